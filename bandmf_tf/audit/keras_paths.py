"""Paths through Keras: `fit` of a private model, a restored run, the pipeline by itself.

The model is linear, two dense layers side by side, and the loss is the mean squared error against
labels so far away that every gradient is the same wherever training has come to:

    example j    one input of one layer is 1,000, and the label asks for a huge change of one output
    gradient     along one entry of that layer's kernel, a thousandth of it along each bias
    padding      other examples; were it counted, canaries would be in rounds that are not theirs

So each example is a canary of a coordinate of its own, a thousand million times longer than the
clip norm, and the sum that belongs into each step is known. Weights after every step are what is
released; the learning rate is the batch size, so that they differ by the noised sum.

Who is in which batch is the pipeline's word (`Batches.indices`), as an adversary would know it
against whom sampling does not help; where batches hold others, the sums do not fit.

`trained` is another model, a classifier like any other, with many canaries in one run: what its
last weights tell about each (black box), and what all its steps do (gradients).
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import tensorflow as tf

from bandmf_tf._files import make_secret_folder
from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting.amplification import CyclicScheme, PoissonSampling, Shuffling
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.audit.attack import EXPOSED, AuditError, Observation, Target, Undone
from bandmf_tf.audit.noise_paths import LENGTH, interruption
from bandmf_tf.audit.sampling import Batches as IndicesOfRounds
from bandmf_tf.keras import SGD, make_batches, make_private

# In clip norms, as weights are:
_FAR = 1e10  # Labels: wherever training has come to, gradients are the same to a few digits.
_OFFSET = 1e3  # Outputs at the beginning, so that rows of zeros would not go unnoticed.
_FEATURES, _CLASSES = 256, 10  # Of the classifier.


class _Course:
    """A data set of canaries and a linear model for them.

    Args:
      target: What is attacked.
      coordinates: Entries of the kernels, about.
      rng: Draws which of them have an example.
    """

    def __init__(self, target: Target, coordinates: int, rng: np.random.Generator):
        self.target = target
        self.width = max(2, round((coordinates / 2) ** 0.5))
        self.kernel = self.width**2
        order = rng.permutation(2 * self.kernel)
        # The last coordinate is for examples beyond the canaries, where a plan asks for more.
        order = order[order != 2 * self.kernel - 1]
        self.scheme, self.dataset_size = scheme_for(target, self.kernel)
        count = min(self.kernel, self.dataset_size)
        self.aimed, self.others = order[:count], order[count : 2 * count]
        self.batches = make_batches(self._fetch, self.scheme, dataset_size=self.dataset_size)
        self._rng = rng

    def model(self) -> Any:
        """Returns a private model, compiled."""
        inputs = [tf.keras.layers.Input((self.width,), name=name) for name in ("a", "b")]
        layers = [
            tf.keras.layers.Dense(
                self.width,
                kernel_initializer="zeros",
                bias_initializer=tf.keras.initializers.Constant(offset * self.target.clip),
                name=name,
            )
            for offset, name in ((_OFFSET, "first"), (0.0, "second"))
        ]
        outputs = [layer(one) for layer, one in zip(layers, inputs, strict=True)]
        network = tf.keras.Model(inputs, tf.keras.layers.Add()(outputs))
        model = make_private(network)
        size = float(self.batches.batch_size)
        model.compile(
            SGD(self.target.mechanism, learning_rate=size, batch_size=size),
            loss=tf.keras.losses.MeanSquaredError(),
        )
        return model

    def fit(self, model: Any, first: int, last: int) -> np.ndarray:
        """Trains from round `first` to `last`; returns what weights changed by, a row a round."""
        weights = _Weights()
        model.fit(self.batches, steps_per_epoch=last - first, verbose=0, callbacks=[weights])
        return -np.diff(np.array(weights.seen), axis=0)

    def observed(self, released: np.ndarray, undone: list[Undone]) -> Observation:
        """Returns the observation of all rounds."""
        patterns = np.zeros((self.target.rounds, len(self.aimed)), np.float32)
        for number, examples in enumerate(self._examples_of_rounds()):
            np.add.at(patterns[number], examples[examples < len(self.aimed)], 1.0)
        # Nobody was aimed at the others: for each, a canary with the rounds of one that was in.
        borrowed = self._rng.integers(len(self.aimed), size=len(self.others))
        parts = np.full(self.dataset_size, -1)
        if isinstance(self.batches.scheme, CyclicScheme):  # Which anybody may know.
            for number, part in enumerate(self.batches._partition().numpy()):
                parts[part] = number
        return Observation(
            released=released,
            sums=self.sums(),
            patterns=np.c_[patterns, patterns[:, borrowed]],
            directions=self._position(np.r_[self.aimed, self.others]),
            included=np.arange(len(self.aimed) + len(self.others)) < len(self.aimed),
            tensors=self._tensors(),
            undone=undone,
            parts=np.r_[parts[: len(self.aimed)], parts[borrowed]],
        )

    def sums(self) -> np.ndarray:
        """Returns the sum of clipped gradients of every round, `[rounds, weights]`."""
        share = self.target.clip / np.sqrt(LENGTH**2 + 2)
        sums = np.zeros((self.target.rounds, 2 * (self.kernel + self.width)))
        biases = [self._tensors()[name].start for name in ("first bias", "second bias")]
        for number, examples in enumerate(self._examples_of_rounds()):
            aims = self._aims_of(examples)
            np.add.at(sums[number], self._position(aims), LENGTH * share)
            for start in biases:
                np.add.at(sums[number], start + aims % self.width, share)
        return sums

    def _examples_of_rounds(self) -> list[np.ndarray]:
        return [self.batches.indices(number) for number in range(self.target.rounds)]

    def _aims_of(self, examples: np.ndarray) -> np.ndarray:
        aims = np.r_[self.aimed, 2 * self.kernel - 1]
        return aims[np.minimum(examples, len(self.aimed))]

    def _position(self, aims: np.ndarray) -> np.ndarray:
        """Returns where entries of the kernels lie among all weights."""
        return aims + (aims >= self.kernel) * self.width

    def _tensors(self) -> dict[str, slice]:
        names = ("first kernel", "first bias", "second kernel", "second bias")
        ends = np.cumsum([self.kernel, self.width] * 2)
        starts = ends - [self.kernel, self.width] * 2
        return {name: slice(int(a), int(b)) for name, a, b in zip(names, starts, ends, strict=True)}

    def _fetch(self, indices: tf.Tensor) -> Any:
        """Returns examples; runs inside of the pipeline."""
        table = tf.constant(np.r_[self.aimed, 2 * self.kernel - 1], tf.int64)
        aims = tf.gather(table, tf.minimum(indices, len(self.aimed)))
        is_first = tf.cast(aims < self.kernel, tf.float32)[:, None]
        inputs = tf.one_hot(aims % self.kernel // self.width, self.width, LENGTH, 0.0)
        labels = tf.one_hot(aims % self.width, self.width, -_FAR * self.target.clip, 0.0)
        return (inputs * is_first, inputs * (1 - is_first)), labels


class _Weights(tf.keras.callbacks.Callback):
    """Looks at the weights before and after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._look()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._look()

    def _look(self) -> None:
        weights = [np.ravel(np.asarray(v, np.float64)) for v in self.model.trainable_variables]
        self.seen.append(np.concatenate(weights))


