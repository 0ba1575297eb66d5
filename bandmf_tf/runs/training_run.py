"""A training run in its folder (`folder.py`): commit, then release.

A round goes through these points, in this order (the names are given to `on_point`, which tests and
drills use to crash the program there):

    started             the round's cohort is known; nothing was written
    computed            its result is in memory
    checkpoint_written  COMMITTED: state, result, metrics and ledger record are in one durable file
    ledger_written      the ledger holds the record, durably
    model_released      the model, if this round's is published, has its final name
    metrics_released    metrics.csv has the line
    published           everything else has it (TensorBoard, the caller's own publishers)
    old_removed         checkpoints that are no longer needed are gone

Before the commit nothing of the round can be seen anywhere, so a crash means that the round never
happened: it is computed again from the last checkpoint, with noise that nobody has seen. After the
commit the result is never computed again: the next start finds it in the checkpoint, writes the
ledger record and the releases that are missing, and goes on. So no round has two results, and no
two results share a row of noise.

TFF's own `FileProgramStateManager` and release managers are not used: the former does not flush to
disk and may fail while it removes old versions, and TFF's training loop gives the latter the whole
state, with the noise in it.

What is refused, in a sentence, without touching anything: a damaged checkpoint, a ledger that was
changed or belongs to another state, another mechanism, another configuration, a second program on
the same folder.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bandmf_tf import _arrays
from bandmf_tf._files import write_atomically
from bandmf_tf.errors import BandMFError
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder, LargeArray
from bandmf_tf.runs.folder import RunFolder
from bandmf_tf.runs.ledger import (
    RECORDING_PSEUDONYMOUS,
    LedgerError,
    LedgerHeader,
    LedgerWriter,
    Pseudonyms,
    RoundRecord,
)

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


class RunError(BandMFError):
    """A run cannot go on; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What a round produced.

    Attributes:
      state: All arrays that the next round needs: model, optimizer, noise stream, population.
      model: The model as it is released, by name; no noise, no optimizer state.
      metrics: Numbers to show. Metrics of clients carry no noise and are for operators only.
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
        ledger: LedgerWriter,
        checkpoints: CheckpointFolder,
        pseudonyms: Pseudonyms | None,
        publish_every: int,
        publishers: Sequence[Publisher],
        on_point: OnPoint,
    ):
        self._folder = folder
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._pseudonyms = pseudonyms
        self._publish_every = publish_every
        self._publishers = publishers
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
        record_pseudonyms: bool = False,
        publish_every: int = 1,
        publishers: Sequence[Publisher] = (),
        on_point: OnPoint = lambda point, number: None,
    ) -> TrainingRun:
        """Begins a run in `folder`, or continues the one that is there.

        Args:
          folder: Folder of the run.
          mechanism: Its mechanism; the same one at every start.
          config: JSON values that must be the same at every start; stored in `run.json`.
          header: Header of the ledger, without pseudonyms.
          record_pseudonyms: Whether the ledger names the participants by pseudonyms, under a salt
            that is drawn here for the run.
          publish_every: The model is published after every so many rounds, and after the last.
          publishers: Called with every committed round; after a crash a round may be given again,
            with the same content.
          on_point: Called at every point of a round, with its name and the round.

        Raises:
          RunError, LedgerError, CheckpointError: The folder cannot be continued like this.
        """
        files = RunFolder(Path(folder))
        files.released.mkdir(parents=True, exist_ok=True)
        _check_mechanism(files, mechanism, header)
        checkpoints = CheckpointFolder(files.secret)
        _check_config(files, config)
        pseudonyms = None
        if record_pseudonyms:
            pseudonyms = _salt(files)
            header = dataclasses.replace(
                header,
                participation_recording=RECORDING_PSEUDONYMOUS,
                salt_id=pseudonyms.salt_id,
            )
        ledger = _open_ledger(files, header, checkpoints)
        run = cls(files, ledger, checkpoints, pseudonyms, publish_every, publishers, on_point)
        try:
            run._recover()
        except BaseException:
            ledger.close()
            raise
        return run

    @property
    def next_round(self) -> int:
        """The round to compute next: the number of rounds committed."""
        return self._ledger.num_records

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

    def forget_state(self) -> None:
        """Frees the state that was found at the start, when the caller has taken it over."""
        self._state, self._large_state = None, {}

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._folder.path

    def mark(self, point: str) -> None:
        """Tells `on_point` that the current round has reached a point."""
        self._on_point(point, self.next_round)

    def commit(self, result: RoundResult) -> PublishedRound:
        """Commits the result of the next round, then releases it."""
        number = self.next_round
        self._on_point("computed", number)
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
        head = self._ledger.next_head(record)
        self._checkpoints.save(
            Checkpoint(
                round=number + 1,
                metadata={
                    "record": record.fields(),
                    "metrics": {name: repr(value) for name, value in metrics.items()},
                    "previous_head": self._ledger.head,
                    "head": head,
                },
                arrays={
                    **{_STATE + name: np.asarray(a) for name, a in result.state.items()},
                    **{_MODEL + name: np.asarray(a) for name, a in result.model.items()},
                },
                large_arrays=result.large_state,
            )
        )
        self._on_point("checkpoint_written", number)
        self._ledger.append(record)
        self._on_point("ledger_written", number)
        published = PublishedRound(number, dict(result.model), metrics)
        self._release(published, model_file)
        self._checkpoints.remove_old()
        self._on_point("old_removed", number)
        return published

    def close(self) -> None:
        """Ends the use of the folder."""
        self._ledger.close()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _recover(self) -> None:
        """Finishes what a crash interrupted after a commit."""
        checkpoint = self._checkpoints.load_newest()
        ledger = self._ledger
        path = self._folder.ledger
        if checkpoint is None:
            if ledger.num_records:
                raise RunError(
                    f"{path} holds {ledger.num_records} rounds and {self._folder.secret} "
                    "no checkpoint; restore the newest one, the rounds cannot be computed again."
                )
            return
        metadata = checkpoint.metadata
        if ledger.num_records == checkpoint.round - 1 and ledger.head == metadata["previous_head"]:
            ledger.append(RoundRecord.from_fields(metadata["record"]))
        if ledger.num_records != checkpoint.round or ledger.head != metadata["head"]:
            raise LedgerError(
                f"{path}, line {ledger.num_records + 1}: the ledger ends after "
                f"{ledger.num_records} rounds with the hash {ledger.head[:12]}.., the newest "
                f"checkpoint after {checkpoint.round} with {metadata['head'][:12]}..; one of them "
                "was replaced, restore both from the same time."
            )
        self._state = _arrays.part(checkpoint.arrays, _STATE)
        self._large_state = checkpoint.large_arrays
        model = _arrays.part(checkpoint.arrays, _MODEL)
        model_file = encode_model(model)
        if hashlib.sha256(model_file).hexdigest() != metadata["record"]["model_digest"]:
            raise RunError(
                f"The model in the checkpoint after {checkpoint.round} rounds is not the one in "
                f"{path}; restore both from the same time."
            )
        metrics = {name: float(text) for name, text in metadata["metrics"].items()}
        self._release(PublishedRound(checkpoint.round - 1, model, metrics), model_file)
        self._checkpoints.remove_old()

    def _release(self, published: PublishedRound, model_file: bytes) -> None:
        """Makes a committed round visible; doing it twice changes nothing."""
        number = published.round
        is_last = number + 1 == self._ledger.header.num_rounds
        if is_last or (number + 1) % self._publish_every == 0:
            path = self._folder.model(number + 1)
            if not path.exists() or path.read_bytes() != model_file:
                write_atomically(path, model_file)
        self._on_point("model_released", number)
        _write_metrics(self._folder.metrics, number, published.metrics)
        self._on_point("metrics_released", number)
        for publisher in self._publishers:
            publisher(published)
        self._on_point("published", number)


