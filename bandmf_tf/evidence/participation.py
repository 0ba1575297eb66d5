"""What units really did in a training run: separation, participations, rounds, and how we know.

An `ObservedParticipation` is what `logs.py` finds in a log, what `timers.py` derives from a timer,
and what a report turns into a guarantee. Nothing in it identifies a client.

Conventions. Rounds count from 0, as the rows of the strategy do. The min-separation is the paper's
`b = r2 - r1`, for rounds r1 < r2 of one unit. A unit that contributes several times to *one* round
(`max_contributions_per_round`, m) has a contribution of up to m clip norms in that round; its
participations and separations count distinct rounds, and sensitivities are multiplied by m.
"""

from __future__ import annotations

import dataclasses
import math

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs.basis import Basis


class ParticipationError(BandMFError):
    """What is known of a run does not bound how units took part in it."""


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """Where and when an extreme value occurred, first of all.

    Attributes:
      first_round: The first round of the participations in question.
      last_round: The last round of them.
      count: How often the extreme value occurs: pairs of participations, or units. None if unknown.
      first_time: Start of `first_round` in UTC, where a ledger tells it.
      last_time: End of `last_round` in UTC, where a ledger tells it.
    """

    first_round: int
    last_round: int
    count: int | None = None
    first_time: str | None = None
    last_time: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedParticipation:
    """How units took part in the rounds that were completed.

    Attributes:
      source: What this was found from, in words.
      rounds_completed: Number of rounds t whose results were released.
      min_separation: Smallest r2 - r1 of one unit; None if no unit took part in two rounds.
      max_participations: Largest number of rounds of one unit, k'.
      max_contributions_per_round: Largest number of contributions of one unit to one round, m.
      rounds_completed_basis: How `rounds_completed` is known.
      min_separation_basis: How `min_separation` is known.
      max_participations_basis: How `max_participations` is known.
      num_units: Units that took part, if known.
      num_contributions: Contributions in all, if known.
      separations: How many pairs of successive participations have which separation.
      participations: How many units took part how often.
      contributions_by_round: Contributions to rounds 0, 1, ..; empty if unknown.
      closest: Where the smallest separation occurred.
      most_active: Where the largest number of participations occurred.
      missing_rounds: Completed rounds without any row in a log.
      separation_multiple: All separations are multiples of this number, where that is known without
        seeing them: the number of parts of a cyclic sampling scheme.
      cautions: What a reader must know about the values, in sentences.
    """

    source: str
    rounds_completed: int
    min_separation: int | None
    max_participations: int
    max_contributions_per_round: int = 1
    rounds_completed_basis: Basis
    min_separation_basis: Basis
    max_participations_basis: Basis
    num_units: int | None = None
    num_contributions: int | None = None
    separations: dict[int, int] = dataclasses.field(default_factory=dict)
    participations: dict[int, int] = dataclasses.field(default_factory=dict)
    contributions_by_round: tuple[int, ...] = ()
    closest: Occurrence | None = None
    most_active: Occurrence | None = None
    missing_rounds: int = 0
    separation_multiple: int | None = None
    cautions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        t = _checks.positive_int("rounds_completed", self.rounds_completed)
        k = _checks.positive_int("max_participations", self.max_participations)
        _checks.positive_int("max_contributions_per_round", self.max_contributions_per_round)
        if self.min_separation is None:
            if k != 1:
                raise ParticipationError(
                    f"min_separation is missing, and a unit with up to {k} participations needs "
                    "one; give it or a participation log."
                )
            return
        _checks.positive_int("min_separation", self.min_separation)
        # No more rounds than the separation leaves room for.
        object.__setattr__(self, "max_participations", min(k, ceil_div(t, self.min_separation)))

    @property
    def units_were_seen(self) -> bool:
        """Whether this is what units did, from a record of them, and not what they could do."""
        return bool(self.participations)

    @property
    def separation_stride(self) -> int | None:
        """A number that divides all separations, the largest that is known; None if unknown."""
        if self.separations:
            # Who states how far apart units were at least does not state that it was a multiple.
            is_stated = self.min_separation_basis is Basis.ASSUMED
            return None if is_stated else math.gcd(*self.separations)
        multiple = self.separation_multiple
        return multiple if multiple == self.min_separation else None

    def by_its_own_word(self, planned_rounds: int) -> ObservedParticipation:
        """Returns the same as a record says it that was compared with nothing outside of it.

        Nothing is then enforced, and that no round followed its last one, though more were planned,
        is assumed: whoever cuts a record off, or invents it, says the same.
        """

        def told(basis: Basis) -> Basis:
            return Basis.ASSUMED if basis is Basis.ENFORCED else basis

        return dataclasses.replace(
            self,
            min_separation_basis=told(self.min_separation_basis),
            max_participations_basis=told(self.max_participations_basis),
            rounds_completed_basis=(
                Basis.ASSUMED
                if self.rounds_completed < planned_rounds
                else self.rounds_completed_basis
            ),
        )

    def describe(self) -> str:
        """Returns the participation in words."""
        if self.min_separation is None or self.max_participations == 1:
            text = f"every unit took part in at most one of {self.rounds_completed} rounds"
        else:
            text = (
                f"every unit took part in at most {self.max_participations} of "
                f"{self.rounds_completed} rounds, at least {self.min_separation} apart"
            )
        if self.max_contributions_per_round > 1:
            text += f", up to {self.max_contributions_per_round} times in one round"
        return text


