"""Sensitivity of a strategy under the participation schemas of the paper.

The sensitivity is the largest `|C u|_F` over all differences u of neighbouring streams: rows of
norm at most 1 (the clip norm is factored out) in the steps where one unit took part, zero
elsewhere. With X = C^T C, Proposition E.1 bounds its square by the maximum over participation
patterns of `sum_{i, j in pattern} |X[i, j]|`, with equality when those entries of X are
non-negative, for any dimension d.

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

from bandmf_tf import _checks, trees
from bandmf_tf.strategies import Strategy

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


def single_participation(strategy: Strategy) -> Sensitivity:
    """Returns the sensitivity when every unit takes part at most once: the largest column norm."""
    return Sensitivity(
        float(strategy.column_norms().max()),
        EXACT,
        "largest column norm (Definition of sensitivity)",
    )


def fixed_epochs(strategy: Strategy, min_separation: int, max_participations: int) -> Sensitivity:
    """Returns the sensitivity under (k, b)-participation: at most k, exactly b steps apart.

    Cost: O(n k) Gram entries.
    """
    b = _checks.positive_int("min_separation", min_separation)
    k = _checks.positive_int("max_participations", max_participations)
    n = strategy.num_rounds
    k = min(k, -(-n // b))
    # total[i] = sum over the pattern {i, i + b, ..} of |X|. Patterns cut off by the end of training
    # are shorter, which the zero padding takes care of.
    total = np.zeros(n)
    non_negative = True
    for offset in range(k):
        if offset * b >= n:
            break
        entries = strategy.gram_diagonal(offset * b)
        non_negative &= bool(np.all(entries >= 0.0))
        padded = np.zeros(n + k * b)
        padded[: entries.size] = np.abs(entries)
        pairs = sum(padded[first * b : first * b + n] for first in range(k - offset))
        total += pairs if offset == 0 else 2.0 * pairs
    value = math.sqrt(total.max())
    if strategy.num_bands <= b:
        return Sensitivity(value, EXACT, "Proposition B.1 (num_bands <= min_separation)")
    if non_negative:
        return Sensitivity(value, EXACT, "Proposition E.1 (X is non-negative on every pattern)")
    return Sensitivity(value, UPPER_BOUND, "Proposition E.1 (X has negative entries on a pattern)")


def min_separation_participation(
    strategy: Strategy, min_separation: int, max_participations: int | None = None
) -> Sensitivity:
    """Returns the sensitivity under b-min-separation with at most k' participations.

    Takes the sharpest result that applies: Theorem 2 when the strategy has at most b bands; the
    tree programme for tree aggregation; the chain programme when it has at most 2 b bands;
    Theorem 3 otherwise.

    Args:
      strategy: The strategy.
      min_separation: b, the smallest number of steps between two participations.
      max_participations: k', the cap on participations; None stands for what the separation allows,
        ceil(n / b).
    """
    n = strategy.num_rounds
    b = _checks.positive_int("min_separation", min_separation)
    k = -(-n // b)
    if max_participations is not None:
        k = min(k, _checks.positive_int("max_participations", max_participations))
    if k == 1:
        return single_participation(strategy)
    if strategy.num_bands <= b:
        return banded_min_separation(strategy, b, k)
    if isinstance(strategy, trees.TreeStrategy):
        squared = trees.min_separation_squared_sensitivity(n, b, k)
        if squared is not None:
            value = strategy.scale * math.sqrt(squared)
            return Sensitivity(value, EXACT, "Proposition E.1 (X >= 0) by the tree programme")
    if strategy.num_bands <= 2 * b:
        return chain_min_separation(strategy, b, k)
    return general_min_separation(strategy, b, k)


def banded_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Algorithm 5: exact for strategies with at most `min_separation` bands (Theorem 2)."""
    if strategy.num_bands > min_separation:
        raise ValueError(
            f"Theorem 2 needs num_bands <= min_separation={min_separation}; use "
            f"`general_min_separation`. Found num_bands={strategy.num_bands}."
        )
    squared = vec_sens(strategy.gram_diagonal(0), min_separation, max_participations)
    return Sensitivity(math.sqrt(squared), EXACT, "Theorem 2 (num_bands <= min_separation)")


