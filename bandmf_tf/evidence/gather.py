"""The evidence of a privacy report: which mechanism a run used, and how units took part in it.

`gather_evidence` finds both in

* a run folder: a mechanism file with a ledger (`training_run.py`), and a participation log beside
  it or none, or with the record of a Keras run (`run_records.py`); or
* a mechanism file with a participation log (or counts of one), a ledger, a run record, a timeline
  of rounds and a timer, or limits that somebody states.

It refuses evidence that is damaged, does not fit together, or leaves open how often a unit took
part; the message says what is missing.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from bandmf_tf import _checks
from bandmf_tf.accounting.amplification import CyclicScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence.counts import FORMAT as COUNTS_FORMAT
from bandmf_tf.evidence.counts import observed_participation, read_participation_counts
from bandmf_tf.evidence.logs import CLIENT_COLUMNS, read_participation_log
from bandmf_tf.evidence.participation import (
    ObservedParticipation,
    stated_participation,
    with_stated_limits,
)
from bandmf_tf.evidence.run_records import participation_of_record
from bandmf_tf.evidence.timers import (
    ledger_participation,
    pseudonymous_participation,
    read_round_timeline,
    timer_participation,
    timer_violators,
)
from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.ledger import FLAG_TIMER_VIOLATIONS, Ledger, verify_ledger
from bandmf_tf.runs.ledger import FORMAT as LEDGER_FORMAT
from bandmf_tf.runs.run_record import FORMAT as RECORD_FORMAT
from bandmf_tf.runs.run_record import load_run_record
from bandmf_tf.runs.training_run import LEDGER_FILE, MECHANISM_FILE, RELEASED_FOLDER, SECRET_FOLDER

# What a unit of privacy is, by the kind of evidence.
UNIT_DEVICE = "device"
UNIT_EXAMPLE = "example"
UNIT_CLIENT = "client"

_LOG, _COUNTS = "participation log", "participation counts"

_RELEASED_MODEL = re.compile(r"model_(\d{1,18})\.npz")
_CHECKPOINT = re.compile(r"checkpoint_(\d{1,18})")


class ReportError(BandMFError):
    """A report cannot be made or does not hold; the message says why in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What a report is asked for. Either `run` or `mechanism` is given.

    Attributes:
      run: Folder of a training run.
      mechanism: A mechanism file.
      participation: A participation log, a ledger, or a timeline of rounds.
      timer_seconds: Period of the clients' timer.
      min_separation: A stated limit on participation; never improves on evidence.
      max_participations: A stated limit on participation; never improves on evidence.
      rounds_completed: Number of completed rounds, if no ledger says it.
      noise_multiplier: Noise over clip norm, if it was not the mechanism's.
      delta: Delta of the guarantee; None stands for the mechanism's.
    """

    run: Path | None = None
    mechanism: Path | None = None
    participation: Path | None = None
    timer_seconds: float | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    rounds_completed: int | None = None
    noise_multiplier: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.mechanism is None):
            found = "neither" if self.run is None else "both"
            raise ReportError(
                "Exactly one of run (the folder of a run) and mechanism (a mechanism file) must be "
                f"given. Found {found}."
            )
        for name in ("min_separation", "max_participations", "rounds_completed"):
            if getattr(self, name) is not None:
                _checks.positive_int(name, getattr(self, name))
        for name in ("timer_seconds", "noise_multiplier"):
            if getattr(self, name) is not None:
                _checks.positive_float(name, getattr(self, name))
        if self.delta is not None:
            _checks.probability("delta", self.delta)
        if self.run is not None and self.noise_multiplier is not None:
            raise ReportError(
                "noise_multiplier belongs to reports without a run folder; the ledger of a run "
                f"says which mechanism it used. Found {self.noise_multiplier}."
            )


@dataclasses.dataclass(frozen=True)
class EvidenceFile:
    """A file that a report rests on: what it is, where it is and its SHA-256."""

    kind: str
    path: Path
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What is known of a run.

    Attributes:
      mechanism: The mechanism whose noise was added.
      checksum: Its identity.
      observed: How units took part.
      unit: What a unit is: "device", "example" or "client".
      files: The files that all this was read from.
      sampling: How batches were drawn, if it is known that units were sampled.
      noise_multiplier: The noise that was used, if the record of the run says it.
      ledger: The ledger, if there is one.
      violators: Clients that cannot have kept to their timer, where that can be seen.
      well_behaved: How the other clients took part, if there are violators.
      notes: Further sentences about the evidence.
    """

    mechanism: Mechanism
    checksum: str
    observed: ObservedParticipation
    unit: str
    files: tuple[EvidenceFile, ...]
    sampling: CyclicScheme | None = None
    noise_multiplier: float | None = None
    ledger: Ledger | None = None
    violators: int = 0
    well_behaved: ObservedParticipation | None = None
    notes: tuple[str, ...] = ()


