"""Learning tasks for federated training: a model, clients with data, and a test set.

A task of your own is a function from a `RunConfig` to a `FederatedTask`; name it in the
configuration as `module:function`:

    def my_task(config: RunConfig) -> FederatedTask:
        ...
        return FederatedTask(name="mine", model=my_tff_model, client_dataset=dataset_of, ...)

`model` is a `tff.learning.models.FunctionalModel` or a function without arguments that returns a
`tff.learning.models.VariableModel`. `client_dataset(i)` returns the batched examples of client i,
with the input spec of the model, the same at every call: a crash makes a round run again. With
`client_ids` clients go by their names instead, such as those of a `ClientData` of TFF, and with
`data_source` the task brings cohorts of its own.
`production/example_task.py` is an example.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from bandmf_tf.federated.runtime import tff
from bandmf_tf.simulation.config import ConfigError, RunConfig

# Characters of a text, fixed in advance: those that occur would tell of private data. All others
# are number 0. An example is this many of them.
_ALPHABET = string.ascii_lowercase + " \n,.;:!?'-"
_WINDOW = 25

# Of the network that reads them; small, because every parameter has its noise.
_EMBEDDING, _UNITS = 8, 32


@dataclasses.dataclass(frozen=True)
class FederatedTask:
    """What is learned, from whom, and how it is judged.

    Attributes:
      name: Name to show.
      data: Where the data come from, in words; says so if they are synthetic. A run is continued
        only with the same.
      model: A TFF functional model, or a function that returns a TFF variable model.
      client_dataset: From the number of a client to its batched training data.
      test_dataset: Batched data on which released models are evaluated. It must not be private data
        of the training population: evaluating is not covered by the guarantee then.
      client_ids: Names of the clients, or a function from how many are wanted to those who can be
        reached now; `client_dataset` then takes a name. For registered clients.
      data_source: Where cohorts come from (`clients: data_source`).
    """

    name: str
    data: str
    model: Any
    client_dataset: Callable[[Any], tf.data.Dataset]
    test_dataset: tf.data.Dataset
    client_ids: Sequence[str] | Callable[[int], Iterable[str]] | None = None
    data_source: tff.program.FederatedDataSource | None = None


def make_task(config: RunConfig) -> FederatedTask:
    """Returns the task that a configuration names."""
    builtin: dict[str, Callable[[RunConfig], FederatedTask]] = {
        "digits": digits,
        "emnist": emnist,
        "shakespeare": shakespeare,
        "stackoverflow": stackoverflow,
    }
    if config.task in builtin:
        return builtin[config.task](config)
    module_name, _, function_name = config.task.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task {config.task!r} cannot be imported: {error}.") from error
    return function(config)


def digits(config: RunConfig) -> FederatedTask:
    """Handwritten digits: the 1,797 real images that scikit-learn ships, on synthetic clients.

    Every fifth image is for testing. A client holds `examples_per_client` images drawn, with a
    preference for some digits, from the rest; a population can be larger than the number of
    images, and then one image is on several clients. The unit of privacy is the client.
    The model is a network with one hidden layer of 32 units, 2,410 parameters.
    """
    images, labels, test_images, test_labels = _digits_data()
    by_label = [np.flatnonzero(labels == digit) for digit in range(10)]

    def client_dataset(client: int) -> tf.data.Dataset:
        draw = np.random.Generator(np.random.Philox([config.population_seed, client]))
        favourites = draw.dirichlet(np.full(10, 1.0))
        chosen = [
            draw.choice(by_label[digit])
            for digit in draw.choice(10, size=config.examples_per_client, p=favourites)
        ]
        return _batches(images[chosen], labels[chosen], config)

    def keras_model() -> tf.keras.Model:
        seeds = [config.population_seed + i for i in range(2)]
        initial = [tf.keras.initializers.GlorotUniform(seed) for seed in seeds]
        return tf.keras.Sequential(
            [
                tf.keras.layers.Dense(32, "relu", kernel_initializer=initial[0], input_shape=(64,)),
                tf.keras.layers.Dense(10, kernel_initializer=initial[1]),
            ]
        )

    test = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(64)
    return FederatedTask(
        name="digits",
        data="real images of handwritten digits (scikit-learn), clients synthetic",
        model=_functional(keras_model, client_dataset(0).element_spec),
        client_dataset=client_dataset,
        test_dataset=test,
    )


def emnist(config: RunConfig) -> FederatedTask:
    """TFF's EMNIST characters with its small CNN."""
    create = functools.partial(
        tff.simulation.baselines.emnist.create_character_recognition_task,
        model_id="cnn",
        only_digits=False,
    )
    return _baseline("emnist", create, config)


