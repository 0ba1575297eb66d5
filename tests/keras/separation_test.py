"""Examples that meet in a model, or leave something behind, are noticed before the first step."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras import _compat, layer_formulas
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.models import PrivateModel, make_private_model_class
from bandmf_tf.keras.optimizers import PrivacyError
from bandmf_tf.keras.separation import SeparationError
from bandmf_tf.noise.stream import NoiseStream
from cases import flat

layers = tf.keras.layers
_rng = np.random.default_rng(0)
X = _rng.normal(size=(8, 4)).astype(np.float32)
Y = _rng.normal(size=(8, 3)).astype(np.float32)
MECHANISM = private_keras.BareMechanism(ToeplitzStrategy(np.array([1.0]), 9), 1.0, 0.7)


def _compiled(model, loss="mse", **options):
    if not isinstance(model, private_keras.models.PrivateModelMixin):
        model = private_keras.make_private(model)
    model.compile(private_keras.SGD(MECHANISM, 0.1, batch_size=8, pinned_seed=1), loss, **options)
    return model


def _sequential(*stack):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([layers.Input((4,)), *stack])


def _step(model, x=X, y=Y, loss="mse"):
    model = _compiled(model, loss)
    model.train_on_batch(x, y)
    return model


def _moved(make_stack, shape=(4,), dtype=None, x=X):
    """Returns how far the gradients of a step move the weights, which noise moves as well."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Input(shape, dtype=dtype), *make_stack()])
    model = _compiled(model)
    variables = model.trainable_variables
    before = flat(variables)
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    noise = flat(NoiseStream(MECHANISM.strategy, MECHANISM.stddev, specs, pinned_seed=1).next())
    model.train_on_batch(x, Y)
    return np.linalg.norm(flat(variables) - (before - 0.1 * noise / 8))


MOST_MOVED = 0.1 * 0.7 * (1 + 1e-4)  # Rate times clip norm, for as many examples as are planned.


def _takes_formulas(model, loss="mse", y=Y):
    model = _compiled(model, loss)
    losses = _compat.UnitLoss(model, per_example=True, known=True)
    try:
        layer_formulas.stages(model, losses, tf.constant(X), tf.constant(y), None)
    except Unsupported:
        return False
    return True


class _Mining(tf.keras.losses.MeanSquaredError):
    """Counts only examples whose loss is below the mean of the batch."""

    def call(self, y, y_pred):
        loss = super().call(y, y_pred)
        return loss * tf.cast(loss < tf.reduce_mean(loss), loss.dtype)


def _with_own_call():
    loss = tf.keras.losses.MeanSquaredError()
    loss.call = lambda y, y_pred: tf.reduce_mean(y - y_pred) * tf.ones(tf.shape(y)[0])
    return loss


class TestLossesWithoutFormulas:
    def test_keras_own_losses_take_them(self):
        for loss in ("mse", tf.keras.losses.MeanAbsoluteError(), tf.keras.losses.huber):
            assert _takes_formulas(_sequential(layers.Dense(3)), loss)

    @pytest.mark.parametrize(
        "loss",
        [
            _Mining(),
            _with_own_call(),
            tf.keras.losses.CosineSimilarity(axis=0),
            lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred), axis=-1),
        ],
        ids=["mining", "method of the object", "along the examples", "function"],
    )
    def test_others_are_given_one_example_at_a_time(self, loss):
        assert not _takes_formulas(_sequential(layers.Dense(3)), loss)

    def test_mining_moves_the_sum_by_one_clip_norm(self):
        """Replacing an example by padding changes the sum by that example's share alone."""
        model = _compiled(_sequential(layers.Dense(3)), _Mining())
        x, y = tf.constant(X), tf.constant(Y)
        sums = []
        for first in (0.0, 1.0):
            weight = tf.concat([[first], tf.ones([7])], 0)
            clipped = model.optimizer.clipped_sum(
                model._loss_and_output, (x, y), model.trainable_variables, weight
            )
            sums.append(np.concatenate([np.ravel(g) for g in clipped.gradients]))
        assert np.linalg.norm(sums[1] - sums[0]) <= 0.7 * (1 + 1e-5)

    @pytest.mark.parametrize(("shape", "labels"), [((), (8,)), ((5, 8), (8,)), ((8, 3), (8, 3))])
    def test_labels_that_would_be_broadcast_along_examples(self, shape, labels):
        model = _sequential(layers.Dense(int(np.prod(shape))), layers.Reshape(shape))
        assert not _takes_formulas(model, y=np.zeros(labels, np.float32))


