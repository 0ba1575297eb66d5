"""How often audits of the library as it is are consistent, and how close their bounds come.

    python -m benchmarks.audit [--runs=100] [--paths=stream,query] [--coordinates=256]

Audits a small mechanism again and again, with and without sampling (or one of them, --sampling),
each time with fresh noise and coins, and prints a line a path: how many runs were consistent, their
smallest p-value and how many were at most 0.05 (all tests of a run together; if the claim holds, 5
in 100 or fewer); how often the lower bound on mu exceeded the claim (its confidence allows 5 in
100), its median and its smallest as a fraction of the claim, and how often it came within a tenth;
and CPU seconds, those of processes that the path started included.
"""

from __future__ import annotations

import argparse
import logging
import resource
from collections.abc import Sequence

import numpy as np

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.audit import audit, available_paths
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.audit_record import CONSISTENT, AuditRecord

ROUNDS, SEPARATION = 12, 4


def main() -> None:
    """Prints a line for every path of either mechanism."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--paths", default=",".join(available_paths()))
    parser.add_argument("--coordinates", type=int, help="as many as the tool takes, if not given")
    parser.add_argument("--noise_multiplier", type=float, default=1.2)
    parser.add_argument("--sampling", choices=["none", "poisson"])
    flags = parser.parse_args()
    for name in ("bandmf_tf.keras", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    strategy = ToeplitzStrategy(np.array([1.0, 0.5, 0.25, 0.2]), ROUNDS)
    schemes = {"none": None, "poisson": PoissonSampling(ROUNDS, SEPARATION, 0.5)}
    for scheme in [schemes[flags.sampling]] if flags.sampling else schemes.values():
        mechanism = Mechanism.create(
            strategy,
            prefix_sum(ROUNDS),
            MinSeparation(SEPARATION) if scheme is None else scheme.participation,
            noise_multiplier=flags.noise_multiplier,
            l2_norm_clip=1.0,
            delta=1e-5,
            sampling=scheme,
        )
        for path in flags.paths.split(","):
            _repeat(mechanism, path, flags.runs, flags.coordinates)


def _repeat(mechanism: Mechanism, path: str, runs: int, coordinates: int | None) -> None:
    start = _cpu_seconds()
    records = [audit(mechanism, paths=[path], coordinates=coordinates)[0] for _ in range(runs)]
    seconds = _cpu_seconds() - start
    consistent = sum(record.verdict == CONSISTENT for record in records)
    p_values = np.array([record.p_value for record in records])
    kind = "no sampling" if mechanism.sampling is None else "Poisson"
    print(
        f"{path:16}{kind:12}{consistent:4} of {runs} consistent, p-value at least "
        f"{p_values.min():.2g}, {np.sum(p_values <= 0.05)} up to 0.05{_bounds(records)}; "
        f"{seconds / runs:.1f} CPU s each",
        flush=True,
    )


def _bounds(records: Sequence[AuditRecord]) -> str:
    bounds = [record.paths[0].mu_lower for record in records]
    if bounds[0] is None:
        return ""
    ratios = np.array(bounds) / records[0].claimed_mu
    return (
        f"; bound over claim: median {np.median(ratios):.3f}, least {ratios.min():.3f}, at least "
        f"0.9 in {sum(ratios >= 0.9)}, above 1 in {sum(ratios > 1)}, from "
        f"{records[0].paths[0].trials} trials"
    )


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
