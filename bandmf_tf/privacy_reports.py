"""Privacy reports: from the evidence of a run to one document, and back again to verify it.

`gather_evidence` finds what is known of a run: its mechanism, and how units took part in it, from

* a run folder (`training_run.py`): mechanism file and ledger, with a participation log beside it or
  without; or
* a mechanism file with a participation log, a ledger, a timeline of rounds and a timer, or limits
  that somebody states.

It refuses evidence that does not fit together. `make_report` turns it into a document, a plain
dictionary that is `report.json`, valid under `schemas/privacy-report-v1.schema.json`: every number
of a statement, and the evidence with its digests. `verify_report` gathers the evidence again and
compares every entry.

Compatibility: fields are only ever added and their meanings never change; an added field raises the
version.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
from pathlib import Path
from typing import Any

import jsonschema

from bandmf_tf import _checks, schemas
from bandmf_tf.amplification import CyclicScheme
from bandmf_tf.ledger import FLAG_TIMER_VIOLATIONS, Ledger, LedgerError, verify_ledger
from bandmf_tf.ledger import FORMAT as LEDGER_FORMAT
from bandmf_tf.mechanism_files import load_mechanism, mechanism_checksum
from bandmf_tf.mechanisms import Mechanism
from bandmf_tf.observed_participation import (
    ObservedParticipation,
    Occurrence,
    ParticipationError,
    stated_participation,
    weaker_of,
)
from bandmf_tf.participation_logs import read_participation_log
from bandmf_tf.privacy_analysis import PrivacyAnalysis, UnsupportedGuaranteeError, analyze
from bandmf_tf.round_timelines import (
    ledger_participation,
    read_round_timeline,
    timer_participation,
)
from bandmf_tf.training_run import LEDGER_FILE, MECHANISM_FILE

FORMAT = "bandmf_tf privacy report"
VERSION = 1
REPORT_FILE = "report.json"

# What a unit of privacy is, by the kind of evidence.
UNIT_DEVICE = "device"
UNIT_EXAMPLE = "example"
UNIT_CLIENT = "client"

# Numbers are recomputed in double precision, possibly by another BLAS or FFT.
_TOLERANCE = 1e-6

# Entries of a document that a fresh computation need not repeat.
_NOT_COMPARED = {"created", "library_version", "path"}


class ReportError(ValueError):
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
      ledger: The ledger, if there is one.
      notes: Further sentences about the evidence.
    """

    mechanism: Mechanism
    checksum: str
    observed: ObservedParticipation
    unit: str
    files: tuple[EvidenceFile, ...]
    sampling: CyclicScheme | None = None
    ledger: Ledger | None = None
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
    except (ParticipationError, LedgerError, UnsupportedGuaranteeError, ValueError) as error:
        raise ReportError(f"No guarantee can be stated: {error}") from error
    except OSError as error:
        name = error.filename or "a file"
        raise ReportError(f"{name} cannot be read: {error.strerror or error}.") from error


def make_report(
    request: ReportRequest, evidence: Evidence | None = None
) -> tuple[dict[str, Any], PrivacyAnalysis]:
    """Returns the document of a report and the analysis it was made from.

    Raises:
      ReportError: No guarantee can be stated; the message says what is missing.
    """
    evidence = gather_evidence(request) if evidence is None else evidence
    try:
        analysis = analyze(
            evidence.mechanism,
            evidence.observed,
            delta=request.delta,
            noise_multiplier=request.noise_multiplier,
            sampling=evidence.sampling,
        )
    except (ValueError, OverflowError) as error:
        raise ReportError(f"No guarantee can be stated: {error}") from error
    document = _document(request, evidence, analysis)
    validate_report(document)
    return document, analysis


def validate_report(document: object) -> None:
    """Raises ReportError unless the document is valid under the schema of its version."""
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ReportError(
            f"The report has version {version} and this library reads up to {VERSION}; install a "
            "newer one."
        )
    error = jsonschema.exceptions.best_match(_validator().iter_errors(document))
    if error is not None:
        raise ReportError(f"The report is invalid at {error.json_path}: {error.message[:200]}.")


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the document in the file at `path`, validated against its schema."""
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ReportError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{os.fspath(path)} is not JSON.") from error
    validate_report(document)
    return document


def request_of(document: dict[str, Any], folder: Path) -> ReportRequest:
    """Returns the request that a report answers; paths are relative to its folder."""
    stated = dict(document["request"])
    for name in ("run", "mechanism", "participation"):
        if stated[name] is not None:
            stated[name] = folder / stated[name]
    return ReportRequest(**stated)


def verify_report(document: dict[str, Any], request: ReportRequest) -> int:
    """Computes the report again and returns how many entries agree.

    Args:
      document: The report, as read.
      request: Where its evidence is, see `request_of`.

    Raises:
      ReportError: The first entry that differs, with both values; or the evidence is gone.
    """
    fresh, _ = make_report(request)
    fresh["request"] = document["request"]  # Files may have moved; their digests are compared.
    return _compare(document, fresh, "$")


def dump(document: dict[str, Any]) -> str:
    """Returns the document as text."""
    return json.dumps(document, indent=2, allow_nan=False)


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the main figures of a report, as the tool prints them with --json."""
    names = (
        "min_separation",
        "max_participations",
        "max_contributions_per_round",
        "rounds_completed",
        "sensitivity",
        "sensitivity_kind",
        "noise_multiplier",
        "rho",
        "mu",
        "epsilon",
        "epsilon_unamplified",
        "epsilon_amplified",
        "epsilon_zcdp",
        "delta",
        "adjacency",
        "unit",
        "plan_was_kept",
        "findings",
        "cautions",
    )
    return {name: document[name] for name in names}


