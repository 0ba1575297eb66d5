"""What a run means for privacy: the guarantee for what really happened, beside what was planned.

A mechanism of n planned rounds of which t were completed released the first t rows of x + C^-1 z.
C is lower triangular, so these rows are the mechanism of the leading t x t block of C, and the
guarantee is that of the block under the observed participation (b, k'):

* one Gaussian release of sensitivity `m * sens(C_t; b, k')`, where m is the largest number of
  contributions of one unit to one round: the triangle inequality, m units in one. Exact where
  the strategy has at most b bands or participations form a chain, Theorem 3's bound otherwise,
  see `sensitivity.py`;
* amplified by sampling, where it is known how batches were drawn (`amplification.py`) and that
  makes epsilon smaller;
* for groups of g units (a user with g devices): see `Release.of_group`.

All figures are for zero-out neighbours. Nothing here depends on files; `evidence/gather.py` finds
the evidence.
"""

from __future__ import annotations

import dataclasses
import math

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div, exactly, round_down, round_up
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.gaussian import (
    Adjacency,
    PrivacyGuarantee,
    gdp_mu,
    zcdp_epsilon,
)
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.evidence.participation import ObservedParticipation
from bandmf_tf.factorization import error
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    Participation,
    Patterns,
    SingleParticipation,
)
from bandmf_tf.factorization.sensitivity import (
    UPPER_BOUND,
    Sensitivity,
    general_min_separation,
)
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.basis import Basis

GROUP_SIZES = (2, 3, 5)
CURVE_DELTAS = tuple(10.0**-exponent for exponent in range(4, 13))

# A figure stated beside another one is worth so many entries of C or C^T C, 160 MB, and not more.
_LARGEST_GRAM = 20_000_000

# From here on an epsilon says nothing.
_LARGEST_EPSILON = 1e6

# A difference of epsilon by less than this factor is not worth a sentence.
_NOTICEABLE = 1 + 1e-6


PLANNED_BY_SAMPLING = (
    "The planned epsilon rests on amplification by sampling; it applies only to runs of which it "
    "is known how batches were drawn."
)

_NOT_AMPLIFIED = "The guarantee is that without amplification: {}."


