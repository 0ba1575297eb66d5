"""What both forms of Keras share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from bandmf_tf import _onednn
from bandmf_tf.errors import BandMFError
from bandmf_tf.noise._tensorflow import has_onednn

if _onednn.multiplies_wrongly(tf.__version__) and has_onednn():
    raise BandMFError(
        f"oneDNN in TensorFlow {tf.__version__} multiplies some matrices wrongly, so that examples "
        f"would meet; import bandmf_tf before tensorflow, or set {_onednn.SWITCH}=0, which turns "
        "it off."
    )


def _version() -> str:
    """Returns the version of Keras; TensorFlow says only that Keras cannot be imported."""
    try:
        return getattr(tf.keras, "__version__", "2.")
    except ImportError as error:
        backend = os.environ.get("KERAS_BACKEND", "the backend of keras.json")
        if backend == "tensorflow":
            raise
        raise BandMFError(
            "Private training needs Keras on TensorFlow: set KERAS_BACKEND=tensorflow before Keras "
            f"is imported. Found {backend}."
        ) from error


IS_KERAS_3 = _version() >= "3."

GradientsAndVariables = list[tuple[tf.Tensor, Any]]


class Unsupported(Exception):
    """The model has something that no formula is known for; the message says what."""

    _keras_call_info_injected = True  # Keras would add the arguments of a layer, over many lines.


# Losses that look at one example at a time, along the last axis of an output.
_SEPARATE_LOSSES = (
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
)
_KNOWN_KINDS = [getattr(tf.keras.losses, name) for name in _SEPARATE_LOSSES]
_KNOWN_FUNCTIONS = frozenset(kind().fn for kind in _KNOWN_KINDS)
_FUNCTION_WRAPPER = _KNOWN_KINDS[0].__mro__[1]
_LOSS_METHODS = {kind: (kind.call, kind.__call__) for kind in (*_KNOWN_KINDS, _FUNCTION_WRAPPER)}


def check_known_loss(loss: Any) -> None:
    """Raises `Unsupported` unless a loss is one of Keras's own, exactly as Keras made it."""
    kind = type(loss)
    if (
        kind not in _LOSS_METHODS
        or _LOSS_METHODS[kind] != (kind.call, kind.__call__)
        or overridden_methods(loss)
        or loss.fn not in _KNOWN_FUNCTIONS
        or loss._fn_kwargs.get("axis", -1) != -1
    ):
        name = getattr(loss, "name", None) or kind.__name__
        raise Unsupported(f"the loss {name}, which is not one of Keras's own as it stands")


def check_known_shapes(loss: Any, y: tf.Tensor, y_pred: tf.Tensor) -> None:
    """Raises `Unsupported` for labels that would be broadcast to the outputs of other examples."""
    ranks = y.shape.rank, y_pred.shape.rank
    is_sparse = loss.fn is tf.keras.losses.sparse_categorical_crossentropy
    if None in ranks or ranks[1] < 2 or ranks[0] - ranks[1] not in ((0, -1)[: 1 + is_sparse]):
        raise Unsupported(f"labels of shape {y.shape} for outputs of shape {y_pred.shape}")


def weights_of_losses(weight: Any, y_pred: tf.Tensor) -> Any:
    """Returns one weight for each loss, or for each example, in a shape that meets no other one."""
    if weight is None:
        return None
    positions = y_pred.shape.rank - 2  # Axes of losses beside the first.
    if weight.shape[1:].num_elements() == 1:
        return tf.reshape(weight, [-1] + [1] * positions)
    if weight.shape.rank != positions + 1 or not weight.shape[1:].is_compatible_with(
        y_pred.shape[1:-1]
    ):
        raise Unsupported(f"weights of shape {weight.shape} for outputs of shape {y_pred.shape}")
    return weight


def per_example(losses: tf.Tensor, reduce: Any = tf.reduce_mean) -> tf.Tensor:
    """Returns losses `[examples, ...]`, reduced over all further axes."""
    return reduce(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)


