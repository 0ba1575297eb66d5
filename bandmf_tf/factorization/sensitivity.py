"""Sensitivity of a strategy under the participation schemas of the paper.

The sensitivity is the largest `|C u|_F` over all differences u of neighbouring streams: rows of
norm at most 1 (the clip norm is factored out) in the rounds where one unit took part, zero
elsewhere. With X = C^T C, Proposition E.1 bounds its square by the maximum over participation
patterns of `sum_{i, j in pattern} |X[i, j]|`, with equality, for any dimension d, when those
entries of X are non-negative or become so by changing the signs of some contributions.

Every function returns a `Sensitivity`, which says whether the value is exact or an upper bound and
why. All figures are for zero-out adjacency: a unit's contributions become zeros, its participation
pattern stays. (Replacing a contribution by another one doubles every value.)

Min-separation is the paper's: two participations r1 < r2 of a unit have
`r2 - r1 >= min_separation`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import Strategy

# Whether a pattern attains Theorem 3 is looked at up to this many participations.
_LARGEST_PATTERN = 32

# From here on squares have all their digits.
_SMALLEST = 1e-150

EXACT = "exact"
UPPER_BOUND = "upper bound"


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """A sensitivity and what is known about it.

    Attributes:
      value: The sensitivity for clip norm 1 under zero-out adjacency.
      kind: "exact" or "upper bound".
      theorem: The result of the paper (or the argument) behind `kind`.
    """

    value: float
    kind: str
    theorem: str

    def __post_init__(self) -> None:
        if abs(self.value) < _SMALLEST:
            raise BandMFError(
                f"A sensitivity must be at least {_SMALLEST:g}, below which squares of entries are "
                f"lost; scale strategy and noise together. Found {self.value:g}."
            )


def single_participation(strategy: Strategy) -> Sensitivity:
    """Returns the sensitivity when every unit takes part at most once: the largest column norm."""
    return Sensitivity(
        float(strategy.column_norms().max()),
        EXACT,
        "largest column norm (Definition of sensitivity)",
    )


def fixed_epochs(strategy: Strategy, min_separation: int, max_participations: int) -> Sensitivity:
    """Returns the sensitivity under (k, b)-participation: at most k, exactly b rounds apart.

    Cost: the non-zero ones among k diagonals of X, and O(n) operations on each.
    """
    b, k = _separation_and_cap(strategy, min_separation, max_participations)
    n = strategy.num_rounds
    known = toeplitz_participation(strategy, b, k) if strategy.num_bands > b else None
    if known is not None and known.kind == EXACT:
        return known
    # total[i] = sum of |X| over the pattern {i, i + b, ..}: its diagonal, and twice what lies
    # offset * b below it. Past the end of training the padding with zeros cuts the pattern short.
    total = np.zeros(n)
    non_negative = True
    for offset in range(min(k, ceil_div(strategy.num_bands, b))):  # Beyond, X vanishes.
        entries = strategy.gram_diagonal(offset * b)
        non_negative &= bool(np.all(entries >= 0.0))
        total += (1.0 if offset == 0 else 2.0) * _strided_sums(np.abs(entries), b, k - offset, n)
    squared = float(total.max())
    value = math.sqrt(squared)
    if strategy.num_bands <= b:
        return Sensitivity(value, EXACT, "Proposition B.1 (num_bands <= min_separation)")
    if non_negative:
        return Sensitivity(value, EXACT, "Proposition E.1 (X is non-negative on every pattern)")
    pattern = np.arange(int(total.argmax()), n, b)[:k]
    if _signs_attain(_gram_of_pattern(strategy, pattern), squared):
        return Sensitivity(value, EXACT, "Proposition E.1, attained by choosing signs")
    return Sensitivity(value, UPPER_BOUND, "Proposition E.1 (X has negative entries on a pattern)")


def min_separation_participation(
    strategy: Strategy, min_separation: int, max_participations: int | None = None
) -> Sensitivity:
    """Returns the sensitivity under b-min-separation with at most k' participations.

    Takes the sharpest result that applies: Theorem 2 when the strategy has at most b bands; the
    tree programme for tree aggregation; the closed form for Toeplitz strategies that do not
    increase; the chain programme when it has at most 2 b bands or when k' <= 2; Theorem 3 or the
    bound for Toeplitz strategies, whichever is smaller, otherwise.

    Args:
      strategy: The strategy.
      min_separation: b, the smallest number of rounds between two participations.
      max_participations: k', the cap on participations; None stands for what the separation allows,
        ceil(n / b).
    """
    n = strategy.num_rounds
    cap = n if max_participations is None else max_participations
    b, k = _separation_and_cap(strategy, min_separation, cap)
    if k == 1:
        return single_participation(strategy)
    if strategy.num_bands <= b:
        return banded_min_separation(strategy, b, k)
    if (known := strategy.min_separation_sensitivity(b, k)) is not None:
        return known
    known = toeplitz_participation(strategy, b, k)
    if known is not None and known.kind == EXACT:
        return known
    if strategy.num_bands <= 2 * b or k == 2:
        return chain_min_separation(strategy, b, k)
    found = general_min_separation(strategy, b, k)
    return known if known is not None and known.value < found.value else found


def banded_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Algorithm 5: exact for strategies with at most `min_separation` bands (Theorem 2)."""
    b, k = _separation_and_cap(strategy, min_separation, max_participations)
    if strategy.num_bands > b:
        raise BandMFError(
            f"Theorem 2 needs num_bands <= min_separation={b}; use `general_min_separation`. "
            f"Found num_bands={strategy.num_bands}."
        )
    squared = vec_sens(strategy.gram_diagonal(0), b, k)
    return Sensitivity(math.sqrt(squared), EXACT, "Theorem 2 (num_bands <= min_separation)")


