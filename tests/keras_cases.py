"""A small mechanism, data set and network that the Keras tests share."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from bandmf_tf import keras as private_keras
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.keras.batches import make_batches
from bandmf_tf.mechanisms.mechanism import Mechanism, Participation
from bandmf_tf.noise.stream import NoiseStream

NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE = 12, 3, 6, 60
NOISE_SEED, SAMPLING_SEED = 5, 2

SCHEME = PoissonSampling.from_sizes(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE)
STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5, 0.3]), NUM_ROUNDS)
MECHANISM = Mechanism.create(
    STRATEGY,
    workloads.prefix_sum(NUM_ROUNDS),
    Participation.of_sampling(SCHEME),
    noise_multiplier=2.0,
    l2_norm_clip=0.7,
    delta=1e-5,
    sampling=SCHEME,
)

_rng = np.random.default_rng(0)
X = _rng.normal(size=(DATASET_SIZE, 4)).astype(np.float32)
Y = _rng.integers(0, 3, DATASET_SIZE)

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    """Returns a plain model, with the same initial weights every time."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [layers.Input((4,)), layers.Dense(5, activation="relu"), layers.Dense(3)]
    )


def batches(pinned_seed=SAMPLING_SEED):
    return make_batches((X, Y), MECHANISM, pinned_seed=pinned_seed)


def private_model(optimizer="SGD", loss=LOSS, pinned_seed=NOISE_SEED, model=None, **options):
    """Returns a compiled private model."""
    compile_options = {
        name: options.pop(name)
        for name in ("run_eagerly", "metrics", "steps_per_execution")
        if name in options
    }
    model = private_keras.make_private(network() if model is None else model)
    make = getattr(private_keras, optimizer) if isinstance(optimizer, str) else optimizer
    options.setdefault("learning_rate", 0.1)
    options.setdefault("batch_size", BATCH_SIZE)
    options.setdefault("mechanism", MECHANISM)
    model.compile(make(pinned_seed=pinned_seed, **options), loss=loss, **compile_options)
    return model


def zero_loss(y, y_pred):
    """A loss without gradients, so that all that moves the weights is noise."""
    del y
    return 0.0 * tf.reduce_sum(y_pred, axis=-1)


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


def noise_rows(variables, num_rows=NUM_ROUNDS, pinned_seed=NOISE_SEED):
    """Returns the rows of C^-1 z that belong to variables, `[rows, all their values]`."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    stream = NoiseStream(STRATEGY, MECHANISM.stddev, specs, pinned_seed=pinned_seed)
    return np.array([flat(stream.next()) for _ in range(num_rows)])


class Trajectory(tf.keras.callbacks.Callback):
    """Notes the weights after every step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        self.weights.append(flat(self.model.get_weights()))
