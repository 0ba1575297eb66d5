"""Pipelines (`tf.data`) that draw batches as the amplification theorem and its accounting assume.

Algorithms 2 and 6 of the paper: a random partition of the data set into `num_parts` parts, made
once, before training; the batch of round i comes from part i mod num_parts. How a part yields its
batches is the sampling scheme (`amplification.py`), and there is one pipeline for each scheme:

    PoissonBatches     every example of the part independently, padded with a mask
    FixedSizeBatches   a uniformly random subset of the part
    ShuffledBatches    the part in a random order, batch after batch, pass after pass

A pipeline reports the scheme it satisfies as `scheme`; `check_sampling` compares it with the
assumption of a mechanism. `cyclic_scheme` is the plain case of epochs in one fixed order, which
keeps participations of an example the whole epoch apart.

Randomness. The batch of round i is a function of a 128-bit seed and i alone, so a pipeline can
start at any round, and a run that is restored goes on with the same partition: with another one an
example could take part twice in a row. The seed comes from the operating system unless a test pins
it. It is a variable that `tf.train.Checkpoint` saves, and a secret: amplification holds only while
nobody knows who is in which batch.

A dataset reads its seed and its starting position when iteration starts, not when it is made, so
that callbacks which restore a run (`BackupAndRestore`) still decide where it goes on.
"""

from __future__ import annotations

