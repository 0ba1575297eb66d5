from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from bandmf_tf.accounting import FixedSizeSampling, PoissonSampling, TruncatedPoissonSampling
from bandmf_tf.accounting.privacy_loss import composed_epsilon
from bandmf_tf.accounting.truncation import TruncatedPoissonGaussian
from bandmf_tf.errors import BandMFError

OUTPUTS = np.linspace(-14, 14, 2801)


def _epsilon(
    noise: float, q: float, rounds: int, delta: float, largest: int, num_records: int
) -> float:
    scheme = TruncatedPoissonSampling(rounds, 1, q, largest, num_records)
    return scheme.epsilon(noise, delta, num_bands=1, max_column_norm=1.0)


def _sum_densities(values: tuple[float, ...], q: float, largest: int) -> np.ndarray:
    """Densities of the noisy sum with less than `largest` of the others drawn, and with more.

    Over all samples and all subsets that are kept; the first value is that of the record.
    """
    densities = np.zeros((2, OUTPUTS.size))
    for size in range(len(values) + 1):
        for drawn in itertools.combinations(range(len(values)), size):
            probability = q**size * (1 - q) ** (len(values) - size)
            kept = list(itertools.combinations(drawn, min(size, largest)))
            others = size - (0 in drawn)
            for batch in kept:
                centre = sum(values[i] for i in batch)
                bell = np.exp(-((OUTPUTS - centre) ** 2) / 2) / math.sqrt(2 * math.pi)
                densities[int(others >= largest)] += probability / len(kept) * bell
    return densities


def _hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> np.ndarray:
    width = OUTPUTS[1] - OUTPUTS[0]
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0), axis=-1) * width


@pytest.mark.parametrize(("q", "largest"), [(0.3, 1), (0.5, 2), (0.8, 2), (1.0, 2), (0.4, 3)])
def test_profile_is_that_of_the_worst_data_set_for_either_case(q, largest):
    mu, epsilons = 0.9, (0.05, 0.2, 0.5, 1.0)
    pld = TruncatedPoissonGaussian(mu, q, largest, num_records=4).pld(1e-3)
    bound = np.array([[side.delta(e) for e in epsilons] for side in (pld.remove, pld.add)])
    worst = np.zeros((2, len(epsilons), 2))
    for others in itertools.product((-mu, 0.0, mu), repeat=3):
        with_it = _sum_densities((mu, *others), q, largest)
        without = _sum_densities((0.0, *others), q, largest)
        for i, epsilon in enumerate(epsilons):
            for side, pair in enumerate(((with_it, without), (without, with_it))):
                of_cases = _hockey_stick(*pair, epsilon)
                worst[side, i] = np.maximum(worst[side, i], of_cases)
                # Whoever does not know the case knows no more.
                blind = _hockey_stick(*(densities.sum(axis=0) for densities in pair), epsilon)
                assert blind <= of_cases.sum() + 1e-12
                assert of_cases.sum() <= bound[side, i] + 1e-6
    # Either case has a data set that attains its part.
    assert np.all(worst.sum(axis=-1) >= 0.999 * bound - 1e-6)


def test_batches_that_are_never_cut_are_poisson_samples():
    exact = PoissonSampling(50, 1, 0.01).epsilon(1.0, 1e-6, num_bands=1, max_column_norm=1.0)
    for largest in (1000, 60):
        found = _epsilon(1.0, 0.01, 50, 1e-6, largest, num_records=1000)
        assert found == pytest.approx(exact, rel=1e-3)


def test_batches_that_are_always_cut_have_a_fixed_size():
    scheme = FixedSizeSampling(50, 1, 100, 1000)
    exact = scheme.epsilon(2.0, 1e-6, num_bands=1, max_column_norm=1.0)
    for q in (1.0, 0.9):
        found = _epsilon(2.0, q, 50, 1e-6, 100, num_records=1000)
        assert found == pytest.approx(exact, rel=1e-3)


def test_cutting_is_free_where_it_is_rarer_than_delta_and_never_gains():
    epsilons = [
        _epsilon(1.0, 0.01, 100, 1e-6, size, num_records=10_000) for size in (1000, 160, 130, 110)
    ]
    assert epsilons == sorted(epsilons)
    # Batches have 100 records, give or take 10: six deviations are free, three are not.
    assert epsilons[1] < 1.001 * epsilons[0]
    assert epsilons[2] > 2 * epsilons[0]


def test_epsilon_is_at_most_that_of_the_event_of_dp_accounting():
    """Its pair, which lets samples of either kind be revealed, is looser where batches are cut."""
    distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    name = "from_truncated_subsampled_gaussian_mechanism"
    if not hasattr(distributions, name):
        pytest.skip("dp_accounting before 0.6 does not know it.")
    for largest, gap in ((160, 0.01), (110, 1.0)):
        theirs = getattr(distributions, name)(
            dataset_size=10_000,
            sampling_probability=0.01,
            truncated_batch_size=largest,
            noise_multiplier=1.0,
            value_discretization_interval=1e-3,
        ).self_compose(100)
        pld = TruncatedPoissonGaussian(1.0, 0.01, largest, num_records=10_000).pld(1e-3)
        ours = composed_epsilon(pld, 100, 1e-6)
        epsilon = theirs.get_epsilon_for_delta(1e-6)
        assert ours <= 1.0001 * epsilon
        assert epsilon <= (1 + gap) * ours


@pytest.mark.parametrize(("noise", "largest"), [(1.0, 0.25), (4.0, 0.15)])
def test_the_size_that_is_chosen_costs_a_thousandth_and_one_less_would_cost_more(noise, largest):
    poisson = PoissonSampling(400, 2, 0.02)
    sizes = {"num_bands": 2, "max_column_norm": 0.7}
    found = TruncatedPoissonSampling.from_poisson(poisson, 50_000, noise * 0.7, 1e-6, **sizes)
    assert (found.num_parts, found.dataset_size) == (2, 50_000)
    assert 500 < found.max_batch_size < 500 * (1 + largest)
    smaller = dataclasses.replace(found, max_batch_size=found.max_batch_size - 1)
    exact, costs, more = (
        scheme.epsilon(noise * 0.7, 1e-6, **sizes) for scheme in (poisson, found, smaller)
    )
    assert costs <= 1.001 * exact < more


def test_a_handful_of_examples_is_never_cut_at_nothing():
    tiny = TruncatedPoissonSampling.from_poisson(
        PoissonSampling(3, 1, 0.5), 1, 1.0, 1e-5, num_bands=1, max_column_norm=1.0
    )
    assert tiny.max_batch_size == 1


def test_wrong_requests_are_refused_in_one_sentence():
    with pytest.raises(BandMFError, match="sampling_probability must be positive"):
        TruncatedPoissonSampling(1, 1, 0.0, 1, 2)
    with pytest.raises(BandMFError, match="max_batch_size must be at least 1"):
        TruncatedPoissonSampling(1, 1, 0.5, 0, 2)
    with pytest.raises(BandMFError, match="max_batch_size must be at most 2, the examples in"):
        TruncatedPoissonSampling(4, 2, 0.5, 3, 5)
