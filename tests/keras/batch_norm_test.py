"""Batch normalisation is replaced where it would be trained, and all other layers stay."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras import _compat
from bandmf_tf.keras.optimizers import PrivacyError

layers = tf.keras.layers
_rng = np.random.default_rng(0)
X = _rng.normal(size=(8, 4)).astype(np.float32)
Y = _rng.normal(size=(8, 3)).astype(np.float32)
MECHANISM = private_keras.BareMechanism(ToeplitzStrategy(np.array([1.0]), 9), 1.0, 0.7)


def _train_on(model, x=X):
    model = private_keras.make_private(model)
    model.compile(private_keras.SGD(MECHANISM, 0.1, batch_size=8, pinned_seed=1), "mse")
    model.train_on_batch(x, Y)


def _normalisations(model):
    kinds = (layers.GroupNormalization, layers.BatchNormalization)
    return [type(layer) for layer in _compat.all_layers(model) if isinstance(layer, kinds)]


def _adapted(*shape):
    """Returns batch normalisation with averages that training has left."""
    layer = layers.BatchNormalization()
    layer.build((None, *shape))
    layer.set_weights([_rng.uniform(1, 3, w.shape) for w in layer.get_weights()])
    return layer


def test_a_frozen_base_keeps_its_features():
    x = layers.Input((4,))
    base = tf.keras.Model(x, _adapted(5)(layers.Dense(5, "relu")(x)), name="base")
    base.trainable = False
    head = tf.keras.Sequential([layers.Input((5,)), layers.BatchNormalization(), layers.Dense(3)])
    inputs = layers.Input((4,))
    model = tf.keras.Model(inputs, head(base(inputs, training=False)))
    features = base(X).numpy()
    fixed = private_keras.replace_batch_norm(model)
    assert fixed.get_layer("base") is base
    np.testing.assert_array_equal(base(X), features)
    assert sorted(map(str, _normalisations(fixed))) == sorted(
        map(str, [layers.BatchNormalization, layers.GroupNormalization])
    )
    _train_on(fixed)
    np.testing.assert_array_equal(base(X), features)
    assert private_keras.replace_batch_norm(fixed) is fixed


def test_a_frozen_layer_beside_a_trained_one_is_left_alone():
    frozen = _adapted(4)
    frozen.trainable = False
    model = tf.keras.Sequential([layers.Input((4,)), frozen, layers.Dense(3), _adapted(3)])
    fixed = private_keras.replace_batch_norm(model)
    assert fixed.layers[0] is frozen
    assert _normalisations(fixed) == [layers.BatchNormalization, layers.GroupNormalization]
    _train_on(fixed)


def test_batch_normalisation_is_replaced_and_other_layers_are_the_same():
    x = layers.Input((6, 6, 3))
    hidden = layers.Conv2D(48, 3, name="conv")(x)
    hidden = layers.BatchNormalization(name="norm", scale=False)(hidden)
    inner = tf.keras.Sequential([layers.Input((48,)), layers.BatchNormalization()])
    hidden = inner(layers.GlobalAveragePooling2D()(hidden))
    model = tf.keras.Model(x, layers.Dense(3, name="out")(hidden))
    fixed = private_keras.replace_batch_norm(model)
    assert _normalisations(fixed) == 2 * [layers.GroupNormalization]
    assert fixed.get_layer("norm").groups == 24
    assert not fixed.get_layer("norm").scale
    for name in ("conv", "out"):
        assert fixed.get_layer(name) is model.get_layer(name)
    _train_on(fixed, x=_rng.normal(size=(8, 6, 6, 3)).astype(np.float32))


def test_sequential_models():
    stack = [layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
    model = tf.keras.Sequential([layers.Input((4,)), *stack])
    fixed = private_keras.replace_batch_norm(model)
    assert type(fixed) is tf.keras.Sequential
    assert fixed.layers[1].groups == 5
    assert fixed.layers[0] is model.layers[0]
    _train_on(fixed)


def test_a_silent_branch_begins_silent_and_constraints_stay():
    norm = layers.BatchNormalization(gamma_initializer="zeros", beta_constraint="non_neg")
    model = tf.keras.Sequential([layers.Input((4,)), norm, layers.Dense(3)])
    fixed = private_keras.replace_batch_norm(model).layers[0]
    np.testing.assert_array_equal(fixed(X), np.zeros_like(X))
    assert fixed.beta_constraint is norm.beta_constraint is not None


@pytest.mark.keras2
def test_channels_along_several_axes_are_refused_with_their_name():
    norm = layers.BatchNormalization(axis=[1, 2], name="wide")
    with pytest.raises(TypeError, match=r"make wide with one\. Found axis=\[1, 2\]"):
        private_keras.replace_batch_norm(tf.keras.Sequential([layers.Input((3, 4)), norm]))


class _Penalty(tf.keras.regularizers.Regularizer):
    def __call__(self, weights):
        return 0.01 * tf.reduce_sum(weights * weights)


class _Scale(layers.Layer):
    """Of a user: no configuration, no `trainable`, and arguments that are no JSON."""

    def __init__(self, scale):
        super().__init__()
        self._scale = scale

    def call(self, x, table=None, **options):
        return x * self._scale + options["shift"]


class _Block(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, kernel_regularizer=_Penalty())

    def call(self, x):
        return self.dense(x)


def test_nothing_that_stays_is_serialised():
    x = layers.Input((4,))
    norm = layers.BatchNormalization()
    hidden = layers.Lambda(lambda t: 2.0 * t)(norm(x))
    hidden = _Scale(3.0)(hidden, table=_Penalty(), shift=1.0) - hidden[:, :1]
    block = _Block()
    outputs = {"a": block(norm(hidden)), "b": norm(x, training=False)}
    model = tf.keras.Model({"x": x}, outputs)
    model.compile("sgd", lambda y, y_pred: tf.reduce_mean(y - y_pred), loss_weights=None)
    fixed = private_keras.replace_batch_norm(model)
    kinds = [layer for layer in fixed.layers if type(layer) is layers.GroupNormalization]
    assert len(kinds) == 1  # Which was used three times, and is.
    normal = kinds[0](X)
    middle = (2.0 * normal) * 3.0 + 1.0 - 2.0 * normal[:, :1]
    found = fixed({"x": X})
    np.testing.assert_allclose(found["a"], block(kinds[0](middle)), atol=1e-5)
    np.testing.assert_allclose(found["b"], normal, atol=1e-6)
    assert block in fixed.layers
    np.testing.assert_array_equal(block.dense.kernel, model.trainable_variables[-2])


def test_masks_reach_the_layers_that_stay():
    tokens = layers.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    hidden = layers.LSTM(3)(layers.LSTM(3, return_sequences=True)(hidden))
    fixed = private_keras.replace_batch_norm(tf.keras.Model(tokens, _adapted(3)(hidden)))
    short, padded = np.array([[1, 2, 3]]), np.array([[1, 2, 3, 0, 0]])
    _, embedding, first, second, norm = fixed.layers
    expected = norm(second(first(embedding(short))))
    np.testing.assert_allclose(fixed(padded), expected, atol=1e-6)


def test_what_is_frozen_around_a_trained_layer_stays_frozen():
    inner = tf.keras.Sequential([layers.Input((4,)), layers.Dense(4), layers.BatchNormalization()])
    inner.trainable = False
    inner.layers[-1].trainable = True
    model = tf.keras.Sequential([layers.Input((4,)), inner, layers.Dense(3)])
    count = len(model.trainable_variables)
    fixed = private_keras.replace_batch_norm(model)
    assert _normalisations(fixed) == [layers.GroupNormalization]
    assert len(fixed.trainable_variables) == count
    _train_on(fixed)


class _Holder(tf.keras.Model):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def call(self, x):
        return self.norm(x)


def test_what_cannot_be_replaced_from_outside_is_named():
    holder = _Holder(layers.BatchNormalization(name="deep"))
    for model in (tf.keras.Sequential([layers.Input((4,)), holder, layers.Dense(3)]), holder):
        with pytest.raises(
            TypeError, match=r"_Holder .* holds .*'deep'.*sequential and functional"
        ):
            private_keras.replace_batch_norm(model)
    with pytest.raises(TypeError, match=r"takes models\. Found list"):
        private_keras.replace_batch_norm([holder])
    harmless = _Holder(layers.Dense(4))
    model = tf.keras.Sequential([layers.Input((4,)), harmless, _adapted(4), layers.Dense(3)])
    assert private_keras.replace_batch_norm(model).layers[0] is harmless


@pytest.mark.keras2
def test_an_added_loss_is_not_dropped_in_silence():
    x = layers.Input((4,))
    model = tf.keras.Model(x, layers.BatchNormalization()(layers.Dense(3)(x)))
    model.add_loss(tf.reduce_mean(model.output))
    with pytest.raises(PrivacyError, match="loss of its own"):
        private_keras.replace_batch_norm(model)
