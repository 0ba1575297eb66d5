"""Arithmetic that is written in many places and must be written once."""

from __future__ import annotations

import math
from typing import overload

import numpy as np


@overload
def ceil_div(numerator: int, denominator: int) -> int: ...
@overload
def ceil_div(numerator: np.ndarray, denominator: int) -> np.ndarray: ...


def ceil_div(numerator: int | np.ndarray, denominator: int) -> int | np.ndarray:
    """Returns the smallest integer not below `numerator / denominator`, exactly."""
    return -(-numerator // denominator)


def exactly(value: float) -> str:
    """Returns the shortest decimal that is this number: what is assumed must not be rounded."""
    return repr(float(value)).removesuffix(".0")


def round_up(value: float, digits: int = 4) -> float:
    """Returns the value rounded up to so many digits: a loss of privacy is never shown smaller."""
    if value == 0.0:
        return 0.0
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(abs(value))))
    # A value that is already a short decimal must not be pushed up by its binary representation.
    return math.ceil(value * scale * (1 - 1e-12)) / scale


def round_down(value: float, digits: int = 4) -> float:
    """Returns the value rounded down to so many digits: noise is never shown larger."""
    if value == 0.0:
        return 0.0
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.floor(value * scale * (1 + 1e-12)) / scale
