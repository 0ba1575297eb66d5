"""Strategies C: the matrices that shape the noise.

A mechanism releases `x + C^-1 z` row by row, where `z` holds independent Gaussian rows. Every
strategy here is lower triangular and `n x n`, so row i of `C^-1 z` needs only `z_0 .. z_i` and can
be produced as a stream (the binary tree, in `trees.py`, is brought into this form there).

Band storage, used everywhere in this library, is LAPACK's lower form as in
`scipy.linalg.cholesky_banded(lower=True)`: diagonal d of the matrix is row d of the array and
column j of the matrix is column j of the array.

    C = | a0          |          bands = | a0 a1 a2 a3 |     diagonal
        | b0 a1       |                  | b0 b1 b2  0 |     first subdiagonal
        |    b1 a2    |
        |       b2 a3 |          bands[d, j] = C[j + d, j]

`num_bands` counts the main diagonal, as the paper does: `C[i, j] = 0` for `i - j >= num_bands`.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.error import BandedObjective
from bandmf_tf.factorization.workloads import Workload

if TYPE_CHECKING:
    from bandmf_tf.factorization.sensitivity import Sensitivity

_KINDS: dict[str, type[Strategy]] = {}


class Strategy(abc.ABC):
    """A lower-triangular `n x n` matrix C with a non-zero diagonal.

    Subclasses differ in storage and cost only; all of them are immutable. A new one names its
    `kind`, implements what is abstract, and joins the conformance test; what is not abstract works
    for every strategy, and may be overridden where structure makes it cheaper.
    """

    # Its name in files and the arguments of its constructor, which are attributes as well.
    kind: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _KINDS.setdefault(cls.kind, cls)

    @property
    @abc.abstractmethod
    def num_rounds(self) -> int:
        """Number of rounds n: rows and columns of C."""

    @property
    @abc.abstractmethod
    def num_bands(self) -> int:
        """Smallest stored band count: `C[i, j] = 0` for `i - j >= num_bands`."""

    @abc.abstractmethod
    def matmul(self, x: np.ndarray) -> np.ndarray:
        """Returns `C x` for `x` with n rows (Algorithm 8)."""

    @abc.abstractmethod
    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        """Returns `C^-1 z` for `z` with n rows (Algorithm 9)."""

    def inverse_columns(self, columns: np.ndarray) -> np.ndarray:
        """Returns the given columns of `C^-1`, one beside the other."""
        unit = np.zeros((self.num_rounds, len(columns)))
        unit[columns, np.arange(len(columns))] = 1.0
        return self.inverse_matmul(unit)

    @abc.abstractmethod
    def row(self, i: int) -> np.ndarray:
        """Returns `C[i, lo : i + 1]` with `lo = max(0, i - num_bands + 1)`: what round i needs."""

    @abc.abstractmethod
    def gram_diagonal(self, offset: int) -> np.ndarray:
        """Returns `X[j + offset, j]` for `j = 0 .. n - offset - 1`, where `X = C^T C`."""

    @abc.abstractmethod
    def scaled(self, factor: float) -> Strategy:
        """Returns the strategy `factor * C`."""

    def stored(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what a file holds of it: {"kind": .., parameters} and arrays by name."""
        if _KINDS.get(self.kind) is not type(self):  # A subclass may behave differently.
            raise BandMFTypeError(
                f"Files hold {', '.join(sorted(_KINDS))} strategies. Found {type(self).__name__}."
            )
        parameters = {name: getattr(self, name) for name in self.parameters}
        arrays = {name: getattr(self, name) for name in self.arrays}
        return {"kind": self.kind, **parameters}, arrays

    @property
    def rows_in_memory(self) -> int:
        """Rows of noise, each the size of the model, that a stream keeps between two rounds."""
        return self.num_bands - 1

    def describe(self) -> str:
        """Returns the strategy in a few words."""
        return f"{self.kind}, {self.num_bands:,} band{'' if self.num_bands == 1 else 's'}"

    def leading_block(self, num_rounds: int) -> Strategy:
        """Returns the leading block of C: the strategy of the first `num_rounds` rounds."""
        t = self._checked_block(num_rounds)
        return DenseStrategy(self.materialize()[:t, :t])

    def column_norms(self) -> np.ndarray:
        """Returns the Euclidean norm of every column of C."""
        return np.sqrt(self.gram_diagonal(0))

    def gram(self) -> np.ndarray:
        """Returns `X = C^T C` as a dense symmetric matrix, in O(n^2) memory."""
        n = self.num_rounds
        X = np.zeros((n, n))
        for offset in range(min(self.num_bands, n)):
            index = np.arange(n - offset)
            X[index + offset, index] = X[index, index + offset] = self.gram_diagonal(offset)
        return X

    def inverse_stream(self) -> InverseStream:
        """Returns a stream from rows of z to rows of `C^-1 z`, in `num_bands` rows of memory."""
        return BandedInverseStream(self)

    def round_variances(self, workload: Workload) -> np.ndarray:
        """Returns the error variance of `A (x + C^-1 z)` in every round, for z of variance 1.

        Exact for every strategy. Cost: O(n b^2) for banded ones (O(n b) for a Toeplitz strategy
        under a constant learning rate), O(n log(n)^3) for trees, O(n^3) for dense ones.
        """
        if workload.num_rounds != self.num_rounds:
            raise BandMFError(
                f"The workload has num_rounds={workload.num_rounds} and the strategy "
                f"{self.num_rounds}; build both for the same number."
            )
        return self._round_variances(workload)

    def _round_variances(self, workload: Workload) -> np.ndarray:
        B = workload.matmul(self.inverse_matmul(np.eye(self.num_rounds)))
        return np.einsum("ij,ij->i", B, B)

    def min_separation_sensitivity(
        self, min_separation: int, max_participations: int
    ) -> Sensitivity | None:
        """Returns what is known beyond `sensitivity.py`'s results on X, by the structure of C."""
        del min_separation, max_participations
        return None

    @property
    def toeplitz_coefficients(self) -> np.ndarray | None:
        """The first column of C down to its last band if C is a Toeplitz matrix, else None."""
        return None

    def coefficient_rows(self, max_bytes: int) -> np.ndarray:
        """Returns `rows[i, d] = C[i, i - d]`; a single row where all rows are alike."""
        if 8 * self.num_rounds * self.num_bands > max_bytes:
            raise BandMFError(
                f"The coefficients of num_rounds={self.num_rounds} and num_bands={self.num_bands} "
                f"take more than {max_bytes / 2**30:g} GiB; use fewer bands or a Toeplitz strategy."
            )
        rows = np.zeros((self.num_rounds, self.num_bands))
        for i in range(self.num_rounds):
            entries = self.row(i)
            rows[i, : len(entries)] = entries[::-1]
        return rows

    def materialize(self) -> np.ndarray:
        """Returns C as a dense matrix; for tests and pictures."""
        C = np.zeros((self.num_rounds, self.num_rounds))
        for i in range(self.num_rounds):
            entries = self.row(i)
            C[i, i + 1 - len(entries) : i + 1] = entries
        return C

    def _checked_block(self, num_rounds: int) -> int:
        t = _checks.positive_int("num_rounds", num_rounds)
        if t > self.num_rounds:
            raise BandMFError(
                f"A leading block has at most the num_rounds={self.num_rounds} of its strategy. "
                f"Found {t}."
            )
        return t

    def _checked_round(self, i: int) -> int:
        i = _checks.int_at_least("i", i, 0)
        if i >= self.num_rounds:
            raise BandMFError(
                f"Row i must be below num_rounds={self.num_rounds}; the strategy ends there. "
                f"Found {i}."
            )
        return i

    def _checked_offset(self, offset: int) -> int:
        offset = _checks.int_at_least("offset", offset, 0)
        if offset >= self.num_rounds:
            raise BandMFError(
                f"offset must be below num_rounds={self.num_rounds}, the size of X. Found {offset}."
            )
        return offset


