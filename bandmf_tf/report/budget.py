"""Several releases from one population: what they cost together, and what is left of a budget.

A *program file* lists the releases of a product in the order in which they were made:

    delta: 1.0e-8
    max_epsilon: 12                     # Optional; so is max_rho.
    releases:
      - name: next word, spring
        report: spring/report.json      # Of bandmf-report; computed again from its evidence,
        evidence_root: runs             # which is in this folder; by default in the report's.
      - name: next word, autumn
        mechanism: plan/mechanism.bandmf    # Planned, not yet trained.
        populations: [phones]           # Who takes part; everybody, if left out.
        tuning: 12 runs on public data  # How its hyperparameters were found, which is not covered.
      - name: next word, winter
        report: winter/report.json      # The best of several runs on the same people, which is.
        tuning: {private_selection: geometric, mean: 8}
      - name: next word, in training
        run: run                        # The folder of a run, without a report.
      - name: emoji
        rho: 0.2                        # Known by its rho alone, which is taken on trust.

With `disjoint_populations: true`, the operator's word, a release costs nothing to those who are in
none of its populations; otherwise everybody may have been in all of them. Whoever took part in
several releases is protected by the guarantee of their composition, one chosen after the other:

* zCDP adds up: rho is the sum of all rho (Bun and Steinke 2016, Lemma 2.3);
* releases that are Gaussian of mu_i, which is what noise without amplification is, are together
  Gaussian of mu = sqrt(sum mu_i^2) (Dong, Roth, Su 2022, Corollary 3.3), whose epsilon is exact;
* releases amplified by sampling, and those known by rho alone, have pairs of distributions that
  dominate them, whose privacy losses are added (`accounting/composition.py`), to those of the
  Gaussian of all others: by the sampled sums of which a release consists or, where samples certify
  its epsilon, by its guarantees at many deltas.

Where the ledgers of runs name units by the same pseudonyms, what each unit really took part in is
added, and the worst unit counts (`joining.py`); otherwise it is assumed that somebody was the worst
unit of every run. A release that was chosen from several runs by private selection
(`accounting/selection.py`) is composed with the others by Rényi DP; it has no rho.

All are proven; epsilon is the smallest of those that apply. Nothing here knows of a release that
the file does not name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.accounting.composition import Composer, Losses
from bandmf_tf.accounting.gaussian import gaussian_epsilon, gdp_mu, zcdp_epsilon
from bandmf_tf.accounting.selection import PrivateSelection, selected_epsilon
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence import confined
from bandmf_tf.evidence.gather import gather_evidence
from bandmf_tf.evidence.logs import without_spelling
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.report import strict_yaml
from bandmf_tf.report.document import (
    LARGE_DELTA,
    check_found,
    delta_cautions,
    make_report,
    read_report,
    verify_report,
)
from bandmf_tf.report.joining import UnitLosses, joined_mu, unit_losses

EVERYBODY = "everybody"
_KINDS = ("report", "run", "mechanism", "rho")
# Evidence that two runs may have in common.
_OF_NO_RUN = ("mechanism", "facts", "audit")
LIMITS = ("max_epsilon", "max_rho")
_FIELDS = ("delta", *LIMITS, "disjoint_populations", "releases")


class ProgramError(ReportError):
    """A program file cannot be composed; the message says why in one sentence."""


@dataclasses.dataclass(frozen=True)
class PlannedRelease:
    """One entry of a program file.

    Attributes:
      name: What the release is called.
      kind: One of "report", "mechanism" and "rho".
      path: The file; None for a rho.
      evidence_root: The folder of a report's evidence; None for all others.
      rho: What is stated; None where a file says it.
      populations: Who took part; empty for everybody.
      tuning: How hyperparameters were found, in words; None where nothing says it.
      selection: How this release was selected from several runs, if that is accounted for.
    """

    name: str
    kind: str
    path: Path | None
    rho: float | None
    populations: tuple[str, ...]
    tuning: str | None
    selection: PrivateSelection | None = None
    evidence_root: Path | None = None

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), *(("population", p) for p in self.populations)):
            # A line break, a change of the direction of writing, or spaces up to where a line is
            # wrapped would forge what is printed.
            if not text.strip() or not text.isprintable() or "   " in text:
                raise ProgramError(
                    f"a {what} must be printable text without rows of spaces, in one line. Found "
                    f"{text!r}."
                )


@dataclasses.dataclass(frozen=True)
class Program:
    """A program file as it is written.

    Raises:
      ProgramError: There is a limit on rho, and a release that has none; or one on epsilon, at a
        delta at which that says nothing.
    """

    delta: float
    releases: tuple[PlannedRelease, ...]
    max_epsilon: float | None = None
    max_rho: float | None = None
    disjoint_populations: bool = False

    def __post_init__(self) -> None:
        chosen = [release.name for release in self.releases if release.selection is not None]
        if chosen and self.max_rho is not None:
            raise ProgramError(
                f"max_rho cannot be checked: {chosen[0]} was selected from several runs, which has "
                "an epsilon and no rho; give max_epsilon."
            )
        if self.max_epsilon is not None and self.delta >= LARGE_DELTA:
            raise ProgramError(
                f"max_epsilon limits nothing at delta = {self.delta!r}; state a delta below "
                f"{exactly(LARGE_DELTA)}, and far below one over the number of units."
            )

    @property
    def populations(self) -> tuple[str, ...]:
        """All populations by name; `EVERYBODY` if they may have members in common."""
        names = {name: None for release in self.releases for name in release.populations}
        return tuple(names) if names and self.disjoint_populations else (EVERYBODY,)


@dataclasses.dataclass(frozen=True)
class ReleaseCost:
    """What one release costs by itself.

    Attributes:
      name: What the release is called.
      basis: "observed", "assumed", "planned" or "stated": how it is known.
      unit: What is protected; None where nothing says it.
      rho: The release is rho-zCDP; each of its runs, if it was selected.
      mu: It is a Gaussian release of mu without amplification; None where that is not known.
      epsilon: At the program's delta, amplified where that is known.
      losses: What dominates it, if it is amplified; else None.
      populations: Who took part; empty for everybody.
      selection: How it was selected from several runs; None if it was not.
      identity: Digests of the evidence that tells it from other runs.
      units: What it cost each unit, where its ledger tells.
      cautions: What its report cautions about.
    """

    name: str
    basis: str
    unit: str | None
    rho: float
    mu: float | None
    epsilon: float
    losses: Losses | None
    populations: tuple[str, ...]
    selection: PrivateSelection | None = None
    identity: frozenset[str] = frozenset()
    units: UnitLosses | None = None
    cautions: tuple[str, ...] = ()

    @property
    def is_amplified(self) -> bool:
        """Whether epsilon is amplified by sampling."""
        return self.losses is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the cost as plain values, without what is of units."""
        names = ("name", "basis", "unit", "rho", "mu", "epsilon", "is_amplified")
        values = {name: getattr(self, name) for name in names}
        selection = None if self.selection is None else dataclasses.asdict(self.selection)
        return {**values, "populations": list(self.populations), "selection": selection}


