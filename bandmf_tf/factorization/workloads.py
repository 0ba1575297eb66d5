"""Workloads A: what the training algorithm computes from the stream of gradients.

The error of a mechanism is measured on `A x`, where row i of `x` is the gradient sum of round i.
The workloads here are those of SGD and its momentum variant under any learning-rate schedule:

    v_i = momentum * v_{i-1} + x_i                 (velocity)
    theta_i = theta_{i-1} - learning_rate_i * v_i  (model; the workload is its displacement)

which is the update of TFF's `build_sgdm` and of the paper's FedSGDM. As a matrix,

    A = S diag(learning_rates) M,   S = prefix sums,   M[i, j] = momentum^(i - j) for i >= j.

`A` is never built: `S` and `M` are recurrences, and `A^-1 = M^-1 diag(1 / learning_rates) S^-1` has
one band more than each recurrence has terms (2 without momentum, 3 with it). That is what makes the
objective of the optimisation cheap, see `error.py`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf.errors import BandMFError


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """SGD with momentum under a learning-rate schedule, as a linear map of the gradients.

    Attributes:
      num_rounds: Number of rounds n.
      momentum: Momentum in [0, 1); 0 is plain SGD.
      learning_rates: Positive vector of n learning rates; all ones is the prefix-sum workload.
    """

    num_rounds: int
    momentum: float
    learning_rates: np.ndarray

    def __post_init__(self) -> None:
        n = _checks.positive_int("num_rounds", self.num_rounds)
        rates = _checks.finite_array("learning_rates", self.learning_rates, ndim=1)
        if rates.size != n:
            raise BandMFError(
                f"learning_rates must hold one rate for each of the num_rounds={n} rounds. "
                f"Found {rates.size}."
            )
        if np.any(rates <= 0.0):
            first = int(np.argmax(rates <= 0.0))
            raise BandMFError(
                "learning_rates must be positive in every round; start a warm-up at a small "
                f"positive rate instead of zero. Found {rates[first]} at round {first}."
            )
        rates.setflags(write=False)
        object.__setattr__(self, "num_rounds", n)
        object.__setattr__(self, "momentum", _checks.momentum("momentum", self.momentum))
        object.__setattr__(self, "learning_rates", rates)

    @property
    def is_prefix_sum(self) -> bool:
        """Whether A is the lower triangle of ones, up to a constant factor."""
        return self.momentum == 0.0 and self.has_constant_learning_rate

    @property
    def has_constant_learning_rate(self) -> bool:
        """Whether A is a Toeplitz matrix."""
        return bool(np.all(self.learning_rates == self.learning_rates[0]))

    def matmul(self, x: np.ndarray) -> np.ndarray:
        """Returns `A x` for `x` with n rows, in O(n) operations per column."""
        x = _checks.rows("x", x, self.num_rounds)
        velocity = self._velocity(x)
        return np.cumsum(_scale_rows(velocity, self.learning_rates), axis=0)

    def transpose_matmul(self, x: np.ndarray) -> np.ndarray:
        """Returns `A^T x` for `x` with n rows, in O(n) operations per column."""
        x = _checks.rows("x", x, self.num_rounds)
        suffix_sums = np.cumsum(x[::-1], axis=0)[::-1]
        scaled = _scale_rows(suffix_sums, self.learning_rates)
        return self._velocity(scaled[::-1])[::-1]

    def _velocity(self, x: np.ndarray) -> np.ndarray:
        if not self.momentum:
            return x
        return scipy.signal.lfilter([1.0], [1.0, -self.momentum], x, axis=0)

    def inverse_bands(self) -> np.ndarray:
        """Returns `A^-1` in band storage: `bands[d, j] = A^-1[j + d, j]`, zero outside the matrix.

        `A^-1 = M^-1 diag(1 / eta) S^-1` reads, column by column,

            A^-1[j,     j] =   1 / eta_j
            A^-1[j + 1, j] = -(1 / eta_{j+1}) - momentum / eta_j
            A^-1[j + 2, j] =   momentum / eta_{j+1}
        """
        n, beta = self.num_rounds, self.momentum
        inverse = 1.0 / self.learning_rates
        following = np.append(inverse[1:], 0.0)
        bands = np.zeros((3 if beta else 2, n))
        bands[0] = inverse
        bands[1, : n - 1] = -following[: n - 1] - beta * inverse[: n - 1]
        if beta and n > 2:
            bands[2, : n - 2] = beta * following[: n - 2]
        return bands[: min(len(bands), n)]

    def first_column(self) -> np.ndarray:
        """Returns column 0 of A, which defines A when the learning rate is constant."""
        impulse = np.zeros(self.num_rounds)
        impulse[0] = 1.0
        return self.matmul(impulse)

    def materialize(self) -> np.ndarray:
        """Returns A as a dense matrix; for tests, pictures and the dense baselines."""
        return self.matmul(np.eye(self.num_rounds))

    def describe(self) -> str:
        """Returns the workload in words, as printed in plans and reports."""
        if self.is_prefix_sum:
            return f"prefix sums of {self.num_rounds} rounds"
        low, high = self.learning_rates.min(), self.learning_rates.max()
        rate = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        kind = f"SGD with momentum {self.momentum:g}" if self.momentum else "SGD"
        return f"{kind} over {self.num_rounds} rounds, learning rate {rate}"


def prefix_sum(num_rounds: int) -> Workload:
    """Returns the lower triangle of ones: plain SGD with a constant learning rate."""
    return sgd(num_rounds)


def sgd(
    num_rounds: int,
    momentum: float = 0.0,
    learning_rates: np.ndarray | None = None,
) -> Workload:
    """Returns the workload of SGD; `learning_rates` of None stands for the constant 1."""
    n = _checks.positive_int("num_rounds", num_rounds)
    rates = np.ones(n) if learning_rates is None else learning_rates
    return Workload(n, momentum, rates)


def warmup_cooldown_schedule(
    num_rounds: int,
    warmup_fraction: float = 0.15,
    cooldown_fraction: float = 0.25,
    warmup_start: float = 0.05,
    cooldown_end: float = 0.05,
) -> np.ndarray:
    """Returns learning rates relative to the peak: linear warm-up, constant, linear cool-down.

    The defaults are the paper's StackOverflow schedule: from 0.05 to 1 over the first 15 % of the
    rounds, and from 1 down to 0.05 over the last 25 %. A fraction of 0 leaves that part out.
    """
    n = _checks.positive_int("num_rounds", num_rounds)
    for name, fraction in (("warmup", warmup_fraction), ("cooldown", cooldown_fraction)):
        if not 0.0 <= fraction <= 1.0:
            raise BandMFError(f"{name}_fraction must be in [0, 1]. Found {fraction}.")
    if warmup_fraction + cooldown_fraction > 1.0:
        raise BandMFError(
            "warmup_fraction and cooldown_fraction must not overlap; their sum must be at most 1. "
            f"Found {warmup_fraction} + {cooldown_fraction}."
        )
    warmup = math.ceil(warmup_fraction * n - 1e-9)
    cooldown = min(math.ceil(cooldown_fraction * n - 1e-9), n - warmup)
    rates = np.ones(n)
    rates[:warmup] = np.linspace(warmup_start, 1.0, warmup, endpoint=False)
    rates[n - cooldown :] = np.linspace(1.0, cooldown_end, cooldown + 1)[1:]
    return rates


def _scale_rows(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return x * factors.reshape((-1,) + (1,) * (x.ndim - 1))
