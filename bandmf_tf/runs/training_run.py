"""A training run in its folder (`folder.py`): commit, then release.

A round goes through these points, in this order (the names are given to `on_point`, which tests and
drills use to crash the program there):

    started             the round's cohort is known; nothing was written
    computed            its result is in memory
    checkpoint_written  COMMITTED: state, result, metrics and ledger record are in one durable file
    ledger_written      the ledger holds the record, durably
    model_released      the model, if this round's is published, has its final name
    metrics_released    metrics.csv has the line
    published           everything else has it (metrics.prom, TensorBoard, publishers, the progress)
    old_removed         checkpoints that are no longer needed are gone

Before the commit nothing of the round can be seen anywhere, so a crash means that the round never
happened: it is computed again from the last checkpoint, with noise that nobody has seen. After the
commit the result is never computed again: the next start finds it in the checkpoint, writes the
ledger record and the releases that are missing, and goes on. So no round has two results, and no
two results share a row of noise.

TFF's own `FileProgramStateManager` and release managers are not used: the former does not flush to
disk and may fail while it removes old versions, and TFF's training loop gives the latter the whole
state, with the noise in it.

One program works on a folder: it locks it (`folder.FolderLock`) before it reads anything, and until
it ends. What is refused, in a sentence, without touching anything: a second program, a damaged
checkpoint, a ledger that was changed or belongs to another state, secrets that others could read,
another mechanism, another configuration, and a ledger with checkpoints that are older than what was
released: a released file is never replaced by another one.

Whatever could speak against a result is looked at before the commit: a result that was committed
can be released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bandmf_tf import _arrays
from bandmf_tf._files import file_digest, make_secret_folder, require_closed, write_atomically
from bandmf_tf._provenance import exact_now, parse_time
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import UNKNOWN
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder, LargeArray
from bandmf_tf.runs.folder import FolderLock, RunError, RunFolder, checkpoint_paths
from bandmf_tf.runs.ledger import (
    RECORDING_PSEUDONYMOUS,
    Ledger,
    LedgerError,
    LedgerHeader,
    LedgerWriter,
    Pseudonyms,
    RoundRecord,
)
from bandmf_tf.runs.progress import Progress, RunProgress

POINTS = (
    "started",
    "computed",
    "checkpoint_written",
    "ledger_written",
    "model_released",
    "metrics_released",
    "published",
    "old_removed",
)

_STATE, _MODEL = "state/", "model/"
# What a line of metrics.csv can have as the name of a column.
_METRIC = re.compile(r"[\w./ -]{1,100}")
# Bytes that hold the last line of metrics.csv.
_TAIL = 1 << 20


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What a round produced.

    Attributes:
      state: All arrays that the next round needs: model, optimizer, noise stream, population.
      model: The model as it is released, by name; no noise, no optimizer state.
      metrics: Numbers to show, under the same names in every round. Metrics of clients carry no
        noise and are for operators only.
      start: When the round started, as in the ledger.
      end: When it ended.
      client_ids: Identifiers of the participants; only their number and, by choice, pseudonyms
        leave this object.
      flags: Irregularities, see `RoundRecord`.
      large_state: More of the state, stored apart because it is large and rarely changes.
    """

    state: Mapping[str, np.ndarray]
    model: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]
    start: str
    end: str
    client_ids: Sequence[str]
    flags: Mapping[str, int] = dataclasses.field(default_factory=dict)
    large_state: Mapping[str, LargeArray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PublishedRound:
    """What publishers are given after the commit: nothing that must stay secret."""

    round: int
    model: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]


Publisher = Callable[[PublishedRound], None]

# Called with a point of a round and the number of the round; tests crash there.
OnPoint = Callable[[str, int], None]


