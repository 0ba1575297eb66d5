"""Runs of light rounds for tests: started at the same moment, or stopped and started again.

Without TensorFlow, so that processes can be forked by the hundred. As a program it forks them
itself, because a process with TensorFlow cannot, and prints what became of each as JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cases
from bandmf_tf._files import write_folder
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.strategies import Strategy, ToeplitzStrategy
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder, LargeArray
from bandmf_tf.runs.folder import RunError
from bandmf_tf.runs.ledger import LedgerHeader, read_ledger
from bandmf_tf.runs.training_run import RoundResult, TrainingRun

MIN_SEPARATION = 4
CLIENTS_PER_ROUND = 5
REFUSED = 3


def make_mechanism(num_rounds: int, noise_multiplier: float = 2.0, kind="banded") -> Mechanism:
    """Returns a small mechanism, banded or a BLT, that is the same in every process."""
    strategy: Strategy = ToeplitzStrategy(np.array([1.0, 0.5, 0.25]), num_rounds).to_banded()
    if kind == "blt":
        strategy = BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.5]), num_rounds)
    apart = MinSeparation(MIN_SEPARATION)
    mechanism = cases.make_mechanism(strategy, apart, noise_multiplier=noise_multiplier)
    provenance = mechanism.provenance
    object.__setattr__(provenance, "created", "2024-01-01T00:00:00Z")
    return mechanism


def make_header(mechanism: Mechanism, num_rounds: int, **changes: Any) -> LedgerHeader:
    fields = {
        "mechanism_checksum": mechanism_checksum(mechanism),
        "num_rounds": num_rounds,
        "clients_per_round": CLIENTS_PER_ROUND,
        "enforced_min_separation": MIN_SEPARATION,
    }
    return cases.ledger_header(**{**fields, **changes})


def result(number: int, value: float | None = None, **changes: Any) -> RoundResult:
    weights = np.full(3, number + 1.0 if value is None else value)
    start = f"2024-01-01T00:{number:02d}:00.000000Z"
    fields = {
        "state": {"weights": weights},
        "model": {"weights": weights},
        "metrics": {"loss": 0.5 / (number + 1)},
        "start": start,
        "end": start,
        "client_ids": ["a", "b"],
    }
    return RoundResult(**{**fields, **changes})


def start(folder, num_rounds=5, noise_multiplier=2.0, config=None, header=None, **kwargs):
    mechanism = make_mechanism(max(num_rounds, MIN_SEPARATION), noise_multiplier)
    header = make_header(mechanism, num_rounds, **(header or {}))
    return TrainingRun.start(
        folder, mechanism, config or {"rate": 1}, header, record_pseudonyms=True, **kwargs
    )


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _attempt(folder: Path, value: float) -> bool:
    """Does a run of two rounds, unless that is refused."""
    try:
        run = start(folder, 2)
    except RunError:
        return False
    with run:
        for number in range(run.next_round, 2):
            run.commit(result(number, value))
    return True


def race(root: str, num_folders: int, num_programs: int) -> list[list[str]]:
    """Starts programs on each new folder at the same moment; returns what became of them."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_programs)
    outcomes = context.SimpleQueue()

    def compete(who: int) -> None:
        for number in range(num_folders):
            barrier.wait()
            try:
                run, outcome = start(Path(root) / f"{number:04d}", 2), "started"
            except RunError:
                run, outcome = None, "refused"
            except OSError as error:
                run, outcome = None, repr(error)
            outcomes.put((number, outcome))
            barrier.wait()  # Whoever has started holds the folder until all have tried.
            if run is not None:
                run.commit(result(0, float(who)))
                run.close()

    programs = [context.Process(target=compete, args=(who,)) for who in range(num_programs)]
    for program in programs:
        program.start()
    found: list[list[str]] = [[] for _ in range(num_folders)]
    for _ in range(num_folders * num_programs):
        number, outcome = outcomes.get()
        found[number].append(outcome)
    for program in programs:
        program.join()
        assert program.exitcode == 0
    return found


_TOUCHING = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate", "os.chmod", "fcntl.flock")


def _stop_before(folder: Path, number: int, how: int) -> None:
    """Sends this process a signal before it touches the folder that many times."""
    touched = itertools.count(1)

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _TOUCHING:
            return
        descriptor = isinstance(arguments[0], int)
        if (descriptor or os.fspath(arguments[0]).startswith(str(folder))) and (
            next(touched) == number
        ):
            os.kill(os.getpid(), how)

    sys.addaudithook(on_event)


