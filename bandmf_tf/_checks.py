"""Argument validation: one helper per kind of number, one sentence per error."""

from __future__ import annotations

import math
import operator

import numpy as np

from bandmf_tf.errors import BandMFError, BandMFTypeError

# Larger counts are not exact as floats, and larger floats have squares that are not finite.
_MOST, _LARGEST = 2**53, 1e150


def positive_int(name: str, value: object) -> int:
    """Returns `value` as an int of at least 1 that can count something."""
    number = int_at_least(name, value, 1)
    if number > _MOST:
        raise BandMFError(f"{name} must be at most {_MOST}. Found {number}.")
    return number


def int_at_least(name: str, value: object, lowest: int) -> int:
    """Returns `value` as an int of at least `lowest`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BandMFTypeError(f"{name} must be an integer. Found {value!r}.") from None
    if number < lowest:
        raise BandMFError(f"{name} must be at least {lowest}. Found {number}.")
    return number


def positive_float(name: str, value: object) -> float:
    """Returns `value` as a finite float above 0 whose square is finite."""
    number = _finite_float(name, value)
    if number <= 0.0:
        raise BandMFError(f"{name} must be positive. Found {number}.")
    if number > _LARGEST:
        raise BandMFError(f"{name} must be at most {_LARGEST:g}. Found {number}.")
    return number


def probability(name: str, value: object) -> float:
    """Returns `value` as a float strictly between 0 and 1."""
    number = _finite_float(name, value)
    if not 0.0 < number < 1.0:
        raise BandMFError(f"{name} must be strictly between 0 and 1. Found {number}.")
    return number


def momentum(name: str, value: object) -> float:
    """Returns `value` as a float in [0, 1)."""
    number = _finite_float(name, value)
    if not 0.0 <= number < 1.0:
        raise BandMFError(f"{name} must be in [0, 1). Found {number}.")
    return number


def num_bands(value: object, num_rounds: int) -> int:
    """Returns `value` as a number of bands that fits into `num_rounds` columns."""
    number = positive_int("num_bands", value)
    if number > num_rounds:
        raise BandMFError(
            f"num_bands must be at most num_rounds={num_rounds}; use {num_rounds} for a full lower "
            f"triangle. Found {number}."
        )
    return number


def finite_array(name: str, value: object, ndim: int) -> np.ndarray:
    """Returns `value` as a float64 array with `ndim` axes and entries whose squares are finite."""
    array = np.array(value, dtype=np.float64)
    if array.ndim != ndim:
        raise BandMFError(f"{name} must have {ndim} axes. Found shape {array.shape}.")
    if array.size == 0:
        raise BandMFError(f"{name} must not be empty. Found shape {array.shape}.")
    if not np.all(np.abs(array) <= _LARGEST):  # NaN fails, too.
        raise BandMFError(
            f"{name} must be finite in every entry, at most {_LARGEST:g}; it holds NaN or more."
        )
    return array


def rows(name: str, value: object, num_rows: int) -> np.ndarray:
    """Returns `value` as a float64 array whose first axis has `num_rows` entries."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0 or array.shape[0] != num_rows:
        raise BandMFError(f"{name} must have {num_rows} rows. Found shape {array.shape}.")
    return array


def _finite_float(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_):
        raise BandMFTypeError(f"{name} must be a number. Found {value!r}.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BandMFTypeError(f"{name} must be a number. Found {value!r}.") from None
    except OverflowError:  # An integer of hundreds of digits.
        number = math.inf
    if not math.isfinite(number):
        raise BandMFError(f"{name} must be finite. Found {number}.")
    return number
