"""Keras optimizers that add the noise of a mechanism to sums of clipped gradients.

`make_private_class(tf.keras.optimizers.Adam)` is Adam on private gradients. Step i gives the base
optimizer

    (sum of clipped per-example gradients + row i of C^-1 z) / batch_size + penalties,

where `batch_size` is a number fixed in advance, never the size of the batch at hand, and penalties
are gradients of weight regularizers, which depend on no example. What the base optimizer does with
it, momentum, adaptive rates, weight decay, is post-processing.

Gradients come from one of three places, all clipped by the optimizer itself:

* `fit` of a private model (`keras_models.py`): the fast way, any loss;
* `clipped_gradients(loss_function, batch, variables)`: the same in a training loop of one's own;
* `minimize(losses, variables, tape=tape)`, which plain Keras models call in `fit`: it needs a loss
  made with `reduction="none"`, and time that grows with the square of the batch size.

`apply_gradients` takes nothing else: gradients that it cannot know to be clipped are refused.

All replicas of a `tf.distribute` strategy together get one row of noise, added to their sum.

In place of a mechanism an optimizer takes any DP query that sums (`queries.py`): its
`get_noised_result` then makes the noised sum of every step.

A step counts when its update is applied: noise is drawn after everything that can fail, so that a
batch that raises leaves the run where it was.

Everything the next step depends on is in variables that checkpoints and Keras's files hold. Three
of them guard against a restore that left something behind: Keras's own `iterations` must agree with
the step of the noise, a fingerprint of the mechanism must be the optimizer's, and one of the
sampling seed must be the pipeline's. Where they do not agree, an assertion says so and the noise is
NaN, because XLA drops assertions.

What was seen of the batches stays with the run, too: a step whose batch was not the next one of the
pipeline that `fit` runs, or whose noise or batch came from a pinned seed, is never forgotten.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf.accounting.amplification import CyclicScheme, PoissonSampling
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat, _config, queries
from bandmf_tf.keras._config import BareMechanism
from bandmf_tf.keras.batches import Batch, Batches, SamplingError, check_sampling, seal
from bandmf_tf.keras.clipping import (
    ClippedSum,
    LossFunction,
    clipped_gradient_sum,
    clipped_gradient_sum_of_tape,
)
from bandmf_tf.keras.queries import QueryNoise
from bandmf_tf.keras.separation import check_loss_function
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.noise.source import fresh_seed
from bandmf_tf.noise.stream import NoiseStream

_DISAGREEMENTS = (
    (
        "The optimizer and its noise are at different steps: a restore has left the noise behind. "
        "Restore with tf.train.Checkpoint, load_model or BackupAndRestore, all of which bring it "
        "back."
    ),
    (
        "The noise that was restored belongs to another mechanism than the optimizer's; go on with "
        "the mechanism that the run was started with."
    ),
)

# In place of a sampling scheme: "I know how batches are drawn, do not check".
UNCHECKED = "unchecked"

PACKAGE = "bandmf_tf"  # Under which Keras finds the classes again when it loads a model.

_FEWEST_TO_JUDGE = 100  # Examples, before a fraction of them says anything.

_LOGGER = logging.getLogger(__name__)

_NO_STRATEGY = tf.distribute.get_strategy()  # Outside of every scope: TensorFlow's default.


if TYPE_CHECKING:
    _KerasOptimizer = Any  # What the class is mixed with has no types.
else:
    _KerasOptimizer = object


class PrivacyError(BandMFError):
    """Going on would not be private, or not in the way that was planned."""


class ClippedGradients(tuple):
    """Pairs of a sum of clipped gradients, on this replica, and its variable, not to be changed.

    Attributes:
      clip: What the contribution of one example was clipped to, or the query that clipped it.
      num_units: Examples (microbatches) in the sum.
      num_clipped: How many of them were clipped. Not private: for debugging only.
      num_nonfinite: How many were dropped for NaN or infinity. Not private, either.
      outputs: What the loss function returned beside the loss.
      penalties: Gradients that depend on no example, added after the noise; None for no such.
      is_enforced: Whether the batch was the next one of the pipeline that `fit` runs.
      is_refused: Whether the model must not take this step; its noise is then NaN.
      sums: What is summed over replicas and pieces: the gradients, or what a DP query makes of
        them, which is then not in the pairs.
    """

    def __new__(
        cls, clipped: ClippedSum, variables: Sequence[tf.Variable], clip: Any, *_: Any
    ) -> Any:
        """Returns the pairs, which nobody can scale after they were clipped."""
        by_query = isinstance(clip, QueryNoise)
        gradients = [None] * len(variables) if by_query else clipped.gradients
        return super().__new__(cls, zip(gradients, variables, strict=True))

    def __init__(
        self,
        clipped: ClippedSum,
        variables: Sequence[tf.Variable],
        clip: float | QueryNoise,
        penalties: Sequence[tf.Tensor] | None = None,
        is_enforced: tf.Tensor | bool = False,
    ):
        self.clip = clip
        self.sums = clipped.gradients
        self.num_units = clipped.num_units
        self.num_clipped = clipped.num_clipped
        self.num_nonfinite = clipped.num_nonfinite
        self.outputs = clipped.outputs
        self.penalties = penalties
        self.is_enforced = tf.convert_to_tensor(is_enforced)
        self.is_refused = tf.constant(False)


class PrivateOptimizer(_KerasOptimizer):
    """What `make_private_class` adds to a Keras optimizer; see the top of this file.

    Args:
      mechanism: A mechanism, the path of a mechanism file, or a `BareMechanism`; None for a query.
      *args: Arguments of the base optimizer, beginning with its learning rate.
      query: In place of a mechanism, a DP query, which clips, adds noise and has a seed itself.
      batch_size: What sums are divided by: the expected number of examples in a batch. None takes
        it from `sampling` or from the sampling scheme of the mechanism.
      sampling: How batches are drawn: a pipeline (`sampling.py`) or its scheme, which must keep the
        assumptions of the mechanism, or `UNCHECKED`. None leaves it to the private model, whose
        `fit` takes a pipeline, or to `declare_sampling`; training does not start without.
      microbatch_size: Examples that are averaged before they are clipped; see `clipping.py`.
      accumulation_steps: Calls of `apply_gradients` that make up one step: gradients of all of them
        are summed, and the last one adds noise. `batch_size` counts all of them.
      chunk_size: Examples differentiated at once; None: as many as fit a memory budget.
      noise_memory_bytes: Memory budget of the noise stream for blocks of rows; None: its default.
      pinned_seed: For tests only: makes the noise reproducible, by anybody.
      **kwargs: Arguments of the base optimizer.
    """

    def __init__(
        self,
        mechanism: Mechanism | BareMechanism | str | os.PathLike[str] | None = None,
        *args: Any,
        query: Any = None,
        batch_size: float | None = None,
        sampling: Batches | CyclicScheme | str | None = None,
        microbatch_size: int = 1,
        accumulation_steps: int = 1,
        chunk_size: int | None = None,
        noise_memory_bytes: int | None = None,
        pinned_seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        _compat.check_optimizer(self)
        if (mechanism is None) == (query is None):
            raise PrivacyError(
                "Noise comes from one place: give the optimizer a mechanism or query=..., and not "
                "both."
            )
        if query is not None:
            mechanism = _checked_query(query, microbatch_size, pinned_seed, noise_memory_bytes)
        elif isinstance(mechanism, str | os.PathLike):
            mechanism = load_mechanism(mechanism)
        self._settings = _Settings(
            mechanism=mechanism,
            query=query,
            l2_norm_clip=(
                queries.plain_l2_norm_clip(query) if mechanism is None else mechanism.l2_norm_clip
            ),
            microbatch_size=_checks.positive_int("microbatch_size", microbatch_size),
            accumulation_steps=_checks.positive_int("accumulation_steps", accumulation_steps),
            chunk_size=chunk_size,
            noise_memory_bytes=noise_memory_bytes,
            pinned_seed=pinned_seed,
            identity=(
                queries.identity_of(query) if mechanism is None else _config.identity_of(mechanism)
            ),
            batch_size=_batch_size(batch_size, sampling, mechanism),
        )
        self._pending: list[np.ndarray] | None = None
        self._stream: NoiseStream | QueryNoise | None = None
        if sampling is not None:
            self.declare_sampling(sampling)
        elif not isinstance(mechanism, Mechanism):
            self._settings.sampling = UNCHECKED  # It promises nothing that could be broken.

    @property
    def mechanism(self) -> Mechanism | BareMechanism | None:
        """The mechanism whose noise is added; None if all that is known is a query."""
        return self._settings.mechanism

    @property
    def query(self) -> Any:
        """The DP query that makes noised sums; None if a mechanism does."""
        return self._settings.query

    @property
    def num_rounds(self) -> int | None:
        """Number of steps that are planned; None if a query does not say."""
        return None if self.mechanism is None else self.mechanism.num_rounds

    @property
    def l2_norm_clip(self) -> float | None:
        """Bound on the norm of one example's contribution; None if a query alone knows it."""
        return self._settings.l2_norm_clip

    @property
    def clip(self) -> Any:
        """What clips the contribution of an example: the norm, or the query once it is built."""
        return self._stream if self.l2_norm_clip is None else self.l2_norm_clip

    def dp_event(self) -> Any:
        """Returns the `DpEvent` of all steps done, without amplification by sampling.

        `UnsupportedDpEvent` if a query does not say what it costs, or is not known to be right.
        """
        if self.query is None and isinstance(self.mechanism, Mechanism):
            sensitivity = self.mechanism.sensitivity.value
            return dp_accounting.GaussianDpEvent(self.mechanism.noise_multiplier / sensitivity)
        if isinstance(self._stream, QueryNoise):
            return self._stream.event(self.steps_done)
        return dp_accounting.UnsupportedDpEvent()

    @property
    def batch_size(self) -> float:
        """What sums of gradients are divided by."""
        if self._settings.batch_size is None:
            raise PrivacyError(
                "batch_size is not known: the mechanism does not say it. Give the optimizer "
                "batch_size=..., the expected number of examples in a batch."
            )
        return self._settings.batch_size

    @property
    def microbatch_size(self) -> int:
        """Examples that are averaged before they are clipped."""
        return self._settings.microbatch_size

    @property
    def chunk_size(self) -> int | None:
        """Examples differentiated at once; None: as many as fit a memory budget."""
        return self._settings.chunk_size

    @property
    def accumulation_steps(self) -> int:
        """Calls of `apply_gradients` that make up one step."""
        return self._settings.accumulation_steps

    @property
    def sampling(self) -> CyclicScheme | str | None:
        """The scheme that was declared, `UNCHECKED`, or None."""
        return self._settings.sampling

    @property
    def noise_stream(self) -> NoiseStream | QueryNoise | None:
        """The stream of noise, or the state of the query; None until the optimizer is built."""
        return self._stream

    @property
    def steps_done(self) -> int:
        """Steps taken, those before a restore included."""
        return int(self.iterations.numpy())

    @property
    def most_steps_done(self) -> int:
        """The most steps that the run has come to in this process; more after a return."""
        return int(self._settings.taken.numpy()[0]) if self._stream is not None else 0

    @property
    def repeats_steps(self) -> bool:
        """Whether a return to an older state made this process take steps again, or is about to."""
        has_repeated = self._stream is not None and self._settings.taken.numpy()[1] > 0
        return has_repeated or self.steps_done < self.most_steps_done

    @property
    def pieces_done(self) -> tf.Variable | int:
        """Calls of `apply_gradients` since the last step, as a variable if there can be any."""
        return self._pieces if self._stream is not None and self.accumulation_steps > 1 else 0

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

    def _seen_so_far(self) -> _Seen:
        return _Seen(*map(int, self._seen.numpy())) if self._stream is not None else _Seen()

    def declare_sampling(self, sampling: Batches | CyclicScheme | str) -> None:
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
            if self.microbatch_size > 1 and isinstance(scheme, PoissonSampling):
                raise SamplingError(
                    "microbatch_size must be 1 for Poisson samples: one example more or less "
                    f"changes all microbatches that follow. Found {self.microbatch_size}."
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

    # Gradients.

    def clipped_gradients(
        self,
        loss_function: LossFunction,
        batch: Any,
        variables: Sequence[tf.Variable],
        mask: tf.Tensor | None = None,
    ) -> ClippedGradients:
        """Returns the sum of the clipped gradients of a batch, for `apply_gradients`.

        Call it inside of a `tf.function`; in eager mode every call traces the model anew.

        A loss function that assigns variables, runs Python or captures the batch is refused. One
        that captures what was computed from a batch in eager mode is not: nobody can see it.

        Args:
          loss_function: From a microbatch (tensors with a first axis of `microbatch_size`) to its
            loss, or to `(loss, outputs)`; see `clipping.clipped_gradient_sum`.
          batch: Structure of tensors with the examples along their first axis.
          variables: The trainable variables, in the same order in all steps.
          mask: Zero for padding; None: no padding.
        """
        variables = list(variables)
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        check_loss_function(loss_function, batch, variables, self.microbatch_size)
        clipped = self.clipped_sum(loss_function, batch, variables, mask)
        return ClippedGradients(clipped, variables, self.clip)

    def clipped_sum(
        self,
        loss_function: LossFunction,
        batch: Any,
        variables: Sequence[tf.Variable],
        mask: tf.Tensor | None = None,
        *,
        examples_per_user: int | None = None,
    ) -> ClippedSum:
        """Returns what `clipped_gradients` does, as tensors alone.

        With `examples_per_user` that many examples in a row are one user's, clipped as one.
        """
        if self.l2_norm_clip is None:
            with tf.init_scope():
                self.build(variables)
        return clipped_gradient_sum(
            loss_function,
            batch,
            variables,
            self.clip,
            mask=mask,
            microbatch_size=examples_per_user or self.microbatch_size,
            is_user=examples_per_user is not None,
            chunk_size=self.chunk_size,
        )

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None
    ) -> ClippedGradients:
        """Returns the sum of the clipped gradients of a vector of losses on a tape.

        Slow: see `clipping.clipped_gradient_sum_of_tape`. Nobody can see from a tape whether
        examples met in the model, or left something in its variables (batch normalisation), before
        it was recorded: `make_private(model)` tries it out.
        """
        if self.l2_norm_clip is None:
            raise PrivacyError(
                "Gradients of a tape cannot go through a query one by one; make the model private "
                "with bandmf_tf.keras.make_private(model)."
            )
        if not callable(loss) and tape is None:
            raise BandMFError("tape is required when a tensor of losses is passed.")
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        variables = list(var_list() if callable(var_list) else var_list)
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank == 0:
            raise PrivacyError(
                "The loss is one number for the whole batch, so examples cannot be clipped one by "
                "one. Make the model private with bandmf_tf.keras.make_private(model), which "
                "takes any loss and is fast, or use a loss made with reduction='none'."
            )
        _LOGGER.warning(
            "Clipping from a tape takes time quadratic in the batch size; "
            "bandmf_tf.keras.make_private(model) is faster."
        )
        clipped = clipped_gradient_sum_of_tape(
            tape, loss, variables, self.l2_norm_clip, microbatch_size=self.microbatch_size
        )
        return ClippedGradients(clipped, variables, self.clip)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> tf.Variable:
        """Adds noise and applies; takes `ClippedGradients` only.

        Fails with `tf.errors.InvalidArgumentError` after the last planned step.
        """
        del name
        if not isinstance(grads_and_vars, ClippedGradients):
            raise PrivacyError(
                "apply_gradients takes what clipped_gradients or compute_gradients of a private "
                "optimizer returned, which it knows to be clipped example by example; a model that "
                "is fitted is made private by bandmf_tf.keras.make_private(model). Found "
                f"{type(grads_and_vars).__name__}."
            )
        clip = grads_and_vars.clip
        by_query = self.l2_norm_clip is None or isinstance(clip, QueryNoise)
        if clip is not self.clip if by_query else clip > self.clip:
            raise PrivacyError(
                f"The gradients were clipped {_clipped_how(clip)} by another optimizer, and the "
                f"noise of this one is for those clipped {_clipped_how(self.clip)}; use its own "
                "clipped_gradients."
            )
        if skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True):
            raise PrivacyError(
                "Gradients must be summed over replicas by the optimizer, which adds noise to the "
                "sum once; leave skip_gradients_aggregation=False."
            )
        if self.sampling is None:
            raise SamplingError(
                "It is not known how batches are drawn, and the guarantee depends on it: fit a "
                "private model with a pipeline of bandmf_tf.keras.batches, or give the optimizer "
                f"sampling=pipeline, or sampling={UNCHECKED!r} if you made sure of it yourself."
            )
        context = tf.distribute.get_replica_context()
        if context is None:
            raise RuntimeError("apply_gradients must be called in replica context.")
        check_replicas(context.strategy)
        batch_size = self.batch_size
        variables = [variable for _, variable in grads_and_vars]
        with tf.init_scope():
            self.build(variables)

        sums, penalties = grads_and_vars.sums, grads_and_vars.penalties
        tally = tf.stack(
            [grads_and_vars.num_units, grads_and_vars.num_clipped, grads_and_vars.num_nonfinite]
        )
        if isinstance(self._stream, QueryNoise) and self.l2_norm_clip is not None:
            sums = self._stream.sample_of_sum(sums, tally)
        flags = [~grads_and_vars.is_enforced, grads_and_vars.is_refused]
        counts = tf.stack([grads_and_vars.num_units, *(tf.cast(f, tf.int32) for f in flags)])
        # In cross-replica context: collective operations of several models would get into each
        # other's way.
        counts, sums = context.merge_call(self._sum_over_replicas, args=(counts, sums, tally))
        if self.accumulation_steps > 1:
            step = functools.partial(self._accumulate, variables, batch_size)
            return context.merge_call(step, args=(sums, penalties, counts))
        noised = context.merge_call(self._noised, args=(counts, sums, penalties))
        gradients = _divided(noised, batch_size, penalties)
        # Nothing of a step happens if its noise was refused, not even in Keras's counter.
        with tf.control_dependencies(gradients):
            self._settings.is_applying = True
            try:
                return _compat.apply_to_sums(
                    self, super().apply_gradients, list(zip(gradients, variables, strict=True))
                )
            finally:
                self._settings.is_applying = False

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Refuses gradients that nobody has clipped; Keras 3 itself calls it with noised ones."""
        if not self._settings.is_applying:
            raise PrivacyError(
                "apply adds no noise; give apply_gradients what clipped_gradients of this "
                "optimizer returned."
            )
        return super().apply(grads, trainable_variables)

    def _sum_over_replicas(
        self,
        strategy: tf.distribute.Strategy,
        counts: tf.Tensor,
        sums: list[tf.Tensor],
        tally: tf.Tensor,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        tally, counts, *sums = [
            strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
            for value in (tally, counts, *sums)
        ]
        self._settings.tally.assign_add(tf.cast(tally, tf.int64))
        return counts, sums

    def _noised(
        self,
        strategy: tf.distribute.Strategy,
        counts: tf.Tensor,
        sums: list[tf.Tensor],
        penalties: list[tf.Tensor] | None,
    ) -> list[tf.Tensor]:
        """Returns the noised sums, in cross-replica context: one noise for all replicas.

        It is drawn after all it will be added to is known: a batch that fails draws none.
        """
        assert self._stream is not None
        known = [
            t for v in [*sums, *(penalties or [])] for t in strategy.experimental_local_results(v)
        ]
        with tf.control_dependencies(known):
            agrees, assertions = self._guards()
        with tf.control_dependencies(assertions):
            # All replicas have the same sums by now.
            counts, *sums = [strategy.experimental_local_results(t)[0] for t in (counts, *sums)]
            counts = tf.cast(counts, tf.int64)
            self._count_units(counts)
            number = tf.identity(self.iterations)
            if isinstance(self._stream, QueryNoise):
                noised = self._stream.noised(sums)
            else:
                noised = [g + noise for g, noise in zip(sums, self._stream.next(), strict=True)]
        with tf.control_dependencies(noised):
            most, again = tf.unstack(tf.convert_to_tensor(self._settings.taken))
            again += tf.cast(number < most, tf.int64)
            self._settings.taken.assign([tf.maximum(most, number + 1), again])
        agrees &= tf.equal(counts[-1], 0)
        return [tf.where(agrees, total, tf.constant(np.nan, total.dtype)) for total in noised]

    def _accumulate(
        self,
        variables: list[tf.Variable],
        batch_size: float,
        strategy: tf.distribute.Strategy,
        sums: list[tf.Tensor],
        penalties: list[tf.Tensor] | None,
        counts: tf.Tensor,
    ) -> tf.Variable:
        """Adds to the sums of this step and, if they are complete, takes it; in cross-replica."""
        known = [t for v in sums for t in strategy.experimental_local_results(v)]
        with tf.control_dependencies(known):
            counts = tf.identity(strategy.experimental_local_results(counts)[0])
        totals = _compat.native(self._totals)
        for total, part in zip(totals, sums, strict=True):
            with tf.control_dependencies([counts]):
                strategy.extended.update(
                    total, lambda t, g: t.assign_add(g), args=(part,), group=False
                )
        self._counts.assign_add(tf.cast(counts, tf.int64))
        self._pieces.assign_add(tf.ones_like(self._pieces))

        def take_step() -> tf.Tensor:
            complete = [tf.convert_to_tensor(total) for total in totals]
            local = None
            if penalties is not None:
                local = [strategy.experimental_local_results(p)[0] for p in penalties]
            noised = self._noised(strategy, self._counts, complete, local)
            gradients = _divided(noised, batch_size, local)
            with tf.control_dependencies(gradients):
                _compat.apply_in_cross_replica_context(
                    self, strategy, list(zip(gradients, variables, strict=True))
                )
            for variable in (*totals, self._counts, self._pieces):
                variable.assign(tf.zeros_like(variable))
            return tf.constant(True)

        is_complete = tf.greater_equal(self._pieces, self.accumulation_steps)
        tf.cond(is_complete, take_step, lambda: tf.constant(False))
        return self.iterations

    def _guards(self) -> tuple[tf.Tensor, list[tf.Operation]]:
        """Returns whether the state belongs together, and assertions, which raise in eager mode."""
        assert self._stream is not None
        found = [tf.identity(self.iterations), tf.identity(self._fingerprints)[0]]
        expected = [self._stream.round, tf.constant(self._settings.identity, tf.int64)]
        assertions = [
            tf.debugging.assert_equal(one, other, message=message)
            for one, other, message in zip(found, expected, _DISAGREEMENTS, strict=True)
        ]
        agrees = tf.reduce_all(tf.equal(tf.stack(found), tf.stack(expected)))
        return agrees, [assertion for assertion in assertions if assertion is not None]

    def _count_units(self, counts: tf.Tensor) -> None:
        units, foreign, _ = tf.unstack(counts)
        seen = _Seen(*tf.unstack(tf.convert_to_tensor(self._seen)))
        is_pinned = tf.maximum(
            tf.convert_to_tensor(self._settings.expected)[2], int(self._settings.pinned_sampling)
        )
        after = _Seen(
            steps=seen.steps + 1,
            total=seen.total + units,
            smallest=tf.where(seen.steps > 0, tf.minimum(seen.smallest, units), units),
            largest=tf.maximum(seen.largest, units),
            enforced=seen.enforced + tf.cast(tf.equal(foreign, 0), tf.int64),
            pinned_noise=seen.pinned_noise + int(self._settings.is_pinned),
            pinned_sampling=seen.pinned_sampling + is_pinned,
        )
        self._seen.assign(list(after))

    # Advice.

    def advice_on_clipping(self) -> str | None:
        """Returns what to change if all or no examples since the last call were clipped."""
        if self._stream is None or self.l2_norm_clip is None:
            return None
        units, clipped, nonfinite = map(int, self._settings.tally.numpy())
        self._settings.tally.assign([0, 0, 0])
        if units < _FEWEST_TO_JUDGE or (0.01 <= clipped / units <= 0.99 and not nonfinite):
            return None
        if nonfinite:
            advice = "those are left out: look for overflows in the model"
        elif clipped / units < 0.01:
            advice = "noise is planned for norms that none has: plan for a smaller l2_norm_clip"
        else:
            advice = (
                "all have the same norm then: if training is slow, plan for a larger l2_norm_clip, "
                "or scale the learning rate up"
            )
        return (
            f"Of {units} gradients {clipped} were longer than l2_norm_clip={self.l2_norm_clip:g} "
            f"and {nonfinite} not finite (exact counts of private data, not to be published); "
            f"{advice}."
        )

    def advice_on_learning_rate(self, variables: Sequence[tf.Variable]) -> str | None:
        """Returns what to change if the rate was chosen for gradients of another length.

        Of SGD with a constant rate alone: others scale gradients themselves.
        """
        rate = super().get_config().get("learning_rate")  # A dict of a schedule.
        mechanism, clip = self.mechanism, self.l2_norm_clip
        if not isinstance(self, tf.keras.optimizers.SGD) or isinstance(rate, dict):
            return None
        if mechanism is None or clip is None or self._settings.batch_size is None:
            return None
        rate = float(rate)
        weights = [tf.convert_to_tensor(v) for v in variables]
        length = float(tf.linalg.global_norm(weights))
        size = sum(w.shape.num_elements() for w in weights)
        reach = mechanism.num_rounds * rate * clip / (1.0 - min(float(self.momentum), 0.999))
        noise = rate * mechanism.stddev * math.sqrt(size) / self.batch_size
        if length > 0 and reach < length / 100:
            return (
                f"With learning_rate={rate:g} and l2_norm_clip={clip:g} all "
                f"{mechanism.num_rounds} steps together move the weights by at most {reach:.2g}, "
                f"and their norm is {length:.2g}: gradients are clipped, so scale the rate up, by "
                "one over the clip norm to begin with."
            )
        if length > 0 and noise > 10 * length:
            return (
                f"With learning_rate={rate:g} the noise of one step moves the weights by about "
                f"{noise:.2g}, and their norm is {length:.2g}: take a smaller rate or a larger "
                "batch."
            )
        return None

    # State.

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Makes the variables of the base optimizer and the noise stream.

        Later calls do nothing, and refuse other variables than those it was built for. Under a
        `tf.distribute` strategy call it in the strategy's scope before the first step.
        """
        if self._stream is not None:
            self._check_variables(var_list)
            return
        super().build(var_list)
        settings = self._settings
        self._built_for = tuple(map(self._var_key, var_list))
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in var_list]
        self._stream = self._noise_for(specs)
        self._fingerprints = counter([settings.identity, 0], "fingerprints")
        self._seen = counter(list(_Seen()), "seen")
        settings.expected = counter([*fresh_seed(), 0], "expected_batches")
        settings.taken = counter([0, 0], "steps_taken")
        settings.tally = counter([0, 0, 0], "tally")
        added = [self._fingerprints, self._seen, *self._stream.variables]
        if settings.accumulation_steps > 1:
            self._pieces = counter(0, "pieces")
            self._counts = counter([0, 0, 0], "counts")
            if isinstance(self._stream, QueryNoise):
                self._totals = self._stream.make_totals()
                added += self._totals
            else:
                self._totals = [
                    self.add_variable_from_reference(v, "clipped_gradients") for v in var_list
                ]
            added += [self._pieces, self._counts]
        # Keras's own files hold what is in this list.
        self._variables.extend(added)
        if self._pending is not None:
            self._assign_all(self._pending)
            self._pending = None

    def _noise_for(self, specs: list[tf.TensorSpec]) -> NoiseStream | QueryNoise:
        settings = self._settings
        if settings.query is not None:
            return QueryNoise(settings.query, specs)
        assert settings.mechanism is not None
        return NoiseStream(
            settings.mechanism.strategy,
            settings.mechanism.stddev,
            specs,
            block_memory_bytes=settings.noise_memory_bytes,
            pinned_seed=settings.pinned_seed,
        )

    def _check_variables(self, variables: Sequence[tf.Variable]) -> None:
        found = tuple(map(self._var_key, variables))
        if found != self._built_for:
            raise PrivacyError(
                "The trainable variables are not those that the noise was made for: give every "
                "model an optimizer of its own, and freeze layers before the first step. Found "
                f"{len(found)} variables, {len({*found} & {*self._built_for})} of them among the "
                f"{len(self._built_for)} expected."
            )

    def load_own_variables(self, store: Any) -> None:
        """Loads from a file of Keras; before the optimizer is built, as soon as it is."""
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        if self._stream is None and values:
            self._pending = values
        elif len(values) == len(self._variables):
            self._assign_all(values)
        elif values:
            _LOGGER.warning(
                "The file holds %d variables of an optimizer and this one has %d; they were not "
                "loaded. If they belong to a private run, it cannot go on from here.",
                len(values),
                len(self._variables),
            )

    def _assign_all(self, values: list[np.ndarray]) -> None:
        fit = [
            tf.TensorShape(variable.shape).is_compatible_with(value.shape)
            for variable, value in zip(self._variables, values, strict=True)
        ]
        if not all(fit):
            _LOGGER.warning(
                "The variables of the optimizer in the file have other shapes than this "
                "optimizer's; they were not loaded. If they belong to a private run, it cannot go "
                "on from here."
            )
            return
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration with the whole mechanism in it, so that a model can be loaded.

        The noise is in the variables, not here.
        """
        settings = self._settings
        return {
            **super().get_config(),
            **_config.encoded_source(self.mechanism, self.query, settings.identity),
            "batch_size": settings.batch_size,
            "sampling": settings.sampling if settings.sampling == UNCHECKED else None,
            "microbatch_size": settings.microbatch_size,
            "accumulation_steps": settings.accumulation_steps,
            "chunk_size": settings.chunk_size,
            "noise_memory_bytes": settings.noise_memory_bytes,
            "pinned_seed": settings.pinned_seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer of a configuration."""
        return super().from_config(_config.decoded_source(config), custom_objects)


