"""JSON that is read strictly: whatever two readers could take for different things is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bandmf_tf.errors import BandMFError

_T = TypeVar("_T")


def load(
    path: str | os.PathLike[str], read: Callable[[Any], _T], error_type: type[BandMFError]
) -> _T:
    """Returns what `read` makes of the JSON in a file.

    Raises:
      BandMFError: Of the `error_type`: it is no JSON, or `read` refuses it.
      OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        return read(parse(data))
    except BandMFError as error:
        raise error_type(f"{os.fspath(path)}: {error}") from error


def parse(text: str | bytes) -> Any:
    """Returns the value that a text of JSON stands for.

    Raises:
      BandMFError: It is no JSON, has two entries of one name, or a number that is none.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_countable,
        )
    except BandMFError:
        raise
    except (ValueError, RecursionError) as error:
        raise BandMFError(f"It is not JSON: {error}.") from error


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; of two entries of one name readers would choose differently."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BandMFError(f"There are two entries called {twice[:80]!r}; the file was edited.")
    return dict(pairs)


def _refuse(constant: str) -> NoReturn:
    raise BandMFError(f"JSON has finite numbers alone. Found {constant[:40]}.")


def _countable(number: str) -> int:
    """Returns an integer that arithmetic with floats can take."""
    _finite(number)
    return int(number)


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)
