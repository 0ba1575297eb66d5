"""The evidence of a privacy report: which mechanism a run used, and how units took part in it.

`gather_evidence` finds both in

* a run folder: a mechanism file with a ledger, and a participation log beside it or none, or with
  the record of a Keras run; or
* a mechanism file with evidence of any kind that one of the `READERS` supports, or with limits that
  somebody states.

It refuses evidence that is damaged, does not fit together, or leaves open how often a unit took
part; the message says what is missing.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandmf_tf import _json
from bandmf_tf._files import file_digest
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence import counts, ledgers, logs, registries, run_records, timers
from bandmf_tf.evidence.participation import ParticipationError, stated_participation
from bandmf_tf.evidence.reader import (
    Evidence,
    LogReader,
    Reader,
    ReportError,
    ReportRequest,
    Run,
    UnreadableError,
    check_name,
    check_noise_source,
)
from bandmf_tf.runs.basis import SYSTEM
from bandmf_tf.runs.checkpoints import stored_head
from bandmf_tf.runs.folder import RunFolder, checkpoint_paths
from bandmf_tf.runs.ledger import Ledger, LedgerHeader, read_ledger, verify_ledger
from bandmf_tf.runs.run_record import RunRecord, load_run_record
from bandmf_tf.runs.training_run import check_released

# The first that supports a file reads it. Logs are what any other file is taken for: their reader
# says what a log must look like.
# Engines leave notes beside their shards.
_NOTE = re.compile(r"_SUCCESS|_(?:started|committed)_\d+|_(?:common_)?metadata|\..*\.crc")

LOG_READERS: tuple[LogReader, ...] = (counts, registries, logs)
READERS: tuple[Reader, ...] = (run_records, ledgers, timers, *LOG_READERS)

_NOISE_ASSUMED = (
    "No ledger or run record says that this mechanism added the noise, or where the noise came "
    "from: that it did, and that the operating system drew noise that nobody knows, is assumed."
)


def gather_evidence(request: ReportRequest) -> Evidence:
    """Returns the evidence for a report.

    Raises:
      ReportError: Evidence is missing, damaged or contradicts itself.
    """
    try:
        if request.run is not None:
            evidence = _run_evidence(request, request.run)
        else:
            assert request.mechanism is not None
            evidence = _file_evidence(Run.of_mechanism(request, request.mechanism))
        if request.ledger_head is not None and evidence.ledger is None:
            raise ReportError("ledger_head belongs to a ledger, and none was given; leave it out.")
        return evidence
    except ReportError:
        raise
    except BandMFError as error:  # Of mechanism files, ledgers, logs and records alike.
        raise ReportError(f"No guarantee can be stated: {error}") from error
    except OSError as error:
        name = error.filename or "a file"
        raise UnreadableError(f"{name} cannot be read: {error.strerror or error}.") from error


def _run_evidence(request: ReportRequest, folder: Path) -> Evidence:
    if not folder.is_dir():
        raise UnreadableError(
            f"run must be the folder of a training run. Found {os.fspath(folder)!r}."
        )
    files = RunFolder(folder)
    if not files.mechanism.is_file():
        raise _missing(folder, files.mechanism.name)
    run = Run.of_mechanism(request, files.mechanism)
    path, shards = files.ledger, _shards(request)
    if not path.is_file():
        record = _record_in(folder)
        if shards:
            raise ReportError(
                f"The run record {record.name} says how examples took part; leave participation "
                f"out. Found {os.fspath(shards[0])!r}."
            )
        return run_records.read(record, run)
    if records := _records_in(folder):
        raise ReportError(
            f"{os.fspath(folder)} has a ledger and the run record {records[0].name}, and they may "
            "contradict each other; give one as participation with its mechanism."
        )
    ledger = verify_ledger(path, mechanism_checksum=run.checksum, head=request.ledger_head)
    for other in _json_in(folder):
        if ledgers.supports(other) and not path.read_bytes().startswith(other.read_bytes()):
            raise ReportError(
                f"{os.fspath(folder)} has another ledger, {other.name}, which {path.name} does not "
                "continue: one of them may have been written again; move what is of another run."
            )
    compared = _check_end_of_ledger(folder, ledger)
    for registry in _registries_in(run, folder, files.secret):
        registries.check_beside(registry, ledger)
    run = run.with_file(ledgers.KIND, path)
    if not shards:
        return ledgers.ledger_evidence(run, ledger, compared=compared)
    reader = _log_reader(shards)
    if reader is not registries:
        _check_registries(run, folder, shards)
    observed = reader.observe(shards, run, ledger)
    run = run.with_file(reader.KIND, *shards)
    return ledgers.ledger_evidence(run, ledger, observed, compared=compared)


def _file_evidence(run: Run) -> Evidence:
    request, n = run.request, run.mechanism.num_rounds
    t = n if request.rounds_completed is None else request.rounds_completed
    if t > n:
        raise ReportError(
            f"rounds_completed must be at most the num_rounds={n} of the mechanism. Found {t}."
        )
    shards = _shards(request)
    _check_beside(run, shards)
    if len(shards) > 1:
        _log_reader(shards)
        return _with_assumed_noise(logs.read_shards(shards, run))
    if shards:
        reader = next((reader for reader in READERS if reader.supports(shards[0])), logs)
        evidence = reader.read(shards[0], run)
        return evidence if reader in (run_records, ledgers) else _with_assumed_noise(evidence)
    if request.timer_seconds is not None:
        raise ParticipationError(
            "timer_seconds bounds the separation only together with the times of the rounds; give "
            "a ledger or a timeline as participation."
        )
    stated = stated_participation(t, request.min_separation, request.max_participations)
    return _with_assumed_noise(Evidence(run=run, observed=stated))


def _with_assumed_noise(evidence: Evidence) -> Evidence:
    return dataclasses.replace(evidence, notes=(*evidence.notes, _NOISE_ASSUMED))


def _check_beside(run: Run, shards: Sequence[Path]) -> None:
    """Raises if a ledger or run record of this mechanism, beside a given file, is passed over.

    What the run itself has left says how units took part, and where the noise came from: whoever
    gives the mechanism of a run with a log, or with limits, must not get around it.
    """
    given = [*shards, *(file.path for file in run.files)]
    # A link stands in one folder, and what it links to in another.
    places = [Path(os.path.realpath(path)) for path in given]
    folders = {path.parent.resolve() for path in given} | {place.parent for place in places}
    for folder in sorted(folders):
        found: list[tuple[Path, str, LedgerHeader | RunRecord]] = []
        for path in _json_in(folder):
            if ledgers.supports(path):
                found.append((path, ledgers.KIND, read_ledger(path).header))
            elif run_records.supports(path):
                found.append((path, run_records.KIND, load_run_record(path)))
        found = [entry for entry in found if entry[2].mechanism_checksum == run.checksum]
        for path, kind, record in found:
            check_noise_source(record.noise_source, f"{kind} {path}")
        # One of them, or a copy of it, must have been given.
        if found and not {file_digest(path) for path, *_ in found} & {*map(file_digest, shards)}:
            path, kind, _ = found[0]
            raise ReportError(
                f"{os.fspath(path)} is a {kind} of this mechanism, and says more than what was "
                f"given; give run={os.fspath(folder)}, or a copy of the mechanism elsewhere."
            )
        if not found:
            _check_registries(run, folder, shards)


def _check_registries(run: Run, folder: Path, shards: Sequence[Path]) -> None:
    """Raises if a participation registry of this mechanism, in the folder, is passed over."""
    given = {*map(file_digest, shards)}
    for path in _registries_in(run, folder):
        if file_digest(path) not in given:
            raise ReportError(
                f"{os.fspath(path)} is a {registries.KIND} of this mechanism; give it as "
                "participation, or a copy of the mechanism elsewhere."
            )


def _registries_in(run: Run, *folders: Path) -> list[Path]:
    """Returns the participation registries of the mechanism in folders, whatever their names."""
    return [
        path
        for folder in folders
        if os.access(folder, os.R_OK | os.X_OK)
        for path in sorted(folder.iterdir())
        if path.is_file() and os.access(path, os.R_OK)
        if registries.supports(path) and registries.is_of(path, run.checksum)
    ]


def _shards(request: ReportRequest) -> list[Path]:
    """Returns the files of participation: those in folders, and of patterns, in order."""
    if request.participation is None:
        return []
    found: list[Path] = []
    for path in (request.participation, *request.further_participation):
        found += _files_of(path)
    seen: set[str] = set()
    for path in found:
        check_name(path)
        place = os.path.realpath(path)  # Of a link to itself, too.
        if place in seen:
            raise ReportError(f"{os.fspath(path)} was given twice as participation.")
        seen.add(place)
    return found


def _files_of(path: Path) -> list[Path]:
    """Returns the file at `path`, the logs in that folder, or what the pattern matches."""
    text = os.fspath(path)
    if not path.exists() and glob.has_magic(text):
        matches = sorted(glob.glob(text, recursive=True, include_hidden=True))
        if not matches:
            raise UnreadableError(f"No file matches participation={text!r}.")
        return [file for match in matches for file in _files_of(Path(match))]
    if not path.is_dir():
        return [path]
    files = [file for file in _walk(path) if not _NOTE.fullmatch(file.name)]
    for file in files:
        if file.is_dir() or not logs.supports(file):
            raise ReportError(
                f"A folder of participation holds logs and nothing else; move {os.fspath(file)}."
            )
    if not files:
        raise ReportError(f"There is no log in the folder participation={text!r}.")
    return files


def _walk(folder: Path) -> list[Path]:
    """Returns all that is in a folder but folders; links to folders are not followed but told."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        entries = [Path(parent) / name for name in (*folders, *files)]
        found += [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    return sorted(found)


def _log_reader(shards: Sequence[Path]) -> LogReader:
    """Returns what reads a log, of which several files are shards."""
    for path in shards:
        reader = next((reader for reader in READERS if reader.supports(path)), logs)
        if reader not in LOG_READERS or (len(shards) > 1 and reader is not logs):
            raise ReportError(
                f"{os.fspath(path)} is a {reader.KIND}, and participation must be a log here; "
                "several files are shards of one log."
            )
    return next((reader for reader in LOG_READERS if reader.supports(shards[0])), logs)


def _check_end_of_ledger(folder: Path, ledger: Ledger) -> bool:
    """Raises if the run folder holds results of rounds that the ledger does not have.

    A hash chain does not show that its last lines were removed, or that all of it was written
    again; what was released, and the hashes in checkpoints, do. Checkpoints may be out of reach for
    whoever writes a report: they are read where they can be.

    Returns:
      Whether the newest checkpoint has the ledger's last hash.
    """
    run, done = RunFolder(folder), ledger.num_records
    check_released(run, ledger.records)
    _compare_with_config(run, ledger.header)
    readable = os.access(run.secret, os.R_OK | os.X_OK)
    newest = (
        max((rounds for rounds, _ in checkpoint_paths(run.secret)), default=0) if readable else 0
    )
    if newest > done:
        # Of a crash between the commit of a round and its line in the ledger, nothing was released.
        way_out = ", or continue the run, which writes the line" if newest == done + 1 else ""
        raise ParticipationError(
            f"{os.fspath(run.secret)} holds the checkpoint after {newest} rounds and the ledger "
            f"ends after {done}; restore the complete ledger{way_out}."
        )
    return _compare_with_checkpoints(run, ledger)


def _compare_with_config(run: RunFolder, header: LedgerHeader) -> None:
    """Raises if the configuration of the run contradicts its ledger: that was written again."""
    if not os.access(run.config, os.R_OK):
        return
    config = _json.load(run.config, lambda value: value, ParticipationError)
    if not isinstance(config, dict):
        raise ParticipationError(
            f"{os.fspath(run.config)} is no JSON object; restore the configuration of the run."
        )
    known: dict[str, Any] = {
        "num_rounds": header.num_rounds,
        "clients_per_round": header.clients_per_round,
        "participation_recording": header.participation_recording,
    }
    # The names of `simulation/config.py`, whose timer is in hours, 0 for none.
    if header.noise_source == SYSTEM:
        known["pinned_noise_seed"] = -1
    contradicted = [name for name, value in known.items() if config.get(name, value) != value]
    hours = config.get("timer_hours", 0)
    is_number = isinstance(hours, int | float)
    if "timer_hours" in config and not (is_number and hours * 3600 == (header.timer_seconds or 0)):
        contradicted.append("timer_hours")
    if contradicted:
        raise ParticipationError(
            f"{os.fspath(run.config)} has {contradicted[0]}={config[contradicted[0]]!r:.80}, which "
            f"contradicts {run.ledger.name}; restore the files of one run."
        )


def _compare_with_checkpoints(run: RunFolder, ledger: Ledger) -> bool:
    if not os.access(run.secret, os.R_OK | os.X_OK):
        return False
    compared = False
    hashes = [json.loads(line)["hash"] for line in run.ledger.read_bytes().splitlines()]
    for rounds, path in checkpoint_paths(run.secret):
        if not os.access(path, os.R_OK):
            continue
        if stored_head(path, rounds) != hashes[rounds]:
            raise ParticipationError(
                f"{os.fspath(path)} has another hash for the ledger after {rounds} rounds than "
                f"{os.fspath(run.ledger)}; the ledger was written again, restore the original."
            )
        compared = compared or rounds == ledger.num_records
    return compared


def _missing(folder: Path, name: str) -> ParticipationError:
    return ParticipationError(
        f"{os.fspath(folder)} has no {name}, without which nobody knows what was released."
    )


def _records_in(folder: Path) -> list[Path]:
    return [path for path in _json_in(folder) if run_records.supports(path)]


def _json_in(folder: Path) -> list[Path]:
    """Returns the files of a folder that begin as JSON does, whatever they are called."""
    found, ledger = [], RunFolder(folder).ledger
    for path in sorted(folder.iterdir()):
        # What cannot be read is nobody's ledger, unless it is called one.
        if path.is_file() and (path == ledger or os.access(path, os.R_OK)):
            with path.open("rb") as file:
                if file.read(1 << 16).lstrip().startswith(b"{"):
                    found.append(path)
    return found


def _record_in(folder: Path) -> Path:
    """Returns the one run record in the folder."""
    records = _records_in(folder)
    if not records:
        raise _missing(folder, f"{RunFolder(folder).ledger.name} and no run record")
    if len(records) > 1:
        names = " and ".join(path.name for path in records[:2])
        raise ReportError(
            f"{os.fspath(folder)} has several run records, {names}; give one as participation "
            "with its mechanism."
        )
    return records[0]
