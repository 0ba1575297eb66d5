"""Binary-tree aggregation as a strategy: Online TreeAgg and OptTreeAgg.

The tree matrix C_T has one row for every complete dyadic block `[a 2^h, (a + 1) 2^h)` of rounds
that fits into the n rounds, with ones in that block: a forest of complete binary trees, one for
every bit of n. (2052 rounds make a tree of 2048 leaves and one of 4; nodes that a padded tree would
add are never completed and never used.) The mechanism releases `C_T x + z` and estimates prefix
sums from it:

* "online" (Honaker; the TreeAgg of Kairouz et al.): the prefix sum at round t uses only nodes that
  are complete by then, each estimated from itself and the nodes below it;
* "full" (OptTreeAgg): the pseudo-inverse, optimal for squared error. `C_T^+ z` has the law of
  `C^-1 g` for the lower-triangular C with `C^T C = C_T^T C_T`, so it, too, can be streamed
  (Denisov et al.).

Both are `x_i = (g_i - sum_l w[i, l] S_l) / c_i` with one fresh Gaussian row `g_i` a round, where
S_l is the noise already spent on the left sibling of the height-l block on the path of leaf i:

        [       height 2       ]           leaf 6 = 110b: bits 2 and 1 are set, so its row of C is
        [ height 1 ][ height 1 ]           w[6, 2] on leaves 0..3, w[6, 1] on leaves 4..5,
        [0 ]  [1 ]  [2 ]  [3 ] ...         c_6 on leaf 6.

So a row of C is constant on O(log n) blocks and a round costs O(log n) rows of memory. To derive
the full estimator, note that `x = C^-1 g` has the density exp(-|C_T x|^2 / 2); integrating out the
future of round i leaves a quadratic form in x_i and the block sums of its past. See
`_full_estimator`.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.sensitivity import EXACT, UPPER_BOUND, Sensitivity
from bandmf_tf.factorization.strategies import DenseStrategy, InverseStream, Strategy
from bandmf_tf.factorization.workloads import Workload

ESTIMATORS = ("full", "online")

# The dynamic programme over participation patterns gives up beyond this many states in a round,
# which happens where a cap of dozens of participations meets a tiny separation on a long tree.
_MAX_STATES = 256


class TreeStrategy(Strategy):
    """Binary-tree aggregation over a forest of complete trees, streamed in O(log n) memory.

    The Gram matrix, hence every sensitivity, is that of the tree matrix C_T: X[i, j] counts the
    nodes that hold both leaves. For the full estimator this is `C^T C` of the streamed matrix. For
    the online estimator the streamed noise is a post-processing of `C_T x + z`, and the guarantee
    is that of `C_T x + z`, as in Kairouz et al.

    Args:
      num_rounds: Number of rounds n.
      estimator: "full" (OptTreeAgg) or "online" (Online TreeAgg).
      scale: Factor on C_T.
    """

    kind = "tree"
    parameters = ("num_rounds", "estimator", "scale")

    def __init__(self, num_rounds: int, estimator: str = "full", scale: float = 1.0):
        self._num_rounds = _checks.positive_int("num_rounds", num_rounds)
        if estimator not in ESTIMATORS:
            raise BandMFError(f"estimator must be one of {ESTIMATORS}. Found {estimator!r}.")
        self._estimator = estimator
        self._scale = _checks.positive_float("scale", scale)
        self._diagonal, self._block_weights = _coefficients(self._num_rounds, estimator)

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    @property
    def num_bands(self) -> int:
        return self._num_rounds

    @property
    def estimator(self) -> str:
        """How prefix sums are estimated: "full" or "online"."""
        return self._estimator

    @property
    def scale(self) -> float:
        """Factor on the tree matrix."""
        return self._scale

    @property
    def diagonal(self) -> np.ndarray:
        """The diagonal of the streamed matrix C, scale included."""
        return self._scale * self._diagonal

    @property
    def block_weights(self) -> np.ndarray:
        """`weights[i, l] = C[i, j]` for j in the left sibling block of height l, scale included."""
        return self._scale * self._block_weights

    def matmul(self, x: np.ndarray) -> np.ndarray:
        """Returns `C x` for the streamed lower-triangular C, in O(log n) operations an entry."""
        x = _checks.rows("x", x, self.num_rounds)
        y = np.empty_like(x)
        sums = np.zeros((self._block_weights.shape[1], *x.shape[1:]))
        for i, row in enumerate(x):
            y[i] = self._diagonal[i] * row + np.tensordot(self._block_weights[i], sums, axes=1)
            _push(sums, i, row)
        return self._scale * y

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        """Returns `C^-1 z` for the streamed lower-triangular C, in O(log n) operations an entry."""
        z = _checks.rows("z", z, self.num_rounds)
        stream = self.inverse_stream()
        return np.stack([stream.next_row(row) for row in z])

    def inverse_stream(self) -> InverseStream:
        """Returns a stream from rows of z to rows of `C^-1 z`, in O(log n) rows of memory."""
        return TreeInverseStream(self)

    def row(self, i: int) -> np.ndarray:
        i = self._checked_round(i)
        entries = np.zeros(i + 1)
        entries[i] = self._diagonal[i]
        for level, weight in enumerate(self._block_weights[i]):
            if i >> level & 1:
                start = ((i >> level) - 1) << level
                entries[start : start + (1 << level)] = weight
        return self._scale * entries

    def gram_diagonal(self, offset: int) -> np.ndarray:
        offset = self._checked_offset(offset)
        j = np.arange(self.num_rounds - offset)
        lowest_common = _bit_length(j ^ (j + offset))
        heights = _tree_heights(self.num_rounds)
        same_tree = heights[j] >= lowest_common
        count = np.where(same_tree, heights[j] - lowest_common + 1, 0)
        return self._scale**2 * count.astype(np.float64)

    def scaled(self, factor: float) -> TreeStrategy:
        factor = _checks.positive_float("factor", factor)
        return TreeStrategy(self._num_rounds, self._estimator, self._scale * factor)

    def released(self) -> Strategy:
        """Returns the matrix C of the stream as a dense strategy, in O(n^2) memory.

        The sensitivity of a tree is the classic one, that of its nodes. What the online estimator
        releases, x + C^-1 z, is less sensitive; for the full estimator both are the same.
        """
        return DenseStrategy(self.materialize())

    def leading_block(self, num_rounds: int) -> TreeStrategy:
        """Returns a strategy whose sensitivity bounds that of the first `num_rounds` rounds.

        The online tree of the first rounds is the tree of those rounds alone, because it uses only
        nodes that are complete. The full estimator looks at the whole tree: it is returned as it
        is, and its sensitivity bounds that of its first rounds.
        """
        t = self._checked_block(num_rounds)
        return TreeStrategy(t, "online", self._scale) if self._estimator == "online" else self

    @property
    def rows_in_memory(self) -> int:
        return self._block_weights.shape[1]

    def _round_variances(self, workload: Workload) -> np.ndarray:
        """Propagates the covariance of (block sums, velocity, model) through the rounds."""
        diagonal, weights = self.diagonal, self.block_weights
        levels = weights.shape[1]
        velocity, model = levels, levels + 1
        covariance = np.zeros((levels + 2, levels + 2))
        variances = np.empty(self.num_rounds)
        for i in range(self.num_rounds):
            # x = (g - w . sums) / c as a row over the old state, plus fresh noise of deviation
            # 1 / c.
            x_row = np.zeros(levels + 2)
            x_row[:levels] = -weights[i] / diagonal[i]
            transition = np.eye(levels + 2)
            fresh = np.zeros(levels + 2)
            rate = workload.learning_rates[i]
            transition[velocity] = x_row
            transition[velocity, velocity] += workload.momentum
            transition[model] = rate * transition[velocity]
            transition[model, model] += 1.0
            fresh[velocity], fresh[model] = 1.0, rate
            merged = 0
            while i >> merged & 1:
                merged += 1
            transition[:merged] = 0.0
            if merged < levels:
                transition[merged] = x_row
                transition[merged, :merged] += 1.0
                fresh[merged] = 1.0
            covariance = transition @ covariance @ transition.T
            covariance += np.outer(fresh, fresh) / diagonal[i] ** 2
            variances[i] = covariance[model, model]
        return variances

    def min_separation_sensitivity(
        self, min_separation: int, max_participations: int
    ) -> Sensitivity:
        """Exact, as X >= 0; where that is too hard to compute, a bound height by height."""
        arguments = (self.num_rounds, min_separation, max_participations)
        squared = min_separation_squared_sensitivity(*arguments)
        if squared is not None:
            value = self._scale * math.sqrt(squared)
            return Sensitivity(value, EXACT, "Proposition E.1 (X >= 0) by the tree programme")
        value = self._scale * math.sqrt(min_separation_squared_bound(*arguments))
        theorem = "Proposition E.1, every height of the tree on its own"
        return Sensitivity(value, UPPER_BOUND, theorem)

    def node_matrix(self) -> np.ndarray:
        """Returns the tree matrix C_T (nodes x rounds) as a dense matrix; for tests, pictures."""
        n, rows = self.num_rounds, []
        height = 0
        while 1 << height <= n:
            for start in range(0, n - (1 << height) + 1, 1 << height):
                row = np.zeros(n)
                row[start : start + (1 << height)] = self._scale
                rows.append(row)
            height += 1
        return np.stack(rows)


class TreeInverseStream(InverseStream):
    """Streams `C^-1 z` of a tree: remembers the sums over the left siblings of the current path."""

    def __init__(self, strategy: TreeStrategy):
        super().__init__(strategy.num_rounds)
        self._diagonal = strategy.diagonal
        self._block_weights = strategy.block_weights
        self._sums: np.ndarray | None = None

    def _solve(self, i: int, noise_row: np.ndarray) -> np.ndarray:
        if self._sums is None:
            self._sums = np.zeros((self._block_weights.shape[1], *noise_row.shape))
        past = np.tensordot(self._block_weights[i], self._sums, axes=1)
        result = (noise_row - past) / self._diagonal[i]
        _push(self._sums, i, result)
        return result


def min_separation_squared_sensitivity(
    num_rounds: int, min_separation: int, max_participations: int
) -> int | None:
    """Returns max over patterns of `sum_nodes (participations in the node)^2`; None if too hard.

    This is the squared sensitivity of the unscaled tree matrix under b-min-separation with at most
    `max_participations`: X is non-negative, so Proposition E.1 is tight. The dynamic programme goes
    over the rounds in order (Kairouz et al. go over the nodes). A participation at round p adds
    `2 c + 1` for every node that holds p, where c counts the node's participations so far. Only
    nodes longer than the separation can have c > 0, so a state is `(c in each of the few long nodes
    on the path of p, participations used, value)`; dominated states are dropped.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    b = _checks.positive_int("min_separation", min_separation)
    cap = _checks.positive_int("max_participations", max_participations)
    cap_binds = cap < ceil_div(n, b)
    heights = _tree_heights(n)
    first_long = b.bit_length()  # The smallest height with 2^height > b.
    levels = np.arange(first_long, heights.max() + 1)
    arriving: dict[int, list[np.ndarray]] = defaultdict(list)
    arriving[0].append(np.zeros((1, levels.size + 2), dtype=np.int64))
    best = 0

    def send(states: np.ndarray, start: int, end: int) -> None:
        nonlocal best
        best = max(best, int(states[:, -1].max(initial=0)))
        if end < n and len(states):
            moved = states.copy()
            moved[:, :-2] *= start >> levels == end >> levels  # Counts of nodes left behind go.
            arriving[end].append(moved)

    for i in range(n):
        if i not in arriving:
            continue
        in_tree = levels <= heights[i]
        node_ends = ((i >> levels) + 1) << levels
        states = np.concatenate(arriving.pop(i))
        if len(states) > _MAX_STATES:
            return None
        future = np.where(in_tree, ceil_div(node_ends - i, b), 0)
        states = _undominated(states, future, cap if cap_binds else n)
        send(states, i, i + 1)
        taken = states[states[:, -2] < cap] if cap_binds else states.copy()
        short_nodes = min(int(heights[i]), first_long - 1) + 1
        taken[:, -1] += short_nodes + (2 * taken[:, :-2] + 1) @ in_tree
        taken[:, -2] += cap_binds
        taken[:, :-2] += in_tree
        send(taken, i, i + b)
    return best


