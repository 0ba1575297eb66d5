"""A federated task whose model is as large as one likes and whose clients have nothing to compute.

    python -m production.train_federated --task=benchmarks.large_task:table ...

A table of `LARGE_TASK_PARAMETERS` values (25 million), of which a client reads a few rows: what a
round takes is what the size of the model costs.
"""

from __future__ import annotations

import collections
import os

import numpy as np
import tensorflow as tf

from bandmf_tf.federated.runtime import tff
from bandmf_tf.simulation.config import RunConfig
from bandmf_tf.simulation.tasks import FederatedTask

_CLASSES = 16


def table(config: RunConfig) -> FederatedTask:
    """Words and their class, one of 16, drawn at random: there is nothing to be learnt."""
    words = int(os.environ.get("LARGE_TASK_PARAMETERS", "25000000")) // _CLASSES

    def client_dataset(client: int) -> tf.data.Dataset:
        draw = np.random.default_rng([config.population_seed, client])
        shape = [config.examples_per_client, 1]
        examples = (
            draw.integers(words, size=shape, dtype=np.int32),
            draw.integers(_CLASSES, size=shape, dtype=np.int32),
        )
        return tf.data.Dataset.from_tensor_slices(examples).batch(config.local_batch_size)

    def keras_model() -> tf.keras.Model:
        layer = tf.keras.layers.Embedding(words, _CLASSES, embeddings_initializer="zeros")
        return tf.keras.Sequential([tf.keras.Input([1], dtype=tf.int32), layer])

    model = tff.learning.models.functional_model_from_keras(
        keras_model,
        loss_fn=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=client_dataset(0).element_spec,
        metrics_constructor=lambda: collections.OrderedDict(
            loss=tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        ),
    )
    return FederatedTask(
        name="large table",
        data="synthetic words",
        model=model,
        client_dataset=client_dataset,
        test_dataset=client_dataset(config.num_clients),
    )
