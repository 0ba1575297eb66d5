"""Simulated clients as a source of cohorts: a `Population`, with the data of a task.

All happens in simulated time: whoever fails makes a round wait until its timeout, and an attempt
that too few clients came to is repeated with others, at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from bandmf_tf._provenance import format_time
from bandmf_tf.federated.cohorts import CohortRule, CohortSource, Selection, require_clients
from bandmf_tf.runs import ledger
from bandmf_tf.simulation.population import ParticipationRule, Population

# Simulated time begins here; a Monday, at midnight UTC.
_SIMULATION_START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


class SimulatedClients(CohortSource):
    """Cohorts of a simulated population.

    Args:
      population: Who can be reached, and keeps to the rule.
      participation: The rule that clients keep.
      client_dataset: From the number of a client to its data.
      rule: How a round gets its clients.
    """

    clock = ledger.CLOCK_SIMULATED

    def __init__(
        self,
        population: Population,
        participation: ParticipationRule,
        client_dataset: Callable[[int], Any],
        rule: CohortRule,
    ):
        self.population = population
        self._client_dataset = client_dataset
        self._rule = rule
        self.timer_seconds = participation.timer_seconds
        self.min_separation = participation.min_separation
        self.max_participations = participation.max_participations

    @property
    def observed_min_separation(self) -> int | None:  # type: ignore[override]
        """Smallest separation of a client that keeps the rule; None if none took part twice."""
        return self.population.observed_min_separation

    def select(self, number: int, wanted: int) -> Selection:
        """Returns the next cohort of the population, without those whose data cannot be read."""
        cohort = self.population.next_cohort(
            wanted,
            over_selection=self._rule.over_selection,
            timeout_seconds=self._rule.timeout_seconds or 0.0,
        )
        assert cohort.round == number
        if len(cohort.clients) < self._rule.minimum:
            self.population.discard(cohort)
        require_clients(number, len(cohort.clients), self._rule.minimum)
        data, kinds = {}, set()
        for client in map(int, cohort.clients):
            try:
                data[f"client {client}"] = self._client_dataset(client)
            except Exception as error:
                kinds.add(type(error).__name__)
        failed = len(cohort.clients) - len(data)
        if kinds:  # What clients' errors say may quote their data.
            kind = ", ".join(sorted(kinds))
            logging.warning(
                "round %d: data of %d clients cannot be read (%s)", number, failed, kind
            )
        flags = {
            ledger.FLAG_TIMER_VIOLATIONS: cohort.timer_violations,
            ledger.FLAG_FAILED_CLIENTS: failed,
            ledger.FLAG_DROPPED_CLIENTS: cohort.dropped,
            ledger.FLAG_EARLIER_ATTEMPTS: cohort.attempt,
        }
        start, end = _utc(cohort.start), _utc(cohort.end)
        return Selection(list(data), list(data.values()), start, end, flags)

    def count(self, left_out: Sequence[str] = ()) -> None:
        """Does nothing: clients have remembered that they took part."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns all that the clients and the simulation remember."""
        return self.population.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from `state()`."""
        self.population.restore(state)


def _utc(seconds: float) -> str:
    return format_time(_SIMULATION_START + datetime.timedelta(seconds=seconds))
