"""All of `docs/how_to/deploy.md` in one go, scaled down: `python -m production.deploy_drill drill`.

From nothing to a registry, two workers on loopback, a run with drop-outs that is killed and
resumed, a signed public statement that anybody verifies, and a second model that a budget refuses.
Each step is a command as in the document, printed before it runs, and must end as it should. Add a
step where it belongs in `STEPS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bandmf_tf.cli.program import EXPECTED, sentence
from bandmf_tf.errors import BandMFError

if TYPE_CHECKING:
    from bandmf_tf.simulation.config import RunConfig
    from bandmf_tf.simulation.tasks import FederatedTask

_ROOT = Path(__file__).resolve().parents[1]
_ROUNDS = 6


def flowers(config: RunConfig) -> FederatedTask:
    """The task of the drill: iris on devices of which every fifth fails, by name."""
    from production import example_task

    task = example_task.iris(config)
    names = [f"device {number}" for number in range(config.num_clients)]

    def client_dataset(name: str):
        number = int(name.split()[1])
        if number % 5 == 0:
            raise ConnectionError(f"{name} has gone away")
        return task.client_dataset(number)

    return dataclasses.replace(task, client_dataset=client_dataset, client_ids=names)


class Drill:
    """The folder of a drill, and what runs beside it.

    Args:
      folder: A new folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = [_free_port(), _free_port()]
        folder.mkdir(parents=True)

    def run(self, *command: str, expected: int = 0) -> str:
        """Runs a command in the checkout; returns what it printed.

        Raises:
          BandMFError: It ended otherwise than it should.
        """
        print("$", shlex.join(command), flush=True)
        ended = subprocess.run(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if ended.returncode != expected:
            last = (ended.stdout.strip().splitlines() or [""])[-1]
            raise BandMFError(
                f"{shlex.join(command)} ended with {ended.returncode} and not {expected}: {last}"
            )
        return ended.stdout

    def python(self, module: str, *arguments: str, expected: int = 0) -> str:
        """Runs a program of the checkout."""
        return self.run(sys.executable, "-m", module, *arguments, expected=expected)

    def path(self, name: str) -> str:
        """Returns a path in the folder of the drill."""
        return os.fspath(self.folder / name)


def plan(drill: Drill) -> None:
    """A device comes back after three rounds at the earliest."""
    drill.python(
        "tools.plan_mechanism",
        f"--num_rounds={_ROUNDS}",
        "--min_separation=3",
        "--max_participations=2",
        "--epsilon=4",
        "--delta=1e-6",
        "--l2_norm_clip=0.5",
        f"--output={drill.path('plan')}",
    )


def certificates(drill: Drill) -> None:
    """By these the program and its workers know each other."""
    drill.run("production/certificates.sh", drill.path("tls"), "localhost")


def train(drill: Drill) -> None:
    """Two workers, a registry, drop-outs; killed after the registry has counted a round."""
    command = [
        f"--mechanism={drill.path('plan/mechanism.bandmf')}",
        f"--output={drill.path('run')}",
        "--task=production.deploy_drill:flowers",
        f"--num_rounds={_ROUNDS}",
        "--clients=registered",
        "--clock=real",
        "--num_clients=100",
        "--clients_per_round=6",
        "--over_selection=1.5",
        "--minimum_clients=3",
        "--report_timeout_seconds=60",
        "--participation_recording=pseudonymous",
        f"--evaluate_every={_ROUNDS}",
        f"--workers={','.join(f'localhost:{port}' for port in drill.ports)}",
        f"--tls={drill.path('tls')}",
    ]
    program = "production.train_federated"
    with _workers(drill):
        drill.python(program, *command, "--crash_at=computed:2", expected=-signal.SIGKILL)
        drill.python(program, *command)


def publish(drill: Drill) -> None:
    """A statement, signed; anybody checks it with the owner's public key alone."""
    key, public = drill.path("owner.pem"), drill.path("owner_public.pem")
    drill.run("openssl", "genpkey", "-algorithm", "ed25519", "-out", key)
    drill.run("openssl", "pkey", "-in", key, "-pubout", "-out", public)
    drill.python(
        "tools.privacy_report",
        f"--run={drill.path('run')}",
        f"--signing_key={key}",
        f"--output={drill.path('report')}",
    )
    drill.python(
        "tools.privacy_report",
        f"--verify={drill.path('report/report.json')}",
        f"--evidence_root={drill.path('.')}",
    )
    drill.python(
        "tools.privacy_report",
        f"--check_signature={drill.path('report')}",
        f"--public_key={public}",
    )


def budget(drill: Drill) -> None:
    """One release fits into the budget; a second one of the same devices does not."""
    program = drill.folder / "releases.yaml"
    first = (
        "delta: 1.0e-6\nmax_epsilon: 5\nreleases:\n"
        "  - {name: spring, report: report/report.json, evidence_root: .}\n"
    )
    program.write_text(first)
    drill.python("tools.privacy_budget", f"--program={program}")
    program.write_text(first + "  - {name: autumn, mechanism: plan/mechanism.bandmf}\n")
    drill.python("tools.privacy_budget", f"--program={program}", expected=3)


STEPS: tuple[Callable[[Drill], None], ...] = (plan, certificates, train, publish, budget)


def _free_port() -> int:
    """A port that nobody uses, below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


@contextlib.contextmanager
def _workers(drill: Drill) -> Iterator[None]:
    """Two workers on loopback, as long as they are needed."""
    command = ["production/workers.sh", drill.path("tls"), *map(str, drill.ports)]
    print("$", shlex.join(command), "&", flush=True)
    script = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        script.terminate()
        script.wait()


def main(argv: list[str]) -> int:
    """Runs all steps in a new folder."""
    if len(argv) != 2:
        print("usage: python -m production.deploy_drill FOLDER", file=sys.stderr)
        return 1
    try:
        drill = Drill(Path(argv[1]).absolute())
        for step in STEPS:
            print(f"\n# {step.__name__}: {step.__doc__}", flush=True)
            step(drill)
    except EXPECTED as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 1
    print("\nAll steps ended as they should.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
