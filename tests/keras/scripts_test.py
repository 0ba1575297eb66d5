"""Scripts that people write for TensorFlow Privacy's optimizers, with our classes in their place.

What changes in each is the optimizer, and `make_private(model)`; data, loss and `fit` stay. Threads
are those of tensorflow/privacy. The ones about versions (#520, #560) hold no script but `import`.
"""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf

import bandmf_tf as bm
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


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_classes_of_private_models(kind):
    """`DPSequential` and `DPModel`, whose constructors are those of Keras: the same training."""
    x = np.random.default_rng(1).normal(size=(24, 4)).astype(np.float32)
    y = np.arange(24) % 3

    def trained(make):
        tf.keras.utils.set_random_seed(1)
        model = make()
        optimizer = private_keras.Adam(
            _noise_of_dp_sgd(steps=6, noise_multiplier=0.5),
            learning_rate=0.1,
            batch_size=8,
            sampling=private_keras.UNCHECKED,
            pinned_seed=1,
        )
        model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    def network():
        return [layers.Input((4,)), layers.Dense(5, "relu"), layers.Dense(3)]

    def functional():
        inputs, hidden, last = network()
        return private_keras.PrivateModel(inputs, last(hidden(inputs)))

    by_class = {
        "sequential": lambda: private_keras.PrivateSequential(network()),
        "functional": functional,
    }
    expected = trained(lambda: private_keras.make_private(tf.keras.Sequential(network())))
    for got, want in zip(trained(by_class[kind]), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_epsilon_that_is_printed_at_the_end():
    """`compute_dp_sgd_privacy` adds moments up: a bound on what the same noise has here."""
    count, size, noise, steps, delta = 600, 40, 1.1, 30, 1e-5
    request = bm.PlanRequest(
        workload=bm.prefix_sum(steps),
        noise_multiplier=noise / np.sqrt(steps),  # A plan's is over that of all steps together.
        delta=delta,
        batch_size=size,
        dataset_size=count,
        num_bands=1,
    )
    mechanism = bm.plan_mechanism(request).mechanism
    gaussian = dp_accounting.PoissonSampledDpEvent(
        size / count, dp_accounting.GaussianDpEvent(noise)
    )
    moments = dp_accounting.rdp.RdpAccountant().compose(gaussian, steps)
    assert 0.8 * moments.get_epsilon(delta) < mechanism.epsilon < moments.get_epsilon(delta)

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images[:count] / 16).astype(np.float32)
    model = private_keras.make_private(tf.keras.Sequential([layers.Input((64,)), layers.Dense(10)]))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(private_keras.Adam(mechanism, learning_rate=0.01), loss)
    batches = private_keras.make_batches((images, labels[:count]), mechanism)
    spending = private_keras.PrivacyCallback()
    history = model.fit(batches, epochs=2, verbose=0, callbacks=[spending]).history
    assert mechanism.epsilon <= history["epsilon"][-1] < mechanism.epsilon + 1e-4
    assert history["epsilon"][0] < history["epsilon"][-1]


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
