"""Everything here that only Keras 2 (2.14) has: the one module to port to another Keras.

The rest of the Keras code uses public names of `tf.keras`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.engine import base_layer, compile_utils, functional, training_utils
from keras.src.layers.normalization import batch_normalization
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry

from bandmf_tf.errors import BandMFError

# Every kind of batch normalisation of Keras is derived from it.
BatchNormalization = batch_normalization.BatchNormalizationBase

GradientsAndVariables = list[tuple[tf.Tensor, tf.Variable]]


class Unsupported(Exception):
    """The model has something that no formula is known for; the message says what."""


class UnitLoss:
    """The loss a model was compiled with, for one microbatch at a time.

    Other than `model.compiled_loss` it updates no metrics, which could not be done for microbatches
    in parallel, and does not divide by the number of replicas, which would change the norms that
    are clipped.

    Args:
      model: A compiled model.
      per_example: Whether to return one loss for each example, `[examples]`, and not what the
        reduction of the compiled loss makes of them.
      known: Whether to raise `Unsupported` unless it is known that examples do not meet in it.
    """

    def __init__(self, model: tf.keras.Model, *, per_example: bool, known: bool = False):
        compiled = model.compiled_loss
        if compiled is None:
            raise BandMFError("The model has no loss; compile it with one.")
        self._container = _Losses(
            compiled._user_losses,
            loss_weights=compiled._user_loss_weights,
            output_names=getattr(model, "output_names", None),
            total_loss_mean=_NoMetric(),
        )
        self._container.per_example = per_example
        self._container.known = known

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._container(y, y_pred, sample_weight=sample_weight)
        if loss is None:
            raise BandMFError("The model has no loss; compile it with one.")
        return loss


class _NoMetric:
    def update_state(self, *_: Any, **__: Any) -> None:
        pass


class _Losses(compile_utils.LossesContainer):
    """A container that leaves metrics and replicas alone."""

    per_example = False
    known = False

    def _get_loss_object(self, loss: Any) -> Any:
        loss = super()._get_loss_object(loss)
        if loss is None:
            return None
        return _KnownLoss(loss) if self.known else _Unscaled(loss, self.per_example)

    def _create_metrics(self) -> None:
        self._per_output_metrics = [None] * len(self._output_names)


class _Unscaled:
    """A loss object that tells its container to reduce and scale nothing."""

    reduction = tf.keras.losses.Reduction.NONE

    def __init__(self, loss: tf.keras.losses.Loss, per_example: bool):
        self._sums = loss.reduction == tf.keras.losses.Reduction.SUM
        self._per_example = per_example
        self._loss = loss
        if per_example:
            self._loss = copy.copy(loss)
            self._loss.reduction = tf.keras.losses.Reduction.NONE

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._loss(y, y_pred, sample_weight=sample_weight)
        if not self._per_example:
            return tf.reduce_mean(loss)
        reduce = tf.reduce_sum if self._sums else tf.reduce_mean
        return reduce(tf.reshape(loss, [tf.shape(loss)[0], -1]), axis=1)


_KNOWN_LOSSES = frozenset(
    kind
    for kind in vars(tf.keras.losses).values()
    if inspect.isclass(kind)
    and issubclass(kind, tf.keras.losses.Loss)
    and kind is not tf.keras.losses.Loss
) | {tf.keras.losses.MeanSquaredError.__mro__[1]}  # What wraps functions.
_KNOWN_LOSS_FUNCTIONS = frozenset(
    function for function in vars(tf.keras.losses).values() if inspect.isfunction(function)
)
_LOSS_METHODS = {kind: (kind.call, kind.__call__) for kind in _KNOWN_LOSSES}


class _KnownLoss(_Unscaled):
    """One of Keras's own losses, exactly as Keras made it, along the last axis of an output."""

    def __init__(self, loss: tf.keras.losses.Loss):
        kind = type(loss)
        name = getattr(loss, "name", None) or kind.__name__
        if (
            kind not in _KNOWN_LOSSES
            or _LOSS_METHODS[kind] != (kind.call, kind.__call__)
            or overridden_methods(loss)
            or loss.fn not in _KNOWN_LOSS_FUNCTIONS
            or loss._fn_kwargs.get("axis", -1) != -1
        ):
            raise Unsupported(f"the loss {name}, which is not one of Keras's own as it stands")
        super().__init__(loss, per_example=True)

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        ranks = y.shape.rank, y_pred.shape.rank
        is_sparse = self._loss.fn is tf.keras.losses.sparse_categorical_crossentropy
        if None in ranks or ranks[1] < 2 or ranks[0] - ranks[1] not in ((0, -1)[: 1 + is_sparse]):
            # Shapes that differ are broadcast, labels of one example to the outputs of another.
            raise Unsupported(f"labels of shape {y.shape} for outputs of shape {y_pred.shape}")
        loss = super().__call__(y, y_pred)
        if sample_weight is None:
            return loss
        return loss * tf.cast(tf.reshape(sample_weight, tf.shape(loss)), loss.dtype)