def gather_evidence(request: ReportRequest) -> Evidence:
    """Returns the evidence for a report.

    Raises:
      ReportError: Evidence is missing, damaged or contradicts itself.
    """
    try:
        if request.run is not None:
            return _run_evidence(request, request.run)
        assert request.mechanism is not None
        return _file_evidence(request, request.mechanism)
    except ReportError:
        raise
    except ValueError as error:  # Of mechanism files, ledgers, logs and records alike.
        raise ReportError(f"No guarantee can be stated: {error}") from error
    except OSError as error:
        name = error.filename or "a file"
        raise ReportError(f"{name} cannot be read: {error.strerror or error}.") from error


def _run_evidence(request: ReportRequest, folder: Path) -> Evidence:
    if not folder.is_dir():
        raise ReportError(f"run must be the folder of a training run. Found {os.fspath(folder)!r}.")
    path, ledger_path = folder / MECHANISM_FILE, folder / LEDGER_FILE
    if not path.is_file():
        raise _missing(folder, MECHANISM_FILE)
    mechanism = load_mechanism(path)
    checksum = mechanism_checksum(mechanism)
    files = [_file("mechanism", path)]
    if not ledger_path.is_file():
        record = _record_in(folder)
        if record is None:
            raise _missing(folder, f"{LEDGER_FILE} and no run record")
        return _record_evidence(request, mechanism, checksum, record, files)
    ledger = verify_ledger(ledger_path, mechanism_checksum=checksum)
    _check_end_of_ledger(folder, ledger)
    files.append(_file("ledger", ledger_path))
    if request.participation is not None:
        files.append(_log_file(request.participation))
    return _ledger_evidence(request, mechanism, checksum, ledger, files)


def _check_end_of_ledger(folder: Path, ledger: Ledger) -> None:
    """Raises if the run folder holds results of rounds that the ledger does not have.

    A hash chain does not show that its last lines were removed; what was released does. Checkpoints
    may be out of reach for whoever writes a report: their names are looked at where they can be.
    """
    newest = 0
    for path in sorted((folder / RELEASED_FOLDER).glob("model_*.npz")):
        match = _RELEASED_MODEL.fullmatch(path.name)
        if match is None:
            continue
        rounds = int(match[1])
        newest = max(newest, rounds)
        if 1 <= rounds <= ledger.num_records:
            found = _file("model", path).sha256
            if found != ledger.records[rounds - 1].model_digest:
                raise ReportError(
                    f"No guarantee can be stated: {os.fspath(path)} is not the model that the "
                    f"ledger names for round {rounds - 1}."
                )
    if os.access(folder / SECRET_FOLDER, os.R_OK | os.X_OK):
        names = (_CHECKPOINT.fullmatch(path.name) for path in (folder / SECRET_FOLDER).iterdir())
        newest = max((newest, *(int(match[1]) for match in names if match)))
    if newest > ledger.num_records:
        raise ReportError(
            f"No guarantee can be stated: {os.fspath(folder)} holds the result of {newest} rounds "
            f"and its ledger ends after {ledger.num_records}; restore the complete ledger, or "
            "start the training program once, which writes what a crash has left out."
        )


def _missing(folder: Path, name: str) -> ReportError:
    return ReportError(
        f"No guarantee can be stated: {os.fspath(folder)} has no {name}, without which nobody "
        "knows what was released."
    )


def _record_in(folder: Path) -> Path | None:
    """Returns the run record in the folder; raises if there are several."""
    records = [path for path in sorted(folder.glob("*.json")) if _format_of(path) == RECORD_FORMAT]
    if len(records) > 1:
        names = " and ".join(path.name for path in records[:2])
        raise ReportError(
            f"{os.fspath(folder)} has several run records, {names}; give one as participation "
            "with its mechanism."
        )
    return records[0] if records else None