def shakespeare(config: RunConfig) -> FederatedTask:
    """Next-character prediction on Shakespeare's plays, one role a client.

    The plays are those of TFF, with its model, or a text of one's own (`data_file`) in which a line
    of a name and a colon after an empty line starts a speech. Of that, every tenth role is for
    testing, an example is 25 characters of a role, in small letters, and the model is an LSTM of 32
    units, 6,765 parameters.
    """
    if not config.data_file:
        create = tff.simulation.baselines.shakespeare.create_character_prediction_task
        return _baseline("shakespeare", create, config)
    text = _read_text(config.data_file)
    roles = _roles(text)
    names = [name for i, name in enumerate(sorted(roles)) if i % 10 != 9]
    if config.num_clients > len(names):
        raise ConfigError(
            f"num_clients must be at most {len(names)}, the roles to train on in "
            f"{config.data_file}: one role is one client. Found {config.num_clients}."
        )

    def client_dataset(client: int) -> tf.data.Dataset:
        windows = _windows(roles[names[client]])[: config.examples_per_client]
        return _batches(windows[:, :-1], windows[:, 1:], config)

    def keras_model() -> tf.keras.Model:
        seeds = range(config.population_seed, config.population_seed + 3)
        first, *others = (tf.keras.initializers.GlorotUniform(seed) for seed in seeds)
        return tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(
                    len(_ALPHABET) + 1, _EMBEDDING, first, input_length=_WINDOW
                ),
                FusedLSTM(_UNITS, others[0]),
                tf.keras.layers.Dense(len(_ALPHABET) + 1, kernel_initializer=others[1]),
            ]
        )

    tested = np.concatenate([_windows(roles[name]) for name in sorted(roles.keys() - set(names))])
    test = tf.data.Dataset.from_tensor_slices((tested[:, :-1], tested[:, 1:])).batch(64)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return FederatedTask(
        name="shakespeare",
        data=f"real text of {len(roles)} roles, {len(names)} to train on (SHA-256 {digest}..)",
        model=_functional(keras_model, client_dataset(0).element_spec),
        client_dataset=client_dataset,
        test_dataset=test,
    )


