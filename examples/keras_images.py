r"""Accuracy of private training on images, of BandMF and its alternatives at the same privacy.

    python -m examples.keras_images --output=digits
    python -m examples.keras_images --dataset=fashion_mnist --network=scattering --epsilons=2.7 \
        --mechanisms=bandmf,dp_sgd --runs=5 --data=fashion_mnist.npz --output=fashion

Without flags it trains on the 1,797 digits that scikit-learn ships, for two passes over them, where
correlated noise pays most. The other data sets are MNIST, Fashion-MNIST and CIFAR-10, from a file
of arrays (`--data`) or by Keras's own loaders, with

* `convolutions`: the small networks with tanh of Papernot et al., "Tempered Sigmoid Activations for
  Deep Learning with Differential Privacy" (2021); for MNIST on digits that were set upright, and
  for CIFAR-10 on brightness and colour differences, with the epochs and batches of the BandMF paper
  ("Additional CIFAR-10 Experiment Details"), and asked about images and their mirror images;
* `normalised`: the same for Fashion-MNIST and MNIST as it is, with group normalisation and kernels
  that are standardised; see `standardised.py`;
* `scattering`: a linear model on fixed wavelet features; see `scattering.py`;
* `patches`, for CIFAR-10: a linear model on likeness to patches of public photographs; see
  `patches.py`.

Every mechanism gets what is best for it:

* `bandmf`: batches drawn by Poisson sampling from one part of the data set after the other, with as
  many bands (and parts) as the planner finds best at that epsilon.
* `dp_sgd`: independent noise, batches drawn by Poisson sampling from all examples.
* `tree`: tree aggregation by the full (Honaker) estimator, batches in one fixed order; its noise is
  dense, so sampling would not amplify its privacy.
* `dense`: multi-epoch matrix factorization, likewise.

All have the same epsilon and delta for zero-out neighbours, the same network, clip norm, number of
steps and expected batch size, and the same choice of learning rates and of momentum. Features of
linear models are centred by their mean over the training images, which gets noise of its own, a
twentieth of epsilon and a twentieth of delta; training has the rest. The rate is chosen for each
mechanism and epsilon by one run each on five sixths of the training images, on the others, and then
whether to do without momentum, by one more. Shown is the mean over several runs with that choice on
all of them, and its standard error, on test images.

An epsilon is that of one run. Choosing by looking at runs on private data would cost privacy, too;
these data are public.

A run can take hours. What was interrupted goes on where its last epoch ended if it is started
again, and runs that are in `accuracy.csv` are not done again. For every mechanism and epsilon the
folder gets `runs/.../mechanism.bandmf` and the record of its last run, of which `python -m
tools.privacy_report --run=digits/runs/... --output=report` makes a report, and `mean.bandmf` where
there is a mean: a release of its own, which that report does not cover. `secret/` holds what an
interrupted run needs, and with it the noise: never share it.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import hashlib
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import numpy as np
import scipy.ndimage
import sklearn.datasets
import tensorflow as tf
import tqdm
from absl import flags

import bandmf_tf as bm
from bandmf_tf import keras as private_keras
from bandmf_tf._numbers import exactly
from bandmf_tf.cli.program import UsageError, run_program
from examples import patches, scattering
from examples.standardised import StandardisedConv2D

MECHANISMS = {
    "bandmf": "BandMF",
    "dp_sgd": "DP-SGD",
    "tree": "tree aggregation",
    "dense": "multi-epoch MF",
}
_DELTA = 1e-5
_MEAN_SHARE = 0.05  # Of epsilon and delta, for the mean of features where it is subtracted.
_CLASSES = 10
_HELD_OUT = 6  # One of so many training images is for choosing the learning rate and momentum.
_COLUMNS = (
    *("mechanism", "epsilon", "delta", "num_bands", "momentum", "learning_rate"),
    *("images", "accuracy"),
)
_TEST, _VALIDATION = "test", "held out"

# Images and their labels.
Examples = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A network and how it is trained, whatever the noise.

    Attributes:
      make: Returns the layers, but for the input.
      epochs: Passes over the data set.
      batch_size: Expected number of examples in a batch.
      momentum: Of the optimizer, unless none is better.
      long_run_rates: Learning rates to choose from, over 1 - momentum: in the long run that is what
        a gradient moves the model by. With one of them nothing is chosen, nor is momentum.
      l2_norm_clip: Clip norm of one example's gradient.
      prepare: What is computed of images of numbers in [0, 1] beforehand, one by one.
      centred: Whether the mean of what is prepared is estimated privately and subtracted.
      mirrored: Whether the trained model is asked about an image and its mirror image.
    """

    make: Callable[[], list[Any]]
    epochs: int
    batch_size: int
    momentum: float
    long_run_rates: tuple[float, ...]
    l2_norm_clip: float = 1.0
    prepare: Callable[[np.ndarray], np.ndarray] = lambda images: 2 * images - 1
    centred: bool = False
    mirrored: bool = False

    @property
    def share(self) -> float:
        """Share of epsilon and delta that is left for training."""
        return 1.0 - _MEAN_SHARE if self.centred else 1.0


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1)


