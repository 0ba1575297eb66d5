"""Federated training with TensorFlow Federated: aggregators that add the noise, and the runtime."""

from bandmf_tf.federated.aggregators import BandMFFactory, NoiseSupply
from bandmf_tf.federated.cohorts import CohortRule, RegisteredClients
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping

__all__ = [
    "AdaptiveClipping",
    "BandMFFactory",
    "CohortRule",
    "NoiseSupply",
    "RegisteredClients",
]
