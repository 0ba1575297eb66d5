"""Which clients take part in which round: the clients' timer and a population with a daily rhythm.

In cross-device federated learning the server knows nobody. A *client* remembers when it last took
part and stays away until its timer allows the next time (`ParticipationRule`); it can be reached
only while it is plugged in, idle and on an unmetered network (`Availability`), mostly at night. The
timer runs in wall-clock time, rounds take as long as it takes to find enough clients, and so the
separation in rounds is only approximately what one wanted; the paper's production run planned 400
rounds and could bound the separation by 385. With `min_separation` the rule is kept in rounds
instead, strictly.

`Population` simulates such clients in simulated time, vectorised over clients: a round of 100,000
clients takes about a millisecond. Everything is a pure function of (seed, round, time, state): all
draws come from counter-based generators keyed by the seed, never from the global `random`, so a
population restored from `state()` goes on exactly as if it had not been interrupted.

Clients that misbehave ignore the rule. That can weaken their own guarantee only: the noise does not
depend on who takes part, and neighbouring data sets differ in one client. The cohort says how many
participants came too early, which the ledger records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bandmf_tf import _checks
from bandmf_tf.errors import BandMFError

DAY_SECONDS = 86_400.0
_HOUR_SECONDS = 3_600.0

# What a generator is for is part of its key, so that no two uses share random numbers.
_TRAITS, _DAY, _COHORT, _DROPPED = 1, 2, 3, 4

_NEVER = -1


@dataclasses.dataclass(frozen=True)
class ParticipationRule:
    """When a client that took part may take part again. All given limits hold together.

    Attributes:
      timer_seconds: At least so long after the start of the last round it took part in. None if
        there is no timer in wall-clock time.
      min_separation: At least so many rounds after the last one, `b = r2 - r1`. None if rounds are
        not counted.
      max_participations: At most so many times in all; None for no limit.
    """

    timer_seconds: float | None = None
    min_separation: int | None = None
    max_participations: int | None = None

    def __post_init__(self) -> None:
        if self.timer_seconds is None and self.min_separation is None:
            raise BandMFError(
                "A participation rule needs timer_seconds or min_separation; without either no "
                "guarantee better than that of min_separation=1 can be stated, ask for that."
            )
        if self.timer_seconds is not None:
            _checks.positive_float("timer_seconds", self.timer_seconds)
        for name in ("min_separation", "max_participations"):
            if getattr(self, name) is not None:
                _checks.positive_int(name, getattr(self, name))

    def allows(
        self,
        round_number: int,
        time: float,
        last_round: np.ndarray,
        last_time: np.ndarray,
        participations: np.ndarray,
    ) -> np.ndarray:
        """Returns for each client whether it may join, given what it remembers."""
        allowed = np.ones(last_round.shape, dtype=bool)
        if self.timer_seconds is not None:
            allowed &= time - last_time >= self.timer_seconds
        if self.min_separation is not None:
            allowed &= round_number - last_round >= self.min_separation
        allowed |= last_round == _NEVER
        if self.max_participations is not None:
            allowed &= participations < self.max_participations
        return allowed


@dataclasses.dataclass(frozen=True)
class Availability:
    """When clients can be reached, in simulated time.

    A client is eligible while it is plugged in, idle and on an unmetered network. It is plugged in
    once a day, around a local time of its own; on a share of the days it is not, or is not at
    home in its unmetered network, or is in use.

    Attributes:
      plugged_in_hour: Mean local hour at which a client is plugged in, in [0, 24).
      plugged_in_hour_stddev: Standard deviation of that hour, over clients and over days.
      plugged_in_hours: Mean number of hours for which it stays plugged in.
      plugged_in_hours_stddev: Standard deviation of that number, over clients and days.
      time_zone_hours: Clients' local times differ from UTC by a number drawn from 0 to this.
      idle_probability: A plugged-in client is idle on a given day with this probability.
      unmetered_probability: It is on an unmetered network on a given day with this probability.
      check_in_seconds: Mean time between two check-ins of an eligible client with the server.
      min_round_seconds: A round never takes less than this.
      max_wait_seconds: A round that has not found its clients by then goes ahead with fewer.
    """

    plugged_in_hour: float = 22.0
    plugged_in_hour_stddev: float = 1.5
    plugged_in_hours: float = 8.0
    plugged_in_hours_stddev: float = 1.5
    time_zone_hours: float = 3.0
    idle_probability: float = 0.8
    unmetered_probability: float = 0.85
    check_in_seconds: float = 1_800.0
    min_round_seconds: float = 60.0
    max_wait_seconds: float = DAY_SECONDS

    def __post_init__(self) -> None:
        if not 0.0 <= self.plugged_in_hour < 24.0:
            raise BandMFError(f"plugged_in_hour must be in [0, 24). Found {self.plugged_in_hour}.")
        for name in ("plugged_in_hours", "check_in_seconds", "min_round_seconds"):
            _checks.positive_float(name, getattr(self, name))
        for name in (
            "plugged_in_hour_stddev",
            "plugged_in_hours_stddev",
            "time_zone_hours",
            "max_wait_seconds",
        ):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0.0):
                raise BandMFError(f"{name} must not be negative. Found {value}.")
        for name in ("idle_probability", "unmetered_probability"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise BandMFError(f"{name} must be in (0, 1]. Found {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Cohort:
    """The clients of one round.

    Attributes:
      round: Number of the round, from 0.
      start: When the round started, in seconds of simulated time.
      end: When it had found its clients.
      clients: Their numbers, sorted.
      timer_violations: How many of them the rule did not allow to join.
      dropped: How many more were invited, and failed or were not needed.
      attempt: How many attempts at the round were discarded before.
    """

    round: int
    start: float
    end: float
    clients: np.ndarray
    timer_violations: int
    dropped: int = 0
    attempt: int = 0


class Population:
    """Clients with a memory, in simulated time.

    Args:
      num_clients: Size of the population.
      rule: When a client may join again.
      availability: When clients can be reached; None means always, and then every round takes
        `round_seconds`.
      seed: Seed of everything random here. No guarantee depends on its being secret.
      misbehaving_fraction: Share of the clients that ignore the rule.
      round_seconds: Duration of a round if clients can always be reached.
      dropout_fraction: Share of the invited clients of whom nothing comes.
    """

    def __init__(
        self,
        num_clients: int,
        rule: ParticipationRule,
        availability: Availability | None = None,
        *,
        seed: int = 0,
        misbehaving_fraction: float = 0.0,
        round_seconds: float = 60.0,
        dropout_fraction: float = 0.0,
    ):
        self._num_clients = _checks.positive_int("num_clients", num_clients)
        self._rule = rule
        self._availability = availability
        self._seed = _checks.int_at_least("seed", seed, 0)
        for name, fraction in (
            ("misbehaving_fraction", misbehaving_fraction),
            ("dropout_fraction", dropout_fraction),
        ):
            if not 0.0 <= fraction < 1.0:
                raise BandMFError(f"{name} must be in [0, 1). Found {fraction}.")
        self._dropout_fraction = dropout_fraction
        self._round_seconds = _checks.positive_float("round_seconds", round_seconds)
        traits = self._generator(_TRAITS)
        self._misbehaves = traits.random(num_clients) < misbehaving_fraction
        if availability is not None:
            zone = traits.uniform(0.0, availability.time_zone_hours, num_clients)
            habit = traits.normal(0.0, availability.plugged_in_hour_stddev / 2, num_clients)
            self._usual_hour = availability.plugged_in_hour - zone + habit
        self._misbehaving_fraction = misbehaving_fraction
        self._windows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._last_round = np.full(num_clients, _NEVER, dtype=np.int32)
        self._last_time = np.full(num_clients, -np.inf)
        self._participations = np.zeros(num_clients, dtype=np.int32)
        self._clock = 0.0
        self._round = 0
        self._discarded = (0, 0)  # A round, and its attempts that were discarded.
        # Smallest separations so far: of clients that keep the rule, and of all.
        self._separations = np.full(2, np.iinfo(np.int32).max, dtype=np.int32)

    @property
    def num_clients(self) -> int:
        """Size of the population."""
        return self._num_clients

    @property
    def next_round(self) -> int:
        """Number of the round that `next_cohort` returns."""
        return self._round

    @property
    def clock(self) -> float:
        """Seconds of simulated time that have passed."""
        return self._clock

    @property
    def observed_min_separation(self) -> int | None:
        """Smallest r2 - r1 of a client that keeps the rule; None if none took part twice."""
        return self._separation(0)

    @property
    def observed_min_separation_of_all(self) -> int | None:
        """The same over all clients, those that misbehave included."""
        return self._separation(1)

    @property
    def observed_max_participations(self) -> int:
        """Largest number of participations of a client that keeps the rule."""
        return int(self._participations[~self._misbehaves].max(initial=0))

    def next_cohort(
        self, clients_per_round: int, *, over_selection: float = 1.0, timeout_seconds: float = 0.0
    ) -> Cohort:
        """Chooses the clients of the next round, waiting for them in simulated time.

        The server takes whoever checks in, so a round lasts as long as it takes until
        `clients_per_round` clients have: the fewer are eligible, the longer. A round for which
        not enough clients turn up within `max_wait_seconds` goes ahead with those it has. Whoever
        is invited remembers it, also if nothing of it is needed or comes.

        Args:
          clients_per_round: How many clients are wanted.
          over_selection: So many times as many are invited.
          timeout_seconds: For so long a round waits for clients that fail.
        """
        wanted = _checks.positive_int("clients_per_round", clients_per_round)
        most = math.ceil(wanted * over_selection)
        start, eligible, allowed = self._wait(most)
        attempt = self._discarded[1] if self._discarded[0] == self._round else 0
        key = self._round + (attempt << 32)
        generator = self._generator(_COHORT, key)
        invited = np.flatnonzero(eligible)
        if invited.size > most:
            invited = np.sort(generator.choice(invited, most, replace=False))
        end = start + self._duration(int(np.count_nonzero(eligible)), invited.size)
        fails = self._generator(_DROPPED, key).random(invited.size) < self._dropout_fraction
        clients = invited[~fails]
        if clients.size > wanted:
            clients = np.sort(generator.choice(clients, wanted, replace=False))
        elif fails.any() and clients.size < wanted:
            end = max(end, start + timeout_seconds)
        cohort = Cohort(
            round=self._round,
            start=start,
            end=end,
            clients=clients,
            timer_violations=int(np.count_nonzero(~allowed[clients])),
            dropped=invited.size - clients.size,
            attempt=attempt,
        )
        self._remember(cohort, invited)
        return cohort

    def discard(self, cohort: Cohort) -> None:
        """Gives up the last cohort: the next one is another attempt at its round.

        Its clients remember that they took part all the same.
        """
        self._round, self._discarded = cohort.round, (cohort.round, cohort.attempt + 1)

    def eligible(self, time: float) -> np.ndarray:
        """Returns for each client whether it can be reached at `time`, whatever its timer says."""
        if self._availability is None:
            return np.ones(self._num_clients, dtype=bool)
        day = int(time // DAY_SECONDS)
        reachable = np.zeros(self._num_clients, dtype=bool)
        for earlier in (day - 1, day, day + 1):  # Evenings last into the next day.
            opening, closing = self._window(earlier)
            reachable |= (opening <= time) & (time < closing)
        return reachable

    def state(self) -> dict[str, np.ndarray]:
        """Returns all that the clients and the simulation remember, as arrays."""
        return {
            "configuration": np.array(self._configuration()),
            "last_round": self._last_round.copy(),
            "last_time": self._last_time.copy(),
            "participations": self._participations.copy(),
            "clock": np.array(self._clock),
            "round": np.array(self._round),
            "separations": self._separations.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state()` of a population with the same configuration."""
        found = str(state["configuration"])
        if found != self._configuration():
            raise BandMFError(
                "The saved population was configured differently; restart with the configuration "
                f"of the run. Found {found[:12]}, expected {self._configuration()[:12]}."
            )
        self._last_round = np.array(state["last_round"], dtype=np.int32)
        self._last_time = np.array(state["last_time"], dtype=np.float64)
        self._participations = np.array(state["participations"], dtype=np.int32)
        self._clock = float(state["clock"])
        self._round = int(state["round"])
        self._separations = np.array(state["separations"], dtype=np.int32)

    def _configuration(self) -> str:
        availability = self._availability
        fields = {
            "num_clients": self._num_clients,
            "rule": dataclasses.asdict(self._rule),
            "availability": None if availability is None else dataclasses.asdict(availability),
            "seed": self._seed,
            "misbehaving_fraction": self._misbehaving_fraction,
            "round_seconds": self._round_seconds,
        }
        if self._dropout_fraction:  # Version 0.1 had none.
            fields["dropout_fraction"] = self._dropout_fraction
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def _generator(self, use: int, counter: int = 0) -> np.random.Generator:
        # Days before the start have negative numbers; keys are unsigned.
        sequence = np.random.SeedSequence([self._seed, use, counter % 2**64])
        return np.random.Generator(np.random.Philox(sequence))

    def _window(self, day: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns when each client's eligibility of that day begins and ends, in seconds."""
        if day not in self._windows:
            self._windows = {key: self._windows[key] for key in self._windows if key >= day - 3}
            self._windows[day] = self._draw_window(day)
        return self._windows[day]

    def _draw_window(self, day: int) -> tuple[np.ndarray, np.ndarray]:
        availability = self._availability
        assert availability is not None
        draws, n = self._generator(_DAY, day), self._num_clients
        hour = self._usual_hour + draws.normal(0.0, availability.plugged_in_hour_stddev, n)
        hours = draws.normal(availability.plugged_in_hours, availability.plugged_in_hours_stddev, n)
        reached = draws.random(n) < availability.idle_probability
        reached &= draws.random(n) < availability.unmetered_probability
        opening = day * DAY_SECONDS + hour * _HOUR_SECONDS
        closing = opening + np.where(reached, np.clip(hours, 0.0, 24.0), 0.0) * _HOUR_SECONDS
        return opening, closing

    def _wait(self, wanted: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Lets time pass until enough clients are eligible; returns time, eligible, allowed."""
        longest = 0.0 if self._availability is None else self._availability.max_wait_seconds
        pause = 0.0 if self._availability is None else self._availability.check_in_seconds
        time, waited = self._clock, 0.0
        while True:
            allowed = self._rule.allows(
                self._round, time, self._last_round, self._last_time, self._participations
            )
            eligible = self.eligible(time) & (allowed | self._misbehaves)
            if np.count_nonzero(eligible) >= wanted or waited >= longest:
                return time, eligible, allowed
            wait = min(pause, longest - waited)
            time, waited = time + wait, waited + wait

    def _duration(self, num_eligible: int, num_chosen: int) -> float:
        if self._availability is None:
            return self._round_seconds
        rate = num_eligible / self._availability.check_in_seconds
        needed = num_chosen / rate if num_chosen else 0.0
        return max(self._availability.min_round_seconds, needed)

    def _remember(self, cohort: Cohort, invited: np.ndarray) -> None:
        # Who was in a discarded attempt at this round is in no sum of it yet.
        before = self._last_round[invited]
        again = invited[(before != _NEVER) & (before != cohort.round)]
        separation = cohort.round - self._last_round[again]
        for position, chosen in enumerate((~self._misbehaves[again], slice(None))):
            smallest = separation[chosen].min(initial=self._separations[position])
            self._separations[position] = smallest
        self._last_round[invited] = cohort.round
        self._last_time[invited] = cohort.start
        self._participations[invited] += 1
        self._round += 1
        self._clock = cohort.end

    def _separation(self, position: int) -> int | None:
        value = int(self._separations[position])
        return None if value == np.iinfo(np.int32).max else value
