from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.keras import clipping
from bandmf_tf.keras.clipping import clipped_gradient_sum, clipped_gradient_sum_of_tape

layers = tf.keras.layers
CLIP = 0.3


def _naive(loss_function, batch, variables, clip, mask=None, microbatch_size=1):
    """Differentiates one microbatch after the other, eagerly, and clips in float64."""
    tensors = [np.asarray(t) for t in tf.nest.flatten(batch)]
    size = len(tensors[0])
    mask = np.ones(size) if mask is None else np.asarray(mask, dtype=np.float64)
    total = [np.zeros(v.shape) for v in variables]
    counts = np.zeros(3, int)
    unit_clip = clip if microbatch_size == 1 else clip / 2
    for start in range(0, size, microbatch_size):
        members = [i for i in range(start, min(start + microbatch_size, size)) if mask[i]]
        if not members:
            continue
        unit = [np.zeros(v.shape) for v in variables]
        for i in members:
            one = tf.nest.pack_sequence_as(batch, [tf.constant(t[i : i + 1]) for t in tensors])
            with tf.GradientTape() as tape:
                result = loss_function(one)
                loss = tf.reduce_mean(result[0] if isinstance(result, tuple) else result)
            gradients = tape.gradient(
                loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            for g, gradient in zip(unit, gradients, strict=True):
                g += tf.convert_to_tensor(gradient).numpy().astype(np.float64) / microbatch_size
        norm = np.sqrt(sum(np.sum(g**2) for g in unit))
        counts += [1, norm > unit_clip, not np.isfinite(norm)]
        if np.isfinite(norm):
            total = [t + g * min(1.0, unit_clip / norm) for t, g in zip(total, unit, strict=True)]
    return total, counts


def _assert_agrees(result, expected, tolerance=2e-5):
    gradients, counts = expected
    for got, want in zip(result.gradients, gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance)
    found = [int(result.num_units), int(result.num_clipped), int(result.num_nonfinite)]
    assert found == list(counts)


def _in_graph(*arguments, **options):
    """Runs `clipped_gradient_sum` as training does, inside of a `tf.function`."""
    loss_function, batch, *rest = arguments

    @tf.function(autograph=False)
    def run(batch):
        return vars(clipped_gradient_sum(loss_function, batch, *rest, **options))

    return clipping.ClippedSum(**run(tf.nest.map_structure(tf.convert_to_tensor, batch)))


@pytest.fixture(scope="module")
def dense():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [layers.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(3)]
    )
    rng = np.random.default_rng(2)
    batch = (rng.normal(size=(11, 5)).astype(np.float32), rng.integers(0, 3, 11))

    def loss_function(batch):
        x, y = batch
        logits = model(x, training=True)
        return tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True), logits

    return model, batch, loss_function


PATHS = {
    "at once": {},
    "in chunks": {"chunk_size": 3},
    "one after the other": {"vectorize": False},
}


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_sum_equals_a_naive_loop_over_examples(dense, options, microbatch_size):
    model, batch, loss_function = dense
    mask = np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1], np.float32)
    result = _in_graph(
        loss_function,
        batch,
        model.trainable_variables,
        CLIP,
        mask=mask,
        microbatch_size=microbatch_size,
        **options,
    )
    expected = _naive(loss_function, batch, model.trainable_variables, CLIP, mask, microbatch_size)
    assert expected[1][1] > 0  # Something is clipped.
    _assert_agrees(result, expected)
    is_real = mask == 1
    np.testing.assert_allclose(result.outputs[is_real], model(batch[0])[is_real], atol=1e-6)


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_a_loss_may_compare_tensors_as_python_does(dense, options):
    """In some graphs of TensorFlow `!=` tells whether two tensors are one object."""
    model, batch, loss_function = dense

    def comparing(unit):
        loss, outputs = loss_function(unit)
        return loss * tf.reduce_sum(tf.cast(unit[0] != 0.0, tf.float32), axis=-1), outputs

    result = _in_graph(comparing, batch, model.trainable_variables, CLIP, **options)
    expected = _naive(comparing, batch, model.trainable_variables, CLIP)
    _assert_agrees(result, expected)


