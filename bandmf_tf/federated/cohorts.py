"""Where a training program has its clients from: one interface, and cohorts of a registry.

A `CohortSource` gives a program its rounds: `select` says who came, with their data, and `count`,
before the round is committed, who of them is in the sum. The simulated population is one
(`simulation/clients.py`), a participation registry another (`RegisteredClients`), and
`DataSourceCohorts` makes one of any data source of TFF.

`RegisteredClients` is also a `tff.program.FederatedDataSource`. Behind it stands anything that
names clients: a list, what `select` of a `tff.program.ClientIdDataSource` returns, devices that
check in, or a simulated population.

A selection is a round as in the field: more clients are invited than wanted, their data are asked
for at the same time, whoever fails or is too late is dropped, and the round goes on with those who
came. Who is handed to TFF has arrived, durably, before `select` returns, because anything of it
can be in the sum from then on. If too few came nothing was handed to anybody: the round is
discarded, and all of them may be asked again.

The iterator's position is the number of the round: it belongs into the state of the program, where
TFF's programs keep it. To select again from the same position, as they do when a round has failed,
is another attempt at that round, for which nobody is admitted who was in the first. A round is
counted when the next one is selected, or by `RegisteredClients.count`; the position says of which
attempt, so that a program whose round another one has begun again goes no further with its own.

A program that is killed before its state is saved comes back at an earlier position than the
registry's. With `private_learning_process(.., registry=registry)`, which has noise of its own for
every attempt, it goes on with the registry's next round, and the rounds that it has lost are
counted; without, it is refused.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._provenance import exact_now
from bandmf_tf.errors import BandMFError
from bandmf_tf.federated.runtime import tff
from bandmf_tf.runs.ledger import (
    CLOCK_REAL,
    FLAG_DROPPED_CLIENTS,
    FLAG_EARLIER_ATTEMPTS,
)
from bandmf_tf.runs.registry import ParticipationRegistry, RegistryError, RegistryRound

# Clients whose data are asked for at the same time.
_THREADS = 16

# Where iterators that TFF has stored come back to, by the identity of the registry.
_SOURCES: weakref.WeakValueDictionary[str, RegisteredClients] = weakref.WeakValueDictionary()


class TooFewClientsError(RegistryError):
    """An attempt at a round was discarded for want of clients; the round can be selected again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohortRule:
    """How a round gets its clients.

    Attributes:
      over_selection: So many times as many clients are invited as are wanted, at least 1.
      minimum: If fewer clients come there is no round. Whose data turn out to be unusable later is
        left out and has come: that a round is given up must not depend on anybody's data.
      timeout_seconds: After this time the round goes on with those who have arrived; None to wait.
    """

    over_selection: float = 1.0
    minimum: int = 1
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        if _checks.positive_float("over_selection", self.over_selection) < 1.0:
            raise BandMFError(f"over_selection must be at least 1. Found {self.over_selection}.")
        _checks.positive_int("minimum", self.minimum)
        if self.timeout_seconds is not None:
            _checks.positive_float("timeout_seconds", self.timeout_seconds)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The clients that came to a round. From now on, anything of them can be in its sum.

    Attributes:
      clients: Their identifiers.
      data: What each of them brought, in the same order.
      start: When the first of them could join, as in the ledger.
      end: When the last of them could.
      flags: What else happened, as in the ledger; entries may be zero.
    """

    clients: Sequence[str]
    data: Sequence[Any]
    start: str
    end: str
    flags: Mapping[str, int] = dataclasses.field(default_factory=dict)


class CohortSource(abc.ABC):
    """Gives a training program the clients of its rounds.

    A program selects `TrainingRun.next_round`, computes, counts, and commits the round. A crash
    before the commit means that the same round is selected again, from the state of the last
    checkpoint; so what a source keeps elsewhere must bear that a round was selected, or counted,
    and never released.

    Attributes:
      clock: Whose time `Selection` tells, as in the ledger.
      timer_seconds: How long clients stay away after they took part, by their own clocks; None if
        they keep no timer.
      min_separation: How many rounds the source keeps clients apart; None if it does not.
      max_participations: How often it lets one take part; None if it does not count.
      observed_min_separation: The smallest separation so far, if it is known.
    """

    clock: str = CLOCK_REAL
    timer_seconds: float | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    observed_min_separation: int | None = None

    @abc.abstractmethod
    def select(self, number: int, wanted: int) -> Selection:
        """Returns the clients of a round, `wanted` at most.

        Raises:
          TooFewClientsError: Fewer came than there must be. Nothing may be computed of them; the
            same round can be selected again.
        """

    @abc.abstractmethod
    def count(self, left_out: Sequence[str] = ()) -> None:
        """Counts the round that was selected last, before it is committed.

        Args:
          left_out: Who came and is not in the sum.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Returns what belongs into the checkpoint of a round, beside what is kept elsewhere."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from `state()`."""
        del state  # Nothing is in it.