def general_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Algorithm 4: an upper bound for any strategy (Theorem 3), exact if a pattern attains it.

    Row i of |X| is maximised over patterns on its own, then the rows are. Vectorised over all rows:
    O(n w) memory and O(n w k) time, where w = min(n, 2 num_bands - 1) is the width of a row of X.
    """
    b, k = _separation_and_cap(strategy, min_separation, max_participations)
    per_row = vec_sens(np.abs(_gram_row_windows(strategy)), b, k)
    squared = float(vec_sens(per_row, b, k))
    # The best pattern has so many participations at least: a round shuts out 2 (b - 1) others.
    if min(k, ceil_div(strategy.num_rounds, 2 * b - 1)) <= _LARGEST_PATTERN:
        pattern = _best_pattern(per_row, b, k)
        few = pattern.size <= _LARGEST_PATTERN
        if few and _signs_attain(_gram_at(strategy, pattern), squared):
            theorem = "Theorem 3 (Algorithm 4), attained by a pattern"
            return Sensitivity(math.sqrt(squared), EXACT, theorem)
    return Sensitivity(math.sqrt(squared), UPPER_BOUND, "Theorem 3 (Algorithm 4)")


def chain_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Exact when `num_bands <= 2 min_separation`, or for at most two participations.

    Then only neighbouring participations interact, so the sum over a pattern r_1 < r_2 < .. is
    `sum X[r, r] + 2 sum |X[r_m, r_{m+1}]|`, a chain: a dynamic programme over (last participation,
    count) attains the maximum of Proposition E.1, which Algorithm 4 only bounds. It is the
    sensitivity also where X is negative: contributions of alternating sign, where needed, make
    every term of a chain positive. Time: O(n k (num_bands - b)).
    """
    n = strategy.num_rounds
    b, k = _separation_and_cap(strategy, min_separation, max_participations)
    if strategy.num_bands > 2 * b and k > 2:
        raise BandMFError(
            f"The chain programme needs num_bands <= 2 min_separation={2 * b} or at most two "
            "participations; use `general_min_separation`. Found "
            f"num_bands={strategy.num_bands}, max_participations={k}."
        )
    diagonal = strategy.gram_diagonal(0)
    neighbours = _gram_diagonals(strategy, range(b, min(strategy.num_bands, n)))
    far = max(b, strategy.num_bands)  # From here on X vanishes: any earlier end will do.
    best = diagonal  # Best sum over patterns that end at each round, with one participation.
    overall = best.max()
    for _ in range(k - 1):
        extended = diagonal.copy()
        if far < n:
            extended[far:] += np.maximum.accumulate(best)[: n - far]
        for gap, entries in neighbours.items():
            with_gap = diagonal[gap:] + best[: n - gap] + 2.0 * np.abs(entries)
            np.maximum(extended[gap:], with_gap, out=extended[gap:])
        best = extended
        overall = max(overall, best.max())
    return Sensitivity(
        math.sqrt(overall), EXACT, "Proposition E.1 by the chain programme, attained by signs"
    )


