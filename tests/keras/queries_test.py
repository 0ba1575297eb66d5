"""A DP query in an optimizer takes part in every step, whatever TensorFlow does around it."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import cases
from bandmf_tf import keras as private_keras
from bandmf_tf.keras.optimizers import PrivacyError
from bandmf_tf.keras.queries import QueryError
from bandmf_tf.noise._dp_query import SumAggregationDPQuery
from bandmf_tf.noise.query import CorrelatedNoiseSumQuery, SuppliedNoiseSumQuery
from bandmf_tf.runs.run_record import load_run_record
from cases import (
    BATCH_SIZE,
    MECHANISM,
    NOISE_SEED,
    NUM_ROUNDS,
    STRATEGY,
    X,
    Y,
    batches,
    flat,
    network,
    private_model,
    zero_loss,
)

try:
    import tensorflow_privacy as tfp
    from tensorflow_privacy.privacy.dp_query import nested_query
    from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras
except (ImportError, AttributeError):  # The second: of a TensorFlow that is too new for it.
    tfp = None

needs_tfp = pytest.mark.skipif(tfp is None, reason="There is no TensorFlow Privacy.")

CLIP = MECHANISM.l2_norm_clip


def ours(specs, pinned_seed=NOISE_SEED, **options):
    return CorrelatedNoiseSumQuery.from_mechanism(
        MECHANISM, specs, pinned_seed=pinned_seed, **options
    )


def gaussian(specs):
    del specs
    return tfp.GaussianSumQuery(CLIP, 2.0 * CLIP)


def adaptive(specs, noise_multiplier=0.0):
    """With so little noise that its trajectory is known, unless told otherwise."""
    del specs
    return tfp.QuantileAdaptiveClipSumQuery(
        CLIP, noise_multiplier, 0.5, 0.2, 1e-9, BATCH_SIZE, True
    )


def tree(specs, noise_multiplier=2.0):
    return tfp.TreeResidualSumQuery.build_l2_gaussian_query(
        CLIP, noise_multiplier, specs, noise_seed=3
    )


def restarted_tree(specs):
    return tfp.RestartQuery(tree(specs), tfp.restart_query.PeriodicRoundRestartIndicator(5))


def restarted_per_variable(specs):
    return nested_query.NestedSumQuery([restarted_tree(spec) for spec in specs])


def specs_of(variables):
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]


def model_with(make_query, optimizer="SGD", loss=None, **options):
    model = network()
    return private_model(
        optimizer,
        model=model,
        mechanism=None,
        pinned_seed=None,
        loss=loss,
        query=make_query(specs_of(model.trainable_variables)),
        **options,
    )


def _mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


WAYS = {
    "compiled": {},
    "eager": {"run_eagerly": True, "chunk_size": 4},
    "accumulated, several steps at once": {
        "accumulation_steps": 3,
        "steps_per_execution": 4,
        "optimizer": "Adam",
        "count_records": False,
    },
}


class TestOurs:
    @pytest.mark.parametrize("way", WAYS)
    def test_trajectory_and_record_are_those_of_the_mechanism_bit_for_bit(self, way, tmp_path):
        options = dict(WAYS[way])
        counts = options.pop("count_records", True)
        model = private_model(**options)
        with_query = model_with(lambda specs: ours(specs, count_records=counts), **options)
        for name, one in (("mechanism", model), ("query", with_query)):
            callback = private_keras.PrivacyCallback(tmp_path / name)
            one.fit(batches(), epochs=3, verbose=0, callbacks=[callback])
        np.testing.assert_array_equal(flat(with_query.get_weights()), flat(model.get_weights()))
        assert with_query.optimizer.batch_sizes_seen() == model.optimizer.batch_sizes_seen()
        assert with_query.optimizer.sampling_is_enforced
        found, expected = (load_run_record(tmp_path / name) for name in ("query", "mechanism"))
        for name in ("mechanism_checksum", "epsilon", "cautions", "noise_source", "sampling_basis"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.epsilon > 0

    def test_two_replicas_get_one_noise_together(self):
        results = []
        for make in (private_model, lambda: model_with(ours)):
            with _mirrored().scope():
                model = make()
            model.fit(batches(), verbose=0)
            results.append(flat(model.get_weights()))
        np.testing.assert_array_equal(*results)

    def test_two_optimizers_that_share_a_query_share_no_noise(self):
        query = ours(specs_of(network().trainable_variables), pinned_seed=None)
        finals = []
        for _ in range(2):
            model = model_with(lambda _: query, loss=zero_loss)
            model.fit(batches(), steps_per_epoch=1, verbose=0)
            finals.append(flat(model.get_weights()))
        assert np.abs(finals[0] - finals[1]).max() > 1e-3

    def test_a_bare_strategy_promises_nothing(self, tmp_path):
        model = model_with(
            lambda specs: CorrelatedNoiseSumQuery.from_strategy(STRATEGY, 2.0, CLIP, specs)
        )
        callback = private_keras.PrivacyCallback(tmp_path / "record")
        model.fit(batches(), verbose=0, callbacks=[callback])
        assert load_run_record(tmp_path / "record").epsilon is None
        assert isinstance(model.optimizer.dp_event(), dp_accounting.UnsupportedDpEvent)

    def test_steps_past_the_last_planned_one(self):
        model = model_with(ours)
        model.fit(batches(), verbose=0)
        with pytest.raises(PrivacyError, match="All 12 steps"):
            model.fit(batches(), verbose=0)

    @pytest.mark.parametrize("change", ["subclass", "replaced method"])
    def test_nothing_is_known_about_what_somebody_changed(self, change):
        """It clips no more, so no event may speak for it."""

        class Liar(CorrelatedNoiseSumQuery):
            def preprocess_record(self, params, record):
                del params
                return self.sample_of_sum(record, tf.zeros([3]))

        def make(specs):
            if change == "subclass":
                return Liar.from_mechanism(MECHANISM, specs)
            query = ours(specs)
            query.preprocess_record = lambda params, record: query.sample_of_sum(
                record, tf.zeros([3])
            )
            return query

        model = model_with(make)
        model.fit(batches(), verbose=0)
        assert model.optimizer.mechanism is None
        assert isinstance(model.optimizer.dp_event(), dp_accounting.UnsupportedDpEvent)
        with pytest.raises(Exception, match="No guarantee can be stated"):
            model.fit(batches(), verbose=0, callbacks=[private_keras.PrivacyCallback()])


class Loop:
    """What a query does to weights, one record after the other, in eager mode."""

    def __init__(self, make_query):
        self.model = network()
        self.query = make_query(specs_of(self.model.trainable_variables))
        self.state = self.query.initial_global_state()
        self.trajectory = []

    def step(self, examples, learning_rate=0.1):
        params = self.query.derive_sample_params(self.state)
        variables = self.model.trainable_variables
        sample = self.query.initial_sample_state([tf.zeros_like(v) for v in variables])
        for i in examples:
            with tf.GradientTape() as tape:
                loss = cases.classification_loss()(Y[i : i + 1], self.model(X[i : i + 1]))
            record = tape.gradient(loss, variables)
            sample = self.query.accumulate_record(params, sample, record)
        result, self.state, _ = self.query.get_noised_result(sample, self.state)
        for variable, gradient in zip(variables, result, strict=True):
            variable.assign_sub(learning_rate * gradient / BATCH_SIZE)
        self.trajectory.append(flat(self.model.get_weights()))


@needs_tfp
class TestForeign:
    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (adaptive, {"accumulation_steps": 3}),
            (adaptive, {"run_eagerly": True, "chunk_size": 4}),
            (tree, {"steps_per_execution": 4}),
            (restarted_per_variable, {}),
        ],
    )
    def test_trajectory_is_that_of_the_query_alone(self, make, options):
        loop, pipeline = Loop(make), batches()
        for i in range(NUM_ROUNDS):
            loop.step(pipeline.indices(i))
        model = model_with(make, **options)
        model.fit(batches(), verbose=0)
        np.testing.assert_allclose(flat(model.get_weights()), loop.trajectory[-1], atol=2e-5)
        assert model.optimizer.steps_done == NUM_ROUNDS
        if make is adaptive:  # It has really adapted.
            state = model.optimizer.noise_stream._read_state()
            clip = float(state.sum_state.l2_norm_clip)
            assert clip == pytest.approx(float(loop.state.sum_state.l2_norm_clip), rel=1e-4)
            assert abs(clip / CLIP - 1.0) > 0.05

    @pytest.mark.parametrize("make", [adaptive, tree])
    def test_two_replicas_do_what_one_does(self, make):
        single = model_with(make)
        single.fit(batches(), verbose=0)
        with _mirrored().scope():
            double = model_with(make, accumulation_steps=2)
        double.fit(batches(), verbose=0)
        np.testing.assert_allclose(
            flat(double.get_weights()), flat(single.get_weights()), atol=2e-5
        )

    @pytest.mark.parametrize("make", [gaussian, tree, lambda s: adaptive(s, 2.0)])
    def test_every_step_has_noise_of_its_own_and_an_event_where_it_is_known(self, make):
        model = model_with(make, loss=zero_loss, learning_rate=1.0, batch_size=1)
        trajectory = [flat(model.get_weights())]
        note = tf.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_: trajectory.append(flat(model.get_weights()))
        )
        model.fit(batches(), verbose=0, callbacks=[note])
        steps = np.diff(trajectory, axis=0)
        distances = np.abs(steps[:, None] - steps[None]).max(axis=2)
        assert np.all(distances + np.eye(NUM_ROUNDS) > 1e-2)
        assert 0.3 < np.std(steps) / (2.0 * CLIP) < 3.0
        model.optimizer.query._stddev = 1e6  # Which no step has used.
        event = model.optimizer.dp_event()
        if make is tree:
            assert isinstance(event, dp_accounting.UnsupportedDpEvent)
        elif make is gaussian:
            known = dp_accounting.GaussianDpEvent(2.0)
            assert event == dp_accounting.SelfComposedDpEvent(known, NUM_ROUNDS)
            accountant = dp_accounting.rdp.RdpAccountant().compose(event)
            assert 0 < accountant.get_epsilon(1e-5) < 20

    def test_optimizers_of_tensorflow_privacy_repeat_the_noise_of_a_tree(self):
        """What the test above would see with them; if this fails, they have been mended."""
        variable = tf.Variable(tf.zeros([5]))
        kind = dp_optimizer_keras.make_keras_generic_optimizer_class(tf.keras.optimizers.legacy.SGD)
        optimizer = kind(tree(specs_of([variable])), num_microbatches=1, learning_rate=1.0)

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(0.0 * variable)[None]
            optimizer.minimize(loss, [variable], tape=tape)

        step()  # In eager mode, without which the compiled one fails.
        compiled, seen = tf.function(step, autograph=False), []
        for _ in range(3):
            before = variable.numpy()
            compiled()
            seen.append(variable.numpy() - before)
        np.testing.assert_allclose(seen[0], seen[1], atol=1e-6)
        np.testing.assert_allclose(seen[1], seen[2], atol=1e-6)

    def test_an_example_that_is_not_finite_contributes_nothing(self):
        x = X.copy()
        x[::2] = np.nan
        results = []
        for data in (x, X):
            model = model_with(tree, batch_size=1)
            model.compile(model.optimizer, loss=cases.classification_loss())
            mask = np.arange(len(X)) % 2 == 1 if data is X else np.ones(len(X), bool)
            model.train_on_batch(data[:8], Y[:8], mask[:8].astype(np.float32))
            results.append(flat(model.get_weights()))
        np.testing.assert_array_equal(*results)


class Drawing(SumAggregationDPQuery):
    """A query of somebody's own, whose state is the number of the step."""

    def __init__(self, draw):
        self.draw = draw

    def initial_global_state(self):
        return tf.constant(0)

    def preprocess_record(self, params, record):
        del params
        return tf.clip_by_global_norm(record, CLIP)[0]

    def get_noised_result(self, sample_state, global_state):
        noised = [part + self.draw(part.shape, global_state) for part in sample_state]
        return noised, global_state + 1, dp_accounting.GaussianDpEvent(1 / CLIP)


