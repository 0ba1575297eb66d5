"""Sums of per-example gradients, each clipped to one norm over all variables (Algorithm 1).

The unit that is clipped is a *microbatch*: `microbatch_size` consecutive examples, one by default.
Its gradient g is scaled by min(1, l2_norm_clip / |g|), where |g| is the Euclidean norm over all
variables together, and the scaled gradients are *summed*. Dividing by a number of examples is left
to the caller, because only a number fixed in advance is private.

What holds for every batch, whatever is in it:

* An example whose mask is 0 (padding) contributes exactly zero and is not counted, whatever it
  holds: a model must be able to take it, so it is a copy of an example, not zeros.
* A microbatch whose gradient is not finite contributes zeros and is counted. So is one whose norm
  is above `LARGEST_NORM`, the root of what float32 can hold.
* Rounding makes no contribution longer than the clip norm: `scale_and_sum` has the proof. Only the
  rounding of the sum over examples itself, which is there in any sum of floats, is on top of it.
* With `microbatch_size` 1, replacing an example by zeros moves the sum by at most `l2_norm_clip`.
  With larger microbatches it moves one clipped mean to another, up to *twice* the clip norm of a
  microbatch apart. Microbatches are therefore clipped to `l2_norm_clip / 2`, so that the bound for
  one example stays `l2_norm_clip`. If a microbatch holds all that a user contributes, replacing the
  user by zeros takes it away: users are clipped to `l2_norm_clip`.
* The last bound needs the other examples to stay in their microbatches. Poisson sampling does not
  give that: one more example shifts all that follow. It is for the caller to refuse.

A clip norm that adapts (`AdaptiveNorm`) clips to what it is when the sum is made. The sum is scaled
to the mechanism's clip norm at once, less the room of a vote (`noise/adaptive_clipping.py`): no
later change of the norm makes a contribution longer.

Each microbatch goes through the model by itself, so examples cannot interact, not even in a layer
that averages over the batch. `tf.vectorized_map` runs a chunk of microbatches at once; its memory
grows with chunk size times number of parameters, so a batch is cut into chunks that fit a budget.
Where an operation cannot be vectorised, the same numbers come from a loop over microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.keras import _compat
from bandmf_tf.noise.adaptive_clipping import QuantileNorm

_LOGGER = logging.getLogger(__name__)

# Gradients of a chunk, their squares, and what the backward pass keeps.
_COPIES_OF_GRADIENTS = 4
DEFAULT_MEMORY_BYTES = 1 << 29

LARGEST_NORM = 2.0**63

# Half the distance of two float32 numbers around 1, and the smallest one of full precision: what is
# smaller may count as zero.
UNIT_ROUNDOFF, SMALLEST = 2.0**-24, 2.0**-126

# By how much a norm is taken to be longer than it was computed; see `scale_and_sum`.
_NORM_MARGIN, _NORM_MARGIN_TF32 = 2.0**-17, 2.0**-9
_LONGEST_FLOAT32_SUM = 64

# Gradients of variables of no more numbers are measured and summed together.
_FEW_NUMBERS = 512

# Takes a microbatch (every tensor with a leading axis of `microbatch_size` examples) and returns
# its loss, or its loss and any structure of outputs with the same leading axis.
LossFunction = Callable[[Any], Any]


@runtime_checkable
class Preprocessing(Protocol):
    """What clips gradients in place of a norm: a DP query, see `queries.py`."""

    @property
    def sample_specs(self) -> list[tf.TensorSpec]:
        """Of what is summed."""

    def preprocess(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what is summed for gradients `[units, ...]`, for each unit."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveNorm:
    """A clip norm that adapts.

    Attributes:
      quantile: What it follows, and how.
      variable: Holds it.
    """

    quantile: QuantileNorm
    variable: tf.Variable

    def threshold(self) -> tf.Tensor:
        """Returns the clip norm of now, in float64."""
        return self.quantile.threshold(tf.convert_to_tensor(self.variable))

    def scaled(self, sums: list[tf.Tensor], threshold: tf.Tensor) -> list[tf.Tensor]:
        """Returns sums of gradients of norm `threshold` at most as the mechanism takes them."""
        scale = self.quantile.record_length / threshold
        return [total * tf.cast(scale, total.dtype) for total in sums]


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped gradients and what happened on the way.

    The counts depend on the data and are not private: use them for debugging, not in a release.

    Attributes:
      gradients: One dense tensor for each variable; what a `Preprocessing` sums, if that clipped.
      num_units: Microbatches with at least one example that is not padding.
      num_clipped: How many of them had a norm above the clip norm.
      num_nonfinite: How many of them were dropped, because their gradient was not finite.
      outputs: What the loss function returned beside the loss, for the examples in order; None if
        it returned the loss alone. Meaningless for padding.
    """

    gradients: list[tf.Tensor]
    num_units: tf.Tensor
    num_clipped: tf.Tensor
    num_nonfinite: tf.Tensor
    outputs: Any = None


