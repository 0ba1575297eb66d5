"""Clients keep their timer, days have a rhythm, and an interrupted population goes on as it was."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.evidence.timers import RoundTimeline, timer_participation
from bandmf_tf.simulation.population import (
    DAY_SECONDS,
    Availability,
    ParticipationRule,
    Population,
)

TIMER = ParticipationRule(timer_seconds=2.5 * DAY_SECONDS)


def _run(population: Population, num_rounds: int, clients_per_round: int = 20):
    return [population.next_cohort(clients_per_round) for _ in range(num_rounds)]


def _participations(cohorts, num_clients):
    """A Python loop over everything: client -> list of (round, start)."""
    found = {client: [] for client in range(num_clients)}
    for cohort in cohorts:
        for client in cohort.clients.tolist():
            found[client].append((cohort.round, cohort.start))
    return found


def _separations(participations):
    return [
        later[0] - earlier[0]
        for history in participations.values()
        for earlier, later in itertools.pairwise(history)
    ]


def test_clients_keep_the_timer_in_wall_clock_time():
    population = Population(400, TIMER, Availability(), seed=1)
    cohorts = _run(population, 150)
    participations = _participations(cohorts, 400)
    waits = [
        later[1] - earlier[1]
        for history in participations.values()
        for earlier, later in itertools.pairwise(history)
    ]
    assert len(waits) > 500
    assert min(waits) >= 2.5 * DAY_SECONDS
    assert population.observed_min_separation == min(_separations(participations))
    assert population.observed_max_participations == max(map(len, participations.values()))
    assert all(cohort.timer_violations == 0 for cohort in cohorts)


def test_the_separation_in_rounds_varies_under_a_timer_and_not_under_strict_enforcement():
    timed = _run(Population(400, TIMER, Availability(), seed=2), 150)
    assert len(set(_separations(_participations(timed, 400)))) > 5
    strict = Population(400, ParticipationRule(min_separation=15), Availability(), seed=2)
    separations = _separations(_participations(_run(strict, 150), 400))
    assert min(separations) == 15 == strict.observed_min_separation


@settings(max_examples=25)
@given(
    b=st.integers(1, 12),
    k=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    per_round=st.integers(1, 9),
)
def test_strict_rules_hold_for_every_client(b, k, seed, per_round):
    rule = ParticipationRule(min_separation=b, max_participations=k)
    population = Population(30, rule, seed=seed)
    cohorts = _run(population, 40, per_round)
    participations = _participations(cohorts, 30)
    assert min(_separations(participations), default=b) >= b
    assert max(map(len, participations.values())) <= k
    assert all(len(cohort.clients) <= per_round for cohort in cohorts)
    assert all(np.all(np.diff(cohort.clients) > 0) for cohort in cohorts)


def test_all_that_may_take_part_do_when_all_are_wanted():
    population = Population(10, ParticipationRule(min_separation=3))
    sizes = [len(cohort.clients) for cohort in _run(population, 7, 10)]
    assert sizes == [10, 0, 0, 10, 0, 0, 10]


def test_availability_follows_the_day():
    population = Population(20_000, TIMER, Availability(time_zone_hours=0.0), seed=3)
    hours = [np.mean(population.eligible(3 * DAY_SECONDS + h * 3600.0)) for h in range(24)]
    assert max(range(24), key=hours.__getitem__) in (0, 1, 2, 3)
    assert 0.9 * 0.8 * 0.85 < hours[2] < 0.8 * 0.85 + 0.02
    assert hours[14] < 0.01


def test_rounds_take_longer_when_fewer_clients_are_awake():
    cohorts = _run(Population(3_000, TIMER, Availability(), seed=4), 300, 50)
    durations = np.array([cohort.end - cohort.start for cohort in cohorts])
    assert durations.max() > 3 * durations.min()
    starts = np.array([cohort.start for cohort in cohorts])
    assert np.all(starts[1:] >= [cohort.end for cohort in cohorts[:-1]])


def test_a_round_without_enough_clients_goes_ahead_with_those_it_has():
    availability = Availability(max_wait_seconds=2 * DAY_SECONDS)
    rule = ParticipationRule(timer_seconds=30 * DAY_SECONDS)
    first, second = _run(Population(15, rule, availability, seed=5), 2, 40)
    assert 0 < len(first.clients) < 40
    assert len(first.clients) + len(second.clients) <= 15


def test_misbehaving_clients_are_counted_and_change_nothing_for_the_others():
    population = Population(200, TIMER, Availability(), seed=6, misbehaving_fraction=0.05)
    cohorts = _run(population, 120, 15)
    misbehaving = np.flatnonzero(population._misbehaves)
    assert 0 < len(misbehaving) < 40
    honest = {
        client: history
        for client, history in _participations(cohorts, 200).items()
        if client not in misbehaving
    }
    waits = [b[1] - a[1] for history in honest.values() for a, b in itertools.pairwise(history)]
    assert min(waits) >= 2.5 * DAY_SECONDS
    assert sum(cohort.timer_violations for cohort in cohorts) > 0
    assert population.observed_min_separation == min(_separations(honest))
    assert population.observed_min_separation_of_all < population.observed_min_separation


def test_violations_are_counted_exactly():
    rule = ParticipationRule(min_separation=5)
    population = Population(50, rule, seed=7, misbehaving_fraction=0.3)
    misbehaving = int(population._misbehaves.sum())
    first, second, *_ = _run(population, 3, 50)
    assert (first.timer_violations, len(first.clients)) == (0, 50)
    assert (second.timer_violations, len(second.clients)) == (misbehaving, misbehaving)


def test_a_restored_population_goes_on_as_if_nothing_had_happened():
    make = lambda: Population(300, TIMER, Availability(), seed=8, misbehaving_fraction=0.02)  # noqa: E731
    whole = _run(make(), 60)
    population = make()
    parts = _run(population, 23)
    saved = population.state()
    _run(population, 5)  # Rounds that a crash undoes.
    restored = make()
    restored.restore(saved)
    assert restored.next_round == 23
    parts += _run(restored, 37)
    for expected, found in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(expected.clients, found.clients)
        assert (expected.start, expected.end) == (found.start, found.end)
        assert expected.timer_violations == found.timer_violations


def test_another_configuration_is_refused():
    saved = Population(10, TIMER, seed=1).state()
    with pytest.raises(ValueError, match="configured differently"):
        Population(10, TIMER, seed=2).restore(saved)


def test_global_randomness_is_neither_used_nor_changed():
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    one = _run(Population(100, TIMER, Availability(), seed=9), 5, 10)
    after = (np.random.random(), random.random())  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    assert after == (np.random.random(), random.random())  # noqa: NPY002
    two = _run(Population(100, TIMER, Availability(), seed=9), 5, 10)
    assert all(np.array_equal(a.clients, b.clients) for a, b in zip(one, two, strict=True))


def test_a_hundred_thousand_clients_keep_the_timer_for_hundreds_of_rounds():
    """The size of the simulated production run; 2,000 rounds of it take seconds."""
    rule = ParticipationRule(timer_seconds=4 * DAY_SECONDS)
    population = Population(100_000, rule, Availability(), seed=10)
    cohorts = _run(population, 200, 200)
    assert all(len(cohort.clients) == 200 for cohort in cohorts)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_no_simulated_client_ever_beats_the_worst_case_of_the_report(seed):
    population = Population(60, ParticipationRule(timer_seconds=9_000.0), Availability(), seed=seed)
    cohorts = _run(population, 40, 6)
    timeline = RoundTimeline(
        np.array([int(cohort.start * 1e6) for cohort in cohorts]),
        np.array([int(cohort.end * 1e6) for cohort in cohorts]),
    )
    if population.observed_min_separation is not None:
        bound = timer_participation(timeline, 9_000.0)
        assert bound.min_separation <= population.observed_min_separation
        assert bound.max_participations >= population.observed_max_participations


@pytest.mark.parametrize(
    "make",
    [
        lambda: ParticipationRule(),
        lambda: ParticipationRule(timer_seconds=0.0),
        lambda: ParticipationRule(min_separation=0),
        lambda: ParticipationRule(min_separation=2, max_participations=0),
        lambda: Availability(plugged_in_hour=24.0),
        lambda: Availability(idle_probability=0.0),
        lambda: Availability(unmetered_probability=1.5),
        lambda: Availability(plugged_in_hours=-1.0),
        lambda: Availability(max_wait_seconds=-1.0),
        lambda: Population(0, TIMER),
        lambda: Population(5, TIMER, misbehaving_fraction=1.0),
        lambda: Population(5, TIMER, seed=-1),
        lambda: Population(5, TIMER).next_cohort(0),
    ],
)
def test_invalid_arguments_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_invited_clients_remember_a_round_whether_they_came_or_not():
    rule = ParticipationRule(min_separation=3, max_participations=2)
    population = Population(200, rule, seed=8, dropout_fraction=0.5)
    sizes, taken = [], np.zeros(200, dtype=int)
    for _ in range(9):
        before = population._participations.copy()
        cohort = population.next_cohort(10, over_selection=1.6)
        invited = np.flatnonzero(population._participations > before)
        assert set(cohort.clients) <= set(invited)
        assert cohort.dropped == 16 - len(cohort.clients)
        taken[invited] += 1
        sizes.append(len(cohort.clients))
    assert taken.max() == 2
    assert population.observed_min_separation >= 3
    assert max(sizes) <= 10
    assert min(sizes) < 10


def test_a_discarded_round_is_repeated_by_others_and_counts_as_no_second_one():
    population = Population(60, ParticipationRule(min_separation=2), seed=9, dropout_fraction=0.3)
    first = population.next_cohort(10)
    population.discard(first)
    second = population.next_cohort(10)
    assert (second.round, second.attempt) == (first.round, 1)
    assert not set(first.clients) & set(second.clients)
    third = population.next_cohort(10)
    assert (third.round, third.attempt) == (1, 0)
    assert not {*first.clients, *second.clients} & set(third.clients)


def test_clients_that_fail_make_a_round_wait_until_its_timeout():
    population = Population(60, ParticipationRule(min_separation=2), dropout_fraction=0.9)
    cohort = population.next_cohort(10, timeout_seconds=600.0)
    assert len(cohort.clients) < 10
    assert (cohort.end - cohort.start, population.clock) == (600.0, 600.0)
