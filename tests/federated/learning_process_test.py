"""A private learning process takes every row of noise once, whoever runs it and dies."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import re
import shutil
import signal
import sqlite3

import numpy as np
import pytest
import tensorflow as tf
import tree

import forked_program
import private_process_program as program
import registry_program
from bandmf_tf._numbers import round_up
from bandmf_tf.errors import BandMFError
from bandmf_tf.federated import (
    AdaptiveClipping,
    RegisteredClients,
    aggregators,
    learning_process,
    private_learning_process,
    runtime,
)
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.noise import SuppliedNoiseSumQuery
from bandmf_tf.noise.stream import NoiseStream
from bandmf_tf.runs import ParticipationRegistry, RegistryError
from bandmf_tf.runs.folder import RunError

KERNEL = 0  # The first array of the model.


@pytest.fixture(autouse=True, scope="module")
def _context():
    runtime.set_local_context()
    yield
    runtime.end_workers()


@functools.cache
def _rows() -> list[np.ndarray]:
    """All rows of noise of the kernel, as they are added to the model."""
    mechanism = program.make_mechanism()
    specs = [tf.TensorSpec([2, 1]), tf.TensorSpec([1])]
    stream = NoiseStream(mechanism.strategy, mechanism.stddev, specs, pinned_seed=program.SEED)
    rows = [stream.next()[KERNEL].numpy() for _ in range(program.NUM_ROWS)]
    return [-row / program.PER_ROUND for row in rows]


def _row_of(before, after) -> int:
    """The one row that is between two models."""
    differences = [np.abs(after - before - row).max() for row in _rows()]
    (found,) = np.flatnonzero(np.array(differences) < 1e-5)
    return int(found)


def _kernel(state) -> np.ndarray:
    return np.asarray(state.global_model_weights.trainable[KERNEL])


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with program.make_process(tmp_path_factory.mktemp("noise")) as process:
        yield process


def test_no_state_gets_a_row_twice_whatever_is_repeated(process):
    data = [program.dataset()] * 3
    first = process.initialize()
    second = process.next(first, data).state
    again = process.next(first, data).state  # Discarded and repeated, or another branch.
    third = process.next(second, data).state
    rewound = process.next(first, data).state
    pairs = [(first, second), (first, again), (second, third), (first, rewound)]
    assert [_row_of(_kernel(a), _kernel(b)) for a, b in pairs] == [0, 1, 2, 3]
    assert process.rows_taken == 4
    assert process.next(first, data).metrics == {"client_work": {"train": {}}}


def test_the_state_holds_neither_noise_nor_seed(process):
    state = process.next(process.initialize(), [program.dataset()]).state
    leaves = {path[-1]: leaf for path, leaf in tree.flatten_with_path(state.aggregator)}
    assert np.size(leaves["row"]) == 0
    secret = re.compile(r"seed|ready_rows|memory_\d+")
    assert not any(secret.fullmatch(str(name)) for name in leaves)
    assert sum(np.size(leaf) for leaf in leaves.values() if np.ndim(leaf)) == 0


def test_a_process_that_is_no_private_one_cannot_use_its_parts(process):
    data = tf.data.Dataset.from_tensors((tf.ones([1, 2]), tf.ones([1, 1])))
    with pytest.raises(Exception, match="needs the row of noise"):
        process._next_fn(process.initialize(), [data])  # TFF's own.

    @tff.federated_computation(process.initialize.type_signature.result)
    def identity(state):
        with pytest.raises(BandMFError, match="no part of another computation"):
            process.next(state, [program.dataset()])
        return state

    assert identity is not None


def test_rows_end_with_the_plan_and_a_folder_is_for_one_process(tmp_path):
    data, lines = [program.dataset()], []
    with program.make_process(tmp_path, progress=lambda *line: lines.append(line)) as process:
        with pytest.raises(RunError, match="in use by another process"):
            program.make_process(tmp_path)
        state = process.initialize()
        for _ in range(program.NUM_ROWS):
            last = process.next(state, data).state
        with pytest.raises(RunError, match=f"All {program.NUM_ROWS} rows"):
            process.next(state, data)
    # What operators see of any loop; rounds are the rows that were taken.
    assert [done for done, _ in lines] == [*range(1, program.NUM_ROWS + 1)]
    spent = epsilon_after(program.make_mechanism(), program.NUM_ROWS)
    assert f"epsilon {round_up(spent):g} of " in lines[-1][1]
    text = (tmp_path / "metrics.prom").read_text()
    for gauge in (f"epsilon_spent {spent!r}", "cohort_clients 1", "participation_enforced 0"):
        assert f"\nbandmf_{gauge}\n" in text
    with pytest.raises(RunError, match="another noise_source"):
        private_learning_process(
            program.builder, program.make_mechanism(), tmp_path, clients_per_round=4
        )
    with (
        program.make_process(tmp_path / "lost") as process,
        pytest.raises(BandMFError, match="stream is at round 0 and the state at round 12"),
    ):
        process.next(last, data)


ALGORITHMS = tff.learning.algorithms
SGD = tff.learning.optimizers.build_sgdm(0.1)


def _weighted_fed_avg(model, aggregator):
    return ALGORITHMS.build_weighted_fed_avg(model, SGD, model_aggregator=aggregator)


def _fed_sgd(model, aggregator):
    server = tff.learning.optimizers.build_sgdm(1.0)
    return ALGORITHMS.build_fed_sgd(model, server, model_aggregator=aggregator)


def _fed_prox(model, aggregator):
    return ALGORITHMS.build_unweighted_fed_prox(model, 0.1, SGD, model_aggregator=aggregator)


def _zeroing(model, aggregator):
    around = tff.aggregators.zeroing_factory(5.0, aggregator)
    return ALGORITHMS.build_unweighted_fed_avg(model, SGD, model_aggregator=around)


@pytest.mark.parametrize(
    ("build", "is_adaptive"),
    [(_weighted_fed_avg, False), (_fed_sgd, False), (_fed_prox, True), (_zeroing, False)],
)
def test_what_builders_of_tff_make_gets_its_row(build, is_adaptive, tmp_path):
    model = program.make_model()
    with private_learning_process(
        lambda model_aggregator: build(model, model_aggregator),
        program.make_mechanism(),
        tmp_path,
        clients_per_round=program.PER_ROUND,
        adaptive_clipping=AdaptiveClipping() if is_adaptive else None,
        pinned_seed=None if is_adaptive else program.SEED,
    ) as process:
        state = process.initialize()
        found = process.next(state, [program.dataset()]).state
    assert np.abs(_kernel(found) - _kernel(state)).min() > 0
    assert is_adaptive or _row_of(_kernel(state), _kernel(found)) == 0
    assert aggregators.noised_rounds(found) == 1


@pytest.mark.parametrize("kind", ["mime", "adaptive"])
def test_what_keeps_something_of_clients_is_refused_before_it_runs(kind, tmp_path):
    model = program.make_model()

    def build(model_aggregator):
        if kind == "mime":
            return ALGORITHMS.build_unweighted_mime_lite(
                model,
                tff.learning.optimizers.build_sgdm(0.1, 0.9),
                model_aggregator=model_aggregator,
            )
        quantile = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.2)
        around = tff.aggregators.zeroing_factory(quantile, model_aggregator)
        return ALGORITHMS.build_unweighted_fed_avg(model, SGD, model_aggregator=around)

    with pytest.raises(BandMFError, match="Mime" if kind == "mime" else "adapts to clients"):
        private_learning_process(
            build, program.make_mechanism(), tmp_path / "noise", clients_per_round=4
        )
    assert not (tmp_path / "noise").exists()


def test_a_builder_that_forgets_the_aggregator_hears_what_to_pass_on(tmp_path):
    def build(model_aggregator):
        del model_aggregator
        return ALGORITHMS.build_unweighted_fed_avg(program.make_model(), SGD)

    with pytest.raises(BandMFError, match="nothing adds noise; pass model_aggregator") as caught:
        private_learning_process(
            build, program.make_mechanism(), tmp_path / "noise", clients_per_round=4
        )
    assert "in_state" not in str(caught.value)
    assert not (tmp_path / "noise").exists()


def _run(folder, how="", number=0, main=program.main) -> int:
    """Runs TFF's program in a process of its own; returns its exit code."""
    server = forked_program.fork_server()
    child = server.Process(target=main, args=(folder, how, number))
    child.start()
    child.join()
    return child.exitcode


