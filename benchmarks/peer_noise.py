"""Times the noise of `jax-privacy`, in its own environment, for `benchmarks/noise.py`.

    python peer_noise.py '{"dimension": 1000, "coefficients": [1.0, 0.5], "repetitions": 3}'

Prints one JSON object.
"""

import functools
import json
import resource
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

_STEPS = 4


def _time(update, state) -> tuple[dict, object]:
    """Times a few steps; returns seconds a step and the state after them."""
    gradient = jnp.zeros(state[2])
    wall, cpu = time.perf_counter(), time.process_time()
    inner = state[:2]
    for _ in range(_STEPS):
        noised, inner = update(gradient, inner)
        noised.block_until_ready()
    seconds = (time.perf_counter() - wall) / _STEPS
    cpu_seconds = (time.process_time() - cpu) / _STEPS
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}, (*inner, state[2])


def _start(privatizer, dimension: int):
    """Returns the compiled update and a state after its first steps."""
    update = jax.jit(privatizer.update, donate_argnums=1)
    state = (*privatizer.init(jnp.zeros(dimension)), dimension)
    _, state = _time(update, state)
    return update, state


def run(case: dict) -> dict:
    """Times correlated and independent noise in turns."""
    dimension = case["dimension"]
    make = functools.partial(noise_addition.matrix_factorization_privatizer, stddev=1.0, prng_key=1)
    independent, state = _start(
        noise_addition.gaussian_privatizer(stddev=1.0, prng_key=1), dimension
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    coefficients = jnp.array(case["coefficients"])
    update, own_state = _start(make(toeplitz.inverse_as_streaming_matrix(coefficients)), dimension)
    own, other = [], []
    for _ in range(case["repetitions"]):
        sample, state = _time(independent, state)
        other.append(sample)
        sample, own_state = _time(update, own_state)
        own.append(sample)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    result = {"peak_gib": peak / 2**20}
    for prefix, samples in (("", own), ("independent_", other)):
        seconds = [sample["seconds"] for sample in samples]
        result[f"{prefix}seconds"] = min(seconds)
        result[f"{prefix}median_seconds"] = statistics.median(seconds)
        result[f"{prefix}cpu_seconds"] = min(sample["cpu_seconds"] for sample in samples)
    return result


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
