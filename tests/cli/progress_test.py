"""Progress is a bar on terminals and a few lines elsewhere."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys

from bandmf_tf.cli.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_lines_come_first_last_and_now_and_then():
    stream = io.StringIO()
    clock = itertools.count().__next__  # A second passes whenever somebody looks.
    with Progress(100, stream=stream, seconds_between_lines=10, clock=clock) as progress:
        for number in range(100):
            progress.show(number + 1, "loss 0.250")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "round 1 of 100: loss 0.250"
    assert lines[-1] == "round 100 of 100: loss 0.250"
    assert 9 <= len(lines) <= 12
    assert "\r" not in stream.getvalue()


def test_milestones_have_lines_of_their_own():
    stream = io.StringIO()
    with Progress(9, unit="stage", name="plan", stream=stream) as progress:
        for text, milestone in (("a", True), ("a, more", False), ("b", True), ("b, more", False)):
            progress.show(2, text, milestone=milestone)
    assert stream.getvalue() == "plan: stage 2 of 9: a\nplan: stage 2 of 9: b\n"


def test_on_a_terminal_there_is_a_bar_that_continues_where_the_run_was():
    stream = _Terminal()
    with Progress(10, 4, name="BandMF", stream=stream) as progress:
        for number in range(4, 10):
            progress.show(number + 1, "loss 0.250, epsilon 8.062")
    shown = stream.getvalue()
    assert "4/10" in shown
    last = shown.rsplit("\r", 1)[-1]
    assert "BandMF: 100%" in last
    assert "10/10" in last
    assert "loss 0.250, epsilon 8.062" in last


def test_lines_stay_in_order_where_output_and_errors_go_to_one_file(tmp_path):
    code = """
import sys
from bandmf_tf.cli import program
program.print_in_order()
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
