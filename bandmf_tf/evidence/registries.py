"""How clients took part, by a participation registry (`runs/registry.py`): a file of SQLite.

A registry holds everybody of whom anything could be in a sum, round by round, so the extremes of it
are observed. That it admitted nobody sooner or more often than its limits is what the server
enforced, by the registry's own word: a note says so, and the label stays with what was recorded.
Where a ledger stands beside it, which says what was released, the registry must have admitted whom
the ledger names.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bandmf_tf.evidence.logs import summarize_participation
from bandmf_tf.evidence.participation import ObservedParticipation, ParticipationError
from bandmf_tf.evidence.reader import UNIT_DEVICE, Evidence, Run
from bandmf_tf.runs._databases import APPLICATION_ID, check_file, make_tables
from bandmf_tf.runs.ledger import (
    RECORDING_PSEUDONYMOUS,
    SEPARATION_CONVENTION,
    Ledger,
    LedgerHeader,
    RoundRecord,
)
from bandmf_tf.runs.registry import CHARGED, FORMAT, VERSION, Outcome, RoundState

KIND = "participation registry"

_MAGIC = b"SQLite format 3\0"
# Where the header of a file of SQLite says whose it is.
_APPLICATION = slice(68, 72)
_CHARGED = f"outcome IN ({', '.join(str(int(outcome)) for outcome in CHARGED)})"

_COUNTED = (
    f"outcome = {Outcome.COUNTED:d} AND attempt = "
    "(SELECT attempt FROM rounds r WHERE r.round = participations.round)"
)
_PARTICIPATIONS = "SELECT hex(client), round FROM participations WHERE {} AND round < ?"

# Participations that are in no round, were counted in an attempt that was not, or do not follow the
# one that they were admitted after, and clients whose last round or number of rounds is not that of
# their participations. In the round that is open, everybody who was invited is charged.
_CONTRADICTIONS = f"""
    WITH charged AS (
      SELECT client, round, previous, lag(round) OVER (PARTITION BY client ORDER BY round) AS before
      FROM participations
      WHERE {_CHARGED} OR outcome = {Outcome.INVITED:d} OR (outcome = {Outcome.DROPPED:d} AND
        (round, attempt) IN (SELECT round, attempt FROM rounds WHERE state = {RoundState.OPEN:d}))),
    told AS (SELECT client, max(round) AS last_round, count(*) AS participations FROM charged
             GROUP BY client)
    SELECT count(*) FROM (
      SELECT client FROM participations
      WHERE typeof(round) != 'integer' OR round NOT IN (SELECT round FROM rounds)
        OR typeof(client) != 'blob' OR length(client) != 16
        OR outcome NOT IN ({", ".join(str(int(outcome)) for outcome in Outcome)})
        OR outcome = {Outcome.COUNTED:d} AND (round, attempt) IN
           (SELECT round, attempt FROM rounds WHERE state != {RoundState.COUNTED:d})
      UNION ALL
      SELECT client FROM charged WHERE previous IS NOT before
      UNION ALL
      SELECT client FROM (SELECT client, last_round, participations FROM clients
                          WHERE participations > 0 EXCEPT SELECT * FROM told)
      UNION ALL
      SELECT client FROM (SELECT * FROM told EXCEPT
                          SELECT client, last_round, participations FROM clients))"""


def supports(path: Path) -> bool:
    """Whether the file is a registry, by its header."""
    with path.open("rb") as file:
        header = file.read(100)
    identity = APPLICATION_ID.to_bytes(4, "big")
    return header.startswith(_MAGIC) and header[_APPLICATION] == identity


def is_of(path: Path, mechanism_checksum: str) -> bool:
    """Whether a registry is of this mechanism; one that cannot be read may be."""
    try:
        with _opened(path) as file:
            question = "SELECT value FROM settings WHERE name = 'mechanism_checksum'"
            return file.execute(question).fetchone() in (None, (mechanism_checksum,))
    except sqlite3.Error:
        return True


def check_beside(path: Path, ledger: Ledger) -> None:
    """Raises if the registry of a run contradicts its ledger, as far as the registry goes.

    Of a file that is in use, or was damaged, only what can be read counts.
    """
    question = f"SELECT count(*) FROM rounds WHERE state = {RoundState.COUNTED:d}"
    try:
        with _opened(path) as file:
            settings = dict(file.execute("SELECT name, value FROM settings"))
            (completed,) = file.execute(question).fetchone()
            known = min(completed, ledger.num_records)
            rows = file.execute(_PARTICIPATIONS.format(_COUNTED), (known,)).fetchall()
    except sqlite3.Error:
        return
    _check_end(ledger, max(completed, ledger.num_records))
    _check_ledger(ledger.records[:known], ledger.header, rows, settings.get("salt_id"))


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of a registry."""
    run.check_no_timer(KIND)
    observed, note = _observed(path, run, None)
    run.check_rounds(observed.rounds_completed, KIND)
    observed = observed.by_its_own_word(run.mechanism.num_rounds)
    return Evidence(
        run=run.with_file(KIND, path),
        observed=run.limited(observed),
        unit=UNIT_DEVICE,
        notes=(note,),
    )


def observe(paths: Sequence[Path], run: Run, ledger: Ledger | None = None) -> ObservedParticipation:
    """Returns what the registry says, which must not contradict the ledger, if there is one."""
    return _observed(paths[0], run, ledger)[0]


