"""DP-SGD, BandMF and tree aggregation at the same privacy, on real handwritten digits.

    python -m examples.keras_digits --output=digits

Trains a small network on the 1,797 images that scikit-learn ships, for two passes over them, where
correlated noise pays most, and draws test accuracy against epsilon. Every mechanism gets what is
best for it:

* DP-SGD: independent noise, batches drawn by Poisson sampling from all examples, no momentum (the
  paper found it best without, and so did we).
* BandMF: batches drawn by Poisson sampling from one part of the data set after the other, with as
  many bands (and parts) as the planner finds best at that epsilon, for SGD with momentum.
* Tree aggregation: the full (Honaker) estimator, batches in one fixed order; its noise is dense, so
  sampling would not amplify its privacy. Momentum as for BandMF.

All have the same epsilon and delta for zero-out neighbours, the same network, clip norm, number of
steps and expected batch size, and the same choice of learning rates. Shown is the mean of several
runs with the rate that is best for the mechanism, and its standard error.

An epsilon is that of one run. Choosing a learning rate by looking at runs on private data would
cost privacy, too; these data are public.

For every mechanism and epsilon the folder gets `runs/.../mechanism.bandmf` and the record of its
last run, of which `python -m tools.privacy_report --run=digits/runs/... --output=report` makes a
report.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import sklearn.datasets
import tensorflow as tf
import tqdm
from absl import flags

import bandmf_tf as bm
from bandmf_tf import keras as private_keras
from bandmf_tf.cli.program import UsageError, run_program

_DELTA = 1e-5
_CLIP = 1.0
_MOMENTUM = {"BandMF": 0.9, "DP-SGD": 0.0, "tree aggregation": 0.9}
# With momentum, a gradient moves the model by learning_rate / (1 - momentum) in the long run; that
# is what is tuned, so that mechanisms with and without momentum have the same choice.
_LONG_RUN_RATES = (0.5, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Digits:
    """The images, as rows of 64 numbers in [0, 1], and their labels; every fifth is for testing."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls) -> Digits:
        """Returns scikit-learn's data set."""
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        is_test = np.arange(len(labels)) % 5 == 4
        return cls(images[~is_test], labels[~is_test], images[is_test], labels[is_test])


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mechanism, how batches are drawn for it, and where its runs are recorded."""

    name: str
    epsilon: float
    mechanism: bm.Mechanism
    scheme: bm.accounting.CyclicScheme
    folder: Path


@dataclasses.dataclass(frozen=True)
class Result:
    """Test accuracies of the runs of a setting with its best learning rate."""

    setting: Setting
    long_run_rate: float
    accuracies: np.ndarray

    @property
    def mean(self) -> float:
        """Mean over the runs."""
        return float(self.accuracies.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        return float(self.accuracies.std(ddof=1) / np.sqrt(self.accuracies.size))


def plan(name: str, epsilon: float, size: int, batch_size: int, epochs: int) -> bm.Mechanism:
    """Returns the mechanism with this name for a data set of `size` examples."""
    steps_per_epoch = size // batch_size
    num_rounds = epochs * steps_per_epoch
    request: dict[str, Any] = {
        "workload": bm.sgd(
            num_rounds,
            momentum=_MOMENTUM[name],
            learning_rates=bm.factorization.warmup_cooldown_schedule(
                num_rounds, warmup_fraction=0.0
            ),
        ),
        "epsilon": epsilon,
        "delta": _DELTA,
        "l2_norm_clip": _CLIP,
        "compare_dense": False,
    }
    if name == "tree aggregation":
        request["strategy"] = "tree_full"
        request["participation"] = bm.factorization.FixedEpochs(steps_per_epoch, epochs)
    else:
        request["strategy"] = "identity" if name == "DP-SGD" else "banded"
        request |= {"batch_size": batch_size, "dataset_size": size}
    return bm.plan_mechanism(bm.PlanRequest(**request)).mechanism


def train(setting: Setting, data: Digits, long_run_rate: float, seed: int) -> float:
    """Trains once and returns the accuracy on the test images.

    The seed is for the initial weights only. Batches and noise come from the operating system's
    randomness, as they must.
    """
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    network = [layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)]
    model = private_keras.make_private(tf.keras.Sequential(network))

    mechanism, momentum = setting.mechanism, _MOMENTUM[setting.name]
    rates = private_keras.WorkloadSchedule(mechanism.workload, long_run_rate * (1 - momentum))
    model.compile(
        private_keras.SGD(mechanism, learning_rate=rates, momentum=momentum),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batches = private_keras.make_batches((data.images, data.labels), setting.scheme)
    record = private_keras.PrivacyCallback(setting.folder / "run_record.json")
    model.fit(batches, verbose=0, callbacks=[record])

    predicted = model(data.test_images).numpy().argmax(axis=-1)
    return float(np.mean(predicted == data.test_labels))


def train_with_best_rate(setting: Setting, data: Digits, runs: int, bar: tqdm.tqdm) -> Result:
    """Returns the accuracies with the learning rate whose mean is best, as the paper does."""

    def accuracy(long_run_rate: float, seed: int) -> float:
        bar.update()
        return train(setting, data, long_run_rate, seed)

    results = [
        Result(setting, rate, np.array([accuracy(rate, seed) for seed in range(runs)]))
        for rate in _LONG_RUN_RATES
    ]
    return max(results, key=lambda result: result.mean)


def make_settings(
    epsilons: list[float], data: Digits, batch_size: int, epochs: int, output: Path
) -> list[Setting]:
    """Plans all mechanisms and writes their files."""
    size = len(data.labels)
    settings = []
    for epsilon in epsilons:
        for name in _MOMENTUM:
            mechanism = plan(name, epsilon, size, batch_size, epochs)
            scheme = mechanism.sampling
            if scheme is None:
                scheme = private_keras.cyclic_scheme(mechanism.num_rounds, batch_size, size)
            slug = name.lower().replace(" ", "_").replace("-", "_")
            folder = output / "runs" / f"{slug}_epsilon_{epsilon:g}"
            folder.mkdir(parents=True, exist_ok=True)
            bm.save_mechanism(mechanism, folder / "mechanism.bandmf")
            settings.append(Setting(name, epsilon, mechanism, scheme, folder))
    return settings


def table(results: list[Result]) -> str:
    """Returns accuracies by mechanism and epsilon, as Markdown."""
    epsilons = sorted({result.setting.epsilon for result in results})
    found = {(r.setting.name, r.setting.epsilon): r for r in results}
    lines = [
        "| mechanism | " + " | ".join(f"epsilon {epsilon:g}" for epsilon in epsilons) + " |",
        "| --- |" + " --- |" * len(epsilons),
    ]
    for name in _MOMENTUM:
        cells = [found[name, epsilon] for epsilon in epsilons]
        texts = [f"{r.mean:.3f} ± {r.standard_error:.3f}" for r in cells]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    bands = [str(found["BandMF", epsilon].setting.mechanism.num_bands) for epsilon in epsilons]
    lines.append("| bands of BandMF | " + " | ".join(bands) + " |")
    return "\n".join(lines)


def draw(results: list[Result], title: str, path: Path) -> None:
    """Draws accuracy against epsilon with error bars of two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name in _MOMENTUM:
        own = sorted(
            (r for r in results if r.setting.name == name), key=lambda r: r.setting.epsilon
        )
        axes.errorbar(
            [r.setting.epsilon for r in own],
            [r.mean for r in own],
            yerr=[2 * r.standard_error for r in own],
            marker="o",
            markersize=4,
            capsize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({r.setting.epsilon for r in results})))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=f"epsilon (delta {_DELTA:g})", ylabel="accuracy on test images", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_csv(results: list[Result], path: Path) -> None:
    """Writes the accuracy of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mechanism", "epsilon", "delta", "num_bands", "learning_rate", "accuracy"])
        for result in results:
            setting = result.setting
            rate = result.long_run_rate * (1 - _MOMENTUM[setting.name])
            described = [setting.name, setting.epsilon, _DELTA, setting.mechanism.num_bands]
            writer.writerows([*described, rate, accuracy] for accuracy in result.accuracies)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    integer = flags.DEFINE_integer
    flags.DEFINE_string("output", None, "Folder for the picture, the table and the runs.", **where)
    flags.DEFINE_list("epsilons", ["2", "4", "8"], "Values of epsilon.", **where)
    integer("epochs", 2, "Passes over the data set.", lower_bound=1, **where)
    integer("batch_size", 16, "Expected number of examples in a batch.", lower_bound=1, **where)
    integer("runs", 3, "Runs with each learning rate.", lower_bound=2, **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    started = time.monotonic()
    if not values.output:
        raise UsageError("output must be a folder for the results; give --output.")
    output = Path(values.output)
    data = Digits.load()
    try:
        epsilons = sorted({float(text) for text in values.epsilons})
    except ValueError:
        raise UsageError(
            f"epsilons must be numbers separated by commas. Found {','.join(values.epsilons)!r}."
        ) from None
    if not epsilons:
        raise UsageError("epsilons must hold at least one number. Found none.")
    if values.batch_size > len(data.labels):
        raise UsageError(
            f"batch_size must be at most the {len(data.labels):,} training images. Found "
            f"{values.batch_size}."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        settings = make_settings(epsilons, data, values.batch_size, values.epochs, output)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    total = len(settings) * len(_LONG_RUN_RATES) * values.runs
    with tqdm.tqdm(total=total, unit="run", file=sys.stderr) as bar:
        results = [train_with_best_rate(setting, data, values.runs, bar) for setting in settings]

    passes = "one pass" if values.epochs == 1 else f"{values.epochs} passes"
    draw(
        results,
        f"Digits, {passes}, {settings[0].mechanism.num_rounds} steps",
        output / "accuracy.png",
    )
    write_csv(results, output / "accuracy.csv")
    (output / "accuracy.md").write_text(table(results) + "\n", encoding="utf-8")
    print(f"Accuracy on {len(data.test_labels)} test images, mean of {values.runs} runs ± its")
    print(f"standard error; delta {_DELTA:g}, zero-out neighbours.\n")
    print(table(results))
    print(f"\nTook {time.monotonic() - started:.0f} seconds. In {output}{os.sep}: accuracy.png, ")
    print("accuracy.md, accuracy.csv, and runs/ with a mechanism and a run record each.")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    usage = "Compares DP-SGD, BandMF and tree aggregation on handwritten digits.\n\nFlags:"
    return run_program("keras_digits", usage, _define(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
