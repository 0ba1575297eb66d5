"""Optimised strategies are feasible and, by a dual bound, cannot be improved any further."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.factorization import error as objective
from bandmf_tf.factorization import optimization, sensitivity, workloads
from bandmf_tf.factorization.optimization import (
    optimize_banded,
    optimize_banded_fixed_epochs,
    optimize_toeplitz,
    square_root,
    square_root_coefficients,
)
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    ToeplitzStrategy,
    inside_matrix,
)
from bandmf_tf.factorization.workloads import Workload

TIGHT = {"tolerance": 1e-9, "max_iterations": 3000}


def lower_bound(
    workload: Workload, X: np.ndarray, num_bands: int, min_separation: int | None = None
) -> float:
    """A proven lower bound on the loss of every feasible strategy, from a nearly optimal X.

    Let Z be positive semi-definite with `Z[i, j] = 0` for `0 < |i - j| < num_bands`. For every
    banded X, `tr(Z X)` is then `sum_i Z[i, i] X[i, i]`, and

        tr(A^T A X^-1) + tr(Z X) >= 2 tr((A Z A^T)^(1/2)) =: 2 T

    (the left side is smallest for X = Z^-1/2 (Z^1/2 A^T A Z^1/2)^1/2 Z^-1/2). With X[i, i] = 1 the
    loss is at least 2 T - S, S = tr(Z); with sums of X[i, i] over residue classes equal to 1 the
    same holds if Z's diagonal is constant in a class and S the sum of these constants. The best
    multiple of Z makes it T^2 / S.

    At the optimum Z = X^-1 A^T A X^-1 satisfies all conditions, so near it a repaired one is good.
    """
    n, A = len(X), workload.materialize()
    inverse = np.linalg.inv(X)
    Z = inverse @ A.T @ A @ inverse
    distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    groups = np.arange(n) % (min_separation or n)
    diagonal = (np.bincount(groups, np.diagonal(Z)) / np.bincount(groups))[groups]
    Z = np.where(distance < num_bands, 0.0, Z) + np.diag(diagonal)
    Z += max(0.0, -1.001 * np.linalg.eigvalsh(Z)[0]) * np.eye(n)
    assert np.linalg.eigvalsh(Z)[0] >= -1e-9 * diagonal.max()
    T = np.sum(np.sqrt(np.maximum(np.linalg.eigvalsh(A @ Z @ A.T), 0.0)))
    S = np.sum(np.diagonal(Z)[: groups.max() + 1])
    return T**2 / S


def some_workload(n: int, name: str) -> Workload:
    return {
        "prefix sum": workloads.prefix_sum(n),
        "momentum": workloads.sgd(n, 0.9),
        "schedule": workloads.sgd(n, 0.0, workloads.warmup_cooldown_schedule(n)),
        "both": workloads.sgd(n, 0.9, workloads.warmup_cooldown_schedule(n)),
    }[name]


WORKLOADS = ["prefix sum", "momentum", "schedule", "both"]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("n", "num_bands"), [(1, 1), (2, 2), (12, 1), (20, 3), (48, 16), (64, 8)])
class TestProblem2:
    def test_nothing_feasible_is_better(self, n, num_bands, name):
        workload = some_workload(n, name)
        result = optimize_banded(workload, num_bands, **TIGHT)
        bound = lower_bound(workload, result.strategy.gram(), num_bands)
        assert result.converged
        assert result.loss == pytest.approx(bound, rel=1e-5)
        default = optimize_banded(workload, num_bands).loss  # Its RMSE is a root of it.
        assert default <= bound * (1 + 0.001) ** 2

    def test_columns_have_norm_one_and_the_loss_is_what_it_says(self, n, num_bands, name):
        workload = some_workload(n, name)
        result = optimize_banded(workload, num_bands)
        strategy = result.strategy
        assert isinstance(strategy, BandedStrategy)
        assert (strategy.num_rounds, strategy.num_bands) == (n, num_bands)
        assert np.all(strategy.bands[0] > 0.0)
        np.testing.assert_allclose(strategy.column_norms(), 1.0, rtol=1e-12)
        assert result.loss == pytest.approx(objective.squared_error(workload, strategy), rel=1e-9)
        most = sensitivity.min_separation_participation(strategy, num_bands).value
        assert most == pytest.approx(math.sqrt(-(-n // num_bands)), rel=1e-12)
        assert "Problem 2" in result.guarantee


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(
    ("n", "num_bands", "b"), [(1, 1, 1), (12, 1, 4), (20, 3, 7), (48, 16, 16), (64, 8, 20)]
)
class TestFixedEpochs:
    def test_nothing_feasible_is_better(self, n, num_bands, b, name):
        workload = some_workload(n, name)
        result = optimize_banded_fixed_epochs(workload, num_bands, b, **TIGHT)
        bound = lower_bound(workload, result.strategy.gram(), num_bands, b)
        assert result.converged
        assert result.loss == pytest.approx(bound, rel=1e-4)

    def test_every_class_of_steps_has_sensitivity_one(self, n, num_bands, b, name):
        workload = some_workload(n, name)
        result = optimize_banded_fixed_epochs(workload, num_bands, b)
        strategy = result.strategy
        sums = np.bincount(np.arange(n) % b, strategy.gram_diagonal(0))
        np.testing.assert_allclose(sums, 1.0, rtol=1e-12)
        spaced = sensitivity.fixed_epochs(strategy, b, -(-n // b))
        assert (spaced.value, spaced.kind) == (pytest.approx(1.0, rel=1e-12), sensitivity.EXACT)
        assert np.all(strategy.bands[0] > 0.0)
        assert result.loss == pytest.approx(objective.squared_error(workload, strategy), rel=1e-9)
        assert "Appendix B" in result.guarantee

    def test_free_column_norms_are_never_worse(self, n, num_bands, b, name):
        workload = some_workload(n, name)
        free = optimize_banded_fixed_epochs(workload, num_bands, b, tolerance=1e-6).loss
        equal = optimize_banded(workload, num_bands, tolerance=1e-6).loss
        assert free <= -(-n // b) * equal * (1 + 1e-6)


def test_the_dual_bound_notices_a_strategy_that_is_not_optimal():
    """The oracle has teeth: the square root is 1 % above the optimum, and it says so."""
    workload = workloads.prefix_sum(40)
    optimum = optimize_banded(workload, 8, **TIGHT)
    start = square_root(workload, 8).to_banded()
    start = BandedStrategy(start.bands / start.column_norms())
    loss = objective.squared_error(workload, start)
    assert loss > 1.01 * optimum.loss
    assert lower_bound(workload, start.gram(), 8) <= optimum.loss * (1 + 1e-9)


def test_the_dual_bound_holds_for_any_feasible_strategy():
    """The bound from one X is below the loss of every other one."""
    workload, rng = workloads.sgd(24, 0.5), np.random.default_rng(0)
    bound = lower_bound(workload, optimize_banded(workload, 5, **TIGHT).strategy.gram(), 5)
    for _ in range(20):
        bands = rng.normal(size=(5, 24)) / 5
        bands[0] = 0.5 + rng.uniform(size=24)
        strategy = BandedStrategy(np.where(inside_matrix(5, 24), bands, 0.0))
        strategy = BandedStrategy(strategy.bands / strategy.column_norms())
        assert bound <= objective.squared_error(workload, strategy)


@settings(max_examples=15)
@given(st.integers(2, 40), st.data())
def test_any_learning_rates_and_momentum_reach_the_dual_bound(n, data):
    num_bands = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 1000))
    rates = np.random.default_rng(seed).uniform(0.1, 1.0, n)
    workload = workloads.sgd(n, data.draw(st.sampled_from([0.0, 0.5, 0.95])), rates)
    result = optimize_banded(workload, num_bands, **TIGHT)
    assert result.loss == pytest.approx(
        lower_bound(workload, result.strategy.gram(), num_bands), rel=1e-4
    )


@pytest.mark.parametrize("name", ["prefix sum", "both"])
@pytest.mark.parametrize("separation", [64, 24])
def test_the_multilevel_start_does_not_change_the_optimum(name, separation):
    """17 to 24 bands have a coarse level; plain L-BFGS from the identity ends at the same loss."""
    workload = some_workload(64, name)
    num_bands = min(20, separation)
    assert -(-num_bands // optimization._COARSENING) >= optimization._SMALLEST_COARSE_BANDS
    multilevel = optimize_banded_fixed_epochs(workload, num_bands, separation, **TIGHT)
    groups = np.arange(64) % separation
    for seed in (0, 1):
        start = 0.01 * np.random.default_rng(seed).normal(size=(num_bands, 64))
        start[0] = 1.0
        start = np.where(inside_matrix(num_bands, 64), start, 0.0)
        plain = optimization._minimize_normalized(workload, start, groups, 1e-10, 5000, None)
        assert np.exp(plain.value) == pytest.approx(multilevel.loss, rel=1e-6)


def test_rows_of_negative_diagonal_are_flipped_without_changing_the_error():
    """A row's sign is free; a column's is not, though both would make the diagonal positive."""
    rng = np.random.default_rng(0)
    bands = np.where(inside_matrix(4, 10), rng.normal(size=(4, 10)), 0.0)
    assert np.any(bands[0] < 0.0)
    flipped = optimization._with_positive_diagonal(bands)
    before, after = BandedStrategy(bands), BandedStrategy(flipped)
    assert np.all(flipped[0] > 0.0)
    np.testing.assert_allclose(after.gram(), before.gram(), atol=1e-12)
    workload = workloads.prefix_sum(10)
    error = objective.squared_error(workload, before)
    assert objective.squared_error(workload, after) == pytest.approx(error, rel=1e-10)
    by_columns = BandedStrategy(bands * np.sign(bands[0]))
    assert objective.squared_error(workload, by_columns) != pytest.approx(error, rel=1e-3)


def test_one_band_is_dp_sgd():
    result = optimize_banded(workloads.sgd(10, 0.9), 1)
    np.testing.assert_allclose(result.strategy.materialize(), np.eye(10), atol=1e-12)
    assert (result.converged, result.iterations) == (True, 0)
    toeplitz = optimize_toeplitz(workloads.sgd(10, 0.9), 1)
    np.testing.assert_array_equal(toeplitz.strategy.materialize(), np.eye(10))
    assert toeplitz.converged


@pytest.mark.parametrize("optimize", [optimize_banded, optimize_toeplitz])
def test_the_unit_of_the_learning_rate_does_not_matter(optimize):
    n, num_bands = 40, 6
    rates = workloads.warmup_cooldown_schedule(n)
    small = optimize(workloads.sgd(n, 0.5, rates), num_bands)
    large = optimize(workloads.sgd(n, 0.5, 1000.0 * rates), num_bands)
    assert large.loss == pytest.approx(1e6 * small.loss, rel=1e-6)
    np.testing.assert_allclose(
        large.strategy.materialize(), small.strategy.materialize(), atol=1e-5
    )


def test_more_bands_are_never_worse():
    workload = workloads.sgd(60, 0.9)
    losses = [optimize_banded(workload, b, tolerance=1e-7).loss for b in (1, 2, 4, 8, 16, 32, 60)]
    assert all(more < fewer for fewer, more in itertools.pairwise(losses))


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_square_root_squares_to_the_workload(momentum):
    workload = workloads.sgd(30, momentum)
    root = ToeplitzStrategy(square_root_coefficients(workload, 30), 30).materialize()
    np.testing.assert_allclose(root @ root, workload.materialize(), rtol=1e-10)
    cut = square_root_coefficients(workload, 7)
    np.testing.assert_allclose(cut, root[:7, 0], rtol=1e-12)


def test_square_root_has_largest_column_norm_one():
    strategy = square_root(workloads.prefix_sum(50), 9)
    assert strategy.column_norms().max() == pytest.approx(1.0, rel=1e-14)
    assert strategy.num_bands == 9


class TestToeplitz:
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("num_bands", [1, 2, 7, 50])
    def test_filters_and_blocks_evaluate_alike(self, num_bands, momentum):
        """With a constant learning rate both routes apply: values and gradients agree."""
        workload = workloads.sgd(50, momentum)
        c = 0.9 * square_root_coefficients(workload, num_bands)
        by_filters = optimization._toeplitz_error(workload, num_bands)(c)
        by_blocks = optimization._tied_banded_error(workload, num_bands)(c)
        assert by_filters[0] == pytest.approx(by_blocks[0], rel=1e-10)
        np.testing.assert_allclose(by_filters[1], by_blocks[1], rtol=1e-8)
        step = np.random.default_rng(0).normal(size=num_bands)
        error = optimization._toeplitz_error(workload, num_bands)
        slope = (error(c + 1e-6 * step)[0] - error(c - 1e-6 * step)[0]) / 2e-6
        assert slope == pytest.approx(by_filters[1] @ step, rel=1e-5)

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_optimum_beats_the_square_root_and_loses_to_free_bands(self, name):
        workload, num_bands = some_workload(80, name), 12
        optimum = optimize_toeplitz(workload, num_bands)
        root = objective.squared_error(workload, square_root(workload, num_bands))
        banded = optimize_banded(workload, num_bands, tolerance=1e-6).loss
        assert banded < 0.9999 * optimum.loss
        assert optimum.loss < root * (1 - 1e-5)
        assert optimum.converged
        assert optimum.gradient_norm < 1e-5
        assert "Toeplitz" in optimum.guarantee

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_the_loss_is_what_it_says(self, name):
        workload = some_workload(60, name)
        result = optimize_toeplitz(workload, 9)
        assert isinstance(result.strategy, ToeplitzStrategy)
        assert result.strategy.column_norms().max() == pytest.approx(1.0, rel=1e-13)
        error = objective.squared_error(workload, result.strategy)
        assert result.loss == pytest.approx(error, rel=1e-9)

    def test_both_routes_find_the_same_optimum(self, monkeypatch):
        workload = workloads.sgd(70, 0.9)
        by_filters = optimize_toeplitz(workload, 8)
        monkeypatch.setattr(Workload, "has_constant_learning_rate", False)
        by_blocks = optimize_toeplitz(workload, 8)
        assert by_blocks.loss == pytest.approx(by_filters.loss, rel=1e-9)
        np.testing.assert_allclose(
            by_blocks.strategy.coefficients, by_filters.strategy.coefficients, atol=1e-5
        )

    def test_no_small_change_improves_it(self):
        workload = workloads.prefix_sum(100)
        result = optimize_toeplitz(workload, 10)
        rng = np.random.default_rng(0)
        for _ in range(50):
            c = result.strategy.coefficients + 1e-3 * rng.normal(size=10)
            nearby = ToeplitzStrategy(c / np.linalg.norm(c), 100)
            assert objective.squared_error(workload, nearby) > result.loss

    def test_a_divergent_inverse_sends_the_line_search_back(self):
        error = optimization._toeplitz_error(workloads.prefix_sum(2000), 2)
        value, gradient = error(np.array([1.0, -5.0]))
        assert np.isfinite(value)
        assert value > 1e90
        np.testing.assert_array_equal(gradient, np.zeros(2))


class TestProgressAndConvergence:
    def test_stopping_early_is_reported(self):
        workload = workloads.sgd(60, 0.9)
        stopped = optimize_banded(workload, 12, max_iterations=2)
        assert not stopped.converged
        assert stopped.iterations == 2
        finished = optimize_banded(workload, 12)
        assert finished.converged
        assert finished.iterations > 2
        assert stopped.gradient_norm > finished.gradient_norm
        assert stopped.loss > finished.loss
        stopped = optimize_toeplitz(workload, 12, max_iterations=2)
        assert (stopped.converged, stopped.iterations) == (False, 2)
        stopped = optimize_banded_fixed_epochs(workload, 12, 20, max_iterations=2)
        assert (stopped.converged, stopped.iterations) == (False, 2)

    @pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
    def test_the_tolerance_is_met_and_says_how_far_the_optimum_is(self, tolerance):
        workload = workloads.sgd(64, 0.9)
        result = optimize_banded(workload, 16, tolerance=tolerance)
        optimum = optimize_banded(workload, 16, **TIGHT).loss
        assert 0.0 <= result.relative_change < tolerance
        assert result.loss / optimum - 1.0 < 5 * tolerance

    def test_progress_is_told_of_every_iteration(self):
        seen = []
        result = optimize_banded(
            workloads.prefix_sum(64), 20, progress=lambda *told: seen.append(told)
        )
        assert [iteration for iteration, _ in seen] == list(range(1, result.iterations + 1))
        losses = [loss for _, loss in seen]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] == pytest.approx(result.loss, rel=1e-12)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda w: optimize_banded(w, 11),
            r"^num_bands must be at most num_rounds=10; use 10 .* Found 11\.$",
        ),
        (lambda w: optimize_toeplitz(w, 0), r"^num_bands must be at least 1\. Found 0\.$"),
        (lambda w: square_root(w, 11), r"^num_bands must be at most num_rounds=10;"),
        (
            lambda w: optimize_banded_fixed_epochs(w, 5, 4),
            r"num_bands must be at most min_separation .* Found num_bands=5, min_separation=4\.$",
        ),
        (
            lambda w: optimize_banded_fixed_epochs(w, 1, 0),
            r"^min_separation must be at least 1\. Found 0\.$",
        ),
        (
            lambda w: optimize_banded(w, 2, tolerance=0.0),
            r"^tolerance must be positive\. Found 0\.0\.$",
        ),
        (
            lambda w: optimize_banded(w, 2, max_iterations=0),
            r"^max_iterations must be at least 1\. Found 0\.$",
        ),
    ],
)
def test_wrong_inputs_get_one_clear_sentence(run, message):
    with pytest.raises(ValueError, match=message):
        run(workloads.prefix_sum(10))
