"""What a private training step costs, against a plain step of the same library, and its peers.

    python -m benchmarks.keras_step
    python -m benchmarks.keras_step --models=transformer --kinds=bounded,poisson --repetitions=20
    python -m benchmarks.keras_step --models=cnn --kinds=fit
    python -m benchmarks.keras_step --models=cnn --kinds=tfp_sequential,tfp_optimizer
    python -m benchmarks.keras_step --peers=opacus,jax

The networks are in `step_models.py`. A private step is `fit`'s: a batch from a pipeline, clipping,
the noise of 16 bands, the update. `bounded` draws what plans draw: Poisson samples of the batch
size in expectation and of a largest size that costs half a percent of epsilon, 79 rows for 64 of
1,280 examples; `poisson` draws them without a largest size, padded so that their size does not
show, 143 rows; `fixed` draws random subsets of the batch size; `general` is
`fixed` without formulas of layers. A plain step has one batch of the batch size from `tf.data`.
`plain` is that step a second time. `fit` is a whole call of `fit`, three epochs of 60,000 examples
in batches of 1,024 that are drawn as `bounded` draws them, against Keras's on arrays.

Every kind runs in a process of its own, where it takes turns with the plain step, so that whatever
else the machine does hits both alike, and on one core: of several, threads that wait for each other
count as well (`--cores=0` gives it all). Shown are CPU seconds, means over whole blocks of noise,
and their ratio. Memory is from two further processes that take one kind of step each:
what the steps add to the process, with data and weights, and the peak of the whole process. Where
TensorFlow's oneDNN is turned off (see `bandmf_tf/_onednn.py`) it is off for both; `--onednn` times
the plain step in a process where it is on, too.

Peers are Opacus with ghost clipping, and jax-privacy, on the same networks, each against the plain
step of PyTorch or JAX, in environments of their own. They take the kinds `fixed` and `bounded`: for
the second, jax-privacy cuts Poisson samples to our largest size and pads them to it, and Opacus
computes as many rows as it drew.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bandmf_tf import _onednn
from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    SamplingScheme,
)
from bandmf_tf.cli.program import UsageError, run_program
from benchmarks import peers, step_models
from benchmarks.load import OtherWork
from benchmarks.rows import write_rows
from benchmarks.step_timing import measure

_BATCHES = 20  # In the data set.
_NUM_ROUNDS = 1_000
_NUM_BANDS = 16
_CLIP, _NOISE, _RATE = 1.0, 1.0, 0.1

_OURS = ("bounded", "poisson", "fixed", "general")
_TFP_OPTIMIZERS = ("tfp_optimizer", "tfp_vectorized")
_TFP = ("tfp_sequential", *_TFP_OPTIMIZERS)
_KINDS = ("plain", *_OURS, "fit", *_TFP)
_OF_PEERS = ("fixed", "bounded")
_PEERS = {
    "opacus": ("peer_opacus_step.py", peers.OPACUS),
    "jax": ("peer_jax_step.py", peers.JAX_PRIVACY),
}
_FIT_EXAMPLES, _FIT_BATCH, _FIT_EPOCHS = 60_000, 1_024, 3
_AIMS = {"lora": 1.3, "lstm": 3.0}
_AIM, _AIM_FIT, _AIM_MEMORY = 1.6, 1.4, 1.4


def _model(name: str, kind: str, size: int) -> Any:
    """Returns a compiled model for a kind of step."""
    import tensorflow as tf

    reduction = "none" if kind in _TFP_OPTIMIZERS else "sum_over_batch_size"
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model = step_models.make(name)
    if kind == "plain":
        model.compile(tf.keras.optimizers.SGD(_RATE), loss=loss, jit_compile=False)
        return model
    if kind in _OURS:
        from bandmf_tf import keras as private_keras
        from bandmf_tf.factorization import strategies

        factors = 1.0 - 0.5 / np.arange(1, _NUM_BANDS)  # The square root of the prefix sums.
        coefficients = np.cumprod(np.concatenate([[1.0], factors]))
        strategy = strategies.ToeplitzStrategy(coefficients, _NUM_ROUNDS)
        model = private_keras.make_private(model)
        model.use_layer_formulas = kind != "general"
        mechanism = private_keras.BareMechanism(strategy, _NOISE, _CLIP)
        model.compile(private_keras.SGD(mechanism, _RATE, batch_size=size), loss=loss)
        return model
    import tensorflow_privacy as tfp

    if kind == "tfp_sequential":
        clipping = {"l2_norm_clip": _CLIP, "noise_multiplier": _NOISE}
        model = tfp.DPSequential(layers=model.layers, **clipping)
        optimizer = tf.keras.optimizers.SGD(_RATE)
    else:
        prefix = "Vectorized" if kind == "tfp_vectorized" else ""
        optimizer = getattr(tfp, f"{prefix}DPKerasSGDOptimizer")(
            _CLIP, _NOISE, num_microbatches=size, learning_rate=_RATE
        )
    model.compile(optimizer, loss=loss)
    return model


def _step(name: str, kind: str) -> Callable[[], object]:
    """Returns a function that takes one compiled training step, already traced."""
    import tensorflow as tf

    size = step_models.BATCH_SIZES[name]
    data = step_models.examples(name, _BATCHES * size)
    model = _model(name, kind, size)
    if kind in _OURS:
        from bandmf_tf.keras import make_batches

        dataset = make_batches(data, _scheme(kind, size, len(data[1]))).dataset()
        model.check_examples(next(iter(dataset)))
    else:
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(size).repeat()
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    batches = iter(dataset)
    train = model.make_train_function()
    train = model.train_function if train is None else train  # Keras 3 returns nothing.
    for _ in range(2):
        train(batches)
    return lambda: train(batches)


def _fit(name: str, kind: str) -> Callable[[], object]:
    """Returns a function that fits a model for some epochs; its first call traces as well."""
    from bandmf_tf.keras import make_batches

    data = step_models.examples(name, _FIT_EXAMPLES)
    if kind == "plain":
        model = _model(name, kind, _FIT_BATCH)
        return functools.partial(model.fit, *data, _FIT_BATCH, _FIT_EPOCHS, verbose=0)
    model = _model(name, "bounded", _FIT_BATCH)
    batches = make_batches(data, _scheme("bounded", _FIT_BATCH, _FIT_EXAMPLES))
    steps = ceil_div(_FIT_EXAMPLES, _FIT_BATCH)
    return functools.partial(
        model.fit, batches, epochs=_FIT_EPOCHS, steps_per_epoch=steps, verbose=0
    )


def _scheme(kind: str, batch_size: int, dataset_size: int) -> SamplingScheme:
    schemes: dict[str, Callable[..., SamplingScheme]] = {
        "bounded": BoundedPoissonSampling.from_sizes,
        "poisson": PoissonSampling.from_sizes,
    }
    make = schemes.get(kind, FixedSizeSampling)
    return make(_NUM_ROUNDS, 1, batch_size, dataset_size)


def _run(model: str, kind: str, repetitions: int, is_fit: bool = False) -> dict[str, float]:
    """Measures one kind of step, or of `fit`, in this process."""
    import tensorflow as tf

    tf.constant(0.0)
    return measure(functools.partial(_fit if is_fit else _step, model), kind, repetitions)


def _in_process(command: list[str], case: dict[str, Any], **environment: str) -> dict[str, Any]:
    outcome = subprocess.run(
        [*command, json.dumps(case)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{case} ended with {outcome.returncode}: {outcome.stderr[-500:]}")
    return json.loads(outcome.stdout.strip().splitlines()[-1])


def _measure(
    command: list[str],
    case: dict[str, Any],
    who: str,
    with_memory: bool,
) -> dict[str, Any]:
    """Returns one row, and prints it."""
    if case["kind"] in (*_TFP_OPTIMIZERS, "fit"):
        case = {**case, "repetitions": max(1, case["repetitions"] // 10)}
    model, kind = case["model"], case["kind"]
    others = OtherWork()
    row = _in_process(command, case)
    row |= {"ratio": row["private"] / row["plain"], "load": others.mark()}
    memory = ""
    if with_memory:
        plain, private = (
            _in_process(command, {**case, "kind": f"{alone}_alone", "repetitions": 3})
            for alone in ("plain", kind)
        )
        row |= {
            "memory": private["step_gib"],
            "plain_memory": plain["step_gib"],
            "memory_ratio": private["step_gib"] / plain["step_gib"],
            "peak_ratio": private["peak_gib"] / plain["peak_gib"],
        }
        memory = (
            f"memory {row['memory']:.2f} of {row['plain_memory']:.2f} GiB, ratio "
            f"{row['memory_ratio']:.2f} ({row['peak_ratio']:.2f} of the process); "
        )
    print(
        f"{who:<9} {model:<12} {kind:<15} {row['private']:7.3f} s, plain {row['plain']:7.3f} s, "
        f"ratio {row['ratio']:6.2f}; {memory}{row['load']}"
        f"{_missed(who, model, kind, row)}",
        flush=True,
    )
    return {"who": who, "model": model, "kind": kind, **row}


def _missed(who: str, model: str, kind: str, row: dict[str, float]) -> str:
    aim = _AIM_FIT if kind == "fit" else _AIMS.get(model, _AIM)
    # A CNN on Keras 2 is judged by nothing: its ratio scatters as the host's cache does.
    has_aim = model != "cnn" or importlib.metadata.version("keras") >= "3"
    over = [f"{aim:g} in time"] if has_aim and row["ratio"] > aim else []
    over += [f"{_AIM_MEMORY:g} in memory"] if row.get("peak_ratio", 0.0) > _AIM_MEMORY else []
    return f"; over {' and '.join(over)}" if over and who == "bandmf_tf" else ""


def _print_onednn(command: list[str], model: str, repetitions: int) -> None:
    """Prints the plain step without and with oneDNN, each in a process where nothing else runs."""
    case = {"model": model, "kind": "plain_alone", "repetitions": repetitions}
    off, on = (_in_process(command, case, **{_onednn.SWITCH: s})["plain"] for s in "01")
    print(
        f"plain     {model:<12} without oneDNN {off:.3f} s, with it {on:.3f} s, ratio "
        f"{off / on:.2f}",
        flush=True,
    )


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    models = list(step_models.BATCH_SIZES)
    flags.DEFINE_list("models", models, f"Some of {', '.join(models)}.", **where)
    flags.DEFINE_list("kinds", ["bounded", "fixed"], f"Some of {', '.join(_KINDS)}.", **where)
    flags.DEFINE_list("peers", [], f"Some of {', '.join(_PEERS)}.", **where)
    flags.DEFINE_boolean("memory", True, "Measures memory as well.", **where)
    flags.DEFINE_integer(
        "cores", 1, "Cores of every process; 0: all there are.", lower_bound=0, **where
    )
    flags.DEFINE_boolean("onednn", False, "Times the plain step with oneDNN as well.", **where)
    flags.DEFINE_integer(
        "repetitions",
        32,
        "Timed steps; of TFP's optimizers and of fits a tenth.",
        lower_bound=1,
        **where,
    )
    flags.DEFINE_string("output", None, "CSV file for the results.", **where)
    flags.DEFINE_string("worker", None, "Internal: one measurement, as JSON.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _compare(values: flags.FlagValues) -> int:
    if values.worker:
        print(json.dumps(_run(**json.loads(values.worker))))
        return 0
    for name, known in (("models", step_models.BATCH_SIZES), ("kinds", _KINDS), ("peers", _PEERS)):
        unknown = [entry for entry in getattr(values, name) if entry not in known]
        if unknown:
            raise UsageError(f"{name} must be some of {', '.join(known)}. Found {unknown[0]!r}.")
    if values.cores:  # Processes that are started have the same.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-values.cores :])
    ours = [sys.executable, "-m", "benchmarks.keras_step", "--worker"]
    rows = []
    for model in values.models:
        if model == "lora" and not _has_lora():
            print("LoRA is of Keras 3.", file=sys.stderr)
            continue
        for kind in values.kinds:
            case = {"model": model, "kind": kind, "repetitions": values.repetitions}
            case["is_fit"] = kind == "fit"
            rows.append(_measure(ours, case, "bandmf_tf", values.memory))
        if values.onednn:
            _print_onednn(ours, model, values.repetitions)
    for peer in values.peers:
        script, requirement = _PEERS[peer]
        python = peers.peer_python(requirement)
        if python is not None:
            command = [str(python), str(Path(__file__).parent / script)]
            for model in values.models:
                for kind in [kind for kind in values.kinds if kind in _OF_PEERS]:
                    size = step_models.BATCH_SIZES[model]
                    most = BoundedPoissonSampling.from_sizes(_NUM_ROUNDS, 1, size, _BATCHES * size)
                    case = {"model": model, "kind": kind, "repetitions": values.repetitions}
                    case["max_batch_size"] = most.max_batch_size
                    rows.append(_measure(command, case, peer, values.memory))
    write_rows(values.output, rows)
    return 0


def _has_lora() -> bool:
    import tensorflow as tf

    return hasattr(tf.keras.layers.Dense, "enable_lora")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status."""
    return run_program("keras_step", f"{__doc__}\nFlags:", _define(), _compare, argv)


if __name__ == "__main__":
    sys.exit(main())
