"""Which batches a step takes, when it counts, and what the record says of it."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.keras._compat import IS_KERAS_3
from bandmf_tf.keras.batches import Batch, PoissonBatches, SamplingError, make_batches
from bandmf_tf.keras.callbacks import shown_epsilon
from bandmf_tf.keras.optimizers import PrivacyError
from bandmf_tf.keras.trials import taken
from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.runs.run_record import load_run_record
from cases import (
    MECHANISM,
    NUM_ROUNDS,
    SAMPLING_SEED,
    X,
    Y,
    batches,
    classification_loss,
    flat,
    make_mechanism,
    network,
    private_model,
)

layers = tf.keras.layers
CLIP = MECHANISM.l2_norm_clip


def _two_inputs(names=("a", "b")):
    tf.keras.utils.set_random_seed(1)
    inputs = [layers.Input((4,), name=name) for name in names]
    return tf.keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(inputs)))


FORMS = {
    "(x, y)": (network, (X, Y)),
    "lists": (_two_inputs, ([X, X + 1], Y)),
    "dict": (_two_inputs, ({"a": X, "b": X + 1}, Y)),
    "weights": (network, (X, Y, np.linspace(0.0, 9.0, len(X), dtype=np.float32))),
}


class _Strict(layers.Layer):
    """Takes no row of zeros, as a lookup takes no word that it does not know."""

    def call(self, x):
        largest = tf.reduce_max(tf.abs(x), axis=1, keepdims=True)
        return x * largest * tf.debugging.check_numerics(1.0 / largest, "A row of zeros.")


private_keras.register_formula(_Strict, None)


class _Lookup(tf.keras.Model):
    """Is built by what it is called with first, and knows three words."""

    def __init__(self):
        super().__init__()
        words = layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=0, mask_token=None)
        self.stack = [words, layers.Embedding(3, 4), layers.Flatten(), layers.Dense(3)]

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x


def _microbatches():
    """Returns options for microbatches of three, of which the second has two examples."""
    scheme = FixedSizeSampling(NUM_ROUNDS, 3, 5, len(X))
    mechanism = make_mechanism(MECHANISM.strategy, sampling=scheme)
    return {"mechanism": mechanism, "batch_size": None, "microbatch_size": 3}


class TestPadding:
    """Padding is no example, whatever examples are made of."""

    @pytest.mark.parametrize(
        ("use_formulas", "devices", "options"),
        [
            (True, 1, {}),
            (False, 1, {}),
            (False, 1, {"chunk_size": 3}),
            (True, 1, {"accumulation_steps": 12}),  # The last two pieces hold nobody.
            (True, 2, {"accumulation_steps": 20}),  # Pieces of one row for two replicas.
        ],
        ids=str,
    )
    def test_it_is_something_that_the_model_takes(self, use_formulas, devices, options):
        assert batches().padded_batch_size == 20
        names = [f"CPU:{i}" for i in range(devices)]
        found = []
        for first in ([_Strict()], []):
            with tf.distribute.MirroredStrategy(names).scope():
                stack = tf.keras.Sequential([layers.Input((4,)), *first, *network().layers])
                model = private_model(model=stack, metrics=["accuracy"], **options)
            model.use_layer_formulas = use_formulas
            history = model.fit(
                batches(), steps_per_epoch=3 * options.get("accumulation_steps", 1), verbose=0
            )
            shown = [history.history[name] for name in ("loss", "accuracy")]
            found.append((flat(model.get_weights()), *shown))
            assert model.optimizer.sampling_is_enforced
        for strict, plain in zip(*found, strict=True):
            np.testing.assert_allclose(strict, plain, atol=2e-5)

    def test_so_it_is_for_a_model_that_is_not_built_yet(self):
        words = np.array(["a", "b", "c"])[Y][:, None]
        model = private_keras.make_private_model_class(_Lookup)()
        model.compile(private_keras.SGD(MECHANISM, 0.1), loss=classification_loss())
        history = model.fit(make_batches((words, Y), MECHANISM), verbose=0)
        assert model.optimizer.steps_done == NUM_ROUNDS
        assert np.all(np.isfinite(history.history["loss"]))

    @pytest.mark.parametrize(
        ("make_options", "pieces", "use_formulas"),
        [(dict, 1, True), (dict, 1, False), (_microbatches, 2, False)],
        ids=["formulas", "one by one", "microbatches"],
    )
    def test_whose_it_is_reaches_neither_weights_nor_what_is_shown(
        self, make_options, pieces, use_formulas
    ):
        options = {"accumulation_steps": pieces, **make_options()}
        mechanism = options.get("mechanism", MECHANISM)
        pipeline = make_batches((X, Y), mechanism, pinned_seed=SAMPLING_SEED)
        elements = list(pipeline.dataset(pieces=pieces).take(pieces))
        is_example = np.concatenate([batch.is_example for batch in elements])
        outsider = max(set(np.flatnonzero(~is_example)) - set(pipeline.indices(0)))
        found = []
        for value in (X[outsider], np.nan, np.inf, 1e30):
            x = X.copy()
            x[outsider] = value
            model = private_model(metrics=["accuracy"], **options)
            model.use_layer_formulas = use_formulas
            model._tried = model._to_try()  # The trial would be of other rows.
            history = model.fit(
                make_batches((x, Y), mechanism, pinned_seed=SAMPLING_SEED),
                steps_per_epoch=pieces,
                verbose=0,
            ).history
            assert np.all(np.isfinite(history["loss"]))
            found.append((flat(model.get_weights()), *history.values()))
        for other in found[1:]:
            for one, same in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, same)

    @pytest.mark.parametrize("use_formulas", [True, False])
    @pytest.mark.parametrize("form", FORMS)
    def test_one_example_moves_the_sum_by_at_most_the_clip_norm(self, form, use_formulas):
        make_model, examples = FORMS[form]
        model = private_model(model=make_model())
        model.use_layer_formulas = use_formulas
        pipeline = make_batches(examples, MECHANISM, pinned_seed=1)
        batch = next(iter(pipeline.dataset()))
        clipped = tf.function(
            lambda batch: vars(model._clipped_sum(*taken(batch)[:4])), autograph=False
        )

        def total(is_example):
            result = clipped(batch._replace(is_example=tf.constant(is_example)))
            assert int(result["num_units"]) == is_example.sum()
            return flat(result["gradients"])

        whole = batch.is_example.numpy()
        assert 0 < whole.sum() < len(whole)
        moved = []
        for row in range(len(whole)):
            without = whole.copy()
            without[row] = False
            moved.append(np.linalg.norm(total(whole) - total(without)))
        assert np.max(moved) <= CLIP * (1 + 1e-5)
        assert np.max(moved) > CLIP / 2  # The bound is about something.
        np.testing.assert_array_equal(np.array(moved)[~whole], 0.0)
        assert not total(np.zeros_like(whole)).any()

    @pytest.mark.parametrize("examples", [X, (X,), {"a": X}], ids=["x", "(x,)", "dict"])
    def test_examples_without_labels_are_refused(self, examples):
        model = private_model(model=network())
        with pytest.raises(PrivacyError, match="have no labels"):
            model.fit(make_batches(examples, MECHANISM), verbose=0)
        assert model.optimizer.steps_done == 0

    @pytest.mark.parametrize(
        ("argument", "way_out"),
        [
            (
                {"sample_weight": np.ones(3)},
                r"give make_batches\(\(x, y, sample_weight\), \.\.\.\)",
            ),
            (
                {"class_weight": {0: 1.0, 1: 2.0, 2: 5.0}},
                r"make_batches\(\(x, y, weights\), \.\.\.\)",
            ),
            ({"validation_split": 0.1}, r"give validation_data=\(x, y\)"),
            ({"batch_size": 32}, "leave it out"),
            ({"y": np.zeros(3)}, r"give make_batches\(\(x, y\), \.\.\.\)"),
        ],
        ids=str,
    )
    def test_what_keras_takes_with_arrays_alone_is_refused(self, argument, way_out):
        (name,) = argument
        with pytest.raises(BandMFError, match=f"{name} does not go with a pipeline; .*{way_out}"):
            private_model().fit(batches(), verbose=0, **argument)

    def test_a_vocabulary_that_was_adapted_is_no_variable(self):
        words = np.array(["a", "b", "c"])[Y % 3][:, None]
        lookup = layers.StringLookup(output_mode="multi_hot")
        lookup.adapt(words)
        inputs = tf.keras.Input((1,), dtype="string")
        model = private_model(model=tf.keras.Model(inputs, layers.Dense(3)(lookup(inputs))))
        model.fit(make_batches((words, Y), MECHANISM), steps_per_epoch=1, verbose=0)
        assert model.optimizer.steps_done == 1

    @pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 takes such weights, and counts others as 1")
    def test_weights_of_some_outputs_alone_hear_what_to_write(self):
        inputs = tf.keras.Input((X.shape[1],))
        heads = {name: tf.keras.layers.Dense(3, name=name)(inputs) for name in "ab"}
        model = private_model(model=tf.keras.Model(inputs, heads))
        weights = {"a": np.ones(len(Y), np.float32)}
        with pytest.raises(BandMFError, match=r"nothing for the output 'b'.*np\.ones"):
            model.fit(make_batches((X, {"a": Y, "b": Y}, weights), MECHANISM), verbose=0)

    def test_a_plain_model_takes_a_batch_for_nothing(self):
        model = network()
        model.compile("sgd", classification_loss())
        with pytest.raises(ValueError, match="Data is expected"):
            model.fit(batches().dataset(), steps_per_epoch=1, verbose=0)


def _evidence(model):
    """Returns (steps, whether all of them are enforced) by optimizer and by record."""
    callback = private_keras.PrivacyCallback()
    callback.set_model(model)
    record = callback.record()
    optimizer = model.optimizer
    assert record.rounds_completed == optimizer.steps_done
    assert record.sampling_basis == ("enforced" if optimizer.sampling_is_enforced else "assumed")
    assert any("only assumed" in c for c in record.cautions) != optimizer.sampling_is_enforced
    return optimizer.steps_done, optimizer.sampling_is_enforced


def _half(model, pipeline=None):
    model.fit(pipeline or batches(), steps_per_epoch=2, verbose=0)
    assert _evidence(model) == (2, True)
    return model


class _KeepsBest(tf.keras.callbacks.Callback):
    """Is no checkpoint of the three that both Keras have, as Orbax's is not, and does the same."""

    monitor, save_best_only = "loss", True