def _undominated(states: np.ndarray, future: np.ndarray, cap: int) -> np.ndarray:
    """Drops states that another state, with no more participations used, is sure to match.

    A node in which f participations follow adds `2 f c` on account of its count c, and f is at most
    `future` (what fits into the rest of the node) and what the cap leaves. So a state whose count
    is larger by d can catch up by at most `2 f d`.
    """
    if len(states) == 1:
        return states
    counts, used, values = states[:, :-2], states[:, -2], states[:, -1]
    order = np.lexsort((used, -counts.sum(axis=1), -values))
    counts, used, values = counts[order], used[order], values[order]
    catch_up = np.zeros((len(states), len(states)), dtype=np.int64)
    for count, fits in zip(counts.T, future, strict=True):
        ahead = np.maximum(count[:, None] - count[None, :], 0)
        catch_up += 2 * ahead * np.minimum(fits, cap - used)[:, None]
    dominated = (values[None, :] - values[:, None] >= catch_up) & (used[None, :] <= used[:, None])
    # Dominance is transitive, so an earlier state may rule out a later one even if dropped itself.
    return states[order[~np.tril(dominated, -1).any(axis=1)]]


def min_separation_squared_bound(
    num_rounds: int, min_separation: int, max_participations: int
) -> int:
    """Returns an upper bound of `min_separation_squared_sensitivity` in O(log n).

    Every height is maximised on its own: a node of `2^h` rounds holds at most `m = ceil(2^h / b)`
    participations, and the sum of squares of counts below m is largest when as many as possible
    equal m.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    b = _checks.positive_int("min_separation", min_separation)
    cap = _checks.positive_int("max_participations", max_participations)
    total = 0
    for height in range(n.bit_length()):
        most = min(cap, ceil_div(1 << height, b))
        full, rest = divmod(min(cap, ceil_div(n, b), (n >> height) * most), most)
        total += full * most**2 + rest**2
    return total


def _coefficients(n: int, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the diagonal (n,) and the weights on left sibling blocks (n, levels) of C."""
    heights = _tree_heights(n)
    num_levels = int(heights.max())
    diagonal, weights = np.empty(n), np.zeros((n, num_levels))
    build = _full_estimator if estimator == "full" else _online_estimator
    for height in np.unique(heights):
        leaves = np.flatnonzero(heights == height)  # Trees differ in height: one tree a height.
        diagonal[leaves], weights[leaves, :height] = build(int(height))
    return diagonal, weights


