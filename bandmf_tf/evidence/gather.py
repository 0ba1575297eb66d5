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

import os
from pathlib import Path

from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence import counts, ledgers, logs, run_records, timers
from bandmf_tf.evidence.participation import ParticipationError, stated_participation
from bandmf_tf.evidence.reader import (
    Evidence,
    LogReader,
    Reader,
    ReportError,
    ReportRequest,
    Run,
    digest,
)
from bandmf_tf.runs.folder import RunFolder, checkpoint_paths
from bandmf_tf.runs.ledger import Ledger, verify_ledger

# The first that supports a file reads it. Logs are what any other file is taken for: their reader
# says what a log must look like.
LOG_READERS: tuple[LogReader, ...] = (counts, logs)
READERS: tuple[Reader, ...] = (run_records, ledgers, timers, *LOG_READERS)


def gather_evidence(request: ReportRequest) -> Evidence:
    """Returns the evidence for a report.

    Raises:
      ReportError: Evidence is missing, damaged or contradicts itself.
    """
    try:
        if request.run is not None:
            return _run_evidence(request, request.run)
        assert request.mechanism is not None
        return _file_evidence(Run.of_mechanism(request, request.mechanism))
    except ReportError:
        raise
    except BandMFError as error:  # Of mechanism files, ledgers, logs and records alike.
        raise ReportError(f"No guarantee can be stated: {error}") from error
    except OSError as error:
        name = error.filename or "a file"
        raise ReportError(f"{name} cannot be read: {error.strerror or error}.") from error


def _run_evidence(request: ReportRequest, folder: Path) -> Evidence:
    if not folder.is_dir():
        raise ReportError(f"run must be the folder of a training run. Found {os.fspath(folder)!r}.")
    files = RunFolder(folder)
    if not files.mechanism.is_file():
        raise _missing(folder, files.mechanism.name)
    run = Run.of_mechanism(request, files.mechanism)
    path = files.ledger
    if not path.is_file():
        return run_records.read(_record_in(folder), run)
    ledger = verify_ledger(path, mechanism_checksum=run.checksum)
    _check_end_of_ledger(folder, ledger)
    run = run.with_file(ledgers.KIND, path)
    log = request.participation
    if log is None:
        return ledgers.ledger_evidence(run, ledger)
    reader = next((reader for reader in LOG_READERS if reader.supports(log)), logs)
    observed = reader.observe(log, run, ledger)
    return ledgers.ledger_evidence(run.with_file(reader.KIND, log), ledger, observed)


def _file_evidence(run: Run) -> Evidence:
    request, n = run.request, run.mechanism.num_rounds
    t = n if request.rounds_completed is None else request.rounds_completed
    if t > n:
        raise ReportError(
            f"rounds_completed must be at most the num_rounds={n} of the mechanism. Found {t}."
        )
    path = request.participation
    if path is not None:
        reader = next((reader for reader in READERS if reader.supports(path)), logs)
        return reader.read(path, run)
    if request.timer_seconds is not None:
        raise ParticipationError(
            "timer_seconds bounds the separation only together with the times of the rounds; give "
            "a ledger or a timeline as participation."
        )
    stated = stated_participation(t, request.min_separation, request.max_participations)
    return Evidence(run=run, observed=stated)


def _check_end_of_ledger(folder: Path, ledger: Ledger) -> None:
    """Raises if the run folder holds results of rounds that the ledger does not have.

    A hash chain does not show that its last lines were removed; what was released does. Checkpoints
    may be out of reach for whoever writes a report: their names are looked at where they can be.
    """
    newest, run = 0, RunFolder(folder)
    for rounds, path in run.models():
        newest = max(newest, rounds)
        if 1 <= rounds <= ledger.num_records:
            found = digest(path)
            if found != ledger.records[rounds - 1].model_digest:
                raise ParticipationError(
                    f"{os.fspath(path)} is not the model that the ledger names for round "
                    f"{rounds - 1}."
                )
    if os.access(run.secret, os.R_OK | os.X_OK):
        newest = max((newest, *(rounds for rounds, _ in checkpoint_paths(run.secret))))
    if newest > ledger.num_records:
        raise ParticipationError(
            f"{os.fspath(folder)} holds the result of {newest} rounds and its ledger ends after "
            f"{ledger.num_records}; restore the complete ledger, or start the training program "
            "once, which writes what a crash has left out."
        )


def _missing(folder: Path, name: str) -> ParticipationError:
    return ParticipationError(
        f"{os.fspath(folder)} has no {name}, without which nobody knows what was released."
    )


def _record_in(folder: Path) -> Path:
    """Returns the one run record in the folder."""
    records = [path for path in sorted(folder.glob("*.json")) if run_records.supports(path)]
    if not records:
        raise _missing(folder, f"{RunFolder(folder).ledger.name} and no run record")
    if len(records) > 1:
        names = " and ".join(path.name for path in records[:2])
        raise ReportError(
            f"{os.fspath(folder)} has several run records, {names}; give one as participation "
            "with its mechanism."
        )
    return records[0]