def restored_strategy(stored: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Strategy:
    """Returns the strategy that `Strategy.stored` has described."""
    if stored["kind"] not in _KINDS:
        raise BandMFError(f"kind must be one of {sorted(_KINDS)}. Found {stored['kind']!r}.")
    found = _KINDS[stored["kind"]]
    for name in found.arrays:
        if name not in arrays:
            raise BandMFError(f"A {found.kind} strategy lacks its array {name}.")
    parameters = {name: stored[name] for name in found.parameters}
    return found(**parameters, **{name: arrays[name] for name in found.arrays})


class InverseStream(abc.ABC):
    """Turns rows of z into rows of `C^-1 z`, one round at a time.

    This is the reference in NumPy. Training uses the TensorFlow stream, which is tested against it.
    """

    def __init__(self, num_rounds: int):
        self._num_rounds = num_rounds
        self._round = 0

    def next_row(self, noise_row: np.ndarray) -> np.ndarray:
        """Takes row i of z and returns row i of `C^-1 z`; raises after the last planned round."""
        if self._round >= self._num_rounds:
            raise BandMFError(
                f"The strategy was planned for num_rounds={self._num_rounds} and all of them are "
                "used; plan a longer mechanism to go on."
            )
        result = self._solve(self._round, np.array(noise_row, dtype=np.float64))
        self._round += 1
        return result

    @abc.abstractmethod
    def _solve(self, i: int, noise_row: np.ndarray) -> np.ndarray:
        """Returns row i of `C^-1 z`, given row i of z and what is remembered of earlier rows."""


class BandedInverseStream(InverseStream):
    """Algorithm 9: `x_i = (z_i - sum_j C[i, j] x_j) / C[i, i]`, keeping `num_bands - 1` rows."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy.num_rounds)
        self._strategy = strategy
        self._recent: collections.deque[np.ndarray] = collections.deque(
            maxlen=strategy.num_bands - 1
        )

    def _solve(self, i: int, noise_row: np.ndarray) -> np.ndarray:
        *past, diagonal = self._strategy.row(i)
        for coefficient, earlier in zip(past, self._recent, strict=True):
            noise_row = noise_row - coefficient * earlier
        result = noise_row / diagonal
        self._recent.append(result)
        return result


class BandedStrategy(Strategy):
    """A banded lower-triangular matrix in band storage, O(n b) memory.

    Args:
      bands: Array of shape `(num_bands, num_rounds)`, `bands[d, j] = C[j + d, j]`; entries that lie
        outside the matrix (`j + d >= num_rounds`) must be zero.
    """

    kind = "banded"
    arrays = ("bands",)

    def __init__(self, bands: np.ndarray):
        bands = _checks.finite_array("bands", bands, ndim=2)
        _checks.num_bands(bands.shape[0], bands.shape[1])
        if np.any(bands[~inside_matrix(*bands.shape)] != 0.0):
            raise BandMFError(
                "bands[d, j] must be zero where j + d >= num_rounds, outside the matrix; the array "
                "is not in LAPACK's lower band storage."
            )
        _check_diagonal(bands[0])
        bands.setflags(write=False)
        self._bands = bands

    @property
    def bands(self) -> np.ndarray:
        """The read-only band storage."""
        return self._bands

    @property
    def num_rounds(self) -> int:
        return self._bands.shape[1]

    @property
    def num_bands(self) -> int:
        return self._bands.shape[0]

    def matmul(self, x: np.ndarray) -> np.ndarray:
        n = self.num_rounds
        x = _checks.rows("x", x, n)
        columns = x.reshape(n, -1)
        y = np.zeros_like(columns)
        for d, band in enumerate(self._bands):
            y[d:] += band[: n - d, None] * columns[: n - d]
        return y.reshape(x.shape)

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        n = self.num_rounds
        z = _checks.rows("z", z, n)
        x, info = scipy.linalg.lapack.dtbtrs(self._bands, z.reshape(n, -1), uplo="L")
        if info != 0:
            raise np.linalg.LinAlgError(f"LAPACK dtbtrs failed with info={info}.")
        return x.reshape(z.shape)

    def row(self, i: int) -> np.ndarray:
        i = self._checked_round(i)
        d = np.arange(min(self.num_bands, i + 1))[::-1]
        return self._bands[d, i - d]

    def gram_diagonal(self, offset: int) -> np.ndarray:
        offset = self._checked_offset(offset)
        n, b = self.num_rounds, self.num_bands
        if offset >= b:
            return np.zeros(n - offset)
        return np.einsum(
            "dj,dj->j", self._bands[: b - offset, offset:], self._bands[offset:, : n - offset]
        )

    def scaled(self, factor: float) -> BandedStrategy:
        return BandedStrategy(self._bands * _checks.positive_float("factor", factor))

    def _round_variances(self, workload: Workload) -> np.ndarray:
        return BandedObjective(workload, self.num_bands).round_variances(self._bands)

    def leading_block(self, num_rounds: int) -> BandedStrategy:
        t = self._checked_block(num_rounds)
        bands = self._bands[:t, :t]
        return BandedStrategy(bands * inside_matrix(*bands.shape))


class LowerToeplitz(Strategy):
    """A lower-triangular Toeplitz matrix, `C[i, j] = coefficients[i - j]`; see its subclasses."""

    _num_rounds: int

    def _checked_column(self, name: str, entries: np.ndarray, num_rounds: int) -> np.ndarray:
        """Sets the number of rounds; returns the first entries of a column, read-only."""
        entries = _checks.finite_array(name, entries, ndim=1)
        self._num_rounds = _checks.positive_int("num_rounds", num_rounds)
        _checks.num_bands(entries.size, self._num_rounds)
        _check_diagonal(entries[:1])
        entries.setflags(write=False)
        return entries

    @property
    @abc.abstractmethod
    def coefficients(self) -> np.ndarray:
        """The read-only coefficients, one for each band."""

    @property
    def num_rounds(self) -> int:
        return self._num_rounds

    @property
    def num_bands(self) -> int:
        return self.coefficients.size

    @property
    def toeplitz_coefficients(self) -> np.ndarray:
        return self.coefficients

    def inverse_columns(self, columns: np.ndarray) -> np.ndarray:
        first = super().inverse_columns(np.zeros(1, int))[:, 0]
        lags = np.arange(self.num_rounds)[:, None] - columns
        return np.where(lags >= 0, first[np.maximum(lags, 0)], 0.0)

    def row(self, i: int) -> np.ndarray:
        return self.coefficients[: self._checked_round(i) + 1][::-1]

    def gram_diagonal(self, offset: int) -> np.ndarray:
        # Column j is cut off by the end of the matrix after n - j entries: the later the column,
        # the fewer products enter, so the diagonal of X is a reversed cumulative sum.
        offset = self._checked_offset(offset)
        n, b = self.num_rounds, self.num_bands
        if offset >= b:
            return np.zeros(n - offset)
        products = np.cumsum(self.coefficients[: b - offset] * self.coefficients[offset:])
        entries = np.minimum(b - offset, n - offset - np.arange(n - offset))
        return products[entries - 1]

    def _round_variances(self, workload: Workload) -> np.ndarray:
        if workload.has_constant_learning_rate:
            return np.cumsum(self.inverse_matmul(workload.first_column()) ** 2)
        return self._scheduled_round_variances(workload)

    @abc.abstractmethod
    def _scheduled_round_variances(self, workload: Workload) -> np.ndarray:
        """Returns the same for learning rates that vary, where A is not a Toeplitz matrix."""

    def coefficient_rows(self, max_bytes: int) -> np.ndarray:
        del max_bytes
        return self.coefficients[None, :]


class ToeplitzStrategy(LowerToeplitz):
    """A banded lower-triangular Toeplitz matrix, O(b) memory.

    Args:
      coefficients: The first `num_bands` entries of the first column.
      num_rounds: Number of rounds n.
    """

    kind = "toeplitz"
    arrays = ("coefficients",)
    parameters = ("num_rounds",)

    def __init__(self, coefficients: np.ndarray, num_rounds: int):
        self._coefficients = self._checked_column("coefficients", coefficients, num_rounds)

    @property
    def coefficients(self) -> np.ndarray:
        return self._coefficients

    def matmul(self, x: np.ndarray) -> np.ndarray:
        x = _checks.rows("x", x, self.num_rounds)
        return scipy.signal.lfilter(self._coefficients, [1.0], x, axis=0)

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        z = _checks.rows("z", z, self.num_rounds)
        return scipy.signal.lfilter([1.0], self._coefficients, z, axis=0)

    def scaled(self, factor: float) -> ToeplitzStrategy:
        factor = _checks.positive_float("factor", factor)
        return ToeplitzStrategy(self._coefficients * factor, self._num_rounds)

    def _scheduled_round_variances(self, workload: Workload) -> np.ndarray:
        return self.to_banded().round_variances(workload)

    def leading_block(self, num_rounds: int) -> ToeplitzStrategy:
        t = self._checked_block(num_rounds)
        return ToeplitzStrategy(self._coefficients[:t], t)

    def to_banded(self) -> BandedStrategy:
        """Returns the same matrix in band storage."""
        b, n = self.num_bands, self.num_rounds
        return BandedStrategy(np.where(inside_matrix(b, n), self._coefficients[:, None], 0.0))


class DenseStrategy(Strategy):
    """A lower-triangular matrix without further structure, O(n^2) memory: the paper's baselines."""

    kind = "dense"
    arrays = ("matrix",)

    def __init__(self, matrix: np.ndarray):
        matrix = _checks.finite_array("matrix", matrix, ndim=2)
        if matrix.shape[0] != matrix.shape[1]:
            raise BandMFError(f"matrix must be square. Found shape {matrix.shape}.")
        if np.any(np.triu(matrix, 1) != 0.0):
            raise BandMFError(
                "matrix must be lower triangular, or its noise would need the future; factor "
                "X = C^T C with `lower_factor` first."
            )
        _check_diagonal(np.diagonal(matrix))
        matrix.setflags(write=False)
        self._matrix = matrix

    @property
    def matrix(self) -> np.ndarray:
        """C, read-only."""
        return self._matrix

    @property
    def num_rounds(self) -> int:
        return self._matrix.shape[0]

    @property
    def num_bands(self) -> int:
        return self._matrix.shape[0]

    def matmul(self, x: np.ndarray) -> np.ndarray:
        return np.tensordot(self._matrix, _checks.rows("x", x, self.num_rounds), axes=1)

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        z = _checks.rows("z", z, self.num_rounds)
        solution = scipy.linalg.solve_triangular(
            self._matrix, z.reshape(self.num_rounds, -1), lower=True
        )
        return solution.reshape(z.shape)

    def row(self, i: int) -> np.ndarray:
        i = self._checked_round(i)
        return self._matrix[i, : i + 1]

    def gram_diagonal(self, offset: int) -> np.ndarray:
        offset = self._checked_offset(offset)
        n = self.num_rounds
        return np.einsum("ij,ij->j", self._matrix[:, offset:], self._matrix[:, : n - offset])

    def gram(self) -> np.ndarray:
        # LAPACK's product for triangles takes a sixth of a full product's operations.
        lower, _ = scipy.linalg.lapack.dlauum(self._matrix, lower=1)
        lower = np.tril(lower)
        return lower + np.tril(lower, -1).T

    def scaled(self, factor: float) -> DenseStrategy:
        return DenseStrategy(self._matrix * _checks.positive_float("factor", factor))

    def materialize(self) -> np.ndarray:
        return self._matrix.copy()


def identity(num_rounds: int) -> ToeplitzStrategy:
    """Returns C = I: independent noise in every round, which is DP-SGD."""
    return ToeplitzStrategy(np.ones(1), num_rounds)


def lower_factor(gram: np.ndarray) -> np.ndarray:
    """Returns the lower-triangular C with `C^T C = gram` and a positive diagonal.

    Proposition 4.1 (banded Cholesky) by its construction: reverse rows and columns, take the
    Cholesky factor, reverse back. A banded `gram` gives a C with the same number of bands.
    """
    gram = _checks.finite_array("gram", gram, ndim=2)
    if gram.shape[0] != gram.shape[1] or not np.allclose(gram, gram.T):
        raise BandMFError(f"gram must be a symmetric matrix. Found shape {gram.shape}, asymmetric.")
    return np.ascontiguousarray(scipy.linalg.cholesky(gram[::-1, ::-1], lower=False)[::-1, ::-1])


def inside_matrix(num_bands: int, num_rounds: int) -> np.ndarray:
    """Returns the mask of band storage entries that lie inside the matrix."""
    return np.arange(num_bands)[:, None] + np.arange(num_rounds)[None, :] < num_rounds


def _check_diagonal(diagonal: np.ndarray) -> None:
    if np.any(diagonal == 0.0):
        raise BandMFError(
            "The diagonal of a strategy must be non-zero, or C has no inverse. Found 0 at "
            f"round {int(np.argmax(diagonal == 0.0))}."
        )
