"""Training on two TFF worker services gives the model that training on this machine gives."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tree

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.federated import aggregators, runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import ledger
from bandmf_tf.simulation import training as federated_training
from bandmf_tf.simulation.config import RunConfig
from cases import ROOT, make_mechanism

PRODUCTION = ROOT / "production"


def _free_port() -> int:
    """A port that nobody uses, below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


@pytest.fixture(name="tls", scope="module")
def _tls(tmp_path_factory) -> Path:
    """The certificates of the documentation."""
    folder = tmp_path_factory.mktemp("certificates") / "tls"
    subprocess.run([PRODUCTION / "certificates.sh", folder, "localhost"], check=True)
    return folder


@contextlib.contextmanager
def _workers(tls: Path) -> Iterator[list[str]]:
    """The script of the documentation, with two workers."""
    ports = [_free_port(), _free_port()]
    script = subprocess.Popen(
        [PRODUCTION / "workers.sh", tls, *map(str, ports)],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield [f"localhost:{port}" for port in ports]
    finally:
        script.terminate()
        script.wait()


def _mechanism() -> Mechanism:
    strategy = ToeplitzStrategy(np.array([1.0, 0.5]), 3)
    return make_mechanism(strategy, MinSeparation(2), noise_multiplier=0.5, l2_norm_clip=0.5)


def _train(folder, workers, tls=None, **arguments):
    mechanism = _mechanism()
    save_mechanism(mechanism, folder / "m.bandmf")
    config = RunConfig(
        mechanism=str(folder / "m.bandmf"),
        output=str(folder / "run"),
        num_rounds=3,
        clients_per_round=5,
        num_clients=40,
        examples_per_client=5,
        availability="always",
        pinned_noise_seed=1,
        evaluate_every=3,
    )
    federated_training.prepare_runtime(workers=workers, tls_folder=tls)
    with federated_training.FederatedTraining(config, **arguments) as training:
        training.train()
    return np.load(folder / "run" / "released" / "model_000003.npz")


def test_two_workers_train_the_same_model_as_this_machine(tmp_path, tls):
    here = _train(_made(tmp_path / "here"), [])
    with _workers(tls) as workers:
        there = _train(_made(tmp_path / "there"), workers, tls)
    runtime.set_local_context()
    for address in workers:  # They end with the script.
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("localhost", int(address.rpartition(":")[2])))
    assert here.files == there.files
    for name in here.files:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-4, atol=1e-5)


class _Recorder(threading.Thread):
    """Forwards connections from one Unix socket to another and keeps what was sent there."""

    def __init__(self, here: str, there: str):
        super().__init__(daemon=True)
        self.received = bytearray()
        self._there = there
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(here)
        self._listener.listen()

    def run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._there)
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        while data := source.recv(1 << 16):
            if keep:
                self.received += data
            target.sendall(data)


@pytest.mark.parametrize("in_state", [False, True])
def test_noise_never_reaches_a_remote_worker(tmp_path, in_state):
    remote = runtime._LocalWorker(0, allow_open=False)
    remote.stub()
    recorder = _Recorder(str(tmp_path / "recorded"), remote._socket)
    recorder.start()
    mechanism = _mechanism()
    make = aggregators.BandMFFactory.in_state if in_state else aggregators.BandMFFactory.from_stream
    process = make(mechanism, clients_per_round=2).create(tff.TensorType(np.float32, [100]))
    running = remote._process  # `set_remote_context` ends the workers of earlier contexts.
    runtime._RUNNING.discard(remote)
    runtime.set_remote_context([f"unix:{tmp_path / 'recorded'}"])
    supply = aggregators.NoiseSupply(mechanism, tf.TensorSpec([100], tf.float32))
    values = [np.full(100, 0.0123, np.float32), np.full(100, 0.0456, np.float32)]
    state, secrets = process.initialize(), {}
    for _ in range(3):
        state = state if in_state else supply.supply(state)
        secrets |= _secrets(state)
        output = process.next(state, values)
        state = output.state
        assert np.std(np.asarray(output.result)) > 0.01  # The noise is in the result.
    runtime.end_workers()
    running.kill()
    running.wait()
    assert values[0].tobytes() in recorder.received  # It was really recorded.
    assert len(secrets) == (3 if in_state else 1)
    for secret in secrets.values():
        assert secret.any()
        assert secret.tobytes() not in recorder.received
        # What a worker could recover from a part of it is refused as well.
        assert secret.tobytes()[:64] not in recorder.received


