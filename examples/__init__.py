"""Programs that teach: complete, small and meant to be read and changed."""

import bandmf_tf  # noqa: F401 (before TensorFlow, see bandmf_tf/_onednn.py)
