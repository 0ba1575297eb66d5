"""Keeps TensorFlow from products of matrices that read beyond their operands.

In some versions of TensorFlow, oneDNN multiplies a stack of matrices of rank 4 with one matrix by
reading far behind it: results are wrong or hold what other examples left in memory, and processes
crash (tensorflow/tensorflow#117700, repaired in 2.22). Per-example gradients are full of such
products, and no clip norm bounds what memory holds. oneDNN can only be turned off before TensorFlow
is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

SWITCH = "TF_ENABLE_ONEDNN_OPTS"

_FIRST_WRONG, _FIRST_RIGHT = (2, 15), (2, 22)


def multiplies_wrongly(version: str) -> bool:
    """Whether oneDNN in this version of TensorFlow is not to be trusted."""
    major, minor, *_ = version.split(".")
    return _FIRST_WRONG <= (int(major), int(minor)) < _FIRST_RIGHT


def turn_off() -> None:
    """Turns oneDNN off where that is needed, and not too late; says nothing."""
    if "tensorflow" in sys.modules or SWITCH in os.environ:
        return
    try:
        version = importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:
        return
    if multiplies_wrongly(version):
        os.environ[SWITCH] = "0"