def _record_evidence(
    request: ReportRequest,
    mechanism: Mechanism,
    checksum: str,
    path: Path,
    files: list[EvidenceFile],
) -> Evidence:
    """Returns the evidence of a Keras run; refuses where its sampling is not known."""
    record = load_run_record(path)
    if record.mechanism_checksum != checksum:
        raise ReportError(
            "No guarantee can be stated: the run record is of the mechanism "
            f"{(record.mechanism_checksum or 'none')[:12]} and not of {checksum[:12]}; give the "
            "mechanism file of this run."
        )
    if record.rounds_completed == 0:
        raise ReportError("No guarantee can be stated: the run record has no completed round.")
    if request.rounds_completed not in (None, record.rounds_completed):
        raise ReportError(
            f"The run record has {record.rounds_completed} completed rounds. Found "
            f"rounds_completed={request.rounds_completed}."
        )
    if record.sampling is None:
        raise ReportError(
            "No guarantee can be stated: the run record does not say how batches were drawn, so "
            "nothing bounds how often an example took part; draw them with a pipeline of "
            "bandmf_tf.keras.batches."
        )
    if record.cautions:
        raise ReportError(f"No guarantee can be stated: the run record says, {record.cautions[0]}")
    if request.timer_seconds is not None:
        raise ReportError(
            "timer_seconds belongs to a ledger or a timeline of rounds. Found "
            f"{request.timer_seconds} with a run record."
        )
    _check_noise(request, record.noise_multiplier, "run record")
    observed = dataclasses.replace(
        participation_of_record(record, mechanism),
        separation_multiple=record.sampling.num_parts,
    )
    sampling: CyclicScheme | None = record.sampling
    notes = []
    if record.microbatch_size > 1:
        # One example moves the mean of its microbatch from one point of the ball to another.
        observed = dataclasses.replace(observed, max_contributions_per_round=2)
        sampling = None
        notes.append(
            f"Gradients were averaged over {record.microbatch_size} examples before clipping: one "
            "example can move its microbatch by two clip norms, and no amplification is stated."
        )
    limited = with_stated_limits(observed, request.min_separation, request.max_participations)
    same = (observed.min_separation, observed.max_participations)
    if sampling is not None and same != (limited.min_separation, limited.max_participations):
        sampling = None
        notes.append(
            "Limits were stated that are weaker than the sampling scheme; no amplification is "
            "stated for them."
        )
    elif sampling is not None and record.sampling_basis == Basis.ASSUMED:
        caution = (
            "How batches were drawn is assumed: the library did not draw all of them itself. The "
            "amplified figures rest on it."
        )
        limited = dataclasses.replace(limited, cautions=(*limited.cautions, caution))
    return Evidence(
        mechanism=mechanism,
        checksum=checksum,
        observed=limited,
        unit=UNIT_EXAMPLE,
        files=(*files, _file("run record", path)),
        sampling=sampling,
        noise_multiplier=record.noise_multiplier,
        notes=tuple(notes),
    )


def _ledger_evidence(
    request: ReportRequest,
    mechanism: Mechanism,
    checksum: str,
    ledger: Ledger,
    files: list[EvidenceFile],
) -> Evidence:
    if request.rounds_completed not in (None, ledger.num_records):
        raise ReportError(
            f"The ledger has {ledger.num_records} completed rounds. Found "
            f"rounds_completed={request.rounds_completed}."
        )
    _check_noise(request, mechanism.noise_multiplier, "mechanism of the ledger")
    if files[-1].kind in (_LOG, _COUNTS):
        observed = _logged_participation(
            files[-1],
            num_rounds=mechanism.num_rounds,
            rounds_completed=ledger.num_records,
            contributions_by_round=[record.num_participants for record in ledger.records],
        )
    else:
        observed = ledger_participation(ledger, request.timer_seconds)
    violators = timer_violators(ledger, request.timer_seconds)
    num_units = observed.num_units or 0
    end = (
        "No released model or checkpoint in the run folder is of a later round."
        if request.run is not None
        else "That no line was cut off its end cannot be seen from the ledger alone."
    )
    notes = [
        (
            f"The hash chain of the ledger is intact from its header to its last line, which has "
            f"the hash {ledger.head}. {end}"
        )
    ]
    if 0 < num_units <= len(violators):
        notes.append("No device kept to the timer; the figures include all of them.")
    flagged = sum(record.flags.get(FLAG_TIMER_VIOLATIONS, 0) for record in ledger.records)
    if flagged:
        notes.append(
            f"The ledger flags {flagged} participations before a client's timer allowed them."
        )
    if ledger.header.clock == "simulated":
        notes.append("The clock of this run is simulated: it is no deployment.")
    return Evidence(
        mechanism=mechanism,
        checksum=checksum,
        observed=with_stated_limits(
            observed,
            request.min_separation,
            request.max_participations,
            # A cap that the program enforced is in the ledger, and so is what a log shows.
            cap_may_bind=not observed.units_were_seen
            and ledger.header.enforced_max_participations is None,
        ),
        unit=UNIT_DEVICE,
        files=tuple(files),
        ledger=ledger,
        violators=len(violators),
        well_behaved=(
            pseudonymous_participation(ledger, violators)
            if 0 < len(violators) < num_units
            else None
        ),
        notes=tuple(notes),
    )


