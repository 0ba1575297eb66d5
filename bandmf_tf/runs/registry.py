"""The participation registry: who took part when, and who may be asked for a round.

A server that knows its clients need not believe their timers. The registry keeps, under pseudonyms
(`ledger.Pseudonyms`), in which round each client last took part and how often, and admits nobody
sooner than `min_separation` rounds after that (`b = r2 - r1`) or more than `max_participations`
times. It decides and writes in one transaction, so that any number of server programs admit a
client once. A round goes through

    begin_round     the attempt is durable; an older attempt at the same round is shut out
    invite          who is invited is charged with the round, durably, before `invite` returns
    arrived         before anything of a client is added to a sum; it stays charged for good
    dropped         a client has failed, or is too late: nothing of it may be added any more
    count           before anything is released: who is in the sum; the round is closed
    discard         instead of `count`: there is no result, and there will be none

Who was invited and has not arrived when an attempt is closed (counted, discarded, or begun again
after a crash) gets the participation back: from then on the registry refuses what may still come of
it, so nothing of it is in any sum. That is the only way back. Whatever arrived counts, even if its
round was discarded or its program died: nobody can prove what became of a sum in memory. All this
holds for programs that add only what `arrived` has returned, and release only what `count` has
closed.

Rounds are the rows of the strategy: from 0, without gaps, never back, none beyond the plan. The
last round may be begun again as long as its result was not released; no client is in two attempts.
So a registry that was put back to an older state refuses the next round of its run.

A program that was put back, and the registry was not, is refused as well, because its noise may be
that of rounds which were released. `private_learning_process` takes every row of noise once, and
tells the registry which attempts had one (`row_taken`). The registry then goes on by itself: an
attempt that had its row is counted, with everybody of whom something had arrived, and the program
gets the round after it. Rounds stay the rows of the strategy, whatever number the program gives.
The registry keeps which attempt had the newest row, so that noise that was put back is refused.

A folder, its owner's only, holds the salt (`participation_salt`) and, unless PostgreSQL has it, the
database (`registry.sqlite`). One without the other is refused: it was lost, and with it who took
part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from bandmf_tf import _checks
from bandmf_tf._files import locked, make_secret_folder, write_atomically
from bandmf_tf._provenance import exact_now
from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.factorization.participation import MinSeparation, SingleParticipation
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs._databases import (
    TABLES,
    Database,
    RegistryError,
    Work,
    make_tables,
    open_database,
)
from bandmf_tf.runs.ledger import (
    FLAG_DROPPED_CLIENTS,
    SEPARATION_CONVENTION,
    Pseudonyms,
    RoundRecord,
    is_pseudonym,
)

__all__ = [
    "CountedRound",
    "Outcome",
    "ParticipationRegistry",
    "RegistryError",
    "RegistryRound",
    "RoundState",
]

FORMAT = "bandmf_tf participation registry"
VERSION = 1

SALT = "participation_salt"
DATABASE = "registry.sqlite"

# The setting that changes: round and attempt that had the newest row of noise.
_NEWEST_ROW = "newest_row"

# Clients that one statement asks for, that one transaction decides, and that one makes known: as
# many as make it worth while to touch most pages of the table.
_CHUNK, _BATCH, _ENROLLED = 500, 10_000, 500_000


class RoundState(enum.IntEnum):
    """What became of the newest attempt at a round."""

    OPEN = 0
    COUNTED = 1
    DISCARDED = 2


class Outcome(enum.IntEnum):
    """What became of a client that was invited."""

    INVITED = 0
    """Nothing has arrived yet; charged until the attempt is closed."""

    DROPPED = 1
    """It failed or came too late; charged until the attempt is closed, not from then on."""

    ARRIVED = 2
    """Something of it could be in a sum; charged for good."""

    LEFT_OUT = 3
    """It arrived and failed then; charged for good, whatever became of its part."""

    COUNTED = 4
    """It is in the sum of its round; charged for good."""


CHARGED = (Outcome.ARRIVED, Outcome.LEFT_OUT, Outcome.COUNTED)
_RETURNED = (Outcome.INVITED, Outcome.DROPPED)


@dataclasses.dataclass(frozen=True)
class CountedRound:
    """A round that was closed with a result; what its line in the ledger needs.

    Attributes:
      round: Its number.
      start: When it was begun, by the clock of the server.
      end: When it was closed.
      participants: Sorted pseudonyms of the clients in the sum.
      flags: How many clients were invited and are not in the sum, if any.
      mechanism_checksum: The mechanism of the registry.
    """

    round: int
    start: str
    end: str
    participants: tuple[str, ...]
    flags: dict[str, int]
    mechanism_checksum: str

    def record(self, model_digest: str) -> RoundRecord:
        """Returns the record for a ledger with pseudonyms under the salt of the registry."""
        return RoundRecord(
            round=self.round,
            start=self.start,
            end=self.end,
            num_participants=len(self.participants),
            mechanism_checksum=self.mechanism_checksum,
            model_digest=model_digest,
            participants=self.participants,
            flags=self.flags,
        )


class ParticipationRegistry:
    """Who took part when, durably; see the top of this file. Use `start`.

    Attributes:
      mechanism_checksum: The mechanism that it keeps to.
      num_rounds: Its rounds.
      min_separation: After how many rounds a client is admitted again.
      max_participations: How often it is.
      row_taken: Whether an attempt had its row of noise, by round and attempt, where every row is
        taken once; None where a program that goes back has the same row again.
    """

    def __init__(self, database: Database, pseudonyms: Pseudonyms, mechanism: Mechanism, name: str):
        self._database = database
        self._pseudonyms = pseudonyms
        self._name = name
        self.mechanism_checksum = mechanism_checksum(mechanism)
        self.row_taken: Callable[[int, int], bool] | None = None
        self.num_rounds = mechanism.num_rounds
        self.min_separation = mechanism.participation.separation(self.num_rounds)
        self.max_participations = mechanism.participation.most(self.num_rounds)

    @classmethod
    def start(
        cls,
        folder: str | os.PathLike[str],
        mechanism: Mechanism,
        *,
        database: str | None = None,
    ) -> ParticipationRegistry:
        """Begins a registry, or goes on with the one that is there.

        Args:
          folder: Folder of the salt and of the database, its owner's only. The folder `secret` of a
            run may be it, before the run is started: its ledger then has the same pseudonyms.
          mechanism: The mechanism of the run, which says how far apart clients take part at least
            and how often at most; the same one at every start.
          database: The URL of a PostgreSQL database; None for SQLite in the folder.

        Raises:
          RegistryError: It is damaged, incomplete, open to others, or of another mechanism.
        """
        _check_plan(mechanism)
        try:
            place = make_secret_folder(folder)
        except OSError:
            raise RegistryError(
                f"{os.fspath(folder)} must be a folder of your own that nobody else can open; give "
                "another, or find out who has seen it, then run `chmod 700` on it."
            ) from None
        tables = open_database(place / DATABASE if database is None else database)
        name = os.fspath(place / DATABASE) if database is None else "in PostgreSQL"
        try:
            with locked(place):  # One program begins it.
                if not tables.exists():
                    _check_not_lost((place / SALT).exists(), place / SALT, f"the registry {name}")
                    tables.create()
                for path in (*place.glob(f"{DATABASE}*"), *place.glob(SALT)):
                    _check_closed(path)
                with tables.transaction() as work:
                    settings = dict(work.rows("SELECT name, value FROM settings"))
                    settings.pop(_NEWEST_ROW, None)
                    # Without any, a crash came before the first start was over.
                    is_new = not settings and cls._last(work) is None
                    pseudonyms = _salt(place / SALT, name, is_new)
                    registry = cls(tables, pseudonyms, mechanism, name)
                    expected = registry._settings()
                    if is_new:
                        work.change_each("INSERT INTO settings VALUES (?, ?)", [*expected.items()])
                    else:
                        _check_settings(settings, expected, name)
        except BaseException as error:
            tables.close()
            if isinstance(error, OSError):
                raise RegistryError(
                    f"The registry in {place} cannot be started ({error.strerror}); mend that and "
                    "start again."
                ) from error
            raise
        return registry

    @property
    def identity(self) -> str:
        """Names the registry: the digest of its salt."""
        return self._pseudonyms.salt_id

    @property
    def open_attempt(self) -> RegistryRound | None:
        """The attempt that is neither counted, discarded nor overtaken; None if there is none."""
        with self._database.transaction() as work:
            last = self._last(work)
        is_open = last is not None and last[2] == RoundState.OPEN
        return RegistryRound(self, *last[:2]) if last is not None and is_open else None

    def take_row(self, before: tuple[int, int] | None, now: tuple[int, int] | None = None) -> None:
        """Writes down which attempt gets a row of noise, before it does; None: only looks.

        Args:
          before: The attempt that had the newest row, by the noise; None for noise that is new.
          now: The attempt that gets the next one.

        Raises:
          RegistryError: A later attempt had a row, which this noise does not know.
        """
        with self._database.transaction() as work:
            rows = work.rows("SELECT value FROM settings WHERE name = ?", (_NEWEST_ROW,))
            known = [tuple(map(int, value.split())) for (value,) in rows]
            if before is not None and known and known[0] > before:
                raise RegistryError(
                    f"The registry {self._name} knows a row of noise of round {known[0][0]}, and "
                    f"the noise ends with round {before[0]}: it was put back, or copied; restore "
                    "its newest state, or go on with an empty folder for the noise."
                )
            if now is not None:
                work.change(
                    "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET "
                    "value = excluded.value",
                    (_NEWEST_ROW, f"{now[0]} {now[1]}"),
                )

    def pseudonym(self, client_id: str) -> str:
        """Returns the name of a client in the registry and in ledgers of the same salt."""
        return self._pseudonyms.digest(client_id).hex()

    def enroll(self, client_ids: Iterable[str]) -> None:
        """Makes clients known that have not been invited yet, for `eligible`."""
        for batch in _batches(client_ids, _ENROLLED):
            names = sorted(self._names(batch))
            with self._database.transaction() as work:
                work.change_each(
                    "INSERT INTO clients VALUES (?, NULL, 0) ON CONFLICT (client) DO NOTHING",
                    [(name,) for name in names],
                )

    def eligible(self, number: int, client_ids: Iterable[str] | None = None) -> Iterator[str]:
        """Yields who may be asked for a round, as things stand; `invite` decides.

        Args:
          number: The round.
          client_ids: Of whom; their ids are yielded then. None stands for all that the registry
            knows, whose pseudonyms are yielded.
        """
        number = self._check_number(number)
        if client_ids is not None:
            for batch in _batches(client_ids):
                names = self._names(batch)
                with self._database.transaction() as work:
                    known = self._known(work, names, number)
                yield from (
                    names[n] for n in names if self._allows(number, *known.get(n, (None, 0)))
                )
            return
        last = b""
        while True:
            with self._database.transaction() as work:
                found = work.rows(
                    "SELECT client FROM clients WHERE client > ? AND participations < ? AND "
                    "(last_round IS NULL OR last_round <= ?) ORDER BY client LIMIT ?",
                    (last, self.max_participations, number - self.min_separation, _BATCH),
                )
            if not found:
                return
            yield from (bytes(name).hex() for (name,) in found)
            last = found[-1][0]

    def begin_round(self, number: int) -> RegistryRound:
        """Begins a round, or begins the last one again, which shuts out its earlier attempt.

        Args:
          number: The round that your program has not released yet, `TrainingRun.next_round`. A
            program that was put back, with noise of which every row is taken once, gets a later
            round.

        Raises:
          RegistryError: It is not the next round, or beyond the plan.
        """
        number = self._check_number(number)
        with self._database.transaction() as work:
            number = self._check_number(self._not_back(work, number))
            last = self._last(work)
            if last is not None and number == last[0]:
                attempt = last[1] + 1
                if last[2] == RoundState.OPEN:
                    _give_back(work, number, last[1])
                work.change(
                    "UPDATE rounds SET attempt = ?, state = ?, begun = ?, closed = NULL "
                    "WHERE round = ?",
                    (attempt, RoundState.OPEN, exact_now(), number),
                )
            else:
                if last is not None and last[2] != RoundState.COUNTED:
                    raise RegistryError(
                        f"Round {last[0]} was not counted; count it (`join_round`), or begin it "
                        f"again, before round {number}."
                    )
                attempt = 0
                work.change(
                    "INSERT INTO rounds VALUES (?, ?, ?, ?, NULL)",
                    (number, attempt, RoundState.OPEN, exact_now()),
                )
        return RegistryRound(self, number, attempt)

    def _not_back(self, work: Work, number: int) -> int:
        """Returns the round to begin for a program that wants round `number`."""
        last, attempt, state = self._last(work) or (-1, 0, RoundState.COUNTED)
        if number > last + 1:
            raise RegistryError(
                f"The registry {self._name} expects round {last + 1}, and rounds leave no gap; "
                f"restore its newest state, if it was put back. Found round {number}."
            )
        if number == last + 1:
            return number
        if self.row_taken is None:
            if number < last:
                raise RegistryError(
                    f"The registry {self._name} is at round {last}, and rounds do not go back; "
                    "restore the newest state of your program, or give the registry to "
                    f"private_learning_process, which repeats no noise. Found round {number}."
                )
            return number
        if state == RoundState.OPEN and self.row_taken(last, attempt):
            _count(work, last, attempt)
            state = RoundState.COUNTED
        return last + 1 if state == RoundState.COUNTED else last

    def join_round(self, number: int) -> RegistryRound:
        """Returns the open round, for another program that serves it, too."""
        number = self._check_number(number)
        with self._database.transaction() as work:
            last = self._last(work)
        if last is None or (last[0], last[2]) != (number, RoundState.OPEN):
            raise RegistryError(f"Round {number} is not open; begin it first.")
        return RegistryRound(self, number, last[1])

    def outcomes(self, number: int) -> dict[Outcome, int]:
        """Returns how many clients of a round, all attempts together, came to what."""
        number = self._check_number(number)
        with self._database.transaction() as work:
            rows = work.rows(
                "SELECT outcome, count(*) FROM participations WHERE round = ? GROUP BY outcome",
                (number,),
            )
        return {Outcome(outcome): count for outcome, count in rows}

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes all of the registry into one new file, its owner's only, for a privacy report."""
        path = Path(path)
        try:
            write_atomically(path, b"", owner_only=True, replace=False)
        except OSError as error:
            raise RegistryError(
                f"{path} must be a new file ({error.strerror}); give another name."
            ) from error
        try:
            with (
                contextlib.closing(sqlite3.connect(path)) as copy,
                self._database.transaction() as work,
            ):
                make_tables(copy)
                for table in TABLES:
                    for rows in _pages(work, table):
                        marks = ", ".join("?" * len(rows[0]))
                        copy.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
                copy.commit()
        except BaseException:
            path.unlink()
            raise

    def close(self) -> None:
        """Ends the use of the database."""
        self._database.close()

    def __enter__(self) -> ParticipationRegistry:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _settings(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "separation": SEPARATION_CONVENTION,
            "mechanism_checksum": self.mechanism_checksum,
            "salt_id": self._pseudonyms.salt_id,
            "num_rounds": str(self.num_rounds),
            "min_separation": str(self.min_separation),
            "max_participations": str(self.max_participations),
        }

    def _check_number(self, number: int) -> int:
        number = _checks.int_at_least("round", number, 0)
        if number >= self.num_rounds:
            raise RegistryError(
                f"The mechanism was planned for num_rounds={self.num_rounds}; plan a longer one to "
                f"go on. Found round {number}, counted from 0."
            )
        return number

    def _names(self, client_ids: Sequence[str]) -> dict[bytes, str]:
        return {self._pseudonyms.digest(client_id): client_id for client_id in client_ids}

    def _known(
        self, work: Work, names: Iterable[bytes], number: int
    ) -> dict[bytes, tuple[int | None, int]]:
        """Returns the last round and the participations of the clients that are known."""
        found: dict[bytes, tuple[int | None, int]] = {}
        for chunk in _batches(names, _CHUNK):
            marks = ", ".join("?" * len(chunk))
            rows = work.rows(
                f"SELECT client, last_round, participations FROM clients WHERE client IN ({marks})",
                chunk,
            )
            for client, last, count in rows:
                if (last is None) != (count == 0) or (last is not None and last > number):
                    raise RegistryError(
                        f"The registry {self._name} contradicts itself: {count} participations "
                        f"until round {last} of a client in round {number}; restore a copy of it."
                    )
                found[bytes(client)] = (last, count)
        return found

    def _check_no_pseudonyms(self, work: Work, client_ids: Iterable[str], number: int) -> None:
        """Raises if a client goes by its pseudonym, which `eligible` yields, and not by its id."""
        digests = [bytes.fromhex(name) for name in client_ids if is_pseudonym(name)]
        if known := self._known(work, digests, number):
            raise RegistryError(
                f"Clients are invited by their ids, and {next(iter(known)).hex()} is the pseudonym "
                "of one, which would count as another client; give `eligible` the ids."
            )

    def _allows(self, number: int, last: int | None, count: int) -> bool:
        """Whether a client with such a past may take part."""
        rested = last is None or number - last >= self.min_separation
        return rested and count < self.max_participations

    @staticmethod
    def _last(work: Work) -> tuple[int, int, int] | None:
        """Returns number, attempt and state of the last round that was begun."""
        rows = work.rows("SELECT round, attempt, state FROM rounds ORDER BY round DESC LIMIT 1")
        return rows[0] if rows else None


