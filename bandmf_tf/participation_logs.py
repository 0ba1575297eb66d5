"""Participation logs: one row for each contribution of a client to a round, millions of rows.

A log is CSV with a header, JSON lines or Parquet (`.csv`, `.jsonl`, `.ndjson`, `.parquet`; text
also with `.gz`). It has a column `client` (or `client_id`), any pseudonym that is the same for all
rows of a client, and a column `round`, an integer. Of the others only `contribution_id` matters.

Rounds count from 0. A log that counts from 1 is recognised by its last round where that is
possible; otherwise round 0 counts as one without participants. Separations are the same.

What a log can get wrong, and what follows. Nothing makes a guarantee look better than it is:

* Order of rows: none is needed.
* A client twice in a round: two contributions, of up to two clip norms together. Whether the second
  row is a second contribution or the first one, logged twice, nobody can tell from client and round
  alone. If the log has a column `contribution_id`, rows alike in client, round and contribution are
  one contribution that was logged again, and are counted once.
* A round outside of the mechanism's rounds, a row without client or with a round that is not an
  integer: the log is refused; a row that cannot be understood could be anybody's.
* Rounds without rows: nobody took part in them, or their rows were lost. The first is assumed, and
  the values are then called assumed, unless a ledger confirms the number of contributions.
* An empty log: refused; it is no evidence.
* Two clients whose pseudonyms collide (in the log, or in the 64-bit hash that replaces pseudonyms
  here): they look like one client that takes part more often.

The engine is DuckDB: one wheel without dependencies, a memory limit that it keeps by spilling to
disk, readers for all three formats, and plain SQL, which other engines understand (`LOG_QUERIES`;
`tools/participation_beam.py` is the same computation as an Apache Beam job). For 13 million rows it
took about half of the CPU time of Polars; see `benchmarks/participation.py`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import duckdb
import numpy as np

from bandmf_tf import _checks
from bandmf_tf.observed_participation import (
    Basis,
    ObservedParticipation,
    Occurrence,
    ParticipationError,
)

CLIENT_COLUMNS = ("client", "client_id")
ROUND_COLUMN = "round"
CONTRIBUTION_COLUMN = "contribution_id"

MEMORY_LIMIT_MB = 1024

# Every query that the answer consists of, over a table contributions(client, round) of integers.
# `gaps` has a row for each contribution, with the separation from the one before of the same
# client: none for its first, 0 for a further one to the same round.
LOG_QUERIES = {
    "gaps": """
        CREATE TEMP TABLE gaps AS
        SELECT client, round,
               round - lag(round) OVER (PARTITION BY client ORDER BY round) AS separation
        FROM contributions""",
    "separations": """
        SELECT separation, count(*), min(round) FROM gaps
        WHERE separation > 0 GROUP BY separation ORDER BY separation""",
    "participations": """
        SELECT participations, count(*), arg_min(first_round, (first_round, last_round)),
               arg_min(last_round, (first_round, last_round))
        FROM (SELECT count(*) AS participations, min(round) AS first_round,
                     max(round) AS last_round
              FROM gaps WHERE separation IS DISTINCT FROM 0 GROUP BY client)
        GROUP BY participations ORDER BY participations""",
    "rounds": "SELECT round, count(*) FROM gaps GROUP BY round",
    "repetitions": """
        SELECT coalesce(max(repetitions), 0)
        FROM (SELECT count(*) AS repetitions FROM gaps WHERE separation = 0
              GROUP BY client, round)""",
}

_TEXT_SUFFIXES = (".csv", ".jsonl", ".ndjson")
_SUFFIXES = (*_TEXT_SUFFIXES, ".parquet")
_MAX_LINE = 1_000_000


class ParticipationLogError(ParticipationError):
    """A file is not a participation log, or not one of this mechanism's run."""


