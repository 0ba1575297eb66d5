"""Buffered linear Toeplitz (BLT) strategies: correlated noise in a few rows of memory.

A BLT (McMahan, Xu, Zhang; "A hassle-free algorithm for private learning in practice") with d
buffers is the Toeplitz matrix of

    c_0 = 1,   c_j = sum_i scales_i decays_i^(j - 1),   j >= 1,

times a factor. Row i of `x = C^-1 z` then needs d earlier rows only, whatever the number of rounds:

    x = z - sum_i scales_i S_i,    S_i <- decays_i S_i + x,    starting with S_i = 0.

With distinct decays in (0, 1) and positive scales whose sum is at most 1, c is positive and never
increases, so every sensitivity is exact and cheap (`sensitivity.toeplitz_participation`), and noise
never grows: as a map of the buffers, the recurrence is `D - 1 w^T` for D = diag(decays), w =
scales. With s = sqrt(w) it is similar to the symmetric `D - s s^T`, whose eigenvalues h_1 > h_2 ..
lie below the decays one by one (interlacing) and above -sum(w) >= -1. With its eigenvectors q_i,

    C^-1 is the Toeplitz matrix of g_0 = 1, g_j = sum_i v_i h_i^(j - 1),   v_i = -(q_i . s)^2.

Conversely C is given by decays and inverse decays that interlace, t_1 > h_1 > t_2 > .. > h_d: as
power series, C = prod(1 - h_i z) / prod(1 - t_i z), whose partial fractions have

    scales_i = prod_j (t_i - h_j) / prod_{j != i} (t_i - t_j) > 0,   sum(scales) = sum(t - h).

The sum is at most 1 if and only if `h_d >= t_d - (1 - sum_{i<d} (t_i - h_i))`. That is the set
over which `optimize_buffered` minimises `sensitivity^2 |A C^-1|_F^2`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import _lbfgs, error
from bandmf_tf.factorization.optimization import (
    OptimizationResult,
    ProgressCallback,
    coarsened,
    minimize_log_loss,
    optimization_result,
)
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.sensitivity import evenly_spaced
from bandmf_tf.factorization.strategies import InverseStream, LowerToeplitz
from bandmf_tf.factorization.workloads import Workload

Minimizer = Callable[[_lbfgs.Function, np.ndarray], _lbfgs.Outcome]

# How many buffers are tried if their number is left open, and what one more has to gain.
MOST_BUFFERS = 8
_SMALLEST_GAIN = 0.01

# Neighbouring decays of more buffers would coincide in double precision.
_LARGEST_NUM_BUFFERS = 64

# Up to this many rounds an evaluation costs next to nothing; beyond, a solution for so many times
# fewer rounds is the start.
_LARGEST_COARSE = 4096
_COARSENING = 8

# Ratios of neighbouring decays stay below sigmoid of this, so that no two coincide.
_LARGEST_VARIABLE = 18.0


class BufferedStrategy(LowerToeplitz):
    """A BLT: decays and scales of its buffers, and a factor on the whole matrix.

    Args:
      decays: The factors by which the buffers decay in a round, in (0, 1), from large to small.
      scales: The weights with which the buffers enter a row, positive, of sum at most 1.
      num_rounds: Number of rounds n.
      scale: Factor on C, whose diagonal it is.
    """

    kind = "blt"
    arrays = ("decays", "scales")
    parameters = ("num_rounds", "scale")

    def __init__(self, decays: np.ndarray, scales: np.ndarray, num_rounds: int, scale: float = 1.0):
        decays = _checks.finite_array("decays", decays, ndim=1)
        scales = _checks.finite_array("scales", scales, ndim=1)
        if scales.size != decays.size:
            raise BandMFError(
                f"decays and scales must have one entry a buffer. Found {decays.size} and "
                f"{scales.size}."
            )
        inside = decays[0] < 1.0 and np.all(np.diff(decays) < 0.0) and decays[-1] > 0.0
        if not inside:
            raise BandMFError(
                f"decays must lie strictly between 0 and 1 and fall strictly. Found {decays}."
            )
        if scales.min() <= 0.0 or scales.sum() > 1.0:
            raise BandMFError(
                "scales must be positive and have a sum of at most 1, so that coefficients never "
                f"increase. Found {scales}."
            )
        decays.setflags(write=False)
        scales.setflags(write=False)
        self._decays, self._scales = decays, scales
        self._num_rounds = _checks.positive_int("num_rounds", num_rounds)
        self._scale = _checks.positive_float("scale", scale)

    @property
    def decays(self) -> np.ndarray:
        """The read-only decays of the buffers, from large to small."""
        return self._decays

    @property
    def scales(self) -> np.ndarray:
        """The read-only weights with which the buffers enter a row."""
        return self._scales

    @property
    def scale(self) -> float:
        """Factor on C."""
        return self._scale

    @property
    def num_buffers(self) -> int:
        """Number of buffers d."""
        return self._decays.size

    @property
    def num_bands(self) -> int:
        return self._num_rounds

    @property
    def rows_in_memory(self) -> int:
        return min(self.num_buffers, self._num_rounds - 1)

    def describe(self) -> str:
        return f"{self.kind}, {self.num_buffers} buffer{'' if self.num_buffers == 1 else 's'}"

    @functools.cached_property
    def inverse_parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Decays h and (negative) scales v of the inverse of C / scale, in closed form."""
        root = np.sqrt(self._scales)
        h, vectors = np.linalg.eigh(np.diag(self._decays) - np.outer(root, root))
        return h[::-1], -((root @ vectors) ** 2)[::-1]

    @functools.cached_property
    def coefficients(self) -> np.ndarray:
        c = self._scale * _series(self._decays, self._scales, self._num_rounds)
        c.setflags(write=False)
        return c

    def matmul(self, x: np.ndarray) -> np.ndarray:
        x = _checks.rows("x", x, self.num_rounds)
        return self._scale * _filtered(self._decays, self._scales, x)

    def inverse_matmul(self, z: np.ndarray) -> np.ndarray:
        z = _checks.rows("z", z, self.num_rounds)
        return _filtered(*self.inverse_parameters, z) / self._scale

    def inverse_stream(self) -> InverseStream:
        """Returns a stream from rows of z to rows of `C^-1 z`, in `num_buffers` rows of memory."""
        return BufferedInverseStream(self)

    def scaled(self, factor: float) -> BufferedStrategy:
        factor = _checks.positive_float("factor", factor)
        return BufferedStrategy(self._decays, self._scales, self._num_rounds, self._scale * factor)

    def leading_block(self, num_rounds: int) -> BufferedStrategy:
        t = self._checked_block(num_rounds)
        return BufferedStrategy(self._decays, self._scales, t, self._scale)

    def _scheduled_round_variances(self, workload: Workload) -> np.ndarray:
        h, v = self.inverse_parameters
        return error.toeplitz_round_variances(workload, np.ones(1), h, v) / self._scale**2


