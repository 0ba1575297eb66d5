"""Seconds of a federated round with BandMF against the same round with TFF's independent noise.

    python -m benchmarks.federated_round --bands=16,64,400 --rounds=5

A one-layer LSTM for next-word prediction with 2.4 million parameters, the size of the paper's
production model, on a few clients with synthetic sentences. Every kind of round is built once; then
the kinds take turns, so that whatever else the machine does hits all of them alike. The noise of
BandMF comes from a stream in this program (`BandMFFactory.from_stream`), which makes rows in
blocks. "round" is TFF's part, "row" the making of a row, as a mean over a whole block, and "supply"
putting it into the state. A strategy's numbers do not matter for the time: strategies are Toeplitz,
not optimised.

"ratio" is the sum of the three over the round with TFF's Gaussian aggregator in the same run; the
aim is below 1.5. On a busy machine the wall clock scatters; CPU time, of this program and of TFF's
worker, scatters less.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
import tensorflow as tf
from absl import app, flags

from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.federated import aggregators, runtime
from bandmf_tf.federated.runtime import tff
from bandmf_tf.mechanisms.mechanism import Mechanism

_BANDS = flags.DEFINE_list("bands", ["16", "64", "400"], "Numbers of bands.")
_UNITS = flags.DEFINE_list("lstm_units", ["256"], "Widths of the LSTM; 256 has 2.4M parameters.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds of each kind.", lower_bound=1)
_CLIENTS = flags.DEFINE_integer("clients", 4, "Clients in a round.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Also write the numbers to this file.")

_VOCABULARY = 5_200
_EMBEDDING = 128
_WORDS = 20


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


def _mechanism(num_bands: int) -> Mechanism:
    n = 2_000
    k = np.arange(1, num_bands)
    decay = np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))
    strategy = identity(n) if num_bands == 1 else ToeplitzStrategy(decay, n)
    return Mechanism.create(
        strategy,
        prefix_sum(n),
        MinSeparation(400),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        delta=1e-10,
    )


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


class _Round:
    """One kind of round, with the time that it took."""

    def __init__(self, name: str, model: Any, factory: Any, supply: Callable[[list], Any] | None):
        self.name = name
        self.rounds: list[_Seconds] = []
        self.supplies: list[_Seconds] = []
        self._process = tff.learning.algorithms.build_unweighted_fed_avg(
            model,
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1, 0.95),
            model_aggregator=factory,
        )
        self._state = self._process.initialize()
        weights = self._process.get_model_weights(self._state).trainable
        self.num_parameters = sum(np.size(w) for w in weights)
        specs = [tf.TensorSpec(np.shape(w), tf.float32) for w in weights]
        self._supply = None if supply is None else supply(specs)

    def run(self, data: list[tf.data.Dataset]) -> None:
        before = _Seconds.now()
        if self._supply is not None:
            self._state = self._supply.supply(self._state)
        supplied = _Seconds.now()
        self._state = self._process.next(self._state, data).state
        self.supplies.append(supplied.since(before))
        self.rounds.append(_Seconds.now().since(supplied))

    def forget(self) -> None:
        self.rounds.clear()
        self.supplies.clear()

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


def _kinds(units: int) -> list[_Round]:
    model, clients = _model(units), _CLIENTS.value
    baseline = aggregators.TffBaselineFactory(_mechanism(1), clients_per_round=clients)
    kinds = [_Round("TFF Gaussian", model, baseline, None)]
    for bands in map(int, _BANDS.value):
        mechanism = _mechanism(bands)
        factory = aggregators.BandMFFactory.from_stream(mechanism, clients_per_round=clients)
        kinds.append(
            _Round(
                f"BandMF, {bands} bands",
                model,
                factory,
                lambda specs, m=mechanism: aggregators.NoiseSupply(m, specs),
            )
        )
    return kinds


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints a table."""
    app.define_help_flags()
    flags.FLAGS(list(sys.argv if argv is None else argv))
    runtime.set_local_context()
    data = [_data(client) for client in range(_CLIENTS.value)]
    results = []
    print(f"{'':32}{'seconds':>24}{'':7}{'CPU seconds':>24}")
    head = f"{'round':>9}{'supply':>8}{'row':>7}{'ratio':>7}"
    print(f"{'parameters':>12} {'round':<18} {head}{head}", flush=True)
    for units in map(int, _UNITS.value):
        kinds = _kinds(units)
        for kind in kinds:  # The first round builds graphs.
            kind.run(data)
            kind.forget()
        for _ in range(_ROUNDS.value):
            for kind in kinds:
                kind.run(data)
        baseline = _median(kinds[0].rounds)
        for kind in kinds:
            # A round that makes a block of rows is rare: the median supply does not.
            parts = (_median(kind.rounds), _median(kind.supplies), kind.row())
            shown = f"{kind.num_parameters:>12,} {kind.name:<18} "
            found: dict[str, Any] = {"num_parameters": int(kind.num_parameters), "round": kind.name}
            for clock in _Seconds._fields:
                round_s, supply, row = (getattr(part, clock) for part in parts)
                ratio = (round_s + supply + row) / getattr(baseline, clock)
                shown += f"{round_s:9.2f}{supply:8.2f}{row:7.2f}{ratio:7.2f}"
                found[clock] = {"round": round_s, "supply": supply, "row": row, "ratio": ratio}
            print(shown, flush=True)
            results.append(found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this program {peak:.1f} GiB; load average {os.getloadavg()[0]:.1f}")
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
