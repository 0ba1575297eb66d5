"""Blocks of rows agree with the dense inverse, block by block, and never run past the plan."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.factorization import buffered, inverse_banded, strategies, trees, workloads
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.noise import recurrence as noise_recurrence

WIDTH = 3
# Slow and fast decays; their scales leave hardly anything of 1.
BLT = {"decays": np.array([0.9999, 0.9, 0.2]), "scales": np.array([0.03, 0.2, 0.7])}


def random_banded(num_rounds, num_bands, seed=0):
    rng = np.random.default_rng(seed)
    bands = 0.3 * rng.normal(size=(num_bands, num_rounds))
    bands[0] = 1.0 + rng.random(num_rounds)
    return strategies.BandedStrategy(bands * strategies.inside_matrix(num_bands, num_rounds))


def _run(recurrence, z):
    """Drives a recurrence over all rows of z, in float64."""
    s = recurrence.block_length
    memory = [tf.zeros([rows, WIDTH], tf.float64) for rows in recurrence.memory_rows]
    block = tf.zeros([s, WIDTH], tf.float64)
    blocks = []
    for start in range(0, len(z), s):
        inputs = np.zeros((s, WIDTH))
        inputs[: len(z) - start] = z[start : start + s]
        start = tf.constant(start, tf.int64)
        memory = recurrence.absorb(memory, block, start)
        block = recurrence.produce(memory, tf.constant(inputs), start, tf.constant(0, tf.int64))
        blocks.append(block.numpy())
    return np.concatenate(blocks)


def _check(strategy, block_length):
    z = np.random.default_rng(1).normal(size=(strategy.num_rounds, WIDTH))
    recurrence = noise_recurrence.make_recurrence(strategy, 1.7, block_length)
    rows = _run(recurrence, z)
    expected = 1.7 * np.linalg.solve(strategy.materialize(), z)
    np.testing.assert_allclose(rows[: len(z)], expected, rtol=1e-9, atol=1e-9)
    assert np.all(np.isnan(rows[len(z) :])), (
        "Rows past the plan must poison what they are added to."
    )


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.data())
def test_banded_blocks_equal_the_dense_inverse(data):
    num_rounds = data.draw(st.integers(1, 40))
    num_bands = data.draw(st.integers(1, num_rounds))
    block_length = data.draw(st.integers(1, 9))
    _check(random_banded(num_rounds, num_bands), block_length)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.data())
def test_tree_blocks_equal_the_dense_inverse(data):
    estimator = data.draw(st.sampled_from(trees.ESTIMATORS))
    strategy = trees.TreeStrategy(data.draw(st.integers(1, 70)), estimator, scale=0.7)
    _check(strategy, 2 ** data.draw(st.integers(0, 5)))


@pytest.mark.parametrize("block_length", [1, 3, 16, 64])
@pytest.mark.parametrize("num_rounds", [1, 2, 40])
def test_buffered_blocks_equal_the_dense_inverse(num_rounds, block_length):
    strategy = buffered.BufferedStrategy(num_rounds=num_rounds, scale=0.7, **BLT)
    _check(strategy, block_length)
    assert noise_recurrence.make_recurrence(strategy, 1.0, block_length).memory_rows == [3]


@pytest.mark.parametrize("block_length", [1, 3, 16, 64])
@pytest.mark.parametrize(("num_rounds", "bands"), [(1, 1), (2, 2), (40, 1), (40, 2), (40, 9)])
def test_banded_inverse_blocks_equal_the_dense_inverse(num_rounds, bands, block_length):
    workload = workloads.prefix_sum(num_rounds)
    strategy = inverse_banded.inverse_square_root(workload, bands).scaled(0.7)
    _check(strategy, block_length)
    rows = sum(noise_recurrence.make_recurrence(strategy, 1.0, block_length).memory_rows)
    assert bands - 1 <= rows < bands - 1 + block_length


def test_a_banded_inverse_keeps_float32_rounding_small_over_a_hundred_thousand_rounds():
    """Rows of z are taken back from finished blocks, so that errors pass through C."""
    n, s = 100_000, 16
    result = inverse_banded.optimize_inverse_banded(
        workloads.prefix_sum(n), 16, MinSeparation(5_000, 20), tolerance=1e-4
    )
    _check_float32(result.strategy.scaled(result.strategy.inverse_coefficients[0]), s)


def test_buffers_keep_float32_rounding_small_over_a_hundred_thousand_rounds():
    n, s = 100_000, 16
    _check_float32(buffered.BufferedStrategy(num_rounds=n, **BLT), s)


def test_buffers_that_grow_in_place_keep_float32_rounding_small_over_a_hundred_thousand_rounds():
    strategy = buffered.BufferedStrategy(num_rounds=100_000, **BLT)
    recurrence = noise_recurrence.make_recurrence(strategy, 1.0, 1)
    growth = recurrence.growth(tf.zeros([], tf.int64)).numpy().astype(np.float32)
    z = np.random.default_rng(5).normal(size=(strategy.num_rounds, WIDTH)).astype(np.float32)
    memory, rows = np.zeros([3, WIDTH], np.float32), []
    for white in z:
        row, *changes = growth @ np.vstack([memory, white])
        memory += changes
        rows.append(row)
    _require_small_errors(strategy, rows, z)


def _check_float32(strategy, s):
    n = strategy.num_rounds
    recurrence = noise_recurrence.make_recurrence(strategy, 1.0, s)
    z = np.random.default_rng(5).normal(size=(n, WIDTH)).astype(np.float32)

    @tf.function
    def run(z):
        memory = [tf.zeros([rows, WIDTH]) for rows in recurrence.memory_rows]
        block = tf.zeros([s, WIDTH])
        blocks = tf.TensorArray(tf.float32, n // s)
        for start in tf.range(0, n, s, tf.int64):
            memory = recurrence.absorb(memory, block, start)
            block = recurrence.produce(memory, z[start : start + s], start, np.int64(0))
            blocks = blocks.write(tf.cast(start // s, tf.int32), block)
        return blocks.concat()

    _require_small_errors(strategy, run(tf.constant(z)).numpy(), z)


def _require_small_errors(strategy, rows, z):
    error = rows - strategy.inverse_matmul(z.astype(np.float64))
    late, early = np.abs(error[-1000:]).max(), np.abs(error[:1000]).max()
    assert late < 2e-6, "Rounding must not add up."
    assert early > 1e-8, "Float32 rounds; no error at all means that nothing was compared."


@pytest.mark.parametrize("block_length", [1, 3, 8])
def test_toeplitz_and_dense_blocks_equal_the_dense_inverse(block_length):
    _check(strategies.ToeplitzStrategy(np.array([1.0, 0.5, -0.2, 0.1]), 21), block_length)
    dense = np.tril(0.1 * np.random.default_rng(2).normal(size=(21, 21)), -1) + np.eye(21)
    _check(strategies.DenseStrategy(dense), block_length)
    _check(strategies.identity(21), block_length)


@pytest.mark.parametrize(
    "strategy",
    [
        random_banded(24, 7),
        trees.TreeStrategy(24),
        buffered.BufferedStrategy(num_rounds=24, **BLT),
        inverse_banded.inverse_square_root(workloads.prefix_sum(24), 5),
    ],
)
def test_known_rows_are_kept_exactly_and_the_others_continue_them(strategy):
    s, known = 8, 3
    recurrence = noise_recurrence.make_recurrence(strategy, 1.0, s)
    z = np.random.default_rng(3).normal(size=(24, WIDTH))
    memory = [tf.zeros([rows, WIDTH], tf.float64) for rows in recurrence.memory_rows]
    rows, block = [], tf.zeros([s, WIDTH], tf.float64)
    for start in (0, 8):
        memory = recurrence.absorb(memory, block, tf.constant(start, tf.int64))
        block = recurrence.produce(
            memory, tf.constant(z[start : start + s]), tf.constant(start, tf.int64), np.int64(0)
        )
        rows.append(block.numpy())
    other = np.random.default_rng(4).normal(size=(s, WIDTH))
    inputs = np.concatenate([rows[1][:known], other[known:]])
    redrawn = recurrence.produce(
        memory, tf.constant(inputs), tf.constant(8, tf.int64), tf.constant(known, tf.int64)
    ).numpy()
    np.testing.assert_array_equal(redrawn[:known], rows[1][:known])
    mixed = np.concatenate([z[: 8 + known], other[known:], z[16:]])
    expected = np.linalg.solve(strategy.materialize(), mixed)
    np.testing.assert_allclose(redrawn, expected[8:16], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block_length", [1, 4, 64])
def test_banded_memory_is_the_bands_and_at_most_two_chunks(block_length):
    for num_bands in (1, 2, 64, 400):
        strategy = strategies.ToeplitzStrategy(np.ones(num_bands), 2000)
        recurrence = noise_recurrence.make_recurrence(strategy, 1.0, block_length)
        rows = recurrence.memory_rows
        assert num_bands - 1 <= sum(rows) <= num_bands - 1 + 2 * max(rows, default=0)
        assert len(rows) <= 2 + np.sqrt(num_bands)


@pytest.mark.parametrize("estimator", trees.ESTIMATORS)
def test_tree_memory_is_logarithmic(estimator):
    strategy = trees.TreeStrategy(2052, estimator)
    assert noise_recurrence.make_recurrence(strategy, 1.0, 1).memory_rows == [11]
    assert noise_recurrence.make_recurrence(strategy, 1.0, 16).memory_rows == [7]


def test_block_length_follows_the_budget():
    strategy = strategies.ToeplitzStrategy(np.ones(400), 2000)
    row_bytes = 4 * 2_400_000

    def choose(budget):
        return noise_recurrence.choose_block_length(strategy, row_bytes, budget)

    assert choose(0) == 1
    assert [choose(4 * s * row_bytes) for s in (1, 2, 31, 64, 1000)] == [1, 2, 16, 64, 64]
    assert choose(None) == 32
    assert noise_recurrence.choose_block_length(strategies.identity(9), 4, None) == 1
    assert noise_recurrence.choose_block_length(trees.TreeStrategy(9), 4, None) == 8
    blt = buffered.BufferedStrategy(num_rounds=99, **BLT)
    lengths = [noise_recurrence.choose_block_length(blt, 1 << b, None) for b in (20, 23, 24, 27)]
    assert lengths == [16, 16, 1, 1]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        noise_recurrence.make_recurrence(trees.TreeStrategy(9), 1.0, 3)

    class Huge(strategies.ToeplitzStrategy):
        pass

    noise_recurrence.make_recurrence(Huge(np.ones(2), 10**9), 1.0, 1)  # Toeplitz needs no table.
    banded = random_banded(2, 1)
    banded._bands = np.broadcast_to(1.0, (400, 10**6))
    with pytest.raises(ValueError, match="Toeplitz"):
        noise_recurrence.make_recurrence(banded, 1.0, 1)
