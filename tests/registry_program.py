"""Servers on one participation registry for tests: killed everywhere, or many at once.

Without TensorFlow, and as a program that forks the servers itself, like `run_program.py`. What the
servers do to the world outside (send, add to a sum, release) they write into a file first, so that
the registry can be compared with what really happened.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import run_program
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.ledger import Pseudonyms
from bandmf_tf.runs.registry import ParticipationRegistry

NUM_ROUNDS, MIN_SEPARATION, MOST = 3, 2, 2
CLIENTS = [f"client {number}" for number in range(12)]


@functools.cache
def make_mechanism(num_rounds=NUM_ROUNDS, min_separation=MIN_SEPARATION, most=MOST) -> Mechanism:
    strategy = ToeplitzStrategy([1.0, 0.5], num_rounds).to_banded()
    mechanism = cases.make_mechanism(strategy, MinSeparation(min_separation, most))
    object.__setattr__(mechanism.provenance, "created", "2024-01-01T00:00:00Z")
    return mechanism


def serve(folder: Path) -> None:
    """Does the rounds that are left; the file `world` has what left the registry's hands."""
    world = folder / "world"

    def tell(what: str, number: int, clients: list[str]) -> None:
        with world.open("a") as file:
            file.write(json.dumps([what, number, clients]) + "\n")

    registry = ParticipationRegistry.start(folder / "registry", make_mechanism())
    for number in range(next_round(world), NUM_ROUNDS):
        attempt = registry.begin_round(number)
        cohort = attempt.invite(CLIENTS[number % 3 :] + CLIENTS, at_most=4)
        tell("sent", number, cohort)
        attempt.dropped(cohort[:1])
        tell("summed", number, attempt.arrived(cohort))
        attempt.count()
        tell("released", number, [])
    registry.close()


def told(world: Path) -> list[tuple[str, int, list[str]]]:
    return [json.loads(line) for line in world.read_text().splitlines()] if world.exists() else []


def next_round(world: Path) -> int:
    return sum(what == "released" for what, *_ in told(world))


def _kill_at_statement(number: int) -> None:
    """Kills this process before its SQLite executes that many statements."""
    counter, connect = itertools.count(1), sqlite3.connect

    def on_statement(_: str) -> None:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(on_statement)
        return connection

    sqlite3.connect = connected  # type: ignore[assignment]


def _kill_at_byte(number: int) -> None:
    """Has the system end this process when a file of it gets longer, in the midst of a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))


def _killed(root: str, kill: Callable[[int], None], step: int) -> list[dict[str, Any]]:
    """Kills a server at each place, starts it again, and returns what happened until the end."""
    found = []
    for number in itertools.count(step, step):
        folder = Path(root) / f"{number:06d}"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            kill(number)
            serve(folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert status == 0
            return found
        before, place = len(told(folder / "world")), folder / "registry"
        serve(folder)
        found.append(
            {
                "before": before,
                "world": told(folder / "world"),
                "charged": charged(place / "registry.sqlite", place / "participation_salt"),
            }
        )
    return []


def charged(path: Path, salt: Path) -> dict[str, list[int]]:
    """Returns in which rounds clients are charged for good, by the file itself."""
    names = {name: client for client in CLIENTS for name in Pseudonyms.load(salt).of([client])}
    found: dict[str, list[int]] = {}
    with contextlib.closing(sqlite3.connect(path)) as file:
        rows = "SELECT hex(client), round FROM participations WHERE outcome >= 2 ORDER BY round"
        for name, number in file.execute(rows):
            found.setdefault(names[name.lower()], []).append(number)
    return found


def kill_at_statements(root: str) -> list[dict[str, Any]]:
    return _killed(root, _kill_at_statement, 1)


def kill_at_bytes(root: str, step: int) -> list[dict[str, Any]]:
    return _killed(root, _kill_at_byte, step)


def together(root: str, num_servers: int, num_clients: int, elsewhere: int) -> list[Any]:
    """Has servers serve the same rounds at the same moments; returns whom each admitted, when."""
    database = os.environ["BANDMF_POSTGRES"] if elsewhere else None
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_servers, timeout=60)  # If one fails, so do all.
    clients = [f"client {number}" for number in range(num_clients)]
    mechanism = make_mechanism()

    def serve_too(who: int) -> None:
        registry = ParticipationRegistry.start(
            Path(root) / "registry", mechanism, database=database
        )
        admitted = []
        for number in range(NUM_ROUNDS):
            if barrier.wait() == 0:
                registry.begin_round(number)
            barrier.wait()
            attempt = registry.join_round(number)
            for client in clients[who * 7 :] + clients[: who * 7]:
                if attempt.invite([client]):
                    summed = attempt.arrived([client]) if (len(client) + number + who) % 3 else []
                    admitted.append((client, number, bool(summed)))
            if barrier.wait() == 0:
                attempt.count()
            barrier.wait()
        (Path(root) / f"{who}.json").write_text(json.dumps(admitted))

    servers = [context.Process(target=serve_too, args=(who,)) for who in range(num_servers)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
        assert server.exitcode == 0
    return [entry for path in Path(root).glob("*.json") for entry in json.loads(path.read_text())]


def forked(tmp_path: Path, name: str, *arguments: int) -> list[Any]:
    return run_program.forked(tmp_path, name, *arguments, program=__file__)


if __name__ == "__main__":
    functions = (kill_at_statements, kill_at_bytes, together)
    chosen = {function.__name__: function for function in functions}[sys.argv[1]]
    print(json.dumps(chosen(sys.argv[2], *map(int, sys.argv[3:]))))