def _secrets(state) -> dict[str, np.ndarray]:
    names = ("row", "seed", "ready_rows", "memory_000")
    return {
        path[-1]: np.asarray(leaf)
        for path, leaf in tree.flatten_with_path(state)
        if path[-1] in names
    }


def test_strangers_are_turned_away(tls, tmp_path):
    stranger = tmp_path / "stranger"
    subprocess.run([PRODUCTION / "certificates.sh", stranger, "localhost"], check=True)

    def connect(certificate: Path, name: str, ca: Path) -> None:
        files = runtime.TlsFiles(
            str(certificate / f"{name}.pem"), str(certificate / f"{name}.key"), str(ca / "ca.pem")
        )
        runtime.set_remote_context(workers, files, connect_seconds=3)

    with _workers(tls) as workers:
        deadline = time.monotonic() + 300
        while True:  # Until the workers are up; the program itself comes in.
            with contextlib.suppress(ConnectionError):
                connect(tls, "program", tls)
                break
            assert time.monotonic() < deadline
        with pytest.raises(ConnectionError):  # Signed by somebody else.
            connect(stranger, "program", tls)
        with pytest.raises(ConnectionError):  # A worker is not a program.
            connect(tls, "worker", tls)
        with pytest.raises(ConnectionError):  # The program does not trust these workers.
            connect(tls, "program", stranger)
        with pytest.raises(ConnectionError):  # No certificate at all.
            runtime.set_remote_context(workers, allow_open_worker=True, connect_seconds=3)
    with pytest.raises(BandMFError, match="needs TLS with client certificates"):
        runtime.set_remote_context(workers)


def test_a_remote_worker_that_is_lost_ends_its_computation_with_a_sentence(monkeypatch):
    """TFF would ask for it again, for ever and without a word."""
    monkeypatch.setattr(runtime, "_LOST_SECONDS", 1.0)
    remote = runtime._LocalWorker(0, allow_open=False)
    remote.stub()
    running = remote._process  # `set_remote_context` ends the workers of earlier contexts.
    runtime._RUNNING.discard(remote)
    runtime.set_remote_context([f"unix:{remote._socket}"])

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def sum_over_clients(values):
        return tff.federated_sum(values)

    assert sum_over_clients([1, 2]) == 3
    running.kill()
    running.wait()
    for _ in range(2):
        with pytest.raises(runtime.WorkerLostError, match="did not come back within 1 seconds"):
            sum_over_clients([1, 2])
    runtime.end_workers()


def test_a_round_goes_on_without_a_worker_that_is_lost_and_the_ledger_says_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runtime, "_LOST_SECONDS", 1.0)
    here = _train(_made(tmp_path / "here"), [])
    remote = [runtime._LocalWorker(0, allow_open=False) for _ in range(2)]
    for worker in remote:
        worker.stub()
        runtime._RUNNING.discard(worker)  # `set_remote_context` ends those of earlier contexts.

    def kill(point, number):
        if (point, number) == ("started", 1):
            remote[1]._process.kill()
            remote[1]._process.wait()

    addresses = [f"unix:{worker._socket}" for worker in remote]
    there = _train(_made(tmp_path / "there"), addresses, on_point=kill)
    runtime.end_workers()
    remote[0].end()
    records = ledger.read_ledger(tmp_path / "there" / "run" / "ledger.jsonl").records
    assert [dict(record.flags) for record in records] == [{}, {ledger.FLAG_LOST_WORKERS: 1}, {}]
    for name in here.files:  # No client was left out, and each row of noise used once.
        np.testing.assert_allclose(there[name], here[name], rtol=1e-4, atol=1e-5)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_worker_that_does_not_answer_is_named():
    port = _free_port()
    with pytest.raises(ConnectionError, match=f"No TFF worker answers at localhost:{port}"):
        runtime.set_remote_context(
            [f"localhost:{port}"], allow_open_worker=True, connect_seconds=0.5
        )
    with pytest.raises(ValueError, match="at least one"):
        runtime.set_remote_context([])
