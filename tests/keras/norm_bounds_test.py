"""No input makes an example's contribution longer than the clip norm, whatever rounding does.

Models of one layer whose loss is the product of its output with the labels: inputs and labels then
are the two factors that formulas multiply, and a search may choose both freely.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bandmf_tf.keras.clipping import (
    clip_and_sum,
    clipped_gradient_sum,
    clipped_gradient_sum_of_tape,
)
from bandmf_tf.keras.layer_formulas import layerwise_clipped_sum
from bandmf_tf.keras.outer_products import ProductPart

layers = tf.keras.layers
CLIP = 1.0
NUM_TOKENS, TOKENS = 5, (12,)

# Positions and sizes are such that each way to a norm is taken by one of them.
LAYERS = {
    "rank one": ((9,), lambda: layers.Dense(7)),
    "inner products": ((8, 64), lambda: layers.Dense(64)),
    "inner products, many positions": ((24, 200), lambda: layers.Dense(200, use_bias=False)),
    "inner products, no bias": ((2, 30), lambda: layers.Dense(40, use_bias=False)),
    "products": ((40, 6), lambda: layers.Dense(3)),
    "one output": ((8, 64), lambda: layers.Dense(1)),
    "patches of few channels": ((9, 8, 1), lambda: layers.Conv2D(3, 3, strides=2)),
    "patches of many channels": ((5, 5, 6), lambda: layers.Conv2D(4, 3, padding="same")),
    "large images": ((16, 16, 8), lambda: layers.Conv2D(16, 3, padding="same")),
    "inner products of patches": ((5, 5, 32), lambda: layers.Conv2D(48, 3, strides=2)),
    "series": ((12, 40), lambda: layers.Conv1D(64, 3, strides=4)),
    "embedding": (TOKENS, lambda: layers.Embedding(NUM_TOKENS, 6)),
    "inner products of heads": ((4, 48), lambda: layers.EinsumDense("abc,cde->abde", (4, 8, 8))),
    "patches in groups": ((6, 6, 4), lambda: layers.Conv2D(4, 3, groups=2)),
    "patches of volumes": ((4, 4, 4, 2), lambda: layers.Conv3D(3, 2)),
    "patches of outputs": ((3, 3, 6), lambda: layers.Conv2DTranspose(4, 3, 2)),
    "channels": ((6, 6, 3), lambda: layers.DepthwiseConv2D(3, depth_multiplier=2)),
    "channels, then products": ((6, 6, 3), lambda: layers.SeparableConv2D(4, 3)),
    "normalisation": ((5, 6), layers.LayerNormalization),
    "normalisation of groups": ((5, 6), lambda: layers.GroupNormalization(2)),
    "LSTM": ((6, 5), lambda: layers.LSTM(4, return_sequences=True)),
    "LSTM, inner products": ((3, 40), lambda: layers.LSTM(32, return_sequences=True)),
    "GRU without bounds": (
        (6, 5),
        lambda: layers.GRU(4, return_sequences=True, activation="linear", reset_after=False),
    ),
    "SimpleRNN without bounds": ((6, 5), lambda: layers.SimpleRNN(4, activation="linear")),
    "half precision": ((8, 64), lambda: layers.Dense(64, dtype="mixed_bfloat16")),
}
if hasattr(layers, "RMSNormalization"):
    LAYERS["root mean square"] = ((5, 6), layers.RMSNormalization)

# By XLA, too, which sums in orders of its own.
COMPILED = ("rank one", "inner products", "patches of few channels", "embedding", "LSTM")


def _losses(y, y_pred, weight):
    products = tf.reshape(y * tf.cast(y_pred, y.dtype), [tf.shape(y)[0], -1])
    return tf.reduce_sum(products, axis=1) * weight


@functools.cache
def _case(name):
    """Returns a model and the ways to its clipped sums."""
    shape, make = LAYERS[name]
    dtype = tf.int64 if name == "embedding" else tf.float32
    model = tf.keras.Sequential([layers.Input(shape, dtype=dtype), make()])

    @tf.function(autograph=False)
    def formula(x, y, weight):
        mask = tf.not_equal(weight, 0.0)
        return vars(layerwise_clipped_sum(model, _losses, x, y, weight, CLIP, mask=mask))

    @tf.function(autograph=False)
    def general(x, y, weight):
        return vars(
            clipped_gradient_sum(
                lambda unit: _losses(unit[1], model(unit[0]), unit[2]),
                (x, y, weight),
                model.trainable_variables,
                CLIP,
                mask=tf.not_equal(weight, 0.0),
                vectorize="groups" not in name,  # TensorFlow cannot, and says so when it runs.
            )
        )

    ways = {"formula": formula}
    # The general way clips what it gets, whatever layer it is from; loops take long to vectorise.
    if not any(loop in name for loop in ("LSTM", "GRU", "RNN")):
        ways["general"] = general
    if name in COMPILED:
        ways["XLA"] = tf.function(formula.python_function, autograph=False, jit_compile=True)
    return model, ways


def _length(sums):
    return np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in sums))


def _contributions(name, x, y):
    """Returns the length of each example's contribution, by way, and the counts."""
    _, ways = _case(name)
    for way, run in ways.items():
        for i in range(len(x)):
            weight = np.zeros(len(x), np.float32)
            weight[i] = 1.0
            result = run(tf.constant(x), tf.constant(y), tf.constant(weight))
            yield way, i, _length(result["gradients"]), int(result["num_nonfinite"])