class TrainingRun:
    """The durable side of a training program; see the top of this file.

    Use `start`, which begins a new run or continues the one in the folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: FolderLock,
        ledger: LedgerWriter,
        checkpoints: CheckpointFolder,
        pseudonyms: Pseudonyms | None,
        publish_every: int,
        publishers: Sequence[Publisher],
        progress: RunProgress,
        on_point: OnPoint,
    ):
        self._folder = folder
        self._lock = lock
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._pseudonyms = pseudonyms
        self._publish_every = publish_every
        self._publishers = publishers
        self._progress = progress
        self._on_point = on_point
        self._state: dict[str, np.ndarray] | None = None
        self._large_state: Mapping[str, LargeArray] = {}

    @classmethod
    def start(
        cls,
        folder: str | os.PathLike[str],
        mechanism: Mechanism,
        config: Mapping[str, Any],
        header: LedgerHeader,
        *,
        config_defaults: Mapping[str, Any] = types.MappingProxyType({}),
        record_pseudonyms: bool = False,
        publish_every: int = 1,
        publishers: Sequence[Publisher] = (),
        progress: Progress | None = None,
        on_point: OnPoint = lambda point, number: None,
    ) -> TrainingRun:
        """Begins a run in `folder`, or continues the one that is there.

        Args:
          folder: Folder of the run; it may have been moved since the run began.
          mechanism: Its mechanism; the same one at every start.
          config: JSON values that must be the same at every start; stored in `run.json`.
          header: Header of the ledger, without pseudonyms.
          config_defaults: What fields of `config` stood for before they existed, so that a run of
            an older version, whose `run.json` lacks them, can go on.
          record_pseudonyms: Whether the ledger names the participants by pseudonyms, under a salt
            that is drawn here for the run.
          publish_every: The model is published after every so many rounds, and after the last.
          publishers: Called with every committed round; after a crash a round may be given again,
            with the same content.
          progress: Called after every round with how many are done and a line about it, epsilon
            included (`cli.progress.Progress.show`); None logs it. The same is in `metrics.prom`.
          on_point: Called at every point of a round, with its name and the round.

        Raises:
          RunError, LedgerError, CheckpointError, PermissionError: The folder cannot be continued
            like this; nothing in it was changed.
        """
        files = RunFolder(Path(folder))
        _check_plan(mechanism, header)
        lock = FolderLock(files)
        try:
            begun = _has_begun(files)
            _check_mechanism(files, mechanism, begun)
            _check_config(files, config, config_defaults, begun)
            pseudonyms = _salt(files, begun) if record_pseudonyms else None
            if pseudonyms is not None:
                header = dataclasses.replace(
                    header,
                    participation_recording=RECORDING_PSEUDONYMOUS,
                    salt_id=pseudonyms.salt_id,
                )
            checkpoints = CheckpointFolder(files.secret)
            checkpoint = checkpoints.load_newest()
            ledger = _open_ledger(files, header, checkpoint, begun)
        except BaseException:
            lock.close()
            raise
        clients, is_enforced = header.clients_per_round, header.enforces_participation
        told = RunProgress(files.prometheus, mechanism, clients, is_enforced, progress)
        run = cls(
            files,
            lock,
            ledger,
            checkpoints,
            pseudonyms,
            publish_every,
            publishers,
            told,
            on_point,
        )
        try:
            files.released.mkdir(0o755, exist_ok=True)
            for leftover in files.leftovers():
                leftover.unlink()
            if checkpoint is not None:
                run._recover(checkpoint)
        except BaseException:
            run.close()
            raise
        return run

    @property
    def next_round(self) -> int:
        """The round to compute next: the number of rounds committed."""
        return self._ledger.num_records

    @property
    def head(self) -> str:
        """The hash of the ledger's last line, to be kept elsewhere."""
        return self._ledger.head

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hashes of all lines of the ledger: entry r is its head after r rounds."""
        return self._ledger.hashes

    @property
    def is_complete(self) -> bool:
        """Whether all planned rounds were done."""
        return self.next_round >= self._ledger.header.num_rounds

    @property
    def state(self) -> Mapping[str, np.ndarray] | None:
        """The state that was found at the start; None in a new run, or when it was forgotten."""
        return self._state

    @property
    def large_state(self) -> Mapping[str, LargeArray]:
        """The large parts of the state, which are read from disk one by one."""
        return self._large_state

    def show_progress(self, progress: Progress) -> None:
        """Gives the lines about rounds to another function from now on."""
        self._progress.show = progress

    def forget_state(self) -> None:
        """Frees the state that was found at the start, when the caller has taken it over."""
        self._state, self._large_state = None, {}

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._folder.path

    def begin_round(self, start: str | None = None) -> str:
        """Says when the next round starts, before anything of it is computed.

        Args:
          start: When, as in the ledger; None for now.

        Returns:
          When it starts.

        Raises:
          RunError: The clock went back: by the ledger, the last round started later. The ledger
            bounds how soon clients can have come back by these times, so they are not mended.
            Also if all rounds are done, or the folder is no longer this program's.
        """
        self._lock.check()
        start = exact_now() if start is None else start
        last = self._ledger.last
        if self.is_complete:
            raise RunError(f"All {self.next_round} rounds of the run in {self.folder} are done.")
        if last is not None and parse_time(start) < parse_time(last.start):
            raise RunError(
                f"The clock went back: round {self.next_round} would start at {start} and round "
                f"{last.round} started at {last.start}; set the clock, or wait. Nothing was "
                "computed."
            )
        self._on_point("started", self.next_round)
        return start

    def commit(self, result: RoundResult) -> PublishedRound:
        """Commits the result of the next round, then releases it.

        Raises:
          RunError, LedgerError: The result cannot be the next round's; nothing was written.
          OSError: Something could not be written. Start the run again: it goes on with this result
            if it was committed, and without it if not.
        """
        number = self.next_round
        self._on_point("computed", number)
        self._lock.check()
        model_file = encode_model(result.model)
        record = RoundRecord(
            round=number,
            start=result.start,
            end=result.end,
            num_participants=len(result.client_ids),
            mechanism_checksum=self._ledger.header.mechanism_checksum,
            model_digest=hashlib.sha256(model_file).hexdigest(),
            participants=self._pseudonyms.of(result.client_ids) if self._pseudonyms else None,
            flags=result.flags,
        )
        metrics = {name: float(value) for name, value in result.metrics.items()}
        state = {name: np.asarray(array) for name, array in result.state.items()}
        model = {name: np.asarray(array) for name, array in result.model.items()}
        in_state = _names_in_state(model, state)
        checkpoint = Checkpoint(
            round=number + 1,
            metadata={
                "record": record.fields(),
                "metrics": {name: repr(value) for name, value in metrics.items()},
                "previous_head": self._ledger.head,
                "head": self._ledger.next_head(record),
                "model": in_state,
            },
            arrays={
                **{_STATE + name: array for name, array in state.items()},
                **{_MODEL + name: a for name, a in model.items() if in_state[name] is None},
            },
            large_arrays=result.large_state,
        )
        published = PublishedRound(number, dict(result.model), metrics)
        self._check_release(published, model_file)
        try:
            self._checkpoints.save(checkpoint)
            self._on_point("checkpoint_written", number)
            self._ledger.append(record)
            self._on_point("ledger_written", number)
            self._release(published, model_file, record)
            self._checkpoints.remove_old()
            self._on_point("old_removed", number)
        except BaseException:
            self.close()  # What is committed is known to the next start, not to this object.
            raise
        return published

    def close(self) -> None:
        """Ends the use of the folder."""
        self._ledger.close()
        self._lock.close()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _recover(self, checkpoint: Checkpoint) -> None:
        """Finishes what a crash interrupted after a commit."""
        metadata = checkpoint.metadata
        if self._ledger.num_records < checkpoint.round:
            self._ledger.append(RoundRecord.from_fields(metadata["record"]))
        self._state = _arrays.part(checkpoint.arrays, _STATE)
        self._large_state = checkpoint.large_arrays
        model = _stored_model(checkpoint)
        metrics = {name: float(text) for name, text in metadata["metrics"].items()}
        published = PublishedRound(checkpoint.round - 1, model, metrics)
        model_file = encode_model(model)
        self._check_release(published, model_file)
        self._release(published, model_file, RoundRecord.from_fields(metadata["record"]))
        self._checkpoints.remove_old()

    def _model_path(self, number: int) -> Path | None:
        """Returns where the model after a round is released, if it is."""
        is_last = number + 1 == self._ledger.header.num_rounds
        if is_last or (number + 1) % self._publish_every == 0:
            return self._folder.model(number + 1)
        return None

    def _check_release(self, published: PublishedRound, model_file: bytes) -> None:
        """Raises RunError if something was released that contradicts this round."""
        path = self._model_path(published.round)
        if path is not None and path.exists() and path.read_bytes() != model_file:
            raise RunError(
                f"{path} exists and holds another model than that of round {published.round}; what "
                "was released is never replaced, find out where it comes from."
            )
        _Metrics.read(self._folder.metrics).check(published.round, published.metrics)

    def _release(self, published: PublishedRound, model_file: bytes, record: RoundRecord) -> None:
        """Makes a committed round visible; doing it twice changes nothing."""
        number = published.round
        path = self._model_path(number)
        if path is not None and not path.exists():
            write_atomically(path, model_file, replace=False)
        self._on_point("model_released", number)
        _Metrics.read(self._folder.metrics).write(number, published.metrics)
        self._on_point("metrics_released", number)
        for publisher in self._publishers:
            publisher(published)
        if not self._progress.has_told(number + 1):
            participants = {"num_participants": float(record.num_participants)}
            self._progress.tell(number + 1, {**published.metrics, **participants})
        self._on_point("published", number)


def _names_in_state(
    model: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
) -> dict[str, str | None]:
    """Returns for every array of a model which one of the state it is, and need not be stored."""
    names = {id(array): name for name, array in state.items()}
    return {name: names.get(id(array)) for name, array in model.items()}


def _stored_model(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Returns the model in a checkpoint, its arrays in the order in which it was released."""
    stored = _arrays.part(checkpoint.arrays, _MODEL)
    if "model" not in checkpoint.metadata:
        return stored  # Version 0.1 stored all of it.
    state = _arrays.part(checkpoint.arrays, _STATE)
    return {
        name: stored[name] if in_state is None else state[in_state]
        for name, in_state in checkpoint.metadata["model"].items()
    }