@dataclasses.dataclass
class _Settings:
    """What an optimizer was made with; an object of its own, so that Keras does not track it."""

    mechanism: Mechanism | BareMechanism | None
    query: Any
    l2_norm_clip: float | None
    microbatch_size: int
    accumulation_steps: int
    chunk_size: int | None
    noise_memory_bytes: int | None
    pinned_seed: int | None
    identity: int
    batch_size: float | None
    sampling: CyclicScheme | str | None = None
    sampling_run: CyclicScheme | None = None  # Of the pipeline that `fit` ran last.
    examples_per_user: int | None = None  # Of the same.
    pinned_sampling: bool = False
    is_expecting: bool = False
    is_applying: bool = False  # Whether noised gradients are on their way to the base optimizer.
    # The key of the seals of the pipeline that `fit` runs, or one that fits no seal, and whether
    # its seed is pinned; never saved, and made with the stream. So are the largest number of a step
    # that this process has taken, plus one, with how many steps it took again, and the numbers of
    # examples, of clipped ones and of non-finite ones.
    expected: Any = None
    taken: Any = None
    tally: Any = None

    @property
    def is_pinned(self) -> bool:
        """Whether anybody can reproduce the noise."""
        return self.pinned_seed is not None or getattr(self.query, "is_pinned", False)


