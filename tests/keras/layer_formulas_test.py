"""The formulas for known layers give the sums of the general way, and only where they may."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf.keras import clipping
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.clipping import ClippedSum, clipped_gradient_sum
from bandmf_tf.keras.layer_formulas import check_layers, layerwise_clipped_sum

layers = tf.keras.layers
CLIP = 0.5
SIZE = 6


def _sequential(shape, *stack, dtype=None):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([layers.Input(shape, dtype=dtype), *stack])


def _two_branches():
    tf.keras.utils.set_random_seed(1)
    x = layers.Input((8, 8, 2))
    left = layers.Conv2D(3, 3, padding="same", activation="tanh")(x)
    right = layers.Conv2D(3, 1, activation="relu")(x)
    joined = layers.Add()([left, right])
    inner = tf.keras.Sequential([layers.Input((192,)), layers.Dense(5, activation="elu")])
    return tf.keras.Model(x, layers.Dense(1)(inner(layers.Flatten()(joined))))


MODELS = {
    "dense": lambda: _sequential((7,), layers.Dense(5, "tanh"), layers.Dense(2, use_bias=False)),
    "dense on sequences": lambda: _sequential(
        (9, 3), layers.Dense(4, "relu"), layers.GlobalAveragePooling1D(), layers.Dense(2)
    ),
    "dense on short sequences": lambda: _sequential(
        (2, 30), layers.Dense(40), layers.Flatten(), layers.Dense(2)
    ),
    "images of few channels": lambda: _sequential(
        (9, 8, 1),
        layers.Conv2D(3, (3, 2), strides=2, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(2),
    ),
    "images of many channels": lambda: _sequential(
        (7, 7, 5),
        layers.Conv2D(4, 3, dilation_rate=2, padding="same", activation="selu"),
        layers.Conv2D(6, 3, strides=(1, 2), use_bias=False),
        layers.Flatten(),
        layers.Dense(2),
    ),
    "series": lambda: _sequential(
        (10, 3),
        layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        layers.Conv1D(4, 2, strides=2),
        layers.Flatten(),
        layers.Dense(2),
    ),
    "embedding": lambda: _sequential(
        (6,), layers.Embedding(20, 3), layers.Flatten(), layers.Dense(2), dtype=tf.int64
    ),
    "two branches": _two_branches,
}


def _data(model, size=SIZE):
    rng = np.random.default_rng(2)
    shape = (size, *model.input_shape[1:])
    if model.inputs[0].dtype == tf.int64:
        x = rng.integers(0, 5, shape)  # Few tokens, so that they repeat.
    else:
        x = rng.normal(size=shape).astype(np.float32)
    return tf.constant(x), tf.constant(rng.normal(size=(size, model.output_shape[-1])), tf.float32)


def _losses(y, y_pred, weight):
    losses = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
    return losses if weight is None else losses * weight


def _layerwise(model, x, y, weight=None, **options):
    @tf.function(autograph=False)
    def run(x, y, weight):
        mask = None if weight is None else tf.not_equal(weight, 0.0)
        return vars(layerwise_clipped_sum(model, _losses, x, y, weight, CLIP, mask=mask, **options))

    return ClippedSum(**run(x, y, weight))


def _general(model, x, y, weight=None):
    weights = tf.ones([len(x)]) if weight is None else weight

    def loss(unit):
        x, y, weight = unit
        y_pred = model(x, training=True)
        return _losses(y, y_pred, weight), y_pred

    @tf.function(autograph=False)
    def run(*batch):
        mask = tf.not_equal(batch[2], 0.0)
        return vars(clipped_gradient_sum(loss, batch, model.trainable_variables, CLIP, mask=mask))

    return ClippedSum(**run(x, y, weights))


def _assert_equal(result, expected):
    for got, want in zip(result.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6)
    for name in ("num_units", "num_clipped", "num_nonfinite"):
        assert int(getattr(result, name)) == int(getattr(expected, name)), name
    np.testing.assert_allclose(result.outputs, expected.outputs, atol=1e-5)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_sums_are_those_of_the_general_way(make):
    model = make()
    x, y = _data(model)
    weight = tf.constant([1.0, 0.0, 1.0, 3.0, 0.0, 1.0])
    result, expected = _layerwise(model, x, y, weight), _general(model, x, y, weight)
    _assert_equal(result, expected)
    assert int(result.num_clipped) > 0


def test_chunks_and_missing_weights_make_no_difference():
    model = MODELS["images of few channels"]()
    x, y = _data(model, 7)
    expected = _general(model, x, y)
    _assert_equal(_layerwise(model, x, y), expected)
    _assert_equal(_layerwise(model, x, y, chunk_size=3), expected)


def test_large_batches_are_cut_to_the_memory_budget(monkeypatch):
    model = MODELS["images of many channels"]()
    x, y = _data(model, 7)
    expected = _general(model, x, y)
    lengths = []
    original = clipping.sum_in_chunks

    def spy(sum_chunk, batch, mask, chunk_size, *rest):
        lengths.append(chunk_size)
        return original(sum_chunk, batch, mask, chunk_size, *rest)

    monkeypatch.setattr(clipping, "DEFAULT_MEMORY_BYTES", 150_000)
    monkeypatch.setattr(clipping, "sum_in_chunks", spy)
    _assert_equal(_layerwise(model, x, y), expected)
    assert 1 <= lengths[0] < 7


def test_examples_with_nan_or_infinity_contribute_zeros_and_are_counted():
    model = MODELS["images of few channels"]()
    x, y = _data(model)
    broken = x.numpy()
    broken[1, 3] = np.nan
    broken[4, 2] = np.inf
    result = _layerwise(model, tf.constant(broken), y)
    kept = tf.constant([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    expected = _layerwise(model, x, y, kept)
    for got, want in zip(result.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert (int(result.num_units), int(result.num_nonfinite)) == (6, 2)


def test_a_frozen_layer_is_left_out():
    model = MODELS["dense"]()
    model.layers[0].trainable = False
    x, y = _data(model)
    result = _layerwise(model, x, y)
    assert len(result.gradients) == 1
    _assert_equal(result, _general(model, x, y))


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, x):
        return self.layer(x)


def _shared():
    x = layers.Input((3,))
    layer = layers.Dense(3)
    return tf.keras.Model(x, layer(layer(x)))


UNKNOWN = {
    "a subclassed model": _Subclassed,
    "a layer of one's own": lambda: _sequential((3,), type("Mine", (layers.Dense,), {})(2)),
    "a function as activation": lambda: _sequential(
        (3,), layers.Dense(2, activation=lambda x: x - tf.reduce_mean(x, axis=0))
    ),
    "a function as layer": lambda: _sequential((3,), layers.Lambda(tf.abs), layers.Dense(2)),
    "an operation as layer": lambda: tf.keras.Model(
        x := layers.Input((3,)), layers.Dense(2)(x * 2)
    ),
    "batch normalisation": lambda: _sequential((3,), layers.BatchNormalization(), layers.Dense(2)),
    "normalisation": lambda: _sequential((3,), layers.LayerNormalization(), layers.Dense(2)),
    "grouped convolutions": lambda: _sequential((4, 4, 2), layers.Conv2D(2, 2, groups=2)),
    "masks": lambda: _sequential((3,), layers.Embedding(4, 2, mask_zero=True), layers.Flatten()),
    "mixed precision": lambda: _sequential((3,), layers.Dense(2, dtype="mixed_bfloat16")),
    "along the axis of examples": lambda: _sequential((3,), layers.Softmax(axis=0)),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_goes_the_general_way(make):
    with pytest.raises(Unsupported):
        check_layers(make())


def test_a_layer_that_is_used_twice_goes_the_general_way():
    model = _shared()
    with pytest.raises(Unsupported, match="used twice"):
        layerwise_clipped_sum(model, _losses, *_data(model), None, CLIP)


def test_layers_are_as_they_were_afterwards():
    model = MODELS["embedding"]()
    before = [(layer.call, getattr(layer, "activation", None)) for layer in model.layers]
    _layerwise(model, *_data(model))
    after = [(layer.call, getattr(layer, "activation", None)) for layer in model.layers]
    assert before == after
    assert all("call" not in vars(layer) for layer in model.layers)
