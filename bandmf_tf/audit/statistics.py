"""What scores of canaries prove: lower confidence bounds, and p-values of a claim.

`trials_for` says how many trials bring the bound on mu (`runs/audit_errors.py`) near the claim.

`one_run_epsilon` is the bound of Steinke, Nasr and Jagielski (2023) for canaries that were all
trained into one model, each by a fair coin of its own; their scores may depend on each other.

`direction_p_value` and its neighbours are sharper and assume more: that under the claim the values
given are independent standard Gaussians. They find noise that is not the claimed one.

A p-value is the probability, at most, of seeing what was seen or more if the claim holds. `all_of`
joins several (Bonferroni). Nothing here says that a claim is true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs.audit_errors import (
    LEAST_P_VALUE,
    Errors,
    epsilon_lower_bound,
    mu_lower_bound,
)

# How many of its canaries a one-run audit guesses, as fractions; the bound pays for trying all.
_GUESSED = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

_LARGEST_EPSILON = 100.0

# Where a number of trials must do, both numbers of errors are so far above what is expected, in
# standard deviations: together as unlucky as one audit in a thousand.
_UNLUCKY = 3.09 / math.sqrt(2)


def trials_for(exposure: float, least: float, confidence: float, most: int) -> int:
    """Returns how many trials show `least` or more nearly always, or `most` if those are too few.

    Half of them with the canary; scores are Gaussian of variance 1 and mean `exposure` or 0, and
    the threshold is between.
    """
    rate = float(scipy.special.ndtr(-exposure / 2))
    for half in np.geomspace(512, most / 2, 100).astype(int).tolist():
        count = math.ceil(half * rate + _UNLUCKY * math.sqrt(half * rate * (1 - rate)))
        if mu_lower_bound(Errors(count, half, count, half), confidence) >= least:
            return 2 * half
    return most


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
      included: Whether it was, by a fair coin of its own for each canary: True or False, 1 or 0.
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
    scores, included = np.asarray(scores, np.float64), np.asarray(included)
    if included.dtype.kind not in "biuf" or not np.all(np.isin(included, (0, 1))):
        # The literature also writes -1 and 1, which are both true: every guess would be half right.
        raise BandMFError(
            "included must say True or False, or 1 or 0, of each canary; write coins of -1 and 1 "
            f"as coins > 0. Found values such as {np.unique(included)[:3].tolist()}."
        )
    included = included.astype(bool)
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
    if not (epsilon >= 0 and 0 <= delta < 1):
        raise BandMFError(
            "A claim has epsilon of at least 0 and delta of at least 0 and below 1. Found "
            f"epsilon={epsilon!r}, delta={delta!r}."
        )
    q = scipy.special.expit(epsilon)
    tail = scipy.stats.binom.sf(right - 1, guesses, q)
    below = np.cumsum(scipy.stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
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
    return scipy.optimize.brentq(excess, 0.0, _LARGEST_EPSILON, xtol=1e-9)


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
    return all_of(2 * scipy.stats.norm.sf(np.abs(sums)))


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
    p_value = 2 * scipy.stats.norm.sf(np.abs(products).max() / deviation)
    return min(1.0, max(p_value * (len(products) / 2), LEAST_P_VALUE))


def at_most_p_value(scores: np.ndarray, most: float) -> float:
    """Returns the p-value of independent Gaussians of variance 1 and means of at most `most`."""
    return max(
        float(scipy.stats.norm.sf((scores - most).sum() / math.sqrt(len(scores)))), LEAST_P_VALUE
    )


def all_of(p_values: Sequence[float] | np.ndarray) -> float:
    """Returns the p-value of all claims together, by Bonferroni."""
    p_values = np.asarray(p_values, np.float64)
    if np.any(np.isnan(p_values)):
        return LEAST_P_VALUE  # What is no number was not drawn from the claimed noise.
    return float(np.clip(p_values.min() * p_values.size, LEAST_P_VALUE, 1.0))


def _chi_square_p_values(values: np.ndarray | float, freedom: int) -> np.ndarray:
    half, shape = np.asarray(values, np.float64) / 2, freedom / 2
    tails = np.minimum(scipy.special.gammainc(shape, half), scipy.special.gammaincc(shape, half))
    return np.clip(2 * tails, LEAST_P_VALUE, 1.0)
