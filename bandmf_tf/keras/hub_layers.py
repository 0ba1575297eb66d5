"""Layers of KerasHub, known by where their classes are; KerasHub itself is never imported.

Most of them hold layers of Keras and nothing of their own: those layers' formulas are used, if the
holder is known to keep examples apart. A few have a table or a scale, and a formula here. What is
not in these lists is taken example by example, with a warning that names it. KerasHub changes more
often than Keras, so a private model compares the formulas of these layers with a few examples taken
one by one before its first step, as it does for layers that users have registered.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.matrix_layers import Term

PACKAGE = "keras_hub"

# Modules below `keras_hub.src`, with classes in which an example never meets another one and which
# have no variables but those of layers in them.
HOLDERS = {
    "layers.modeling.cached_multi_head_attention": "CachedMultiHeadAttention",
    "layers.modeling.rotary_embedding": "RotaryEmbedding",
    "layers.modeling.sine_position_encoding": "SinePositionEncoding",
    "layers.modeling.token_and_position_embedding": "TokenAndPositionEmbedding",
    "layers.modeling.transformer_decoder": "TransformerDecoder",
    "layers.modeling.transformer_encoder": "TransformerEncoder",
    "models.gemma.gemma_attention": "CachedGemmaAttention",
    "models.gemma.gemma_decoder_block": "GemmaDecoderBlock",
    "models.llama.llama_attention": "LlamaAttention",
    "models.llama.llama_decoder": "LlamaTransformerDecoder",
    "models.llama.llama_rotary_embedding": "LlamaRotaryEmbedding",
}

# Functions of one example, as activations are.
ACTIVATIONS = {"utils.keras_utils": "gelu_approximate"}


def is_of_hub(kind: type) -> bool:
    """Whether a class is one of KerasHub's own."""
    return kind.__module__.startswith(f"{PACKAGE}.src.")


def found(names: dict[str, str]) -> list[Any]:
    """Returns what the modules hold under the names, as far as they are there and imported."""
    modules = {path: sys.modules.get(f"{PACKAGE}.src.{path}") for path in names}
    all_found = (getattr(modules[path], name, None) for path, name in names.items())
    return [each for each in all_found if each is not None]


def position_embedding(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A table of which every example uses the first rows, one at each position."""
    del inputs
    length = behind.shape[1]
    if behind.shape.rank != 3 or length is None:
        raise Unsupported(f"the shape of the output of {layer.name}")
    if length == layer.position_embeddings.shape[0]:
        return [(layer.position_embeddings, behind)]
    rows = tf.tile(tf.range(length, dtype=tf.int64)[None], [tf.shape(behind)[0], 1])
    return [(layer.position_embeddings, rows, behind)]


def call_position_embedding(
    layer: Any, call: Any, watch: Any, inputs: Any, start_index: Any = 0, positions: Any = None
) -> tf.Tensor:
    """Calls a table of positions that counts them from zero."""
    if positions is not None or tf.is_tensor(start_index) or start_index != 0:
        raise Unsupported(f"the positions of {layer.name}, which do not begin with the first")
    return watch(inputs, call(inputs))


def last_axis_rms(layer: Any, inputs: tf.Tensor, behind: tf.Tensor) -> list[Term]:
    """A division by the root of the mean square along the last axis, then a scale, or one plus it.

    Both have the same gradient.
    """
    epsilon = getattr(layer, "epsilon", 1e-6)
    squares = tf.reduce_mean(tf.square(inputs), axis=-1, keepdims=True)
    normalized = inputs * tf.math.rsqrt(squares + epsilon)
    return [
        (layer.scale, tf.reduce_sum(normalized * behind, list(range(1, behind.shape.rank - 1))))
    ]
