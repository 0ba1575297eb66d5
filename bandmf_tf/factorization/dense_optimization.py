"""The paper's dense baselines: single-epoch MF and multi-epoch MF, by their dual problem.

Under (k, b)-participation the patterns are the residue classes `r, r + b, r + 2 b, ..` of the
rounds. As in the paper's baselines (Choquette-Choo et al., Appendix I.3) the columns of C within a
class are orthogonal, so with X = C^T C the squared sensitivity is the largest sum of X[i, i] over a
class. The primal problem

    minimise tr(A^T A X^-1)  subject to  X[i, j] = 0 for i != j in a class,
                                         sum of X[i, i] over a class <= 1

(or X[i, i] = 1 / k for every i, with equal column norms) has a dual over symmetric positive
definite V that are zero outside the classes and have one value on the diagonal of a class (or any
diagonal):

    maximise 2 tr((A V A^T)^(1/2)) - S(V),   S(V) = sum of the classes' values (or tr(V) / k).

Its maximiser gives X = A^T (A V A^T)^(-1/2) A, and its gradient is the infeasibility of that X.
The best multiple of V turns it into `T(V)^2 / S(V)` with T = tr((A V A^T)^(1/2)), a lower bound on
every feasible loss: results carry a proven duality gap. An evaluation is one symmetric
eigenproblem, O(n^3).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import _lbfgs, sensitivity
from bandmf_tf.factorization.error import squared_error
from bandmf_tf.factorization.optimization import OptimizationResult, ProgressCallback
from bandmf_tf.factorization.strategies import DenseStrategy, lower_factor
from bandmf_tf.factorization.workloads import Workload

_COARSENING = 4
_SMALLEST_COARSE_SEPARATION = 8
_SMALLEST_EIGENVALUE = 1e-15

# Fewest and most, unless told. With momentum, many epochs and equal norms it takes thousands.
_ITERATIONS = (300, 5_000)


def optimize_dense(
    workload: Workload,
    min_separation: int | None = None,
    *,
    equal_column_norms: bool = False,
    tolerance: float = 1e-4,
    max_iterations: int | None = None,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Returns the optimal dense strategy for (k, b)-participation with `k = ceil(n / b)`.

    Args:
      workload: The workload A.
      min_separation: b, the number of rounds in an epoch; None is single participation, that is,
        single-epoch MF.
      equal_column_norms: Whether all columns must have the same norm.
      tolerance: Stops when the duality gap, relative to the loss, is below this.
      max_iterations: A lower limit on iterations than the usual one, which is larger for fewer
        rounds, whose iterations are cheap.
      progress: Called with the iteration and the current loss.

    Returns:
      A lower-triangular strategy scaled to sensitivity 1 under (k, b)-participation. Its
      sensitivity under b-min-separation is bounded by `sensitivity.general_min_separation`.
    """
    n = workload.num_rounds
    b = n if min_separation is None else _checks.positive_int("min_separation", min_separation)
    if b > n:
        raise BandMFError(
            f"min_separation must be at most num_rounds={n}, which means single participation. "
            f"Found {b}."
        )
    k = ceil_div(n, b)
    equal_norms = " and have equal norms" if equal_column_norms else ""
    guarantee = (
        "Within the duality gap of the best strategy whose columns are orthogonal within every "
        f"participation pattern{equal_norms}; sensitivity 1 under (k={k}, b={b})-participation."
    )
    if b == 1:
        return _diagonal(workload, equal_column_norms, guarantee)
    usual = int(np.clip(_ITERATIONS[0] * (500 / n) ** 2, *_ITERATIONS))
    max_iterations = usual if max_iterations is None else min(max_iterations, usual)
    dual = _Dual(workload, b, equal_column_norms)
    start = _coarse_start(workload, b, equal_column_norms, tolerance, max_iterations)
    outcome = _maximize(dual, start, tolerance, max_iterations, progress)
    C = lower_factor(dual.primal(outcome.V))
    if equal_column_norms:
        C = C / np.linalg.norm(C, axis=0)
    strategy = DenseStrategy(C)
    strategy = strategy.scaled(1.0 / sensitivity.fixed_epochs(strategy, b, k).value)
    loss = squared_error(workload, strategy)
    return OptimizationResult(
        strategy=strategy,
        loss=loss,
        converged=outcome.converged,
        iterations=outcome.iterations,
        relative_change=outcome.relative_change,
        gradient_norm=outcome.gradient_norm,
        duality_gap=loss / outcome.lower_bound - 1.0,
        guarantee=guarantee,
    )


