"""Choosing the number of bands under amplification (Appendix F.4).

With b bands the data set is split into b parts. More parts mean a larger sampling probability and
so more noise; more bands mean a strategy with less error for the same noise. The root mean squared
error at (epsilon, delta) weighs both:

    rmse(b) = sigma(b) sqrt(L(b) / n),

where sigma(b) is the noise multiplier that the sampling scheme with b parts needs and L(b) the
squared error ||A C_b^-1||_F^2 of the best b-banded strategy with unit column norms. Beyond
floor(dataset_size / batch_size) parts a batch no longer fits into a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from bandmf_tf import _checks
from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling
from bandmf_tf.errors import BandMFError


@dataclass(frozen=True)
class BandCandidate:
    """What one number of bands leads to.

    Attributes:
        num_bands: Number of bands of the strategy, and of parts of the data set.
        sampling_probability: Probability that an example of a part is in its batch.
        compositions: Number of sampled Gaussian sums that are accounted for.
        noise_multiplier: Noise for the target, for a strategy with unit column norms.
        squared_error: Squared error of that strategy at noise 1.
        rmse: noise_multiplier * sqrt(squared_error / num_rounds).
    """

    num_bands: int
    sampling_probability: float
    compositions: int
    noise_multiplier: float
    squared_error: float
    rmse: float


@dataclass(frozen=True)
class BandSearch:
    """The best candidate and everything that was tried, by number of bands."""

    best: BandCandidate
    tried: tuple[BandCandidate, ...]


def choose_num_bands(
    loss: Callable[[int], float],
    *,
    epsilon: float,
    delta: float,
    num_rounds: int,
    batch_size: int,
    dataset_size: int,
    scheme: Callable[
        [int, int, int, int], PoissonSampling | FixedSizeSampling
    ] = PoissonSampling.from_sizes,
    largest_num_bands: int | None = None,
    refine: bool = True,
    progress: Callable[[BandCandidate], None] | None = None,
    discretization: float | None = None,
) -> BandSearch:
    """Returns the number of bands with the least error at (epsilon, delta).

    The error is a smooth valley in the number of bands up to the roundings of part sizes and
    counts, so what `search_valley` finds, up to the largest possible number of bands, can be beaten
    only by what these roundings make of a number close to it.

    Args:
        loss: Squared error ||A C^-1||_F^2 of the best strategy with the given number of bands and
            unit column norms. Called once for each candidate.
        epsilon: Target epsilon.
        delta: Target delta.
        num_rounds: Number of rounds, n.
        batch_size: Examples in a batch, B (in expectation for Poisson sampling).
        dataset_size: Examples in the data set, m.
        scheme: Makes the sampling scheme from num_rounds, num_parts, batch_size, dataset_size:
            `PoissonSampling.from_sizes` or `FixedSizeSampling`.
        largest_num_bands: Tries no more bands than this; None tries all that are possible.
        refine: Whether to look between the powers of two.
        progress: Called with each candidate when it is done.
        discretization: Width of the grid of privacy losses; None for one that is fine enough.

    Returns:
        The best candidate (the one with fewer bands in a tie) and all others.
    """
    num_rounds = _checks.positive_int("num_rounds", num_rounds)
    batch_size = _checks.positive_int("batch_size", batch_size)
    largest = min(num_rounds, _checks.positive_int("dataset_size", dataset_size) // batch_size)
    if largest < 1:
        raise BandMFError(
            f"batch_size must be at most dataset_size; got batch_size={batch_size}, "
            f"dataset_size={dataset_size}. Use batches of at most {dataset_size} examples."
        )
    if largest_num_bands is not None:
        largest = min(largest, _checks.positive_int("largest_num_bands", largest_num_bands))
    tried: dict[int, BandCandidate] = {}

    def try_bands(num_bands: int) -> float:
        sampling = scheme(num_rounds, num_bands, batch_size, dataset_size)
        noise_multiplier = sampling.noise_multiplier(
            epsilon,
            delta,
            num_bands=num_bands,
            max_column_norm=1.0,
            discretization=discretization,
        )
        squared_error = _checks.positive_float(f"the loss of {num_bands} bands", loss(num_bands))
        tried[num_bands] = BandCandidate(
            num_bands=num_bands,
            sampling_probability=sampling.sampling_probability,
            compositions=sampling.rounds_per_part,
            noise_multiplier=noise_multiplier,
            squared_error=squared_error,
            rmse=noise_multiplier * math.sqrt(squared_error / num_rounds),
        )
        if progress is not None:
            progress(tried[num_bands])
        return tried[num_bands].rmse

    best = search_valley(try_bands, largest, refine=refine)
    return BandSearch(tried[best], tuple(tried[num_bands] for num_bands in sorted(tried)))


def search_valley(error: Callable[[int], float], largest: int, *, refine: bool = True) -> int:
    """Returns the number of bands with the least error, the smaller one in a tie.

    Tries the powers of two and `largest`; if `refine`, it halves the gaps beside the best one.
    """
    tried = {b: error(b) for b in sorted({*(2**i for i in range(largest.bit_length())), largest})}
    while refine:
        bands = sorted(tried)
        at = bands.index(_least(tried))
        neighbours = bands[max(0, at - 1) : at + 2]
        middles = {(a + b) // 2 for a, b in itertools.pairwise(neighbours)} - set(bands)
        if not middles:
            break
        tried |= {b: error(b) for b in sorted(middles)}
    return _least(tried)


def _least(errors: dict[int, float]) -> int:
    return min(errors, key=lambda num_bands: (errors[num_bands], num_bands))
