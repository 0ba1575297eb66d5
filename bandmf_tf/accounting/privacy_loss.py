"""Privacy losses of the Gaussian mechanism, plain and on sampled batches.

A step of training is described by its *privacy profile*, the hockey-stick divergence

    H_alpha(P || Q) = sup_S P(S) - alpha Q(S),    alpha = exp(epsilon),

of the output with an example (P) against the output without it (Q), in both directions. Everything
follows from the profile of one Gaussian with shift `mu` (`gaussian_profile`).

The profile is known at the points of a grid of losses, and rounding in between is pessimistic
(connect-the-dots, Doroshenko et al. 2022): the grid can make epsilon larger than it is, never
smaller. `sampled_epsilon` takes losses with few digits (`floating_losses.py`), and more of them
until epsilon no longer moves. With a `discretization` it takes a uniform grid instead, as the
paper's tables and version 1 of mechanism files do; the rest of this module is about these.

Losses of k steps on a uniform grid are added by a Fourier transform, whose rounding errors would
drown a small delta. So the distribution is first tilted, p(l) exp(theta l) / M(theta), with the
theta that moves its bulk to the losses that decide about delta, and tilted back afterwards: errors
are then relative to delta (Chernoff), and a bound on them is added to it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import scipy

from bandmf_tf.accounting.floating_losses import FloatingLosses, floating_grid

# The grid of the paper's tables, for their reproduction.
PAPER_DISCRETIZATION = 1e-4

# A Gaussian tail beyond this many standard deviations becomes an infinite loss: on a uniform grid
# (mass 1e-24), and where cells cost nothing (1e-300).
_TAIL, _FAR_TAIL = 10.2, 37.0

# Rounding errors of a Fourier transform and its k-th power, in total, in units of k times the
# machine precision. The largest ones measured were twice that; they are tilted, so that this costs
# nothing that could be seen.
_FFT_ROUNDING = 64 * float(np.finfo(np.float64).eps)

# Everything else that is rounded: logarithms of weights that cancel, and the like.
SLACK = 1e-9

# More points than this are never made: the grid becomes coarser, which is still pessimistic.
_MAX_GRID_POINTS = 2**22

# Nor wider cells, whose losses no exponential function could take.
_WIDEST_CELL = 100.0

# Losses have first so many cells to a power of two, more if that makes the cells of a single loss,
# mu^2 / 2, narrower than 1. The number is doubled until epsilon changes by less than the fraction
# below, of which a third is what remains, or to the last one. (Fewest and most of either; still
# more cells would show how profiles are rounded.)
_FIRST_CELLS, _LAST_CELLS = (128, 2048), (1024, 4096)
SMALLEST_DELTA = 1e-250
LOSS_ROUNDING = 1 + 2.0**-50  # Losses have 53 digits themselves.
_AGREEMENT = 5e-4

# What protects nobody needs no digits.
_ENORMOUS = 1e7

# Sums within so many tilted standard deviations of the tilted mean are looked at.
_DEVIATIONS = 12.0

# The tilt is looked for on so many cells; it need not be exact.
_CELLS_OF_SEARCH = 2**18

# Beyond this shift the cells of a grid get too wide; what sampling could gain is not worth more.
LARGEST_SHIFT = 3e4

# Below this shift, profiles are differences of almost equal numbers and come from a series.
_SMALL_SHIFT = 0.02


@dataclasses.dataclass(frozen=True, eq=False)
class LossDistribution:
    """Probabilities of the losses first * step, (first + 1) * step, .. of P against Q.

    Attributes:
        step: Width of the grid.
        first: Index of the first loss.
        probabilities: Under P.
        infinity: Probability of an infinite loss.
    """

    step: float
    first: int
    probabilities: np.ndarray
    infinity: float

    def tilted(self, theta: float) -> tuple[np.ndarray, float]:
        """Returns the finite losses' p exp(theta l) / M(theta), and log M(theta)."""
        with np.errstate(divide="ignore"):
            logs = np.log(self.probabilities)
        logs += theta * self.step * (self.first + np.arange(logs.size))
        largest = logs.max()
        weights = np.exp(logs - largest)
        moment = float(weights.sum())
        return weights / moment, float(largest) + math.log(moment)

    def coarser(self, most: int) -> LossDistribution:
        """Returns about the same distribution on at most so many cells; neither bound."""
        by = -(-self.probabilities.size // most)
        before = self.first % by
        padded = np.zeros(-(-(self.probabilities.size + before) // by) * by)
        padded[before : before + self.probabilities.size] = self.probabilities
        sums = padded.reshape(-1, by).sum(axis=1)
        return LossDistribution(self.step * by, self.first // by, sums, self.infinity)

    def delta(self, epsilon: float) -> float:
        """Returns H(P || Q) at a finite epsilon."""
        losses = self.step * (self.first + np.arange(self.probabilities.size))
        above = losses > epsilon
        return self.infinity - float(self.probabilities[above] @ np.expm1(epsilon - losses[above]))


@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """The losses of one step in both directions: P against Q and, if different, Q against P."""

    remove: LossDistribution
    add: LossDistribution


def gaussian_profile(mu: float, epsilon: np.ndarray | float) -> np.ndarray:
    """Returns H_alpha(N(mu, 1) || N(0, 1)) at alpha = exp(epsilon), exactly.

    This is the smallest delta for which a Gaussian release of sensitivity `mu` and unit noise is
    (epsilon, delta)-DP (Balle and Wang 2018, Theorem 8). It holds for every real epsilon and is the
    same in both directions. With t = epsilon / mu - mu / 2 it is

        Phi(-t) - exp(epsilon) Phi(-t - mu)
            = exp(-t^2 / 2) (erfcx(t / sqrt 2) - erfcx((t + mu) / sqrt 2)) / 2,

    where nothing overflows or cancels but the difference of erfcx at a small mu.
    """
    return _profile(mu, np.asarray(epsilon, dtype=np.float64) / mu - mu / 2)


def _profile(mu: float, t: np.ndarray) -> np.ndarray:
    """Returns `gaussian_profile` at epsilon = mu t + mu^2 / 2."""
    inner = np.maximum(t, -5.0)
    x, shift = inner / math.sqrt(2), mu / math.sqrt(2)
    if mu < _SMALL_SHIFT:
        difference = _erfcx_drop(x, shift)
    else:
        difference = scipy.special.erfcx(x) - scipy.special.erfcx(x + shift)
    right = np.exp(-inner * inner / 2) / 2 * difference
    with np.errstate(over="ignore", invalid="ignore"):
        epsilon = mu * (t + mu / 2)
        left = scipy.special.ndtr(-t) - np.exp(epsilon + scipy.special.log_ndtr(-t - mu))
    return np.maximum(np.where(t < -5.0, left, right), 0.0)


def _erfcx_drop(x: np.ndarray, shift: float) -> np.ndarray:
    """Returns erfcx(x) - erfcx(x + shift) for a small shift: its Taylor series at x."""
    # f' = 2 x f - 2 / sqrt(pi), and so f^(j + 1) = 2 x f^(j) + 2 j f^(j - 1).
    before = scipy.special.erfcx(x)
    current = 2 * x * before - 2 / math.sqrt(math.pi)
    total, power = np.zeros_like(x), 1.0
    for j in range(1, 9):
        power *= shift / j
        total -= power * current
        before, current = current, 2 * x * current + 2 * j * before
    return total


def gaussian_closed_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon at which N(mu, 1) and N(0, 1) have a profile of `delta`.

    By the closed form, and rounded up; infinite where that is beyond floating point.
    """
    if math.isinf(mu * mu):
        return math.inf
    if scipy.special.erf(mu / math.sqrt(8)) <= delta:  # The total variation: epsilon is 0.
        return 0.0

    def excess(t: float) -> float:
        return math.log(max(float(_profile(mu, np.asarray(t))), 1e-320) / delta) + SLACK

    lowest, highest = max(-mu / 2, -10.0), 40.0
    if excess(lowest) <= 0.0:
        return max(0.0, mu * (lowest + mu / 2))
    if excess(highest) > 0.0:
        return math.inf
    t = scipy.optimize.brentq(excess, lowest, highest, xtol=1e-13, rtol=1e-13)
    return max(0.0, mu * (t + mu / 2) + 1e-11 * mu)


class DominatingPair(abc.ABC):
    """P and Q, no harder to tell apart than what a release gives with a unit and without it."""

    @property
    @abc.abstractmethod
    def scale(self) -> float:
        """The size of typical losses, roughly."""

    @property
    def is_symmetric(self) -> bool:
        """Whether the losses of Q against P are those of P against Q."""
        return False

    @abc.abstractmethod
    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns H(P || Q) and H(Q || P) at each epsilon >= 0."""

    @abc.abstractmethod
    def largest_losses(self, tail: float) -> tuple[float, float]:
        """Returns losses of P against Q and of Q against P that a Gaussian tail has beyond it."""

    def floating(
        self, cells: int, unit: float | None = None
    ) -> tuple[FloatingLosses, FloatingLosses]:
        """Returns the losses of P against Q and of Q against P with few digits."""
        unit = self.scale / (16 * cells) if unit is None else unit
        grid = floating_grid(unit, cells, max(self.largest_losses(_FAR_TAIL)))
        forward, reverse = self.profiles(grid)
        remove = FloatingLosses.from_profiles(unit, cells, grid, forward, reverse)
        if self.is_symmetric:
            return remove, remove
        return remove, FloatingLosses.from_profiles(unit, cells, grid, reverse, forward)


@dataclasses.dataclass(frozen=True)
class SampledGaussian(DominatingPair):
    """A Gaussian sum over a sample of records.

    Attributes:
        mu: Largest contribution of a record over the standard deviation of the noise.
        q: Probability that a record is in the sample; 1 is the plain Gaussian.
    """

    mu: float
    q: float

    @property
    def is_plain(self) -> bool:
        """Whether every record is in every sample, and this is one Gaussian."""
        return self.q == 1.0

    @property
    def scale(self) -> float:
        return self.q * min(1.0, self.mu)

    @property
    def is_symmetric(self) -> bool:
        return self.is_plain

    def pld(self, discretization: float) -> PrivacyLoss:
        """Returns the losses on a uniform grid."""
        largest = self.largest_losses(_TAIL)
        step = max(min(discretization, _WIDEST_CELL), sum(largest) / _MAX_GRID_POINTS)
        ends = [max(1, math.ceil(loss / step)) + 1 for loss in largest]
        forward, reverse = self.profiles(np.arange(max(ends)) * step)
        forward, reverse = forward[: ends[0]], reverse[: ends[1]]
        remove = _connect_dots(forward, reverse, step)
        return PrivacyLoss(
            remove, remove if self.is_plain else _connect_dots(reverse, forward, step)
        )


class PoissonSampledGaussian(SampledGaussian):
    """A Gaussian sum over a Poisson sample.

    P = (1 - q) N(0, 1) + q N(mu, 1) is the output with the example, which enters the sum with
    probability q, and Q = N(0, 1) the output without it: removing the example and replacing it by
    a zero record are the same thing.
    """

    def largest_losses(self, tail: float) -> tuple[float, float]:
        loss = self.mu * self.mu / 2 + tail * self.mu
        return _sampled_epsilon(loss, self.q), -_sampled_epsilon(-loss, self.q)

    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mu, q = self.mu, self.q
        forward = q * gaussian_profile(mu, _unsampled_epsilon(epsilon, q))
        # Q - alpha P = alpha q (exp(-e) N(0, 1) - N(mu, 1)), exp(-e) = (1 / alpha - (1 - q)) / q,
        # which is negative everywhere if exp(-e) is not positive.
        with np.errstate(divide="ignore", invalid="ignore"):
            unsampled = np.where(
                epsilon < 1,
                -np.log1p(np.expm1(-epsilon) / q),  # Exact for small epsilon,
                -np.log((np.exp(-epsilon) - (1 - q)) / q),  # and this where q is almost 1.
            )
        possible = np.isfinite(unsampled)
        at, unsampled = epsilon[possible], unsampled[possible]
        reverse = np.zeros_like(forward)
        reverse[possible] = q * np.exp(at - unsampled) * gaussian_profile(mu, unsampled)
        return forward, reverse


class FixedSizeSampledGaussian(SampledGaussian):
    """A bound on a Gaussian sum over a random batch of fixed size, zero-out.

    A batch of size q m is drawn without replacement from m records, records contribute vectors of
    norm at most `mu`, the noise has unit variance. In the neighbouring data set one record is
    replaced by a zero record that still takes its place in a batch. With

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

    def largest_losses(self, tail: float) -> tuple[float, float]:
        near = self.mu * self.mu / 2 + tail * self.mu
        far = 2 * self.mu * self.mu + 2 * tail * self.mu
        return min(_sampled_epsilon(far, self.q), near), _sampled_epsilon(near, self.q)

    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mu, q = self.mu, self.q
        # (1 - w) / w^2 = (a - alpha) / (exp(mu^2) alpha^2)
        ratio = (1 - q) / q * math.exp(-mu * mu) * -np.exp(-epsilon) * np.expm1(-epsilon)
        weight = 2 / (1 + np.sqrt(1 + 4 * ratio))
        log_x = epsilon - np.log(weight)
        far, near = gaussian_profile(2 * mu, mu * mu + 2 * log_x), gaussian_profile(mu, log_x)
        forward = q * (ratio * weight**2 * far + weight * near)
        return forward, q * gaussian_profile(mu, _unsampled_epsilon(epsilon, q))


def loss_of_guarantee(epsilon: float, delta: float) -> PrivacyLoss:
    """Returns the losses that dominate every step that is (epsilon, delta)-DP, exactly."""
    larger = (1 - delta) * scipy.special.expit(epsilon)
    probabilities = np.array([1 - delta - larger, 0.0, larger])
    both = LossDistribution(epsilon, -1, probabilities, delta)
    return PrivacyLoss(both, both)


def sampled_epsilon(
    step: SampledGaussian, compositions: int, delta: float, discretization: float | None = None
) -> float:
    """Returns epsilon at `delta` after `compositions` adaptive runs of a step.

    Args:
        step: A Gaussian sum over a sample.
        compositions: Number of steps.
        delta: Delta of the guarantee.
        discretization: Width of a uniform grid of losses; None for as many digits as it takes.
    """
    if step.mu > LARGEST_SHIFT:
        return math.inf
    if discretization is not None:
        return composed_epsilon(step.pld(discretization), compositions, delta)
    if step.is_plain:
        return gaussian_closed_epsilon(step.mu * math.sqrt(compositions), delta)
    total_variation = float(step.profiles(np.zeros(1))[0][0])
    if compositions * total_variation <= delta * (1 - SLACK):  # They add up.
        return 0.0
    floating = functools.cache(step.floating)
    return refined_epsilon(
        lambda cells, direction: floating_epsilon(floating(cells)[direction], compositions, delta),
        step.mu,
    )


def refined_epsilon(epsilon_at: Callable[[int, int], float], shift: float) -> float:
    """Returns epsilon of the worse direction, with more cells until it no longer moves.

    Args:
        epsilon_at: From a number of cells and a direction, 0 or 1, to epsilon, rounded up.
        shift: The largest mu of a Gaussian among the losses.
    """
    enough = 1 << math.ceil(math.log2(max(shift, 1.0) ** 2))
    fewest = _FIRST_CELLS[0]
    if enough > fewest and epsilon_at(fewest, 0) > _ENORMOUS:  # More digits would only take time.
        return max(epsilon_at(fewest, 0), epsilon_at(fewest, 1))
    cells, last = (
        min(max(number, fewest), most)
        for number, (fewest, most) in ((enough, _FIRST_CELLS), (4 * enough, _LAST_CELLS))
    )
    found = [epsilon_at(cells, direction) for direction in (0, 1)]
    while True:
        cells *= 2
        coarse = max(found)
        for direction in (0, 1):
            if found[direction] >= (1 - _AGREEMENT) * coarse:  # The other one decides nothing.
                found[direction] = min(found[direction], epsilon_at(cells, direction))
        fine = max(found)
        if coarse - fine <= _AGREEMENT * fine or math.isinf(fine) or cells >= last:
            return fine


def floating_epsilon(losses: FloatingLosses, k: int, delta: float) -> float:
    """Returns epsilon at `delta` of k losses in one direction, rounded up."""
    left = delta * (1 - SLACK - losses.rounding(k))
    if left <= SMALLEST_DELTA:  # Products of probabilities below the normal numbers are lost.
        return math.inf
    return losses.composed(k, left).epsilon(left) * LOSS_ROUNDING


def composed_epsilon(pld: PrivacyLoss, compositions: int, delta: float) -> float:
    """Returns epsilon at `delta` after `compositions` adaptive runs of one step."""
    directions = (pld.remove,) if pld.add is pld.remove else (pld.remove, pld.add)
    return max(_composed_epsilon(losses, compositions, delta) for losses in directions)


def _composed_epsilon(losses: LossDistribution, k: int, delta: float) -> float:
    if k * losses.delta(0.0) <= delta * (1 - SLACK):  # Total variations add up.
        return 0.0
    left = delta * (1 - SLACK) + math.expm1(k * math.log1p(-losses.infinity))
    if left <= 0.0:
        return math.inf
    if k == 1:
        return _epsilon_of(losses.probabilities, losses.step, losses.first, left, np.zeros_like)
    tilted = _Tilted.towards(losses, k, left)
    found = tilted.epsilon(left)
    if found is None:  # Too many cells: where the bound on P(loss >= epsilon) is delta.
        return max(0.0, (k * tilted.log_moment - math.log(left)) / tilted.theta)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Tilted:
    """The sum of k losses under p(l) exp(theta l) / M(theta).

    Attributes:
        losses: Of one step.
        compositions: k.
        theta: The tilt.
        log_moment: log M(theta).
        probabilities: p tilted.
        mean: Of one tilted loss, in cells from the first one.
        deviation: Standard deviation of one tilted loss, in cells.
    """

    losses: LossDistribution
    compositions: int
    theta: float
    log_moment: float
    probabilities: np.ndarray
    mean: float
    deviation: float

    @classmethod
    def by(cls, losses: LossDistribution, k: int, theta: float) -> _Tilted:
        cells = np.arange(losses.probabilities.size)
        probabilities, log_moment = losses.tilted(theta)
        mean = float(probabilities @ cells)
        deviation = math.sqrt(float(probabilities @ (cells - mean) ** 2))
        return cls(losses, k, theta, log_moment, probabilities, mean, deviation)

    @classmethod
    def towards(cls, losses: LossDistribution, k: int, delta: float) -> _Tilted:
        """Returns the tilt whose Chernoff bound, at the tilted mean, is about `delta`."""
        few = losses.coarser(_CELLS_OF_SEARCH)

        def excess(log_theta: float) -> float:
            tilted = cls.by(few, k, math.exp(log_theta))
            centre = few.step * k * (few.first + tilted.mean)
            return float(tilted.log_delta_bound(centre)) - math.log(delta)

        # The bound falls in theta. Where it does not get as low as delta, any tilt will do.
        variance = k * (few.step * cls.by(few, k, 0.0).deviation) ** 2
        low = high = math.log(-2 * math.log(delta) / max(variance, 1e-300)) / 2
        while excess(low) < 0.0 and low > -300.0:
            low -= 1.0
        while excess(high) > 0.0 and high < low + 20.0:
            high += 1.0
        if excess(low) > 0.0 > excess(high):
            high = scipy.optimize.brentq(excess, low, high, xtol=1e-2)
        return cls.by(losses, k, math.exp(high))

    def log_delta_bound(self, epsilon: np.ndarray | float) -> np.ndarray:
        """Returns a bound on the logarithm of delta at `epsilon`, by Chernoff.

        (1 - exp(epsilon - l))_+ is at most exp(theta (l - epsilon)) / (1 + theta).
        """
        log_tail = self.compositions * self.log_moment - self.theta * np.asarray(epsilon)
        return log_tail - math.log1p(self.theta)

    def epsilon(self, delta: float) -> float | None:
        """Returns epsilon at `delta` from the sums within a few deviations; None: too few."""
        k, step, size = self.compositions, self.losses.step, self.probabilities.size
        everything = k * (size - 1) + 1
        spread = _DEVIATIONS * self.deviation * math.sqrt(k) + 2
        window = min(everything, math.ceil(2 * spread))
        if window > 2 * _MAX_GRID_POINTS:
            return None
        # Cells of the sum count from k * first.
        start = min(max(0, math.floor(k * self.mean - spread)), everything - window)
        composed = _circular_power(self.probabilities, k, window, start)
        first = k * self.losses.first + start
        is_cut = everything - start > composed.size
        above = self._above(step * (first + composed.size)) if is_cut else 0.0
        losses = step * (first + np.arange(composed.size))
        weights = np.exp(np.minimum(k * self.log_moment - self.theta * losses, 700.0))

        def rounding(at: np.ndarray) -> np.ndarray:
            bound = np.exp(np.minimum(self.log_delta_bound(step * at), 700.0))
            return k * _FFT_ROUNDING * bound + above

        found = _epsilon_of(composed * weights, step, first, delta, rounding)
        if window == everything:
            return found
        # Below the window there may be more, but not below epsilon = 0.
        is_short = found <= step * first and first > 0
        return None if is_short or above > 1e-7 * delta or math.isinf(found) else found

    def _above(self, loss: float) -> float:
        """Returns a bound on the probability of sums from `loss` on."""
        spread = self.losses.step * self.deviation * math.sqrt(self.compositions)
        bounds = []
        for more in (0.0, 6.0, 12.0):
            theta = self.theta + more / spread
            bounds.append(self.compositions * self.losses.tilted(theta)[1] - theta * loss)
        return math.exp(min(0.0, *bounds))


def _circular_power(probabilities: np.ndarray, k: int, window: int, start: int) -> np.ndarray:
    """Returns the k-fold convolution from cell `start` on, `window` cells or a few more.

    What lies outside is added to what is inside, which makes no probability smaller.
    """
    size = 1 << max(4, (window - 1).bit_length())
    rows = -(-probabilities.size // size)
    folded = np.zeros(rows * size)
    folded[: probabilities.size] = probabilities
    spectrum = np.fft.rfft(folded.reshape(rows, size).sum(axis=0))
    power = np.fft.irfft(spectrum**k, size)
    return np.maximum(np.roll(power, -(start % size)), 0.0)


def _epsilon_of(
    probabilities: np.ndarray,
    step: float,
    first: int,
    delta: float,
    more: Callable[[np.ndarray], np.ndarray],
) -> float:
    """Returns the smallest epsilon >= 0 with a profile plus `more` of at most `delta`.

    Args:
        probabilities: Of the losses first * step, (first + 1) * step, ..
        step: Width of the grid.
        first: Index of the first loss; where it is positive, no smaller epsilon is looked for.
        delta: Delta.
        more: What to add to the profile at an index or a smaller one; not increasing.
    """
    if first < 0:  # Only losses above epsilon >= 0 count.
        probabilities, first = probabilities[-first:], 0
    if probabilities.size == 0:
        return 0.0
    # above[j] and profile[j] at epsilon = loss j: all terms of the recursion are positive.
    total = np.cumsum(probabilities[::-1])[::-1]
    above = np.append(total[1:], 0.0)
    decay = math.exp(-step)
    profile = scipy.signal.lfilter([-math.expm1(-step)], [1.0, -decay], above[::-1])[::-1]
    indices = first + np.arange(probabilities.size)
    enough = profile + more(indices) <= delta
    j = int(np.argmax(enough))
    if not enough[j]:
        return math.inf
    if j == 0:
        return step * first
    # Between loss j - 1 and loss j, with the larger `more` of the two.
    target = delta - float(more(indices[j - 1]))
    between = total[j] - profile[j]  # Zero where floating point ends: epsilon is then loss j.
    gain = max(target - profile[j], 0.0) / between if between > 0.0 else 0.0
    return step * (first + j) + max(math.log1p(-min(gain, 1 - 1e-16)), -step)


def _sampled_epsilon(epsilon: float, q: float) -> float:
    """Returns log(1 + q (exp(epsilon) - 1))."""
    if q == 1.0:
        return epsilon
    return float(np.logaddexp(math.log1p(-q), math.log(q) + epsilon))


def _unsampled_epsilon(epsilon: np.ndarray, q: float) -> np.ndarray:
    """Returns log(1 + (exp(epsilon) - 1) / q), the inverse of `_sampled_epsilon`, epsilon >= 0."""
    with np.errstate(divide="ignore"):  # Where it is not taken.
        large = epsilon + np.log1p(-(1 - q) * np.exp(-epsilon)) - math.log(q)
    return np.where(epsilon < 1, np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / q), large)


def _connect_dots(forward: np.ndarray, reverse: np.ndarray, step: float) -> LossDistribution:
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
    return LossDistribution(step, 1 - len(reverse), probabilities, float(forward[-1]))


def _positive_loss_mass(profile: np.ndarray, growth: float) -> np.ndarray:
    """Returns the probabilities of the losses step, 2 step, ... with growth = exp(step) - 1."""
    drops = -np.diff(profile)
    mass = drops * (1 + growth) / growth
    mass[:-1] -= drops[1:] / growth
    return np.maximum(mass, 0.0)
