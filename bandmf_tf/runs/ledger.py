"""The ledger of a training run: what was released, when, from how many clients; append-only.

A ledger is a text file of JSON lines. The first line is the header, every further line one round:

    {"hash": .., "kind": "header", "previous": "000..0", "format": .., "num_rounds": .., ..}
    {"hash": .., "kind": "round",  "previous": <hash of line 1>, "round": 0, "start": .., ..}
    {"hash": .., "kind": "round",  "previous": <hash of line 2>, "round": 1, ..}

`hash` is the SHA-256 of the record without `hash`, as canonical JSON (sorted names, no spaces,
ASCII). It covers `previous`, the hash of the line before, so that no line can be changed, removed,
inserted or moved without changing all hashes after it. A line that is not the canonical form of its
record is refused, so every byte counts. Rounds are numbered from 0, like the rows of the strategy.

What the chain cannot show is that its *last* lines were removed, or that all of it was written
again. For that, keep the number of records and the last hash (`Ledger.head`) elsewhere and give
them to `verify_ledger`; the training program keeps them in its checkpoints.

Durability. `LedgerWriter.append` writes the record, flushes it to disk, writes the end of the line
and flushes again before it returns. A record is *committed* exactly when its end of line is in the
file: bytes after the last end of line are an append that a crash interrupted, whose caller was
never told that it had succeeded. Only such bytes are removed (`LedgerWriter.open`); readers refuse
them.

A ledger holds no noise, no seed and no client data. Participation is recorded as a number of
clients only ("none") or also as pseudonyms ("pseudonymous"): HMAC-SHA-256 of client identifiers
under a random salt that lives in an owner-only file outside the ledger. Destroying the salt makes
the pseudonyms unlinkable to identifiers; they still link the rounds of one client with each other.

Compatibility: fields are only ever added and their meanings never change; an added field raises the
version, and a reader refuses versions that it does not know. Version 2 added `noise_source`; in
ledgers of version 1, which go on as they are, it is "unknown", and no report is made from them.
Version 3 added `adaptive_clipping`; a ledger without it is written as version 2, as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from bandmf_tf import _checks
from bandmf_tf._files import sync_folder, write_atomically
from bandmf_tf._provenance import parse_time, version_of
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import NOISE_SOURCES, SYSTEM, UNKNOWN, check_adaptive_clipping

FORMAT = "bandmf_tf ledger"
VERSION = 3

RECORDING_NONE = "none"
RECORDING_PSEUDONYMOUS = "pseudonymous"
RECORDINGS = (RECORDING_NONE, RECORDING_PSEUDONYMOUS)

CLOCK_REAL = "real"
CLOCK_SIMULATED = "simulated"
CLOCKS = (CLOCK_REAL, CLOCK_SIMULATED)

# Participants of this round that joined before their timer allowed it, as far as anyone noticed.
FLAG_TIMER_VIOLATIONS = "timer_violations"
# Clients of this round's cohort whose data could not be used; they are not among its participants.
FLAG_FAILED_CLIENTS = "failed_clients"
# Clients that were asked for this round and are not in its sum: they failed, or came too late.
FLAG_DROPPED_CLIENTS = "dropped_clients"
# Attempts at this round without a result: too few clients came, or, where that is known, the
# program ended. Nothing of them was released.
FLAG_EARLIER_ATTEMPTS = "earlier_attempts"
# Workers that were lost while this round was computed; the others computed it anew.
FLAG_LOST_WORKERS = "lost_workers"

SEPARATION_CONVENTION = "b = r2 - r1 for rounds r1 < r2 of one client; rounds count from 0"

NO_PREVIOUS = "0" * 64
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PSEUDONYM = re.compile(r"[0-9a-f]{32}")
_FLAG = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SALT_BYTES = 32


class LedgerError(BandMFError):
    """A ledger is damaged, was tampered with, or does not belong to this run."""


@dataclasses.dataclass(frozen=True)
class LedgerHeader:
    """What holds for the whole run.

    Attributes:
      run_id: Name of the run, any non-empty string.
      mechanism_checksum: Identity of the mechanism, see `mechanisms/files.py`.
      num_rounds: Planned number of rounds; the ledger takes no more.
      clients_per_round: Planned number of participants, the fixed denominator of the mean.
      participation_recording: "none" or "pseudonymous".
      salt_id: With "pseudonymous", which salt: its digest. Otherwise None.
      clock: "real", or "simulated" if start and end are times of a simulated population.
      timer_seconds: The period for which a client that took part must stay away, measured from the
        moment it joined; None if clients keep no timer in wall-clock time.
      enforced_min_separation: b if the program itself enforces it in rounds; None if it does not.
      enforced_max_participations: k if clients enforce it; None if they do not.
      library_version: Version of bandmf_tf that wrote the ledger.
      noise_source: "system", "pinned" or "unknown": who knows the seed of the noise.
      adaptive_clipping: How the clip norm adapted within the same releases: `target_quantile`,
        `learning_rate` and `vote_weight` of `AdaptiveClipping`; None if it was fixed.
    """

    run_id: str
    mechanism_checksum: str
    num_rounds: int
    clients_per_round: int
    participation_recording: str
    salt_id: str | None
    clock: str
    timer_seconds: float | None
    enforced_min_separation: int | None
    enforced_max_participations: int | None
    library_version: str
    noise_source: str
    adaptive_clipping: Mapping[str, float] | None = None

    @property
    def enforces_participation(self) -> bool:
        """Whether the program, or a timer of the clients, keeps clients to the plan."""
        return self.enforced_min_separation is not None or self.timer_seconds is not None

    def __post_init__(self) -> None:
        for name in ("run_id", "library_version"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise BandMFError(f"{name} must be a non-empty string. Found {value!r}.")
        _check_digest("mechanism_checksum", self.mechanism_checksum)
        for name in ("num_rounds", "clients_per_round"):
            _checks.positive_int(name, getattr(self, name))
        _check_choice("participation_recording", self.participation_recording, RECORDINGS)
        _check_choice("clock", self.clock, CLOCKS)
        _check_choice("noise_source", self.noise_source, NOISE_SOURCES)
        check_adaptive_clipping(self.adaptive_clipping)
        if (self.salt_id is not None) != (self.participation_recording == RECORDING_PSEUDONYMOUS):
            raise BandMFError(
                "salt_id belongs to pseudonymous recording, and only to it. Found "
                f"{self.salt_id!r} with {self.participation_recording!r}."
            )
        if self.salt_id is not None:
            _check_digest("salt_id", self.salt_id)
        if self.timer_seconds is not None:
            seconds = _checks.positive_float("timer_seconds", self.timer_seconds)
            object.__setattr__(self, "timer_seconds", seconds)
        for name in ("enforced_min_separation", "enforced_max_participations"):
            if getattr(self, name) is not None:
                _checks.positive_int(name, getattr(self, name))

    @classmethod
    def of_run(
        cls,
        mechanism: Mechanism,
        run_id: str,
        clients_per_round: int,
        *,
        num_rounds: int | None = None,
        clock: str = CLOCK_REAL,
        timer_seconds: float | None = None,
        enforced_min_separation: int | None = None,
        enforced_max_participations: int | None = None,
        noise_source: str = SYSTEM,
        adaptive_clipping: Mapping[str, float] | None = None,
    ) -> LedgerHeader:
        """Returns the header of a run with a mechanism, for `TrainingRun.start`.

        Args:
          mechanism: The mechanism.
          run_id: Name of the run.
          clients_per_round: Planned number of participants.
          num_rounds: Planned number of rounds; None for all of the mechanism.
          clock: These and all that follow are attributes of the class.
          timer_seconds: None if clients keep no timer.
          enforced_min_separation: None if the program does not enforce it.
          enforced_max_participations: None if nobody enforces it.
          noise_source: Who knows the seed.
          adaptive_clipping: None if the clip norm is fixed.
        """
        return cls(
            run_id=run_id,
            mechanism_checksum=mechanism_checksum(mechanism),
            num_rounds=mechanism.num_rounds if num_rounds is None else num_rounds,
            clients_per_round=clients_per_round,
            participation_recording=RECORDING_NONE,
            salt_id=None,
            clock=clock,
            timer_seconds=timer_seconds,
            enforced_min_separation=enforced_min_separation,
            enforced_max_participations=enforced_max_participations,
            library_version=version_of(),
            noise_source=noise_source,
            adaptive_clipping=adaptive_clipping,
        )

    def _fields(self) -> dict[str, Any]:
        own = dataclasses.asdict(self)
        version = VERSION
        if self.adaptive_clipping is None:
            version = 2
            del own["adaptive_clipping"]
        fields = {"format": FORMAT, "version": version, "kind": "header"}
        return {**fields, "min_separation": SEPARATION_CONVENTION, **own}


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """One round whose result was released.

    Attributes:
      round: Number of the round, from 0: the row of the strategy whose noise it used.
      start: When the first client could join, UTC to the microsecond, see `_provenance.py`.
      end: When the last client could join or report.
      num_participants: Clients whose contributions were summed.
      mechanism_checksum: The mechanism whose noise was added.
      model_digest: SHA-256 of the released model, see `training_run.encode_model`.
      participants: Sorted pseudonyms of the participants; None unless recorded. A client that
        contributed twice stands there twice.
      flags: Names of noticed irregularities with how many clients they concern, or how many there
        were (attempts, workers).
    """

    round: int
    start: str
    end: str
    num_participants: int
    mechanism_checksum: str
    model_digest: str
    participants: tuple[str, ...] | None = None
    flags: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _checks.int_at_least("round", self.round, 0)
        if parse_time(self.end) < parse_time(self.start):
            raise BandMFError(f"A round cannot end before it starts: {self.start} to {self.end}.")
        _checks.int_at_least("num_participants", self.num_participants, 0)
        _check_digest("mechanism_checksum", self.mechanism_checksum)
        _check_digest("model_digest", self.model_digest)
        self._check_participants()
        for name, count in self.flags.items():
            if not isinstance(name, str) or not _FLAG.fullmatch(name):
                raise BandMFError(f"Flags are named in small letters. Found {name!r}.")
            _checks.positive_int(name, count)
        object.__setattr__(self, "flags", types.MappingProxyType(dict(self.flags)))

    def _check_participants(self) -> None:
        if self.participants is None:
            return
        participants = tuple(self.participants)
        if len(participants) != self.num_participants:
            raise BandMFError(
                f"participants must name all {self.num_participants} participants. Found "
                f"{len(participants)}."
            )
        for name in participants:
            if not is_pseudonym(name):
                raise BandMFError(f"A pseudonym has 32 hexadecimal digits. Found {name!r}.")
        if list(participants) != sorted(participants):
            raise BandMFError("participants must be sorted, so that their order tells nothing.")
        object.__setattr__(self, "participants", participants)

    def fields(self) -> dict[str, Any]:
        """Returns the record as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "flags": dict(self.flags)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RoundRecord:
        """The inverse of `fields`."""
        participants = fields["participants"]
        return cls(
            **{**fields, "participants": None if participants is None else tuple(participants)}
        )


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A ledger that was read and verified.

    Attributes:
      header: What holds for the whole run.
      records: One record for each round 0, 1, .. that was completed, without gaps.
      hashes: Of its lines: entry r is the head that it had after r rounds.
    """

    header: LedgerHeader
    records: tuple[RoundRecord, ...]
    hashes: tuple[str, ...]

    @property
    def num_records(self) -> int:
        """Number of completed rounds."""
        return len(self.records)

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1]

    @property
    def contributions_by_round(self) -> tuple[int, ...]:
        """Number of participants, round by round."""
        return tuple(record.num_participants for record in self.records)


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Returns the ledger at `path` after verifying every line of it.

    Raises:
      LedgerError: A line is damaged, was tampered with or is unfinished; the message names it.
      OSError: The file cannot be read.
    """
    return _parse(Path(path).read_bytes(), path)


