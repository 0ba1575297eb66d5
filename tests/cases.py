"""What tests share: small mechanisms, runs and networks, and a full disk.

TensorFlow is imported by what needs it, so that tests of mathematics start at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bandmf_tf._provenance import format_time
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.cli.report import main
from bandmf_tf.factorization.buffered import optimize_buffered
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.participation import MinSeparation, Participation
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    Strategy,
    ToeplitzStrategy,
    inside_matrix,
)
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.mechanisms.spending import EpsilonSpent
from bandmf_tf.runs.ledger import LedgerHeader, LedgerWriter, Pseudonyms, RoundRecord
from bandmf_tf.runs.run_record import RunRecord, save_run_record

ROOT = Path(__file__).resolve().parents[1]
CHECKSUM = "ab" * 32


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system refuses longer files, after writing what fits: a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def random_banded(
    num_bands: int, num_rounds: int, seed: int = 0, spread: float = 1.0
) -> BandedStrategy:
    """Returns a strategy of both signs; a small spread keeps its inverse tame."""
    bands = spread * np.random.default_rng(seed).normal(size=(num_bands, num_rounds))
    bands[0] = 0.5 + np.abs(bands[0])
    return BandedStrategy(np.where(inside_matrix(num_bands, num_rounds), bands, 0.0))


def separated_patterns(n: int, b: int, k: int) -> Iterator[tuple[int, ...]]:
    """All patterns of b-min-separation with at most k participations."""
    for count in range(1, min(k, -(-n // b)) + 1):
        for pattern in itertools.combinations(range(n), count):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(pattern)):
                yield pattern


def make_mechanism(
    strategy: Strategy, participation: Participation | None = None, **changes: Any
) -> Mechanism:
    """Returns a mechanism for prefix sums; without a participation, with that of its sampling."""
    fields = {"noise_multiplier": 2.0, "l2_norm_clip": 1.0, "delta": 1e-5, **changes}
    participation = participation or changes["sampling"].participation
    return Mechanism.create(strategy, prefix_sum(strategy.num_rounds), participation, **fields)


def ledger_header(**changes: Any) -> LedgerHeader:
    fields = {
        "run_id": "test",
        "mechanism_checksum": CHECKSUM,
        "num_rounds": 10,
        "clients_per_round": 3,
        "participation_recording": "none",
        "salt_id": None,
        "clock": "simulated",
        "timer_seconds": None,
        "enforced_min_separation": None,
        "enforced_max_participations": None,
        "library_version": "0",
        "noise_source": "system",
    }
    return LedgerHeader(**{**fields, **changes})


def round_record(number: int, **changes: Any) -> RoundRecord:
    """Returns the record of a round of half a minute; one starts every minute."""
    midnight = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    start = midnight + datetime.timedelta(minutes=number)
    fields = {
        "round": number,
        "start": format_time(start),
        "end": format_time(start + datetime.timedelta(seconds=30)),
        "num_participants": 3,
        "mechanism_checksum": CHECKSUM,
        "model_digest": f"{number:064x}",
    }
    return RoundRecord(**{**fields, **changes})


# Runs and logs for privacy reports.

N, B, K = 24, 6, 4
# Much noise: accounting takes time in proportion to the privacy loss.
NOISE = 8.0
MODEL = b"a model"
# What --json promises.
KEYS = {
    "min_separation",
    "max_participations",
    "rounds_completed",
    "sensitivity",
    "sensitivity_kind",
    "rho",
    "epsilon",
    "delta",
    "adjacency",
}


def planned_mechanism(noise_multiplier: float = NOISE, *, kind: str = "banded") -> Mechanism:
    """Returns the same mechanism for the same arguments, however they are given."""
    return _planned_mechanism(noise_multiplier, kind)


@functools.cache
def _planned_mechanism(noise_multiplier: float, kind: str) -> Mechanism:
    participation = MinSeparation(B, K)
    strategy: Strategy = optimize_banded(prefix_sum(N), B).strategy
    if kind == "blt":
        strategy = optimize_buffered(prefix_sum(N), 2, participation).strategy
    common = {"noise_multiplier": noise_multiplier, "l2_norm_clip": 0.5, "delta": 1e-6}
    return make_mechanism(strategy, participation, **common)


def write_log(folder: Path) -> Path:
    path = folder / "log.csv"
    rows = [f"secret-{i % B},{i}" for i in range(N)]
    path.write_text("client,round\n" + "\n".join(rows) + "\n")
    return path


def make_run(
    folder: Path,
    *,
    pseudonymous: bool = True,
    rounds: int = N,
    liar: bool = False,
    kind: str = "banded",
    **header,
) -> Path:
    (folder / "released").mkdir(parents=True)
    (folder / "released" / f"model_{rounds:06d}.npz").write_bytes(MODEL)
    save_mechanism(planned_mechanism(kind=kind), folder / "mechanism.bandmf")
    checksum = mechanism_checksum(planned_mechanism(kind=kind))
    pseudonyms = Pseudonyms.create(folder / "salt") if pseudonymous else None
    fields = {
        "mechanism_checksum": checksum,
        "num_rounds": N,
        "clients_per_round": 1,
        "participation_recording": "pseudonymous" if pseudonymous else "none",
        "salt_id": pseudonyms.salt_id if pseudonyms else None,
        **header,
    }
    with LedgerWriter.create(folder / "ledger.jsonl", ledger_header(**fields)) as writer:
        for i in range(rounds):
            writer.append(
                round_record(
                    i,
                    num_participants=1,
                    mechanism_checksum=checksum,
                    model_digest=hashlib.sha256(MODEL).hexdigest(),
                    participants=pseudonyms
                    and pseudonyms.of(["secret-liar" if liar and i < 2 else f"secret-{i % B}"]),
                )
            )
    return folder


@functools.cache
def sampled_mechanism() -> Mechanism:
    strategy = planned_mechanism().strategy
    common = {"noise_multiplier": NOISE, "l2_norm_clip": 0.5, "delta": 1e-6}
    return make_mechanism(strategy, sampling=PoissonSampling(N, B, 0.1), **common)


def run_record(**changes: object) -> RunRecord:
    mechanism = sampled_mechanism()
    rounds = int(changes.get("rounds_completed", N))  # type: ignore[call-overload]
    record = RunRecord(
        mechanism_checksum=mechanism_checksum(mechanism),
        num_rounds=N,
        rounds_completed=N,
        sampling=mechanism.sampling,
        sampling_basis="enforced",
        batch_size=8.0,
        batch_sizes_seen={"smallest": 3, "largest": 12, "mean": 8.1},
        noise_multiplier=NOISE,
        l2_norm_clip=0.5,
        microbatch_size=1,
        accumulation_steps=1,
        epsilon=EpsilonSpent(mechanism)(rounds),
        delta=mechanism.delta,
        adjacency="zero-out",
        started="2024-01-01T00:00:00Z",
        finished="2024-01-01T00:01:00Z",
        noise_source="system",
    )
    return dataclasses.replace(record, **changes)


def keras_run(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    save_mechanism(sampled_mechanism(), folder / "mechanism.bandmf")
    save_run_record(run_record(**changes), folder / "record.json")
    return folder


def last_of_each(arguments: Iterable[object]) -> list[str]:
    """Returns the flags without those that a later one of the same name replaces."""
    found: dict[str, str] = {}
    for flag in map(str, arguments):
        name = flag.partition("=")[0]
        found.pop(name, None)
        found[name] = flag
    return list(found.values())


def verify(report: Path) -> tuple[str, str]:
    """Returns the flags that verify a report whose evidence is in the folder above its own."""
    return f"--verify={report}", f"--evidence_root={report.parents[1]}"


def number_places(entry: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yields where numbers stand in a report, but for what was asked for and its version."""
    if isinstance(entry, dict | list):
        for name, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
            if name not in ("request", "version"):
                yield from number_places(value, (*place, name))
    elif isinstance(entry, int | float) and not isinstance(entry, bool):
        yield place


