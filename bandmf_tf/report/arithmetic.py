"""What anybody can compute again from a public edition alone, without its evidence.

Which rounds there were, and who took part, is behind the digests of the evidence, and so is what
sampling makes of epsilon. That all other figures follow from the sensitivity and the noise, and
that none contradicts another, is arithmetic, and is done again here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from bandmf_tf.accounting.gaussian import gaussian_epsilon, gdp_mu, zcdp_epsilon, zcdp_rho
from bandmf_tf.evidence.reader import ReportError
from bandmf_tf.report.analysis import CURVE_DELTAS, PLANNED_BY_SAMPLING
from bandmf_tf.report.document import PrivacyReport, compared_plan, compared_statement
from bandmf_tf.report.facts import open_questions
from bandmf_tf.report.meaning import attacker_success

_TOLERANCE = 1e-6


def check_arithmetic(report: PrivacyReport) -> int:
    """Computes figures of a report again from others in it, and returns how many agree.

    If epsilon without amplification is the closed form of its mu, so are all of Gaussian releases.
    Otherwise it was computed on a grid, or by an older version, and all may be larger.

    Raises:
      ReportError: A figure does not follow from the others, or contradicts them.
    """
    try:
        return _check(report)
    except OverflowError as error:
        raise ReportError(f"its figures are too large to compute with: {error}.") from error


def _check(report: PrivacyReport) -> int:
    checked = 0
    mu = gdp_mu(report.noise_multiplier, report.sensitivity)
    for name, found, computed in _equal(report, mu):
        if not _is_same(found, computed):
            raise ReportError(f"{name} is {found!r}, and follows as {computed!r} from the rest.")
        checked += 1
    may_be_larger = not _is_same(
        report.epsilon_unamplified, gaussian_epsilon(1.0, mu, report.delta)
    )
    for name, found, of_mu, delta in _gaussian(report, mu):
        computed = gaussian_epsilon(1.0, of_mu, delta)
        if not (_is_same(found, computed) or (may_be_larger and found > computed)):
            raise ReportError(f"{name} is {found!r}, and by its mu epsilon is {computed!r}.")
        checked += 1
    for name, smaller, larger in _ordered(report, mu):
        if smaller > larger * (1 + _TOLERANCE):
            raise ReportError(f"{name}: {smaller!r} is more than {larger!r}, which it cannot be.")
        checked += 1
    return checked


def _is_same(found: object, computed: object) -> bool:
    if isinstance(found, int | float) and isinstance(computed, int | float):
        return math.isclose(found, computed, rel_tol=_TOLERANCE)
    return found == computed


def _equal(report: PrivacyReport, mu: float) -> Iterator[tuple[str, object, object]]:
    """Yields figures with what they must be."""
    rho = mu * mu / 2
    yield "mu", report.mu, mu
    yield "rho", report.rho, rho
    yield "epsilon_zcdp", report.epsilon_zcdp, zcdp_epsilon(rho, report.delta)
    amplified = report.epsilon_amplified
    yield "epsilon", report.epsilon, report.epsilon_unamplified if amplified is None else amplified
    deltas = tuple(point.delta for point in report.curve)
    yield "the deltas of curve", deltas, tuple(x for x in CURVE_DELTAS if x in deltas)
    for group in report.groups:
        yield f"groups[{group.group_size}].rho", group.rho, group.group_size**2 * rho
    planned, tree = report.planned, report.tree_aggregation
    yield "planned.rho", planned.rho, zcdp_rho(planned.noise_multiplier, planned.sensitivity)
    yield "tree_aggregation.rho", tree.rho, zcdp_rho(tree.noise_multiplier, tree.sensitivity)
    yield "planned.num_rounds", planned.num_rounds, report.mechanism.num_rounds
    if (others := report.well_behaved) is not None:
        yield "well_behaved.rho", others.rho, zcdp_rho(report.noise_multiplier, others.sensitivity)
    if (both := report.replace_one) is not None:
        yield "replace_one.mu", both.mu, 2 * mu
        yield "replace_one.rho", both.rho, 4 * rho
    if report.comparison:
        ours, plan = compared_statement(report), compared_plan(report)
        by_kind = {entry.kind: entry for entry in report.comparison}
        seen = "observed" if ours.kind == "enforced" else ours.kind
        kinds = tuple(entry.kind for entry in report.comparison)
        yield "the kinds of comparison", kinds, ("enforced", seen, plan.kind)
        yield f"comparison.{ours.kind}", by_kind.get(ours.kind), ours
        yield f"comparison.{plan.kind}", by_kind.get(plan.kind), plan
    if report.attacker is not None:
        points = [(p.delta, p.epsilon) for p in report.curve] if report.is_amplified else []
        attacker = attacker_success(mu, points, report.attacker.false_alarms)
        yield "attacker.success", report.attacker.success, attacker.success
        yield "attacker.bound", report.attacker.bound, attacker.bound
    yield "open_questions", report.open_questions, open_questions(report.facts)
    if not report.is_amplified:
        yield "failure_probability", report.failure_probability, None


def _gaussian(report: PrivacyReport, mu: float) -> Iterator[tuple[str, float, float, float]]:
    """Yields each epsilon of a release without amplification, with its mu and delta."""
    planned, tree, delta = report.planned, report.tree_aggregation, report.delta
    yield "epsilon_unamplified", report.epsilon_unamplified, mu, delta
    if not report.is_amplified:
        for point in report.curve:
            yield f"curve[{point.delta!r}]", point.epsilon, mu, point.delta
        for group in report.groups:
            yield f"groups[{group.group_size}]", group.epsilon, group.group_size * mu, delta
    of_tree = gdp_mu(tree.noise_multiplier, tree.sensitivity)
    yield "tree_aggregation.epsilon", tree.epsilon, of_tree, delta
    if tree.released_sensitivity is not None and tree.released_epsilon is not None:
        released = gdp_mu(tree.noise_multiplier, tree.released_sensitivity)
        yield "tree_aggregation.released_epsilon", tree.released_epsilon, released, delta
    if PLANNED_BY_SAMPLING not in report.findings:
        of_plan = gdp_mu(planned.noise_multiplier, planned.sensitivity)
        yield "planned.epsilon", planned.epsilon, of_plan, delta
    if report.rounds_completed == planned.num_rounds:
        kept = gdp_mu(report.noise_multiplier, planned.sensitivity)
        yield "planned.epsilon_if_kept", planned.epsilon_if_kept, kept, delta
    if (others := report.well_behaved) is not None:
        of_others = gdp_mu(report.noise_multiplier, others.sensitivity)
        yield "well_behaved.epsilon", others.epsilon, of_others, delta
    if report.replace_one is not None:
        yield "replace_one.epsilon", report.replace_one.epsilon, 2 * mu, delta
    if report.comparison:
        settled = {compared_statement(report).kind, "planned"}
        for entry in report.comparison:
            if entry.kind not in settled and entry.epsilon is not None and entry.rho is not None:
                name = f"comparison.{entry.kind}.epsilon"
                yield name, entry.epsilon, math.sqrt(2 * entry.rho), delta


def _ordered(report: PrivacyReport, mu: float) -> Iterator[tuple[str, float, float]]:
    """Yields pairs of figures of which the first cannot be larger."""
    k, m, b = report.max_participations, report.max_contributions_per_round, report.min_separation
    planned, once = report.planned, report.sensitivity / m
    yield "rounds_completed", report.rounds_completed, planned.num_rounds
    if (largest := report.max_column_norm) is not None:
        # One participation, all that there are in one direction, and orthogonal ones.
        apart = k == 1 or (b is not None and report.mechanism.num_bands <= b)
        yield "max_column_norm beside the sensitivity", largest, once
        most = largest * (math.sqrt(k) if apart else k)
        yield "the sensitivity beside max_column_norm", once, most
        if report.min_column_norm is not None:
            yield "min_column_norm", report.min_column_norm, largest
        one = gaussian_epsilon(1.0, largest / report.noise_multiplier, report.delta)
        yield "epsilon of one round beside planned.epsilon_if_kept", one, planned.epsilon_if_kept
    if report.theorem_3_bound is not None:
        yield "the sensitivity beside theorem_3_bound", report.sensitivity, report.theorem_3_bound
    for one_point, other in itertools.pairwise(report.curve):
        yield f"epsilon at {one_point.delta!r}", one_point.epsilon, other.epsilon
    if report.is_amplified:
        for group in report.groups:  # Amplified or not, whichever is less.
            plain = gaussian_epsilon(1.0, group.group_size * mu, report.delta)
            least = min(group.group_size * report.epsilon, plain)
            yield f"the least epsilon of groups[{group.group_size}]", least, group.epsilon
        is_sampled = report.sampling is not None and report.sampling_basis is not None and m == 1
        yield "epsilon_amplified", report.epsilon, report.epsilon_unamplified if is_sampled else 0.0
        for point in report.curve:
            if point.delta <= report.delta:
                yield f"epsilon at {report.delta!r}", report.epsilon, point.epsilon
    for entry in report.comparison:
        if entry.kind == "enforced" and entry.rho is not None:
            yield "rho beside the enforced worst case", report.rho, entry.rho
    if report.plan_was_kept:
        if planned.schema == "min_separation":
            name = "the sensitivity beside planned.sensitivity of a plan that was kept"
            yield name, report.sensitivity, planned.sensitivity
        yield "max_contributions_per_round of a plan that was kept", m, 1
        yield "max_participations of a plan that was kept", k, planned.max_participations
        noise = "planned.noise_multiplier of a plan that was kept"
        yield noise, planned.noise_multiplier, report.noise_multiplier
        if b is not None and k > 1 and planned.min_separation is not None:
            yield "planned.min_separation of a plan that was kept", planned.min_separation, b
