"""Private models train as Keras models do, and refuse what would not be private."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import cases
from bandmf_tf import keras as private_keras
from bandmf_tf.accounting.amplification import FixedSizeSampling
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras._compat import IS_KERAS_3
from bandmf_tf.keras.batches import SamplingError, make_batches
from bandmf_tf.keras.models import PrivateModel, PrivateSequential, make_private_model_class
from bandmf_tf.keras.optimizers import PrivacyError
from bandmf_tf.keras.trials import taken
from cases import (
    MECHANISM,
    NUM_ROUNDS,
    X,
    Y,
    batches,
    classification_loss,
    flat,
    network,
    private_model,
)

layers = tf.keras.layers


def _fit(model, pipeline=None, **options):
    model.fit(pipeline or batches(), verbose=0, **options)
    return flat(model.get_weights())


def _general(**options):
    """Returns a model that does not use the formulas of its layers."""
    model = private_model(**options)
    model.use_layer_formulas = False
    return model


@pytest.fixture(name="by_formula", scope="module")
def _by_formula():
    """The weights after a whole run."""
    return _fit(private_model())


def test_both_ways_of_clipping_train_alike(by_formula):
    np.testing.assert_allclose(_fit(_general()), by_formula, atol=1e-5)


def test_embeddings_train_alike():
    def make():
        tf.keras.utils.set_random_seed(1)
        return tf.keras.Sequential(
            [layers.Input((5,)), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(3)]
        )

    tokens = np.random.default_rng(1).integers(0, 4, (len(X), 5))
    pipeline = make_batches((tokens, Y), MECHANISM, pinned_seed=1)
    general = _fit(_general(model=make()), pipeline)
    np.testing.assert_allclose(general, _fit(private_model(model=make()), pipeline), atol=1e-5)


def test_metrics_do_not_count_padding():
    model = private_model(metrics=["accuracy"], learning_rate=1e-9)
    pipeline = batches()
    assert pipeline.padded_batch_size > cases.BATCH_SIZE
    history = model.fit(pipeline, verbose=0).history
    seen = np.concatenate([pipeline.indices(i) for i in range(NUM_ROUNDS)])
    loss, accuracy = private_model(metrics=["accuracy"], learning_rate=1e-9).evaluate(
        X[seen], Y[seen], verbose=0
    )
    # Keras averages the means of the batches, weighed by their sizes.
    assert history["loss"][0] == pytest.approx(loss, rel=1e-4)
    assert history["accuracy"][0] == pytest.approx(accuracy, rel=1e-5)


def test_weight_penalties_are_added_after_the_noise_and_are_not_clipped():
    def make(strength):
        model = network()
        penalty = tf.keras.regularizers.L2(strength)
        regularized = tf.keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(5, "relu", kernel_regularizer=penalty),
                layers.Dense(3),
            ]
        )
        regularized.set_weights(model.get_weights())
        return regularized

    moved = []
    for strength in (0.0, 10.0):
        model = private_model(model=make(strength))
        kernel = model.layers[0].kernel.numpy()
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        moved.append(model.layers[0].kernel.numpy())
    np.testing.assert_allclose(moved[1] - moved[0], -0.1 * 2 * 10.0 * kernel, rtol=1e-4, atol=1e-6)


def test_a_functional_model_with_two_outputs_and_weights_of_losses():
    def make():
        tf.keras.utils.set_random_seed(1)
        x = layers.Input((4,))
        hidden = layers.Dense(5, "tanh")(x)
        outputs = {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)}
        return tf.keras.Model(x, outputs)

    labels = {"a": Y, "b": X[:, :1]}
    pipeline = make_batches((X, labels), MECHANISM, pinned_seed=1)
    results = []
    for use_formulas in (False, True):
        model = private_keras.make_private(make())
        model.use_layer_formulas = use_formulas
        model.compile(
            private_keras.SGD(MECHANISM, 0.1, pinned_seed=1),
            loss={"a": classification_loss(), "b": "mse"},
            loss_weights={"a": 1.0, "b": 0.5},
        )
        model.fit(pipeline, verbose=0)
        results.append(flat(model.get_weights()))
    assert isinstance(model, PrivateModel)
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no such loss")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_ctc_is_clipped_example_by_example(chunk_size):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(len(X), 8, 4)).astype(np.float32)
    y, loss = rng.integers(1, 5, (len(X), 3)), tf.keras.losses.CTC()
    tf.keras.utils.set_random_seed(1)
    network = tf.keras.Sequential([layers.Input((8, 4)), layers.Dense(6)])
    model = private_model(model=network, loss=loss, chunk_size=chunk_size, learning_rate=1.0)
    model.optimizer.build(model.trainable_variables)
    weights, total = flat(model.get_weights()), np.zeros(30)
    pipeline = make_batches((x, y), MECHANISM, pinned_seed=1)
    for i in pipeline.indices(0):
        with tf.GradientTape() as tape:
            value = loss(y[i : i + 1], network(x[i : i + 1]))
        gradient = flat(tape.gradient(value, network.trainable_variables))
        total += gradient * min(1.0, MECHANISM.l2_norm_clip / np.linalg.norm(gradient))
    noise = cases.noise_rows(model.trainable_variables)[0]
    moved = _fit(model, pipeline, steps_per_epoch=1) - weights
    np.testing.assert_allclose(moved * cases.BATCH_SIZE, -total - noise, atol=1e-4)


@pytest.mark.parametrize("use_formulas", [True, False])
def test_weights_of_each_output_weigh_its_losses(use_formulas):
    rng = np.random.default_rng(4)
    labels = {"a": Y, "b": X[:, :1]}
    weights = {name: rng.uniform(0.0, 3.0, len(X)).astype(np.float32) for name in labels}
    weights["a"][::2] = 0.0  # Such an example has a share by its other output.
    x = layers.Input((4,))
    outputs = {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    network = tf.keras.Model(x, outputs)
    model = private_keras.make_private(network)
    model.use_layer_formulas = use_formulas
    optimizer = private_keras.SGD(MECHANISM, 1.0, pinned_seed=cases.NOISE_SEED)
    model.compile(optimizer, loss={"a": classification_loss(), "b": "mse"})
    before, total = flat(model.get_weights()), np.zeros(20)
    pipeline = make_batches((X, labels, weights), MECHANISM, pinned_seed=1)
    for i in pipeline.indices(0):
        with tf.GradientTape() as tape:
            y_pred = network(X[i : i + 1])
            loss = weights["a"][i] * classification_loss()(Y[i : i + 1], y_pred["a"])
            loss += weights["b"][i] * tf.reduce_mean(tf.square(y_pred["b"] - X[i, 0]))
        gradient = flat(tape.gradient(loss, network.trainable_variables))
        total += gradient * min(1.0, MECHANISM.l2_norm_clip / np.linalg.norm(gradient))
    noise = cases.noise_rows(model.trainable_variables)[0]
    moved = _fit(model, pipeline, steps_per_epoch=1) - before
    np.testing.assert_allclose(moved * cases.BATCH_SIZE, -total - noise, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "mask"),
    [
        ([0.0, 1.0, 2.0], [False, True, True]),
        ({"a": [0.0, 1.0, 0.0], "b": [0.0, 0.0, 2.0]}, [False, True, True]),
        ({"a": [0.0, 1.0, 0.0]}, None),
        ({"a": [0.0, 1.0, 0.0], "b": None}, None),
        (None, None),
    ],
    ids=str,
)
def test_an_example_that_no_output_weighs_is_padding(weights, mask):
    weights = (
        {name: None if value is None else tf.constant(value) for name, value in weights.items()}
        if isinstance(weights, dict)
        else weights and tf.constant(weights)
    )
    found = taken((tf.zeros([3, 4]), {"a": tf.zeros([3]), "b": tf.zeros([3])}, weights)).mask
    assert mask is None if found is None else found.numpy().tolist() == mask


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="relu"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


class _Distiller(_Subclassed):
    def train_step(self, data):
        return {}


class _Endpoint(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x


def test_a_subclassed_model_that_is_built_by_its_first_batch():
    tf.keras.utils.set_random_seed(1)
    model = make_private_model_class(_Subclassed)()
    model.compile(
        private_keras.SGD(MECHANISM, 0.1, pinned_seed=cases.NOISE_SEED), loss=classification_loss()
    )
    first = _fit(model, steps_per_epoch=2)
    assert model.optimizer.steps_done == 2
    assert np.all(np.isfinite(first))
    _fit(model, steps_per_epoch=2)
    assert model.optimizer.steps_done == 4


class _OfKnownWords(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.lookup = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
        self.table = layers.Embedding(2, 3)

    def call(self, words):
        return self.table(self.lookup(words))


def test_a_subclassed_model_that_takes_no_empty_words_is_built():
    model = make_private_model_class(_OfKnownWords)()
    model.compile(
        private_keras.SGD(MECHANISM, 0.1, batch_size=6, sampling="unchecked"),
        loss=classification_loss(),
    )
    model.train_on_batch(tf.constant(["a", "b", "b", "a"]), Y[:4])
    assert model.optimizer.steps_done == 1


def test_cells_of_recurrent_layers_go_the_general_way():
    tf.keras.utils.set_random_seed(1)
    recurrent = tf.keras.Sequential(
        [layers.Input((2, 1)), layers.RNN(layers.SimpleRNNCell(3)), layers.Dense(3)]
    )
    model = private_model(model=recurrent)
    _fit(model, make_batches((X[:, :2, None], Y), MECHANISM), steps_per_epoch=2)
    assert model.optimizer.steps_done == 2


def test_microbatches_of_fixed_size_batches():
    scheme = FixedSizeSampling(NUM_ROUNDS, 3, 6, len(X))
    mechanism = cases.make_mechanism(MECHANISM.strategy, sampling=scheme)
    model = private_model(mechanism=mechanism, batch_size=None, microbatch_size=3)
    _fit(model, make_batches((X, Y), mechanism), steps_per_epoch=3)
    assert model.optimizer.batch_size == 6
    assert model.optimizer.batch_sizes_seen() == {"smallest": 6, "largest": 6, "mean": 6.0}


def test_fit_goes_on_where_the_last_one_ended(by_formula):
    model = private_model()
    for _ in range(3):
        final = _fit(model, steps_per_epoch=4)
    np.testing.assert_array_equal(final, by_formula)


class TestRefusals:
    @pytest.mark.parametrize("optimizer", ["sgd", tf.keras.optimizers.Adam()])
    def test_optimizers_without_noise(self, optimizer):
        with pytest.raises(PrivacyError, match="needs a private optimizer"):
            private_keras.make_private(network()).compile(optimizer, loss="mse")

    def test_data_of_unknown_sampling(self):
        model = private_model()
        with pytest.raises(SamplingError, match="how batches are drawn"):
            model.fit(X, Y, verbose=0)
        told = private_model(sampling="unchecked")
        told.fit(X, Y, batch_size=20, verbose=0)
        assert told.optimizer.steps_done == 3
        assert not told.optimizer.sampling_is_enforced

    def test_a_pipeline_that_breaks_the_plan(self):
        scheme = FixedSizeSampling(NUM_ROUNDS, 3, 6, len(X))
        with pytest.raises(SamplingError, match="assumes PoissonSampling"):
            private_model().fit(make_batches((X, Y), scheme), verbose=0)

    def test_more_steps_than_planned(self):
        model = private_model()
        _fit(model)
        with pytest.raises(PrivacyError, match="All 12 steps"):
            _fit(model)

    def test_epochs_that_do_not_divide_the_plan(self):
        with pytest.raises(ValueError, match="epochs must divide the 12 rounds"):
            _fit(private_model(), epochs=5)

    def test_batch_normalisation(self):
        model = tf.keras.Sequential(
            [layers.Input((4,)), layers.BatchNormalization(), layers.Dense(3)]
        )
        with pytest.raises(Exception, match="GroupNormalization or LayerNormalization"):
            _fit(private_model(model=model))
        model.layers[0].trainable = False
        _fit(private_model(model=model), steps_per_epoch=1)

    def test_state_carried_from_batch_to_batch(self):
        model = tf.keras.Sequential(
            [layers.Input(batch_shape=(6, 4, 1)), layers.GRU(3, stateful=True)]
        )
        with pytest.raises(Exception, match="stateful=False"):
            _fit(private_model(model=model), make_batches((X[:, :2, None], Y), MECHANISM))

    def test_losses_that_layers_add_from_examples(self):
        model = tf.keras.Sequential(
            [layers.Input((4,)), layers.Dense(3, activity_regularizer="l2")]
        )
        with pytest.raises(Exception, match="put it into the loss function"):
            _fit(private_model(model=model))

    def test_labels_are_not_asked_for_where_a_layer_adds_the_loss(self):
        for labels, loss in ((None, None), (None, "mse"), (Y, None), (Y, "mse")):
            x = layers.Input((4,))
            model = tf.keras.Model(x, _Endpoint()(layers.Dense(3)(x)))
            model = private_keras.make_private(model)
            optimizer = private_keras.SGD(MECHANISM, 0.1, batch_size=6, sampling="unchecked")
            model.compile(optimizer, loss)
            with pytest.raises(PrivacyError, match="put it into the loss function"):
                model.fit(X, labels, verbose=0)
        with pytest.raises(PrivacyError, match="put it into the loss function"):
            model.fit(make_batches(X, MECHANISM), verbose=0)

    def test_models_without_a_loss(self):
        model = private_keras.make_private(network())
        model.compile(private_keras.SGD(MECHANISM, 0.1))
        with pytest.raises(ValueError, match="has no loss; compile it with one"):
            model.fit(batches(), verbose=0)

    def test_loss_scaling(self):
        with pytest.raises(PrivacyError, match=r"no loss scaling.*mixed_bfloat16"):
            private_keras.make_private(network()).compile(
                tf.keras.mixed_precision.LossScaleOptimizer(private_keras.SGD(MECHANISM)),
                loss="mse",
            )

    def test_the_policy_that_scales_losses(self):
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            model = private_keras.make_private(network())
            with pytest.raises(PrivacyError, match=r"mixed_float16 brings; use .*'mixed_bfloat16'"):
                model.compile(private_keras.SGD(MECHANISM), "mse")
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")

    @pytest.mark.parametrize("policy", ["float16", "bfloat16"])
    def test_a_policy_without_float32_hears_which_one_has_them(self, policy):
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            model = private_keras.make_private(network())
            model.compile(private_keras.SGD(MECHANISM), "mse")
            with pytest.raises(BandMFError, match=f"policy mixed_bfloat16.* Found {policy} in"):
                model.fit(batches(), verbose=0)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")

    def test_models_it_cannot_wrap(self):
        with pytest.raises(TypeError, match="make_private_model_class"):
            private_keras.make_private(_Subclassed())
        with pytest.raises(PrivacyError, match=r"train_step of its own.*clipped_gradients"):
            private_keras.make_private(_Distiller())


def test_a_loss_in_which_examples_meet_is_clipped_example_by_example():
    """A loss of one's own is never given more than one example at a time."""
    seen = []

    def contrastive(y, y_pred):
        seen.append(y_pred.shape[0])
        return tf.reduce_mean(tf.square(y_pred - tf.reduce_mean(y_pred, axis=0)), axis=-1)

    model = private_model(loss=contrastive)
    pipeline = batches()
    _fit(model, pipeline, steps_per_epoch=1)
    assert 1 in seen
    assert pipeline.padded_batch_size not in seen


def test_private_models_share_their_layers():
    model = network()
    private = private_keras.make_private(model)
    assert isinstance(private, PrivateSequential)
    assert private.layers[0] is model.layers[0]
    assert private_keras.make_private(private) is private
    np.testing.assert_array_equal(flat(private.get_weights()), flat(model.get_weights()))


def test_models_of_another_keras_get_a_sentence():
    with pytest.raises(TypeError, match=r"takes models of tf\.keras, .* Found a Foreign of"):
        private_keras.make_private(type("Foreign", (), {})())


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no other backend.")
@pytest.mark.parametrize("backend", ["jax", "numpy"])  # One is not installed, one always is.
def test_another_backend_than_tensorflow_gets_a_sentence(backend):
    run = subprocess.run(
        [sys.executable, "-c", "import bandmf_tf.keras"],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    message = f"set KERAS_BACKEND=tensorflow before Keras is imported. Found {backend}."
    assert message in run.stderr.splitlines()[-1]