# A facts file that leaves no question open, and says nothing that the runs here contradict.
FACTS = """\
model: next word prediction, en-GB
owner: Example Ltd
contact: privacy@example.org
period: {first: 2024-01-01, last: 2024-01-01}
tuning: 12 runs on public text
pretraining_data: public web text
secure_aggregation: no
randomness: system
code_commit: 5f2bc232aacdfb7b
purpose: Suggest the next word
data: What was typed on one device
region: Worldwide
sector: Technology
data_source: Dynamic
actors: The server is trusted; whoever has the model is not
justification: Devices cannot be sampled
further_use: Every season, from the same devices.
published_at: https://example.org/privacy
author: A. Author
"""


def run_tool(*arguments: object) -> int:
    return main(["bandmf-report", *map(str, arguments)])


def refused(capsys, *arguments: object, status: int = 2) -> str:
    """Runs the tool, which must fail with one sentence, and returns that."""
    assert run_tool(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bandmf-report: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


# A mechanism, data set and network for Keras.

NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE = 12, 3, 6, 60
NOISE_SEED, SAMPLING_SEED = 5, 2

SCHEME = PoissonSampling.from_sizes(NUM_ROUNDS, NUM_PARTS, BATCH_SIZE, DATASET_SIZE)
STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5, 0.3]), NUM_ROUNDS)
MECHANISM = make_mechanism(STRATEGY, sampling=SCHEME, l2_norm_clip=0.7)

