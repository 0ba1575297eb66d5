"""Federated training with TensorFlow Federated: aggregators that add the noise, and the runtime."""

from bandmf_tf import _extras

_extras.require_tensorflow(__name__)

from bandmf_tf.federated.aggregators import BandMFFactory, NoiseSupply
from bandmf_tf.federated.cohorts import (
    CohortRule,
    CohortSource,
    DataSourceCohorts,
    RegisteredClients,
    Selection,
)
from bandmf_tf.federated.learning_process import PrivateLearningProcess, private_learning_process
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping

__all__ = [
    "AdaptiveClipping",
    "BandMFFactory",
    "CohortRule",
    "CohortSource",
    "DataSourceCohorts",
    "NoiseSupply",
    "PrivateLearningProcess",
    "RegisteredClients",
    "Selection",
    "private_learning_process",
]