class DataSourceCohorts(CohortSource):
    """The cohorts of any data source of TFF, whose clients keep to their timers, or do not.

    Nobody's identifier is known, so the ledger has numbers of participants only.

    Args:
      source: The data source; its iterator is stored with the state of the program.
      minimum: If fewer clients come there is no round.
      timer_seconds: The timer that these clients keep; None if they keep none.
    """

    def __init__(
        self,
        source: tff.program.FederatedDataSource,
        minimum: int = 1,
        timer_seconds: float | None = None,
    ):
        self._iterator = source.iterator()
        self._minimum = minimum
        self._attempts = (-1, 0)  # A round, and how many attempts at it were begun.
        self.timer_seconds = timer_seconds
        self.state()  # An iterator that cannot be stored fails now, not after the first round.

    def select(self, number: int, wanted: int) -> Selection:
        """Returns the clients of a round, under names that say nothing."""
        earlier = self._attempts[1] if self._attempts[0] == number else 0
        self._attempts = (number, earlier + 1)
        start = exact_now()
        data = self._iterator.select(wanted)
        if not isinstance(data, list | tuple):
            raise BandMFError(
                "A data source of the training program selects a list, one entry a client. Found "
                f"{type(data).__name__}."
            )
        require_clients(number, len(data), self._minimum)
        names = [f"unnamed {position}" for position in range(len(data))]
        return Selection(names, data, start, exact_now(), {FLAG_EARLIER_ATTEMPTS: earlier})

    def count(self, left_out: Sequence[str] = ()) -> None:
        """Does nothing: nobody keeps who took part, but clients themselves."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns where the iterator is."""
        return {"iterator": np.frombuffer(self._iterator.to_bytes(), np.uint8)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from `state()`."""
        self._iterator = type(self._iterator).from_bytes(state["iterator"].tobytes())


class RegisteredClients(tff.program.FederatedDataSource, CohortSource):
    """Clients of a registry, with their data.

    Args:
      registry: Decides who may take part, and keeps it.
      client_ids: All clients, of whom those of a round are drawn at random, or a function from how
        many are wanted to those who can be reached now. How they are drawn does not matter for the
        guarantee.
      client_dataset: Returns the data of a client; may fail, or take its time.
      element_spec: The type of the elements of these data, as of `tf.data.Dataset`.
      rule: How a round gets its clients.
    """

    def __init__(
        self,
        registry: ParticipationRegistry,
        client_ids: Sequence[str] | Callable[[int], Iterable[str]],
        client_dataset: Callable[[str], Any],
        element_spec: Any,
        rule: CohortRule | None = None,
    ):
        self._registry = registry
        self._reachable = client_ids if callable(client_ids) else _shuffled(client_ids)
        self._client_dataset = client_dataset
        self._rule = rule or CohortRule()
        self._selected: RegistryRound | None = None
        self._invited = 0
        self.min_separation = registry.min_separation
        self.max_participations = registry.max_participations
        self._type = tff.FederatedType(
            tff.SequenceType(tff.types.tensorflow_to_type(element_spec)), tff.CLIENTS
        )
        _SOURCES[registry.identity] = self

    @classmethod
    def of_client_data(
        cls, registry: ParticipationRegistry, client_data: Any, rule: CohortRule | None = None
    ) -> RegisteredClients:
        """Returns the clients of a `tff.simulation.datasets.ClientData`."""
        return cls(
            registry,
            client_data.client_ids,
            client_data.create_tf_dataset_for_client,
            client_data.element_type_structure,
            rule,
        )

    @property
    def federated_type(self) -> tff.FederatedType:
        return self._type

    def iterator(self) -> RegisteredClientsIterator:
        return RegisteredClientsIterator(self, 0)

    def count(self, left_out: Sequence[str] = ()) -> None:
        """Counts the round that was selected last, if it was not; for the last one of a run.

        Args:
          left_out: Who came and is not in the sum; they stay charged.

        Raises:
          RegistryError: Another program has begun the round again; do not release it.
        """
        if self._selected is not None:
            if left_out:
                self._selected.dropped(left_out)
            self._selected.count_once()
        elif (attempt := self._registry.open_attempt) is not None:  # Selected before a restart.
            attempt.count()

    def select(self, number: int, wanted: int) -> Selection:
        """Returns the clients of a round of a program that counts each before it commits it."""
        start = exact_now()
        attempt, data = self._begin(number, wanted)
        flags = {
            FLAG_EARLIER_ATTEMPTS: attempt.attempt,
            FLAG_DROPPED_CLIENTS: self._invited - len(data),
        }
        return Selection(list(data), list(data.values()), start, exact_now(), flags)

    def select_round(
        self, number: int, wanted: int, previous: int | None = None
    ) -> tuple[list[Any], RegistryRound]:
        """Returns the data of the clients of a round, and which attempt at which round this is.

        Args:
          number: The round; a later one is begun if the program was put back and its noise was not.
          wanted: How many clients are wanted.
          previous: The attempt at the round before whose result the program goes on with; None if
            it does not know.

        Raises:
          RegistryError: There are too few, or the round before is another program's.
        """
        if previous is not None:
            RegistryRound(self._registry, number - 1, previous).count_once()
        elif (found := self._registry.open_attempt) is not None and found.number == number - 1:
            self.count()
        attempt, data = self._begin(number, wanted)
        return list(data.values()), attempt

    def _begin(self, number: int, wanted: int) -> tuple[RegistryRound, dict[str, Any]]:
        """Begins a round, and returns who has arrived, durably, with their data."""
        self._selected = None
        attempt = self._registry.begin_round(number)
        most = math.ceil(wanted * self._rule.over_selection)
        invited = attempt.invite(self._reachable(most), most)
        data = self._gather(invited, wanted)
        attempt.dropped(client for client in invited if client not in data)
        if len(data) < self._rule.minimum:
            attempt.discard()
        require_clients(attempt.number, len(data), self._rule.minimum)
        data = {client: data[client] for client in attempt.arrived(data)}
        self._selected, self._invited = attempt, len(invited)
        return attempt, data

    def _gather(self, invited: Sequence[str], wanted: int) -> dict[str, Any]:
        """Returns the data of those who come first, and in time."""
        found: dict[str, Any] = {}
        answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        waiting, over = iter(invited), threading.Event()
        one_at_a_time = threading.Lock()

        def ask() -> None:
            while not over.is_set():
                with one_at_a_time:
                    client = next(waiting, None)
                if client is None:
                    return
                try:
                    answers.put((client, self._client_dataset(client)))
                except BaseException:  # Whatever it says may quote the client's data.
                    answers.put((client, None))

        # Not a pool: Python would wait at its end for clients that never answer.
        for _ in range(min(len(invited), _THREADS)):
            threading.Thread(target=ask, daemon=True).start()
        seconds = self._rule.timeout_seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        for _ in invited:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                client, dataset = answers.get(timeout=left)
            except queue.Empty:
                break
            if dataset is not None:
                found[client] = dataset
            if len(found) == wanted:
                break
        over.set()
        return found


class RegisteredClientsIterator(tff.program.FederatedDataSourceIterator):
    """The rounds of `RegisteredClients`, from a number on. Copies go on independently."""

    def __init__(self, source: RegisteredClients, number: int, previous: int | None = None):
        self._source = source
        self._number = number
        self._previous = previous  # The attempt at the round before.

    @classmethod
    def from_bytes(cls, buffer: bytes) -> RegisteredClientsIterator:
        identity, *numbers = buffer.decode().split(" ")
        if identity not in _SOURCES:
            raise RegistryError(
                "The stored iterator belongs to a registry that this program has not started; make "
                "its RegisteredClients first."
            )
        return cls(_SOURCES[identity], *map(int, numbers))

    def to_bytes(self) -> bytes:
        attempt = "" if self._previous is None else f" {self._previous}"
        return f"{self._source._registry.identity} {self._number}{attempt}".encode()

    @property
    def federated_type(self) -> tff.FederatedType:
        return self._source.federated_type

    def select(self, k: int | None = None) -> list[Any]:
        """Returns the data of up to `k` clients that were admitted to the next round."""
        k = _checks.positive_int("k", k)
        data, attempt = self._source.select_round(self._number, k, self._previous)
        self._number, self._previous = attempt.number + 1, attempt.attempt
        return data

    def __deepcopy__(self, memo: object) -> RegisteredClientsIterator:
        return RegisteredClientsIterator(self._source, self._number, self._previous)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RegisteredClientsIterator):
            return NotImplemented
        return self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]


def _shuffled(client_ids: Sequence[str]) -> Callable[[int], Iterable[str]]:
    """Returns a function that yields all clients in an order of chance."""
    draw = random.SystemRandom()

    def reachable(wanted: int) -> Iterable[str]:
        del wanted  # Whoever may not take part is passed over, so more may be looked at.
        remaining = list(range(len(client_ids)))
        while remaining:
            position = draw.randrange(len(remaining))
            remaining[position], remaining[-1] = remaining[-1], remaining[position]
            yield client_ids[remaining.pop()]

    return reachable


def require_clients(number: int, found: int, minimum: int) -> None:
    """Raises TooFewClientsError if a round has fewer clients than it must have."""
    if found < minimum:
        raise TooFewClientsError(
            f"Round {number} needs at least {minimum} clients and {found} came; nothing of them "
            "is released, select the round again."
        )