def encode_model(model: Mapping[str, np.ndarray]) -> bytes:
    """Returns a model as a NumPy archive (`np.load`); equal models give equal bytes."""
    members = {f"{name}.npy": _arrays.npy(np.asarray(array)) for name, array in model.items()}
    return _arrays.pack(members, permissions=0o600)


def _check_plan(mechanism: Mechanism, header: LedgerHeader) -> None:
    if header.mechanism_checksum != mechanism_checksum(mechanism):
        raise RunError("The header of the ledger must carry the checksum of the mechanism.")
    if mechanism.num_rounds < header.num_rounds:
        raise RunError(
            f"The mechanism covers {mechanism.num_rounds} rounds and the run has num_rounds="
            f"{header.num_rounds}; plan a mechanism for all rounds."
        )


def _has_begun(folder: RunFolder) -> bool:
    """Whether the ledger has its header; raises if it has not and yet something was done."""
    if folder.secret.exists():
        require_closed(folder.secret)
    path = folder.ledger
    if path.exists() and b"\n" in path.read_bytes():
        if not folder.secret.is_dir():
            raise RunError(f"{folder.secret} is missing and the run has begun; restore it.")
        return True
    if checkpoint_paths(folder.secret):
        raise RunError(f"{path} is missing or empty and rounds were done; restore the ledger.")
    check_released(folder, [])
    return False


