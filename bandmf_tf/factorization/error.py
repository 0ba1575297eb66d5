"""The error of a mechanism, `|A C^-1|_F^2`, exactly and without a dense n x n matrix.

For the workloads of `workloads.py`, `N = C A^-1` is banded, with `num_bands` bands plus one or two,
and `B = A C^-1 = N^-1`. Cut N into block rows of s >= p rows, p the number of subdiagonals:

    N = | D_1             |      block row i of N^-1 is   R_i = D_i^-1 (E_i - L_i R_{i-1}),
        | L_2  D_2        |      so G_i = R_i R_i^T obeys
        |      L_3  D_3   |      G_i = D_i^-1 (I + L_i G_{i-1} L_i^T) D_i^-T,

because block i of the noise is independent of the earlier ones (E_i R_{i-1}^T = 0). The diagonal of
G_i is the error variance of the rounds of block i, and the total error is the sum of the traces.
The adjoint runs backwards through the same blocks. All of it is BLAS-3 on s x s blocks: O(n p^2)
time, O(n p) memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import scipy

from bandmf_tf.factorization.workloads import Workload

if TYPE_CHECKING:
    from bandmf_tf.factorization.sensitivity import Sensitivity
    from bandmf_tf.factorization.strategies import Strategy

# A block row of N: (L_i, D_i^-1, G_i).
_Block = tuple[np.ndarray, np.ndarray, np.ndarray]

# Blocks much smaller than this spend their time in Python instead of BLAS.
_SMALLEST_BLOCK = 32

# Rows of a band that are transposed at a time.
_CHUNK = 512


def squared_error(workload: Workload, strategy: Strategy) -> float:
    """Returns `|A C^-1|_F^2`, the expected total squared error at noise variance 1."""
    return float(np.sum(strategy.round_variances(workload)))


def rmse(workload: Workload, strategy: Strategy, sensitivity: Sensitivity) -> float:
    """Returns the paper's `sqrt(L(B, C) / n)` at sigma = 1, for C scaled to sensitivity 1."""
    return sensitivity.value * math.sqrt(squared_error(workload, strategy) / strategy.num_rounds)


