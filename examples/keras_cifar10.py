"""Trains a CIFAR-10 classifier with BandMF, in the setting of the paper.

    python -m examples.keras_cifar10 --epsilon=3 --output=cifar10
    python -m examples.keras_cifar10 --generated_images --epochs=2 --output=trial

The paper (appendix "Additional CIFAR-10 Experiment Details"): 20 epochs, batches of 500, momentum
0.95, and a learning rate that falls to 0.05 of itself over the last 500 of the 2,000 steps, which
is the last quarter. The number of bands is chosen for epsilon: few bands leave more to
amplification by sampling, many bands cancel more noise. The paper tunes the learning rate on the
grid 1, 2, 5 times powers of ten for every epsilon and gives no values, so the default here is a
place to start from. It names no network either; the one here, six convolutions with tanh (550,570
parameters), is common in the literature on private training.

Where the paper shuffles and accounts for Poisson sampling, batches here really are Poisson samples.

The second command runs the same code on small images that are made up, which takes a minute and
downloads nothing.

A run that was interrupted goes on where its last epoch ended if it is started again. In the output
folder, `secret/` holds what it needs for that, and with it the noise: never share it. To publish
are `model.keras`, which holds the weights alone, `mechanism.bandmf`, and `run_record.json`; of the
latter two `python -m tools.privacy_report --run=cifar10 --output=report` makes a report.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from absl import flags

import bandmf_tf as bm
from bandmf_tf import keras as private_keras
from bandmf_tf.cli.program import UsageError, run_program

_CLASSES = 10
_MOMENTUM = 0.95
_COOLDOWN_FRACTION = 0.25  # 500 of 2,000 steps.
_GENERATED_TRAINING, _GENERATED_TEST, _GENERATED_SIDE = 2_000, 500, 16
_MECHANISM, _RECORD, _MODEL = "mechanism.bandmf", "run_record.json", "model.keras"

# Images as floats in [-1, 1] and their labels.
Examples = tuple[np.ndarray, np.ndarray]


def load_cifar10() -> tuple[Examples, Examples]:
    """Returns 50,000 training and 10,000 test images, downloaded by Keras at the first call."""
    try:
        training, test = tf.keras.datasets.cifar10.load_data()
    except Exception as error:  # Keras raises a bare Exception where a download fails.
        raise UsageError(
            "CIFAR-10 cannot be downloaded here; use --generated_images, or put "
            "cifar-10-batches-py.tar.gz into the folder datasets of Keras's home, ~/.keras."
        ) from error
    return _scaled(*training), _scaled(*test)


def _scaled(images: np.ndarray, labels: np.ndarray) -> Examples:
    return (images / 127.5 - 1.0).astype(np.float32), labels.ravel()


def generate_images(count: int, seed: int) -> Examples:
    """Returns made-up images: a coloured pattern for each class under a lot of noise."""
    shape = (_GENERATED_SIDE, _GENERATED_SIDE, 3)
    patterns = np.random.default_rng(0).choice([-0.3, 0.3], size=(_CLASSES, 4, 4, 3))
    patterns = patterns.repeat(shape[0] // 4, axis=1).repeat(shape[1] // 4, axis=2)
    rng = np.random.default_rng(seed)
    labels = rng.integers(_CLASSES, size=count)
    images = patterns[labels] + rng.normal(scale=0.5, size=(count, *shape))
    return np.clip(images, -1, 1).astype(np.float32), labels


def make_network(input_shape: tuple[int, ...]) -> tf.keras.Model:
    """Returns six convolutions in three stages, each of which halves the image, and two layers."""
    layers = tf.keras.layers
    stack = [layers.Input(input_shape)]
    for filters in (32, 64, 128):
        stack += [layers.Conv2D(filters, 3, padding="same", activation="tanh") for _ in range(2)]
        stack.append(layers.MaxPooling2D(2))
    stack += [layers.Flatten(), layers.Dense(128, activation="tanh"), layers.Dense(_CLASSES)]
    return tf.keras.Sequential(stack)


def plan(
    dataset_size: int,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
    epochs: int,
    l2_norm_clip: float,
    num_bands: int | None,
) -> bm.Mechanism:
    """Returns the mechanism; the planner chooses the number of bands unless it is given."""
    if batch_size > dataset_size:
        raise UsageError(
            f"batch_size must be at most the {dataset_size:,} training images. Found {batch_size}."
        )
    num_rounds = epochs * (dataset_size // batch_size)
    rates = bm.factorization.warmup_cooldown_schedule(
        num_rounds, warmup_fraction=0.0, cooldown_fraction=_COOLDOWN_FRACTION
    )
    request = bm.PlanRequest(
        workload=bm.sgd(num_rounds, momentum=_MOMENTUM, learning_rates=rates),
        epsilon=epsilon,
        delta=delta,
        batch_size=batch_size,
        dataset_size=dataset_size,
        l2_norm_clip=l2_norm_clip,
        num_bands=num_bands,
        compare_dense=False,
    )
    return bm.plan_mechanism(request, _show_stage()).mechanism


def _show_stage() -> Any:
    shown: list[str] = []

    def show(stage: str, detail: str) -> None:
        del detail
        if stage not in shown[-1:]:
            shown.append(stage)
            print(f"planning: {stage}", file=sys.stderr, flush=True)

    return show


def train(
    mechanism: bm.Mechanism,
    training: Examples,
    test: Examples,
    *,
    epochs: int,
    learning_rate: float,
    output: Path,
) -> float:
    """Trains, or goes on with training, and returns the accuracy on the test images."""
    secret = private_keras.make_secret_folder(output / "secret")
    model = private_keras.make_private(make_network(training[0].shape[1:]))
    rates = private_keras.WorkloadSchedule(mechanism.workload, learning_rate)
    model.compile(
        private_keras.SGD(mechanism, learning_rate=rates, momentum=_MOMENTUM),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        private_keras.make_batches(training, mechanism),
        epochs=epochs,
        validation_data=test,
        validation_batch_size=500,
        verbose=2,
        callbacks=[
            tf.keras.callbacks.BackupAndRestore(os.fspath(secret / "backup")),
            private_keras.PrivacyCallback(output / _RECORD),
            tf.keras.callbacks.TensorBoard(os.fspath(output / "tensorboard")),
        ],
    )
    private_keras.to_public(model).save(output / _MODEL)
    return float(model.evaluate(*test, batch_size=500, verbose=0, return_dict=True)["accuracy"])


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    integer, number = flags.DEFINE_integer, flags.DEFINE_float
    flags.DEFINE_string("output", None, "Folder for model, mechanism and record.", **where)
    flags.DEFINE_boolean(
        "generated_images",
        False,
        f"Train on {_GENERATED_TRAINING:,} small images that are made up, by default in batches of "
        "100, instead of CIFAR-10.",
        **where,
    )
    number("epsilon", 3.0, "Epsilon, for zero-out neighbours.", **where)
    number("delta", 1e-5, "Delta.", **where)
    integer("epochs", 20, "Passes over the data set.", lower_bound=1, **where)
    integer("batch_size", None, "Expected batch size, by default 500.", lower_bound=1, **where)
    number("learning_rate", 0.05, "Peak learning rate; tune it.", **where)
    number("l2_norm_clip", 1.0, "Clip norm of one example's gradient.", **where)
    integer("num_bands", None, "Number of bands, instead of the best for epsilon.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _mechanism(values: flags.FlagValues, dataset_size: int, output: Path) -> bm.Mechanism:
    """Returns the mechanism of the run in the folder, or plans one."""
    path = output / _MECHANISM
    if (output / _MODEL).exists():
        raise UsageError(
            f"{output} holds a finished run, and another one with its data would add to its "
            "privacy loss; choose a new folder."
        )
    if path.exists():
        print(f"Going on with {path}; choose another output for another run.", file=sys.stderr)
        return bm.load_mechanism(path)
    mechanism = plan(
        dataset_size,
        epsilon=values.epsilon,
        delta=values.delta,
        batch_size=values.batch_size or (100 if values.generated_images else 500),
        epochs=values.epochs,
        l2_norm_clip=values.l2_norm_clip,
        num_bands=values.num_bands,
    )
    output.mkdir(parents=True, exist_ok=True)
    bm.save_mechanism(mechanism, path)
    return mechanism


def _run(values: flags.FlagValues) -> int:
    if not values.output:
        raise UsageError("output must be a folder for the results; give --output.")
    if values.learning_rate <= 0:
        raise UsageError(f"learning_rate must be positive. Found {values.learning_rate}.")
    output = Path(values.output)
    if values.generated_images:
        training = generate_images(_GENERATED_TRAINING, seed=1)
        test = generate_images(_GENERATED_TEST, seed=2)
    else:
        training, test = load_cifar10()
    try:
        mechanism = _mechanism(values, len(training[1]), output)
        print(mechanism.describe())
        accuracy = train(
            mechanism,
            training,
            test,
            epochs=values.epochs,
            learning_rate=values.learning_rate,
            output=output,
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    data = "made-up images" if values.generated_images else "CIFAR-10"
    print(f"\nAccuracy on test images ({data}): {accuracy:.3f}")
    print(f"epsilon {mechanism.epsilon:.4g} at delta {mechanism.delta:g}, zero-out neighbours")
    print(f"In {output}{os.sep}: {_MODEL}, {_MECHANISM} and {_RECORD}, and secret/ (keep it so).")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    usage = "Trains a CIFAR-10 classifier with BandMF, in the setting of the paper.\n\nFlags:"
    return run_program("keras_cifar10", usage, _define(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