def general_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Algorithm 4: an upper bound for any strategy (Theorem 3).

    Row i of |X| is maximised over patterns on its own, then the rows are. Vectorised over all rows:
    O(n w) memory and O(n w k) time, where w = min(n, 2 num_bands - 1) is the width of a row of X.
    """
    rows = _gram_row_windows(strategy)
    per_row = vec_sens(np.abs(rows), min_separation, max_participations)
    squared = vec_sens(per_row, min_separation, max_participations)
    return Sensitivity(math.sqrt(squared), UPPER_BOUND, "Theorem 3 (Algorithm 4)")


def chain_min_separation(
    strategy: Strategy, min_separation: int, max_participations: int
) -> Sensitivity:
    """Maximises `sum_{i, j} |X[i, j]|` exactly when `num_bands <= 2 min_separation`.

    Then only neighbouring participations interact, so the sum over a pattern r_1 < r_2 < .. is
    `sum X[r, r] + 2 sum |X[r_m, r_{m+1}]|`, a chain: a dynamic programme over (last participation,
    count) attains the maximum of Proposition E.1, which Algorithm 4 only bounds. Time:
    O(n k (num_bands - b)).
    """
    n, b, k = strategy.num_rounds, min_separation, max_participations
    if strategy.num_bands > 2 * b:
        raise ValueError(
            f"The chain programme needs num_bands <= 2 min_separation={2 * b}; use "
            f"`general_min_separation`. Found num_bands={strategy.num_bands}."
        )
    diagonal = strategy.gram_diagonal(0)
    neighbours = {g: strategy.gram_diagonal(g) for g in range(b, min(strategy.num_bands, n))}
    non_negative = all(bool(np.all(entries >= 0.0)) for entries in neighbours.values())
    best = diagonal.copy()  # Best sum over patterns that end at each step, with one participation.
    overall = best.max()
    for _ in range(k - 1):
        extended = diagonal.copy()
        far = strategy.num_bands  # From here on X vanishes: any earlier end will do.
        if far < n:
            extended[far:] += np.maximum.accumulate(best)[: n - far]
        for gap, entries in neighbours.items():
            with_gap = diagonal[gap:] + best[: n - gap] + 2.0 * np.abs(entries)
            np.maximum(extended[gap:], with_gap, out=extended[gap:])
        best = extended
        overall = max(overall, best.max())
    value = math.sqrt(overall)
    if non_negative:
        return Sensitivity(value, EXACT, "Proposition E.1 (X >= 0) by the chain programme")
    return Sensitivity(value, UPPER_BOUND, "Proposition E.1 by the chain programme")


def vec_sens(v: np.ndarray, min_separation: int, max_participations: int) -> np.ndarray:
    """Algorithm 3 (VecSens): max of `<v, u>` over patterns with at most k separated participations.

    Args:
      v: Array whose last axis runs over steps; leading axes are independent problems.
      min_separation: b.
      max_participations: k.

    Returns:
      The maxima, of the shape of `v` without its last axis. O(size of v times k) time.
    """
    v = np.asarray(v, dtype=np.float64)
    n = v.shape[-1]
    b = _checks.positive_int("min_separation", min_separation)
    k = min(_checks.positive_int("max_participations", max_participations), -(-n // b))
    # F[i, m]: best from step i on with at most m participations. Only b rows of F are live; slot
    # i % b holds F[i + b] until F[i] replaces it. Column 0 (no participation left) stays zero.
    live = np.zeros((b, k + 1, *v.shape[:-1]))
    following = np.zeros((k + 1, *v.shape[:-1]))
    for i in range(n - 1, -1, -1):
        slot = live[i % b]
        current = np.empty_like(following)
        current[0] = 0.0
        np.maximum(v[..., i] + slot[:-1], following[1:], out=current[1:])
        live[i % b] = following = current
    return following[k]


def _gram_row_windows(strategy: Strategy) -> np.ndarray:
    """Returns the rows of X, each as the window of steps in which it can be non-zero."""
    n, bands = strategy.num_rounds, strategy.num_bands
    if 2 * bands - 1 >= n:
        return strategy.gram()
    windows = np.zeros((n, 2 * bands - 1))
    for offset in range(bands):
        entries = strategy.gram_diagonal(offset)
        windows[: n - offset, bands - 1 + offset] = entries
        windows[offset:, bands - 1 - offset] = entries
    return windows