def _rows_in(difference, count) -> tuple[int, ...]:
    """Which rows, so many, add up to a difference of models."""
    (found,) = [
        chosen
        for chosen in itertools.combinations(range(program.NUM_ROWS), count)
        if np.abs(difference - sum(_rows()[row] for row in chosen)).max() < 1e-5
    ]
    return found


def test_train_model_of_tff_is_private_after_kills_and_discarded_rounds(tmp_path):
    """Every model that was saved or released has rows of its own, never one of them twice."""
    for how, number in (("computed", 2), ("saved", 4)):
        assert _run(tmp_path, how, number) == -signal.SIGKILL
    assert _run(tmp_path, "discard") == 0
    released = np.load(
        tmp_path / "released" / f"training_checkpoint_round_{program.NUM_ROUNDS}.npz"
    )
    with program.make_process(tmp_path / "noise") as process:
        initial, taken = _kernel(process.initialize()), process.rows_taken
    (model,) = [released[name] for name in released.files if released[name].shape == initial.shape]
    discarded = np.load(tmp_path / "discarded.npy")
    kept, before = _rows_in(model - initial, 5), _rows_in(discarded - initial, 5)
    # The rows of rounds that were lost or discarded are in no model that was kept.
    assert max(kept) + 1 == taken > program.NUM_ROUNDS + 2
    assert kept[:-1] == before[:-1]
    assert before[-1] not in kept
    # No noise is anywhere but in the folder of the noise.
    rows = [(-row * program.PER_ROUND).astype(np.float32) for row in _rows()]
    for path in tmp_path.rglob("*"):
        if path.is_file() and "noise" not in path.parts[len(tmp_path.parts) :]:
            content = path.read_bytes()
            assert not any(row.tobytes() in content for row in rows), path
    assert not any(np.load(path).files for path in (tmp_path / "metrics").iterdir())


