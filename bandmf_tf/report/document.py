"""Privacy reports: from the evidence of a run to one document, and back again to verify it.

`make_report` turns evidence into a `PrivacyReport`: every number of a statement, and the digests of
the evidence. As JSON it is `report.json`, valid under the schema of its version (`schemas/`),
which says what each entry means. `verify_report` gathers the evidence again and compares every
entry.

Compatibility: fields are only ever added and their meanings never change; an added field raises the
version.
"""

from __future__ import annotations

import dataclasses
import enum
import glob
import itertools
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bandmf_tf import _json, _provenance, schemas
from bandmf_tf._numbers import exactly
from bandmf_tf.accounting.gaussian import Adjacency, gaussian_guarantee
from bandmf_tf.accounting.privacy_loss import gaussian_closed_epsilon
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence.gather import gather_evidence
from bandmf_tf.evidence.participation import ObservedParticipation, Occurrence
from bandmf_tf.evidence.reader import (
    UNIT_USER,
    Evidence,
    EvidenceFile,
    ReportError,
    ReportRequest,
    UnreadableError,
)
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.report.analysis import (
    AsObserved,
    GroupGuarantee,
    PlannedGuarantee,
    PrivacyAnalysis,
    TreeComparison,
    analyze,
)
from bandmf_tf.report.facts import Fact, load_facts, open_questions
from bandmf_tf.report.meaning import AttackerSuccess, attacker_success
from bandmf_tf.runs.audit_record import VIOLATES, load_audit_record
from bandmf_tf.runs.basis import Basis

FORMAT = "bandmf_tf privacy report"
VERSION = 2
REPORT_FILE = "report.json"

# Numbers are recomputed in double precision, possibly by another BLAS or FFT.
_TOLERANCE = 1e-6

# Places in a document that a fresh computation need not repeat: files may have moved.
_NOT_COMPARED = re.compile(r"\$\.(?:created|library_version|evidence\.files\[\d+\]\.path)")

# A delta from here on is no longer a small probability.
LARGE_DELTA = 1e-3

# The entries that are printed with --json.
_SUMMARY = (
    "min_separation",
    "min_separation_basis",
    "max_participations",
    "max_participations_basis",
    "max_contributions_per_round",
    "rounds_completed",
    "rounds_completed_basis",
    "sensitivity",
    "sensitivity_kind",
    "noise_multiplier",
    "noise_multiplier_basis",
    "sampling_basis",
    "timer_seconds",
    "timer_seconds_basis",
    "rho",
    "mu",
    "epsilon",
    "epsilon_unamplified",
    "epsilon_amplified",
    "epsilon_zcdp",
    "delta",
    "adjacency",
    "unit",
    "unit_basis",
    "examples_per_user",
    "plan_was_kept",
    "comparison",
    "attacker",
    "replace_one",
    "findings",
    "assumptions",
    "cautions",
    "facts",
    "open_questions",
)


# In a report of an older version these may be larger than they are found now: bounds got sharper.
_LOSSES = re.compile(r"(?:.*\.)?(?:epsilon(?:_\w+)?|rho|mu|sensitivity|theorem_3_bound)")

