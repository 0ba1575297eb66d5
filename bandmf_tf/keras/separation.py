"""Tries out on a few examples what privacy rests on: they do not meet, and leave nothing behind.

Clipping bounds what one example does to the sum of gradients. That is all it does to the weights
only if its presence changes no other example's contribution, and if a step changes no variable but
through that sum. For layers and losses of a list this is known, and the general way takes examples
one by one; but nobody can see from outside what a layer of one's own does with its variables, or
what a list has overlooked. So before the first step one example of a few is exchanged, and nothing
of the others may change; and all variables must end up as they do without the exchange. Counters
and states of random numbers, which change by themselves, pass.

The trial runs what a step would trace, but for vectorisation: the general way is tried example by
example, and that TensorFlow vectorises it without mixing them is taken from TensorFlow. All that a
graph can keep from one batch to the next is in variables that it captures, of a layer, a loss or
nobody, and these are compared and put back; or in operations with a state of their own, such as
Python functions, and these are refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.keras import _compat
from bandmf_tf.keras.clipping import LossFunction, UnitGradient

NUM_EXAMPLES = 4
_TOLERANCE = 1e-6  # Relative: kernels may sum in another order.

# Operations whose state is in variables, which are compared, or in random numbers; or that have
# none and are called stateful all the same. `LearnedUnigramCandidateSampler` is not among them.
_WRITES = re.compile(
    r"Assign(Add|Sub)?VariableOp|Resource(Scatter\w+|StridedSliceAssign|CountUpTo)"
)
_KNOWN = re.compile(
    _WRITES.pattern + r"|ReadVariableOp|VarIsInitializedOp|VariableShape|ResourceGather(Nd)?"
    r"|Rng(ReadAndSkip|Skip)|Random(Crop|Gamma|Poisson(V2)?|Shuffle|StandardNormal|Uniform(Int)?)"
    r"|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox(V2)?"
    r"|Stateful(RandomBinomial|StandardNormal(V2)?|TruncatedNormal|Uniform(FullInt|Int)?)"
    r"|StatelessRandomGet\w+|(All|FixedUnigram|LogUniform|Uniform)CandidateSampler"
    r"|StatefulPartitionedCall|While|If|Case|TensorArray\w*|Stack(Close|Pop|Push)?(V2)?|Empty"
    r"|Assert|CheckNumerics(V2)?|Print(V2)?|LookupTable(Export|Find|Size)V2|CudnnRNN\w*"
)

# What is computed from a batch, `[examples, ...]`, in order and by name.
Stages = Sequence[tuple[str, tf.Tensor]]


class SeparationError(BandMFError):
    """Examples meet in a model, or leave something behind."""


def check_separation(
    model: tf.keras.Model,
    stages: Callable[[Any], Stages],
    batch: Any,
    mask: Any,
    beside: Callable[[Any], Stages],
    trace_update: Callable[[], None],
    exact: Sequence[tf.Variable],
) -> None:
    """Raises `SeparationError` if an example changes what is computed from another, or a variable.

    Leaves all variables and the state of TensorFlow's random numbers as they were.

    Args:
      model: A model that is built.
      stages: From a few examples to all that matters of what is computed from them.
      batch: Structure of tensors with a common first axis, the examples.
      mask: Zero for padding; None: no padding.
      beside: What else a step does with an example. What it changes must be no weight and not
        matter for `stages`.
      trace_update: Puts into a graph what is done with noised gradients, for which it must not
        matter, either: rates, constraints, and the optimizer of a user.
      exact: Variables of the optimizer with exact counts or sums of examples, not to be read.
    """
    base = _few_examples(batch, mask)
    with _compat.repeatable_randomness() as restart:
        restart()
        names, function = _traced(model, stages, base)
        _refuse_hidden_state(function.graph)
        variables = _compat.captured_variables(function)

        def run(batch: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
            restart()
            with _put_back(variables):
                return [t.numpy() for t in function(batch)], [v.numpy() for v in variables]

        computed, after = run(base)
        others = [run(base), *_of_all_that_work(run, _exchanges(base))]
        if len(others) == 2 and not _differ(base, 0, -1):
            raise SeparationError(
                "The first batch has no two different examples, and the model takes no invented "
                "ones, so that it cannot be tried whether examples meet; give a batch that has."
            )
        _, after_reversed = run(tf.nest.map_structure(lambda t: t[::-1], base))
    states = [after_reversed, *(state for _, state in others)]  # Some keep the last example only.
    for index, variable in enumerate(variables):
        if not all(_equal(after[index], state[index]) for state in states):
            raise SeparationError(
                f"A step changes the variable {variable.name} by what is in the batch, without "
                "noise; leave out the layer or the part of the loss that does it. Batch "
                "normalisation is replaced by bandmf_tf.keras.replace_batch_norm(model)."
            )
    (again, _), *exchanged = others
    for name, one, other in zip(names, computed, again, strict=True):
        if one.shape != other.shape or not _close(one, other):
            raise SeparationError(
                f"The same examples, variables and seeds gave another value of {name}, so that it "
                "cannot be tried whether examples meet; draw random numbers outside of functions "
                "that were traced before, and call "
                "tf.config.experimental.enable_op_determinism() on a GPU."
            )
    for changed, _ in exchanged:
        _check_others(names, computed, changed)
    with _compat.repeatable_randomness() as restart:
        restart()
        strategy = model.distribute_strategy
        update = tf.function(lambda: strategy.run(trace_update), autograph=False)
        read = [*variables, *_compat.captured_variables(update.get_concrete_function())]
        hidden = _compat.handles(exact)
        for variable in read:
            if id(variable.handle) in hidden:
                raise SeparationError(
                    f"The model, its loss or its optimizer reads {variable.name}, an exact count "
                    "or sum of training examples, without noise; keep it out of what is trained."
                )
        _check_beside(model, beside, base, read)


def _check_beside(
    model: tf.keras.Model,
    beside: Callable[[Any], Stages],
    base: Any,
    read: Sequence[_compat.CapturedVariable],
) -> None:
    """Raises if metrics put something of an example into a weight, or what the update reads."""
    units = [tf.nest.map_structure(lambda t: t[:1], b) for b in (base, *_exchanges(base))]
    _, function = _traced(model, beside, units[0])
    changed = _compat.captured_variables(function)
    # An adapted vocabulary is a weight in Keras 2, in a table, which no step may write to.
    stored = [v for v in _compat.native(model.weights) if isinstance(v, tf.Variable)]
    weights = _compat.handles(stored)
    read = [*read, *(v for v in changed if id(v.handle) in weights)]  # Who uses a model reads them.

    def state_after(unit: Any) -> list[np.ndarray]:
        with _put_back(changed):
            function(unit)
            return [v.numpy() for v in read]

    states = _of_all_that_work(state_after, units)
    for variable, *values in zip(read, *states, strict=True):
        if not all(_equal(values[0], value) for value in values):
            raise SeparationError(
                f"The model, its loss or its optimizer has or reads the variable {variable.name}, "
                "which metrics of the training examples change, without noise; keep metrics out of "
                "what is trained or released."
            )


@contextlib.contextmanager
def _put_back(variables: Sequence[_compat.CapturedVariable]) -> Iterator[None]:
    """Gives variables the values at the end that they had at the beginning."""
    before = [v.numpy() for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            if not _equal(variable.numpy(), value):
                variable.assign(value)


def check_loss_function(
    loss_function: LossFunction, batch: Any, variables: Sequence[tf.Variable], microbatch_size: int
) -> None:
    """Refuses what can be seen of a loss function, in a graph too, before it is called.

    It must take its examples from its argument and may assign no variable. What it computes from
    a batch in eager mode beforehand, and a state of Python, cannot be seen.
    """
    spec = tf.nest.map_structure(
        lambda t: tf.TensorSpec([microbatch_size, *t.shape[1:]], t.dtype), batch
    )
    gradient = UnitGradient(loss_function, list(variables), microbatch_size)
    graph = (
        tf.function(gradient, autograph=False)
        .get_concrete_function((spec, tf.TensorSpec([microbatch_size], tf.bool)))
        .graph
    )
    _refuse_hidden_state(graph)
    writes = [name for name in _compat.stateful_operations(graph) if _WRITES.fullmatch(name)]
    if writes:
        raise SeparationError(
            f"The loss function changes a variable ({', '.join(sorted(writes))}), without noise; "
            "do it elsewhere, and replace batch normalisation by "
            "bandmf_tf.keras.replace_batch_norm(model)."
        )
    whole = {id(t) for t in tf.nest.flatten(batch)}
    if any(_descends_from(captured, whole) for captured, _ in graph.captures):
        raise SeparationError(
            "The loss function looks at the whole batch, so no clip norm bounds what an example "
            "does; use nothing but its argument, which holds one microbatch."
        )


def _descends_from(tensor: tf.Tensor, origins: set[int]) -> bool:
    """Whether a tensor is one of some or, in a graph, was computed from one."""
    seen: set[int] = set()
    ahead = [tensor]
    while ahead:
        tensor = ahead.pop()
        if id(tensor) in origins:
            return True
        if id(tensor) not in seen and tf.is_symbolic_tensor(tensor):
            ahead.extend(tensor.op.inputs)
        seen.add(id(tensor))
    return False


def _traced(
    model: tf.keras.Model, stages: Callable[[Any], Stages], batch: Any
) -> tuple[list[str], Any]:
    """Returns the names of the stages and a graph that computes them, on the first replica."""
    strategy = model.distribute_strategy
    names: list[str] = []

    def compute(batch: Any) -> list[tf.Tensor]:
        found = strategy.run(stages, (batch,))
        first = [[strategy.experimental_local_results(v)[0] for v in stage] for stage in found]
        names[:] = [name for name, _ in first]
        return [tensor for _, tensor in first]

    spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batch)
    try:
        return names, tf.function(compute, autograph=False).get_concrete_function(spec)
    except tf.errors.OperatorNotAllowedInGraphError as error:
        raise SeparationError(
            "The model or its loss decides in Python by the value of a tensor (spectral "
            "normalisation does), and steps are graphs; use tf.cond, or leave that layer out."
        ) from error


def _refuse_hidden_state(graph: tf.Graph) -> None:
    hidden = [name for name in _compat.stateful_operations(graph) if not _KNOWN.fullmatch(name)]
    if hidden:
        raise SeparationError(
            f"The model or its loss runs {', '.join(sorted(hidden))}, which can keep something of "
            "an example that nobody sees; use operations of TensorFlow without a state, and no "
            "tf.py_function or tf.numpy_function."
        )


def stages_one_by_one(
    loss_function: LossFunction, batch: Any, variables: Sequence[tf.Variable]
) -> Stages:
    """Returns the norms of gradients and the outputs of examples that are taken one by one."""
    gradient = UnitGradient(loss_function, list(variables), 1)
    norms: list[list[tf.Tensor]] = []
    outputs: list[list[tf.Tensor]] = []
    for i in range(tf.nest.flatten(batch)[0].shape[0]):
        unit = tf.nest.map_structure(lambda t: t[i : i + 1], batch)  # noqa: B023 (called at once)
        found, output = gradient((unit, tf.ones([1], tf.bool)))
        norms.append([tf.norm(tf.cast(g, tf.float64)) for g in tf.nest.flatten(found)])
        outputs.append(tf.nest.flatten(output))
    return [
        *(("an output of the model", tf.concat(parts, 0)) for parts in zip(*outputs, strict=True)),
        ("the gradients of examples taken one by one", tf.stack([tf.stack(n) for n in norms])),
    ]


def _few_examples(batch: Any, mask: Any) -> Any:
    """Returns a few examples, padding last, and then one that is not the first if there is one."""
    size = len(tf.nest.flatten(batch)[0])
    is_real = np.ones(size, bool) if mask is None else np.asarray(mask) != 0
    order = np.argsort(~is_real, kind="stable")
    other = next((i for i in order if _differ(batch, order[0], i)), order[-1])
    chosen = [*order[: NUM_EXAMPLES - 1], other]
    return tf.nest.map_structure(lambda t: tf.gather(t, chosen), batch)


def _differ(batch: Any, one: int, other: int) -> bool:
    return not all(
        _equal(t[one].numpy(), t[other].numpy())
        for t in map(tf.convert_to_tensor, tf.nest.flatten(batch))
    )


def _exchanges(batch: Any) -> Iterator[Any]:
    """Yields the batch with another first example: the last one, one of zeros, one far away.

    The last differs from both others, in numbers, even where all rows are padding.
    """

    def far(tensor: tf.Tensor) -> tf.Tensor:
        last = tensor[-1:]
        if tensor.dtype == tf.string:
            return tf.strings.join([last, "a"], " ")
        if tensor.dtype.is_floating or tensor.dtype.is_complex:
            return 1e3 * (last + 1)
        return tf.cast(last == tf.zeros_like(last), tensor.dtype)  # Few tables have no row 1.

    for first in (lambda t: t[-1:], lambda t: tf.zeros_like(t[:1]), far):
        yield tf.nest.map_structure(lambda t: tf.concat([first(t), t[1:]], 0), batch)  # noqa: B023


def _of_all_that_work(function: Callable[[Any], Any], batches: Iterable[Any]) -> list[Any]:
    """Returns results for batches; an invented example may be no index of a table, or no label."""
    results = []
    for batch in batches:
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            results.append(function(batch))
    return results


def _check_others(
    names: Sequence[str], computed: Sequence[np.ndarray], changed: Sequence[np.ndarray]
) -> None:
    for name, one, other in zip(names, computed, changed, strict=True):
        if one.shape != other.shape or not _close(one[1:], other[1:]):
            raise SeparationError(
                f"Examples meet in the model or its loss: another first example of a batch changed "
                f"{name} of the others, so no clip norm bounds what it does. Take out what looks "
                "along the axis of the examples."
            )


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind != "f":
        return _equal(one, other)
    scale = np.max(np.abs(one[np.isfinite(one)]), initial=0.0)
    return np.allclose(one, other, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def _equal(one: Any, other: Any) -> bool:
    is_float = getattr(getattr(one, "dtype", None), "kind", "") == "f"  # A string has no type.
    return np.array_equal(one, other, equal_nan=is_float)
