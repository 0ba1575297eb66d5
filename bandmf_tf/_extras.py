"""What comes with an extra of the package, and the sentence that says so where it is missing."""

from __future__ import annotations

import importlib.util

from bandmf_tf.errors import BandMFImportError


def require_tensorflow(name: str) -> None:
    """Raises BandMFImportError, on behalf of what is called `name`, if there is no TensorFlow."""
    if importlib.util.find_spec("tensorflow") is None:
        raise BandMFImportError(
            f"{name} needs TensorFlow, which is not installed; run pip install 'bandmf-tf[keras]'.",
            name="tensorflow",
        )