def test_nothing_is_clipped_under_a_large_clip_norm(dense):
    model, batch, loss_function = dense
    result = _in_graph(loss_function, batch, model.trainable_variables, 1e3)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(loss_function(batch)[0])
    for got, want in zip(
        result.gradients, tape.gradient(total, model.trainable_variables), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert int(result.num_clipped) == 0


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_examples_with_nan_or_infinity_contribute_zeros_and_are_counted(dense, options):
    model, (x, y), loss_function = dense
    x = x.copy()
    x[[1, 4]] = np.nan
    x[9, 2] = np.inf
    mask = np.ones(11)
    mask[4] = 0  # Padding is not counted, whatever it holds.
    result = _in_graph(loss_function, (x, y), model.trainable_variables, CLIP, mask=mask, **options)
    finite = np.delete(np.arange(11), [1, 4, 9])
    expected, _ = _naive(loss_function, (x[finite], y[finite]), model.trainable_variables, CLIP)
    for got, want in zip(result.gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert (int(result.num_units), int(result.num_nonfinite)) == (10, 2)


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_padding_contributes_exactly_zero(dense, microbatch_size):
    """Also in the fourth microbatch, which it shares with two examples."""
    model, (x, y), loss_function = dense
    outcomes = []
    for filler in (0.0, 1e4, np.nan):
        padded = np.concatenate([x, np.full((3, 5), filler, np.float32)])
        labels, mask = np.concatenate([y, [0, 1, 2]]), np.repeat([1, 0], [11, 3])
        result = _in_graph(
            loss_function,
            (padded, labels),
            model.trainable_variables,
            CLIP,
            mask=mask,
            microbatch_size=microbatch_size,
        )
        outcomes.append([g.numpy() for g in result.gradients])
        assert (int(result.num_units), int(result.num_nonfinite)) == (-(-11 // microbatch_size), 0)
    for outcome in outcomes[1:]:
        for got, want in zip(outcome, outcomes[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("options", [*PATHS.values(), {"microbatch_size": 2}], ids=str)
def test_a_model_sees_no_rows_but_those_of_the_batch(dense, options):
    """Eleven rows do not fill chunks of three, nor microbatches of two."""
    model, (x, y), loss_function = dense

    def checking(unit):
        largest = tf.reduce_max(tf.abs(unit[0]), axis=1)
        loss, outputs = loss_function(unit)
        return loss * largest * tf.debugging.check_numerics(1.0 / largest, "Zeros."), outputs

    found = _in_graph(checking, (x, y), model.trainable_variables, CLIP, **options)
    plain = _in_graph(loss_function, (x, y), model.trainable_variables, CLIP, **options)
    assert int(found.num_units) == int(plain.num_units)
    for one, other in zip(found.gradients, plain.gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_batch_of_padding_only_sums_to_zero(dense):
    model, batch, loss_function = dense
    variables = model.trainable_variables
    result = _in_graph(loss_function, batch, variables, CLIP, mask=np.zeros(11))
    assert all(not np.any(g) for g in result.gradients)
    assert int(result.num_units) == 0


def test_batches_of_any_size_share_one_trace(dense):
    model, (x, y), loss_function = dense
    variables, traces = model.trainable_variables, []

    @tf.function(
        autograph=False,
        input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64)],
    )
    def run(x, y):
        traces.append(1)
        return vars(clipped_gradient_sum(loss_function, (x, y), variables, CLIP, chunk_size=4))

    for size in (11, 4, 1, 0):
        result = clipping.ClippedSum(**run(x[:size], y[:size]))
        _assert_agrees(result, _naive(loss_function, (x[:size], y[:size]), variables, CLIP))
        assert result.outputs.shape == (size, 3)
    assert len(traces) == 1


def test_one_example_moves_the_sum_by_at_most_the_clip_norm(dense):
    model, _, loss_function = dense
    variables = model.trainable_variables
    rng = np.random.default_rng(3)

    @tf.function(autograph=False)
    def flat_sum(x, y, mask, microbatch_size):
        total = clipped_gradient_sum(
            loss_function, (x, y), variables, CLIP, mask=mask, microbatch_size=microbatch_size
        )
        return tf.concat([tf.reshape(g, [-1]) for g in total.gradients], 0)

    largest = {}
    for microbatch_size in (1, 2):
        moved = []
        for _ in range(20):
            data = tf.constant((rng.normal(size=(4, 5)) * 10).astype(np.float32))
            labels, mask = tf.constant(rng.integers(0, 3, 4)), np.ones(4, np.float32)
            whole = flat_sum(data, labels, tf.constant(mask), microbatch_size)
            mask[rng.integers(4)] = 0
            moved.append(
                np.linalg.norm(whole - flat_sum(data, labels, tf.constant(mask), microbatch_size))
            )
        largest[microbatch_size] = max(moved)
    assert largest[1] == pytest.approx(CLIP, rel=1e-5)
    # A microbatch moves from one clipped mean to another: more than its own clip norm, CLIP / 2.
    assert CLIP / 2 < largest[2] <= CLIP * (1 + 1e-5)


@pytest.fixture(scope="module")
def embedding():
    tf.keras.utils.set_random_seed(4)
    table = tf.Variable(tf.random.normal([50, 3]))
    head = tf.Variable(tf.random.normal([3]))

    def loss_function(tokens):
        return tf.reduce_mean(tf.tanh(tf.gather(table, tokens) @ head[:, None]), axis=(1, 2))

    # Tokens that occur several times in an example, and in several examples.
    tokens = np.random.default_rng(5).integers(0, 6, (9, 7))
    return table, head, loss_function, tokens


@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_sparse_gradients_of_repeated_tokens_are_clipped_as_one(embedding, options):
    table, head, loss_function, tokens = embedding
    clip = 0.5
    expected = _naive(loss_function, tokens, [table, head], clip)
    assert 0 < expected[1][1] < 9  # Some are clipped and some are not.
    _assert_agrees(_in_graph(loss_function, tokens, [table, head], clip, **options), expected)


@pytest.mark.parametrize("shape", [(7, 2), (3, 5)])
def test_a_sparse_gradient_made_dense_is_that_of_each_example(shape):
    rng = np.random.default_rng(1)
    values, indices = rng.normal(size=(4, 6, shape[1])), rng.integers(0, shape[0], (4, 6))
    rows = clipping.SparseRows(tf.constant(values), tf.constant(indices))
    part = clipping.SparsePart.from_rows(rows, tf.Variable(np.zeros(shape)), tf.constant(4))
    expected = np.zeros((4, *shape))
    for unit in range(4):
        np.add.at(expected[unit], indices[unit], values[unit])
    np.testing.assert_allclose(part.dense(), expected.reshape(4, -1), rtol=1e-12)


def test_the_norm_of_repeated_tokens_is_not_that_of_their_rows(embedding):
    table, _, _, _ = embedding
    tokens = np.zeros((1, 7), np.int64)  # Seven equal rows: norm 7, and sqrt(7) row by row.

    def loss_function(tokens):
        return tf.reduce_sum(tf.gather(table, tokens)[..., 0], axis=1)

    result = _in_graph(loss_function, tokens, [table], 1.0)
    assert np.linalg.norm(result.gradients[0]) == pytest.approx(1.0, rel=1e-5)


def test_a_tied_embedding_and_an_unused_variable(embedding):
    table, _, _, tokens = embedding
    unused, scalar = tf.Variable(tf.zeros([2, 2])), tf.Variable(1.5)

    def loss_function(tokens):
        looked_up = tf.reduce_mean(tf.gather(table, tokens), axis=1)
        logits = scalar * tf.linalg.matmul(looked_up, table, transpose_b=True)
        return tf.reduce_logsumexp(logits, axis=1)

    variables = [table, unused, scalar]
    expected = _naive(loss_function, tokens, variables, CLIP)
    _assert_agrees(_in_graph(loss_function, tokens, variables, CLIP), expected)


def test_memory_for_embeddings_is_judged_by_the_rows_they_use(embedding, monkeypatch):
    table, head, loss_function, tokens = embedding
    units = clipping._split_into_units(tokens, None, 1)
    unit = clipping.UnitGradient(loss_function, [table, head], 1)
    numbers_used = 7 * 3 + 7 + 3  # Rows, their indices, and the head; the table has 150.
    monkeypatch.setattr(clipping, "DEFAULT_MEMORY_BYTES", 16 * numbers_used * 4)
    assert unit.default_chunk_size(units) == 4


def test_convolutions_and_recurrent_layers_agree_with_the_naive_loop():
    tf.keras.utils.set_random_seed(6)
    model = tf.keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.Reshape((4, 12)),
            layers.GRU(4),
            layers.Dense(1),
        ]
    )
    x = np.random.default_rng(7).normal(size=(6, 6, 6, 2)).astype(np.float32)

    def loss_function(x):
        return tf.square(model(x, training=True) - 3.0)

    variables = model.trainable_variables
    expected = _naive(loss_function, x, variables, CLIP)
    _assert_agrees(_in_graph(loss_function, x, variables, CLIP, chunk_size=4), expected, 1e-4)


def test_operations_that_cannot_be_vectorised_run_one_after_the_other(dense, monkeypatch):
    model, batch, loss_function = dense

    def refuse(*_):
        raise ValueError("No converter.")

    monkeypatch.setattr(tf, "vectorized_map", refuse)
    result = _in_graph(loss_function, batch, model.trainable_variables, CLIP)
    _assert_agrees(result, _naive(loss_function, batch, model.trainable_variables, CLIP))


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_a_tape_gives_the_same_sum(dense, microbatch_size):
    model, (x, y), loss_function = dense
    x, y, variables = x[:6], y[:6], model.trainable_variables
    with tf.GradientTape() as tape:
        losses, _ = loss_function((tf.constant(x), tf.constant(y)))
    result = clipped_gradient_sum_of_tape(
        tape, losses, variables, CLIP, microbatch_size=microbatch_size
    )
    expected = _naive(loss_function, (x, y), variables, CLIP, None, microbatch_size)
    _assert_agrees(result, expected)


def test_a_reduced_loss_on_a_tape_is_refused(dense):
    model, batch, loss_function = dense
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(loss_function(batch)[0])
    with pytest.raises(ValueError, match="reduction='none'"):
        clipped_gradient_sum_of_tape(tape, loss, model.trainable_variables, CLIP)


def test_a_reduced_loss_of_a_larger_microbatch_is_refused(dense):
    model, batch, loss_function = dense
    with pytest.raises(ValueError, match="one entry for each"):
        _in_graph(
            lambda batch: tf.reduce_mean(loss_function(batch)[0]),
            batch,
            model.trainable_variables,
            CLIP,
            microbatch_size=2,
        )


@pytest.mark.parametrize(
    ("name", "value"), [("l2_norm_clip", 0.0), ("microbatch_size", 0), ("chunk_size", 0)]
)
def test_wrong_arguments_are_refused(dense, name, value):
    model, batch, loss_function = dense
    arguments = {"l2_norm_clip": CLIP, name: value}
    with pytest.raises(ValueError, match=name):
        clipped_gradient_sum(loss_function, batch, model.trainable_variables, **arguments)


@settings(max_examples=25)
@given(
    size=st.integers(0, 9),
    scale=st.floats(0.01, 100.0),
    chunk_size=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_linear_models_of_any_size_and_scale(size, scale, chunk_size, seed):
    rng = np.random.default_rng(seed)
    x = tf.constant((scale * rng.normal(size=(size, 2))).astype(np.float32))
    mask = tf.constant(rng.integers(0, 2, size).astype(bool))
    result = clipping.ClippedSum(**_linear_sum(x, mask, tf.constant(chunk_size)))
    rows = np.asarray(x, np.float64)[np.asarray(mask)]
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    want = np.sum(rows * np.minimum(1.0, 1.0 / np.maximum(norms, 1e-30)), axis=0)
    np.testing.assert_allclose(result.gradients[0], want, atol=1e-5 * (1 + size))
    assert int(result.num_clipped) == np.count_nonzero(norms > 1.0)


_WEIGHTS = tf.Variable([0.5, -1.0])


@tf.function(
    autograph=False,
    input_signature=[
        tf.TensorSpec([None, 2]),
        tf.TensorSpec([None], tf.bool),
        tf.TensorSpec([], tf.int32),
    ],
)
def _linear_sum(x, mask, chunk_size):
    """One trace for all sizes: chunks of 1, 4 or 64."""

    def run(chunk_size):
        return lambda: vars(
            clipped_gradient_sum(
                lambda x: tf.linalg.matvec(x, _WEIGHTS),
                x,
                [_WEIGHTS],
                1.0,
                mask=mask,
                chunk_size=chunk_size,
            )
        )

    return tf.case([(chunk_size < 3, run(1)), (chunk_size < 7, run(4))], default=run(64))


@pytest.mark.parametrize("broken", [None, 0, 3])
def test_gradients_of_small_variables_are_summed_side_by_side(broken):
    """Between large ones, of any shape, also with hardly a divisor, and one that is not finite."""
    rng = np.random.default_rng(1)
    shapes = [(3, 5), (701,), (), (7,), (40, 20), (509,), (2, 2, 2)]
    rows = [rng.normal(size=(6, math.prod(shape))).astype(np.float32) for shape in shapes]
    if broken is not None:
        rows[broken][2, 0] = np.nan
    is_real = np.array([True, True, True, True, False, True])
    parts = [
        clipping.DensePart(tf.constant(r), tf.Variable(np.zeros(shape, np.float32)))
        for r, shape in zip(rows, shapes, strict=True)
    ]
    total = clipping.clip_and_sum(parts, tf.constant(is_real), 30.0)

    together = np.concatenate(rows, axis=1).astype(np.float64)
    norms = np.linalg.norm(together, axis=1)
    kept = is_real & np.isfinite(norms)
    factors = np.minimum(1.0, 30.0 / norms[kept])
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    expected = np.split((factors[:, None] * together[kept]).sum(axis=0), ends)
    for found, piece, shape in zip(total.gradients, expected, shapes, strict=True):
        assert found.shape == shape
        np.testing.assert_allclose(found, piece.reshape(shape), rtol=1e-4, atol=1e-5)
    assert int(total.num_clipped) == np.sum(norms[kept] > 30.0) > 0
    assert int(total.num_nonfinite) == np.sum(is_real & ~kept)


@pytest.mark.parametrize("size", [1, 10, 17, 64, 65, 90, 127, 1_114, 8_191])
def test_squared_norms_are_those_of_float64(size):
    rows = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    found = clipping.sums_of_squares(tf.constant(rows))
    np.testing.assert_allclose(found, np.sum(rows.astype(np.float64) ** 2, axis=1), rtol=2.0**-17)
