"""How often audits of the library as it is are consistent, and how close their bounds come.

    python -m benchmarks.audit [--runs=100] [--paths=stream,query] [--coordinates=1024]

Audits a small mechanism again and again, with and without sampling (or one of them, --sampling),
each time with fresh noise and coins, and prints a line a path: verdicts, the smallest p-value of a
run (all its tests together), how often the lower bound on mu exceeded the claim (its confidence
allows 5 in 100), its median, and CPU seconds.
"""

from __future__ import annotations

import argparse
import logging
import time

import numpy as np

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.audit import audit, available_paths
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.audit_record import CONSISTENT

ROUNDS, SEPARATION = 12, 4


def main() -> None:
    """Prints a line for every path of either mechanism."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--paths", default=",".join(available_paths()))
    parser.add_argument("--coordinates", type=int, default=1_024)
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
            noise_multiplier=1.2,
            l2_norm_clip=1.0,
            delta=1e-5,
            sampling=scheme,
        )
        for path in flags.paths.split(","):
            _repeat(mechanism, path, flags.runs, flags.coordinates)


def _repeat(mechanism: Mechanism, path: str, runs: int, coordinates: int) -> None:
    start = time.process_time()
    records = [audit(mechanism, paths=[path], coordinates=coordinates)[0] for _ in range(runs)]
    seconds = time.process_time() - start
    consistent = sum(record.verdict == CONSISTENT for record in records)
    least = min(record.p_value for record in records)
    kind = "no sampling" if mechanism.sampling is None else "Poisson"
    line = f"{path:16}{kind:12}{consistent:4} of {runs} consistent, p-value at least {least:.2g}"
    bounds = [record.paths[0].mu_lower for record in records]
    if bounds[0] is not None:
        ratios = np.array(bounds) / records[0].claimed_mu
        line += f"; bound over claim: median {np.median(ratios):.3f}, above 1 in {sum(ratios > 1)}"
    print(f"{line}; {seconds / runs:.1f} CPU s each", flush=True)


if __name__ == "__main__":
    main()
