"""Programs that run training with bandmf_tf in production; none exist yet."""
