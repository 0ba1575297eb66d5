"""`jit_compile=True`: XLA compiles what is slow, and the checks of a step stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.errors import BandMFError
from cases import MECHANISM, NUM_ROUNDS, X, Y, flat, private_model

layers = tf.keras.layers
_rng = np.random.default_rng(0)


class _Wave(layers.Layer):
    """Has no formula."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale + tf.sin(x)


MODELS = {
    "images": (
        (5, 5, 2),
        [layers.Conv2D(4, 3), layers.GroupNormalization(2), layers.Flatten(), layers.Dense(3)],
    ),
    "tokens": ((5,), [layers.Embedding(7, 4), layers.LSTM(4), layers.Dense(3)]),
    "one by one": ((4,), [_Wave(), layers.Dense(3)]),
}


def _made(name):
    shape, stack = MODELS[name]
    tf.keras.utils.set_random_seed(1)
    stack = [type(layer).from_config(layer.get_config()) for layer in stack]
    return tf.keras.Sequential([layers.Input(shape), *stack])


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_trains_as_one_that_is_not(name):
    shape = (len(X), *MODELS[name][0])
    x = _rng.integers(0, 7, shape) if name == "tokens" else _rng.normal(size=shape)
    weights, calls = [], []
    for jit_compile in (False, True):
        model = private_model(model=_made(name), jit_compile=jit_compile, metrics=["accuracy"])
        pipeline = private_keras.make_batches((x, Y), MECHANISM, pinned_seed=1)
        model.fit(pipeline, verbose=0, steps_per_epoch=3)
        assert model.optimizer.sampling_is_enforced
        weights.append(flat(model.get_weights()))
        graph = model._clipping_function and model._clipping_function.experimental_get_compiler_ir
        calls.append(graph is not None and model._uses_xla)
    np.testing.assert_allclose(*weights, atol=1e-6)
    assert calls == [False, True]


def test_checks_are_not_dropped():
    model = private_model(jit_compile=True, sampling="unchecked")
    for _ in range(NUM_ROUNDS):
        model.train_on_batch(X[:6], Y[:6])
    before = flat(model.get_weights())
    with pytest.raises(tf.errors.InvalidArgumentError, match="all rounds are used"):
        model.train_on_batch(X[:6], Y[:6])
    assert model.optimizer.steps_done == NUM_ROUNDS
    np.testing.assert_array_equal(flat(model.get_weights()), before)


def test_two_replicas_and_a_file(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = private_model(jit_compile=True, sampling="unchecked")
    model.fit(X[:12], Y[:12], batch_size=6, shuffle=False, verbose=0)
    alone = private_model(sampling="unchecked")
    alone.fit(X[:12], Y[:12], batch_size=6, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.get_weights()), flat(alone.get_weights()), atol=1e-6)
    alone.compile(alone.optimizer, alone.loss, jit_compile=True)
    alone.save(tmp_path / "model.keras")
    assert private_keras.load_model(tmp_path / "model.keras")._uses_xla


def test_what_xla_does_not_know_is_refused_with_a_sentence():
    reader = layers.TextVectorization(vocabulary=["a"], output_sequence_length=2)
    text = [reader, layers.Embedding(3, 2), layers.Flatten(), layers.Dense(3)]
    model = tf.keras.Sequential([layers.Input((1,), dtype=tf.string), *text])
    model = private_model(model=model, jit_compile=True, sampling="unchecked")
    with pytest.raises(BandMFError, match="XLA cannot compile this model; leave out jit_compile"):
        model.train_on_batch(np.array([["a a"], ["a"]]), Y[:2])
    assert model.optimizer.steps_done == 0
