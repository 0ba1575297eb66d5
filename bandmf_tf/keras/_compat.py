"""What the two forms of Keras do not have in common, and TensorFlow's insides, under one name.

The rest of the Keras code uses public names of `tf.keras`, which is Keras 2 up to TensorFlow 2.15
and wherever TF_USE_LEGACY_KERAS is set, and Keras 3 otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bandmf_tf.keras._common import *  # noqa: F403
from bandmf_tf.keras._common import IS_KERAS_3
from bandmf_tf.noise._tensorflow import *  # noqa: F403

if TYPE_CHECKING or not IS_KERAS_3:
    from bandmf_tf.keras._keras2 import *  # noqa: F403
else:
    from bandmf_tf.keras._keras3 import *  # noqa: F403