def _check_mechanism(folder: RunFolder, mechanism: Mechanism, begun: bool) -> None:
    path = folder.mechanism
    if not path.exists():
        if begun:
            raise RunError(
                f"{path} is missing; restore the mechanism file that the run began with."
            )
        save_mechanism(mechanism, path)
        return
    checksum = mechanism_checksum(mechanism)
    found = mechanism_checksum(load_mechanism(path))
    if found != checksum:
        raise RunError(
            f"The run in {folder.path} uses the mechanism {found[:12]}.. and was started with "
            f"{checksum[:12]}..; a run keeps its mechanism to the end, use another folder."
        )


def _check_config(
    folder: RunFolder, config: Mapping[str, Any], defaults: Mapping[str, Any], begun: bool
) -> None:
    path = folder.config
    text = json.dumps(dict(config), sort_keys=True, indent=2, allow_nan=False) + "\n"
    if not path.exists():
        if begun:
            raise RunError(f"{path} is missing; restore the configuration that the run began with.")
        write_atomically(path, text.encode())
        return
    try:
        stored = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise RunError(f"{path} is damaged; restore the configuration that the run began with.")
    given = json.loads(text)
    stored = {**{name: value for name, value in defaults.items() if name in given}, **stored}
    if stored != given:
        changed = sorted(
            name
            for name in {*stored, *given}
            if name not in stored or name not in given or stored[name] != given[name]
        )
        raise RunError(
            f"The run in {folder.path} began with another configuration; it differs in {changed}. "
            "Continue it as it began, or use another folder."
        )