class FusedLSTM(tf.keras.layers.Layer):
    """An LSTM from zero states, of one operation of TensorFlow, that returns all its outputs.

    TFF prepares a client's graph anew for every client. Keras's LSTM is a loop or hundreds of
    operations in it, which takes many times as long as the training, and functional models of TFF
    cannot have it.
    """

    def __init__(self, units: int, initializer: Any):
        super().__init__()
        self.units, self._initializer = units, initializer

    def build(self, shape: Any) -> None:
        """Makes one kernel for inputs above states, with gates input, cell, forget, output."""
        self.kernel = self.add_weight(
            "kernel", (shape[-1] + self.units, 4 * self.units), initializer=self._initializer
        )
        self.bias = self.add_weight("bias", (4 * self.units,), initializer="zeros")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns outputs `[batch, time, units]` of inputs `[batch, time, features]`."""
        state = tf.zeros([tf.shape(inputs)[0], self.units])
        unused = tf.zeros([self.units])
        outputs = tf.raw_ops.BlockLSTM(
            seq_len_max=tf.cast(tf.shape(inputs)[1], tf.int64),
            x=tf.transpose(inputs, (1, 0, 2)),
            cs_prev=state,
            h_prev=state,
            w=self.kernel,
            wci=unused,
            wcf=unused,
            wco=unused,
            b=self.bias,
            forget_bias=1.0,
            cell_clip=-1.0,
        )
        return tf.transpose(outputs.h, (1, 0, 2))


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data_file {path} cannot be read: {error}.") from error


def _roles(text: str) -> dict[str, str]:
    """Returns all that each role says."""
    roles: dict[str, str] = {}
    for speech in text.strip().split("\n\n"):
        name, _, said = speech.strip().partition("\n")
        if name.endswith(":") and said:
            roles[name] = roles.get(name, "") + said + "\n"
    if len(roles) < 10:
        raise ConfigError(
            "data_file must have at least 10 roles, each speech after an empty line and a line of "
            f"its role's name and a colon. Found {len(roles)}."
        )
    return roles


def _windows(text: str) -> np.ndarray:
    """Returns numbers of characters, a row an example and the character that follows its last."""
    codes = np.array([_ALPHABET.find(letter) + 1 for letter in text.lower()], np.int32)
    count = max(1, (len(codes) - 1) // _WINDOW)
    # What is shorter than one example is said again.
    places = np.arange(count)[:, None] * _WINDOW + np.arange(_WINDOW + 1)
    return codes[places % len(codes)]


def stackoverflow(config: RunConfig) -> FederatedTask:
    """TFF's StackOverflow next-word prediction with the paper's one-layer LSTM."""
    create = tff.simulation.baselines.stackoverflow.create_word_prediction_task
    return _baseline("stackoverflow", create, config)


def _baseline(name: str, create: Callable[..., Any], config: RunConfig) -> FederatedTask:
    """Takes a baseline of TFF, with real data where they can be had and synthetic ones where not.

    TFF's synthetic data have a handful of clients; the population shares them.
    """
    spec = tff.simulation.baselines.ClientSpec(
        num_epochs=config.local_epochs,
        batch_size=config.local_batch_size,
        max_elements=config.examples_per_client,
        shuffle_buffer_size=1,  # The order of examples must be the same after a crash.
    )
    try:
        task, data = create(spec, use_synthetic_data=False), "real, downloaded by TFF"
    except Exception as error:  # Whatever the download raises: no network, no space, a bad hash.
        logging.warning("The real data of %s could not be downloaded: %s", name, error)
        task = create(spec, use_synthetic_data=True)
        data = "SYNTHETIC, embedded in TFF (the real data could not be downloaded)"
    preprocess = task.datasets.train_preprocess_fn
    clients = task.datasets.train_data
    names = sorted(clients.client_ids)

    @functools.lru_cache(maxsize=1_000)
    def client_dataset(client: int) -> tf.data.Dataset:
        return preprocess(clients.create_tf_dataset_for_client(names[client % len(names)]))

    return FederatedTask(
        name=name,
        data=data,
        model=task.model_fn,
        client_dataset=client_dataset,
        test_dataset=task.datasets.get_centralized_test_data(),
    )


@functools.cache
def _digits_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # Takes a second; only this task needs it.

    data = load_digits()
    images, labels = (data.data / 16.0).astype(np.float32), data.target.astype(np.int32)
    is_test = np.arange(len(labels)) % 5 == 4
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def _batches(inputs: np.ndarray, labels: np.ndarray, config: RunConfig) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return examples.repeat(config.local_epochs).batch(config.local_batch_size)


def _functional(keras_model: Callable[[], tf.keras.Model], input_spec: Any) -> Any:
    return tff.learning.models.functional_model_from_keras(
        keras_model,
        loss_fn=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=input_spec,
        metrics_constructor=lambda: collections.OrderedDict(
            loss=tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            accuracy=tf.keras.metrics.SparseCategoricalAccuracy(),
        ),
    )
