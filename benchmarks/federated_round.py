"""Seconds of a federated round with BandMF against the same round with TFF's independent noise.

    python -m benchmarks.federated_round --bands=16,64,400 --buffers=2 --rounds=5
    python -m benchmarks.federated_round --lstm_units=1850 --bands=4 --clients=2 --rounds=3

A one-layer LSTM for next-word prediction with 2.4 million parameters, the size of the paper's
production model, or with 25 million (`--lstm_units=1850`), on a few clients with synthetic
sentences. Every kind of round is built once; then the kinds take turns, so that whatever else the
machine does hits all of them alike. The noise of BandMF and of BLTs comes from a stream in this
program (`BandMFFactory.from_stream`), which makes rows in blocks. "round" is TFF's part, "row" the
making of a row, as a mean over a whole block, "supply" putting it into the state, and "commit" the
checkpoint, ledger and released model of the production program, which TFF's own round is given as
well. A strategy's numbers do not matter for the time: strategies are not optimised.

"ratio" is the sum over that of the round with TFF's Gaussian aggregator in the same run; the aim is
below 1.3. On a busy machine the wall clock scatters; CPU time, of this program and of TFF's worker,
scatters less.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
import tensorflow as tf
import tree
from absl import app, flags

from bandmf_tf import _provenance
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import Strategy, ToeplitzStrategy, identity
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.federated import aggregators, runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import ledger
from bandmf_tf.runs.basis import SYSTEM
from bandmf_tf.runs.checkpoints import LargeArray
from bandmf_tf.runs.training_run import RoundResult, TrainingRun
from benchmarks import load

_BANDS = flags.DEFINE_list("bands", ["16", "64", "400"], "Numbers of bands.")
_BUFFERS = flags.DEFINE_list("buffers", ["2"], "Numbers of buffers of BLTs.")
_UNITS = flags.DEFINE_list("lstm_units", ["256"], "Widths of the LSTM; 256 has 2.4M parameters.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds of each kind.", lower_bound=1)
_CLIENTS = flags.DEFINE_integer("clients", 4, "Clients in a round.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Also write the numbers to this file.")

_VOCABULARY = 5_200
_EMBEDDING = 128
_WORDS = 20
_NUM_ROUNDS = 2_000
_PARTS = ("round", "supply", "row", "commit")


def _model(units: int) -> Callable[[], Any]:
    spec = tf.TensorSpec([None, _WORDS], tf.int32)

    def model_fn() -> Any:
        layers = tf.keras.layers
        keras_model = tf.keras.Sequential(
            [
                layers.Embedding(_VOCABULARY, _EMBEDDING, input_length=_WORDS),
                layers.LSTM(units, return_sequences=True),
                layers.Dense(_VOCABULARY),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tff.learning.models.from_keras_model(keras_model, loss, (spec, spec))

    return model_fn


def _data(client: int) -> tf.data.Dataset:
    words = np.random.default_rng(client).integers(_VOCABULARY, size=(8, _WORDS + 1))
    words = words.astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((words[:, :-1], words[:, 1:])).batch(8)


def _banded(num_bands: int) -> Strategy:
    k = np.arange(1, num_bands)
    return ToeplitzStrategy(np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k))), _NUM_ROUNDS)


def _buffered(num_buffers: int) -> Strategy:
    decays = 1.0 - 0.5 ** np.arange(10, 10 - num_buffers, -1)
    return BufferedStrategy(decays, np.full(num_buffers, 0.5 / num_buffers), _NUM_ROUNDS)


def _mechanism(strategy: Strategy) -> Mechanism:
    return Mechanism.create(
        strategy,
        prefix_sum(_NUM_ROUNDS),
        MinSeparation(400),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        delta=1e-10,
    )


def _start_run(folder: Path, mechanism: Mechanism) -> TrainingRun:
    header = ledger.LedgerHeader(
        run_id="benchmark",
        mechanism_checksum=mechanism_checksum(mechanism),
        num_rounds=_NUM_ROUNDS,
        clients_per_round=_CLIENTS.value,
        participation_recording=ledger.RECORDING_NONE,
        salt_id=None,
        clock=ledger.CLOCK_SIMULATED,
        timer_seconds=None,
        enforced_min_separation=None,
        enforced_max_participations=None,
        library_version=_provenance.version_of(),
        noise_source=SYSTEM,
    )
    return TrainingRun.start(folder, mechanism, {}, header)


class _Seconds(NamedTuple):
    """Time on the wall, and CPU time of this program and TFF's worker."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> _Seconds:
        here = psutil.Process()
        times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
        return cls(time.perf_counter(), sum(spent.user + spent.system for spent in times))

    def since(self, start: _Seconds, count: int = 1) -> _Seconds:
        return _Seconds((self.wall - start.wall) / count, (self.cpu - start.cpu) / count)


