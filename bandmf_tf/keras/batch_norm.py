"""Batch normalisation, which no private model can have, replaced by group normalisation."""

from __future__ import annotations

import tensorflow as tf

from bandmf_tf.errors import BandMFTypeError
from bandmf_tf.keras import _compat

_MOST_GROUPS = 32


def replace_batch_norm(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a copy of a model with group normalisation wherever it had batch normalisation.

    Batch normalisation mixes the examples of a batch and keeps averages of them without noise.
    Group normalisation looks at the channels of one example, in up to 32 groups of equal size. All
    other layers keep their weights; the new ones begin as the identity that layers of their kind
    begin as, so train before you compare.

    Args:
      model: A sequential or functional model, models inside of it included.
    """
    if type(model) is not tf.keras.Sequential and not _compat.is_functional(model):
        raise BandMFTypeError(
            "replace_batch_norm takes sequential and functional models that are not private yet; "
            "in a subclass use tf.keras.layers.GroupNormalization where it makes its layers. Found "
            f"{type(model).__name__}."
        )
    copy = _compat.cloned(model, _replaced)
    if model.built and not copy.built:
        copy.build(model.input_shape)
    for old, new in zip(model.layers, copy.layers, strict=True):
        if type(old) is type(new) and not isinstance(old, tf.keras.Model):
            new.set_weights(old.get_weights())
    return copy


def _replaced(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
    if isinstance(layer, tf.keras.Model):
        return replace_batch_norm(layer)
    if not isinstance(layer, _compat.BatchNormalization):
        return type(layer).from_config(layer.get_config())
    (axis,) = tf.nest.flatten(layer.axis)
    if not layer.built:
        raise BandMFTypeError(
            f"The channels of the layer {layer.name} are not known; build the model first."
        )
    channels = int(layer.moving_mean.shape[0])
    groups = max(n for n in range(1, _MOST_GROUPS + 1) if channels % n == 0)
    return tf.keras.layers.GroupNormalization(
        groups=groups,
        axis=axis,
        epsilon=layer.epsilon,
        center=layer.center,
        scale=layer.scale,
        beta_regularizer=layer.beta_regularizer,
        gamma_regularizer=layer.gamma_regularizer,
        trainable=layer.trainable,
        name=layer.name,
    )
