"""The counts that a participation log comes down to, whichever engine counts them.

`logs.py` counts on one machine, `tools/participation_beam.py` on as many as a log
needs; both give the same `ParticipationCounts`, which as JSON can stand for the log in a report:

    {"format": "bandmf_tf participation counts", "version": 1,
     "rows": .., "anonymous_rows": .., "roundless_rows": .., "repetitions": ..,
     "separations": [[separation, pairs, round of the first such pair's second member], ..],
     "participations": [[participations, clients, first round, last round], ..],
     "contributions": [[round, contributions], ..]}

`observed_participation` decides what the counts prove, see `logs.py` for the rules.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from bandmf_tf import _checks, _json
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.evidence.participation import ObservedParticipation, Occurrence, ParticipationError
from bandmf_tf.evidence.reader import Evidence, Run, stated_format
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.ledger import Ledger

KIND = "participation counts"

FORMAT = "bandmf_tf participation counts"
VERSION = 1

CONTRIBUTION_COLUMN = "contribution_id"

_COUNTS_DOUBT = (
    "Counts of a log do not show whether one client was spelled in several ways, or whether its "
    f"{CONTRIBUTION_COLUMN} named contributions; that neither happened is assumed."
)


# From here on it is odd that no client came back.
_MANY_ROWS = 20


class ParticipationLogError(ParticipationError):
    """A file is not a participation log, or not one of this mechanism's run."""


@dataclasses.dataclass(frozen=True)
class ParticipationCounts:
    """What was counted in a log; rounds as the log numbers them.

    Attributes:
      rows: Contributions.
      anonymous_rows: Of these, without a client.
      roundless_rows: Of these, without an integer as round.
      repetitions: Most contributions of one client to one round, beyond the first.
      separations: For each separation of successive rounds of a client, ascending: how many pairs
        of rounds have it, and the later round of the earliest pair.
      participations: For each number of rounds of a client, ascending: how many clients have it,
        and first and last round of the earliest of them.
      contributions: For each round with any, ascending: how many contributions it had.
    """

    rows: int
    anonymous_rows: int
    roundless_rows: int
    repetitions: int
    separations: tuple[tuple[int, ...], ...]
    participations: tuple[tuple[int, ...], ...]
    contributions: tuple[tuple[int, ...], ...]


