"""Poisson batches that are cut to a largest size: the account of `TruncatedPoissonSampling`.

Every one of N records enters a batch independently with probability q. If more than B did, B of
them are kept, a random subset. Zero-out neighbours: the record in question is replaced by a zero
record that still takes its place in a batch.

Let r be the number of *other* records that were drawn; it has the same law in both worlds, so it
may be fixed, or revealed, in both.

* r < B, with probability 1 - T: nothing is cut, whatever the record does. The sum is one over a
  Poisson sample.
* r >= B, with probability T = P(Bin(N - 1, q) >= B): without the record, the batch is a random
  subset of B of those r, and with r itself forgotten a random subset of B of all N - 1 others. The
  record is in the batch if it is drawn and kept, with probability q B / (r + 1), and then the rest
  of the batch is a random subset of B - 1 others. This is a batch of fixed size that holds the
  record with probability

      q' = E[q B / (r + 1) | r >= B] = B / (N T) P(Bin(N, q) > B),

  as P(Bin(N - 1, q) = r) q / (r + 1) = P(Bin(N, q) = r + 1) / N.

Which of the two cases it is may be known: the profile is that of a Poisson sample with weight 1 - T
and that of a batch of fixed size with weight T. Both are those of dominating pairs
(`privacy_loss.py`), so their mixture composes, also over adaptively chosen steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy import stats

from bandmf_tf.accounting.privacy_loss import (
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    SampledGaussian,
)


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonGaussian(SampledGaussian):
    """A bound on a Gaussian sum over a Poisson sample of at most so many records, zero-out.

    Attributes:
        largest_batch: B.
        num_records: N, of the data set or of the part that is sampled.
    """

    largest_batch: int
    num_records: int

    @property
    def is_plain(self) -> bool:
        return False

    def largest_losses(self, tail: float) -> tuple[float, float]:
        both = [step.largest_losses(tail) for step, _ in self._cases()]
        return max(losses[0] for losses in both), max(losses[1] for losses in both)

    def profiles(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        forward, reverse = np.zeros_like(epsilon), np.zeros_like(epsilon)
        for step, weight in self._cases():
            of_case = step.profiles(epsilon)
            forward += weight * of_case[0]
            reverse += weight * of_case[1]
        return forward, reverse

    def _cases(self) -> list[tuple[SampledGaussian, float]]:
        """Returns what the sum is over, and with which probability."""
        poisson = PoissonSampledGaussian(self.mu, self.q)
        cut = float(stats.binom.sf(self.largest_batch - 1, self.num_records - 1, self.q))
        kept = float(stats.binom.sf(self.largest_batch, self.num_records, self.q))
        # Where these are below the smallest number, neither matters.
        fixed_q = min(kept * self.largest_batch / (self.num_records * cut), self.q) if cut else 0.0
        if fixed_q == 0.0:
            return [(poisson, 1.0)]
        return [(poisson, 1 - cut), (FixedSizeSampledGaussian(self.mu, fixed_q), cut)]
