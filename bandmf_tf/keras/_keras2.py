"""Everything that only Keras 2 has: 2.14, and `tf-keras` in later versions of TensorFlow."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from bandmf_tf.errors import BandMFError
from bandmf_tf.keras._common import (
    GradientsAndVariables,
    KnownLoss,
    UnscaledLoss,
    all_layers,
    called_in_place_of,
    decay_weights,
    overridden_methods,
)
from bandmf_tf.noise._tensorflow import converting_control_flow

# The package is called keras or tf_keras.
_SOURCE = tf.keras.Model.__module__.split(".engine.")[0]
_engine: dict[str, Any] = {
    name: importlib.import_module(f"{_SOURCE}.engine.{name}")
    for name in ("base_layer", "compile_utils", "functional", "training_utils")
}
_Functional: Any = _engine["functional"].Functional
_LossesContainer: Any = _engine["compile_utils"].LossesContainer

# Every kind of batch normalisation of Keras is derived from it.
BatchNormalization = importlib.import_module(
    f"{_SOURCE}.layers.normalization.batch_normalization"
).BatchNormalizationBase


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


class _Losses(_LossesContainer):
    """A container that leaves metrics and replicas alone."""

    per_example = False
    known = False

    def _get_loss_object(self, loss: Any) -> Any:
        loss = super()._get_loss_object(loss)
        if loss is None:
            return None
        return (KnownLoss if self.known else UnscaledLoss)(loss, self.per_example)

    def _create_metrics(self) -> None:
        self._per_output_metrics = [None] * len(self._output_names)


def is_plain_model(model: tf.keras.Model) -> bool:
    """Whether a model does nothing but call its layers one after the other, as Keras does."""
    kind = type(model)
    plain = {tf.keras.Sequential.call, _Functional.call}
    return (
        (isinstance(model, tf.keras.Sequential) or is_graph_network(model))
        and kind.call in plain
        and kind.__call__ is _Functional.__call__
        and not overridden_methods(model)
    )


def is_graph_network(model: tf.keras.Model) -> bool:
    """Whether it is known which layers a model calls, and in which order."""
    return getattr(model, "_is_graph_network", False)


def is_functional(model: tf.keras.Model) -> bool:
    """Whether a model is exactly what `tf.keras.Model(inputs, outputs)` makes."""
    return type(model) is _Functional


def calls_graph(model: tf.keras.Model) -> bool:
    """Whether a model calls what `tf.keras.Model(inputs, outputs)` does, whatever it adds."""
    return isinstance(model, _Functional) and type(model).call is _Functional.call


def inputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic inputs of a functional model, in its structure."""
    return model.input


def outputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic outputs of a plain model."""
    return model.output


def output_shapes(layer: tf.keras.layers.Layer) -> list[tf.TensorShape]:
    """Returns the shapes of all outputs that a layer has in models."""
    return [
        output.shape for node in layer.inbound_nodes for output in tf.nest.flatten(node.outputs)
    ]


def outputs_with(model: tf.keras.Model, replace: Callable[[Any], Any]) -> Any:
    """Returns the outputs of a functional model whose layers are replaced by others."""
    uses = model._tensor_usage_count  # A node takes every tensor from its list.
    found = {str(id(tensor)): [tensor] * uses[str(id(tensor))] for tensor in model.inputs}
    for _, nodes in sorted(model._nodes_by_depth.items(), reverse=True):
        for node in (node for node in nodes if not node.is_input):
            args, kwargs = node.map_arguments(found)
            results = called_in_place_of(node.layer, replace(node.layer), args, kwargs)
            for key, tensor in zip(node.flat_output_ids, tf.nest.flatten(results), strict=True):
                found[key] = [tensor] * uses[key]
    return tf.nest.map_structure(lambda tensor: found[str(id(tensor))].pop(), model.output)


def adds_losses(model: tf.keras.Model) -> bool:
    """Whether `add_loss` was called on the model itself, not on one of its layers."""
    return bool(model._callable_losses or model._losses) or any(
        isinstance(layer, _engine["base_layer"].AddLoss) for layer in all_layers(model)
    )


def input_layers(model: tf.keras.Sequential) -> list[Any]:
    """Returns the input of a sequential model as a layer, if it is known."""
    if not is_graph_network(model):
        return []
    (given,) = model.inputs
    return [tf.keras.Input(batch_shape=given.shape, dtype=given.dtype)]


def as_compiled(model: tf.keras.Model) -> Any:
    """Returns a context in which what is trained is what was when the model was compiled."""
    return _engine["training_utils"].RespectCompiledTrainableState(model)


def with_control_flow() -> Any:
    """Returns a context in which calls of layers may use `if` and `while` on tensors."""
    return converting_control_flow()


def weight_penalties(model: tf.keras.Model) -> list[tf.Tensor]:
    """Returns the losses of weight regularizers, which depend on no example."""
    penalties = [
        regularizer()
        for layer in model._flatten_layers()
        for regularizer in getattr(layer, "_callable_losses", [])
    ]
    return [penalty for penalty in penalties if penalty is not None]


def adds_losses_of_users(model: tf.keras.Model) -> bool:
    """Whether a function was given to `add_loss` that does not come from a regularizer."""
    constants = tf.keras.layers.Layer._handle_weight_regularization.__code__.co_consts
    known = [constant for constant in constants if inspect.iscode(constant)]
    return any(
        getattr(getattr(loss.args[0], "func", None), "__code__", None) not in known
        for layer in model._flatten_layers()
        for loss in getattr(layer, "_callable_losses", [])
    )


def has_data_dependent_losses(model: tf.keras.Model) -> bool:
    """Whether the last call of the model added losses other than weight penalties."""
    return any(
        layer._losses or layer._eager_losses
        for layer in model._flatten_layers()
        if isinstance(layer, tf.keras.layers.Layer)
    )


def update_loss_metrics(model: tf.keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the loss that `fit` displays; Keras cannot add penalties to losses of examples."""
    losses = tf.nest.flatten(model.compiled_loss._user_losses)
    is_reduced = all(getattr(loss, "reduction", None) != "none" for loss in losses)
    penalties = weight_penalties(model) if is_reduced else None
    model.compiled_loss(y, y_pred, sample_weight, regularization_losses=penalties or None)


def build_metrics(model: tf.keras.Model, batch: Any) -> None:
    """Makes the variables of metrics that a graph of several replicas could not make."""
    del model, batch  # In Keras 2 it can.


def native(variables: Iterable[Any]) -> list[tf.Variable]:
    """Returns variables as those of TensorFlow."""
    return list(variables)


def apply_to_sums(
    optimizer: tf.keras.optimizers.Optimizer,
    apply_gradients: Callable[..., Any],
    gradients_and_variables: GradientsAndVariables,
) -> tf.Variable:
    """Applies gradients that are the same on all replicas, and summed over them already."""
    del optimizer
    return apply_gradients(gradients_and_variables, skip_gradients_aggregation=True)


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
        decay_weights(optimizer, strategy, variables)
    optimizer._distributed_apply_gradients_fn(
        strategy, list(zip(gradients, variables, strict=True))
    )
    for variable in variables:
        if variable.constraint is not None:
            strategy.extended.update(variable, lambda v: v.assign(v.constraint(v)), group=False)


def check_optimizer(optimizer: tf.keras.optimizers.Optimizer) -> None:
    """Refuses options that would change when noise is added; Keras 2 has none."""
    del optimizer


def check_format(filepath: Any) -> None:
    """Refuses files that do not bring a private optimizer back; Keras 2 writes none."""
    del filepath


def refuse_old_hdf5() -> None:
    """Refuses to describe an optimizer for a file that cannot hold it; Keras 2 writes none."""


def infers_shapes() -> bool:
    """Whether layers are called for their shapes alone, as sequential models do for new inputs."""
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "").endswith("_scratch_graph")


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns how many steps the next call of the compiled train function takes."""
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())