def _check_rounds_are_rows(world, registry):
    """`world` has a row of noise and clients, for each sum that anybody could have seen."""
    taken = {}
    for row, clients in world:
        assert clients
        for client in clients:
            taken.setdefault(client, []).append(row)
    assert [row for row, _ in world] == sorted({row for row, _ in world})
    for rows in taken.values():
        assert all(later - row >= 3 for row, later in itertools.pairwise(rows))
    names = {registry.pseudonym(client): client for client in taken}
    with sqlite3.connect(registry._database._path) as file:
        charged = file.execute(
            "SELECT lower(hex(client)), round FROM participations WHERE outcome >= 2"
        )
        found = {(names.get(name), number) for name, number in charged}
    # Who arrived and was in no sum is charged as well, and nobody knows anything of it.
    assert {(client, row) for client in taken for row in taken[client]} <= found


def test_train_model_with_a_registry_goes_on_after_kills_and_counts_everybody(tmp_path):
    """Killed while TFF saves: the registry knows of two rounds that TFF's newest state does not."""
    for how, number in (("taken", 2), ("asking", 3)):
        assert _run(tmp_path, how, number, program.registered) == -signal.SIGKILL
    assert _run(tmp_path, main=program.registered) == 0
    released = np.load(
        tmp_path / "released" / f"training_checkpoint_round_{program.NUM_ROUNDS}.npz"
    )
    world = [json.loads(line) for line in (tmp_path / "world").read_text().splitlines()]
    with ParticipationRegistry.start(tmp_path / "registry", program.make_mechanism()) as registry:
        _check_rounds_are_rows(world, registry)
        with program.make_process(tmp_path / "noise", registry) as process:
            initial, taken = _kernel(process.initialize()), process.rows_taken
        assert sum(registry.outcomes(taken - 1).values()) == program.PER_ROUND
        assert len(world) == taken > program.NUM_ROUNDS + 2
        # How many rounds TFF could save, and so the next program repeats, the disk decides.
        assert registry.outcomes(taken) == {}
    (model,) = [released[name] for name in released.files if released[name].shape == initial.shape]
    assert len(_rows_in(model - initial, program.NUM_ROUNDS)) == program.NUM_ROUNDS


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_rows_whatever_is_put_back_repeated_or_left_out(seed, tmp_path):
    """Histories of programs that die anywhere, and come back at any state that they ever had."""
    draw = random.Random(seed)
    mechanism, clients = program.make_mechanism(), [f"client {n}" for n in range(60)]
    specs = tf.TensorSpec([2])
    query = SuppliedNoiseSumQuery.from_mechanism(mechanism, specs)
    first = {name: leaf.numpy() for name, leaf in query.initial_global_state().items()}
    owner, world, saved, last = {}, [], [(first, None)], None
    with contextlib.ExitStack() as opened:

        def begin():
            opened.close()
            registry = opened.enter_context(
                ParticipationRegistry.start(tmp_path / "registry", mechanism)
            )
            source = RegisteredClients(registry, clients, lambda name: name, program.SPEC[0])
            noise = learning_process._NoiseFolder(
                tmp_path / "noise",
                mechanism.num_rounds,
                lambda: aggregators.NoiseSupply(mechanism, specs, on_disk=True),
                owner,
                registry,
            )
            opened.callback(noise.close)
            state, position = draw.choice(saved)
            iterator = source.iterator()
            if position is not None:
                iterator = type(iterator).from_bytes(position)
            return registry, noise, iterator, state

        registry, noise, iterator, state = begin()
        while noise.rows_taken < mechanism.num_rounds - 1:
            action = draw.choice(["round"] * 3 + ["skip", "twice", "kill", "back"])
            if action == "kill":
                registry, noise, iterator, state = begin()
            elif action == "back":  # TFF discards a round, with a copy of the iterator.
                state, position = draw.choice(saved)
                iterator = type(iterator).from_bytes(position) if position else iterator
            else:
                cohort = iterator.select(4)
                if action == "skip":
                    continue
                supplied = noise.supply(state)
                world.append((noise.rows_taken - 1, cohort))
                state = {**supplied, "step": supplied["step"] + 1}
                saved.append((state, iterator.to_bytes()))
                if action == "twice":
                    with pytest.raises(RunError, match="its clients took part"):
                        noise.supply(state)
                last = registry.open_attempt
                assert last.number <= noise.rows_taken - 1
        assert last is not None
        _check_rounds_are_rows(world, registry)


