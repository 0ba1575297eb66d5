"""Regenerates the computed tables and figures of the BandMF paper, beside its digits.

    python -m tools.reproduce_paper --output=reproduction_output
    python -m tools.reproduce_paper --only=amplified,pictures --quick

prints paper, ours and the difference, and writes CSV and PNG. A full run takes about a quarter of
an hour of CPU time, most of it in the dense matrices, which `--quick` leaves out. Set
OMP_NUM_THREADS to the number of idle cores: BLAS threads that wait for busy ones make it many times
slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from bandmf_tf.cli.program import UsageError, run_program
from bandmf_tf.cli.progress import Progress
from tools.reproduce_paper import report
from tools.reproduce_paper.run import SECTIONS, Reproduction


def main(argv: Sequence[str]) -> int:
    """Runs the program on `argv` and returns its exit status."""
    return run_program("reproduce_paper", f"{__doc__}\nFlags:", _define(), _run, argv)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("output", "reproduction_output", "Folder for CSV and PNG files.", values)
    flags.DEFINE_list(
        "only", list(SECTIONS), f"Sections, out of {', '.join(SECTIONS)}.", flag_values=values
    )
    flags.DEFINE_boolean(
        "quick", False, "Leave out the dense matrices, which take most of the time.", values
    )
    flags.DEFINE_boolean("help", False, "Print this help.", values)
    return values


def _run(values: flags.FlagValues) -> int:
    sections, output = _checked_sections(values.only), _made_folder(values.output)
    _reproduce(sections, output, quick=values.quick)
    return 0


def _checked_sections(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        found = f"Found {unknown[0]!r}." if unknown else "Found none."
        raise UsageError(f"only must list sections out of {', '.join(SECTIONS)}. {found}")
    return tuple(section for section in SECTIONS if section in names)


def _made_folder(output: str) -> Path:
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"output must be a folder that can be written; {output!r} is not: {error.strerror}."
        ) from None
    return folder


def _reproduce(sections: Sequence[str], output: Path, *, quick: bool) -> None:
    summaries = []
    reproduction = Reproduction(
        output, quick=quick, progress=lambda done, total, what: bar.show(done, what, total=total)
    )
    for section in sections:
        started = time.monotonic()
        with Progress(1, unit="part", name=section) as bar:
            outcome = reproduction.run(section)
        files = ", ".join(path.name for path in outcome.files)
        seconds = time.monotonic() - started
        if outcome.table is not None:
            print(report.format_table(outcome.table))
            summaries.append(f"{outcome.table.summary()}; {seconds:.0f} s; {files}")
        else:
            summaries.append(f"{section}: drawn; {seconds:.0f} s; {files}")
    print("\n".join([f"Summary (files in {output}):", *summaries]))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