def read_participation_log(
    path: str | os.PathLike[str],
    *,
    num_rounds: int,
    rounds_completed: int | None = None,
    contributions_by_round: Sequence[int] | None = None,
    memory_limit_mb: int = MEMORY_LIMIT_MB,
) -> ObservedParticipation:
    """Returns what the log at `path` says about participation, see the top of this file.

    Args:
      path: The log.
      num_rounds: Planned rounds n of the mechanism; the log may have none outside of them.
      rounds_completed: How many rounds were completed, if known from elsewhere. None stands for
        the last round in the log.
      contributions_by_round: How many contributions each round had, from a ledger. The log must
        have as many.
      memory_limit_mb: Megabytes of memory for the engine; what does not fit goes to a temporary
        folder, which is removed again.

    Raises:
      ParticipationLogError: The log cannot be read or proves nothing.
      OSError: The file does not exist or cannot be read.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    if rounds_completed is not None:
        _checks.positive_int("rounds_completed", rounds_completed)
    path = Path(path)
    name = os.fspath(path)
    with path.open("rb"):
        pass  # A missing or unreadable file is an OSError, whatever the engine would call it.
    try:
        with _engine(memory_limit_mb) as engine:
            _load(engine, path)
            first, last = _check_rows(engine)
            first_round, completed = _round_range(first, last, n, rounds_completed)
            return _summary(
                engine,
                source="a participation log",
                first_round=first_round,
                rounds_completed=completed,
                rounds_known=rounds_completed is not None,
                contributions_by_round=contributions_by_round,
            )
    except duckdb.Error as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise ParticipationLogError(
            f"{name} is no readable participation log ({reason})."
        ) from error
    except ParticipationError as error:
        raise ParticipationLogError(f"{name}: {error}") from error


def summarize_participation(
    clients: np.ndarray, rounds: np.ndarray, *, rounds_completed: int, source: str
) -> ObservedParticipation:
    """Returns the same summary for contributions in memory, of a complete record.

    Args:
      clients: One integer for each contribution, the same for all contributions of a client.
      rounds: The round of each contribution, from 0.
      rounds_completed: Number of rounds of the record.
      source: What the record is, in words.
    """
    table = {"client": np.asarray(clients), "round": np.asarray(rounds, dtype=np.int64)}
    if table["round"].size == 0:
        raise ParticipationError("no client took part in any round, which proves nothing.")
    with _engine(MEMORY_LIMIT_MB) as engine:
        engine.register("arrays", table)
        engine.execute("CREATE TEMP VIEW contributions AS SELECT client, round FROM arrays")
        return _summary(
            engine,
            source=source,
            first_round=0,
            rounds_completed=rounds_completed,
            rounds_known=True,
            contributions_by_round=np.bincount(table["round"], minlength=rounds_completed).tolist(),
        )


@contextlib.contextmanager
def _engine(memory_limit_mb: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields an engine of its own, which cannot reach the network and cleans up its disk space."""
    limit = _checks.positive_int("memory_limit_mb", memory_limit_mb)
    with tempfile.TemporaryDirectory(prefix="participation-") as folder:  # Owner-only.
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{limit}MB",
            "temp_directory": folder,
            "preserve_insertion_order": "false",
            "autoinstall_known_extensions": "false",
        }
        engine = duckdb.connect(":memory:", config=settings)
        try:
            yield engine
        finally:
            engine.close()