def fitted(target: Target, coordinates: int, rng: np.random.Generator) -> Observation:
    """`fit` of a private model, from beginning to end."""
    course = _Course(target, coordinates, rng)
    return course.observed(course.fit(course.model(), 0, target.rounds), [])


def restored_fit(target: Target, coordinates: int, rng: np.random.Generator) -> Observation:
    """`fit` that is saved, goes on, and is restored into a new model that goes on from there."""
    course = _Course(target, coordinates, rng)
    saved, lost = interruption(target.rounds)
    first, second = course.model(), course.model()
    kept = course.fit(first, 0, saved)
    with tempfile.TemporaryDirectory() as name:
        path = make_secret_folder(Path(name) / "secret") / "model.weights.h5"
        first.save_weights(path)
        seen = course.fit(first, saved, lost)
        second.load_weights(path)
    released = np.r_[kept, course.fit(second, saved, target.rounds)]
    undone = Undone(saved, seen, course.sums()[saved:lost])
    return course.observed(released, [undone])


def drawn_batches(target: Target, dataset_size: int) -> IndicesOfRounds:
    """Returns who is in every batch that a new pipeline hands out."""
    scheme, dataset_size = scheme_for(target, dataset_size)
    index = np.arange(dataset_size)
    pipeline = make_batches((index, index), scheme)
    rounds = pipeline.dataset().take(target.rounds)
    return [batch.examples[0].numpy()[batch.is_example.numpy()] for batch in rounds]


