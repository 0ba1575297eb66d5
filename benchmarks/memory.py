"""Peak memory of the production program, and seconds to its first commit, by size.

    python -m benchmarks.memory --parameters=240000,2400000 --bands=16,100,400

Every line is one run of `production.train_federated` on a model that is an embedding and a few
weights more. The program is killed at a commit and started again, so that a restart is measured as
well. Memory is the most that the kernel could not take back (RssAnon, looked at twenty times a
second), of the program and of TFF's worker apart; "buffer" is num_bands rows of noise, which no
banded mechanism can do without and which the program has in files, and "ratio" what the program
took beyond one that trains the same model with one band, over it.
The table in `production/README.md` is from this program. A strategy's numbers do not matter for
memory: strategies are Toeplitz, not optimised.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
from absl import flags

from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.folder import RunFolder
from benchmarks import load

_PARAMETERS = flags.DEFINE_list("parameters", ["240000"], "Numbers of parameters.")
_BANDS = flags.DEFINE_list("bands", ["400"], "Numbers of bands.")
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    66,
    "Rounds before the restart and after it; both starts make as many blocks, of up to 64 rounds.",
    lower_bound=1,
)
_FOLDER = flags.DEFINE_string("folder", None, "Where runs are written, for a while.")

# How `task`, which the production program calls, learns the size of the model.
_SIZE = "BANDMF_BENCHMARK_PARAMETERS"
_EMBEDDING = 16
_CLIENTS = 4


class Peak(NamedTuple):
    """What one start of the program took: bytes, and seconds to its first commit."""

    program: int
    worker: int
    seconds: float
    cpu: float


def task(config: Any) -> Any:
    """A task for the production program: an embedding of the size that the environment names."""
    import tensorflow as tf

    from bandmf_tf.federated.runtime import tff
    from bandmf_tf.simulation.tasks import FederatedTask

    words = int(os.environ[_SIZE]) // _EMBEDDING

    def dataset(client: int) -> tf.data.Dataset:
        draw = np.random.default_rng([config.population_seed, client])
        examples = draw.integers(words, size=(8, 4)), draw.integers(2, size=8)
        return tf.data.Dataset.from_tensor_slices(examples).batch(8)

    def model_fn() -> Any:
        layers = [
            tf.keras.layers.Embedding(words, _EMBEDDING, input_length=4),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(2),
        ]
        return tff.learning.models.from_keras_model(
            tf.keras.Sequential(layers),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            dataset(0).element_spec,
            metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        )

    return FederatedTask("embedding", "random", model_fn, dataset, dataset(-1 % 2**31))


def mechanism(num_bands: int, num_rounds: int = 2_000) -> Mechanism:
    """Returns a Toeplitz mechanism with so many bands."""
    k = np.arange(1, num_bands)
    decay = np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))
    return Mechanism.create(
        identity(num_rounds) if num_bands == 1 else ToeplitzStrategy(decay, num_rounds),
        prefix_sum(num_rounds),
        MinSeparation(max(num_bands, 2)),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        delta=1e-10,
    )


def run(folder: Path, file: Path, parameters: int, rounds: int) -> tuple[Peak, Peak]:
    """Trains `rounds` rounds, kills the program, trains as many again; returns both peaks."""
    command = [sys.executable, "-m", "production.train_federated", f"--mechanism={file}"]
    command += [f"--output={folder}", "--task=benchmarks.memory:task", "--availability=always"]
    command += [f"--num_rounds={2 * rounds}", f"--clients_per_round={_CLIENTS}"]
    command += [f"--num_clients={2 * rounds * _CLIENTS}", "--server_learning_rate=0.1"]
    command += [f"--publish_every={2 * rounds}", f"--evaluate_every={2 * rounds}"]
    environment = {**os.environ, _SIZE: str(parameters)}
    fresh = _watch([*command, f"--crash_at=old_removed:{rounds - 1}"], folder, environment)
    return fresh, _watch(command, folder, environment)


def _watch(command: list[str], folder: Path, environment: dict[str, str]) -> Peak:
    started, done = time.monotonic(), _records(folder)
    first: tuple[float, float] | None = None
    largest: dict[int, int] = collections.defaultdict(int)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as program:
        while program.poll() is None:
            processes = _tree(program.pid)
            for process in processes:
                largest[process.pid] = max(largest[process.pid], _peak(process.pid))
            if first is None and _records(folder) > done:
                times = [process.cpu_times() for process in processes if process.is_running()]
                first = time.monotonic() - started, sum(t.user + t.system for t in times)
            time.sleep(0.05)
        told = program.stderr.read() if program.stderr else ""
    if program.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"The program ended with exit code {program.returncode}: {told[-2000:]}")
    own = largest.pop(program.pid)
    return Peak(own, sum(largest.values()), *(first or (0.0, 0.0)))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        program = psutil.Process(pid)
        return [program, *program.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _peak(pid: int) -> int:
    """Returns the memory of a process that is no file's, 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kib = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return 1024 * sum(kib)


def _records(folder: Path) -> int:
    path = RunFolder(folder).ledger
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints a table."""
    flags.FLAGS(list(sys.argv if argv is None else argv))
    heads = (
        "parameters",
        "bands",
        "buffer",
        "start",
        "program",
        "worker",
        "ratio",
        "first commit",
        "its CPU",
    )
    print("".join(f"{head:>13}" for head in heads), flush=True)
    others = load.OtherWork()
    for parameters in map(int, _PARAMETERS.value):
        base: tuple[Peak, Peak] | None = None
        for bands in (1, *map(int, _BANDS.value)):
            with tempfile.TemporaryDirectory(dir=_FOLDER.value) as temporary:
                file = Path(temporary) / "mechanism.bandmf"
                save_mechanism(mechanism(bands), file)
                peaks = run(Path(temporary) / "run", file, parameters, _ROUNDS.value)
            base = base or peaks
            _print(parameters, bands, peaks, base)
    print(others.mark())
    return 0


def _print(parameters: int, bands: int, peaks: tuple[Peak, Peak], base: tuple[Peak, Peak]) -> None:
    buffer = 4 * parameters * bands
    for start, peak, without in zip(("fresh", "restart"), peaks, base, strict=True):
        ratio = (peak.program + peak.worker - without.program - without.worker) / buffer
        print(
            f"{parameters:>13,}{bands:>13}{buffer / 1e9:>10.2f} GB{start:>13}"
            f"{peak.program / 1e9:>10.2f} GB{peak.worker / 1e9:>10.2f} GB{ratio:>13.2f}"
            f"{peak.seconds:>11.1f} s{peak.cpu:>11.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