class RegistryRound:
    """One attempt at a round. Any number of programs may serve it, each with its own object."""

    def __init__(self, registry: ParticipationRegistry, number: int, attempt: int):
        self._registry = registry
        self.number = number
        self.attempt = attempt

    def invite(self, client_ids: Iterable[str], at_most: int | None = None) -> list[str]:
        """Admits clients to the round, in the order given; returns those that may be asked.

        They are charged with the round, durably, when this returns. Nobody is admitted twice,
        whoever asks.

        Args:
          client_ids: Who could be asked. It is read as far as needed.
          at_most: How many are wanted; None for all that may take part.
        """
        wanted = None if at_most is None else _checks.int_at_least("at_most", at_most, 0)
        registry, admitted = self._registry, list[str]()
        for batch in _batches(client_ids):
            names = registry._names(batch)
            with self._open() as work:
                registry._check_no_pseudonyms(work, batch, self.number)
                known = registry._known(work, names, self.number)
                chosen = [
                    (name, known.get(name, (None, 0))[0])
                    for name in names
                    if registry._allows(self.number, *known.get(name, (None, 0)))
                ]
                chosen = chosen[: None if wanted is None else wanted - len(admitted)]
                work.change_each(
                    "INSERT INTO clients VALUES (?, ?, 1) ON CONFLICT (client) DO UPDATE SET "
                    "last_round = excluded.last_round, participations = clients.participations + 1",
                    [(name, self.number) for name, _ in chosen],
                )
                # Of an earlier attempt at this round there can be those that got it back.
                added = work.change_each(
                    "INSERT INTO participations VALUES (?, ?, ?, ?, ?) ON CONFLICT (round, client) "
                    "DO UPDATE SET attempt = excluded.attempt, outcome = excluded.outcome, "
                    "previous = excluded.previous "
                    f"WHERE participations.outcome = {Outcome.DROPPED:d}",
                    [(self.number, n, self.attempt, Outcome.INVITED, last) for n, last in chosen],
                )
                if added != len(chosen):
                    raise RegistryError(
                        f"The registry {registry._name} contradicts itself in round {self.number}; "
                        "restore a copy of it."
                    )
            admitted += [names[name] for name, _ in chosen]
            if wanted is not None and len(admitted) >= wanted:
                break
        return admitted

    def arrived(self, client_ids: Iterable[str]) -> list[str]:
        """Says that something of these clients is there; returns whose may be added to the sum.

        Not returned are clients that were not invited, have arrived before, or were dropped.
        """
        return self._move(client_ids, {Outcome.INVITED: Outcome.ARRIVED})

    def dropped(self, client_ids: Iterable[str]) -> list[str]:
        """Says that these clients failed or are too late; returns those that were taking part."""
        outcomes = {Outcome.INVITED: Outcome.DROPPED, Outcome.ARRIVED: Outcome.LEFT_OUT}
        return self._move(client_ids, outcomes)

    def count(self, *, minimum: int = 0) -> CountedRound:
        """Closes the round with a result, before anything of it is released: all that arrived.

        Args:
          minimum: With fewer clients in the sum it is refused, and the round stays open.
        """
        with self._open() as work:
            (here,) = work.rows(
                "SELECT count(*) FROM participations WHERE round = ? AND attempt = ? AND "
                f"outcome = {Outcome.ARRIVED:d}",
                (self.number, self.attempt),
            )[0]
            if here < _checks.int_at_least("minimum", minimum, 0):
                raise RegistryError(
                    f"Round {self.number} needs at least {minimum} clients and {here} have "
                    "arrived; wait for more, or discard it."
                )
            _count(work, self.number, self.attempt)
            start, end = work.rows(
                "SELECT begun, closed FROM rounds WHERE round = ?", (self.number,)
            )[0]
            invited = work.rows(
                "SELECT client, outcome FROM participations WHERE round = ? AND attempt = ?",
                (self.number, self.attempt),
            )
        names = sorted(bytes(n).hex() for n, outcome in invited if outcome == Outcome.COUNTED)
        missing = len(invited) - len(names)
        return CountedRound(
            round=self.number,
            start=start,
            end=max(start, end),  # A clock that was set back does not end a round before its start.
            participants=tuple(names),
            flags={FLAG_DROPPED_CLIENTS: missing} if missing else {},
            mechanism_checksum=self._registry.mechanism_checksum,
        )

    def count_once(self) -> None:
        """Counts the round, unless this attempt at it was counted already."""
        with self._registry._database.transaction() as work:
            found = work.rows("SELECT attempt, state FROM rounds WHERE round = ?", (self.number,))
        if found != [(self.attempt, RoundState.COUNTED)]:
            self.count()

    def discard(self) -> None:
        """Closes the round without a result; who has arrived stays charged with it."""
        with self._open() as work:
            _close(work, self.number, self.attempt, RoundState.DISCARDED)

    def _move(self, client_ids: Iterable[str], outcomes: dict[Outcome, Outcome]) -> list[str]:
        moved: list[str] = []
        for batch in _batches(client_ids):
            names = self._registry._names(batch)
            with self._open() as work:
                found: dict[bytes, Outcome] = {}
                for chunk in _batches(names, _CHUNK):
                    rows = work.rows(
                        "SELECT client, outcome FROM participations WHERE round = ? AND attempt = "
                        f"? AND client IN ({', '.join('?' * len(chunk))})",
                        (self.number, self.attempt, *chunk),
                    )
                    found |= {bytes(name): Outcome(outcome) for name, outcome in rows}
                moving = [name for name in names if found.get(name) in outcomes]
                work.change_each(
                    "UPDATE participations SET outcome = ? WHERE round = ? AND client = ?",
                    [(outcomes[found[name]], self.number, name) for name in moving],
                )
            moved += [names[name] for name in moving]
        return moved

    @contextlib.contextmanager
    def _open(self) -> Iterator[Work]:
        """Begins a transaction in which this attempt is open."""
        with self._registry._database.transaction() as work:
            last = self._registry._last(work)
            if last != (self.number, self.attempt, RoundState.OPEN):
                raise RegistryError(
                    f"Attempt {self.attempt} at round {self.number} is closed, or was begun again "
                    "by another program; add nothing more to its sum, and do not release it unless "
                    "`count` has returned."
                )
            yield work


