"""Whether batches are drawn as a claim says: who is in which batch, of two runs of a pipeline.

What a scheme rules out (twice in a batch, too soon again, too often, a batch of the wrong size) has
probability 0 under the claim: seen once, it refutes it. What it leaves to chance is compared with
its exact distribution:

* numbers drawn    a Poisson batch is binomial in its part, and one of random participation in
                   the data set;
* visits           of those drawn from a part, the next visit draws each again with the sampling
                   probability (binomial), or a uniform subset (hypergeometric); of those who wait
                   after a round, the first one in which they are ready again;
* runs             the same round of another run is a uniform subset of all examples of its size,
                   whatever the first run drew (hypergeometric). A seed that is always the same
                   shows here, and so does a partition.

Amplification rests on nobody knowing the batches. That the seed is secret no sample can show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy

from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.random_participation import (
    OncePerEpoch,
    RandomParticipation,
    WaitingParticipation,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.audit.statistics import all_of
from bandmf_tf.factorization.participation import FixedEpochs, Participation
from bandmf_tf.runs.audit_errors import LEAST_P_VALUE
from bandmf_tf.runs.audit_record import Comparison

Batches = Sequence[np.ndarray]  # Indices of the examples of every round.


def sampling_tests(
    scheme: SamplingScheme,
    participation: Participation,
    dataset_size: int,
    runs: Sequence[Batches],
) -> list[Comparison]:
    """Compares the batches of two runs with a scheme and the participation that a claim assumes."""
    part_size = dataset_size // scheme.min_separation
    tests = [
        _excluded(f"run {i}", scheme, participation, dataset_size, run)
        for i, run in enumerate(runs)
    ]
    if isinstance(scheme, PoissonSampling):
        tests.append(_numbers(part_size, scheme.sampling_probability, runs, scheme))
    if isinstance(scheme, RandomParticipation):
        tests.append(_numbers(dataset_size, scheme.rate, runs, scheme))
    if not isinstance(scheme, Shuffling):
        tests.append(_visits(scheme, part_size, runs))
    return [*tests, _between_runs(dataset_size, *runs)]


def _numbers(units: int, q: float, runs: Sequence[Batches], scheme: SamplingScheme) -> Comparison:
    sizes = np.array([len(batch) for run in runs for batch in run])
    law, expected = scipy.stats.binom(units, q), units * q
    if isinstance(scheme, BoundedPoissonSampling):
        expected = scheme.batch_size
        p_values = [_two_sided(law, size, scheme.max_batch_size) for size in sizes]
    else:
        p_values = [_two_sided(law, size) for size in sizes]
    if type(scheme) is PoissonSampling:  # Of others batches depend on each other, or are bounded.
        total = _two_sided(scipy.stats.binom(units * len(sizes), q), sizes.sum())
        p_values.append(min(1.0, len(p_values) * total))
    found = f"{sizes.sum()} drawn, {expected * len(sizes):.1f} expected"
    return Comparison("numbers drawn", all_of(p_values), found)


def _excluded(
    name: str, scheme: SamplingScheme, participation: Participation, size: int, run: Batches
) -> Comparison:
    """Looks for what cannot happen under the claim."""
    found = _broken(scheme, participation, run)
    if not found and isinstance(scheme, OncePerEpoch):
        found = _broken_epoch(scheme.epoch_rounds, size, run)
    return Comparison(f"participation of {name}", LEAST_P_VALUE if found else 1.0, found)


def _broken(scheme: SamplingScheme, participation: Participation, run: Batches) -> str:
    for number, batch in enumerate(run):
        if len(np.unique(batch)) < len(batch):
            return f"an example is twice in the batch of round {number}"
        if isinstance(scheme, FixedSizeSampling | Shuffling) and len(batch) != scheme.batch_size:
            return f"round {number} has {len(batch)} examples for {scheme.batch_size}"
    n = len(run)
    b, k = participation.separation(n), participation.most(n)
    examples = np.concatenate(run)
    rounds = np.repeat(np.arange(n), [len(batch) for batch in run])
    order = np.lexsort((rounds, examples))
    examples, rounds = examples[order], rounds[order]
    same = examples[1:] == examples[:-1]
    gaps = (rounds[1:] - rounds[:-1])[same]
    if gaps.size and gaps.min() < b:
        return f"an example takes part again after {gaps.min()} rounds, {b} at the earliest"
    if isinstance(participation, FixedEpochs) and np.any(gaps % b):
        return f"an example takes part again after {gaps[gaps % b > 0][0]} rounds, not {b} apart"
    most = int(np.unique(examples, return_counts=True)[1].max()) if examples.size else 0
    if most > k:
        return f"an example takes part {most} times, {k} at most"
    return ""


def _broken_epoch(epoch_rounds: int, size: int, run: Batches) -> str:
    for start in range(0, len(run), epoch_rounds):
        epoch = run[start : start + epoch_rounds]
        drawn, different = sum(map(len, epoch)), len(np.unique(np.concatenate(epoch)))
        if different < drawn or (len(epoch) == epoch_rounds and different < size):
            return f"the epoch from round {start} on draws {drawn} times {different} of {size}"
    return ""


def _visits(scheme: SamplingScheme, part_size: int, runs: Sequence[Batches]) -> Comparison:
    """Compares every batch with the next one that its examples can be in."""
    p_values, again = [], 0
    is_subset = isinstance(scheme, FixedSizeSampling | BoundedPoissonSampling)
    rounds = np.arange(scheme.num_rounds)
    following = rounds + scheme.min_separation
    coins = np.full(len(rounds), getattr(scheme, "sampling_probability", 1.0))
    if isinstance(scheme, WaitingParticipation):
        following, coins = scheme.ready_again, scheme.coins
    for run in runs:
        for number, next_number in zip(rounds[: len(run)], following, strict=False):
            if next_number >= len(run):
                continue
            before, after = run[number], run[next_number]
            both = len(np.intersect1d(before, after))
            again += both
            if is_subset:
                law = scipy.stats.hypergeom(part_size, len(before), len(after))
            else:
                law = scipy.stats.binom(len(before), coins[next_number])
            p_values.append(_two_sided(law, both))
    return Comparison("visits of a part", all_of(p_values or [1.0]), f"{again} drawn again")


def _between_runs(dataset_size: int, first: Batches, second: Batches) -> Comparison:
    pairs = zip(first, second, strict=True)
    shared = [(len(np.intersect1d(a, b)), len(a), len(b)) for a, b in pairs]
    p_values = [
        float(scipy.stats.hypergeom(dataset_size, a, b).sf(both - 1)) if both else 1.0
        for both, a, b in shared
    ]
    total, most = sum(both for both, *_ in shared), sum(min(a, b) for _, a, b in shared)
    found = f"{total} of {most} examples are in the same round of both runs"
    return Comparison("run to run", all_of(np.maximum(p_values, LEAST_P_VALUE)), found)


def _two_sided(law: scipy.stats.rv_discrete, value: float, largest: float = np.inf) -> float:
    """The p-value of a number that has the law, given that it is at most the largest."""
    below, above = float(law.cdf(value)), float(law.sf(value - 1) - law.sf(largest))
    tail = min(below, above) / float(law.cdf(largest))
    return float(np.clip(2 * tail, LEAST_P_VALUE, 1.0))
