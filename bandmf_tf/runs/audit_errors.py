"""How often an attack on a claim erred, and what that proves: bounds on mu and epsilon, p-values.

An attack gives every trial a score: trials *with* the canary, trials *without*. Whoever calls
"with" where the score exceeds a threshold errs with some false positive rate a and some false
negative rate b, and a guarantee limits every such attack:

    mu-GDP               Phi^-1(a) + Phi^-1(b) >= -mu,
    (epsilon, delta)-DP  1 - b <= e^epsilon a + delta    and    1 - a <= e^epsilon b + delta.

So upper confidence bounds on both rates (Clopper and Pearson, half of the error probability each)
are a lower confidence bound on mu or epsilon, whatever the distribution of the scores, as long as
trials are independent and the threshold does not depend on the trials that are counted.

An audit computes them, and whoever reads its record again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf.accounting.privacy_loss import gaussian_profile

# P-values below it are stated as it: nobody needs them, and floating point ends not far below.
LEAST_P_VALUE = 1e-300

_COUNTS = r"(\d{1,12}) of (\d{1,12})"
_WORDS = re.compile(rf"wrong in {_COUNTS} trials without the canary and in {_COUNTS} with it")


@dataclass(frozen=True)
class Errors:
    """How often an attack erred.

    Attributes:
      false_positives: Trials without the canary that were called "with".
      without: Trials without the canary.
      false_negatives: Trials with the canary that were called "without".
      having: Trials with the canary.
    """

    false_positives: int
    without: int
    false_negatives: int
    having: int

    @classmethod
    def at(cls, threshold: float, with_canary: np.ndarray, without: np.ndarray) -> Errors:
        """Counts errors of "with" above the threshold; scores that are no number err."""
        return cls(
            int(np.sum(~(without <= threshold))),
            len(without),
            int(np.sum(~(with_canary > threshold))),
            len(with_canary),
        )

    @classmethod
    def described(cls, words: str) -> Errors | None:
        """Returns the counts that `describe` has told, or None if these are other words."""
        found = _WORDS.fullmatch(words)
        return None if found is None else cls(*map(int, found.groups()))

    def describe(self) -> str:
        """Returns the counts in words."""
        return (
            f"wrong in {self.false_positives} of {self.without} trials without the canary and in "
            f"{self.false_negatives} of {self.having} with it"
        )

    def rates_below(self, error_probability: float) -> tuple[float, float]:
        """Returns upper bounds on both rates that hold together, except with that probability."""
        half = error_probability / 2
        return (
            _rate_below(self.false_positives, self.without, half),
            _rate_below(self.false_negatives, self.having, half),
        )


def mu_lower_bound(errors: Errors, confidence: float) -> float:
    """Returns a lower confidence bound on mu: no mu-GDP mechanism with less gives such errors."""
    return _mu_bound(errors, 1 - _checks.probability("confidence", confidence))


def _mu_bound(errors: Errors, error_probability: float) -> float:
    return max(0.0, -float(scipy.special.ndtri(errors.rates_below(error_probability)).sum()))


def epsilon_lower_bound(errors: Errors, delta: float, confidence: float) -> float:
    """Returns a lower confidence bound on epsilon at `delta`."""
    return _epsilon_bound(errors, delta, 1 - _checks.probability("confidence", confidence))


def _epsilon_bound(errors: Errors, delta: float, error_probability: float) -> float:
    a, b = errors.rates_below(error_probability)
    return math.log(max((1 - delta - b) / a, (1 - delta - a) / b, 1.0))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns the smallest epsilon that a mu-GDP mechanism can have at `delta`, rounded down."""

    def excess(epsilon: float) -> float:
        return float(gaussian_profile(mu, epsilon)) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    largest = mu * mu / 2 + 50.0 * mu
    return max(0.0, scipy.optimize.brentq(excess, 0.0, largest, xtol=1e-12) * (1 - 1e-9))


def mu_p_value(errors: Errors, mu: float) -> float:
    """Returns the p-value of the claim of mu-GDP: where the lower bound would reach `mu`."""
    return _where_it_reaches(lambda p: _mu_bound(errors, p), mu)


def epsilon_p_value(errors: Errors, epsilon: float, delta: float) -> float:
    """Returns the p-value of the claim of (epsilon, delta)-DP, likewise."""
    return _where_it_reaches(lambda p: _epsilon_bound(errors, delta, p), epsilon)


def _where_it_reaches(bound: Callable[[float], float], claim: float) -> float:
    def excess(log_p: float) -> float:
        return bound(math.exp(log_p)) - claim

    least = math.log(LEAST_P_VALUE)
    if excess(least) > 0:
        return LEAST_P_VALUE
    if excess(0.0) <= 0:
        return 1.0
    return math.exp(scipy.optimize.brentq(excess, least, 0.0, xtol=1e-6))


def _rate_below(count: int, trials: int, error_probability: float) -> float:
    """Returns Clopper and Pearson's upper confidence bound on a rate."""
    if count >= trials:
        return 1.0
    return float(1 - scipy.special.betaincinv(trials - count, count + 1, error_probability))
