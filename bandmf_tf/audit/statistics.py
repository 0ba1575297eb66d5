"""What scores of canaries prove: lower confidence bounds, and p-values of a claim.

An attack gives every trial a score: trials *with* the canary, trials *without*. Whoever calls
"with" where the score exceeds a threshold errs with some false positive rate a and some false
negative rate b, and a guarantee limits every such attack:

    mu-GDP               Phi^-1(a) + Phi^-1(b) >= -mu,
    (epsilon, delta)-DP  1 - b <= e^epsilon a + delta    and    1 - a <= e^epsilon b + delta.

So upper confidence bounds on both rates (Clopper and Pearson, half of the error probability each)
are a lower confidence bound on mu or epsilon, whatever the distribution of the scores, as long as
trials are independent and the threshold does not depend on the trials that are counted.

`one_run_epsilon` is the bound of Steinke, Nasr and Jagielski (2023) for canaries that were all
trained into one model, each by a fair coin of its own; their scores may depend on each other.

`direction_p_value` and its neighbours are sharper and assume more: that under the claim the values
given are independent standard Gaussians. They find noise that is not the claimed one.

A p-value is the probability, at most, of seeing what was seen or more if the claim holds. `all_of`
joins several (Bonferroni). Nothing here says that a claim is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.fft
from scipy import optimize, special, stats

from bandmf_tf import _checks
from bandmf_tf.accounting.privacy_loss import gaussian_profile
from bandmf_tf.errors import BandMFError

# P-values below it are stated as it: nobody needs them, and floating point ends not far below.
LEAST_P_VALUE = 1e-300

# How many of its canaries a one-run audit guesses, as fractions; the bound pays for trying all.
_GUESSED = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

_LARGEST_EPSILON = 100.0


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
    return max(0.0, -float(special.ndtri(errors.rates_below(error_probability)).sum()))


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
    return max(0.0, optimize.brentq(excess, 0.0, largest, xtol=1e-12) * (1 - 1e-9))


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
    return math.exp(optimize.brentq(excess, least, 0.0, xtol=1e-6))


def best_threshold(
    with_canary: np.ndarray, without: np.ndarray, delta: float, confidence: float
) -> float:
    """Returns the threshold that gives the largest `epsilon_lower_bound` on these scores.

    Count errors on other trials: of these it was chosen.
    """
    candidates = np.unique(np.quantile(np.r_[with_canary, without], np.linspace(0.002, 0.998, 99)))
    bounds = [
        epsilon_lower_bound(Errors.at(t, with_canary, without), delta, confidence)
        for t in candidates
    ]
    return float(candidates[int(np.argmax(bounds))])


def one_run_epsilon(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float
) -> float:
    """Returns a lower confidence bound on epsilon from canaries of one training run.

    Guesses that the canaries with the highest scores were in and those with the lowest were not,
    as many of each, and abstains on the rest; several numbers of guesses share the error
    probability.

    Args:
      scores: One for each canary; higher where it seems to have been trained on.
      included: Whether it was, by a fair coin of its own for each canary.
      delta: Delta of the guarantee.
      confidence: Of the bound.
    """
    error_probability = (1 - _checks.probability("confidence", confidence)) / len(_GUESSED)
    return max(
        _one_run_bound(*guessed, delta, error_probability) for guessed in _guesses(scores, included)
    )


def one_run_claim_p_value(
    scores: np.ndarray, included: np.ndarray, epsilon: float, delta: float
) -> float:
    """Returns the p-value of the claim of (epsilon, delta)-DP from canaries of one run."""
    return all_of([one_run_p_value(*g, epsilon, delta) for g in _guesses(scores, included)])


def _guesses(scores: np.ndarray, included: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields numbers of canaries, guesses, and right guesses."""
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.ndim != 1 or scores.shape != included.shape or len(scores) < 2:
        raise BandMFError(
            "A one-run audit needs a score and a coin for each of at least two canaries. Found "
            f"shapes {scores.shape} and {included.shape}."
        )
    if not np.all(np.isfinite(scores)):
        raise BandMFError("Scores of canaries must be finite. Found NaN or infinity.")
    m = len(scores)
    # Ties are broken without looking at the coins, which may be in some order.
    order = np.lexsort((np.random.default_rng(0).permutation(m), scores))
    for fraction in _GUESSED:
        side = max(1, int(m * fraction) // 2)
        right = int(included[order[-side:]].sum() + (~included[order[:side]]).sum())
        yield m, 2 * side, right


def one_run_p_value(
    num_canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """Returns the p-value of (epsilon, delta)-DP for so many right guesses (their Theorem 3.1).

    With q = e^epsilon / (1 + e^epsilon) and W binomial(guesses, q),

        P[W >= right] + 2 m delta max_i P[right - i <= W < right] / i.
    """
    q = special.expit(epsilon)
    tail = stats.binom.sf(right - 1, guesses, q)
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    steepest = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, float(tail) + 2 * num_canaries * delta * steepest)


def _one_run_bound(
    num_canaries: int, guesses: int, right: int, delta: float, error_probability: float
) -> float:
    def excess(epsilon: float) -> float:
        return one_run_p_value(num_canaries, guesses, right, epsilon, delta) - error_probability

    if excess(0.0) >= 0:
        return 0.0
    if excess(_LARGEST_EPSILON) <= 0:  # pragma: no cover (no number of canaries reaches it)
        return _LARGEST_EPSILON
    return optimize.brentq(excess, 0.0, _LARGEST_EPSILON, xtol=1e-9)


# Tests of noise. All take an array of values that are independent standard Gaussians if the claim
# holds, `[rows, coordinates]`.


def size_p_value(noise: np.ndarray) -> float:
    """Returns the two-sided p-value of the sum of all squares."""
    return float(_chi_square_p_values(np.sum(np.square(noise)), noise.size))


def direction_p_value(noise: np.ndarray) -> tuple[float, str]:
    """Returns the p-value of the squares in all directions e_i and (e_i ± e_j) / sqrt 2 of rows.

    Along a unit vector u the squares of `u^T noise` sum to chi-square with one degree of freedom a
    coordinate, exactly. Rows of too little noise, repeated rows and every correlation between two
    rows show. O(rows^2 coordinates) time.
    """
    gram = noise @ noise.T
    rows, count = noise.shape
    squares = np.diagonal(gram).copy()
    # A p-value falls to both sides, so the extremes of each kind are all that must be looked at.
    found = [(int(i), int(i), 0, squares[i]) for i in (squares.argmin(), squares.argmax())]
    if rows > 1:
        middle = (squares[:, None] + squares) / 2
        for sign in (1, -1):
            values = middle + sign * gram
            np.fill_diagonal(values, middle[0, 1] + sign * gram[0, 1])  # Another row's, for these.
            for place in (values.argmin(), values.argmax()):
                i, j = np.unravel_index(place, values.shape)
                i, j = (1, 0) if i == j else (max(i, j), min(i, j))
                found.append((int(i), int(j), sign, values[i, j]))
    values = np.maximum([value for *_, value in found], 0.0)
    p_values = _chi_square_p_values(values, count)
    i, j, sign, value = found[int(np.argmin(p_values))]
    words = f"row {i}" + (f" {'+' if sign > 0 else '-'} row {j}" if sign else "")
    words += f": variance {value / count:.4g} for 1"
    return float(np.clip(rows * rows * p_values.min(), LEAST_P_VALUE, 1.0)), words


def mean_p_value(noise: np.ndarray) -> float:
    """Returns the p-value of the sums of rows over coordinates."""
    sums = noise.sum(axis=1) / math.sqrt(noise.shape[1])
    return all_of(2 * stats.norm.sf(np.abs(sums)))


def shift_p_value(noise: np.ndarray) -> float:
    """Returns the p-value of the largest correlation of the noise with itself, shifted.

    By all shifts in rows and coordinates, cyclically. Each is a mean of as many products as there
    are values, whose tail is a Gaussian one for as many as this is used with. Values that are used
    in two places show: tensors that share noise, or rows that overlap.
    """
    spectrum = np.abs(scipy.fft.rfft2(noise.astype(np.float32))) ** 2
    products = scipy.fft.irfft2(spectrum, s=noise.shape).reshape(-1)[1:]
    # A shift and its opposite are one. Those that are their own opposite have twice the variance
    # of the others; it is taken for all.
    deviation = math.sqrt(2 * noise.size)
    p_value = 2 * stats.norm.sf(np.abs(products).max() / deviation)
    return min(1.0, max(p_value * (len(products) / 2), LEAST_P_VALUE))


def at_most_p_value(scores: np.ndarray, most: float) -> float:
    """Returns the p-value of independent Gaussians of variance 1 and means of at most `most`."""
    return max(float(stats.norm.sf((scores - most).sum() / math.sqrt(len(scores)))), LEAST_P_VALUE)


def all_of(p_values: Sequence[float] | np.ndarray) -> float:
    """Returns the p-value of all claims together, by Bonferroni."""
    p_values = np.asarray(p_values, np.float64)
    if np.any(np.isnan(p_values)):
        return LEAST_P_VALUE  # What is no number was not drawn from the claimed noise.
    return float(np.clip(p_values.min() * p_values.size, LEAST_P_VALUE, 1.0))


def _chi_square_p_values(values: np.ndarray | float, freedom: int) -> np.ndarray:
    half, shape = np.asarray(values, np.float64) / 2, freedom / 2
    tails = np.minimum(special.gammainc(shape, half), special.gammaincc(shape, half))
    return np.clip(2 * tails, LEAST_P_VALUE, 1.0)


def _rate_below(count: int, trials: int, error_probability: float) -> float:
    """Returns Clopper and Pearson's upper confidence bound on a rate."""
    if count >= trials:
        return 1.0
    return float(1 - special.betaincinv(trials - count, count + 1, error_probability))
