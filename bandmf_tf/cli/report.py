"""The report tool: `bandmf-report`, or `python -m tools.privacy_report` from a checkout.

Points at a finished run, or at a mechanism file and evidence of participation, and writes a report:
`statement.txt`, `statement.md`, `report.json`, `deployment.yaml` and `report.html`. With `--verify`
it computes a report again instead, and with `--check_signature` whatever of a published one needs
no evidence. Whatever is wrong is said in one sentence: exit status 2 for bad
input, files that cannot be read, or a guarantee that the evidence does not support; 1 for a report
that does not hold. On error
nothing is written; a report appears as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bandmf_tf._files import write_folder
from bandmf_tf.cli import budget
from bandmf_tf.cli.program import EXPECTED, UsageError, output_folder, run_program, sentence
from bandmf_tf.evidence import confined
from bandmf_tf.evidence.reader import (
    EDITIONS,
    SMALL_COUNT,
    ReportError,
    ReportRequest,
    UnreadableError,
)
from bandmf_tf.report import registry, signing, statement
from bandmf_tf.report.analysis import PrivacyAnalysis
from bandmf_tf.report.arithmetic import check_arithmetic
from bandmf_tf.report.budget import LIMITS, program_of_runs
from bandmf_tf.report.document import (
    REPORT_FILE,
    VERSION,
    PrivacyReport,
    check_found,
    dump,
    make_report,
    read_report,
    verify_report,
)

_NAME = "bandmf-report"
_TEXT, _MARKDOWN = "statement.txt", "statement.md"
_REGISTRY, _PAGE = "deployment.yaml", "report.html"
_FILES = (_TEXT, _MARKDOWN, REPORT_FILE, _REGISTRY, _PAGE)
_SIGNED = (signing.SUMS, signing.SIGNATURE)
_OF_SEVERAL_RUNS = ("run", "delta", *LIMITS, "output", "json")
_LARGEST_REPORT = 1 << 28  # Bytes.
_CHECKING = ("check_signature", "public_key", "json")
_PATHS = ("run", "mechanism", "participation", "further_participation", "audit", "facts")
_NUMBERS = tuple(
    field.name for field in dataclasses.fields(ReportRequest) if field.name not in _PATHS
)

_USAGE = """Writes the privacy report of a finished run.

From the folder of a run:

  bandmf-report --run=RUN --delta=1e-10 --output=report

From a mechanism file and a participation log (CSV, JSON lines or Parquet, with the columns client
and round); or a ledger, or a CSV timeline (round, start, end) with the clients' timer; or limits:

  bandmf-report --mechanism=plan/mechanism.bandmf --participation=log.parquet --output=report
  bandmf-report --mechanism=plan/mechanism.bandmf --participation=rounds.csv \\
      --timer_seconds=86400 --output=report
  bandmf-report --mechanism=plan/mechanism.bandmf --min_separation=385 \\
      --max_participations=4 --rounds_completed=2000 --delta=1e-10 --output=report

To check a report against its evidence, and a published one by its signature alone:

  bandmf-report --verify=report/report.json --evidence_root=.
  bandmf-report --check_signature=report --public_key=public.pem

Flags:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    return run_program(_NAME, _USAGE, _define(), _run, argv)