def _interrupted(root: str, how: int) -> Iterator[tuple[int, int, Path, dict[str, bytes]]]:
    """Sends runs this signal, each before another one of their accesses to their folders.

    Yields the number of the access, the process, its folder, and what is in it by now.
    """
    for number in itertools.count(1):
        folder = Path(root) / f"{number:04d}"
        child = os.fork()
        if child == 0:
            _stop_before(folder, number, how)
            os._exit(0 if _attempt(folder, 1.0) else REFUSED)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFEXITED(status):
            return
        yield number, child, folder, content(folder) if folder.exists() else {}


def stop_everywhere(root: str) -> list[dict[str, Any]]:
    """Stops a run before each of its accesses to its folder, and starts another one meanwhile."""
    found = []
    for number, child, folder, before in _interrupted(root, signal.SIGSTOP):
        started = _attempt(folder, 2.0)
        after = content(folder)
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
        found.append(
            {
                "number": number,
                "second_started": started,
                "second_changed": before != after,
                "first": os.waitstatus_to_exitcode(status),
                "first_changed": content(folder) != after,
            }
        )
    return found


def kill_everywhere(root: str) -> list[dict[str, Any]]:
    """Kills a run before each of its accesses to its folder, and starts it again."""
    found = []
    for number, _, folder, before in _interrupted(root, signal.SIGKILL):
        started = _attempt(folder, 2.0)
        after = content(folder)
        released = [name for name in before if name.startswith("released/model")]
        found.append(
            {
                "number": number,
                "completed": started and read_ledger(folder / "ledger.jsonl").num_records == 2,
                "replaced": [name for name in released if after[name] != before[name]],
                "left": [name for name in after if name.endswith(".tmp")],
                "lines": after["metrics.csv"].count(b"\n"),
            }
        )
    return found


def write_race(root: str, num_times: int, num_programs: int) -> list[list[str]]:
    """Has programs write one folder at the same moments; returns what was in it then."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_programs + 1)
    folder = Path(root) / "deep" / "output"

    def write(who: int) -> None:
        for _ in range(num_times):
            barrier.wait()
            write_folder(folder, {name: str(who).encode() for name in "abcdefgh"})
            barrier.wait()

    programs = [context.Process(target=write, args=(who,)) for who in range(num_programs)]
    for program in programs:
        program.start()
    found = []
    for number in range(num_times):
        if number == num_times // 2:  # From here on files are replaced one by one.
            (folder / "of somebody else").write_text("")
        barrier.wait()
        barrier.wait()
        found.append([path.read_text() for path in sorted(folder.iterdir())])
    for program in programs:
        program.join()
        assert program.exitcode == 0
    return found


def kill_between_chunks(root: str, num_chunks: int) -> list[dict[str, Any]]:
    """Kills a program that saves its second checkpoint, after each number of chunks."""

    def save(folder: Path, number: int, die_after: int | None = None) -> None:
        def read(chunk: int) -> np.ndarray:
            if chunk == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return np.full(1000, 10.0 * number + chunk)

        large = {str(i): LargeArray(str(i), functools.partial(read, i)) for i in range(num_chunks)}
        CheckpointFolder(folder).save(Checkpoint(number, {}, {}, large))

    found = []
    for written in range(num_chunks):
        folder = Path(root) / str(written)
        save(folder, 1)
        child = os.fork()
        if child == 0:
            save(folder, 2, die_after=written)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        files = folder / "large_arrays"
        num_files = len(list(files.iterdir()))
        checkpoints = CheckpointFolder(folder)
        kept = checkpoints.load_newest()
        values = [sorted(set(large.read())) for large in kept.large_arrays.values()]
        checkpoints.save(Checkpoint(2, {}, {}, kept.large_arrays))
        checkpoints.remove_old()
        found.append(
            {
                "exit": os.waitstatus_to_exitcode(status),
                "round": kept.round,
                "values": values,
                "files": [num_files, len(list(files.iterdir()))],
            }
        )
    return found


def forked(tmp_path: Path, name: str, *arguments: int, program: str = __file__) -> list[Any]:
    """Runs a function of this file, or of another such program, in a program of its own.

    In memory, where that can be had: the programs would wait for the disk most of the time.
    """
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as root:
        done = subprocess.run(
            [sys.executable, program, name, root, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout)


if __name__ == "__main__":
    functions = (race, stop_everywhere, kill_everywhere, kill_between_chunks, write_race)
    chosen = {function.__name__: function for function in functions}[sys.argv[1]]
    print(json.dumps(chosen(sys.argv[2], *map(int, sys.argv[3:]))))
