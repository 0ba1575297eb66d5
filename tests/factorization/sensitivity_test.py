"""Sensitivities agree with brute force over all patterns, and no contribution exceeds them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import optimization, sensitivity, trees, workloads
from bandmf_tf.factorization.sensitivity import EXACT, UPPER_BOUND
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    Strategy,
    ToeplitzStrategy,
    identity,
    lower_factor,
)
from bandmf_tf.factorization.trees import TreeStrategy
from cases import random_banded, separated_patterns

PROPERTY = settings(max_examples=60)


def spaced_patterns(n: int, b: int, k: int) -> Iterator[tuple[int, ...]]:
    """All patterns of (k, b)-participation: neighbours exactly b apart."""
    for start, count in itertools.product(range(n), range(1, k + 1)):
        if start + (count - 1) * b < n:
            yield tuple(range(start, start + count * b, b))


def largest_absolute_sum(X: np.ndarray, patterns: Iterator[tuple[int, ...]]) -> float:
    """Proposition E.1's bound: the square root of max over patterns of sum |X[i, j]|."""
    return math.sqrt(max(np.abs(X[np.ix_(p, p)]).sum() for p in patterns))


def largest_signed_sum(X: np.ndarray, patterns: Iterator[tuple[int, ...]]) -> float:
    """The sensitivity in dimension d = 1, by trying all signs of the contributions.

    |C u|^2 is convex in every entry of u, so its maximum over the cube is at a corner.
    """
    best = 0.0
    for pattern in patterns:
        block = X[np.ix_(pattern, pattern)]
        for signs in itertools.product([1.0], *[[1.0, -1.0]] * (len(pattern) - 1)):
            best = max(best, float(np.array(signs) @ block @ np.array(signs)))
    return math.sqrt(best)


def searched_sensitivity(
    X: np.ndarray, patterns: Iterator[tuple[int, ...]], dimension: int, seed: int = 0
) -> float:
    """The largest |C u|_F a local search finds over contributions of unit rows in R^d.

    Every row in turn is set to its best value given the others, which never lowers the objective.
    """
    rng = np.random.default_rng(seed)
    best = 0.0
    for pattern in patterns:
        block = X[np.ix_(pattern, pattern)]
        off_diagonal = block - np.diag(np.diagonal(block))
        for _ in range(3):
            u = rng.normal(size=(len(pattern), dimension))
            u /= np.linalg.norm(u, axis=1, keepdims=True)
            for _, row in itertools.product(range(15), range(len(pattern))):
                pull = off_diagonal[row] @ u
                if np.linalg.norm(pull) > 0.0:
                    u[row] = pull / np.linalg.norm(pull)
            best = max(best, float(np.einsum("ij,id,jd->", block, u, u)))
    return math.sqrt(best)


@st.composite
def problems(draw, largest: int = 9) -> tuple[Strategy, int, int]:
    n = draw(st.integers(1, largest))
    num_bands = draw(st.integers(1, n))
    strategy = random_banded(num_bands, n, draw(st.integers(0, 10**6)))
    if draw(st.booleans()):  # Otherwise X has entries of both signs.
        strategy = BandedStrategy(np.abs(strategy.bands))
    b, k = draw(st.integers(1, n + 1)), draw(st.integers(1, n + 1))
    return draw(st.sampled_from([strategy, DenseStrategy(strategy.materialize())])), b, k


