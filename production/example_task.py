"""An example of a task of your own: species of iris, told apart by logistic regression.

    python -m production.train_federated --task=production.example_task:iris ...

A task is a function from the configuration to a `FederatedTask`. It needs a model that TFF knows,
the data of every client by its number, and a test set.
"""

from __future__ import annotations

import collections

import numpy as np
import tensorflow as tf

from bandmf_tf.federated.runtime import tff
from bandmf_tf.simulation.config import RunConfig
from bandmf_tf.simulation.tasks import FederatedTask


def iris(config: RunConfig) -> FederatedTask:
    """The 150 real flowers that scikit-learn ships, four of five of them dealt out to clients."""
    from sklearn.datasets import load_iris

    centimetres, species = load_iris(return_X_y=True)
    # Scaled by constants: a mean or a deviation of private data would have to be private, too.
    features, labels = ((centimetres - 3.0) / 2.0).astype(np.float32), species.astype(np.int32)
    is_test = np.arange(len(labels)) % 5 == 4
    train_features, train_labels = features[~is_test], labels[~is_test]

    def client_dataset(client: int) -> tf.data.Dataset:
        # Drawn from a seed of the client's own: a round that a crash interrupted is repeated.
        draw = np.random.default_rng([config.population_seed, client])
        chosen = draw.choice(len(train_labels), size=config.examples_per_client)
        examples = (train_features[chosen], train_labels[chosen])
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        return dataset.repeat(config.local_epochs).batch(config.local_batch_size)

    def keras_model() -> tf.keras.Model:
        dense = tf.keras.layers.Dense(3, kernel_initializer="zeros", input_shape=(4,))
        return tf.keras.Sequential([dense])

    model = tff.learning.models.functional_model_from_keras(
        keras_model,
        loss_fn=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=client_dataset(0).element_spec,
        # The program shows what is called loss and accuracy; other metrics go to the files.
        metrics_constructor=lambda: collections.OrderedDict(
            loss=tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            accuracy=tf.keras.metrics.SparseCategoricalAccuracy(),
        ),
    )
    test = (features[is_test], labels[is_test])
    return FederatedTask(
        name="iris",
        data="real flowers (scikit-learn), clients synthetic",
        model=model,
        client_dataset=client_dataset,
        test_dataset=tf.data.Dataset.from_tensor_slices(test).batch(64),
    )
