from __future__ import annotations

import math

import pytest

from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling
from bandmf_tf.planning.bands import choose_num_bands

TARGET = {"delta": 1e-6, "num_rounds": 128, "discretization": 2e-3}


def _loss(num_bands: int) -> float:
    """Falls with the number of bands like the error of prefix sums, from n^2 / 2 towards n."""
    return 128 * (64 / num_bands + math.log(num_bands) + 1)


def _brute_force(epsilon: float, batch_size: int, dataset_size: int) -> dict[int, float]:
    errors = {}
    for num_bands in range(1, min(128, dataset_size // batch_size) + 1):
        scheme = PoissonSampling.from_sizes(128, num_bands, batch_size, dataset_size)
        noise = scheme.noise_multiplier(
            epsilon, 1e-6, num_bands=num_bands, max_column_norm=1.0, discretization=2e-3
        )
        errors[num_bands] = noise * math.sqrt(_loss(num_bands) / 128)
    return errors


@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_search_finds_the_best_of_all_numbers_of_bands(epsilon):
    sizes = {"batch_size": 100, "dataset_size": 2400}
    search = choose_num_bands(_loss, epsilon=epsilon, **sizes, **TARGET)
    errors = _brute_force(epsilon, **sizes)
    assert search.best.rmse <= min(errors.values()) * 1.005
    for candidate in search.tried:
        assert candidate.rmse == pytest.approx(errors[candidate.num_bands], rel=1e-5)
    # Far fewer than all numbers had to be tried.
    assert len(search.tried) < len(errors) / 2


def test_table_says_what_each_candidate_is_made_of():
    sizes = {"batch_size": 100, "dataset_size": 4000}
    search = choose_num_bands(_loss, epsilon=2.0, **sizes, **TARGET, refine=False)
    assert [c.num_bands for c in search.tried] == [1, 2, 4, 8, 16, 32, 40]
    for candidate in search.tried:
        part_size = 4000 // candidate.num_bands
        assert candidate.sampling_probability == 100 / part_size
        assert candidate.compositions == math.ceil(128 / candidate.num_bands)
        assert candidate.squared_error == _loss(candidate.num_bands)
        assert candidate.rmse == pytest.approx(
            candidate.noise_multiplier * math.sqrt(candidate.squared_error / 128)
        )
    assert search.best in search.tried


def test_little_privacy_wants_many_bands_and_much_privacy_wants_one():
    sizes = {"batch_size": 10, "dataset_size": 1000}
    # A coarse grid costs small epsilons most, where there are few bands and many compositions.
    fine = TARGET | {"discretization": 1e-3}
    best = [
        choose_num_bands(_loss, epsilon=epsilon, **sizes, **fine, refine=False).best.num_bands
        for epsilon in (0.1, 1.0, 10.0)
    ]
    assert best[0] < best[1] < best[2]
    # With a loss that hardly depends on the bands, sampling is all that counts, and conversely.
    flat = choose_num_bands(lambda _: 128.0, epsilon=1.0, **sizes, **TARGET)
    assert flat.best.num_bands == 1
    steep = choose_num_bands(lambda b: 128.0 / b**4, epsilon=1.0, **sizes, **TARGET)
    assert steep.best.num_bands == 100


def test_sampling_probability_and_count_of_the_optimal_bands_table():
    """n = 1024 rounds and k epochs are batches of k out of n: q = b k / n, T = n / b."""
    search = choose_num_bands(
        lambda b: 1024.0 / b,
        epsilon=4.0,
        delta=1e-6,
        num_rounds=1024,
        batch_size=16,
        dataset_size=1024,
        refine=False,
        discretization=2e-3,
    )
    assert [c.num_bands for c in search.tried] == [1, 2, 4, 8, 16, 32, 64]
    for candidate in search.tried:
        assert candidate.sampling_probability == candidate.num_bands * 16 / 1024
        assert candidate.compositions == 1024 / candidate.num_bands


def test_fixed_size_batches_need_more_noise():
    sizes = {"batch_size": 100, "dataset_size": 4000}
    poisson = choose_num_bands(_loss, epsilon=2.0, **sizes, **TARGET, refine=False)
    fixed = choose_num_bands(
        _loss, epsilon=2.0, **sizes, **TARGET, refine=False, scheme=FixedSizeSampling
    )
    for ours, theirs in zip(fixed.tried, poisson.tried, strict=True):
        assert ours.noise_multiplier >= theirs.noise_multiplier * (1 - 1e-3)


def test_progress_sees_every_candidate_once():
    seen = []
    search = choose_num_bands(
        _loss, epsilon=2.0, batch_size=100, dataset_size=1000, **TARGET, progress=seen.append
    )
    assert sorted(c.num_bands for c in seen) == [c.num_bands for c in search.tried]


def test_batches_larger_than_the_data_set_are_refused():
    with pytest.raises(ValueError, match="batch_size=200, dataset_size=100"):
        choose_num_bands(_loss, epsilon=1.0, batch_size=200, dataset_size=100, **TARGET)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_loss_must_be_positive(bad):
    with pytest.raises(ValueError, match="loss of 1 bands"):
        choose_num_bands(lambda _: bad, epsilon=1.0, batch_size=1, dataset_size=100, **TARGET)