def _in_python(shape, number):
    del number
    return np.random.default_rng().normal(size=shape).astype(np.float32)


DRAWS = {
    "in Python": _in_python,
    "one seed": lambda shape, _: tf.random.stateless_normal(shape, [0, 1]),
    "one tensor without": lambda shape, i: tf.random.stateless_normal(
        shape, [0, i] if len(shape) > 1 else [0, 1]
    ),
}


class TestRepeatedNoise:
    """Two steps with one noise: their difference would be that of the gradients."""

    @pytest.mark.parametrize("draw", DRAWS)
    def test_it_is_refused_before_the_first_step(self, draw):
        model = model_with(lambda _: Drawing(DRAWS[draw]))
        before = flat(model.get_weights())
        with pytest.raises(QueryError, match="new noise in every step"):
            model.fit(batches(), verbose=0)
        np.testing.assert_array_equal(flat(model.get_weights()), before)

    def test_a_seed_that_the_state_moves_on_is_not(self):
        def draw(shape, number):
            return tf.random.stateless_normal(shape, [0, number])

        model = model_with(lambda _: Drawing(draw))
        model.fit(batches(), verbose=0)
        assert model.optimizer.steps_done == NUM_ROUNDS


REFUSED = {
    "a class": (lambda specs: tfp.GaussianSumQuery, "an object and not a class"),
    "a number": (lambda specs: 3.0, "Found float"),
    "an average": (lambda specs: tfp.NormalizedQuery(gaussian(specs), 6), "return the sum"),
    "cumulative sums": (
        lambda specs: tfp.TreeCumulativeSumQuery.build_l2_gaussian_query(CLIP, 2.0, specs),
        "forget the sums of earlier steps",
    ),
    "no noise": (lambda specs: tfp.NoPrivacySumQuery(), "adds no noise"),
    "other specs": (lambda specs: ours(specs[:1]), "does not take the gradients"),
    "other specs of a tree": (lambda specs: tree(specs[1:]), "does not take the gradients"),
    "no rows": (
        lambda specs: SuppliedNoiseSumQuery.from_mechanism(MECHANISM, specs),
        "use CorrelatedNoiseSumQuery",
    ),
}


