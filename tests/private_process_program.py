"""TFF's own training program with a private learning process, killed where it is told.

Clients contribute zero and the server's learning rate is 1, so that what a round adds to the model
is its row of noise, over the number of clients, which the pinned seed lets a test compute.

`how` is where the program kills itself in that round: `computed` (the result is in memory, nothing
of it saved) or `saved` (the state is). With `discard` the first result is discarded, and repeated.

With a registry (`registered`) no state from that round on is saved in time, and the program is
killed after three rounds: while clients are asked for their data (`asking`) or when a row of noise
was taken for them (`taken`). Who is about to be in a sum, with which row, stands in a file before.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import cases
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.federated import RegisteredClients, private_learning_process
from bandmf_tf.federated.runtime import set_program_context, tff
from bandmf_tf.runs import ParticipationRegistry

NUM_ROWS, NUM_ROUNDS, PER_ROUND, SEED = 12, 5, 4, 7
SPEC = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.float32))


def make_mechanism():
    strategy = ToeplitzStrategy(np.array([1.0, 0.5, 0.25]), NUM_ROWS)
    mechanism = cases.make_mechanism(strategy, MinSeparation(3), noise_multiplier=1.0)
    object.__setattr__(mechanism.provenance, "created", "2024-01-01T00:00:00Z")
    return mechanism


def make_model():
    return tff.learning.models.functional_model_from_keras(
        lambda: tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))]
        ),
        tf.keras.losses.MeanSquaredError(),
        SPEC,
    )


def builder(model_aggregator):
    return tff.learning.algorithms.build_unweighted_fed_avg(
        make_model(),
        tff.learning.optimizers.build_sgdm(0.1),
        tff.learning.optimizers.build_sgdm(1.0),
        model_aggregator=model_aggregator,
    )


def make_process(folder: Path, registry: ParticipationRegistry | None = None, progress=None):
    return private_learning_process(
        builder,
        make_mechanism(),
        folder,
        clients_per_round=PER_ROUND,
        registry=registry,
        progress=progress,
        pinned_seed=SEED,
    )


def dataset() -> tf.data.Dataset:
    """Data of which nothing can be learned."""
    return tf.data.Dataset.from_tensors((tf.zeros([1, 2]), tf.zeros([1, 1]))).take(0)


class _Source(tff.program.FederatedDataSource, tff.program.FederatedDataSourceIterator):
    """A data source, and its own iterator, of clients that are all alike."""

    federated_type = tff.FederatedType(
        tff.SequenceType(tff.types.tensorflow_to_type(SPEC)), tff.CLIENTS
    )

    def iterator(self):
        return self

    def select(self, k=None):
        return [dataset() for _ in range(k)]

    def to_bytes(self):
        return b""

    @classmethod
    def from_bytes(cls, buffer):
        return cls()


class _Killing(tff.program.FileProgramStateManager):
    """TFF's state manager, which kills its program before or after a version is saved.

    TFF goes on while it saves, and on a busy machine a later version could be there before an
    earlier one. Here they are saved one by one, so that none is there after the one of the kill.
    """

    def __init__(self, folder: Path, how: str, version: int):
        super().__init__(folder)
        self._how, self._version = how, version
        self._turn = asyncio.Lock()

    async def save(self, program_state: Any, version: int) -> None:
        if (self._how, self._version) == ("computed", version):
            os.kill(os.getpid(), signal.SIGKILL)
        async with self._turn:
            await super().save(program_state, version)
            if (self._how, self._version) == ("saved", version):
                os.kill(os.getpid(), signal.SIGKILL)


class _Releasing(tff.program.ReleaseManager):
    """Writes every array that it is given into a file, as it is."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self._folder = folder

    async def release(self, value: Any, key: Any = None) -> None:
        value = await tff.program.materialize_value(value)
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(value)]
        np.savez(self._folder / f"{key}.npz", *[leaf for leaf in leaves if leaf.dtype != object])


def main(folder: Path, how: str, number: int) -> None:
    set_program_context()
    source = _Source()
    discarded: list[np.ndarray] = []

    def should_discard(output: Any) -> bool:
        if how != "discard" or discarded:
            return False
        discarded.append(np.asarray(output.state.global_model_weights.trainable[0]))
        np.save(folder / "discarded.npy", discarded[0])
        return True

    with make_process(folder / "noise") as process:
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=source,
                train_per_round_clients=PER_ROUND,
                train_total_rounds=NUM_ROUNDS,
                should_discard_round=should_discard,
                program_state_manager=_Killing(folder / "states", how, number),
                model_output_manager=_Releasing(folder / "released"),
                train_metrics_manager=_Releasing(folder / "metrics"),
                evaluation_manager=None,
                evaluation_periodicity=1,
            )
        )


class _Slow(tff.program.FileProgramStateManager):
    """TFF's state manager on a disk that never answers from a version on."""

    def __init__(self, folder: Path, stuck_from: int):
        super().__init__(folder)
        self._stuck_from = stuck_from

    async def save(self, program_state: Any, version: int) -> None:
        if version >= self._stuck_from:
            await asyncio.Event().wait()
        await super().save(program_state, version)


def registered(folder: Path, how: str, number: int) -> None:
    """Trains on clients of a registry; without `how`, to the end."""
    set_program_context()
    registry = ParticipationRegistry.start(folder / "registry", make_mechanism())
    asked: list[str] = []
    started = 0

    def client_dataset(name: str) -> tf.data.Dataset:
        if how == "asking" and started == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        asked.append(name)
        return dataset()

    source = RegisteredClients(
        registry, [f"client {n}" for n in range(60)], client_dataset, tuple(SPEC)
    )
    with make_process(folder / "noise", registry) as process:
        inner = process.next._inner

        def compute(state: Any, data: Any) -> Any:
            nonlocal started
            started += 1
            if how == "taken" and started == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(state, data)

        supply = process._noise.supply

        def taking(state: Any, num_clients: int) -> Any:
            with (folder / "world").open("a") as world:
                world.write(json.dumps([process.rows_taken, sorted(asked)]) + "\n")
            asked.clear()
            return supply(state, num_clients)

        process._noise.supply = taking
        process.next._inner = compute
        manager = _Slow(folder / "states", number if how else NUM_ROWS)
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=source,
                train_per_round_clients=PER_ROUND,
                train_total_rounds=NUM_ROUNDS,
                program_state_manager=manager,
                model_output_manager=_Releasing(folder / "released"),
                evaluation_manager=None,
                evaluation_periodicity=1,
            )
        )
    source.count()