def _observed(path: Path, run: Run, ledger: Ledger | None) -> tuple[ObservedParticipation, str]:
    logs = [path.with_name(f"{path.name}-{kind}") for kind in ("wal", "journal")]
    if any(log.exists() and log.stat().st_size for log in logs):
        raise ParticipationError(
            f"{os.fspath(path)} is in use, or its program has crashed; give a copy that "
            "`ParticipationRegistry.export` has made."
        )
    try:
        with _opened(path) as file:
            check_file(file, path)
            _check_tables(file, path)
            settings = dict(file.execute("SELECT name, value FROM settings"))
            rounds = file.execute("SELECT round, state FROM rounds ORDER BY round").fetchall()
            (contradictions,) = file.execute(_CONTRADICTIONS).fetchone()
            # With a ledger, which has what was released: whom the last attempt has counted.
            chosen = _CHARGED if ledger is None else _COUNTED
            _check(path, settings, run, rounds, contradictions)
            completed = sum(state == RoundState.COUNTED for _, state in rounds)
            if ledger is not None:
                _check_end(ledger, completed)
                completed = ledger.num_records
            rows = file.execute(_PARTICIPATIONS.format(chosen), (completed,)).fetchall()
    except sqlite3.Error as error:
        raise ParticipationError(
            f"{os.fspath(path)} is damaged ({error}); give a whole copy."
        ) from error
    if ledger is not None:
        _check_ledger(ledger.records, ledger.header, rows, settings.get("salt_id"))
    if not completed:
        raise ParticipationError("the registry has counted no round; there is nothing to report.")
    observed = summarize_participation(
        # Folded to 64 bits; a collision only merges two clients.
        np.array([int(name[:16], 16) for name, _ in rows], dtype=np.uint64),
        np.array([number for _, number in rows], dtype=np.int64),
        rounds_completed=completed,
        source="a participation registry, with everybody of whom something had arrived",
    )
    b, k = _limits(run)
    if (observed.min_separation or b) < b or observed.max_participations > k:
        raise ParticipationError(
            f"the registry enforced min_separation={b} and max_participations={k}, and by its rows "
            f"{observed.describe()}; it was edited."
        )
    unfinished = (
        "" if completed == len(rounds) else f" Round {completed} was begun and not counted."
    )
    note = (
        f"By its own word, the server admitted clients at least {b} rounds apart and at most {k} "
        "times, and wrote down each of them before anything of it could be in a "
        f"sum.{unfinished}"
    )
    return observed, note


def _opened(path: Path) -> contextlib.closing[sqlite3.Connection]:
    """Returns the file as it is, to be read and never written."""
    location = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    return contextlib.closing(sqlite3.connect(location, uri=True))


def _check_tables(file: sqlite3.Connection, path: Path) -> None:
    """Raises unless the tables, and what they allow, are those of a registry, and nothing else."""
    question = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    with contextlib.closing(sqlite3.connect(":memory:")) as memory:
        make_tables(memory)
        expected = memory.execute(question).fetchall()
    if file.execute(question).fetchall() != expected:
        raise ParticipationError(
            f"{os.fspath(path)} has other tables than a registry; it was edited, give a whole copy."
        )


def _check(
    path: Path, settings: dict[str, str], run: Run, rounds: list[tuple], contradictions: int
) -> None:
    """Raises unless the registry is of this run, and its tables say the same."""
    b, k = _limits(run)
    expected = {
        "format": FORMAT,
        "version": str(VERSION),
        "separation": SEPARATION_CONVENTION,
        "mechanism_checksum": run.checksum,
        "num_rounds": str(run.mechanism.num_rounds),
        "min_separation": str(b),
        "max_participations": str(k),
    }
    for name, value in expected.items():
        if settings.get(name) != value:
            raise ParticipationError(
                f"{os.fspath(path)} has another {name} than the run; give the registry of this "
                f"mechanism. Found {settings.get(name)!r:.80}."
            )
    states = [state for _, state in rounds]
    gapless = [number for number, _ in rounds] == list(range(len(rounds)))
    if not gapless or any(state != RoundState.COUNTED for state in states[:-1]) or contradictions:
        raise ParticipationError(
            f"{os.fspath(path)} contradicts itself; it was damaged or edited, give a whole copy."
        )


def _limits(run: Run) -> tuple[int, int]:
    """Returns the separation and the cap that a registry of this mechanism enforces."""
    n, participation = run.mechanism.num_rounds, run.mechanism.participation
    return participation.separation(n), participation.most(n)


def _check_end(ledger: Ledger, completed: int) -> None:
    # A crash between the two leaves the registry one round ahead.
    if not ledger.num_records <= completed <= ledger.num_records + 1:
        raise ParticipationError(
            f"the ledger has {ledger.num_records} rounds and the registry has counted {completed}; "
            "they are not of the same run, or of different times."
        )


def _check_ledger(
    records: Sequence[RoundRecord], header: LedgerHeader, rows: list[tuple], salt_id: str | None
) -> None:
    admitted: dict[int, set[str]] = {}
    for name, number in rows:
        admitted.setdefault(number, set()).add(name.lower())
    named = header.participation_recording == RECORDING_PSEUDONYMOUS
    if records and named and header.salt_id != salt_id:
        raise ParticipationError(
            "the ledger and the registry have different salts; give those of one run."
        )
    for record in records:
        here = admitted.get(record.round, set())
        if len(here) != record.num_participants or (
            named and here != set(record.participants or ())
        ):
            raise ParticipationError(
                f"round {record.round} has other participants in the ledger than in the registry; "
                "they are not of the same run."
            )
