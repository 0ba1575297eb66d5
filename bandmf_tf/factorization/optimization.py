"""Optimal banded and Toeplitz strategies: Problem 2, its appendix variant, and closed forms.

All of them minimise `L(A C^-1, C) = sens(C)^2 |A C^-1|_F^2` over banded lower-triangular C. The
paper works with X = C^T C, where the problem is convex. We work with C: X -> C is a diffeomorphism
of the positive definite banded matrices onto the banded C with positive diagonal (Proposition 4.1),
so a stationary point in C is stationary in X, hence a global minimum. C needs no
positive-definiteness constraint, and its columns can be normalised, which turns the sensitivity
constraint into a change of variables.

The method is L-BFGS on the objective of `error.py`, O(n b^2) time and O(n b) memory for an
evaluation, with two accelerations: a diagonal scaling (the last columns influence few rounds, so
the objective is flat in them), and a multilevel start. The optimum looks alike at every scale:
solve for n / 4 rounds and b / 4 bands, divide by the Toeplitz optimum of that size, interpolate
this smooth ratio, and multiply it by the Toeplitz optimum of the full size. That start is usually
within 0.2 % of the optimum. The curvature that the coarse problem found is that of the fine one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import _lbfgs, workloads
from bandmf_tf.factorization.error import BandedObjective
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    Strategy,
    ToeplitzStrategy,
    inside_matrix,
)
from bandmf_tf.factorization.workloads import Workload

# Called with the iteration and the current loss L(A C^-1, C), to show progress.
ProgressCallback = Callable[[int, float], None]

_COARSENING = 4
_SMALLEST_COARSE_BANDS = 4
_LARGEST_ENTRY = 1e50


@dataclasses.dataclass(frozen=True)
class OptimizationResult:
    """An optimised strategy and how far its optimisation got.

    Attributes:
      strategy: The strategy, normalised as `guarantee` says.
      loss: `L(A C^-1, C)` of the paper for the problem that was solved.
      converged: Whether the stopping rule was met before the iteration limit.
      iterations: Iterations of the optimiser (at the finest level).
      relative_change: Relative decrease of the loss over the last iterations looked at.
      gradient_norm: Euclidean norm of the gradient of log(loss) in the scaled variables; zero at
        the optimum.
      duality_gap: Relative gap to a proven lower bound of the problem's optimum, where the method
        yields one; None otherwise.
      guarantee: What was solved and what follows from it, in one sentence.
    """

    strategy: Strategy
    loss: float
    converged: bool
    iterations: int
    relative_change: float
    gradient_norm: float
    duality_gap: float | None
    guarantee: str


def power_coefficients(workload: Workload, exponent: float, count: int) -> np.ndarray:
    """Returns the first coefficients of a power of the Toeplitz workload.

    A constant learning rate makes `A = 1 / ((1 - z) (1 - momentum z))` as a power series in the
    shift z; a varying one is ignored. `(1 - z)^-exponent` has the coefficients r_0 = 1 and
    `r_j = r_(j-1) (j - 1 + exponent) / j`.
    """
    j = np.arange(1, count)
    root = np.cumprod(np.append(1.0, (j - 1 + exponent) / j))
    if not workload.momentum:
        return root
    powers = np.append(1.0, np.full(count - 1, workload.momentum)).cumprod()
    return scipy.signal.fftconvolve(root, root * powers)[:count]


def square_root_coefficients(workload: Workload, num_bands: int) -> np.ndarray:
    """Returns the first coefficients of `A^(1/2)`, the factorisation of Fichtenberger et al.

    Cut to `num_bands` it is a strategy of its own and the start of the optimisation.
    """
    b = _checks.num_bands(num_bands, workload.num_rounds)
    return power_coefficients(workload, 0.5, b)


def square_root(workload: Workload, num_bands: int) -> ToeplitzStrategy:
    """Returns the banded square-root factorisation, scaled so that its largest column norm is 1."""
    c = square_root_coefficients(workload, num_bands)
    return ToeplitzStrategy(c / np.linalg.norm(c), workload.num_rounds)


def optimize_toeplitz(
    workload: Workload,
    num_bands: int,
    *,
    max_iterations: int = 500,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Returns the best banded Toeplitz strategy under single or b-min-separated participation.

    Minimises `max column norm^2 * |A C^-1|_F^2`, which for `num_bands <= min_separation` is the
    loss divided by the number of participations. An evaluation costs O(n b) for a constant learning
    rate (recursive filters), O(n b^2) otherwise.
    """
    b = _checks.num_bands(num_bands, workload.num_rounds)
    start = square_root_coefficients(workload, b)
    if workload.has_constant_learning_rate:
        error = _toeplitz_error(workload, b)
    else:
        error = _tied_banded_error(workload, b)

    def log_loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        c = np.concatenate([[1.0], free])
        value, gradient = error(c)
        norm = c @ c
        return float(np.log(value * norm)), (gradient / value + 2.0 * c / norm)[1:]

    outcome = minimize_log_loss(log_loss, start[1:], 1e-10, max_iterations, progress)
    c = np.append(1.0, outcome.x)
    strategy = ToeplitzStrategy(c / np.linalg.norm(c), workload.num_rounds)
    return optimization_result(
        outcome,
        strategy,
        "Stationary point over banded Toeplitz strategies with largest column norm 1; for at most "
        "k' participations at min-separation >= num_bands the sensitivity is at most sqrt(k').",
    )


