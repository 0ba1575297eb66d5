"""Federated training with TensorFlow Federated: aggregators that add the noise, and the runtime."""

from bandmf_tf.federated.aggregators import BandMFFactory, NoiseSupply
from bandmf_tf.federated.cohorts import CohortRule, RegisteredClients

__all__ = [
    "BandMFFactory",
    "CohortRule",
    "NoiseSupply",
    "RegisteredClients",
]
