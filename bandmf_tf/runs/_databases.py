"""Where a participation registry is kept: SQLite in a file, or PostgreSQL by URL.

Both answer the same SQL, with `?` for values. A transaction is the only one that writes: SQLite
locks its file, on PostgreSQL the first statement locks a table, so that whatever a transaction
reads stays true until it is committed, whoever else is at work. What was committed is on disk:
SQLite flushes its log (`synchronous=FULL`), and a PostgreSQL told not to flush is refused.

A commit whose answer is lost may have happened. That is safe here: what it adds is only ever
participation that somebody was to be charged with.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bandmf_tf._files import write_atomically
from bandmf_tf.errors import BandMFError

# The tables, and by what their rows are told apart.
TABLES = {
    "settings": ("name",),
    "rounds": ("round",),
    "clients": ("client",),
    "participations": ("round", "client"),
}

# "bmfr"; stands in every file, so that one is known without being opened.
APPLICATION_ID = 0x626D6672

_SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rounds (
  round INTEGER PRIMARY KEY CHECK (round >= 0),
  attempt INTEGER NOT NULL,
  state INTEGER NOT NULL,
  begun TEXT NOT NULL,
  closed TEXT
);
CREATE TABLE clients (
  client {binary} PRIMARY KEY CHECK (length(client) = 16),
  last_round INTEGER CHECK (last_round >= 0),
  participations INTEGER NOT NULL CHECK (participations >= 0)
) {clustered};
CREATE TABLE participations (
  round INTEGER NOT NULL,
  client {binary} NOT NULL CHECK (length(client) = 16),
  attempt INTEGER NOT NULL,
  outcome INTEGER NOT NULL,
  previous INTEGER,
  PRIMARY KEY (round, client)
) {clustered};
"""

# Where the tables are in PostgreSQL: one registry in each of its databases.
_PG_SCHEMA = "bandmf_registry"

# Pages that SQLite may keep in memory; a cohort touches thousands.
_CACHE_KB = 64_000

# Seconds for which a transaction waits for those of other programs.
_LONGEST_WAIT = 60


class RegistryError(BandMFError):
    """A participation registry refuses, or cannot be used; the message says why."""


