"""Adaptive clipping: a clip norm that follows a quantile of the norms, within the same release.

As Andrew, Thakkar, McMahan and Ramaswamy (2021, "Differentially private learning with adaptive
clipping") and TensorFlow Privacy do it, the clip norm S moves in every round by

    S <- S exp(-learning_rate (fraction - target_quantile)),

where `fraction` estimates how many records had a norm of at most S. They release that fraction by a
second mechanism with noise of its own. Here it is one more coordinate of the records, the *vote* v,
so that there is nothing else to account for. A record x contributes

    l2_norm_clip (a x / max(|x|, S), b v),    v = 1 if |x| <= S, else -1,    a^2 + b^2 < 1,

whose norm is below `l2_norm_clip`, whatever x and S are; one that is left out (padding, a norm that
is not finite) contributes zeros in all coordinates. The mechanism releases sums of such records
with rows of its own noise that have one coordinate more. S is computed from earlier releases alone,
as the model is, so any sensitivity, sampling and accounting that holds for adaptively chosen
records of norm `l2_norm_clip` holds here: the guarantee is the mechanism's, unchanged. What the
user gets is the sum times S / (a l2_norm_clip), with noise as if for clip norm S / a.

The fraction is 1/2 + votes / (2 b l2_norm_clip m), cut to [0, 1], with m the *expected* number of
records of a round, which is public; the actual one is not. Its noise is that of a coordinate of a
row over 2 b m clip norms. Log S is a sum over rounds, in which correlated noise cancels itself.

In floating point a is smaller by 2^-20, more than what rounding a vote and a record in float32 can
add. S is kept within a factor of 10^6 of where it began. Where it is not a number, which takes an
edited state, records contribute nothing, and results are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly
from bandmf_tf.errors import BandMFError

VOTE_SPEC = tf.TensorSpec([], tf.float32)

# Values below 1e-19 have squares that vanish in float32. Their norm reaches this only if there are
# more of them than fit into any memory.
MIN_L2_NORM_CLIP = 1e-12

_MAX_L2_NORM_CLIP = 1e12
_FARTHEST = 1e6
_ROUNDING = 2.0**-20


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping:
    """How a clip norm follows a quantile; it begins with that of the mechanism.

    Attributes:
      target_quantile: Which part of the norms shall be at most the clip norm.
      learning_rate: Of log S; a round changes S by a factor of at most exp(learning_rate).
      vote_weight: b, the length of a vote in clip norms. Votes of 0.1 take 0.5 % of the norm from
        records, so that results have 0.5 % more noise, and leave a fraction with the standard
        deviation of Andrew et al., 1/20, if m is a hundred times the noise of a coordinate in clip
        norms. With a smaller m take more: 0.3 costs 5 %.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    vote_weight: float = 0.1

    def __post_init__(self) -> None:
        for name in ("target_quantile", "vote_weight"):
            object.__setattr__(self, name, _checks.probability(name, getattr(self, name)))
        rate = _checks.positive_float("learning_rate", self.learning_rate)
        object.__setattr__(self, "learning_rate", rate)
        if self.vote_weight > 0.5 or self.learning_rate > 1.0:
            raise BandMFError(
                "vote_weight must be at most 0.5, and learning_rate at most 1: more leaves little "
                f"of the records, or lets one round decide. Found {self.vote_weight} and "
                f"{self.learning_rate}."
            )


class QuantileNorm:
    """A clip norm that adapts: what is summed for records, and what is read from a release.

    It holds no state: S, a float32 scalar, is its caller's.

    Args:
      settings: How the norm follows the quantile.
      l2_norm_clip: Of the mechanism: bound on what is summed for a record, and the first S.
    """

    def __init__(self, settings: AdaptiveClipping, l2_norm_clip: float):
        if not MIN_L2_NORM_CLIP <= l2_norm_clip <= _MAX_L2_NORM_CLIP:
            raise BandMFError(
                f"A clip norm that adapts must begin between {exactly(MIN_L2_NORM_CLIP)} and "
                f"{exactly(_MAX_L2_NORM_CLIP)}; scale the records. Found {l2_norm_clip}."
            )
        if not isinstance(settings, AdaptiveClipping):
            raise BandMFError(f"adaptive_clipping must be an AdaptiveClipping. Found {settings!r}.")
        self.settings = settings
        self.initial = np.float32(l2_norm_clip)
        self._smallest = max(l2_norm_clip / _FARTHEST, MIN_L2_NORM_CLIP)
        self._largest = l2_norm_clip * _FARTHEST
        share = math.sqrt(1.0 - settings.vote_weight**2) - _ROUNDING
        self.record_length = share * l2_norm_clip
        self.vote_length = settings.vote_weight * l2_norm_clip

    def threshold(self, norm: tf.Tensor) -> tf.Tensor:
        """Returns S as records are compared with it, in float64: infinity if it is not a number."""
        norm = tf.cast(norm, tf.float64)
        inside = tf.clip_by_value(norm, self._smallest, self._largest)
        return tf.where(tf.math.is_finite(norm), inside, tf.constant(np.inf, tf.float64))

    def votes(self, records: tf.Tensor, clipped: tf.Tensor, nonfinite: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the votes of records of which so many were clipped or left out."""
        counts = [tf.cast(count, tf.float32) for count in (records, clipped, nonfinite)]
        return tf.constant(self.vote_length, tf.float32) * (counts[0] - 2.0 * counts[1] - counts[2])

    def read(
        self,
        noised: Sequence[tf.Tensor],
        noised_votes: tf.Tensor,
        norm: tf.Tensor,
        expected_records: float,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the sums that a release stands for, and the S of the next round.

        Args:
          noised: The noised sums of records.
          noised_votes: The noised sum of votes.
          norm: S of this round.
          expected_records: How many records were to be expected.
        """
        threshold = self.threshold(norm)
        scale = tf.where(
            tf.math.is_finite(threshold),
            threshold / self.record_length,
            tf.constant(np.nan, tf.float64),
        )
        votes = tf.cast(noised_votes, tf.float64) / (2.0 * self.vote_length * expected_records)
        error = tf.clip_by_value(0.5 + votes, 0.0, 1.0) - self.settings.target_quantile
        moved = self.threshold(threshold * tf.exp(-self.settings.learning_rate * error))
        # A round without its row of noise has NaN for votes, and does not count.
        following = tf.where(tf.math.is_finite(votes), tf.cast(moved, tf.float32), norm)
        return [tensor * tf.cast(scale, tensor.dtype) for tensor in noised], following