@needs_tfp
class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_queries_that_cannot_be_right(self, case):
        make, message = REFUSED[case]
        with pytest.raises(QueryError, match=message) as caught:
            model_with(make).fit(batches(), verbose=0)
        assert "\n" not in str(caught.value)

    def test_a_query_whose_state_changes_its_type(self):
        class Odd(tfp.GaussianSumQuery):
            def get_noised_result(self, sample_state, global_state):
                result, state, event = super().get_noised_result(sample_state, global_state)
                return result, tf.nest.map_structure(lambda t: tf.cast(t, tf.float64), state), event

        with pytest.raises(QueryError, match="Odd does not take"):
            model_with(lambda _: Odd(1.0, 1.0)).fit(batches(), verbose=0)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mechanism": MECHANISM}, "not both"),
            ({"query": None}, "needs a mechanism first"),
            ({"pinned_seed": 1}, "own seed"),
            ({"microbatch_size": 2, "query": adaptive}, "microbatch_size must be 1"),
        ],
    )
    def test_arguments_that_do_not_go_together(self, options, message):
        options = {"query": gaussian, **options}
        if options["query"] is not None:
            options["query"] = options["query"](None)
        with pytest.raises(PrivacyError, match=message):
            private_keras.SGD(**options)

    def test_gradients_of_a_tape_for_a_query_that_clips(self):
        model = network()
        model.compile(
            private_keras.SGD(query=adaptive(None), batch_size=1),
            loss=tf.keras.losses.MeanSquaredError(reduction="none"),
        )
        with pytest.raises(Exception, match="cannot go through a query one by one"):
            model.fit(X, np.zeros((len(X), 3)), verbose=0)


