"""Arithmetic that is written in many places and must be written once."""

from __future__ import annotations

import decimal
from typing import overload

import numpy as np

# What a few operations round: it must not push a short decimal to the next one.
_ARITHMETIC = 2.0**-50


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
    """Returns the value rounded up to so many digits: a loss of privacy is never shown smaller.

    Every privacy figure that is shown goes through this function, `round_down` or `exactly`: a
    format such as `:g` rounds to the nearest. Noise that is planned is rounded up as well: who
    takes it from a plan gets at least its privacy. Noise that was added is rounded down.
    """
    return _rounded(value * (1 - _ARITHMETIC), digits, decimal.ROUND_CEILING)


def round_down(value: float, digits: int = 4) -> float:
    """Returns the value rounded down to so many digits: noise is never shown larger."""
    return _rounded(value * (1 + _ARITHMETIC), digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> float:
    return float(decimal.Context(digits, rounding).create_decimal(exactly(value)))