class _OwnCall(tf.keras.Model):
    def call(self, inputs, training=None):
        outputs = super().call(inputs, training=training)
        return outputs - tf.reduce_mean(outputs, axis=0, keepdims=True)


def _functional(kind, **options):
    x = layers.Input((4,))
    return kind(x, layers.Dense(3)(x), **options)


class TestModelsWithoutFormulas:
    def test_a_functional_model_with_a_call_of_its_own(self):
        with pytest.raises(TypeError, match="make_private_model_class"):
            private_keras.make_private(_functional(_OwnCall))
        assert not _takes_formulas(_functional(make_private_model_class(_OwnCall)))

    def test_one_inside_of_another(self):
        x = layers.Input((4,))
        assert not _takes_formulas(tf.keras.Model(x, _functional(_OwnCall)(x)))

    def test_methods_of_the_object(self):
        model = _sequential(layers.Dense(3))
        model.layers[0].call = lambda x: x[:, :3] - tf.reduce_mean(x[:, :3], axis=0)
        assert not _takes_formulas(model)

    def test_methods_of_the_class(self, monkeypatch):
        original = layers.Dense.call
        monkeypatch.setattr(layers.Dense, "call", lambda self, x: original(self, x))
        assert not _takes_formulas(_sequential(layers.Dense(3)))

    def test_joining_along_the_examples(self):
        x = layers.Input((4,))
        joined = layers.Concatenate(axis=-2)([x, x])
        assert not _takes_formulas(tf.keras.Model(x, layers.Dense(3)(joined)), y=np.zeros((16, 3)))

    @pytest.mark.parametrize("method", ["train_step", "make_train_function", "compute_loss"])
    def test_training_of_ones_own_is_refused(self, method):
        kind = type("Mine", (tf.keras.Model,), {method: lambda self, *_, **__: None})
        with pytest.raises(PrivacyError, match=f"Mine has a {method} of its own"):
            make_private_model_class(kind)
        later = type("Later", (PrivateModel,), {method: lambda self, *_, **__: None})
        with pytest.raises(PrivacyError, match=f"Later has a {method} of its own"):
            _compiled(_functional(later))

    @pytest.mark.keras2
    def test_losses_that_are_added_to_a_model_are_not_dropped(self):
        x = layers.Input((4,))
        hidden = layers.Dense(3)(x)
        model = tf.keras.Model(x, hidden)
        model.add_loss(tf.reduce_mean(hidden**2))
        with pytest.raises(PrivacyError, match="add_loss"):
            private_keras.make_private(model)
        for loss in (tf.reduce_mean(hidden**2), lambda: tf.reduce_mean(model(X) ** 2)):
            private = PrivateModel(x, hidden)
            private.add_loss(loss)
            with pytest.raises(PrivacyError, match="add_loss"):
                _step(private)