class _Seen(NamedTuple):
    """What a run has seen of its batches, by numbers of steps and of examples (microbatches)."""

    steps: Any = 0
    total: Any = 0
    smallest: Any = 0
    largest: Any = 0
    enforced: Any = 0  # Steps on the next batch of the pipeline that `fit` ran.
    pinned_noise: Any = 0
    pinned_sampling: Any = 0


def make_private_class(base: type) -> type:
    """Returns the private version of a Keras optimizer class.

    Its constructor takes a mechanism first, then the arguments of `base`; see `PrivateOptimizer`.
    """
    if issubclass(base, tf.keras.optimizers.legacy.Optimizer) or not issubclass(
        base, tf.keras.optimizers.Optimizer
    ):
        raise BandMFTypeError(
            "base must be a current Keras optimizer, such as tf.keras.optimizers.SGD; legacy "
            f"optimizers have one of the same name there. Found {base!r}."
        )
    name = f"Private{base.__name__}"
    private = type(
        name,
        (PrivateOptimizer, base),
        {"__doc__": f"`{base.__name__}` on private gradients; see `PrivateOptimizer`."},
    )
    private.__module__ = __name__
    return tf.keras.utils.register_keras_serializable(PACKAGE, name)(private)


SGD = make_private_class(tf.keras.optimizers.SGD)
Adam = make_private_class(tf.keras.optimizers.Adam)
AdamW = make_private_class(tf.keras.optimizers.AdamW)
Adagrad = make_private_class(tf.keras.optimizers.Adagrad)
RMSprop = make_private_class(tf.keras.optimizers.RMSprop)