def toeplitz_participation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity | None:
    """Returns the sensitivity of a Toeplitz strategy in O(n log k), None for others.

    For both schemas, exactly or at least b apart: exact if the coefficients are non-negative and
    never increase, a bound otherwise. Let c be such coefficients and p_1 < p_2 < .. a pattern.
    For i >= j, X[p_i, p_j] is the sum of `c_l c_(l + p_i - p_j)` over `l < n - p_i`: it can only
    grow when p_i or p_i - p_j shrink, and these are at least `(i - 1) b` and `(i - j) b`. So the
    pattern 0, b, 2 b, .. has the largest entries of X one by one, and Proposition E.1 is tight
    (Kalinin & Lampert, Theorem 2). Other coefficients are at most their majorant
    `max(|c_j|, |c_(j+1)|, ..)`, which never increases; its sensitivity bounds theirs.
    """
    c = strategy.toeplitz_coefficients
    if c is None:
        return None
    n = strategy.num_rounds
    b, k = _separation_and_cap(strategy, min_separation, max_participations)
    padded = np.zeros(n)
    padded[: c.size] = c
    majorant = np.maximum.accumulate(np.abs(padded[::-1]))[::-1]
    bound = math.sqrt(evenly_spaced(majorant, b, k)[0])
    attained = math.sqrt(evenly_spaced(padded, b, k)[0])
    if attained >= bound * (1.0 - 1e-12):
        return Sensitivity(bound, EXACT, "Toeplitz with coefficients >= 0 that never increase")
    return Sensitivity(bound, UPPER_BOUND, "Toeplitz, by the majorant of its coefficients")


def evenly_spaced(c: np.ndarray, stride: int, count: int) -> tuple[float, np.ndarray]:
    """Returns `|C u|^2` for u = 1 in `count` rounds from 0 on, `stride` apart; its gradient in c.

    C is the Toeplitz matrix of c, of as many entries as there are rounds. O(n log(count)) time.
    """
    sums = _strided_sums(c[::-1], stride, count, c.size)
    return float(sums @ sums), 2.0 * _strided_sums(sums[::-1], stride, count, c.size)


def vec_sens(v: np.ndarray, min_separation: int, max_participations: int) -> np.ndarray:
    """Algorithm 3 (VecSens): max of `<v, u>` over patterns with at most k separated participations.

    Args:
      v: Array whose last axis runs over rounds; leading axes are independent problems.
      min_separation: b.
      max_participations: k.

    Returns:
      The maxima, of the shape of `v` without its last axis. O(size of v times k) time; the factor k
      disappears when the separation alone allows no more than k participations.
    """
    v = np.asarray(v, dtype=np.float64)
    n = v.shape[-1]
    b = _checks.positive_int("min_separation", min_separation)
    k = _checks.positive_int("max_participations", max_participations)
    rounds = np.ascontiguousarray(np.moveaxis(v, -1, 0))
    # F[i, m]: best from round i on with at most m participations. Only b rows of F are live: slot
    # i % b holds F[i + b] until F[i] replaces it. Column 0 (no participation left) stays zero.
    # Without a cap that binds one column is enough: F[i] = max(v_i + F[i + b], F[i + 1]).
    cap_binds = k < ceil_div(n, b)
    left, after = (slice(1, None), slice(-1)) if cap_binds else (slice(None), slice(None))
    live = np.zeros((b, k + 1 if cap_binds else 1, *v.shape[:-1]))
    following = np.zeros_like(live[0])
    for i in range(n - 1, -1, -1):
        slot = live[i % b]
        np.maximum(rounds[i] + slot[after], following[left], out=slot[left])
        following = slot
    return following[-1]


