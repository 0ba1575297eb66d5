"""Decisions a second of a participation registry that knows 10 million clients.

    python -m benchmarks.registry [--millions=10] [--rounds=5] [--database=postgresql://..]

Makes a registry in a temporary folder (--folder: on that disk), makes all clients known, and holds
rounds of 6500 of 10,000 candidates, drawn from all. A decision is one candidate admitted or
refused, durably; in batches of 10,000, and one client at a time, each with its own flush to disk,
as where every client is answered by itself. Prints decisions a second, seconds of starting, and
the size.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.registry import ParticipationRegistry
from benchmarks import load

NUM_ROUNDS, MIN_SEPARATION = 2000, 385
CLIENTS_PER_ROUND, CANDIDATES = 6500, 10_000
ALONE = 500


def make_mechanism() -> Mechanism:
    """Returns a mechanism of the paper's production run in size; its noise does not matter here."""
    return Mechanism.create(
        ToeplitzStrategy([1.0, 0.5], NUM_ROUNDS).to_banded(),
        prefix_sum(NUM_ROUNDS),
        MinSeparation(MIN_SEPARATION),
        noise_multiplier=10.0,
        l2_norm_clip=1.0,
        delta=1e-6,
    )


def timed(name: str, count: int, action: Callable[[], object]) -> None:
    """Prints how many of something an action does in a second."""
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    print(f"{name:<44} {seconds:>9.2f} s {count / seconds:>12,.0f} /s", flush=True)


def main() -> None:
    """Prints one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--database")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    others, draw = load.OtherWork(), random.Random(0)
    known = int(arguments.millions * 1e6)
    with tempfile.TemporaryDirectory(prefix="registry-", dir=arguments.folder) as folder:
        mechanism = make_mechanism()

        def start() -> ParticipationRegistry:
            place = Path(folder) / "registry"
            return ParticipationRegistry.start(place, mechanism, database=arguments.database)

        registry = start()
        timed("clients made known", known, lambda: registry.enroll(map(str, range(known))))
        for number in range(arguments.rounds):
            candidates = [str(i) for i in draw.sample(range(known), CANDIDATES)]
            attempt = registry.begin_round(number)
            cohort: list[str] = []
            timed(
                f"round {number}: {CANDIDATES:,} candidates, all decided",
                CANDIDATES,
                lambda attempt=attempt, candidates=candidates, cohort=cohort: cohort.extend(
                    attempt.invite(candidates)
                ),
            )
            arriving = cohort[:CLIENTS_PER_ROUND]
            timed("  arrived", len(arriving), lambda a=attempt, c=arriving: a.arrived(c))
            timed("  counted, the others given back", len(cohort), attempt.count)
        attempt = registry.begin_round(arguments.rounds)
        alone = [str(i) for i in draw.sample(range(known), ALONE)]
        timed("one at a time", ALONE, lambda: [attempt.invite([client]) for client in alone])
        registry.close()
        timed("started again, its file checked", 1, lambda: start().close())
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        print(f"{size / 1e9:.2f} GB in the folder; {others.mark()}")


if __name__ == "__main__":
    main()