def _checked_query(
    query: Any, microbatch_size: int, pinned_seed: int | None, noise_memory_bytes: int | None
) -> Mechanism | BareMechanism | None:
    """Returns the mechanism that is known of a query; refuses what does not go with it."""
    queries.check_interface(query)
    if pinned_seed is not None or noise_memory_bytes is not None:
        raise PrivacyError(
            "pinned_seed and noise_memory_bytes are for mechanisms; a query has its own seed and "
            "memory, so make the query with them."
        )
    if microbatch_size != 1 and queries.plain_l2_norm_clip(query) is None:
        raise PrivacyError(
            "microbatch_size must be 1 for a query that clips by itself: it takes a microbatch for "
            "one record, and one example can move that by twice its clip norm. Found "
            f"{microbatch_size}."
        )
    return queries.mechanism_of(query)


def _clipped_how(clip: Any) -> str:
    return f"to {clip:g}" if isinstance(clip, int | float) else "by a query"


def _divided(
    sums: Sequence[tf.Tensor], batch_size: float, penalties: Sequence[tf.Tensor] | None
) -> list[tf.Tensor]:
    gradients = [g / batch_size for g in sums]
    if penalties is None:
        return gradients
    return [g + penalty for g, penalty in zip(gradients, penalties, strict=True)]


def check_replicas(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies of several processes, each of which would draw noise and batches."""
    single = (type(_NO_STRATEGY), tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)
    if not isinstance(strategy, single):
        raise PrivacyError(
            "Replicas must be those of one process, so that there is one noise and one draw of "
            "batches: use MirroredStrategy, OneDeviceStrategy or no strategy. Found "
            f"{type(strategy).__name__}."
        )


def counter(value: Any, name: str) -> tf.Variable:
    """Returns a variable of counts that all replicas share."""
    return tf.Variable(
        tf.constant(value, tf.int64),
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _batch_size(given: float | None, sampling: Any, mechanism: Any) -> float | None:
    if given is not None:
        return _checks.positive_float("batch_size", given)
    for source in (sampling, getattr(mechanism, "sampling", None)):
        if getattr(source, "batch_size", None) is not None:
            return float(source.batch_size)
    return None
