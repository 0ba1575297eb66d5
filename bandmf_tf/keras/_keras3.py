"""Everything that only Keras 3 has, on TensorFlow; `_keras2.py` describes the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.models.functional import Functional
from keras.src.ops.numpy import GetItem, Multiply, NotEqual
from keras.src.trainers.compile_utils import CompileLoss

from bandmf_tf.errors import BandMFError
from bandmf_tf.keras._common import (
    GradientsAndVariables,
    KnownLoss,
    UnscaledLoss,
    called_in_place_of,
    decay_weights,
    overridden_methods,
)

if tf.keras.backend.backend() != "tensorflow":
    raise BandMFError(
        "Private training needs Keras on TensorFlow: set KERAS_BACKEND=tensorflow before Keras is "
        f"imported. Found {tf.keras.backend.backend()}."
    )

BatchNormalization = tf.keras.layers.BatchNormalization


class UnitLoss:
    def __init__(self, model: tf.keras.Model, *, per_example: bool, known: bool = False):
        compiled: Any = model._compile_loss
        self._container: Any = None  # Not an error yet: a layer that adds losses is one before.
        if compiled is not None:
            self._container = _Losses(
                compiled._user_loss, compiled._user_loss_weights, output_names=compiled.output_names
            )
            self._container.per_example = per_example
            self._container.known = known

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        try:
            loss = self._container and self._container(y, y_pred, sample_weight)
        except KeyError as error:
            (name,) = error.args
            if not isinstance(sample_weight, dict) or name in sample_weight:
                raise
            raise BandMFError(
                f"sample_weight has nothing for the output {name!r}, and Keras 3 takes an array "
                'for each; give np.ones(len(x), "float32") where all count alike.'
            ) from error
        if loss is None:
            raise BandMFError("The model has no loss; compile it with one.")
        return loss


class _Losses(CompileLoss):
    """A container that leaves metrics and replicas alone."""

    per_example = False
    known = False

    def build(self, y_true: Any, y_pred: Any) -> None:
        self._found: list[Any] = []
        super().build(y_true, y_pred)
        self._flat_losses: Any = self._found

    def _build_nested(self, *args: Any) -> None:
        super()._build_nested(*args)
        wrap: Any = KnownLoss if self.known else UnscaledLoss
        for each in self._flat_losses:
            self._found.append(each._replace(loss=wrap(each.loss, self.per_example)))
        self._flat_losses.clear()  # Keras would make metrics for several.

    @property
    def metrics(self) -> list[None]:
        return [None] * len(self._flat_losses or ())  # Keras pairs them with the losses.


def _graph(model: tf.keras.Model) -> Functional | None:
    """Returns the graph of layers that a model calls, or None if it has no such graph."""
    if isinstance(model, tf.keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def is_graph_network(model: tf.keras.Model) -> bool:
    return _graph(model) is not None


def is_plain_model(model: tf.keras.Model) -> bool:
    kind, graph = type(model), _graph(model)
    return (
        graph is not None
        and (graph is model or type(graph) is Functional)
        and kind.call in (tf.keras.Sequential.call, Functional.call)
        and kind.__call__ is tf.keras.layers.Layer.__call__
        and not overridden_methods(model)
        and not overridden_methods(graph)
        # Operations on symbolic tensors are no layers: nobody would look at them.
        and all(
            isinstance(operation, tf.keras.layers.Layer) or _is_of_one_example(operation)
            for operation in graph.operations
        )
    )


def _is_of_one_example(operation: Any) -> bool:
    """Whether an operation compares or scales all of a tensor, or takes a part of each example."""
    arguments: Any = operation._inbound_nodes[0].arguments
    others = [*arguments.args[1:], *arguments.kwargs.values()]
    if type(operation) is GetItem:
        (key,) = others
        keys = key if isinstance(key, tuple) else (key,)
        bounds = [b for k in keys for b in ((k.start, k.stop, k.step) if type(k) is slice else [k])]
        is_known = all(b is None or isinstance(b, int) for b in bounds) and None not in keys
        return is_known and keys[0] == slice(None)
    return type(operation) in (NotEqual, Multiply) and all(map(_is_number, tf.nest.flatten(others)))


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return True
    return tf.is_tensor(value) and value.shape.rank == 0 and not isinstance(value, tf.Variable)


def is_functional(model: tf.keras.Model) -> bool:
    return type(model) is Functional


def calls_graph(model: tf.keras.Model) -> bool:
    return isinstance(model, Functional) and type(model).call is Functional.call


def inputs(model: tf.keras.Model) -> Any:
    graph: Any = _graph(model)
    return graph._inputs_struct


def outputs(model: tf.keras.Model) -> Any:
    graph: Any = _graph(model)
    return graph._outputs_struct


def output_shapes(layer: tf.keras.layers.Layer) -> list[tf.TensorShape]:
    return [
        tf.TensorShape(output.shape)
        for node in layer._inbound_nodes
        for output in tf.nest.flatten(node.output_tensors)
    ]


def outputs_with(model: tf.keras.Model, replace: Callable[[Any], Any]) -> Any:
    def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        is_layer = isinstance(operation, tf.keras.layers.Layer)
        new = replace(operation) if is_layer else operation
        return called_in_place_of(operation, new, args, kwargs)

    return model._run_through_graph(model._inputs, call_fn=call)


def adds_losses(model: tf.keras.Model) -> bool:
    return bool(model._losses)


def input_layers(model: tf.keras.Sequential) -> list[Any]:
    return [] if model._functional is None else list(model.inputs)


def as_compiled(model: tf.keras.Model) -> Any:
    del model
    return contextlib.nullcontext()  # The optimizer refuses variables that it was not built for.


def with_control_flow() -> Any:
    return contextlib.nullcontext()  # Keras 3 converts no calls of layers.


def weight_penalties(model: tf.keras.Model) -> list[tf.Tensor]:
    return [
        variable.regularizer(variable)
        for variable in model.trainable_variables
        if variable.regularizer is not None
    ]


def adds_losses_of_users(model: tf.keras.Model) -> bool:
    del model
    return False  # Its `add_loss` takes no functions.


def has_data_dependent_losses(model: tf.keras.Model) -> bool:
    return any(layer._get_own_losses() for layer in model._flatten_layers())


def update_loss_metrics(model: tf.keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    loss = tf.reduce_mean(model._compile_loss(y, y_pred, sample_weight))  # It may be unreduced.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    loss = tf.add_n([loss * replicas, *weight_penalties(model)])
    model._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(y_pred)[0])[0])


def build_metrics(model: tf.keras.Model, batch: Any) -> None:
    model._maybe_symbolic_build(data_batch=batch)


def native(variables: Iterable[Any]) -> list[tf.Variable]:
    return [v.value if isinstance(v, tf.keras.Variable) else v for v in variables]


def apply_to_sums(
    optimizer: tf.keras.optimizers.Optimizer,
    apply_gradients: Callable[..., Any],
    gradients_and_variables: GradientsAndVariables,
) -> tf.Variable:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return apply_gradients(gradients_and_variables)
    gradients, variables = zip(*gradients_and_variables, strict=True)

    def update(strategy: tf.distribute.Strategy, gradients: Any) -> None:
        local = [strategy.experimental_local_results(g)[0] for g in gradients]
        apply_in_cross_replica_context(
            optimizer, strategy, list(zip(local, variables, strict=True))
        )

    context.merge_call(update, args=(list(gradients),))
    return optimizer.iterations


def apply_in_cross_replica_context(
    optimizer: tf.keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    gradients_and_variables: GradientsAndVariables,
) -> None:
    if optimizer.use_ema:  # Keras would put averages that nobody made in the place of weights.
        raise BandMFError(
            "Averages of weights go with single steps on one replica; leave out use_ema=True, or "
            "accumulation_steps and the strategy."
        )
    gradients, variables = zip(*gradients_and_variables, strict=True)
    gradients = optimizer._clip_gradients(gradients)
    if optimizer.weight_decay is not None:
        decay_weights(optimizer, strategy, native(variables))
    optimizer._distributed_tf_update_step(
        strategy, list(zip(gradients, native(variables), strict=True)), optimizer.learning_rate
    )
    for variable in variables:
        if variable.constraint is not None:
            strategy.extended.update(
                variable.value,
                lambda v, constraint=variable.constraint: v.assign(constraint(v)),
                group=False,
            )
    optimizer.iterations.assign_add(1)


def check_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Refuses options of Keras 3 that would change when noise is added."""
    if optimizer.gradient_accumulation_steps:
        raise BandMFError(
            "Gradients are accumulated before noise is added: use accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} in place of gradient_accumulation_steps."
        )
    if optimizer.loss_scale_factor:
        raise BandMFError("Leave out loss_scale_factor: no loss is scaled before it is clipped.")


def check_format(filepath: Any) -> None:
    if not str(filepath).endswith((".keras", ".weights.h5")):
        raise BandMFError(
            "Keras 3 brings a private optimizer back from .keras and .weights.h5 files alone. "
            f"Found {str(filepath)!r}."
        )


def refuse_old_hdf5() -> None:
    if get_global_attribute("use_legacy_config"):
        raise BandMFError(
            "Old HDF5 files bring no private optimizer back; save it with model.save('a.keras'), "
            "for yourself alone, or save to_public(model)."
        )


def infers_shapes() -> bool:
    """Whether layers are called for their shapes alone: never by a model that is built."""
    return False


def steps_per_execution(model: tf.keras.Model) -> int:
    return int(model.steps_per_execution)
