"""A loop of one's own around the registry, the noise and the run survives kills at every point."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

import crash_program
import forked_program
from bandmf_tf.evidence import registries
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.noise.stream import NoiseStream
from bandmf_tf.runs import RoundResult, ledger
from bandmf_tf.runs.folder import FolderLock, RunFolder
from bandmf_tf.runs.training_run import POINTS, encode_model
from production import own_loop

PINNED = 5


def _run(server, folder, crash_at=None) -> int:
    child = server.Process(target=crash_program.own_loop, args=(str(folder), PINNED, crash_at))
    child.start()
    child.join()
    return child.exitcode


def test_every_row_of_noise_is_in_one_release_and_every_device_apart_after_kills(tmp_path):
    server, folder = forked_program.fork_server(), tmp_path / "loop"
    for number, point in enumerate(POINTS):
        assert _run(server, folder, (point, number)) == -signal.SIGKILL
        found = ledger.read_ledger(folder / "ledger.jsonl")
        registries.check_beside(folder / "secret" / "registry.sqlite", found)
    assert _run(server, folder) == 0
    records = ledger.verify_ledger(folder / "ledger.jsonl", num_records=12).records
    mechanism = load_mechanism(folder / "mechanism.bandmf")
    spec = tf.TensorSpec([own_loop.SIZE], tf.float32)
    stream = NoiseStream(mechanism.strategy, mechanism.stddev, spec, pinned_seed=PINNED)
    weights = np.zeros(own_loop.SIZE)
    for record in records:  # Devices send zeros: a model is the sum of the rows up to its round.
        noise = np.zeros(own_loop.SIZE) + stream.next().numpy()
        weights = weights - own_loop.RATE / own_loop.WANTED * noise
        expected = hashlib.sha256(encode_model({"weights": weights})).hexdigest()
        assert record.model_digest == expected
    last: dict[str, int] = {}
    for record in records:
        for device in record.participants:
            assert record.round - last.get(device, -10) >= 10
            last[device] = record.round
    assert max(record.flags["dropped_clients"] for record in records) >= 6


def test_a_device_that_sends_no_numbers_is_in_no_release_and_counted(tmp_path, monkeypatch, capsys):
    def gradient(device, weights):
        size = own_loop.SIZE
        return np.array([np.nan, np.inf] * (size // 2)) if len(device) < 9 else np.full(size, 1e3)

    kept = []
    monkeypatch.setattr(own_loop, "ROUNDS", 12)
    monkeypatch.setattr(own_loop, "gradient", gradient)
    monkeypatch.setattr(own_loop, "RoundResult", lambda **f: kept.append(f) or RoundResult(**f))
    own_loop.train(tmp_path)
    bad = [sum(len(device) < 9 for device in round["client_ids"]) for round in kept]
    assert sum(bad) > 0
    for number, found in enumerate(kept):
        assert found["metrics"]["non_finite"] == bad[number]
        assert found["metrics"]["clipped"] == len(found["client_ids"]) - bad[number]
        assert np.isfinite(found["model"]["weights"]).all()
    assert re.search(r"^round 12 of 12: .*epsilon \S+ of \S+$", capsys.readouterr().err, re.M)
    assert "\nbandmf_rounds_completed 12\n" in (tmp_path / "metrics.prom").read_text()


def test_what_is_wrong_with_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "file").write_text("")
    with contextlib.closing(FolderLock(RunFolder(tmp_path / "run"))):
        for arguments in ([str(tmp_path / "run")], [str(tmp_path / "file")], []):
            with pytest.raises(SystemExit, match=r"^error: .*$"):
                own_loop.main(arguments)