def _salt(folder: RunFolder, begun: bool) -> Pseudonyms:
    path = folder.salt
    if path.exists():
        return Pseudonyms.load(path)
    if begun:
        raise RunError(
            f"{path} is missing; with a new salt, clients that took part would look like others. "
            "Restore it."
        )
    make_secret_folder(folder.secret)
    return Pseudonyms.create(path)


def _open_ledger(
    folder: RunFolder, header: LedgerHeader, checkpoint: Checkpoint | None, begun: bool
) -> LedgerWriter:
    """Opens the ledger if all that the folder holds is of one time; begins it in a new run."""

    def check(ledger: Ledger) -> None:
        _check_header(folder.ledger, ledger.header, header)
        check_released(folder, _committed(folder, ledger, checkpoint))

    if begun:
        return LedgerWriter.open(folder.ledger, check)
    return LedgerWriter.create(folder.ledger, header)


def _check_header(path: Path, stored: LedgerHeader, header: LedgerHeader) -> None:
    """Raises LedgerError unless the run goes on as it began; its folder may have been renamed."""
    kept = {"library_version": stored.library_version, "run_id": stored.run_id}
    if stored.noise_source == UNKNOWN:  # A ledger of version 1; it stays unknown to the end.
        kept["noise_source"] = UNKNOWN
    comparable = dataclasses.replace(header, **kept)  # type: ignore[arg-type]
    if stored != comparable:
        changed = [
            field.name
            for field in dataclasses.fields(stored)
            if getattr(stored, field.name) != getattr(comparable, field.name)
        ]
        raise LedgerError(
            f"{path}, line 1: the ledger began with other values of {changed}; continue the run as "
            "it began, or use another folder."
        )


def _committed(
    folder: RunFolder, ledger: Ledger, checkpoint: Checkpoint | None
) -> list[RoundRecord]:
    """Returns the records of all committed rounds, of which the ledger may lack the last."""
    path = folder.ledger
    if checkpoint is None:
        if ledger.num_records:
            raise RunError(
                f"{path} holds {ledger.num_records} rounds and {folder.secret} no checkpoint; "
                "restore the newest one, the rounds cannot be computed again."
            )
        return []
    metadata = checkpoint.metadata
    newest = RoundRecord.from_fields(metadata["record"])
    ends = (ledger.num_records, ledger.head)
    records = list(ledger.records)
    if ends == (checkpoint.round - 1, metadata["previous_head"]):
        records.append(newest)
    elif ends != (checkpoint.round, metadata["head"]):
        raise LedgerError(
            f"{path}, line {ledger.num_records + 1}: the ledger ends after {ledger.num_records} "
            f"rounds with the hash {ledger.head[:12]}.., the newest checkpoint after "
            f"{checkpoint.round} with {metadata['head'][:12]}..; one of them was replaced, restore "
            "both from the same time."
        )
    model = encode_model(_stored_model(checkpoint))
    if hashlib.sha256(model).hexdigest() != newest.model_digest:
        raise RunError(
            f"The model in the checkpoint after {checkpoint.round} rounds is not the one in "
            f"{path}; restore both from the same time."
        )
    return records


