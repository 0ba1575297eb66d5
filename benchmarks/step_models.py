"""The networks whose training steps `keras_step.py` and its peers time, in Keras.

`peer_opacus_step.py` and `peer_jax_step.py` have the same ones, layer by layer: images and texts of
these sizes, a cross-entropy of ten classes. They import this file, so it imports TensorFlow late.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH_SIZES = {"cnn": 256, "transformer": 64, "lora": 64, "resnet": 64, "lstm": 64}
CLASSES, WORDS, LENGTH, WIDTH, HEADS, BLOCKS, RANK = 10, 2_000, 64, 128, 4, 4, 4
STAGES, GROUPS = (16, 32, 64), 8
SHAPES = {"cnn": (28, 28, 1), "resnet": (32, 32, 3)}


def examples(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up inputs and labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=count)
    if name in SHAPES:
        return rng.normal(size=(count, *SHAPES[name])).astype(np.float32), labels
    return rng.integers(WORDS, size=(count, LENGTH)).astype(np.int32), labels


def make(name: str) -> Any:
    """Returns a network with random weights."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    return {
        "cnn": _cnn,
        "transformer": _transformer,
        "lora": lambda: _transformer(RANK),
        "resnet": _resnet,
        "lstm": _lstm,
    }[name]()


def _cnn() -> Any:
    """The network of TensorFlow Privacy's tutorials, 26,010 parameters."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input(SHAPES["cnn"]),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
            layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 4, strides=2, padding="valid", activation="relu"),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def _transformer(rank: int | None = None) -> Any:
    """Blocks of attention and two dense layers, normalised first; with a rank, adapters of it.

    Adapters are those of queries and values; beside them the last layer alone is trained.
    """
    import tensorflow as tf

    layers = tf.keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal)])
        normal = layers.LayerNormalization()(x)
        wide = layers.Dense(4 * WIDTH, activation="relu")(normal)
        x = layers.Add()([x, layers.Dense(WIDTH)(wide)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = tf.keras.Model(tokens, layers.Dense(CLASSES)(x))
    if rank is not None:
        for layer in model.layers[:-1]:
            layer.trainable = False
        for layer in model._flatten_layers(include_self=False):
            if layer.name in ("query", "value"):
                layer.trainable = True
                layer.enable_lora(rank)
                layer.bias.trainable = False
    return model


def _resnet() -> Any:
    """Three stages of two blocks of two convolutions, with group normalisation."""
    import tensorflow as tf

    layers = tf.keras.layers

    def convolution(x: Any, filters: int, stride: int = 1, size: int = 3) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.GroupNormalization(GROUPS)(x)

    image = layers.Input(SHAPES["resnet"])
    x = layers.ReLU()(convolution(image, STAGES[0]))
    for filters in STAGES:
        for block in range(2):
            stride = 2 if block == 0 and filters != STAGES[0] else 1
            short = x if stride == 1 else convolution(x, filters, stride, 1)
            x = convolution(layers.ReLU()(convolution(x, filters, stride)), filters)
            x = layers.ReLU()(layers.Add()([x, short]))
    return tf.keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _lstm() -> Any:
    """Words, one LSTM, the last of its states."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, WIDTH),
            layers.LSTM(WIDTH),
            layers.Dense(CLASSES),
        ]
    )