def clipped_gradient_sum(
    loss_function: LossFunction,
    batch: Any,
    variables: Sequence[tf.Variable],
    l2_norm_clip: float | AdaptiveNorm | Preprocessing,
    *,
    mask: tf.Tensor | None = None,
    microbatch_size: int = 1,
    is_user: bool = False,
    chunk_size: int | None = None,
    vectorize: bool = True,
) -> ClippedSum:
    """Returns the sum of the clipped gradients of a batch.

    Call it inside of a `tf.function`; in eager mode every call traces the model anew.

    Args:
      loss_function: From a microbatch to its loss, or to `(loss, outputs)`. A loss that has one
        entry for each example or more is averaged; with a microbatch of several examples it must
        have them, so that padding can be left out.
      batch: Structure of dense tensors with a common first axis, the examples.
      variables: What to differentiate. Variables that the loss does not use get zeros.
      l2_norm_clip: Bound on the norm of one example's contribution, or what clips it.
      mask: One number for each example, zero for padding. None: no padding.
      microbatch_size: Examples in a microbatch. A last, shorter one is filled up with padding, and
        the mean is over `microbatch_size` all the same.
      is_user: Whether a microbatch is a user, who is there or not as a whole: then the bound is on
        the norm of a user's contribution.
      chunk_size: Microbatches differentiated at once. None: as many as fit a memory budget.
      vectorize: False runs one microbatch after the other.
    """
    microbatch_size = _checks.positive_int("microbatch_size", microbatch_size)
    if chunk_size is not None:
        chunk_size = _checks.positive_int("chunk_size", chunk_size)
    variables = _compat.native(variables)
    if not variables:
        raise BandMFError("variables must not be empty; build the model before its first step.")
    check_precision(variables)
    unit = UnitGradient(loss_function, variables, microbatch_size)
    units = _split_into_units(batch, mask, microbatch_size)
    clip: Callable[..., ClippedSum]
    totals: Sequence[Any] = variables
    if isinstance(l2_norm_clip, Preprocessing):
        clip = functools.partial(_preprocess_and_sum, preprocessing=l2_norm_clip)
        totals = l2_norm_clip.sample_specs
    else:
        unit_clip = _unit_clip(l2_norm_clip, 1 if is_user else microbatch_size)
        clip = functools.partial(clip_and_sum, unit_clip=unit_clip)

    def sum_units(
        differentiate: Callable[[Any], Any], at_once: int, examples: Any, mask: tf.Tensor
    ) -> dict[str, Any]:
        def sum_chunk(examples: Any, mask: tf.Tensor) -> ClippedSum:
            gradients, outputs = differentiate((examples, mask))
            is_real = tf.reduce_any(mask, axis=1)
            return clip(_parts(gradients, variables, is_real), is_real, outputs=outputs)

        specs = functools.partial(unit.output_specs, units)
        return vars(sum_in_chunks(sum_chunk, examples, mask, at_once, totals, specs))

    total = None
    # Operations on strings are vectorised by loops that fail on strings of several lengths.
    has_strings = any(t.dtype == tf.string for t in tf.nest.flatten(units.examples))
    if vectorize and not has_strings:
        at_once = chunk_size or unit.default_chunk_size(units)
        # A function of its own: what it has traced when it fails must not stay in the graph.
        attempt = tf.function(
            functools.partial(sum_units, unit.vectorized, at_once), autograph=False
        )
        try:
            with _quiet_tensorflow():
                total = attempt(*units.tensors)
        except (tf.errors.OpError, BandMFError):
            raise  # Of the model, in eager mode, and ours.
        except Exception as error:  # Converters of TensorFlow raise many types.
            _LOGGER.warning("Per-example gradients one by one, which is slow: %s", error)
    if total is None:
        total = sum_units(unit.alone, 1, *units.tensors)
    total = ClippedSum(**total)
    return dataclasses.replace(total, outputs=_per_example(total.outputs, units))


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    """Keeps TensorFlow from printing pages about what it cannot vectorise; one line says it."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def clipped_gradient_sum_of_tape(
    tape: tf.GradientTape,
    losses: tf.Tensor,
    variables: Sequence[tf.Variable],
    l2_norm_clip: float | AdaptiveNorm,
    *,
    microbatch_size: int = 1,
) -> ClippedSum:
    """Returns the sum of the clipped gradients of losses that were recorded on a tape.

    For training loops that cannot hand over a loss function. The batch went through the model as
    one, so the gradient of each loss is propagated through the whole batch: time grows with the
    *square* of the batch size, and all gradients are in memory at once. It is for the caller to
    know that the examples did not interact: a loss that depends on other examples (batch
    normalisation) is clipped, too, but one example then has a share in many losses.

    Args:
      tape: The tape, not used before unless it is persistent.
      losses: One loss for each example, `[batch, ...]`; further axes are averaged.
      variables: What to differentiate.
      l2_norm_clip: Bound on the norm of one example's contribution.
      microbatch_size: Examples in a microbatch; must divide the batch.
    """
    microbatch_size = _checks.positive_int("microbatch_size", microbatch_size)
    unit_clip = _unit_clip(l2_norm_clip, microbatch_size)
    variables = _compat.native(variables)
    check_precision(variables)
    if losses.shape.rank is None or losses.shape.rank == 0:
        raise BandMFError(
            "The loss must have one entry for each example; make the loss with reduction='none'. "
            f"Found shape {losses.shape}."
        )
    with tape:
        per_unit = _compat.per_example(losses)
        if microbatch_size > 1:
            per_unit = tf.reduce_mean(tf.reshape(per_unit, [-1, microbatch_size]), axis=1)
    jacobians = tape.jacobian(
        per_unit, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    is_real = tf.ones_like(per_unit, dtype=tf.bool)
    return clip_and_sum(_parts(jacobians, variables, is_real), is_real, unit_clip)


def _unit_clip(l2_norm_clip: float | AdaptiveNorm, microbatch_size: int) -> float | AdaptiveNorm:
    if isinstance(l2_norm_clip, AdaptiveNorm):
        if microbatch_size > 1:
            raise BandMFError("A clip norm that adapts takes one example at a time.")
        return l2_norm_clip
    l2_norm_clip = _checks.positive_float("l2_norm_clip", l2_norm_clip)
    return l2_norm_clip if microbatch_size == 1 else l2_norm_clip / 2


@dataclasses.dataclass(frozen=True)
class SparseRows:
    """Gradients of a chunk that touch a few rows of a variable: `[units, rows, ...]`."""

    values: tf.Tensor
    indices: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Units:
    """A batch as microbatches: tensors `[units, microbatch_size, ...]`, padded at the end."""

    examples: Any
    mask: tf.Tensor
    num_examples: int | tf.Tensor

    @property
    def tensors(self) -> tuple[Any, tf.Tensor]:
        """All tensors as one structure."""
        return self.examples, self.mask


class UnitGradient:
    """The gradient of one microbatch, and of a chunk of them."""

    def __init__(
        self, loss_function: LossFunction, variables: list[tf.Variable], microbatch_size: int
    ):
        self._loss_function = loss_function
        self.variables = _compat.native(variables)
        self._microbatch_size = microbatch_size
        self._kinds: list[str] = []

    def __call__(self, unit: tuple[Any, tf.Tensor]) -> tuple[list[Any], Any]:
        """Returns the gradients, IndexedSlices taken apart, and `[outputs]` or `[]`."""
        examples, mask = unit
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.variables)
            result = self._loss_function(examples)
            loss, *outputs = result if isinstance(result, tuple) else (result,)
            loss = self._mean(tf.convert_to_tensor(loss), mask)
        gradients = tape.gradient(loss, self.variables)
        self._kinds = [_kind(g) for g in gradients]
        return [_taken_apart(g) for g in gradients], outputs

    def vectorized(self, chunk: tuple[Any, tf.Tensor]) -> tuple[list[Any], Any]:
        """Returns the gradients of every microbatch of a chunk at once."""
        gradients, outputs = tf.vectorized_map(self, chunk)
        return self._put_together(gradients), outputs

    def alone(self, chunk: tuple[Any, tf.Tensor]) -> tuple[list[Any], Any]:
        """Returns the gradients of a chunk of one microbatch."""
        result = self(tf.nest.map_structure(lambda t: tf.squeeze(t, 0), chunk))
        gradients, outputs = tf.nest.map_structure(lambda t: tf.expand_dims(t, 0), result)
        return self._put_together(gradients), outputs

    def trace(self, units: _Units) -> tuple[list[Any], Any]:
        """Returns the results of one microbatch symbolically: their shapes and types."""
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), units.tensors)
        # Not in a `tf.Graph`, where `==` and `!=` compare tensors as objects, in losses too.
        function = tf.function(self, autograph=False).get_concrete_function(spec)
        return function.structured_outputs

    def output_specs(self, units: _Units) -> Any:
        """Returns shapes and types of the outputs of one microbatch."""
        return self.trace(units)[1]

    def default_chunk_size(self, units: _Units) -> int:
        """Returns how many microbatches fit the memory budget."""
        at_once = fitting_chunk_size(sum(v.shape.num_elements() for v in self.variables))
        num_units = units.mask.shape[0]
        if num_units is not None and num_units <= at_once:
            return at_once
        # Gradients of a few rows (embeddings) are smaller than their variables: look at them.
        gradients, _ = self.trace(units)
        return fitting_chunk_size(
            sum(g.shape.num_elements() or 0 for g in tf.nest.flatten(gradients))
        )

    def _put_together(self, gradients: list[Any]) -> list[Any]:
        return [
            SparseRows(*g) if kind == "rows" else (g if kind == "dense" else None)
            for g, kind in zip(gradients, self._kinds, strict=True)
        ]

    def _mean(self, loss: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        if self._microbatch_size == 1:
            return tf.reduce_mean(loss)
        if loss.shape.rank == 0 or loss.shape[0] != self._microbatch_size:
            raise BandMFError(
                f"The loss of a microbatch must have one entry for each of its "
                f"{self._microbatch_size} examples; use reduction='none'. Found shape {loss.shape}."
            )
        return tf.reduce_mean(_compat.per_example(loss) * tf.cast(mask, loss.dtype))


def _kind(gradient: Any) -> str:
    if gradient is None:
        return "none"
    return "rows" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _taken_apart(gradient: Any) -> Any:
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, tf.cast(gradient.indices, tf.int64)
    return tf.convert_to_tensor(gradient)


def fitting_chunk_size(numbers_per_unit: int) -> int:
    """Returns how many units fit the memory budget, at least one."""
    bytes_per_unit = 4 * _COPIES_OF_GRADIENTS * max(numbers_per_unit, 1)
    return max(1, DEFAULT_MEMORY_BYTES // bytes_per_unit)


def _split_into_units(batch: Any, mask: tf.Tensor | None, microbatch_size: int) -> _Units:
    tensors = [tf.convert_to_tensor(t) for t in tf.nest.flatten(batch)]
    if not tensors:
        raise BandMFError("The batch must hold at least one tensor.")
    if mask is None:
        mask = tf.ones(tf.shape(tensors[0])[:1], tf.bool)
    mask = tf.ensure_shape(tf.cast(mask, tf.bool), tensors[0].shape[:1])
    grouped = _in_groups(mask, microbatch_size, is_mask=True)
    split = [_in_groups(t, microbatch_size) for t in tensors]
    if microbatch_size > 1:
        # What is not a number in padding would be so in the mean, and padding of the pipeline holds
        # examples of others, who must not reach it: the microbatch's own first one stands in.
        first = tf.argmax(tf.cast(grouped, tf.int32), axis=1, output_type=tf.int32)
        places = tf.where(grouped, tf.range(microbatch_size), first[:, None])
        split = [tf.gather(t, places, axis=1, batch_dims=1) for t in split]
    return _Units(tf.nest.pack_sequence_as(batch, split), grouped, _length(tensors[0]))


def _length(tensor: tf.Tensor) -> int | tf.Tensor:
    """Returns the length of the first axis, as a number where it is known."""
    return tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]


def _in_groups(tensor: tf.Tensor, group: int | tf.Tensor, *, is_mask: bool = False) -> tf.Tensor:
    """Returns the tensor with its first axis cut into groups, at least one, filled with its last.

    Which a model takes. A mask, and what has no row to be repeated, is filled with zeros.
    """
    length = _length(tensor)
    num_groups = ceil_div(length, group)
    num_groups = max(num_groups, 1) if isinstance(num_groups, int) else tf.maximum(num_groups, 1)
    missing = num_groups * group - length
    rest = tf.shape(tensor)[1:]
    if not isinstance(missing, int) or missing:
        filling = tf.zeros(tf.concat([[1], rest], 0), tensor.dtype)
        if not is_mask:
            filling = tf.concat([tensor[-1:], filling], 0)[:1]
        tensor = tf.concat([tensor, tf.repeat(filling, missing, axis=0)], 0)
    result = tf.reshape(tensor, tf.concat([[num_groups, group], rest], 0))
    known = [n if isinstance(n, int) else None for n in (num_groups, group)]
    return tf.ensure_shape(result, tf.TensorShape(known).concatenate(tensor.shape[1:]))


def sum_in_chunks(
    sum_chunk: Callable[[Any, tf.Tensor], ClippedSum],
    batch: Any,
    mask: tf.Tensor,
    chunk_size: int,
    totals: Sequence[tf.Variable | tf.TensorSpec],
    output_specs: Callable[[], Any],
) -> ClippedSum:
    """Sums chunk by chunk; chunks have equal lengths, so that little padding is needed.

    Args:
      sum_chunk: From a part of batch and mask to its sum.
      batch: Structure of tensors with a common first axis.
      mask: Which entries of that axis are real, `[n]` or `[n, ...]`.
      chunk_size: Largest length of a chunk.
      totals: Variables, or whatever else has the shapes and types of the sums.
      output_specs: Returns shapes and types of the outputs without their first axis; called only if
        there is more than one chunk.
    """
    length = _length(mask)
    if isinstance(length, int) and length <= chunk_size:
        return sum_chunk(batch, mask)
    num_chunks = ceil_div(length, chunk_size)
    num_chunks = tf.maximum(num_chunks, 1) if not isinstance(length, int) else num_chunks
    group = ceil_div(length, num_chunks) if chunk_size > 1 else 1
    group = tf.maximum(group, 1) if not isinstance(group, int) else group
    chunks = tf.nest.map_structure(lambda t: _in_groups(t, group), batch)
    masks = _in_groups(mask, group, is_mask=True)
    specs = output_specs()
    arrays = [
        tf.TensorArray(o.dtype, num_chunks, element_shape=tf.TensorShape([None]) + o.shape)
        for o in tf.nest.flatten(specs)
    ]

    def body(i: tf.Tensor, sums: list[tf.Tensor], arrays: list[tf.TensorArray]) -> tuple:
        part = sum_chunk(tf.nest.map_structure(lambda t: t[i], chunks), masks[i])
        sums = [a + b for a, b in zip(sums, _flat(part), strict=True)]
        written = zip(arrays, tf.nest.flatten(part.outputs), strict=True)
        return i + 1, sums, [array.write(i, output) for array, output in written]

    zeros = [*(tf.zeros(v.shape, v.dtype) for v in totals), tf.zeros([3], tf.int32)]
    _, sums, arrays = tf.while_loop(
        lambda i, *_: i < num_chunks,
        body,
        (tf.constant(0), zeros, arrays),
        parallel_iterations=1,
    )
    outputs = tf.nest.pack_sequence_as(specs, [array.concat()[:length] for array in arrays])
    num_units, num_clipped, num_nonfinite = tf.unstack(sums[-1])
    return ClippedSum(sums[:-1], num_units, num_clipped, num_nonfinite, outputs)


def _flat(total: ClippedSum) -> list[tf.Tensor]:
    """Returns what chunks add up; the counts are one tensor, because operations take time."""
    counts = tf.stack([total.num_units, total.num_clipped, total.num_nonfinite])
    return [*total.gradients, counts]


def clip_and_sum(
    parts: Sequence[Part],
    is_real: tf.Tensor,
    unit_clip: float | AdaptiveNorm,
    outputs: Any = None,
) -> ClippedSum:
    """Clips the gradients of a chunk, one part for each variable, and sums them over its units."""
    small = [part for part in parts if _is_small(part)]
    joined: list[Part] = [part for part in parts if not _is_small(part)]
    if small:
        rows = tf.concat([part.rows for part in small], axis=1)
        joined.append(DensePart(rows, tf.TensorSpec(rows.shape[1:], rows.dtype)))

    def weighted_sums(factors: tf.Tensor, select: tf.Tensor | None) -> list[tf.Tensor]:
        chosen = joined if select is None else [part.only(select) for part in joined]
        sums = [part.weighted_sum(factors) for part in chosen]
        pieces = iter(tf.split(sums.pop(), [p.rows.shape[1] for p in small]) if small else ())
        others = iter(sums)
        return [p.shaped(next(pieces)) if _is_small(p) else next(others) for p in parts]

    squared_norms = tf.add_n([part.squared_norms() for part in joined])
    return scale_and_sum(squared_norms, weighted_sums, is_real, unit_clip, outputs)


def _is_small(part: Part) -> TypeGuard[DensePart]:
    """Whether its gradients lie side by side with others: a copy costs less than operations."""
    if not isinstance(part, DensePart) or part.rows.dtype != tf.float32:
        return False
    return part.rows.shape[1] <= _FEW_NUMBERS


def _preprocess_and_sum(
    parts: Sequence[DensePart | SparsePart | _ZeroPart],
    is_real: tf.Tensor,
    preprocessing: Preprocessing,
    outputs: Any = None,
) -> ClippedSum:
    """Sums what a query makes of the gradients of a chunk, one by one.

    Gradients that are not finite, or become so, contribute nothing. How many the query clips is
    not known.
    """
    keep = is_real & (tf.add_n([part.squared_norms() for part in parts]) < LARGEST_NORM**2)
    records = [tf.reshape(part.only(keep).dense(), [-1, *part.variable.shape]) for part in parts]
    processed = preprocessing.preprocess(records)
    for tensor in processed:
        rows = tf.reshape(tensor, [tf.shape(is_real)[0], -1])
        keep &= tf.reduce_all(tf.math.is_finite(tf.cast(rows, tf.float64)), axis=1)

    def total(tensor: tf.Tensor) -> tf.Tensor:
        kept = tf.reshape(keep, [-1] + [1] * (tensor.shape.rank - 1))
        return tf.reduce_sum(tf.where(kept, tensor, tf.zeros_like(tensor)), axis=0)

    return ClippedSum(
        gradients=[total(tensor) for tensor in processed],
        num_units=tf.math.count_nonzero(is_real, dtype=tf.int32),
        num_clipped=tf.constant(0),
        num_nonfinite=tf.math.count_nonzero(is_real & ~keep, dtype=tf.int32),
        outputs=outputs,
    )


def scale_and_sum(
    squared_norms: tf.Tensor,
    weighted_sums: Callable[[tf.Tensor, tf.Tensor | None], list[tf.Tensor]],
    is_real: tf.Tensor,
    unit_clip: float | AdaptiveNorm,
    outputs: Any,
) -> ClippedSum:
    """Scales the gradients of units to the clip norm and sums them.

    A gradient g contributes f g with f = min(1, clip / ((1 + margin) n)), where n^2 is what
    `squared_norms` says. That |f g| <= clip holds in spite of rounding if |g| <= (1 + margin / 2) n
    and what `weighted_sums` makes of g is at most (margin / 2 - 2 u) clip away from f g, where
    u = 2^-24: f is rounded once (u) and multiplied once (u). The margin of 2^-17 takes less than
    1e-5 from a gradient that is clipped, and nothing from others. It is larger where a GPU rounds
    the factors of matrix products to 11 bits (TensorFloat-32).

    Args:
      squared_norms: float64, `[units]`.
      weighted_sums: From factors, and which units not to take for zeros whatever they hold (None:
        all of them), to the sums for each variable.
      is_real: Which units are not padding.
      unit_clip: Bound on the norm of one unit's contribution.
      outputs: What to return as outputs.
    """
    threshold = unit_clip.threshold() if isinstance(unit_clip, AdaptiveNorm) else unit_clip
    is_finite = squared_norms < LARGEST_NORM**2  # NaN is not.
    keep = is_real & is_finite
    norm = tf.sqrt(tf.where(keep, squared_norms, tf.zeros_like(squared_norms)))
    factors = threshold / tf.maximum((1.0 + _norm_margin()) * norm, threshold)
    factors = tf.cast(factors, tf.float32)
    factors = tf.where(keep & (factors >= SMALLEST), factors, 0.0)
    # A factor of zero does not remove NaN or infinity; looking for them in every gradient would
    # cost a pass over all of them in every step, for something that hardly ever happens.
    sums = tf.cond(
        tf.reduce_all(is_finite),
        lambda: weighted_sums(factors, None),
        lambda: weighted_sums(factors, is_finite),
    )
    if isinstance(unit_clip, AdaptiveNorm):
        sums = unit_clip.scaled(sums, threshold)

    conditions = tf.stack([is_real, norm > threshold, is_real & ~is_finite])
    counts = tf.reduce_sum(tf.cast(conditions, tf.int32), axis=1)
    num_units, num_clipped, num_nonfinite = tf.unstack(counts)
    return ClippedSum(sums, num_units, num_clipped, num_nonfinite, outputs)


def _norm_margin() -> float:
    return _NORM_MARGIN_TF32 if factor_roundoff() else _NORM_MARGIN


def factor_roundoff() -> float:
    """Returns by how much a product is off because a GPU rounds its factors (TensorFloat-32)."""
    rounds = tf.config.experimental.tensor_float_32_execution_enabled()
    return 2.0**-10 if rounds and _compat.has_gpu() else 0.0


def sums_of_squares(rows: tf.Tensor) -> tf.Tensor:
    """Returns the squared norms of rows, `[rows, numbers]`, in float64.

    A float32 sum of n squares can be wrong by n u. Here one has at most 64 terms, and the roots of
    those are squared and summed in float64: norms are at most 34 u < 2^-18 off. Squares below the
    smallest number of full precision may be lost, so as much as that is added for each number.
    """
    size = rows.shape[1]
    lengths = range(min(size, _LONGEST_FLOAT32_SUM), 0, -1)
    length = next((n for n in lengths if size % n == 0), 1)
    if length < min(size, 16):  # Hardly any divisor: rather add zeros.
        length = _LONGEST_FLOAT32_SUM
        rows = tf.pad(rows, [(0, 0), (0, -size % length)])
    blocks = tf.reshape(rows, [-1, ceil_div(size, length), length]) if size else rows[:, None]
    if _compat.is_compiled_by_xla():  # Which knows no Euclidean norms, and copies no squares.
        norms = tf.sqrt(tf.reduce_sum(tf.square(blocks), axis=2))
    else:
        norms = tf.math.reduce_euclidean_norm(blocks, axis=2)
    squares = tf.reduce_sum(tf.square(tf.cast(norms, tf.float64)), axis=1)
    return squares + size * SMALLEST


def check_precision(variables: Sequence[tf.Variable]) -> None:
    """Refuses variables whose gradients rounding would make longer than their clip norm."""
    for variable in variables:
        dtype = tf.as_dtype(variable.dtype)  # Variables of Keras 3 have its name alone.
        if dtype not in (tf.float32, tf.float64):
            raise BandMFError(
                f"Variables must be float32 or float64, or rounding would move clipped gradients "
                f"further than the noise allows for; use the policy mixed_bfloat16, which keeps "
                f"variables in float32. Found {dtype.name} in {variable.name}."
            )


class Part(Protocol):
    """The gradients of one variable for the units of a chunk."""

    def squared_norms(self) -> tf.Tensor:
        """Returns squared norms, `[units]`, in float64, as near as `scale_and_sum` needs them."""

    def only(self, keep: tf.Tensor) -> Part:
        """Replaces all of the other units by zeros, whatever it is."""

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the gradients times factors, of the shape of the variable."""


