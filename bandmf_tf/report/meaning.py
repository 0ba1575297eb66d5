"""What epsilon and mu mean: how often an attacker can be right.

The attacker knows everything but whether one unit's contributions were used, sees all that was
released, and wants to tell: the test that the guarantee is about. At a rate alpha of false alarms
it finds at most

    Phi(Phi^-1(alpha) + mu)                                       of a mu-GDP release,
    min(1, e^eps alpha + delta, 1 - e^-eps (1 - delta - alpha))   of an (eps, delta)-DP one

of the units that were used (Dong, Roth, Su 2022, equations 6 and 5). The first is reached by the
Gaussian release of this mu; the second holds for all points (eps, delta) of a curve at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import scipy

FALSE_ALARMS = 0.01
BY_MU = "the Gaussian trade-off curve of mu"
BY_EPSILON = "the bound of (epsilon, delta)-DP"


@dataclasses.dataclass(frozen=True)
class AttackerSuccess:
    """The best that an attacker can do.

    Attributes:
      false_alarms: How often it accuses wrongly.
      success: How often it is right about a unit that was used, at most.
      bound: By which of the two formulas.
    """

    false_alarms: float
    success: float
    bound: str


def attacker_success(
    mu: float, points: Iterable[tuple[float, float]], false_alarms: float = FALSE_ALARMS
) -> AttackerSuccess:
    """Returns the smaller of both bounds.

    Args:
      mu: The release is mu-GDP, without amplification.
      points: Pairs (delta, epsilon), where epsilon is smaller than mu implies; else empty.
      false_alarms: The attacker's rate of false alarms.
    """
    candidates = {BY_MU: gaussian_success(mu, false_alarms)}
    bounds = [approximate_success(epsilon, delta, false_alarms) for delta, epsilon in points]
    if bounds:
        candidates[BY_EPSILON] = min(bounds)
    bound = min(candidates, key=candidates.__getitem__)
    return AttackerSuccess(false_alarms, candidates[bound], bound)


def gaussian_success(mu: float, false_alarms: float) -> float:
    """Returns the true positives of the best test against a mu-GDP release."""
    return float(scipy.special.ndtr(scipy.special.ndtri(false_alarms) + mu))


def approximate_success(epsilon: float, delta: float, false_alarms: float) -> float:
    """Returns the most true positives of any test against an (epsilon, delta)-DP release."""
    more_likely = math.inf if epsilon > 700 else math.exp(epsilon) * false_alarms + delta
    return min(1.0, more_likely, 1 - math.exp(-epsilon) * (1 - delta - false_alarms))
