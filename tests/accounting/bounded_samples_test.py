from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bandmf_tf.accounting import BoundedPoissonSampling, PoissonSampling
from bandmf_tf.accounting.bounded_samples import BoundedPoissonGaussian, choose_bound, kept
from bandmf_tf.errors import BandMFError

OUTPUTS = np.linspace(-12, 12, 6001)
SIZES = {"num_bands": 1, "max_column_norm": 1.0}


def _batches(num_records: int, q: float, largest: int) -> list[tuple[tuple[int, ...], float]]:
    """All batches with their probabilities."""
    weights = {
        batch: q**size * (1 - q) ** (num_records - size)
        for size in range(largest + 1)
        for batch in itertools.combinations(range(num_records), size)
    }
    total = sum(weights.values())
    return [(batch, weight / total) for batch, weight in weights.items()]


def _sum_densities(values: tuple[float, ...], q: float, largest: int) -> np.ndarray:
    """Densities of the noisy sum with room for the record beside the others, and without.

    Over all batches; the first value is that of the record.
    """
    densities = np.zeros((2, OUTPUTS.size))
    for batch, probability in _batches(len(values), q, largest):
        others = len(batch) - (0 in batch)
        centre = sum(values[i] for i in batch)
        bell = np.exp(-((OUTPUTS - centre) ** 2) / 2) / math.sqrt(2 * math.pi)
        densities[int(others == largest)] += probability * bell
    return densities


def _hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> np.ndarray:
    width = OUTPUTS[1] - OUTPUTS[0]
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0), axis=-1) * width


@pytest.mark.parametrize(("q", "largest"), [(0.3, 1), (0.5, 2), (0.8, 3), (0.95, 3), (0.4, 4)])
def test_profile_is_that_of_the_worst_data_set(q, largest):
    mu, epsilons = 0.9, (0.05, 0.2, 0.5, 1.0)
    pld = BoundedPoissonGaussian(mu, q, largest, num_records=4).pld(1e-3)
    bound = np.array([[side.delta(e) for e in epsilons] for side in (pld.remove, pld.add)])
    worst = np.zeros_like(bound)
    for others in itertools.product((-mu, 0.0, mu), repeat=3):
        with_it = _sum_densities((mu, *others), q, largest)
        without = _sum_densities((0.0, *others), q, largest)
        for i, epsilon in enumerate(epsilons):
            for side, pair in enumerate(((with_it, without), (without, with_it))):
                with_room, full = _hockey_stick(*pair, epsilon)
                # Where others fill the batch, neighbours are the same.
                assert full < 1e-12
                worst[side, i] = max(worst[side, i], with_room)
                # Whoever does not know the case knows no more.
                blind = _hockey_stick(*(densities.sum(axis=0) for densities in pair), epsilon)
                assert blind <= with_room + 1e-12
                assert with_room <= bound[side, i] + 1e-6
    assert np.all(worst >= 0.999 * bound - 1e-6)


def test_two_rounds_are_at_most_as_far_apart_as_the_account_says():
    """Of all pairs of batches and sums in two dimensions, one a round."""
    mu, q, largest, others = 1.0, 0.5, 2, (1.0, -1.0)
    grid = np.linspace(-9, 9, 361)
    area = (grid[1] - grid[0]) ** 2
    scheme = BoundedPoissonSampling(2, 1, q, largest, 3)
    batches = _batches(3, q, largest)

    def density(record: float) -> np.ndarray:
        total = np.zeros((grid.size, grid.size))
        values = (record, *others)
        for (one, p), (other, p_other) in itertools.product(batches, repeat=2):
            bells = [
                np.exp(-((grid - sum(values[i] for i in batch)) ** 2) / 2) / math.sqrt(2 * math.pi)
                for batch in (one, other)
            ]
            total += p * p_other * np.outer(*bells)
        return total

    having, lacking = density(mu), density(0.0)
    for delta in (0.2, 0.05, 0.01):
        epsilon = scheme.epsilon(1.0, delta, **SIZES)
        for p, p_other in ((having, lacking), (lacking, having)):
            found = float(np.sum(np.maximum(p - math.exp(epsilon) * p_other, 0)) * area)
            assert found <= delta