def optimize_banded(
    workload: Workload,
    num_bands: int,
    *,
    tolerance: float = 2e-4,
    max_iterations: int = 1000,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Problem 2: the best banded strategy whose columns all have norm 1.

    Args:
      workload: The workload A.
      num_bands: Number of bands, the main diagonal included.
      tolerance: Stops when 4 iterations together lower the loss by less than this fraction; it is
        then typically within twice that fraction of the optimum, up to 7 times with momentum. So
        the default's RMSE, a root of the loss, is 0.01 to 0.06 % above the best one.
      max_iterations: Limit on iterations at each level.
      progress: Called after every iteration of the finest level.

    Returns:
      The strategy; under b-min-separation with at most k' participations and `num_bands <= b` its
      sensitivity is exactly sqrt(k') (Theorem 2) as soon as k' participations fit into training.
    """
    b = _checks.num_bands(num_bands, workload.num_rounds)
    outcome = _minimize_multilevel(
        workload, b, workload.num_rounds, tolerance, max_iterations, progress
    )
    return optimization_result(
        outcome,
        BandedStrategy(outcome.x),
        "Problem 2 (equal column norms), globally optimal up to the reported convergence; "
        "sensitivity sqrt(k') for k' participations at min-separation >= num_bands (Theorem 2).",
    )


def optimize_banded_fixed_epochs(
    workload: Workload,
    num_bands: int,
    min_separation: int,
    *,
    tolerance: float = 2e-4,
    max_iterations: int = 1000,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Appendix B: the best banded strategy for (k, b)-participation, column norms free.

    The squared column norms of the rounds `i, i + b, i + 2 b, ..` sum to 1 for every i, which is
    sensitivity 1 under (k, b)-participation with `k = ceil(n / b)` (Proposition B.1). Under
    b-min-separation such a strategy has a larger sensitivity; compute it with
    `sensitivity.min_separation_participation`.

    Args:
      workload: The workload A.
      num_bands: Number of bands, at most `min_separation`.
      min_separation: b, the number of rounds in an epoch.
      tolerance: Stops when 4 iterations together lower the loss by less than a quarter of this
        fraction, because free column norms converge more slowly; it is then typically within twice
        that fraction of the optimum, 5 to 15 times with momentum, 30 at 0.99.
      max_iterations: Limit on iterations at each level.
      progress: Called after every iteration of the finest level.
    """
    b = _checks.num_bands(num_bands, workload.num_rounds)
    separation = _checks.positive_int("min_separation", min_separation)
    if b > separation:
        raise BandMFError(
            "num_bands must be at most min_separation for (k, b)-participation, so that the "
            f"participations of a unit do not interact. Found num_bands={b}, "
            f"min_separation={separation}."
        )
    outcome = _minimize_multilevel(workload, b, separation, tolerance / 4, max_iterations, progress)
    return optimization_result(
        outcome,
        BandedStrategy(outcome.x),
        "Appendix B (column norms free), globally optimal for (k, b)-participation up to the "
        "reported convergence; sensitivity 1 under (k, b)-participation (Proposition B.1).",
    )


def optimization_result(
    outcome: _lbfgs.Outcome, strategy: Strategy, guarantee: str, *, loss: float | None = None
) -> OptimizationResult:
    """Translates the outcome of minimising log(loss), or, with a `loss`, what stands in for it."""
    return OptimizationResult(
        strategy=strategy,
        loss=float(np.exp(outcome.value)) if loss is None else loss,
        converged=outcome.converged,
        iterations=outcome.iterations,
        relative_change=float(np.expm1(outcome.recent_gain)),
        gradient_norm=outcome.gradient_norm,
        duality_gap=None,
        guarantee=guarantee,
    )


def minimize_log_loss(
    log_loss: _lbfgs.Function,
    start: np.ndarray,
    tolerance: float,
    max_iterations: int,
    progress: ProgressCallback | None,
    first_step: float | None = None,
) -> _lbfgs.Outcome:
    """Minimises log(loss), so that `tolerance` is relative to the loss."""

    def report(iteration: int, value: float) -> None:
        if progress is not None:
            progress(iteration, float(np.exp(value)))

    return _lbfgs.minimize(
        log_loss,
        start,
        finished=_lbfgs.stalled(tolerance),
        max_iterations=max_iterations,
        progress=report,
        first_step=first_step,
    )


def _minimize_multilevel(
    workload: Workload,
    num_bands: int,
    separation: int,
    tolerance: float,
    max_iterations: int,
    progress: ProgressCallback | None,
) -> _lbfgs.Outcome:
    """Minimises `|A C^-1|_F^2` over banded C, starting from the solution of a coarser problem.

    Columns `i, i + separation, i + 2 separation, ..` form a group, whose squared norms sum to 1; a
    separation of n makes every column a group of its own.
    """
    n = workload.num_rounds
    inside = inside_matrix(num_bands, n)
    toeplitz = _reference_toeplitz(workload, num_bands)[:, None]
    start = np.where(inside, toeplitz, 0.0)
    first_step = None
    coarse_bands = ceil_div(num_bands, _COARSENING)
    if coarse_bands >= _SMALLEST_COARSE_BANDS:
        coarse = coarsened(workload, _COARSENING)
        coarse_separation = min(ceil_div(separation, _COARSENING), coarse.num_rounds)
        outcome = _minimize_multilevel(
            coarse, coarse_bands, coarse_separation, tolerance, max_iterations, None
        )
        ratio = outcome.x / _reference_toeplitz(coarse, coarse_bands)[:, None]
        start *= _interpolate(_extend_downwards(ratio), num_bands, n)
        first_step = outcome.first_scale
    groups = np.arange(n) % separation
    return _minimize_normalized(
        workload, start, groups, tolerance, max_iterations, progress, first_step
    )


def _minimize_normalized(
    workload: Workload,
    start: np.ndarray,
    groups: np.ndarray,
    tolerance: float,
    max_iterations: int,
    progress: ProgressCallback | None,
    first_step: float | None = None,
) -> _lbfgs.Outcome:
    """Minimises over banded C whose squared column norms sum to 1 in every group."""
    b, n = start.shape
    objective = BandedObjective(workload, b)
    # A column influences the rounds after it: the curvature falls towards the end of training. The
    # floor keeps the last columns from being scaled without bound.
    scale = np.sqrt(n / np.maximum(n - np.arange(n), b))

    def log_loss(variables: np.ndarray) -> tuple[float, np.ndarray]:
        bands = variables.reshape(b, n) * scale
        norms = _group_norms(bands, groups)
        bands /= norms
        value, gradient = objective.value_and_gradient(bands)
        # Moving along C itself changes only the norm, which is divided out again. In place, as
        # arrays of this size are the memory of the optimisation; outside the matrix both are zero.
        bands *= np.bincount(groups, np.einsum("dj,dj->j", gradient, bands))[groups]
        gradient -= bands
        gradient *= scale / (norms * value)
        return np.log(value), gradient.ravel()

    outcome = minimize_log_loss(
        log_loss, (start / scale).ravel(), tolerance, max_iterations, progress, first_step
    )
    bands = outcome.x.reshape(b, n) * scale
    bands /= _group_norms(bands, groups)
    return dataclasses.replace(outcome, x=_with_positive_diagonal(bands))


def _with_positive_diagonal(bands: np.ndarray) -> np.ndarray:
    """Flips rows of C, which changes neither X = C^T C nor the error."""
    signs = np.sign(bands[0])
    padded = np.concatenate([signs, np.zeros(len(bands))])
    rows = np.arange(len(bands))[:, None] + np.arange(bands.shape[1])[None, :]
    return bands * padded[rows]


def _group_norms(bands: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.sqrt(np.bincount(groups, np.einsum("dj,dj->j", bands, bands))[groups])


def _reference_toeplitz(workload: Workload, num_bands: int) -> np.ndarray:
    """Returns the Toeplitz optimum for a constant learning rate, of unit norm."""
    constant = workloads.sgd(workload.num_rounds, workload.momentum)
    strategy = optimize_toeplitz(constant, num_bands).strategy
    assert isinstance(strategy, ToeplitzStrategy)
    return strategy.coefficients


def coarsened(workload: Workload, factor: int) -> Workload:
    """Returns the workload in which one round stands for `factor` rounds."""
    centres = np.minimum(
        np.arange(0, workload.num_rounds, factor) + factor // 2, workload.num_rounds - 1
    )
    rates = workload.learning_rates[centres]
    return Workload(rates.size, workload.momentum**factor, rates)


def _extend_downwards(ratio: np.ndarray) -> np.ndarray:
    """Fills entries outside the matrix with the last one inside, for the interpolation."""
    b, n = ratio.shape
    last_inside = np.minimum(b, n - np.arange(n)) - 1
    return np.where(inside_matrix(b, n), ratio, ratio[last_inside, np.arange(n)])


def _interpolate(coarse: np.ndarray, num_bands: int, num_rounds: int) -> np.ndarray:
    """Interpolates linearly from coarse (band, round) positions to the fine ones."""
    b, n = coarse.shape
    d = np.minimum(np.arange(num_bands) / _COARSENING, b - 1)
    j = np.clip((np.arange(num_rounds) + 0.5) / _COARSENING - 0.5, 0, n - 1)
    return _lines(_lines(coarse, d).T, j).T


def _lines(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns the rows of `values` at positions between them, on straight lines."""
    low = at.astype(int)
    high = np.minimum(low + 1, len(values) - 1)
    return values[low] + (at - low)[:, None] * (values[high] - values[low])


def _toeplitz_error(
    workload: Workload, num_bands: int
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Returns `c -> (|A C^-1|_F^2, gradient)` when A and C are Toeplitz.

    B = a / c as power series, entry i of B occurs n - i times, and dB = -B dc / c.
    """
    n = workload.num_rounds
    first_column = workload.first_column()
    multiplicity = np.arange(n, 0, -1.0)

    def error(c: np.ndarray) -> tuple[float, np.ndarray]:
        B = scipy.signal.lfilter([1.0], c, first_column)
        if not np.abs(B).max() < _LARGEST_ENTRY:
            # 1 / c diverges: a line search stepped too far, and an enormous value sends it back.
            return float(n * _LARGEST_ENTRY**2), np.zeros(num_bands)
        B_over_c = scipy.signal.lfilter([1.0], c, B)
        weighted = multiplicity * B
        gradient = [-2.0 * (weighted[d:] @ B_over_c[: n - d]) for d in range(num_bands)]
        return float(weighted @ B), np.array(gradient)

    return error


def _tied_banded_error(
    workload: Workload, num_bands: int
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Returns the same for any learning rates: the banded objective with tied diagonals."""
    objective = BandedObjective(workload, num_bands)
    inside = inside_matrix(num_bands, workload.num_rounds)

    def error(c: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective.value_and_gradient(np.where(inside, c[:, None], 0.0))
        return value, np.sum(gradient, axis=1, where=inside)

    return error