import abc
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf.accounting.amplification import (
    CyclicScheme,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.mechanisms.mechanism import Mechanism

# Over all rounds of a run, a Poisson batch exceeds its padding with at most this probability.
OVERFLOW_PROBABILITY = 1e-15

# A structure of arrays with the examples along their first axis, or a function from a vector of
# indices to such a structure of tensors, to be run inside of the pipeline.
Examples = Any

_PARTITION, _DRAW = 0, 1  # What a stretch of random bits is for.


class SamplingError(BandMFError):
    """Batches are not drawn the way a mechanism's guarantee assumes."""


class Batches(tf.Module, abc.ABC):
    """Batches of one sampling scheme, round after round.

    Args:
      examples: Arrays, or a function that fetches examples by index; see `Examples`. For Keras, a
        tuple `(x, y)`.
      scheme: How batches are drawn.
      dataset_size: Number of examples; needed only if `examples` is a function.
      pinned_seed: For tests only: makes the batches known to everybody.
    """

    scheme_type: type[CyclicScheme]

    def __init__(
        self,
        examples: Examples,
        scheme: CyclicScheme,
        *,
        dataset_size: int | None = None,
        pinned_seed: int | None = None,
    ):
        super().__init__(name="batches")
        if not isinstance(scheme, self.scheme_type):
            raise BandMFTypeError(
                f"scheme must be {self.scheme_type.__name__}. Found {type(scheme).__name__}."
            )
        self._scheme = scheme
        self._fetch, self._dataset_size = _fetcher(examples, dataset_size)
        self._check_dataset_size()
        self._is_pinned = pinned_seed is not None
        if pinned_seed is None:
            seed = np.frombuffer(secrets.token_bytes(16), np.int64)
        else:
            seed = np.array([_checks.int_at_least("pinned_seed", pinned_seed, 0), -1], np.int64)
        with tf.init_scope():
            self.seed = tf.Variable(seed, trainable=False, name="sampling_seed")

    @property
    def scheme(self) -> CyclicScheme:
        """The sampling scheme that these batches satisfy."""
        return self._scheme

    @property
    def dataset_size(self) -> int:
        """Number of examples, those that no part uses included."""
        return self._dataset_size

    @property
    def part_size(self) -> int:
        """Examples in a part."""
        return self._dataset_size // self._scheme.num_parts

    @property
    @abc.abstractmethod
    def batch_size(self) -> float:
        """Examples in a batch, in expectation: what sums of gradients are divided by."""

    @property
    @abc.abstractmethod
    def padded_batch_size(self) -> int:
        """Rows of every batch, padding included."""

    def dataset(
        self,
        first_round: int | tf.Variable = 0,
        *,
        pieces: int = 1,
        first_piece: int | tf.Variable = 0,
    ) -> tf.data.Dataset:
        """Returns the batches from `first_round` on, as `(*examples, mask)`.

        If the examples are a tuple `(x, y)`, an element is `(x, y, mask)`, which Keras takes for
        inputs, labels and sample weights. The mask is 1.0 for examples and 0.0 for padding; padding
        is all zeros. A tuple `(x, y, sample_weight)` gives `(x, y, sample_weight * mask)`.

        Args:
          first_round: Where to start. A variable is read when iteration starts; it must be one that
            training does not change, because TensorFlow may run a step's updates before it has
            asked for the step's batch.
          pieces: Cuts each batch into this many elements, for gradient accumulation.
          first_piece: Pieces of the first batch to leave out; a variable is read likewise.
        """
        pieces = _checks.positive_int("pieces", pieces)

        def from_here(_: tf.Tensor) -> tf.data.Dataset:
            first, skipped = _int64(first_round), _int64(first_piece)
            parts = self._partition()
            rounds = tf.data.Dataset.range(first, self._scheme.num_rounds)
            batches = rounds.map(lambda i: self._batch(parts, i, pieces), tf.data.AUTOTUNE)
            if pieces > 1:
                batches = batches.flat_map(
                    lambda *element: tf.data.Dataset.from_tensor_slices(element)
                )
            return batches.skip(skipped)

        dataset = tf.data.Dataset.range(1).flat_map(from_here)
        return dataset.prefetch(tf.data.AUTOTUNE)

    @property
    def is_pinned(self) -> bool:
        """Whether the batches are those of a test, known to everybody."""
        return self._is_pinned

    @property
    def has_partition(self) -> bool:
        """Whether the guarantee needs the same seed in all rounds of a run."""
        return self._scheme.num_parts > 1 or isinstance(self._scheme, Shuffling)

    def fingerprint(self) -> int:
        """Returns a number that tells seeds apart and does not reveal them."""
        digest = hashlib.sha256(b"bandmf_tf sampling seed" + self.seed.numpy().tobytes()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def indices(self, round_number: int) -> np.ndarray:
        """Returns which examples are in the batch of a round, in order; for tests and audits."""
        indices, mask = self._draw(self._partition(), tf.constant(round_number, tf.int64))
        return tf.boolean_mask(indices, mask).numpy()

    @abc.abstractmethod
    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns indices of examples, `[padded_batch_size]`, and which of them are no padding."""

    def _partition(self) -> tf.Tensor:
        """Returns the parts: indices of examples, `[num_parts, part_size]`."""
        order = _random_order(self._dataset_size, _derived(self.seed, _PARTITION))
        used = self._scheme.num_parts * self.part_size
        return tf.reshape(order[:used], [self._scheme.num_parts, self.part_size])

    def _part(self, parts: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        return parts[i % self._scheme.num_parts]

    def _batch(self, parts: tf.Tensor, i: tf.Tensor, pieces: int) -> tuple[Any, ...]:
        indices, is_example = self._draw(parts, i)
        missing = -self.padded_batch_size % pieces
        indices = tf.pad(indices, [[0, missing]])
        is_example = tf.pad(is_example, [[0, missing]])
        size = self.padded_batch_size + missing
        indices = tf.ensure_shape(indices, [size])
        is_example = tf.ensure_shape(is_example, [size])
        mask = tf.cast(is_example, tf.float32)
        fetched = tf.nest.map_structure(lambda t: _zero_unless(is_example, t), self._fetch(indices))
        if isinstance(fetched, tuple) and len(fetched) == 3:
            x, y, weight = fetched
            element = (x, y, tf.cast(weight, tf.float32) * mask)
        else:
            element = (*fetched, mask) if isinstance(fetched, tuple) else (fetched, mask)
        if pieces == 1:
            return element
        return tf.nest.map_structure(
            lambda t: tf.reshape(t, [pieces, size // pieces, *t.shape[1:]]), element
        )

    def _check_dataset_size(self) -> None:
        planned = getattr(self._scheme, "dataset_size", self._dataset_size)
        if planned != self._dataset_size:
            raise SamplingError(
                f"The scheme is for a data set of {planned} examples. Found {self._dataset_size}; "
                "plan again for this data set."
            )
        if not self.part_size:
            raise SamplingError(
                f"A data set of {self._dataset_size} examples cannot be split into "
                f"{self._scheme.num_parts} parts; use fewer parts."
            )


class PoissonBatches(Batches):
    """Every example of the part enters the batch independently with `sampling_probability`.

    Batches are padded to one size, so that their size does not show, neither in shapes nor in
    timing. It is the size that all batches of a run stay within except with probability
    `OVERFLOW_PROBABILITY`. A larger draw is an error: leaving examples out would not be a Poisson
    sample. (That the error itself can be seen adds at most that probability to delta.)
    """

    scheme_type = PoissonSampling
    _scheme: PoissonSampling

    def __init__(
        self,
        examples: Examples,
        scheme: PoissonSampling,
        *,
        dataset_size: int | None = None,
        pinned_seed: int | None = None,
    ):
        super().__init__(examples, scheme, dataset_size=dataset_size, pinned_seed=pinned_seed)
        sizes = scipy.stats.binom(self.part_size, scheme.sampling_probability)
        per_round = OVERFLOW_PROBABILITY / scheme.num_rounds
        self._padded_batch_size = min(self.part_size, max(1, int(sizes.isf(per_round))))

    @property
    def batch_size(self) -> float:
        return self._scheme.sampling_probability * self.part_size

    @property
    def padded_batch_size(self) -> int:
        return self._padded_batch_size

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = self._part(parts, i)
        chosen = _bernoulli(
            self.part_size, self._scheme.sampling_probability, _derived(self.seed, _DRAW, i)
        )
        drawn = tf.boolean_mask(part, chosen)
        size = tf.size(drawn)
        check = tf.debugging.assert_less_equal(
            size,
            self.padded_batch_size,
            message="A Poisson sample is larger than the padded batch; this happens once in "
            f"{1 / OVERFLOW_PROBABILITY:.0e} runs. Start the run again.",
        )
        with tf.control_dependencies([check] if check is not None else []):
            drawn = tf.pad(drawn, [[0, self.padded_batch_size - size]])
        return drawn, tf.range(self.padded_batch_size) < size


class _EqualBatches(Batches):
    """Batches of one size, without padding."""

    _scheme: FixedSizeSampling | Shuffling

    @property
    def batch_size(self) -> float:
        return self._scheme.batch_size

    @property
    def padded_batch_size(self) -> int:
        return self._scheme.batch_size


class FixedSizeBatches(_EqualBatches):
    """A uniformly random subset of the part with `batch_size` examples, drawn anew every round."""

    scheme_type = FixedSizeSampling
    _scheme: FixedSizeSampling

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = self._part(parts, i)
        order = _random_order(self.part_size, _derived(self.seed, _DRAW, i), self.padded_batch_size)
        return tf.gather(part, order), tf.ones([self.padded_batch_size], tf.bool)


class ShuffledBatches(_EqualBatches):
    """The part in a random order, batch after batch; a pass over it ends with its whole batches.

    The order of every pass is fresh if the scheme says `reshuffled`, and that of the partition
    otherwise.
    """

    scheme_type = Shuffling
    _scheme: Shuffling

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = self._part(parts, i)
        visit = i // self._scheme.num_parts
        batches_in_pass = self.part_size // self._scheme.batch_size
        if self._scheme.reshuffled:
            seed = _derived(self.seed, _DRAW, i % self._scheme.num_parts, visit // batches_in_pass)
            part = tf.gather(part, _random_order(self.part_size, seed))
        start = (visit % batches_in_pass) * self._scheme.batch_size
        batch = part[start : start + self._scheme.batch_size]
        return batch, tf.ones([self.padded_batch_size], tf.bool)


def make_batches(
    examples: Examples,
    scheme: CyclicScheme | Mechanism,
    *,
    dataset_size: int | None = None,
    pinned_seed: int | None = None,
) -> Batches:
    """Returns the pipeline for a sampling scheme, or for the one that a mechanism assumes."""
    if isinstance(scheme, Mechanism):
        if scheme.sampling is None:
            raise SamplingError(
                "The mechanism assumes no sampling, only who takes part when: "
                f"{scheme.participation.describe()}. Choose a scheme that keeps to it, for example "
                "cyclic_scheme(num_rounds, batch_size, dataset_size)."
            )
        scheme = scheme.sampling
    pipelines: tuple[type[Batches], ...] = (PoissonBatches, FixedSizeBatches, ShuffledBatches)
    for pipeline in pipelines:
        if isinstance(scheme, pipeline.scheme_type):
            return pipeline(examples, scheme, dataset_size=dataset_size, pinned_seed=pinned_seed)
    raise BandMFTypeError(f"No pipeline draws batches for {type(scheme).__name__}.")


def cyclic_scheme(num_rounds: int, batch_size: int, dataset_size: int) -> Shuffling:
    """Returns epochs in one random order: an example takes part every dataset_size // batch_size.

    This is the (k, b)-participation of fixed epochs, with b = floor(dataset_size / batch_size) and
    k = ceil(num_rounds / b). Examples that do not fill a batch of their own sit out.
    """
    batch_size = _checks.positive_int("batch_size", batch_size)
    num_parts = _checks.positive_int("dataset_size", dataset_size) // batch_size
    return Shuffling(num_rounds, max(num_parts, 1), batch_size, dataset_size, reshuffled=False)


def check_sampling(mechanism: Mechanism, scheme: CyclicScheme) -> None:
    """Raises `SamplingError` unless batches drawn by `scheme` keep the mechanism's assumptions."""
    if scheme.num_rounds != mechanism.num_rounds:
        raise SamplingError(
            f"The mechanism is for {mechanism.num_rounds} rounds and the batches are for "
            f"{scheme.num_rounds}; use the same number."
        )
    if not mechanism.participation.allows(scheme):
        raise SamplingError(
            f"The mechanism assumes that {mechanism.participation.describe()}. Batches drawn by "
            f"{scheme} do not keep to that."
        )
    if mechanism.sampling is not None and not _at_least_as_private(scheme, mechanism.sampling):
        raise SamplingError(
            f"The epsilon of the mechanism assumes {mechanism.sampling}. Found batches drawn by "
            f"{scheme}."
        )


def _at_least_as_private(scheme: CyclicScheme, planned: CyclicScheme) -> bool:
    """Whether epsilon of the planned scheme holds for the scheme; a smaller probability is fine."""
    if isinstance(scheme, PoissonSampling) and isinstance(planned, PoissonSampling):
        return (
            scheme.num_rounds == planned.num_rounds
            and scheme.num_parts == planned.num_parts
            and scheme.sampling_probability <= planned.sampling_probability * (1 + 1e-12)
        )
    return scheme == planned


def _fetcher(
    examples: Examples, dataset_size: int | None
) -> tuple[Callable[[tf.Tensor], Any], int]:
    if callable(examples):
        return examples, _checks.positive_int("dataset_size", dataset_size)
    tensors = tf.nest.map_structure(tf.convert_to_tensor, examples)
    sizes = {t.shape[0] if t.shape.rank else None for t in tf.nest.flatten(tensors)}
    if len(sizes) != 1 or None in sizes:
        raise BandMFError(
            "All arrays of the examples must have the same first axis, one entry an example. "
            f"Found lengths {sorted(sizes, key=str)}."
        )
    (size,) = sizes
    if dataset_size not in (None, size):
        raise BandMFError(f"dataset_size={dataset_size} and the arrays hold {size} examples.")
    return lambda indices: tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors), size


def _zero_unless(is_example: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    condition = tf.reshape(is_example, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def _int64(value: int | tf.Variable) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.int64)


def _derived(seed: tf.Tensor, *data: int | tf.Tensor) -> tf.Tensor:
    """Returns a seed of its own for each sequence of numbers."""
    seed = tf.convert_to_tensor(seed)
    for number in data:
        seed = tf.random.experimental.stateless_fold_in(seed, number, alg="philox")
    return seed


def _bits(count: int, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform(
        [count], seed, minval=None, maxval=None, dtype=tf.int64, alg="philox"
    )


def _bernoulli(count: int, probability: float, seed: tf.Tensor) -> tf.Tensor:
    """Returns independent truth values; the probability is exact to 2^-64."""
    threshold = round(probability * 2**64) - 2**63
    if threshold >= 2**63:
        return tf.ones([count], tf.bool)
    return _bits(count, seed) < tf.constant(threshold, tf.int64)


def _random_order(count: int, seed: tf.Tensor, take: int | None = None) -> tf.Tensor:
    """Returns the first `take` entries of a uniformly random permutation of `range(count)`."""
    order = tf.math.top_k(_bits(count, seed), count if take is None else take).indices
    return tf.cast(order, tf.int64)
