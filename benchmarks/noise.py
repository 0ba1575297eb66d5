"""What correlated noise costs: the stream against independent noise and against jax-privacy.

    python -m benchmarks.noise                # all sizes that fit into memory, with the peer
    python -m benchmarks.noise --quick        # a minute, no peer

Every case runs in a process of its own: rows of `tf.random.normal` and of the stream in turns, in a
`tf.function`. A stream makes rows in blocks, so its time is that of whole blocks divided by their
length. Shown are the fastest repetition and, in brackets, the median; other work on the machine
slows down both sides but not evenly, so read ratios. CPU seconds count all threads. Memory is the
peak of the process above what it had with TensorFlow loaded, when the stream has made as many rows
as it keeps and before any independent noise. Rows "on disk" are those of a server program, which
has its chunks in the files of its checkpoints: their time includes writing them and is shown by its
parts, independent noise standing for white noise, and memory is what the kernel could not take back
after any row. How fast cores hand over memory to each other is shown because noise depends on it.

The peer, `jax-privacy` 2.0.0, is installed into its own environment. It adds a row of the same
strategy to a gradient of zeros, compiled, with its state donated so that it may work in place.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from bandmf_tf._numbers import ceil_div
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder, LargeArray
from benchmarks import load, peers
from benchmarks.rows import write_rows

_DIMENSIONS = (100_000, 2_400_000, 25_000_000, 100_000_000)

_QUICK = flags.DEFINE_bool("quick", False, "Small sizes only, without the peer.")
_PEER = flags.DEFINE_bool("peer", True, "Measure jax-privacy as well.")
_DIMENSION = flags.DEFINE_enum(
    "dimension", None, [str(d) for d in _DIMENSIONS], "Measure this dimension only."
)
_STRATEGIES = flags.DEFINE_list("strategies", None, "Measure these only: 128, tree, blt 4 ..")
_OUTPUT = flags.DEFINE_string("output", None, "CSV file for the results.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 3, "Blocks measured in each case.")
_FOLDER = flags.DEFINE_string("folder", None, "Where files are written, for a while.")
_WORKER = flags.DEFINE_string("worker", None, "Internal: one measurement, as JSON.")

_PEER_PROGRAM = pathlib.Path(__file__).with_name("peer_noise.py")

_NUM_ROUNDS = 2048
_TREE = "tree"
_BANDS = (1, 16, 64, 128, 400)
_BUFFERS = {f"blt {k}": k for k in (1, 2, 4)}
_MOST_BANDS = {100_000_000: 16}  # More do not fit into a machine that this is for.
_PEER_CASES = tuple((2_400_000, b) for b in (16, 64, 128, 400))
_ON_DISK_CASES = ((25_000_000, 128),)
_ROW_BY_ROW_CASES = tuple((2_400_000, b) for b in (64, 400))

# What an aim is about: (dimension, bands) -> at most this many times independent noise.
_AIMS = {(2_400_000, 64): 2.0, (2_400_000, 400): 4.0, (25_000_000, "blt 4"): 1.5}
_PEER_AIM = ((2_400_000, 128), 5.0)

# Part of the free memory that a case may need; the rest is for what else runs on the machine.
_USABLE = 0.6


def square_root_coefficients(num_bands: int) -> list[float]:
    """Returns the first coefficients of (1 - x)^(-1/2), a good strategy for prefix sums."""
    factors = 1.0 - 0.5 / np.arange(1, num_bands)
    return np.cumprod(np.concatenate([[1.0], factors])).tolist()


def _time(function: Callable[[], object], count: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        function()
    return {
        "seconds": (time.perf_counter() - wall) / count,
        "cpu_seconds": (time.process_time() - cpu) / count,
    }


def _handover() -> float:
    """Returns how fast a core writes what another has just written, in GB/s.

    Cores of a virtual machine share a cache at some times and at others do not, and what TensorFlow
    makes in several steps, each divided among cores, takes longer when they do not.
    """
    values, cores, seconds = np.zeros(3 << 20, np.uint8), os.sched_getaffinity(0), []
    for k in range(30):
        for core in cores:
            os.sched_setaffinity(0, {core})  # Of this thread alone.
            start = time.perf_counter()
            values.fill(k)
            seconds.append(time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    return values.size / float(np.median(seconds)) / 1e9


def _summary(samples: list[dict[str, float]], prefix: str = "") -> dict[str, float]:
    seconds = [sample["seconds"] for sample in samples]
    return {
        f"{prefix}seconds": min(seconds),
        f"{prefix}median_seconds": float(np.median(seconds)),
        f"{prefix}cpu_seconds": min(sample["cpu_seconds"] for sample in samples),
    }


def _run_ours(case: dict) -> dict:
    """Measures one case in this process."""
    import tensorflow as tf

    from bandmf_tf._memory import NotEnoughMemoryError
    from bandmf_tf.factorization import buffered, strategies, trees
    from bandmf_tf.noise import stream as noise_stream

    dimension = case["dimension"]
    if case["num_bands"] == _TREE:
        strategy: strategies.Strategy = trees.TreeStrategy(_NUM_ROUNDS)
    elif case["num_bands"] in _BUFFERS:
        k = _BUFFERS[case["num_bands"]]
        strategy = buffered.BufferedStrategy(
            np.linspace(0.99, 0.5, k), np.full(k, 0.8 / k), _NUM_ROUNDS
        )
    else:
        coefficients = np.array(square_root_coefficients(case["num_bands"]))
        strategy = strategies.ToeplitzStrategy(coefficients, _NUM_ROUNDS)
    tf.function(lambda: tf.random.normal([1000]))()
    others = load.OtherWork()
    before = _peak_gib()
    try:
        stream = noise_stream.NoiseStream(
            strategy,
            1.0,
            tf.TensorSpec([dimension]),
            block_length=case["block_length"],
            on_disk=bool(case["folder"]),
        )
    except NotEnoughMemoryError as error:
        return {"skipped": str(error).partition(";")[0]}
    block = stream.block_length
    next_row = tf.function(stream.next)
    anonymous, saving = [_status_gib("RssAnon")], [0.0]
    if case["folder"]:
        next_row = _saved_rows(stream, case["folder"], anonymous, saving)
    # Until then a part of the memory is zeros, which all tiles share.
    for _ in range(block * (ceil_div(strategy.rows_in_memory, block) + 1)):
        next_row()
    peak = max(anonymous) - anonymous[0] if case["folder"] else _peak_gib() - before
    independent = tf.function(lambda: tf.random.normal([dimension]))
    independent()
    own, other, saving[:] = [], [], []
    rows_at_once = block * ceil_div(8, block)
    handovers = [_handover()]
    for _ in range(case["repetitions"]):
        other.append(_time(independent, 8))
        own.append(_time(next_row, rows_at_once))
        handovers.append(_handover())
    return {
        "block_length": block,
        **_summary(own),
        **_summary(other, "independent_"),
        "saving_cpu_seconds": sum(saving) / max(len(saving), 1),
        "peak_gib": peak,
        "peak_rows": peak * 2**30 / stream.layout.row_bytes,
        "state_gib": stream.state_bytes / 2**30,
        "load": f"{others.mark()}, cores hand over {min(handovers):.0f} to "
        f"{max(handovers):.0f} GB/s",
    }


def _saved_rows(
    stream: Any, folder: str, anonymous: list[float], saving: list[float]
) -> Callable[[], object]:
    """Returns what takes a row and saves what changed, as a server program does.

    It notes memory after every row, and the CPU seconds that saving took.
    """
    checkpoints, numbers = CheckpointFolder(folder), itertools.count(1)

    def next_row() -> None:
        stream.next_in_graph()
        anonymous.append(_status_gib("RssAnon"))
        start = time.process_time()
        large = {c.variable.name: LargeArray(c.key, c.read, c.replace) for c in stream.chunks()}
        checkpoints.save(Checkpoint(next(numbers), {}, {}, large))
        checkpoints.remove_old()
        saving.append(time.process_time() - start)

    return next_row


def _status_gib(name: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{name}:"))


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _free_gib() -> float:
    lines = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def _measure(case: dict, python: str | None = None) -> dict:
    """Runs one case in a fresh process and returns what it reports."""
    if python is None:
        command = [sys.executable, "-m", "benchmarks.noise", f"--worker={json.dumps(case)}"]
    else:
        command = [python, str(_PEER_PROGRAM), json.dumps(case)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        return {"skipped": f"the process ended with {outcome.returncode}: {outcome.stderr[-300:]}"}
    return json.loads(outcome.stdout.strip().splitlines()[-1])


def _ours(
    dimension: int, num_bands: int | str, block_length: int | None = None, folder: str = ""
) -> dict:
    case = {
        "dimension": dimension,
        "num_bands": num_bands,
        "block_length": block_length,
        "repetitions": _REPETITIONS.value,
        "folder": folder,
    }
    who = "on disk" if folder else "bandmf_tf"
    row_by_row = block_length is not None
    return _reported({"who": who, "row_by_row": row_by_row, **case, **_measure(case)})


def _peer(dimension: int, num_bands: int, python: str) -> dict:
    # The state, its rolled copy, and rows in between.
    needed = (2 * num_bands + 8) * dimension * 4 / 2**30
    case = {
        "dimension": dimension,
        "coefficients": square_root_coefficients(num_bands),
        "repetitions": _REPETITIONS.value,
    }
    if needed > _USABLE * _free_gib():
        result = {"skipped": f"needs {needed:.1f} GiB and {_free_gib():.1f} GiB are free"}
    else:
        result = _measure(case, python)
    described = {"who": "jax-privacy", "dimension": dimension, "num_bands": num_bands}
    return _reported({**described, "block_length": 1, **result})


def _reported(row: dict) -> dict:
    """Adds ratios to a row, and prints it."""
    name = f"{row['who']:>11} d = {row['dimension']:>11,} b = {row['num_bands']!s:>5}"
    if "skipped" in row:
        print(f"{name}: skipped, {row['skipped']}.", flush=True)
        return row
    row["ratio"] = row["seconds"] / row["independent_seconds"]
    row["cpu_ratio"] = row["cpu_seconds"] / row["independent_cpu_seconds"]
    correlated, independent = (
        f"{row[f'{prefix}seconds']:.4f} s ({row[f'{prefix}median_seconds']:.4f})"
        for prefix in ("", "independent_")
    )
    print(
        f"{name} block {row['block_length']:>2}: {correlated}, independent {independent}, "
        f"ratio {row['ratio']:.2f} (CPU {row['cpu_ratio']:.2f}), {_parts(row)}"
        f"peak {row['peak_gib']:.2f} GiB, {row.get('peak_rows', math.nan):.1f} rows; "
        f"{row.get('load', '')}",
        flush=True,
    )
    return row


def _parts(row: dict) -> str:
    """Returns where the CPU seconds of a row that is saved go; nothing for one that is not."""
    saving, white = row.get("saving_cpu_seconds"), row["independent_cpu_seconds"]
    if not saving:
        return ""
    past = row["cpu_seconds"] - white - saving
    return f"CPU {white:.3f} s white noise, {past:.3f} s past rows, {saving:.3f} s saving, "


def _print_aims(rows: list[dict]) -> None:
    measured = [row for row in rows if "ratio" in row]
    ours = {
        (row["dimension"], row["num_bands"]): row
        for row in measured
        if row["who"] == "bandmf_tf" and not row["row_by_row"]
    }
    peer = {
        (row["dimension"], row["num_bands"]): row for row in measured if row["who"] == "jax-privacy"
    }
    for case, aim in _AIMS.items():
        if case in ours:
            print(
                f"d = {case[0]:,}, b = {case[1]}: {ours[case]['ratio']:.2f} times independent "
                f"noise (aim: at most {aim:g})"
            )
    for case, row in peer.items():
        if case in ours:
            factor = row["seconds"] / ours[case]["seconds"]
            cpu_factor = row["cpu_seconds"] / ours[case]["cpu_seconds"]
            aim = f" (aim: at least {_PEER_AIM[1]:g})" if case == _PEER_AIM[0] else ""
            print(
                f"d = {case[0]:,}, b = {case[1]}: {factor:.1f} times faster than the peer{aim}, "
                f"{cpu_factor:.1f} times less CPU"
            )


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}.")
    if _WORKER.value:
        print(json.dumps(_run_ours(json.loads(_WORKER.value))))
        return
    if _QUICK.value:
        rows = [_ours(100_000, b) for b in (1, 64)] + [_ours(2_400_000, 64)]
    else:
        rows = []
        python = peers.peer_python() if _PEER.value else None
        for d, b in itertools.product(_DIMENSIONS, (*_BANDS, _TREE, *_BUFFERS)):
            too_many = isinstance(b, int) and b > _MOST_BANDS.get(d, b)
            unwanted = _STRATEGIES.value is not None and str(b) not in _STRATEGIES.value
            if _DIMENSION.value not in (None, str(d)) or too_many or unwanted:
                continue
            rows.append(_ours(d, b))
            if (d, b) in _ROW_BY_ROW_CASES:
                rows.append(_ours(d, b, block_length=1))
            if (d, b) in _ON_DISK_CASES:
                with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
                    rows.append(_ours(d, b, folder=f"{folder}/secret"))
            if (d, b) in _PEER_CASES and python is not None:
                rows.append(_peer(d, int(b), str(python)))
    _print_aims(rows)
    write_rows(_OUTPUT.value, rows)


if __name__ == "__main__":
    app.run(main)
