"""Strategies whose inverse is banded: noise from the last few rows of z.

`C^-1` is the Toeplitz matrix of q_0, .., q_(p-1), so row i of `C^-1 z` is `sum_j q_j z_(i-j)`: a
stream keeps p - 1 rows of z, or makes them again from their seeds. C is full: c = 1 / q as power
series. If q_1, .. are not positive and the first p coefficients of C never increase, none does:
`c_j - c_(j+1) = sum_{l>=1} |q_l / q_0| (c_(j-l) - c_(j+1-l))` from there on.

* `inverse_square_root` (BISR, Kalinin et al.): the first coefficients of `A^(-1/2)`, a closed form.
* `optimize_inverse_banded`: the best q for a participation. The squared error is a quadratic form
  in q, because `A C^-1` is linear in it, and only the sensitivity needs C.
"""

from __future__ import annotations

import collections
import functools

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf.factorization import error
from bandmf_tf.factorization.optimization import (
    OptimizationResult,
    ProgressCallback,
    minimize_log_loss,
    optimization_result,
    power_coefficients,
)
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.sensitivity import (
    Sensitivity,
    evenly_spaced,
    toeplitz_participation,
)
from bandmf_tf.factorization.strategies import InverseStream, LowerToeplitz
from bandmf_tf.factorization.workloads import Workload

# Beyond so many rounds Theorem 3, which needs all of C^T C, is not tried.
_LARGEST_GRAM = 4096

# Exponents of (1 - z) from which the optimisation starts, the best of them: 1/2 is BISR.
_EXPONENTS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)


class InverseBandedStrategy(LowerToeplitz):
    """A Toeplitz strategy with a banded inverse.

    Args:
      inverse_coefficients: q, the first p entries of the first column of C^-1.
      num_rounds: Number of rounds n.
    """

    kind = "inverse_banded"
    arrays = ("inverse_coefficients",)
    parameters = ("num_rounds",)

    def __init__(self, inverse_coefficients: np.ndarray, num_rounds: int):
        q = self._checked_column("inverse_coefficients", inverse_coefficients, num_rounds)
        self._inverse_coefficients = q
        _checks.finite_array("The strategy, 1 / inverse_coefficients,", self.coefficients, ndim=1)

    @property
    def inverse_coefficients(self) -> np.ndarray:
        """The read-only coefficients of C^-1."""
        return self._inverse_coefficients

    @functools.cached_property
    def coefficients(self) -> np.ndarray:
        impulse = np.zeros(self._num_rounds)
        impulse[0] = 1.0
        with np.errstate(over="ignore", invalid="ignore"):
            c = self.matmul(impulse)
        c.setflags(write=False)
        return c

    @property
    def rows_in_memory(self) -> int:
        return self._inverse_coefficients.size - 1

    def describe(self) -> str:
        return f"{self.kind}, C^-1 of {self.rows_in_memory + 1:,} bands"

    def matmul(self, x: np.ndarray) -> np.ndarray:
        x = _checks.rows("x", x, self.num_rounds)
        return scipy.signal.lfilter([1.0], self._inverse_coefficients, x, axis=0)

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        z = _checks.rows("z", z, self.num_rounds)
        return scipy.signal.lfilter(self._inverse_coefficients, [1.0], z, axis=0)

    def inverse_stream(self) -> InverseStream:
        """Returns a stream from rows of z to rows of `C^-1 z`, in p - 1 rows of memory."""
        return InverseBandedStream(self)

    def scaled(self, factor: float) -> InverseBandedStrategy:
        factor = _checks.positive_float("factor", factor)
        return InverseBandedStrategy(self._inverse_coefficients / factor, self._num_rounds)

    def leading_block(self, num_rounds: int) -> InverseBandedStrategy:
        t = self._checked_block(num_rounds)
        return InverseBandedStrategy(self._inverse_coefficients[:t], t)

    def min_separation_sensitivity(
        self, min_separation: int, max_participations: int
    ) -> Sensitivity | None:
        """In long training all that is looked at is one column of C."""
        if self._num_rounds <= _LARGEST_GRAM:
            return None
        return toeplitz_participation(self, min_separation, max_participations)

    def _scheduled_round_variances(self, workload: Workload) -> np.ndarray:
        none = np.zeros(0)
        return error.toeplitz_round_variances(workload, self._inverse_coefficients, none, none)


class InverseBandedStream(InverseStream):
    """Streams `C^-1 z` of a banded inverse: remembers the last rows of z."""

    def __init__(self, strategy: InverseBandedStrategy):
        super().__init__(strategy.num_rounds)
        self._coefficients = strategy.inverse_coefficients
        self._recent: collections.deque[np.ndarray] = collections.deque(
            maxlen=strategy.inverse_coefficients.size
        )

    def _solve(self, i: int, noise_row: np.ndarray) -> np.ndarray:
        del i
        self._recent.appendleft(noise_row)
        terms = zip(self._coefficients, self._recent, strict=False)
        return sum((q * row for q, row in terms), np.zeros_like(noise_row))


