"""How far a program is: a bar on a terminal, a few lines in a file or a container's log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

import tqdm


class Progress:
    """Shows how many rounds, stages or cells are done, and a text beside the number.

    Where there is no terminal, a line is written for the first, the last and every milestone, and
    otherwise every so many seconds.

    Args:
      total: How many there are.
      done: How many were done before.
      unit: What is counted.
      name: Shown before the numbers.
      stream: Where to write; the standard error by default.
      seconds_between_lines: Time from a line to the next, at least.
      clock: Returns seconds.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        unit: str = "round",
        name: str = "",
        stream: TextIO | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total
        self._unit = unit
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._seconds_between_lines = seconds_between_lines
        self._clock = clock
        self._last_line = -math.inf
        self._bar: tqdm.tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total,
                initial=done,
                desc=name or None,
                unit=unit,
                file=self._stream,
                dynamic_ncols=True,
            )

    def show(
        self, done: int, text: str, *, total: int | None = None, milestone: bool = False
    ) -> None:
        """Shows that `done` are done, of another `total` if it has changed."""
        self._total = total or self._total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        is_due = self._clock() - self._last_line >= self._seconds_between_lines
        if is_due or milestone or done == self._total:
            self._last_line = self._clock()
            name = f"{self._name}: " if self._name else ""
            self._stream.write(f"{name}{self._unit} {done} of {self._total}: {text}\n")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.close()  # The bar stays on the screen.
