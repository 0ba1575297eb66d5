"""Clients of a registry that fail, are late or too many change nothing of who may return."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

import registry_program
from bandmf_tf.errors import BandMFError
from bandmf_tf.federated import CohortRule, RegisteredClients
from bandmf_tf.federated.runtime import tff
from bandmf_tf.runs.registry import Outcome, ParticipationRegistry, RegistryError
from bandmf_tf.simulation.population import ParticipationRule, Population

NUM_ROUNDS, MIN_SEPARATION, MOST = 8, 3, 2
CLIENTS = [f"client {number}" for number in range(40)]
SPEC = tf.TensorSpec([], tf.int64)


@pytest.fixture
def registry(tmp_path):
    mechanism = registry_program.make_mechanism(NUM_ROUNDS, MIN_SEPARATION, MOST)
    with ParticipationRegistry.start(tmp_path / "registry", mechanism) as registry:
        yield registry


def _dataset(client):
    return tf.data.Dataset.from_tensors(np.int64(client.split()[1]))


def _who(data):
    return [f"client {next(iter(dataset)).numpy()}" for dataset in data]


def _check_apart(rounds):
    """`rounds` has whom each round's sum could hold, in the order of rounds."""
    taken = collections.defaultdict(list)
    for number, clients in enumerate(rounds):
        for client in clients:
            taken[client].append(number)
    assert max(map(len, taken.values())) <= MOST
    for numbers in taken.values():
        assert all(s - r >= MIN_SEPARATION for r, s in itertools.pairwise(numbers))


def test_rounds_with_failing_clients_keep_clients_apart_and_record_what_happened(registry):
    def dataset(client):
        if client.endswith("7"):
            raise RuntimeError("its storage is broken")
        return _dataset(client)

    rule = CohortRule(over_selection=1.5)
    iterator = RegisteredClients(registry, CLIENTS, dataset, SPEC, rule).iterator()
    rounds = [_who(iterator.select(4)) for _ in range(NUM_ROUNDS)]
    _check_apart(rounds)
    assert not any(client.endswith("7") for cohort in rounds for client in cohort)
    for number in range(NUM_ROUNDS - 1):
        outcomes = registry.outcomes(number)
        assert outcomes[Outcome.COUNTED] == len(rounds[number]) <= 4
        assert sum(outcomes.values()) == 6
    with pytest.raises(RegistryError, match="planned for num_rounds=8"):
        iterator.select(4)


def test_a_round_goes_on_without_clients_that_never_answer(registry):
    end = threading.Event()

    def dataset(client):
        if client in CLIENTS[:2]:
            end.wait()
        return _dataset(client)

    source = RegisteredClients(
        registry, lambda wanted: CLIENTS[:4], dataset, SPEC, CohortRule(timeout_seconds=2.0)
    )
    try:
        assert set(_who(source.iterator().select(4))) <= set(CLIENTS[2:4])
    finally:
        end.set()
    source.count()
    assert registry.outcomes(0)[Outcome.DROPPED] >= 2
    assert set(registry.eligible(1, CLIENTS[:2])) == set(CLIENTS[:2])  # Nothing of them came.


def test_clients_whose_data_end_a_thread_are_not_waited_for(registry):
    def dataset(client):
        raise SystemExit

    def select():
        with contextlib.suppress(RegistryError):
            RegisteredClients(registry, CLIENTS, dataset, SPEC).iterator().select(4)

    selecting = threading.Thread(target=select, daemon=True)
    selecting.start()
    selecting.join(timeout=30)
    assert not selecting.is_alive()


def test_with_too_few_clients_nothing_is_handed_out_and_nobody_charged(registry):
    source = RegisteredClients(
        registry, lambda wanted: CLIENTS[:3], _dataset, SPEC, CohortRule(minimum=4)
    )
    iterator = source.iterator()
    for _ in range(2):
        with pytest.raises(RegistryError, match="at least 4 clients and 3 came"):
            iterator.select(8)
    assert list(registry.eligible(0, CLIENTS)) == CLIENTS


def test_another_attempt_at_a_round_has_other_clients(registry):
    iterator = RegisteredClients(registry, CLIENTS, _dataset, SPEC).iterator()
    before = copy.deepcopy(iterator)  # As TFF's training program does, to try again.
    first = _who(iterator.select(10))
    second = _who(before.select(10))
    assert not set(first) & set(second)
    third = _who(before.select(10))
    assert not {*first, *second} & set(third)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("rounds_ahead", [0, 1, 2])
def test_a_program_whose_round_another_has_begun_again_goes_no_further(
    registry, is_restarted, rounds_ahead
):
    """Both would release a round, with clients of whom the registry counts one program's."""
    first, second = (RegisteredClients(registry, CLIENTS, _dataset, SPEC) for _ in range(2))
    iterator, other = first.iterator(), second.iterator()
    iterator.select(5)
    theirs = _who(other.select(5))
    for _ in range(rounds_ahead):
        other.select(5)
    if is_restarted:
        first = RegisteredClients(registry, CLIENTS, _dataset, SPEC)
        iterator = type(iterator).from_bytes(iterator.to_bytes())
    else:
        with pytest.raises(RegistryError, match="begun again by another program"):
            first.count()
    with pytest.raises(RegistryError, match="begun again by another program"):
        iterator.select(5)
    other.select(5)
    assert len(theirs) == registry.outcomes(0)[Outcome.COUNTED]


def test_an_iterator_that_tff_has_stored_goes_on(registry, tmp_path):
    source = RegisteredClients(registry, CLIENTS, _dataset, SPEC)
    iterator = source.iterator()
    first = _who(iterator.select(5))
    manager = tff.program.FileProgramStateManager(tmp_path / "state")
    asyncio.run(manager.save([iterator], 1))
    restored = asyncio.run(manager.load(1, [source.iterator()]))[0]
    assert restored == iterator
    second = _who(restored.select(5))
    _check_apart([first, second])
    assert registry.outcomes(0) == {Outcome.COUNTED: 5}
    with pytest.raises(RegistryError, match="has not started"):
        type(iterator).from_bytes(b"of-somebody-else 1")


def test_a_simulated_population_that_keeps_no_rule_is_kept_apart(registry):
    population = Population(30, ParticipationRule(min_separation=1), misbehaving_fraction=0.9)

    def reachable(wanted):
        return [f"client {number}" for number in population.next_cohort(30).clients]

    iterator = RegisteredClients(registry, reachable, _dataset, SPEC).iterator()
    _check_apart([_who(iterator.select(5)) for _ in range(NUM_ROUNDS)])


def test_data_sources_of_tff_stand_behind_it(registry):
    ids = tff.program.ClientIdDataSource(CLIENTS).iterator()
    source = RegisteredClients(registry, lambda wanted: ids.select(wanted), _dataset, SPEC)
    assert str(source.federated_type) == "{int64*}@CLIENTS"
    assert len(source.iterator().select(6)) == 6
    source.count()
    data = tff.simulation.datasets.TestClientData({"a": [1, 2], "b": [3]})
    of_data = RegisteredClients.of_client_data(registry, data)
    assert of_data.federated_type.member.element == tff.TensorType(np.int32)
    registry.begin_round(1).discard()
    iterator = type(of_data.iterator())(of_data, 1)
    assert sorted(sum(list(d.as_numpy_iterator())) for d in iterator.select(2)) == [3, 3]


@pytest.mark.parametrize(
    "change", [{"over_selection": 0.5}, {"minimum": 0}, {"timeout_seconds": -1.0}]
)
def test_rules_that_make_no_cohort_are_refused(change):
    with pytest.raises(BandMFError):
        CohortRule(**change)