def _spread(images: np.ndarray) -> np.ndarray:
    # About mean 0 and variance 1 for pale things on black, which no private data were asked for.
    return 3 * images - np.float32(0.5)


def upright(images: np.ndarray) -> np.ndarray:
    """Returns digits in the middle and without slant: their principal axis becomes vertical.

    LeCun et al. prepared MNIST so for their simpler models ("Gradient-Based Learning Applied to
    Document Recognition", 1998). A network that is noised does better with less to learn, and what
    is done to each image by itself costs no privacy.
    """
    places = np.indices(images.shape[1:3], np.float32)
    middle = (np.array(images.shape[1:3]) - 1) / 2
    made = np.empty_like(images)
    for image, out in zip(images[..., 0], made[..., 0], strict=True):
        centre = (image * places).sum(axis=(1, 2)) / (image.sum() + 1e-6)
        down, right = places - centre[:, None, None]
        slant = (image * down * right).sum() / ((image * down**2).sum() + 1e-6)
        shear = np.array([[1.0, 0.0], [slant, 1.0]])
        offset = centre - shear @ middle
        scipy.ndimage.affine_transform(image, shear, offset, output=out, order=1)
    return made


def _colours(images: np.ndarray) -> np.ndarray:
    """Returns brightness and two differences of colour, about mean 0 and variance 1 in photographs.

    Red, green and blue are much alike, and differences would be too small for a noised network to
    learn from. The variances are those of the photographs that scikit-learn ships.
    """
    basis = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])
    spread = np.array([[0.55], [0.18], [0.06]])
    return ((images - 0.475) @ (basis / spread).T).astype(np.float32)


def _upright_spread(images: np.ndarray) -> np.ndarray:
    return _spread(upright(images))


def _dense() -> list[Any]:
    return [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(_CLASSES)]


def _linear() -> list[Any]:
    # From zero: with random weights private training spends its first steps on forgetting them.
    return [tf.keras.layers.Dense(_CLASSES, kernel_initializer="zeros")]


def small_network() -> list[Any]:
    """Two convolutions and two layers, 26,010 parameters for images of 28 x 28."""
    layers = tf.keras.layers
    return [
        layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh"),
        layers.MaxPooling2D(2, strides=1),
        layers.Conv2D(32, 4, strides=2, activation="tanh"),
        layers.MaxPooling2D(2, strides=1),
        layers.Flatten(),
        layers.Dense(32, activation="tanh"),
        layers.Dense(_CLASSES),
    ]


def normalised_network() -> list[Any]:
    """The small one with standardised kernels and group normalisation, 26,106 parameters."""
    layers = tf.keras.layers

    def convolution(filters: int, size: int, padding: str) -> list[Any]:
        return [
            StandardisedConv2D(filters, size, strides=2, padding=padding),
            layers.GroupNormalization(8),
            layers.Activation("tanh"),
            layers.MaxPooling2D(2, strides=1),
        ]

    dense = [layers.Dense(32, activation="tanh"), layers.Dense(_CLASSES)]
    return [*convolution(16, 8, "same"), *convolution(32, 4, "valid"), layers.Flatten(), *dense]


