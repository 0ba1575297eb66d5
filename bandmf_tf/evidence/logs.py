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
* A round outside of the mechanism's rounds, a row without client or with a round that is neither
  an integer nor, as tables with gaps have it, `7.0`: the log is refused; a row that cannot be
  understood could be anybody's. So is a row of CSV with a line break in it: stray quotes have
  swallowed the rows between them. So are clients that are objects, lists or true and false, of
  which there are several spellings or two in all, and rows of JSON with two entries of one name,
  but for capital letters.
* Rounds without rows: nobody took part in them, or their rows were lost. The first is assumed, and
  the values are then called assumed, unless a ledger confirms the number of contributions.
* An empty log: refused; it is no evidence.
* One client in several spellings (leading zeros, `7` and `7.0`, capital letters, quotes and
  separators, letters that look alike, characters that have no width, a number in decimal and in
  hexadecimal digits, with a sign and without, or an address of a network card), or a name that may
  stand for a missing one (`NA`, `nil`, a UUID of zeros): that they are clients of their own is
  assumed, with their number; `fold_clients` takes spellings for one client and such names for
  missing ones. Of `31` nothing says whether it is hexadecimal: where other names are, and this one
  or a longer one cannot be of the same kind, that no client has two names is assumed.
* A `contribution_id` that several clients or rounds share does not name a contribution: each of its
  rows counts.
* Folder names like `round=7` are not read, and a caution says so.
* Several files are shards of one log. Text that is cut, padded with zeros, or whose checksum (gzip)
  is wrong, is refused or cautioned about.
* Names that change at some round, because their key did: then hardly any client took part both
  before and after; that they are different clients is assumed, and a caution says where. A client
  that changes its name alone is two clients.
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
import functools
import gzip
import json
import os
import re
import tempfile
import unicodedata
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from bandmf_tf import _checks
from bandmf_tf.evidence.confined import interruptible
from bandmf_tf.evidence.counts import (
    CONTRIBUTION_COLUMN,
    ParticipationCounts,
    ParticipationLogError,
    observed_participation,
)
from bandmf_tf.evidence.participation import ObservedParticipation, ParticipationError
from bandmf_tf.evidence.reader import Evidence, Run, shown_count
from bandmf_tf.runs.ledger import Ledger

if TYPE_CHECKING:
    import duckdb

KIND = "participation log"

CLIENT_COLUMNS = ("client", "client_id")
ROUND_COLUMN = "round"

_KNOWN_COLUMNS = (*CLIENT_COLUMNS, ROUND_COLUMN, CONTRIBUTION_COLUMN)

# What programs write where there is no value. All such rows are without a client: taken for a
# pseudonym, it would hide whose participations they are.
MISSING_VALUES = ("", "nan", "null", "none", "<na>", "n/a")


# What may stand for no value as well, but is a name that somebody could have.
DOUBTFUL_VALUES = (
    "na",
    "#n/a",
    "\\n",
    "nil",
    "undefined",
    "unknown",
    "-",
    "(null)",
    "00000000-0000-0000-0000-000000000000",
    "0" * 32,
)

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

# The round that hardly any client's participations span, among many that took part repeatedly.
_RENAMED = """
    WITH clients AS (SELECT min(round) AS first_round, max(round) AS last_round FROM gaps
                     GROUP BY client HAVING min(round) < max(round)),
    ends AS (SELECT first_round AS round, 1 AS begun, 0 AS ended FROM clients
             UNION ALL SELECT last_round, 0, 1 FROM clients),
    rounds AS (SELECT round, sum(sum(begun)) OVER earlier AS begun, sum(sum(ended)) OVER earlier
                      AS ended, (SELECT count(*) FROM clients) AS clients
               FROM ends GROUP BY round
               WINDOW earlier AS (ORDER BY round ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
    SELECT round FROM (SELECT round, begun - ended AS spanning,
                              least(ended, clients - begun) AS fewer FROM rounds)
    WHERE fewer >= 20 AND 20 * spanning <= fewer ORDER BY spanning / fewer, round LIMIT 1"""

# Types of columns that do not name a client: there are two, or several spellings, of a value.
_NO_NAMES = ("STRUCT", "MAP", "UNION", "BOOLEAN", "JSON", "VARIANT")

# Whole numbers below are told apart by these types.
_EXACT = {"FLOAT": 2**24, "DOUBLE": 2**53}