def stated_participation(
    rounds_completed: int, min_separation: int | None, max_participations: int | None
) -> ObservedParticipation:
    """Returns a participation that somebody states, without evidence.

    Raises:
      ParticipationError: The statement leaves open how often a unit took part.
    """
    t = _checks.positive_int("rounds_completed", rounds_completed)
    if max_participations is None:
        allowed = (
            ""
            if min_separation is None
            else f"; a separation of {min_separation} alone allows {ceil_div(t, min_separation)}"
        )
        raise ParticipationError(
            "max_participations, the cap on the rounds of one unit, is missing; give it or a "
            f"participation log{allowed}."
        )
    k = _checks.positive_int("max_participations", max_participations)
    return ObservedParticipation(
        source="limits that were stated without evidence",
        rounds_completed=t,
        min_separation=min_separation,
        max_participations=k,
        rounds_completed_basis=Basis.ASSUMED,
        min_separation_basis=Basis.ASSUMED,
        max_participations_basis=Basis.ASSUMED,
    )


def worse_of(ledger: ObservedParticipation, log: ObservedParticipation) -> ObservedParticipation:
    """Returns the worse of what a ledger and a log beside it say, value by value.

    A log never improves on a ledger. Where the ledger names clients, the two must say the same, and
    a caution says where they do not; where it knows a timer or limits, a log may only be better.
    """
    separations = [b for b in (ledger.min_separation, log.min_separation) if b is not None]
    b = min(separations, default=None)
    k = max(ledger.max_participations, log.max_participations)
    m = max(ledger.max_contributions_per_round, log.max_contributions_per_round)
    seen = ledger.units_were_seen
    is_worse = (b, k, m) != (
        ledger.min_separation,
        ledger.max_participations,
        ledger.max_contributions_per_round,
    )
    differ = seen and (ledger.separations, ledger.participations, ledger.num_contributions) != (
        log.separations,
        log.participations,
        log.num_contributions,
    )
    cautions = [*ledger.cautions, *(text for text in log.cautions if text not in ledger.cautions)]
    if is_worse or differ:
        cautions.insert(
            0,
            f"The log contradicts the ledger: by the log {log.describe()}, by {ledger.source} "
            f"{ledger.describe()}; the worse of each value is stated.",
        )
    elif not seen:
        cautions.append(
            f"By the log {log.describe()}; a log does not improve on the ledger, by which "
            f"{ledger.describe()}."
        )

    def basis(name: str) -> Basis:
        bases = (getattr(ledger, f"{name}_basis"), getattr(log, f"{name}_basis"))
        if Basis.ASSUMED in bases:
            return Basis.ASSUMED
        return bases[int(getattr(ledger, name) != (b if name == "min_separation" else k))]

    return dataclasses.replace(
        ledger,
        source=f"{ledger.source}, and {log.source}",
        min_separation=b,
        max_participations=k,
        max_contributions_per_round=m,
        min_separation_basis=basis("min_separation"),
        max_participations_basis=basis("max_participations"),
        num_units=ledger.num_units or log.num_units,
        num_contributions=ledger.num_contributions or log.num_contributions,
        # Those of a log say nothing of what a timer allows.
        separations=_larger_cells(ledger.separations, log.separations) if seen else {},
        participations=_larger_cells(ledger.participations, log.participations),
        closest=ledger.closest if b == ledger.min_separation else log.closest,
        most_active=ledger.most_active if k == ledger.max_participations else log.most_active,
        cautions=tuple(cautions),
    )


def _larger_cells(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    cells = sorted(first.keys() | second.keys())
    return {cell: max(first.get(cell, 0), second.get(cell, 0)) for cell in cells}


def with_stated_limits(
    observed: ObservedParticipation,
    min_separation: int | None,
    max_participations: int | None,
    *,
    cap_may_bind: bool = False,
) -> ObservedParticipation:
    """Returns the weaker of what the evidence shows and what is stated, value by value.

    A stated limit never makes a guarantee look better than the evidence does; where the evidence is
    worse than the statement, a caution says so.

    Args:
      observed: What the evidence shows.
      min_separation: A stated limit.
      max_participations: A stated limit.
      cap_may_bind: Whether the evidence leaves room for a cap on participations, as a timer does:
        it bounds how close they are, and only thereby how many. A smaller `max_participations` is
        then taken as an assumption.
    """
    cautions = list(observed.cautions)
    did = "took" if observed.units_were_seen else "can have taken"
    b, k = observed.min_separation, observed.max_participations
    b_basis, k_basis = observed.min_separation_basis, observed.max_participations_basis
    if min_separation is not None:
        _checks.positive_int("min_separation", min_separation)
        if b is None or min_separation < b:
            b, b_basis = min_separation, Basis.ASSUMED
        elif b < min_separation:
            cautions.append(
                f"min_separation={min_separation} was stated and a unit {did} part {b} rounds "
                f"apart; the guarantee is for {b}."
            )
    if max_participations is not None and b is not None:
        _checks.positive_int("max_participations", max_participations)
        if max_participations < k and cap_may_bind:
            cautions.append(
                f"max_participations={max_participations} was stated without evidence and is "
                f"assumed; by the evidence alone a unit can have taken part in {k} rounds, for "
                "which the guarantee is weaker."
            )
            k, k_basis = max_participations, Basis.ASSUMED
        elif max_participations < k:
            cautions.append(
                f"max_participations={max_participations} was stated and a unit {did} part in {k} "
                f"rounds; the guarantee is for {k}."
            )
        elif min(max_participations, ceil_div(observed.rounds_completed, b)) > k:
            k, k_basis = max_participations, Basis.ASSUMED
    return dataclasses.replace(
        observed,
        min_separation=b,
        max_participations=k,
        min_separation_basis=b_basis,
        max_participations_basis=k_basis,
        cautions=tuple(cautions),
    )