def large_network() -> list[Any]:
    """Six convolutions in three stages and two layers, 550,570 parameters for 32 x 32 x 3."""
    layers = tf.keras.layers
    stack: list[Any] = []
    for filters in (32, 64, 128):
        stack += [layers.Conv2D(filters, 3, padding="same", activation="tanh") for _ in range(2)]
        stack.append(layers.MaxPooling2D(2))
    return [*stack, layers.Flatten(), layers.Dense(128, activation="tanh"), layers.Dense(_CLASSES)]


_SMALL = Recipe(small_network, 20, 2048, 0.9, (2.0, 5.0, 10.0), prepare=_spread)
_NORMALISED = dataclasses.replace(_SMALL, make=normalised_network)
_SCATTERED = Recipe(
    _linear, 20, 2500, 0.9, (5.0, 10.0), prepare=scattering.scattering_features, centred=True
)
# The first of a data set is its default.
RECIPES = {
    "digits": {"dense": Recipe(_dense, 2, 16, 0.9, (0.5, 1.0, 2.0), prepare=_flat)},
    "mnist": {
        "convolutions": dataclasses.replace(_SMALL, prepare=_upright_spread),
        "normalised": _NORMALISED,
        "scattering": _SCATTERED,
    },
    "fashion_mnist": {
        "convolutions": _SMALL,
        "normalised": _NORMALISED,
        "scattering": _SCATTERED,
    },
    "cifar10": {
        "convolutions": Recipe(
            large_network, 20, 500, 0.9, (1.0, 2.0), prepare=_colours, mirrored=True
        ),
        "scattering": dataclasses.replace(
            _SCATTERED,
            epochs=10,
            long_run_rates=(20.0, 50.0),
            prepare=scattering.mirrored_features,
        ),
        "patches": dataclasses.replace(_SCATTERED, epochs=10, prepare=patches.patch_features),
    },
}


def load(dataset: str, path: str | None) -> tuple[Examples, Examples]:
    """Returns images of numbers in [0, 1] and their labels, for training and for testing."""
    if path is not None:
        return _load_file(path)
    if dataset == "digits":
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        is_test = np.arange(len(labels)) % 5 == 4
        return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])
    try:
        training, test = getattr(tf.keras.datasets, dataset).load_data()
    except Exception as error:  # Keras raises a bare Exception where a download fails.
        raise UsageError(
            f"{dataset} cannot be downloaded here; give a file of the arrays x_train, y_train, "
            "x_test and y_test by --data, as numpy.savez writes it."
        ) from error
    return _scaled(*training), _scaled(*test)


def _load_file(path: str) -> tuple[Examples, Examples]:
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(
            "data must be a file of the arrays x_train, y_train, x_test and y_test, as numpy.savez "
            f"writes it. Found {path}: {error}."
        ) from error
    return _scaled(*arrays[:2]), _scaled(*arrays[2:])


def _scaled(images: np.ndarray, labels: np.ndarray) -> Examples:
    images = (images / np.float32(255)).astype(np.float32)
    return images if images.ndim == 4 else images[..., None], labels.ravel().astype(np.int64)


def prepared(recipe: Recipe, examples: Examples, cache: str | None) -> Examples:
    """Returns what a recipe makes of images; from the cache, if they were there before."""
    images, labels = examples
    if cache is None:
        return recipe.prepare(images), labels
    source = Path(inspect.getfile(recipe.prepare)).read_bytes() + recipe.prepare.__name__.encode()
    key = hashlib.sha256(source + np.ascontiguousarray(images).data).hexdigest()
    path = Path(cache, f"{key[:16]}.npy")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file:
            np.save(file, recipe.prepare(images))
        unfinished.replace(path)
    return np.load(path, mmap_mode="r"), labels


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on and tested with; `images` is what the results say about the latter."""

    training: Examples
    test: Examples
    images: str

    @property
    def size(self) -> int:
        """Number of training images."""
        return len(self.training[1])


def split(training: Examples, test: Examples) -> tuple[Data, Data]:
    """Returns the data for choosing how to train, and for the result."""
    is_held_out = np.arange(len(training[1])) % _HELD_OUT == 0
    kept = tuple(array[~is_held_out] for array in training)
    held_out = tuple(array[is_held_out] for array in training)
    return Data(kept, held_out, _VALIDATION), Data(training, test, _TEST)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mechanism and the folder in which its runs are recorded."""

    name: str
    epsilon: float
    momentum: float
    recipe: Recipe
    mechanism: bm.Mechanism
    folder: Path


