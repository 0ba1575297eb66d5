"""Models of KerasHub, built from its own classes, take the steps of examples one by one."""

from __future__ import annotations

import importlib
import logging

import numpy as np
import pytest
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.keras._common import IS_KERAS_3
from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.layer_formulas import check_layers

# KerasHub is for Keras 3; `find_spec` would not notice one that does not import.
keras_hub = pytest.importorskip("keras_hub")
if not IS_KERAS_3:  # tf-keras is in its place.
    pytest.skip("KerasHub is for Keras 3.", allow_module_level=True)
models = keras_hub.models

WORDS, LENGTH, SIZE, CLIP = 30, 6, 5, 0.05
COMMON = {"vocabulary_size": WORDS, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12}
HEADS = {"num_heads": 2, "max_sequence_length": 8, "dropout": 0.0}
GROUPS = {"num_query_heads": 2, "num_key_value_heads": 1}

TASKS = {
    "gpt2": lambda: models.GPT2CausalLM(models.GPT2Backbone(**COMMON, **HEADS)),
    "bert": lambda: models.BertTextClassifier(
        models.BertBackbone(**COMMON, **{**HEADS, "max_sequence_length": LENGTH}),
        num_classes=3,
        dropout=0.0,
    ),
    "gemma": lambda: models.GemmaCausalLM(
        models.GemmaBackbone(**COMMON, **GROUPS, head_dim=4, use_post_ffw_norm=True)
    ),
    "llama": lambda: models.LlamaCausalLM(models.LlamaBackbone(**COMMON, **GROUPS)),
}


def task_of(name, rank=None):
    tf.keras.utils.set_random_seed(0)
    task = TASKS[name]()
    if rank is not None:
        task.backbone.enable_lora(rank)
    rng = np.random.default_rng(1)
    for variable in task.weights:  # Zeros would hide mistakes.
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    return task


def data_of(task):
    """Returns inputs, labels and weights; the ends of some texts are padding."""
    rng = np.random.default_rng(2)
    x = {i.name: rng.integers(0, 2, (SIZE, LENGTH)).astype("int32") for i in task.inputs}
    x["token_ids"] = rng.integers(0, WORDS, (SIZE, LENGTH)).astype("int32")
    x["padding_mask"] = (np.arange(LENGTH) < [[6], [6], [4], [3], [5]]).astype("int32")
    if len(task.output_shape) == 2:
        return x, rng.integers(0, 3, SIZE), np.ones(SIZE, np.float32)
    return x, rng.integers(0, WORDS, (SIZE, LENGTH)), x["padding_mask"].astype("float32")


def one_by_one(task, x, y, weight):
    variables = task.trainable_variables
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    total, was_clipped = [np.zeros(v.shape) for v in variables], 0

    @tf.function(autograph=False)
    def gradients_of(x, y, weight):
        with tf.GradientTape() as tape:
            value = loss(y, task(x), weight)
        return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

    for i in range(SIZE):
        one = tf.nest.map_structure(lambda t: tf.constant(t[i : i + 1]), (x, y, weight))  # noqa: B023
        gradients = [g.numpy().astype(float) for g in gradients_of(*one)]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        was_clipped += norm > CLIP
        total = [t + g * min(1.0, CLIP / norm) for t, g in zip(total, gradients, strict=True)]
    assert was_clipped
    return total


@pytest.mark.parametrize(
    ("name", "rank"),
    [("gpt2", None), ("gpt2", 2), ("bert", None), ("gemma", None), ("gemma", 2), ("llama", None)],
)
def test_a_step_is_that_of_examples_one_by_one(name, rank, caplog):
    task = task_of(name, rank)
    x, y, weight = data_of(task)
    before = [np.array(v) for v in task.trainable_variables]
    expected = one_by_one(task, x, y, weight)
    model = private_keras.make_private(task)
    noiseless = private_keras.BareMechanism(identity(4), 1e-9, CLIP)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(private_keras.SGD(noiseless, 1.0, batch_size=1), loss)
    with caplog.at_level(logging.WARNING, "bandmf_tf"):
        model.train_on_batch(x, y, weight)
    assert "example by example" not in caplog.text
    for old, variable, total in zip(before, task.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(
            old - np.array(variable), total, atol=3e-6, err_msg=variable.path
        )


def test_a_layer_that_is_not_known_is_named(caplog):
    """One of KerasHub's own that no list has, and one of theirs that somebody changed."""
    layer = importlib.import_module("keras_hub.layers").FNetEncoder(intermediate_dim=4)
    inputs = tf.keras.Input((LENGTH, 4))
    with pytest.raises(Unsupported, match="of type FNetEncoder"):
        check_layers(tf.keras.Model(inputs, layer(inputs)))
    task = task_of("gpt2")
    decoder = task.backbone.transformer_layers[0]
    decoder.call = lambda x, **_: x - tf.reduce_mean(x, axis=0)
    with pytest.raises(Unsupported, match="of type TransformerDecoder"):
        check_layers(private_keras.make_private(task))
