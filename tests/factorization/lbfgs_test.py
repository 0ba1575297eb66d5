"""The minimiser finds minima, says when it did not, and steps back from undefined values."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from bandmf_tf.factorization import _lbfgs

TIGHT = {"finished": _lbfgs.stalled(1e-14), "max_iterations": 1000}


def _rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    return float(scipy.optimize.rosen(x)), scipy.optimize.rosen_der(x)


@given(st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_quadratics_are_solved(n, seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    H, solution = root @ root.T + 0.1 * np.eye(n), rng.normal(size=n)

    def quadratic(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float((x - solution) @ H @ (x - solution)) / 2.0, H @ (x - solution)

    outcome = _lbfgs.minimize(quadratic, np.zeros(n), **TIGHT)
    assert outcome.converged
    assert outcome.value < 1e-10
    np.testing.assert_allclose(outcome.x, solution, atol=1e-4)


@pytest.mark.parametrize("n", [2, 10, 50])
def test_a_curved_valley_is_followed_to_its_end(n):
    outcome = _lbfgs.minimize(_rosenbrock, np.zeros(n), **TIGHT)
    assert outcome.converged
    np.testing.assert_allclose(outcome.x, np.ones(n), atol=1e-5)


@pytest.mark.parametrize("outside", [np.nan, np.inf, 1e300])
def test_it_steps_back_from_where_the_function_is_not_defined(outside):
    def barrier(x: np.ndarray) -> tuple[float, np.ndarray]:
        """-log(x) + 100 x for x > 0: minimum at 0.01; the first step ends outside."""
        if np.any(x <= 0.0):
            return outside, np.full_like(x, np.nan)
        return float(np.sum(100.0 * x - np.log(x))), 100.0 - 1.0 / x

    outcome = _lbfgs.minimize(barrier, np.array([0.5, 0.02]), **TIGHT)
    assert outcome.converged
    np.testing.assert_allclose(outcome.x, [0.01, 0.01], rtol=1e-5)


def test_nothing_to_do_is_convergence():
    at_minimum = _lbfgs.minimize(lambda x: (float(x @ x), 2.0 * x), np.zeros(3), **TIGHT)
    assert (at_minimum.converged, at_minimum.iterations) == (True, 0)
    no_variables = _lbfgs.minimize(lambda x: (7.0, x), np.zeros(0), **TIGHT)
    assert (no_variables.converged, no_variables.iterations, no_variables.value) == (True, 0, 7.0)


def test_the_iteration_limit_is_reported():
    outcome = _lbfgs.minimize(
        _rosenbrock, np.zeros(10), finished=_lbfgs.stalled(1e-14), max_iterations=3
    )
    assert (outcome.converged, outcome.iterations) == (False, 3)


def test_the_stopping_rule_looks_at_the_last_four_iterations():
    values = []
    outcome = _lbfgs.minimize(
        _rosenbrock,
        np.zeros(20),
        finished=_lbfgs.stalled(1e-3),
        max_iterations=1000,
        progress=lambda _, value: values.append(value),
    )
    assert outcome.converged
    assert outcome.recent_gain == values[-5] - values[-1] < 1e-3
    assert all(values[i - 4] - values[i] >= 1e-3 for i in range(4, len(values) - 1))


def test_a_rule_of_the_caller_is_asked_from_the_start():
    assert (
        _lbfgs.minimize(
            _rosenbrock, np.zeros(5), finished=lambda history: True, max_iterations=9
        ).iterations
        == 0
    )
    third = _lbfgs.minimize(
        _rosenbrock, np.zeros(5), finished=lambda history: len(history) == 4, max_iterations=9
    )
    assert (third.converged, third.iterations) == (True, 3)


def test_progress_is_told_of_every_iteration_and_values_fall():
    told = []
    outcome = _lbfgs.minimize(
        _rosenbrock, np.zeros(5), **TIGHT, progress=lambda *arguments: told.append(arguments)
    )
    assert [iteration for iteration, _ in told] == list(range(1, outcome.iterations + 1))
    values = [value for _, value in told]
    assert values == sorted(values, reverse=True)
    assert values[-1] == outcome.value


def test_the_outcome_describes_the_point_that_is_returned():
    """Also where the last line search failed at some other point."""

    def kinked(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(np.abs(x))), np.sign(x)

    outcome = _lbfgs.minimize(
        kinked, np.array([1.0, -2.5]), finished=_lbfgs.stalled(1e-9), max_iterations=100
    )
    value, gradient = kinked(outcome.x)
    assert outcome.value == value
    assert outcome.gradient_norm == pytest.approx(np.linalg.norm(gradient))


def test_a_line_search_that_fails_is_not_convergence():
    def nonsense(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(x @ x), -2.0 * x  # The gradient points the wrong way.

    outcome = _lbfgs.minimize(
        nonsense, np.array([1.0, 2.0]), finished=_lbfgs.stalled(1e-4), max_iterations=100
    )
    assert (outcome.converged, outcome.iterations) == (False, 0)
    np.testing.assert_array_equal(outcome.x, [1.0, 2.0])


def test_the_start_is_left_alone():
    start = np.zeros(4)
    _lbfgs.minimize(_rosenbrock, start, **TIGHT)
    np.testing.assert_array_equal(start, np.zeros(4))


def test_wrong_inputs_get_one_clear_sentence():
    with pytest.raises(ValueError, match=r"^tolerance must be positive\. Found 0\.0\.$"):
        _lbfgs.stalled(0.0)
    with pytest.raises(ValueError, match=r"^max_iterations must be at least 1\. Found 0\.$"):
        _lbfgs.minimize(_rosenbrock, np.zeros(2), **{**TIGHT, "max_iterations": 0})