def plan(name: str, epsilon: float, momentum: float, recipe: Recipe, size: int) -> bm.Mechanism:
    """Returns the mechanism with this name for a data set of `size` examples."""
    steps_per_epoch = size // recipe.batch_size
    num_rounds = recipe.epochs * steps_per_epoch
    request: dict[str, Any] = {
        "workload": bm.sgd(
            num_rounds,
            momentum=momentum,
            learning_rates=bm.factorization.warmup_cooldown_schedule(
                num_rounds, warmup_fraction=0.0
            ),
        ),
        "epsilon": recipe.share * epsilon,
        "delta": recipe.share * _DELTA,
        "l2_norm_clip": recipe.l2_norm_clip,
        "compare_dense": False,
    }
    if name in ("tree", "dense"):
        request["strategy"] = "tree_full" if name == "tree" else "dense"
        request["participation"] = bm.factorization.FixedEpochs(steps_per_epoch, recipe.epochs)
        request["equal_column_norms"] = name != "dense"  # No column need be like others here.
    else:
        request["strategy"] = "identity" if name == "dp_sgd" else "banded"
        request |= {"batch_size": recipe.batch_size, "dataset_size": size}
    return bm.plan_mechanism(bm.PlanRequest(**request)).mechanism


def make_setting(
    name: str, epsilon: float, momentum: float, recipe: Recipe, data: Data, output: Path
) -> Setting:
    """Plans a mechanism, or takes the one that an earlier start planned."""
    folder = output / "runs" / f"{name}_epsilon_{exactly(epsilon)}"
    if data.images == _VALIDATION:
        folder = folder / "choice" / f"momentum_{momentum:g}"
    path = folder / "mechanism.bandmf"
    mechanism = bm.load_mechanism(path) if path.exists() else None
    # With other learning rates to choose from, the choice of momentum may be another.
    if mechanism is None or mechanism.workload.momentum != momentum:
        mechanism = plan(name, epsilon, momentum, recipe, data.size)
        folder.mkdir(parents=True, exist_ok=True)
        bm.save_mechanism(mechanism, path)
    return Setting(name, epsilon, momentum, recipe, mechanism, folder)


def plan_mean(epsilon: float, delta: float, size: int) -> bm.Mechanism:
    """Returns a mechanism of one round, for the sum of rows of so many numbers.

    Rows are clipped to norm 1 a number, which features keep that are normalised one by one.
    """
    return bm.plan_mechanism(
        bm.PlanRequest(
            workload=bm.prefix_sum(1), epsilon=epsilon, delta=delta, l2_norm_clip=float(size**0.5)
        )
    ).mechanism