def _parts(
    gradients: Sequence[tf.Tensor | SparseRows | None],
    variables: Sequence[tf.Variable],
    is_real: tf.Tensor,
) -> list[DensePart | SparsePart | _ZeroPart]:
    """Returns the gradients `[units, ...]` of a chunk, one part for each variable."""
    num_units = tf.shape(is_real)[0]
    return [_part(g, v, num_units) for g, v in zip(gradients, variables, strict=True)]


def _part(
    gradient: tf.Tensor | SparseRows | None, variable: tf.Variable, num_units: tf.Tensor
) -> DensePart | SparsePart | _ZeroPart:
    if gradient is None:
        return _ZeroPart(variable, num_units)
    if isinstance(gradient, SparseRows):
        return SparsePart.from_rows(gradient, variable, num_units)
    return DensePart(tf.reshape(gradient, [num_units, variable.shape.num_elements()]), variable)


@dataclasses.dataclass(frozen=True)
class _ZeroPart:
    """The gradients of a variable that the loss does not use."""

    variable: tf.Variable
    num_units: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        return tf.zeros([self.num_units], tf.float64)

    def only(self, keep: tf.Tensor) -> _ZeroPart:
        del keep
        return self

    def dense(self) -> tf.Tensor:
        """Returns the gradients, `[units, numbers of the variable]`."""
        size = self.variable.shape.num_elements()
        return tf.zeros([self.num_units, size], self.variable.dtype)

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        del factors
        return tf.zeros(self.variable.shape, self.variable.dtype)


