"""The formulas for known layers give the sums of the general way, and only where they may."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras import _compat, clipping, convolution_layers, layer_formulas
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.clipping import ClippedSum
from bandmf_tf.keras.layer_formulas import (
    FormulaError,
    check_formula,
    check_layers,
    layerwise_clipped_sum,
    register_formula,
)

layers = tf.keras.layers
CLIP = 0.5
TOKENS = (6,)


def _sequential(shape, *stack, dtype=None):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([layers.Input(shape, dtype=dtype), *stack])


# Sizes are such that each form of a norm is taken by some of them.
LAYERS = {
    "dense": ((7,), lambda: layers.Dense(5, "tanh")),
    "dense without bias": ((7,), lambda: layers.Dense(5, use_bias=False)),
    "dense on sequences": ((9, 3), lambda: layers.Dense(4, "relu")),
    "dense on short sequences": ((2, 30), lambda: layers.Dense(40)),
    "dense on images": ((2, 3, 5), lambda: layers.Dense(4)),
    "einsum": ((4, 6), lambda: _einsum("abc,cd->abd", (4, 5), "d", activation="tanh")),
    "einsum with dots": ((4, 6), lambda: _einsum("...x,xy->...y", 5, "y")),
    "einsum into heads": ((4, 6), lambda: _einsum("abc,cde->abde", (4, 2, 3), "de")),
    "einsum with a short bias": ((4, 6), lambda: _einsum("abc,cde->abde", (4, 2, 3), "d")),
    "einsum out of heads": ((4, 2, 3), lambda: _einsum("abcd,cde->abe", (4, 5), None)),
    "einsum by position": ((4, 6), lambda: _einsum("abc,bcd->abd", (4, 5), "bd")),
    "einsum transposed": ((4, 6), lambda: _einsum("abc,dc->abd", (4, 5), "d")),
    "einsum with heads first": ((4, 6), lambda: _einsum("abc,dce->abde", (4, 2, 3), "de")),
    "einsum over positions": ((4, 6), lambda: _einsum("abc,cd->ad", 5, "d")),
    "einsum permuted": ((4, 6), lambda: _einsum("abc,cde->aebd", (3, 4, 2), "e")),
    "embedding": (TOKENS, lambda: layers.Embedding(20, 3)),
    "series": ((10, 3), lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2)),
    "series in groups": ((10, 4), lambda: layers.Conv1D(6, 3, 2, "same", groups=2)),
    "images of few channels": (
        (9, 8, 1),
        lambda: layers.Conv2D(3, (3, 2), strides=2, padding="same", activation="relu"),
    ),
    "images of many channels": ((7, 7, 5), lambda: layers.Conv2D(4, 3, (1, 2), use_bias=False)),
    "pieces of two pixels": ((9, 13, 5), lambda: layers.Conv2D(4, (3, 4), (1, 2))),
    "pieces that are apart": ((9, 11, 5), lambda: layers.Conv2D(4, 2, 4, use_bias=False)),
    "dilated images": ((7, 7, 5), lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same")),
    "large images": ((16, 16, 8), lambda: layers.Conv2D(16, 3, padding="same")),
    "large images with strides": ((18, 17, 8), lambda: layers.Conv2D(32, 3, (1, 2), "same")),
    "large images, not padded": ((18, 17, 8), lambda: layers.Conv2D(16, (4, 3), use_bias=False)),
    "large images of few channels": ((20, 17, 3), lambda: layers.Conv2D(16, 7, 2, "same")),
    "large images, blocks cut off": ((23, 18, 1), lambda: layers.Conv2D(8, (4, 3), (3, 4))),
    "long series": ((901, 8), lambda: layers.Conv1D(32, 3, 2, "same")),
    "one position": ((3, 3, 8), lambda: layers.Conv2D(40, 3)),
    "images in groups": ((7, 7, 6), lambda: layers.Conv2D(4, 3, groups=2, activation="selu")),
    "volumes": ((5, 4, 6, 2), lambda: layers.Conv3D(3, (2, 3, 2), (1, 2, 2), "same")),
    "dilated volumes": ((5, 6, 6, 2), lambda: layers.Conv3D(3, 2, dilation_rate=2)),
    "volumes in groups": ((5, 6, 6, 4), lambda: layers.Conv3D(4, 2, groups=2)),
    "transposed series": ((5, 3), lambda: layers.Conv1DTranspose(4, 3, 2, "same")),
    "transposed images": ((5, 4, 3), lambda: layers.Conv2DTranspose(4, 3, 2, "same")),
    "transposed, not padded": ((5, 4, 3), lambda: layers.Conv2DTranspose(4, (2, 3), (3, 1))),
    "transposed volumes": ((3, 4, 3, 2), lambda: layers.Conv3DTranspose(2, 2, 2)),
    "series by channel": ((9, 3), lambda: layers.DepthwiseConv1D(3, 2, "same", 2)),
    "images by channel": ((7, 8, 3), lambda: layers.DepthwiseConv2D(3, 2, "same", 2)),
    "dilated by channel": ((7, 8, 3), lambda: layers.DepthwiseConv2D((2, 3), dilation_rate=2)),
    "separable series": ((9, 3), lambda: layers.SeparableConv1D(4, 3, 2)),
    "separable images": (
        (7, 8, 3),
        lambda: layers.SeparableConv2D(4, 3, 2, "same", depth_multiplier=2, activation="tanh"),
    ),
    "separable, dilated": ((7, 8, 3), lambda: layers.SeparableConv2D(4, 3, dilation_rate=2)),
    "normalisation": ((4, 7), layers.LayerNormalization),
    "normalisation along two": ((4, 7), lambda: layers.LayerNormalization([1, 2], center=False)),
    "normalisation by position": ((4, 7), lambda: layers.LayerNormalization(1, scale=False)),
    "groups": ((4, 5, 8), lambda: layers.GroupNormalization(2)),
    "groups along the first": ((8, 5, 4), lambda: layers.GroupNormalization(4, axis=1)),
    "groups of one": ((4, 8), lambda: layers.GroupNormalization(-1)),
    "LSTM": ((5, 3), lambda: layers.LSTM(4)),
    "LSTM with sequences": ((5, 3), lambda: layers.LSTM(4, return_sequences=True, use_bias=False)),
    "LSTM backwards": (
        (5, 3),
        lambda: layers.LSTM(4, return_sequences=True, go_backwards=True, implementation=1),
    ),
    "LSTM without loop": ((5, 3), lambda: layers.LSTM(4, unroll=True, activation="relu")),
    "LSTM of one step": ((1, 3), lambda: layers.LSTM(4)),
    "LSTM, large": ((3, 40), lambda: layers.LSTM(30)),
    "GRU": ((5, 3), lambda: layers.GRU(4, return_sequences=True)),
    "GRU without bias": ((5, 3), lambda: layers.GRU(4, use_bias=False)),
    "GRU, reset first": ((5, 3), lambda: layers.GRU(4, reset_after=False)),
    "SimpleRNN": ((5, 3), lambda: layers.SimpleRNN(4)),
    "both directions": (
        (5, 3),
        lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
    ),
    "both directions, summed": (
        (5, 3),
        lambda: layers.Bidirectional(layers.GRU(4), merge_mode="sum"),
    ),
}
if hasattr(layers, "RMSNormalization"):
    LAYERS["root mean square"] = ((4, 7), layers.RMSNormalization)


def _einsum(equation, shape, bias_axes, **options):
    return layers.EinsumDense(equation, shape, bias_axes=bias_axes, **options)


def _two_branches():
    x = layers.Input((8, 8, 2))
    left = layers.Conv2D(3, 3, padding="same", activation="tanh")(x)
    right = layers.Conv2D(3, 1, activation="relu")(x)
    joined = layers.Add()([left, right])
    inner = tf.keras.Sequential([layers.Input((192,)), layers.Dense(5, activation="elu")])
    return tf.keras.Model(x, layers.Dense(1)(inner(layers.Flatten()(joined))))


def _attention(**options):
    x = layers.Input((5, 6))
    attended = layers.MultiHeadAttention(2, 3, **options)(x, x, use_causal_mask=True)
    joined = layers.LayerNormalization()(layers.Add()([x, attended]))
    return tf.keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling1D()(joined)))


def _grouped_query_attention():
    x = layers.Input((5, 8))
    attended = layers.GroupedQueryAttention(4, 4, 2)(x, x)
    return tf.keras.Model(x, layers.Dense(2)(layers.Flatten()(attended)))


def _shared():
    """One dense layer at three places, of one position and of several; a shared normalisation."""
    x, layer, norm = layers.Input((4, 6)), layers.Dense(6, "tanh"), layers.LayerNormalization()
    twice = norm(layer(norm(layer(x))))
    joined = layers.Add()([layers.Flatten()(twice), layers.Dense(24)(layers.Flatten()(x))])
    pooled = layers.GlobalAveragePooling1D()(layers.Reshape((4, 6))(joined))
    return tf.keras.Model(x, layers.Dense(2)(layer(pooled)))


def _shared_lookups():
    x, table = layers.Input(TOKENS, dtype=tf.int64), layers.Embedding(9, 4, mask_zero=True)
    left, right = layers.LSTM(3)(table(x)), layers.GlobalAveragePooling1D()(table(x))
    return tf.keras.Model(x, layers.Dense(2)(layers.Concatenate()([left, right])))


def _tied(vocabulary):
    x = layers.Input(TOKENS, dtype=tf.int64)
    table = layers.ReversibleEmbedding(vocabulary, 5)
    return tf.keras.Model(
        x, layers.GlobalAveragePooling1D()(table(layers.Dense(5)(table(x)), reverse=True))
    )


def _masked(kind, **options):
    x = layers.Input(TOKENS, dtype=tf.int64)
    h = layers.Embedding(9, 4, mask_zero=True)(x)
    h = layers.Bidirectional(kind(3, return_sequences=True, **options))(h)
    return tf.keras.Model(x, layers.Dense(2)(kind(3, go_backwards=True)(h)))


def _states():
    """An encoder whose states begin a decoder."""
    x = layers.Input((5, 3))
    output, h, c = layers.LSTM(4, return_state=True)(x)
    decoded = layers.LSTM(4)(x, initial_state=[h, c])
    again = layers.GRU(4, return_sequences=True)(x, initial_state=c)
    return tf.keras.Model(
        x, layers.Dense(2)(layers.Concatenate()([output, decoded, layers.Flatten()(again)]))
    )


MODELS = {
    "two branches": _two_branches,
    "attention": _attention,
    "attention along an axis": lambda: _attention(attention_axes=(1,), output_shape=6),
    "a layer at three places": _shared,
    "a table that is shared": _shared_lookups,
    "masked LSTM": lambda: _masked(layers.LSTM),
    "masked GRU": lambda: _masked(layers.GRU, zero_output_for_mask=True),
    "masked SimpleRNN": lambda: _masked(layers.SimpleRNN),
    "states": _states,
    "Conv1D after an embedding": lambda: _sequential(
        TOKENS, layers.Embedding(9, 4), layers.Conv1D(3, 3), layers.Flatten(), dtype=tf.int64
    ),
}
if hasattr(layers, "GroupedQueryAttention"):
    MODELS["grouped queries"] = _grouped_query_attention
if hasattr(layers, "ReversibleEmbedding"):
    MODELS["a table that is also the last matrix"] = lambda: _tied(9)
    MODELS["a large table that is also the last matrix"] = lambda: _tied(200)


def _model_of(name):
    shape, make = LAYERS[name]
    dtype = tf.int64 if shape is TOKENS else None
    return _sequential(shape, make(), layers.Flatten(), layers.Dense(2), dtype=dtype)


def _randomized(model):
    """Zeros and ones, of which variables begin, would hide mistakes."""
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return model


def _data(model, size=6):
    rng = np.random.default_rng(2)
    shape = (size, *model.input_shape[1:])
    if "int" in str(model.inputs[0].dtype):
        x = rng.integers(0, 5, shape)  # Few tokens, so that they repeat.
    elif "bool" in str(model.inputs[0].dtype):
        x = rng.integers(0, 2, shape) > 0
    else:
        x = rng.normal(size=shape).astype(np.float32)
    return tf.constant(x), tf.constant(rng.normal(size=(size, model.output_shape[-1])), tf.float32)


def _losses(y, y_pred, weight):
    losses = tf.reduce_mean(tf.square(y - tf.cast(y_pred, tf.float32)), axis=-1)
    return losses if weight is None else losses * weight


def _layerwise(model, x, y, weight=None, **options):
    @tf.function(autograph=False)
    def run(x, y, weight):
        mask = None if weight is None else tf.not_equal(weight, 0.0)
        return vars(layerwise_clipped_sum(model, _losses, x, y, weight, CLIP, mask=mask, **options))

    return ClippedSum(**run(x, y, weight))


def _one_by_one(model, x, y, weight=None):
    """Returns the sum that plain gradients of single examples give."""
    weights = np.ones(len(x), np.float32) if weight is None else weight.numpy()
    sums = [np.zeros(v.shape) for v in model.trainable_variables]
    outputs, num_clipped = model(x, training=False), 0
    for i in np.flatnonzero(weights):
        with tf.GradientTape() as tape:
            y_pred = model(x[i : i + 1], training=False)
            loss = tf.reduce_sum(_losses(y[i : i + 1], y_pred, weights[i]))
        gradients = [
            np.asarray(tf.convert_to_tensor(g), np.float64)
            for g in tape.gradient(loss, model.trainable_variables)
        ]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        num_clipped += norm > CLIP
        sums = [s + g * min(1.0, CLIP / norm) for s, g in zip(sums, gradients, strict=True)]
    return ClippedSum(sums, np.count_nonzero(weights), num_clipped, 0, outputs)


def _assert_equal(result, expected, tolerance=3e-5):
    for got, want in zip(result.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance)
    for name in ("num_units", "num_clipped", "num_nonfinite"):
        assert int(getattr(result, name)) == int(getattr(expected, name)), name
    np.testing.assert_allclose(result.outputs, expected.outputs, rtol=1e-5, atol=tolerance)


def _assert_sums_of_examples(model):
    x, y = _data(model)
    weight = tf.constant([1.0, 0.0, 1.0, 3.0, 0.0, 1.0])
    result = _layerwise(model, x, y, weight)
    _assert_equal(result, _one_by_one(model, x, y, weight))
    assert int(result.num_clipped) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_sums_of_a_layer_are_those_of_examples_one_by_one(name):
    _assert_sums_of_examples(_randomized(_model_of(name)))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_sums_of_a_model_are_those_of_examples_one_by_one(make):
    tf.keras.utils.set_random_seed(1)
    _assert_sums_of_examples(_randomized(make()))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_are_multiplied_and_no_rows_of_a_table(dtype):
    # As many examples as inputs and as outputs: no shape would tell rows from numbers.
    _assert_sums_of_examples(_sequential((6,), layers.Dense(6), layers.Dense(2), dtype=dtype))


def test_integers_have_no_formula_in_a_normalisation():
    model = _sequential((6,), layers.LayerNormalization(), layers.Dense(2), dtype="int32")
    with pytest.raises(Unsupported, match="the integers that"):
        _layerwise(model, *_data(model))


def test_chunks_and_missing_weights_make_no_difference():
    model = _model_of("images of few channels")
    x, y = _data(model, 7)
    expected = _one_by_one(model, x, y)
    _assert_equal(_layerwise(model, x, y), expected)
    _assert_equal(_layerwise(model, x, y, chunk_size=3), expected)


def test_a_convolution_of_large_images_is_left_to_tensorflow(monkeypatch):
    calls = []
    for name in ("_one_by_one", "_as_groups"):
        original = getattr(convolution_layers, name)

        def spy(*args, name=name, original=original):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(convolution_layers, name, spy)
    model = _model_of("large images")
    expected = _one_by_one(model, *_data(model))
    for has_onednn in {_compat.has_onednn(), False}:
        monkeypatch.setattr(_compat, "has_onednn", lambda has_onednn=has_onednn: has_onednn)
        calls.clear()
        _assert_equal(_layerwise(model, *_data(model)), expected)
        _assert_equal(_layerwise(model, *_data(model), chunk_size=4), expected)
        assert set(calls) == {"_as_groups" if has_onednn else "_one_by_one"}


@pytest.mark.parametrize(
    ("module", "limit", "name", "is_cut"),
    [
        (clipping, "DEFAULT_MEMORY_BYTES", "images of many channels", True),
        (layer_formulas, "_CACHE_BYTES", "images of many channels", True),
        (clipping, "DEFAULT_MEMORY_BYTES", "LSTM", True),
        (layer_formulas, "_CACHE_BYTES", "LSTM", False),  # Whose loops would be as long.
    ],
)
def test_large_batches_are_cut_to_memory_and_cache(module, limit, name, is_cut, monkeypatch):
    model = _model_of(name)
    x, y = _data(model, 7)
    expected = _one_by_one(model, x, y)
    lengths = []
    original = clipping.sum_in_chunks

    def spy(sum_chunk, batch, mask, chunk_size, *rest):
        lengths.append(chunk_size)
        return original(sum_chunk, batch, mask, chunk_size, *rest)

    monkeypatch.setattr(module, limit, 8_000)
    monkeypatch.setattr(layer_formulas, "_FEWEST_IN_CACHE", 2)
    monkeypatch.setattr(clipping, "sum_in_chunks", spy)
    _assert_equal(_layerwise(model, x, y), expected)
    assert (1 <= lengths[0] < 7) == is_cut


@pytest.mark.parametrize("name", ["images of few channels", "large images"])
def test_examples_with_nan_or_infinity_contribute_zeros_and_are_counted(name):
    model = _model_of(name)
    x, y = _data(model)
    broken = x.numpy()
    broken[1, 3] = np.nan
    broken[4, 2] = np.inf
    result = _layerwise(model, tf.constant(broken), y)
    kept = tf.constant([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    expected = _layerwise(model, x, y, kept)
    for got, want in zip(result.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert (int(result.num_units), int(result.num_nonfinite)) == (6, 2)


def test_a_frozen_layer_is_left_out():
    model = _model_of("dense")
    model.layers[0].trainable = False
    x, y = _data(model)
    result = _layerwise(model, x, y)
    assert len(result.gradients) == 2
    _assert_equal(result, _one_by_one(model, x, y))


@pytest.mark.parametrize("axis", [-1, 1])
def test_frozen_batch_normalisation_is_a_function_of_each_example(axis):
    norm = layers.BatchNormalization(axis, trainable=False)
    tail = (layers.Flatten(), layers.Dense(2))
    model = _sequential((5, 3), layers.Dense(4, "tanh"), norm, *tail)
    norm.set_weights([np.linspace(1, 3, w.size) for w in map(np.array, norm.get_weights())])
    _assert_sums_of_examples(model)
    norm.trainable = True
    with pytest.raises(Unsupported, match="which is trained"):
        check_layers(model)


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, x):
        return self.layer(x)


UNKNOWN = {
    "a subclassed model": _Subclassed,
    "a layer of one's own": lambda: _sequential((3,), type("Mine", (layers.Dense,), {})(2)),
    "a function as activation": lambda: _sequential(
        (3,), layers.Dense(2, activation=lambda x: x - tf.reduce_mean(x, axis=0))
    ),
    "a function as layer": lambda: _sequential((3,), layers.Lambda(tf.abs), layers.Dense(2)),
    "an operation as layer": lambda: tf.keras.Model(
        x := layers.Input((3,)), layers.Dense(2)(x * x[0])
    ),
    "batch normalisation": lambda: _sequential((3,), layers.BatchNormalization(), layers.Dense(2)),
    "states that outlive a batch": lambda: tf.keras.Sequential(
        [tf.keras.Input(batch_size=2, shape=(3, 1)), layers.LSTM(2, stateful=True)]
    ),
    "dropout of states": lambda: _sequential((3, 1), layers.GRU(2, recurrent_dropout=0.5)),
    "dropout of gates": lambda: _sequential((3, 1), layers.LSTM(2, dropout=0.5, implementation=1)),
    "an activation of one's own in a gate": lambda: _sequential(
        (3, 1), layers.LSTM(2, recurrent_activation=lambda x: x - tf.reduce_mean(x, axis=0))
    ),
    "attention between examples": lambda: _attention(attention_axes=(0,)),
    "normalisation of examples": lambda: tf.keras.Sequential(
        [tf.keras.Input(batch_size=2, shape=(3,)), layers.LayerNormalization(0)]
    ),
    "channels first": lambda: _sequential(
        (2, 5, 5), layers.Conv2D(2, 2, data_format="channels_first")
    ),
    "along the axis of examples": lambda: _sequential((3,), layers.Softmax(axis=0)),
}


def _with_cell():
    model = _sequential((3, 1), layers.LSTM(2))
    model.layers[0].cell.call = lambda inputs, states, training=None: (inputs, states)
    return model


UNKNOWN["a method of a cell"] = _with_cell


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_goes_the_general_way(make):
    with pytest.raises(Unsupported):
        check_layers(make())


def test_layers_are_as_they_were_afterwards():
    model = _model_of("embedding")
    before = [(layer.call, getattr(layer, "activation", None)) for layer in model.layers]
    _layerwise(model, *_data(model))
    after = [(layer.call, getattr(layer, "activation", None)) for layer in model.layers]
    assert before == after
    assert all("call" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    "name", ["dense on sequences", "large images", "LSTM", "separable images", "groups"]
)
def test_mixed_precision_sums_in_float32(name):
    shape, make = LAYERS[name]
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        layer = make()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    x = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    check_formula(layer, x)
    model = _sequential(shape, layer, layers.Flatten(), layers.Dense(2))
    assert all(g.dtype == tf.float32 for g in _layerwise(model, *_data(model)).gradients)


def test_an_empty_batch_has_no_gradient():
    model = _model_of("LSTM")
    x, y = _data(model)
    run = tf.function(
        lambda x, y: vars(layerwise_clipped_sum(model, _losses, x, y, None, CLIP)),
        autograph=False,
        input_signature=[tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)],
    )
    for size in (0, 1):
        result = run(x[:size], y[:size])
        assert int(result["num_units"]) == size
        assert all(np.any(g) == bool(size) for g in result["gradients"])


def test_an_output_without_loss_has_no_gradient():
    x = layers.Input((4,))
    model = tf.keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)])
    data = tf.ones([3, 4]), tf.ones([3, 2])

    def losses(y, y_pred, weight):
        return _losses(y, y_pred[0], weight)

    sums = layerwise_clipped_sum(model, losses, *data, None, CLIP).gradients
    assert np.any(sums[0])
    assert not np.any(sums[2])


@pytest.mark.skipif(not hasattr(layers.Dense, "enable_lora"), reason="Keras 2 has no LoRA.")
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "dense on sequences",
        "einsum into heads",
        "einsum out of heads",
        "einsum transposed",
        "einsum by position",
        "einsum with heads first",
        "embedding",
        "series",
        "images of few channels",
        "images in groups",
        "one position",
    ],
)
def test_low_rank_adapters(name):
    model = _model_of(name)
    layer = model.layers[0]
    layer.enable_lora(2, lora_alpha=3)
    assert sum("lora" in v.path for v in layer.trainable_variables) == 2
    _assert_sums_of_examples(_randomized(model))


class Polynomial(layers.Layer):
    """A layer of a user's own: x W + x^2 V."""

    def build(self, input_shape):
        shape = (input_shape[-1], 3)
        self.linear = self.add_weight(name="linear", shape=shape)
        self.quadratic = self.add_weight(name="quadratic", shape=shape)

    def call(self, inputs):
        return tf.matmul(inputs, self.linear) + tf.matmul(inputs**2, self.quadratic)


