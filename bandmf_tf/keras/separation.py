"""Tries out on a few examples what privacy rests on: they do not meet, and leave nothing behind.

Clipping bounds what one example does to the sum of gradients. That is all it does to the weights
only if its presence changes no other example's contribution, and if a step changes no variable but
through that sum. For layers and losses of a list this is known, and the general way takes examples
one by one; but nobody can see from outside what a layer of one's own does with its variables, or
what a list has overlooked. So before the first step one example of a few is exchanged, and nothing
of the others may change; and all variables must end up as they do without the exchange. Counters
and states of random numbers, which change by themselves, pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.keras import _compat
from bandmf_tf.keras.clipping import LossFunction, UnitGradient

NUM_EXAMPLES = 4
_TOLERANCE = 1e-6  # Relative: kernels may sum in another order.

# What is computed from a batch, `[examples, ...]`, in order and by name.
Stages = Sequence[tuple[str, tf.Tensor]]


class SeparationError(BandMFError):
    """Examples meet in a model, or leave something behind."""


def check_separation(
    model: tf.keras.Model, stages: Callable[[Any], Stages], batch: Any, mask: Any = None
) -> None:
    """Raises `SeparationError` if an example changes what is computed from another, or a variable.

    Leaves all variables and the state of TensorFlow's random numbers as they were.

    Args:
      model: A model that is built.
      stages: From a few examples to all that matters of what is computed from them.
      batch: Structure of tensors with a common first axis, the examples.
      mask: Zero for padding; None: no padding.
    """
    base = _few_examples(batch, mask)
    variables = _compat.variables_behind(model)
    before = [v.numpy() for v in variables]
    strategy = model.distribute_strategy

    def run(batch: Any) -> tuple[list[tuple[str, np.ndarray]], list[np.ndarray]]:
        for variable, value in zip(variables, before, strict=True):
            if not _equal(variable.numpy(), value):
                variable.assign(value)
        restart()
        found = strategy.run(stages, (batch,))
        computed = [(n, strategy.experimental_local_results(t)[0].numpy()) for n, t in found]
        return computed, [v.numpy() for v in variables]

    with _compat.repeatable_randomness() as restart:
        try:
            run(base)  # What nobody tracks then is as the others find it.
            computed, after = run(base)
            again, after_again = run(base)
            is_repeatable = all(map(_same, computed, again))
            states = [after_again]
            for other in _exchanges(base):
                changed, state = run(other)
                states.append(state)
                if is_repeatable:
                    _check_others(computed, changed)
        finally:
            for variable, value in zip(variables, before, strict=True):
                if not _equal(variable.numpy(), value):
                    variable.assign(value)
    for index, variable in enumerate(variables):
        if not all(_equal(after[index], state[index]) for state in states):
            raise SeparationError(
                f"A step changes the variable {variable.name} by what is in the batch, without "
                "noise; leave out the layer that does it. Batch normalisation is replaced by "
                "bandmf_tf.keras.replace_batch_norm(model)."
            )


def stages_one_by_one(
    loss_function: LossFunction, batch: Any, variables: Sequence[tf.Variable]
) -> Stages:
    """Returns the norms of gradients and the outputs of examples that are taken one by one."""
    gradient = UnitGradient(loss_function, list(variables), 1)
    norms: list[list[tf.Tensor]] = []
    outputs: list[list[tf.Tensor]] = []
    for i in range(len(tf.nest.flatten(batch)[0])):
        unit = tf.nest.map_structure(lambda t: t[i : i + 1], batch)  # noqa: B023 (called at once)
        found, output = gradient((unit, tf.ones([1], tf.bool)))
        norms.append([tf.norm(tf.cast(g, tf.float64)) for g in tf.nest.flatten(found)])
        outputs.append(tf.nest.flatten(output))
    return [
        *(("an output of the model", tf.concat(parts, 0)) for parts in zip(*outputs, strict=True)),
        ("the gradients of examples taken one by one", tf.stack([tf.stack(n) for n in norms])),
    ]


def _few_examples(batch: Any, mask: Any) -> Any:
    """Returns a few examples, padding last; one alone is doubled."""
    size = len(tf.nest.flatten(batch)[0])
    is_real = np.ones(size, bool) if mask is None else np.asarray(mask) != 0
    chosen = np.argsort(~is_real, kind="stable")[:NUM_EXAMPLES]
    chosen = np.resize(chosen, max(2, len(chosen)))
    return tf.nest.map_structure(lambda t: tf.gather(t, chosen), batch)


def _exchanges(batch: Any) -> Iterator[Any]:
    """Yields the batch with another first example: the last one, one of zeros, one far away."""

    def far(tensor: tf.Tensor) -> tf.Tensor:
        return 1e3 * (tensor[-1:] + 1) if tensor.dtype.is_floating else tensor[-1:]

    for first in (lambda t: t[-1:], lambda t: tf.zeros_like(t[:1]), far):
        yield tf.nest.map_structure(lambda t: tf.concat([first(t), t[1:]], 0), batch)  # noqa: B023


def _check_others(
    computed: Sequence[tuple[str, np.ndarray]], changed: Sequence[tuple[str, np.ndarray]]
) -> None:
    for (name, one), (_, other) in zip(computed, changed, strict=True):
        if one.shape != other.shape or not _close(one[1:], other[1:]):
            raise SeparationError(
                f"Examples meet in the model or its loss: another first example of a batch changed "
                f"{name} of the others, so no clip norm bounds what it does. Take out what looks "
                "along the axis of the examples."
            )


def _same(one: tuple[str, np.ndarray], other: tuple[str, np.ndarray]) -> bool:
    return one[1].shape == other[1].shape and _close(one[1], other[1])


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind != "f":
        return _equal(one, other)
    scale = np.max(np.abs(one[np.isfinite(one)]), initial=0.0)
    return np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
