"""The audit tool: `bandmf-audit`, or `python -m tools.audit_privacy` from a checkout.

Attacks paths of the library with a mechanism, prints what was found and writes it: `audit.json`,
which a privacy report can carry, and `audit.png`. Exit status 0 if the claim is consistent with
what was seen, 1 if it is violated, and 2, with one sentence, if the audit could not be done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from bandmf_tf._files import write_folder
from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.audit.paths import PATHS, audit, available_paths
from bandmf_tf.cli.program import fill, output_folder, quiet_imports, run_program
from bandmf_tf.cli.progress import Progress
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.files import load_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.planning.plan import PlanRequest
from bandmf_tf.planning.planner import plan_mechanism
from bandmf_tf.runs.audit_record import VIOLATES, AuditRecord, encode_audit_record

_NAME = "bandmf-audit"
_RECORD, _PICTURE = "audit.json", "audit.png"
_FILES = (_RECORD, _PICTURE)

_USAGE = """Tries to break the guarantee of a mechanism, with canaries on the library's own paths.

A small mechanism of its own on all paths:

  bandmf-audit --output=audit

A planned mechanism, its first 100 rounds, on two of them:

  bandmf-audit --mechanism=plan/mechanism.bandmf --rounds=100 --paths=stream,keras --output=audit

The report of a run can carry what was found:

  bandmf-report --run=RUN --audit=audit/audit.json --output=report

Exit status: 0 consistent with the claim, 1 the claim is violated, 2 the audit could not be done.

Flags:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    return run_program(_NAME, _USAGE, _define(), _run, argv)


def _define() -> flags.FlagValues:
    """Returns the flags of this program, which are not those of the process."""
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string(
        "mechanism", None, "Mechanism file; by default 24 rounds, a unit every 6 at most.", **where
    )
    flags.DEFINE_list(
        "paths", None, f"What to attack: {', '.join(PATHS)}; all that is installed.", **where
    )
    flags.DEFINE_integer("rounds", None, "How many rounds to do, from the first; all.", **where)
    flags.DEFINE_integer(
        "coordinates",
        None,
        "Parameters of the attacked models, each a trial; as many as make the bound sharp.",
        **where,
    )
    flags.DEFINE_float("confidence", 0.95, "Of every lower bound, by itself.", **where)
    flags.DEFINE_string("output", None, f"Folder for {' and '.join(_FILES)}.", **where)
    flags.DEFINE_boolean("json", False, "Print one JSON object instead of words.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    folder = None if values.output is None else output_folder(values.output, _FILES)
    mechanism = _own_mechanism() if values.mechanism is None else load_mechanism(values.mechanism)
    quiet_imports()
    paths = available_paths() if values.paths is None else values.paths
    start = time.monotonic()
    with _without_advice(), Progress(len(paths), unit="path", name=_NAME) as bar:
        record, attacks = audit(
            mechanism,
            paths=paths,
            rounds=values.rounds,
            coordinates=values.coordinates,
            confidence=values.confidence,
            progress=lambda done, name: bar.show(done + 1, name, milestone=True),
        )
    if folder is not None:
        from bandmf_tf.audit.figures import audit_picture  # Drawing libraries are slow to import.

        picture = audit_picture(record, attacks)
        contents = {_RECORD: encode_audit_record(record)}
        write_folder(folder, contents if picture is None else {**contents, _PICTURE: picture})
    if values.json:
        print(encode_audit_record(record).decode(), end="")
    else:
        print(_summary(record, time.monotonic() - start))
        if folder is not None:
            print(f"\nWritten to {folder}{os.sep}: {', '.join(_FILES)}.")
    return 1 if record.verdict == VIOLATES else 0


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silences what training advises its users, which is not about canaries."""
    loggers = [logging.getLogger(name) for name in ("bandmf_tf.keras", "tensorflow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _own_mechanism() -> Mechanism:
    request = PlanRequest(
        workload=prefix_sum(24),
        epsilon=8.0,
        delta=1e-5,
        participation=MinSeparation(6),
        compare_dense=False,
    )
    return plan_mechanism(request).mechanism


def _summary(record: AuditRecord, seconds: float) -> str:
    lines = [f"{'path':24}{'trials':>9}{'mu >=':>9}{'epsilon >=':>12}{'p-value':>10}  smallest in"]
    for path in record.paths:
        mu = "" if path.mu_lower is None else f"{round_down(path.mu_lower):g}"
        epsilon = "" if path.epsilon_lower is None else f"{round_down(path.epsilon_lower):g}"
        trials = path.trials or ""
        test = path.worst
        p_value = min(1.0, test.p_value * len(path.tests))
        lines.append(f"{path.name:24}{trials:>9}{mu:>9}{epsilon:>12}{p_value:>10.2g}  {test.name}")
    lines.append(
        f"{'claimed':33}{round_up(record.claimed_mu):>9.4g}{round_up(record.claimed_epsilon):>12.4g}"
    )
    words = [fill(sentence, "", "") for sentence in record.sentences()]
    return "\n".join([*lines, "", *words, f"({seconds:.0f} seconds)"])


if __name__ == "__main__":
    sys.exit(main())
