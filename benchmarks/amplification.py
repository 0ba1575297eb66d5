"""What sampling gains: certified epsilon by scheme, and the error that two rows of noise reach.

    python -m benchmarks.amplification            # both tables, some ten minutes
    python -m benchmarks.amplification --quick    # two minutes

Table 1: epsilon of the same strategy and noise by how batches are drawn, at the paper's sizes:
CIFAR-10, 50,000 examples and batches of 500, and StackOverflow, 342,477 users and 1,001 a round,
with the bands of its table and the noise that cyclic sampling needs for its epsilon. The cyclic
figure, which everything is compared with, composes Gaussian sums over Poisson samples of parts of
equal size that everybody knows; `jax-privacy` has an accountant for that one alone, which runs in
its own environment. A certificate comes with an estimate of the delta that its epsilon really has:
where that is close to delta, no accounting of the same scheme can be much better.

Table 2: error of prefix sums with a noise of certified epsilon, balls-in-bins with a BLT, against
the best number of bands with cyclic Poisson sampling.

CPU seconds are those of one thread, for the certificate with its pilot; in table 2, for strategy
and calibration.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator

from absl import app, flags

from bandmf_tf.accounting import PoissonSampling, certificates, gaussian_epsilon
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
)
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import buffered, optimization, workloads
from bandmf_tf.factorization.error import squared_error
from bandmf_tf.factorization.participation import FixedEpochs
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.planning.bins import optimize_buffered_in_bins
from benchmarks import peers
from benchmarks.rows import write_rows

_QUICK = flags.DEFINE_bool("quick", False, "Fewer rows.")
_DELTA = flags.DEFINE_float("delta", 1e-6, "Delta of the first table.")
_PEER = flags.DEFINE_bool("peer", True, "Run jax-privacy's accountant as well.")
_OUTPUT = flags.DEFINE_string("output", None, "CSV file for the results.")

_CIFAR = 500 / 50_000
_STACKOVERFLOW = 1001 / 342_477
_STACKOVERFLOW_BANDS = ((8.0, 64), (4.0, 32), (2.0, 18), (1.0, 9))

_PEER_PROGRAM = pathlib.Path(__file__).with_name("peer_accounting.py")


def _timed(compute: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    return compute(), time.process_time() - start


def _schemes(
    num_rounds: int, num_bands: int, rate: float
) -> Iterator[tuple[str, RandomParticipation]]:
    yield "balls in bins", BallsInBins(num_rounds, round(1 / rate))
    yield "secret parts", SecretParts(num_rounds, num_bands, num_bands * rate)
    yield "b-min-sep", MinSeparationSampling.from_rate(num_rounds, num_bands, rate)
    if not _QUICK.value:
        separation = min(4 * num_bands, round(0.5 / rate))
        scheme = MinSeparationSampling.from_rate(num_rounds, separation, rate)
        yield f"b-min-sep, b = {separation}", scheme
    yield "once per epoch", OncePerEpoch(num_rounds, num_bands, round(1 / rate))


def _peer(setting: dict, rate: float) -> dict | None:
    """Returns what jax-privacy makes of cyclic Poisson sampling; None where it does not install."""
    python = peers.peer_python()
    if python is None:
        return None
    case = {**setting, "probability": setting["bands"] * rate}
    command = [str(python), str(_PEER_PROGRAM), json.dumps(case)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(outcome.stdout)


def _noise_of(num_rounds: int, num_bands: int, rate: float, epsilon: float) -> float:
    """Returns the noise of cyclic Poisson sampling for an epsilon, for columns of norm 1."""
    scheme = PoissonSampling(num_rounds, num_bands, num_bands * rate)
    return scheme.noise_multiplier(epsilon, _DELTA.value, num_bands=num_bands, max_column_norm=1.0)


def _by_scheme(num_rounds: int, num_bands: int, noise: float, rate: float) -> Iterator[dict]:
    """Yields epsilon of one strategy, of column norm 1, under every scheme."""
    delta = _DELTA.value
    workload = workloads.prefix_sum(num_rounds)
    strategy = optimization.optimize_banded(workload, num_bands).strategy
    strategy = strategy.scaled(1 / float(strategy.column_norms().max()))
    setting = {"n": num_rounds, "bands": num_bands, "noise": noise, "delta": delta}

    fixed = FixedEpochs(round(1 / rate), math.ceil(num_rounds * rate))
    sensitivity = fixed.sensitivity(strategy).value
    plain, seconds = _timed(lambda: gaussian_epsilon(noise, sensitivity, delta))
    yield {**setting, "scheme": "fixed order", "epsilon": plain, "cpu_seconds": seconds}

    poisson = PoissonSampling(num_rounds, num_bands, num_bands * rate)
    cyclic, seconds = _timed(
        lambda: poisson.epsilon(noise, delta, num_bands=num_bands, max_column_norm=1.0)
    )
    yield {**setting, "scheme": "cyclic Poisson", "epsilon": cyclic, "cpu_seconds": seconds}
    if _PEER.value and (peer := _peer(setting, rate)):
        yield {**setting, "scheme": "cyclic Poisson, jax-privacy 2.0.0", **peer}

    for name, scheme in _schemes(num_rounds, num_bands, rate):
        try:
            certificate, seconds = _timed(
                lambda scheme=scheme: scheme.certificate(strategy, noise, delta)
            )
        except BandMFError as refused:
            print(f"{name}: {refused}", flush=True)
            continue
        make = scheme.replicas(strategy)
        bound = certificates.epsilon_bound(make(noise, certificate.order), delta)
        yield {
            **setting,
            "scheme": name,
            "epsilon": certificate.epsilon,
            "to_cyclic": certificate.epsilon / cyclic - 1,
            "without_samples": bound,
            "cpu_seconds": seconds,
            "failure_probability": certificate.failure_probability,
            "samples": certificate.samples,
            "order": certificate.order,
            "estimated_delta": certificate.estimate,
        }


def _rmse(strategy: Strategy, noise: float) -> float:
    workload = workloads.prefix_sum(strategy.num_rounds)
    return noise * math.sqrt(squared_error(workload, strategy) / strategy.num_rounds)


def _two_rows(epsilon: float) -> Iterator[dict]:
    """Yields the error at one epsilon, eight epochs of 256 rounds, delta 1e-5."""
    n, b, delta = 2048, 256, 1e-5
    workload = workloads.prefix_sum(n)
    setting = {"n": n, "epsilon": epsilon, "delta": delta}
    best, best_bands, start = math.inf, 0, time.process_time()
    for bands in (2**i for i in range(9)):
        strategy = optimization.optimize_banded(workload, bands).strategy
        scheme = PoissonSampling(n, bands, bands / b)
        norm = float(strategy.column_norms().max())
        noise = scheme.noise_multiplier(epsilon, delta, num_bands=bands, max_column_norm=norm)
        if _rmse(strategy, noise) < best:
            best, best_bands = _rmse(strategy, noise), bands
    yield {
        **setting,
        "scheme": "banded, cyclic Poisson",
        "rows": best_bands - 1,
        "rmse": best,
        "cpu_seconds": time.process_time() - start,
    }
    bins = BallsInBins(n, b)
    in_order = {
        d: buffered.optimize_buffered(workload, d, bins.participation).strategy for d in (1, 2)
    }
    cases = [("BLT of a fixed order, balls in bins", 1, lambda: in_order[1])]
    cases.append(("BLT of a fixed order, balls in bins", 2, lambda: in_order[2]))
    for d in (1, 2):
        make = functools.partial(optimize_buffered_in_bins, workload, d, bins, epsilon, delta)
        cases.append(("BLT of its own, balls in bins", d, make))
    for name, buffers, make in cases:
        start = time.process_time()
        strategy = make()
        noise, certificate = bins.noise_multiplier(strategy, epsilon, delta)
        seconds = time.process_time() - start
        yield {
            **setting,
            "scheme": name,
            "rows": buffers,
            "rmse": _rmse(strategy, noise),
            "noise": noise,
            "cpu_seconds": seconds,
            "failure_probability": certificate.failure_probability,
            "samples": certificate.samples,
            "order": certificate.order,
        }


def _show(row: dict) -> None:
    if "rmse" in row:
        figure = f"epsilon {row['epsilon']:g}: RMSE {row['rmse']:7.4f}, {row['rows']:>3} rows"
    else:
        figure = f"{row['bands']} bands, noise {row['noise']:g}: epsilon {row['epsilon']:7.4f}"
    more = f" ({row['to_cyclic']:+.1%} of cyclic)" if "to_cyclic" in row else ""
    if row.get("samples"):
        more += (
            f", confidence 1 - {row['failure_probability']:g}, {row['samples']:,} samples of order "
            f"{row['order']}"
        )
    if row.get("estimated_delta"):
        more += f", delta about {row['estimated_delta']:.3g}"
    if "without_samples" in row:
        more += f", {row['without_samples']:.4f} without samples"
    print(
        f"n = {row['n']}, delta {row['delta']:g}, {figure}, {row['scheme']}{more}, "
        f"{row['cpu_seconds']:.1f} CPU s, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments {argv[1:]}.")
    rows: list[dict] = []

    def keep(more: Iterator[dict]) -> None:
        for row in more:
            _show(row)
            rows.append(row)

    keep(_by_scheme(2000, 10, 1.0, _CIFAR))
    keep(_by_scheme(1000, 20, 2.0, _CIFAR))
    for epsilon, bands in _STACKOVERFLOW_BANDS[:1] if _QUICK.value else _STACKOVERFLOW_BANDS:
        noise = _noise_of(2052, bands, _STACKOVERFLOW, epsilon)
        keep(_by_scheme(2052, bands, noise, _STACKOVERFLOW))
    for epsilon in (8.0,) if _QUICK.value else (8.0, 2.0, 1.0):
        keep(_two_rows(epsilon))
    write_rows(_OUTPUT.value, rows)


if __name__ == "__main__":
    app.run(main)
