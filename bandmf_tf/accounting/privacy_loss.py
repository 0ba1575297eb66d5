"""Privacy loss distributions (PLDs) of the Gaussian mechanism, plain and on sampled batches.

`dp_accounting` composes privacy loss distributions and reads (epsilon, delta) off them; this module
describes one step to it. A step is described by its *privacy profile*, the hockey-stick divergence

    H_alpha(P || Q) = sup_S P(S) - alpha Q(S),    alpha = exp(epsilon),

of the output with an example (P) against the output without it (Q), in both directions. Everything
follows from the profile of one Gaussian with shift `mu` (`gaussian_profile`), so a distribution on
a grid of a hundred thousand losses costs a few vectorised NumPy calls; `dp_accounting` itself loops
over the grid in Python and takes about twenty times as long. `tests/privacy_loss_test.py` checks
that both give the same epsilon.

Rounding is pessimistic throughout (connect-the-dots, Doroshenko et al. 2022): the grid can make
epsilon larger than it is, never smaller.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

# Distance between neighbouring privacy losses on the grid. The paper's tables need 1e-4 or finer.
DISCRETIZATION = 1e-4

# A Gaussian tail beyond this many standard deviations (mass 1e-22) becomes an infinite loss.
_TAIL = 9.74

# Composition by FFT leaves rounding errors in delta. The largest ones measured, for 33 to 100,000
# compositions, were twice the machine precision for each composition; delta is reduced by twice as
# much again. This is what limits delta from below: about 1e-12 for a thousand compositions.
_FFT_ROUNDING = 4 * float(np.finfo(np.float64).eps)

# More points than this are never made: the grid becomes coarser, which is still pessimistic.
_MAX_GRID_POINTS = 2**22


def gaussian_profile(mu: float, epsilon: np.ndarray | float) -> np.ndarray:
    """Returns H_alpha(N(mu, 1) || N(0, 1)) at alpha = exp(epsilon), exactly.

    This is the smallest delta for which a Gaussian release of sensitivity `mu` and unit noise is
    (epsilon, delta)-DP (Balle and Wang 2018, Theorem 8). It holds for every real epsilon and is the
    same in both directions.
    """
    epsilon = np.asarray(epsilon, dtype=np.float64)
    upper = special.log_ndtr(mu / 2 - epsilon / mu)
    lower = special.log_ndtr(-mu / 2 - epsilon / mu)
    return np.maximum(np.exp(upper) - np.exp(epsilon + lower), 0.0)


def poisson_sampled_gaussian_pld(
    mu: float, sampling_probability: float, discretization: float = DISCRETIZATION
) -> PrivacyLossDistribution:
    """Returns the PLD of a Gaussian sum over a Poisson sample; probability 1 is the plain Gaussian.

    P = (1 - q) N(0, 1) + q N(mu, 1) is the output with the example, which enters the sum with
    probability q = `sampling_probability`, and Q = N(0, 1) the output without it: removing the
    example and replacing it by a zero record are the same thing.
    """
    q = sampling_probability
    largest = _sampled_epsilon(_largest_loss(mu), q)
    largest_reverse = -_sampled_epsilon(-_largest_loss(mu), q)
    step = _grid_step(largest + largest_reverse, discretization)
    forward = q * gaussian_profile(mu, _unsampled_epsilon(_grid(largest, step), q))
    if q == 1.0:
        return PrivacyLossDistribution(_connect_dots(forward, forward, step))

    # Q - alpha P = alpha q (exp(-e) N(0, 1) - N(mu, 1)), exp(-e) = (1 / alpha - (1 - q)) / q, which
    # is negative everywhere if exp(-e) is not positive.
    epsilon = _grid(largest_reverse, step)
    with np.errstate(divide="ignore", invalid="ignore"):
        unsampled = np.where(
            epsilon < 1,
            -np.log1p(np.expm1(-epsilon) / q),  # Exact for small epsilon,
            -np.log((np.exp(-epsilon) - (1 - q)) / q),  # and this where q is almost 1.
        )
    possible = np.isfinite(unsampled)
    unsampled = unsampled[possible]
    reverse = np.zeros_like(epsilon)
    reverse[possible] = q * np.exp(epsilon[possible] - unsampled) * gaussian_profile(mu, unsampled)
    return PrivacyLossDistribution(
        _connect_dots(forward, reverse, step), _connect_dots(reverse, forward, step)
    )


def fixed_size_sampled_gaussian_pld(
    mu: float, sampling_probability: float, discretization: float = DISCRETIZATION
) -> PrivacyLossDistribution:
    """Returns a PLD that bounds a Gaussian sum over a random batch of fixed size, zero-out.

    A batch of size q m is drawn without replacement from m records (q = `sampling_probability`),
    records contribute vectors of norm at most `mu`, the noise has unit variance. In the
    neighbouring data set one record is replaced by a zero record that still takes its place in a
    batch. With

        P1: the sum over a batch that holds the record,
        Q1: the sum over a batch that holds the zero record instead,
        P0: the sum over a batch that holds neither,

    the output is P = (1 - q) P0 + q P1 or Q = (1 - q) P0 + q Q1. Replacing a random member of a
    batch that holds neither by the record gives a random batch that holds the record, so by joint
    convexity P1 and P0 are at most as distinguishable as Gaussians 2 mu apart; in the same way
    Q1 and P0, and P1 and Q1, as Gaussians mu apart. Let H_x(mu) be `gaussian_profile` at log(x) and
    a = 1 + (alpha - 1) / q. For alpha >= 1 advanced joint convexity (Balle, Barthe, Gaboardi 2018,
    Theorem 2) turns H_alpha(P || Q) into

        integral of (q P1 - (1 - q) (alpha - 1) P0 - q alpha Q1)_+
            <= q (1 - w) H_y(2 mu) + q w H_x(mu),    y = (a - alpha) / (1 - w),  x = alpha / w,

    for every weight w in (0, 1), as (p - u - v)_+ <= ((1 - w) p - u)_+ + (w p - v)_+. The best
    weight makes y = exp(mu^2) x^2, a quadratic equation. In the same way, with w = alpha / a,

        H_alpha(Q || P) <= q H_a(mu).

    Both are attained: the first if all other records contribute the opposite of the one in
    question, the second if they contribute the same. So they are a supremum of profiles, hence the
    profile of a pair that dominates the step (Zhu, Dong, Wang 2022), and they compose, also over
    adaptively chosen steps.
    """
    q = sampling_probability
    largest = min(_sampled_epsilon(_largest_loss(2 * mu), q), _largest_loss(mu))
    largest_reverse = _sampled_epsilon(_largest_loss(mu), q)
    step = _grid_step(largest + largest_reverse, discretization)

    epsilon = _grid(largest, step)
    # (1 - w) / w^2 = (a - alpha) / (exp(mu^2) alpha^2)
    ratio = (1 - q) / q * math.exp(-mu * mu) * -np.exp(-epsilon) * np.expm1(-epsilon)
    weight = 2 / (1 + np.sqrt(1 + 4 * ratio))
    log_x = epsilon - np.log(weight)
    far, near = gaussian_profile(2 * mu, mu * mu + 2 * log_x), gaussian_profile(mu, log_x)
    forward = q * (ratio * weight**2 * far + weight * near)
    reverse = q * gaussian_profile(mu, _unsampled_epsilon(_grid(largest_reverse, step), q))
    return PrivacyLossDistribution(
        _connect_dots(forward, reverse, step), _connect_dots(reverse, forward, step)
    )


def composed_epsilon(pld: PrivacyLossDistribution, compositions: int, delta: float) -> float:
    """Returns epsilon at `delta` after `compositions` adaptive runs of one step."""
    if compositions > 1:
        pld = pld.self_compose(compositions)
        delta -= compositions * _FFT_ROUNDING
        if delta <= 0:
            return math.inf
    return float(pld.get_epsilon_for_delta(delta))


def _largest_loss(mu: float) -> float:
    """Returns a loss that a Gaussian shifted by `mu` exceeds with negligible probability."""
    loss = mu * mu / 2 + _TAIL * mu
    if math.isinf(loss):
        raise OverflowError(f"The privacy loss of a shift by {mu:g} is too large to be computed.")
    return loss


def _sampled_epsilon(epsilon: float, q: float) -> float:
    """Returns log(1 + q (exp(epsilon) - 1))."""
    if q == 1.0:
        return epsilon
    return float(np.logaddexp(math.log1p(-q), math.log(q) + epsilon))


def _unsampled_epsilon(epsilon: np.ndarray, q: float) -> np.ndarray:
    """Returns log(1 + (exp(epsilon) - 1) / q), the inverse of `_sampled_epsilon`, epsilon >= 0."""
    return epsilon + np.log1p(-(1 - q) * np.exp(-epsilon)) - math.log(q)


def _grid_step(width: float, discretization: float) -> float:
    return max(discretization, width / _MAX_GRID_POINTS)


def _grid(largest: float, step: float) -> np.ndarray:
    """Returns the losses 0, step, 2 step, ... that reach beyond `largest`."""
    return np.arange(max(1, math.ceil(largest / step)) + 1) * step


def _connect_dots(forward: np.ndarray, reverse: np.ndarray, step: float) -> pld_pmf.DensePLDPmf:
    """Returns the losses of P against Q from H(P || Q) and H(Q || P) at 0, step, 2 step, ...

    Between the points the profile is replaced by straight lines in alpha, which lie above it
    (Doroshenko et al. 2022, Algorithm 1). A negative loss of P is a positive loss of Q with
    probability exp(loss) times as large; second differences of the profile left of alpha = 1, as
    `dp_accounting` forms them, would drown in rounding errors of 1e-12.
    """
    growth = math.expm1(step)
    negative = _positive_loss_mass(reverse, growth)
    negative *= np.exp(-step * np.arange(1, len(negative) + 1))
    zero = 1 + (forward[1] + reverse[1] - (2 + growth) * forward[0]) / growth
    probabilities = np.concatenate(
        [negative[::-1], [max(zero, 0.0)], _positive_loss_mass(forward, growth)]
    )
    return pld_pmf.DensePLDPmf(step, 1 - len(reverse), probabilities, float(forward[-1]), True)


def _positive_loss_mass(profile: np.ndarray, growth: float) -> np.ndarray:
    """Returns the probabilities of the losses step, 2 step, ... with growth = exp(step) - 1."""
    drops = -np.diff(profile)
    mass = drops * (1 + growth) / growth
    mass[:-1] -= drops[1:] / growth
    return np.maximum(mass, 0.0)
