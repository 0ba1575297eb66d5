"""Training on two TFF worker services gives the model that training on this machine gives."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.federated import runtime as tff_runtime
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism, Participation
from bandmf_tf.simulation import training as federated_training
from bandmf_tf.simulation.config import RunConfig
from cases import ROOT

SCRIPT = ROOT / "production" / "workers.sh"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("localhost", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@contextlib.contextmanager
def _workers() -> Iterator[list[str]]:
    """The script of the documentation, with two workers."""
    ports = _free_ports(2)
    script = subprocess.Popen(
        [str(SCRIPT), *map(str, ports)],
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


def _train(folder, workers):
    mechanism = Mechanism.create(
        ToeplitzStrategy(np.array([1.0, 0.5]), 3),
        prefix_sum(3),
        Participation.separated(2),
        noise_multiplier=0.5,
        l2_norm_clip=0.5,
        delta=1e-6,
    )
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
    federated_training.prepare_runtime(workers=workers)
    with federated_training.FederatedTraining(config) as training:
        training.train()
    return np.load(folder / "run" / "released" / "model_000003.npz")


def test_two_workers_train_the_same_model_as_this_machine(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = _train(tmp_path / "here", [])
    # TFF interrupts the local worker when another context replaces its own, and waits for it; a
    # worker that is busy ending a computation ignores that, and the wait never ends.
    tff_runtime.end_workers()
    with _workers() as workers:
        there = _train(tmp_path / "there", workers)
    tff_runtime.set_local_context()
    for address in workers:  # They end with the script.
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("localhost", int(address.rpartition(":")[2])))
    assert here.files == there.files
    for name in here.files:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-4, atol=1e-5)


def test_a_worker_that_does_not_answer_is_named():
    (port,) = _free_ports(1)
    with pytest.raises(ConnectionError, match=f"No TFF worker answers at localhost:{port}"):
        tff_runtime.set_remote_context([f"localhost:{port}"], connect_seconds=0.5)
    with pytest.raises(ValueError, match="at least one"):
        tff_runtime.set_remote_context([])