class TestVecSens:
    """Algorithm 3."""

    @staticmethod
    def brute_force(v: np.ndarray, b: int, k: int) -> float:
        return max(0.0, *(v[list(p)].sum() for p in separated_patterns(len(v), b, k)))

    @PROPERTY
    @given(
        st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=10),
        st.integers(1, 11),
        st.integers(1, 11),
    )
    def test_it_is_the_maximum_over_all_patterns(self, v, b, k):
        expected = self.brute_force(np.array(v), b, k)
        assert sensitivity.vec_sens(np.array(v), b, k) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("b", [1, 2, 3, 4, 5, 6])
    def test_one_participation_picks_the_largest_entry(self, b):
        """The trap of Algorithm 3 in 0-based arrays: at k = 1, F[i + b, m - 1] wraps around."""
        v = np.array([5.0, 1.0, 9.0, 2.0, 7.0])
        assert sensitivity.vec_sens(v, b, 1) == 9.0

    def test_the_last_steps_have_nothing_after_them(self):
        """The same trap in the other index: F[i + b, ..] past the end is zero, not F[i + b - n]."""
        v = np.array([100.0, 0.0, 0.0, 0.0, 1.0])
        assert sensitivity.vec_sens(v, 4, 2) == 101.0
        assert sensitivity.vec_sens(v, 5, 2) == 100.0
        assert sensitivity.vec_sens(v[::-1], 5, 2) == 100.0

    @pytest.mark.parametrize("k", [1, 2, 3, 9])
    def test_leading_axes_are_independent_problems(self, k):
        v = np.random.default_rng(0).normal(size=(2, 3, 8))
        ours = sensitivity.vec_sens(v, 3, k)
        assert ours.shape == (2, 3)
        for index in np.ndindex(2, 3):
            assert ours[index] == pytest.approx(self.brute_force(v[index], 3, k), abs=1e-14)

    def test_its_argument_is_left_alone(self):
        v = np.arange(6.0)
        sensitivity.vec_sens(v, 2, 2)
        np.testing.assert_array_equal(v, np.arange(6.0))


class TestSingleParticipation:
    @PROPERTY
    @given(problems())
    def test_it_is_the_largest_column_norm(self, problem):
        strategy, _, _ = problem
        result = sensitivity.single_participation(strategy)
        expected = np.linalg.norm(strategy.materialize(), axis=0).max()
        assert result.value == pytest.approx(expected, rel=1e-12)
        assert result.kind == EXACT


class TestFixedEpochs:
    @PROPERTY
    @given(problems())
    def test_it_is_proposition_e1_over_all_spaced_patterns(self, problem):
        strategy, b, k = problem
        X = strategy.gram()
        result = sensitivity.fixed_epochs(strategy, b, k)
        expected = largest_absolute_sum(X, spaced_patterns(strategy.num_rounds, b, k))
        assert result.value == pytest.approx(expected, rel=1e-12)

    @PROPERTY
    @given(problems())
    def test_exact_means_attained_and_a_bound_is_never_exceeded(self, problem):
        strategy, b, k = problem
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.fixed_epochs(strategy, b, k)
        attained = largest_signed_sum(X, spaced_patterns(n, b, k))
        assert attained <= result.value * (1 + 1e-12)
        if result.kind == EXACT:
            assert attained == pytest.approx(result.value, rel=1e-9)

    @pytest.mark.parametrize("negative", [-1e-9, -1e-3, -0.1])
    def test_a_small_cancellation_is_already_a_bound(self, negative):
        X = np.array([[1.0, 0.4, negative], [0.4, 1.0, 0.4], [negative, 0.4, 1.0]])
        strategy = DenseStrategy(lower_factor(X))
        assert sensitivity.fixed_epochs(strategy, 1, 3).kind == UPPER_BOUND

    def test_cancelling_contributions_are_called_a_bound(self):
        """Three participations, two positive and one negative product: not all can be attained."""
        X = np.array([[1.0, 0.4, -0.4], [0.4, 1.0, 0.4], [-0.4, 0.4, 1.0]])
        strategy = DenseStrategy(lower_factor(X))
        result = sensitivity.fixed_epochs(strategy, 1, 3)
        assert result.kind == UPPER_BOUND
        assert result.value == pytest.approx(math.sqrt(3 + 6 * 0.4))
        assert largest_signed_sum(X, iter([(0, 1, 2)])) < 0.9 * result.value
        assert searched_sensitivity(X, iter([(0, 1, 2)]), 3) < 0.95 * result.value

    def test_negative_products_that_signs_make_positive_are_called_exact(self):
        X = np.array([[1.0, -0.4, 0.3], [-0.4, 1.0, -0.2], [0.3, -0.2, 1.0]])
        strategy = DenseStrategy(lower_factor(X))
        result = sensitivity.fixed_epochs(strategy, 1, 3)
        assert result.kind == EXACT
        assert result.theorem == "Proposition E.1, attained by choosing signs"
        assert largest_signed_sum(X, iter([(0, 1, 2)])) == pytest.approx(result.value)

    def test_proposition_b1_for_banded_strategies(self):
        strategy = random_banded(3, 12, seed=1)
        result = sensitivity.fixed_epochs(strategy, 4, 3)
        squared_norms = strategy.column_norms() ** 2
        # The paper's formula gives the square of the sensitivity.
        expected = max(squared_norms[i::4].sum() for i in range(4))
        assert result.value**2 == pytest.approx(expected, rel=1e-13)
        assert result.kind == EXACT
        assert "Proposition B.1" in result.theorem

    def test_every_step_is_the_norm_of_the_whole_matrix(self):
        strategy = BandedStrategy(np.abs(random_banded(30, 30, seed=4).bands))
        expected = math.sqrt(strategy.gram().sum())
        assert sensitivity.fixed_epochs(strategy, 1, 30).value == pytest.approx(expected)
        assert sensitivity.fixed_epochs(strategy, 1, 10**9).value == pytest.approx(expected)


