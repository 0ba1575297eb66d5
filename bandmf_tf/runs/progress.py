"""How a run fares, for those who watch it, whichever loop does its rounds.

`TrainingRun` (and so the training program, and loops of one's own) and `private_learning_process`
have a `RunProgress`. After every round it says in one line how far the run is, and replaces
`metrics.prom`, which Prometheus' textfile collector reads, as a whole, so that a collector never
reads half of it. In it is what the ledger or a privacy report says anyhow: rounds, sizes of
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from absl import logging

from bandmf_tf._files import write_atomically
from bandmf_tf._numbers import round_up
from bandmf_tf.errors import BandMFError
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.mechanisms.spending import EpsilonSpent

# Called after every round with how many are done, and the line.
Progress = Callable[[int, str], None]

_EXACT = "Exact, not private."


def log_progress(done: int, text: str) -> None:
    """Says it where TFF's own programs do."""
    logging.info("round %d: %s", done, text)


class RunProgress:
    """Tells operators of every round that was committed.

    Args:
      path: Where `metrics.prom` is; its folder exists.
      mechanism: The mechanism of the run.
      clients_per_round: How many clients a round wants.
      is_enforced: Whether somebody keeps clients to the plan: a registry, or their timers.
      show: Is given the line.
    """

    def __init__(
        self,
        path: Path,
        mechanism: Mechanism,
        clients_per_round: int,
        is_enforced: bool,
        show: Progress | None = None,
    ):
        self.show = show or log_progress
        self._path = path
        self._mechanism = mechanism
        self._clients_per_round = clients_per_round
        self._is_enforced = is_enforced
        self._spent = EpsilonSpent(mechanism)
        self._last = time.monotonic()
        self._accuracy = math.nan

    def has_told(self, done: int) -> bool:
        """Whether the file is that of the round after which `done` are."""
        line = f"\nbandmf_rounds_completed {done}\n"
        return self._path.exists() and line in self._path.read_text()

    def tell(self, done: int, metrics: Mapping[str, float]) -> None:
        """Tells of the round after which `done` are.

        Args:
          done: How many rounds have used their noise.
          metrics: Of the round. Of clients (`train_*`) nothing gets into the file.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        try:
            spent = self._spent(done)
        except BandMFError:  # A certificate that was not verified must not stop a release.
            spent = math.nan
        text = "".join(
            f"# HELP bandmf_{name} {words}\n# TYPE bandmf_{name} gauge\nbandmf_{name} {value!r}\n"
            for name, words, value in self._gauges(done, metrics, seconds, spent)
            if math.isfinite(value)  # What is not known yet has no line.
        )
        write_atomically(self._path, text.encode())
        self.show(done, self._line(metrics, seconds, spent))

    def _line(self, metrics: Mapping[str, float], seconds: float, spent: float) -> str:
        accuracy = metrics.get("test_accuracy", math.nan)
        if math.isfinite(accuracy):  # It is not measured in every round.
            self._accuracy = accuracy
        planned = f"{round_up(self._mechanism.epsilon):g}"
        projected = metrics.get("epsilon", math.nan)
        worse = projected > self._mechanism.epsilon
        figures = {
            "loss": f"{metrics.get('train_loss', math.nan):.3f}",
            "test accuracy": f"{self._accuracy:.3f}",
            "clients": f"{metrics.get('num_participants', math.nan):.0f}",
            "s/round": f"{seconds:.2f}",
            "separation": f"{metrics.get('min_separation', math.nan):.0f}",
            "epsilon": f"{round_up(spent) if math.isfinite(spent) else spent:g}",
        }
        line = ", ".join(f"{name} {value}" for name, value in figures.items() if value != "nan")
        return f"{line} of {planned}" + (f", heading for {round_up(projected):g}" if worse else "")

    def _gauges(
        self, done: int, metrics: Mapping[str, float], seconds: float, spent: float
    ) -> Iterator[tuple[str, str, float]]:
        mechanism = self._mechanism
        yield "rounds_completed", "Rounds that were committed, or whose noise was taken.", done
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
        yield (
            "participation_enforced",
            "1 if a registry or timers keep clients to the plan, 0 if nothing does.",
            int(self._is_enforced),
        )
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
            spent,
        )
        yield (
            "epsilon_projected",
            f"Epsilon of all rounds with the smallest separation so far. {_EXACT}",
            metrics.get("epsilon", math.nan),
        )
        yield "epsilon_planned", "Epsilon of all rounds as planned.", mechanism.epsilon
        yield "delta", "Delta of every epsilon here.", mechanism.delta