def check_released(folder: RunFolder, records: Sequence[RoundRecord]) -> None:
    """Raises RunError if something was released that the committed rounds do not account for.

    An older ledger with the older checkpoints agree with each other; what was released since then
    shows that rounds would be computed, and released, a second time.
    """
    done = len(records)
    for rounds, path in folder.models():
        if rounds > done:
            raise RunError(
                f"{path} is the model after {rounds} rounds, and {folder.ledger.name} and "
                f"{folder.secret.name}/ end after {done}: they are an older copy. Round {done} was "
                "released and cannot be computed again; restore both from after round "
                f"{rounds - 1}, or use another folder."
            )
        if rounds and file_digest(path) != records[rounds - 1].model_digest:
            raise RunError(
                f"{path} is not the model that the ledger names for round {rounds - 1}; what was "
                "released is never replaced, restore the files of one time."
            )
    # Whoever writes a report may not be allowed to read them.
    readable = os.access(folder.metrics, os.R_OK)
    last = _Metrics.read(folder.metrics).last_round if readable else -1
    if last >= done:
        raise RunError(
            f"{folder.metrics} has a line for round {last}, and {folder.ledger.name} and "
            f"{folder.secret.name}/ end after {done} rounds: they are an older copy; restore both "
            f"from after round {last}, or use another folder."
        )


@dataclasses.dataclass(frozen=True)
class _Metrics:
    """What metrics.csv holds.

    Attributes:
      path: The file.
      names: Names of its columns; empty if there is no file.
      last_round: The last round with a complete line; -1 if there is none.
      last_line: That line.
      size: Bytes of complete lines; what follows is of an append that a crash interrupted.
    """

    path: Path
    names: tuple[str, ...] = ()
    last_round: int = -1
    last_line: bytes = b""
    size: int = 0

    @classmethod
    def read(cls, path: Path) -> _Metrics:
        """Returns what the first and the last line of the file say."""
        if not path.exists():
            return cls(path)
        with path.open("rb") as file:
            first = file.readline()
            end = file.seek(0, os.SEEK_END)
            start = max(len(first), end - _TAIL)
            file.seek(start)
            tail = file.read()
        complete = tail[: tail.rfind(b"\n") + 1]
        if not first:
            return cls(path)
        names = tuple(first.decode("utf-8", "replace").rstrip("\n").split(","))
        last_line = complete[complete[:-1].rfind(b"\n") + 1 :] or b"-1"
        number = last_line.rstrip(b"\n").split(b",", 1)[0]
        if names[0] != "round" or not re.fullmatch(rb"-1|\d{1,18}", number):
            raise RunError(f"{path} does not hold lines of rounds; restore it or move it away.")
        return cls(path, names, int(number), last_line, start + len(complete))

    def check(self, number: int, metrics: Mapping[str, float]) -> None:
        """Raises RunError if these cannot be the metrics of a round."""
        for name in metrics:
            if not isinstance(name, str) or not _METRIC.fullmatch(name):
                raise RunError(f"Metrics are named in letters, digits and _./-. Found {name!r}.")
        if self.names and self.names != ("round", *metrics):
            raise RunError(
                f"{self.path} has the columns {list(self.names[1:])}; metrics keep their names to "
                f"the end of a run. Found {list(metrics)} in round {number}."
            )
        if self.last_round > number or (
            self.last_round == number and self.last_line != _metrics_line(number, metrics)
        ):
            raise RunError(
                f"{self.path} has other metrics of round {number}, or of a later one, already, and "
                "they are not replaced; restore the file or move it away."
            )

    def write(self, number: int, metrics: Mapping[str, float]) -> None:
        """Appends the line of a round, in place of what a crash left of it."""
        if self.last_round == number:
            return
        line = _metrics_line(number, metrics)
        if not self.size:
            header = ",".join(["round", *metrics]) + "\n"
            write_atomically(self.path, header.encode() + line, owner_only=True)
            return
        with self.path.open("rb+") as file:
            file.seek(self.size)
            file.truncate()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _metrics_line(number: int, metrics: Mapping[str, float]) -> bytes:
    return (",".join([str(number), *map(repr, metrics.values())]) + "\n").encode()
