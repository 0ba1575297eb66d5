"""Programs that measure speed and memory of bandmf_tf."""