class UnsupportedGuaranteeError(BandMFError):
    """The evidence does not support a guarantee; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class GroupGuarantee:
    """The guarantee for `group_size` units together, for example the devices of one user."""

    group_size: int
    epsilon: float
    rho: float


@dataclasses.dataclass(frozen=True)
class TreeComparison:
    """Online tree aggregation of the same rounds and participation, at the same error.

    Attributes:
      sensitivity: Of the tree, by its exact dynamic programme where `sensitivity_kind` is "exact".
      sensitivity_kind: "exact" or "upper bound".
      noise_multiplier: The noise at which its RMSE on the mechanism's workload is the mechanism's.
      rho: zCDP of that release.
      epsilon: Epsilon of that release at the report's delta.
      released_sensitivity: Of the matrix that online tree aggregation releases, which is less than
        that of the nodes; None where the matrix is too large to write down.
      released_epsilon: Epsilon at the same noise by that sensitivity.
    """

    sensitivity: float
    sensitivity_kind: str
    noise_multiplier: float
    rho: float
    epsilon: float
    released_sensitivity: float | None = None
    released_epsilon: float | None = None


@dataclasses.dataclass(frozen=True)
class PlannedGuarantee:
    """What the mechanism was planned for, at the report's delta.

    Attributes:
      num_rounds: Planned rounds n.
      min_separation: Planned b; None for a single participation.
      max_participations: Planned k.
      schema: Participation schema of the plan.
      sensitivity: Of the whole strategy under the planned participation.
      noise_multiplier: Planned noise.
      rho: zCDP of the whole run as planned.
      epsilon: Epsilon of the whole run as planned, amplified if the plan rests on sampling.
      epsilon_if_kept: Epsilon of the completed rounds, unamplified, with the noise that was used,
        had the participation kept to the plan.
    """

    num_rounds: int
    min_separation: int | None
    max_participations: int
    schema: str
    sensitivity: float
    noise_multiplier: float
    rho: float
    epsilon: float
    epsilon_if_kept: float


@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyAnalysis:
    """Everything that follows from a mechanism and what happened with it.

    Attributes:
      mechanism: The mechanism.
      observed: What happened.
      noise_multiplier: The noise that was used, over the clip norm.
      delta: The delta of every epsilon.
      strategy: The leading block of the strategy, of `observed.rounds_completed` rounds; all of it
        where the block of a tree has no closed form.
      sensitivity: For clip norm 1 and zero-out neighbours, several contributions to one round
        included.
      theorem_3_bound: Theorem 3's bound on the same, where the strategy has more bands than the
        separation: what the paper states. `sensitivity` is never larger.
      unamplified: The guarantee as one Gaussian release.
      amplified: The guarantee amplified by sampling; None if it is unknown how batches were drawn,
        or if that amplifies nothing.
      epsilon_zcdp: Epsilon by conversion from rho alone; larger than by PLD.
      mu: The release is mu-GDP.
      release: What was released, with sampling where that amplifies the guarantee.
      curve: Pairs (delta, epsilon) of the stated guarantee.
      groups: Guarantees for groups of units.
      tree: The comparison with tree aggregation.
      planned: What was planned.
      findings: Plan and reality, compared in sentences.
      plan_was_kept: Whether what happened is within what was planned.
      cautions: What a reader must know about the figures, in sentences.
    """

    mechanism: Mechanism
    observed: ObservedParticipation
    noise_multiplier: float
    delta: float
    strategy: Strategy
    sensitivity: Sensitivity
    theorem_3_bound: float | None
    unamplified: PrivacyGuarantee
    amplified: PrivacyGuarantee | None
    epsilon_zcdp: float
    mu: float
    release: Release
    curve: tuple[tuple[float, float], ...]
    groups: tuple[GroupGuarantee, ...]
    tree: TreeComparison
    planned: PlannedGuarantee
    findings: tuple[str, ...]
    plan_was_kept: bool
    cautions: tuple[str, ...]

    @property
    def guarantee(self) -> PrivacyGuarantee:
        """The guarantee to state: amplified where that is supported."""
        return self.unamplified if self.amplified is None else self.amplified

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee to state."""
        return self.guarantee.epsilon

    @property
    def rho(self) -> float:
        """The release is rho-zCDP, with or without amplification."""
        return self.unamplified.rho

    @property
    def max_column_norm(self) -> float:
        """Largest column norm of the strategy as it was used, at clip norm 1."""
        return float(self.strategy.column_norms().max())

    @property
    def min_column_norm(self) -> float:
        """Smallest column norm of the strategy as it was used, at clip norm 1."""
        return float(self.strategy.column_norms().min())

    @property
    def adjacency(self) -> Adjacency:
        """Neighbours of every guarantee here."""
        return Adjacency.ZERO_OUT


def analyze(
    mechanism: Mechanism,
    observed: ObservedParticipation,
    *,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    sampling: SamplingScheme | None = None,
) -> PrivacyAnalysis:
    """Returns the privacy of a run.

    Args:
      mechanism: The mechanism whose noise was added.
      observed: How units took part.
      delta: Delta of the guarantees; None stands for the mechanism's.
      noise_multiplier: Noise over clip norm, if it was not the mechanism's. The strategy's scaling
        is taken as it is.
      sampling: How batches were drawn, if that is known and units were sampled.

    Raises:
      UnsupportedGuaranteeError: There is no finite guarantee.
    """
    delta = mechanism.delta if delta is None else _checks.probability("delta", delta)
    noise = mechanism.noise_multiplier if noise_multiplier is None else noise_multiplier
    noise = _checks.positive_float("noise_multiplier", noise)
    t = observed.rounds_completed
    if t > mechanism.num_rounds:
        raise UnsupportedGuaranteeError(
            f"rounds_completed={t} is more than the num_rounds={mechanism.num_rounds} for which "
            "the mechanism has noise; give the mechanism of this run."
        )
    participation = AsObserved(observed, mechanism.participation)
    release = Release(mechanism.strategy, participation).first(t)
    strategy, sensitivity = release.strategy, release.sensitivity
    grid = mechanism.discretization
    ending = (*_fixed_assumption(observed), *_ending_assumption(t, mechanism.num_rounds))
    unamplified = release.guarantee(noise, delta, discretization=grid, assumptions=ending)
    if not unamplified.epsilon < _LARGEST_EPSILON:
        raise UnsupportedGuaranteeError(
            f"epsilon is {round_up(unamplified.epsilon):g} at delta={exactly(delta)} with "
            f"noise_multiplier={exactly(noise)}, which protects nobody; "
            f"{exactly(_LARGEST_EPSILON)} is the most that is stated."
        )
    amplified, why_not = None, None
    if sampling is not None:
        why_not = _why_not_amplified(strategy, observed, sampling)
    if sampling is not None and why_not is None:
        sampled = Release(strategy, participation, sampling.first(t))
        amplified = sampled.guarantee(
            noise,
            delta,
            discretization=grid,
            assumptions=ending,
            certificate=_planned_certificate(mechanism, sampled, noise, delta),
        )
        if amplified.epsilon * _NOTICEABLE >= unamplified.epsilon:
            amplified = None
            why_not = "the way in which batches were drawn makes no proven figure smaller"
        else:
            release = sampled
    planned = _planned(mechanism, strategy, noise, delta)
    findings, kept = _findings(mechanism, observed, planned, noise, unamplified.epsilon)
    if why_not is not None:
        findings = (*findings, _NOT_AMPLIFIED.format(why_not))
    return PrivacyAnalysis(
        mechanism=mechanism,
        observed=observed,
        noise_multiplier=noise,
        delta=delta,
        strategy=strategy,
        sensitivity=sensitivity,
        theorem_3_bound=_theorem_3_bound(strategy, observed),
        unamplified=unamplified,
        amplified=amplified,
        epsilon_zcdp=zcdp_epsilon(unamplified.rho, delta),
        mu=gdp_mu(noise, sensitivity.value),
        release=release,
        curve=_curve(release, noise, grid),
        groups=tuple(_group(release, noise, delta, grid, size) for size in GROUP_SIZES),
        tree=_tree_comparison(mechanism, strategy, observed, noise, delta),
        planned=planned,
        findings=findings,
        plan_was_kept=kept,
        cautions=(*observed.cautions, *_delta_cautions(observed, delta, sampling)),
    )