def overridden_methods(instance: Any) -> list[str]:
    """Returns methods of an object that were replaced on the object itself."""
    kind = type(instance)
    return [name for name in vars(instance) if inspect.isfunction(getattr(kind, name, None))]


def is_plain_model(model: tf.keras.Model) -> bool:
    """Whether a model does nothing but call its layers one after the other, as Keras does."""
    kind = type(model)
    plain = {tf.keras.Sequential.call, functional.Functional.call}
    return (
        (isinstance(model, tf.keras.Sequential) or getattr(model, "_is_graph_network", False))
        and kind.call in plain
        and kind.__call__ is functional.Functional.__call__
        and not overridden_methods(model)
    )


def is_functional(model: tf.keras.Model) -> bool:
    """Whether a model is exactly what `tf.keras.Model(inputs, outputs)` makes."""
    return type(model) is functional.Functional


def methods_of_users(kind: type, names: Iterable[str], ours: type) -> list[str]:
    """Returns which methods a class has from elsewhere than Keras, TensorFlow and `ours`."""
    return [
        name
        for name in names
        for base in kind.__mro__
        if name in vars(base)
        and base is not ours
        and not base.__module__.startswith(("keras.", "tensorflow."))
    ]


def adds_losses(model: tf.keras.Model) -> bool:
    """Whether `add_loss` was called on the model itself, not on one of its layers."""
    return bool(model._callable_losses or model._losses) or any(
        isinstance(layer, base_layer.AddLoss) for layer in all_layers(model)
    )


def input_layers(model: tf.keras.Sequential) -> list[Any]:
    """Returns the input of a sequential model as a layer, if it is known."""
    if not getattr(model, "_is_graph_network", False):
        return []
    (given,) = model.inputs
    return [tf.keras.Input(batch_shape=given.shape, dtype=given.dtype)]


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


def stateful_operations(graph: tf.Graph) -> set[str]:
    """Returns the kinds of operations that may keep something or act outside, nested ones too."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    found = {node.op: op_def_registry.get(node.op) for node in nodes}  # None: a nested function.
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


def as_compiled(model: tf.keras.Model) -> Any:
    """Returns a context in which what is trained is what was when the model was compiled."""
    return training_utils.RespectCompiledTrainableState(model)


def with_control_flow() -> Any:
    """Returns a context in which calls of layers may use `if` and `while` on tensors."""
    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)


def all_layers(model: tf.keras.Model) -> Iterable[tf.keras.layers.Layer]:
    """Yields every layer of a model, nested ones included."""
    return model._flatten_layers(include_self=False)


def sublayers(layer: tf.keras.layers.Layer) -> Iterable[tf.keras.layers.Layer]:
    """Yields the layers that a layer holds itself."""
    return layer._flatten_layers(recursive=False, include_self=False)


def weight_penalties(model: tf.keras.Model) -> list[tf.Tensor]:
    """Returns the losses of weight regularizers, which depend on no example."""
    penalties = [
        regularizer()
        for layer in model._flatten_layers()
        for regularizer in getattr(layer, "_callable_losses", [])
    ]
    return [penalty for penalty in penalties if penalty is not None]


def has_data_dependent_losses(model: tf.keras.Model) -> bool:
    """Whether the last call of the model added losses other than weight penalties."""
    return any(
        layer._losses or layer._eager_losses
        for layer in model._flatten_layers()
        if isinstance(layer, tf.keras.layers.Layer)
    )


def update_loss_metrics(model: tf.keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the loss that `fit` displays."""
    model.compiled_loss(
        y, y_pred, sample_weight, regularization_losses=weight_penalties(model) or None
    )


def apply_in_cross_replica_context(
    optimizer: tf.keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: GradientsAndVariables,
) -> None:
    """Does what `apply_gradients` does, in cross-replica context, where a `tf.cond` may hold it."""
    optimizer._compute_current_learning_rate()
    gradients, variables = zip(*gradients_and_variables, strict=True)
    gradients = optimizer._clip_gradients(gradients)
    if optimizer.weight_decay is not None:
        _decay_weights(optimizer, strategy, variables)
    optimizer._distributed_apply_gradients_fn(
        strategy, list(zip(gradients, variables, strict=True))
    )
    for variable in variables:
        if variable.constraint is not None:
            strategy.extended.update(variable, lambda v: v.assign(v.constraint(v)), group=False)


def _decay_weights(
    optimizer: tf.keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    variables: Iterable[tf.Variable],
) -> None:
    def decay(variable: tf.Variable) -> None:
        rate = tf.cast(optimizer.learning_rate, variable.dtype)
        variable.assign_sub(variable * tf.cast(optimizer.weight_decay, variable.dtype) * rate)

    for variable in variables:
        if optimizer._use_weight_decay(variable):
            strategy.extended.update(variable, decay, group=False)


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns how many steps the next call of the compiled train function takes."""
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())


class Holder(tf.__internal__.tracking.AutoTrackable):
    """Holds variables that checkpoints of a model find and its `weights` do not."""


def track(owner: Any, trackable: Any, name: str) -> None:
    """Lets checkpoints of `owner` hold `trackable`, without counting its variables as weights."""
    owner._track_trackable(trackable, name, overwrite=True)