def test_a_registry_or_noise_that_was_put_back_or_changed_is_refused(tmp_path):
    mechanism, specs = program.make_mechanism(), tf.TensorSpec([2])

    def noise(registry):
        return learning_process._NoiseFolder(
            tmp_path / "noise",
            mechanism.num_rounds,
            lambda: aggregators.NoiseSupply(mechanism, specs, on_disk=True),
            {},
            registry,
        )

    query = SuppliedNoiseSumQuery.from_mechanism(mechanism, specs)
    state = {name: leaf.numpy() for name, leaf in query.initial_global_state().items()}
    path = tmp_path / "registry" / "registry.sqlite"
    with ParticipationRegistry.start(path.parent, mechanism) as registry:
        taken = noise(registry)
        with pytest.raises(RunError, match="No round of the registry is open"):
            taken.supply(state)
        registry.begin_round(0)
        taken.supply(state)
        registry.close()
        before = path.read_bytes()
        registry.begin_round(0)  # What was lost had its row, and is counted.
        taken.supply(state)
        assert (registry.open_attempt.number, taken.rows_taken) == (1, 2)
        taken.close()
    path.write_bytes(before)
    with ParticipationRegistry.start(path.parent, mechanism) as registry:
        taken = noise(registry)
        with pytest.raises(RunError, match=r"Round 0 .* for round 1 already: the registry was put"):
            taken.supply(state)
        taken.close()
    for other in (None, ParticipationRegistry.start(tmp_path / "other", mechanism)):
        with pytest.raises(RunError, match="give that one to private_learning_process"):
            noise(other)
    longer = registry_program.make_mechanism()
    with (
        ParticipationRegistry.start(tmp_path / "longer", longer) as registry,
        pytest.raises(BandMFError, match="start the registry with the mechanism of the process"),
    ):
        private_learning_process(
            program.builder, mechanism, tmp_path / "new", clients_per_round=4, registry=registry
        )


