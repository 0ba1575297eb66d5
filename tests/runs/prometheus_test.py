"""The file for Prometheus has what a collector can parse, and nothing of the clients' metrics."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time

import pytest

from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.runs import prometheus
from bandmf_tf.runs.folder import RunFolder
from bandmf_tf.runs.prometheus import PrometheusFile
from cases import ROOT, largest_file
from run_program import make_mechanism, result, start

_METRICS = {
    "train_loss": 0.1234567,
    "train_accuracy": 0.7654321,
    "num_participants": 7,
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


def _run(folder, metrics, rounds=2):
    files, mechanism = RunFolder(folder), make_mechanism(5)
    with start(folder, publishers=[PrometheusFile(files.prometheus, mechanism, 9)]) as run:
        for number in range(run.next_round, rounds):
            run.commit(dataclasses.replace(result(number), metrics=metrics))
    return files.prometheus, mechanism


def test_the_file_tells_of_the_last_round(tmp_path):
    path, mechanism = _run(tmp_path / "run", {**_METRICS, "min_separation": 3})
    gauges = _gauges(path)
    assert gauges["rounds_completed"] == 2
    assert gauges["rounds_planned"] == mechanism.num_rounds
    assert gauges["cohort_clients"] == 7
    assert gauges["cohort_clients_wanted"] == 9
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
    monkeypatch.setattr(prometheus.time, "monotonic", lambda: next(clock))
    path, _ = _run(tmp_path / "run", _METRICS)
    assert _gauges(path)["round_seconds"] == 0.75


def test_a_full_disk_leaves_the_last_file_as_it_was(tmp_path):
    path, mechanism = _run(tmp_path / "run", _METRICS)
    before = path.read_bytes()
    publisher = PrometheusFile(path, mechanism, 9)
    published = prometheus.PublishedRound(3, {}, _METRICS)
    with largest_file(100), pytest.raises(OSError, match="too large"):
        publisher(published)
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.tmp"))


def test_what_the_runbook_watches_is_in_the_file(tmp_path):
    path, _ = _run(tmp_path / "run", {**_METRICS, "min_separation": 3})
    text = (ROOT / "production" / "README.md").read_text()
    table = text[text.index("## What to watch") : text.index("## A newer version")]
    watched = set(re.findall(r"bandmf_(\w+)", table))
    assert len(watched) > 8
    assert watched <= _gauges(path).keys()