_rng = np.random.default_rng(0)
X = _rng.normal(size=(DATASET_SIZE, 4)).astype(np.float32)
Y = _rng.integers(0, 3, DATASET_SIZE)


def classification_loss():
    import tensorflow as tf

    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    """Returns a plain model, with the same initial weights every time."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [layers.Input((4,)), layers.Dense(5, activation="relu"), layers.Dense(3)]
    )


def batches(pinned_seed=SAMPLING_SEED):
    from bandmf_tf.keras import make_batches

    return make_batches((X, Y), MECHANISM, pinned_seed=pinned_seed)


def private_model(optimizer="SGD", loss=None, pinned_seed=NOISE_SEED, model=None, **options):
    """Returns a compiled private model."""
    from bandmf_tf import keras as private_keras

    compile_options = {
        name: options.pop(name)
        for name in ("run_eagerly", "metrics", "steps_per_execution", "jit_compile")
        if name in options
    }
    model = private_keras.make_private(network() if model is None else model)
    make = getattr(private_keras, optimizer) if isinstance(optimizer, str) else optimizer
    options.setdefault("learning_rate", 0.1)
    options.setdefault("batch_size", BATCH_SIZE)
    options.setdefault("mechanism", MECHANISM)
    loss = classification_loss() if loss is None else loss
    model.compile(make(pinned_seed=pinned_seed, **options), loss=loss, **compile_options)
    return model


def zero_loss(y, y_pred):
    """A loss without gradients, so that all that moves the weights is noise."""
    import tensorflow as tf

    del y
    return 0.0 * tf.reduce_sum(y_pred, axis=-1)


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


def noise_rows(variables, num_rows=NUM_ROUNDS, pinned_seed=NOISE_SEED):
    """Returns the rows of C^-1 z that belong to variables, `[rows, all their values]`."""
    import tensorflow as tf

    from bandmf_tf.noise.stream import NoiseStream

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    stream = NoiseStream(STRATEGY, MECHANISM.stddev, specs, pinned_seed=pinned_seed)
    return np.array([flat(stream.next()) for _ in range(num_rows)])


def running(pids: Iterable[int]) -> list[int]:
    """Returns those of the processes that run; ended ones may wait for a parent that never asks."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # It may end while it is looked at.
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def all_end(pids: Sequence[int]) -> bool:
    """Waits for processes to end, which a busy machine may take a while to do."""
    deadline = time.monotonic() + 300
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(pids)