def _checkpoint(model, folder, fresh, query):
    del query
    path = tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    tf.train.Checkpoint(model=fresh).read(path)
    return fresh


def _keras_weights(model, folder, fresh, query):
    del query
    model.save_weights(folder / "model.weights.h5")
    fresh.load_weights(folder / "model.weights.h5")
    return fresh


def _file(name, **options):
    def restore(model, folder, fresh, query):
        del fresh
        model.save(folder / name, **options)
        return private_keras.load_model(folder / name, query=query)

    return restore


RESTORES = {
    "checkpoint": _checkpoint,
    "weights": _keras_weights,
    "keras": _file("model.keras"),
    "folder": _file("folder", save_format="tf"),
}


class TestRestore:
    @pytest.mark.parametrize(
        ("make", "restore"),
        [*(pytest.param(tree, way, marks=needs_tfp) for way in RESTORES), (ours, "checkpoint")],
    )
    def test_a_restored_run_goes_on_bit_for_bit(self, make, restore, tmp_path):
        model = model_with(make)
        model.fit(batches(), steps_per_epoch=7, verbose=0)
        query = make(specs_of(model.trainable_variables))
        restored = RESTORES[restore](model, tmp_path, model_with(make), query)
        for one in (model, restored):
            one.fit(batches(), steps_per_epoch=5, verbose=0)
        np.testing.assert_array_equal(flat(restored.get_weights()), flat(model.get_weights()))

    def test_without_a_pinned_seed_future_noise_differs(self, tmp_path):
        def make(specs):
            return ours(specs, pinned_seed=None)

        model = model_with(make, loss=zero_loss)
        model.fit(batches(), steps_per_epoch=2, verbose=0)
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
        finals = []
        for again in (model, model, model_with(make, loss=zero_loss)):
            tf.train.Checkpoint(model=again).read(path)
            again.fit(batches(), steps_per_epoch=1, verbose=0)
            finals.append(flat(again.get_weights()))
        assert min(np.abs(finals[i] - finals[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3

    @needs_tfp
    def test_a_file_does_not_hold_the_query(self, tmp_path):
        model = model_with(tree)
        model.save(tmp_path / "model.keras")
        with pytest.raises(Exception, match="load_model\\(path, query=query\\)"):
            private_keras.load_model(tmp_path / "model.keras")

    @needs_tfp
    def test_the_state_of_another_query_is_refused(self, tmp_path):
        model = model_with(tree)
        model.fit(batches(), steps_per_epoch=2, verbose=0)
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
        other = model_with(lambda specs: tree(specs, noise_multiplier=0.1))
        tf.train.Checkpoint(model=other).read(path)
        with pytest.raises(tf.errors.InvalidArgumentError, match="another mechanism"):
            other.fit(batches(), steps_per_epoch=1, verbose=0)
