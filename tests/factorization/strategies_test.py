"""Every strategy is a lower-triangular matrix and agrees with it in all that it computes."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from bandmf_tf.factorization import error, strategies, workloads
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from bandmf_tf.factorization.sensitivity import EXACT
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    Strategy,
    ToeplitzStrategy,
    identity,
    inside_matrix,
    lower_factor,
)
from bandmf_tf.factorization.trees import TreeStrategy


def _random_banded(num_bands: int, num_rounds: int, seed: int = 0) -> BandedStrategy:
    bands = np.random.default_rng(seed).normal(size=(num_bands, num_rounds)) / num_bands
    bands[0] = 0.7 + np.abs(bands[0])
    return BandedStrategy(np.where(inside_matrix(num_bands, num_rounds), bands, 0.0))


def _random_dense(num_rounds: int, seed: int = 0) -> DenseStrategy:
    matrix = np.tril(np.random.default_rng(seed).normal(size=(num_rounds, num_rounds)))
    return DenseStrategy(matrix / num_rounds + np.eye(num_rounds))


EXAMPLES = {
    "banded": _random_banded(4, 11),
    "one band": _random_banded(1, 5),
    "banded, all bands": _random_banded(7, 7),
    "banded, one step": _random_banded(1, 1),
    "toeplitz": ToeplitzStrategy(np.array([2.0, -0.5, 0.25, 0.1]), 9),
    "toeplitz, all bands": ToeplitzStrategy(0.6 ** np.arange(6), 6),
    "identity": identity(5),
    "dense": _random_dense(8),
    "full tree": TreeStrategy(13, "full"),
    "full tree, power of two": TreeStrategy(16, "full", scale=0.5),
    "online tree": TreeStrategy(13, "online"),
    "tree of one step": TreeStrategy(1, "online"),
    "blt": BufferedStrategy(np.array([0.95, 0.5, 0.1]), np.array([0.2, 0.3, 0.4]), 13, scale=0.7),
    "blt, one buffer": BufferedStrategy(np.array([0.9]), np.array([0.3]), 9),
    "blt, more buffers than steps": BufferedStrategy(np.array([0.9, 0.3]), np.full(2, 0.1), 2),
    "inverse banded": InverseBandedStrategy(np.array([2.0, -0.7, 0.3]), 11),
    "inverse banded, decreasing": InverseBandedStrategy(np.array([1.0, -0.5, -0.1]), 13),
    "inverse banded, one step": InverseBandedStrategy(np.array([2.0]), 1),
    "blt of one step": BufferedStrategy(np.array([0.9]), np.array([0.3]), 1),
}


WORKLOADS = {
    "prefix sum": workloads.prefix_sum,
    "momentum": lambda n: workloads.sgd(n, 0.9),
    "learning rates": lambda n: workloads.sgd(n, 0.0, np.linspace(0.2, 2.0, n)),
    "momentum and learning rates": lambda n: workloads.sgd(n, 0.9, np.linspace(0.2, 2.0, n)),
}

PARTICIPATIONS = [
    SingleParticipation(),
    *(FixedEpochs(b, k) for b, k in [(1, 16), (3, 2), (4, 4)]),
    *(MinSeparation(b, k) for b, k in [(1, 2), (2, 3), (4, None), (5, 2)]),
]


@pytest.fixture(params=EXAMPLES, ids=list(EXAMPLES))
def strategy(request) -> Strategy:
    return EXAMPLES[request.param]


def test_every_kind_of_strategy_is_among_the_examples():
    assert {type(example) for example in EXAMPLES.values()} == set(strategies._KINDS.values())


class TestConformance:
    """What every strategy promises; a new one gets these checks by joining `EXAMPLES`."""

    def test_it_is_lower_triangular_and_banded(self, strategy):
        C = strategy.materialize()
        n = strategy.num_rounds
        assert C.shape == (n, n)
        assert not np.any(np.triu(C, 1))
        assert not np.any(np.tril(C, -strategy.num_bands))
        assert np.all(np.diagonal(C) != 0.0)
        assert 1 <= strategy.num_bands <= n

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
    def test_matmul_multiplies(self, strategy, shape):
        x = np.random.default_rng(1).normal(size=(strategy.num_rounds, *shape))
        expected = np.tensordot(strategy.materialize(), x, axes=1)
        np.testing.assert_allclose(strategy.matmul(x), expected, atol=1e-12)

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
    def test_inverse_matmul_solves(self, strategy, shape):
        z = np.random.default_rng(2).normal(size=(strategy.num_rounds, *shape))
        inverse = np.linalg.inv(strategy.materialize())
        expected = np.tensordot(inverse, z, axes=1)
        np.testing.assert_allclose(strategy.inverse_matmul(z), expected, atol=1e-10)

    def test_columns_of_the_inverse_are_those_of_the_matrix(self, strategy):
        columns = np.array([0, strategy.num_rounds // 2, strategy.num_rounds - 1])
        expected = np.linalg.inv(strategy.materialize())[:, columns]
        np.testing.assert_allclose(strategy.inverse_columns(columns), expected, atol=1e-10)

    def test_inverse_undoes_matmul(self, strategy):
        x = np.random.default_rng(3).normal(size=(strategy.num_rounds, 2))
        np.testing.assert_allclose(strategy.inverse_matmul(strategy.matmul(x)), x, atol=1e-10)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
    def test_the_stream_is_inverse_matmul_row_by_row(self, strategy, shape):
        z = np.random.default_rng(4).normal(size=(strategy.num_rounds, *shape))
        stream = strategy.inverse_stream()
        streamed = np.stack([stream.next_row(row) for row in z])
        np.testing.assert_allclose(streamed, strategy.inverse_matmul(z), rtol=1e-10, atol=1e-12)

    def test_the_stream_leaves_its_input_alone(self, strategy):
        stream = strategy.inverse_stream()
        for _ in range(strategy.num_rounds):
            row = np.ones(2)
            stream.next_row(row)
            np.testing.assert_array_equal(row, np.ones(2))

    def test_streams_of_one_strategy_are_independent(self, strategy):
        first, second = strategy.inverse_stream(), strategy.inverse_stream()
        rows = [first.next_row(np.ones(1)) for _ in range(strategy.num_rounds)]
        again = [second.next_row(np.ones(1)) for _ in range(strategy.num_rounds)]
        np.testing.assert_array_equal(rows, again)

    def test_the_stream_refuses_to_run_past_the_end(self, strategy):
        stream = strategy.inverse_stream()
        for _ in range(strategy.num_rounds):
            stream.next_row(np.zeros(2))
        message = f"planned for num_rounds={strategy.num_rounds} and all of them are used"
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                stream.next_row(np.zeros(2))

    def test_rows_are_the_rows_of_the_matrix(self, strategy):
        C = strategy.materialize()
        for i in range(strategy.num_rounds):
            first = max(0, i - strategy.num_bands + 1)
            np.testing.assert_allclose(strategy.row(i), C[i, first : i + 1], rtol=1e-15)

    @pytest.mark.parametrize("beyond", [0, 3])
    def test_there_is_no_row_past_the_end(self, strategy, beyond):
        i = strategy.num_rounds + beyond
        with pytest.raises(ValueError, match=rf"below num_rounds={strategy.num_rounds};.*{i}\.$"):
            strategy.row(i)
        with pytest.raises(ValueError, match=r"^i must be at least 0\. Found -1\.$"):
            strategy.row(-1)

    def test_gram_entries_are_those_of_the_released_query(self, strategy):
        C = _released_query(strategy)
        X = C.T @ C
        np.testing.assert_allclose(strategy.gram(), X, atol=1e-12)
        for offset in range(strategy.num_rounds):
            expected = np.diagonal(X, -offset)
            np.testing.assert_allclose(strategy.gram_diagonal(offset), expected, atol=1e-12)

    def test_gram_vanishes_beyond_the_bands(self, strategy):
        for offset in range(strategy.num_bands, strategy.num_rounds):
            assert not np.any(strategy.gram_diagonal(offset))

    def test_gram_has_no_diagonal_past_its_size(self, strategy):
        n = strategy.num_rounds
        with pytest.raises(ValueError, match=rf"offset must be below num_rounds={n}.* Found {n}\."):
            strategy.gram_diagonal(n)
        with pytest.raises(ValueError, match=r"^offset must be at least 0\. Found -1\.$"):
            strategy.gram_diagonal(-1)

    def test_column_norms_are_those_of_the_released_query(self, strategy):
        expected = np.linalg.norm(_released_query(strategy), axis=0)
        np.testing.assert_allclose(strategy.column_norms(), expected, rtol=1e-12)

    def test_the_stream_reveals_no_more_than_the_released_query(self, strategy):
        """X of the query minus C^T C of the stream is positive semi-definite."""
        C = strategy.materialize()
        assert np.linalg.eigvalsh(strategy.gram() - C.T @ C).min() >= -1e-10

    def test_scaled_multiplies_the_matrix(self, strategy):
        scaled = strategy.scaled(3.0)
        assert type(scaled) is type(strategy)
        assert scaled.num_bands == strategy.num_bands
        np.testing.assert_allclose(scaled.materialize(), 3.0 * strategy.materialize(), rtol=1e-14)
        np.testing.assert_allclose(scaled.gram(), 9.0 * strategy.gram(), rtol=1e-13)
        z = np.random.default_rng(5).normal(size=strategy.num_rounds)
        expected = strategy.inverse_matmul(z) / 3.0
        np.testing.assert_allclose(scaled.inverse_matmul(z), expected, rtol=1e-9, atol=1e-13)
        back = scaled.scaled(1.0 / 3.0)
        np.testing.assert_allclose(back.column_norms(), strategy.column_norms(), rtol=1e-13)

    @pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
    def test_scaled_wants_a_positive_factor(self, strategy, factor):
        with pytest.raises(ValueError, match=r"^factor must be (positive|finite)"):
            strategy.scaled(factor)

    def test_the_leading_block_is_that_of_the_matrix_or_reveals_more(self, strategy):
        C = strategy.materialize()
        for t in range(1, strategy.num_rounds + 1):
            block = strategy.leading_block(t)
            first = C[:t, :t]
            if block.num_rounds == t:
                np.testing.assert_allclose(block.materialize(), first, atol=1e-12)
            assert np.linalg.eigvalsh(block.gram()[:t, :t] - first.T @ first).min() >= -1e-10
        for t, message in (
            (0, "at least 1"),
            (strategy.num_rounds + 1, "leading block has at most"),
        ):
            with pytest.raises(ValueError, match=message):
                strategy.leading_block(t)

    def test_it_comes_back_from_what_is_stored_bit_for_bit(self, strategy):
        stored, arrays = strategy.stored()
        assert stored["kind"] == strategy.kind
        restored = strategies.restored_strategy(json.loads(json.dumps(stored)), arrays)
        assert type(restored) is type(strategy)
        np.testing.assert_array_equal(restored.materialize(), strategy.materialize())
        np.testing.assert_array_equal(restored.gram(), strategy.gram())

    def test_a_subclass_that_may_behave_differently_is_not_stored(self, strategy):
        stored, arrays = strategy.stored()
        parameters = {name: stored[name] for name in strategy.parameters}
        other = type("Other", (type(strategy),), {})(**parameters, **arrays)
        with pytest.raises(TypeError, match=r"Files hold .* strategies\. Found Other\.$"):
            other.stored()

    @pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
    def test_round_variances_are_the_row_norms_of_a_over_c(self, strategy, workload):
        workload = workload(strategy.num_rounds)
        B = workload.materialize() @ np.linalg.inv(strategy.materialize())
        expected = np.sum(B**2, axis=1)
        np.testing.assert_allclose(strategy.round_variances(workload), expected, rtol=1e-8)
        assert error.squared_error(workload, strategy) == pytest.approx(expected.sum(), rel=1e-8)

    @pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
    def test_sensitivity_is_the_maximum_over_patterns_or_bounds_it(self, strategy, participation):
        n = strategy.num_rounds
        X = np.abs(_released_query(strategy).T @ _released_query(strategy))
        patterns = _patterns(n, participation)
        largest = max(math.sqrt(X[np.ix_(pattern, pattern)].sum()) for pattern in patterns)
        found = participation.sensitivity(strategy)
        if found.kind == EXACT:
            assert found.value == pytest.approx(largest, rel=1e-12)
        assert found.value >= largest * (1 - 1e-12)

    def test_the_rows_of_coefficients_are_those_of_the_matrix(self, strategy):
        n, C = strategy.num_rounds, strategy.materialize()
        rows = np.broadcast_to(strategy.coefficient_rows(2**20), (n, strategy.num_bands))
        for i, d in itertools.product(range(n), range(strategy.num_bands)):
            assert d > i or rows[i, d] == C[i, i - d]

    def test_memory_is_never_more_than_the_bands_need(self, strategy):
        assert 0 <= strategy.rows_in_memory < strategy.num_bands

    @pytest.mark.parametrize("method", ["matmul", "inverse_matmul"])
    def test_products_want_one_row_a_step(self, strategy, method):
        rows = strategy.num_rounds + 1
        message = rf"must have {strategy.num_rounds} rows\. Found shape \({rows}, 2\)\.$"
        with pytest.raises(ValueError, match=message):
            getattr(strategy, method)(np.zeros((rows, 2)))


def _released_query(strategy: Strategy) -> np.ndarray:
    """The matrix whose sensitivity counts: the nodes of a tree, C itself otherwise."""
    return getattr(strategy, "node_matrix", strategy.materialize)()


def _patterns(num_rounds: int, participation: Participation) -> list[tuple[int, ...]]:
    """All patterns that the participation allows, by trying all sets of rounds."""
    b, k = participation.separation(num_rounds), participation.max_participations or num_rounds

    def allowed(gap: int) -> bool:
        return gap == b if isinstance(participation, FixedEpochs) else gap >= b

    return [
        pattern
        for size in range(1, min(k, -(-num_rounds // b)) + 1)
        for pattern in itertools.combinations(range(num_rounds), size)
        if all(allowed(later - earlier) for earlier, later in itertools.pairwise(pattern))
    ]


@st.composite
def random_banded(draw) -> BandedStrategy:
    n = draw(st.integers(1, 12))
    return _random_banded(draw(st.integers(1, n)), n, draw(st.integers(0, 2**32 - 1)))


@given(random_banded())
def test_banded_and_dense_storage_compute_the_same(strategy):
    dense = DenseStrategy(strategy.materialize())
    z = np.random.default_rng(0).normal(size=(strategy.num_rounds, 2))
    np.testing.assert_allclose(strategy.matmul(z), dense.matmul(z), atol=1e-12)
    np.testing.assert_allclose(strategy.inverse_matmul(z), dense.inverse_matmul(z), atol=1e-8)
    np.testing.assert_allclose(strategy.gram(), dense.gram(), atol=1e-12)


@given(random_banded())
def test_band_storage_is_lapacks_lower_form(strategy):
    C = strategy.materialize()
    for d in range(strategy.num_bands):
        inside = strategy.bands[d, : strategy.num_rounds - d]
        np.testing.assert_array_equal(inside, np.diagonal(C, -d))
    # As SciPy understands it: the Cholesky factor of L L^T in band storage is L itself.
    X = C @ C.T
    storage = np.zeros_like(strategy.bands)
    for d in range(strategy.num_bands):
        storage[d, : strategy.num_rounds - d] = np.diagonal(X, -d)
    factor = scipy.linalg.cholesky_banded(storage, lower=True)
    inside = inside_matrix(*factor.shape)
    np.testing.assert_allclose(factor[inside], strategy.bands[inside], atol=1e-8)


@given(random_banded())
def test_proposition_4_1_a_banded_gram_has_a_banded_factor(strategy):
    C = lower_factor(strategy.gram())
    np.testing.assert_allclose(C.T @ C, strategy.gram(), atol=1e-10)
    assert not np.any(np.triu(C, 1))
    np.testing.assert_allclose(np.tril(C, -strategy.num_bands), 0.0, atol=1e-12)
    # The factor with a positive diagonal is unique, and ours has one.
    np.testing.assert_allclose(C, strategy.materialize(), atol=1e-8)


@given(st.integers(1, 12), st.data())
def test_toeplitz_and_band_storage_compute_the_same(n, data):
    b = data.draw(st.integers(1, n))
    coefficients = np.array(data.draw(st.lists(st.floats(-1.0, 1.0), min_size=b, max_size=b)))
    coefficients[0] = 2.0
    toeplitz = ToeplitzStrategy(coefficients, n)
    banded = toeplitz.to_banded()
    z = np.random.default_rng(0).normal(size=(n, 2))
    np.testing.assert_allclose(toeplitz.materialize(), banded.materialize(), rtol=1e-15)
    np.testing.assert_allclose(toeplitz.matmul(z), banded.matmul(z), atol=1e-12)
    np.testing.assert_allclose(toeplitz.inverse_matmul(z), banded.inverse_matmul(z), atol=1e-9)
    np.testing.assert_allclose(toeplitz.gram(), banded.gram(), atol=1e-12)


def test_identity_is_dp_sgd():
    strategy = identity(4)
    assert strategy.num_bands == 1
    z = np.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(strategy.inverse_matmul(z), z)
    np.testing.assert_array_equal(strategy.column_norms(), np.ones(4))


def test_strategies_cannot_be_changed_behind_their_backs():
    bands = np.ones((1, 3))
    strategy = BandedStrategy(bands)
    bands[0, 0] = 5.0
    assert strategy.bands[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        strategy.bands[0, 0] = 5.0
    with pytest.raises(ValueError, match="read-only"):
        ToeplitzStrategy(np.ones(2), 3).coefficients[0] = 5.0
    dense = DenseStrategy(np.eye(2))
    dense.materialize()[0, 0] = 5.0
    assert dense.materialize()[0, 0] == 1.0


def test_a_banded_stream_remembers_no_more_than_its_bands():
    stream = _random_banded(3, 50).inverse_stream()
    assert isinstance(stream, strategies.BandedInverseStream)
    for _ in range(50):
        stream.next_row(np.ones(1))
        assert len(stream._recent) <= 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BandedStrategy(np.ones((2, 2))), r"must be zero where j \+ d >= num_rounds"),
        (lambda: BandedStrategy(np.ones(3)), r"^bands must have 2 axes\. Found shape \(3,\)\.$"),
        (lambda: BandedStrategy(np.ones((0, 3))), r"^bands must not be empty"),
        (
            lambda: BandedStrategy(np.zeros((4, 3))),
            r"^num_bands must be at most num_rounds=3; use 3 for a full lower triangle\. Found 4\.",
        ),
        (
            lambda: BandedStrategy(np.array([[1.0, 0.0, 1.0]])),
            r"diagonal of a strategy must be non-zero.*Found 0 at round 1\.$",
        ),
        (lambda: BandedStrategy(np.array([[np.nan]])), r"^bands must be finite in every entry"),
        (lambda: ToeplitzStrategy(np.ones(4), 3), r"^num_bands must be at most num_rounds=3;"),
        (lambda: ToeplitzStrategy(np.array([0.0, 1.0]), 3), r"diagonal of a strategy"),
        (lambda: ToeplitzStrategy(np.ones(1), 0), r"^num_rounds must be at least 1\. Found 0\.$"),
        (lambda: DenseStrategy(np.ones((2, 3))), r"^matrix must be square\. Found shape \(2, 3\)"),
        (lambda: DenseStrategy(np.ones((2, 2))), r"^matrix must be lower triangular, or its noise"),
        (lambda: DenseStrategy(np.zeros((2, 2))), r"diagonal of a strategy must be non-zero"),
        (
            lambda: lower_factor(np.array([[1.0, 0.5], [0.0, 1.0]])),
            r"^gram must be a symmetric matrix",
        ),
        (lambda: lower_factor(np.ones((1, 2))), r"^gram must be a symmetric matrix"),
    ],
)
def test_wrong_inputs_get_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_indefinite_gram_has_no_factor():
    with pytest.raises(np.linalg.LinAlgError):
        lower_factor(np.array([[1.0, 2.0], [2.0, 1.0]]))