def _count(work: Work, number: int, attempt: int) -> None:
    """Closes an attempt with a result: all that arrived are in it."""
    work.change(
        f"UPDATE participations SET outcome = {Outcome.COUNTED:d} WHERE round = ? AND "
        f"attempt = ? AND outcome = {Outcome.ARRIVED:d}",
        (number, attempt),
    )
    _close(work, number, attempt, RoundState.COUNTED)


def _close(work: Work, number: int, attempt: int, state: RoundState) -> None:
    _give_back(work, number, attempt)
    work.change(
        "UPDATE rounds SET state = ?, closed = ? WHERE round = ?", (state, exact_now(), number)
    )


def _give_back(work: Work, number: int, attempt: int) -> None:
    """Ends an attempt for those of whom nothing has arrived, and nothing can any more."""
    waiting = f"outcome IN ({', '.join(str(int(outcome)) for outcome in _RETURNED)})"
    work.change(
        "UPDATE clients SET participations = participations - 1, last_round = "
        "(SELECT previous FROM participations p WHERE p.round = ? AND p.client = clients.client) "
        "WHERE client IN "
        f"(SELECT client FROM participations WHERE round = ? AND attempt = ? AND {waiting})",
        (number, number, attempt),
    )
    work.change(
        f"UPDATE participations SET outcome = {Outcome.DROPPED:d} WHERE round = ? AND attempt = ? "
        f"AND {waiting}",
        (number, attempt),
    )