class BufferedInverseStream(InverseStream):
    """Streams `C^-1 z` of a BLT: remembers its buffers."""

    def __init__(self, strategy: BufferedStrategy):
        super().__init__(strategy.num_rounds)
        self._decays, self._scales = strategy.decays, strategy.scales
        self._scale = strategy.scale
        self._buffers: np.ndarray | None = None

    def _solve(self, i: int, noise_row: np.ndarray) -> np.ndarray:
        del i
        if self._buffers is None:
            self._buffers = np.zeros((self._decays.size, *noise_row.shape))
        result = noise_row / self._scale - np.tensordot(self._scales, self._buffers, axes=1)
        decays = self._decays.reshape((-1,) + (1,) * noise_row.ndim)
        self._buffers = decays * self._buffers + result
        return result


def optimize_buffered(
    workload: Workload,
    num_buffers: int | None,
    participation: Participation,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 500,
    progress: ProgressCallback | None = None,
) -> OptimizationResult:
    """Returns the best BLT for a workload and a participation, scaled to sensitivity 1.

    The problem is not convex: L-BFGS starts from several places and the best end counts, within
    1e-4 of what hundreds of random starts find. Where fewer buffers reach the optimum (three, for
    six epochs of 342 rounds), those beyond hardly enter.

    Args:
      workload: The workload A.
      num_buffers: Number of buffers; None adds them one by one, up to eight, as long as one more
        lowers the root mean squared error by at least a hundredth.
      participation: In which rounds a unit may take part.
      tolerance: Stops when 4 iterations together lower the loss by less than this fraction.
      max_iterations: Limit on iterations from each start.
      progress: Called after every iteration at full size.
    """
    b, k = participation.separation(workload.num_rounds), participation.most(workload.num_rounds)
    minimize = functools.partial(
        minimize_log_loss, tolerance=tolerance, max_iterations=max_iterations, progress=progress
    )
    d = 1 if num_buffers is None else checked_num_buffers(num_buffers)
    outcome = _minimize_multilevel(workload, d, b, k, minimize)
    for more in range(2, MOST_BUFFERS + 1) if num_buffers is None else ():
        better = _minimize_multilevel(workload, more, b, k, minimize)
        if better.value > outcome.value + 2.0 * math.log(1.0 - _SMALLEST_GAIN):
            break
        outcome = better
    t, h = _decays(np.minimum(outcome.x, _LARGEST_VARIABLE))
    strategy = BufferedStrategy(t, _residues(t, h), workload.num_rounds)
    return optimization_result(
        outcome,
        strategy.scaled(1.0 / participation.sensitivity(strategy).value),
        "Best stationary point found over BLTs with that many buffers; sensitivity 1 under the "
        "participation, exact.",
    )