_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class UnscaledLoss:
    """A loss object that does not depend on the number of replicas.

    Args:
      loss: Of Keras.
      per_example: Whether to return one loss for each example.
    """

    reduction = "none"  # Keras reduces and scales nothing behind it.

    def __init__(self, loss: tf.keras.losses.Loss, per_example: bool):
        self._reduction = loss.reduction
        self._per_example = per_example
        self._loss = loss
        if per_example:  # `copy.copy` would go by a file, which knows no classes of users.
            self._loss = object.__new__(type(loss))
            vars(self._loss).update(vars(loss), reduction="none")

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._loss(y, y_pred, sample_weight=sample_weight)
        if self._per_example:
            is_sum = self._reduction == "sum"
            return per_example(loss, tf.reduce_sum if is_sum else tf.reduce_mean)
        if IS_KERAS_3 and self._reduction in _MEANS:  # Which it divides.
            loss *= tf.distribute.get_strategy().num_replicas_in_sync
        return tf.reduce_mean(loss)


class KnownLoss(UnscaledLoss):
    """One of Keras's own losses, exactly as Keras made it, along the last axis of an output."""

    def __init__(self, loss: tf.keras.losses.Loss, per_example: bool):
        check_known_loss(loss)
        if loss.reduction == "mean_with_sample_weight":
            raise Unsupported("a loss that is divided by the weights of a batch")
        super().__init__(loss, per_example)

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        check_known_shapes(self._loss, y, y_pred)
        return super().__call__(y, y_pred, weights_of_losses(sample_weight, y_pred))


def all_layers(model: tf.keras.Model) -> Iterable[tf.keras.layers.Layer]:
    """Yields every layer of a model, nested ones included."""
    return model._flatten_layers(include_self=False)


def called_in_place_of(old: Any, new: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a layer as another one was called, as far as it takes the same arguments."""
    if new is not old:
        names = inspect.signature(new.call).parameters
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    return new(*args, **kwargs)


def sublayers(layer: tf.keras.layers.Layer) -> Iterable[tf.keras.layers.Layer]:
    """Yields the layers that a layer holds itself."""
    return layer._flatten_layers(recursive=False, include_self=False)


def can_vectorize(model: tf.keras.Model) -> bool:
    """Whether gradients of many examples can be taken at once; `clipping.py` tries.

    Grouped convolutions are compiled by XLA, which vectorising forgets: it fails when it runs.
    """
    return not any(
        hasattr(layer, "kernel_size") and getattr(layer, "groups", 1) > 1
        for layer in all_layers(model)
    )


def overridden_methods(instance: Any) -> list[str]:
    """Returns methods of an object that were replaced on the object itself.

    Keras 3 itself replaces three that training does not call.
    """
    kind, by_keras = type(instance), ("build", "loss", "quantize")
    return [
        name
        for name in vars(instance)
        if inspect.isfunction(getattr(kind, name, None)) and name not in by_keras
    ]


def methods_of_users(kind: type, names: Iterable[str], ours: type) -> list[str]:
    """Returns which methods a class has from elsewhere than Keras, TensorFlow and `ours`."""
    return [
        name
        for name in names
        for base in kind.__mro__
        if name in vars(base)
        and base is not ours
        and not base.__module__.startswith(("keras.", "tf_keras.", "tensorflow."))
    ]


def has_mask(tensor: Any) -> bool:
    """Whether a layer has said which entries of its output count."""
    return getattr(tensor, "_keras_mask", None) is not None


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def decay_weights(
    optimizer: tf.keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    variables: Iterable[tf.Variable],
) -> None:
    """Decays weights as Keras does, in cross-replica context."""

    def decay(variable: tf.Variable) -> None:
        rate = tf.cast(optimizer.learning_rate, variable.dtype)
        variable.assign_sub(variable * tf.cast(optimizer.weight_decay, variable.dtype) * rate)

    for variable in variables:
        if optimizer._use_weight_decay(variable):
            strategy.extended.update(variable, decay, group=False)


def constant_rate(optimizer: tf.keras.optimizers.Optimizer) -> float | None:
    """Returns the learning rate; None if a schedule decides it."""
    rate = optimizer._learning_rate
    return None if callable(rate) else float(tf.convert_to_tensor(rate))