def _check_plan(mechanism: Mechanism) -> None:
    if not isinstance(mechanism.participation, MinSeparation | SingleParticipation):
        raise RegistryError(
            "A registry keeps clients at least so many rounds apart, and the mechanism needs that "
            f"{mechanism.participation.describe()}; plan it with MinSeparation."
        )
    if mechanism.sampling is not None:
        raise RegistryError(
            "A registry draws nobody at random, and the epsilon of this mechanism is that of "
            f"{mechanism.sampling.kind} sampling; plan it without."
        )


def _salt(path: Path, name: str, is_new: bool) -> Pseudonyms:
    if path.exists():
        return Pseudonyms.load(path)
    _check_not_lost(not is_new, f"The registry {name}", path)
    return Pseudonyms.create(path)


def _check_not_lost(other: bool, found: object, lost: object) -> None:
    if other:
        raise RegistryError(
            f"{found} is there and {lost} is missing; restore it, because who took part is not "
            "known without both."
        )


def _check_settings(found: dict[str, str], expected: dict[str, str], registry: str) -> None:
    for name in (*expected, *found):
        if found.get(name) != expected.get(name):
            raise RegistryError(
                f"The registry {registry} has {name}={_short(found.get(name))} and the run "
                f"{_short(expected.get(name))}; go on with what it began with, or use another "
                "folder."
            )


def _check_closed(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise RegistryError(
            f"{path} can be read or changed by others; find out who did, then run `chmod 600 "
            f"{path}`."
        )


def _batches(items: Iterable, size: int = _BATCH) -> Iterator[list]:
    # The letters of one name would be clients, too.
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise BandMFTypeError(f"client_ids must be several, in a list. Found {items!r:.80}.")
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _pages(work: Work, table: str) -> Iterator[list[tuple]]:
    """Yields the rows of a table, in the order of its key."""
    names = TABLES[table]
    key, marks, after, last = ", ".join(names), ", ".join("?" * len(names)), "", ()
    while True:
        sql = f"SELECT {key}, {table}.* FROM {table} {after} ORDER BY {key} LIMIT {_BATCH}"
        rows = work.rows(sql, last)
        if not rows:
            return
        yield [row[len(names) :] for row in rows]
        after, last = f"WHERE ({key}) > ({marks})", rows[-1][: len(names)]


def _short(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) < 64 else f"{value[:12]}.."