# What older versions say in other words, or do not have.
_WORDS_AND_NEW = re.compile(
    r".*\.(?:version|cautions|findings|assumptions|accounting|notes|source|plan_was_kept"
    r"|sensitivity_kind|sensitivity_theorem|noise_multiplier_basis|sampling_basis|max_column_norm"
    r"|released_\w+|\w+_cells|unit_basis|examples_per_user|timer_seconds(?:_basis)?|comparison"
    r"|attacker|min_column_norm|replace_one|facts|open_questions)"
)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The guarantee at another delta."""

    delta: float
    epsilon: float


@dataclasses.dataclass(frozen=True)
class WellBehaved:
    """The guarantee of the clients that kept to their timer, where others did not.

    The main figures are for all clients. A client that did not keep to its timer makes them worse,
    but does not weaken the protection of the others, which this states.
    """

    violators: int | None
    num_units: int | None
    min_separation: int | None
    max_participations: int
    sensitivity: float
    sensitivity_kind: str
    epsilon: float
    rho: float


@dataclasses.dataclass(frozen=True)
class ReplaceOne:
    """The guarantee for replace-one neighbours, without amplification: twice the sensitivity."""

    epsilon: float
    rho: float
    mu: float


@dataclasses.dataclass(frozen=True)
class Compared:
    """One of the guarantees that stand side by side, at the report's delta.

    Attributes:
      kind: "enforced": whatever units did, within what was enforced; "observed": for what they did,
        or "assumed" where somebody's word is part of that; "planned": what the mechanism was made
        for.
      epsilon: None where there is no such guarantee.
      rho: The same.
      min_separation: What it is for.
      max_participations: What it is for.
      note: Where there is none, why.
    """

    kind: str
    epsilon: float | None = None
    rho: float | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """How many have a value from `lowest` on, up to the next cell."""

    lowest: int
    count: int


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was seen of participation; in a public edition, nothing that singles out a unit."""

    source: str
    num_units: int | None
    num_contributions: int | None
    missing_rounds: int
    closest: Occurrence | None
    most_active: Occurrence | None
    separations: dict[int, int]
    participations: dict[int, int]
    contributions_by_round: tuple[int, ...]
    separation_cells: tuple[Cell, ...] = ()
    participation_cells: tuple[Cell, ...] = ()

    @classmethod
    def of(cls, observed: ObservedParticipation) -> Observed:
        """Returns the fields of the same names."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(observed, name) for name in names if hasattr(observed, name)})

    def public(self, smallest: int) -> Observed:
        """Returns what can be published: no count below `smallest`, and no unit's own rounds."""

        def shown(count: int | None) -> int | None:
            return None if count is None or count < smallest else count

        units, contributions = shown(self.num_units), self.num_contributions
        by_round, separations = self.contributions_by_round, self.separations
        if units is not None and contributions is not None:
            # So many contributed more often than once, or less often than the most active ones.
            most = max(self.participations, default=1) * units - contributions
            if any(0 < abs(few) < smallest for few in (contributions - units, most)):
                contributions, by_round, separations = None, (), {}  # All have the same sum.
        if any(0 < count < smallest for count in by_round):
            by_round = ()
        return dataclasses.replace(
            self,
            num_units=units,
            num_contributions=shown(contributions),
            # Of units that were seen, the first extreme is one of them. A timer's is nobody's.
            closest=None if self.participations else self.closest,
            most_active=None if self.participations else self.most_active,
            separations={},
            participations={},
            contributions_by_round=by_round,
            separation_cells=_cells(separations, smallest),
            participation_cells=_cells(self.participations, smallest),
        )


def _cells(histogram: dict[int, int], smallest: int) -> tuple[Cell, ...]:
    """Returns the histogram with its cells merged until none has a small count."""
    cells: list[Cell] = []
    lowest, count = None, 0
    for value in sorted(histogram):
        lowest, count = value if lowest is None else lowest, count + histogram[value]
        if count >= smallest:
            cells.append(Cell(lowest, count))
            lowest, count = None, 0
    if count and cells:
        cells[-1] = Cell(cells[-1].lowest, cells[-1].count + count)
    return tuple(cells)


@dataclasses.dataclass(frozen=True)
class MechanismEntry:
    """Which mechanism added the noise."""

    checksum: str
    strategy: str
    num_rounds: int
    num_bands: int
    library_version: str


