"""Operators see how a run fares: a file that a collector can parse, without clients' metrics."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time

import pytest

from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.runs import progress
from bandmf_tf.runs.folder import RunFolder
from bandmf_tf.runs.progress import RunProgress
from cases import ROOT, largest_file
from run_program import CLIENTS_PER_ROUND, make_mechanism, result, start

_METRICS = {
    "train_loss": 0.1234567,
    "train_accuracy": 0.7654321,
    "timer_violations": 0,
    "min_separation": math.nan,
    "epsilon": 5.5,
}


def _gauges(path):
    """Returns what is in a file of Prometheus' text format, by name; refuses any other line."""
    text = path.read_text()
    pattern = re.compile(
        r"# HELP (bandmf_\w+) (\S.*)\n# TYPE \1 gauge\n\1 (-?\d+(?:\.\d+)?(?:e-?\d+)?)\n"
    )
    found = pattern.findall(text)
    assert pattern.sub("", text) == ""
    assert len({name for name, _, _ in found}) == len(found)
    return {name.removeprefix("bandmf_"): float(value) for name, _, value in found}


def _run(folder, metrics, rounds=2, **options):
    with start(folder, **options) as run:
        for number in range(run.next_round, rounds):
            clients = [f"client {n}" for n in range(7)]
            run.commit(dataclasses.replace(result(number, client_ids=clients), metrics=metrics))
    return RunFolder(folder).prometheus, make_mechanism(5)


def test_after_every_round_of_a_run_operators_hear_how_far_it_is(tmp_path):
    lines = []
    _, mechanism = _run(
        tmp_path, {**_METRICS, "min_separation": 3}, 3, progress=lambda *line: lines.append(line)
    )
    assert [done for done, _ in lines] == [1, 2, 3]
    for done, line in lines:
        (spent, planned, heading) = map(
            float, re.search(r"epsilon (\S+) of (\S+), heading for (\S+)$", line).groups()
        )
        assert 0 <= spent - epsilon_after(mechanism, done) < 0.01
        assert 0 <= planned - mechanism.epsilon < 0.001
        assert heading == 5.5 > planned
        assert "clients 7, s/round" in line


def test_a_line_leaves_out_what_is_unknown_and_keeps_the_last_accuracy(tmp_path):
    lines, mechanism = [], make_mechanism(5)
    path = tmp_path / "metrics.prom"
    told = RunProgress(path, mechanism, 7, True, lambda _, line: lines.append(line))
    told.tell(1, {"train_loss": 0.25, "min_separation": 31, "test_accuracy": 0.5})
    told.tell(2, {"min_separation": math.nan, "num_participants": 7})
    told.tell(3, {})
    assert "loss 0.250, test accuracy 0.500, s/round " in lines[0]
    assert "separation 31, epsilon " in lines[0]
    assert lines[1].startswith("test accuracy 0.500, clients 7, s/round ")
    assert lines[2].startswith("test accuracy 0.500, s/round ")
    assert not any(word in lines[2] for word in ("nan", "separation", "heading"))


def test_the_file_tells_of_the_last_round(tmp_path):
    path, mechanism = _run(tmp_path / "run", {**_METRICS, "min_separation": 3})
    gauges = _gauges(path)
    assert gauges["rounds_completed"] == 2
    assert gauges["rounds_planned"] == mechanism.num_rounds
    assert gauges["cohort_clients"] == 7
    assert gauges["cohort_clients_wanted"] == CLIENTS_PER_ROUND
    assert gauges["participation_enforced"] == 1
    assert gauges["separation_margin_rounds"] == 3 - mechanism.participation.min_separation
    assert gauges["epsilon_spent"] == pytest.approx(epsilon_after(mechanism, 2))
    assert gauges["epsilon_projected"] == 5.5
    assert gauges["epsilon_planned"] == mechanism.epsilon
    assert abs(gauges["last_commit_timestamp_seconds"] - time.time()) < 600
    # Readable for the collector, unless the umask of the process, which noise in a state narrows.
    umask = os.umask(0o077)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o644 & ~umask


def test_nothing_of_clients_and_nothing_unknown_stands_there(tmp_path):
    path, _ = _run(tmp_path / "run", _METRICS)
    assert "separation_margin_rounds" not in _gauges(path)
    text = path.read_text()
    for secret in ("train", "0.1234567", "0.7654321", "nan"):
        assert secret not in text


def test_exact_numbers_are_marked(tmp_path):
    path, _ = _run(tmp_path / "run", {**_METRICS, "min_separation": 3})
    marked = re.findall(r"# HELP bandmf_(\w+) .*Exact, not private\.\n", path.read_text())
    assert marked == [
        "cohort_clients",
        "separation_margin_rounds",
        "timer_violations",
        "epsilon_projected",
    ]


def test_the_time_of_a_round_is_measured_from_the_commit_before(tmp_path, monkeypatch):
    clock = iter((100.0, 107.5, 108.25))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    path, _ = _run(tmp_path / "run", _METRICS)
    assert _gauges(path)["round_seconds"] == 0.75


def test_a_full_disk_leaves_the_last_file_as_it_was(tmp_path):
    path, mechanism = _run(tmp_path / "run", _METRICS)
    before = path.read_bytes()
    told = RunProgress(path, mechanism, 9, is_enforced=True)
    with largest_file(100), pytest.raises(OSError, match="too large"):
        told.tell(3, _METRICS)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.tmp"))


def test_what_the_runbook_watches_is_in_the_file(tmp_path):
    path, _ = _run(tmp_path / "run", {**_METRICS, "min_separation": 3})
    text = (ROOT / "production" / "README.md").read_text()
    table = text[text.index("## What to watch") : text.index("## A newer version")]
    watched = set(re.findall(r"bandmf_(\w+)", table))
    assert len(watched) > 8
    assert watched <= _gauges(path).keys()
