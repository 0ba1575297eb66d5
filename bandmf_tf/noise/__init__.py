"""The noise of a mechanism in TensorFlow: rows of C^-1 z as a stream, and as DP queries."""

from bandmf_tf import _extras

_extras.require_tensorflow(__name__)

from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping
from bandmf_tf.noise.query import (
    ClippedSum,
    CorrelatedNoiseSumQuery,
    SuppliedNoiseSumQuery,
    clipped_sum,
)
from bandmf_tf.noise.stream import FunctionalNoiseStream, NoiseStream

__all__ = [
    "AdaptiveClipping",
    "ClippedSum",
    "CorrelatedNoiseSumQuery",
    "FunctionalNoiseStream",
    "NoiseStream",
    "SuppliedNoiseSumQuery",
    "clipped_sum",
]
