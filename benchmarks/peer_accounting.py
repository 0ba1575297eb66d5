"""Runs the accountant of `jax-privacy`, in its own environment, for `benchmarks/amplification.py`.

    python peer_accounting.py '{"n": 64, "bands": 8, "noise": 1, "probability": 0.1, "delta": 1e-6}'

The released version has one for cyclic Poisson sampling alone; prints one JSON object.
"""

import json
import sys
import time

import dp_accounting
from jax_privacy.experimental import accounting


def run(case: dict) -> dict:
    """Returns epsilon and the CPU seconds it took."""
    start = time.process_time()
    event = accounting.amplified_bandmf_event(
        case["noise"], case["n"], num_bands=case["bands"], sampling_prob=case["probability"]
    )
    accountant = dp_accounting.pld.PLDAccountant().compose(event)
    epsilon = accountant.get_epsilon(target_delta=case["delta"])
    return {"epsilon": epsilon, "cpu_seconds": time.process_time() - start}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
