"""Workloads are the linear maps of SGD, whatever the momentum and the schedule."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.workloads import Workload


@st.composite
def any_workload(draw) -> Workload:
    n = draw(st.integers(1, 9))
    rates = draw(st.lists(st.floats(0.01, 10.0), min_size=n, max_size=n))
    return Workload(n, draw(st.sampled_from([0.0, 0.3, 0.95])), np.array(rates))


def _dense(workload: Workload) -> np.ndarray:
    """A = S diag(learning_rates) M, written out."""
    n = workload.num_rounds
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    M = np.where(lag >= 0, workload.momentum ** np.maximum(lag, 0.0), 0.0)
    return np.tril(np.ones((n, n))) @ np.diag(workload.learning_rates) @ M


def _train(workload: Workload, gradients: np.ndarray) -> np.ndarray:
    """The update of SGD with momentum, one step after the other."""
    displacement, velocity = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    trajectory = []
    for rate, gradient in zip(workload.learning_rates, gradients, strict=True):
        velocity = workload.momentum * velocity + gradient
        displacement = displacement + rate * velocity
        trajectory.append(displacement)
    return np.stack(trajectory)


@given(any_workload())
def test_the_matrix_is_the_one_of_the_docstring(workload):
    np.testing.assert_allclose(workload.materialize(), _dense(workload), rtol=1e-12, atol=1e-12)


@given(any_workload(), st.integers(0, 2**32 - 1))
def test_matmul_is_training_with_sgd(workload, seed):
    gradients = np.random.default_rng(seed).normal(size=(workload.num_rounds, 2, 3))
    expected = _train(workload, gradients)
    np.testing.assert_allclose(workload.matmul(gradients), expected, rtol=1e-10, atol=1e-10)


@given(any_workload(), st.integers(0, 2**32 - 1))
def test_transpose_matmul_is_the_adjoint_of_matmul(workload, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, workload.num_rounds))
    assert workload.matmul(x) @ y == pytest.approx(x @ workload.transpose_matmul(y), abs=1e-9)
    several = rng.normal(size=(workload.num_rounds, 2))
    expected = _dense(workload).T @ several
    np.testing.assert_allclose(workload.transpose_matmul(several), expected, atol=1e-9)


@given(any_workload())
def test_inverse_bands_hold_the_whole_inverse(workload):
    n, bands = workload.num_rounds, workload.inverse_bands()
    inverse = np.zeros((n, n))
    for d, band in enumerate(bands):
        assert not np.any(band[n - d :]), "entries outside the matrix must be zero"
        inverse += np.diag(band[: n - d], -d)
    np.testing.assert_allclose(inverse @ _dense(workload), np.eye(n), atol=1e-8)


@pytest.mark.parametrize(("momentum", "most_bands"), [(0.0, 2), (0.9, 3)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 10])
def test_the_inverse_has_two_bands_or_three_with_momentum(n, momentum, most_bands):
    assert workloads.sgd(n, momentum).inverse_bands().shape == (min(most_bands, n), n)


def test_first_column_defines_a_workload_of_constant_learning_rate():
    workload = workloads.sgd(6, 0.5, np.full(6, 0.25))
    A = workload.materialize()
    np.testing.assert_allclose(workload.first_column(), A[:, 0], rtol=1e-15)
    for j in range(6):
        np.testing.assert_allclose(A[j:, j], workload.first_column()[: 6 - j], rtol=1e-13)


def test_prefix_sum_is_the_triangle_of_ones():
    workload = workloads.prefix_sum(5)
    assert workload.is_prefix_sum
    np.testing.assert_array_equal(workload.materialize(), np.tril(np.ones((5, 5))))


def test_structure_is_recognised():
    n = 4
    assert workloads.sgd(n, learning_rates=np.full(n, 3.0)).is_prefix_sum
    assert not workloads.sgd(n, momentum=0.9).is_prefix_sum
    assert workloads.sgd(n, momentum=0.9).has_constant_learning_rate
    varying = workloads.sgd(n, learning_rates=np.array([1.0, 1.0, 1.0, 0.5]))
    assert not varying.has_constant_learning_rate
    assert not varying.is_prefix_sum


def test_a_workload_cannot_be_changed_behind_its_back():
    rates = np.ones(3)
    workload = workloads.sgd(3, learning_rates=rates)
    rates[0] = 7.0
    assert workload.learning_rates[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        workload.learning_rates[0] = 7.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.momentum = 0.5


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (workloads.prefix_sum(7), "prefix sums of 7 rounds"),
        (workloads.sgd(7, 0.9), "SGD with momentum 0.9 over 7 rounds, learning rate 1"),
        (
            workloads.sgd(2, learning_rates=np.array([0.5, 0.25])),
            "SGD over 2 rounds, learning rate 0.25 to 0.5",
        ),
    ],
)
def test_describe_says_it_in_words(workload, words):
    assert workload.describe() == words


def test_default_schedule_is_the_papers_for_stackoverflow():
    rates = workloads.warmup_cooldown_schedule(2052)
    # Appendix H: 0.05 to 1 over the first 309 rounds, 1 to 0.05 over the last 513.
    np.testing.assert_allclose(rates[:309], np.linspace(0.05, 1.0, 309), rtol=1e-12)
    assert np.all(rates[308 : 2052 - 513] == 1.0)
    np.testing.assert_allclose(rates[-514:], np.linspace(1.0, 0.05, 514), rtol=1e-12)


@given(
    st.integers(1, 60),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
)
def test_schedules_rise_then_fall_between_their_ends_and_the_peak(n, warmup, cooldown, low, last):
    rates = workloads.warmup_cooldown_schedule(n, warmup, cooldown, low, last)
    assert rates.shape == (n,)
    assert np.all((rates >= min(low, last) - 1e-12) & (rates <= 1.0 + 1e-12))
    peak = int(np.argmax(rates))
    assert np.all(np.diff(rates[: peak + 1]) >= -1e-12)
    assert np.all(np.diff(rates[peak:]) <= 1e-12)


def test_a_schedule_without_warmup_and_cooldown_is_constant():
    rates = workloads.warmup_cooldown_schedule(5, 0.0, 0.0)
    np.testing.assert_array_equal(rates, np.ones(5))


def test_a_schedule_can_be_all_cooldown():
    rates = workloads.warmup_cooldown_schedule(4, 0.0, 1.0, cooldown_end=0.2)
    np.testing.assert_allclose(rates, [0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: workloads.prefix_sum(0),
            ValueError,
            r"^num_rounds must be at least 1\. Found 0\.$",
        ),
        (
            lambda: workloads.prefix_sum(2.5),
            TypeError,
            r"^num_rounds must be an integer\. Found 2\.5\.$",
        ),
        (
            lambda: workloads.sgd(3, momentum=1.0),
            ValueError,
            r"^momentum must be in \[0, 1\)\. Found 1\.0\.$",
        ),
        (
            lambda: workloads.sgd(3, momentum="much"),
            TypeError,
            r"^momentum must be a number\. Found 'much'\.$",
        ),
        (
            lambda: workloads.sgd(3, momentum=float("nan")),
            ValueError,
            r"^momentum must be finite\. Found nan\.$",
        ),
        (
            lambda: workloads.sgd(3, learning_rates=np.ones(4)),
            ValueError,
            r"one rate for each of the num_rounds=3 rounds\. Found 4\.$",
        ),
        (
            lambda: workloads.sgd(2, learning_rates=np.ones((2, 1))),
            ValueError,
            r"^learning_rates must have 1 axes\. Found shape \(2, 1\)\.$",
        ),
        (
            lambda: workloads.sgd(3, learning_rates=np.array([1.0, 0.0, 1.0])),
            ValueError,
            r"^learning_rates must be positive in every round; .* Found 0\.0 at round 1\.$",
        ),
        (
            lambda: workloads.sgd(2, learning_rates=np.array([1.0, np.inf])),
            ValueError,
            r"^learning_rates must be finite in every entry",
        ),
        (
            lambda: workloads.prefix_sum(3).matmul(np.ones(4)),
            ValueError,
            r"^x must have 3 rows\. Found shape \(4,\)\.$",
        ),
        (
            lambda: workloads.prefix_sum(3).transpose_matmul(np.float64(1.0)),
            ValueError,
            r"^x must have 3 rows\. Found shape \(\)\.$",
        ),
        (
            lambda: workloads.warmup_cooldown_schedule(10, 0.6, 0.5),
            ValueError,
            r"their sum must be at most 1\. Found 0\.6 \+ 0\.5\.$",
        ),
        (
            lambda: workloads.warmup_cooldown_schedule(10, -0.1),
            ValueError,
            r"^warmup_fraction must be in \[0, 1\]\. Found -0\.1\.$",
        ),
    ],
)
def test_wrong_inputs_get_one_clear_sentence(make, error, message):
    with pytest.raises(error, match=message):
        make()
