"""Buffered strategies (BLTs) for balls-in-bins sampling.

A BLT that is best for a fixed order of batches is not best for random bins. Their inner products
<m_i, m_j>, with m_i = C x_i of the rounds of bin i, have a part that all bins share, which the
secret of the bin does not hide, and one that falls with the distance of i and j, which it does. So
the error to lower is that at equal (epsilon, delta),

    noise multiplier(C) * sqrt(|A C^-1|_F^2 / n),

where the noise is about what samples will certify (`likely_noise_multiplier`): it is smooth in C
and takes a tenth of a second, where a certificate takes seconds.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from bandmf_tf.accounting import gaussian_noise_multiplier
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import BufferedStrategy, optimize_buffered
from bandmf_tf.factorization.error import squared_error
from bandmf_tf.factorization.workloads import Workload

# The search ends when the error changes by less than this fraction, or after so many strategies.
_TOLERANCE = 2e-4
_MAX_STRATEGIES = 300


def optimize_buffered_in_bins(
    workload: Workload, num_buffers: int, scheme: BallsInBins, epsilon: float, delta: float
) -> BufferedStrategy:
    """Returns a BLT of low error at (epsilon, delta), scaled to sensitivity 1 in a fixed order.

    Nelder and Mead's search over decays and scales, from the BLT that is best in a fixed order,
    which it never leaves for a worse one. Nothing of the privacy rests on it.

    Args:
        workload: The workload A.
        num_buffers: Number of buffers: two are enough for a few epochs.
        scheme: How examples are put into bins.
        epsilon: Epsilon.
        delta: Delta.
    """
    first = optimize_buffered(workload, num_buffers, scheme.participation).strategy
    if not isinstance(first, BufferedStrategy):
        raise AssertionError("optimize_buffered returns buffered strategies.")
    noise = gaussian_noise_multiplier(epsilon, delta, 1.0)

    def strategy(variables: np.ndarray) -> BufferedStrategy:
        decays, scales = (
            scipy.special.expit(variables[:num_buffers]),
            np.exp(variables[num_buffers:]),
        )
        found = BufferedStrategy(decays, scales, workload.num_rounds)
        return found.scaled(1 / scheme.participation.sensitivity(found).value)

    def log_error(variables: np.ndarray) -> float:
        nonlocal noise  # The next strategy is not far away.
        try:
            candidate = strategy(variables)
            noise = scheme.likely_noise_multiplier(candidate, epsilon, delta, start=noise)
        except BandMFError:  # Not a BLT, or too few replicas for so small a delta.
            return math.inf
        return math.log(noise) + math.log(squared_error(workload, candidate)) / 2

    start = np.concatenate([scipy.special.logit(first.decays), np.log(first.scales)])
    if math.isinf(log_error(start)):  # Its noise will be that without amplification.
        return strategy(start)
    simplex = np.vstack([start, start - 0.2 * np.eye(start.size)])
    outcome = scipy.optimize.minimize(
        log_error,
        start,
        method="Nelder-Mead",
        options={
            "initial_simplex": simplex,
            "maxfev": _MAX_STRATEGIES,
            "fatol": _TOLERANCE,
            "xatol": math.inf,
        },
    )
    return strategy(outcome.x)