def test_noise_that_was_put_back_or_copied_is_refused_where_the_registry_was_not(tmp_path):
    """Rows drawn anew over the same past would tell of the clients in that past a second time."""
    mechanism, specs = program.make_mechanism(), tf.TensorSpec([2])
    query = SuppliedNoiseSumQuery.from_mechanism(mechanism, specs)
    state = {name: leaf.numpy() for name, leaf in query.initial_global_state().items()}

    def noise(folder):
        return learning_process._NoiseFolder(
            tmp_path / folder,
            mechanism.num_rounds,
            lambda: aggregators.NoiseSupply(mechanism, specs, on_disk=True),
            {},
            registry,
        )

    def do_round(taken, number):
        attempt = registry.begin_round(number)
        taken.supply(state)
        attempt.count()

    with ParticipationRegistry.start(tmp_path / "registry", mechanism) as registry:
        with contextlib.closing(noise("noise")) as taken:
            do_round(taken, 0)
        shutil.copytree(tmp_path / "noise", tmp_path / "before")
        shutil.copytree(tmp_path / "noise", tmp_path / "copy")
        copy = noise("copy")
        with contextlib.closing(noise("noise")) as taken:
            do_round(taken, 1)
        registry.begin_round(2)
        with contextlib.closing(copy), pytest.raises(RegistryError, match="put back, or copied"):
            copy.supply(state)
    # It is kept over restarts. Noise that is new has nothing in common with what was released.
    with ParticipationRegistry.start(tmp_path / "registry", mechanism) as registry:
        with pytest.raises(
            RegistryError, match="noise of round 1, and the noise ends with round 0"
        ):
            noise("before")
        with contextlib.closing(noise("empty")) as taken:
            do_round(taken, 2)
            assert taken.rows_taken == 3


def test_a_kill_before_the_registry_knows_of_a_row_costs_that_row_alone(tmp_path, monkeypatch):
    mechanism, specs = program.make_mechanism(), tf.TensorSpec([2])
    query = SuppliedNoiseSumQuery.from_mechanism(mechanism, specs)
    state = {name: leaf.numpy() for name, leaf in query.initial_global_state().items()}
    rows = []
    for killed in (True, False):
        with ParticipationRegistry.start(tmp_path / "registry", mechanism) as registry:
            taken = learning_process._NoiseFolder(
                tmp_path / "noise",
                mechanism.num_rounds,
                lambda: aggregators.NoiseSupply(mechanism, specs, on_disk=True),
                {},
                registry,
            )
            with contextlib.closing(taken):
                registry.begin_round(0)
                if killed:
                    monkeypatch.setattr(registry, "take_row", _fail)
                    with pytest.raises(OSError, match="killed"):
                        taken.supply(state)
                else:
                    taken.supply(state)
                rows.append((registry.open_attempt.number, taken.rows_taken))
    assert rows == [(0, 1), (1, 2)]


def _fail(*unused):
    raise OSError("killed")


def test_who_has_not_arrived_is_not_added(tmp_path):
    """A loop that forgets `arrived` charges nobody, and its clients could come back at once."""
    with (
        ParticipationRegistry.start(tmp_path / "registry", program.make_mechanism()) as registry,
        program.make_process(tmp_path / "noise", registry) as process,
    ):
        attempt = registry.begin_round(0)
        invited = attempt.invite(["a", "b", "c"])
        attempt.arrived(invited[:1])
        state = process.initialize()
        with pytest.raises(RunError, match="got 3 clients, and 1 have arrived in round 0"):
            process.next(state, [program.dataset()] * 3)
        assert process.rows_taken == 0
        process.next(state, [program.dataset()])
        assert process.rows_taken == 1
