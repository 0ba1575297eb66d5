"""Replicas of participation patterns: of bins, whatever the strategy, and of Markov chains.

`certificates.py` says what replicas are for: l patterns x_1 .. x_l with the law
exp(sum_(i < j) <C x_i, C x_j>) times their own, up to a bounded weight, and an output around the
sum of C x_i. Everything here is in units of the noise: the Gram matrices are C^T C / noise^2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import scipy

from bandmf_tf.accounting.certificates import Replicas

# Draws at a time, and the numbers that they may have in one array.
_CHUNK, _CHUNK_NUMBERS = 8192, 2**21

# Columns that are multiplied at a time, as a dense matrix; at least as many as there are bands.
_LEAST_BLOCK = 32

# Limits on replicas of chains: multisets, their steps in all rounds, numbers in tables.
_MAX_MULTISETS = 2**18
_MAX_STEPS = 2**29
_MAX_TABLE = 2**26


class BinReplicas(Replicas):
    """Replicas of a pattern that is one of b equally likely ones, the bins.

    With m_i = C x_i and G_ij = <m_i, m_j>, an output y enters by u = (<m_i, y>)_i alone. It is
    normal, of covariance G, around the sum of the rows of G that belong to the replicas, and

        L = log mean_i exp(u_i - G_ii / 2).

    Replicas i_1, i_2, .. are drawn one after the other: given those before, i_j = i has a
    probability in proportion to exp(sum_(s < j) G_(i_s, i)). The product of the proportions is
    exp(S), so the weight is the product over j >= 2 of their means

        N_j = mean_i exp(sum_(s < j) G_(i_s, i)) <= max_k mean_i exp((j - 1) G_(k, i)),

    by Hoelder's inequality, for a product of j - 1 factors. Bins without rounds have m_i = 0; all
    of them together are one bin, the last, that counts as many times in means.

    Args:
        gram: G of the bins with rounds, of shape (b, b) if there are no others.
        order: Number of replicas.
        num_idle: Number of bins without rounds.
    """

    def __init__(self, gram: np.ndarray, order: int, num_idle: int = 0):
        self.order = order
        self.num_bins = len(gram) + num_idle
        self._gram = np.pad(gram, (0, 1)) if num_idle else gram
        self._counts = np.ones(len(self._gram))
        self._counts[len(gram) :] = num_idle
        self.chunk = max(64, min(_CHUNK, _CHUNK_NUMBERS // len(self._gram)))
        self.log_largest_weight = math.fsum(
            float(np.max(scipy.special.logsumexp(j * self._gram, axis=1, b=self._counts)))
            - math.log(self.num_bins)
            for j in range(1, order)
        )

    @functools.cached_property
    def _factor(self) -> np.ndarray:
        """F with F F^T = G; orders that are only compared never need it."""
        eigenvalues, vectors = np.linalg.eigh(self._gram)
        return vectors * np.sqrt(np.maximum(eigenvalues, 0.0))

    def sample(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        b = len(self._gram)
        shift = self._gram[np.minimum(rng.integers(self.num_bins, size=size), b - 1)]
        log_weights = np.zeros(size)
        for _ in range(1, self.order):
            largest = shift.max(axis=1)
            sums = np.cumsum(self._counts * np.exp(shift - largest[:, None]), axis=1)
            log_weights += np.log(sums[:, -1] / self.num_bins) + largest
            coins = rng.random(size) * sums[:, -1]
            chosen = np.sum(sums <= coins[:, None], axis=1)
            shift += self._gram[np.minimum(chosen, b - 1)]
        u = shift + rng.standard_normal((size, b)) @ self._factor.T
        u -= np.diag(self._gram) / 2
        largest = u.max(axis=1)
        means = np.mean(np.exp(u - largest[:, None]) * self._counts, axis=1) * (b / self.num_bins)
        return np.log(means) + largest, log_weights


@dataclasses.dataclass(frozen=True)
class Chain:
    """A participation pattern as a Markov chain with one state in which a coin decides.

    Attributes:
        initial: Probabilities of the states before the first round.
        coins: Probability to take part in each round, if that finds the chain in state 0, `ready`.
            In any other state the example does not take part.
        kinds: Which rules of `following` and `joined` hold in each round.
        following: The next state of every state after not taking part, a row for each kind.
        joined: The next state after taking part, of each kind.
        since: How many rounds ago the example took part, for states in which its column still
            overlaps with that of the current round; 0 for the others.
    """

    initial: np.ndarray
    coins: np.ndarray
    kinds: np.ndarray
    following: np.ndarray
    joined: np.ndarray
    since: np.ndarray


class ChainReplicas(Replicas):
    """Replicas of a Markov chain of participations, for a banded strategy; exactly proportional.

    Columns of one replica that are in use at the same time must not overlap, so that S is a sum
    over pairs of participations of *different* replicas: <c_s, c_t> if one takes part in round s
    and the other in round t. What of the past matters to round t is how many replicas are in which
    state, a multiset. If e of them are ready and j of these take part, the replicas gain

        binomial(e, j) p^j (1 - p)^(e - j) exp(j a_t + j (j - 1) / 2 |c_t|^2),    p = coins[t],

    where a_t is the sum of <c_t, c_(t - since)> over the other replicas. Backward from the last
    round this gives the sum over all futures of a multiset, hence the law of j given the multiset,
    from which patterns are drawn forward, and E_Q r^l, which is every weight.

    Args:
        columns: |C| / noise as a sparse matrix in compressed columns.
        states: What states the replicas can be in.
        loss: From u = (<c_t, y> - |c_t|^2 / 2)_t, one column a draw, to L.
    """

    def __init__(
        self,
        columns: scipy.sparse.csc_matrix,
        states: Multisets,
        loss: Callable[[np.ndarray], np.ndarray],
    ):
        n = columns.shape[1]
        self.order = states.order
        self.chunk = max(64, min(_CHUNK, _CHUNK_NUMBERS // n))
        self._columns, self._rows = columns, columns.T.tocsr()
        self._blocks = _dense_blocks(columns)
        self._loss = loss
        self._half = np.asarray(columns.multiply(columns).sum(axis=0)).ravel() / 2
        self._states = states
        with np.errstate(over="ignore", invalid="ignore"):  # Largest weights may be no number.
            self._joining = self._backward()

    @staticmethod
    def fits(num_states: int, num_rounds: int, order: int) -> bool:
        """Whether so many replicas are few enough, in memory and time."""
        multisets = math.comb(num_states + order - 1, order)
        ready = math.comb(num_states + order - 2, order - 1)
        return (
            multisets <= _MAX_MULTISETS
            and multisets * num_rounds <= _MAX_STEPS
            and ready * num_rounds * order <= _MAX_TABLE
        )

    def _backward(self) -> list[np.ndarray]:
        """Returns P(more than i of the replicas join) for every round, i < order, and multiset.

        A column for each multiset with ready replicas and one, of zeros, for all the others.
        """
        states = self._states
        overlaps = _overlaps(self._rows, states.since_counts.shape[1])
        values, log_scale, tables = np.ones(states.count), 0.0, []
        for t in reversed(range(len(self._half))):
            nearby = states.since_counts @ overlaps[:, t]
            following, log_coins = states.following_in(t), states.log_coins_in(t)
            futures = np.empty((self.order + 1, len(states.ready)))
            for j in range(self.order + 1):
                gain = log_coins[j] + j * nearby + j * (j - 1) * self._half[t]
                futures[j] = np.exp(gain) * values[following[j, states.ready]]
            above = np.cumsum(futures[::-1], axis=0)[::-1]
            values = values[following[0]]
            values[states.ready] = above[0]
            tables.append(np.pad(above[1:] / above[0], ((0, 0), (0, 1))))
            scale = float(values.max())
            values /= scale
            log_scale += math.log(scale)
        weights = states.initial * values
        total = float(weights.sum())
        self._initial = np.cumsum(weights) / total
        log_weight = math.log(total) + log_scale
        self.log_largest_weight = log_weight if math.isfinite(log_weight) else math.inf
        return tables[::-1]

    def sample(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        states = self._states
        counts = np.empty((len(self._half), size))
        state = np.searchsorted(self._initial, rng.random(size), side="right")
        state = np.minimum(state, states.count - 1)
        for t, joining in enumerate(self._joining):
            probabilities = joining[:, states.place[state]]
            joined = np.sum(rng.random(size) < probabilities, axis=0)
            state = states.following_in(t)[joined, state]
            counts[t] = joined
        y = rng.standard_normal(counts.shape)
        y += (self._columns @ scipy.sparse.csc_matrix(counts)).toarray()
        u = np.empty_like(y)
        for start, block in self._blocks:
            height, width = block.shape
            u[start : start + width] = block.T @ y[start : start + height]
        u -= self._half[:, None]
        return self._loss(u), np.full(size, self.log_largest_weight)


class Multisets:
    """How many of `order` replicas are in which state of a chain, numbered.

    Attributes:
        order: Number of replicas.
        count: Number of multisets.
        initial: Probabilities before the first round, of independent replicas.
        ready: Multisets with a ready replica.
        place: Where a multiset is among those; their number for the others.
        since_counts: How many replicas took part 1, 2, .. rounds ago, of those.
    """

    def __init__(self, chain: Chain, order: int):
        self.order = order
        self._chain = chain
        m = len(chain.initial)
        members = np.array(list(itertools.combinations_with_replacement(range(m), order)))
        self._ranks = np.array([[math.comb(v + i, i + 1) for v in range(m)] for i in range(order)])
        members = members[np.argsort(self._rank(members))]
        self.count = len(members)
        self.initial = _multinomial(members, chain.initial)
        num_ready = np.sum(members == 0, axis=1)
        self._following = [
            self._moved(members, num_ready, following, joined)
            for following, joined in zip(chain.following, chain.joined, strict=True)
        ]
        self.ready = np.flatnonzero(num_ready)
        self.place = np.full(self.count, len(self.ready))
        self.place[self.ready] = np.arange(len(self.ready))
        self._joining = np.arange(order + 1)[:, None]
        self._staying = num_ready[self.ready] - self._joining
        with np.errstate(divide="ignore"):
            self._log_ways = np.log(scipy.special.binom(num_ready[self.ready], self._joining))
        longest = int(chain.since.max(initial=0))
        ago = chain.since[members[self.ready]][:, :, None]
        self.since_counts = np.sum(ago == np.arange(1, longest + 1), axis=1).astype(float)

    def following_in(self, t: int) -> np.ndarray:
        """Returns the next multiset if j replicas join in round t, of shape (order + 1, count)."""
        return self._following[self._chain.kinds[t]]

    def log_coins_in(self, t: int) -> np.ndarray:
        """Returns log of binomial(e, j) p^j (1 - p)^(e - j), j = 0 .. order, of `ready`."""
        p = self._chain.coins[t]
        staying = scipy.special.xlogy(np.maximum(self._staying, 0), 1 - p)
        return self._log_ways + scipy.special.xlogy(self._joining, p) + staying

    def _moved(
        self, members: np.ndarray, num_ready: np.ndarray, following: np.ndarray, joined: int
    ) -> np.ndarray:
        place = np.arange(self.order)
        # State 0 is the smallest, so ready replicas come first.
        return np.array(
            [
                self._rank(
                    np.sort(
                        np.where(
                            place < np.minimum(num_ready, j)[:, None], joined, following[members]
                        ),
                        axis=1,
                    )
                )
                for j in range(self.order + 1)
            ]
        )

    def _rank(self, members: np.ndarray) -> np.ndarray:
        """Returns the numbers of multisets, given in ascending order (combinatorial numbers)."""
        return self._ranks[np.arange(members.shape[1]), members].sum(axis=1)


def _multinomial(members: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns the probabilities of multisets whose members are drawn independently."""
    order = members.shape[1]
    run = np.ones(len(members))  # How often the member at hand has occurred, in ascending order.
    result = probabilities[members[:, 0]]
    for i in range(1, order):
        run = np.where(members[:, i] == members[:, i - 1], run + 1, 1.0)
        result = result * probabilities[members[:, i]] * (i + 1) / run
    return result


def _dense_blocks(columns: scipy.sparse.csc_matrix) -> list[tuple[int, np.ndarray]]:
    """Returns the columns, some at a time, from the row of the first one's diagonal on."""
    n = columns.shape[1]
    width = max(_LEAST_BLOCK, int(np.diff(columns.indptr).max()))
    return [
        (start, columns[start : start + 2 * width, start : start + width].toarray())
        for start in range(0, n, width)
    ]


def _overlaps(rows: scipy.sparse.csr_matrix, most: int) -> np.ndarray:
    """Returns <c_t, c_(t - d)> for d = 1 .. most and every round t; 0 before the first round."""
    n = rows.shape[0]
    overlaps = np.zeros((most, n))
    for d in range(1, min(most, n - 1) + 1):
        overlaps[d - 1, d:] = np.asarray(rows[d:].multiply(rows[:-d]).sum(axis=1)).ravel()
    return overlaps