def _inputs(name, seed, scale_x, scale_y, repeats, closeness, cancels, spread):
    """Two examples: rows that repeat up to a relative difference, labels that sum to nothing."""
    model, _ = _case(name)
    rng = np.random.default_rng(seed)
    shape = (2, *model.input_shape[1:])
    out = rng.normal(size=(2, *model.output_shape[1:]))
    if name == "embedding":
        x = rng.integers(0, 1 if repeats else NUM_TOKENS, shape)
    else:
        x = rng.normal(size=shape)
        if repeats:
            first = x.reshape(2, -1, shape[-1])[:, :1]
            x = first + closeness * x.reshape(2, -1, shape[-1]) * np.abs(first)
            x = x.reshape(shape)
    rows = out.reshape(2, -1, out.shape[-1])
    rows *= 10.0 ** (spread * rng.uniform(-1, 1, rows.shape[:2])[..., None])
    if cancels and rows.shape[1] > 1:
        rows = rows.astype(np.float32).astype(np.float64)
        rows[:, -1] -= rows.sum(axis=1)
    out = rows.reshape(out.shape)
    with np.errstate(over="ignore"):
        y = (out * 10.0**scale_y).astype(np.float32)
        x = x if name == "embedding" else (x * 10.0**scale_x).astype(np.float32)
    return x, y


def _choice(seed, scale_x, scale_y, repeats, closeness, cancels, spread):
    return locals()


ORDINARY = {"repeats": False, "closeness": 0.0, "cancels": False, "spread": 0.0}
adversarial = st.builds(
    _choice,
    seed=st.integers(0, 2**32 - 1),
    scale_x=st.floats(-30, 30),
    scale_y=st.floats(-30, 30),
    repeats=st.booleans(),
    closeness=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3]),
    cancels=st.booleans(),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=20)