def supports(path: Path) -> bool:
    """Whether the file holds counts of a log."""
    return stated_format(path) == FORMAT


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of the log that was counted."""
    run.check_no_timer(KIND)
    observed = observe([path], run)
    return Evidence(run=run.with_file(KIND, path), observed=run.limited(observed))


def observe(paths: Sequence[Path], run: Run, ledger: Ledger | None = None) -> ObservedParticipation:
    """Returns what the counts say, which must not contradict the ledger, if there is one."""
    if len(paths) > 1:
        raise ParticipationLogError(
            f"counts of {len(paths)} shards do not show a client that is in two of them; count all "
            "shards together."
        )
    if run.request.fold_clients:
        raise ParticipationLogError(
            "fold_clients belongs to a participation log; counts of one no longer show how clients "
            "were spelled."
        )
    return observed_participation(
        read_participation_counts(paths[0]),
        num_rounds=run.mechanism.num_rounds,
        rounds_completed=ledger.num_records if ledger else run.request.rounds_completed,
        contributions_by_round=ledger.contributions_by_round if ledger else None,
        source="counts of a participation log",
        doubts=(_COUNTS_DOUBT,),
    )


def read_participation_counts(path: str | os.PathLike[str]) -> ParticipationCounts:
    """Returns the counts in a JSON file.

    Raises:
      ParticipationLogError: The file does not hold counts that can be true.
    """
    return _json.load(path, _parse, ParticipationLogError)


def observed_participation(
    counts: ParticipationCounts,
    *,
    num_rounds: int,
    rounds_completed: int | None = None,
    contributions_by_round: Sequence[int] | None = None,
    source: str = "a participation log",
    cautions: Sequence[str] = (),
    assumptions: Sequence[str] = (),
    doubts: Sequence[str] = (),
) -> ObservedParticipation:
    """Returns what the counts of a log say about participation.

    Args:
      counts: The counts.
      num_rounds: Planned rounds n of the mechanism; the log may have none outside of them.
      rounds_completed: How many rounds were completed, if known from elsewhere. None stands for
        the last round in the log.
      contributions_by_round: How many contributions each round had, from a ledger. The log must
        have as many.
      source: What was counted, in words.
      cautions: What whoever counted has to say.
      assumptions: What the counts rest on besides, unless a ledger confirms their number.
      doubts: What they rest on, whatever their number: that names are what they seem to be.

    Raises:
      ParticipationLogError: The log proves nothing.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    if rounds_completed is not None:
        _checks.positive_int("rounds_completed", rounds_completed)
    _check_rows(counts)
    first, last = counts.contributions[0][0], counts.contributions[-1][0]
    origin, completed = _round_range(first, last, n, rounds_completed)
    by_round = {entry[0]: entry[1] for entry in counts.contributions}
    contributions = tuple(by_round.get(origin + i, 0) for i in range(completed))
    if contributions_by_round is not None:
        _check_against_ledger(contributions, contributions_by_round)
    missing = contributions.count(0)
    complete = missing == 0 or contributions_by_round is not None
    doubts = (*doubts, *_nameless_doubt(counts))
    # A ledger that has as many contributions confirms what was read, and nothing confirms names.
    certain = complete and not doubts and (not assumptions or contributions_by_round is not None)
    basis = Basis.OBSERVED if certain else Basis.ASSUMED
    multiplicity = 1 + counts.repetitions
    closest = None
    if counts.separations:
        separation, pairs, second = counts.separations[0]
        closest = Occurrence(second - separation - origin, second - origin, pairs)
    most, units, first, last = counts.participations[-1]
    return ObservedParticipation(
        source=source,
        rounds_completed=completed,
        min_separation=counts.separations[0][0] if counts.separations else None,
        max_participations=most,
        max_contributions_per_round=multiplicity,
        rounds_completed_basis=(
            Basis.OBSERVED
            if contributions_by_round is not None or (complete and completed == n)
            else Basis.ASSUMED
        ),
        min_separation_basis=basis,
        max_participations_basis=basis,
        num_units=sum(entry[1] for entry in counts.participations),
        num_contributions=counts.rows,
        separations={entry[0]: entry[1] for entry in counts.separations},
        participations={entry[0]: entry[1] for entry in counts.participations},
        contributions_by_round=contributions,
        closest=closest,
        most_active=Occurrence(first - origin, last - origin, units),
        missing_rounds=missing,
        cautions=(
            *doubts,
            *cautions,
            *assumptions,
            *_cautions(missing, multiplicity, complete),
            *_end_caution(completed, n, rounds_completed),
        ),
    )


def _parse(value: object) -> ParticipationCounts:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BandMFError(f'it is not of the format "{FORMAT}"')
    if value.get("version") != VERSION:
        raise BandMFError(f"it has version {value.get('version')!r}, this library reads {VERSION}")
    fields = {name: entry for name, entry in value.items() if name not in ("format", "version")}
    names = {field.name for field in dataclasses.fields(ParticipationCounts)}
    if fields.keys() != names:
        raise BandMFError(f"it lacks fields or has unknown ones: {sorted(fields.keys() ^ names)}")
    for name, width in (("separations", 3), ("participations", 4), ("contributions", 2)):
        rows = tuple(tuple(map(_integer, _list(entry))) for entry in _list(fields[name]))
        if any(len(row) != width for row in rows):
            raise BandMFError(f"an entry of {name} must have {width} numbers")
        if [row[0] for row in rows] != sorted({row[0] for row in rows}):
            raise BandMFError(f"the entries of {name} must ascend")
        fields[name] = rows
    for name in ("rows", "anonymous_rows", "roundless_rows", "repetitions"):
        fields[name] = _checks.int_at_least(name, _integer(fields[name]), 0)
    counts = ParticipationCounts(**fields)
    _check_consistency(counts)
    return counts


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise BandMFTypeError(f"{value!r} is not a list")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BandMFTypeError(f"{value!r} is not an integer")
    return value


