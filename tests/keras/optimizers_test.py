"""The noise that reaches the weights is the mechanism's, whatever TensorFlow does around it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import cases
from bandmf_tf import keras as private_keras
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.participation import FixedEpochs
from bandmf_tf.factorization.strategies import BandedStrategy, DenseStrategy
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.keras.batches import SamplingError, cyclic_scheme, make_batches
from bandmf_tf.keras.optimizers import ClippedGradients, PrivacyError
from bandmf_tf.mechanisms.files import load_mechanism, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise import stream as noise_stream
from cases import (
    BATCH_SIZE,
    MECHANISM,
    NUM_PARTS,
    NUM_ROUNDS,
    SCHEME,
    STRATEGY,
    X,
    Y,
    batches,
    flat,
    make_mechanism,
    network,
    noise_rows,
    private_model,
    zero_loss,
)


class Trajectory(tf.keras.callbacks.Callback):
    """Notes the weights after every step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        self.weights.append(flat(self.model.get_weights()))


def _mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


WAYS = {
    "compiled": {},
    "eager": {"run_eagerly": True},
    "several steps at once": {"steps_per_execution": 4},
    "accumulated": {"accumulation_steps": 3},
}


class TestProofOfNoise:
    """With zero gradients and learning rate 1 the trajectory is the prefix sums of C^-1 z."""

    def _check(self, model, accumulation_steps=1, callback=None):
        start = flat(model.get_weights())
        trajectory = callback or Trajectory()
        model.fit(batches(), epochs=3, verbose=0, callbacks=[trajectory])
        expected = start - np.cumsum(noise_rows(model.trainable_variables), axis=0)
        every = NUM_ROUNDS * accumulation_steps // len(trajectory.weights)
        steps = np.array(trajectory.weights)[accumulation_steps - 1 :: accumulation_steps]
        steps = steps if every == 1 or accumulation_steps > 1 else np.array(trajectory.weights)
        wanted = expected if accumulation_steps > 1 else expected[every - 1 :: every]
        np.testing.assert_allclose(steps, wanted, atol=1e-5)
        assert np.abs(expected - start).max() > 1.0
        assert model.optimizer.sampling_is_enforced
        np.testing.assert_array_equal(
            model.optimizer.noise_stream.round.numpy(), model.optimizer.steps_done
        )

    @pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
    def test_under_fit(self, options):
        model = private_model(loss=zero_loss, learning_rate=1.0, batch_size=1, **options)
        self._check(model, options.get("accumulation_steps", 1))

    @pytest.mark.parametrize(("accumulation_steps", "tile_bytes"), [(1, None), (2, 16)])
    def test_two_replicas_get_one_row_together(self, accumulation_steps, tile_bytes, monkeypatch):
        if tile_bytes is not None:  # Of which every replica keeps and makes some.
            monkeypatch.setattr(noise_stream, "_TILE_BYTES", tile_bytes)
        with _mirrored().scope():
            model = private_model(
                loss=zero_loss,
                learning_rate=1.0,
                batch_size=1,
                accumulation_steps=accumulation_steps,
            )
        self._check(model, accumulation_steps)
        devices = {v[0].device[-5:] for v in model.optimizer.noise_stream._variables()}
        assert devices == ({"CPU:0", "CPU:1"} if tile_bytes else {"CPU:0"})

    def test_one_row_per_replica_would_be_noticed(self):
        rows = noise_rows(network().trainable_variables)
        assert np.abs(np.cumsum(2 * rows, axis=0) - np.cumsum(rows, axis=0)).max() > 1.0

    @pytest.mark.keras2
    def test_under_fit_of_a_plain_model_with_unreduced_losses(self):
        """A plain model calls `minimize` with a tape; the loss has one entry for each example."""
        model = network()
        loss = tf.keras.losses.CosineSimilarity(reduction="none")  # Flat around zero labels.
        optimizer = private_keras.SGD(
            MECHANISM, 1.0, batch_size=1, sampling="unchecked", pinned_seed=cases.NOISE_SEED
        )
        model.compile(optimizer, loss=loss)
        start, trajectory = flat(model.get_weights()), Trajectory()
        x = tf.zeros([3 * NUM_ROUNDS, 4])
        model.fit(x, tf.zeros([len(x), 3]), batch_size=3, verbose=0, callbacks=[trajectory])
        expected = start - np.cumsum(noise_rows(model.trainable_variables), axis=0)
        np.testing.assert_allclose(trajectory.weights, expected, atol=1e-5)

    @pytest.mark.parametrize("base", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax"])
    def test_every_optimizer_sees_the_noised_mean(self, base):
        """The private optimizer does to weights what the base does on noised gradients."""
        plain_class = getattr(tf.keras.optimizers, base)
        options = {"momentum": 0.9} if base == "SGD" else {}
        plain = plain_class(0.1, **options)
        private = private_keras.make_private_class(plain_class)(
            MECHANISM, 0.1, batch_size=4, sampling="unchecked", pinned_seed=3, **options
        )
        expected, variable = tf.Variable([1.0, -2.0, 3.0]), tf.Variable([1.0, -2.0, 3.0])
        rows = noise_rows([variable], pinned_seed=3)
        data = np.random.default_rng(1).normal(size=(NUM_ROUNDS, 4, 3)).astype(np.float32)

        @tf.function(autograph=False)
        def step(batch):
            def loss(x):
                return tf.linalg.matvec(x, variable)

            private.apply_gradients(private.clipped_gradients(loss, batch, [variable]))

        for row, batch in zip(rows, data, strict=True):
            step(batch)
            norms = np.linalg.norm(batch, axis=1, keepdims=True)
            clip = MECHANISM.l2_norm_clip
            total = np.sum(batch * np.minimum(1.0, clip / norms), axis=0)
            plain.apply_gradients([(tf.constant((total + row) / 4, tf.float32), expected)])
            np.testing.assert_allclose(variable, expected, atol=2e-5)


class TestDenominator:
    def test_it_is_fixed_and_not_the_size_of_the_batch(self):
        model = network()
        optimizer = private_keras.SGD(
            MECHANISM, 1.0, batch_size=7, sampling="unchecked", pinned_seed=1
        )
        rows = noise_rows(model.trainable_variables, 3, pinned_seed=1)

        @tf.function(autograph=False, reduce_retracing=True)
        def step(x, y, mask):
            def loss(example):
                return cases.classification_loss()(example[1], model(example[0]))

            gradients = optimizer.clipped_gradients(loss, (x, y), model.trainable_variables, mask)
            optimizer.apply_gradients(gradients)
            return flat_tensor([g for g, _ in gradients])

        for row, size in zip(rows, (5, 2, 0), strict=True):  # Mixed sizes, an empty batch too.
            before = flat(model.get_weights())
            mask = tf.range(5) < size
            total = step(X[:5], Y[:5], mask)
            moved = before - flat(model.get_weights())
            np.testing.assert_allclose(moved, (total + row) / 7, atol=1e-6)
        assert optimizer.batch_sizes_seen() == {
            "smallest": 0,
            "largest": 5,
            "mean": pytest.approx(7 / 3),
        }

    def test_it_comes_from_the_pipeline_or_the_plan(self):
        assert private_keras.SGD(MECHANISM, sampling=batches()).batch_size == BATCH_SIZE
        with pytest.raises(PrivacyError, match="batch_size is not known"):
            _ = private_keras.SGD(MECHANISM).batch_size


def flat_tensor(tensors):
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


class TestClipping:
    def test_fit_adds_clipped_gradients_of_the_examples_in_the_batch(self):
        pipeline = batches()
        model = private_model(learning_rate=1.0, batch_size=1)
        trajectory, start = Trajectory(), flat(model.get_weights())
        rows = noise_rows(model.trainable_variables)
        model.fit(pipeline, verbose=0, callbacks=[trajectory])
        reference, weights = network(), start
        for i in range(NUM_ROUNDS):
            _set_flat(reference, weights)
            total = np.zeros_like(start)
            for example in pipeline.indices(i):
                with tf.GradientTape() as tape:
                    logits = reference(X[example : example + 1])
                    loss = cases.classification_loss()(Y[example : example + 1], logits)
                gradient = flat(tape.gradient(loss, reference.trainable_variables))
                clip = MECHANISM.l2_norm_clip
                total += gradient * min(1.0, clip / np.linalg.norm(gradient))
            weights = weights - total - rows[i]
            np.testing.assert_allclose(trajectory.weights[i], weights, rtol=1e-4, atol=1e-4)
            weights = trajectory.weights[i]

    def test_two_replicas_clip_and_sum_what_one_would(self):
        single = private_model(batch_size=BATCH_SIZE)
        single.fit(batches(), verbose=0)
        with _mirrored().scope():
            double = private_model(batch_size=BATCH_SIZE)
        double.fit(batches(), verbose=0)
        np.testing.assert_allclose(
            flat(double.get_weights()), flat(single.get_weights()), atol=1e-5
        )
        assert double.optimizer.batch_sizes_seen() == single.optimizer.batch_sizes_seen()

    def test_accumulated_pieces_give_the_step_of_the_whole_batch(self):
        whole = private_model("Adam")
        whole.fit(batches(), verbose=0)
        pieces = private_model("Adam", accumulation_steps=4)
        pieces.fit(batches(), verbose=0)
        np.testing.assert_allclose(flat(pieces.get_weights()), flat(whole.get_weights()), atol=2e-5)
        assert pieces.optimizer.steps_done == NUM_ROUNDS
        assert pieces.optimizer.batch_sizes_seen() == whole.optimizer.batch_sizes_seen()

    def test_accumulation_decays_weights_and_keeps_constraints(self):
        def constrained():
            model = network()
            model.layers[0].kernel_constraint = tf.keras.constraints.NonNeg()
            model.layers[0].kernel._constraint = tf.keras.constraints.NonNeg()
            return model

        results = []
        for accumulation_steps in (1, 2):
            model = private_model(
                "AdamW",
                model=constrained(),
                weight_decay=0.1,
                accumulation_steps=accumulation_steps,
            )
            model.fit(batches(), verbose=0)
            results.append(flat(model.get_weights()))
            assert np.all(model.layers[0].kernel.numpy() >= 0.0)
        np.testing.assert_allclose(results[0], results[1], atol=2e-5)


def _set_flat(model, values):
    weights, start = [], 0
    for w in model.get_weights():
        weights.append(values[start : start + w.size].reshape(w.shape))
        start += w.size
    model.set_weights(weights)


class TestRefusals:
    @pytest.mark.keras2
    def test_a_reduced_loss_of_a_plain_model(self):
        model = network()
        model.compile(private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked"), loss="mse")
        with pytest.raises(Exception, match="one number for the whole batch"):
            model.fit(X, np.zeros((len(X), 3)), verbose=0)

    def test_the_short_way_of_keras_3_to_apply_gradients(self):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        optimizer.build([variable])
        clipped = optimizer.clipped_gradients(lambda x: x * variable, tf.ones([2, 1]), [variable])
        for _ in range(2):
            before = variable.numpy()
            with pytest.raises(PrivacyError, match="apply adds no noise"):
                optimizer.apply([tf.constant([1.0])], [variable])
            np.testing.assert_array_equal(variable, before)
            optimizer.apply_gradients(clipped)
        assert optimizer.steps_done == 2

    @pytest.mark.parametrize("wrap", [list, iter, tuple])
    def test_gradients_that_it_did_not_clip(self, wrap):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        with pytest.raises(PrivacyError, match="takes what clipped_gradients"):
            optimizer.apply_gradients(wrap([(tf.constant([1.0]), variable)]))
        np.testing.assert_array_equal(variable, [1.0])

    def test_gradients_that_another_optimizer_clipped_to_more(self):
        variable = tf.Variable([1.0])
        less, more = (
            private_keras.SGD(
                private_keras.BareMechanism(STRATEGY, noise_multiplier=1.0, l2_norm_clip=clip),
                batch_size=1,
            )
            for clip in (0.7, 10.0)
        )
        gradients = more.clipped_gradients(lambda x: 9 * x * variable, tf.ones([2, 1]), [variable])
        with pytest.raises(PrivacyError, match="clipped to 10 by another optimizer"):
            less.apply_gradients(gradients)
        np.testing.assert_array_equal(variable, [1.0])

    def test_steps_past_the_last_planned_one(self):
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        variable = tf.Variable([1.0])

        @tf.function(autograph=False)
        def step():
            gradients = optimizer.clipped_gradients(
                lambda x: x * variable, tf.ones([2, 1]), [variable]
            )
            optimizer.apply_gradients(gradients)

        for _ in range(NUM_ROUNDS):
            step()
        last = variable.numpy()
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="planned for num_rounds=12"):
                step()
        np.testing.assert_array_equal(variable, last)

    def test_training_without_a_word_on_sampling(self):
        optimizer = private_keras.SGD(MECHANISM, batch_size=1)
        variable = tf.Variable([1.0])
        gradients = optimizer.clipped_gradients(lambda x: x * variable, tf.ones([2, 1]), [variable])
        with pytest.raises(SamplingError, match="how batches are drawn"):
            optimizer.apply_gradients(gradients)

    def test_batches_that_break_the_plan(self):
        for scheme in (
            cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, len(X)),
            PoissonSampling(NUM_ROUNDS, cases.NUM_PARTS, 0.9),
        ):
            with pytest.raises(SamplingError):
                private_keras.SGD(MECHANISM, sampling=scheme)
            with pytest.raises(SamplingError):
                private_keras.SGD(MECHANISM, sampling=make_batches((X, Y), scheme))
        private_keras.SGD(MECHANISM, sampling="unchecked")  # Told explicitly.

    def test_microbatches_of_poisson_samples(self):
        with pytest.raises(SamplingError, match="microbatch_size must be 1"):
            private_keras.SGD(MECHANISM, sampling=batches(), microbatch_size=2)

    def test_other_variables_than_before(self):
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")

        def gradients(variable):
            return optimizer.clipped_gradients(
                lambda x: tf.reduce_sum(x) * tf.reduce_sum(variable), tf.ones([2, 1]), [variable]
            )

        optimizer.apply_gradients(gradients(tf.Variable([1.0])))
        with pytest.raises(PrivacyError, match="not those that the noise was made for"):
            optimizer.apply_gradients(gradients(tf.Variable([1.0, 2.0])))

    @pytest.mark.parametrize("clip", [1e-37, 1e37])
    def test_noise_that_float32_cannot_hold(self, clip):
        with pytest.raises(PrivacyError, match="vanishes or overflows in float32"):
            private_keras.SGD(private_keras.BareMechanism(STRATEGY, 1.0, clip), 0.1)

    def test_noise_that_nobody_has_named(self):
        with pytest.raises(PrivacyError, match=r"needs a mechanism first: Adam\('plan.bandmf'"):
            private_keras.Adam(learning_rate=0.1)
        with pytest.raises(TypeError, match=r"a mechanism or the path .* Found 0\.1"):
            private_keras.Adam(0.1)

    def test_legacy_optimizers(self):
        with pytest.raises(TypeError, match="legacy"):
            private_keras.make_private_class(tf.keras.optimizers.legacy.SGD)

    def test_an_optimizer_whose_noise_was_left_behind(self):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1, sampling="unchecked")
        optimizer.iterations.assign(3)  # As a checkpoint of another optimizer would.
        gradients = optimizer.clipped_gradients(lambda x: x * variable, tf.ones([2, 1]), [variable])
        with pytest.raises(tf.errors.InvalidArgumentError, match="left the noise behind"):
            optimizer.apply_gradients(gradients)


