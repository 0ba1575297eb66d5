"""Progress is a bar on terminals and a few lines elsewhere."""

from __future__ import annotations

import io
import itertools
import math
import os
import subprocess
import sys

from production.terminal import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(**changes):
    shown = {
        "train_loss": 0.25,
        "test_accuracy": 0.5,
        "seconds": 0.125,
        "separation": 31,
        "epsilon": 8.0625,
    }
    return {**shown, **changes}


def test_elsewhere_lines_come_first_last_and_now_and_then():
    stream = io.StringIO()
    clock = itertools.count().__next__  # A second passes whenever somebody looks.
    with Progress(100, stream=stream, seconds_between_lines=10, clock=clock) as progress:
        for number in range(100):
            progress(number, _shown())
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("round 1 of 100: ")
    assert lines[-1].startswith("round 100 of 100: ")
    assert 9 <= len(lines) <= 12
    assert "\r" not in stream.getvalue()


def test_everything_that_matters_is_shown_and_what_is_unknown_is_a_dash():
    stream = io.StringIO()
    with Progress(3, name="BandMF", stream=stream, seconds_between_lines=0.0) as progress:
        progress(0, _shown(test_accuracy=math.nan, separation=None))
        progress(1, _shown())
        progress(2, _shown(test_accuracy=math.nan))  # The last known accuracy stays.
    first, _, last = stream.getvalue().splitlines()
    assert first == (
        "BandMF: round 1 of 3: loss 0.250, test accuracy -, s/round 0.12, separation -, "
        "epsilon 8.062"
    )
    assert "test accuracy 0.500" in last
    assert "separation 31" in last


def test_on_a_terminal_there_is_a_bar_that_continues_where_the_run_was():
    stream = _Terminal()
    with Progress(10, 4, name="BandMF", stream=stream) as progress:
        for number in range(4, 10):
            progress(number, _shown())
    shown = stream.getvalue()
    assert "4/10" in shown
    last = shown.rsplit("\r", 1)[-1]
    assert "BandMF: 100%" in last
    assert "10/10" in last
    for figure in ("loss=0.250", "test accuracy=0.500", "separation=31", "epsilon=8.062"):
        assert figure in last


def test_lines_stay_in_order_where_output_and_errors_go_to_one_file(tmp_path):
    code = """
import sys
from production import terminal
terminal.print_in_order()
print("first")
print("second", file=sys.stderr)
print("third")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    path = tmp_path / "output.txt"
    with path.open("w") as output:
        subprocess.run(
            [sys.executable, "-c", code], stdout=output, stderr=output, env=environment, check=True
        )
    assert path.read_text() == "first\nsecond\nthird\n"
