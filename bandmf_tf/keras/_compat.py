"""Everything here that only Keras 2 (2.14) has: the one module to port to another Keras.

The rest of the Keras code uses public names of `tf.keras`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from keras.src.engine import compile_utils

from bandmf_tf.errors import BandMFError

GradientsAndVariables = list[tuple[tf.Tensor, tf.Variable]]


class UnitLoss:
    """The loss a model was compiled with, for one microbatch at a time.

    Other than `model.compiled_loss` it updates no metrics, which could not be done for microbatches
    in parallel, and does not divide by the number of replicas, which would change the norms that
    are clipped.

    Args:
      model: A compiled model.
      per_example: Whether to return one loss for each example, `[examples]`, and not what the
        reduction of the compiled loss makes of them.
    """

    def __init__(self, model: tf.keras.Model, *, per_example: bool):
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

    def _get_loss_object(self, loss: Any) -> Any:
        loss = super()._get_loss_object(loss)
        return None if loss is None else _Unscaled(loss, self.per_example)

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


def has_known_losses(model: tf.keras.Model) -> bool:
    """Whether all compiled losses are Keras's own, in which examples never meet."""
    container = UnitLoss(model, per_example=True)._container
    losses = [container._get_loss_object(l) for l in tf.nest.flatten(container._user_losses)]
    functions = [getattr(loss._loss, "fn", None) for loss in losses if loss is not None]
    return all(
        getattr(function, "__module__", "") == tf.keras.losses.mean_squared_error.__module__
        for function in functions
    )


def all_layers(model: tf.keras.Model) -> Iterable[tf.keras.layers.Layer]:
    """Yields every layer of a model, nested ones included."""
    return model._flatten_layers(include_self=False)


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