def _check_consistency(counts: ParticipationCounts) -> None:
    """Raises unless the numbers can be the counts of one log."""
    if counts.anonymous_rows or counts.roundless_rows:
        return  # Nothing else was counted, and `observed_participation` refuses it.
    clients = sum(entry[1] for entry in counts.participations)
    rounds_of_clients = sum(entry[0] * entry[1] for entry in counts.participations)
    pairs = sum(entry[1] for entry in counts.separations)
    contributions = sum(entry[1] for entry in counts.contributions)
    positive = (
        all(entry[0] >= 1 and entry[1] >= 1 for entry in counts.participations)
        and all(entry[0] >= 1 and entry[1] >= 1 for entry in counts.separations)
        and all(entry[1] >= 1 for entry in counts.contributions)
    )
    fits = contributions == counts.rows and pairs == rounds_of_clients - clients
    if counts.contributions and positive:
        first, last = counts.contributions[0][0], counts.contributions[-1][0]
        smallest = min((entry[0] for entry in counts.separations), default=1)
        fits = fits and all(
            first <= later - separation and later <= last
            for separation, _, later in counts.separations
        )
        fits = fits and all(
            first <= start and (k - 1) * smallest <= end - start and end <= last
            for k, _, start, end in counts.participations
        )
    repeats = (contributions > rounds_of_clients) == (counts.repetitions > 0)
    # Nobody contributes more often to a round than is said, and to a round somebody does.
    most = 1 + counts.repetitions
    fits = (
        fits
        and contributions <= rounds_of_clients * most
        and all(entry[1] <= clients * most for entry in counts.contributions)
        and len(counts.contributions) <= rounds_of_clients
    )
    if not (positive and fits and repeats and contributions >= rounds_of_clients):
        raise BandMFError("its numbers contradict each other")


def _check_rows(counts: ParticipationCounts) -> None:
    if counts.rows == 0:
        raise ParticipationLogError("it has no rows, which proves nothing.")
    if counts.anonymous_rows or counts.roundless_rows:
        raise ParticipationLogError(
            f"{counts.anonymous_rows} of {counts.rows} rows have no client and "
            f"{counts.roundless_rows} no integer as round; such a row could be anybody's, so "
            "correct the log."
        )


def _round_range(
    first: int, last: int, num_rounds: int, rounds_completed: int | None
) -> tuple[int, int]:
    """Returns the number of the log's first possible round, 0 or 1, and how many were completed."""
    limit = num_rounds if rounds_completed is None else rounds_completed
    from_one = first >= 1 and last == limit
    if first < 0 or (last >= limit and not from_one):
        stranger = first if first < 0 else last
        bound = "num_rounds" if rounds_completed is None else "rounds_completed"
        raise ParticipationLogError(
            f"rounds must be in [0, {bound} - 1] = [0, {limit - 1}], or in [1, {limit}]; it has "
            f"round {stranger}, so it is not the log of this run."
        )
    if limit > num_rounds:
        raise ParticipationLogError(
            f"rounds_completed={limit} is more than the num_rounds={num_rounds} of the mechanism."
        )
    if rounds_completed is not None:
        return int(from_one), rounds_completed
    return int(from_one), last if from_one else last + 1


def _end_caution(completed: int, num_rounds: int, stated: int | None) -> tuple[str, ...]:
    """Returns what to know if only the log says when training ended."""
    if stated is not None or completed == num_rounds:
        return ()
    caution = (
        f"The log ends after {completed} of {num_rounds} planned rounds, and that training ended "
        "there is taken from the log alone. If more rounds were completed, state rounds_completed."
    )
    return (caution,)


def _nameless_doubt(counts: ParticipationCounts) -> tuple[str, ...]:
    """Returns what to know if no name stands in two rounds."""
    if counts.separations or len(counts.contributions) < 2 or counts.rows < _MANY_ROWS:
        return ()
    caution = (
        "No client stands in two rounds, as where names are made anew for every round; if these "
        "are, clients took part more often than stated."
    )
    return (caution,)


def _cautions(missing: int, multiplicity: int, complete: bool) -> tuple[str, ...]:
    cautions = []
    if not complete:
        cautions.append(
            f"The log has no row in {missing} of the completed rounds. That nobody took part in "
            "them is assumed; if their rows were lost, the separation can be smaller and the "
            "participations more than stated."
        )
    if multiplicity > 1:
        cautions.append(
            f"A client stands up to {multiplicity} times in one round. Each row counts as a "
            f"contribution, so the sensitivity is {multiplicity} times as large. If rows were only "
            f"logged twice, add a column {CONTRIBUTION_COLUMN} that shows it."
        )
    return tuple(cautions)


def _check_against_ledger(counts: Sequence[int], expected: Sequence[int]) -> None:
    if len(expected) != len(counts):
        raise ParticipationLogError(
            f"the ledger has {len(expected)} rounds and the log {len(counts)}; they are not of the "
            "same run."
        )
    for i, (found, wanted) in enumerate(zip(counts, expected, strict=True)):
        if found != wanted:
            raise ParticipationLogError(
                f"round {i} has {wanted} contributions in the ledger and {found} in the log; the "
                "log is not complete or not of this run."
            )