@dataclasses.dataclass(frozen=True)
class Total:
    """What the first releases cost one population together.

    Attributes:
      population: Who.
      after: The name of the last of them.
      rho: rho-zCDP of all; None if one was selected, which has none.
      epsilon: At the program's delta.
      accounting: How epsilon was composed.
    """

    population: str
    after: str
    rho: float | None
    epsilon: float
    accounting: str


@dataclasses.dataclass(frozen=True)
class Budget:
    """A program, what its releases cost, and what they cost together, after each of them."""

    program: Program
    costs: tuple[ReleaseCost, ...]
    totals: tuple[Total, ...]

    @property
    def last_totals(self) -> tuple[Total, ...]:
        """What all releases cost, one entry a population."""
        last = {total.population: total for total in self.totals}
        return tuple(last.values())

    def excesses(self) -> tuple[str, ...]:
        """Returns, in a sentence each, where the budget does not suffice."""
        found = []
        for total in self.last_totals:
            for name in ("epsilon", "rho"):
                limit = getattr(self.program, f"max_{name}")
                value = getattr(total, name)
                if limit is not None and value is not None and value > limit:
                    found.append(
                        f"{total.population}: {name} is {round_up(value, 6):g} after {total.after} "
                        f"and max_{name} is {exactly(limit)}."
                    )
        return tuple(found)

    def open_questions(self) -> tuple[str, ...]:
        """Returns what a reader would have to ask about, in a sentence each."""
        found = [
            f"{release.name}: how its hyperparameters were found is not said; no figure covers it."
            for release in self.program.releases
            if release.tuning is None
        ]
        of_delta = delta_cautions(self.program.delta)
        found += of_delta
        found += [
            f"{cost.name}: {caution}"
            for cost in self.costs
            for caution in cost.cautions
            if caution not in of_delta
        ]
        found += [
            f"{cost.name}: which unit its cost is of is not known; it is added as if it were that "
            "of the others."
            for cost in self.costs
            if cost.unit is None and len(self.costs) > 1
        ]
        found += [
            f"{cost.name}: its cost is {cost.basis}, not observed."
            for cost in self.costs
            if cost.basis != "observed"
        ]
        found += [
            f"{cost.name}: that the number of its runs was drawn as stated, that none of them cost "
            "more, and that nothing but the best was seen, is the operator's word."
            for cost in self.costs
            if cost.selection is not None
        ]
        found += [
            f"{one.name} and {other.name}: {_percent(one.units.recurring(other.units))} of the "
            "pseudonyms recur, though one salt made them, so that units may have got new ones; "
            "they are added as if somebody had been the worst unit of both."
            for i, other in enumerate(self.costs)
            for one in self.costs[:i]
            if one.units is not None
            and other.units is not None
            and one.units.salt_id == other.units.salt_id
            and not one.units.can_be_joined(other.units)
        ]
        sampled = [cost.name for cost in self.costs if cost.is_amplified]
        if len(sampled) > 1:
            found.append(
                f"{', '.join(sampled)}: that each drew its batches by coins of its own, not from "
                "one seed, is the operator's word."
            )
        if self.program.disjoint_populations:
            found.append("That nobody is in two populations is the operator's word.")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain values."""
        return {
            "delta": self.program.delta,
            "max_epsilon": self.program.max_epsilon,
            "max_rho": self.program.max_rho,
            "releases": [cost.to_json() for cost in self.costs],
            "totals": [dataclasses.asdict(total) for total in self.totals],
            "excesses": list(self.excesses()),
            "open_questions": list(self.open_questions()),
        }


def load_program(path: str | os.PathLike[str]) -> Program:
    """Returns the program in a YAML file.

    Raises:
      ReportError: The file cannot be read, or a field is missing, unknown, there twice, or of the
        wrong type.
    """
    folder, loaded = Path(path).parent, strict_yaml.load(path, _FIELDS)
    try:
        disjoint = loaded.get("disjoint_populations", False)
        if not isinstance(disjoint, bool):
            raise ProgramError(f"disjoint_populations must be true or false. Found {disjoint!r}.")
        entries = loaded.get("releases")
        if not isinstance(entries, list) or not entries:
            raise ProgramError("releases must be a list of one release or more.")
        releases = tuple(_entry(entry, folder) for entry in entries)
        names = [release.name for release in releases]
        if len(set(names)) < len(names):
            raise ProgramError(f"every release needs a name of its own. Found {names}.")
        _check_populations(releases)
        limits = {
            name: _checks.positive_float(name, loaded[name])
            for name in LIMITS
            if loaded.get(name) is not None
        }
        delta = _checks.probability("delta", loaded.get("delta"))
        return Program(delta, releases, **limits, disjoint_populations=disjoint)
    except BandMFError as error:
        raise ProgramError(f"{path}: {error}") from error


def program_of_runs(runs: Sequence[str], delta: float) -> Program:
    """Returns the program whose releases are these runs, by the names of their folders."""
    releases = (PlannedRelease(run, "run", Path(run), None, (), None) for run in runs)
    return Program(_checks.probability("delta", delta), tuple(releases))


def compose(program: Program) -> Budget:
    """Returns what the releases of a program cost, computed from their evidence.

    Raises:
      ReportError: A release has no guarantee, or units of privacy differ.
    """
    share = program.delta / (1 + len(program.releases))
    costs = tuple(_cost(release, program.delta, share) for release in program.releases)
    units = {cost.unit for cost in costs if cost.unit is not None}
    if len(units) > 1:
        raise ProgramError(
            f"Releases must protect the same unit to be added up. Found {sorted(units)}; state "
            "them for the larger unit, or keep a program file for each."
        )
    _check_runs(costs, disjoint=program.disjoint_populations)
    totals = []
    for population in program.populations:
        of_population: list[ReleaseCost] = []
        composer = Composer(program.delta)
        for cost in costs:
            if population in (EVERYBODY, *cost.populations) or not cost.populations:
                of_population.append(cost)
                totals.append(_total(population, of_population, composer))
    return Budget(program, costs, tuple(totals))


def _check_populations(releases: tuple[PlannedRelease, ...]) -> None:
    """Raises if one population may have two names, for whom costs would not be added."""
    spellings: dict[str, str] = {}
    for name in (name for release in releases for name in release.populations):
        if without_spelling(name) == EVERYBODY:
            raise ProgramError(f"populations must be left out for everybody. Found {name!r}.")
        folded = without_spelling(name)
        key = "".join(letter for letter in folded if letter.isalnum()) or folded
        if spellings.setdefault(key, name) != name:
            raise ProgramError(
                f"populations {spellings[key]!r} and {name!r} look like one; spell it in one way."
            )


def _check_runs(costs: tuple[ReleaseCost, ...], *, disjoint: bool) -> None:
    """Raises if a run stands there twice, or if its pseudonyms show that populations overlap."""
    for i, cost in enumerate(costs):
        for other in costs[:i]:
            if cost.identity & other.identity:
                raise ProgramError(
                    f"{other.name!r} and {cost.name!r} rest on the same evidence: they are one "
                    "run; name it once."
                )
            apart = cost.populations and other.populations
            if not disjoint or not apart or set(cost.populations) & set(other.populations):
                continue
            if cost.units is not None and other.units is not None:
                shared = cost.units.shared(other.units)
                if shared:
                    raise ProgramError(
                        f"disjoint_populations is true, and {shared:,} pseudonyms of "
                        f"{other.name!r} are in {cost.name!r}, too; leave it out."
                    )


def _entry(entry: Any, folder: Path) -> PlannedRelease:
    if not isinstance(entry, dict):
        raise ProgramError(f"a release must hold `name: value` lines. Found {entry!r}.")
    optional = ["populations", "tuning", *(["evidence_root"] if "report" in entry else [])]
    unknown = sorted(map(str, entry.keys() - {"name", *optional, *_KINDS}))
    kinds = [kind for kind in _KINDS if kind in entry]
    name, populations, tuning = entry.get("name"), entry.get("populations", []), entry.get("tuning")
    selection = None
    if isinstance(tuning, dict):
        selection = _selection(tuning)
        tuning = selection.describe()
    elif isinstance(tuning, str):
        tuning = tuning.strip() or None
    is_named = isinstance(name, str)
    if unknown or len(kinds) != 1 or not is_named or not isinstance(tuning, str | None):
        raise ProgramError(
            f"a release has a name, exactly one of {', '.join(_KINDS)}, and perhaps "
            f"{' and '.join(optional)}. Found {entry!r}."
        )
    if not isinstance(populations, list) or not all(
        isinstance(population, str) for population in populations
    ):
        raise ProgramError(f"populations must be a list of names. Found {populations!r}.")
    kind, source = kinds[0], entry[kinds[0]]
    path = rho = root = None
    if kind == "rho":
        rho = _checks.positive_float("rho", source)
    elif isinstance(source, str) and source and source.isprintable():
        path = folder / source
        root = _evidence_root(entry, folder, path) if kind == "report" else None
    else:
        raise ProgramError(f"{kind} must name a file. Found {source!r}.")
    names = tuple(dict.fromkeys(populations))
    return PlannedRelease(str(name), kind, path, rho, names, tuning, selection, root)


def _evidence_root(entry: dict[Any, Any], folder: Path, report: Path) -> Path:
    root = entry.get("evidence_root")
    if root is None:
        return report.parent
    if not isinstance(root, str) or not (folder / root).is_dir():
        raise ProgramError(f"evidence_root must be a folder. Found {root!r}.")
    return folder / root


def _selection(tuning: dict[Any, Any]) -> PrivateSelection:
    if tuning.keys() != {"private_selection", "mean"}:
        raise ProgramError(
            f"tuning must be words, or {{private_selection: geometric, mean: 8}}. Found {tuning!r}."
        )
    return PrivateSelection(tuning["mean"], tuning["private_selection"])


def _cost(release: PlannedRelease, delta: float, share: float) -> ReleaseCost:
    cost = _cost_of_one(release, delta, share)
    selection = release.selection
    if selection is None:
        return cost
    # Only what holds for every run counts: rho, and no amplification.
    return dataclasses.replace(
        cost,
        mu=None,
        epsilon=selected_epsilon([(cost.rho, selection)], 0.0, delta),
        losses=None,
        selection=selection,
        units=None,
    )


def _cost_of_one(release: PlannedRelease, delta: float, share: float) -> ReleaseCost:
    """Returns what the run that was released costs, as if there had been no other."""
    populations = release.populations
    if release.rho is not None:
        epsilon = zcdp_epsilon(release.rho, delta)
        return ReleaseCost(
            release.name, "stated", None, release.rho, None, epsilon, None, populations
        )
    assert release.path is not None
    path = release.path
    if release.kind == "mechanism":
        mechanism = load_mechanism(path)
        mechanism.verify_epsilon()
        noise = mechanism.noise_multiplier
        mu, guarantee = gdp_mu(noise, mechanism.sensitivity.value), mechanism.guarantee_at(delta)
        losses = mechanism.release.losses(noise, guarantee, share)
        return ReleaseCost(
            *(release.name, "planned", None, mechanism.rho, mu),
            *(guarantee.epsilon, losses, populations),
        )
    if release.kind == "run":
        request = ReportRequest(run=path)
    else:
        assert release.evidence_root is not None
        if not path.is_file():
            raise ProgramError(f"report must be a file. Found {os.fspath(path)!r}.")
        report = read_report(path)
        request = report.request_in(release.evidence_root)
        confined.check(request.paths, release.evidence_root)  # A stranger may have named them.
        check_found(request.paths, release.evidence_root)
        verify_report(report, request)
    stated, analysis = make_report(dataclasses.replace(request, delta=delta))
    evidence = gather_evidence(request)
    return ReleaseCost(
        name=release.name,
        basis="assumed" if stated.assumed else "observed",
        unit=stated.unit,
        rho=stated.rho,
        mu=stated.mu,
        epsilon=stated.epsilon,
        losses=analysis.release.losses(analysis.noise_multiplier, analysis.guarantee, share),
        populations=populations,
        identity=frozenset(
            file.sha256 for file in evidence.run.files if file.kind not in _OF_NO_RUN
        ),
        units=unit_losses(evidence, analysis),
        cautions=stated.cautions,
    )


def _joined(costs: list[ReleaseCost]) -> tuple[list[ReleaseCost], str]:
    """Returns the costs, those in one place whose units can be told, and that in words.

    By what each unit bore; there are no words if no units could be told.
    """
    groups: list[list[ReleaseCost]] = []
    for cost in costs:
        for group in groups:
            if cost.units is not None and all(
                other.units is not None and cost.units.can_be_joined(other.units) for other in group
            ):
                group.append(cost)
                break
        else:
            groups.append([cost])
    recurring = [
        one.units.recurring(other.units)
        for group in groups
        for one, other in itertools.combinations(group, 2)
        if one.units is not None and other.units is not None
    ]
    if not recurring:
        return costs, ""
    joined = [group[0] if len(group) == 1 else _as_one(group) for group in groups]
    return joined, f", added unit by unit ({_percent(min(recurring))} of pseudonyms recur)"


def _percent(share: float) -> str:
    return f"{round_down(100 * share, 3):g} %"


def _as_one(group: list[ReleaseCost]) -> ReleaseCost:
    mu = joined_mu(cost.units for cost in group if cost.units is not None)
    return dataclasses.replace(group[-1], rho=mu * mu / 2, mu=mu, units=None)


def _total(population: str, costs: list[ReleaseCost], composer: Composer) -> Total:
    """Returns what releases cost together; of several proven figures the smallest."""
    after, delta = costs[-1].name, composer.delta
    costs, by = _joined(costs)
    selected = [(cost.rho, cost.selection) for cost in costs if cost.selection is not None]
    if selected:
        beside = math.fsum(cost.rho for cost in costs if cost.selection is None)
        epsilon = selected_epsilon(selected, beside, delta)
        return Total(population, after, None, epsilon, f"Rényi DP, private selection{by}")
    rho = math.fsum(cost.rho for cost in costs)
    options = {"zCDP": zcdp_epsilon(rho, delta)}
    if len(costs) == 1 and not by:
        options["one release"] = costs[0].epsilon
    if all(cost.mu is not None for cost in costs):
        options["Gaussian releases"] = gaussian_epsilon(1.0, _gaussian_mu(costs), delta)
    losses = [cost.losses for cost in costs if cost.losses is not None]
    others = [cost for cost in costs if cost.losses is None]
    by_rho = math.fsum(cost.rho for cost in others if cost.mu is None)
    gaussian = _gaussian_mu(others)
    kinds = {"amplified": losses, "Gaussian": gaussian, "zCDP": by_rho}
    if losses or (gaussian and by_rho):
        names = " and ".join(kind for kind, found in kinds.items() if found)
        name = f"privacy loss distributions of {names} releases"
        options[name] = composer.epsilon(losses, gaussian, by_rho)
    accounting = min(options, key=options.__getitem__)
    return Total(population, after, rho, options[accounting], f"{accounting}{by}")


def _gaussian_mu(costs: list[ReleaseCost]) -> float:
    """Returns mu of those together that are Gaussian releases."""
    return math.sqrt(math.fsum(cost.mu**2 for cost in costs if cost.mu is not None))