def _file_evidence(request: ReportRequest, path: Path) -> Evidence:
    mechanism = load_mechanism(path)
    checksum = mechanism_checksum(mechanism)
    files = [_file("mechanism", path)]
    n = mechanism.num_rounds
    if request.rounds_completed is not None and request.rounds_completed > n:
        raise ReportError(
            f"rounds_completed must be at most the num_rounds={n} of the mechanism. Found "
            f"{request.rounds_completed}."
        )
    log = request.participation
    if log is None:
        if request.timer_seconds is not None:
            raise ReportError(
                "No guarantee can be stated: timer_seconds bounds the separation only together "
                "with the times of the rounds; give a ledger or a timeline as participation."
            )
        observed = stated_participation(
            n if request.rounds_completed is None else request.rounds_completed,
            request.min_separation,
            request.max_participations,
        )
        return Evidence(
            mechanism=mechanism,
            checksum=checksum,
            observed=observed,
            unit=UNIT_CLIENT,
            files=tuple(files),
        )
    if _format_of(log) == RECORD_FORMAT:
        return _record_evidence(request, mechanism, checksum, log, files)
    if _first_line_format(log) == LEDGER_FORMAT:
        ledger = verify_ledger(log, mechanism_checksum=checksum)
        files.append(_file("ledger", log))
        return _ledger_evidence(request, mechanism, checksum, ledger, files)
    is_timeline = _is_timeline(log)
    if is_timeline:
        files.append(_file("timeline", log))
        observed = _timeline_participation(request, log, n)
    else:
        files.append(_log_file(log))
        if request.timer_seconds is not None:
            raise ReportError(
                "timer_seconds belongs to a ledger or a timeline of rounds; a participation log "
                "says itself how far apart participations were."
            )
        observed = _logged_participation(
            files[-1], num_rounds=n, rounds_completed=request.rounds_completed
        )
    return Evidence(
        mechanism=mechanism,
        checksum=checksum,
        observed=with_stated_limits(
            observed,
            request.min_separation,
            request.max_participations,
            cap_may_bind=is_timeline,
        ),
        unit=UNIT_CLIENT,
        files=tuple(files),
    )


def _check_noise(request: ReportRequest, known: float, source: str) -> None:
    """Raises if another noise is stated than the one the evidence is of."""
    if request.noise_multiplier not in (None, known):
        raise ReportError(
            f"The {source} has noise_multiplier={known:g}. Found "
            f"noise_multiplier={request.noise_multiplier:g}; leave it out."
        )


def _log_file(path: Path) -> EvidenceFile:
    return _file(_COUNTS if _format_of(path) == COUNTS_FORMAT else _LOG, path)


def _logged_participation(
    file: EvidenceFile,
    *,
    num_rounds: int,
    rounds_completed: int | None,
    contributions_by_round: list[int] | None = None,
) -> ObservedParticipation:
    """Returns what a log says, or what was counted in it elsewhere."""
    if file.kind == _LOG:
        return read_participation_log(
            file.path,
            num_rounds=num_rounds,
            rounds_completed=rounds_completed,
            contributions_by_round=contributions_by_round,
        )
    return observed_participation(
        read_participation_counts(file.path),
        num_rounds=num_rounds,
        rounds_completed=rounds_completed,
        contributions_by_round=contributions_by_round,
        source="counts of a participation log",
    )


def _timeline_participation(
    request: ReportRequest, path: Path, num_rounds: int
) -> ObservedParticipation:
    timeline = read_round_timeline(path)
    if request.timer_seconds is None:
        raise ReportError(
            "No guarantee can be stated: a timeline of rounds bounds the separation only together "
            "with timer_seconds, the period of the clients' timer."
        )
    if request.rounds_completed not in (None, timeline.num_rounds):
        raise ReportError(
            f"The timeline has {timeline.num_rounds} rounds. Found "
            f"rounds_completed={request.rounds_completed}."
        )
    if timeline.num_rounds > num_rounds:
        raise ReportError(
            f"The timeline has {timeline.num_rounds} rounds, more than the num_rounds={num_rounds} "
            "of the mechanism; it is not of this run."
        )
    return timer_participation(timeline, request.timer_seconds)


def _first_line_format(path: Path) -> object:
    """Returns what the first line says that the file is; None if it says nothing."""
    with path.open("rb") as file:
        return _stated_format(file.readline(1 << 20))


def _format_of(path: Path) -> object:
    """Returns what a small JSON file says that it is; None if it is no such file."""
    with path.open("rb") as file:
        return _stated_format(file.read(1 << 20))


def _stated_format(data: bytes) -> object:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value.get("format") if isinstance(value, dict) else None


def _is_timeline(path: Path) -> bool:
    if path.suffix.lower() != ".csv":
        return False
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        columns = next(csv.reader([line.decode("utf-8-sig").strip()]), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    return {"round", "start", "end"} <= set(columns) and not {*CLIENT_COLUMNS} & {*columns}


def _file(kind: str, path: Path) -> EvidenceFile:
    with path.open("rb") as file:
        return EvidenceFile(kind, path, hashlib.file_digest(file, "sha256").hexdigest())
