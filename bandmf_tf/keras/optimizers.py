"""Keras optimizers that add the noise of a mechanism to sums of clipped gradients.

`make_private_class(tf.keras.optimizers.Adam)` is Adam on private gradients. Step i gives the base
optimizer

    (sum of clipped per-example gradients + row i of C^-1 z) / batch_size + penalties,

where `batch_size` is a number fixed in advance, never the size of the batch at hand, and penalties
are gradients of weight regularizers, which depend on no example. What the base optimizer does with
it, momentum, adaptive rates, weight decay, is post-processing.

Gradients come from one of three places, all clipped by the optimizer itself:

* `fit` of a private model (`models.py`): the fast way, any loss;
* `clipped_gradients(loss_function, batch, variables)`: the same in a training loop of one's own;
* `minimize(losses, variables, tape=tape)`, which plain Keras models call in `fit`: it needs a loss
  made with `reduction="none"`, and time that grows with the square of the batch size.

`apply_gradients` takes nothing else: gradients that it cannot know to be clipped are refused.

All replicas of a `tf.distribute` strategy together get one row of noise, added to their sum.

With `adaptive_clipping` the clip norm follows a quantile of the norms, within the same noise and
budget (`noise/adaptive_clipping.py`); the noise is then that of the current clip norm.

In place of a mechanism an optimizer takes any DP query that sums (`queries.py`): its
`get_noised_result` then makes the noised sum of every step.

A step counts when its update is applied: noise is drawn after everything that can fail, so that a
batch that raises leaves the run where it was.

Where the variables do not belong together (`optimizer_state.py`), an assertion says so and the
noise is NaN, because XLA drops assertions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.keras import _compat
from bandmf_tf.keras.batches import SamplingError
from bandmf_tf.keras.clipping import (
    AdaptiveNorm,
    ClippedSum,
    LossFunction,
    clipped_gradient_sum,
    clipped_gradient_sum_of_tape,
)
from bandmf_tf.keras.optimizer_state import UNCHECKED, PrivacyError
from bandmf_tf.keras.queries import QueryNoise
from bandmf_tf.keras.separation import check_loss_function
from bandmf_tf.keras.watching import WatchedOptimizer

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

PACKAGE = "bandmf_tf"  # Under which Keras finds the classes again when it loads a model.

_LOGGER = logging.getLogger(__name__)

_NO_STRATEGY = tf.distribute.get_strategy()  # Outside of every scope: TensorFlow's default.


class ClippedGradients(tuple):
    """Pairs of a sum of clipped gradients, on this replica, and its variable, not to be changed.

    Attributes:
      clip: What the contribution of one example was clipped to, or what clipped it: a norm that
        adapts, or a query.
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
        clip: float | AdaptiveNorm | QueryNoise,
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


class PrivateOptimizer(WatchedOptimizer):
    """What `make_private_class` adds to a Keras optimizer; see the top of this file.

    Args:
      mechanism: A mechanism, the path of a mechanism file, or a `BareMechanism`; None for a query.
      *args: Arguments of the base optimizer, beginning with its learning rate.
      query: In place of a mechanism, a DP query, which clips, adds noise and has a seed itself.
      adaptive_clipping: How the clip norm adapts, from the mechanism's on (`AdaptiveClipping`);
        None: it does not.
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
        vectorize: bool = True,
    ) -> ClippedSum:
        """Returns what `clipped_gradients` does, as tensors alone.

        With `examples_per_user` that many examples in a row are one user's, clipped as one. Without
        `vectorize` they are taken one by one.
        """
        return clipped_gradient_sum(
            loss_function,
            batch,
            variables,
            self._built_clip(variables),
            mask=mask,
            microbatch_size=examples_per_user or self.microbatch_size,
            is_user=examples_per_user is not None,
            chunk_size=self.chunk_size,
            vectorize=vectorize,
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
            tape,
            loss,
            variables,
            self._built_clip(variables),
            microbatch_size=self.microbatch_size,
        )
        return ClippedGradients(clipped, variables, self.clip)

    def _built_clip(self, variables: Sequence[tf.Variable]) -> Any:
        if self.clip is None:
            with tf.init_scope():
                self.build(variables)
        return self.clip

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
        are_numbers = isinstance(clip, float) and isinstance(self.clip, float)
        if clip > self.clip if are_numbers else clip is not self.clip:
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
        if isinstance(clip, AdaptiveNorm):
            sums = [*sums, clip.quantile.votes(*tf.unstack(tally))]
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
            return self._update(gradients, variables)

    def _update(self, gradients: list[tf.Tensor], variables: Sequence[tf.Variable]) -> tf.Variable:
        self._settings.is_applying = True
        try:
            pairs = list(zip(gradients, variables, strict=True))
            return _compat.apply_to_sums(self, super().apply_gradients, pairs)
        finally:
            self._settings.is_applying = False

    def trace_update(self, variables: Sequence[tf.Variable]) -> None:
        """Puts into a graph what is done with noised gradients, so that it shows what that reads.

        The graph must not be run: there is no noise in it.
        """
        with tf.init_scope():
            self.build(variables)
        self._update([tf.zeros(v.shape, v.dtype) for v in variables], variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Refuses gradients that nobody has clipped; Keras 3 itself calls it with noised ones."""
        if not self._settings.is_applying:
            raise PrivacyError(
                "apply adds no noise; give apply_gradients what clipped_gradients of this "
                "optimizer returned."
            )
        return super().apply(grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert
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

    @tf.autograph.experimental.do_not_convert
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
        if isinstance(self.clip, AdaptiveNorm):
            noised = self._adapted(self.clip, noised)
        with tf.control_dependencies(noised):
            most, again = tf.unstack(tf.convert_to_tensor(self._settings.taken))
            again += tf.cast(number < most, tf.int64)
            self._settings.taken.assign([tf.maximum(most, number + 1), again])
        agrees &= tf.equal(counts[-1], 0)
        return [tf.where(agrees, total, tf.constant(np.nan, total.dtype)) for total in noised]

    def _adapted(self, clip: AdaptiveNorm, noised: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums that a release stands for, and moves the clip norm."""
        *noised, votes = noised
        norm = tf.identity(clip.variable)
        sums, following = clip.quantile.read(noised, votes, norm, self.batch_size)
        with tf.control_dependencies(sums):
            clip.variable.assign(following)
        return sums

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
"""Keras's `SGD` on private gradients; see `PrivateOptimizer`."""
Adam = make_private_class(tf.keras.optimizers.Adam)
"""Keras's `Adam` on private gradients; see `PrivateOptimizer`."""
AdamW = make_private_class(tf.keras.optimizers.AdamW)
"""Keras's `AdamW` on private gradients; see `PrivateOptimizer`."""
Adagrad = make_private_class(tf.keras.optimizers.Adagrad)
"""Keras's `Adagrad` on private gradients; see `PrivateOptimizer`."""
RMSprop = make_private_class(tf.keras.optimizers.RMSprop)
"""Keras's `RMSprop` on private gradients; see `PrivateOptimizer`."""


def _clipped_how(clip: Any) -> str:
    if isinstance(clip, AdaptiveNorm):
        return "to a norm that adapts"
    return f"to {clip:g}" if isinstance(clip, float) else "by a query"


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