def checked_num_buffers(num_buffers: int) -> int:
    """Returns a number of buffers that can be optimised."""
    d = _checks.positive_int("num_buffers", num_buffers)
    if d > _LARGEST_NUM_BUFFERS:
        raise BandMFError(
            f"num_buffers must be at most {_LARGEST_NUM_BUFFERS}; beyond {MOST_BUFFERS} hardly any "
            f"lowers the error. Found {d}."
        )
    return d


def _minimize_multilevel(
    workload: Workload, num_buffers: int, separation: int, participations: int, minimize: Minimizer
) -> _lbfgs.Outcome:
    """Minimises from several starts; for many rounds with the solution for fewer in mind.

    A decay t in a round of the coarser problem is a decay t^(1 / r) in one of its r rounds. That is
    one start. As more rounds have use for more decays, the other one has only its slowest decay,
    and the rest equally spaced on a logarithmic scale.
    """
    n = workload.num_rounds
    if n > _LARGEST_COARSE:
        coarse = coarsened(workload, _COARSENING)
        shorter = max(1, separation // _COARSENING)
        outcome = _minimize_multilevel(coarse, num_buffers, shorter, participations, minimize)
        # The last h may be negative; any small number will do for the start.
        t, h = (np.maximum(x, 1e-3) ** (1.0 / _COARSENING) for x in _decays(outcome.x))
        starts = [_variables(t, h), _spaced(1.0 - t[0], 0.7, num_buffers)]
    else:
        nearest = [min(0.2, factor / separation) for factor in (0.3, 3.0)]
        starts = [_spaced(low, high, num_buffers) for low in nearest for high in (0.5, 0.9)]
    objective = _Objective(workload, separation, participations)
    outcomes = [minimize(objective, start) for start in starts]
    return min(outcomes, key=lambda outcome: outcome.value)


def _spaced(low: float, high: float, num_buffers: int) -> np.ndarray:
    """Returns variables with 1 - t_1 = low, .., 1 - h_d = high, equally spaced in logarithms."""
    values = 1.0 - np.geomspace(low, high, 2 * num_buffers)
    return _variables(values[::2], values[1::2])


class _Objective:
    """log of `sensitivity^2 |A C^-1|_F^2` and its gradient, in the variables of `_decays`."""

    def __init__(self, workload: Workload, separation: int, participations: int):
        self._workload = workload
        self._num_rounds = workload.num_rounds
        self._shifts = separation, participations
        self._exponents = np.arange(1.0, self._num_rounds - 1)

    def __call__(self, variables: np.ndarray) -> tuple[float, np.ndarray]:
        t, h = _decays(variables)
        with np.errstate(all="ignore"):  # Neighbours that coincide give NaN, which is stepped from.
            w, v = _residues(t, h), _residues(h, t)
            squared, in_t, in_w = self._sensitivity(t, w)
            total, in_h, in_v = self._error(h, v)
            from_w, from_v = _residues_adjoint(t, h, in_w * w), _residues_adjoint(h, t, in_v * v)
        in_t, in_h = in_t + from_w[0] + from_v[1], in_h + from_v[0] + from_w[1]
        value = float(np.log(squared * total))
        return value, _decays_adjoint(variables, in_t, in_h)

    def _sensitivity(self, t: np.ndarray, w: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns the squared sensitivity and the gradient of its logarithm."""
        powers = _powers(t, self._num_rounds - 1)
        squared, in_c = evenly_spaced(np.append(1.0, w @ powers), *self._shifts)
        return squared, *self._in_series(w, powers, in_c / squared)

    def _error(self, h: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns the squared error and the gradient of its logarithm."""
        if not self._workload.has_constant_learning_rate:
            total, in_h, in_v = _scheduled_error(self._workload, h, v)
            return total, in_h / total, in_v / total
        powers = _powers(h, self._num_rounds - 1)
        B = self._workload.matmul(np.append(1.0, v @ powers))
        weighted = np.arange(self._num_rounds, 0.0, -1.0) * B  # Entry i of B occurs n - i times.
        total = float(weighted @ B)
        in_g = self._workload.transpose_matmul(weighted)
        return total, *self._in_series(v, powers, 2.0 / total * in_g)

    def _in_series(
        self, scales: np.ndarray, powers: np.ndarray, gradient: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the gradient in decays and scales, given that in the series of `_series`."""
        in_decays = scales * (powers[:, :-1] @ (self._exponents * gradient[2:]))
        return in_decays, powers @ gradient[1:]


def _scheduled_error(
    workload: Workload, h: np.ndarray, v: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the sum of `error.toeplitz_round_variances` and its gradient in h and v.

    The adjoint of every line there, from the last to the first, in the same O(n d) time.
    """
    n, eta, beta = workload.num_rounds, workload.learning_rates, workload.momentum
    powers = _powers(h, n)
    exponents = np.arange(n)
    p = _filter(beta, np.append(1.0, v @ powers[:, :-1]))
    sums = np.cumsum(p * powers, axis=1)
    filtered = [_filter(decay, eta * row) for decay, row in zip(h, sums, strict=True)]
    P = np.cumsum(p**2)
    E = np.append(0.0, v @ np.array(filtered)[:, :-1] + beta * (eta * P)[:-1])
    remaining = np.arange(n, 0.0, -1.0) * eta  # A round counts in all that follow, itself included.
    total = float(remaining @ (eta * P + 2.0 * _filter(beta, E)))

    in_E = _filter(beta, 2.0 * remaining[::-1])[::-1]
    in_P = remaining * eta + beta * eta * np.append(in_E[1:], 0.0)
    in_p = 2.0 * p * _cumsum_back(in_P)
    in_h, in_v = np.empty_like(h), np.empty_like(v)
    for a, row in enumerate(filtered):
        in_v[a] = in_E[1:] @ row[:-1]
        in_past = v[a] * _filter(h[a], np.append(in_E[1:], 0.0)[::-1])[::-1]
        in_terms = _cumsum_back(in_past * eta)
        in_h[a] = in_past[1:] @ row[:-1]
        in_h[a] += (in_terms[1:] * p[1:] * exponents[1:]) @ powers[a, :-1]
        in_p += in_terms * powers[a]
    in_g = _filter(beta, in_p[::-1])[::-1]
    in_v += powers[:, :-1] @ in_g[1:]
    in_h += v * (powers[:, :-2] @ (exponents[1:-1] * in_g[2:]))
    return total, in_h, in_v


def _filter(decay: float, x: np.ndarray) -> np.ndarray:
    """Returns `y_i = decay y_(i-1) + x_i`."""
    return scipy.signal.lfilter([1.0], [1.0, -decay], x)


def _cumsum_back(x: np.ndarray) -> np.ndarray:
    return np.cumsum(x[::-1])[::-1]


def _decays(variables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns decays of C and of C^-1 that belong to a BLT, whatever the variables.

    t_1 > h_1 > .. > t_d, in turn, are the products of sigmoid(variables) from the first on, so that
    they interlace; the last variable says how far h_d is below t_d, out of what is allowed.
    """
    products = np.cumprod(scipy.special.expit(variables[:-1]))
    t, h = products[::2], products[1::2]
    allowed = 1.0 - np.sum(t[:-1] - h)
    return t, np.append(h, t[-1] - scipy.special.expit(-variables[-1]) * allowed)


def _decays_adjoint(variables: np.ndarray, in_t: np.ndarray, in_h: np.ndarray) -> np.ndarray:
    """Returns the gradient in the variables, given that in both kinds of decays."""
    products = np.cumprod(scipy.special.expit(variables[:-1]))
    fraction = scipy.special.expit(-variables[-1])
    allowed = 1.0 - np.sum(products[:-1:2] - products[1::2])
    in_products = np.empty_like(products)
    in_products[::2] = in_t + in_h[-1] * np.append(np.full(in_t.size - 1, fraction), 1.0)
    in_products[1::2] = in_h[:-1] - fraction * in_h[-1]
    following = _cumsum_back(in_products * products) * scipy.special.expit(-variables[:-1])
    return np.append(following, in_h[-1] * allowed * fraction * (1.0 - fraction))


def _variables(t: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The inverse of `_decays`; decays that coincide are moved apart a little."""
    products = np.stack([t, h], axis=1).ravel()[:-1]
    ratios = products / np.append(1.0, products[:-1])
    below = (t[-1] - h[-1]) / (1.0 - np.sum(t[:-1] - h[:-1]))
    variables = scipy.special.logit(np.append(ratios, 1.0 - below))
    return np.minimum(variables, _LARGEST_VARIABLE)


def _residues(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Returns `prod_j (poles_i - zeros_j) / prod_{j != i} (poles_i - poles_j)`."""
    apart = np.subtract.outer(poles, poles) + np.eye(poles.size)
    return np.prod(np.subtract.outer(poles, zeros), axis=1) / np.prod(apart, axis=1)


def _residues_adjoint(
    poles: np.ndarray, zeros: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradient of `weights @ log|residues|` in poles and zeros."""
    from_zeros = 1.0 / np.subtract.outer(poles, zeros)
    from_poles = 1.0 / (np.subtract.outer(poles, poles) + np.diag(np.full(poles.size, np.inf)))
    in_poles = weights * np.sum(from_zeros - from_poles, axis=1) + weights @ from_poles
    return in_poles, -weights @ from_zeros


def _powers(bases: np.ndarray, count: int) -> np.ndarray:
    """Returns `bases[i]^m` for m < count, from an outer product of two short tables."""
    width = max(1, int(np.sqrt(count)))
    small = bases[:, None] ** np.arange(width)
    large = (bases[:, None] ** width) ** np.arange(ceil_div(count, width))
    return (large[:, :, None] * small[:, None, :]).reshape(bases.size, -1)[:, :count]


def _series(decays: np.ndarray, scales: np.ndarray, num_rounds: int) -> np.ndarray:
    """Returns `1, sum_i scales_i, sum_i scales_i decays_i, ..`."""
    return np.append(1.0, scales @ _powers(decays, num_rounds - 1))


def _filtered(decays: np.ndarray, scales: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the product with the Toeplitz matrix of `_series`, buffer by buffer."""
    y = x.copy()
    for decay, scale in zip(decays, scales, strict=True):
        y[1:] += scipy.signal.lfilter([scale], [1.0, -decay], x[:-1], axis=0)
    return y
