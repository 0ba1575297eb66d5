"""Runs one optimisation of `jax-privacy`, in its own environment, for `benchmarks/optimization.py`.

    python peer_optimization.py '{"kind": "banded", "n": 64, "b": 8, "target": 70, "seconds": 9}'

Stops at the target loss or when the CPU seconds are used up, and prints one JSON object.
"""

import functools
import json
import math
import resource
import sys
import time

import jax.numpy as jnp
from jax_privacy.matrix_factorization import (
    banded,
    buffered_toeplitz,
    dense,
    optimization,
    toeplitz,
)


def run(case: dict) -> dict:
    """Optimises until the target loss or the time limit, whichever comes first."""
    n, b = case["n"], case["b"]
    best = math.inf
    start = time.process_time()

    def callback(step: optimization.CallbackArgs) -> bool:
        nonlocal best
        best = min(best, float(step.loss) * n)  # The peer minimises the mean over the steps.
        return best <= case["target"] or time.process_time() - start > case["seconds"]

    if case["kind"] == "banded":
        banded.optimize(n, bands=b, max_optimizer_steps=10**6, callback=callback)
    elif case["kind"] == "toeplitz":
        optimization.optimize(
            functools.partial(toeplitz.loss, n=n, reduction_fn=jnp.mean),
            toeplitz.optimal_max_error_strategy_coefs(b),
            max_optimizer_steps=10**6,
            callback=callback,
        )
    elif case["kind"] == "blt":
        # Its steps tell a loss with barriers: it ends by its own rule, and the last loss counts.
        loss = buffered_toeplitz.LossFn.build_min_sep(
            n=n, error="mean", min_sep=b, max_participations=case["k"]
        )
        best = n * float(buffered_toeplitz.optimize_loss(loss, num_buffers=case["buffers"])[1])
    else:
        dense.optimize(n, epochs=n // b, max_optimizer_steps=10**6, callback=callback)
    return {
        "loss": best,
        "rmse": math.sqrt(best / n),
        "reached": best <= case["target"],
        "seconds": time.process_time() - start,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
