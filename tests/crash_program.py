"""A training program that is killed: the real run folder, noise stream and population, tiny rounds.

What is real here: `TrainingRun` with its checkpoints, ledger and releases, the TensorFlow
`NoiseStream` of a small strategy, and `Population`. What is small: the round, which sums one
vector a client in NumPy instead of running TFF, so that a process does many rounds a second and
many processes can be killed. `train_federated_test.py` kills the program with TFF inside.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import signal
import types
from pathlib import Path

import numpy as np
import tensorflow as tf

from bandmf_tf._provenance import format_time
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.noise.stream import NoiseStream
from bandmf_tf.runs.checkpoints import LargeArray
from bandmf_tf.runs.training_run import POINTS, RoundResult, TrainingRun
from bandmf_tf.simulation.population import Availability, ParticipationRule, Population
from production import own_loop as loop
from run_program import CLIENTS_PER_ROUND, MIN_SEPARATION, make_header, make_mechanism

DIMENSION = 24
_EPOCH = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


def client_update(client: int, number: int) -> np.ndarray:
    """The unit vector that a client sends in a round."""
    update = np.random.default_rng([client, number]).normal(size=DIMENSION).astype(np.float32)
    return update / np.linalg.norm(update)


def _time(seconds: float) -> str:
    return format_time(_EPOCH + datetime.timedelta(seconds=seconds))


def _small_state(stream: NoiseStream) -> dict[str, np.ndarray]:
    return {v.name: v.numpy() for v in stream.variables if v.shape.rank < 2}


def _large_state(stream: NoiseStream) -> dict[str, LargeArray]:
    return {c.variable.name: LargeArray(c.key, c.read, c.replace) for c in stream.chunks()}


def _restore(run: TrainingRun, stream: NoiseStream) -> None:
    for variable in stream.variables:
        if variable.name in run.state:
            variable.assign(run.state[variable.name])
    for chunk in stream.chunks():
        chunk.restore(run.large_state[chunk.variable.name].read())
    run.forget_state()


def train(folder, num_rounds, pinned_seed, crash_at=None, tell=None, kind="banded") -> None:
    """Trains until all rounds are done, or dies at the point `crash_at = (name, round)`.

    With `tell = (event, number)` the event is set when so many points were passed: somebody else
    kills the program then, which waits for that when it has done two rounds.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    passed = itertools.count()

    def on_point(point: str, number: int) -> None:
        if tell is not None:
            points = next(passed)
            if points == tell[1]:
                tell[0].set()
            if points == 2 * len(POINTS):
                signal.pause()
        if crash_at == (point, number):
            os.kill(os.getpid(), signal.SIGKILL)

    mechanism = make_mechanism(num_rounds, kind=kind)
    rule = ParticipationRule(min_separation=MIN_SEPARATION)
    population = Population(60, rule, Availability(), seed=7)
    spec = tf.TensorSpec([DIMENSION], tf.float32)
    stream = NoiseStream(
        mechanism.strategy, mechanism.stddev, spec, block_length=2, pinned_seed=pinned_seed
    )
    weights = np.zeros(DIMENSION, np.float32)
    with TrainingRun.start(
        folder, mechanism, {"task": "crash test"}, make_header(mechanism, num_rounds),
        record_pseudonyms=True, on_point=on_point,
    ) as run:  # fmt: skip
        if run.state is not None:
            weights = run.state["weights"]
            saved = {k.removeprefix("p/"): v for k, v in run.state.items() if k.startswith("p/")}
            population.restore(saved)
            _restore(run, stream)
        while not run.is_complete:
            cohort = population.next_cohort(CLIENTS_PER_ROUND)
            run.begin_round(_time(cohort.start))
            total = np.sum([client_update(c, cohort.round) for c in cohort.clients], axis=0)
            weights = weights + total + stream.next().numpy()
            state = {
                "weights": weights,
                **{f"p/{name}": value for name, value in population.state().items()},
                **_small_state(stream),
            }
            run.commit(
                RoundResult(
                    state=state,
                    model={"weights": weights},
                    metrics={"norm": float(np.linalg.norm(weights))},
                    start=_time(cohort.start),
                    end=_time(cohort.end),
                    client_ids=[str(client) for client in cohort.clients],
                    large_state=_large_state(stream),
                )
            )


def own_loop(folder: str, pinned_seed: int, crash_at: tuple[str, int] | None = None) -> None:
    """Runs `production/own_loop.py`, twelve rounds of devices that send zeros, and kills it."""

    def on_point(point: str, number: int) -> None:
        if crash_at == (point, number):
            os.kill(os.getpid(), signal.SIGKILL)

    loop.ROUNDS = 12
    loop.gradient = lambda device, weights: np.zeros(loop.SIZE)
    loop.NoiseStream = functools.partial(NoiseStream, pinned_seed=pinned_seed)
    loop.TrainingRun = types.SimpleNamespace(
        start=functools.partial(TrainingRun.start, on_point=on_point)
    )
    loop.train(Path(folder))


def peak_memory(folder: str, num_bands: int, stop: int, found) -> None:
    """Trains 200,000 parameters until round `stop`, twelve rows of noise each.

    Sends the most memory that the kernel could not take back at any point of a round, in bytes.
    """
    peak = 0

    def on_point(point: str, number: int) -> None:
        nonlocal peak
        with open("/proc/self/status") as status:
            (kib,) = [line.split()[1] for line in status if line.startswith("RssAnon:")]
        peak = max(peak, 1024 * int(kib))

    tf.config.threading.set_intra_op_parallelism_threads(1)
    k = np.arange(1, num_bands)
    decay = np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))
    num_rounds = 400
    mechanism = make_mechanism(num_rounds)
    strategy = ToeplitzStrategy(decay, num_rounds)
    spec = tf.TensorSpec([200_000], tf.float32)
    stream = NoiseStream(strategy, 1.0, spec, block_length=min(num_bands, 16), on_disk=True)
    with TrainingRun.start(
        folder, mechanism, {}, make_header(mechanism, num_rounds), on_point=on_point
    ) as run:
        if run.state is not None:
            _restore(run, stream)
        while run.next_round < stop:
            for _ in range(12):
                weights = stream.next_in_graph().numpy()
            run.commit(
                RoundResult(
                    state=_small_state(stream),
                    model={"weights": weights},
                    metrics={},
                    start=_time(run.next_round),
                    end=_time(run.next_round + 1),
                    client_ids=["1"],
                    large_state=_large_state(stream),
                )
            )
    found.put(peak)