def _median(seconds: list[_Seconds]) -> _Seconds:
    return _Seconds(*(statistics.median(column) for column in zip(*seconds, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Times:
    """What a round took, part by part."""

    supply: _Seconds
    round: _Seconds
    commit: _Seconds


class _Round:
    """One kind of round, with the times that it took."""

    def __init__(self, name: str, units: int, mechanism: Mechanism, factory: Any, folder: Path):
        self.name = name
        self.times: list[_Times] = []
        self._process = tff.learning.algorithms.build_unweighted_fed_avg(
            _model(units),
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1, 0.95),
            model_aggregator=factory,
        )
        self._state = self._process.initialize()
        weights = self._state.global_model_weights.trainable
        self.num_parameters = sum(np.size(w) for w in weights)
        self._supply: aggregators.NoiseSupply | None = None
        if isinstance(factory, aggregators.BandMFFactory):
            specs = [tf.TensorSpec(np.shape(w), tf.float32) for w in weights]
            self._supply = aggregators.NoiseSupply(mechanism, specs)
        self._run = _start_run(folder, mechanism)

    def run(self, data: list[tf.data.Dataset]) -> None:
        before = _Seconds.now()
        if self._supply is not None:
            self._state = self._supply.supply(self._state)
        supplied = _Seconds.now()
        self._state = self._process.next(self._state, data).state
        computed = _Seconds.now()
        self._run.commit(self._result())
        committed = _Seconds.now().since(computed)
        self.times.append(_Times(supplied.since(before), computed.since(supplied), committed))

    def _result(self) -> RoundResult:
        chunks = [] if self._supply is None else self._supply.stream.chunks()
        weights = self._state.global_model_weights.trainable
        now = _provenance.format_time(datetime.datetime.now(datetime.UTC))
        return RoundResult(
            state={f"{i:04d}": np.asarray(a) for i, a in enumerate(tree.flatten(self._state))},
            model={f"{i:04d}": np.asarray(w) for i, w in enumerate(weights)},
            metrics={},
            start=now,
            end=now,
            client_ids=[str(client) for client in range(_CLIENTS.value)],
            large_state={
                f"{i:04d}": LargeArray(chunk.key, chunk.read, chunk.replace)
                for i, chunk in enumerate(chunks)
            },
        )

    def row(self) -> _Seconds:
        """Time of one row, averaged over a block."""
        if self._supply is None:
            return _Seconds(0.0, 0.0)
        stream = self._supply.stream
        before = _Seconds.now()
        for _ in range(stream.block_length):
            row = stream.next()
        row[0].numpy()
        return _Seconds.now().since(before, stream.block_length)


def _kinds(units: int, folder: Path) -> list[_Round]:
    clients = _CLIENTS.value
    mechanism = _mechanism(identity(_NUM_ROUNDS))
    factory: Any = aggregators.TffBaselineFactory(mechanism, clients_per_round=clients)
    kinds = [_Round("TFF Gaussian", units, mechanism, factory, folder / "gaussian")]
    named = {f"BandMF, {bands} bands": _banded(int(bands)) for bands in _BANDS.value}
    named |= {f"BLT, {buffers} buffers": _buffered(int(buffers)) for buffers in _BUFFERS.value}
    for name, strategy in named.items():
        mechanism = _mechanism(strategy)
        factory = aggregators.BandMFFactory.from_stream(mechanism, clients_per_round=clients)
        kinds.append(_Round(name, units, mechanism, factory, folder / name.replace(" ", "_")))
    return kinds


def _measure(units: int, folder: Path) -> list[dict[str, Any]]:
    """Runs all kinds of rounds in turns and prints a line for each."""
    data = [_data(client) for client in range(_CLIENTS.value)]
    kinds = _kinds(units, folder)
    for kind in kinds:  # The first round builds graphs.
        kind.run(data)
        kind.times.clear()
    for _ in range(_ROUNDS.value):
        for kind in kinds:
            kind.run(data)
    results = []
    baseline: dict[str, float] = {}
    for kind in kinds:
        # A round that makes a block of rows is rare: the median supply does not.
        parts = {
            name: _median([getattr(times, name) for times in kind.times])
            for name in ("round", "supply", "commit")
        }
        parts["row"] = kind.row()
        shown = f"{kind.num_parameters:>12,} {kind.name:<18} "
        found: dict[str, Any] = {"num_parameters": int(kind.num_parameters), "kind": kind.name}
        for clock in _Seconds._fields:
            seconds = {name: getattr(part, clock) for name, part in parts.items()}
            total = sum(seconds.values())
            ratio = total / baseline.setdefault(clock, total)
            shown += "".join(f"{seconds[name]:8.2f}" for name in _PARTS) + f"{ratio:7.2f}"
            found[clock] = {**seconds, "ratio": ratio}
        print(shown, flush=True)
        results.append(found)
    return results


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints a table."""
    app.define_help_flags()
    flags.FLAGS(list(sys.argv if argv is None else argv))
    runtime.set_local_context()
    results, others = [], load.OtherWork()
    head = "".join(f"{name:>8}" for name in _PARTS) + f"{'ratio':>7}"
    print(f"{'':32}{'seconds':>{len(head)}}{'CPU seconds':>{len(head)}}")
    print(f"{'parameters':>12} {'round':<18} {head}{head}", flush=True)
    for units in map(int, _UNITS.value):
        with tempfile.TemporaryDirectory() as folder:
            results += _measure(units, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this program {peak:.1f} GiB; {others.mark()}")
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
