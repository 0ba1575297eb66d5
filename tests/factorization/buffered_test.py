"""BLTs are what their parameters say, and the optimiser finds the best ones at any size."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import scipy.optimize

from bandmf_tf.factorization import buffered, error, optimization, workloads
from bandmf_tf.factorization.buffered import BufferedStrategy, optimize_buffered
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    SingleParticipation,
)
from bandmf_tf.factorization.sensitivity import EXACT

THREE = BufferedStrategy(np.array([0.99, 0.7, 0.2]), np.array([0.1, 0.3, 0.35]), 40)


def _rmse(result) -> float:
    return math.sqrt(result.loss / result.strategy.num_rounds)


def _workload(name: str, n: int) -> workloads.Workload:
    rates = np.random.default_rng(n).uniform(0.2, 2.0, n) if "rates" in name else None
    return workloads.sgd(n, 0.9 if "momentum" in name else 0.0, rates)


WORKLOADS = ["prefix sum", "momentum", "rates", "momentum, rates"]


def test_coefficients_are_those_of_the_definition():
    powers = THREE.decays ** np.arange(39)[:, None]
    expected = np.append(1.0, powers @ THREE.scales)
    np.testing.assert_allclose(THREE.coefficients, expected, rtol=1e-12)
    np.testing.assert_allclose(THREE.scaled(0.3).coefficients, 0.3 * expected, rtol=1e-12)


def test_inverse_parameters_interlace_and_give_the_inverse():
    h, v = THREE.inverse_parameters
    merged = np.stack([THREE.decays, h], axis=1).ravel()
    assert np.all(np.diff(merged) < 0.0)
    assert np.all(v < 0.0)
    expected = np.append(1.0, (h ** np.arange(39)[:, None]) @ v)
    np.testing.assert_allclose(np.linalg.inv(THREE.materialize())[:, 0], expected, atol=1e-14)
    np.testing.assert_allclose(buffered._residues(THREE.decays, h), THREE.scales, rtol=1e-12)
    np.testing.assert_allclose(buffered._residues(h, THREE.decays), v, rtol=1e-10)


def test_any_parameters_that_are_allowed_give_noise_that_never_grows():
    rng = np.random.default_rng(0)
    for _ in range(200):
        d = int(rng.integers(1, 6))
        scales = rng.dirichlet(np.ones(d)) * rng.choice([0.1, 0.9, 1.0 - 1e-12])
        strategy = BufferedStrategy(np.sort(rng.uniform(size=d))[::-1], scales, 50)
        assert np.all(np.abs(strategy.inverse_parameters[0]) < 1.0)
        assert np.all(np.diff(strategy.coefficients) <= 0.0)


@pytest.mark.parametrize(
    ("decays", "scales", "message"),
    [
        ([0.5, 0.5], [0.1, 0.1], "decays must lie strictly between 0 and 1 and fall strictly"),
        ([1.0, 0.5], [0.1, 0.1], "decays must lie"),
        ([0.5, 0.0], [0.1, 0.1], "decays must lie"),
        ([0.2, 0.5], [0.1, 0.1], "decays must lie"),
        ([0.5], [0.1, 0.1], r"one entry a buffer\. Found 1 and 2"),
        ([0.5, 0.2], [0.1, 0.0], "scales must be positive and have a sum of at most 1"),
        ([0.5, 0.2], [0.6, 0.5], "scales must be positive and have a sum of at most 1"),
        ([0.5, np.nan], [0.1, 0.1], "decays must be finite"),
        ([], [], "decays must not be empty"),
    ],
)
def test_other_parameters_are_refused(decays, scales, message):
    with pytest.raises(ValueError, match=message):
        BufferedStrategy(np.array(decays), np.array(scales), 5)


def test_sensitivity_stays_exact_for_many_participations_of_long_training():
    """A million rounds would make X a million by a million; the pattern 0, b, 2 b .. is enough."""
    strategy = BufferedStrategy(np.array([0.9999, 0.5]), np.array([0.01, 0.3]), 10**6)
    for b, k in ((1, 10**6), (7, 1000), (50_000, 20)):
        found = MinSeparation(b, k).sensitivity(strategy)
        assert found == FixedEpochs(b, k).sensitivity(strategy)
        assert found.kind == EXACT
        column = np.zeros(10**6)
        column[: b * k : b] = 1.0
        assert found.value == pytest.approx(np.linalg.norm(strategy.matmul(column)), rel=1e-10)


@pytest.mark.parametrize("name", WORKLOADS)
def test_error_of_long_training_is_that_of_its_blocks(name):
    """A dense oracle ends at some hundred rounds; banded blocks with all bands go further."""
    n = 600
    workload = _workload(name, n)
    strategy = BufferedStrategy(np.array([0.999, 0.6]), np.array([0.05, 0.4]), n)
    banded = optimization.ToeplitzStrategy(strategy.coefficients, n).to_banded()
    expected = banded.round_variances(workload)
    np.testing.assert_allclose(strategy.round_variances(workload), expected, rtol=1e-9)
    h, v = strategy.inverse_parameters
    # The formula for any learning rates is not asked for constant ones, and is right there, too.
    by_formula = error.toeplitz_round_variances(workload, np.ones(1), h, v)
    np.testing.assert_allclose(by_formula, expected, rtol=1e-9)


@pytest.mark.parametrize("name", WORKLOADS)
def test_error_of_a_million_rounds_is_that_of_single_rows_in_the_memory_of_a_few_columns(name):
    """Row i of A C^-1 is `C^-T A^T e_i`: two products with a vector."""
    n = 10**6
    workload = _workload(name, n)
    strategy = BufferedStrategy(np.array([1.0 - 1e-6, 0.99, 0.6]), np.array([1e-3, 0.05, 0.4]), n)
    tracemalloc.start()
    variances = strategy.round_variances(workload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for i in (0, 1, 999, n // 2, n - 1):
        unit = np.zeros(n)
        unit[i] = 1.0
        row = strategy.inverse_matmul(workload.transpose_matmul(unit)[::-1])
        assert variances[i] == pytest.approx(row @ row, rel=1e-7)
    assert peak < 20 * unit.nbytes


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 60])
def test_the_objective_is_the_loss_and_its_gradient_its_slope(n, num_buffers, name):
    workload, participation = _workload(name, n), MinSeparation(max(1, n // 4), 3)
    objective = buffered._Objective(workload, participation.separation(n), participation.most(n))
    rng = np.random.default_rng(num_buffers)
    variables = buffered._spaced(0.02, 0.8, num_buffers) + rng.normal(size=2 * num_buffers)
    value, gradient = objective(variables)
    t, h = buffered._decays(variables)
    strategy = BufferedStrategy(t, buffered._residues(t, h), n)
    sensitivity = participation.sensitivity(strategy).value
    loss = sensitivity**2 * error.squared_error(workload, strategy)
    assert value == pytest.approx(math.log(loss), abs=1e-10)
    step = 1e-6
    slopes = [
        (objective(variables + step * unit)[0] - objective(variables - step * unit)[0]) / (2 * step)
        for unit in np.eye(2 * num_buffers)
    ]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-7)


def test_variables_are_those_of_their_decays_and_reach_every_blt():
    h, _ = THREE.inverse_parameters
    variables = buffered._variables(THREE.decays, h)
    for found, expected in zip(buffered._decays(variables), (THREE.decays, h), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    rng = np.random.default_rng(0)
    for variables in rng.normal(scale=4.0, size=(200, 6)):
        t, h = buffered._decays(variables)
        BufferedStrategy(t, buffered._residues(t, h), 5)  # Refuses what is not one.


@pytest.mark.parametrize(
    ("n", "b", "k", "rmse"),
    [
        (2052, 342, 6, [9.84552089, 9.18275189, 9.17130352]),
        (2000, 400, 5, [8.83346, 8.16083, 8.14662]),
    ],
)
def test_published_optima_are_reached(n, b, k, rmse):
    """jax-privacy reports 9.182751892 for two buffers; three of the first row are field.md's."""
    for num_buffers, expected in enumerate(rmse, start=1):
        result = optimize_buffered(workloads.prefix_sum(n), num_buffers, MinSeparation(b, k))
        assert result.converged
        assert result.strategy.num_buffers == num_buffers
        assert _rmse(result) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("participation", [SingleParticipation(), FixedEpochs(8, 4)], ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_other_blt_is_better_by_a_search_on_dense_matrices(name, participation):
    n, d = 32, 2
    workload = _workload(name, n)
    result = optimize_buffered(workload, d, participation)
    assert participation.sensitivity(result.strategy).value == pytest.approx(1.0, rel=1e-12)
    assert result.loss == pytest.approx(error.squared_error(workload, result.strategy), rel=1e-6)
    A = workload.materialize()
    b, k = participation.separation(n), participation.most(n)
    lags = np.subtract.outer(np.arange(n), np.arange(n))

    def dense_loss(x: np.ndarray) -> float:
        """Of decays and scales, without anything that the optimiser knows about them."""
        decays, scales = 1.0 / (1.0 + np.exp(-x[:d])), np.exp(x[d:])
        if scales.sum() > 1.0:
            return 1e3 + scales.sum()
        C = np.tril((decays ** np.maximum(lags - 1, 0)[..., None]) @ scales, -1) + np.eye(n)
        X = C.T @ C
        squared = max(X[i::b, i::b][:k, :k].sum() for i in range(b))
        return math.log(squared * np.sum((A @ np.linalg.inv(C)) ** 2))

    rng = np.random.default_rng(0)
    starts = [np.concatenate([rng.uniform(-1, 4, d), rng.uniform(-4, -1, d)]) for _ in range(3)]
    found = [scipy.optimize.minimize(dense_loss, s, method="Nelder-Mead").fun for s in starts]
    assert math.log(result.loss) <= min(found) + 1e-4


def test_more_buffers_are_never_worse_and_never_better_than_the_dense_optimum():
    n = 256
    workload, single = workloads.prefix_sum(n), SingleParticipation()
    losses = [optimize_buffered(workload, d, single).loss for d in range(1, 6)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(losses))
    best = optimization.optimize_toeplitz(workload, n).loss
    assert best <= losses[-1] * (1 + 1e-9)
    assert losses[-1] <= 1.001 * best  # Five buffers are as good as all 256 bands.


def test_a_coarser_problem_does_not_cost_error():
    """Above 4,096 rounds one start is the solution for an eighth; all starts find no better one."""
    n, b, k = 8192, 1024, 8
    workload = workloads.prefix_sum(n)
    result = optimize_buffered(workload, 3, MinSeparation(b, k))
    objective = buffered._Objective(workload, b, k)
    for low, high in itertools.product((0.3 / b, 3.0 / b), (0.5, 0.9)):
        start = buffered._spaced(low, high, 3)
        other = optimization.minimize_log_loss(objective, start, 1e-8, 500, None)
        assert math.log(result.loss) <= other.value + 1e-4


def test_training_of_hundred_thousand_rounds_needs_a_few_buffers():
    """Four rows of memory stay within a tenth of 64 times as many Toeplitz bands."""
    n, b, k = 100_000, 20_000, 5
    result = optimize_buffered(workloads.prefix_sum(n), 3, MinSeparation(b, k))
    bands = optimization.optimize_toeplitz(workloads.prefix_sum(n), 64).loss * k
    assert result.loss < bands / 4.0
    assert MinSeparation(b, k).sensitivity(result.strategy).kind == EXACT


def test_progress_tells_losses_and_wrong_numbers_are_refused():
    seen: list[float] = []
    result = optimize_buffered(
        workloads.prefix_sum(64),
        1,
        MinSeparation(16, 4),
        progress=lambda iteration, loss: seen.append(loss),
    )
    assert min(seen) == pytest.approx(result.loss, rel=1e-9)
    with pytest.raises(ValueError, match=r"^num_buffers must be at least 1\. Found 0\.$"):
        optimize_buffered(workloads.prefix_sum(64), 0, SingleParticipation())
    with pytest.raises(
        ValueError, match=r"^num_buffers must be at most 64; .* Found 1000000000\.$"
    ):
        optimize_buffered(workloads.prefix_sum(64), 10**9, SingleParticipation())