def scheme_for(target: Target, dataset_size: int) -> tuple[SamplingScheme, int]:
    """Returns the mechanism's sampling, or epochs in one order that keep to its participation.

    With the number of examples: the scheme's, where it says one, else about `dataset_size`.
    """
    mechanism = target.mechanism
    if mechanism.sampling is not None:
        return mechanism.sampling, getattr(mechanism.sampling, "dataset_size", dataset_size)
    n = mechanism.num_rounds
    parts = max(mechanism.participation.separation(n), ceil_div(n, mechanism.participation.most(n)))
    batch = max(1, dataset_size // parts)
    scheme = Shuffling(n, parts, batch, batch * parts, reshuffled=False)
    if not mechanism.participation.allows(scheme):
        raise AuditError(
            f"No pipeline draws batches so that {mechanism.participation.describe()} in "
            f"num_rounds={n}; leave the Keras paths out."
        )
    return scheme, batch * parts


def exposed(target: Target) -> tuple[float, float]:
    """Returns |v| of the canaries that will be attacked, and which fraction of all they are.

    Of those in a part of the data set, all take part in its every visit without sampling, and few
    with it. Schemes without parts are taken for such that expose everybody.
    """
    scheme = scheme_for(target, target.mechanism.num_rounds)[0]
    if not isinstance(scheme, PoissonSampling) and target.mechanism.sampling is not None:
        return target.claimed_mu, 1.0
    parts = min(scheme.min_separation, target.rounds)
    visits = np.arange(target.rounds)[:, None] % scheme.min_separation == np.arange(parts)
    exposure = np.linalg.norm(target.signals(visits), axis=0)
    attacked = exposure >= EXPOSED * exposure.max()
    q = getattr(scheme, "sampling_probability", 1.0)
    fraction = np.sum(q ** visits.sum(axis=0)[attacked]) / scheme.min_separation
    return float(exposure[attacked].mean()), float(fraction)


def trained(
    target: Target, canaries: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Trains a classifier on canaries, each of them in by a coin of its own.

    A canary is a random input with a random label. Out is one whose loss has the weight zero, so
    that its place in the pipeline stays.

    Returns:
      Scores by what the adversary sees, and which canaries were in.
    """
    scheme, size = scheme_for(target, canaries)
    canaries = min(canaries, size)
    included = rng.random(canaries) < 0.5
    x = rng.normal(size=(canaries, _FEATURES)).astype(np.float32)
    y = rng.integers(_CLASSES, size=canaries)
    # Behind the canaries one more, never in, for the other examples that a plan asks for.
    table = (np.r_[x, x[:1]], np.r_[y, 0], np.r_[included, False].astype(np.float32))
    model = make_private(
        tf.keras.Sequential(
            [
                tf.keras.layers.Input((_FEATURES,)),
                tf.keras.layers.Dense(_CLASSES, kernel_initializer="zeros"),
            ]
        )
    )
    batches = make_batches(
        lambda indices: tuple(tf.gather(part, tf.minimum(indices, canaries)) for part in table),
        scheme,
        dataset_size=size,
    )
    rate = float(batches.batch_size / (target.clip * target.rounds))
    model.compile(
        SGD(target.mechanism, learning_rate=rate, batch_size=batches.batch_size),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    weights = _Weights()
    model.fit(batches, steps_per_epoch=target.rounds, verbose=0, callbacks=[weights])
    seen = [_as_matrix(step) for step in weights.seen]
    x_and_1 = np.c_[x, np.ones(canaries)]
    gradients = np.zeros(canaries)
    for before, after in itertools.pairwise(seen):
        errors = scipy.special.softmax(x_and_1 @ before, axis=1)
        errors[np.arange(canaries), y] -= 1.0
        lengths = np.linalg.norm(x_and_1, axis=1) * np.linalg.norm(errors, axis=1)
        moved = np.sum((x_and_1 @ (before - after)) * errors, axis=1)
        gradients += moved * np.minimum(1.0, target.clip / lengths)
    logits = scipy.special.log_softmax(x_and_1 @ seen[-1], axis=1)
    black_box = logits[np.arange(canaries), y]
    return {"black box": black_box, "gradients": gradients}, included


def _as_matrix(weights: np.ndarray) -> np.ndarray:
    return weights.reshape(_FEATURES + 1, _CLASSES)  # The kernel, and the bias below it.
