"""A drill with the real program: kill it again and again, and see that nothing changed.

    python -m production.crash_drill --kills=50 --output=drill

Trains a small federated model twice under one pinned noise seed: once in peace, and once in a
program that is killed (`kill -9`, its TFF worker with it) at random moments, of its start as well
as of its rounds, and started again. At the end the ledger must verify, no round may be missing,
and every model that was released must be, bit for bit, that of the run in peace: so no row of
noise was drawn again, and none is in two releases.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags

from bandmf_tf.accounting.releases import Release
from bandmf_tf.cli.program import EXPECTED, refuse_repeated, sentence
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import ledger
from bandmf_tf.runs.folder import RunFolder

_KILLS = flags.DEFINE_integer("kills", 50, "How often to kill the program.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("num_rounds", 400, "Rounds of the run.", lower_bound=8)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write, which must not exist.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the moments of the kills.")

_ROOT = Path(__file__).resolve().parents[1]
_MIN_SEPARATION = 8
# A kill comes at most so many seconds after a start's first commit: a few rounds.
_LONGEST_WAIT = 1.5
# Every so many starts the program is killed before its first commit, within so many seconds.
_KILL_DURING_START, _LONGEST_START = 5, 10.0


class _Program:
    """The training program in a process of its own, with its worker."""

    def __init__(self, folder: Path, mechanism: Path):
        self._folder = folder
        self._done = _num_rounds(folder)
        self._output = folder.with_suffix(".log").open("a")
        command = [sys.executable, "-m", "production.train_federated"]
        command += [f"--mechanism={mechanism}", f"--output={folder}"]
        command += [f"--num_rounds={_ROUNDS.value}", "--clients_per_round=3", "--num_clients=60"]
        command += ["--examples_per_client=6", "--pinned_noise_seed=3", "--availability=always"]
        command += [
            "--publish_every=1",
            f"--evaluate_every={_ROUNDS.value}",
            "--server_learning_rate=0.05",
        ]
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = float("inf"), until_commit: bool = False) -> bool:
        """Waits for the end, a time, or a round in the ledger; returns whether it ended."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            if until_commit and _num_rounds(self._folder) > self._done:
                break
            time.sleep(0.01)
        return self._process.poll() is not None

    def kill(self) -> int:
        """Kills the program and its worker; returns the program's exit code."""
        with contextlib.suppress(ProcessLookupError):  # It may have ended, and its worker, too.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._output.close()
        return self._process.wait()


def _mechanism() -> Mechanism:
    workload = prefix_sum(_ROUNDS.value)
    strategy = optimize_banded(workload, _MIN_SEPARATION).strategy
    participation = MinSeparation(_MIN_SEPARATION)
    return Mechanism.create(
        strategy,
        workload,
        participation,
        noise_multiplier=Release(strategy, participation).noise_multiplier(8.0, 1e-6),
        l2_norm_clip=0.5,
        delta=1e-6,
    )


def _train_and_kill(folder: Path, mechanism: Path) -> int:
    """Trains with kills; returns how many of them came before the start's first commit."""
    moments, during_start = random.Random(_SEED.value), 0
    for number in range(_KILLS.value):
        started, before = time.monotonic(), _num_rounds(folder)
        program = _Program(folder, mechanism)
        if number % _KILL_DURING_START == _KILL_DURING_START - 1:
            program.wait(moments.uniform(0.0, _LONGEST_START), until_commit=True)
        else:
            program.wait(until_commit=True)
            program.wait(moments.uniform(0.0, _LONGEST_WAIT))
        code = program.kill()
        if code != -signal.SIGKILL:
            raise BandMFError(
                f"The program ended by itself with exit code {code} after {number} kills; see "
                f"{folder.with_suffix('.log')}, or give it more num_rounds."
            )
        done, seconds = _num_rounds(folder), time.monotonic() - started
        during_start += done == before
        print(f"kill {number + 1} after {seconds:.2f} seconds, {done} rounds done", flush=True)
    return during_start


def _num_rounds(folder: Path) -> int:
    path = RunFolder(folder).ledger
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def _finish(folder: Path, mechanism: Path) -> None:
    program = _Program(folder, mechanism)
    program.wait()
    if code := program.kill():
        raise BandMFError(f"The program ended with exit code {code}; see {folder}.log.")


def _compare(killed: RunFolder, whole: RunFolder) -> None:
    """Raises a BandMFError unless both folders hold the same complete run."""
    n = _ROUNDS.value
    found, expected = (
        ledger.verify_ledger(folder.ledger, num_records=n) for folder in (killed, whole)
    )
    for ours, theirs in zip(found.records, expected.records, strict=True):
        released = hashlib.sha256(killed.model(ours.round + 1).read_bytes()).hexdigest()
        if not ours.model_digest == theirs.model_digest == released:
            raise BandMFError(f"The model of round {ours.round} is not that of the run in peace.")
    with killed.metrics.open() as file:
        if [int(row["round"]) for row in csv.DictReader(file)] != list(range(n)):
            raise BandMFError("metrics.csv does not hold every round once, in order.")


def _run() -> None:
    output = Path(_OUTPUT.value)
    output.mkdir(parents=True)
    mechanism = output / "mechanism.bandmf"
    save_mechanism(_mechanism(), mechanism)
    killed, whole = output / "killed", output / "whole"
    during_start = _train_and_kill(killed, mechanism)
    done = _num_rounds(killed)
    _finish(killed, mechanism)
    _finish(whole, mechanism)
    _compare(RunFolder(killed), RunFolder(whole))
    print(
        f"{_KILLS.value} kills in {done} rounds, {during_start} of them while the program started: "
        f"the ledger verifies, all {_ROUNDS.value} rounds are there once and in order, and every "
        "released model equals that of the run in peace."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the drill with these arguments, or those of the command line."""
    try:
        app.define_help_flags()
        refuse_repeated(flags.FLAGS)
        flags.FLAGS(list(sys.argv if argv is None else argv))
        if not _OUTPUT.value:
            raise BandMFError("--output must name a folder.")
        _run()
    except (flags.Error, *EXPECTED) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
