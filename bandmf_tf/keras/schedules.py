"""The learning rates of a workload as a Keras schedule.

A strategy is optimised for a workload, and with it for its learning rates. Training with those, up
to a factor, which leaves the optimum where it is, gets the error that was planned.

One difference remains with momentum: a workload multiplies the velocity with the rate of the step,
Keras's SGD the gradient before it enters the velocity. Where the rate changes slowly compared with
1 / (1 - momentum) steps, both are the same; privacy does not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf.factorization.workloads import Workload

if TYPE_CHECKING:
    _Schedule = Any  # Keras has no types.
else:
    _Schedule = tf.keras.optimizers.schedules.LearningRateSchedule


@tf.keras.utils.register_keras_serializable("bandmf_tf")
class WorkloadSchedule(_Schedule):
    """`factor` times the learning rates of a workload; after its last step, the last of them.

    Args:
      workload: The workload, such as `mechanism.workload`, or its learning rates.
      factor: What the rates are multiplied with: the peak, if that is 1 in the workload.
    """

    def __init__(self, workload: Workload | Any, factor: float = 1.0):
        rates = workload.learning_rates if isinstance(workload, Workload) else workload
        self._rates = _checks.finite_array("learning_rates", rates, ndim=1)
        self._factor = _checks.positive_float("factor", factor)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate of a step; called by Keras."""
        rates = tf.constant(self._factor * self._rates, tf.float32)
        last = tf.constant(self._rates.size - 1, tf.int64)
        return tf.gather(rates, tf.minimum(tf.cast(step, tf.int64), last))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same schedule again; called by Keras."""
        return {"workload": np.asarray(self._rates).tolist(), "factor": self._factor}
