"""Private training with Keras.

From a mechanism file to `model.fit`:

    from bandmf_tf import keras as private_keras
    from bandmf_tf import load_mechanism

    mechanism = load_mechanism("plan.bandmf")
    model = private_keras.make_private(tf.keras.Sequential([...]))
    model.compile(private_keras.SGD(mechanism, learning_rate=0.5), loss=..., metrics=["accuracy"])
    model.fit(private_keras.make_batches((x, y), mechanism), epochs=20)
"""

from bandmf_tf import _extras

_extras.require_tensorflow(__name__)

from bandmf_tf._files import make_secret_folder, restrict_checkpoint
from bandmf_tf.keras._config import BareMechanism
from bandmf_tf.keras.batch_norm import replace_batch_norm
from bandmf_tf.keras.batches import (
    Batches,
    SamplingError,
    cyclic_scheme,
    group_by_user,
    make_batches,
    wrap_dataset,
)
from bandmf_tf.keras.callbacks import PrivacyCallback
from bandmf_tf.keras.layer_formulas import FormulaError, check_formula, register_formula
from bandmf_tf.keras.models import (
    PrivateModel,
    PrivateSequential,
    load_model,
    make_private,
    make_private_model_class,
    to_public,
)
from bandmf_tf.keras.optimizer_state import UNCHECKED, PrivacyError
from bandmf_tf.keras.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClippedGradients,
    PrivateOptimizer,
    RMSprop,
    make_private_class,
)
from bandmf_tf.keras.queries import QueryError
from bandmf_tf.keras.schedules import WorkloadSchedule
from bandmf_tf.keras.separation import SeparationError
from bandmf_tf.noise.adaptive_clipping import AdaptiveClipping

__all__ = [
    "SGD",
    "UNCHECKED",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveClipping",
    "BareMechanism",
    "Batches",
    "ClippedGradients",
    "FormulaError",
    "PrivacyCallback",
    "PrivacyError",
    "PrivateModel",
    "PrivateOptimizer",
    "PrivateSequential",
    "QueryError",
    "RMSprop",
    "SamplingError",
    "SeparationError",
    "WorkloadSchedule",
    "check_formula",
    "cyclic_scheme",
    "group_by_user",
    "load_model",
    "make_batches",
    "make_private",
    "make_private_class",
    "make_private_model_class",
    "make_secret_folder",
    "register_formula",
    "replace_batch_norm",
    "restrict_checkpoint",
    "to_public",
    "wrap_dataset",
]
