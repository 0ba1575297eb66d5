"""Commit, then release: real kills at any moment lose nothing, repeat nothing, change nothing.

The processes that are killed run `crash_program.py`; they are forked from a server that has
TensorFlow imported, because importing it takes longer than the rounds that are interrupted.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import random
import signal
import time

import numpy as np
import pytest

import crash_program
import forked_program
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.runs import ledger
from bandmf_tf.runs.training_run import POINTS

NUM_KILLS = 50
PINNED = 3
KINDS = ["banded", "blt"]


@pytest.fixture(name="server", scope="module")
def _server():
    return forked_program.fork_server()


def _train(server, folder, num_rounds, pinned_seed=PINNED, **kwargs) -> int:
    """Trains in a process of its own; returns its exit code."""
    child = server.Process(
        target=crash_program.train, args=(str(folder), num_rounds, pinned_seed), kwargs=kwargs
    )
    child.start()
    child.join()
    return child.exitcode


def _kill_at_a_random_moment(server, folder, num_rounds, random, kind) -> int:
    """Kills a program in its first or second round, however fast it is; returns its exit code."""
    event = server.Event()
    child = server.Process(
        target=crash_program.train,
        args=(str(folder), num_rounds, PINNED),
        kwargs={"tell": (event, random.randrange(2 * len(POINTS) + 1)), "kind": kind},
    )
    child.start()
    while not event.wait(0.05) and child.is_alive():
        pass
    time.sleep(random.uniform(0.0, 0.003))
    child.kill()
    child.join()
    return child.exitcode


def _models(folder) -> list[np.ndarray]:
    return [np.load(path)["weights"] for path in sorted((folder / "released").iterdir())]


def _noise(folder, num_rounds) -> np.ndarray:
    """The noise of every release: what its step added, minus what its clients sent."""
    models = [np.zeros(crash_program.DIMENSION, np.float32), *_models(folder)]
    rule = crash_program.ParticipationRule(min_separation=crash_program.MIN_SEPARATION)
    population = crash_program.Population(60, rule, crash_program.Availability(), seed=7)
    rows = []
    for number in range(num_rounds):
        clients = population.next_cohort(crash_program.CLIENTS_PER_ROUND).clients
        total = np.sum([crash_program.client_update(c, number) for c in clients], axis=0)
        rows.append(models[number + 1] - models[number] - total)
    return np.stack(rows)


def _check_complete(folder, num_rounds, kind="banded") -> ledger.Ledger:
    mechanism = crash_program.make_mechanism(num_rounds, kind=kind)
    found = ledger.verify_ledger(
        folder / "ledger.jsonl",
        mechanism_checksum=mechanism_checksum(mechanism),
        num_records=num_rounds,
    )
    assert [record.round for record in found.records] == list(range(num_rounds))
    for record in found.records:
        model = folder / "released" / f"model_{record.round + 1:06d}.npz"
        assert hashlib.sha256(model.read_bytes()).hexdigest() == record.model_digest
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [int(row["round"]) for row in rows] == list(range(num_rounds))
    norms = [np.linalg.norm(model) for model in _models(folder)]
    np.testing.assert_allclose([float(row["norm"]) for row in rows], norms, rtol=1e-6)
    return found


@pytest.fixture(name="uninterrupted", scope="module")
def _uninterrupted(server, tmp_path_factory):
    """num_rounds, kind -> folder of an uninterrupted pinned run."""

    @functools.cache
    def get(num_rounds, kind="banded"):
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert _train(server, folder, num_rounds, kind=kind) == 0
        return folder

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_an_uninterrupted_run_is_complete_and_holds_the_mechanisms_noise(uninterrupted, kind):
    folder = uninterrupted(20, kind)
    _check_complete(folder, 20, kind)
    mechanism = crash_program.make_mechanism(20, kind=kind)
    z = mechanism.strategy.matmul(_noise(folder, 20).astype(np.float64)) / mechanism.stddev
    assert 0.85 < z.std() < 1.15
    assert abs(np.mean(z)) < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_kills_at_random_moments_change_nothing(server, uninterrupted, tmp_path, kind):
    folder, num_rounds, generator = tmp_path / "run", 2 * NUM_KILLS + 1, random.Random(1)
    for _ in range(NUM_KILLS):
        code = _kill_at_a_random_moment(server, folder, num_rounds, generator, kind)
        assert code == -signal.SIGKILL
    assert _train(server, folder, num_rounds, kind=kind) == 0
    _check_complete(folder, num_rounds, kind)
    np.testing.assert_array_equal(_models(folder), _models(uninterrupted(num_rounds, kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_pinned_seed_no_row_of_noise_is_in_two_releases(server, tmp_path, kind):
    num_rounds = 2 * len(POINTS) + 4
    folder = tmp_path / "run"
    for number, point in enumerate(POINTS):
        crash_at = point, 2 * number + 1
        code = _train(server, folder, num_rounds, None, crash_at=crash_at, kind=kind)
        assert code == -signal.SIGKILL, point
    assert _train(server, folder, num_rounds, None, kind=kind) == 0
    _check_complete(folder, num_rounds, kind)
    strategy = crash_program.make_mechanism(num_rounds, kind=kind).strategy
    z = strategy.matmul(_noise(folder, num_rounds).astype(np.float64))
    norms = np.linalg.norm(z, axis=1)
    similarity = (z @ z.T) / np.outer(norms, norms) - np.eye(num_rounds)
    assert np.abs(similarity).max() < 0.9, "Two releases share a row of z."
    assert 1.6 < z.std() < 2.4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_point_changes_nothing(server, uninterrupted, tmp_path, point, kind):
    folder, num_rounds = tmp_path / "run", 4
    code = _train(server, folder, num_rounds, crash_at=(point, 1), kind=kind)
    assert code == -signal.SIGKILL
    released = (folder / "released" / "model_000002.npz").exists()
    assert released == (POINTS.index(point) >= POINTS.index("model_released"))
    assert _train(server, folder, num_rounds, kind=kind) == 0
    _check_complete(folder, num_rounds, kind)
    np.testing.assert_array_equal(_models(folder), _models(uninterrupted(num_rounds, kind)))


def _peak(server, folder, num_bands, stop) -> int:
    found = server.SimpleQueue()
    child = server.Process(
        target=crash_program.peak_memory, args=(str(folder), num_bands, stop, found)
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    return found.get()


def test_noise_need_not_fit_into_memory(server, tmp_path):
    """200 bands of 200,000 values are 160 MB, of which a block of 16 rows, 13 MB, is held."""
    block, without = 4 * 200_000 * 16, _peak(server, tmp_path / "none", 1, 2)
    fresh = _peak(server, tmp_path / "run", 200, 18)  # All bands are there, a block is begun.
    restarted = _peak(server, tmp_path / "run", 200, 20)  # Redraws it, and begins another.
    assert fresh - without <= 6 * block
    assert restarted - without <= 6 * block