def encode_model(model: Mapping[str, np.ndarray]) -> bytes:
    """Returns a model as a NumPy archive (`np.load`); equal models give equal bytes."""
    members = {f"{name}.npy": _arrays.npy(np.asarray(array)) for name, array in model.items()}
    return _arrays.pack(members, permissions=0o600)


def _check_mechanism(folder: RunFolder, mechanism: Mechanism, header: LedgerHeader) -> None:
    checksum = mechanism_checksum(mechanism)
    if header.mechanism_checksum != checksum:
        raise RunError("The header of the ledger must carry the checksum of the mechanism.")
    if mechanism.num_rounds < header.num_rounds:
        raise RunError(
            f"The mechanism covers {mechanism.num_rounds} rounds and the run has num_rounds="
            f"{header.num_rounds}; plan a mechanism for all rounds."
        )
    path = folder.mechanism
    if not path.exists():
        if folder.ledger.exists():
            raise RunError(
                f"{path} is missing; restore the mechanism file that the run began with."
            )
        save_mechanism(mechanism, path)
        return
    found = mechanism_checksum(load_mechanism(path))
    if found != checksum:
        raise RunError(
            f"The run in {folder.path} uses the mechanism {found[:12]}.. and was started with "
            f"{checksum[:12]}..; a run keeps its mechanism to the end, use another folder."
        )


