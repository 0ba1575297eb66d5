"""How far epsilon of sampled Gaussian sums is above that of more digits, and what it costs.

    python -m benchmarks.accounting [--samples=poisson] [--cells=512] [--points=100]

Goes through sampling probabilities from 1e-9 to 0.5, noise multipliers from 0.2 to 50, 1 to 100,000
steps and delta from 1e-3 to 1e-12 (1,176 points), compares `sampled_epsilon` with losses of `cells`
cells to a power of two, and prints the extreme ratios and CPU seconds. Both are upper bounds, and
the error of digits falls with the square of the cells. Tests compare a few points with exact
integrals.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time

from bandmf_tf.accounting.privacy_loss import (
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    floating_epsilon,
    sampled_epsilon,
)

SAMPLES = {"poisson": PoissonSampledGaussian, "fixed_size": FixedSizeSampledGaussian}
PROBABILITIES = (1e-9, 1e-7, 1e-5, 1e-3, 1e-2, 0.1, 0.5)
NOISE_MULTIPLIERS = (0.2, 0.3, 0.5, 1.0, 2.0, 10.0, 50.0)
STEPS = (1, 2, 50, 1000, 20_000, 100_000)
DELTAS = (1e-3, 1e-6, 1e-9, 1e-12)


def main() -> None:
    """Prints how often epsilon was zero, the extreme ratios, and the cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", choices=SAMPLES, default="poisson")
    parser.add_argument("--cells", type=int, default=512)
    parser.add_argument("--points", type=int, help="So many of them at random.")
    flags = parser.parse_args()
    points = list(itertools.product(PROBABILITIES, NOISE_MULTIPLIERS, STEPS, DELTAS))
    if flags.points is not None:
        points = random.Random(0).sample(points, flags.points)
    ratios, seconds, zeros = [], [], 0
    for q, noise, k, delta in points:
        step = SAMPLES[flags.samples](1 / noise, q)
        start = time.process_time()
        epsilon = sampled_epsilon(step, k, delta)
        seconds.append(time.process_time() - start)
        if epsilon == 0.0:
            zeros += 1
            continue
        finer = max(floating_epsilon(losses, k, delta) for losses in step.floating(flags.cells))
        point = f"q = {q:g}, noise multiplier {noise:g}, {k} steps, delta = {delta:g}"
        ratios.append((epsilon / finer if math.isfinite(finer) else math.nan, epsilon, point))
    print(f"{len(ratios)} points, and {zeros} where epsilon is 0; CPU seconds: mean", end=" ")
    print(f"{sum(seconds) / len(seconds):.3f}, most {max(seconds):.3f}")
    for ratio, epsilon, point in (*sorted(ratios)[:2], *sorted(ratios)[-5:]):
        print(f"epsilon {epsilon:.6g} is {ratio:.7f} times that of more digits: {point}")


if __name__ == "__main__":
    main()
