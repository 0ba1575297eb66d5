"""What to change in a run that will not be what was meant, from its settings and exact counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from bandmf_tf._numbers import exactly
from bandmf_tf.keras._compat import constant_rate
from bandmf_tf.keras.optimizers import PrivateOptimizer

_FEWEST_TO_JUDGE = 100  # Examples, before a fraction of them says anything.


def on_clipping(optimizer: PrivateOptimizer) -> str | None:
    """Returns what to change if all or no examples since the last call were clipped."""
    units, clipped, nonfinite = optimizer.take_tally()
    if optimizer.l2_norm_clip is None:
        return None
    is_usual = optimizer.adaptive_clipping is not None or 0.01 <= clipped / max(units, 1) <= 0.99
    if units < _FEWEST_TO_JUDGE or (is_usual and not nonfinite):
        return None
    if nonfinite:
        advice = "those are left out: look for overflows in the model"
    elif clipped / units < 0.01:
        advice = "noise is planned for norms that none has: plan for a smaller l2_norm_clip"
    else:
        advice = (
            "all have the same norm then: if training is slow, plan for a larger l2_norm_clip, "
            "or scale the learning rate up"
        )
    return (
        f"Of {units} gradients {clipped} were longer than "
        f"l2_norm_clip={exactly(optimizer.l2_norm_clip)} and {nonfinite} not finite (exact "
        f"counts of private data, not to be published); {advice}."
    )


def on_learning_rate(optimizer: PrivateOptimizer, variables: Sequence[tf.Variable]) -> str | None:
    """Returns what to change if the rate was chosen for gradients of another length.

    Of SGD with a constant rate alone: others scale gradients themselves.
    """
    mechanism, clip, rate = optimizer.mechanism, optimizer.l2_norm_clip, constant_rate(optimizer)
    if not isinstance(optimizer, tf.keras.optimizers.SGD) or rate is None:
        return None
    if mechanism is None or clip is None or not optimizer.knows_batch_size:
        return None
    if optimizer.adaptive_clipping is not None:
        return None  # Nobody knows where the norm will go.
    weights = [tf.convert_to_tensor(v) for v in variables]
    length = float(tf.linalg.global_norm(weights))
    size = sum(w.shape.num_elements() for w in weights)
    reach = mechanism.num_rounds * rate * clip / (1.0 - min(float(optimizer.momentum), 0.999))
    noise = rate * mechanism.stddev * math.sqrt(size) / optimizer.batch_size
    if length > 0 and reach < length / 100:
        return (
            f"With learning_rate={rate:g} and l2_norm_clip={clip:g} all "
            f"{mechanism.num_rounds} steps together move the weights by at most {reach:.2g}, "
            f"and their norm is {length:.2g}: gradients are clipped, so scale the rate up, by "
            "one over the clip norm to begin with."
        )
    if length > 0 and noise > 10 * length:
        return (
            f"With learning_rate={rate:g} the noise of one step moves the weights by about "
            f"{noise:.2g}, and their norm is {length:.2g}: take a smaller rate or a larger "
            "batch."
        )
    return None