@dataclasses.dataclass(frozen=True)
class EvidenceEntry:
    """What the report rests on; files by their names, without folders."""

    files: tuple[EvidenceFile, ...]
    ledger_head: str | None
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """Everything that a report states; the schema says what each entry means."""

    format: str = FORMAT
    version: int = VERSION
    created: str
    library_version: str
    unit: str
    adjacency: Adjacency
    delta: float
    epsilon: float
    epsilon_amplified: float | None
    epsilon_unamplified: float
    epsilon_zcdp: float
    rho: float
    mu: float
    min_separation: int | None
    min_separation_basis: Basis
    max_participations: int
    max_participations_basis: Basis
    max_contributions_per_round: int
    rounds_completed: int
    rounds_completed_basis: Basis
    sensitivity: float
    sensitivity_kind: str
    sensitivity_theorem: str
    theorem_3_bound: float | None
    noise_multiplier: float
    l2_norm_clip: float
    accounting: str
    assumptions: tuple[str, ...]
    cautions: tuple[str, ...]
    curve: tuple[CurvePoint, ...]
    groups: tuple[GroupGuarantee, ...]
    tree_aggregation: TreeComparison
    planned: PlannedGuarantee
    plan_was_kept: bool
    findings: tuple[str, ...]
    well_behaved: WellBehaved | None
    observed: Observed
    mechanism: MechanismEntry
    sampling: dict[str, Any] | None
    evidence: EvidenceEntry
    request: ReportRequest
    noise_multiplier_basis: Basis | None = None
    sampling_basis: Basis | None = None
    max_column_norm: float | None = None
    unit_basis: Basis | None = None
    examples_per_user: int | None = None
    timer_seconds: float | None = None
    timer_seconds_basis: Basis | None = None
    failure_probability: float | None = None
    audit: tuple[str, ...] = ()
    comparison: tuple[Compared, ...] = ()
    attacker: AttackerSuccess | None = None
    min_column_norm: float | None = None
    replace_one: ReplaceOne | None = None
    facts: tuple[Fact, ...] = ()
    open_questions: tuple[str, ...] = ()
    clip_norm_adapts: bool = False

    @property
    def assumed(self) -> bool:
        """Whether the figures rest on something that nothing shows."""
        bases = (
            self.min_separation_basis,
            self.max_participations_basis,
            self.rounds_completed_basis,
            self.noise_multiplier_basis,
            self.sampling_basis if self.is_amplified else None,
            self.unit_basis,
        )
        return Basis.ASSUMED in bases

    @property
    def is_amplified(self) -> bool:
        """Whether the guarantee needs that nobody knows who took part when."""
        return self.epsilon_amplified is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON, in the order of the fields."""
        document = _plain(self)
        if not self.clip_norm_adapts:  # As in older reports of this version.
            del document["clip_norm_adapts"]
        return document

    @classmethod
    def from_json(cls, document: object) -> PrivacyReport:
        """Returns the report in a JSON document.

        Raises:
          ReportError: The document is not valid under the schema of its version.
        """
        _validate(document)
        return _typed(cls, document)

    def summary(self) -> dict[str, Any]:
        """Returns the main figures, as the tool prints them with --json."""
        document = self.to_json()
        notes = {"notes": document["evidence"]["notes"]}
        return {name: document[name] for name in _SUMMARY} | notes

    def request_in(self, folder: Path) -> ReportRequest:
        """Returns the request that the report answers, where a folder holds its evidence."""
        return _with_paths(self.request, lambda path: folder / path)


def make_report(request: ReportRequest) -> tuple[PrivacyReport, PrivacyAnalysis]:
    """Returns a report and the analysis it was made from.

    Raises:
      ReportError: No guarantee can be stated; the message says what is missing.
    """
    evidence = gather_evidence(request)
    audit = _audit(request, evidence)
    if request.audit is not None:
        evidence = dataclasses.replace(evidence, run=evidence.run.with_file("audit", request.audit))
    facts: tuple[Fact, ...] = ()
    if request.facts is not None:
        facts = load_facts(request.facts, evidence)
        evidence = dataclasses.replace(evidence, run=evidence.run.with_file("facts", request.facts))
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
        report = dataclasses.replace(
            _report(request, evidence, analysis),
            audit=audit,
            facts=facts,
            open_questions=open_questions(facts),
        )
        report = dataclasses.replace(report, comparison=_comparison(report, evidence, analysis))
        if request.edition == "public":
            report = _public(report)
    except BandMFError as error:
        raise ReportError(f"No guarantee can be stated: {error}") from error
    _validate(report.to_json())
    return report, analysis


def _audit(request: ReportRequest, evidence: Evidence) -> tuple[str, ...]:
    """Returns what an audit of the mechanism found, in its own words; refuses a broken claim."""
    if request.audit is None:
        return ()
    record = load_audit_record(request.audit)
    if record.mechanism_checksum != evidence.run.checksum:
        raise ReportError(
            f"The audit is of the mechanism {record.mechanism_checksum[:12]}... and the run had "
            f"{evidence.run.checksum[:12]}...; audit the mechanism of the run."
        )
    mechanism, rounds = evidence.run.mechanism, record.rounds
    if record.delta != mechanism.delta:
        raise ReportError(
            f"The audit has delta={record.delta} and the mechanism {mechanism.delta}; it was "
            "edited, audit the mechanism again."
        )
    if record.num_rounds != mechanism.num_rounds or rounds > record.num_rounds:
        raise ReportError(
            f"The audit is of {rounds} of {record.num_rounds} rounds and the mechanism has "
            f"{mechanism.num_rounds}; it was edited, audit the mechanism again."
        )
    sensitivity = mechanism.sensitivity
    if rounds < mechanism.num_rounds:
        sensitivity = mechanism.release.first(rounds).sensitivity
    claimed = sensitivity.value / mechanism.noise_multiplier
    if not math.isclose(record.claimed_mu, claimed, rel_tol=_TOLERANCE):
        raise ReportError(
            f"The audit tested the claim mu={exactly(record.claimed_mu)} and the mechanism claims "
            f"{exactly(claimed)}; it was edited, audit the mechanism again."
        )
    # Of the first rounds, or from samples drawn anew, epsilon is what it would be without sampling,
    # at most and within what accounting rounds up.
    most = 1.01 * gaussian_closed_epsilon(claimed, record.delta)
    if rounds == mechanism.num_rounds and mechanism.guarantee.certificate is None:
        most = mechanism.epsilon
    if record.claimed_epsilon > most * (1 + _TOLERANCE):
        raise ReportError(
            f"The audit tested the claim epsilon={exactly(record.claimed_epsilon)} and the "
            f"mechanism claims at most {exactly(most)}; it was edited, audit the mechanism again."
        )
    if record.verdict == VIOLATES:
        raise ReportError(f"No guarantee can be stated: the audit {record.sentences()[-1]}")
    return tuple(record.sentences())


def read_report(path: str | os.PathLike[str]) -> PrivacyReport:
    """Returns the report in the file at `path`, validated against its schema."""
    try:
        return _json.load(path, PrivacyReport.from_json, ReportError)
    except OSError as error:
        raise ReportError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from error


def check_found(paths: Iterable[Path], root: Path) -> None:
    """Raises if evidence that a report names is not there, or is two files in one place."""
    found = sorted(paths)
    for path, following in itertools.pairwise(found):
        if path == following:
            raise UnreadableError(
                f"The report rests on two files of the name {path.name}; name both as when the "
                "report was made, or make one of files whose names differ."
            )
    for path in found:
        if not path.exists() and not glob.has_magic(path.name):
            raise UnreadableError(
                f"{root} has no {path.name}, on which the report rests; state the folder that has "
                "it as evidence_root, or name it as when the report was made."
            )


def verify_report(report: PrivacyReport, request: ReportRequest) -> int:
    """Computes the report again and returns how many entries agree.

    Args:
      report: The report, as read.
      request: Where its evidence is, see `PrivacyReport.request_in`.

    Raises:
      ReportError: The first entry that differs, with both values; or the evidence is gone.
    """
    fresh, _ = make_report(request)
    # Files may have moved; their digests are compared.
    fresh = dataclasses.replace(fresh, request=report.request)
    return _compare(report.to_json(), fresh.to_json(), "$", older=report.version < VERSION)


def dump(document: dict[str, Any]) -> str:
    """Returns a JSON document as text."""
    return json.dumps(document, indent=2, allow_nan=False)


def _report(request: ReportRequest, evidence: Evidence, analysis: PrivacyAnalysis) -> PrivacyReport:
    observed, mechanism = analysis.observed, analysis.mechanism
    amplified = analysis.amplified
    return PrivacyReport(
        created=_provenance.now(),
        library_version=_provenance.version_of(),
        unit=evidence.unit,
        unit_basis=evidence.unit_basis,
        examples_per_user=evidence.examples_per_user,
        clip_norm_adapts=evidence.clip_norm_adapts,
        timer_seconds=evidence.timer_seconds,
        timer_seconds_basis=evidence.timer_seconds_basis,
        adjacency=analysis.adjacency,
        delta=analysis.delta,
        epsilon=analysis.epsilon,
        epsilon_amplified=None if amplified is None else amplified.epsilon,
        failure_probability=None if amplified is None else amplified.failure_probability,
        epsilon_unamplified=analysis.unamplified.epsilon,
        epsilon_zcdp=analysis.epsilon_zcdp,
        rho=analysis.rho,
        mu=analysis.mu,
        min_separation=observed.min_separation,
        min_separation_basis=observed.min_separation_basis,
        max_participations=observed.max_participations,
        max_participations_basis=observed.max_participations_basis,
        max_contributions_per_round=observed.max_contributions_per_round,
        rounds_completed=observed.rounds_completed,
        rounds_completed_basis=observed.rounds_completed_basis,
        sensitivity=analysis.sensitivity.value,
        sensitivity_kind=analysis.sensitivity.kind,
        sensitivity_theorem=analysis.sensitivity.theorem,
        theorem_3_bound=analysis.theorem_3_bound,
        noise_multiplier=analysis.noise_multiplier,
        noise_multiplier_basis=(
            Basis.ASSUMED if evidence.noise_multiplier is None else Basis.OBSERVED
        ),
        sampling_basis=evidence.sampling_basis,
        max_column_norm=analysis.max_column_norm,
        min_column_norm=analysis.min_column_norm,
        attacker=attacker_success(analysis.mu, analysis.curve if amplified is not None else ()),
        replace_one=_replace_one(analysis) if request.replace_one else None,
        l2_norm_clip=mechanism.l2_norm_clip,
        accounting=analysis.guarantee.accounting,
        assumptions=(*_unit_assumptions(evidence), *analysis.guarantee.assumptions),
        cautions=(
            *_noise_cautions(request, mechanism),
            *delta_cautions(analysis.delta),
            *analysis.cautions,
        ),
        curve=tuple(CurvePoint(*point) for point in analysis.curve),
        groups=analysis.groups,
        tree_aggregation=analysis.tree,
        planned=analysis.planned,
        plan_was_kept=analysis.plan_was_kept,
        findings=analysis.findings,
        well_behaved=_well_behaved(evidence, analysis),
        observed=Observed.of(observed),
        mechanism=MechanismEntry(
            checksum=evidence.run.checksum,
            strategy=mechanism.strategy.kind,
            num_rounds=mechanism.num_rounds,
            num_bands=mechanism.num_bands,
            library_version=mechanism.provenance.library_version,
        ),
        sampling=_sampling_entries(evidence.sampling),
        evidence=EvidenceEntry(
            files=tuple(
                dataclasses.replace(file, path=Path(file.path.name)) for file in evidence.run.files
            ),
            ledger_head=None if evidence.ledger is None else evidence.ledger.head,
            notes=evidence.notes,
        ),
        # Where files were is nobody's business, and anybody may have them elsewhere.
        request=_with_paths(request, lambda path: Path(path.absolute().name)),
    )


def _with_paths(request: ReportRequest, change: Callable[[Path], Path]) -> ReportRequest:
    changed: dict[str, Any] = {
        name: None if path is None else change(path)
        for name in ("run", "mechanism", "participation", "audit", "facts")
        for path in (getattr(request, name),)
    }
    further = tuple(map(change, request.further_participation))
    return dataclasses.replace(request, **changed, further_participation=further)


def _replace_one(analysis: PrivacyAnalysis) -> ReplaceOne:
    found = gaussian_guarantee(
        analysis.noise_multiplier,
        analysis.sensitivity.value,
        analysis.delta,
        adjacency=Adjacency.REPLACE_ONE,
        discretization=analysis.mechanism.discretization,
    )
    return ReplaceOne(found.epsilon, found.rho, 2 * analysis.mu)


def _comparison(
    report: PrivacyReport, evidence: Evidence, analysis: PrivacyAnalysis
) -> tuple[Compared, ...]:
    """Returns what was enforced, what happened and what was planned, the enforced first."""
    stated = compared_statement(report)
    if stated.kind == "enforced":
        seen = Compared("observed", note="who took part when was not recorded")
        first = (stated, seen)
    elif evidence.enforced is not None and not report.assumed:
        limits = evidence.enforced
        found = Release(analysis.strategy, AsObserved(limits)).guarantee(
            analysis.noise_multiplier,
            analysis.delta,
            discretization=analysis.mechanism.discretization,
        )
        enforced = Compared(
            "enforced", found.epsilon, found.rho, limits.min_separation, limits.max_participations
        )
        first = (enforced, stated)
    else:
        why = "nothing that enforces how often units take part is shown to have held"
        first = (Compared("enforced", note=why), stated)
    return (*first, compared_plan(report))


def compared_statement(report: PrivacyReport) -> Compared:
    """Returns the guarantee that is stated, as one of those side by side."""
    bases = {report.max_participations_basis}
    if report.min_separation is not None:
        bases.add(report.min_separation_basis)
    kind = "observed"
    if report.assumed:
        kind = "assumed"
    elif bases == {Basis.ENFORCED}:
        kind = "enforced"
    return Compared(
        kind, report.epsilon, report.rho, report.min_separation, report.max_participations
    )


def compared_plan(report: PrivacyReport) -> Compared:
    """Returns the guarantee that was planned, as one of those side by side."""
    planned = report.planned
    limits = (planned.min_separation, planned.max_participations)
    return Compared("planned", planned.epsilon, planned.rho, *limits)


def _unit_assumptions(evidence: Evidence) -> tuple[str, ...]:
    if evidence.unit != UNIT_USER:
        return ()
    assumption = (
        "what is drawn, and called an example below, is a user: a row of a batch, with up to "
        f"{evidence.examples_per_user} examples of one, and the names of users that the training "
        "program was given say whose every example is"
    )
    return (assumption,)


def _noise_cautions(request: ReportRequest, mechanism: Mechanism) -> tuple[str, ...]:
    if request.noise_multiplier in (None, mechanism.noise_multiplier):
        return ()
    caution = (
        f"noise_multiplier={request.noise_multiplier!r} was stated without evidence, in the place "
        f"of the mechanism's {mechanism.noise_multiplier!r}."
    )
    return (caution,)


def delta_cautions(delta: float) -> tuple[str, ...]:
    """Returns a caution if delta is no small probability."""
    if delta < LARGE_DELTA:
        return ()
    caution = (
        f"delta = {delta!r} is large: with that probability nothing at all is promised. State one "
        "far below one over the number of units."
    )
    return (caution,)


def _public(report: PrivacyReport) -> PrivacyReport:
    """Returns the report without what singles out a unit."""
    smallest, others = report.request.small_count, report.well_behaved
    if others is not None and min(others.violators or 0, others.num_units or 0) < smallest:
        # The difference of two numbers of units would be the number of violators.
        others = dataclasses.replace(others, violators=None, num_units=None)
    return dataclasses.replace(
        report, well_behaved=others, observed=report.observed.public(smallest)
    )


def _well_behaved(evidence: Evidence, analysis: PrivacyAnalysis) -> WellBehaved | None:
    observed = evidence.well_behaved
    if observed is None:
        return None
    release = Release(analysis.strategy, AsObserved(observed))
    guarantee = release.guarantee(
        analysis.noise_multiplier,
        analysis.delta,
        discretization=analysis.mechanism.discretization,
    )
    return WellBehaved(
        violators=evidence.violators,
        num_units=observed.num_units,
        min_separation=observed.min_separation,
        max_participations=observed.max_participations,
        sensitivity=release.sensitivity.value,
        sensitivity_kind=release.sensitivity.kind,
        epsilon=guarantee.epsilon,
        rho=guarantee.rho,
    )


def _sampling_entries(sampling: SamplingScheme | None) -> dict[str, Any] | None:
    if sampling is None:
        return None
    return {**sampling.to_json(), "kind": type(sampling).__name__}


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): entry for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, enum.Enum):
        return value.value
    return os.fspath(value) if isinstance(value, Path) else value


def _typed(hint: Any, value: Any) -> Any:
    """Returns a value of JSON, valid under the schema, as what the type hint asks for."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):  # Or None.
        return None if value is None else _typed(arguments[0], value)
    if typing.get_origin(hint) is tuple:
        return tuple(_typed(arguments[0], entry) for entry in value)
    if hint == dict[int, int]:
        try:
            return {int(key): entry for key, entry in value.items()}
        except ValueError as error:  # Python reads 4,300 digits at most.
            raise ReportError(f"The report is invalid: {error}.") from error
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _typed(hints[name], entry) for name, entry in value.items()})
    if isinstance(hint, type) and issubclass(hint, enum.Enum | Path):
        return hint(value)
    return value


