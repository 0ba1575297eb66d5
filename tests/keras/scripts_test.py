"""Scripts that people write for TensorFlow Privacy's optimizers, with our classes in their place.

What changes in each is the optimizer, and `make_private(model)`; data, loss and `fit` stay.
"""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras._compat import IS_KERAS_3

layers = tf.keras.layers


def _noise_of_dp_sgd(steps, noise_multiplier, l2_norm_clip=1.0):
    """Returns what those optimizers add: independent noise in every step."""
    strategy = ToeplitzStrategy(np.array([1.0]), steps)
    return private_keras.BareMechanism(strategy, noise_multiplier, l2_norm_clip)


def test_images_learn_with_unreduced_losses():
    """The tutorial of that library; threads #160 and #162 saw an accuracy of chance."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train, test = slice(0, 1500), slice(1500, None)
    labels = tf.keras.utils.to_categorical(labels, 10)
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 4, strides=2, padding="same", activation="relu"),
            layers.MaxPool2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    optimizer = private_keras.SGD(
        _noise_of_dp_sgd(steps=45, noise_multiplier=1.1),
        learning_rate=4.0,
        batch_size=100,
        sampling=private_keras.UNCHECKED,
        pinned_seed=1,
    )
    loss = tf.keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none")
    model = private_keras.make_private(model)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    history = model.fit(
        images[train],
        labels[train],
        epochs=3,
        validation_data=(images[test], labels[test]),
        batch_size=100,
        verbose=0,
    ).history
    assert history["val_accuracy"][-1] > 0.6


def test_penalties_of_weights():
    """Thread #149: they are no examples, and neither clipped nor in the way."""
    model = tf.keras.Sequential([layers.Input((4,)), layers.Dense(3, kernel_regularizer="l2")])
    optimizer = private_keras.SGD(
        _noise_of_dp_sgd(steps=1, noise_multiplier=1e-6),
        learning_rate=1.0,
        batch_size=8,
        sampling=private_keras.UNCHECKED,
    )
    model = private_keras.make_private(model)
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))
    before = model.layers[-1].kernel.numpy()
    model.fit(np.zeros((8, 4)), np.zeros((8, 3)), batch_size=8, verbose=0)
    np.testing.assert_allclose(model.layers[-1].kernel, before * (1 - 2 * 0.01), atol=1e-5)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 gives an optimizer the losses of examples.")
def test_without_make_private_the_sentence_names_it():
    """Keras 3 gives an optimizer the gradient of the whole batch alone, which nobody can clip."""
    model = tf.keras.Sequential([layers.Input((4,)), layers.Dense(3)])
    optimizer = private_keras.SGD(
        _noise_of_dp_sgd(1, 1.0), batch_size=8, sampling=private_keras.UNCHECKED
    )
    model.compile(optimizer, tf.keras.losses.MeanSquaredError(reduction="none"))
    before = model.get_weights()[0]
    with pytest.raises(Exception, match=r"made private by bandmf_tf.keras.make_private\(model\)"):
        model.fit(np.ones((8, 4)), np.zeros((8, 3)), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before)