@dataclasses.dataclass(frozen=True)
class AsObserved(Participation):
    """What units did, as a schema: its sensitivity is that of the completed rounds.

    If epochs of a fixed length were planned and every separation that was observed is a multiple of
    it, patterns are subsets of (k, b)-participation, for which dense strategies were made.

    Attributes:
      observed: What happened.
      planned: The schema of the plan, if its epochs count.
    """

    schema = "as observed"
    observed: ObservedParticipation
    planned: Participation | None = None

    def sensitivity(self, strategy: Strategy) -> Sensitivity:
        b, k = self.observed.min_separation, self.observed.max_participations
        if b is None or k == 1:
            found = SingleParticipation().sensitivity(strategy)
        else:
            found = MinSeparation(b, k).sensitivity(strategy)
        if (epochs := self._epochs()) is not None:
            fixed = epochs.sensitivity(strategy)
            if k < epochs.max_participations:
                fixed = dataclasses.replace(fixed, kind=UPPER_BOUND)
            found = min(found, fixed, key=lambda candidate: candidate.value)
        if strategy.num_rounds != self.observed.rounds_completed:
            theorem = f"{found.theorem}, of all {strategy.num_rounds} rounds that were planned"
            found = Sensitivity(found.value, UPPER_BOUND, theorem)
        m = self.observed.max_contributions_per_round
        if m > 1:
            theorem = f"{found.theorem}, times {m} contributions to one round (triangle inequality)"
            found = Sensitivity(m * found.value, UPPER_BOUND, theorem)
        return found

    def _epochs(self) -> FixedEpochs | None:
        """The planned epochs, if every separation that was observed is a multiple of them."""
        stride = self.observed.separation_stride
        if (
            self.observed.max_participations == 1
            or stride is None
            or not isinstance(self.planned, FixedEpochs)
            or stride % self.planned.min_separation
        ):
            return None
        # A unit may leave epochs out, so all of them count, more than the cap if need be.
        return FixedEpochs(stride, ceil_div(self.observed.rounds_completed, stride))

    def allows(self, sampling: Patterns) -> bool:
        """Whether a unit contributed once to a round; `evidence` holds rounds to the sampling."""
        del sampling
        return self.observed.max_contributions_per_round == 1

    def describe(self) -> str:
        epochs, text = self._epochs(), _participation_assumption(self.observed)
        if epochs is None:
            return text
        return f"{text}, always by a multiple of {epochs.min_separation} rounds"


def _theorem_3_bound(strategy: Strategy, observed: ObservedParticipation) -> float | None:
    b, k = observed.min_separation, observed.max_participations
    width = min(2 * strategy.num_bands - 1, strategy.num_rounds)
    if b is None or strategy.num_bands <= b or strategy.num_rounds * width > _LARGEST_GRAM:
        return None
    bound = general_min_separation(strategy, b, k)
    return observed.max_contributions_per_round * bound.value


