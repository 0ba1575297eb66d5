"""Several releases from one population, composed as privacy losses.

A *dominating pair* of a release is a pair (P, Q) with

    H_alpha(M(D) || M(D')) <= H_alpha(P || Q)        for every alpha > 0,

for all data sets D, and D' without the data of one unit (zero-out neighbours); M may depend on what
was released before. The pair of the other direction bounds H_alpha(M(D') || M(D)).

Theorem. Let (P_i, Q_i) dominate M_i in one direction, i = 1, 2, .., each for whatever the others
have released before it. Then (P_1 x P_2 x .., Q_1 x Q_2 x ..) dominates all of them together in
this direction, and if both products have a profile of at most delta at epsilon, all together are
(epsilon, delta)-DP.

Proof (Zhu, Dong, Wang 2022, Theorem 10). Fix D and D'; p, q are densities of the first release, and
given its outcome y the rest has a profile of at most h(alpha), that of the other pairs' product.
Then H_alpha of all is the integral over y of q(y) g(p(y) / q(y)) with g(r) = r h(alpha / r), which
is convex and increasing in r, as h is convex and falling. A mean of such a function is no larger
than under (P_1, Q_1): every convex g is a mixture of (r - a)_+ and linear functions, and the first
have means H_a. By induction over the releases this is the profile of the product. As multiplication
has no order, neither have releases: those that are interleaved cost the same.

The direction is one for all: D has the data of the unit in every release, and D' in none. Losses of
P_1 against Q_1 beside those of Q_2 against P_2 belong to no neighbours. So sums are formed
direction by direction, and the worse one counts.

What dominates a release:

* without amplification, N(mu, 1) and N(0, 1), in both directions. All of these together are one
  Gaussian of sqrt(sum mu^2);
* a cyclic scheme: its Gaussian sums over samples, of which it is a composition
  (`SamplingScheme.steps`), direction by direction;
* whatever is known by guarantees alone: `ProvenPoints`. They may be of groups, of rho-zCDP, or
  certified by samples, whose failure probabilities are then part of every delta. Such a release may
  be a long run that others interleave, which costs no more (Vadhan and Zhang 2023: it is no more
  than a function of its pair's outcome).

The losses of products are sums. They are formed with few digits and rounded up
(`floating_losses.py`), with more of them until epsilon no longer moves. It assumes that every
release draws its noise and its batches by coins of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from bandmf_tf import _checks
from bandmf_tf.accounting.floating_losses import FloatingLosses
from bandmf_tf.accounting.gaussian import zcdp_epsilon
from bandmf_tf.accounting.privacy_loss import (
    LARGEST_SHIFT,
    LOSS_ROUNDING,
    SLACK,
    SMALLEST_DELTA,
    DominatingPair,
    PoissonSampledGaussian,
    SampledGaussian,
    refined_epsilon,
    sampled_epsilon,
)
from bandmf_tf.errors import BandMFError

# Guarantees that stand for a release are for deltas from the first number down to the second one
# times the delta of all releases, so many to a power of ten.
_LARGEST_DELTA, _LEAST_OF_DELTA, _POINTS = 0.3, 1e-4, 4
_LEAST_LOG_DELTA = -300.0

# Losses of guarantees are at least as large as the largest of them times this.
_SMALLEST_LOSS = 1e-9

# Sums of some releases that are remembered, of a megabyte or so each.
_REMEMBERED = 64


@dataclasses.dataclass(frozen=True)
class ProvenPoints(DominatingPair):
    """The pair of all that is (epsilon, delta)-DP at every one of some points.

    H is a convex and falling function of alpha with H(0) = 1, and H(1 / alpha) = 1 - 1 / alpha +
    H'(alpha) / alpha for the profile H' of the other direction. Both are at most delta at the
    points, so H is at most the lower convex hull of (0, 1), of

        (exp(epsilon), delta),    (exp(-epsilon), 1 - exp(-epsilon) + delta exp(-epsilon)),

    and, beyond the last point, at most the last delta. That function is the profile of a pair (Zhu,
    Dong, Wang 2022), as it is convex, falling, 1 at 0 and at least 1 - alpha; and it is its own
    mirror image. It crosses alpha = 1 by the edge between the two images of one point, at
    (exp(epsilon) - 1 + 2 delta) / (exp(epsilon) + 1). Of one point this is randomised response,
    which may fail with probability delta.

    Attributes:
        points: Pairs (epsilon, delta).
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not any(epsilon < math.inf for epsilon, _ in self.points):
            raise BandMFError(f"a guarantee must have a finite epsilon. Found {self.points}.")
        for epsilon, delta in self.points:
            _checks.probability("delta", delta)
            if not epsilon >= 0.0:
                raise BandMFError(f"epsilon must be at least 0. Found {epsilon}.")

    @classmethod
    def of_zcdp(cls, rho: float, delta: float) -> ProvenPoints:
        """Returns the pair of all that is rho-zCDP, for compositions of this delta."""
        return cls(tuple((zcdp_epsilon(rho, at), at) for at in deltas_below(delta)))

    @functools.cached_property
    def _hull(self) -> tuple[np.ndarray, np.ndarray]:
        """Epsilon and delta of the corners from epsilon = 0 on."""
        finite = sorted(point for point in self.points if point[0] < math.inf)
        at_zero = min(math.tanh(epsilon / 2) * (1 - delta) + delta for epsilon, delta in finite)
        hull: list[tuple[float, float]] = [(0.0, at_zero)]
        for point in finite:
            if point[0] == 0.0 or point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _log_slope(hull[-2], hull[-1]) <= _log_slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        corners = np.array(hull)
        return corners[:, 0], corners[:, 1]

    @property
    def scale(self) -> float:
        corners = self._hull[0]
        return float(max(*corners[1:2], _SMALLEST_LOSS * corners[-1], 1e-12))

    @property
    def is_symmetric(self) -> bool:
        return True

    def largest_losses(self, tail: float) -> tuple[float, float]:
        del tail
        largest = float(self._hull[0][-1])
        return largest, largest

    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        corners, deltas = self._hull
        right = np.searchsorted(corners, epsilon)
        inside = (right > 0) & (right < corners.size)
        profile = np.where(right == 0, deltas[0], deltas[-1])
        at, right = epsilon[inside], right[inside]
        low, high = corners[right - 1], corners[right]
        # How far alpha is from that of the left corner to that of the right one.
        part = np.exp(at - high) * np.expm1(low - at) / np.expm1(low - high)
        profile[inside] = deltas[right - 1] + part * (deltas[right] - deltas[right - 1])
        return profile, profile