def inverse_square_root(workload: Workload, num_bands: int) -> InverseBandedStrategy:
    """Returns BISR: `num_bands` coefficients of `A^(-1/2)`, scaled to a largest column norm of 1.

    A constant learning rate makes `A^(-1/2) = (1 - z)^(1/2) (1 - momentum z)^(1/2)`. A varying one
    is ignored, as in `optimization.square_root`.
    """
    p = _checks.num_bands(num_bands, workload.num_rounds)
    strategy = InverseBandedStrategy(power_coefficients(workload, -0.5, p), workload.num_rounds)
    return strategy.scaled(1.0 / float(np.linalg.norm(strategy.coefficients)))


def optimize_inverse_banded(
    workload: Workload,
    num_bands: int,
    participation: Participation,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 500,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Returns the best strategy with a Toeplitz inverse of `num_bands` bands, of sensitivity 1.

    Minimises the error times the sensitivity of |C| to the pattern 0, b, 2 b, .., in O(n p) time an
    evaluation, and scales the result by the sensitivity of C to all patterns, most often the same.

    Args:
      workload: The workload A.
      num_bands: p, the number of bands of C^-1, its diagonal included.
      participation: In which rounds a unit may take part.
      tolerance: Stops when 4 iterations together lower the loss by less than this fraction.
      max_iterations: Limit on iterations.
      progress: Called after every iteration.
    """
    n = workload.num_rounds
    p = _checks.num_bands(num_bands, n)
    quadratic = _shift_gram(workload, p)
    shifts = participation.separation(n), participation.most(n)
    impulse = np.zeros(n)
    impulse[0] = 1.0

    def log_loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        q = np.append(1.0, free)
        with np.errstate(over="ignore", invalid="ignore"):  # Not finite: stepped back from.
            c = scipy.signal.lfilter([1.0], q, impulse)
            squared, in_sizes = evenly_spaced(np.abs(c), *shifts)
            in_c = in_sizes * np.sign(c)
            over_q = scipy.signal.lfilter([1.0], q, c)  # dc = -(c / q) dq as power series.
            in_q = np.array([-(in_c[j:] @ over_q[: n - j]) for j in range(p)])
            total = q @ quadratic @ q
            gradient = in_q / squared + 2.0 * (quadratic @ q) / total
            return float(np.log(squared * total)), gradient[1:]

    starts = [power_coefficients(workload, -exponent, p)[1:] for exponent in _EXPONENTS]
    start = min(starts, key=lambda q: log_loss(q)[0])
    outcome = minimize_log_loss(log_loss, start, tolerance, max_iterations, progress)
    strategy = InverseBandedStrategy(np.append(1.0, outcome.x), n)
    strategy = strategy.scaled(1.0 / participation.sensitivity(strategy).value)
    return optimization_result(
        outcome,
        strategy,
        "Stationary point over strategies whose inverse is banded and Toeplitz; sensitivity 1 "
        "under the participation.",
        loss=error.squared_error(workload, strategy),
    )


def _shift_gram(workload: Workload, count: int) -> np.ndarray:
    """Returns `<A Z^k, A Z^l>_F` for k, l < count, Z the shift by one round, in O(n count).

    Diagonal d of `G = A^T A`, for A = S diag(eta) M and momentum beta, is

        G[i, i + d] = rho_(i+d) sum_{s<d} beta^s eta_(i+s) + beta^d G[i + d, i + d],
        rho_j = sum_{s>=j} beta^(s-j) eta_s (n - s),
        G[j, j] = eta_j (rho_j + beta rho_(j+1)) + beta^2 G[j + 1, j + 1],

    because `(S^T S)[i, j] = n - max(i, j)`; and `<A Z^k, A Z^(k+d)>` sums it from i = k on.
    """
    n, eta, beta = workload.num_rounds, workload.learning_rates, workload.momentum

    def backwards(decay: float, x: np.ndarray) -> np.ndarray:
        return scipy.signal.lfilter([1.0], [1.0, -decay], x[::-1])[::-1]

    rho = backwards(beta, eta * np.arange(n, 0.0, -1.0))
    diagonal = backwards(beta**2, eta * (rho + beta * np.append(rho[1:], 0.0)))
    velocity = np.zeros(n)
    result = np.zeros((count, count))
    for d in range(count):
        entries = rho[d:] * velocity[: n - d] + beta**d * diagonal[d:]
        sums = np.cumsum(entries[::-1])[::-1]
        k = np.arange(count - d)
        result[k, k + d] = result[k + d, k] = np.where(k < n - d, sums[np.minimum(k, n - d - 1)], 0)
        velocity[: n - d] += beta**d * eta[d:]
    return result
