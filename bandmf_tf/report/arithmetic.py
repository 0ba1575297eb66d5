"""What anybody can compute again from a public edition alone, without its evidence.

Which rounds there were, and who took part, is behind the digests of the evidence. That the figures
follow from the sensitivity and the noise is arithmetic, and is done again here.
"""

from __future__ import annotations

import math

from bandmf_tf.accounting.gaussian import gaussian_epsilon, gdp_mu, zcdp_epsilon
from bandmf_tf.evidence.reader import ReportError
from bandmf_tf.report.document import PrivacyReport
from bandmf_tf.report.facts import open_questions
from bandmf_tf.report.meaning import attacker_success

_TOLERANCE = 1e-6


def check_arithmetic(report: PrivacyReport) -> int:
    """Computes figures of a report again from others in it, and returns how many agree.

    Epsilon may be larger than the closed form of a Gaussian release, as one on a grid is.

    Raises:
      ReportError: A figure does not follow from the others.
    """
    mu = gdp_mu(report.noise_multiplier, report.sensitivity)
    equal = {
        "mu": (report.mu, mu),
        "rho": (report.rho, mu * mu / 2),
        "epsilon_zcdp": (report.epsilon_zcdp, zcdp_epsilon(mu * mu / 2, report.delta)),
        "planned.rho": (
            report.planned.rho,
            gdp_mu(report.planned.noise_multiplier, report.planned.sensitivity) ** 2 / 2,
        ),
    }
    stated = [("epsilon_unamplified", report.epsilon_unamplified, mu, report.delta)]
    if not report.is_amplified:
        stated.append(("epsilon", report.epsilon, mu, report.delta))
        stated += [("curve", point.epsilon, mu, point.delta) for point in report.curve]
        stated += [
            (f"groups[{g.group_size}]", g.epsilon, g.group_size * mu, report.delta)
            for g in report.groups
        ]
        stated += [
            (f"comparison.{entry.kind}", entry.epsilon, math.sqrt(2 * entry.rho), report.delta)
            for entry in report.comparison
            if entry.kind != "planned" and entry.epsilon is not None and entry.rho is not None
        ]
    if report.replace_one is not None:
        equal["replace_one.mu"] = (report.replace_one.mu, 2 * mu)
        stated.append(("replace_one", report.replace_one.epsilon, 2 * mu, report.delta))
    if report.attacker is not None:
        points = [(p.delta, p.epsilon) for p in report.curve] if report.is_amplified else []
        success = attacker_success(mu, points, report.attacker.false_alarms).success
        equal["attacker.success"] = (report.attacker.success, success)
    for name, (found, computed) in equal.items():
        if not math.isclose(found, computed, rel_tol=_TOLERANCE):
            raise ReportError(f"{name} is {found!r}, and follows as {computed!r} from the rest.")
    for name, epsilon, of_mu, delta in stated:
        least = gaussian_epsilon(1.0, of_mu, delta)
        if epsilon < least * (1 - _TOLERANCE):
            raise ReportError(f"{name}: epsilon is {epsilon!r}, and at least {least!r} by its mu.")
    if report.open_questions != open_questions(report.facts):
        raise ReportError("open_questions are not those that the facts leave.")
    return len(equal) + len(stated) + 1
