"""Private training with Keras: from a mechanism file to `model.fit`.

    from bandmf_tf import keras as private_keras, load_mechanism, sampling

    mechanism = load_mechanism("plan.bandmf")
    model = private_keras.make_private(tf.keras.Sequential([...]))
    model.compile(private_keras.SGD(mechanism, learning_rate=0.5), loss=..., metrics=["accuracy"])
    model.fit(sampling.make_batches((x, y), mechanism), epochs=20)

The names are those of `keras_optimizers`, `keras_models`, `keras_callbacks` and `keras_schedules`,
where they are described.
"""

from bandmf_tf.keras_callbacks import PrivacyCallback
from bandmf_tf.keras_configs import BareMechanism
from bandmf_tf.keras_models import (
    PrivateModel,
    PrivateSequential,
    load_model,
    make_private,
    make_private_model_class,
    to_public,
)
from bandmf_tf.keras_optimizers import (
    SGD,
    UNCHECKED,
    Adagrad,
    Adam,
    AdamW,
    ClippedGradients,
    PrivacyError,
    PrivateOptimizer,
    RMSprop,
    make_private_class,
)
from bandmf_tf.keras_schedules import WorkloadSchedule

__all__ = [
    "SGD",
    "UNCHECKED",
    "Adagrad",
    "Adam",
    "AdamW",
    "BareMechanism",
    "ClippedGradients",
    "PrivacyCallback",
    "PrivacyError",
    "PrivateModel",
    "PrivateOptimizer",
    "PrivateSequential",
    "RMSprop",
    "WorkloadSchedule",
    "load_model",
    "make_private",
    "make_private_class",
    "make_private_model_class",
    "to_public",
]