def _participation_assumption(observed: ObservedParticipation) -> str:
    b, k = observed.min_separation, observed.max_participations
    if b is None or k == 1:
        basis = observed.max_participations_basis
        text = f"every unit took part in at most one round ({basis})"
    else:
        text = (
            f"every unit took part in at most {k} rounds "
            f"({observed.max_participations_basis}), at least {b} rounds apart "
            f"({observed.min_separation_basis}; b = r2 - r1)"
        )
    if observed.max_contributions_per_round > 1:
        text += f", up to {observed.max_contributions_per_round} times in one round"
    return text


def _fixed_assumption(observed: ObservedParticipation) -> tuple[str, ...]:
    """Returns what a participation that was only observed needs to be as good as a planned one."""
    bases = (observed.min_separation_basis, observed.max_participations_basis)
    if Basis.OBSERVED not in bases:
        return ()
    assumption = (
        "when a unit took part did not depend on models that had been released: a separation that "
        "was observed counts as if it had been fixed in advance"
    )
    return (assumption,)


def _ending_assumption(rounds_completed: int, num_rounds: int) -> tuple[str, ...]:
    """Returns what the guarantee of fewer rounds than planned needs beside the participation."""
    if rounds_completed == num_rounds:
        return ()
    assumption = (
        f"that training ended after {rounds_completed} of {num_rounds} planned rounds was not "
        f"decided by looking at what it had released; otherwise count all {num_rounds}"
    )
    return (assumption,)


def _delta_cautions(
    observed: ObservedParticipation, delta: float, sampling: SamplingScheme | None
) -> tuple[str, ...]:
    """Returns a caution if delta allows a mechanism that just publishes somebody's data."""
    units = observed.num_units or getattr(sampling, "dataset_size", None)
    if units is None and observed.contributions_by_round:  # So many there were at least.
        units = max(observed.contributions_by_round) // observed.max_contributions_per_round
    if units is None or delta * units < 1:
        return ()
    caution = (
        f"delta = {delta!r} is not smaller than one over the number of units: to publish the data "
        "of one of them at random would be allowed at this delta. State a smaller one."
    )
    return (caution,)


def _why_not_amplified(
    strategy: Strategy, observed: ObservedParticipation, sampling: SamplingScheme
) -> str | None:
    """Returns why the theorems on amplification do not apply; None if they do."""
    m = observed.max_contributions_per_round
    if m > 1:
        return f"amplification needs one contribution of a unit to a round at most, not {m}"
    try:
        sampling.check_strategy(strategy)
    except BandMFError as error:
        return str(error).rstrip(".")
    return None


def _planned_certificate(
    mechanism: Mechanism, release: Release, noise: float, delta: float
) -> Certificate | None:
    """Returns the mechanism's certificate, verified, if the run is all that it is about."""
    certificate = mechanism.guarantee.certificate
    planned = (mechanism.sampling, mechanism.noise_multiplier, mechanism.delta)
    if certificate is None or planned != (release.sampling, noise, delta):
        return None
    mechanism.verify_epsilon()
    return certificate


def _curve(release: Release, noise: float, grid: float | None) -> tuple[tuple[float, float], ...]:
    points = [
        (delta, release.bounded(noise, delta, discretization=grid).epsilon)
        for delta in CURVE_DELTAS
    ]
    # Tails of privacy losses are cut off, see `privacy_loss.py`.
    return tuple(point for point in points if math.isfinite(point[1]))


def _group(
    release: Release, noise: float, delta: float, grid: float | None, size: int
) -> GroupGuarantee:
    found = release.of_group(size).guarantee(noise, delta, discretization=grid)
    return GroupGuarantee(size, found.epsilon, found.rho)


def _tree_comparison(
    mechanism: Mechanism,
    strategy: Strategy,
    observed: ObservedParticipation,
    noise: float,
    delta: float,
) -> TreeComparison:
    t = strategy.num_rounds
    workload = Workload(t, mechanism.workload.momentum, mechanism.workload.learning_rates[:t])
    tree = TreeStrategy(t, "online")
    release = Release(tree, AsObserved(observed))
    # Squared errors are at unit noise; equal errors fix the ratio of the noise.
    ratio = error.squared_error(workload, strategy) / error.squared_error(
        workload, release.strategy
    )
    tree_noise = noise * math.sqrt(ratio)
    guarantee = release.guarantee(tree_noise, delta, discretization=mechanism.discretization)
    sharper = sharper_epsilon = None
    if t * t <= _LARGEST_GRAM:
        sharp = Release(tree.released(), release.participation)
        sharper = sharp.sensitivity.value
        sharper_epsilon = sharp.guarantee(
            tree_noise, delta, discretization=mechanism.discretization
        ).epsilon
    return TreeComparison(
        sensitivity=release.sensitivity.value,
        sensitivity_kind=release.sensitivity.kind,
        noise_multiplier=tree_noise,
        rho=guarantee.rho,
        epsilon=guarantee.epsilon,
        released_sensitivity=sharper,
        released_epsilon=sharper_epsilon,
    )


