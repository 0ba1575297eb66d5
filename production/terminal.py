"""What a person sees of a training program: a quiet start, then progress."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import tqdm


def quiet_imports() -> None:
    """Keeps notes about installation that help nobody off the screen; call before TensorFlow.

    TensorFlow 2.14 reports as errors that CUDA plugins are registered twice, on every machine.
    Whoever sets TF_CPP_MIN_LOG_LEVEL gets what they ask for.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def print_in_order() -> None:
    """Writes every line when it is printed: in a log it must not follow later errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


class Progress:
    """Shows round, loss, accuracy, seconds a round, separation so far and projected epsilon.

    On a terminal this is a bar. Elsewhere, in a file or a container's log, it is a line of text for
    the first round, the last one, and every so many seconds between.

    Args:
      total: Number of rounds.
      done: How many were done before.
      name: Name to show before the numbers.
      stream: Where to write.
      seconds_between_lines: Where this is no terminal: time from a line to the next, at least.
      clock: Returns seconds.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        name: str = "",
        stream: TextIO | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._seconds_between_lines = seconds_between_lines
        self._clock = clock
        self._last_line = -math.inf
        self._accuracy = math.nan
        self._bar: tqdm.tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total,
                initial=done,
                desc=name or None,
                unit="round",
                file=self._stream,
                dynamic_ncols=True,
            )

    def __call__(self, number: int, shown: Mapping[str, Any]) -> None:
        """Shows round `number`, counted from 0, which has just been released."""
        if math.isfinite(shown["test_accuracy"]):
            self._accuracy = shown["test_accuracy"]
        figures = {
            "loss": _figure(shown.get("train_loss", math.nan), 3),
            "test accuracy": _figure(self._accuracy, 3),
            "s/round": _figure(shown["seconds"], 2),
            "separation": str(shown["separation"] or "-"),
            "epsilon": _figure(shown["epsilon"], 3),
        }
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update()
            return
        is_last = number + 1 == self._total
        if is_last or self._clock() - self._last_line >= self._seconds_between_lines:
            self._last_line = self._clock()
            numbers = ", ".join(f"{key} {value}" for key, value in figures.items())
            name = f"{self._name}: " if self._name else ""
            self._stream.write(f"{name}round {number + 1} of {self._total}: {numbers}\n")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.close()  # The bar stays on the screen.


def _figure(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