def _validate(document: object) -> None:
    """Raises ReportError unless the document is valid under the schema of its version."""
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ReportError(
            f"The report has version {version} and this library reads up to {VERSION}; install a "
            "newer one."
        )
    schema = f"privacy-report-v{1 if version == 1 else VERSION}"
    error = schemas.find_error(document, schema)
    if error is not None:
        raise ReportError(f"The report is invalid at {error.json_path}: {error.message[:200]}.")


def _compare(stated: object, fresh: object, where: str, *, older: bool = False) -> int:
    """Returns how many numbers, words and truth values agree; raises at the first that differs.

    Of a report of an older version words are not compared, and losses may be larger.
    """
    if _NOT_COMPARED.fullmatch(where) or (older and _WORDS_AND_NEW.fullmatch(where)):
        return 0
    if isinstance(stated, dict) and isinstance(fresh, dict):
        if stated.keys() != fresh.keys():
            raise ReportError(f"{where} has other entries than its evidence gives.")
        return sum(
            _compare(stated[name], fresh[name], f"{where}.{name}", older=older) for name in stated
        )
    if isinstance(stated, list) and isinstance(fresh, list):
        if older and where == "$.curve":  # Fewer points of it were finite.
            fresh = fresh[: len(stated)]
        if len(stated) != len(fresh):
            raise ReportError(
                f"{where} has {len(stated)} entries and its evidence gives {len(fresh)}."
            )
        pairs = enumerate(zip(stated, fresh, strict=True))
        return sum(_compare(old, new, f"{where}[{i}]", older=older) for i, (old, new) in pairs)
    if older and _LOSSES.fullmatch(where) and (stated is None or _is_more(stated, fresh)):
        return 1
    if type(stated) is not type(fresh) and not _are_numbers(stated, fresh):
        raise ReportError(f"{where} is {stated!r} and its evidence gives {fresh!r}.")
    if stated != fresh and not _are_close(stated, fresh):
        raise ReportError(f"{where} is {stated!r} and its evidence gives {fresh!r}.")
    return 1


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_more(stated: object, fresh: object) -> bool:
    return _are_numbers(stated, fresh) and stated > fresh  # type: ignore[operator]


def _are_close(stated: object, fresh: object) -> bool:
    """Whether the values are the same but for rounding; integers are not rounded."""
    if not isinstance(stated, float) and not isinstance(fresh, float):
        return False
    try:
        return math.isclose(stated, fresh, rel_tol=_TOLERANCE)  # type: ignore[arg-type]
    except OverflowError:  # An integer that no float is close to.
        return False