def verify_ledger(
    path: str | os.PathLike[str],
    *,
    mechanism_checksum: str | None = None,
    num_records: int | None = None,
    head: str | None = None,
) -> Ledger:
    """Returns the ledger at `path` after verifying it against what is known from elsewhere.

    Args:
      path: The file.
      mechanism_checksum: The mechanism that the run must have used.
      num_records: The number of rounds that it must hold; finds lines cut off at the end.
      head: The hash of its last line; finds a ledger that was written again from scratch.

    Raises:
      LedgerError: The ledger is invalid or differs from what was expected.
    """
    ledger = read_ledger(path)
    found = ledger.header.mechanism_checksum
    if mechanism_checksum is not None and found != mechanism_checksum:
        raise LedgerError(
            f"{os.fspath(path)}, line 1: the ledger is of the mechanism {found[:12]}.. and not of "
            f"{mechanism_checksum[:12]}..; give the mechanism file of this run."
        )
    if num_records is not None and ledger.num_records != num_records:
        raise LedgerError(
            f"{os.fspath(path)}, line {ledger.num_records + 1}: the ledger ends after "
            f"{ledger.num_records} rounds and {num_records} were committed; restore the whole file."
        )
    if head is not None and ledger.head != head:
        raise LedgerError(
            f"{os.fspath(path)}, line {ledger.num_records + 1}: the last hash is not the one that "
            "was committed; the ledger was written again, restore the original."
        )
    return ledger


