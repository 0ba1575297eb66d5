"""Privacy reports: from the evidence of a run to one document, and back again to verify it.

`make_report` turns evidence (`report_evidence.py`) into a document, a plain dictionary that is
`report.json`, valid under `schemas/privacy-report-v1.schema.json`: every number of a statement, and
the digests of the evidence. `verify_report` gathers the evidence again and compares every entry.

Compatibility: fields are only ever added and their meanings never change; an added field raises the
version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import os
from pathlib import Path
from typing import Any

import jsonschema

from bandmf_tf import _provenance, schemas
from bandmf_tf.accounting.amplification import CyclicScheme
from bandmf_tf.accounting.gaussian import gaussian_guarantee
from bandmf_tf.evidence.gather import gather_evidence
from bandmf_tf.evidence.participation import ObservedParticipation, Occurrence
from bandmf_tf.evidence.reader import Evidence, ReportError, ReportRequest
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.report.analysis import PrivacyAnalysis, analyze, observed_sensitivity

FORMAT = "bandmf_tf privacy report"
VERSION = 1
REPORT_FILE = "report.json"

# Numbers are recomputed in double precision, possibly by another BLAS or FFT.
_TOLERANCE = 1e-6

# Entries of a document that a fresh computation need not repeat.
_NOT_COMPARED = {"created", "library_version", "path"}


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
            evidence.run.mechanism,
            evidence.observed,
            delta=request.delta,
            noise_multiplier=(
                evidence.noise_multiplier
                if request.noise_multiplier is None
                else request.noise_multiplier
            ),
            sampling=evidence.sampling,
        )
    except OverflowError as error:
        raise ReportError(
            "No guarantee can be stated: the privacy loss is too large to be computed for "
            f"{evidence.observed.describe()}; check the evidence and the limits."
        ) from error
    except ValueError as error:
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


def _document(
    request: ReportRequest, evidence: Evidence, analysis: PrivacyAnalysis
) -> dict[str, Any]:
    observed, mechanism = analysis.observed, analysis.mechanism
    amplified = analysis.amplified
    return {
        "format": FORMAT,
        "version": VERSION,
        "created": _provenance.now(),
        "library_version": _provenance.version_of(),
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
        "theorem_3_bound": analysis.theorem_3_bound,
        "noise_multiplier": analysis.noise_multiplier,
        "l2_norm_clip": mechanism.l2_norm_clip,
        "accounting": analysis.guarantee.accounting,
        "assumptions": list(analysis.guarantee.assumptions),
        "cautions": [*_noise_cautions(request, mechanism), *analysis.cautions],
        "curve": [{"delta": delta, "epsilon": epsilon} for delta, epsilon in analysis.curve],
        "groups": [dataclasses.asdict(group) for group in analysis.groups],
        "tree_aggregation": dataclasses.asdict(analysis.tree),
        "planned": dataclasses.asdict(analysis.planned),
        "plan_was_kept": analysis.plan_was_kept,
        "findings": list(analysis.findings),
        "well_behaved": _well_behaved_entries(evidence, analysis),
        "observed": _observed_entries(observed),
        "mechanism": {
            "checksum": evidence.run.checksum,
            "strategy": type(mechanism.strategy).__name__.removesuffix("Strategy").lower(),
            "num_rounds": mechanism.num_rounds,
            "num_bands": mechanism.num_bands,
            "library_version": mechanism.provenance.library_version,
        },
        "sampling": _sampling_entries(evidence.sampling),
        "evidence": {
            "files": [
                {"kind": file.kind, "path": file.path.name, "sha256": file.sha256}
                for file in evidence.run.files
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


def _noise_cautions(request: ReportRequest, mechanism: Mechanism) -> list[str]:
    if request.noise_multiplier in (None, mechanism.noise_multiplier):
        return []
    caution = (
        f"noise_multiplier={request.noise_multiplier!r} was stated without evidence, in the place "
        f"of the mechanism's {mechanism.noise_multiplier!r}."
    )
    return [caution]


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


def _well_behaved_entries(evidence: Evidence, analysis: PrivacyAnalysis) -> dict[str, Any] | None:
    """Returns the guarantee of the clients that kept to their timer, where others did not.

    The main figures are for all clients. A client that did not keep to its timer makes them worse,
    but does not weaken the protection of the others, which this states.
    """
    observed = evidence.well_behaved
    if observed is None:
        return None
    sensitivity = observed_sensitivity(analysis.strategy, observed)
    guarantee = gaussian_guarantee(analysis.noise_multiplier, sensitivity.value, analysis.delta)
    return {
        "violators": evidence.violators,
        "num_units": observed.num_units,
        "min_separation": observed.min_separation,
        "max_participations": observed.max_participations,
        "sensitivity": sensitivity.value,
        "sensitivity_kind": sensitivity.kind,
        "epsilon": guarantee.epsilon,
        "rho": guarantee.rho,
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
