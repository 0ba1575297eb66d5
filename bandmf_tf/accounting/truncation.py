"""Poisson batches that are cut to a largest size: fixed shapes with a proof.

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

Which of the two cases it is may be known: the privacy loss is that of a Poisson sample with
probability 1 - T and that of a batch of fixed size with probability T. Both are those of dominating
pairs (`privacy_loss.py`), so their mixture composes, also over adaptively chosen steps.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import stats

from bandmf_tf import _checks
from bandmf_tf.accounting.privacy_loss import (
    LossDistribution,
    PrivacyLoss,
    fixed_size_sampled_gaussian_pld,
    poisson_sampled_gaussian_pld,
    sampled_epsilon,
)
from bandmf_tf.errors import BandMFError


def truncated_poisson_gaussian_pld(
    mu: float,
    sampling_probability: float,
    discretization: float,
    *,
    largest_batch: int,
    num_records: int,
) -> PrivacyLoss:
    """Returns a PLD that bounds a Gaussian sum over a Poisson sample of at most so many, zero-out.

    Args:
        mu: Largest contribution of a record over the standard deviation of the noise.
        sampling_probability: q.
        discretization: Width of the grid of losses.
        largest_batch: B.
        num_records: N, of the data set or of the part that is sampled.
    """
    q = sampling_probability
    cut = float(stats.binom.sf(largest_batch - 1, num_records - 1, q))
    poisson = poisson_sampled_gaussian_pld(mu, q, discretization)
    if cut == 0.0:
        return poisson
    kept = float(stats.binom.sf(largest_batch, num_records, q)) * largest_batch
    fixed_q = min(kept / (num_records * cut), q)
    if fixed_q == 0.0:  # Below the smallest number: neither matters.
        return poisson
    fixed = fixed_size_sampled_gaussian_pld(mu, fixed_q, discretization)
    if fixed.remove.step != poisson.remove.step:  # Grids that would have had too many points.
        step = max(fixed.remove.step, poisson.remove.step)
        poisson = poisson_sampled_gaussian_pld(mu, q, step)
        fixed = fixed_size_sampled_gaussian_pld(mu, fixed_q, step)
    return PrivacyLoss(
        _mixed(poisson.remove, fixed.remove, cut), _mixed(poisson.add, fixed.add, cut)
    )


def truncated_poisson_epsilon(
    mu: float,
    sampling_probability: float,
    compositions: int,
    delta: float,
    *,
    largest_batch: int,
    num_records: int,
    discretization: float | None = None,
) -> float:
    """Returns epsilon at `delta` after `compositions` such sums, for zero-out neighbours."""
    largest_batch = _checks.positive_int("largest_batch", largest_batch)
    num_records = _checks.positive_int("num_records", num_records)
    if not 0.0 < sampling_probability <= 1.0:
        raise BandMFError(f"sampling_probability must be in (0, 1]. Found {sampling_probability}.")
    make_pld = functools.partial(
        truncated_poisson_gaussian_pld, largest_batch=largest_batch, num_records=num_records
    )
    # Probability 1 would be taken for a plain Gaussian, which a batch that is cut is not.
    if sampling_probability == 1.0 and largest_batch < num_records:
        q = largest_batch / num_records
        return sampled_epsilon(
            fixed_size_sampled_gaussian_pld, mu, q, compositions, delta, discretization
        )
    return sampled_epsilon(make_pld, mu, sampling_probability, compositions, delta, discretization)


def _mixed(first: LossDistribution, second: LossDistribution, weight: float) -> LossDistribution:
    """Returns the mixture that is `second` with probability `weight`; both have one grid."""
    lowest = min(first.first, second.first)
    size = max(part.first + part.probabilities.size for part in (first, second)) - lowest
    probabilities = np.zeros(size)
    for part, share in ((first, 1 - weight), (second, weight)):
        start = part.first - lowest
        probabilities[start : start + part.probabilities.size] += share * part.probabilities
    infinity = (1 - weight) * first.infinity + weight * second.infinity
    return LossDistribution(first.step, lowest, probabilities, infinity)
