"""Strategies with a banded inverse: the closed form, the best one, and their oracles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize

from bandmf_tf.factorization import error, inverse_banded, optimization, workloads
from bandmf_tf.factorization.inverse_banded import (
    InverseBandedStrategy,
    inverse_square_root,
    optimize_inverse_banded,
)
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.factorization.sensitivity import EXACT, UPPER_BOUND

PAPER = workloads.prefix_sum(2052), MinSeparation(342, 6)
WORKLOADS = list(itertools.product([0.0, 0.9], [False, True]))


def _workload(n: int, momentum: float, varies: bool) -> workloads.Workload:
    rates = np.random.default_rng(n).uniform(0.2, 2.0, n) if varies else None
    return workloads.sgd(n, momentum, rates)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_all_bands_of_the_inverse_square_root_are_the_inverse_of_the_square_root(momentum):
    workload = workloads.sgd(30, momentum)
    ours = inverse_square_root(workload, 30)
    expected = optimization.square_root(workload, 30)
    np.testing.assert_allclose(ours.materialize(), expected.materialize(), rtol=1e-9)
    root = scipy.linalg.sqrtm(np.linalg.inv(workload.materialize()))
    ratio = ours.inverse_coefficients / ours.inverse_coefficients[0]
    np.testing.assert_allclose(ratio, np.real(root[:, 0]), atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("num_bands", [1, 2, 5, 40])
def test_bisr_never_increases_so_that_its_sensitivity_is_exact(num_bands, momentum):
    strategy = inverse_square_root(workloads.sgd(2000, momentum), num_bands)
    assert np.all(np.diff(strategy.coefficients) <= 0.0)
    assert strategy.column_norms().max() == pytest.approx(1.0, rel=1e-12)
    assert MinSeparation(100, 20).sensitivity(strategy).kind == EXACT


@pytest.mark.parametrize(
    ("num_bands", "bisr", "best"), [(2, 45.38, 13.9704), (3, 36.27, 12.2065), (8, 22.85, 10.1608)]
)
def test_errors_at_the_papers_size(num_bands, bisr, best):
    """The first columns are published; the best ones beat the published 12.48 and 10.54."""
    workload, participation = PAPER
    closed = inverse_square_root(workload, num_bands)
    found = error.rmse(workload, closed, participation.sensitivity(closed))
    assert found == pytest.approx(bisr, abs=5e-3)
    result = optimize_inverse_banded(workload, num_bands, participation)
    assert result.converged
    assert participation.sensitivity(result.strategy).kind == EXACT
    assert math.sqrt(result.loss / 2052) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize(("momentum", "varies"), WORKLOADS)
@pytest.mark.parametrize("count", [1, 3, 14])
def test_the_quadratic_form_is_that_of_shifted_workloads(momentum, varies, count):
    workload = _workload(14, momentum, varies)
    A = workload.materialize()
    shifted = [A @ np.eye(14, k=-shift) for shift in range(count)]
    expected = [[np.sum(one * other) for one in shifted] for other in shifted]
    found = inverse_banded._shift_gram(workload, count)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize(("momentum", "varies"), WORKLOADS)
@pytest.mark.parametrize("participation", [SingleParticipation(), FixedEpochs(8, 4)], ids=str)
def test_no_other_one_is_better_by_a_search_on_dense_matrices(momentum, varies, participation):
    n, p = 32, 3
    workload = _workload(n, momentum, varies)
    result = optimize_inverse_banded(workload, p, participation)
    assert participation.sensitivity(result.strategy).value == pytest.approx(1.0, rel=1e-12)
    A = workload.materialize()
    b, k = participation.separation(n), participation.most(n)

    def dense_loss(free: np.ndarray) -> float:
        inverse = scipy.linalg.toeplitz(
            np.concatenate([[1.0], free, np.zeros(n - p)]), np.eye(n)[0]
        )
        X = np.abs(np.linalg.inv(inverse).T @ np.linalg.inv(inverse))
        squared = max(X[i::b, i::b][:k, :k].sum() for i in range(b))
        return math.log(squared * np.sum((A @ inverse) ** 2))

    starts = ([-0.5, -0.1], [-0.9, 0.0], [-0.3, -0.3])
    found = [scipy.optimize.minimize(dense_loss, s, method="Nelder-Mead").fun for s in starts]
    assert math.log(result.loss) <= min(found) + 1e-3


def test_long_training_is_bounded_by_one_column():
    n = 50_000
    rising = InverseBandedStrategy(np.array([1.0, -0.49, -0.476]), n)
    found = MinSeparation(5000, 10).sensitivity(rising)
    assert found.kind == UPPER_BOUND
    column = np.zeros(n)
    column[::5000] = 1.0
    attained = np.linalg.norm(rising.matmul(column))
    assert attained < found.value < 1.1 * attained


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ([0.0, 1.0], "diagonal of a strategy must be non-zero"),
        ([1.0, -9.0], "must be finite in every entry"),
        ([1.0] * 900, "at most num_rounds=800"),
    ],
)
def test_what_has_no_use_is_refused(q, message):
    with pytest.raises(ValueError, match=message):
        InverseBandedStrategy(np.array(q), 800)
