"""The drill kills the real program, and notices a run that is over too soon."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cases import ROOT


def _drill(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "production.crash_drill", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.tff
def test_a_drill_kills_and_compares(tmp_path):
    # This seed kills a moment after the first commit, long before the last round.
    flags = ("--kills=1", "--num_rounds=16", "--seed=31")
    result = _drill(*flags, f"--output={tmp_path / 'drill'}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("kill 1 after ")
    assert "all 16 rounds are there once and in order" in result.stdout


def test_a_wrong_command_is_told_in_one_sentence(tmp_path):
    for arguments, message in (
        (["--kills=1"], "--output must name a folder"),
        (["--kills=0", "--output=x"], "--kills"),
        ([f"--output={tmp_path}"], "File exists"),
    ):
        result = _drill(*arguments)
        assert result.returncode == 1
        assert message in result.stderr
        assert "Traceback" not in result.stderr