def _define() -> flags.FlagValues:
    """Returns the flags of this program, which are not those of the process."""
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    string, integer, number = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    flags.DEFINE_multi_string(
        "run",
        None,
        "Folder of a training run. Given several times, what these runs cost together is printed, "
        "as by bandmf-budget, at --delta.",
        **where,
    )
    string("mechanism", None, "Mechanism file, where there is no run folder.", **where)
    flags.DEFINE_multi_string(
        "participation",
        None,
        "Participation log (.csv, .jsonl, .parquet), ledger, or timeline of rounds (.csv). Given "
        "several times, or as a folder or a pattern of names, it is the shards of one log.",
        **where,
    )
    flags.DEFINE_boolean(
        "fold_clients",
        False,
        "Take all spellings of a client in a log for one client, and NA or nil for none.",
        **where,
    )
    string("ledger_head", None, "The ledger's last hash, from a record kept elsewhere.", **where)
    number("timer_seconds", None, "Period of the clients' timer, with a timeline.", **where)
    integer(
        "min_separation",
        None,
        "Rounds between two participations of a client, at least; never improves on evidence.",
        **where,
    )
    integer(
        "max_participations",
        None,
        "Rounds of a client, at most; never improves on evidence, beside a timer it is assumed.",
        **where,
    )
    integer(
        "rounds_completed",
        None,
        "Completed rounds, if no ledger says it; by default those of the log, else all planned.",
        **where,
    )
    number(
        "noise_multiplier",
        None,
        "Noise over clip norm, if it was not the mechanism's; the strategy is taken as it is.",
        **where,
    )
    flags.DEFINE_enum(
        "edition",
        "public",
        EDITIONS,
        "A public edition leaves out small counts and whatever singles out a unit.",
        **where,
    )
    integer(
        "small_count", SMALL_COUNT, "Counts below it do not stand in a public edition.", **where
    )
    number("delta", None, "Delta of the guarantee; the mechanism's by default.", **where)
    string("audit", None, "What bandmf-audit found (audit.json), for the report to carry.", **where)
    string("facts", None, "Facts that no evidence holds (YAML): model, owner, contact, ..", **where)
    flags.DEFINE_boolean(
        "replace_one", False, "State the guarantee for replace-one neighbours, too.", **where
    )
    string("output", None, f"Folder for {', '.join(_FILES)}.", **where)
    string(
        "signing_key", None, "Private key (ed25519, PEM) to sign the public edition with.", **where
    )
    string(
        "check_signature", None, "Folder of a signed report, to check without evidence.", **where
    )
    string("public_key", None, "The owner's public key (PEM), from the owner.", **where)
    string("verify", None, f"A {REPORT_FILE} to compute again from its evidence.", **where)
    string(
        "evidence_root",
        None,
        "Folder of the evidence that the report names, and of no other; by default the report's.",
        **where,
    )
    budget.define_limits(values)
    flags.DEFINE_boolean("json", False, "Print one JSON object instead of the statement.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    if values.check_signature is not None:
        return _check_signature(values)
    if values.public_key is not None:
        raise UsageError("public_key belongs to check_signature, the folder of a signed report.")
    if values.evidence_root is not None and values.verify is None:
        raise UsageError("evidence_root belongs to verify, a report that names its evidence.")
    if len(values.run or ()) > 1:
        return _together(values)
    given = [name for name in LIMITS if values[name].value is not None]
    if given:
        raise UsageError(f"{given[0]} is for several runs, which --run names one by one.")
    return _verify(values) if values.verify is not None else _report(values)


def _together(values: flags.FlagValues) -> int:
    """Prints what several runs cost those who took part in all of them."""
    others = sorted(
        name for name in values if values[name].present and name not in _OF_SEVERAL_RUNS
    )
    if others or values.delta is None:
        found = f"Found --{others[0]}" if others else "Found no --delta"
        raise UsageError(
            f"several runs take {', '.join(_OF_SEVERAL_RUNS)} and nothing else; more can be said "
            f"in a program file of bandmf-budget. {found}."
        )
    program = program_of_runs(values.run, values.delta)
    return budget.show(program, values)


def _report(values: flags.FlagValues) -> int:
    request = _request(values)
    key = None if values.signing_key is None else Path(values.signing_key)
    if key is not None and (values.output is None or request.edition != "public"):
        raise UsageError("signing_key needs output, and signs public editions alone.")
    folder = None if values.output is None else _checked_folder(values.output, key is not None)
    report, analysis = make_report(request)
    if folder is not None:
        _write(report, analysis, folder, key)
    if values.json:
        print(dump(report.summary()))
    else:
        print(statement.statement_text(report), end="")
        if folder is not None:
            print(f"\nWritten to {folder}{os.sep}: {', '.join(_FILES)}. Open {_PAGE} first.")
    return 0


def _verify(values: flags.FlagValues) -> int:
    path = Path(values.verify)
    given = [name for name in (*_NUMBERS, "output", "signing_key") if values[name].present]
    if given:
        raise UsageError(f"verify takes the numbers from the report. Found --{given[0]}.")
    root = path.parent
    if values.evidence_root is not None:
        root = Path(values.evidence_root)
        if not values.evidence_root or not root.is_dir():
            raise UsageError(f"evidence_root must be a folder. Found {values.evidence_root!r}.")
    if path.is_dir():
        raise UsageError(f"verify must be a report, such as {path / REPORT_FILE}, not its folder.")
    _check_files(path.parent, path.name)
    report, moved = read_report(path), _paths(values)
    request = dataclasses.replace(report.request_in(root), **moved)
    # What the caller names is taken as it is; the rest may be a stranger's.
    named = {*moved.values()} | {*moved.get("further_participation", ())}
    theirs = [file for file in request.paths if file not in named]
    try:
        with confined.limited_time() if theirs else contextlib.nullcontext():
            confined.check(theirs, root)
            check_found(theirs, root)
            agreed, left_out = verify_report(report, request), ""
            if report.version == VERSION:
                _verify_texts(report, path.parent)
            else:
                left_out = " Words of older versions, and statements beside them, are not compared."
    except (UnreadableError, OSError, MemoryError):
        raise
    except EXPECTED as error:
        print(f"{_NAME}: {path} does not hold: {sentence(error)}", file=sys.stderr)
        return 1
    if values.json:
        print(dump(report.summary()))
        if left_out:
            print(f"{_NAME}:{left_out}", file=sys.stderr)
    else:
        found = f"{agreed:,} entries were computed again from the evidence."
        print(f"{path} holds: {found}{left_out}")
    return 0


def _check_signature(values: flags.FlagValues) -> int:
    folder = Path(values.check_signature)
    given = [name for name in values if values[name].present and name not in _CHECKING]
    if given or values.public_key is None:
        found = f"--{given[0]}" if given else "no public_key"
        raise UsageError(f"check_signature takes public_key, from the owner. Found {found}.")
    _check_files(folder, *_SIGNED)
    try:
        signing.check_signature(folder, _FILES, Path(values.public_key))
        report = read_report(folder / REPORT_FILE)
        if report.request.edition != "public":
            raise ReportError(f"{folder / REPORT_FILE} is no public edition.")
        agreed = check_arithmetic(report)
        _verify_texts(report, folder)
    except (UnreadableError, OSError):
        raise
    except EXPECTED as error:
        print(f"{_NAME}: {folder} does not hold: {sentence(error)}", file=sys.stderr)
        return 1
    if values.json:
        print(dump(report.summary()))
    else:
        others = sorted({entry.name for entry in folder.iterdir()} - {*_FILES, *_SIGNED})
        unsigned = f" Not signed: {', '.join(others)}." if others else ""
        print(
            f"{folder}, made at {report.created}, was signed with this key and not changed since; "
            f"{agreed} figures follow from each other, and all files say the same. The evidence "
            f"was not looked at.{unsigned}"
        )
    return 0


def _check_files(folder: Path, *names: str) -> None:
    """Raises unless the files of a report, which may be a stranger's, are files in its folder."""
    files = [folder / name for name in (*_FILES, *names)]
    confined.check(files, folder, _LARGEST_REPORT, beside=False)


def _verify_texts(report: PrivacyReport, folder: Path) -> None:
    """Compares the statements beside a report, where there are any, with what it says.

    Of the page the words are compared; its pictures depend on the libraries that drew them.
    """
    from bandmf_tf.report import page as report_page  # Drawing libraries are slow to import.

    texts = {**_texts(report), _PAGE: report_page.render(report, None)}
    for name, text in texts.items():
        path = folder / name
        if not path.exists():
            continue
        stated = path.read_text("utf-8", errors="replace")
        if name == _PAGE:
            stated = report_page.without_pictures(stated)
        if stated != text:
            raise ReportError(f"{path} does not say what {REPORT_FILE} says.")


def _request(values: flags.FlagValues) -> ReportRequest:
    given = {name: values[name].value for name in _NUMBERS if values[name].value is not None}
    return ReportRequest(**given, **_paths(values))


def _paths(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the paths that were given, as fields of a request."""
    given: dict[str, Any] = {
        name: Path(values[name].value)
        for name in ("mechanism", "audit", "facts")
        if values[name].value is not None
    }
    if values.run:
        given["run"] = Path(values.run[0])
    if values.participation:
        if "" in values.participation:
            raise UsageError("participation must name a file, a folder or a pattern. Found ''.")
        first, *further = map(Path, values.participation)
        given.update(participation=first, further_participation=tuple(further))
    return given


def _checked_folder(output: str, is_signed: bool) -> Path:
    """Returns the folder to write to: new, empty, or with an earlier report, which is replaced."""
    files = (*_FILES, *_SIGNED) if is_signed else _FILES
    folder = output_folder(output, files)
    if folder.is_dir():
        others = sorted({entry.name for entry in folder.iterdir()} - set(files))
        if others:
            raise UsageError(
                f"output={output} holds other things than a report, such as {others[0]}; choose a "
                "new folder."
            )
    return folder


def _texts(report: PrivacyReport) -> dict[str, str]:
    return {
        _TEXT: statement.statement_text(report),
        _MARKDOWN: statement.statement_markdown(report),
        _REGISTRY: registry.registry_entry(report),
    }


def _write(
    report: PrivacyReport, analysis: PrivacyAnalysis, folder: Path, key: Path | None
) -> None:
    from bandmf_tf.report import page as report_page  # Drawing libraries are slow to import.

    contents = {
        **_texts(report),
        REPORT_FILE: dump(report.to_json()) + "\n",
        _PAGE: report_page.render(report, analysis),
    }
    files = {name: text.encode() for name, text in contents.items()}
    write_folder(folder, files if key is None else signing.signed(files, key))


if __name__ == "__main__":
    sys.exit(main())