@dataclasses.dataclass(frozen=True)
class DensePart:
    """The gradients of one variable, `[units, numbers of the variable]`."""

    rows: tf.Tensor
    variable: tf.Variable | tf.TensorSpec

    def squared_norms(self) -> tf.Tensor:
        return sums_of_squares(self.rows)

    def only(self, keep: tf.Tensor) -> DensePart:
        """Replaces the rows of all other units by zeros."""
        return DensePart(
            tf.where(keep[:, None], self.rows, tf.zeros_like(self.rows)), self.variable
        )

    def dense(self) -> tf.Tensor:
        """Returns the gradients as they are."""
        return self.rows

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        factors = tf.cast(factors, self.rows.dtype)
        return self.shaped(tf.linalg.matvec(self.rows, factors, transpose_a=True))

    def shaped(self, total: tf.Tensor) -> tf.Tensor:
        """Returns a sum of rows as it is for the variable."""
        return tf.cast(tf.reshape(total, self.variable.shape), self.variable.dtype)


@dataclasses.dataclass(frozen=True)
class SparsePart:
    """The gradients of one variable as rows that belong to a unit and an index of the variable.

    A unit that looks up the same index twice has one row with the sum, or its norm would be wrong.
    """

    rows: tf.Tensor
    units: tf.Tensor
    indices: tf.Tensor
    variable: tf.Variable
    num_units: tf.Tensor

    @classmethod
    def from_rows(
        cls, gradient: SparseRows, variable: tf.Variable, num_units: tf.Tensor
    ) -> SparsePart:
        numbers_per_row = tf.TensorShape(variable.shape[1:]).num_elements()
        values = tf.reshape(gradient.values, [-1, numbers_per_row])
        num_indices = tf.cast(variable.shape[0], tf.int64)
        units = tf.range(tf.cast(num_units, tf.int64))[:, None]
        indices = tf.reshape(gradient.indices, [num_units, -1])
        # Where devices do not check indices, one too large must not be the next unit's.
        is_valid = (indices >= 0) & (indices < num_indices)
        keys = tf.where(is_valid, units * num_indices + indices, -1)
        unique, position = tf.unique(tf.reshape(keys, [-1]))
        rows = tf.math.unsorted_segment_sum(values, position, tf.size(unique))
        return cls(rows, unique // num_indices, unique % num_indices, variable, num_units)

    def squared_norms(self) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(sums_of_squares(self.rows), self.units, self.num_units)

    def only(self, keep: tf.Tensor) -> SparsePart:
        """Replaces the rows of all other units by zeros."""
        kept = tf.gather(keep, self.units)[:, None]
        return dataclasses.replace(self, rows=tf.where(kept, self.rows, tf.zeros_like(self.rows)))

    def dense(self) -> tf.Tensor:
        """Returns the gradients, `[units, numbers of the variable]`."""
        num_indices = tf.cast(self.variable.shape[0], tf.int64)
        count = tf.cast(self.num_units, tf.int64) * num_indices
        keys = self.units * num_indices + self.indices
        rows = tf.math.unsorted_segment_sum(self.rows, keys, count)
        return tf.reshape(rows, [self.num_units, self.variable.shape.num_elements()])

    def weighted_sum(self, factors: tf.Tensor) -> tf.Tensor:
        weights = tf.cast(tf.gather(factors, self.units), self.rows.dtype)
        total = tf.math.unsorted_segment_sum(
            self.rows * weights[:, None], self.indices, self.variable.shape[0]
        )
        return tf.cast(tf.reshape(total, self.variable.shape), self.variable.dtype)


def _per_example(outputs: Any, units: _Units) -> Any:
    """Returns outputs `[units or more, microbatch_size, ...]` as `[examples, ...]`."""
    if not outputs:
        return None

    def flatten(output: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[-1], tf.shape(output)[2:]], 0)
        result = tf.reshape(output, shape)[: units.num_examples]
        known = units.num_examples if isinstance(units.num_examples, int) else None
        return tf.ensure_shape(result, tf.TensorShape([known]).concatenate(output.shape[2:]))

    return tf.nest.map_structure(flatten, outputs[0])