def _planned(mechanism: Mechanism, block: Strategy, noise: float, delta: float) -> PlannedGuarantee:
    participation, n = mechanism.participation, mechanism.num_rounds
    kept = Release(block, participation).guarantee(
        noise, delta, discretization=mechanism.discretization
    )
    return PlannedGuarantee(
        num_rounds=n,
        min_separation=participation.min_separation,
        max_participations=participation.max_participations or participation.most(n),
        schema=participation.schema,
        sensitivity=mechanism.sensitivity.value,
        noise_multiplier=mechanism.noise_multiplier,
        rho=mechanism.rho,
        # Of a sampled mechanism the file may state anything.
        epsilon=mechanism.guarantee_at(delta).epsilon,
        epsilon_if_kept=kept.epsilon,
    )


def _findings(
    mechanism: Mechanism,
    observed: ObservedParticipation,
    planned: PlannedGuarantee,
    noise: float,
    epsilon: float,
) -> tuple[tuple[str, ...], bool]:
    """Returns plan and reality in sentences, and whether the plan was kept."""
    findings, violations = [], _violations(observed, planned)
    t, n = observed.rounds_completed, planned.num_rounds
    if t < n:
        findings.append(
            f"{t} of {n} planned rounds were completed; the guarantee is for those {t}."
        )
    if noise != planned.noise_multiplier:
        findings.append(
            f"The noise multiplier was {round_down(noise, 6):g} and "
            f"{round_down(planned.noise_multiplier, 6):g} was planned: "
            f"rho is {round_up((planned.noise_multiplier / noise) ** 2):g} times that of the "
            "planned noise."
        )
    findings += [f"The plan was violated: {violation}." for violation in violations]
    kept = round_up(planned.epsilon_if_kept)
    if violations and epsilon > planned.epsilon_if_kept * _NOTICEABLE:
        findings.append(
            f"The violation cost privacy: epsilon, without amplification, is "
            f"{round_up(epsilon):g}; had the plan been kept, it would be {kept:g} for the same "
            "rounds and noise."
        )
    elif violations:
        findings.append(
            f"The violation cost no privacy: epsilon, without amplification, is "
            f"{round_up(epsilon):g}, not more than the {kept:g} of the plan for the same rounds "
            "and noise."
        )
    elif Basis.ASSUMED in (observed.min_separation_basis, observed.max_participations_basis):
        findings.append("What is assumed of participation is within the plan.")
    elif observed.units_were_seen:
        findings.append("Participation was within the plan.")
    else:
        findings.append("What units could do was within the plan.")
    if mechanism.sampling is not None:
        findings.append(PLANNED_BY_SAMPLING)
    return tuple(findings), not violations and noise >= planned.noise_multiplier


def _violations(observed: ObservedParticipation, planned: PlannedGuarantee) -> list[str]:
    violations = []
    b, k = observed.min_separation, observed.max_participations
    took, contributed = (
        ("took", "contributed") if observed.units_were_seen else ("could take", "could contribute")
    )
    if observed.max_contributions_per_round > 1:
        violations.append(
            f"a unit {contributed} up to {observed.max_contributions_per_round} times to one round "
            "instead of once"
        )
    if k > planned.max_participations:
        violations.append(
            f"a unit {took} part in {k} rounds and at most {planned.max_participations} were "
            "planned"
        )
    if b is None or k == 1 or planned.min_separation is None:
        return violations
    if b < planned.min_separation:
        violations.append(
            f"a unit {took} part {b} rounds apart and at least {planned.min_separation} were "
            "planned"
        )
    stride = observed.separation_stride
    if planned.schema == FixedEpochs.schema and (stride is None or stride % planned.min_separation):
        violations.append(
            f"participations exactly {planned.min_separation} rounds apart were planned, and there "
            "were others or it is not known"
        )
    return violations
