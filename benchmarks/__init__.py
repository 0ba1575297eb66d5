"""Programs that measure speed and memory of bandmf_tf."""

import bandmf_tf  # noqa: F401 (before TensorFlow, see bandmf_tf/_onednn.py)