_TEXT_SUFFIXES = (".csv", ".jsonl", ".ndjson")
_MAX_LINE = 1_000_000


def supports(path: Path) -> bool:
    """Whether the name of the file is that of a log; `.gz` is for the text formats."""
    name = path.name.lower()
    return name.removesuffix(".gz").endswith(_TEXT_SUFFIXES) or name.endswith(".parquet")


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of a log."""
    run.check_no_timer(KIND)
    return read_shards([path], run)


def read_shards(paths: Sequence[Path], run: Run) -> Evidence:
    """Returns the evidence of a log in one file or in several."""
    observed = observe(paths, run)
    return Evidence(run=run.with_file(KIND, *paths), observed=run.limited(observed))


def observe(paths: Sequence[Path], run: Run, ledger: Ledger | None = None) -> ObservedParticipation:
    """Returns what the log says, which must not contradict the ledger, if there is one."""
    return read_participation_log(
        *paths,
        num_rounds=run.mechanism.num_rounds,
        rounds_completed=ledger.num_records if ledger else run.request.rounds_completed,
        contributions_by_round=ledger.contributions_by_round if ledger else None,
        fold_clients=run.request.fold_clients,
        smallest_count=run.request.smallest_count,
    )


def read_participation_log(
    *shards: str | os.PathLike[str],
    num_rounds: int,
    rounds_completed: int | None = None,
    contributions_by_round: Sequence[int] | None = None,
    fold_clients: bool = False,
    smallest_count: int = 1,
    memory_limit_mb: int = MEMORY_LIMIT_MB,
) -> ObservedParticipation:
    """Returns what a log says about participation, see the top of this file.

    Args:
      *shards: The log, in one file or in several.
      num_rounds: Planned rounds n of the mechanism; the log may have none outside of them.
      rounds_completed: How many rounds were completed, if known from elsewhere. None stands for
        the last round in the log.
      contributions_by_round: How many contributions each round had, from a ledger. The log must
        have as many.
      fold_clients: Whether all spellings of a client are one client, and names that may stand for a
        missing one are missing.
      smallest_count: Counts of clients below it are not named in cautions.
      memory_limit_mb: Megabytes of memory for the engine; what does not fit goes to a temporary
        folder, which is removed again.

    Raises:
      ParticipationLogError: The log cannot be read or proves nothing.
      OSError: The file does not exist or cannot be read.
    """
    import duckdb

    paths = [Path(shard) for shard in shards]
    path = paths[0]
    try:
        with _engine(memory_limit_mb) as engine:
            engine.execute(_LOGGED)
            cautions, assumptions, doubts = [], [], []
            for path in paths:
                with path.open("rb"):
                    pass  # A missing file is an OSError, whatever the engine would call it.
                assumptions += _check_text(path)
                cautions += _load(engine, path)
            path = paths[0]
            if not fold_clients:
                doubts += _spelling(engine, smallest_count)
            doubts += _notations(engine)
            cautions += _identify(engine, smallest_count, fold_clients=fold_clients)
            assumptions += _repeated(engine, smallest_count)
            counts = _count(engine)
            doubts += _renaming(engine) if counts.participations else []
        return observed_participation(
            counts,
            num_rounds=num_rounds,
            rounds_completed=rounds_completed,
            contributions_by_round=contributions_by_round,
            source="a participation log"
            if len(paths) == 1
            else f"a participation log in {len(paths)} files",
            cautions=cautions,
            assumptions=assumptions,
            doubts=doubts,
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
        doubts = _renaming(engine)
    contributions = np.bincount(table["round"], minlength=rounds_completed).tolist()
    return observed_participation(
        counts,
        num_rounds=rounds_completed,
        rounds_completed=rounds_completed,
        contributions_by_round=contributions,
        source=source,
        doubts=doubts,
    )


@contextlib.contextmanager
def _engine(memory_limit_mb: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields an engine of its own, which cannot reach the network and cleans up its disk space."""
    import duckdb

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
            engine.create_function("without_spelling", without_spelling, ["VARCHAR"], "VARCHAR")
            with interruptible(engine.interrupt):
                yield engine
        finally:
            engine.close()


# A row for each row of the shards. `contribution` is a hash, none if no contribution is named.
_LOGGED = """
    CREATE TEMP TABLE logged (client UBIGINT, folded UBIGINT, anonymous BOOLEAN, doubtful BOOLEAN,
                              notation TINYINT, round BIGINT, contribution UBIGINT)"""