class TestWhatNoListKnows:
    """Formulas are told that everything is known; the trial finds out."""

    @pytest.fixture(autouse=True)
    def everything_is_known(self, monkeypatch):
        monkeypatch.setattr(layer_formulas, "check_layers", lambda model: None)

    class Centred(layers.Layer):
        def call(self, x):
            return x - tf.reduce_mean(x, axis=0, keepdims=True)

    class Attending(layers.Layer):
        def call(self, x):
            return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)

    @pytest.mark.parametrize("kind", [Centred, Attending])
    def test_layers_along_the_examples(self, kind):
        model = _sequential(layers.Dense(4), kind(), layers.Dense(3, name="last"))
        with pytest.raises(SeparationError, match="the input of the layer last of the others"):
            _step(model)

    def test_losses_along_the_examples(self, monkeypatch):
        form = sys.modules[_compat.UnitLoss.__module__]
        monkeypatch.setattr(form, "KnownLoss", form.UnscaledLoss)
        with pytest.raises(SeparationError, match="the loss of the others"):
            _step(_sequential(layers.Dense(3)), loss=_Mining())

    def test_gradients_along_the_examples(self):
        @tf.custom_gradient
        def meet(x):
            return tf.identity(x), lambda g: g + tf.reduce_sum(g, axis=0, keepdims=True)

        model = _sequential(layers.Dense(4, name="first"), layers.Lambda(meet), layers.Dense(3))
        with pytest.raises(SeparationError, match="the gradient behind the layer first"):
            _step(model)

    def test_what_is_separate_and_random_passes(self):
        moved = _moved(lambda: [layers.Dense(4), layers.Dropout(0.5), layers.Dense(3)])
        assert 0.01 < moved < MOST_MOVED


