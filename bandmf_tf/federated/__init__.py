"""Federated training with TensorFlow Federated: aggregators that add the noise, and the runtime."""

from bandmf_tf.federated.aggregators import BandMFFactory, NoiseSupply

__all__ = [
    "BandMFFactory",
    "NoiseSupply",
]
