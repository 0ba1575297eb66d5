"""Poisson samples of a largest size: the account of `BoundedPoissonSampling`.

Every one of N records enters a batch independently with probability q. If more than B did, all is
drawn again, until there are at most B: a Poisson sample given that it has at most B records.
Zero-out neighbours: the record in question is replaced by a zero record that still takes its place
in a batch.

Let R be the *other* records of the batch. Whether the record is there changes neither how the batch
is drawn nor the law of R, so R may be revealed, in both worlds. The probability of a batch is
proportional to that of a Poisson sample, so that given R the record is there

* with probability q if R has fewer than B records: both batches, with it and without, are small
  enough. The sum is one over a Poisson sample.
* never if R has B records. The sum is the same for both neighbours.

The profile is therefore w times that of a Poisson sample, where

    w = P(|R| < B) = P(Bin(N - 1, q) < B) / P(Bin(N, q) <= B),

and a record is in a batch with probability w q. It is the profile of a pair that dominates the step
(either the pair of the Poisson sample or, known to everybody, nothing at all), so it composes, also
over adaptively chosen steps. Compared with Poisson samples of the same mean size, which draw with
w q in every round, a record is drawn with q in a part w of the rounds: epsilon is larger by some
(1 - w) / 2.

A random *subset* of too large a sample, what `dp_accounting` calls a truncated batch, would cost
far more: there the record in question takes the place of another one, so that sums can differ by
two records. Here it takes nobody's place.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy

from bandmf_tf.accounting.privacy_loss import PoissonSampledGaussian

# Cumulative probabilities of SciPy are at most so far off, in relative terms.
_ROUNDING = 1e-11

# A largest size that is chosen here keeps at least this part of a sample's records: w.
_KEPT = 0.99

# Samples that are drawn until they are small enough must not be so for ever: so many are at once.
FEWEST_FIT = 0.01


@dataclasses.dataclass(frozen=True)
class BoundedPoissonGaussian(PoissonSampledGaussian):
    """A Gaussian sum over a Poisson sample of at most so many records, zero-out.

    Attributes:
        largest_batch: B.
        num_records: N, of the data set or of the part that is sampled.
    """

    largest_batch: int
    num_records: int

    @property
    def is_plain(self) -> bool:
        return False

    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weight = min(1.0, kept(self.q, self.largest_batch, self.num_records) * (1 + _ROUNDING))
        forward, reverse = super().profiles(epsilon)
        return weight * forward, weight * reverse


def fits(q: float, largest_batch: int, num_records: int) -> float:
    """Returns how often a sample is not drawn again."""
    return float(scipy.stats.binom.cdf(largest_batch, num_records, q))


def kept(q: float, largest_batch: int, num_records: int) -> float:
    """Returns w: how often there is room for a record, whoever else was drawn."""
    room = scipy.stats.binom.cdf(largest_batch - 1, num_records - 1, q)
    return float(room / fits(q, largest_batch, num_records))


def choose_bound(batch_size: float, num_records: int) -> tuple[float, int]:
    """Returns q and B for samples of this size in expectation, with w of at least `_KEPT`."""

    def missing(q: float, largest: int) -> float:
        return batch_size - q * kept(q, largest, num_records) * num_records

    at_most = min(1.0, batch_size / (_KEPT * num_records))
    too_small, enough = math.ceil(batch_size) - 1, num_records
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        # Of almost all records of a part, few samples may fit where each loses next to nothing.
        is_enough = fits(at_most, middle, num_records) >= FEWEST_FIT and (
            missing(at_most, middle) <= 0
        )
        too_small, enough = (too_small, middle) if is_enough else (middle, enough)
    at_least = batch_size / num_records
    if missing(at_least, enough) <= 0:  # Of samples that are never too large.
        return at_least, enough
    return float(scipy.optimize.brentq(missing, at_least, at_most, (enough,), xtol=1e-15)), enough