def _separation_and_cap(
    strategy: Strategy, min_separation: int, max_participations: int
) -> tuple[int, int]:
    """Returns (b, k), with k lowered to the participations that fit into training."""
    b = _checks.positive_int("min_separation", min_separation)
    k = _checks.positive_int("max_participations", max_participations)
    return b, min(k, ceil_div(strategy.num_rounds, b))


def _strided_sums(entries: np.ndarray, stride: int, count: int, size: int) -> np.ndarray:
    """Returns `sums[i] = entries[i] + entries[i + stride] + ..`, `count` terms, for i < size."""
    block = np.zeros(size)  # Sums of 1, 2, 4, .. terms; `count` is made up of such numbers.
    block[: entries.size] = entries
    sums, offset = np.zeros(size), 0
    while count and offset < size:
        if count & 1:
            sums[: size - offset] += block[offset:]
            offset += stride
        block[: max(0, size - stride)] += block[stride:]
        count, stride = count >> 1, 2 * stride
    return sums


def _gram_of_pattern(strategy: Strategy, pattern: np.ndarray) -> np.ndarray:
    """Returns X on an equally spaced pattern."""
    size, stride = pattern.size, int(pattern[1] - pattern[0]) if pattern.size > 1 else 1
    X = np.zeros((size, size))
    for offset in range(size):
        entries = strategy.gram_diagonal(offset * stride)[pattern[: size - offset]]
        index = np.arange(size - offset)
        X[index + offset, index] = X[index, index + offset] = entries
    return X


def _best_pattern(v: np.ndarray, min_separation: int, max_participations: int) -> np.ndarray:
    """Returns a pattern that attains `vec_sens` of a vector without negative entries."""
    n, b, k = v.size, min_separation, max_participations
    # best[m, i]: from step i on, with at most m participations.
    best = np.zeros((k + 1, n + b))
    for m in range(1, k + 1):
        with_i = v + best[m - 1, b : n + b]
        best[m, :n] = np.maximum.accumulate(with_i[::-1])[::-1]
    pattern, i, left = [], 0, k
    while left and i < n and best[left, i] > 0.0:
        if v[i] + best[left - 1, i + b] >= best[left, i]:
            pattern.append(i)
            i, left = i + b, left - 1
        else:
            i += 1
    return np.array(pattern, dtype=int)


def _gram_at(strategy: Strategy, pattern: np.ndarray) -> np.ndarray:
    """Returns X on any pattern."""
    X = np.zeros((pattern.size, pattern.size))
    for row, i in enumerate(pattern):
        for column, j in enumerate(pattern[: row + 1]):
            if i - j < strategy.num_bands:
                X[row, column] = X[column, row] = strategy.gram_diagonal(int(i - j))[j]
    return X


def _signs_attain(X: np.ndarray, squared: float) -> bool:
    """Whether contributions `+-u` with one unit vector u are seen to reach `sum |X| = squared`.

    Signs are chosen one after the other, each to suit the earlier ones. That finds them when they
    exist and all entries differ from zero; a miss only means that the bound is not called exact.
    """
    signs = np.ones(len(X))
    for j in range(1, len(X)):
        if signs[:j] @ X[:j, j] < 0.0:
            signs[j] = -1.0
    return bool(signs @ X @ signs >= squared * (1.0 - 1e-12))


def _gram_diagonals(strategy: Strategy, offsets: range) -> dict[int, np.ndarray]:
    """Returns diagonals of X; of a full X at once, which is faster than one by one."""
    if strategy.num_bands < strategy.num_rounds:
        return {offset: strategy.gram_diagonal(offset) for offset in offsets}
    X = strategy.gram()
    return {offset: np.diagonal(X, -offset) for offset in offsets}


def _gram_row_windows(strategy: Strategy) -> np.ndarray:
    """Returns the rows of X, each as the window of rounds in which it can be non-zero."""
    n, bands = strategy.num_rounds, strategy.num_bands
    if 2 * bands - 1 >= n:
        return strategy.gram()
    windows = np.zeros((n, 2 * bands - 1))
    for offset in range(bands):
        entries = strategy.gram_diagonal(offset)
        windows[: n - offset, bands - 1 + offset] = entries
        windows[offset:, bands - 1 - offset] = entries
    return windows
