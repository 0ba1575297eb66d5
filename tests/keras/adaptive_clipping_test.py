"""A clip norm that adapts in `fit`: the steps of the DP query, in every way to take them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.keras import AdaptiveClipping
from bandmf_tf.keras.clipping import clipped_gradient_sum
from bandmf_tf.keras.optimizers import PrivacyError
from bandmf_tf.keras.queries import QueryError
from bandmf_tf.noise.query import CorrelatedNoiseSumQuery
from cases import (
    BATCH_SIZE,
    MECHANISM,
    NOISE_SEED,
    NUM_ROUNDS,
    X,
    Y,
    batches,
    classification_loss,
    flat,
    network,
    private_model,
)

RATE = 0.1
SETTINGS = AdaptiveClipping(target_quantile=0.6, learning_rate=0.5, vote_weight=0.3)
CLIP = MECHANISM.l2_norm_clip


def _model(optimizer="SGD", **options):
    return private_model(optimizer, adaptive_clipping=SETTINGS, learning_rate=RATE, **options)


def _specs(model):
    return [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]


@pytest.fixture(name="expected", scope="module")
def _expected():
    """Weights and clip norm after every step, one example at a time by the query."""
    model, loss = network(), classification_loss()
    dp_query = CorrelatedNoiseSumQuery.from_mechanism(
        MECHANISM,
        _specs(model),
        pinned_seed=NOISE_SEED,
        adaptive_clipping=SETTINGS,
        expected_records=BATCH_SIZE,
    )

    @tf.function(input_signature=[tf.TensorSpec([4]), tf.TensorSpec([], tf.int64)])
    def gradient(x, y):
        with tf.GradientTape() as tape:
            value = loss(y[None], model(x[None]))
        return [tf.convert_to_tensor(g) for g in tape.gradient(value, model.trainable_variables)]

    state, weights, norms = dp_query.initial_global_state(), [], []
    for batch in batches().dataset(0, pieces=1, first_piece=0):
        x, y = batch.examples
        params = dp_query.derive_sample_params(state)
        sample = dp_query.initial_sample_state()
        for i in np.flatnonzero(batch.is_example):
            sample = dp_query.accumulate_record(params, sample, gradient(x[i], y[i]))
        result, state, _ = dp_query.get_noised_result(sample, state)
        for variable, total in zip(model.trainable_variables, result, strict=True):
            variable.assign_sub(RATE * total / BATCH_SIZE)
        weights.append(flat(model.get_weights()))
        norms.append(float(state["l2_norm_clip"]))
    assert len(weights) == NUM_ROUNDS
    assert min(norms) > 1.3 * CLIP  # It moves, and not in one direction.
    assert min(np.diff(norms)) < -0.1
    return np.array(weights), np.array(norms)


def _check(model, expected):
    model.fit(batches(), epochs=1, verbose=0)
    weights, norms = expected
    np.testing.assert_allclose(flat(model.get_weights()), weights[-1], atol=2e-4)
    assert model.optimizer.current_l2_norm_clip == pytest.approx(norms[-1], rel=1e-4)
    assert model.optimizer.steps_done == NUM_ROUNDS
    assert model.optimizer.sampling_is_enforced


@pytest.mark.parametrize(
    "options",
    [{"steps_per_execution": 4}, {"jit_compile": True, "accumulation_steps": 3}],
    ids=["compiled", "by XLA, accumulated"],
)
def test_fit_takes_the_steps_of_the_query(options, expected):
    _check(_model(**options), expected)


def test_two_replicas_take_the_steps_of_one_with_gradients_one_by_one(expected):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = _model(accumulation_steps=2)
    model.use_layer_formulas = False
    _check(model, expected)


def _train(model):
    model.fit(batches(), epochs=1, steps_per_epoch=NUM_ROUNDS // 2, verbose=0)
    return flat(model.get_weights()), model.optimizer.current_l2_norm_clip


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory):
    """A folder with a run saved after half of its steps, and where it was and went on to."""
    folder, model = tmp_path_factory.mktemp("saved"), _model("Adam")
    half = _train(model)
    model.save(folder / "model.keras")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    whole = _train(model)
    with pytest.raises((PrivacyError, tf.errors.InvalidArgumentError, ValueError)):
        _train(model)  # The plan ends where it ended.
    return folder, half, whole


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_a_restored_run_goes_on_bit_for_bit(kind, saved):
    folder, half, whole = saved
    assert half[1] != CLIP
    if kind == "file":
        model = tf.keras.models.load_model(folder / "model.keras")
    else:
        model = _model("Adam")
        tf.train.Checkpoint(model=model).read(str(folder / "checkpoint"))
    assert model.optimizer.adaptive_clipping == SETTINGS
    weights, norm = _train(model)
    np.testing.assert_array_equal(weights, whole[0])
    assert norm == whole[1]


def test_a_norm_that_does_not_adapt_does_not_go_on_with_the_noise_of_one_that_does(saved):
    model = private_model("Adam")
    tf.train.Checkpoint(model=model).read(str(saved[0] / "checkpoint")).expect_partial()
    with pytest.raises(tf.errors.InvalidArgumentError, match="another mechanism"):
        _train(model)


def _sum_of(optimizer, model, x, y):
    loss = classification_loss()
    return optimizer.clipped_gradients(
        lambda unit: loss(unit[1], model(unit[0])), (x, y), model.trainable_variables
    )


def _optimizer(**options):
    options = {"adaptive_clipping": SETTINGS, "pinned_seed": 1, **options}
    return private_keras.SGD(MECHANISM, 0.0, batch_size=3, sampling="unchecked", **options)


def test_no_contribution_is_longer_than_the_clip_norm_whatever_the_current_one_is():
    model, optimizer = network(), _optimizer()
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def summed(x):
        clipped = _sum_of(optimizer, model, x, Y[:1])
        votes = optimizer.clip.quantile.votes(
            clipped.num_units, clipped.num_clipped, clipped.num_nonfinite
        )
        return [*(gradient for gradient, _ in clipped), votes]

    scales = (1e-6, 1.0, 1e30, np.inf)
    for norm, scale in itertools.product([1e-9, 0.1, 0.7, 50.0, 1e9, np.nan, np.inf], scales):
        optimizer.clip.variable.assign(norm)
        found = flat(summed(tf.constant(X[:1] * np.float32(scale)))).astype(np.float64)
        assert np.linalg.norm(found) <= CLIP
        if scale == np.inf:
            np.testing.assert_array_equal(found, 0.0)


def test_an_edited_norm_that_is_no_number_gives_no_weights():
    model, optimizer = network(), _optimizer()
    optimizer.build(model.trainable_variables)
    optimizer.clip.variable.assign(np.nan)
    optimizer.apply_gradients(_sum_of(optimizer, model, X[:3], Y[:3]))
    assert np.isnan(flat(model.get_weights())).all()


def test_gradients_of_before_a_step_are_as_long_as_planned_after_it():
    """The norm moves between clipping and use, and what was clipped before stays what it is."""
    model, optimizer = network(), _optimizer()
    first, stale = (_sum_of(optimizer, model, X[:3], Y[:3]) for _ in range(2))
    before = flat([g for g, _ in stale])
    optimizer.apply_gradients(first)
    assert optimizer.current_l2_norm_clip != CLIP
    np.testing.assert_array_equal(flat([g for g, _ in stale]), before)
    optimizer.apply_gradients(stale)


def test_gradients_that_were_clipped_otherwise_are_refused():
    model = network()
    ours, other, fixed = _optimizer(), _optimizer(), _optimizer(adaptive_clipping=None)
    for one, taker in ((other, ours), (fixed, ours), (ours, fixed)):
        clipped = _sum_of(one, model, X[:3], Y[:3])
        with pytest.raises(PrivacyError, match="by another optimizer"):
            taker.apply_gradients(clipped)
    ours.apply_gradients(_sum_of(ours, model, X[:3], Y[:3]))


def test_padding_does_not_vote():
    model, optimizer = network(), _optimizer()
    loss = classification_loss()
    optimizer.build(model.trainable_variables)
    clipped = clipped_gradient_sum(
        lambda unit: loss(unit[1], model(unit[0])),
        (X[:5], Y[:5]),
        model.trainable_variables,
        optimizer.clip,
        mask=tf.constant([True, True, False, False, True]),
    )
    assert int(clipped.num_units) == 3


def test_a_tape_gives_the_same_sum():
    model, optimizer = network(), _optimizer()
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.keras.losses.sparse_categorical_crossentropy(Y[:3], model(X[:3]), True)
    taped = optimizer.compute_gradients(losses, model.trainable_variables, tape)
    expected = _sum_of(optimizer, model, X[:3], Y[:3])
    for (one, _), (other, _) in zip(taped, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_mixed_precision_and_users():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = _model(model=network())
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    users = np.arange(len(X)) // 2
    grouped = private_keras.group_by_user((X, Y), users, examples_per_user=2)
    pipeline = private_keras.make_batches(grouped, MECHANISM)
    model.fit(pipeline, epochs=1, steps_per_epoch=2, verbose=0)
    assert np.isfinite(flat(model.get_weights())).all()
    assert model.optimizer.current_l2_norm_clip != CLIP


def test_what_cannot_adapt_is_refused():
    with pytest.raises(PrivacyError, match="microbatch_size=1"):
        _optimizer(microbatch_size=2)
    dp_query = CorrelatedNoiseSumQuery.from_mechanism(
        MECHANISM, _specs(network()), adaptive_clipping=SETTINGS, expected_records=3
    )
    with pytest.raises(QueryError, match="adaptive_clipping=AdaptiveClipping"):
        private_keras.SGD(query=dp_query)
    fixed = CorrelatedNoiseSumQuery.from_mechanism(MECHANISM, _specs(network()))
    with pytest.raises(PrivacyError, match="goes with a mechanism"):
        private_keras.SGD(query=fixed, adaptive_clipping=SETTINGS)