class Work:
    """A transaction: statements that are committed together or not at all."""

    def __init__(self, cursor: Any, marker: str):
        self._cursor = cursor
        self._marker = marker

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple]:
        """Returns the answer to a question."""
        self._cursor.execute(sql.replace("?", self._marker), values)
        return self._cursor.fetchall()

    def change(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Changes rows; returns how many."""
        self._cursor.execute(sql.replace("?", self._marker), values)
        return self._cursor.rowcount

    def change_each(self, sql: str, values: Sequence[Sequence[Any]]) -> int:
        """Changes rows for each of many values; returns how many."""
        if not values:
            return 0
        self._cursor.executemany(sql.replace("?", self._marker), values)
        return self._cursor.rowcount


class Database(Protocol):
    """What a registry needs."""

    def exists(self) -> bool:
        """Whether the tables are there."""

    def create(self) -> None:
        """Makes the tables, empty, durably; all or none."""

    def transaction(self) -> contextlib.AbstractContextManager[Work]:
        """Begins a transaction; at its end it is committed, on an error it is rolled back."""

    def close(self) -> None:
        """Ends the connection."""


class SQLite:
    """A registry in a file of its owner only."""

    def __init__(self, path: Path):
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._process = os.getpid()
        self._one_at_a_time = threading.Lock()

    def exists(self) -> bool:
        return self._path.exists()

    def create(self) -> None:
        with contextlib.closing(sqlite3.connect(":memory:")) as memory:
            make_tables(memory)
            write_atomically(self._path, memory.serialize(), owner_only=True, replace=False)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Work]:
        with self._one_at_a_time, _in_a_sentence(sqlite3.Error, f"The registry {self._path}"):
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_file()
                yield Work(connection.cursor(), "?")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()
        self._connection = None

    def _connected(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            raise RegistryError(
                f"The registry {self._path} was opened by the process that this is a fork of; "
                "start it in every process."
            )
        if self._connection is None:
            found = self._path.stat()
            self._file = (found.st_dev, found.st_ino)
            # mode=rw: a file that is gone is not made again, empty.
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=_LONGEST_WAIT,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _check_file(self) -> None:
        """Raises unless the path still leads to the file that was opened, and not to a copy."""
        found = self._path.stat() if self._path.exists() else None
        if found is None or (found.st_dev, found.st_ino) != self._file:
            raise RegistryError(
                f"The registry {self._path} was moved or replaced while it was in use; end all "
                "programs that use it, restore the newest file, and start again."
            )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (identity,) = connection.execute("PRAGMA application_id").fetchone()
        if identity != APPLICATION_ID:
            raise RegistryError(f"{self._path} is no participation registry; restore the file.")
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise RegistryError(
                f"The registry {self._path} must be on a local disk: SQLite can keep no log beside "
                f"it there. Found journal_mode={mode}."
            )
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA cache_size={-_CACHE_KB}")
        connection.execute("PRAGMA cell_size_check=ON")
        check_file(connection, self._path)


class PostgreSQL:
    """A registry in a database of PostgreSQL; its URL, with a password in it, is never shown."""

    def __init__(self, url: str):
        try:
            import psycopg
        except ImportError:
            raise RegistryError(
                "A registry in PostgreSQL needs psycopg; run `pip install 'psycopg[binary]'`."
            ) from None
        try:  # Here and not by the server, whose complaint would quote the password.
            psycopg.conninfo.conninfo_to_dict(url)
            place = url.partition("://")[2].partition("/")[0]
            is_plain = place.count("@") < 2 and not any(map(str.isspace, url))
        except psycopg.Error:
            is_plain = False
        if not is_plain:
            raise RegistryError(
                "database must be a valid URL of PostgreSQL; write special characters of names and "
                "passwords as %40 for @."
            )
        self._psycopg = psycopg
        self._url = url
        self._connection: Any = None
        self._process = os.getpid()
        self._one_at_a_time = threading.Lock()

    def exists(self) -> bool:
        with self._work() as work:
            found = work.rows(f"SELECT to_regclass('{_PG_SCHEMA}.participations') IS NOT NULL")
        return found == [(True,)]

    def create(self) -> None:
        with self._work() as work:
            work.change(f"CREATE SCHEMA {_PG_SCHEMA}")
            for statement in _schema("BYTEA", "").split(";")[:-1]:
                work.change(statement)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Work]:
        with self._work() as work:
            work.change("LOCK TABLE rounds IN EXCLUSIVE MODE")
            yield work

    def close(self) -> None:
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()
        self._connection = None

    @contextlib.contextmanager
    def _work(self) -> Iterator[Work]:
        with (
            self._one_at_a_time,
            _in_a_sentence(self._psycopg.Error, "The registry in PostgreSQL"),
            self._connected().transaction(),
            self._connection.cursor() as cursor,
        ):
            yield Work(cursor, "%s")

    def _connected(self) -> Any:
        if self._process != os.getpid():
            raise RegistryError(
                "The registry in PostgreSQL was opened by the process that this is a fork of; "
                "start it in every process."
            )
        if self._connection is None or self._connection.closed:
            connection = self._psycopg.connect(self._url, autocommit=True)
            connection.execute(f"SET search_path TO {_PG_SCHEMA}")
            connection.execute("SET synchronous_commit TO on")
            connection.execute(f"SET lock_timeout TO '{_LONGEST_WAIT}s'")
            for name in ("fsync", "full_page_writes"):
                found = connection.execute(f"SHOW {name}").fetchone()
                if found != ("on",):
                    connection.close()
                    raise RegistryError(
                        f"PostgreSQL must keep what it has acknowledged: set {name}=on. Found "
                        f"{found}."
                    )
            self._connection = connection
        return self._connection


def open_database(where: Path | str) -> Database:
    """Returns the database at a path, or at a URL of PostgreSQL."""
    if isinstance(where, Path):
        return SQLite(where)
    if where.startswith(("postgresql://", "postgres://")):
        return PostgreSQL(where)
    raise RegistryError(
        "database must be a URL that begins with postgresql://, or be left out for a file in the "
        f"folder. Found {where.partition(':')[0]!r}."
    )


def make_tables(connection: sqlite3.Connection) -> None:
    """Makes the tables in a new file of SQLite."""
    connection.executescript(_schema("BLOB", "WITHOUT ROWID"))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.commit()


def check_file(connection: sqlite3.Connection, path: Path) -> None:
    """Raises RegistryError unless the pages of a file of SQLite fit together."""
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        reason = found[0].splitlines()[-1]
        raise RegistryError(f"The registry {path} is damaged ({reason}); restore a copy of it.")


def _schema(binary: str, clustered: str) -> str:
    return _SCHEMA.format(binary=binary, clustered=clustered)


@contextlib.contextmanager
def _in_a_sentence(errors: type[Exception], name: str) -> Iterator[None]:
    try:
        yield
    except errors as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RegistryError(
            f"{name} cannot be used ({reason[0]}); add and release nothing on its account, mend "
            "that and start again."
        ) from error
