"""Sums of privacy losses, held as floating-point numbers with few digits.

A step of training has a pair of output distributions, P with an example and Q without it. The
*loss* of an outcome is log(P / Q); the losses of adaptively chosen steps add up, and

    delta(epsilon) = E_P (1 - exp(epsilon - loss))_+ .

Losses of rare samples have a scale of 1e-9 and, once in a billion, one of 10. A uniform grid for
both would have 1e12 cells. Here a loss is i * unit * 2^level, |i| < 2 m, as a floating-point number
with log2(m) bits behind the point, from an origin that is at first zero:

    level 0    -2m < i < 2m                      width of a cell: unit
    level 1    m <= |i| < 2m                                  2 unit
    level 2    m <= |i| < 2m                                  4 unit    ...

so that a cell is at most 1 / m of the loss. Three facts make every result an upper bound.

*Splitting is pessimistic.* An outcome of loss l between two neighbours a < l < b on the grid is
replaced by two outcomes of losses a and b, such that both P and Q keep their probability. Whoever
forgets which of the two it was has the outcome back, so they tell P from Q at least as well, also
among other steps. In the middle of a cell of width 2 s the upper part is 1 / (1 + exp(-s)). (The
connect-the-dots algorithm of Doroshenko et al. 2022 does the same to a whole profile.)

*What is left out is infinite.* Probabilities too small to matter are added to that of an infinite
loss.

*Nothing is subtracted.* Sums are formed by convolution term by term. All terms are positive, so the
rounding error of a result is relative to it: at most the number of operations that led to it times
2^-53. `Composition.epsilon` takes that off delta. There is no Fourier transform, whose errors are
relative to the largest probability, and so no tilting that would make up for it.

What splitting costs. It adds at most (l / 2 m)^2 to the variance of a loss l, once for every
doubling of the number of steps, and so a fraction of the order of 1 / m^2 to epsilon. In cells
wider than 1 nearly all of an outcome moves up, by half a cell. So sums whose mean is far from zero
are counted from their mean (`recentred`), and l is how far they are from it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy

# Of delta, what may become an infinite loss because it is too small to be carried along.
_LEFT_OUT = 1e-7

# Sums are rarely in the finest cells after a while. These are merged when less than this is there.
_RARE = 1e-2

# From this many standard deviations on, losses are counted from their mean.
_FAR = 4.0


@dataclasses.dataclass(frozen=True, eq=False)
class FloatingLosses:
    """Probabilities under P of losses with few digits.

    Attributes:
        unit: Width of the finest cells.
        levels: `levels[k][i + 2 m]` is the probability of the loss origin + i * unit * 2^k.
        infinity: Probability of an infinite loss.
        origin: From where losses are counted.
    """

    unit: float
    levels: list[np.ndarray]
    infinity: float
    origin: float = 0.0

    @property
    def _m(self) -> int:
        return self.levels[0].size // 4

    @classmethod
    def from_profiles(
        cls, unit: float, m: int, grid: np.ndarray, forward: np.ndarray, reverse: np.ndarray
    ) -> FloatingLosses:
        """Returns the losses of P against Q from H(P || Q) and H(Q || P) on a `floating_grid`.

        Between the points the profile is replaced by straight lines in alpha, which lie above it.
        A negative loss of P is a positive loss of Q with probability exp(loss) times as large.
        """
        positive = _positive_losses(grid, forward)
        negative = _positive_losses(grid, reverse) * np.exp(-grid)
        # So that probabilities add up to one at least, whatever was rounded.
        positive[0] = max(0.0, 1.0 - float(positive.sum() + negative.sum() + forward[-1]))
        levels = []
        for first, last in [(0, 2 * m), *((k, k + m) for k in range(2 * m, grid.size, m))]:
            level = np.zeros(4 * m + 1)
            start = 4 * m - (last - first)
            level[start : 4 * m] = positive[first:last]
            level[1 : last - first + 1] += negative[first:last][::-1]
            levels.append(level)
        return cls(unit, levels, float(forward[-1]))

    def composed(self, k: int, delta: float) -> FloatingLosses:
        """Returns the sum of k losses; what is far below `delta` becomes infinite."""
        entries = (len(self.levels) + k.bit_length()) * self.levels[0].size
        cut = _LEFT_OUT * delta / (2 * k.bit_length() * entries)
        total, one, steps = self, self, 1
        for bit in bin(k)[3:]:
            steps *= 2
            total = total.plus(total).without(cut * steps / k).coarsened_where_rare().recentred()
            if bit == "1":
                steps += 1
                while one.unit < total.unit:
                    one = one.coarsened()
                total = total.plus(one).without(cut * steps / k)
        return total

    def plus(self, other: FloatingLosses) -> FloatingLosses:
        """Returns the distribution of the sum of two independent losses on the same grid.

        Of each pair of losses the finer one is split until both have the same level.
        """
        m, count = self._m, max(len(self.levels), len(other.levels))
        nothing = np.zeros(4 * m + 1)
        sums, finer, other_finer = [], nothing, nothing
        for k in range(count):
            level = self.levels[k] if k < len(self.levels) else nothing
            if self is other:
                sums.append(_convolved(level, level + 2 * finer))
            else:
                other_level = other.levels[k] if k < len(other.levels) else nothing
                sums.append(
                    _convolved(level, other_level + other_finer) + _convolved(finer, other_level)
                )
                other_finer = _split(other_level + other_finer, self.unit * 2.0**k)
            finer = _split(level + finer, self.unit * 2.0**k)
        return FloatingLosses(
            self.unit,
            _in_place(sums, self.unit, m),
            self.infinity + other.infinity,
            self.origin + other.origin,
        )

    def joined(self, other: FloatingLosses, delta: float) -> FloatingLosses:
        """Returns the sum of two, by units that are powers of two, as `composed` does of one."""
        one, two = self, other
        while one.unit < two.unit:
            one = one.coarsened()
        while two.unit < one.unit:
            two = two.coarsened()
        total = one.plus(two)
        cut = _LEFT_OUT * delta / (2 * len(total.levels) * total.levels[0].size)
        return total.without(cut).coarsened_where_rare().recentred()

    def without(self, cut: float) -> FloatingLosses:
        """Returns the same with an infinite loss in the place of probabilities below `cut`."""
        levels, infinity = [], self.infinity
        for level in self.levels:
            small = level < cut
            infinity += float(level[small].sum())
            levels.append(np.where(small, 0.0, level))
        while len(levels) > 1 and not levels[-1].any():
            levels.pop()
        return FloatingLosses(self.unit, levels, infinity, self.origin)

    def coarsened(self) -> FloatingLosses:
        """Returns the same with finest cells twice as wide."""
        finest = _split(self.levels[0], self.unit)
        if len(self.levels) > 1:
            finest += self.levels[1]
        return FloatingLosses(2 * self.unit, [finest, *self.levels[2:]], self.infinity, self.origin)

    def coarsened_where_rare(self) -> FloatingLosses:
        """Returns the same, with wider finest cells if few losses lie there."""
        rare = len(self.levels) > 1 and float(self.levels[0].sum()) < _RARE
        return self.coarsened() if rare else self

    def recentred(self) -> FloatingLosses:
        """Returns the same counted from about the mean, if that is far from the origin.

        Digits are then those of the deviation. The mean is subtracted as any loss is added.
        """
        m, (beyond, probabilities) = self._m, self._finite()
        total = float(probabilities.sum()) or 1.0
        mean = float(probabilities @ beyond) / total
        deviation = math.sqrt(float(probabilities @ (beyond - mean) ** 2) / total)
        if not abs(mean) > max(_FAR * deviation, self.unit):
            return self
        level = max(0, math.frexp(abs(mean) / (m * self.unit))[1] - 1)
        width = self.unit * 2.0**level
        cells = min(round(abs(mean) / width), 2 * m - 1) * (1 if mean > 0 else -1)
        nothing, back = np.zeros(4 * m + 1), np.zeros(4 * m + 1)
        back[2 * m - cells] = 1.0
        moved = self.plus(FloatingLosses(self.unit, [*[nothing] * level, back], 0.0))
        for _ in range(level):  # All that is left are multiples of the wider cells.
            moved = moved.coarsened()
        return dataclasses.replace(moved, origin=self.origin + cells * width)

    def epsilon(self, delta: float) -> float:
        """Returns the smallest epsilon >= 0 with a profile of at most `delta`."""
        left = delta - self.infinity
        if left <= 0.0:
            return math.inf
        beyond, probabilities = self._finite()
        order = np.argsort(beyond)
        losses, probabilities = self.origin + beyond[order], probabilities[order]

        def profile(epsilon: float) -> float:
            above = slice(np.searchsorted(losses, epsilon, side="right"), None)
            return float(-(probabilities[above] @ np.expm1(epsilon - losses[above])))

        if profile(0.0) <= left:
            return 0.0
        # The first loss at which the profile is small enough; one below, it is a line in alpha.
        low, high = int(np.searchsorted(losses, 0.0, side="right")) - 1, losses.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if profile(losses[middle]) <= left else (middle, high)
        at_high, total = profile(losses[high]), float(probabilities[high:].sum())
        gain = (left - at_high) / (total - at_high) if total > at_high else 0.0
        below = math.log1p(-min(gain, 1 - 1e-16))
        return max(0.0, float(losses[low]) if low >= 0 else 0.0, float(losses[high]) + below)

    def _finite(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns how far finite losses are from the origin, and their probabilities."""
        found = [np.flatnonzero(level) for level in self.levels]
        beyond = [(at - 2 * self._m) * (self.unit * 2.0**k) for k, at in enumerate(found)]
        probabilities = [level[at] for level, at in zip(self.levels, found, strict=True)]
        return np.concatenate(beyond), np.concatenate(probabilities)

    def rounding(self, k: int) -> float:
        """Returns a bound on the relative rounding error of what k of these losses add up to."""
        return 4 * k * (len(self.levels) + k.bit_length()) * self.levels[0].size * 2.0**-53


