import numpy as np
import pytest

from bandmf_tf.factorization import dense_optimization, error, optimization, sensitivity, workloads


def _pattern_entries(X: np.ndarray, b: int) -> np.ndarray:
    """Returns the off-diagonal entries of X between steps of the same residue class mod b."""
    i, j = np.indices(X.shape)
    return X[(i != j) & ((i - j) % b == 0)]


@pytest.mark.parametrize("equal_column_norms", [False, True])
@pytest.mark.parametrize(("n", "b"), [(24, 24), (24, 6), (23, 6), (40, 10)])
def test_gap_certifies_the_optimum(n: int, b: int, equal_column_norms: bool):
    workload = workloads.prefix_sum(n)
    result = dense_optimization.optimize_dense(
        workload, b, equal_column_norms=equal_column_norms, tolerance=1e-5
    )
    assert result.converged
    assert -1e-9 <= result.duality_gap < 1e-4


@pytest.mark.parametrize("equal_column_norms", [False, True])
def test_strategy_satisfies_the_constraints_it_was_optimised_for(equal_column_norms: bool):
    n, b, k = 40, 10, 4
    result = dense_optimization.optimize_dense(
        workloads.prefix_sum(n), b, equal_column_norms=equal_column_norms, tolerance=1e-6
    )
    X = result.strategy.gram()
    assert np.abs(_pattern_entries(X, b)).max() < 1e-3 * X.max()
    class_sums = np.diagonal(X).reshape(k, b).sum(axis=0)
    np.testing.assert_allclose(class_sums, 1.0, rtol=1e-3)
    assert sensitivity.fixed_epochs(result.strategy, b, k).value == pytest.approx(1.0)
    norms = result.strategy.column_norms()
    assert (norms.max() / norms.min() < 1 + 1e-9) == equal_column_norms


@pytest.mark.parametrize("equal_column_norms", [False, True])
def test_without_separation_the_optimum_is_diagonal_and_needs_no_iterations(equal_column_norms):
    workload = workloads.sgd(24, momentum=0.5)
    result = dense_optimization.optimize_dense(workload, 1, equal_column_norms=equal_column_norms)
    assert (result.iterations, result.duality_gap) == (0, 0.0)
    assert sensitivity.fixed_epochs(result.strategy, 1, 24).value == pytest.approx(1.0)
    assert result.loss == pytest.approx(error.squared_error(workload, result.strategy))
    dual = dense_optimization._Dual(workload, 1, equal_column_norms)
    outcome = dense_optimization._maximize(dual, np.eye(24)[:, :, None], 1e-4, 20_000, None)
    assert result.loss >= outcome.lower_bound
    assert result.loss == pytest.approx(outcome.lower_bound, rel=1e-3)


def test_equal_norms_cost_error_and_both_beat_banded_strategies():
    n, b, k = 48, 12, 4
    workload = workloads.prefix_sum(n)
    free = dense_optimization.optimize_dense(workload, b).loss
    equal = dense_optimization.optimize_dense(workload, b, equal_column_norms=True).loss
    banded = k * optimization.optimize_banded(workload, b).loss
    assert free < equal < banded


def test_single_epoch_is_the_banded_problem_with_all_bands():
    """Two independent methods: the dual here, the primal with n bands in `optimization`."""
    workload = workloads.prefix_sum(64)
    dual = dense_optimization.optimize_dense(workload, tolerance=1e-6)
    primal = optimization.optimize_banded(workload, 64, tolerance=1e-9)
    assert dual.loss == pytest.approx(primal.loss, rel=1e-5)


def test_no_strategy_of_the_family_beats_the_lower_bound():
    """Perturbs the optimum within its constraints; every feasible loss stays above the bound."""
    n, b = 12, 4
    workload = workloads.sgd(n, momentum=0.5)
    result = dense_optimization.optimize_dense(workload, b, tolerance=1e-7)
    bound = result.loss / (1.0 + result.duality_gap)
    M = workload.materialize().T @ workload.materialize()
    X = result.strategy.gram()
    rng = np.random.default_rng(7)
    i, j = np.indices(X.shape)
    within = (i - j) % b == 0
    feasible = np.where(within & (i != j), 0.0, X)
    for scale in (1e-3, 1e-2, 1e-1):
        for _ in range(50):
            noise = rng.normal(size=X.shape) * scale
            candidate = feasible + np.where(within, 0.0, (noise + noise.T) * X.max())
            if np.linalg.eigvalsh(candidate)[0] <= 0:
                continue
            largest = max(np.diagonal(candidate)[r::b].sum() for r in range(b))
            assert largest * np.trace(M @ np.linalg.inv(candidate)) >= bound * (1 - 1e-9)


def test_any_workload_is_accepted_and_matters():
    n, b = 32, 8
    schedule = workloads.warmup_cooldown_schedule(n)
    workload = workloads.sgd(n, momentum=0.9, learning_rates=schedule)
    own = dense_optimization.optimize_dense(workload, b)
    other = dense_optimization.optimize_dense(workloads.prefix_sum(n), b)
    assert own.loss < error.squared_error(workload, other.strategy)
    assert own.loss == pytest.approx(error.squared_error(workload, own.strategy))


def test_min_separation_bound_exceeds_the_fixed_epoch_sensitivity():
    """The paper's penalty of about 15 % for using these matrices under min-separation."""
    result = dense_optimization.optimize_dense(workloads.prefix_sum(120), 20)
    bound = sensitivity.min_separation_participation(result.strategy, 20, 6)
    assert bound.kind == sensitivity.UPPER_BOUND
    assert 1.05 < bound.value < 1.25


def test_iteration_limit_is_reported():
    result = dense_optimization.optimize_dense(workloads.prefix_sum(24), 6, max_iterations=2)
    assert not result.converged
    assert result.duality_gap > 1e-4


def test_progress_is_called_with_a_loss_that_approaches_the_result():
    seen: list[tuple[int, float]] = []
    result = dense_optimization.optimize_dense(
        workloads.prefix_sum(40), 10, progress=lambda i, loss: seen.append((i, loss))
    )
    assert [i for i, _ in seen] == list(range(1, result.iterations + 1))
    assert seen[-1][1] == pytest.approx(result.loss, rel=1e-3)


def test_one_step_has_nothing_to_correlate():
    result = dense_optimization.optimize_dense(workloads.prefix_sum(1))
    assert result.loss == pytest.approx(1.0)


def test_separation_beyond_training_is_refused():
    with pytest.raises(ValueError, match="min_separation must be at most num_rounds=8"):
        dense_optimization.optimize_dense(workloads.prefix_sum(8), 9)