def toeplitz_round_variances(
    workload: Workload, head: np.ndarray, decays: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Returns the error variance of every round where C^-1 is the Toeplitz matrix of g.

    g starts with `head`, of h entries, and goes on with `g_(h + m) = sum_a scales_a decays_a^m`
    (with zeros if there are none). Time: O(n) for every entry of both, at any learning rates.

    With p = M g (velocities) and `B[i, j] = sum_{l=j}^i eta_l p_(l-j)`, a round adds to variances

        eta_i^2 P_i + 2 eta_i K_i,   P_i = sum_{m<=i} p_m^2,
        K_i = sum_{l<i} eta_l sum_{m<=l} p_m p_(m+i-l).

    As `p_(j+1) = momentum p_j + g_(j+1)`, `K_i = momentum (K_(i-1) + eta_(i-1) P_(i-1)) + E_i`,
    where E has g in the place of the second p. Its sum over m is a cumulative one for each lag
    within the head, and beyond that, decay by decay, a cumulative one times a power of the lag.
    """
    eta, beta = workload.learning_rates, workload.momentum
    n = workload.num_rounds
    rounds = np.arange(n)
    g = np.zeros(n)
    g[: head.size] = head[:n]
    tail = rounds[: max(0, n - head.size)]
    for decay, scale in zip(decays, scales, strict=True):
        g[head.size :] += scale * decay**tail
    p = scipy.signal.lfilter([1.0], [1.0, -beta], g)
    E = np.zeros(n)
    for lag in range(1, min(head.size, n)):
        E[lag:] += eta[: n - lag] * np.cumsum(p[: n - lag] * g[lag:])
    for decay, scale in zip(decays, scales, strict=True):
        past = eta * np.cumsum(p * decay**rounds)
        E[head.size :] += scipy.signal.lfilter([scale], [1.0, -decay], past)[: tail.size]
    P = np.cumsum(p**2)
    E[1:] += beta * (eta * P)[:-1]
    K = scipy.signal.lfilter([1.0], [1.0, -beta], E)
    return np.cumsum(eta * (eta * P + 2.0 * K))


class BandedObjective:
    """`|A C^-1|_F^2` and its gradient for banded C, as functions of the band storage of C."""

    def __init__(self, workload: Workload, num_bands: int):
        self._workload_inverse = workload.inverse_bands()
        self._num_rounds = workload.num_rounds
        self._num_bands = num_bands
        self._subdiagonals = min(
            num_bands + len(self._workload_inverse) - 2, workload.num_rounds - 1
        )
        block = max(self._subdiagonals, _SMALLEST_BLOCK)
        self._starts = list(range(0, workload.num_rounds, block))
        self._kept: list[_Block] = []
        self._block_rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def round_variances(self, bands: np.ndarray) -> np.ndarray:
        """Returns the error variance of every round."""
        product = self._times_workload_inverse(bands)
        return np.concatenate([np.diagonal(G).copy() for _, _, G in self._forward(product)])

    def value_and_gradient(self, bands: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the total squared error and its gradient in band storage."""
        product = self._times_workload_inverse(bands)
        blocks = [self._keep(i, block) for i, block in enumerate(self._forward(product))]
        value = float(sum(np.trace(G) for _, _, G in blocks))
        gradient = self._backward(blocks)
        return value, self._times_workload_inverse_adjoint(gradient)

    def _keep(self, index: int, block: _Block) -> _Block:
        """Copies a block to where it was kept before: the system is slow to give memory anew."""
        if index == len(self._kept):
            left, inverse, G = block
            self._kept.append((np.empty_like(left), np.empty_like(inverse), np.empty_like(G)))
        for kept, part in zip(self._kept[index], block, strict=True):
            np.copyto(kept, part)
        return self._kept[index]

    def _forward(self, product: np.ndarray) -> Iterator[_Block]:
        """Yields (L_i, D_i^-1, G_i) for every block row of N; the adjoint needs all three."""
        p, n = self._subdiagonals, self._num_rounds
        rows = _bands_to_rows(product, p)
        tail = np.zeros((p, p))  # G of the last p rounds before the block.
        for start, stop in zip(self._starts, [*self._starts[1:], n], strict=True):
            size = stop - start
            block, band = self._block_row(size)
            band[...] = rows[start:stop]
            left, inverse = block[:, :p], _inverse_lower(block[:, p:])
            if start and p:
                covariance = _plus_identity(
                    _left_product(left, _left_product(left, tail), right=True, transposed=True)
                )
                G = _trmm(inverse, _trmm(inverse, covariance), right=True, transposed=True)
            else:
                G = _trmm(inverse, inverse, right=True, transposed=True)
            yield left, inverse, G
            tail = G[size - p :, size - p :] if size >= p else tail

    def _backward(self, blocks: list[_Block]) -> np.ndarray:
        """Returns the gradient of `sum trace(G_i)` with respect to N, in band storage.

        With the adjoint Gbar_i = I + (contribution of block i + 1) and H_i = D_i^-T Gbar_i D_i^-1:
        dD_i = -2 D_i^-T Gbar_i G_i and dL_i = 2 H_i L_i G_{i-1}, kept inside the band.
        """
        p, n = self._subdiagonals, self._num_rounds
        gradient_rows = np.empty((n, p + 1))
        from_next: np.ndarray | None = None
        for index in range(len(blocks) - 1, -1, -1):
            left, inverse, G = blocks[index]
            start, size = self._starts[index], len(G)
            half = inverse.T
            if from_next is not None:
                adjoint = np.zeros((size, size)) if size > p else from_next
                adjoint[size - p :, size - p :] = from_next
                half = _trmm(inverse, _plus_identity(adjoint), transposed=True)
            block, band = self._block_row(size)
            np.multiply(half @ G, -2.0, out=block[:, p:])
            if index and p:
                H = _trmm(inverse, half, right=True)
                previous = blocks[index - 1][2]
                tail = previous[len(previous) - p :, len(previous) - p :]
                left_H = _left_product(left, H, transposed=True)  # H is symmetric.
                np.multiply(left_H.T @ tail, 2.0, out=block[:, :p])
                from_next = _left_product(left, left_H, right=True)
            gradient_rows[start : start + size] = band
            block[...] = 0.0
        return _rows_to_bands(gradient_rows, p)

    def _block_row(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (L, D) side by side, zero outside the band, and the band's rows as a view.

        Kept for the next block: an array and a view of it cost as much as a product.
        """
        if size not in self._block_rows:
            p = self._subdiagonals
            block = np.zeros((size, size + p))
            row_stride, stride = block.strides
            band = np.lib.stride_tricks.as_strided(
                block, shape=(size, p + 1), strides=(row_stride + stride, stride)
            )
            self._block_rows[size] = block, band
        return self._block_rows[size]

    def _times_workload_inverse(self, bands: np.ndarray) -> np.ndarray:
        """Returns `N = C A^-1`: `N[j + d, j] = sum_t C[j + d, j + t] A^-1[j + t, j]`."""
        b, n = bands.shape
        product = np.zeros((self._subdiagonals + 1, n))
        for t, inverse in enumerate(self._workload_inverse):
            # Row by row: temporary arrays of the size of C would cost as much as the products.
            for d in range(min(b, len(product) - t)):
                product[t + d, : n - t] += bands[d, t:] * inverse[: n - t]
        return product

    def _times_workload_inverse_adjoint(self, gradient: np.ndarray) -> np.ndarray:
        """The adjoint of `_times_workload_inverse`."""
        b, n = self._num_bands, self._num_rounds
        result = np.zeros((b, n))
        for t, inverse in enumerate(self._workload_inverse):
            for d in range(min(b, len(gradient) - t)):
                result[d, t:] += gradient[t + d, : n - t] * inverse[: n - t]
        return result


def _plus_identity(matrix: np.ndarray) -> np.ndarray:
    """Adds 1 to the diagonal, in place."""
    matrix.reshape(-1)[:: len(matrix) + 1] += 1.0
    return matrix


def _inverse_lower(triangle: np.ndarray) -> np.ndarray:
    """Returns the inverse; LAPACK leaves what is above the diagonal as it is, zero.

    The caller's array is kept.
    """
    # Fortran's order is that of the transposed matrix, which spares LAPACK a copy; so below.
    inverse, info = scipy.linalg.lapack.dtrtri(triangle.T, lower=0)
    if info != 0:
        raise np.linalg.LinAlgError("The strategy is singular: a diagonal entry is zero.")
    return inverse.T


def _trmm(
    triangle: np.ndarray,
    other: np.ndarray,
    *,
    lower: bool = True,
    right: bool = False,
    transposed: bool = False,
) -> np.ndarray:
    """Returns `triangle @ other` (or `other @ triangle`, or transposed) at half the cost."""
    return scipy.linalg.blas.dtrmm(
        1.0, triangle.T, other.T, side=int(not right), lower=int(not lower), trans_a=int(transposed)
    ).T


def _left_product(
    left: np.ndarray, other: np.ndarray, *, right: bool = False, transposed: bool = False
) -> np.ndarray:
    """Returns the product with a block L, which is upper triangular when it is square.

    It is not in the last block row, which may be shorter, nor in blocks enlarged to
    `_SMALLEST_BLOCK`.
    """
    if left.shape[0] == left.shape[1]:
        return _trmm(left, other, lower=False, right=right, transposed=transposed)
    matrix = left.T if transposed else left
    return other @ matrix if right else matrix @ other


def _bands_to_rows(bands: np.ndarray, p: int) -> np.ndarray:
    """Returns `rows[i, p - d] = M[i, i - d]` from `bands[d, j] = M[j + d, j]`, zero outside."""
    n = bands.shape[1]
    row_stride, stride = bands.strides
    by_row = np.lib.stride_tricks.as_strided(
        bands, shape=(p + 1, n), strides=(row_stride - stride, stride)
    )  # [d, i] = M[i, i - d]; what is left of the matrix is the end of another band.
    rows = np.empty((n, p + 1))
    for chunk in _chunks(n):
        rows[chunk] = by_row[::-1, chunk].T
    for i in range(p):
        rows[i, : p - i] = 0.0
    return rows


def _rows_to_bands(rows: np.ndarray, p: int) -> np.ndarray:
    """The inverse of `_bands_to_rows`."""
    n = len(rows)
    row_stride, stride = rows.strides
    full = n - p  # Columns that end inside the matrix.
    by_column = np.lib.stride_tricks.as_strided(
        rows[0, p:], shape=(p + 1, full), strides=(row_stride - stride, row_stride)
    )
    bands = np.zeros((p + 1, n))
    for chunk in _chunks(full):
        bands[:, chunk] = by_column[:, chunk]
    for d in range(p):
        bands[d, full : n - d] = rows[full + d :, p - d]
    return bands


def _chunks(n: int) -> Iterator[slice]:
    """Yields parts of n rows that can be transposed within the cache."""
    for start in range(0, n, _CHUNK):
        yield slice(start, min(start + _CHUNK, n))