# Evidence.


def _run_evidence(request: ReportRequest, folder: Path) -> Evidence:
    if not folder.is_dir():
        raise ReportError(f"run must be the folder of a training run. Found {os.fspath(folder)!r}.")
    paths = {name: folder / name for name in (MECHANISM_FILE, LEDGER_FILE)}
    for name, path in paths.items():
        if not path.is_file():
            raise ReportError(
                f"No guarantee can be stated: {os.fspath(folder)} has no {name}, without which "
                "nobody knows what was released."
            )
    mechanism = load_mechanism(paths[MECHANISM_FILE])
    checksum = mechanism_checksum(mechanism)
    ledger = verify_ledger(paths[LEDGER_FILE], mechanism_checksum=checksum)
    files = [_file("mechanism", paths[MECHANISM_FILE]), _file("ledger", paths[LEDGER_FILE])]
    if request.participation is not None:
        files.append(_file("participation log", request.participation))
    return _ledger_evidence(request, mechanism, checksum, ledger, files)


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
    if files[-1].kind == "participation log":
        observed = read_participation_log(
            files[-1].path,
            num_rounds=mechanism.num_rounds,
            rounds_completed=ledger.num_records,
            contributions_by_round=[record.num_participants for record in ledger.records],
        )
    else:
        observed = ledger_participation(ledger, request.timer_seconds)
    notes = [
        (
            f"The hash chain of the ledger is intact from its header to its last line, which has "
            f"the hash {ledger.head}. That no line was cut off its end can be checked against the "
            "number of rounds and the hash in the checkpoints of the run."
        )
    ]
    violations = sum(record.flags.get(FLAG_TIMER_VIOLATIONS, 0) for record in ledger.records)
    if violations:
        notes.append(
            f"The ledger flags {violations} participations before a client's timer allowed them."
        )
    if ledger.header.clock == "simulated":
        notes.append("The clock of this run is simulated: it is no deployment.")
    return Evidence(
        mechanism=mechanism,
        checksum=checksum,
        observed=weaker_of(observed, request.min_separation, request.max_participations),
        unit=UNIT_DEVICE,
        files=tuple(files),
        ledger=ledger,
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
    if _is_ledger(log):
        ledger = verify_ledger(log, mechanism_checksum=checksum)
        files.append(_file("ledger", log))
        return _ledger_evidence(request, mechanism, checksum, ledger, files)
    if _is_timeline(log):
        files.append(_file("timeline", log))
        observed = _timeline_participation(request, log, n)
    else:
        files.append(_file("participation log", log))
        if request.timer_seconds is not None:
            raise ReportError(
                "timer_seconds belongs to a ledger or a timeline of rounds; a participation log "
                "says itself how far apart participations were."
            )
        observed = read_participation_log(
            log, num_rounds=n, rounds_completed=request.rounds_completed
        )
    return Evidence(
        mechanism=mechanism,
        checksum=checksum,
        observed=weaker_of(observed, request.min_separation, request.max_participations),
        unit=UNIT_CLIENT,
        files=tuple(files),
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


def _is_ledger(path: Path) -> bool:
    """Whether the first line of the file says that it is a ledger, of whatever version."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == LEDGER_FORMAT


def _is_timeline(path: Path) -> bool:
    if path.suffix.lower() != ".csv":
        return False
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        columns = next(csv.reader([line.decode("utf-8-sig").strip()]), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    return {"round", "start", "end"} <= set(columns) and "client" not in columns


def _file(kind: str, path: Path) -> EvidenceFile:
    with path.open("rb") as file:
        return EvidenceFile(kind, path, hashlib.file_digest(file, "sha256").hexdigest())


# The document.


def _document(
    request: ReportRequest, evidence: Evidence, analysis: PrivacyAnalysis
) -> dict[str, Any]:
    observed, mechanism = analysis.observed, analysis.mechanism
    amplified = analysis.amplified
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": _now(),
        "library_version": _library_version(),
        "unit": evidence.unit,
        "adjacency": analysis.adjacency.value,
        "delta": analysis.delta,
        "epsilon": analysis.epsilon,
        "epsilon_amplified": None if amplified is None else amplified.epsilon,
        "epsilon_unamplified": analysis.unamplified.epsilon,
        "epsilon_zcdp": analysis.epsilon_zcdp,
        "rho": analysis.rho,
        "mu": analysis.mu,
        "min_separation": observed.min_separation,
        "min_separation_basis": observed.min_separation_basis.value,
        "max_participations": observed.max_participations,
        "max_participations_basis": observed.max_participations_basis.value,
        "max_contributions_per_round": observed.max_contributions_per_round,
        "rounds_completed": observed.rounds_completed,
        "rounds_completed_basis": observed.rounds_completed_basis.value,
        "sensitivity": analysis.sensitivity.value,
        "sensitivity_kind": analysis.sensitivity.kind,
        "sensitivity_theorem": analysis.sensitivity.theorem,
        "noise_multiplier": analysis.noise_multiplier,
        "l2_norm_clip": mechanism.l2_norm_clip,
        "accounting": analysis.guarantee.accounting,
        "assumptions": list(analysis.guarantee.assumptions),
        "cautions": list(observed.cautions),
        "curve": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in analysis.curve],
        "groups": [dataclasses.asdict(group) for group in analysis.groups],
        "tree_aggregation": dataclasses.asdict(analysis.tree),
        "planned": dataclasses.asdict(analysis.planned),
        "plan_was_kept": analysis.plan_was_kept,
        "findings": list(analysis.findings),
        "observed": _observed_entries(observed),
        "mechanism": {
            "checksum": evidence.checksum,
            "strategy": type(mechanism.strategy).__name__.removesuffix("Strategy").lower(),
            "num_rounds": mechanism.num_rounds,
            "num_bands": mechanism.num_bands,
            "library_version": mechanism.provenance.library_version,
        },
        "sampling": _sampling_entries(evidence.sampling),
        "evidence": {
            "files": [
                {"kind": file.kind, "path": file.path.name, "sha256": file.sha256}
                for file in evidence.files
            ],
            "ledger_head": None if evidence.ledger is None else evidence.ledger.head,
            "notes": list(evidence.notes),
        },
        "request": {
            name: os.fspath(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(request).items()
        },
    }


def relative_to(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the document with the paths of its request relative to the folder it will be in."""
    request = dict(document["request"])
    for name in ("run", "mechanism", "participation"):
        if request[name] is not None:
            request[name] = os.path.relpath(request[name], folder)
    return {**document, "request": request}


def _observed_entries(observed: ObservedParticipation) -> dict[str, Any]:
    def place(occurrence: Occurrence | None) -> dict[str, Any] | None:
        return None if occurrence is None else dataclasses.asdict(occurrence)

    return {
        "source": observed.source,
        "num_units": observed.num_units,
        "num_contributions": observed.num_contributions,
        "missing_rounds": observed.missing_rounds,
        "closest": place(observed.closest),
        "most_active": place(observed.most_active),
        "separations": {str(key): value for key, value in observed.separations.items()},
        "participations": {str(key): value for key, value in observed.participations.items()},
        "contributions_by_round": list(observed.contributions_by_round),
    }


def _sampling_entries(sampling: CyclicScheme | None) -> dict[str, Any] | None:
    if sampling is None:
        return None
    return {"kind": type(sampling).__name__, **dataclasses.asdict(sampling)}


def _compare(stated: object, fresh: object, where: str) -> int:
    """Returns how many numbers, words and truth values agree; raises at the first that differs."""
    if isinstance(stated, dict) and isinstance(fresh, dict):
        if stated.keys() != fresh.keys():
            raise ReportError(f"{where} has other entries than its evidence gives.")
        names = [name for name in stated if name not in _NOT_COMPARED]
        return sum(_compare(stated[name], fresh[name], f"{where}.{name}") for name in names)
    if isinstance(stated, list) and isinstance(fresh, list):
        if len(stated) != len(fresh):
            raise ReportError(
                f"{where} has {len(stated)} entries and its evidence gives {len(fresh)}."
            )
        pairs = enumerate(zip(stated, fresh, strict=True))
        return sum(_compare(old, new, f"{where}[{i}]") for i, (old, new) in pairs)
    if type(stated) is not type(fresh) and not _are_numbers(stated, fresh):
        raise ReportError(f"{where} is {stated!r} and its evidence gives {fresh!r}.")
    if isinstance(stated, float) or isinstance(fresh, float):
        equal = math.isclose(stated, fresh, rel_tol=_TOLERANCE)  # type: ignore[arg-type]
    else:
        equal = stated == fresh
    if not equal:
        raise ReportError(f"{where} is {stated!r} and its evidence gives {fresh!r}.")
    return 1


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = importlib.resources.files(schemas) / f"privacy-report-v{VERSION}.schema.json"
    return jsonschema.Draft202012Validator(json.loads(schema.read_text("utf-8")))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _library_version() -> str:
    try:
        return importlib.metadata.version("bandmf-tf")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
