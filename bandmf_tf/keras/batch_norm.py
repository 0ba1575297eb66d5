"""Batch normalisation, which no private model can have, replaced by group normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.keras import _compat
from bandmf_tf.keras.models import rebuilt, refuse_own_losses
from bandmf_tf.keras.trials import mixes_examples

_MOST_GROUPS = 32

# What both layers have; a gamma that begins with zeros keeps the branch of a residual silent.
_KEPT = ["name", "epsilon", "center", "scale"] + [
    f"{of}_{what}"
    for of in ("beta", "gamma")
    for what in ("initializer", "regularizer", "constraint")
]


def replace_batch_norm(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a model with group normalisation wherever batch normalisation would be trained.

    Batch normalisation mixes the examples of a batch and keeps averages of them without noise, but
    not where its `trainable` is False: there it is a fixed function of one example, and stays.
    Group normalisation looks at the channels of one example, in up to 32 groups of equal size. The
    new layers begin with the initializers of the old ones, so train before you compare.

    All other layers are those of the model itself, with their weights; if there is nothing to
    replace, it is the model itself.

    Args:
      model: A sequential or functional model, models inside of it included.
    """
    if not isinstance(model, tf.keras.Model):
        raise BandMFTypeError(f"replace_batch_norm takes models. Found {type(model).__name__}.")
    known: dict[int, Any] = {}  # Layers that are used several times stay one.

    def replaced(layer: Any) -> Any:
        if id(layer) not in known:
            known[id(layer)] = _replacement(layer, replaced)
        return known[id(layer)]

    return replaced(model)


def _replacement(layer: Any, replaced: Callable[[Any], Any]) -> Any:
    if mixes_examples(layer):
        return _group_normalization(layer)
    inner = [each for each in _compat.all_layers(layer) if mixes_examples(each)]
    if not inner:
        return layer
    if type(layer) is not tf.keras.Sequential and not _compat.is_functional(layer):
        raise BandMFTypeError(
            f"{type(layer).__name__} {layer.name!r} holds the batch normalisation "
            f"{inner[0].name!r}, which can be replaced in sequential and functional models that "
            "are not private yet; use tf.keras.layers.GroupNormalization where it is made."
        )
    refuse_own_losses(layer)
    copy = rebuilt(layer, tf.keras.Sequential, tf.keras.Model, replaced)
    copy._trainable = layer._trainable  # Of the model alone: its layers have their own.
    return copy


def _group_normalization(layer: Any) -> tf.keras.layers.Layer:
    axis, *others = tf.nest.flatten(layer.axis)
    if others:
        raise BandMFTypeError(
            f"Group normalisation has one axis of channels; make {layer.name} with one. Found "
            f"axis={[axis, *others]}."
        )
    if not layer.built:
        raise BandMFTypeError(
            f"The channels of the layer {layer.name} are not known; build the model first."
        )
    channels = int(layer.moving_mean.shape[0])
    groups = max(n for n in range(1, _MOST_GROUPS + 1) if channels % n == 0)
    return tf.keras.layers.GroupNormalization(
        groups=groups,
        axis=axis,
        dtype=layer.dtype_policy,
        **{name: getattr(layer, name) for name in _KEPT},
    )
