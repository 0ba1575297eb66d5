"""A training loop of one's own that survives `kill -9`: `python -m production.own_loop loop`.

Logistic regression on 600 devices that drop out, in NumPy. What keeps the guarantee is the
library's: the registry says who takes part, `NoiseStream` has the noise, `TrainingRun` commits a
round and then releases it. Start it again after a kill; `bandmf-report --run=loop` reports it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import bandmf_tf as bm
from bandmf_tf.noise.stream import NoiseStream
from bandmf_tf.runs import LedgerHeader, ParticipationRegistry, RoundResult, TrainingRun

ROUNDS, WANTED, RATE, SIZE = 40, 20, 0.5, 8
DEVICES = [f"device {number}" for number in range(600)]


def make_mechanism() -> bm.Mechanism:
    """A device returns after 10 rounds at the earliest."""
    apart = bm.MinSeparation(10)
    request = bm.PlanRequest(
        workload=bm.prefix_sum(ROUNDS), epsilon=4.0, delta=1e-6, participation=apart
    )
    return bm.plan_mechanism(request).mechanism


def clipped_gradient(device: str, weights: np.ndarray, clip: float) -> np.ndarray:
    """What a device sends: a vector of norm `clip` at most."""
    draw = np.random.default_rng(list(device.encode()))
    inputs, label = draw.normal(size=SIZE), draw.integers(2)
    gradient = inputs * (1.0 / (1.0 + np.exp(-inputs @ weights)) - label)
    return gradient * min(1.0, clip / max(np.linalg.norm(gradient), 1e-12))


def train(folder: Path) -> None:
    """Does the rounds that are left."""
    folder.mkdir(exist_ok=True)
    path = folder / "mechanism.bandmf"
    mechanism = bm.load_mechanism(path) if path.exists() else make_mechanism()
    stream = NoiseStream(mechanism.strategy, mechanism.stddev, tf.TensorSpec([SIZE], tf.float32))
    weights = np.zeros(SIZE)
    # The registry before the run, beside its secrets: both have the same pseudonyms then.
    registry = ParticipationRegistry.start(folder / "secret", mechanism)
    header = LedgerHeader.of_run(
        mechanism, "own loop", WANTED, enforced_min_separation=registry.min_separation
    )
    with TrainingRun.start(
        folder, mechanism, {"rate": RATE}, header, record_pseudonyms=True, publish_every=5
    ) as run:
        if run.state is not None:  # All that the next round needs: model and noise.
            weights = run.state["weights"]
            for number, variable in enumerate(stream.variables):
                variable.assign(run.state[f"noise {number}"])
        while not run.is_complete:
            start = run.begin_round()
            attempt = registry.begin_round(run.next_round)  # Shuts out what a kill left behind.
            invited = attempt.invite(
                random.sample(DEVICES, len(DEVICES)), at_most=int(1.3 * WANTED)
            )
            came = [device for device in invited if random.random() > 0.1][:WANTED]
            came = attempt.arrived(came)  # Durable before anything of them is in a sum.
            total = sum(clipped_gradient(d, weights, mechanism.l2_norm_clip) for d in came)
            weights = weights - RATE / WANTED * (total + stream.next().numpy())
            counted = attempt.count()  # Durable before anything of the round is released.
            noise = {f"noise {n}": v.numpy() for n, v in enumerate(stream.variables)}
            run.commit(
                RoundResult(
                    state={"weights": weights, **noise},
                    model={"weights": weights},
                    metrics={"participants": len(came)},
                    start=start,
                    end=counted.end,
                    client_ids=came,
                    flags=counted.flags,
                )
            )


if __name__ == "__main__":
    train(Path(sys.argv[1]))