def _load(engine: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Makes the table contributions(client, anonymous, round), a row for each contribution."""
    columns, source = _source(engine, path)
    client = next((column for column in CLIENT_COLUMNS if column in columns), None)
    if client is None or ROUND_COLUMN not in columns:
        raise ParticipationLogError(
            f"a log needs the columns {CLIENT_COLUMNS[0]} and {ROUND_COLUMN}. Found "
            f"{', '.join(columns)[:200] or 'none'}."
        )
    rows = f"""
        SELECT hash(nullif(trim("{client}"::VARCHAR), '')) AS client,
               nullif(trim("{client}"::VARCHAR), '') IS NULL AS anonymous,
               CASE WHEN regexp_full_match(trim("{ROUND_COLUMN}"::VARCHAR), '[+-]?[0-9]{{1,18}}')
                    THEN trim("{ROUND_COLUMN}"::VARCHAR)::BIGINT END AS round"""
    if CONTRIBUTION_COLUMN not in columns:
        engine.execute(f"CREATE TEMP TABLE contributions AS {rows} FROM {source}")
        return
    contribution = f'"{CONTRIBUTION_COLUMN}"::VARCHAR AS contribution'
    engine.execute(f"CREATE TEMP TABLE logged AS {rows}, {contribution} FROM {source}")
    # Rows that name no contribution are contributions of their own.
    engine.execute("""
        CREATE TEMP TABLE contributions AS
        SELECT client, anonymous, round FROM (
            SELECT DISTINCT client, anonymous, round, contribution
            FROM logged WHERE contribution IS NOT NULL)
        UNION ALL SELECT client, anonymous, round FROM logged WHERE contribution IS NULL""")


def _source(engine: duckdb.DuckDBPyConnection, path: Path) -> tuple[list[str], str]:
    """Returns the columns of the log and the SQL that reads them, all text as text."""
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(_SUFFIXES) or (
        path.name.lower().endswith(".gz") and not name.endswith(_TEXT_SUFFIXES)
    ):
        raise ParticipationLogError(
            f"a log is a file with the suffix {', '.join(_SUFFIXES)}, or .gz after one of the "
            "text formats."
        )
    literal = _literal(path)
    if name.endswith(".parquet"):
        described = engine.execute(f"DESCRIBE SELECT * FROM read_parquet({literal})").fetchall()
        return [row[0] for row in described], f"read_parquet({literal})"
    columns = _text_columns(path, is_csv=name.endswith(".csv"))
    if name.endswith(".csv"):
        types = ", ".join(f"{_quote(column)}: 'VARCHAR'" for column in columns)
        options = "header=true, auto_detect=false, delim=',', quote='\"', escape='\"'"
        return columns, f"read_csv({literal}, {options}, columns={{{types}}})"
    known = (*CLIENT_COLUMNS, ROUND_COLUMN, CONTRIBUTION_COLUMN)
    types = ", ".join(f"{column}: 'VARCHAR'" for column in known if column in columns)
    return columns, f"read_json({literal}, format='newline_delimited', columns={{{types}}})"


def _text_columns(path: Path, *, is_csv: bool) -> list[str]:
    """Returns the names of the columns: of the header, or of the first object of JSON lines."""
    try:
        with _open_text(path) as file:
            line = file.readline(_MAX_LINE)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ParticipationLogError(f"it is not text in UTF-8 ({error}).") from error
    if not line.strip():
        raise ParticipationLogError("it is empty, which proves nothing.")
    if is_csv:
        try:
            columns = next(csv.reader([line.rstrip("\r\n")], strict=True))
        except csv.Error as error:
            raise ParticipationLogError(f"its header is no line of CSV ({error}).") from error
    else:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ParticipationLogError("its first line is no JSON object.") from error
        if not isinstance(record, dict):
            raise ParticipationLogError("its first line is no JSON object.")
        columns = list(record)
    if len({column.lower() for column in columns}) != len(columns):
        raise ParticipationLogError("two of its columns have the same name.")
    return columns


def _open_text(path: Path) -> TextIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open("rt", encoding="utf-8-sig", newline="")


def _literal(path: Path) -> str:
    """Returns the path as a string of SQL; the engine would expand patterns in it."""
    text = os.fspath(path.absolute())
    if any(character in text for character in "*?["):
        raise ParticipationLogError("the engine takes *, ? and [ for patterns; rename the file.")
    return _quote(text)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _check_rows(engine: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    """Returns the first and the last round, if every row can be understood."""
    rows, anonymous, roundless, first, last = _fetch_one(
        engine,
        "SELECT count(*), count_if(anonymous), count_if(round IS NULL), min(round), max(round) "
        "FROM contributions",
    )
    if rows == 0:
        raise ParticipationLogError("it has no rows, which proves nothing.")
    if anonymous or roundless:
        raise ParticipationLogError(
            f"{anonymous} of {rows} rows have no client and {roundless} no integer as round; such "
            "a row could be anybody's, so correct the log."
        )
    return first, last


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


def _summary(
    engine: duckdb.DuckDBPyConnection,
    *,
    source: str,
    first_round: int,
    rounds_completed: int,
    rounds_known: bool,
    contributions_by_round: Sequence[int] | None,
) -> ObservedParticipation:
    engine.execute(LOG_QUERIES["gaps"])
    separations = engine.execute(LOG_QUERIES["separations"]).fetchall()
    participations = engine.execute(LOG_QUERIES["participations"]).fetchall()
    rounds = dict(engine.execute(LOG_QUERIES["rounds"]).fetchall())
    (repetitions,) = _fetch_one(engine, LOG_QUERIES["repetitions"])
    counts = tuple(int(rounds.get(first_round + i, 0)) for i in range(rounds_completed))
    missing = counts.count(0)
    if contributions_by_round is not None:
        _check_counts(counts, contributions_by_round)
    complete = missing == 0 or contributions_by_round is not None
    basis = Basis.OBSERVED if complete else Basis.ASSUMED
    closest, most_active = None, None
    if separations:
        separation, count, second = separations[0]
        second -= first_round
        closest = Occurrence(int(second - separation), int(second), int(count))
    most, units, first, last = participations[-1]
    most_active = Occurrence(int(first - first_round), int(last - first_round), int(units))
    return ObservedParticipation(
        source=source,
        rounds_completed=rounds_completed,
        min_separation=int(separations[0][0]) if separations else None,
        max_participations=int(most),
        max_contributions_per_round=1 + int(repetitions),
        rounds_completed_basis=Basis.OBSERVED if not rounds_known or complete else Basis.ASSUMED,
        min_separation_basis=basis,
        max_participations_basis=basis,
        num_units=sum(int(row[1]) for row in participations),
        num_contributions=sum(counts),
        separations={int(row[0]): int(row[1]) for row in separations},
        participations={int(row[0]): int(row[1]) for row in participations},
        contributions_by_round=counts,
        closest=closest,
        most_active=most_active,
        missing_rounds=missing,
        cautions=_cautions(missing, 1 + int(repetitions), complete),
    )


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


def _check_counts(counts: Sequence[int], expected: Sequence[int]) -> None:
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


def _fetch_one(engine: duckdb.DuckDBPyConnection, query: str) -> tuple:
    row = engine.execute(query).fetchone()
    assert row is not None
    return row
