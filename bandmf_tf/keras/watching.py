"""What a private optimizer knows of how its batches were drawn.

What was seen of the batches stays with the run: a step whose batch was not the next one of the
pipeline that `fit` runs, or whose noise or batch came from a pinned seed, is never forgotten.
"""

from __future__ import annotations

import tensorflow as tf

from bandmf_tf.accounting.amplification import FixedSizeSampling, Shuffling
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras.batches import Batch, Batches, SamplingError, check_sampling, seal
from bandmf_tf.keras.optimizer_state import UNCHECKED, OptimizerState, PrivacyError, Seen
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.source import fresh_seed


class WatchedOptimizer(OptimizerState):
    """An optimizer that is told how batches are drawn, and counts what it saw of them."""

    def batch_sizes_seen(self) -> dict[str, float]:
        """Returns smallest, largest and mean number of examples in the batches of all steps."""
        seen = self._seen_so_far()
        if not seen.steps:
            return {}
        scale = self.microbatch_size
        return {
            "smallest": scale * seen.smallest,
            "largest": scale * seen.largest,
            "mean": scale * seen.total / seen.steps,
        }

    @property
    def sampling_is_enforced(self) -> bool:
        """Whether all batches so far came, in order, from pipelines that `fit` itself ran.

        Of the scheme that is stated now, that is: nobody knows the one of a run that was restored
        until `fit` has compared it.
        """
        settings = self._settings
        is_same = settings.sampling_run is not None and settings.sampling_run == settings.sampling
        return is_same and 0 < self._seen_so_far().enforced == self.steps_done

    @property
    def examples_per_user(self) -> int | None:
        """Bound on what a user contributes to a round; None if what `fit` last drew are examples.

        It is that of all steps whose sampling is enforced: the fingerprint of a pipeline has it.
        """
        return self._settings.examples_per_user

    @property
    def expects_batches(self) -> bool:
        """Whether `fit` is running a pipeline, whose batches it counts as enforced."""
        return self._settings.is_expecting

    @property
    def has_pinned_seed(self) -> bool:
        """Whether any noise of the run is that of a test, which anybody can reproduce."""
        return self._settings.is_pinned or self._seen_so_far().pinned_noise > 0

    @property
    def has_pinned_sampling(self) -> bool:
        """Whether any batches of the run are those of a test, which anybody can reproduce."""
        return self._settings.pinned_sampling or self._seen_so_far().pinned_sampling > 0

    def _seen_so_far(self) -> Seen:
        return Seen(*map(int, self._seen.numpy())) if self._stream is not None else Seen()

    def declare_sampling(self, sampling: Batches | SamplingScheme | str) -> None:
        """States how batches are drawn; raises `SamplingError` if the mechanism assumes otherwise.

        Args:
          sampling: A pipeline or a scheme. `UNCHECKED` stands for: whoever says this has made sure.
        """
        scheme = sampling.scheme if isinstance(sampling, Batches) else sampling
        if isinstance(scheme, str):
            if scheme != UNCHECKED:
                raise BandMFError(f"sampling must be a scheme or {UNCHECKED!r}. Found {scheme!r}.")
        else:
            users = getattr(sampling, "examples_per_user", None)
            if self.microbatch_size > 1 and users is not None:
                raise SamplingError(
                    "microbatch_size must be 1 where users are drawn: their examples are averaged "
                    f"as they are. Found {self.microbatch_size}."
                )
            if isinstance(self.mechanism, Mechanism):
                check_sampling(self.mechanism, scheme)
            if self.microbatch_size > 1 and not isinstance(scheme, FixedSizeSampling | Shuffling):
                raise SamplingError(
                    "microbatch_size must be 1 for samples of random size: one example more or "
                    f"less changes all microbatches that follow. Found {self.microbatch_size}."
                )
        if self._settings.batch_size is None and isinstance(sampling, Batches):
            self._settings.batch_size = float(sampling.batch_size)
        self._settings.sampling = scheme
        self._settings.pinned_sampling = isinstance(sampling, Batches) and sampling.is_pinned

    def expect_batches(self, batches: Batches | None) -> None:
        """Counts steps on batches of this pipeline as enforced from now on; None: no steps.

        Called by `fit`, which runs the pipeline. Raises `SamplingError` if earlier steps used
        another partition of the data.
        """
        self._settings.is_expecting = batches is not None
        if batches is None:
            if self._stream is not None:
                self._settings.expected.assign([*fresh_seed(), 0])
            return
        if self._stream is None:
            raise PrivacyError("The optimizer is not built; call build(variables) first.")
        found, (identity, known) = batches.fingerprint(), self._fingerprints.numpy()
        if known not in (0, found) and (self.steps_done or int(self.pieces_done)):
            raise SamplingError(
                f"The first {self.steps_done} steps of this run used another random partition of "
                "the data set, or another scheme, so examples could take part too often; restore "
                "the pipeline, too, for example with tf.train.Checkpoint(batches=batches)."
            )
        self._fingerprints.assign([identity, found])
        self._settings.sampling_run = batches.scheme
        self._settings.examples_per_user = batches.examples_per_user
        key = batches.seal_key(self.accumulation_steps)
        self._settings.expected.assign([*key, int(batches.is_pinned)])

    def is_next(self, batch: Batch) -> tf.Tensor:
        """Returns whether the rows are of the batch that `fit`'s pipeline has for this step."""
        if self._stream is None:
            return tf.constant(False)
        done = tf.convert_to_tensor(self.iterations)
        position = done * self.accumulation_steps + self.pieces_done
        expected = tf.convert_to_tensor(self._settings.expected)
        return tf.reduce_all(tf.equal(batch.position, position)) & tf.reduce_all(
            tf.equal(batch.seal, seal(expected[:2], position))
        )

    def take_tally(self) -> list[int]:
        """Returns the numbers of examples, of clipped and of non-finite ones since the last call.

        They are exact, and so not private.
        """
        if self._stream is None:
            return [0, 0, 0]
        counts = [*map(int, self._settings.tally.numpy())]
        self._settings.tally.assign([0, 0, 0])
        return counts

    def _count_units(self, counts: tf.Tensor) -> None:
        units, foreign, _ = tf.unstack(counts)
        seen = Seen(*tf.unstack(tf.convert_to_tensor(self._seen)))
        is_pinned = tf.maximum(
            tf.convert_to_tensor(self._settings.expected)[2], int(self._settings.pinned_sampling)
        )
        after = Seen(
            steps=seen.steps + 1,
            total=seen.total + units,
            smallest=tf.where(seen.steps > 0, tf.minimum(seen.smallest, units), units),
            largest=tf.maximum(seen.largest, units),
            enforced=seen.enforced + tf.cast(tf.equal(foreign, 0), tf.int64),
            pinned_noise=seen.pinned_noise + int(self._settings.is_pinned),
            pinned_sampling=seen.pinned_sampling + is_pinned,
        )
        self._seen.assign(list(after))
