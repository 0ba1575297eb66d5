"""A client that fails is left out, with nothing of the failed attempt to be seen anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sqlite3
import types

import numpy as np
import pytest
import tensorflow as tf

import run_program
from bandmf_tf import _memory
from bandmf_tf.evidence import registries
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.federated import runtime as tff_runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.runs import ledger
from bandmf_tf.runs.folder import RunError
from bandmf_tf.simulation import tasks, training
from bandmf_tf.simulation.config import RunConfig
from bandmf_tf.simulation.population import Population

NUM_ROUNDS = 4
PER_ROUND = 5

# What is wrong with which client; tasks of this module look it up.
wrong: dict[int, str] = {}


def _dataset(whole, kind):
    if kind == "unreadable":
        raise FileNotFoundError("client 7 has gone")
    if kind == "broken":
        return whole.map(lambda x, y: (_raise(x), y))
    if kind == "label":
        return whole.map(lambda x, y: (x, y * 0 + 77))
    if kind == "type":
        return whole.map(lambda x, y: (tf.cast(x, tf.float64), y))
    return whole.take(0)


def _raise(x):
    with tf.control_dependencies([tf.debugging.assert_greater(tf.reduce_sum(x), 1e9)]):
        return tf.identity(x)


def _latest(client: int) -> tf.data.Dataset:
    return _latest.__dict__["task"](client)


def digits(config: RunConfig) -> tasks.FederatedTask:
    """Digits, with some clients out of order."""
    task = tasks.digits(config)

    def client_dataset(client: int) -> tf.data.Dataset:
        whole = task.client_dataset(client)
        return _dataset(whole, wrong[client]) if client in wrong else whole

    _latest.__dict__["task"] = client_dataset
    source = _Cohorts([[client_dataset(client) for client in cohort] for cohort in told])
    return dataclasses.replace(task, client_dataset=client_dataset, data_source=source)


# Cohorts that a data source of TFF selects, one after the other.
told: list[list[int]] = []


class _Cohorts(tff.program.FederatedDataSource, tff.program.FederatedDataSourceIterator):
    """A data source of TFF that selects what it is told, and its own iterator."""

    federated_type = None

    def __init__(self, cohorts, position=0):
        self._cohorts, self._position = cohorts, position

    def iterator(self):
        return self

    def select(self, k=None):
        self._position += 1
        return self._cohorts[self._position - 1]

    def to_bytes(self):
        return bytes([self._position])

    @classmethod
    def from_bytes(cls, buffer):
        (position,) = buffer
        return cls([[_latest(client) for client in cohort] for cohort in told], position)


@pytest.fixture(name="config")
def _config(tmp_path):
    told.clear()
    save_mechanism(run_program.make_mechanism(NUM_ROUNDS), tmp_path / "m.bandmf")
    tff_runtime.set_local_context()
    yield RunConfig(
        mechanism=str(tmp_path / "m.bandmf"),
        output=str(tmp_path / "run"),
        task=f"{__name__}:digits",
        num_rounds=NUM_ROUNDS,
        num_clients=60,
        clients_per_round=PER_ROUND,
        examples_per_client=6,
        availability="always",
        pinned_noise_seed=3,
        publish_every=1,
        evaluate_every=NUM_ROUNDS,
    )
    tff_runtime.end_workers()


@pytest.fixture(name="cohorts")
def _cohorts(config):
    """The clients of every round."""
    rule = config.participation_rule(run_program.make_mechanism(NUM_ROUNDS))
    population = Population(config.num_clients, rule, round_seconds=config.min_round_seconds)
    return [[int(c) for c in population.next_cohort(PER_ROUND).clients] for _ in range(NUM_ROUNDS)]


def _train(config, output, broken):
    wrong.clear()
    wrong.update(broken)
    config = dataclasses.replace(config, output=str(output))
    with training.FederatedTraining(config) as run:
        run.train()
    records = ledger.verify_ledger(output / "ledger.jsonl", num_records=NUM_ROUNDS).records
    models = [np.load(path) for path in sorted((output / "released").iterdir())]
    return records, [np.concatenate([m[name].ravel() for name in m]) for m in models]


def test_clients_that_fail_count_as_zero_and_the_run_goes_on(config, cohorts, tmp_path, caplog):
    one, two, three, four = cohorts
    broken = {one[0]: "broken", two[1]: "label", two[3]: "unreadable", three[4]: "type"}
    broken |= dict.fromkeys(four, "broken")  # Nobody is left in the last round.
    records, models = _train(config, tmp_path / "run", broken)
    assert [r.num_participants for r in records] == [4, 3, 4, 0]
    assert [r.flags[ledger.FLAG_FAILED_CLIENTS] for r in records] == [1, 2, 1, 5]
    # Whoever has no data contributes zero: the noise must be the same row, used once a round.
    records, expected = _train(config, tmp_path / "zeros", dict.fromkeys(broken, "nothing"))
    assert [dict(r.flags) for r in records] == [{}] * NUM_ROUNDS
    for ours, theirs in zip(models, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert "round 1: data of 1 clients cannot be read (FileNotFoundError)" in caplog.text
    assert "round 1: 1 of 4 clients failed" in caplog.text
    assert "77" not in caplog.text  # What a client's data are.
    assert "has gone" not in caplog.text


def test_drop_outs_and_discarded_rounds_change_nothing_but_who_is_in_the_sum(config, tmp_path):
    """A run whose cohorts are those that came, by a data source, has the same models to the bit."""
    field = {"over_selection": 1.4, "minimum_clients": 4, "dropout_fraction": 0.45}
    simulated = dataclasses.replace(config, num_clients=300, **field)
    records, models = _train(simulated, tmp_path / "run", {})
    rule = simulated.participation_rule(run_program.make_mechanism(NUM_ROUNDS))
    population = Population(300, rule, dropout_fraction=0.45, round_seconds=60.0)
    came, discarded = [], 0
    while len(came) < NUM_ROUNDS:
        cohort = population.next_cohort(PER_ROUND, over_selection=1.4)
        if len(cohort.clients) < 4:
            population.discard(cohort)
            discarded += 1
        else:
            came.append([int(client) for client in cohort.clients])
    assert discarded
    assert discarded == sum(r.flags.get(ledger.FLAG_EARLIER_ATTEMPTS, 0) for r in records)
    assert [r.num_participants for r in records] == list(map(len, came))
    assert [r.flags[ledger.FLAG_DROPPED_CLIENTS] for r in records] == [7 - len(c) for c in came]
    told[:] = came
    records, expected = _train(
        dataclasses.replace(config, clients="data_source"), tmp_path / "told", {}
    )
    header = ledger.read_ledger(tmp_path / "told" / "ledger.jsonl").header
    assert (header.clock, header.enforced_min_separation) == (ledger.CLOCK_REAL, None)
    for ours, theirs in zip(models, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_registered_clients_stay_apart_whichever_moment_a_round_is_interrupted_at(config, tmp_path):
    """The registry knows of a round before its sum does, the ledger after."""
    wrong.clear()
    wrong.update(dict.fromkeys(range(0, 60, 6), "unreadable"))
    wrong.update(dict.fromkeys(range(1, 60, 12), "label"))
    config = dataclasses.replace(
        config,
        clients="registered",
        over_selection=1.5,
        minimum_clients=2,
        participation_recording="pseudonymous",
        pinned_noise_seed=-1,
    )
    folder = tmp_path / "run"

    def interrupt_at(point, number):
        def on_point(found, round_number):
            if (found, round_number) == (point, number):
                raise KeyboardInterrupt

        return on_point

    for point, number in (("computed", 0), ("checkpoint_written", 2)):
        run = training.FederatedTraining(config, on_point=interrupt_at(point, number))
        with run, pytest.raises(KeyboardInterrupt):
            run.train()
        _check_beside(folder)
    with training.FederatedTraining(config) as run:
        run.train()
        run.source._registry.export(tmp_path / "registry.sqlite")
    records = ledger.verify_ledger(folder / "ledger.jsonl", num_records=NUM_ROUNDS).records
    assert [r.flags.get(ledger.FLAG_EARLIER_ATTEMPTS, 0) for r in records] == [1, 0, 0, 0]
    assert all(r.flags[ledger.FLAG_DROPPED_CLIENTS] >= 2 for r in records)
    _check_beside(folder)
    with contextlib.closing(sqlite3.connect(tmp_path / "registry.sqlite")) as file:
        charged = file.execute(
            "SELECT hex(client), round FROM participations WHERE outcome >= 2"
        ).fetchall()
        left_out = file.execute("SELECT count(*) FROM participations WHERE outcome = 3").fetchone()
    named = {(name, r.round) for r in records for name in r.participants}
    assert named <= {(name.lower(), number) for name, number in charged}
    assert len({name for name, _ in charged}) == len(charged)  # 4 rounds apart: nobody twice.
    assert left_out[0] >= sum(r.flags.get(ledger.FLAG_FAILED_CLIENTS, 0) for r in records)


def _check_beside(folder):
    """The registry of a run has admitted whom its ledger names, and is at most a round ahead."""
    registries.check_beside(
        folder / "secret" / "registry.sqlite", ledger.read_ledger(folder / "ledger.jsonl")
    )


def test_a_round_that_nobody_comes_to_ends_the_run_and_it_gets_no_registry_later(config, tmp_path):
    field = {"minimum_clients": 3, "round_attempts": 4, "dropout_fraction": 0.999}
    config = dataclasses.replace(config, num_clients=99, **field)
    with pytest.raises(RunError, match="needs at least 3 clients and 0 came, in 4 attempts"):
        _train(config, tmp_path / "run", {})
    assert ledger.read_ledger(tmp_path / "run" / "ledger.jsonl").num_records == 0
    registered = dataclasses.replace(config, clients="registered", dropout_fraction=0.0)
    with pytest.raises(RunError, match="began without a registry"):
        training.FederatedTraining(registered)
    assert not (tmp_path / "run" / "secret" / "registry.sqlite").exists()


def test_a_round_that_fails_without_any_client_is_not_blamed_on_clients(config, tmp_path):
    wrong.clear()
    with training.FederatedTraining(config) as run:
        supply = run._supply
        run._supply = None  # Rounds without their row of noise fail.
        with pytest.raises(RunError, match="result of round 0 has no noise"):
            run.train()
        run._supply = supply
    assert ledger.read_ledger(tmp_path / "run" / "ledger.jsonl").num_records == 0
    assert not list((tmp_path / "run" / "released").iterdir())


def test_a_run_that_was_interrupted_goes_on_from_its_checkpoint_only(config, tmp_path):
    """The same object would leave the clients of that round out of the ledger."""
    wrong.clear()

    def interrupt(point, number):
        if (point, number) == ("computed", 1):
            raise KeyboardInterrupt

    with training.FederatedTraining(config, on_point=interrupt) as run:
        with pytest.raises(KeyboardInterrupt):
            run.train()
        with pytest.raises(RunError, match="Round 1 was interrupted"):
            run.train()
    assert ledger.read_ledger(tmp_path / "run" / "ledger.jsonl").num_records == 1


def test_a_clip_norm_that_adapts_is_in_metrics_and_ledger(config, tmp_path, monkeypatch):
    adaptive = dataclasses.replace(
        config, clip_quantile=0.4, clip_learning_rate=0.5, clip_vote_weight=0.3
    )
    _train(adaptive, tmp_path / "run", {})
    metrics = np.genfromtxt(tmp_path / "run" / "metrics.csv", delimiter=",", names=True)
    moves = np.diff(np.log([1.0, *metrics["l2_norm_clip"]]))
    assert np.all((moves != 0.0) & (moves > -0.5 * 0.6 - 1e-6) & (moves < 0.5 * 0.4 + 1e-6))
    header = ledger.read_ledger(tmp_path / "run" / "ledger.jsonl").header
    settings = {"target_quantile": 0.4, "learning_rate": 0.5, "vote_weight": 0.3}
    assert header.adaptive_clipping == settings
    # The run is the one that began: not of another quantile, nor of none.
    for other in (config, dataclasses.replace(adaptive, clip_quantile=0.5)):
        with pytest.raises(RunError, match="clip_quantile"):
            training.FederatedTraining(other)
    # Noise in the state adapts in the same way, see tests/federated/adaptive_clipping_test.py.
    given = {}
    monkeypatch.setattr(
        training.aggregators.BandMFFactory, "in_state", lambda _, **options: given.update(options)
    )
    in_state = dataclasses.replace(adaptive, aggregator="state", zeroing=False)
    task = types.SimpleNamespace(model=None)
    with pytest.raises(TypeError):  # That is no model, nor is there a factory.
        training.build_learning_process(task, run_program.make_mechanism(NUM_ROUNDS), in_state)
    assert dataclasses.asdict(given["adaptive_clipping"]) == settings


def test_a_model_of_another_shape_is_refused_and_no_noise_is_printed(config, monkeypatch):
    wrong.clear()
    config = dataclasses.replace(config, aggregator="state", pinned_noise_seed=-1)
    with training.FederatedTraining(config) as run:
        run._round()
    task = tasks.digits(config)
    spec = task.client_dataset(0).element_spec
    for units in ([3], [8], [3, 3]):

        def model(units=units):
            layers = [tf.keras.layers.Dense(count) for count in (*units, 10)]
            return tf.keras.Sequential([tf.keras.Input((64,)), *layers])

        other = dataclasses.replace(task, model=tasks._functional(model, spec))
        monkeypatch.setattr(training, "make_task", lambda config, other=other: other)
        with pytest.raises(RunError, match="arrays of another model") as refused:
            training.FederatedTraining(config)
        assert "array(" not in str(refused.value)


def test_metrics_are_for_their_owner_from_the_first_moment(config, tmp_path):
    wrong.clear()
    with training.FederatedTraining(config) as run:
        run.train()
    folder = tmp_path / "run"
    events = list((folder / "tensorboard").iterdir())
    assert events
    for path in (folder / "metrics.csv", *events):
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert (folder / "tensorboard").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_was_renamed_goes_on_and_one_that_cannot_is_not_kept_locked(
    config, tmp_path, monkeypatch
):
    wrong.clear()
    with monkeypatch.context() as patched:
        patched.setattr(training, "build_learning_process", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.FederatedTraining(config)
    with training.FederatedTraining(config) as run:
        run._round()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    config = dataclasses.replace(config, output=str(tmp_path / "elsewhere"))
    with training.FederatedTraining(config) as run:
        run.train()
        assert run.run.is_complete


@pytest.mark.parametrize(("gigabytes", "outcome"), [(3, "refused"), (8, "warned"), (64, "fits")])
def test_noise_that_does_not_fit_stays_on_disk_and_the_program_says_so(
    gigabytes, outcome, tmp_path, monkeypatch
):
    """400 bands of 10 million values are 16 GB; a block of 32 rows, TFF and the model are 4."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {gigabytes * 10**9 // 1024} kB\n")
    monkeypatch.setattr(_memory, "_ROOT", tmp_path)
    warnings: list[str] = []
    monkeypatch.setattr(training.logging, "warning", lambda text, *a: warnings.append(text % a))
    model = types.SimpleNamespace(trainable_variables=[tf.TensorSpec([10**7])])
    run = types.SimpleNamespace(
        task=types.SimpleNamespace(model=lambda: model),
        mechanism=types.SimpleNamespace(strategy=ToeplitzStrategy(np.full(400, 0.5), 500)),
    )
    refused = pytest.raises(_memory.NotEnoughMemoryError, match=r"up to 38 rows of 40 MB, needs 4")
    with refused if outcome == "refused" else contextlib.nullcontext():
        training.FederatedTraining._require_memory(run)
    said = (
        "The noise of n,n,n values with num_bands=n, up to n rows of n MB, needs n.n GB of memory "
        "and n.n GB can be had (what the machine has available). Past noise stays on disk, and "
        "what has no room in memory is read again for every block of rounds."
    )
    expected = [said] if outcome == "warned" else []
    assert [re.sub(r"\d+", "n", text) for text in warnings] == expected