@given(case=adversarial)
@example(case=_choice(1, 5.0, 0.0, True, 0.0, True, 0.0))
@example(case=_choice(2, 30.0, -29.9, True, 1e-7, True, 1.0))
@example(case=_choice(3, 6.0, -2.0, True, 1e-5, True, 6.0))
@example(case=_choice(4, -30.0, 30.0, False, 0.0, False, 0.0))
def test_no_contribution_is_longer_than_the_clip_norm(name, case):
    for way, _, length, _ in _contributions(name, *_inputs(name, **case)):
        assert length <= CLIP, way


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_ordinary_gradients_lose_next_to_nothing(name, scale):
    model, _ = _case(name)
    x, y = _inputs(name, seed=7, scale_x=0.0, scale_y=np.log10(scale), **ORDINARY)
    for way, i, length, num_nonfinite in _contributions(name, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_losses(y[i : i + 1], model(x[i : i + 1]), 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        expected = min(CLIP, _length(tf.convert_to_tensor(g) for g in gradients))
        tolerance = 0.02 if name == "half precision" else 2e-5
        assert expected * (1 - tolerance) <= length <= expected * (1 + tolerance), way
        assert num_nonfinite == 0


@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_gives_exact_zeros(name):
    x, y = _inputs(name, seed=1, scale_x=0.0, scale_y=0.0, **ORDINARY)
    for way, _, length, num_nonfinite in _contributions(name, x, np.zeros_like(y)):
        assert (length, num_nonfinite) == (0.0, 0), way


@settings(max_examples=40, deadline=None)
@given(case=adversarial)
@example(case=_choice(1, 5.0, 0.0, True, 0.0, True, 0.0))
@example(case=_choice(2, 30.0, -29.9, True, 1e-7, True, 1.0))
def test_a_table_that_is_also_a_matrix_is_bounded_as_well(case):
    """Rows that are looked up and rows of products of one variable cancel, too."""
    rng = np.random.default_rng(case["seed"])
    scales = 10.0 ** np.array([case["scale_x"], case["scale_y"]])
    left = rng.normal(size=(1, 3, 7)) * scales[0]
    if case["repeats"]:  # What is multiplied is nearly what is looked up.
        left[:] = np.eye(7)[2] * scales[0] * (1 + case["closeness"] * rng.normal(size=(3, 1)))
    right = rng.normal(size=(1, 3, 4)) * scales[1]
    looked_up = rng.normal(size=(1, 3, 4)) * scales[1]
    if case["cancels"]:
        looked_up = -right * scales[0]
    with np.errstate(over="ignore"):
        left, right, looked_up = (t.astype(np.float32) for t in (left, right, looked_up))
    table = tf.Variable(tf.zeros([7, 4]))
    blocks = (
        (tf.fill([1, 3], tf.constant(2, tf.int64)), tf.constant(looked_up)),
        (tf.constant(left), tf.constant(right)),
    )
    part = ProductPart(blocks, table)
    result = clip_and_sum([part], tf.constant([True]), CLIP, None)
    assert _length(result.gradients) <= CLIP
    with np.errstate(all="ignore"):
        exact = left.astype(np.float64)[0].T @ right[0]
        exact[2] += looked_up.astype(np.float64).sum((0, 1))
    bound = np.sqrt(part.squared_norms().numpy()[0])
    assert not bound < np.linalg.norm(exact) * (1 - 1e-12)


def test_long_sums_of_equal_squares_are_not_underestimated():
    """A sum of squares in one float32 stops growing: a million ones seem to be fewer."""
    variable = tf.Variable(tf.zeros([1 << 22]))

    @tf.function(autograph=False)
    def run(x):
        return vars(
            clipped_gradient_sum(lambda x: tf.reduce_sum(variable * x), x, [variable], CLIP)
        )

    numbers = np.full([1, 1 << 22], 0.7001, np.float32)
    assert CLIP * (1 - 1e-5) <= _length(run(numbers)["gradients"]) <= CLIP


def test_candidates_that_are_all_alike_do_not_end_in_nan():
    """The norm of a sum that cancels came out as the root of a negative number."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [layers.Input((8, 20)), layers.Dense(64), layers.Dense(1), layers.Flatten()]
    )
    entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @tf.function(autograph=False)
    def run(x, y):
        losses = lambda y, y_pred, weight: entropy(y, y_pred)  # noqa: E731
        return vars(layerwise_clipped_sum(model, losses, x, y, None, CLIP))

    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = np.repeat(rng.normal(size=(1, 1, 20)), 8, axis=1).astype(np.float32)
        result = run(tf.constant(x * 10.0 ** (seed % 6)), tf.constant([seed % 8]))
        assert _length(result["gradients"]) <= CLIP
        assert int(result["num_nonfinite"]) == 0


def test_losses_on_a_tape_are_bounded_as_well():
    variable = tf.Variable(tf.zeros([3]))
    for scale in (1e-30, 1e-3, 1e15, 1e30):
        with tf.GradientTape() as tape:
            losses = tf.linalg.matvec(tf.constant([[1.0, 2.0, 3.0]]) * scale, variable)
        length = _length(clipped_gradient_sum_of_tape(tape, losses, [variable], CLIP).gradients)
        assert length <= CLIP


def test_numbers_outside_of_a_table_are_nobodys_gradient():
    """On devices that do not check indices, index 5 of example 0 must not be 0 of example 1."""
    from bandmf_tf.keras.clipping import SparsePart, SparseRows

    table = tf.Variable(tf.zeros([NUM_TOKENS, 1]))
    rows = SparseRows(tf.ones([2, 1, 1]), tf.constant([[NUM_TOKENS], [0]], tf.int64))
    part = SparsePart.from_rows(rows, table, tf.constant(2))
    np.testing.assert_allclose(part.squared_norms(), [0.0, 1.0], atol=1e-5)


def test_gradients_in_half_precision_are_refused():
    variable = tf.Variable(tf.zeros([3], tf.float16))
    with pytest.raises(ValueError, match="float32"):
        clipped_gradient_sum(
            lambda x: tf.reduce_sum(variable * x), tf.ones([2, 3], tf.float16), [variable], CLIP
        )