def _check_config(folder: RunFolder, config: Mapping[str, Any]) -> None:
    path = folder.config
    text = json.dumps(dict(config), sort_keys=True, indent=2, allow_nan=False) + "\n"
    if not path.exists():
        if folder.ledger.exists():
            raise RunError(f"{path} is missing; restore the configuration that the run began with.")
        write_atomically(path, text.encode())
        return
    stored = json.loads(path.read_text())
    given = json.loads(text)
    if stored != given:
        changed = sorted(k for k in {*stored, *given} if stored.get(k) != given.get(k))
        raise RunError(
            f"The run in {folder.path} began with another configuration; it differs in {changed}. "
            "Continue it as it began, or use another folder."
        )


def _salt(folder: RunFolder) -> Pseudonyms:
    path = folder.salt
    if path.exists():
        return Pseudonyms.load(path)
    if folder.ledger.exists():
        raise RunError(
            f"{path} is missing; with a new salt, clients that took part would look like others. "
            "Restore it."
        )
    return Pseudonyms.create(path)


def _open_ledger(
    folder: RunFolder, header: LedgerHeader, checkpoints: CheckpointFolder
) -> LedgerWriter:
    path = folder.ledger
    if not path.exists() or b"\n" not in path.read_bytes():
        if not checkpoints.is_empty:
            raise RunError(f"{path} is missing or empty and rounds were done; restore the ledger.")
        # What is there is a header whose append was interrupted: the run has not begun.
        path.unlink(missing_ok=True)
        return LedgerWriter.create(path, header)
    ledger = LedgerWriter.open(path)
    stored = ledger.header
    comparable = dataclasses.replace(header, library_version=stored.library_version)
    if stored != comparable:
        ledger.close()
        changed = [
            field.name
            for field in dataclasses.fields(stored)
            if getattr(stored, field.name) != getattr(comparable, field.name)
        ]
        raise LedgerError(
            f"{path}, line 1: the ledger began with other values of {changed}; continue the run as "
            "it began, or use another folder."
        )
    return ledger


def _write_metrics(path: Path, number: int, metrics: Mapping[str, float]) -> None:
    """Appends the line of a round in place of what a crash left of it."""
    names = ["round", *metrics]
    row = [str(number), *(repr(value) for value in metrics.values())]
    line = _csv_line(row)
    if not path.exists():
        write_atomically(path, _csv_line(names) + line)
        return
    with path.open("rb+") as file:
        kept = _end_of_round(file, number)
        file.seek(kept)
        rest = file.read()
        if rest == line:
            return
        file.seek(kept)
        file.truncate()
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _end_of_round(file: io.BufferedRandom, number: int) -> int:
    """Returns where the line of `number` begins or would begin, looking at the end of the file."""
    size = file.seek(0, os.SEEK_END)
    tail = min(size, 1 << 16)
    file.seek(size - tail)
    data = file.read(tail)
    position = data.rfind(b"\n") + 1
    while position > 0:
        start = data.rfind(b"\n", 0, position - 1) + 1
        first = data[start:position].split(b",", 1)[0]
        if not first.isdigit() or int(first) < number:
            break
        position = start
    return size - tail + position


def _csv_line(fields: Sequence[str]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(fields)
    return buffer.getvalue().encode()
