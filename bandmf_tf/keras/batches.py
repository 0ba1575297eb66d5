"""Pipelines (`tf.data`) that draw batches as the amplification theorem and its accounting assume.

Algorithms 2 and 6 of the paper: a random partition of the data set into `num_parts` parts, made
once, before training; the batch of round i comes from part i mod num_parts. How a part yields its
batches is the sampling scheme (`amplification.py`), and there is one pipeline for each scheme:

    PoissonBatches         every example of the part independently, padded with a mask; drawn
                           again where the scheme has a largest size
    FixedSizeBatches       a uniformly random subset of the part
    ShuffledBatches        the part in a random order, batch after batch, pass after pass

In schemes of random participation (`random_participation.py`) every example draws its rounds for
itself, independently of all others, so that parts have random sizes:

    SecretPartBatches      a part, once; in its rounds, with a probability or always
    WaitingBatches         with a probability, unless it took part a few rounds before, or before
                           in the same epoch

Where several examples belong to one user, `group_by_user` makes the user what is drawn: data set
sizes are numbers of users, a row of a batch holds up to `examples_per_user` examples of one, and
their mean gradient is what is clipped, so that the guarantee is that of a user.

A pipeline reports the scheme it satisfies as `scheme`; `check_sampling` compares it with the
assumption of a mechanism. `cyclic_scheme` is the plain case of epochs in one fixed order, which
keeps participations of an example the whole epoch apart.

Randomness. The batch of round i is a function of a 128-bit seed and i alone, so a pipeline can
start at any round, and a run that is restored goes on with the same partition: with another one an
example could take part twice in a row. The seed comes from the operating system unless a test pins
it. It is a variable that `tf.train.Checkpoint` saves, and a secret: amplification holds only while
nobody knows who is in which batch. All 128 bits reach every draw: half of them are Philox's key,
half of them the upper half of its counter (`tf.random.experimental.stateless_fold_in` would keep 64
of them, or 32 with a Python number).

Elements are a `Batch`, which says beside the examples which rows are padding and which batch of
which pipeline this is. Keras takes it for neither inputs, labels nor weights: it has four fields,
and Keras refuses more than three.

A dataset reads its seed and its starting position when iteration starts, not when it is made, so
that callbacks which restore a run (`BackupAndRestore`) still decide where it goes on.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import math
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import tensorflow as tf

from bandmf_tf import _checks, _memory
from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.certificates import OVERFLOW_PROBABILITY
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
    WaitingParticipation,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat
from bandmf_tf.mechanisms.mechanism import Mechanism

# An array, a dict, or a tuple (x,), (x, y) or (x, y, sample_weight) of arrays or of structures of
# them, all with the examples along their first axis; or a function from a vector of indices to such
# a structure of tensors, to be run inside of the pipeline and traced by the first `fit` of a model;
# or what `group_by_user` returns.
Examples = Any

# What a stretch of random bits is for.
_PARTITION, _DRAW, _SEAL, _PLACE, _CHOICE = range(5)
_PHILOX = 1
_PINNED = -1  # Second half of a pinned seed; one from the operating system has it once in 2^64.


class Batch(NamedTuple):
    """One element of a pipeline.

    Attributes:
      examples: The examples, `[rows, ...]`; lists in them have become tuples. With a further axis
        behind the first if a row is a user. Padding is zeros; what `fit` gets has other examples
        there, so that models take it, with weights of zero.
      is_example: Which rows are not padding, `[rows]`; of users, `[rows, examples_per_user]`.
      position: Of the batch among all batches (or their pieces) of the run, in every row, so that
        the rows can be distributed over replicas, `[rows]`.
      seal: 128 bits that follow from the seed and the position, in every row, `[rows, 2]`: only
        this pipeline has them, and they tell nothing about the seed.
    """

    examples: Any
    is_example: tf.Tensor
    position: tf.Tensor
    seal: tf.Tensor


class SamplingError(BandMFError):
    """Batches are not drawn the way a mechanism's guarantee assumes."""


