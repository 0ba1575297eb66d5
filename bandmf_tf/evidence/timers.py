"""Participation that a timer on the clients guarantees, from the times at which rounds were open.

Where no identities exist, nobody can look up how far apart a client's rounds were. What is known is
when each round was open to clients, and that a client which joined at time x does not join again
before x + T, T being the period of its timer. The worst case over all clients that keep to that:

    round r1 |------------|                 A client joins as early as possible in r1
             x <--------- T --------->      and as late as possible in r2, so the rounds
                           r2 |------------|    can follow each other iff
                                     x + T <= end of r2,   x = start of r1.

So the smallest separation is the smallest |r2 - r1| with `end[r2] - start[r1] >= T`, over both
orders (rounds may overlap, then the later-numbered one may be joined first). The same with r1 = r2
says how often a client can contribute to one round that stays open for longer than T. The largest
number of contributions is found by joining as early as possible every time: whoever joins later
can never join more often. Times that do not advance are those of a clock that stands still; what
follows from them is assumed.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import decimal
import io
import math
import os
from pathlib import Path

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly
from bandmf_tf._provenance import format_time, parse_time
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence.logs import CLIENT_COLUMNS
from bandmf_tf.evidence.participation import ObservedParticipation, Occurrence, ParticipationError
from bandmf_tf.evidence.reader import Evidence, ReportError, Run
from bandmf_tf.runs.basis import Basis

KIND = "timeline"

TIMER_CAUTION = (
    "The guarantee is for clients that keep to their timer and whose clocks run right. A client "
    "that does not keep to it weakens its own guarantee and nobody else's."
)

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_LARGEST_SECONDS = 50_000_000_000  # Sixteen centuries: a date, and microseconds in 64 bits.


@dataclasses.dataclass(frozen=True)
class RoundTimeline:
    """When each round was open to clients, in integer microseconds since any fixed moment.

    Attributes:
      starts: When the first client could join, round by round, not decreasing.
      ends: When the last client could join, round by round.
      contributions: How many clients contributed, round by round; empty if unknown.
    """

    starts: np.ndarray
    ends: np.ndarray
    contributions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        starts, ends = (np.asarray(times, dtype=np.int64) for times in (self.starts, self.ends))
        if starts.ndim != 1 or starts.shape != ends.shape or starts.size == 0:
            raise ParticipationError(
                f"a timeline needs a start and an end for each of its rounds. Found {starts.size} "
                f"starts and {ends.size} ends."
            )
        if np.any(ends < starts) or np.any(np.diff(starts) < 0):
            raise ParticipationError(
                "rounds must start in the order of their numbers and end after they start."
            )
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "ends", ends)

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return self.starts.size

    def times(self, first_round: int, last_round: int) -> tuple[str, str]:
        """Returns the start of the one and the end of the other round, as a ledger writes them."""
        times = (int(self.starts[first_round]), int(self.ends[last_round]))
        first, last = (format_time(_EPOCH + time * _MICROSECOND) for time in times)
        return first, last


def supports(path: Path) -> bool:
    """Whether the file is a timeline of rounds: CSV with their times and without clients."""
    if path.suffix.lower() != ".csv":
        return False
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        columns = next(csv.reader([line.decode("utf-8-sig").strip()]), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    clients = {*CLIENT_COLUMNS} & {column.strip().lower() for column in columns}
    return {"round", "start", "end"} <= set(columns) and not clients


def read(path: Path, run: Run) -> Evidence:
    """Returns what the times of the rounds and the timer of the request allowed clients."""
    timeline = read_round_timeline(path)
    timer = run.request.timer_seconds
    if timer is None:
        raise ParticipationError(
            "a timeline of rounds bounds the separation only together with timer_seconds, the "
            "period of the clients' timer."
        )
    run.check_rounds(timeline.num_rounds, KIND)
    if timeline.num_rounds > run.mechanism.num_rounds:
        raise ReportError(
            f"The timeline has {timeline.num_rounds} rounds, more than the "
            f"num_rounds={run.mechanism.num_rounds} of the mechanism; it is not of this run."
        )
    observed = timer_participation(timeline, timer, Basis.ASSUMED)
    t, n = timeline.num_rounds, run.mechanism.num_rounds
    if t < n:
        caution = (
            f"The timeline ends after {t} of {n} planned rounds, and that training ended there is "
            "taken from it alone. If more rounds were completed, give all of them."
        )
        observed = dataclasses.replace(
            observed,
            rounds_completed_basis=Basis.ASSUMED,
            cautions=(*observed.cautions, caution),
        )
    observed = run.limited(observed, cap_may_bind=True)
    return Evidence(
        run=run.with_file(KIND, path),
        observed=observed,
        timer_seconds=timer,
        timer_seconds_basis=Basis.ASSUMED,
    )


def timer_participation(
    timeline: RoundTimeline, timer_seconds: float, basis: Basis = Basis.ASSUMED
) -> ObservedParticipation:
    """Returns the worst participation of any client that keeps to its timer.

    O(n b) operations for a smallest separation of b.

    Args:
      timeline: When rounds were open.
      timer_seconds: Period of the timer.
      basis: How it is known that clients keep one: enforced by the ledger's word, or assumed.
    """
    timer, period = timer_microseconds(timer_seconds), exactly(timer_seconds)
    closest = _closest_rounds(timeline, timer)
    joins = _earliest_joins(timeline, timer)
    t = timeline.num_rounds
    open_longest = int((timeline.ends - timeline.starts).max())
    first, last = min(joins), max(joins)
    cautions = [TIMER_CAUTION]
    length = int(timeline.ends.max() - timeline.starts[0])
    if np.any(np.diff(timeline.starts) == 0) or open_longest == 0:
        basis = Basis.ASSUMED
        cautions.append(
            "By their times, rounds followed each other without any time between them, as where a "
            "clock stands still; that the times are right is assumed."
        )
    elif closest is None and t > 1:
        cautions.append(
            f"By their times, all {t} rounds took {length / 1e6:g} seconds, less than the timer; "
            "if that is not so, clients took part more often."
        )
    per_round = open_longest // timer + 1
    if per_round > 1:
        cautions.append(
            f"A round was open for {open_longest / 1e6:g} seconds, longer than the timer of "
            f"{period}: a client could contribute {per_round} times to it, so the "
            "sensitivity is that many times as large."
        )
    return ObservedParticipation(
        source=f"times of {t} rounds and a timer of {period} seconds on the clients",
        rounds_completed=t,
        min_separation=None if closest is None else closest.last_round - closest.first_round,
        # One contribution at least, and no more rounds than contributions.
        max_participations=1 if closest is None else min(len(joins), t),
        max_contributions_per_round=per_round,
        rounds_completed_basis=Basis.OBSERVED,
        min_separation_basis=basis,
        max_participations_basis=basis,
        num_contributions=sum(timeline.contributions) if timeline.contributions else None,
        contributions_by_round=timeline.contributions,
        closest=closest,
        most_active=Occurrence(first, last, None, *timeline.times(first, last)),
        cautions=tuple(cautions),
    )


def _closest_rounds(timeline: RoundTimeline, timer: int) -> Occurrence | None:
    """Returns the first pair of rounds of the smallest separation that the timer allows."""
    starts, ends, n = timeline.starts, timeline.ends, timeline.num_rounds
    for gap in range(1, n):
        later = ends[gap:] - starts[:-gap] >= timer  # r1 first, then r1 + gap
        earlier = ends[:-gap] - starts[gap:] >= timer  # r1 + gap first, then r1, still open
        possible = np.flatnonzero(later | earlier)
        if possible.size:
            first = int(possible[0])
            times = timeline.times(first, first + gap)
            return Occurrence(first, first + gap, int(possible.size), *times)
    return None


def _earliest_joins(timeline: RoundTimeline, timer: int) -> list[int]:
    """Returns the rounds of a client that joins as early as it can, again and again.

    No more joins than there are rounds: how often one round can be joined is known without this.
    """
    starts = timeline.starts
    last_end = np.maximum.accumulate(timeline.ends)  # Latest end of the rounds up to each one.
    longest = timeline.ends.max()
    joins, time = [0], int(starts[0])
    while len(joins) < timeline.num_rounds:
        time += timer
        if time > longest:
            break
        started = int(np.searchsorted(starts, time, side="right"))  # Rounds started by then.
        if started and last_end[started - 1] >= time:
            open_rounds = np.flatnonzero(timeline.ends[:started] >= time)
            joins.append(int(open_rounds[-1]))
        else:  # Nothing is open: the next round to start.
            joins.append(started)
            time = int(starts[started])
    return joins


def read_round_timeline(path: str | os.PathLike[str]) -> RoundTimeline:
    """Returns the timeline in a CSV file with the columns round, start and end.

    Rounds are listed in order and without gaps, counted from 0 or from 1; times are as a ledger has
    them (2024-02-29T12:00:00.000000Z) or numbers of seconds. For systems without a ledger.

    Raises:
      ParticipationError: The file is not such a timeline.
    """
    try:
        data = Path(path).read_bytes()
        if not data.endswith((b"\n", b"\r")):
            raise ParticipationError("its last line has no end, so it may have been cut off")
        table = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        rows, names = list(table), [name.lower() for name in table.fieldnames or ()]
        if len(set(names)) < len(names):
            raise ParticipationError("two of its columns have the same name")
        if any(None in row or None in row.values() for row in rows):
            raise ParticipationError("a row has another number of columns than the header")
        numbers = [int(row["round"]) for row in rows]
        starts = [_parse_microseconds(row["start"], decimal.ROUND_FLOOR) for row in rows]
        ends = [_parse_microseconds(row["end"], decimal.ROUND_CEILING) for row in rows]
        if numbers not in (list(range(len(rows))), list(range(1, len(rows) + 1))):
            raise ParticipationError("its rounds are not 0, 1, .. or 1, 2, .. in order.")
        return RoundTimeline(np.array(starts, np.int64), np.array(ends, np.int64))
    except (csv.Error, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ParticipationError(
            f"{os.fspath(path)} is not a timeline of rounds with the columns round, start and end "
            f"({error})."
        ) from error


def _parse_microseconds(time: str, rounding: str) -> int:
    """Returns a time; those of rounds are rounded outwards, which allows clients more."""
    try:
        seconds = decimal.Decimal(time)
    except decimal.InvalidOperation:
        return microseconds(time)
    # Not abs, which rounds, and overflows where an exponent is enormous.
    if not seconds.is_finite() or seconds.copy_abs() > _LARGEST_SECONDS:
        raise BandMFError(f"{time[:40]!r} is not a time")
    scaled = decimal.Context(rounding=rounding).multiply(seconds, decimal.Decimal(1_000_000))
    return int(scaled.to_integral_value(rounding))


def timer_microseconds(timer_seconds: float) -> int:
    """Returns the period, rounded down: a shorter timer allows more."""
    exact = exactly(_checks.positive_float("timer_seconds", timer_seconds))
    timer = math.floor(decimal.Decimal(exact).scaleb(6))
    if timer < 1:
        raise ParticipationError(
            f"timer_seconds must be at least a microsecond. Found {timer_seconds}."
        )
    return timer


def microseconds(time: str) -> int:
    """Returns a time of a ledger in microseconds since 1970."""
    return (parse_time(time) - _EPOCH) // _MICROSECOND