def private_mean(features: np.ndarray, mechanism: bm.Mechanism) -> np.ndarray:
    """Returns the mean of rows, of which each is clipped, with the mechanism's noise."""
    spec = tf.TensorSpec(features.shape[1:], tf.float64)
    total = bm.noise.NoiseStream(mechanism.strategy, mechanism.stddev, spec).next().numpy()
    for chunk in np.array_split(features, -(-len(features) // 1000)):
        norms = np.linalg.norm(chunk.astype(np.float64), axis=1, keepdims=True)
        total += np.sum(chunk * np.minimum(1.0, mechanism.l2_norm_clip / (norms + 1e-12)), axis=0)
    return (total / len(features)).astype(np.float32)


def _mean_of_run(setting: Setting, data: Data, path: Path) -> np.ndarray:
    """Returns the private mean of a run, which goes on with the one that it began with."""
    if not path.exists():
        share, size = 1.0 - setting.recipe.share, data.training[0].shape[1]
        mechanism = plan_mean(share * setting.epsilon, share * _DELTA, size)
        bm.save_mechanism(mechanism, setting.folder / "mean.bandmf")
        unfinished = path.with_suffix(".new.npy")
        np.save(unfinished, private_mean(data.training[0], mechanism))
        unfinished.replace(path)
    return np.load(path)


def _backup(folder: Path) -> tf.keras.callbacks.Callback:
    """Returns what saves a run after every epoch, so that a kill at any moment leaves a state."""
    backup = tf.keras.callbacks.BackupAndRestore
    if "double_checkpoint" not in inspect.signature(backup).parameters:
        return backup(os.fspath(folder))
    # Keras 3 overwrites its one file in place unless it is told to keep the one before.
    saved = list(folder.glob("*.weights.h5*"))
    if len(saved) == 1:
        try:
            h5py.File(saved[0]).close()
        except OSError:  # Killed in its first save: the run begins anew, nobody has seen it.
            shutil.rmtree(folder)
    return backup(os.fspath(folder), double_checkpoint=True)


def train(setting: Setting, data: Data, rate: float, seed: int) -> float:
    """Trains once and returns the accuracy on images that it was not trained on.

    The seed is for the initial weights only. Batches and noise come from the operating system's
    randomness, as they must.
    """
    tf.keras.utils.set_random_seed(seed)
    recipe, mechanism = setting.recipe, setting.mechanism
    secret = private_keras.make_secret_folder(setting.folder / "secret")
    run = f"momentum_{setting.momentum:g}_rate_{rate:g}_seed_{seed}"
    layers = [tf.keras.layers.Input(data.training[0].shape[1:])]
    if recipe.centred:
        mean = _mean_of_run(setting, data, secret / f"{run}_mean.npy")
        layers.append(tf.keras.layers.Rescaling(1.0, -mean))
    model = private_keras.make_private(tf.keras.Sequential([*layers, *recipe.make()]))
    rates = private_keras.WorkloadSchedule(mechanism.workload, rate * (1 - setting.momentum))
    model.compile(
        private_keras.SGD(mechanism, learning_rate=rates, momentum=setting.momentum),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    scheme = mechanism.sampling or private_keras.cyclic_scheme(
        mechanism.num_rounds, recipe.batch_size, data.size
    )
    model.fit(
        private_keras.make_batches(data.training, scheme),
        epochs=recipe.epochs,
        verbose=0,
        callbacks=[
            _backup(secret / run),
            # Nobody sees the weights before the end: a run that goes on has released nothing.
            private_keras.PrivacyCallback(
                setting.folder / "run_record.json", undone_steps_unseen=True
            ),
        ],
    )
    shutil.rmtree(secret)
    images, labels = data.test
    chunks = np.array_split(images, -(-len(images) // 500))
    logits = np.concatenate([model(chunk).numpy() for chunk in chunks])
    if recipe.mirrored:  # Of a model that is released, and so for nothing.
        logits += np.concatenate([model(chunk[:, :, ::-1]).numpy() for chunk in chunks])
    del model  # Its functions hold the batches, and those all images: too much for many runs.
    tf.keras.backend.clear_session()
    gc.collect()
    return float(np.mean(logits.argmax(axis=-1) == labels))


class Results:
    """The accuracy of every run, in a file that grows run by run."""

    def __init__(self, path: Path):
        self._path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(_COLUMNS)

    def accuracies(self, setting: Setting, images: str, rate: float) -> list[float]:
        """Returns what is known of a setting with this learning rate."""
        key = self._row(setting, images, rate)
        return [float(row["accuracy"]) for row in self.rows if row | key == row]

    def add(self, setting: Setting, images: str, rate: float, accuracy: float) -> None:
        """Adds a run, and writes it down."""
        row = self._row(setting, images, rate) | {"accuracy": f"{accuracy:.4f}"}
        self.rows.append(row)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, _COLUMNS).writerow(row)

    @staticmethod
    def _row(setting: Setting, images: str, rate: float) -> dict[str, str]:
        return {
            "mechanism": MECHANISMS[setting.name],
            "epsilon": exactly(setting.epsilon),
            "delta": exactly(_DELTA),
            "num_bands": str(setting.mechanism.num_bands),
            "momentum": f"{setting.momentum:g}",
            "learning_rate": f"{rate * (1 - setting.momentum):g}",
            "images": images,
        }


@dataclasses.dataclass(frozen=True)
class Summary:
    """Runs of a setting, which was chosen, with its chosen learning rate."""

    setting: Setting
    rate: float
    accuracies: np.ndarray

    @property
    def mean(self) -> float:
        """Mean over the runs."""
        return float(self.accuracies.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN of one run."""
        if self.accuracies.size < 2:
            return float("nan")
        return float(self.accuracies.std(ddof=1) / np.sqrt(self.accuracies.size))

    def __str__(self) -> str:
        if self.accuracies.size < 2:
            return f"{self.mean:.3f}"
        return f"{self.mean:.4f} ± {self.standard_error:.4f}"


def measure(
    make: Callable[[float, Data], Setting],
    recipe: Recipe,
    data: tuple[Data, Data],
    runs: int,
    results: Results,
    bar: tqdm.tqdm,
) -> Summary:
    """Chooses rate and momentum on held-out images, then trains on all of them.

    `make` returns the setting with a momentum for some data.
    """

    def accuracies(setting: Setting, part: Data, rate: float, count: int) -> list[float]:
        while len(found := results.accuracies(setting, part.images, rate)) < count:
            accuracy = train(setting, part, rate, seed=len(found))
            results.add(setting, part.images, rate, accuracy)
            bar.update()
        return found[:count]

    def held_out(choice: tuple[float, float]) -> list[float]:
        momentum, rate = choice
        return accuracies(make(momentum, data[0]), data[0], rate, 1)

    chosen = (recipe.momentum, recipe.long_run_rates[0])
    if len(recipe.long_run_rates) > 1:
        chosen = max(((recipe.momentum, rate) for rate in recipe.long_run_rates), key=held_out)
        chosen = max(chosen, (0.0, chosen[1]), key=held_out)
    momentum, rate = chosen
    setting = make(momentum, data[1])
    return Summary(setting, rate, np.array(accuracies(setting, data[1], rate, runs)))


def table(summaries: Iterable[Summary]) -> str:
    """Returns accuracies by mechanism and epsilon, as Markdown."""
    found = {(s.setting.name, s.setting.epsilon): s for s in summaries}
    names = list(dict.fromkeys(name for name, _ in found))
    epsilons = sorted({epsilon for _, epsilon in found})
    lines = [
        "| mechanism | " + " | ".join(f"epsilon {exactly(epsilon)}" for epsilon in epsilons) + " |",
        "| --- |" + " --- |" * len(epsilons),
    ]
    for name in names:
        cells = [str(found[name, epsilon]) for epsilon in epsilons]
        lines.append(f"| {MECHANISMS[name]} | " + " | ".join(cells) + " |")
    if "bandmf" in names:
        bands = [str(found["bandmf", e].setting.mechanism.num_bands) for e in epsilons]
        lines.append("| bands of BandMF | " + " | ".join(bands) + " |")
    return "\n".join(lines)


def draw(summaries: list[Summary], title: str, path: Path) -> None:
    """Draws accuracy against epsilon with error bars of two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name in dict.fromkeys(s.setting.name for s in summaries):
        own = sorted(
            (s for s in summaries if s.setting.name == name), key=lambda s: s.setting.epsilon
        )
        axes.errorbar(
            [s.setting.epsilon for s in own],
            [s.mean for s in own],
            yerr=[2 * s.standard_error for s in own],
            marker="o",
            markersize=4,
            capsize=4,
            label=MECHANISMS[name],
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({s.setting.epsilon for s in summaries})))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(
        xlabel=f"epsilon (delta {exactly(_DELTA)})", ylabel="accuracy on test images", title=title
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    integer = flags.DEFINE_integer
    networks = sorted({network for recipes in RECIPES.values() for network in recipes})
    names = ["bandmf", "dp_sgd", "tree"]
    flags.DEFINE_string("output", None, "Folder for the picture, the table and the runs.", **where)
    flags.DEFINE_enum("dataset", "digits", list(RECIPES), "What to train on.", **where)
    flags.DEFINE_string(
        "data", None, "File of x_train, y_train, x_test, y_test, as numpy.savez writes it.", **where
    )
    flags.DEFINE_string(
        "cache", None, "Folder for features of images, for the next start or program.", **where
    )
    flags.DEFINE_enum("network", None, networks, "What to train; see above.", **where)
    flags.DEFINE_list("mechanisms", names, f"Some of {', '.join(MECHANISMS)}.", **where)
    flags.DEFINE_list("epsilons", ["2", "4", "8"], "Values of epsilon.", **where)
    integer("epochs", None, "Passes over the data set.", lower_bound=1, **where)
    integer("batch_size", None, "Expected number of examples in a batch.", lower_bound=1, **where)
    flags.DEFINE_list(
        "long_run_rates", None, "Learning rates over 1 - momentum to choose from.", **where
    )
    integer("runs", 3, "Runs with the chosen learning rate.", lower_bound=1, **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _numbers(name: str, texts: list[str]) -> tuple[float, ...]:
    try:
        numbers = tuple(dict.fromkeys(float(text) for text in texts))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise UsageError(
            f"{name} must be positive numbers separated by commas. Found {','.join(texts)!r}."
        )
    return numbers


def _recipe(values: flags.FlagValues) -> Recipe:
    recipes = RECIPES[values.dataset]
    network = values.network or next(iter(recipes))
    if network not in recipes:
        raise UsageError(
            f"network must be one of {', '.join(recipes)} for {values.dataset}. Found {network}."
        )
    changes = {name: values[name].value for name in ("epochs", "batch_size")}
    if values.long_run_rates:
        changes["long_run_rates"] = _numbers("long_run_rates", values.long_run_rates)
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(recipes[network], **given)


def _run(values: flags.FlagValues) -> int:
    started = time.monotonic()
    if not values.output:
        raise UsageError("output must be a folder for the results; give --output.")
    unknown = [name for name in values.mechanisms if name not in MECHANISMS]
    if unknown or not values.mechanisms:
        raise UsageError(
            f"mechanisms must be some of {', '.join(MECHANISMS)}. Found "
            f"{', '.join(unknown) or 'none'}."
        )
    epsilons = sorted(_numbers("epsilons", values.epsilons))
    recipe, output = _recipe(values), Path(values.output)
    training, test = load(values.dataset, values.data)
    pairs = split(training, test)
    if recipe.batch_size > pairs[0].size:
        raise UsageError(
            f"batch_size must be at most the {pairs[0].size:,} training images that are not held "
            f"out. Found {recipe.batch_size}."
        )
    try:
        data = split(*(prepared(recipe, part, values.cache) for part in (training, test)))
        output.mkdir(parents=True, exist_ok=True)
        results = Results(output / "accuracy.csv")
        rates = len(recipe.long_run_rates)
        choices = rates + 1 if rates > 1 else 0
        total = len(epsilons) * len(values.mechanisms) * (values.runs + choices)
        summaries = []
        with tqdm.tqdm(total=total, unit="run", file=sys.stderr) as bar:
            for epsilon in epsilons:
                for name in values.mechanisms:

                    def make(momentum: float, part: Data, key: Any = (name, epsilon)) -> Setting:
                        return make_setting(*key, momentum, recipe, part, output)

                    summaries.append(measure(make, recipe, data, values.runs, results, bar))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error

    passes = "one pass" if recipe.epochs == 1 else f"{recipe.epochs} passes"
    steps = summaries[0].setting.mechanism.num_rounds
    draw(summaries, f"{values.dataset}, {passes}, {steps} steps", output / "accuracy.png")
    (output / "accuracy.md").write_text(table(summaries) + "\n", encoding="utf-8")
    print(f"Accuracy on {len(test[1])} test images, mean of {values.runs} runs ± its standard")
    print(f"error; delta {exactly(_DELTA)}, zero-out neighbours.\n")
    print(table(summaries))
    print(f"\nTook {time.monotonic() - started:.0f} seconds. In {output}{os.sep}: accuracy.png, ")
    print("accuracy.md, accuracy.csv, and runs/ with a mechanism and a run record each.")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    usage = "Compares BandMF with other mechanisms at the same privacy, on images.\n\nFlags:"
    return run_program("keras_images", usage, _define(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