def _log_slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Returns log of how fast delta falls with alpha between two points."""
    width = right[0] + math.log(-math.expm1(left[0] - right[0]))
    return math.log(left[1] - right[1]) - width


def deltas_below(delta: float) -> tuple[float, ...]:
    """Returns at which deltas guarantees are wanted for compositions of this one."""
    first = math.log10(_LARGEST_DELTA)
    last = max(math.log10(delta) + math.log10(_LEAST_OF_DELTA), _LEAST_LOG_DELTA)
    count = math.ceil((first - last) * _POINTS)
    return tuple(float(10**x) for x in np.linspace(first, last, count + 1))


@dataclasses.dataclass(frozen=True)
class Losses:
    """A pair that dominates each of a number of steps.

    Attributes:
        pair: P and Q.
        times: Number of steps.
    """

    pair: DominatingPair
    times: int = 1


class Composer:
    """Adds up the losses of releases; remembers sums of some for lists that go on with others."""

    def __init__(self, delta: float):
        """Takes the delta of all releases together."""
        self.delta = _checks.probability("delta", delta)
        self._sum = functools.lru_cache(_REMEMBERED)(self._sum_of)

    def epsilon(self, releases: Iterable[Losses], mu: float = 0.0, rho: float = 0.0) -> float:
        """Returns epsilon of releases and of others without amplification, rounded up.

        Args:
            releases: Losses of the releases.
            mu: Gaussian DP of others together; 0 if there are none.
            rho: zCDP of still others together; 0 if there are none.
        """
        for name, value in (("mu", mu), ("rho", rho)):
            if not value >= 0.0:
                raise BandMFError(f"{name} must be at least 0. Found {value}.")
        times: dict[DominatingPair, int] = {}
        for release in releases:
            times[release.pair] = times.get(release.pair, 0) + release.times
        if mu > 0.0:
            gaussian = PoissonSampledGaussian(mu, 1.0)
            times[gaussian] = times.get(gaussian, 0) + 1
        if rho > 0.0:
            times[ProvenPoints.of_zcdp(rho, self.delta)] = 1
        parts = tuple(Losses(pair, count) for pair, count in times.items())
        if len(parts) == 1 and isinstance(parts[0].pair, SampledGaussian):
            return sampled_epsilon(parts[0].pair, parts[0].times, self.delta)
        shifts = [part.pair.mu for part in parts if isinstance(part.pair, SampledGaussian)]
        shift = max(shifts, default=0.0)
        if not shift <= LARGEST_SHIFT:
            return math.inf
        distance = math.fsum(
            part.times * float(part.pair.profiles(np.zeros(1))[0][0]) for part in parts
        )
        if distance <= self.delta * (1 - SLACK):  # Total variations add up.
            return 0.0
        return refined_epsilon(functools.partial(self._epsilon, parts), shift)

    def _epsilon(self, parts: tuple[Losses, ...], cells: int, direction: int) -> float:
        if direction == 1 and all(part.pair.is_symmetric for part in parts):
            return 0.0  # Nothing but the first one, once more.
        total = self._sum(parts, cells, direction)
        left = self.delta * (1 - SLACK - total.rounding)
        if left <= SMALLEST_DELTA:
            return math.inf
        return total.losses.epsilon(left) * LOSS_ROUNDING

    def _sum_of(self, parts: tuple[Losses, ...], cells: int, direction: int) -> _Sum:
        """Returns the sum of all parts, halves first: digits are lost with every sum of sums."""
        if len(parts) == 1:
            return self._one(parts[0], cells, direction)
        # Halves of 2^k parts from the first one on are also those of longer lists.
        half = 1 << ((len(parts) - 1).bit_length() - 1)
        one, two = (self._sum(half, cells, direction) for half in (parts[:half], parts[half:]))
        losses = one.losses.joined(two.losses, self.delta)
        return _Sum(losses, one.rounding + two.rounding + losses.rounding(2))

    def _one(self, part: Losses, cells: int, direction: int) -> _Sum:
        # Powers of two, so that cells can be merged until all are on one grid.
        unit = 2.0 ** math.floor(math.log2(part.pair.scale / (16 * cells)))
        losses = part.pair.floating(cells, unit)[direction]
        return _Sum(losses.composed(part.times, self.delta), losses.rounding(part.times))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sum:
    """A distribution of losses, and a bound on its relative rounding error."""

    losses: FloatingLosses
    rounding: float
