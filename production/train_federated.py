"""Trains a federated model with BandMF: `python -m production.train_federated --config=run.yaml`.

Every field of the configuration is also a flag, which wins over the file. Start the same command
again after a crash, and the run goes on at the last committed round; nothing is released twice.
`production/README.md` describes the folder that a run writes and what in it is secret.

Exit codes: 0 all rounds are done; 1 the run cannot be started or continued, for the reason printed;
130 it was interrupted (Ctrl-C or SIGTERM) and can be continued.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from bandmf_tf.cli import program
from bandmf_tf.cli.progress import Progress
from bandmf_tf.runs.training_run import POINTS
from bandmf_tf.simulation.config import FIELDS, load_config

_CONFIG = flags.DEFINE_string("config", None, "YAML file with the configuration.")
_WORKERS = flags.DEFINE_list(
    "workers", [], "host:port of TFF worker services to run on; none means this machine."
)
_TLS = flags.DEFINE_string(
    "tls", None, "Folder with program.pem, program.key and ca.pem, by which workers know us."
)
_ALLOW_OPEN_WORKER = flags.DEFINE_boolean(
    "allow_open_worker",
    False,
    "Go on where TFF's workers can be reached, and used, by anybody on the network.",
)
_CONCURRENT_CLIENTS = flags.DEFINE_integer(
    "concurrent_clients", 0, "Clients that train at the same time; 0 for no limit.", lower_bound=0
)
_ANCHOR = flags.DEFINE_string(
    "anchor",
    None,
    "File elsewhere to which the hash of the ledger's last line is appended after every round.",
)
_REGISTRY_DATABASE = flags.DEFINE_string(
    "registry_database",
    None,
    "URL of the PostgreSQL database of registered clients; none means SQLite in the run's folder.",
)
_CRASH_AT = flags.DEFINE_string(
    "crash_at",
    None,
    f"For drills: point:round at which the program kills itself. Points: {', '.join(POINTS)}.",
)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_DEFINERS = {
    "str": flags.DEFINE_string,
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_boolean,
}
for _name, _field in FIELDS.items():
    _DEFINERS[str(_field.type)](_name, None, f"{_field.metadata['help']} [{_field.default!r}]")


def _crash(point: str, number: int) -> None:
    if _CRASH_AT.value == f"{point}:{number}":
        os.kill(os.getpid(), signal.SIGKILL)


def _train(overrides: Mapping[str, Any]) -> None:
    config = load_config(_CONFIG.value, overrides)
    # Imported late: a wrong configuration is told at once, and TensorFlow takes seconds.
    program.quiet_imports()
    from bandmf_tf.simulation import training

    training.prepare_runtime(
        _CONCURRENT_CLIENTS.value,
        _WORKERS.value,
        _TLS.value,
        allow_open_worker=_ALLOW_OPEN_WORKER.value,
    )
    if config.noise_seed is not None:
        print("WARNING: pinned_noise_seed makes the noise predictable; this run is NOT private.")
    with training.FederatedTraining(
        config, registry_database=_REGISTRY_DATABASE.value, on_point=_crash
    ) as training:
        print(f"data: {training.task.data}")
        print(training.mechanism.describe())
        done = training.run.next_round
        if done:
            print(f"continuing after {done} of {config.num_rounds} rounds")
        with Progress(config.num_rounds, done) as progress:
            training.train(progress.show, anchor=_ANCHOR.value)
        final = training.evaluate()
        print("final model: " + ", ".join(f"{name} {value:.4f}" for name, value in final.items()))
        print(f"ledger head: {training.run.head} (keep it elsewhere)")
        print(f"run folder: {training.run.folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with these arguments, or those of the command line."""
    program.print_in_order()
    try:
        app.define_help_flags()
        program.refuse_repeated(flags.FLAGS)
        rest = flags.FLAGS(list(sys.argv if argv is None else argv))
    except flags.Error as error:
        print(f"error: {error}; --helpfull lists all flags.", file=sys.stderr)
        return 1
    if len(rest) > 1:
        print(f"error: unexpected arguments {rest[1:]}.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # What ends containers, like Ctrl-C.
    given = {name: flags.FLAGS[name].value for name in FIELDS if flags.FLAGS[name].present}
    try:
        _train(given)
    except program.EXPECTED as error:
        print(f"error: {program.sentence(error)}", file=sys.stderr)
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            print(
                "The disk of the run is full. Nothing is lost: make room and start the same "
                "command again.",
                file=sys.stderr,
            )
        return 1
    except KeyboardInterrupt:
        print("interrupted; start the same command again to continue.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Not by absl's app.run: Keras cannot build models when TensorFlow is imported inside of it.
    sys.exit(main())
