"""Arithmetic that is written in many places and must be written once."""

from __future__ import annotations

from typing import overload

import numpy as np


@overload
def ceil_div(numerator: int, denominator: int) -> int: ...
@overload
def ceil_div(numerator: np.ndarray, denominator: int) -> np.ndarray: ...


def ceil_div(numerator: int | np.ndarray, denominator: int) -> int | np.ndarray:
    """Returns the smallest integer not below `numerator / denominator`, exactly."""
    return -(-numerator // denominator)
