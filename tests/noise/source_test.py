"""Rows of z: pure functions of (seed, row), Gaussian out to the far tails, from OS entropy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.noise import source

DTYPES = [tf.float32, tf.float64]


def _rows(seed, first_row, num_rows, width, dtype=tf.float32):
    seed = tf.constant(source.pinned_seed(seed))
    first_row = tf.constant(first_row, tf.int64)
    return source.normal_rows(seed, first_row, num_rows, width, dtype).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_a_block(dtype):
    together = _rows(1, 5, 8, 48, dtype)
    alone = [_rows(1, 5 + i, 1, 48, dtype)[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_drawn_in_parts_are_the_same(dtype, monkeypatch):
    together = _rows(1, 5, 8, 48, dtype)
    monkeypatch.setattr(source, "_VALUES_AT_ONCE", 100)
    np.testing.assert_array_equal(_rows(1, 5, 8, 48, dtype), together)
    graph = tf.function(source.normal_rows)
    seed = tf.constant(source.pinned_seed(1))
    rows = graph(seed, tf.constant(5, tf.int64), 8, 48, dtype)
    np.testing.assert_array_equal(rows, together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_the_pairs_is_the_same_in_both_halves_of_the_row(dtype):
    together, seed = _rows(1, 5, 3, 112, dtype), tf.constant(source.pinned_seed(1))
    for first, pairs in ((0, 16), (16, 24), (40, 16)):
        part = tf.constant(first, tf.int64), pairs
        rows = source.normal_rows(seed, tf.constant(5, tf.int64), 3, 112, dtype, part)
        columns = np.arange(first, first + pairs)
        np.testing.assert_array_equal(rows, together[:, [*columns, *(56 + columns)]])


def test_parts_begin_at_whole_counters():
    seed = tf.constant(source.pinned_seed(1))
    with pytest.raises(BandMFError, match="Found 12"):
        source.normal_rows(seed, tf.constant(0, tf.int64), 1, 32, tf.float32, (0, 12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_seeds_share_no_value(dtype):
    values = np.concatenate([_rows(seed, 0, 64, 160, dtype).ravel() for seed in range(4)])
    repeated = values.size - np.unique(values).size
    # float32 has so few values that some pairs meet by chance; a repeated row would be 160 of them.
    assert repeated < (160 if dtype == tf.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_standard_gaussians(dtype):
    values = _rows(2, 0, 100, 1600, dtype).ravel().astype(np.float64)
    assert scipy.stats.kstest(values, "norm").pvalue > 0.01
    assert scipy.stats.kstest(values * 1.02, "norm").pvalue < 1e-4
    # Moments that the Kolmogorov-Smirnov test is weak on, within four standard errors.
    assert abs(np.mean(values**4) - 3.0) < 4 * np.sqrt(96.0 / values.size)
    beyond = np.mean(np.abs(values) > 4.0)
    expected = 2 * scipy.stats.norm.sf(4.0)
    assert abs(beyond - expected) < 4 * np.sqrt(expected / values.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_halves_of_a_pair_are_uncorrelated(dtype):
    values = _rows(3, 0, 100, 1600, dtype)
    first, second = values[:, :800].ravel(), values[:, 800:].ravel()
    for f in (lambda x: x, np.square, np.abs):
        assert scipy.stats.pearsonr(f(first), f(second)).pvalue > 0.001


@pytest.mark.parametrize(
    ("dtype", "integers", "planes", "reach"),
    [(tf.float32, tf.int32, 3, 8.7), (tf.float64, tf.int64, 2, 9.4)],
)
def test_every_bit_pattern_gives_a_finite_value_and_tails_are_not_cut(
    dtype, integers, planes, reach
):
    extreme = [integers.min, integers.min + 1, -1, 0, 1, integers.max]
    patterns = np.array(np.meshgrid(*[extreme] * planes)).reshape(1, planes, -1)
    values = source.box_muller(tf.unstack(tf.constant(patterns, integers), axis=1), dtype).numpy()
    assert np.all(np.isfinite(values))
    assert np.abs(values).max() > reach


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_is_the_continuation_of_another(dtype):
    # The next row starts where the counters of this one end; nothing overlaps in between.
    first, second = _rows(4, 0, 2, 32, dtype)
    assert not set(first) & set(second)


def test_a_fresh_seed_is_drawn_at_every_run_of_a_graph():
    draw = tf.function(source.fresh_seed_tensor)
    seeds = np.array([draw().numpy() for _ in range(8)] + [source.fresh_seed()])
    assert seeds.dtype == np.int64
    assert np.unique(seeds).size == seeds.size


def test_a_fresh_seed_fails_where_the_system_gives_no_entropy(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_ENTROPY_FILE", str(tmp_path / "none"))
    with pytest.raises(tf.errors.NotFoundError):
        source.fresh_seed_tensor()
    (tmp_path / "none").write_bytes(b"short\n")
    with pytest.raises(tf.errors.InvalidArgumentError, match="enough random bytes"):
        source.fresh_seed_tensor()


def test_pinned_seeds_differ_and_repeat():
    seeds = np.array([source.pinned_seed(i) for i in range(100)])
    assert np.unique(seeds).size == seeds.size
    np.testing.assert_array_equal(seeds[7], source.pinned_seed(7))
    with pytest.raises(ValueError, match="pinned_seed must be at least 0"):
        source.pinned_seed(-1)


def test_widths_and_dtypes_are_checked():
    with pytest.raises(ValueError, match="multiple of 16"):
        _rows(0, 0, 1, 17)
    with pytest.raises(ValueError, match="float32 or float64"):
        _rows(0, 0, 1, 16, tf.bfloat16)
    assert [source.padded_width(d) for d in (1, 16, 17)] == [16, 16, 32]