# Most names are their own, or numbers, or of such letters and digits that a plain replacement does.
_PLAIN = "[a-z0-9]*[g-z][a-z0-9]*"
_DECIMAL = "[1-9][0-9]{0,37}|0"
_HEXADECIMAL = "[0-9]*[a-f][0-9a-f]*"
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WORDS = "[a-z0-9_.-]*[g-z][a-z0-9_.-]*"

# What has a sign in 32 bits.
_NEGATIVE = "^([89a-f][0-9a-f]{7})$"

# Small letters, Cyrillic, Greek and others, that look like Latin ones, large or small; dashes.
_LOOK_ALIKE = str.maketrans(
    "авекмнорстухіјѕԁһԛԝαβεζηικμνορτυχıɡɑ\u2010\u2011\u2012\u2013\u2014\u2212",
    "abekmhopctyxijsdhqwabezhikmnoptyxiga------",
)

# Accents, and what cannot be seen beside controls, marks and private characters.
_UNSEEN = re.compile(
    r"[\u0300-\u036f\u115f\u1160\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_PREFIX = re.compile(r"^(?:urn:uuid:|b(?=[\"'`]))")
_ROUNDED = re.compile(r"\d+\.\d+e\+?\d+|\d+e\+\d+")
_NUMBER = re.compile(r"([+-]*)0*(\d+)(?:\.0*)?")


def _folded(name: str) -> str:
    """Returns the SQL of what all spellings of a name have in common, see `without_spelling`."""

    def number(digits: str) -> str:
        return f"regexp_replace({digits}, {_quote(_NEGATIVE)}, {_quote('f' * 8 + chr(92) + '1')})"

    words = f"trim(regexp_replace({name}, '[_.-]+', '-', 'g'), '-')"
    return f"""CASE WHEN regexp_full_match({name}, {_quote(_DECIMAL)})
             THEN {number(f"lower(to_hex(TRY_CAST({name} AS UHUGEINT)))")}
        WHEN regexp_full_match({name}, {_quote(_HEXADECIMAL)}) THEN {number(f"ltrim({name}, '0')")}
        WHEN regexp_full_match({name}, {_quote(_UUID)}) AND regexp_matches({name}, '[a-f]')
             THEN {number(f"ltrim(replace({name}, '-', ''), '0')")}
        WHEN regexp_matches({name}, '^0x|(?:^|[_.-])0[0-9]') THEN without_spelling({name})
        WHEN regexp_full_match({name}, {_quote(_PLAIN)}) THEN {name}
        WHEN regexp_full_match({name}, {_quote(_WORDS)}) THEN {words}
        ELSE without_spelling({name}) END"""


# How a name is written that may be a number: so many decimal digits, or minus so many hexadecimal
# ones, or with 0x.
_NOTATION = """
    CASE WHEN regexp_full_match(client, '[0-9]+') THEN least(length(ltrim(client, '0')), 126)
         WHEN regexp_full_match(client, '[0-9a-fA-F]+') THEN -least(length(ltrim(client, '0')), 126)
         WHEN regexp_full_match(client, '0[xX][0-9a-fA-F]+') THEN -127 ELSE 0 END"""


@functools.lru_cache(maxsize=1 << 16)
def without_spelling(name: str) -> str:
    """Returns what all spellings of a name have in common, for people and for programs."""
    text = name.lower()
    if not (name.isascii() and name.isprintable()):
        text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", name).casefold())
        text = "".join(c for c in _UNSEEN.sub("", text) if unicodedata.category(c)[0] != "C")
        text = "".join(str(unicodedata.decimal(c, c)) for c in text.translate(_LOOK_ALIKE))
    text = text.strip()
    bare = _PREFIX.sub("", text).strip("'\"`(){}[]<>=;,: ")
    for known in (text, bare):
        if known in (*MISSING_VALUES, *DOUBTFUL_VALUES):
            return known
    if number := _NUMBER.fullmatch(bare):
        if "-" in number[1] and 0 < (value := int(number[2][:38])) <= 2**63:
            return f"{2**64 - value:x}"  # Read with a sign here, and without there.
        return _number(number[2])
    if _ROUNDED.fullmatch(bare):
        return ""  # A program rounded the number that was a client, as far as anybody knows.
    if bare.startswith("0x") and re.fullmatch("[0-9a-f]+", bare[2:]):
        return _number(bare[2:], 16)
    words = re.findall(r"[^\W_]+", bare)
    # The address of a network card, with or without zeros, or a UUID.
    digits = "".join(word.zfill(2) for word in words) if len(words) in (6, 8) else "".join(words)
    if re.fullmatch("[0-9a-f]+", digits) and (len(words) == 1 or len(digits) in (12, 16, 32)):
        return _number(digits)
    return "-".join(word.lstrip("0") or "0" if word.isdecimal() else word for word in words) or text


def _number(digits: str, base: int | None = None) -> str:
    """Returns what all notations of a number have in common: its digits in hexadecimal.

    Without a base, digits alone are decimal. Of 32 bits, one that has a sign is of 64.
    """
    if base is None and digits.isdecimal() and len(digits) <= 38:
        digits = f"{int(digits):x}"
    return re.sub(_NEGATIVE, r"ffffffff\1", digits.lstrip("0") or "0")


def _load(engine: duckdb.DuckDBPyConnection, path: Path) -> list[str]:
    """Adds the rows of a shard to the table `logged`; returns cautions about the file."""
    columns, source, cautions = _source(engine, path)
    clients = [column for column in columns if column.strip().lower() in CLIENT_COLUMNS]
    if len(clients) > 1:
        raise ParticipationLogError(
            f"it has the columns {' and '.join(clients)}, and which of them tells clients apart is "
            "not known; rename the other one."
        )
    raw = f'"{clients[0]}"::VARCHAR'
    # In JSON a row can have other names than the first row, or a client that is no text or number.
    is_odd = "NOT plain" if "read_json" in source else "false"
    quoted = ['"' + column.replace('"', '""') + '"' for column in columns]
    row = f"concat({', '.join(quoted)})" if "read_csv" in source else raw
    missing = ", ".join(map(_quote, MISSING_VALUES))
    doubtful = ", ".join(map(_quote, DOUBTFUL_VALUES))
    name = f'"{CONTRIBUTION_COLUMN}"::VARCHAR'
    contribution = (
        f"CASE WHEN lower(trim({name})) NOT IN ({missing}) THEN hash({name}) END"
        if CONTRIBUTION_COLUMN in columns
        else "NULL"
    )
    engine.execute(f"""
        INSERT INTO logged
        SELECT hash(client), hash(folded), coalesce(folded IN ({missing}) OR unclear, true),
               coalesce(folded IN ({doubtful}), false), {_NOTATION},
               CASE WHEN regexp_full_match(number, '[+-]?[0-9]{{1,18}}([.]0*)?')
                    THEN split_part(number, '.', 1)::BIGINT END,
               contribution
        FROM (SELECT trim({raw}) AS client,
                     {_folded(raw)} AS folded,
                     {is_odd} OR regexp_matches({row}, '[\\n\\r]') AS unclear,
                     trim("{ROUND_COLUMN}"::VARCHAR) AS number, {contribution} AS contribution
              FROM {source})""")
    return cautions


def _spelling(engine: duckdb.DuckDBPyConnection, smallest: int) -> list[str]:
    """Returns what is assumed if names look like spellings of others, or like none."""
    clients, folded, doubtful = _fetch_one(
        engine,
        "SELECT count(DISTINCT client), count(DISTINCT folded), count_if(doubtful) FROM logged",
    )
    doubts = []
    if clients > folded:
        doubts.append(
            f"Of the clients {shown_count(clients - folded, smallest)} are spelled like others but "
            "for zeros, capital letters, quotes, letters that look alike, characters that cannot "
            "be seen or the notation of a number, and count as clients of their own; if each is "
            "one client in several spellings, its participations are more, and closer, than "
            "stated: state fold_clients."
        )
    if doubtful:
        doubts.append(
            f"Rows, {shown_count(doubtful, smallest)} of them, have a client such as NA or nil, "
            "which may stand for no client at all; they count as a client of that name. State "
            "fold_clients to refuse them."
        )
    return doubts


def _notations(engine: duckdb.DuckDBPyConnection) -> list[str]:
    """Returns what is assumed if names look like numbers, some decimal and some hexadecimal."""
    question = "SELECT coalesce(max(notation), 0), -min(notation) FROM logged"
    decimal, other = _fetch_one(engine, question)
    if decimal <= 0 or not (other == 127 or 0 < other < decimal):
        return []
    doubt = (
        "Names look like numbers of several notations, decimal and hexadecimal; that no client has "
        "two of them is assumed. Write all names in one notation."
    )
    return [doubt]


def _identify(engine: duckdb.DuckDBPyConnection, smallest: int, *, fold_clients: bool) -> list[str]:
    """Makes contributions(client, anonymous, round) of the rows; returns cautions about them."""
    client = "folded" if fold_clients else "client"
    anonymous = "anonymous OR doubtful" if fold_clients else "anonymous"
    columns = f"{client} AS client, {anonymous} AS anonymous, round"
    (named,) = _fetch_one(engine, "SELECT count(contribution) FROM logged")
    if not named:
        engine.execute(f"CREATE TEMP VIEW contributions AS SELECT {columns} FROM logged")
        return []
    # A contribution is one client's, in one round. Rows that name none are contributions of their
    # own, and so are those of a name that several clients or rounds share.
    engine.execute(f"""
        CREATE TEMP TABLE contributions AS
        WITH rows AS (SELECT {columns}, contribution FROM logged),
        names AS (SELECT contribution FROM rows WHERE contribution IS NOT NULL
                  GROUP BY contribution HAVING count(DISTINCT (client, round)) = 1)
        SELECT client, anonymous, round FROM (
            SELECT DISTINCT client, anonymous, round, contribution FROM rows SEMI JOIN names
            USING (contribution))
        UNION ALL
        SELECT client, anonymous, round FROM rows WHERE contribution IS NULL
        UNION ALL
        SELECT client, anonymous, round FROM rows ANTI JOIN names USING (contribution)
        WHERE contribution IS NOT NULL""")
    (shared,) = _fetch_one(
        engine,
        f"""SELECT count(*) FROM (SELECT contribution FROM logged WHERE contribution IS NOT NULL
            GROUP BY contribution HAVING count(DISTINCT ({client}, round)) > 1)""",
    )
    caution = (
        f"Values of {CONTRIBUTION_COLUMN} ({shown_count(shared, smallest)}) stand with several "
        "clients or rounds, so they do not name a contribution; each of their rows counts."
    )
    return [caution] if shared else []


def _repeated(engine: duckdb.DuckDBPyConnection, smallest: int) -> list[str]:
    """Returns what is assumed if rows were taken for repetitions of others."""
    (rows,) = _fetch_one(engine, "SELECT count(*) FROM logged")
    (kept,) = _fetch_one(engine, "SELECT count(*) FROM contributions")
    if kept == rows:
        return []
    assumption = (
        f"Rows, {shown_count(rows - kept, smallest)} of them, repeat another one by their "
        f"{CONTRIBUTION_COLUMN} and do not count; that the column is right is assumed."
    )
    return [assumption]


def _source(engine: duckdb.DuckDBPyConnection, path: Path) -> tuple[list[str], str, list[str]]:
    """Returns the columns of the log, the SQL that reads them, all text as text, and cautions."""
    if not supports(path):
        raise ParticipationLogError(
            f"a log is a file with the suffix {', '.join(_TEXT_SUFFIXES)}, .parquet, or .gz after "
            "one of the text formats."
        )
    literal, name = _literal(path), path.name.lower().removesuffix(".gz")
    known = _KNOWN_COLUMNS
    cautions = [
        f"The folder name {urllib.parse.quote(part, safe='=')} was not read; the columns of the "
        "file say who took part when."
        for part in sorted({part for part in path.absolute().parts if part.split("=")[0] in known})
        if "=" in part
    ]
    plain = "hive_partitioning=false"  # A folder called round=7 would replace the column.
    if name.endswith(".parquet"):
        # Names of an older writer are bytes, which are texts as well.
        source = f"read_parquet({literal}, {plain}, binary_as_string=true)"
        # The engine renames the second of two columns that differ by capital letters alone.
        query = f"SELECT name, coalesce(num_children, 0) FROM parquet_schema({literal})"
        _check_columns(_columns_of_schema(engine.execute(query).fetchall()))
        described = engine.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
        for column, kind, *_ in described:
            if column in CLIENT_COLUMNS and (kind.startswith(_NO_NAMES) or kind.endswith("]")):
                raise ParticipationLogError(
                    f"its column {column} is of type {kind[:40]}; clients must be texts or numbers."
                )
            if column in CLIENT_COLUMNS and kind in _EXACT:
                largest = _fetch_one(engine, f'SELECT max(abs("{column}")) FROM {source}')[0]
                if largest is not None and largest >= _EXACT[kind]:
                    raise ParticipationLogError(
                        f"its column {column} is of type {kind}, which rounds numbers from "
                        f"{_EXACT[kind]} on, so other shards may call its clients otherwise; "
                        "write them as text."
                    )
        return [row[0] for row in described], source, cautions
    columns = _text_columns(path, is_csv=name.endswith(".csv"))
    _check_columns(columns)
    if name.endswith(".csv"):
        # What else is there may have no name, as the index of a table, or one that it shares.
        columns = [
            column if column.strip().lower() in known else f"column {number}"
            for number, column in enumerate(columns)
        ]
        types = ", ".join(f"{_quote(column)}: 'VARCHAR'" for column in columns)
        options = f"header=true, auto_detect=false, delim=',', quote='\"', escape='\"', {plain}"
        return columns, f"read_csv({literal}, {options}, columns={{{types}}})", cautions
    values = ", ".join(f"json->>'{column}' AS \"{column}\"" for column in known)
    kinds = ", ".join(f"json_type(json, '{column}')" for column in CLIENT_COLUMNS)
    rounded = " OR ".join(
        f"json_type(json, '{column}') = 'DOUBLE' AND "
        f"abs(TRY_CAST(json->>'{column}' AS DOUBLE)) >= {_EXACT['DOUBLE']}"
        for column in CLIENT_COLUMNS
    )
    objects = f"read_json_objects({literal}, format='newline_delimited', {plain})"
    source = f"""
        (SELECT {values}, len(names) = len(list_distinct(names))
                AND len([name FOR name IN names IF name IN {CLIENT_COLUMNS}]) = 1
                AND coalesce({kinds}, '') NOT IN ('OBJECT', 'ARRAY', 'BOOLEAN')
                AND NOT coalesce({rounded}, false) AS plain
         FROM (SELECT json, [lower(trim(name)) FOR name IN json_keys(json)] AS names
               FROM {objects}))"""
    return columns, source, cautions


def _check_text(path: Path) -> list[str]:
    """Reads all of a text, which checks its checksum if it has one; returns what is assumed."""
    if path.name.lower().endswith(".parquet"):
        return []
    last = b""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            while chunk := file.read(1 << 20):
                if b"\0" in chunk:
                    raise ParticipationLogError(
                        "it holds zero bytes, as a file that was cut by a crash does; restore it."
                    )
                last = chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ParticipationLogError(f"it is damaged ({error}); restore it.") from error
    if last.endswith((b"\n", b"\r")):
        return []
    return ["The last line of the log has no end; that it was not cut off is assumed."]


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
    return columns


def _columns_of_schema(entries: Sequence[tuple[str, int]]) -> list[str]:
    """Returns the columns of a Parquet file, without the fields within them.

    Args:
      entries: Name and number of fields of the root, and of all below it, each before its fields.
    """
    columns, within = [], 0  # So many fields follow that are within a column.
    for name, fields in entries[1:]:
        if not within:
            columns.append(name)
        within += fields - bool(within)
    return columns


def _check_columns(columns: Sequence[str]) -> None:
    names = [column.lower() for column in columns]
    if any(names.count(column) > 1 for column in _KNOWN_COLUMNS):
        raise ParticipationLogError("two of its columns have the same name.")
    if not {*columns} & {*CLIENT_COLUMNS} or ROUND_COLUMN not in columns:
        raise ParticipationLogError(
            f"a log needs the columns {CLIENT_COLUMNS[0]} and {ROUND_COLUMN}. Found "
            f"{', '.join(columns)[:200] or 'none'}."
        )


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


def _renaming(engine: duckdb.DuckDBPyConnection) -> list[str]:
    """Returns what is assumed if names changed at some round: hardly any stand on both sides."""
    found = engine.execute(_RENAMED).fetchone()
    if found is None:
        return []
    doubt = (
        f"Hardly any client took part both before round {found[0]} and from it on, though many "
        "took part repeatedly: if their names changed there, participations are more, and closer, "
        "than stated."
    )
    return [doubt]


def _fetch_one(engine: duckdb.DuckDBPyConnection, query: str) -> tuple:
    row = engine.execute(query).fetchone()
    assert row is not None
    return row