def _diagonal(workload: Workload, equal_column_norms: bool, guarantee: str) -> OptimizationResult:
    """Returns the optimum of one class of all rounds, whose X is diagonal: in closed form.

    sum of g_i / X_ii, with g the squared column norms of A, is least where X_ii is in proportion to
    sqrt(g_i), by Cauchy and Schwarz.
    """
    norms = np.linalg.norm(workload.materialize(), axis=0)
    X = np.ones(workload.num_rounds) if equal_column_norms else norms
    X = X / X.sum()
    return OptimizationResult(
        strategy=DenseStrategy(np.diag(np.sqrt(X))),
        loss=float(np.sum(norms**2 / X)),
        converged=True,
        iterations=0,
        relative_change=0.0,
        gradient_norm=0.0,
        duality_gap=0.0,
        guarantee=guarantee,
    )


class _Dual:
    """The dual function of V, stored as `V[j, l, r]`, which couples the rounds r + j b and r + l b.

    The variables keep V positive definite: `V = D U U^T D` for every residue r, with D diagonal and
    positive and U a unit lower-triangular matrix whose rows are then normalised. They are the
    logarithms of D (one value for a residue, or one for a round) and the entries of U below the
    diagonal. Rounds past the end of training are decoupled from the others and take no part.
    """

    def __init__(self, workload: Workload, b: int, equal_column_norms: bool):
        self.workload = workload
        self.equal_column_norms = equal_column_norms
        self.b = b
        self.k = ceil_div(workload.num_rounds, b)
        rounds = np.arange(self.k)[:, None] * b + np.arange(b)
        self.exists = rounds < workload.num_rounds
        self.pairs = np.tril_indices(self.k, -1)
        self.pair_exists = self.exists[self.pairs[0]]

    def pack(self, V: np.ndarray) -> np.ndarray:
        """Returns the variables of a positive definite V."""
        scale = np.sqrt(np.einsum("jjr->jr", V))
        correlation = np.moveaxis(V / (scale[:, None] * scale[None, :]), 2, 0)
        factor = np.moveaxis(np.linalg.cholesky(correlation), 0, 2)
        factor = factor / np.einsum("jjr->jr", factor)[:, None]
        scales = scale[self.exists] if self.equal_column_norms else scale[0]
        return np.concatenate([np.log(scales), factor[self.pairs][self.pair_exists]])

    def unpack(self, variables: np.ndarray) -> _Variables:
        """Returns what the variables stand for."""
        size = variables.size - np.count_nonzero(self.pair_exists)
        scale = np.ones((self.k, self.b))
        if self.equal_column_norms:
            scale[self.exists] = np.exp(variables[:size])
        else:
            scale[:] = np.exp(variables[:size])
        rows = np.zeros((self.k, self.k, self.b))
        rows[np.arange(self.k), np.arange(self.k)] = 1.0
        below = np.zeros(self.pair_exists.shape)
        below[self.pair_exists] = variables[size:]
        rows[self.pairs] = below
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return _Variables(scale, rows / norms, norms)

    def value_and_gradient(self, variables: np.ndarray) -> tuple[float, np.ndarray, float, float]:
        """Returns `2 log T - log S`, its gradient, the lower bound T^2 / S and a feasible loss."""
        parts = self.unpack(variables)
        V = parts.V
        roots, factor = self._factor(V)
        T, S = float(roots.sum()), self._budget(parts.scale)
        X = self._blocks(factor)
        G = X / T  # d(2 log T) = <X / T, dV>, because dT = <X, dV> / 2.
        by_scale = 2.0 * np.einsum("jlr,jlr->jr", G, V) - self._budget_gradient(parts.scale) / S
        scales = by_scale[self.exists] if self.equal_column_norms else by_scale.sum(axis=0)
        outer = parts.scale[:, None] * parts.scale[None, :]
        by_row = 2.0 * _products(outer * G, parts.rows)
        radial = np.einsum("jmr,jmr->jr", by_row, parts.rows)[:, None]
        by_row = (by_row - radial * parts.rows) / parts.norms
        gradient = np.concatenate([scales, by_row[self.pairs][self.pair_exists]])
        # X scaled down by its largest class sum is feasible, up to small entries within classes.
        loss = T * float(np.abs(X).sum(axis=(0, 1)).max())
        return 2.0 * np.log(T) - np.log(S), gradient, T * T / S, loss

    def primal(self, V: np.ndarray) -> np.ndarray:
        """Returns X = A^T (A V A^T)^(-1/2) A."""
        _, factor = self._factor(V)
        return factor @ factor.T

    def _budget(self, scale: np.ndarray) -> float:
        """Returns S(V)."""
        if self.equal_column_norms:
            return float(np.sum(scale**2, where=self.exists) / self.k)
        return float(np.sum(scale[0] ** 2))

    def _budget_gradient(self, scale: np.ndarray) -> np.ndarray:
        """Returns the gradient of S by the logarithms of the scales."""
        if self.equal_column_norms:
            return 2.0 * scale**2 / self.k
        return 2.0 * scale**2 * (np.arange(self.k) == 0)[:, None]  # One value for a residue.

    def _blocks(self, factor: np.ndarray) -> np.ndarray:
        """Returns the entries of X = F F^T within residue classes."""
        padded = np.zeros((self.k * self.b, factor.shape[1]))
        padded[: len(factor)] = factor
        rows = padded.reshape(self.k, self.b, -1).swapaxes(0, 1)
        return np.moveaxis(rows @ rows.swapaxes(1, 2), 0, 2)

    def _factor(self, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the eigenvalues of (A V A^T)^(1/2) and a factor F of X = F F^T."""
        n, index = self.workload.num_rounds, np.arange(self.b)
        dense = np.zeros((self.k, self.b, self.k, self.b))
        dense[:, index, :, index] = np.moveaxis(V, 2, 0)
        dense = dense.reshape(self.k * self.b, -1)
        product = self.workload.matmul(self.workload.matmul(dense[:n, :n]).T)
        eigenvalues, vectors = np.linalg.eigh(product)
        # The smallest ones may come out as rounding errors of the largest.
        roots = np.sqrt(np.maximum(eigenvalues, _SMALLEST_EIGENVALUE * eigenvalues[-1]))
        return roots, self.workload.transpose_matmul(vectors / np.sqrt(roots))


def _products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the matrix products of `left[:, :, r]` and `right[:, :, r]`, for every residue r."""
    return np.moveaxis(np.moveaxis(left, 2, 0) @ np.moveaxis(right, 2, 0), 0, 2)


@dataclasses.dataclass(frozen=True)
class _Variables:
    """V in its parts: D as `scale[j, r]`, U as `rows[j, l, r]` and the norms divided out of U."""

    scale: np.ndarray
    rows: np.ndarray
    norms: np.ndarray

    @property
    def V(self) -> np.ndarray:
        correlation = _products(self.rows, self.rows.swapaxes(0, 1))
        return self.scale[:, None] * self.scale[None, :] * correlation


@dataclasses.dataclass(frozen=True)
class _DualOutcome:
    V: np.ndarray
    lower_bound: float
    converged: bool
    iterations: int
    relative_change: float
    gradient_norm: float


def _maximize(
    dual: _Dual,
    start: np.ndarray,
    tolerance: float,
    max_iterations: int,
    progress: ProgressCallback | None,
) -> _DualOutcome:
    """Maximises `2 log T - log S` by L-BFGS until the duality gap is below `tolerance`."""
    lower_bound = loss = gap = math.inf

    def negative_dual(variables: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal lower_bound, loss
        value, gradient, lower_bound, loss = dual.value_and_gradient(variables)
        return -value, -gradient

    def gap_is_closed(history: Sequence[float]) -> bool:
        nonlocal gap
        del history
        gap = loss / lower_bound - 1.0
        return gap < tolerance

    def report(iteration: int, value: float) -> None:
        del value
        if progress is not None:
            progress(iteration, loss)

    outcome = _lbfgs.minimize(
        negative_dual,
        dual.pack(start),
        finished=gap_is_closed,
        max_iterations=max_iterations,
        progress=report,
        corrections=30,
    )
    return _DualOutcome(
        V=dual.unpack(outcome.x).V,
        lower_bound=math.exp(-outcome.value),
        converged=gap < tolerance,
        iterations=outcome.iterations,
        relative_change=math.expm1(outcome.recent_gain),
        gradient_norm=outcome.gradient_norm,
    )


def _coarse_start(
    workload: Workload, b: int, equal_column_norms: bool, tolerance: float, max_iterations: int
) -> np.ndarray:
    """Returns V interpolated from a problem with a quarter of the rounds and as many epochs.

    V depends smoothly on the position within an epoch, and a mean of positive definite blocks is
    positive definite.
    """
    n = workload.num_rounds
    k = ceil_div(n, b)
    coarse_b = ceil_div(b, _COARSENING)
    if coarse_b < _SMALLEST_COARSE_SEPARATION:
        return np.eye(k)[:, :, None] * np.ones(b)
    coarse_n = int(np.clip(round(n * coarse_b / b), (k - 1) * coarse_b + 1, k * coarse_b))
    positions = (np.arange(coarse_n) + 0.5) * n / coarse_n - 0.5
    rates = np.interp(positions, np.arange(n), workload.learning_rates)
    coarse = Workload(coarse_n, workload.momentum ** (n / coarse_n), rates)
    start = _coarse_start(coarse, coarse_b, equal_column_norms, tolerance, max_iterations)
    dual = _Dual(coarse, coarse_b, equal_column_norms)
    V = _maximize(dual, start, tolerance, max_iterations, None).V
    fine_positions = np.clip((np.arange(b) + 0.5) * coarse_b / b - 0.5, 0, coarse_b - 1)
    low = np.minimum(fine_positions.astype(int), max(coarse_b - 2, 0))
    weight = fine_positions - low
    return V[:, :, low] * (1.0 - weight) + V[:, :, np.minimum(low + 1, coarse_b - 1)] * weight