class TestSources:
    def test_a_mechanism_file_is_enough(self, tmp_path):
        save_mechanism(MECHANISM, tmp_path / "plan.bandmf")
        optimizer = private_keras.SGD(tmp_path / "plan.bandmf", learning_rate=0.5, batch_size=6)
        assert optimizer.mechanism.noise_multiplier == MECHANISM.noise_multiplier
        assert optimizer.l2_norm_clip == MECHANISM.l2_norm_clip

    @pytest.mark.parametrize("scheme", [SCHEME, BallsInBins(NUM_ROUNDS, NUM_PARTS)])
    def test_a_file_that_states_another_epsilon_trains_nothing(self, tmp_path, scheme):
        """Whoever writes a file can seal it again, with a certificate to fit."""
        mechanism = make_mechanism(STRATEGY, sampling=scheme)
        edited = dataclasses.replace(mechanism.guarantee, epsilon=0.8 * mechanism.epsilon)
        if edited.certificate is not None:
            forged = dataclasses.replace(edited.certificate, epsilon=edited.epsilon)
            edited = dataclasses.replace(edited, certificate=forged)
        path = tmp_path / "plan.bandmf"
        save_mechanism(dataclasses.replace(mechanism, guarantee=edited), path)
        for source in (path, load_mechanism(path)):
            with pytest.raises(BandMFError, match=r"states epsilon|its seed gives|not supported"):
                private_keras.SGD(source, learning_rate=0.5, batch_size=6)

    @pytest.mark.parametrize(
        "strategy",
        [
            STRATEGY,
            BandedStrategy(STRATEGY.to_banded().bands),
            TreeStrategy(NUM_ROUNDS, "online", 0.5),
            BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.5]), NUM_ROUNDS, 0.5),
            InverseBandedStrategy(np.array([1.0, -0.5, -0.125]), NUM_ROUNDS),
            DenseStrategy(STRATEGY.materialize()),
        ],
        ids=lambda s: type(s).__name__,
    )
    def test_a_strategy_and_its_noise_are_enough(self, strategy):
        bare = private_keras.BareMechanism(strategy, noise_multiplier=1.5, l2_norm_clip=2.0)
        optimizer = private_keras.Adam(bare, 0.1, batch_size=3)
        copy = private_keras.Adam.from_config(optimizer.get_config())
        np.testing.assert_array_equal(copy.mechanism.strategy.materialize(), strategy.materialize())
        assert copy.mechanism.stddev == 3.0
        variable = tf.Variable(tf.zeros([3]))
        optimizer = private_keras.SGD(bare, 1.0, batch_size=1, sampling="unchecked", pinned_seed=1)
        rows = noise_stream.NoiseStream(strategy, 3.0, [tf.TensorSpec([3])], pinned_seed=1)
        expected = np.zeros(3, np.float32)
        for _ in range(4):
            optimizer.apply_gradients(
                optimizer.clipped_gradients(lambda x: x, tf.ones([2, 1]), [variable])
            )
            expected -= rows.next()[0].numpy()
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-5)

    def test_a_configuration_holds_the_mechanism_and_the_schedule(self):
        schedule = tf.keras.optimizers.schedules.PolynomialDecay(1.0, 100, 0.05)
        optimizer = private_keras.SGD(MECHANISM, schedule, momentum=0.9, batch_size=6)
        copy = type(optimizer).from_config(optimizer.get_config())
        assert copy.mechanism.epsilon == MECHANISM.epsilon
        assert (copy.momentum, copy.batch_size) == (0.9, 6)
        assert copy.get_config() == optimizer.get_config()

    def test_noise_differs_from_run_to_run_unless_pinned(self):
        finals = []
        for pinned_seed in (1, 1, None, None):
            variable = tf.Variable([1.0])
            optimizer = private_keras.SGD(
                MECHANISM, batch_size=1, sampling="unchecked", pinned_seed=pinned_seed
            )
            for _ in range(2):
                optimizer.apply_gradients(
                    optimizer.clipped_gradients(lambda x: x, tf.ones([2, 1]), [variable])
                )
            finals.append(variable.numpy())
        assert finals[0] == finals[1]
        assert len({float(final[0]) for final in finals}) == 3

    def test_a_plan_without_sampling_takes_cyclic_batches(self):
        mechanism = Mechanism.create(
            STRATEGY,
            workloads.prefix_sum(NUM_ROUNDS),
            FixedEpochs(10, 2),
            noise_multiplier=2.0,
            l2_norm_clip=1.0,
            delta=1e-5,
        )
        pipeline = make_batches((X, Y), cyclic_scheme(NUM_ROUNDS, BATCH_SIZE, len(X)))
        model = private_model(mechanism=mechanism)
        model.fit(pipeline, verbose=0)
        assert model.optimizer.steps_done == NUM_ROUNDS

    def test_nothing_secret_is_printed(self):
        model = private_model(pinned_seed=None)
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        optimizer = model.optimizer
        text = f"{optimizer!r} {optimizer.get_config()} {optimizer.__dict__!r}"
        assert str(optimizer.noise_stream._secret.seed.numpy()[0]) not in text

    def test_clipped_gradients_say_what_was_dropped(self):
        variable = tf.Variable([1.0])
        optimizer = private_keras.SGD(MECHANISM, batch_size=1)
        gradients = optimizer.clipped_gradients(
            lambda x: x * variable, tf.constant([[0.1], [9.0], [np.nan]]), [variable]
        )
        assert isinstance(gradients, ClippedGradients)
        counts = (gradients.num_units, gradients.num_clipped, gradients.num_nonfinite)
        assert [int(count) for count in counts] == [3, 1, 1]