def floating_grid(unit: float, m: int, largest: float) -> np.ndarray:
    """Returns the losses from 0 on that have few digits, to beyond `largest`, in whole levels."""
    grid = [np.arange(2 * m) * unit]
    while grid[-1][-1] <= largest:
        unit *= 2
        grid.append(np.arange(m, 2 * m) * unit)
    return np.concatenate(grid)


def _positive_losses(grid: np.ndarray, profile: np.ndarray) -> np.ndarray:
    """Returns the probabilities of the losses of a grid, but for the first, from a profile."""
    widths, drops = np.diff(grid), np.maximum(-np.diff(profile), 0.0)
    mass = np.zeros_like(grid)
    mass[1:] = drops / -np.expm1(-widths)
    with np.errstate(over="ignore"):
        mass[1:-1] -= drops[1:] / np.expm1(widths[1:])
    return np.maximum(mass, 0.0)


def _split(level: np.ndarray, width: float) -> np.ndarray:
    """Returns a level on cells twice as wide, at the middle of an array of the same size."""
    split, quarter = np.zeros_like(level), level.size // 4
    inner = split[quarter : 3 * quarter + 1]
    inner += level[::2]
    inner[1:] += scipy.special.expit(width) * level[1::2]
    inner[:-1] += scipy.special.expit(-width) * level[1::2]
    return split


