"""All that is used of TensorFlow's insides, here and in Keras; the rest uses public names."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.util import _pywrap_util_port

# A dataset that a function of another one, such as flat_map's, has from outside.
CAPTURED = "datasets that functions capture"
_DATASET = re.compile(r"(\w+?)Dataset(V\d+)?")


def unmirrored_variable(value: Any, name: str) -> tf.Variable:
    """Returns a variable of one device, also in the scope of a strategy, which would copy it."""
    return ResourceVariable(value, trainable=False, name=name)


@dataclasses.dataclass(frozen=True)
class CapturedVariable:
    """A variable that a traced function can read or change, whoever holds it."""

    name: str
    handle: tf.Tensor
    dtype: tf.DType

    def numpy(self) -> np.ndarray:
        """Returns its value."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype).numpy()

    def assign(self, value: np.ndarray) -> None:
        """Changes its value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.constant(value, self.dtype))


def captured_variables(function: Any) -> list[CapturedVariable]:
    """Returns all variables that a concrete function reads or changes."""
    names = {id(v.handle): v.name for v in function.graph.variables}
    return [
        CapturedVariable(
            names.get(id(handle), "without a name"),
            handle,
            tf.as_dtype(handle._handle_data.shape_and_type[0].dtype),
        )
        for handle, _ in function.graph.captures
        # Tables are resources, too, without a shape.
        if handle.dtype == tf.resource and getattr(handle._handle_data, "shape_and_type", ())
    ]


def transformations(dataset: tf.data.Dataset) -> set[str]:
    """Returns names of methods that made a dataset, such as "repeat", and those inside of it.

    That are its inputs and what its functions make; `CAPTURED` if one has a dataset from outside.
    "variant" is a dataset that nobody can look into.
    """
    found = set(map(_name_of_dataset, _with_inputs(dataset)))
    for concrete in _functions(dataset):
        matches = map(_DATASET.fullmatch, _operations(concrete.graph))
        found |= {match[1].lower() for match in matches if match}
        if any(tensor.dtype == tf.variant for tensor in concrete.captured_inputs):
            found.add(CAPTURED)
    return found


def stateful_in_functions(dataset: tf.data.Dataset) -> set[str]:
    """Returns what `stateful_operations` does of all functions that made a dataset."""
    return set().union(*(stateful_operations(concrete.graph) for concrete in _functions(dataset)))


def _name_of_dataset(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset").lower()


def _with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for one in dataset._inputs():
        yield from _with_inputs(one)


def _functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    for one in _with_inputs(dataset):
        yield from (function.function for function in one._functions())


def handles(variables: Iterable[tf.Variable]) -> set[int]:
    """Returns the identities of the handles of TensorFlow's variables, on all replicas."""
    return {id(one.handle) for v in variables for one in getattr(v, "values", [v])}


def _operations(graph: tf.Graph) -> set[str]:
    """Returns the kinds of operations in a graph and in its functions."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return {node.op for node in nodes}


def stateful_operations(graph: tf.Graph) -> set[str]:
    """Returns the kinds of operations that may keep something or act outside, nested ones too."""
    found = {name: op_def_registry.get(name) for name in _operations(graph)}  # None: a function.
    return {
        name
        for name, known in found.items()
        if known is not None and (known.is_stateful or name == "PyFuncStateless")
    }


@contextlib.contextmanager
def repeatable_randomness() -> Iterator[Callable[[], None]]:
    """Yields a function that begins the same random numbers anew; restores the seeds at the end."""
    eager = context.context()
    seed, state = eager._seed, getattr(eager, "_rng", None)  # None before the first seed.
    try:
        yield lambda: tf.random.set_seed(0)
    finally:
        eager._seed, eager._rng = seed, state


def has_onednn() -> bool:
    """Whether oneDNN computes on the CPU, and not Eigen."""
    return _pywrap_util_port.IsMklEnabled()


def is_compiled_by_xla() -> bool:
    """Whether what is traced now is for XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def converting_control_flow() -> Any:
    """Returns a context in which functions that are called may use `if` and `while` on tensors."""
    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)


class Holder(tf.__internal__.tracking.AutoTrackable):
    """Holds variables that checkpoints of a model find and its `weights` do not."""


def track(owner: Any, trackable: Any, name: str) -> None:
    """Lets checkpoints of `owner` hold `trackable`, without counting its variables as weights."""
    owner._track_trackable(trackable, name, overwrite=True)