class UserExamples:
    """Examples by user; made by `group_by_user`."""

    def __init__(self, examples: Examples, user_ids: Any, examples_per_user: int):
        ids = _exact_ids(user_ids)
        self.examples_per_user = _checks.positive_int("examples_per_user", examples_per_user)
        self._fetch, size = _fetcher(examples, ids.size if callable(examples) else None)
        if ids.ndim != 1 or ids.size != size:
            raise BandMFError(
                f"user_ids must have one entry for each of the {size} examples. Found shape "
                f"{ids.shape}."
            )
        _, users, counts = np.unique(ids, return_inverse=True, return_counts=True)
        self.num_users = counts.size
        self._order = tf.constant(np.argsort(users, kind="stable"), tf.int64)
        self._counts = tf.constant(counts, tf.int64)
        self._starts = tf.constant(np.cumsum(counts) - counts, tf.int64)

    def fetch(self, users: tf.Tensor, seed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns examples of users, `[users, examples_per_user, ...]`, and which are there.

        Of a user who has more, those from a random one on.
        """
        slots = tf.range(self.examples_per_user, dtype=tf.int64)
        counts = tf.gather(self._counts, users)[:, None]
        first = tf.math.floormod(_bits(users.shape[0], seed)[:, None], counts)
        places = tf.gather(self._starts, users)[:, None] + (first + slots) % counts
        fetched = self._fetch(tf.gather(self._order, tf.reshape(places, [-1])))
        shape = [users.shape[0], self.examples_per_user]
        return (
            tf.nest.map_structure(lambda t: tf.reshape(t, [*shape, *t.shape[1:]]), fetched),
            slots < counts,
        )


def group_by_user(examples: Examples, user_ids: Any, *, examples_per_user: int) -> UserExamples:
    """Returns the examples for `make_batches`, which then draws users.

    A user takes part in a round with at most `examples_per_user` examples, others of them in other
    rounds. A plan for these batches counts users: its data set size is their number.

    Args:
      examples: As for `make_batches`.
      user_ids: Whose each example is, in the order of the examples: numbers or strings.
      examples_per_user: Bound on what a user contributes to a round.
    """
    return UserExamples(examples, user_ids, examples_per_user)


class Batches(tf.Module, abc.ABC):
    """Batches of one sampling scheme, round after round.

    Args:
      examples: Arrays, or a function that fetches examples by index; see `Examples`. To train a
        Keras model, `(x, y)` or `(x, y, sample_weight)`.
      scheme: How batches are drawn.
      dataset_size: Number of examples; needed only if `examples` is a function.
      pinned_seed: For tests only: makes the batches known to everybody.
    """

    scheme_types: tuple[type[SamplingScheme], ...]

    def __init__(
        self,
        examples: Examples,
        scheme: SamplingScheme,
        *,
        dataset_size: int | None = None,
        pinned_seed: int | None = None,
    ):
        super().__init__(name="batches")
        if not isinstance(scheme, self.scheme_types):
            names = " or ".join(known.__name__ for known in self.scheme_types)
            raise BandMFTypeError(f"scheme must be {names}. Found {type(scheme).__name__}.")
        self._scheme = scheme
        self._users = examples if isinstance(examples, UserExamples) else None
        if self._users is None:
            self._fetch, self._dataset_size = _fetcher(examples, dataset_size)
        else:
            self._dataset_size = self._users.num_users
            if dataset_size not in (None, self._dataset_size):
                raise BandMFError(
                    f"dataset_size={dataset_size} and the examples are of {self._dataset_size} "
                    "users, which is what is drawn."
                )
        self._check_dataset_size()
        if pinned_seed is None:
            seed = np.frombuffer(secrets.token_bytes(16), np.int64)
        else:
            seed = np.array(
                [_checks.int_at_least("pinned_seed", pinned_seed, 0), _PINNED], np.int64
            )
        with tf.init_scope():
            self.seed = tf.Variable(seed, trainable=False, name="sampling_seed")

    @property
    def scheme(self) -> SamplingScheme:
        """The sampling scheme that these batches satisfy."""
        return self._scheme

    @property
    def dataset_size(self) -> int:
        """Number of examples, or of users, those that no part uses included."""
        return self._dataset_size

    @property
    def examples_per_user(self) -> int | None:
        """Bound on what a user contributes to a round; None if what is drawn is an example."""
        return None if self._users is None else self._users.examples_per_user

    @property
    def part_size(self) -> int:
        """Examples in a part."""
        return self._dataset_size // self._scheme.min_separation

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
        """Returns the batches from `first_round` on, each a `Batch`, with zeros for padding.

        So a loop of your own that forgets `is_example` counts no example that was not drawn. In the
        scope of a strategy all replicas get the same number of rows.

        Args:
          first_round: Where to start. A variable is read when iteration starts; it must be one that
            training does not change, because TensorFlow may run a step's updates before it has
            asked for the step's batch.
          pieces: Cuts each batch into this many elements, for gradient accumulation.
          first_piece: Pieces of the first batch to leave out; a variable is read likewise.
        """
        pieces = _checks.positive_int("pieces", pieces)
        batches = self._dataset_for_fit(first_round, pieces, first_piece)

        @tf.autograph.experimental.do_not_convert
        def without_padding(batch: Batch) -> Batch:
            clear = functools.partial(_zero_unless, batch.is_example)
            return batch._replace(examples=tf.nest.map_structure(clear, batch.examples))

        return batches.map(without_padding)

    def _dataset_for_fit(
        self, first_round: int | tf.Variable, pieces: int, first_piece: int | tf.Variable
    ) -> tf.data.Dataset:
        """Returns the batches with padding that a model takes, for `fit`, which leaves it out."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        make = functools.partial(self._batch, pieces, replicas)

        @tf.autograph.experimental.do_not_convert
        def from_here(_: tf.Tensor) -> tf.data.Dataset:
            first, skipped = _int64(first_round), _int64(first_piece)
            batches = self._made(first, make)
            return (batches.unbatch() if pieces > 1 else batches).skip(skipped)

        dataset = tf.data.Dataset.range(1).flat_map(from_here)
        return dataset.prefetch(tf.data.AUTOTUNE)

    @property
    def is_pinned(self) -> bool:
        """Whether the batches are those of a test, known to everybody."""
        return int(self.seed.numpy()[1]) == _PINNED

    @property
    def is_own(self) -> bool:
        """Whether this library's methods alone draw the batches, none of a subclass or object."""
        return type(self) in _PIPELINES and not _compat.overridden_methods(self)

    @property
    def has_partition(self) -> bool:
        """Whether the guarantee needs the same seed in all rounds of a run."""
        return self._scheme.min_separation > 1 or isinstance(self._scheme, Shuffling | OncePerEpoch)

    def fingerprint(self) -> int:
        """Returns a number, never 0, for what must not change within a run; it reveals no seed."""
        fixed = f"bandmf_tf partition {self._dataset_size} {self._scheme} ".encode()
        if self._users is not None:
            fixed += f"users {self.examples_per_user} ".encode()
        if self.has_partition:
            fixed += self.seed.numpy().tobytes()
        digest = hashlib.sha256(fixed).digest()
        return int.from_bytes(digest[:8], "little", signed=True) | 1

    def seal_key(self, pieces: int) -> np.ndarray:
        """Returns what `seal` needs to check the batches of this pipeline, two int64."""
        return _derived(self.seed, _SEAL, pieces).numpy()

    def indices(self, round_number: int) -> np.ndarray:
        """Returns which examples are in the batch of a round, in order; for tests and audits."""
        i = tf.constant(round_number, tf.int64)
        indices, mask = self._draw(self._before(i), i)
        return tf.boolean_mask(indices, mask).numpy()

    def _made(self, first: tf.Tensor, make: Callable[..., Batch]) -> tf.data.Dataset:
        """Returns what is made of the rounds from `first` on and of what `_draw` returns."""
        parts = self._before(first)

        @tf.autograph.experimental.do_not_convert
        def draw_and_make(i: tf.Tensor) -> Batch:
            return make(i, *self._draw(parts, i))

        rounds = tf.data.Dataset.range(first, self._scheme.num_rounds)
        return rounds.map(draw_and_make, tf.data.AUTOTUNE)

    def _before(self, i: tf.Tensor) -> tf.Tensor:
        """Returns what `_draw` needs to know in round i: the parts, whatever the round."""
        del i
        return self._partition()

    @abc.abstractmethod
    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns indices of examples, `[padded_batch_size]`, and which of them are no padding."""

    def _padded(self, drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the indices that were drawn, padded to the size of batches, and where they are.

        More than that is an error: leaving examples out would be another sampling scheme. The
        error itself can be seen, which adds its probability to delta.
        """
        size = tf.size(drawn)
        check = tf.debugging.assert_less_equal(
            size,
            self.padded_batch_size,
            message="A random batch is larger than its padding; this happens once in "
            f"{1 / OVERFLOW_PROBABILITY:.0e} runs. Start the run again.",
        )
        with tf.control_dependencies([check] if check is not None else []):
            drawn = tf.pad(drawn, [[0, self.padded_batch_size - size]])
        return drawn, tf.range(self.padded_batch_size) < size

    def _in_random_rows(
        self, indices: tf.Tensor, mask: tf.Tensor, i: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a batch of random size with its rows in random order.

        What is computed of an example may depend on its row (by seeds of dropout that anybody
        knows), and that must not depend on whether another one was drawn.
        """
        order = _random_order(self.padded_batch_size, _derived(self.seed, _PLACE, i))
        return tf.gather(indices, order), tf.gather(mask, order)

    def _partition(self) -> tf.Tensor:
        """Returns the parts: indices of examples, `[num_parts, part_size]`."""
        order = _random_order(self._dataset_size, _derived(self.seed, _PARTITION))
        used = self._scheme.min_separation * self.part_size
        return tf.reshape(order[:used], [self._scheme.min_separation, self.part_size])

    def _part(self, parts: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        return parts[i % self._scheme.min_separation]

    def _batch(
        self, pieces: int, replicas: int, i: tf.Tensor, indices: tf.Tensor, is_example: tf.Tensor
    ) -> Batch:
        """Returns the batch of round i, cut into `[pieces, rows, ...]` if these are several."""
        rows = ceil_div(self.padded_batch_size, pieces * replicas) * replicas
        missing = rows * pieces - self.padded_batch_size
        axes = [pieces, rows] if pieces > 1 else [rows]

        def cut(tensor: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tensor, [*axes, *tensor.shape[1:]])

        def padded(tensor: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.pad(tensor, [[0, missing]]), [rows * pieces])

        indices, is_example = padded(indices), padded(is_example)
        # Padding must be something that the model takes, and different rows let `separation.py`
        # exchange one for another: an example for each place, whoever was drawn.
        places = tf.range(rows * pieces, dtype=tf.int64) % self._dataset_size
        indices = tf.where(is_example, indices, places)
        if self._users is None:
            fetched = self._fetch(indices)
        else:
            seed = _derived(self.seed, _CHOICE, i)
            fetched, is_there = self._users.fetch(indices, seed)
            is_example = is_example[:, None] & is_there
        fetched = _as_tuples(fetched)
        _check_structure(fetched)
        if isinstance(fetched, tuple) and len(fetched) == 3:
            weights = tf.nest.map_structure(lambda t: _zero_unless(is_example, t), fetched[2])
            fetched = (*fetched[:2], weights)
        positions = i * pieces + tf.range(pieces, dtype=tf.int64)
        key = _derived(self.seed, _SEAL, pieces)
        seals = tf.stack([seal(key, positions[piece]) for piece in range(pieces)])
        return Batch(
            examples=tf.nest.map_structure(cut, fetched),
            is_example=cut(is_example),
            position=cut(tf.repeat(positions, rows)),
            seal=cut(tf.repeat(seals, rows, axis=0)),
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
                f"{self._scheme.min_separation} parts; use fewer parts."
            )


class PoissonBatches(Batches):
    """Every example of the part enters the batch independently with `sampling_probability`.

    Batches are padded to one size, so that their size does not show, neither in shapes nor in
    timing: to the largest one of a `BoundedPoissonSampling`, which draws larger samples again, and
    otherwise to the one that all batches of a run stay within except with probability
    `OVERFLOW_PROBABILITY`. How often a batch was drawn again has nothing to do with who is in it.
    """

    scheme_types = (PoissonSampling,)
    _scheme: PoissonSampling

    @property
    def batch_size(self) -> float:
        if isinstance(self._scheme, BoundedPoissonSampling):
            return self._scheme.batch_size
        return self._scheme.sampling_probability * self.part_size

    @property
    def padded_batch_size(self) -> int:
        if isinstance(self._scheme, BoundedPoissonSampling):
            return self._scheme.max_batch_size
        probability = self._scheme.sampling_probability
        return poisson_padding(self.part_size, probability, self._scheme.num_rounds)

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = _derived(self.seed, _DRAW, i)
        if isinstance(self._scheme, BoundedPoissonSampling):
            first = tf.constant(0, tf.int64)
            _, chosen = tf.while_loop(
                lambda _, chosen: tf.math.count_nonzero(chosen) > self.padded_batch_size,
                lambda last, _: (last + 1, self._sample(_derived(seed, last + 1))),
                (first, self._sample(_derived(seed, first))),
            )
        else:
            chosen = self._sample(seed)
        drawn = tf.boolean_mask(self._part(parts, i), chosen)
        return self._in_random_rows(*self._padded(drawn), i)

    def _sample(self, seed: tf.Tensor) -> tf.Tensor:
        coins = _bits(self.part_size, seed)
        return _happens(coins, self._scheme.sampling_probability)


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

    scheme_types = (FixedSizeSampling,)
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

    scheme_types = (Shuffling,)
    _scheme: Shuffling

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        part = self._part(parts, i)
        visit = i // self._scheme.num_parts
        batches_in_pass = self.part_size // self._scheme.batch_size
        if self._scheme.reshuffled:
            seed = _derived(
                self.seed, _DRAW, i % self._scheme.min_separation, visit // batches_in_pass
            )
            part = tf.gather(part, _random_order(self.part_size, seed))
        start = (visit % batches_in_pass) * self._scheme.batch_size
        batch = part[start : start + self._scheme.batch_size]
        return batch, tf.ones([self.padded_batch_size], tf.bool)


class _RandomBatches(Batches):
    """Batches of examples that draw their rounds for themselves, padded to one size.

    A batch holds every example with the same probability, independently of the others, so its size
    is that of a Poisson sample.
    """

    _scheme: RandomParticipation

    @property
    def batch_size(self) -> float:
        return self._scheme.rate * self._dataset_size

    @property
    def padded_batch_size(self) -> int:
        return poisson_padding(self._dataset_size, self._scheme.rate, self._scheme.num_rounds)

    def _rows(self, takes_part: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        drawn = tf.boolean_mask(tf.range(self._dataset_size, dtype=tf.int64), takes_part)
        return self._in_random_rows(*self._padded(drawn), i)


class SecretPartBatches(_RandomBatches):
    """Every example draws a part once; round i takes those of part i mod num_parts.

    All of them (balls in bins), or each with `sampling_probability`, anew in every round.
    """

    scheme_types = (BallsInBins, SecretParts)
    _scheme: BallsInBins | SecretParts

    def _partition(self) -> tf.Tensor:
        """Returns the part of every example, `[dataset_size]`."""
        coins = _bits(self._dataset_size, _derived(self.seed, _PARTITION))
        parts = self._scheme.min_separation
        return _interval(coins, [k / parts for k in range(1, parts)])

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        has_its_turn = tf.equal(parts, i % self._scheme.min_separation)
        coins = _bits(self._dataset_size, _derived(self.seed, _DRAW, i))
        probability = getattr(self._scheme, "sampling_probability", 1.0)
        return self._rows(has_its_turn & _happens(coins, probability), i)


class WaitingBatches(_RandomBatches):
    """Every example that has waited long enough takes part with the probability of the round.

    How long each has to wait follows from the rounds before, so a pipeline that starts in round i
    first goes through i rounds of coins, without their examples.
    """

    scheme_types = (MinSeparationSampling, OncePerEpoch)
    _scheme: WaitingParticipation

    def _partition(self) -> tf.Tensor:
        """Returns how many rounds every example has to wait before the first one."""
        coins = _bits(self._dataset_size, _derived(self.seed, _PARTITION))
        ends = np.cumsum(self._scheme.initial)
        return _interval(coins, [float(end) for end in ends[:-1] if end < 1.0])

    def _before(self, i: tf.Tensor) -> tf.Tensor:
        """Returns how many rounds every example has to wait before round i."""
        _, waits = tf.while_loop(
            lambda j, _: j < i,
            lambda j, waits: (j + 1, self._after(waits, j)[0]),
            (tf.constant(0, tf.int64), self._partition()),
        )
        return waits

    def _made(self, first: tf.Tensor, make: Callable[..., Batch]) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def draw(waits: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
            after, takes_part = self._after(waits, i)
            return after, (i, *self._rows(takes_part, i))

        rounds = tf.data.Dataset.range(first, self._scheme.num_rounds)
        drawn = rounds.scan(self._before(first), draw)
        return drawn.map(tf.autograph.experimental.do_not_convert(make), tf.data.AUTOTUNE)

    def _draw(self, parts: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._rows(self._after(parts, i)[1], i)

    def _after(self, waits: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns how long examples have to wait after round i, and who takes part in it."""
        coins = _bits(self._dataset_size, _derived(self.seed, _DRAW, i))
        takes_part = tf.equal(waits, 0) & (coins <= tf.constant(_last_coins(self._scheme))[i])
        wait = tf.constant(self._scheme.ready_again, tf.int64)[i] - i - 1
        return tf.where(takes_part, wait, tf.maximum(waits - 1, 0)), takes_part


_PIPELINES: tuple[type[Batches], ...] = (
    PoissonBatches,
    FixedSizeBatches,
    ShuffledBatches,
    SecretPartBatches,
    WaitingBatches,
)


@functools.cache
def poisson_padding(part_size: int, sampling_probability: float, num_rounds: int) -> int:
    """Returns the least size that no batch exceeds, except with `OVERFLOW_PROBABILITY` in all.

    Found by bisection on the logarithm of the tail: SciPy's `isf` gives up below 1e-16, where it
    returns the size of the whole part.
    """
    sizes = scipy.stats.binom(part_size, sampling_probability)
    limit = math.log(OVERFLOW_PROBABILITY) - math.log(num_rounds)
    too_small, enough = 0, part_size
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        # A tail that is not a number proves nothing.
        too_small, enough = (
            (too_small, middle) if sizes.logsf(middle) <= limit else (middle, enough)
        )
    return enough


def make_batches(
    examples: Examples,
    scheme: SamplingScheme | Mechanism,
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
    for pipeline in _PIPELINES:
        if isinstance(scheme, pipeline.scheme_types):
            return pipeline(examples, scheme, dataset_size=dataset_size, pinned_seed=pinned_seed)
    raise BandMFTypeError(f"No pipeline draws batches for {type(scheme).__name__}.")


# What can give an example twice, or another order every time; a variant could hide either.
_UNWANTED = {"repeat", "shuffle", "random", "variant", _compat.CAPTURED}
_OF_WINDOWS = {"range", "repeat", "tensor", "zip"}  # In timeseries_dataset_from_array.

# Operations with a state by which functions draw at random: the state may be a variable of theirs.
_DRAWS = re.compile(
    r"(?!Stateless)\w*(Random|Rng|Multinomial|TruncatedNormal|SampleDistorted|StandardNormal"
    r"|StatefulUniform|CandidateSampler|Assign)\w*"
)
_READ_AGAIN = 8  # Elements; all, if a function of Python may make something else of them.
_AT_ONCE = 1024


def wrap_dataset(
    dataset: tf.data.Dataset, scheme: SamplingScheme | Mechanism, *, pinned_seed: int | None = None
) -> Batches:
    """Returns the pipeline that draws batches of the elements of a dataset, each an example.

    What guarantees rest on is who is drawn, so elements are drawn by index: the dataset is read
    once, into memory. It must be in the same order whenever a run goes on, and have every example
    once: `shuffle`, `repeat`, `window` and random choices between datasets are refused, also inside
    of the functions of `flat_map` and `interleave`, and so are datasets that those capture, whose
    elements come with every call. That it is not put together from copies is the caller's word. For
    more examples than fit, give `make_batches` a function that fetches them by index.

    As elements are read once, functions that draw at random are refused, too: an example would be
    augmented in the same way in all rounds. Layers of the model, and the function that is given to
    `make_batches`, draw anew. What Python functions and generators draw shows when they are read a
    second time; operations with seeds of their own (`tf.random.stateless_normal`) give the same in
    all epochs of a plain `fit`, too.

    Args:
      dataset: Of single examples, `(x, y)` or `(x, y, sample_weight)`, as many as it says.
      scheme: As for `make_batches`.
      pinned_seed: For tests only: makes the batches known to everybody.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise BandMFTypeError(
            "dataset must be a tf.data.Dataset; make_batches takes arrays. Found "
            f"{type(dataset).__name__}."
        )
    made_by = _compat.transformations(dataset)
    if made_by >= _OF_WINDOWS or any("window" in name for name in made_by):
        raise SamplingError(
            "The windows of a series can overlap, and a moment in several examples is protected "
            "less; give make_batches arrays of windows that do not, or see group_by_user."
        )
    size = int(dataset.cardinality())
    if size <= 0:
        kind = "without end" if size == tf.data.INFINITE_CARDINALITY else f"of cardinality {size}"
        raise SamplingError(
            f"A stream {kind} cannot be drawn from by index, and shuffling a buffer of it "
            "amplifies nothing: leave out repeat, state its size with tf.data.experimental."
            "assert_cardinality, or train on it as it is with sampling='unchecked' and a mechanism "
            "for as many participations as it has passes, which is then assumed and not enforced."
        )
    unwanted = {name for name in made_by if any(word in name for word in _UNWANTED)}
    if unwanted:
        raise SamplingError(
            "The dataset must have every example once and in one order, the pipeline itself draws "
            f"at random for as long as planned; leave out {' and '.join(sorted(unwanted))}."
        )
    stateful = _compat.stateful_in_functions(dataset)
    _refuse_draws(filter(_DRAWS.fullmatch, stateful))
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs):
        raise SamplingError(
            "Elements must be single examples of one shape, not batches, and not ragged: call "
            f"unbatch(), or pad them. Found {dataset.element_spec}."
        )
    number_bytes = size * sum(s.shape.num_elements() * s.dtype.size for s in specs)
    _memory.require_bytes(
        2 * number_bytes,
        f"The {size:,} examples of the dataset",
        "give make_batches a function that fetches examples by index",
    )
    try:
        examples = dataset.batch(size).get_single_element()
    except tf.errors.FailedPreconditionError:  # What assert_cardinality raises.
        raise SamplingError(
            f"The dataset states {size:,} examples and has more or fewer; state as many as it has."
        ) from None
    count = size if any("PyFunc" in name for name in stateful) else min(size, _READ_AGAIN)
    done = 0
    for again in map(tf.nest.flatten, dataset.take(count).batch(_AT_ONCE)):
        stop = done + len(again[0])
        first = [t[done:stop] for t in tf.nest.flatten(examples)]
        if not all(map(_same, first, again)):
            break
        done = stop
    if done != count:
        _refuse_draws(["read twice, it is another one"])
    return make_batches(examples, scheme, dataset_size=size, pinned_seed=pinned_seed)


def _refuse_draws(found: Iterable[str]) -> None:
    if signs := " and ".join(sorted(found)):
        raise SamplingError(
            f"A function of the dataset draws at random ({signs}), which would be once for all "
            "rounds; let layers of the model do it, or a function that is given to make_batches."
        )


def _same(one: tf.Tensor, other: tf.Tensor) -> bool:
    return np.array_equal(one.numpy(), other.numpy(), equal_nan=one.dtype.is_floating)


def cyclic_scheme(num_rounds: int, batch_size: int, dataset_size: int) -> Shuffling:
    """Returns epochs in one random order: an example takes part every dataset_size // batch_size.

    This is the (k, b)-participation of fixed epochs, with b = floor(dataset_size / batch_size) and
    k = ceil(num_rounds / b). Examples that do not fill a batch of their own sit out.
    """
    batch_size = _checks.positive_int("batch_size", batch_size)
    num_parts = _checks.positive_int("dataset_size", dataset_size) // batch_size
    return Shuffling(num_rounds, max(num_parts, 1), batch_size, dataset_size, reshuffled=False)


def check_sampling(mechanism: Mechanism, scheme: SamplingScheme) -> None:
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


def _at_least_as_private(scheme: SamplingScheme, planned: SamplingScheme) -> bool:
    """Whether epsilon of the planned scheme holds for the scheme.

    Of Poisson samples without a largest size, a smaller probability is fine.
    """
    if type(scheme) is PoissonSampling and type(planned) is PoissonSampling:
        return (
            scheme.num_rounds == planned.num_rounds
            and scheme.num_parts == planned.num_parts
            and scheme.sampling_probability <= planned.sampling_probability * (1 + 1e-12)
        )
    return scheme == planned


def _fetcher(
    examples: Examples, dataset_size: int | None
) -> tuple[Callable[[tf.Tensor], Any], int]:
    if isinstance(examples, tf.data.Dataset):
        raise BandMFTypeError(
            "make_batches takes arrays, or a function that fetches examples by index; for a "
            "tf.data.Dataset call wrap_dataset(dataset, scheme)."
        )
    if callable(examples):
        return examples, _checks.positive_int("dataset_size", dataset_size)
    if isinstance(examples, list):
        raise BandMFTypeError(
            "examples must be an array, a dict, or a tuple (x,), (x, y) or (x, y, sample_weight), "
            "which says what is what. Found a list."
        )
    tensors = tf.nest.map_structure(_tensor, _as_tuples(examples))
    _check_structure(tensors)
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


def _exact_ids(user_ids: Any) -> np.ndarray:
    """Returns ids as an array in which different users are different: NumPy rounds and strips."""
    has_type = hasattr(user_ids, "dtype")
    ids = np.asanyarray(user_ids) if has_type else np.array(user_ids, dtype=object)
    kinds = {type(user) for user in ids.flat} if ids.dtype.kind == "O" else {ids.dtype.type}
    known = all(issubclass(kind, int | np.integer | str | bytes) for kind in kinds)
    if isinstance(ids, np.ma.MaskedArray) or len(kinds) > 1 or not known:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise BandMFError(
            "user_ids must say exactly whose every example is, all by integers or all by strings; "
            f"NaN, None, masked and rounded numbers merge users. Found {names}."
        )
    return ids


def _tensor(array: Any) -> tf.Tensor:
    if array is None or isinstance(array, tf.RaggedTensor | tf.SparseTensor | tf.data.Dataset):
        raise BandMFTypeError(
            "examples must be dense arrays; leave out what there is not, and pad what is ragged. "
            f"Found {type(array).__name__}."
        )
    return tf.convert_to_tensor(array)


def _as_tuples(structure: Any) -> Any:
    """Returns the structure with tuples for lists, which `tf.data` would stack into one tensor."""
    if isinstance(structure, dict):
        return {name: _as_tuples(value) for name, value in structure.items()}
    if isinstance(structure, list | tuple):
        return tuple(_as_tuples(value) for value in structure)
    return structure


def _check_structure(examples: Any) -> None:
    if isinstance(examples, tuple) and len(examples) not in (1, 2, 3):
        raise BandMFTypeError(
            "A tuple of examples must be (x,), (x, y) or (x, y, sample_weight); put several inputs "
            f"into a tuple of their own, ((x1, x2), y). Found {len(examples)} entries."
        )


def _zero_unless(is_example: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    missing = tensor.shape.rank - is_example.shape.rank
    condition = tf.reshape(is_example, [*is_example.shape, *[1] * missing])
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def _int64(value: int | tf.Variable) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.int64)


def seal(key: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    """Returns the seal of the batch at a position, two int64."""
    return _derived(key, position)


def _derived(seed: tf.Tensor, *data: int | tf.Tensor) -> tf.Tensor:
    """Returns a 128-bit seed of its own for each sequence of numbers."""
    seed = tf.convert_to_tensor(seed)
    for number in data:
        seed = _bits(2, seed, number)
    return seed


def _bits(count: int, seed: tf.Tensor, start: int | tf.Tensor = 0) -> tf.Tensor:
    """Returns random int64, two from each Philox counter, with counters from `start` on."""
    seed = tf.bitcast(tf.convert_to_tensor(seed), tf.uint64)
    counter = tf.stack([tf.cast(_int64(start), tf.uint64), seed[1]])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count], key=seed[:1], counter=counter, alg=_PHILOX, dtype=tf.int64
    )


def _threshold(probability: float) -> int:
    """Returns what a random int64 is below with this probability, exact to 2^-64."""
    return round(probability * 2**64) - 2**63


def _last_coin(probability: float) -> int:
    """Returns the largest random int64 that makes something happen that has the probability."""
    return max(_threshold(probability) - 1, -(2**63))


@functools.lru_cache(maxsize=8)
def _last_coins(scheme: WaitingParticipation) -> np.ndarray:
    """Returns the same for taking part when ready, of every round."""
    probabilities, places = np.unique(scheme.coins, return_inverse=True)
    return np.array([_last_coin(float(p)) for p in probabilities], np.int64)[places]


def _happens(coins: tf.Tensor, probability: float) -> tf.Tensor:
    """Returns which random int64 make something happen that has the probability."""
    return coins <= tf.constant(_last_coin(probability), tf.int64)


def _interval(coins: tf.Tensor, ends: list[float]) -> tf.Tensor:
    """Returns in which interval of [0, 1), cut at the ends, random int64 are, counted from 0."""
    thresholds = tf.constant([_threshold(end) for end in ends], tf.int64)
    return tf.searchsorted(thresholds, coins, side="right", out_type=tf.int64)


def _random_order(count: int, seed: tf.Tensor, take: int | None = None) -> tf.Tensor:
    """Returns the first `take` entries of a uniformly random permutation of `range(count)`."""
    order = tf.math.top_k(_bits(count, seed), count if take is None else take).indices
    return tf.cast(order, tf.int64)
