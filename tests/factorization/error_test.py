"""The error without a dense matrix equals the error with one, and its gradient is its slope."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf_tf.factorization import error, optimization, sensitivity, trees, workloads
from bandmf_tf.factorization.error import BandedObjective
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    Strategy,
    identity,
    inside_matrix,
)
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.factorization.workloads import Workload


def random_workload(n: int, momentum: float, constant: bool, seed: int = 0) -> Workload:
    rates = np.ones(n) if constant else np.random.default_rng(seed).uniform(0.2, 2.0, n)
    return Workload(n, momentum, rates)


def random_banded(num_bands: int, n: int, seed: int = 0) -> BandedStrategy:
    """Diagonally dominant, so that the inverse stays tame."""
    bands = np.random.default_rng(seed).normal(size=(num_bands, n)) / (2 * num_bands)
    bands[0] = 1.0 + np.abs(bands[0])
    return BandedStrategy(np.where(inside_matrix(num_bands, n), bands, 0.0))


def dense_round_variances(workload: Workload, strategy: Strategy) -> np.ndarray:
    """Row norms of A C^-1, written out."""
    B = workload.materialize() @ np.linalg.inv(strategy.materialize())
    return np.sum(B**2, axis=1)


WORKLOADS = [
    pytest.param(0.0, True, id="prefix sum"),
    pytest.param(0.9, True, id="momentum"),
    pytest.param(0.0, False, id="learning rates"),
    pytest.param(0.9, False, id="momentum and learning rates"),
]
# Below, at and above the smallest block of 32, with last blocks of every kind.
SHAPES = [
    (1, 1), (1, 2), (2, 2), (1, 40), (3, 3), (5, 31), (5, 32), (5, 33), (16, 16), (30, 64),
    (31, 65), (32, 70), (33, 100), (40, 41), (40, 120), (64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("momentum", "constant"), WORKLOADS)
@pytest.mark.parametrize(("num_bands", "n"), SHAPES)
class TestBandedObjective:
    def test_round_variances_are_the_row_norms_of_a_over_c(self, momentum, constant, num_bands, n):
        workload, strategy = random_workload(n, momentum, constant), random_banded(num_bands, n)
        ours = BandedObjective(workload, num_bands).round_variances(strategy.bands)
        np.testing.assert_allclose(ours, dense_round_variances(workload, strategy), rtol=1e-9)

    def test_value_is_the_sum_of_the_round_variances(self, momentum, constant, num_bands, n):
        workload, strategy = random_workload(n, momentum, constant), random_banded(num_bands, n)
        value, _ = BandedObjective(workload, num_bands).value_and_gradient(strategy.bands)
        expected = dense_round_variances(workload, strategy).sum()
        assert value == pytest.approx(expected, rel=1e-10)

    def test_gradient_is_that_of_linear_algebra(self, momentum, constant, num_bands, n):
        """With B = A C^-1: d |B|_F^2 = -2 <B^T B C^-T, dC>, cut to the band."""
        workload, strategy = random_workload(n, momentum, constant), random_banded(num_bands, n)
        _, gradient = BandedObjective(workload, num_bands).value_and_gradient(strategy.bands)
        inverse = np.linalg.inv(strategy.materialize())
        B = workload.materialize() @ inverse
        dense = -2.0 * B.T @ B @ inverse.T
        assert gradient.shape == (num_bands, n)
        for d in range(num_bands):
            expected = np.diagonal(dense, -d)
            np.testing.assert_allclose(gradient[d, : n - d], expected, rtol=1e-7, atol=1e-7)


@given(st.data())
def test_gradient_is_the_slope_of_the_value(data):
    """Central differences along a random direction inside the matrix."""
    n = data.draw(st.integers(1, 80))
    num_bands = data.draw(st.integers(1, n))
    workload = random_workload(
        n, data.draw(st.sampled_from([0.0, 0.5, 0.95])), data.draw(st.booleans())
    )
    bands = random_banded(num_bands, n, data.draw(st.integers(0, 1000))).bands
    direction = np.random.default_rng(1).normal(size=bands.shape) * inside_matrix(num_bands, n)
    function = BandedObjective(workload, num_bands)
    _, gradient = function.value_and_gradient(bands)
    step = 1e-5
    above, _ = function.value_and_gradient(bands + step * direction)
    below, _ = function.value_and_gradient(bands - step * direction)
    slope = np.sum(gradient * direction)
    scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert (above - below) / (2.0 * step) == pytest.approx(slope, abs=1e-6 * scale)


def test_a_wrong_gradient_would_be_noticed():
    """The finite differences above tell a gradient with one entry off by a thousandth."""
    workload, bands = random_workload(20, 0.9, False), random_banded(4, 20).bands
    function = BandedObjective(workload, 4)
    _, gradient = function.value_and_gradient(bands)
    direction = np.zeros_like(bands)
    direction[2, 3] = 1.0
    above, _ = function.value_and_gradient(bands + 1e-5 * direction)
    below, _ = function.value_and_gradient(bands - 1e-5 * direction)
    slope = (above - below) / 2e-5
    assert slope == pytest.approx(gradient[2, 3], rel=1e-6)
    assert slope != pytest.approx(gradient[2, 3] * 1.001, rel=1e-6)


def test_a_singular_strategy_is_refused():
    bands = np.ones((1, 5))
    bands[0, 2] = 0.0
    with pytest.raises(np.linalg.LinAlgError, match="a diagonal entry is zero"):
        BandedObjective(workloads.prefix_sum(5), 1).round_variances(bands)


def test_memory_does_not_grow_with_the_square_of_the_steps():
    n, num_bands = 20_000, 8
    bands = random_banded(num_bands, n).bands
    function = BandedObjective(workloads.prefix_sum(n), num_bands)
    tracemalloc.start()
    function.value_and_gradient(bands)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Blocks of 32: three matrices of 32 x 32 for 32 steps, and a few arrays in band storage.
    assert peak < 8 * n * 32 * 6 < 8 * n * n / 50


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_toeplitz_by_filters_and_by_blocks_agree(momentum):
    workload = workloads.sgd(300, momentum, np.full(300, 0.7))
    strategy = optimization.square_root(workload, 20)
    by_filters = strategy.round_variances(workload)
    by_blocks = strategy.to_banded().round_variances(workload)
    np.testing.assert_allclose(by_filters, by_blocks, rtol=1e-10)


@pytest.mark.parametrize("estimator", trees.ESTIMATORS)
def test_tree_errors_agree_with_a_simulation_and_not_with_a_wrong_scale(estimator):
    """An independent route: sum the noise the stream really adds."""
    n, draws = 21, 40_000
    strategy = TreeStrategy(n, estimator)
    workload = workloads.sgd(n, 0.5, np.linspace(1.0, 0.2, n))
    noise = np.random.default_rng(0).normal(size=(n, draws))
    observed = np.mean(workload.matmul(strategy.inverse_matmul(noise)) ** 2, axis=1)
    # The mean of `draws` squared Gaussians deviates by sqrt(2 / draws) of its value: 0.7 %.
    expected = strategy.round_variances(workload)
    deviations = np.abs(observed / expected - 1.0) / math.sqrt(2.0 / draws)
    assert deviations.max() < 4.5
    wrong = strategy.scaled(1.05).round_variances(workload)
    assert (np.abs(observed / wrong - 1.0) / math.sqrt(2.0 / draws)).min() > 4.5


def test_dp_sgd_accumulates_one_unit_of_variance_a_step():
    variances = identity(6).round_variances(workloads.prefix_sum(6))
    np.testing.assert_allclose(variances, np.arange(1.0, 7.0))


def test_rmse_is_the_papers_and_does_not_depend_on_the_scale():
    workload, strategy = workloads.prefix_sum(12), random_banded(3, 12)
    value = sensitivity.min_separation_participation(strategy, 4, 2)
    loss = value.value**2 * dense_round_variances(workload, strategy).sum()
    assert error.rmse(workload, strategy, value) == pytest.approx(math.sqrt(loss / 12))
    scaled = strategy.scaled(7.0)
    rescaled = sensitivity.min_separation_participation(scaled, 4, 2)
    assert error.rmse(workload, scaled, rescaled) == pytest.approx(math.sqrt(loss / 12))


def test_dp_sgd_of_the_papers_matrix_table():
    """n = 2052, (6, 342): sqrt(6 (n + 1) / 2), 9.63 times the unit RMSE of 8.1523."""
    workload, strategy = workloads.prefix_sum(2052), identity(2052)
    value = error.rmse(workload, strategy, sensitivity.fixed_epochs(strategy, 342, 6))
    assert value == pytest.approx(math.sqrt(6 * 2053 / 2), rel=1e-12)
    assert value / 8.1523 == pytest.approx(9.63, abs=0.005)


def test_sizes_must_agree():
    message = r"workload has num_rounds=3 and the strategy 4; build both for the same"
    with pytest.raises(ValueError, match=message):
        identity(4).round_variances(workloads.prefix_sum(3))
    exact = Sensitivity(1.0, sensitivity.EXACT, "given")
    with pytest.raises(ValueError, match=message):
        error.rmse(workloads.prefix_sum(3), identity(4), exact)