def _polynomial(layer, inputs, behind, power=2):
    gradients = tf.einsum("ai,aj->aij", inputs, behind)
    return [
        (layer.linear, gradients),
        (layer.quadratic, (inputs**power)[:, None], behind[:, None]),
    ]


@pytest.fixture
def registry(monkeypatch):
    for name in ("_FORMULAS", "_KNOWN", "_REGISTERED"):
        monkeypatch.setattr(layer_formulas, name, getattr(layer_formulas, name).copy())


@pytest.mark.usefixtures("registry")
class TestFormulasOfUsers:
    X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)

    def test_a_right_formula_is_used(self):
        register_formula(Polynomial, _polynomial)
        check_formula(Polynomial(), self.X)
        _assert_sums_of_examples(_sequential((4,), Polynomial(), layers.Dense(2)))

    @pytest.mark.parametrize(
        ("formula", "message"),
        [
            (lambda *a: _polynomial(*a, power=1), "quadratic"),
            (lambda layer, x, e: _polynomial(layer, x, -e), "sums of gradients of"),
            (lambda *a: _polynomial(*a)[:1], "No formula is known for a variable"),
        ],
        ids=["other numbers", "other signs", "a part"],
    )
    def test_a_wrong_one_is_refused(self, formula, message):
        register_formula(Polynomial, formula)
        with pytest.raises(FormulaError, match=message):
            check_formula(Polynomial(), self.X)

    @pytest.mark.parametrize("kind", ["a formula", "a layer without one"])
    def test_a_wrong_one_trains_nothing(self, kind):
        class Tied(layers.Layer):
            """Uses a variable of another layer beside that layer's own call."""

            def __init__(self):
                super().__init__()
                self.inner = layers.Dense(4)

            def call(self, inputs):
                return tf.matmul(self.inner(inputs), tf.convert_to_tensor(self.inner.kernel))

        register_formula(Tied, None)
        register_formula(Polynomial, lambda *a: _polynomial(*a, power=1))
        layer, name = (Polynomial(), "quadratic") if kind == "a formula" else (Tied(), "kernel")
        model = private_keras.make_private(_sequential((4,), layer, layers.Dense(3)))
        mechanism = private_keras.BareMechanism(ToeplitzStrategy(np.array([1.0]), 9), 1.0, 0.7)
        model.compile(private_keras.SGD(mechanism, 0.1, batch_size=5), "mse")
        before = model.get_weights()
        with pytest.raises(FormulaError, match=name):
            model.fit(self.X, np.zeros((5, 3)), batch_size=5, verbose=0)
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)

    def test_it_holds_for_exactly_that_class_as_it_is(self, monkeypatch):
        with pytest.raises(FormulaError, match="No formula is known"):
            check_formula(Polynomial(), self.X)
        register_formula(Polynomial, _polynomial)
        with pytest.raises(FormulaError, match="No formula is known"):
            check_formula(type("Derived", (Polynomial,), {})(), self.X)
        monkeypatch.setattr(Polynomial, "call", lambda self, x: x - tf.reduce_mean(x, axis=0))
        with pytest.raises(FormulaError, match="No formula is known"):
            check_formula(Polynomial(), self.X)

    def test_a_layer_that_holds_layers(self):
        class Block(layers.Layer):
            def __init__(self):
                super().__init__()
                self.first, self.second = layers.Dense(4, "tanh"), Polynomial()

            def call(self, inputs):
                return self.second(self.first(inputs) + self.first(inputs * 2))

        register_formula(Block, None)
        with pytest.raises(FormulaError, match="Polynomial"):
            check_formula(Block(), self.X)
        register_formula(Polynomial, _polynomial)
        check_formula(Block(), self.X)

    def test_layers_that_hold_layers_of_keras_agree(self):
        class Attention(layers.Layer):
            def __init__(self):
                super().__init__()
                self.attention = layers.MultiHeadAttention(2, 2)

            def call(self, inputs):
                return self.attention(inputs, inputs)

        register_formula(Attention, None)
        check_formula(Attention(), self.X[:, :, None])

    def test_layers_of_keras_keep_theirs(self):
        with pytest.raises(FormulaError, match="Dense of Keras"):
            register_formula(layers.Dense, _polynomial)
        with pytest.raises(FormulaError, match="Found 3"):
            register_formula(3, _polynomial)