@pytest.mark.parametrize(("q", "largest"), [(0.3, 1), (0.5, 2), (0.9, 3), (0.5, 5)])
def test_a_record_is_in_a_batch_as_often_as_there_is_room(q, largest):
    batches = _batches(5, q, largest)
    often = sum(probability for batch, probability in batches if 0 in batch)
    assert q * kept(q, largest, 5) == pytest.approx(often, rel=1e-12)
    if sum(q**k * (1 - q) ** (5 - k) * math.comb(5, k) for k in range(largest + 1)) > 0.01:
        mean = sum(probability * len(batch) for batch, probability in batches)
        scheme = BoundedPoissonSampling(1, 1, q, largest, 5)
        assert scheme.batch_size == pytest.approx(mean, rel=1e-11)


def test_a_bound_costs_no_epsilon_and_saves_what_it_leaves_out():
    poisson = PoissonSampling(100, 1, 0.01).epsilon(1.0, 1e-6, **SIZES)
    epsilons = [
        BoundedPoissonSampling(100, 1, 0.01, largest, 10_000).epsilon(1.0, 1e-6, **SIZES)
        for largest in (1000, 130, 110, 100, 90)
    ]
    assert epsilons == sorted(epsilons, reverse=True)
    assert epsilons[0] == pytest.approx(poisson, rel=1e-9)
    assert 0.8 * poisson < epsilons[-1] < poisson


@pytest.mark.parametrize(
    ("batch_size", "dataset_size", "largest"),
    [(64, 1280, 79), (500, 50_000, 532), (1, 100, 5), (7, 8, 8), (1, 1, 1), (0.5, 10, 3)],
)
@pytest.mark.parametrize("noise", [0.7, 4.0])
def test_the_bound_that_is_chosen_costs_half_a_percent(batch_size, dataset_size, largest, noise):
    found = BoundedPoissonSampling.from_sizes(200, 1, batch_size, dataset_size)
    assert found.max_batch_size == largest
    assert found.batch_size == batch_size
    poisson = PoissonSampling.from_sizes(200, 1, batch_size, dataset_size)
    ratio = found.epsilon(noise, 1e-6, **SIZES) / poisson.epsilon(noise, 1e-6, **SIZES)
    assert 1 - 1e-4 < ratio < 1.007
    if largest > batch_size + 1:  # One less would leave out more than a hundredth.
        with_less = choose_bound(batch_size, dataset_size)[0]
        assert kept(with_less, largest, dataset_size) >= 0.99
        assert kept(batch_size / 0.99 / dataset_size, largest - 1, dataset_size) < 0.99


@pytest.mark.parametrize("size", [10, 4_166, 8_571])
def test_batches_may_be_almost_as_large_as_their_part(size):
    for missing in (0, 1, 2, 3, 10, 70, 379):
        if missing < size:
            found = BoundedPoissonSampling.from_sizes(100, 1, size - missing, size)
            assert found.batch_size == size - missing
            assert size - missing <= found.max_batch_size <= size


def test_wrong_requests_are_refused_in_one_sentence():
    with pytest.raises(BandMFError, match="sampling_probability must be positive"):
        BoundedPoissonSampling(1, 1, 0.0, 1, 2)
    with pytest.raises(BandMFError, match="max_batch_size must be at least 1"):
        BoundedPoissonSampling(1, 1, 0.5, 0, 2)
    with pytest.raises(BandMFError, match="max_batch_size must be at most 2, the examples in"):
        BoundedPoissonSampling(4, 2, 0.5, 3, 5)
    for q, largest in ((0.5, 300), (1.0, 999)):
        with pytest.raises(BandMFError, match="all others are drawn again"):
            BoundedPoissonSampling(4, 1, q, largest, 1_000)