def _full_estimator(height: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of the full estimator for one complete tree.

    Integrating a complete future subtree of height h out leaves `alpha_h s^2`, s its sum. For round
    i, go down its path from the root with the quadratic form `p t^2 + 2 t m(S)` in t = x_i +
    (future sums below this level), m linear in the past sums S_l of the path's nodes: a node adds
    (S_l + t)^2, and a future right sibling, if i lies in the left half, is integrated out. What
    remains at the leaf is `(c x_i + m(S) / c)^2`.
    """
    alpha = _block_precisions(height)
    leaves = np.arange(1 << height)
    p = np.zeros(leaves.size)
    m = np.zeros((leaves.size, height + 1))
    for level in range(height, 0, -1):
        p += 1.0
        m[:, level] += 1.0
        in_left_half = (leaves >> (level - 1) & 1) == 0
        shrink = np.where(in_left_half, alpha[level - 1] / (p + alpha[level - 1]), 1.0)
        p *= shrink
        m *= shrink[:, None]
    diagonal = np.sqrt(p + 1.0)
    # The left sibling of height l lies in the past of every path node above height l.
    on_nodes = m[:, 1:] / diagonal[:, None]
    on_blocks = np.cumsum(on_nodes[:, ::-1], axis=1)[:, ::-1]
    return diagonal, on_blocks * _past_blocks(height)


def _online_estimator(height: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of the online estimator for one complete tree.

    Round i completes the nodes of heights 0 .. h that end at i. Each is estimated by weighing
    itself with 1 / alpha against the sum of its two halves; the right half is fresh, the left half,
    of height l, is the block sum S_l and was already in the previous prefix sum, from which it is
    taken out again.
    """
    alpha = _block_precisions(height)
    size = 1 << height
    diagonal, weights = np.ones(size), np.zeros((size, height))
    completed = _bit_length((np.arange(size) + 1) & -(np.arange(size) + 1)) - 1
    for top in range(1, height + 1):
        own = 1.0 / alpha[: top + 1]
        from_halves = np.cumprod((1.0 - own[1:])[::-1])[::-1]  # Products of levels l + 1 .. top.
        fresh = own * np.append(from_halves, 1.0)
        deviation = np.sqrt(np.sum(fresh**2))
        ending = completed == top
        diagonal[ending] = 1.0 / deviation
        weights[ending, :top] = (1.0 - from_halves) / deviation
    return diagonal, weights


def _block_precisions(height: int) -> np.ndarray:
    """Returns alpha_h: the precision of a block's sum given its own node and all nodes below it."""
    alpha = np.ones(height + 1)
    for h in range(1, height + 1):
        alpha[h] = 1.0 + alpha[h - 1] / 2.0
    return alpha


def _past_blocks(height: int) -> np.ndarray:
    """Returns the mask (leaves, levels) of left siblings that exist: the bits of a leaf's index."""
    return (np.arange(1 << height)[:, None] >> np.arange(height)[None, :] & 1).astype(np.float64)


def _push(sums: np.ndarray, i: int, row: np.ndarray) -> None:
    """Updates the left-sibling block sums after round i, in place.

    Round i completes the blocks of heights 0 .. h ending at i; their sum becomes the left sibling
    of height h for the rounds that follow, and the lower blocks, merged into it, start anew.
    """
    total = np.array(row)
    level = 0
    while i >> level & 1:
        total += sums[level]
        sums[level] = 0.0
        level += 1
    if level < len(sums):
        sums[level] = total


def _tree_heights(n: int) -> np.ndarray:
    """Returns, for each of the n leaves, the height of its tree in the forest."""
    heights = np.empty(n, dtype=np.int64)
    start = 0
    for height in range(n.bit_length() - 1, -1, -1):
        if n >> height & 1:
            heights[start : start + (1 << height)] = height
            start += 1 << height
    return heights


def _bit_length(values: np.ndarray) -> np.ndarray:
    return np.frexp(values.astype(np.float64))[1]