class TestBandedMinSeparation:
    @PROPERTY
    @given(problems(largest=10))
    def test_theorem_2_is_exact_in_every_dimension(self, problem):
        strategy, b, k = problem
        b = max(b, strategy.num_bands)
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.banded_min_separation(strategy, b, k)
        assert result.kind == EXACT
        patterns = list(separated_patterns(n, b, k))
        assert result.value == pytest.approx(largest_absolute_sum(X, iter(patterns)), rel=1e-12)
        for dimension in (1, 2, 5):
            found = searched_sensitivity(X, iter(patterns), dimension)
            assert found == pytest.approx(result.value, rel=1e-12)

    def test_equal_column_norms_give_the_square_root_of_the_participations(self):
        strategy = optimization.square_root(workloads.prefix_sum(20), 4).to_banded()
        bands = strategy.bands / strategy.column_norms()
        result = sensitivity.banded_min_separation(BandedStrategy(bands), 5, 3)
        assert result.value == pytest.approx(math.sqrt(3), rel=1e-14)

    def test_more_bands_than_the_separation_are_refused(self):
        with pytest.raises(ValueError, match=r"num_bands <= min_separation=3; .*num_bands=4\.$"):
            sensitivity.banded_min_separation(random_banded(4, 8, seed=1), 3, 2)


class TestGeneralMinSeparation:
    @PROPERTY
    @given(problems())
    def test_theorem_3_bounds_every_contribution(self, problem):
        strategy, b, k = problem
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.general_min_separation(strategy, b, k)
        bound = largest_absolute_sum(X, separated_patterns(n, b, k))
        assert bound <= result.value * (1 + 1e-12)
        if result.kind == EXACT:
            assert bound == pytest.approx(result.value, rel=1e-12)
        found = searched_sensitivity(X, separated_patterns(n, b, k), dimension=2)
        assert found <= result.value * (1 + 1e-12)

    @PROPERTY
    @given(problems())
    def test_it_is_algorithm_4(self, problem):
        strategy, b, k = problem
        n, X = strategy.num_rounds, np.abs(strategy.gram())
        patterns = [list(p) for p in separated_patterns(n, b, k)]
        per_row = np.array([max(row[p].sum() for p in patterns) for row in X])
        expected = math.sqrt(max(per_row[p].sum() for p in patterns))
        result = sensitivity.general_min_separation(strategy, b, k)
        assert result.value == pytest.approx(expected, rel=1e-12)

    def test_the_windows_of_a_banded_gram_lose_nothing(self):
        banded = random_banded(5, 40, seed=3)
        dense = DenseStrategy(banded.materialize())
        for b, k in [(1, 40), (2, 7), (3, 3), (7, 4)]:
            ours = sensitivity.general_min_separation(banded, b, k)
            assert ours.value == pytest.approx(
                sensitivity.general_min_separation(dense, b, k).value, rel=1e-13
            )