class LedgerWriter:
    """Appends to a ledger; holds an exclusive lock on the file until it is closed.

    Use `create` or `open`. If an append fails, the writer takes back what it wrote and refuses to
    continue: open the ledger again.
    """

    def __init__(self, path: Path, descriptor: int, ledger: Ledger, size: int):
        self._path = path
        self._descriptor: int | None = descriptor
        self._header = ledger.header
        self._last = ledger.records[-1] if ledger.records else None
        self._hashes = list(ledger.hashes)
        self._size = size

    @classmethod
    def create(cls, path: str | os.PathLike[str], header: LedgerHeader) -> LedgerWriter:
        """Starts a new ledger; its header is durable when this returns.

        A file without an end of line is a header whose append was interrupted, or one that another
        program is writing at this moment; it is taken over under the lock and never removed.

        Raises:
          FileExistsError: There is a ledger.
          LedgerError: Another process has it open.
        """
        path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            if b"\n" in path.read_bytes():
                raise FileExistsError(f"{path} exists; a ledger is never replaced.")
            os.ftruncate(descriptor, 0)
            line = _line({**header._fields(), "previous": NO_PREVIOUS})
            _append_or_nothing(descriptor, line, 0)
            sync_folder(path.parent)
            return cls(path, descriptor, _parse(line, path), len(line))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], check: Callable[[Ledger], None] = lambda ledger: None
    ) -> LedgerWriter:
        """Opens a ledger to go on with it, and removes an append that never finished.

        Args:
          path: The file.
          check: Called with what is committed, before anything is removed; may raise.

        Raises:
          LedgerError: A committed line is invalid, or another process has the ledger open.
        """
        path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, path)
            data = path.read_bytes()
            committed = data[: data.rfind(b"\n") + 1]
            ledger = _parse(committed, path)
            check(ledger)
            if len(committed) != len(data):
                os.ftruncate(descriptor, len(committed))
                os.fsync(descriptor)
            return cls(path, descriptor, ledger, len(committed))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def header(self) -> LedgerHeader:
        """The header of the ledger."""
        return self._header

    @property
    def last(self) -> RoundRecord | None:
        """The record of the last round; None if there is none."""
        return self._last

    @property
    def num_records(self) -> int:
        """Number of rounds in the ledger; the next round has this number."""
        return len(self._hashes) - 1

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of all lines: entry r is the head after r rounds."""
        return tuple(self._hashes)

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self._hashes[-1]

    def next_head(self, record: RoundRecord) -> str:
        """Returns the head that the ledger will have once `record` is appended.

        Raises:
          LedgerError: `append` would refuse the record.
        """
        if self._descriptor is None:
            raise LedgerError(f"{self._path} is closed; open the ledger again.")
        ours = os.fstat(self._descriptor)
        with self._path.open("rb") as file:  # Opened anew: other hosts' writes show only then.
            found = os.fstat(file.fileno())
        same_file = (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
        if not same_file or found.st_size != self._size:
            raise LedgerError(
                f"{self._path} {'has' if same_file else 'was replaced by a file of'} "
                f"{found.st_size} bytes and had {self._size} when this program last wrote to it; "
                "somebody changed it, restore it before the run goes on."
            )
        try:
            _check_follows(record, self._header, self._last, self.num_records)
        except ValueError as error:
            raise LedgerError(f"{self._path}: {error}") from error
        return _hash(self._linked(record))

    def append(self, record: RoundRecord) -> str:
        """Appends the record of the next round, durably, and returns the new head.

        Raises:
          LedgerError: The record does not follow the last one; nothing was written.
          OSError: It could not be written, for example because the disk is full; nothing remains.
        """
        head = self.next_head(record)
        line = _line(self._linked(record))
        assert self._descriptor is not None
        try:
            _append_or_nothing(self._descriptor, line, self._size)
        except BaseException:
            self.close()
            raise
        self._hashes.append(head)
        self._size += len(line)
        self._last = record
        return head

    def _linked(self, record: RoundRecord) -> dict[str, Any]:
        return {**record.fields(), "kind": "round", "previous": self.head}

    def close(self) -> None:
        """Releases the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class Pseudonyms:
    """Pseudonyms of clients: HMAC-SHA-256 of an identifier under a secret salt, 128 bits.

    Two clients share a pseudonym with a probability of less than 1e-26 among a million; they would
    look like one client that takes part more often, which never makes a guarantee look better.
    """

    def __init__(self, salt: bytes):
        if len(salt) != _SALT_BYTES:
            raise BandMFError(f"A salt has {_SALT_BYTES} bytes. Found {len(salt)}.")
        self._salt = salt

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Pseudonyms:
        """Draws a salt into a new owner-only file at `path`, durably."""
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} exists; a salt is never replaced.")
        salt = secrets.token_bytes(_SALT_BYTES)
        write_atomically(path, salt, owner_only=True)
        return cls(salt)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Pseudonyms:
        """Reads the salt at `path`; refuses a file that others than its owner can read."""
        path = Path(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise LedgerError(
                f"The salt {path} has permissions {mode:o} and must be readable by its owner only; "
                f"run `chmod 600 {path}`, and treat pseudonyms made with it as public."
            )
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise LedgerError(f"{path} is not a salt of a ledger: {error}") from error

    @property
    def salt_id(self) -> str:
        """Names the salt without revealing it: a digest of its 256 random bits."""
        return hashlib.sha256(b"bandmf_tf salt id" + self._salt).hexdigest()

    def of(self, client_ids: Iterable[str]) -> tuple[str, ...]:
        """Returns the sorted pseudonyms of the clients."""
        return tuple(sorted([self.digest(name).hex() for name in client_ids]))

    def digest(self, client_id: str) -> bytes:
        """Returns the pseudonym of one client, as its 16 bytes."""
        return hmac.digest(self._salt, _encoded(client_id), "sha256")[:16]


def is_pseudonym(name: object) -> bool:
    """Whether this is written like a pseudonym."""
    return isinstance(name, str) and _PSEUDONYM.fullmatch(name) is not None


def _encoded(client_id: object) -> bytes:
    try:
        return client_id.encode()  # type: ignore[attr-defined]
    except (AttributeError, UnicodeEncodeError):
        raise BandMFTypeError(
            f"A client id must be a string that UTF-8 can write. Found {client_id!r}."
        ) from None


def _check_digest(name: str, value: object) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise BandMFError(f"{name} must be a SHA-256 of 64 hexadecimal digits. Found {value!r}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BandMFError(f"{name} must be one of {choices}. Found {value!r}.")


def _check_follows(
    record: RoundRecord, header: LedgerHeader, last: RoundRecord | None, num_records: int
) -> None:
    if record.round != num_records:
        raise BandMFError(f"the next round is {num_records}. Found round {record.round}.")
    if record.round >= header.num_rounds:
        raise BandMFError(
            f"the run was planned for num_rounds={header.num_rounds}; plan a longer mechanism to "
            f"go on. Found round {record.round}, counted from 0."
        )
    if record.mechanism_checksum != header.mechanism_checksum:
        raise BandMFError(
            f"the run uses the mechanism {header.mechanism_checksum[:12]}.. from its first round "
            f"to its last. Found {record.mechanism_checksum[:12]}.. in round {record.round}."
        )
    recorded = header.participation_recording == RECORDING_PSEUDONYMOUS
    if (record.participants is not None) != recorded:
        raise BandMFError(
            f"participation_recording is {header.participation_recording!r}, and round "
            f"{record.round} has {'no ' if recorded else ''}pseudonyms."
        )
    if last is not None and parse_time(record.start) < parse_time(last.start):
        raise BandMFError(
            f"rounds start in order of time. Found {record.start} after {last.start} in round "
            f"{record.round}."
        )


def _canonical(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(
        fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _hash(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields)).hexdigest()


def _line(fields: Mapping[str, Any]) -> bytes:
    return _canonical({**fields, "hash": _hash(fields)}) + b"\n"


def _append(descriptor: int, line: bytes) -> None:
    """Writes a line so that its end is never on disk before the rest of it."""
    os.lseek(descriptor, 0, os.SEEK_END)
    for part in (line[:-1], line[-1:]):
        written = 0
        while written < len(part):
            written += os.write(descriptor, part[written:])
        os.fsync(descriptor)


def _append_or_nothing(descriptor: int, line: bytes, size: int) -> None:
    try:
        _append(descriptor, line)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(
            f"{path} is open in another process; one run has one program at a time."
        ) from None


def _parse(data: bytes, path: str | os.PathLike[str]) -> Ledger:
    name = os.fspath(path)
    lines = data.split(b"\n")
    if lines.pop():
        raise LedgerError(
            f"{name}, line {len(lines) + 1}: the line has no end, its append was interrupted and "
            "never committed; start the training program again, which repairs it."
        )
    if not lines:
        raise LedgerError(f"{name}, line 1: the ledger has no header.")
    header: LedgerHeader | None = None
    records: list[RoundRecord] = []
    hashes: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = _parse_line(line, hashes[-1] if hashes else NO_PREVIOUS)
            hashes.append(fields.pop("hash"))
            if header is None:
                header = _parse_header(fields)
            else:
                record = _parse_record(fields)
                _check_follows(record, header, records[-1] if records else None, len(records))
                records.append(record)
        except (TypeError, ValueError, RecursionError) as error:
            raise LedgerError(f"{name}, line {number}: {error}") from error
    assert header is not None
    return Ledger(header, tuple(records), tuple(hashes))


def _parse_line(line: bytes, previous: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        canonical = _canonical(fields) == line
    except (ValueError, RecursionError):
        fields, canonical = None, False
    if not isinstance(fields, dict) or not canonical:
        raise BandMFError("it is not a record in canonical JSON; it was edited or damaged.")
    unsealed = {name: value for name, value in fields.items() if name != "hash"}
    if fields.get("hash") != _hash(unsealed):
        raise BandMFError("the record does not match its hash; it was edited or damaged.")
    if fields.pop("previous", None) != previous:
        raise BandMFError(
            "the record does not continue the line before it; a line was removed, inserted, moved "
            "or replaced."
        )
    return fields


def _parse_header(fields: dict[str, Any]) -> LedgerHeader:
    if fields.pop("format", None) != FORMAT or fields.pop("kind", None) != "header":
        raise BandMFError(f'it is not the header of a "{FORMAT}".')
    version = fields.pop("version", None)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BandMFError(f"it has version {version!r} and this library reads 1 to {VERSION}.")
    if fields.pop("min_separation", None) != SEPARATION_CONVENTION:
        raise BandMFError(f'min_separation must be counted as "{SEPARATION_CONVENTION}".')
    added: dict[str, Any] = {} if version == VERSION else {"adaptive_clipping": None}
    if version == 1:
        added["noise_source"] = UNKNOWN
    _check_names(fields, LedgerHeader, without=added)
    return LedgerHeader(**fields, **added)


def _parse_record(fields: dict[str, Any]) -> RoundRecord:
    if fields.pop("kind", None) != "round":
        raise BandMFError("it is not the record of a round.")
    _check_names(fields, RoundRecord)
    if not isinstance(fields["flags"], dict):
        raise BandMFError(f"flags must be an object. Found {fields['flags']!r}.")
    return RoundRecord.from_fields(fields)


def _check_names(fields: dict[str, Any], record_type: type, without: Collection[str] = ()) -> None:
    expected = {field.name for field in dataclasses.fields(record_type)} - set(without)
    if fields.keys() != expected:
        differing = sorted(fields.keys() ^ expected)
        raise BandMFError(f"it lacks fields or has unknown ones: {differing}.")
