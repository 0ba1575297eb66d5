"""A training loop of one's own that survives `kill -9`: `python -m production.own_loop loop`.

Logistic regression on 600 devices that drop out, in NumPy. What keeps the guarantee is the
library's: the registry says who takes part, `clipped_sum` bounds what they send, `NoiseStream` has
the noise, `TrainingRun` commits a round, then releases it, and says how far it is and what epsilon
was spent (also in `loop/metrics.prom`). Start it again after a kill; `bandmf-report --run=loop`
reports it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

import bandmf_tf as bm
from bandmf_tf.cli import program
from bandmf_tf.cli.progress import Progress
from bandmf_tf.noise import NoiseStream, clipped_sum
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


def gradient(device: str, weights: np.ndarray) -> np.ndarray:
    """What a device sends, whatever that is."""
    draw = np.random.default_rng(list(device.encode()))
    inputs, label = draw.normal(size=SIZE), draw.integers(2)
    return inputs * (1.0 / (1.0 + np.exp(-inputs @ weights)) - label)


def train(folder: Path) -> None:
    """Does the rounds that are left."""
    folder.mkdir(exist_ok=True)
    path = folder / "mechanism.bandmf"
    mechanism = bm.load_mechanism(path) if path.exists() else make_mechanism()
    spec, clip = tf.TensorSpec([SIZE], tf.float32), mechanism.l2_norm_clip
    stream = NoiseStream(mechanism.strategy, mechanism.stddev, spec)
    weights = np.zeros(SIZE)
    # The registry before the run, beside its secrets: both have the same pseudonyms then.
    registry = ParticipationRegistry.start(folder / "secret", mechanism)
    header = LedgerHeader.of_run(
        mechanism, "own loop", WANTED, enforced_min_separation=registry.min_separation
    )
    with (
        Progress(ROUNDS) as shown,
        TrainingRun.start(
            folder,
            mechanism,
            {"rate": RATE},
            header,
            record_pseudonyms=True,
            publish_every=5,
            progress=shown.show,
        ) as run,
    ):
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
            found = clipped_sum((gradient(device, weights) for device in came), clip, spec)
            weights = weights - RATE / WANTED * (found.total + stream.next().numpy())
            counted = attempt.count()  # Durable before anything of the round is released.
            noise = {f"noise {n}": v.numpy() for n, v in enumerate(stream.variables)}
            run.commit(
                RoundResult(
                    state={"weights": weights, **noise},
                    model={"weights": weights},
                    metrics={"clipped": found.num_clipped, "non_finite": found.num_non_finite},
                    start=start,
                    end=counted.end,
                    client_ids=came,
                    flags=counted.flags,
                )
            )


def main(arguments: Sequence[str]) -> None:
    """Runs the program; what is wrong is one sentence."""
    if len(arguments) != 1:
        sys.exit("error: Give one argument, the folder of the run.")
    try:
        train(Path(arguments[0]))
    except program.EXPECTED as error:
        sys.exit(f"error: {program.sentence(error)}")


if __name__ == "__main__":
    main(sys.argv[1:])