class TestChainMinSeparation:
    @PROPERTY
    @given(problems())
    def test_it_is_exact_for_up_to_twice_as_many_bands(self, problem):
        strategy, b, k = problem
        b = max(b, -(-strategy.num_bands // 2))
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.chain_min_separation(strategy, b, k)
        assert result.kind == EXACT
        bound = largest_absolute_sum(X, separated_patterns(n, b, k))
        attained = largest_signed_sum(X, separated_patterns(n, b, k))
        assert result.value == pytest.approx(bound, rel=1e-12)
        assert result.value == pytest.approx(attained, rel=1e-12)

    @PROPERTY
    @given(problems())
    def test_it_is_exact_for_two_participations(self, problem):
        strategy, b, _ = problem
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.chain_min_separation(strategy, b, 2)
        attained = largest_signed_sum(X, separated_patterns(n, b, 2))
        assert result.value == pytest.approx(attained, rel=1e-12)

    @pytest.mark.parametrize("dimension", [1, 2, 5])
    def test_no_dimension_gains_over_signs(self, dimension):
        for seed in range(5):
            strategy = random_banded(6, 10, seed)
            X = strategy.gram()
            result = sensitivity.chain_min_separation(strategy, 3, 4)
            found = searched_sensitivity(X, separated_patterns(10, 3, 4), dimension)
            assert found <= result.value * (1 + 1e-12)
            assert found == pytest.approx(result.value, rel=1e-6 if dimension > 1 else 0.2)

    def test_it_improves_on_theorem_3(self):
        strategy = optimization.square_root(workloads.prefix_sum(60), 16)
        chain = sensitivity.chain_min_separation(strategy, 10, 5)
        general = sensitivity.general_min_separation(strategy, 10, 5)
        assert chain.value < 0.999 * general.value

    def test_it_respects_the_separation_of_narrow_bands(self):
        """With fewer bands than the separation it is Theorem 2, not a tighter packing."""
        strategy = identity(10)
        result = sensitivity.chain_min_separation(strategy, 4, 10)
        assert result.value == pytest.approx(math.sqrt(3))

    def test_too_many_bands_are_refused(self):
        message = r"num_bands <= 2 min_separation=6 or .*num_bands=7, max_participations=3\.$"
        with pytest.raises(ValueError, match=message):
            sensitivity.chain_min_separation(random_banded(7, 9, seed=1), 3, 3)


class TestTreeMinSeparation:
    @pytest.mark.parametrize("estimator", trees.ESTIMATORS)
    @pytest.mark.parametrize(("n", "b", "k"), [(13, 2, 4), (16, 3, 3), (12, 1, 12), (9, 4, 2)])
    def test_it_is_exact(self, n, b, k, estimator):
        strategy = TreeStrategy(n, estimator, scale=0.3)
        result = sensitivity.min_separation_participation(strategy, b, k)
        expected = largest_absolute_sum(strategy.gram(), separated_patterns(n, b, k))
        assert result.value == pytest.approx(expected, rel=1e-12)
        assert result.kind == EXACT
        assert "tree programme" in result.theorem

    def test_where_the_programme_gives_up_the_heights_bound_it(self, monkeypatch):
        strategy = TreeStrategy(40, scale=0.3)
        exact = sensitivity.min_separation_participation(strategy, 3, 8)
        monkeypatch.setattr(trees, "_MAX_STATES", 3)
        bound = sensitivity.min_separation_participation(strategy, 3, 8)
        assert (exact.kind, bound.kind) == (EXACT, UPPER_BOUND)
        assert exact.value <= bound.value <= 1.05 * exact.value
        assert bound.value <= sensitivity.general_min_separation(strategy, 3, 8).value

    def test_tiny_separations_on_long_trees_take_the_bound_without_a_dense_gram(self, monkeypatch):
        monkeypatch.setattr(TreeStrategy, "gram", None)
        result = sensitivity.min_separation_participation(TreeStrategy(30_000), 5, 100)
        assert result.kind == UPPER_BOUND
        packed = np.zeros(30_000)
        packed[0:500:5] = 1.0
        squared = sum(
            np.sum(packed[: 30_000 >> h << h].reshape(-1, 1 << h).sum(axis=1) ** 2)
            for h in range(15)
        )
        assert math.sqrt(squared) <= result.value <= 1.02 * math.sqrt(squared)


class TestMinSeparationParticipation:
    """The sharpest result that applies is taken."""

    @PROPERTY
    @given(problems())
    def test_no_contribution_exceeds_it_and_exact_is_attained(self, problem):
        strategy, b, k = problem
        n, X = strategy.num_rounds, strategy.gram()
        result = sensitivity.min_separation_participation(strategy, b, k)
        assert largest_absolute_sum(X, separated_patterns(n, b, k)) <= result.value * (1 + 1e-12)
        for dimension in (1, 3):
            found = searched_sensitivity(X, separated_patterns(n, b, k), dimension)
            assert found <= result.value * (1 + 1e-12)
        if result.kind == EXACT:
            attained = largest_signed_sum(X, separated_patterns(n, b, k))
            assert attained == pytest.approx(result.value, rel=1e-12)

    @pytest.mark.parametrize(
        ("num_bands", "b", "k", "kind", "theorem"),
        [
            (12, 12, None, EXACT, "largest column norm"),
            (12, 3, 1, EXACT, "largest column norm"),
            (3, 3, None, EXACT, "Theorem 2"),
            (6, 3, None, EXACT, "chain programme"),
            (12, 3, 2, EXACT, "chain programme"),
            (7, 3, 3, UPPER_BOUND, "Theorem 3"),
        ],
    )
    def test_the_theorem_follows_the_bands(self, num_bands, b, k, kind, theorem):
        strategy = random_banded(num_bands, 12, seed=1)
        result = sensitivity.min_separation_participation(strategy, b, k)
        assert result.kind == kind
        assert theorem in result.theorem

    def test_without_a_cap_the_separation_limits_participations(self):
        strategy = random_banded(3, 11, seed=5)
        without = sensitivity.min_separation_participation(strategy, 3)
        assert without == sensitivity.min_separation_participation(strategy, 3, 4)
        assert without == sensitivity.min_separation_participation(strategy, 3, 100)

    @PROPERTY
    @given(problems(), st.floats(0.1, 10.0))
    def test_it_scales_with_the_strategy(self, problem, factor):
        strategy, b, k = problem
        for schema in (
            sensitivity.fixed_epochs,
            sensitivity.min_separation_participation,
            sensitivity.general_min_separation,
        ):
            expected = factor * schema(strategy, b, k).value
            assert schema(strategy.scaled(factor), b, k).value == pytest.approx(expected, rel=1e-9)

    @PROPERTY
    @given(problems())
    def test_schemas_are_ordered(self, problem):
        """One participation <= exactly b apart <= at least b apart, and more never hurts less."""
        strategy, b, k = problem
        single = sensitivity.single_participation(strategy).value
        spaced = sensitivity.fixed_epochs(strategy, b, k).value
        separated = sensitivity.min_separation_participation(strategy, b, k).value
        assert single <= spaced * (1 + 1e-12)
        assert spaced <= separated * (1 + 1e-12)
        capped_less = sensitivity.general_min_separation(strategy, b, k + 1).value
        assert sensitivity.general_min_separation(strategy, b, k).value <= capped_less + 1e-12


def test_row_flips_change_no_sensitivity():
    """X = C^T C does not know the signs of rows; patterns and noise do not either."""
    C = random_banded(6, 9, seed=3).materialize()
    flipped = DenseStrategy(np.diag([1, -1, 1, -1, -1, 1, 1, -1, 1]) @ C)
    for schema in (sensitivity.fixed_epochs, sensitivity.general_min_separation):
        ours = schema(flipped, 2, 3)
        assert ours.value == pytest.approx(schema(DenseStrategy(C), 2, 3).value, rel=1e-13)


def test_dp_sgd_has_the_square_root_of_its_participations():
    strategy = identity(2052)
    assert sensitivity.single_participation(strategy).value == 1.0
    assert sensitivity.fixed_epochs(strategy, 342, 6).value == pytest.approx(math.sqrt(6))
    ours = sensitivity.min_separation_participation(strategy, 342)
    assert ours.value == pytest.approx(math.sqrt(6))
    assert ours.kind == EXACT


def test_a_dense_strategy_of_the_papers_size_is_bounded():
    rng = np.random.default_rng(0)
    strategy = DenseStrategy(np.tril(rng.normal(size=(2052, 2052)) / 2052) + np.eye(2052))
    spaced = sensitivity.fixed_epochs(strategy, 342, 6)
    bound = sensitivity.general_min_separation(strategy, 342, 6)
    assert spaced.value < bound.value < 1.5 * spaced.value


@pytest.mark.parametrize(
    "schema",
    [
        sensitivity.fixed_epochs,
        sensitivity.min_separation_participation,
        sensitivity.banded_min_separation,
        sensitivity.general_min_separation,
        sensitivity.chain_min_separation,
        lambda strategy, b, k: sensitivity.vec_sens(strategy.column_norms(), b, k),
    ],
)
def test_wrong_inputs_get_one_clear_sentence(schema):
    strategy = ToeplitzStrategy(np.ones(2), 5)
    with pytest.raises(ValueError, match=r"^min_separation must be at least 1\. Found 0\.$"):
        schema(strategy, 0, 1)
    with pytest.raises(ValueError, match=r"^max_participations must be at least 1\. Found 0\.$"):
        schema(strategy, 3, 0)
    with pytest.raises(TypeError, match=r"^min_separation must be an integer\. Found 2\.5\.$"):
        schema(strategy, 2.5, 1)


def test_a_unit_in_each_of_many_rounds_needs_memory_for_some_rows():
    """A table of rounds by participations would have 75 GiB."""
    n = 100_000
    strategy = ToeplitzStrategy(np.array([1.0, 0.5]), n).to_banded()
    found = sensitivity.general_min_separation(strategy, 1, n)
    everywhere = np.full(n, 1.5)  # C times ones.
    everywhere[0] = 1.0
    assert found.value == pytest.approx(np.linalg.norm(everywhere))
    assert found.kind == UPPER_BOUND


def test_theorem_3_is_exact_where_a_pattern_attains_it():
    rng = np.random.default_rng(3)
    kinds = set()
    for _ in range(60):
        C = np.tril(rng.normal(size=(7, 7))) + 2.0 * np.eye(7)
        if rng.random() < 0.5:
            C = np.diag(np.diag(C)) + 1e-9 * np.tril(np.abs(C), -1)
        found = sensitivity.general_min_separation(DenseStrategy(C), 2, 3)
        bound = largest_absolute_sum(C.T @ C, separated_patterns(7, 2, 3))
        assert found.value >= bound * (1 - 1e-12)
        if found.kind == EXACT:
            attained = largest_signed_sum(C.T @ C, separated_patterns(7, 2, 3))
            assert found.value == pytest.approx(attained, rel=1e-11)
        kinds.add(found.kind)
    assert kinds == {EXACT, UPPER_BOUND}


@pytest.mark.parametrize(("scale", "kept"), [(1e-149, True), (10**-161.5, False), (1e-200, False)])
def test_a_strategy_so_small_that_its_squares_are_lost_is_refused(scale, kept):
    """At 10^-161.5 a planned strategy had 1.57 for 2, and epsilon 3.3 for 4.4."""
    whole, small = random_banded(3, 12), BandedStrategy(scale * random_banded(3, 12).bands)
    if kept:
        true = scale * sensitivity.min_separation_participation(whole, 3, 4).value
        assert sensitivity.min_separation_participation(small, 3, 4).value == pytest.approx(
            true, rel=1e-12
        )
        return
    with pytest.raises(BandMFError, match="at least 1e-150"):
        sensitivity.min_separation_participation(small, 3, 4)
