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
  integer: the log is refused; a row that cannot be understood could be anybody's. So is a client
  with a line break in it: stray quotes in CSV have swallowed the rows between them.
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
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import duckdb
import numpy as np

from bandmf_tf import _checks
from bandmf_tf.evidence.counts import (
    CONTRIBUTION_COLUMN,
    ParticipationCounts,
    ParticipationLogError,
    observed_participation,
)
from bandmf_tf.evidence.participation import ObservedParticipation, ParticipationError
from bandmf_tf.evidence.reader import Evidence, Run
from bandmf_tf.runs.ledger import Ledger

KIND = "participation log"

CLIENT_COLUMNS = ("client", "client_id")
ROUND_COLUMN = "round"

# What programs write where there is no value. All such rows are without a client: taken for a
# pseudonym, it would hide whose participations they are.
MISSING_VALUES = ("", "nan", "null", "none", "<na>", "n/a")

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
    "contributions": "SELECT round, count(*) FROM gaps GROUP BY round ORDER BY round",
    "repetitions": """
        SELECT coalesce(max(repetitions), 0)
        FROM (SELECT count(*) AS repetitions FROM gaps WHERE separation = 0
              GROUP BY client, round)""",
}

_TEXT_SUFFIXES = (".csv", ".jsonl", ".ndjson")
_MAX_LINE = 1_000_000


def supports(path: Path) -> bool:
    """Whether the name of the file is that of a log; `.gz` is for the text formats."""
    name = path.name.lower()
    return name.removesuffix(".gz").endswith(_TEXT_SUFFIXES) or name.endswith(".parquet")


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of a log."""
    run.check_no_timer(KIND)
    observed = observe(path, run)
    return Evidence(run=run.with_file(KIND, path), observed=run.limited(observed))


def observe(path: Path, run: Run, ledger: Ledger | None = None) -> ObservedParticipation:
    """Returns what the log says, which must not contradict the ledger, if there is one."""
    return read_participation_log(
        path,
        num_rounds=run.mechanism.num_rounds,
        rounds_completed=ledger.num_records if ledger else run.request.rounds_completed,
        contributions_by_round=ledger.contributions_by_round if ledger else None,
    )


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
    path = Path(path)
    with path.open("rb"):
        pass  # A missing or unreadable file is an OSError, whatever the engine would call it.
    try:
        with _engine(memory_limit_mb) as engine:
            _load(engine, path)
            counts = _count(engine)
        return observed_participation(
            counts,
            num_rounds=num_rounds,
            rounds_completed=rounds_completed,
            contributions_by_round=contributions_by_round,
        )
    except duckdb.Error as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise ParticipationLogError(
            f"{os.fspath(path)} is not a readable participation log ({reason})."
        ) from error
    except ParticipationError as error:
        raise ParticipationLogError(f"{os.fspath(path)}: {error}") from error


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
        engine.execute(
            "CREATE TEMP VIEW contributions AS SELECT client, false AS anonymous, round FROM arrays"
        )
        counts = _count(engine)
    contributions = np.bincount(table["round"], minlength=rounds_completed).tolist()
    return observed_participation(
        counts,
        num_rounds=rounds_completed,
        rounds_completed=rounds_completed,
        contributions_by_round=contributions,
        source=source,
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
            engine.execute("SET enable_progress_bar = false")  # It is drawn into standard output.
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
    pseudonym = f'trim("{client}"::VARCHAR)'
    missing = ", ".join(map(_quote, MISSING_VALUES))
    rows = f"""
        SELECT hash({pseudonym}) AS client,
               coalesce(lower({pseudonym}) IN ({missing})
                        OR contains({pseudonym}, chr(10)) OR contains({pseudonym}, chr(13)), true)
                   AS anonymous,
               CASE WHEN regexp_full_match(trim("{ROUND_COLUMN}"::VARCHAR), '[+-]?[0-9]{{1,18}}')
                    THEN trim("{ROUND_COLUMN}"::VARCHAR)::BIGINT END AS round"""
    if CONTRIBUTION_COLUMN not in columns:
        engine.execute(f"CREATE TEMP TABLE contributions AS {rows} FROM {source}")
        return
    name = f'"{CONTRIBUTION_COLUMN}"::VARCHAR'
    contribution = f"CASE WHEN lower(trim({name})) NOT IN ({missing}) THEN {name} END"
    engine.execute(
        f"CREATE TEMP TABLE logged AS {rows}, {contribution} AS contribution FROM {source}"
    )
    # Rows that name no contribution are contributions of their own.
    engine.execute("""
        CREATE TEMP TABLE contributions AS
        SELECT client, anonymous, round FROM (
            SELECT DISTINCT client, anonymous, round, contribution
            FROM logged WHERE contribution IS NOT NULL)
        UNION ALL SELECT client, anonymous, round FROM logged WHERE contribution IS NULL""")


def _source(engine: duckdb.DuckDBPyConnection, path: Path) -> tuple[list[str], str]:
    """Returns the columns of the log and the SQL that reads them, all text as text."""
    if not supports(path):
        raise ParticipationLogError(
            f"a log is a file with the suffix {', '.join(_TEXT_SUFFIXES)}, .parquet, or .gz after "
            "one of the text formats."
        )
    literal, name = _literal(path), path.name.lower().removesuffix(".gz")
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
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ParticipationLogError(f"it is not text in UTF-8 ({error}).") from error
    if not line.strip():
        raise ParticipationLogError("it is empty, which proves nothing.")
    if is_csv:
        try:
            columns = next(csv.reader([line.rstrip("\r\n")], strict=True))
        except csv.Error as error:
            raise ParticipationLogError(f"its header is not a line of CSV ({error}).") from error
    else:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ParticipationLogError("its first line is not a JSON object.") from error
        if not isinstance(record, dict):
            raise ParticipationLogError("its first line is not a JSON object.")
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


def _count(engine: duckdb.DuckDBPyConnection) -> ParticipationCounts:
    """Counts the table of contributions; rows that cannot be understood are counted alone."""
    rows, anonymous, roundless = _fetch_one(
        engine, "SELECT count(*), count_if(anonymous), count_if(round IS NULL) FROM contributions"
    )
    if anonymous or roundless:
        return ParticipationCounts(rows, anonymous, roundless, 0, (), (), ())
    engine.execute(LOG_QUERIES["gaps"])
    (repetitions,) = _fetch_one(engine, LOG_QUERIES["repetitions"])
    separations, participations, contributions = (
        tuple(tuple(map(int, row)) for row in engine.execute(LOG_QUERIES[name]).fetchall())
        for name in ("separations", "participations", "contributions")
    )
    return ParticipationCounts(
        rows, anonymous, roundless, repetitions, separations, participations, contributions
    )


def _fetch_one(engine: duckdb.DuckDBPyConnection, query: str) -> tuple:
    row = engine.execute(query).fetchone()
    assert row is not None
    return row
