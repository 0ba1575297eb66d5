"""How a run fares, for those who watch it: a file that Prometheus' textfile collector reads.

After every committed round `PrometheusFile` replaces `metrics.prom` as a whole, so that a collector
never reads half of it. In it is what the ledger or a privacy report says anyhow: rounds, sizes of
cohorts, how close participations came, epsilon. Cohorts and separations are exact, without noise;
the guarantee is for neighbours with the same participation, so it treats them as public, and their
`HELP` lines say that they are not private. Metrics of clients (loss, accuracy) are not there:
nothing covers them.

Ages are for the collector to compute (`time() - bandmf_last_commit_timestamp_seconds`): a program
that hangs cannot report that it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

from bandmf_tf._files import write_atomically
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.mechanisms.spending import EpsilonSpent
from bandmf_tf.runs.training_run import PublishedRound

_EXACT = "Exact, not private."


class PrometheusFile:
    """A publisher of a `TrainingRun` that writes metrics in Prometheus' text format.

    Args:
      path: The file; its folder exists.
      mechanism: The mechanism of the run.
      clients_per_round: How many clients a round wants.
    """

    def __init__(self, path: Path, mechanism: Mechanism, clients_per_round: int):
        self._path = path
        self._mechanism = mechanism
        self._clients_per_round = clients_per_round
        self._epsilon_spent = EpsilonSpent(mechanism)
        self._last = time.monotonic()

    def __call__(self, published: PublishedRound) -> None:
        """Replaces the file by one that tells of this round."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        text = "".join(
            f"# HELP bandmf_{name} {words}\n# TYPE bandmf_{name} gauge\nbandmf_{name} {value!r}\n"
            for name, words, value in self._gauges(published, seconds)
            if math.isfinite(value)  # What is not known yet has no line.
        )
        write_atomically(self._path, text.encode())

    def _gauges(
        self, published: PublishedRound, seconds: float
    ) -> Iterator[tuple[str, str, float]]:
        metrics, mechanism = published.metrics, self._mechanism
        done = published.round + 1
        yield "rounds_completed", "Rounds that were committed.", done
        yield "rounds_planned", "Rounds that the mechanism has noise for.", mechanism.num_rounds
        yield (
            "round_seconds",
            "From the commit before, or the start of the program, to this commit.",
            round(seconds, 6),
        )
        yield (
            "last_commit_timestamp_seconds",
            "When the newest checkpoint was committed.",
            time.time(),
        )
        yield (
            "cohort_clients",
            f"Clients in the sum of the last round. {_EXACT}",
            metrics.get("num_participants", math.nan),
        )
        yield "cohort_clients_wanted", "Clients that a round wants.", self._clients_per_round
        planned = mechanism.participation.min_separation
        closest = metrics.get("min_separation", math.nan)
        if planned is not None:
            yield (
                "separation_margin_rounds",
                f"Smallest separation so far minus the planned one. {_EXACT}",
                closest - planned,
            )
        yield (
            "timer_violations",
            f"Clients of the last round that came before their timer allowed it. {_EXACT}",
            metrics.get("timer_violations", math.nan),
        )
        yield (
            "epsilon_spent",
            "Upper bound on epsilon of the rounds so far, if the plan is kept.",
            self._epsilon_spent(done),
        )
        yield (
            "epsilon_projected",
            f"Epsilon of all rounds with the smallest separation so far. {_EXACT}",
            metrics.get("epsilon", math.nan),
        )
        yield "epsilon_planned", "Epsilon of all rounds as planned.", mechanism.epsilon
        yield "delta", "Delta of every epsilon here.", mechanism.delta
