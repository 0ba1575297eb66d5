"""What a private step of Keras costs, against a plain step and against TensorFlow Privacy.

    python -m benchmarks.keras_step
    python -m benchmarks.keras_step --kinds=ours,ours_general --repetitions=100

A convolutional network with 26,010 parameters (that of TFP's tutorials) on batches of 256 images of
28 x 28, trained by Keras's compiled train function. Every kind of step runs in a process of its
own, where it takes turns with the plain step, so that whatever else the machine does hits both
alike. Shown are CPU seconds of all threads, the fastest repetition and, in brackets, the median;
the ratio is that of the fastest. Memory is what the private step adds to the peak of the process.
`ours_poisson` takes its batches from a pipeline: as many examples in expectation, drawn anew and
padded in every step, which is what `fit` does; all others take one fixed batch.

The aims: at most 2 times the plain step, and at least 50 times faster than TFP's optimizers.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from bandmf_tf.cli.program import UsageError, run_program

_BATCH_SIZE = 256
_DATASET_SIZE = 20 * _BATCH_SIZE
_NUM_ROUNDS = 1_000
_NUM_BANDS = 16
_CLIP, _NOISE, _RATE = 1.0, 1.0, 0.1

_KINDS = {
    "plain": "plain Keras, a second time",
    "ours": f"bandmf_tf, {_NUM_BANDS} bands",
    "ours_poisson": f"bandmf_tf, {_NUM_BANDS} bands, Poisson samples",
    "ours_general": f"bandmf_tf, {_NUM_BANDS} bands, no layer formulas",
    "tfp_sequential": "TFP DPSequential",
    "tfp_optimizer": "TFP DPKerasSGDOptimizer",
    "tfp_vectorized": "TFP VectorizedDPKerasSGDOptimizer",
}
_OURS, _TFP_OPTIMIZERS = "ours", ("tfp_optimizer", "tfp_vectorized")
_AIM_OVER_PLAIN, _AIM_UNDER_TFP = 2.0, 50.0


def _network(make: Callable[..., Any]) -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    return make(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
            layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 4, strides=2, padding="valid", activation="relu"),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def _model(kind: str) -> Any:
    """Returns a compiled model for a kind of step."""
    import tensorflow as tf

    reduction = "none" if kind in _TFP_OPTIMIZERS else "sum_over_batch_size"
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    if kind == "plain":
        model, optimizer = _network(tf.keras.Sequential), tf.keras.optimizers.SGD(_RATE)
    elif kind.startswith("ours"):
        from bandmf_tf import keras as private_keras
        from bandmf_tf.factorization import strategies

        factors = 1.0 - 0.5 / np.arange(1, _NUM_BANDS)  # The square root of the prefix sums.
        coefficients = np.cumprod(np.concatenate([[1.0], factors]))
        strategy = strategies.ToeplitzStrategy(coefficients, _NUM_ROUNDS)
        model = private_keras.make_private(_network(tf.keras.Sequential))
        model.use_layer_formulas = kind != "ours_general"
        mechanism = private_keras.BareMechanism(strategy, _NOISE, _CLIP)
        optimizer = private_keras.SGD(mechanism, _RATE, batch_size=_BATCH_SIZE)
    else:
        import tensorflow_privacy as tfp

        if kind == "tfp_sequential":
            model = _network(
                lambda layers: tfp.DPSequential(
                    l2_norm_clip=_CLIP, noise_multiplier=_NOISE, layers=layers
                )
            )
            optimizer = tf.keras.optimizers.SGD(_RATE)
        else:
            model = _network(tf.keras.Sequential)
            vectorized = kind == "tfp_vectorized"
            name = ("Vectorized" if vectorized else "") + "DPKerasSGDOptimizer"
            optimizer = getattr(tfp, name)(
                _CLIP, _NOISE, num_microbatches=_BATCH_SIZE, learning_rate=_RATE
            )
    model.compile(optimizer, loss=loss)
    return model


def _step(kind: str) -> Callable[[], object]:
    """Returns a function that takes one compiled training step, already traced."""
    import tensorflow as tf

    is_drawn = kind == "ours_poisson"
    num_images = _DATASET_SIZE if is_drawn else _BATCH_SIZE
    rng = np.random.default_rng(0)
    images = rng.normal(size=(num_images, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(10, size=num_images)
    model = _model(kind)
    if is_drawn:
        from bandmf_tf.accounting.amplification import PoissonSampling
        from bandmf_tf.keras import make_batches

        scheme = PoissonSampling.from_sizes(_NUM_ROUNDS, 1, _BATCH_SIZE, num_images)
        data = make_batches((images, labels), scheme).dataset()
    else:
        data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    if kind.startswith("ours"):
        model.check_examples(next(iter(data)))
    batches = iter(data)
    train = model.make_train_function()
    for _ in range(1 if kind in _TFP_OPTIMIZERS else 2):
        train(batches)
    return lambda: train(batches)


def _cpu_seconds(step: Callable[[], object]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _run(kind: str, repetitions: int) -> dict:
    """Measures one kind of step in this process."""
    plain = _step("plain")
    before = _peak_gib()
    private = _step(kind)
    plain_times, private_times = [], []
    for _ in range(repetitions):
        plain_times.append(_cpu_seconds(plain))
        private_times.append(_cpu_seconds(private))
    return {
        "cpu_seconds": min(private_times),
        "median_cpu_seconds": float(np.median(private_times)),
        "plain_cpu_seconds": min(plain_times),
        "plain_median_cpu_seconds": float(np.median(plain_times)),
        "ratio": min(private_times) / min(plain_times),
        "peak_gib": _peak_gib() - before,
    }


def _measure(kind: str, repetitions: int) -> dict:
    if kind in _TFP_OPTIMIZERS:
        repetitions = max(1, repetitions // 10)
    case = json.dumps({"kind": kind, "repetitions": repetitions})
    outcome = subprocess.run(
        [sys.executable, "-m", "benchmarks.keras_step", f"--worker={case}"],
        env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{kind} ended with {outcome.returncode}: {outcome.stderr[-500:]}")
    row = {"kind": kind, **json.loads(outcome.stdout.strip().splitlines()[-1])}
    print(
        f"{_KINDS[kind]:<42} {row['cpu_seconds']:7.3f} s ({row['median_cpu_seconds']:.3f}), plain "
        f"{row['plain_cpu_seconds']:.3f} s ({row['plain_median_cpu_seconds']:.3f}), ratio "
        f"{row['ratio']:6.2f}, memory {row['peak_gib']:.2f} GiB",
        flush=True,
    )
    return row


def _print_aims(rows: dict[str, dict]) -> None:
    if _OURS not in rows:
        return
    ours = rows[_OURS]
    print(f"{ours['ratio']:.2f} times the plain step (aim: at most {_AIM_OVER_PLAIN:g})")
    for kind in _TFP_OPTIMIZERS:
        if kind in rows:
            # Each kind relative to the plain step beside it: the load changes between processes.
            factor = rows[kind]["ratio"] / ours["ratio"]
            print(f"{factor:.0f} times faster than {_KINDS[kind]} (aim: {_AIM_UNDER_TFP:g})")


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_list("kinds", list(_KINDS), f"Some of {', '.join(_KINDS)}.", **where)
    flags.DEFINE_integer(
        "repetitions", 30, "Timed steps; of TFP's optimizers a tenth.", lower_bound=1, **where
    )
    flags.DEFINE_string("output", None, "CSV file for the results.", **where)
    flags.DEFINE_string("worker", None, "Internal: one measurement, as JSON.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _compare(values: flags.FlagValues) -> int:
    if values.worker:
        print(json.dumps(_run(**json.loads(values.worker))))
        return 0
    unknown = [kind for kind in values.kinds if kind not in _KINDS]
    if unknown:
        raise UsageError(f"kinds must be some of {', '.join(_KINDS)}. Found {unknown[0]!r}.")
    rows = {kind: _measure(kind, values.repetitions) for kind in values.kinds}
    _print_aims(rows)
    if values.output:
        with open(values.output, "w", newline="") as file:
            writer = csv.DictWriter(file, list(next(iter(rows.values()))))
            writer.writeheader()
            writer.writerows(rows.values())
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status."""
    return run_program("keras_step", f"{__doc__}\nFlags:", _define(), _compare, argv)


if __name__ == "__main__":
    sys.exit(main())