class _MovingMean(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=shape[1:], trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
        return x


class _Holder(tf.Module):
    def __init__(self):
        super().__init__()
        self.inner = layers.BatchNormalization()


class _InModule(layers.Layer):
    def __init__(self):
        super().__init__()
        self.module = _Holder()

    def call(self, x, training=None):
        return self.module.inner(x, training=training)


class _Memory(layers.Layer):
    """Adds the last example that it saw, from a variable that nobody tracks."""

    def __init__(self, last):
        super().__init__()
        self._last = lambda: last

    def call(self, x):
        found = x + self._last()
        self._last().assign(x)
        return found


class _Counter(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(
            name="calls", shape=[], dtype="int64", initializer="zeros", trainable=False
        )

    def call(self, x):
        self.calls.assign_add(1)
        return x


class _FirstBatch(layers.Layer):
    """Keeps the mean of the first batch that it is called with, and never changes it again."""

    def build(self, shape):
        del shape
        self.mean = self.add_weight(name="first", shape=[], initializer="zeros", trainable=False)
        self.is_set = self.add_weight(name="set", shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        first = tf.convert_to_tensor(self.is_set) == 0.0
        self.mean.assign(tf.where(first, tf.reduce_mean(x), tf.convert_to_tensor(self.mean)))
        self.is_set.assign(1.0)
        return x + self.mean


class _Unbuilt(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = _FirstBatch(name="first"), layers.Dense(3)

    def call(self, x, training=None):
        del training
        return self.last(self.first(x))


class _Tokens(layers.Layer):
    def build(self, shape):
        del shape
        self.sum = self.add_weight(name="sum", shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        self.sum.assign_add(tf.reduce_sum(tf.cast(x, tf.float32)))
        return tf.cast(x, tf.float32)


class TestState:
    def test_a_model_is_built_without_examples(self):
        model = _compiled(make_private_model_class(_Unbuilt)())
        model.train_on_batch(X, Y)
        assert model.first.is_set.numpy() == 1.0
        assert model.first.mean.numpy() == 0.0

    def test_whole_numbers_are_exchanged_where_all_rows_are_padding(self):
        tokens = layers.Input((4,), dtype="int32")
        model = _compiled(tf.keras.Model(tokens, layers.Dense(3)(_Tokens()(tokens))))
        with pytest.raises(SeparationError, match=r"changes the variable .*sum"):
            model.check_examples((tf.zeros([2, 4], tf.int32), tf.zeros([2, 3])))

    def test_a_batch_of_one_word_alone_tries_nothing_out(self):
        """Invented words are in no vocabulary; another one of the batch is found wherever it is."""
        words = ["a", "b"]
        lookup = layers.StringLookup(vocabulary=words, num_oov_indices=0, mask_token=None)
        inputs = layers.Input((1,), dtype="string")
        inner = layers.Flatten()(layers.Embedding(2, 3)(lookup(inputs)))
        model = _compiled(tf.keras.Model(inputs, _Tokens()(layers.Dense(1)(inner))))
        first, y = tf.constant([["a"]] * 6), tf.zeros([6, 1])
        with pytest.raises(SeparationError, match="no two different examples"):
            model.check_examples((first, y))
        second = tf.concat([first[:4], [["b"]], first[:1]], 0)
        with pytest.raises(SeparationError, match=r"changes the variable .*sum"):
            model.check_examples((second, y))

    def test_metrics_that_change_a_weight(self):
        """One that training does not read, but whoever uses the model."""
        last = layers.Dense(3)
        shift = _MovingMean()

        class Model(tf.keras.Sequential):
            def compute_metrics(self, x, y, y_pred, sample_weight=None):
                shift.mean.assign(tf.reduce_mean(y, axis=0))
                return super().compute_metrics(x, y, y_pred, sample_weight)

            def call(self, x, training=None):
                y = last(x)
                return y if training else y + shift.mean

        shift.build((None, 3))
        model = make_private_model_class(Model)([layers.Input((4,)), last, shift])
        before = shift.mean.numpy()
        with pytest.raises(SeparationError, match=r"has or reads the variable .*mean"):
            _step(model)
        np.testing.assert_array_equal(shift.mean.numpy(), before)

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (_MovingMean, "mean"),
            (_InModule, "moving_"),
            (lambda: layers.BatchNormalization(), "replace_batch_norm"),
            (lambda: layers.BatchNormalization(synchronized=True), "replace_batch_norm"),
            (lambda: tf.compat.v1.keras.layers.BatchNormalization(), "replace_batch_norm"),
        ],
    )
    def test_statistics_of_examples_are_refused_by_name(self, make, name):
        model = _sequential(make(), layers.Dense(3))
        before = [v.numpy() for v in model.variables]
        with pytest.raises((SeparationError, PrivacyError), match=name):
            _step(model)
        for value, variable in zip(before, model.variables, strict=True):
            np.testing.assert_array_equal(value, variable)

    def test_a_variable_that_nobody_tracks(self):
        model = _sequential(_Memory(tf.Variable(tf.zeros([1, 4]))), layers.Dense(3))
        with pytest.raises(SeparationError, match="A step changes the variable Variable:0"):
            _step(model)

    def test_counters_and_generators_pass(self):
        images = tf.constant(_rng.normal(size=(8, 4, 4, 1)), tf.float32)
        last = [lambda: layers.Dense(3)]
        for shape, x, first in (
            ((4,), X, [_Counter]),
            ((4, 4, 1), images, [lambda: layers.RandomFlip(seed=1), layers.Flatten]),
            ((4,), X, [lambda: layers.Dropout(0.5, seed=3), lambda: layers.Lambda(tf.identity)]),
        ):
            moved = _moved(lambda: [make() for make in [*first, *last]], shape, x=x)  # noqa: B023
            assert 0.01 < moved < MOST_MOVED

    def test_the_trial_leaves_weights_and_random_numbers_alone(self):
        model = _compiled(_sequential(layers.Dense(4), layers.Dropout(0.5), layers.Dense(3)))
        before = [v.numpy() for v in model.variables]
        tf.random.set_seed(3)
        expected = tf.random.normal([4]).numpy()
        tf.random.set_seed(3)
        model.check_examples((tf.constant(X), tf.constant(Y)))
        np.testing.assert_array_equal(tf.random.normal([4]), expected)
        for value, variable in zip(before, model.variables, strict=True):
            np.testing.assert_array_equal(value, variable)

    def test_a_training_loop_of_ones_own_has_to_try_first(self):
        model = _compiled(_sequential(layers.Dense(3)))
        data = (tf.constant(X), tf.constant(Y))
        with pytest.raises(Exception, match="check_examples"):
            tf.function(lambda: model.train_step(data))()
        model.check_examples(data)
        tf.function(lambda: model.train_step(data))()

    def test_generators_lose_no_batch(self):
        model = _compiled(_sequential(layers.Dense(3)))
        model.fit(((X, Y) for _ in range(3)), verbose=0)
        assert model.optimizer.steps_done == 3


def _watching(watch):
    """Returns losses and layers that show the mean of what they see to `watch`."""

    class Loss(tf.keras.losses.Loss):
        def call(self, y, y_pred):
            return tf.reduce_mean((y - y_pred) ** 2, -1) + watch(y)

    class Layer(layers.Layer):
        def call(self, x):
            return x + watch(x)

    return {
        "loss class": ([], Loss()),
        "loss function": ([], lambda y, y_pred: tf.reduce_mean((y - y_pred) ** 2, -1) + watch(y)),
        "lambda": ([layers.Lambda(lambda x: x + watch(x))], "mse"),
        "activation": ([layers.Dense(4, activation=lambda x: x + watch(x))], "mse"),
        "layer": ([Layer()], "mse"),
    }


class TestHiddenState:
    """State where no layer tracks it: a mean of earlier examples moves the sums of later ones."""

    @pytest.mark.parametrize("place", list(_watching(None)))
    def test_variables_of_nobody(self, place):
        mean, count = tf.Variable(0.5, name="of_nobody"), tf.Variable(0)

        def watch(values):
            return mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(values))

        def count_calls(values):
            return 0.0 * tf.cast(count.assign_add(1), values.dtype)

        stack, loss = _watching(watch)[place]
        with pytest.raises(SeparationError, match="of_nobody"):
            _step(_sequential(*stack, layers.Dense(3)), loss=loss)
        assert mean.numpy() == 0.5, "The trial left its examples."
        stack, loss = _watching(count_calls)[place]
        _step(_sequential(*stack, layers.Dense(3)), loss=loss)

    @pytest.mark.parametrize(
        "reader", ["loss", "learning rate", "regularizer", "call", "constraint", "optimizer"]
    )
    def test_metrics_that_the_update_reads(self, reader):
        class Labels(tf.keras.metrics.Mean):
            def update_state(self, y, *_, **__):
                return super().update_state(y)

        metric = Labels("labels")

        class Rate(tf.keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return 0.1 + metric.total

        class Model(tf.keras.Sequential):
            def call(self, x, training=None):
                return super().call(x, training=training) + metric.total

        def loss(y, y_pred):
            return tf.reduce_mean((y - y_pred) ** 2, -1) * (1.0 + metric.total)

        def penalty(weights):
            return metric.total * tf.reduce_sum(weights**2)

        class Optimizer(tf.keras.optimizers.SGD):
            def update_step(self, gradient, variable, *rest):
                super().update_step(gradient + metric.total, variable, *rest)

        class Constraint(tf.keras.constraints.Constraint):
            def __call__(self, weights):
                return weights * (1.0 + metric.total)

        kind = Model if reader == "call" else tf.keras.Sequential
        layer = layers.Dense(
            3,
            kernel_regularizer=penalty if reader == "regularizer" else None,
            kernel_constraint=Constraint() if reader == "constraint" else None,
        )
        model = make_private_model_class(kind)([layers.Input((4,)), layer])
        base = Optimizer if reader == "optimizer" else tf.keras.optimizers.SGD
        optimizer = private_keras.make_private_class(base)(
            MECHANISM,
            Rate() if reader == "learning rate" else 0.1,
            batch_size=8,
        )
        model.compile(optimizer, loss if reader == "loss" else "mse", metrics=[metric])
        with pytest.raises(SeparationError, match="which metrics of the training examples change"):
            model.train_on_batch(X, Y)
        assert metric.total.numpy() == 0.0, "The trial left its examples."

    @pytest.mark.parametrize("name", ["tally", "clipped_gradients"])
    def test_a_rate_that_reads_exact_counts_or_sums(self, name):
        class Rate(tf.keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                found = [v for o in made for v in o.exact_variables if name in v.name]
                return 0.1 + sum(tf.reduce_sum(tf.cast(v, tf.float32)) for v in found)

        made = []
        made += [private_keras.SGD(MECHANISM, Rate(), batch_size=8, accumulation_steps=2)]
        model = private_keras.make_private(_sequential(layers.Dense(3)))
        model.compile(made[0], "mse")
        with pytest.raises(SeparationError, match="an exact count or sum of training examples"):
            model.train_on_batch(X, Y)

    def test_what_is_kept_outside_of_tensorflow(self):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        one = tf.constant(1, tf.int64)

        def in_table(values):
            table.insert(one, tf.reduce_mean(values))
            return tf.reshape(table.lookup(one), [])

        def numpy(stateful):
            return lambda v: tf.reshape(
                tf.numpy_function(np.mean, [v], tf.float32, stateful=stateful), []
            )

        python = {
            "LookupTableInsertV2": in_table,
            "PyFunc, which": numpy(stateful=True),
            "PyFuncStateless": numpy(stateful=False),
            "EagerPyFunc": lambda v: tf.reshape(
                tf.py_function(tf.reduce_mean, [v], tf.float32), []
            ),
        }
        for name, watch in python.items():
            stack, loss = _watching(watch)["loss function"]
            with pytest.raises(SeparationError, match=f"runs {name}"):
                _step(_sequential(*stack, layers.Dense(3)), loss=loss)

    def test_randomness_that_cannot_be_repeated(self):
        drawn = tf.function(lambda: tf.random.normal([]))
        tf.random.set_seed(None)
        drawn()  # Traced without a seed.
        model = _compiled(_sequential(layers.Lambda(lambda x: x * drawn()), layers.Dense(3)))
        with pytest.raises(SeparationError, match="same examples, variables and seeds"):
            model.train_on_batch(X, Y)


class TestLoopsOfOnesOwn:
    def _gradients(self, loss_of, model, in_graph=False):
        optimizer = _compiled(_sequential(layers.Dense(3))).optimizer

        def take(x, y):
            gradients = optimizer.clipped_gradients(
                loss_of(x, y), (x, y), model.trainable_variables
            )
            return gradients if not in_graph else [g for g, _ in gradients]

        return (tf.function(take, autograph=False) if in_graph else take)(
            tf.constant(X), tf.constant(Y)
        )

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_state_and_whole_batches_are_refused(self, in_graph):
        model = _sequential(layers.BatchNormalization(), layers.Dense(3))
        before = model.layers[0].moving_mean.numpy()

        def training(x, y):
            return lambda unit: (unit[1] - model(unit[0], training=True)) ** 2

        with pytest.raises(SeparationError, match=r"Assign(Sub)?VariableOp.*replace_batch_norm"):
            self._gradients(training, model, in_graph)
        np.testing.assert_array_equal(model.layers[0].moving_mean, before)

        def of_batch(x, y):
            other = x * 2.0 if in_graph else x
            return lambda unit: (unit[1] - model(unit[0])) ** 2 + tf.reduce_mean(model(other) ** 2)

        with pytest.raises(SeparationError, match="looks at the whole batch"):
            self._gradients(of_batch, model, in_graph)

        weights = tf.constant([1.0, 2.0, 3.0])
        drop = layers.Identity() if _compat.IS_KERAS_3 else layers.Dropout(0.5)  # Counts there.

        def allowed(x, y):
            scaled = weights / tf.cast(tf.shape(x)[1], tf.float32)
            return lambda unit: scaled * drop(unit[1] - model(unit[0]), training=True) ** 2

        assert len(self._gradients(allowed, model, in_graph)) == len(model.trainable_variables)

    def test_clipped_gradients_cannot_be_scaled(self):
        model = _sequential(layers.Dense(3))
        gradients = self._gradients(lambda x, y: lambda u: (u[1] - model(u[0])) ** 2, model)
        with pytest.raises(TypeError, match="item assignment"):
            gradients[0] = (1e3 * gradients[0][0], gradients[0][1])


class _Branching(layers.Layer):
    def call(self, x):
        if tf.reduce_sum(x) > 0:
            return x
        return -2.0 * x


class TestUnclearCrashes:
    @pytest.mark.keras2
    def test_control_flow_that_depends_on_tensors(self):
        model = _compiled(_sequential(_Branching(), layers.Dense(3, use_bias=False)))
        clipped = tf.function(
            lambda x, y: model._clipped_sum(x, y, None, None).gradients, autograph=False
        )(tf.constant(X[:1]), tf.constant(Y[:1]))
        x = tf.constant(X[:1]) * (1.0 if X[0].sum() > 0 else -2.0)
        plain = _compiled(_sequential(layers.Dense(3, use_bias=False)))
        expected = plain._clipped_sum(x, tf.constant(Y[:1]), None, None).gradients
        np.testing.assert_allclose(clipped[0], expected[0], atol=1e-5)

    def test_layers_that_change_their_weights_by_these_alone(self):
        """Keras 2.14 decides in Python whether they do; where it does not, no example is in it."""

        def weights_after(x):
            tf.keras.utils.set_random_seed(1)  # Which Keras 3 reads when it makes a layer.
            model = _sequential(layers.SpectralNormalization(layers.Dense(3)))
            return _step(model, x=x).get_weights()

        if tf.__version__.startswith("2.14"):
            with pytest.raises(SeparationError, match="decides in Python by the value of a tensor"):
                weights_after(X)
            return
        one, other = weights_after(X), weights_after(-3 * X)
        vectors = [[w for w in found if w.shape == (1, 3)] for found in (one, other)]
        np.testing.assert_array_equal(*vectors)
        assert 0.01 < np.linalg.norm(flat(one) - flat(other)) <= 2 * MOST_MOVED

    @pytest.mark.parametrize("of", [tf.sparse.from_dense, tf.RaggedTensor.from_tensor])
    def test_tensors_that_are_not_dense(self, of):
        model = _compiled(_sequential(layers.Dense(3)))
        with pytest.raises(TypeError, match=r"takes dense tensors, and found a (Sparse|Ragged)"):
            model.fit(of(X), Y, verbose=0)
        with pytest.raises(TypeError, match=r"takes dense tensors, and found a (Sparse|Ragged)"):
            model.fit(tf.data.Dataset.from_tensor_slices((of(X), Y)).batch(4), verbose=0)

    @pytest.mark.parametrize("groups", [2, 4])
    def test_grouped_convolutions(self, groups):
        """The general way takes them, too, with the same result."""
        x = _rng.normal(size=(8, 5, 5, 4)).astype(np.float32)
        weights = []
        for use_formulas in (True, False):
            tf.keras.utils.set_random_seed(1)
            stack = [layers.Conv2D(4, 3, groups=groups), layers.Flatten(), layers.Dense(3)]
            model = tf.keras.Sequential([layers.Input((5, 5, 4)), *stack])
            model = private_keras.make_private(model)
            model.use_layer_formulas = use_formulas
            weights.append(flat(_step(model, x=x).get_weights()))
        np.testing.assert_allclose(*weights, atol=1e-6)

    @pytest.mark.parametrize("length", [4, None])
    def test_texts(self, length):
        def stack():
            reader = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=length)
            mean = layers.GlobalAveragePooling1D()
            return [reader, layers.Embedding(5, 3), mean, layers.Dense(3)]

        texts = np.array([["a b"], ["b"], ["a a b"], ["c"]] * 2)
        assert 0.01 < _moved(stack, shape=(1,), dtype=tf.string, x=texts) < MOST_MOVED

    @pytest.mark.keras2
    def test_convolutions_of_more_than_one_series(self):
        def stack():
            return [layers.Conv1D(4, 2), layers.Flatten(), layers.Dense(3)]

        x = _rng.normal(size=(8, 2, 5, 3)).astype(np.float32)
        assert 0.01 < _moved(stack, shape=(2, 5, 3), x=x) < MOST_MOVED

    def test_sequences_of_several_lengths(self):
        stack = [layers.Conv1D(3, 2), layers.GlobalMaxPooling1D(), layers.Dense(3)]
        model = _compiled(tf.keras.Sequential([layers.Input((None, 4)), *stack]))
        for length in (6, 3):
            model.train_on_batch(_rng.normal(size=(8, length, 4)).astype(np.float32), Y)
        assert np.isfinite(flat(model.get_weights())).all()
        assert model.optimizer.steps_done == 2

    def test_tokens_that_are_floats(self):
        """The trial must not fail for examples of its own that are in no table."""
        stack = [layers.Embedding(5, 3), layers.Flatten(), layers.Dense(3)]
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([layers.Input((4,)), *stack])
        tokens = _rng.integers(0, 5, (8, 4)).astype(np.float32)
        assert _step(model, x=tokens).optimizer.steps_done == 1

    def test_inputs_keep_their_type(self):
        """As floats, large numbers of a vocabulary would be rounded to those of others."""
        model = tf.keras.Sequential([layers.Input((2,), dtype=tf.int64), layers.Embedding(3, 2)])
        for copy in (private_keras.make_private(model), private_keras.to_public(model)):
            assert copy.inputs[0].dtype == tf.int64

    @pytest.mark.keras2
    def test_a_clone_of_a_private_model(self):
        for model in (_sequential(layers.Dense(3)), _functional(tf.keras.Model)):
            private = _compiled(model)
            clone = tf.keras.models.clone_model(private)
            assert clone(X).shape == (8, 3)
            _step(clone)

    def test_the_slow_way_is_explained_once(self, caplog):
        model = _compiled(_sequential(layers.Lambda(lambda x: 2.0 * x), layers.Dense(3)))
        with caplog.at_level(logging.WARNING, logger="bandmf_tf.keras.models"):
            model.train_on_batch(X, Y)
            model.train_on_batch(X[:5], Y[:5])
        said = [r.getMessage() for r in caplog.records if "no formula is known" in r.getMessage()]
        assert len(said) == 1
        assert "the layer lambda" in said[0]
        assert "of type Lambda" in said[0]


@pytest.mark.keras2
def test_a_second_fit_traces_nothing_anew():
    model = _compiled(_sequential(layers.Dense(3)))
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(2)
    model.fit(data, verbose=0)
    function = model.train_function
    traced = model.train_tf_function.experimental_get_tracing_count()
    model.fit(data, verbose=0)
    assert model.train_function is function
    assert model.train_tf_function.experimental_get_tracing_count() == traced


@pytest.mark.keras2
def test_freezing_counts_from_the_next_compile_for_the_trial_as_well():
    """Keras trains what was trainable when the model was compiled, whatever is set since."""
    model = _compiled(_sequential(layers.BatchNormalization(), layers.Dense(3)))
    model.layers[0].trainable = False
    with pytest.raises(PrivacyError, match="replace_batch_norm"):
        model.train_on_batch(X, Y)
    _step(model)


def test_a_pipeline_is_not_data():
    from cases import batches, private_model

    model = private_model()
    for method in (model.evaluate, model.predict):
        with pytest.raises(ValueError, match="takes data, not a pipeline"):
            method(batches())
