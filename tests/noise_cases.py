"""What tests of noise streams share: small strategies of every kind, and ways to take rows."""

from __future__ import annotations

import itertools
import secrets

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from bandmf_tf.factorization import buffered, strategies, trees
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.noise import source as noise_source
from bandmf_tf.noise import stream as noise_stream

NUM_ROUNDS = 21
STDDEV = 1.5
PIN = 11


def pin_entropy(monkeypatch):
    """Draws all seeds of this process from one, so that chance does not decide a test."""
    rng, numbers = np.random.default_rng(5), itertools.count()
    monkeypatch.setattr(secrets, "token_bytes", lambda count=32: rng.bytes(count))
    monkeypatch.setattr(
        noise_source,
        "fresh_seed_tensor",
        lambda: tf.constant(noise_source.pinned_seed(next(numbers))),
    )


def random_bands(num_bands):
    rng = np.random.default_rng(num_bands)
    bands = 0.3 * rng.normal(size=(num_bands, NUM_ROUNDS))
    bands[0] = 1.0 + rng.random(NUM_ROUNDS)
    return strategies.BandedStrategy(bands * strategies.inside_matrix(num_bands, NUM_ROUNDS))


def _random_dense():
    rng = np.random.default_rng(0)
    below = np.tril(0.2 * rng.normal(size=(NUM_ROUNDS, NUM_ROUNDS)), -1)
    return strategies.DenseStrategy(below + np.eye(NUM_ROUNDS))


STRATEGIES = {
    "identity": strategies.identity(NUM_ROUNDS),
    "banded": random_bands(6),
    "toeplitz": strategies.ToeplitzStrategy(np.array([1.0, 0.5, 0.375, 0.3125]), NUM_ROUNDS),
    "dense": _random_dense(),
    "full tree": trees.TreeStrategy(NUM_ROUNDS, "full"),
    "online tree": trees.TreeStrategy(NUM_ROUNDS, "online", scale=2.0),
    "blt": buffered.BufferedStrategy(np.array([0.95, 0.5]), np.array([0.2, 0.4]), NUM_ROUNDS, 0.5),
    "banded inverse": InverseBandedStrategy(np.array([1.2, -0.5, -0.2, 0.1]), NUM_ROUNDS),
}


@pytest.fixture(autouse=True)
def fixed_entropy(monkeypatch):
    """Makes the operating system's entropy the same in every run of the tests."""
    numbers = itertools.count(1000)

    def seed():
        return noise_source.pinned_seed(next(numbers))

    monkeypatch.setattr(noise_source, "fresh_seed", seed)
    monkeypatch.setattr(noise_source, "fresh_seed_tensor", lambda: tf.constant(seed()))


@pytest.fixture
def tiled(monkeypatch):
    """Cuts the rows of streams with a block of four or more into several tiles."""
    monkeypatch.setattr(noise_stream, "_TILE_BYTES", 2**8)


def flat(row):
    return np.concatenate([np.ravel(tensor) for tensor in tf.nest.flatten(row)])


def take(stream, count):
    return np.array([flat(stream.next()) for _ in range(count)])


def take_in_graph(stream, count):
    return np.array([flat(stream.next_in_graph()) for _ in range(count)])


def take_functional(stream, state, count, step=None):
    rows = []
    step = step or stream.next
    for _ in range(count):
        row, state = step(state)
        rows.append(flat(row))
    return np.array(rows), state


def make_stream(pinned_seed=PIN, dimension=40, block_length=4, strategy="banded", **kwargs):
    spec = tf.TensorSpec([dimension])
    return noise_stream.NoiseStream(
        STRATEGIES[strategy],
        STDDEV,
        spec,
        block_length=block_length,
        pinned_seed=pinned_seed,
        **kwargs,
    )


def restored(stream, path, **kwargs):
    prefix = tf.train.Checkpoint(noise=stream).write(str(path / "checkpoint"))
    other = make_stream(**kwargs)
    tf.train.Checkpoint(noise=other).read(prefix).assert_consumed()
    return other


def covariance_pvalue(rows, covariance):
    """p-value of `rows` having independent columns with this covariance.

    Whitened rows have a sample covariance of I with independent errors: variance 1 / d off the
    diagonal and 2 / d on it.
    """
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), rows)
    n, d = whitened.shape
    errors = whitened @ whitened.T / d - np.eye(n)
    on = np.sum(np.diagonal(errors) ** 2) * d / 2
    off = np.sum(np.tril(errors, -1) ** 2) * d
    return scipy.stats.chi2.sf(on + off, n * (n + 1) / 2)