def _convolved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the convolution, term by term, of what is not zero at the ends."""
    result = np.zeros(a.size + b.size - 1)
    at_a, at_b = np.flatnonzero(a), np.flatnonzero(b)
    if at_a.size and at_b.size:
        first_a, last_a, first_b, last_b = at_a[0], at_a[-1] + 1, at_b[0], at_b[-1] + 1
        product = np.convolve(a[first_a:last_a], b[first_b:last_b])
        result[first_a + first_b : last_a + last_b - 1] = product
    return result


def _in_place(sums: list[np.ndarray], unit: float, m: int) -> list[np.ndarray]:
    """Returns sums, |i| < 4 m at every level, at the level of their size."""
    sums = [*sums, np.zeros(8 * m + 1)]
    for k, level in enumerate(sums[:-1]):  # Too large ones go up and are split.
        large = level.copy()
        large[2 * m + 1 : 6 * m] = 0.0
        sums[k + 1] += _split(large, unit * 2.0**k)
        level[: 2 * m + 1] = level[6 * m :] = 0.0
    for k in range(len(sums) - 1, 0, -1):  # Small ones go down as they are.
        small = sums[k][3 * m + 1 : 5 * m]
        sums[k - 1][2 * m + 2 : 6 * m - 1 : 2] += small
        small[:] = 0.0
    return [level[2 * m : 6 * m + 1] for level in sums]