class TestTokens:
    """Enforced are the batches that `fit` took from its pipeline, in order, and no others."""

    def test_a_batch_of_ones_own_makes_the_run_unchecked_for_good(self, tmp_path):
        model = private_model(pinned_seed=None)
        path = tmp_path / "record.json"
        record = private_keras.PrivacyCallback(path)
        pipeline = make_batches((X, Y), MECHANISM)
        model.fit(pipeline, steps_per_epoch=2, verbose=0, callbacks=[record])
        assert load_run_record(path).sampling_basis == "enforced"
        assert load_run_record(path).cautions == ()
        model.train_on_batch(X[:3], Y[:3])
        # The record knows it although no callback was given.
        assert load_run_record(path).sampling_basis == "assumed"
        assert load_run_record(path).rounds_completed == 3
        model.fit(pipeline, steps_per_epoch=2, verbose=0)
        assert load_run_record(path).rounds_completed == 5
        assert load_run_record(path).sampling_basis == "assumed"
        assert _evidence(model) == (5, False)
        # Nor does a restore forget.
        model.save_weights(tmp_path / "model.weights.h5")
        restored = private_model(pinned_seed=None)
        restored.load_weights(tmp_path / "model.weights.h5")
        assert restored.optimizer.batch_sizes_seen()["smallest"] >= 0
        assert not restored.optimizer.sampling_is_enforced

    def test_a_batch_taken_from_the_pipeline_by_hand_is_not(self):
        pipeline = batches()
        model = _half(private_model(), pipeline)
        batch = next(iter(pipeline.dataset(2)))
        assert not model.optimizer.is_next(batch)  # The right one, when no `fit` takes it.
        model.train_on_batch(batch)
        assert _evidence(model) == (3, False)

    def test_only_the_next_batch_of_the_right_pipeline_in_pieces_of_the_right_size_is(self):
        pipeline = batches()
        model = _half(private_model(), pipeline)
        optimizer = model.optimizer
        optimizer.expect_batches(pipeline)
        by_round = list(pipeline.dataset())
        assert [bool(optimizer.is_next(b)) for b in by_round[:4]] == [False, False, True, False]
        pieces = list(pipeline.dataset(pieces=2))
        assert not any(bool(optimizer.is_next(b)) for b in pieces)
        other = list(batches(pinned_seed=3).dataset())
        assert not any(bool(optimizer.is_next(b)) for b in other)
        forged = by_round[3]._replace(position=by_round[2].position)
        assert not optimizer.is_next(forged)
        mixed = Batch(*tf.nest.map_structure(lambda *t: tf.concat(t, 0), *by_round[2:4]))
        assert not optimizer.is_next(mixed)

    def test_a_step_of_ones_own_around_it_makes_the_run_unchecked(self):
        model = private_model()
        step = model.train_step

        def mixing(data):
            x, y = data.examples
            return step(data._replace(examples=(x + tf.roll(x, 1, 0), y)))

        model.train_step = mixing
        model.fit(batches(), steps_per_epoch=2, verbose=0)
        assert _evidence(model) == (2, False)

    def test_a_callback_that_trains_on_the_side_is_noticed(self, tmp_path):
        class OnTheSide(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 0:
                    self.model.train_on_batch(X[:4], Y[:4])
                    assert load_run_record(tmp_path / "record").sampling_basis == "assumed"

        model = private_model()
        callbacks = [private_keras.PrivacyCallback(tmp_path / "record"), OnTheSide()]
        model.fit(batches(), steps_per_epoch=3, verbose=0, callbacks=callbacks)
        assert not _evidence(model)[1]

    @pytest.mark.parametrize("where", ["class", "object"])
    def test_batches_that_are_drawn_or_changed_by_others_are_not_enforced(self, where):
        class Mine(PoissonBatches):
            pass

        pipeline = (Mine if where == "class" else PoissonBatches)((X, Y), MECHANISM.sampling)
        if where == "object":
            dataset = pipeline.dataset
            pipeline.dataset = lambda *args, **kwargs: dataset(*args, **kwargs).map(lambda b: b)
        model = private_model()
        model.fit(pipeline, steps_per_epoch=1, verbose=0)
        assert _evidence(model) == (1, False)

    def test_a_later_fit_keeps_the_dataset_unless_what_draws_it_changed(self, monkeypatch):
        made = []

        class Counted(PoissonBatches):
            def _dataset_for_fit(self, *args):  # Which `dataset` calls, too.
                made.append(args)
                return super()._dataset_for_fit(*args)

        monkeypatch.setattr(Counted, "is_own", property(lambda self: "_draw" not in vars(self)))
        pipeline = Counted((X, Y), MECHANISM.sampling, pinned_seed=SAMPLING_SEED)
        seen = []
        model = private_model()
        see = tf.keras.callbacks.LambdaCallback(
            on_train_end=lambda logs: seen.append(model.optimizer.steps_done)
        )

        def fit(steps=1):
            model.fit(pipeline, steps_per_epoch=steps, verbose=0, callbacks=[see])
            return len(made)

        assert [fit(), fit(2), fit()] == [1, 1, 1]
        assert seen == [1, 3, 4]
        assert _evidence(model) == (4, True)  # Every fit began where the last one had ended.
        draw = pipeline._draw
        pipeline._draw = lambda parts, i: draw(parts, i * 0)
        assert fit() == 2
        assert not _evidence(model)[1]
        del pipeline._draw
        assert fit() == 3  # What was drawn meanwhile is not kept.
        pipeline.seed.assign(pipeline.seed + 1)
        assert model._guard_of(pipeline).dataset(1) is not None
        assert len(made) == 4

    def test_another_scheme_that_is_stated_afterwards_is_not_enforced(self):
        scheme = PoissonSampling(NUM_ROUNDS, 3, 0.01)
        model = _half(private_model())
        with pytest.raises(SamplingError, match="another scheme"):
            model.fit(make_batches((X, Y), scheme), verbose=0)
        assert _evidence(model) == (2, False)
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        assert _evidence(model) == (3, True)

    def test_another_partition_is_refused_when_the_model_was_not_built_at_first(self):
        model = private_keras.PrivateSequential([layers.Dense(3)])
        model.compile(private_keras.SGD(MECHANISM, batch_size=6), loss=classification_loss())
        model.fit(make_batches((X, Y), MECHANISM), steps_per_epoch=1, verbose=0)
        with pytest.raises(SamplingError, match="another random partition"):
            model.fit(make_batches((X, Y), MECHANISM), steps_per_epoch=1, verbose=0)
        assert _evidence(model) == (1, True)

    def test_another_data_set_under_the_same_seed_is_refused(self):
        model = _half(private_model())
        fewer = make_batches((X[:-1], Y[:-1]), MECHANISM, pinned_seed=2)
        with pytest.raises(SamplingError, match="another random partition"):
            model.fit(fewer, steps_per_epoch=1, verbose=0)

    def test_a_smaller_probability_in_the_middle_of_a_run_is_refused(self):
        scheme = PoissonSampling(NUM_ROUNDS, 1, 0.1)
        model = private_model(mechanism=make_mechanism(identity(NUM_ROUNDS), sampling=scheme))
        model.fit(make_batches((X, Y), scheme), steps_per_epoch=1, verbose=0)
        model.fit(make_batches((X, Y), scheme), steps_per_epoch=1, verbose=0)  # No partition.
        less = make_batches((X, Y), PoissonSampling(NUM_ROUNDS, 1, 0.05))
        with pytest.raises(SamplingError, match="another scheme"):
            model.fit(less, steps_per_epoch=1, verbose=0)

    def test_a_new_run_on_old_weights_is_a_caution_that_stays(self, tmp_path):
        model = _half(private_model())
        model.start_new_run()
        for _ in range(2):  # In all kinds of files of weights.
            for name in ("a.weights.h5", *([] if IS_KERAS_3 else ["a.hdf5"])):
                model.save_weights(tmp_path / name)
                model = private_model()
                model.load_weights(tmp_path / name)
        model.start_new_run()
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        callback = private_keras.PrivacyCallback()
        callback.set_model(model)
        assert any("hold 2 private steps of earlier runs" in c for c in callback.record().cautions)

    def test_pinned_noise_is_not_forgotten_by_a_restore(self, tmp_path):
        _half(private_model()).save_weights(tmp_path / "model.weights.h5")
        model = private_model(pinned_seed=None)
        model.load_weights(tmp_path / "model.weights.h5")
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        assert model.optimizer.has_pinned_seed
        assert model.optimizer.has_pinned_sampling

    def test_what_steers_by_training_metrics_is_refused(self):
        model = private_model()
        for callback in (
            tf.keras.callbacks.EarlyStopping(monitor="loss"),
            tf.keras.callbacks.ReduceLROnPlateau(monitor="accuracy"),
            tf.keras.callbacks.ModelCheckpoint("never.keras", monitor="loss", save_best_only=True),
            tf.keras.callbacks.TerminateOnNaN(),  # One example can end the run.
            tf.keras.callbacks.CallbackList([tf.keras.callbacks.EarlyStopping(monitor="loss")]),
            _KeepsBest(),
        ):
            with pytest.raises(PrivacyError, match="lets the training examples choose"):
                model.fit(batches(), verbose=0, callbacks=[callback])
        assert model.optimizer.steps_done == 0

    @pytest.mark.parametrize(("name", "run_eagerly"), [("val_accuracy", False), ("epsilon", True)])
    def test_a_training_metric_under_another_name_is_refused(self, name, run_eagerly):
        metric = tf.keras.metrics.SparseCategoricalAccuracy(name=name)
        model = private_model(metrics=[metric], run_eagerly=run_eagerly)
        stop = tf.keras.callbacks.EarlyStopping(monitor=name)
        # Names are known when the step is traced, where TensorFlow wraps errors in its own.
        with pytest.raises(Exception, match=f"'{name}' lets the training examples choose"):
            model.fit(batches(), verbose=0, callbacks=[stop])
        assert model.optimizer.steps_done == int(model.optimizer.noise_stream.round) == 0
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        with pytest.raises(PrivacyError, match=f"'{name}' lets the training examples choose"):
            model.fit(batches(), verbose=0, callbacks=[stop])
        assert model.optimizer.steps_done == 1

    def test_what_steers_by_other_numbers_is_not(self):
        stop = tf.keras.callbacks.EarlyStopping(monitor="epsilon", mode="max")
        plateau = tf.keras.callbacks.ReduceLROnPlateau(monitor="val_loss")
        model = private_model()
        model.fit(
            batches(),
            epochs=2,
            steps_per_epoch=1,
            verbose=0,
            validation_data=(X, Y),
            callbacks=[private_keras.PrivacyCallback(), stop, plateau],
        )
        assert model.optimizer.steps_done == 2
        alone = private_model()
        alone.fit(batches(), steps_per_epoch=2, verbose=0)
        np.testing.assert_array_equal(flat(model.get_weights()), flat(alone.get_weights()))

    def test_workers_that_would_each_draw_for_themselves_are_refused(self):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Of one worker, here.
        with strategy.scope():
            model = private_model()
        with pytest.raises(PrivacyError, match="Replicas must be those of one process"):
            model.fit(batches(), verbose=0)
        assert model.optimizer.steps_done == 0


class TestCounting:
    """A step counts when its update is applied, and the record is there before."""

    def test_a_batch_that_fails_leaves_the_run_where_it_was(self):
        fails = tf.Variable(True)

        def fetch(indices):
            tf.debugging.assert_equal(fails, False, message="the disk is gone")
            return tf.gather(X, indices), tf.gather(Y, indices)

        model = private_model()
        with pytest.raises(tf.errors.InvalidArgumentError, match="the disk is gone"):
            model.fit(make_batches(fetch, MECHANISM, dataset_size=60), verbose=0)
        start = flat(model.get_weights())
        assert int(model.optimizer.noise_stream.round) == model.optimizer.steps_done == 0
        fails.assign(False)
        model.fit(make_batches(fetch, MECHANISM, dataset_size=60), steps_per_epoch=2, verbose=0)
        assert _evidence(model) == (2, True)
        assert np.abs(flat(model.get_weights()) - start).max() > 0

    @pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"run_eagerly": True}])
    def test_so_does_an_example_that_the_model_or_a_metric_cannot_take(self, options):
        class Picky(tf.keras.metrics.Mean):
            def update_state(self, y, *_, **__):
                check = tf.debugging.assert_less(tf.cast(y, tf.int64), tf.constant(3, tf.int64))
                with tf.control_dependencies([check] if check is not None else []):
                    return super().update_state(0.0)

        model = private_model(sampling="unchecked", metrics=[Picky()], **options)
        steps = 1 if "accumulation_steps" not in options else 2
        model.fit(X[:6], Y[:6], batch_size=6 // steps, verbose=0)
        before = flat(model.get_weights())
        for labels in (np.full(6, 3), np.full(6, 77)):
            with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
                model.train_on_batch(X[:6], labels)
            optimizer = model.optimizer
            assert int(optimizer.noise_stream.round) == optimizer.steps_done == 1
            assert int(optimizer.pieces_done) == 0
            np.testing.assert_array_equal(flat(model.get_weights()), before)
        model.fit(X[:6], Y[:6], batch_size=6 // steps, verbose=0)
        assert model.optimizer.steps_done == 2

    def test_a_generator_that_ends_does_not_end_the_run(self):
        def generator():
            for _ in range(3):
                yield X[:6], Y[:6]

        model = private_model(sampling="unchecked")
        model.use_layer_formulas = False  # Keras does not know the shapes of what it generates.
        for expected in (3, 6):
            model.fit(generator(), epochs=2, steps_per_epoch=3, verbose=0)
            assert model.optimizer.steps_done == expected
            assert int(model.optimizer.noise_stream.round) == expected

    def test_after_the_last_round_fit_refuses_and_the_record_stays(self, tmp_path):
        path = tmp_path / "record.json"
        model = private_model()
        callback = private_keras.PrivacyCallback(path)
        model.fit(batches(), epochs=3, steps_per_epoch=5, verbose=0, callbacks=[callback])
        assert load_run_record(path).rounds_completed == NUM_ROUNDS
        written = path.read_bytes()
        for callbacks in ([callback], [private_keras.PrivacyCallback(path)], []):
            with pytest.raises(PrivacyError, match="All 12 steps of the mechanism are done"):
                model.fit(batches(), steps_per_epoch=5, verbose=0, callbacks=callbacks)
            assert path.read_bytes() == written
        assert _evidence(model) == (NUM_ROUNDS, True)

    @pytest.mark.parametrize("steps_per_execution", [1, 4])
    def test_the_record_is_ahead_of_every_result(self, tmp_path, steps_per_execution):
        path = tmp_path / "record.json"
        told = []

        class Reader(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                told.append((load_run_record(path).rounds_completed, self.model.optimizer))

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    raise KeyboardInterrupt

        model = private_model(steps_per_execution=steps_per_execution)
        callbacks = [Reader(), private_keras.PrivacyCallback(path)]  # The reader comes first.
        steps = []
        original = type(model).train_step

        def noting(self, data):
            shown = original(self, data)
            with tf.control_dependencies(tf.nest.flatten(shown)):
                tf.py_function(lambda: steps.append(load_run_record(path).rounds_completed), [], [])
            return shown

        model.train_step = noting.__get__(model)
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(), epochs=2, verbose=0, callbacks=callbacks)
        done = 8 if IS_KERAS_3 and steps_per_execution == 4 else 6  # It ends no execution early.
        assert len(steps) == done
        assert all(said >= step for step, said in enumerate(steps, start=1))
        assert load_run_record(path).rounds_completed >= model.optimizer.steps_done == done


class TestSameRecord:
    """Steps that a record told of before are not taken again without a caution."""

    def _fit(self, model, path, steps=2, **options):
        callbacks = [private_keras.PrivacyCallback(path, **options)]
        model.fit(batches(), steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        record = load_run_record(path)
        assert record.rounds_completed == model.optimizer.steps_done
        return any("were taken again" in caution for caution in record.cautions)

    @pytest.mark.parametrize("process", ["same", "new"])
    def test_after_a_return_to_an_older_state(self, tmp_path, process):
        path = tmp_path / "record.json"
        model = private_model()
        assert not self._fit(model, path)
        older = tf.train.Checkpoint(model=model).write(str(tmp_path / "older"))
        assert not self._fit(model, path)
        model = model if process == "same" else private_model()
        tf.train.Checkpoint(model=model).read(older)
        assert self._fit(model, path, steps=1)
        assert self._fit(model, path, steps=3)
        newer = tf.train.Checkpoint(model=model).write(str(tmp_path / "newer"))
        model = private_model()  # As a later process, which takes no step again.
        tf.train.Checkpoint(model=model).read(newer)
        assert self._fit(model, path)

    def test_not_if_nobody_has_seen_the_first_ones(self, tmp_path):
        path = tmp_path / "record.json"
        for _ in range(2):
            assert not self._fit(private_model(), path, undone_steps_unseen=True)
        assert self._fit(private_model(), path)

    def test_not_after_an_interruption_without_a_return(self, tmp_path, monkeypatch):
        class Interrupted(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise KeyboardInterrupt

        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        model = private_model()
        callbacks = [private_keras.PrivacyCallback("record.json"), Interrupted()]
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(), verbose=0, callbacks=callbacks)
        monkeypatch.chdir(tmp_path / "elsewhere")  # The record stays where it was.
        model.train_on_batch(X[:3], Y[:3])
        assert load_run_record(tmp_path / "record.json").rounds_completed == 2
        assert not self._fit(model, tmp_path / "record.json")


def _check_refused(model, message, **options):
    for train in (
        lambda: model.fit(batches(), steps_per_epoch=1, verbose=0, **options),
        lambda: model.train_on_batch(X[:3], Y[:3]),
    ):
        with pytest.raises(PrivacyError, match=message):
            train()


class TestHowKerasRunsIt:
    def test_two_threads_are_not_given_the_same_noise(self):
        model = private_model(sampling="unchecked")
        same_layers = private_keras.make_private(private_keras.to_public(model))
        same_layers.compile(model.optimizer, model.loss)
        refusals = []

        class Meanwhile(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                thread = threading.Thread(target=train)
                thread.start()
                thread.join()

        def train():
            for other in (model, same_layers):
                with pytest.raises(PrivacyError, match="Another thread is training") as refusal:
                    other.train_on_batch(X[:3], Y[:3])
                refusals.append(refusal)

        model.fit(batches(), steps_per_epoch=2, verbose=0, callbacks=[Meanwhile()])
        assert len(refusals) == 4
        assert _evidence(model) == (2, True)

    def test_epsilon_of_several_steps_at_once_is_that_after_all_of_them(self):
        shown = []

        class Reader(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                shown.append(logs["epsilon"])

        model = private_model(steps_per_execution=5)
        callbacks = [private_keras.PrivacyCallback(), Reader()]
        model.fit(batches(), verbose=0, callbacks=callbacks)
        expected = [shown_epsilon(epsilon_after(MECHANISM, t)) for t in (5, 10, 12)]
        np.testing.assert_allclose(shown, expected, rtol=1e-6)

    @pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 makes the averages itself.")
    def test_averages_of_weights_that_nobody_makes_are_refused(self):
        model = private_model(use_ema=True, accumulation_steps=2)
        with pytest.raises(Exception, match="leave out use_ema=True"):  # Keras wraps it.
            model.fit(batches(), steps_per_epoch=2, verbose=0)

    @pytest.mark.keras2
    def test_a_number_of_steps_that_changes_on_the_way_is_refused(self):
        model = private_model(steps_per_execution="auto")
        model.enable_tune_steps_per_execution = True
        with pytest.raises(PrivacyError, match="steps_per_execution must not change"):
            model.fit(batches(), verbose=0)

    def test_an_optimizer_that_was_not_compiled_is_refused(self, tmp_path):
        """Keras would go on with the one it has traced, and the record tell of the other."""
        model = _half(private_model())
        weights, old = flat(model.get_weights()), model.optimizer
        model.start_new_run()
        model.optimizer = private_keras.SGD(MECHANISM, 0.1, sampling="unchecked")
        record = private_keras.PrivacyCallback(tmp_path / "record.json")
        _check_refused(model, "another optimizer than it was compiled with", callbacks=[record])
        assert old.steps_done == 2
        np.testing.assert_array_equal(flat(model.get_weights()), weights)
        assert not (tmp_path / "record.json").exists()

    @pytest.mark.parametrize("run_eagerly", [False, True])
    def test_an_optimizer_of_another_model_is_refused_and_goes_on(self, run_eagerly):
        first = private_model(run_eagerly=run_eagerly)
        second = private_keras.make_private(network())
        second.compile(first.optimizer, classification_loss(), run_eagerly=run_eagerly)
        _half(first)
        _check_refused(second, "not those that the noise was made for")
        assert int(first.optimizer.noise_stream.round) == 2
        first.fit(batches(), steps_per_epoch=1, verbose=0)
        assert _evidence(first) == (3, True)

    def test_layers_trained_by_another_private_model_are_refused(self):
        base = network()
        first, second = private_model(model=base), private_model(model=base, sampling="unchecked")
        _half(first)
        _check_refused(second, "2 private steps of another private model")
        second.start_new_run()
        _half(second)
        callback = private_keras.PrivacyCallback()
        callback.set_model(second)
        assert any("hold 2 private steps of earlier" in c for c in callback.record().cautions)
        with pytest.raises(PrivacyError, match="4 private steps of another private model"):
            first.fit(batches(), steps_per_epoch=1, verbose=0)

    @pytest.mark.parametrize("way", ["frozen", "loaded", "restored"])
    def test_so_are_they_in_another_model(self, way, tmp_path):
        first = _half(private_model())
        if way == "loaded":
            first.save(tmp_path / "model.keras")
            first = private_keras.load_model(tmp_path / "model.keras")
        elif way == "restored":
            path = tf.train.Checkpoint(first).write(str(tmp_path / "checkpoint"))
            first = private_model()
            tf.train.Checkpoint(first).restore(path)
        hidden = first.layers[0]
        hidden.trainable = way != "frozen"
        tuned = tf.keras.Sequential([layers.Input((4,)), hidden, layers.Dense(3)])
        second = private_model(model=tuned)
        _check_refused(second, "2 private steps of another private model")
        second.start_new_run()
        _half(second)
        assert second.earlier_steps == 2

    def test_files_of_callbacks_are_for_their_owner_only(self, tmp_path):
        before = os.umask(0o022)
        try:
            callbacks = [
                tf.keras.callbacks.CSVLogger(tmp_path / "metrics.csv"),
                tf.keras.callbacks.TensorBoard(tmp_path / "board"),
            ]
            private_model().fit(batches(), steps_per_epoch=1, verbose=0, callbacks=callbacks)
            assert os.umask(0o022) == 0o022
        finally:
            os.umask(before)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) >= 2
        assert not [path for path in files if path.stat().st_mode & 0o077]

    def test_xla_for_a_whole_step_is_refused(self):
        model = private_model(sampling="unchecked")
        model.jit_compile = True
        _check_refused(model, "jit_compile")

    @pytest.mark.parametrize("wrong", ["iterations", "mechanism"])
    def test_guards_hold_under_xla_where_assertions_do_not(self, wrong):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        optimizer.build([variable])
        if wrong == "iterations":
            optimizer.iterations.assign(3)
        else:
            optimizer._fingerprints.assign([1, 0])

        gradients = optimizer.clipped_gradients(lambda x: x * variable, tf.ones([2, 1]), [variable])
        tf.function(lambda: optimizer.apply_gradients(gradients), jit_compile=True)()
        assert np.isnan(variable.numpy()).all()

    @pytest.mark.parametrize(
        "options",
        [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}],
        ids=lambda o: next(iter(o)),
    )
    def test_gradients_that_are_not_summed_over_replicas_are_refused(self, options):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        gradients = optimizer.clipped_gradients(lambda x: x * variable, tf.ones([2, 1]), [variable])
        with pytest.raises(PrivacyError, match="summed over replicas"):
            optimizer.apply_gradients(gradients, **options)
        np.testing.assert_array_equal(variable, [1.0])
