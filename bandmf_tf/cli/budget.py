"""The budget tool: `bandmf-budget`, or `python -m tools.privacy_budget` from a checkout.

Adds up what the releases of a program file cost, computed again from their evidence, and says what
is left. Exit status 0 if the budget suffices, 3 if it does not, and 2, with a sentence, for bad
input, evidence that cannot be read or that supports no guarantee.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from bandmf_tf._checks import positive_float
from bandmf_tf._files import write_folder
from bandmf_tf._numbers import exactly, round_down, round_up
from bandmf_tf.cli.program import UsageError, fill, output_folder, run_program
from bandmf_tf.report.budget import LIMITS, Budget, Program, Total, compose, load_program

_NAME = "bandmf-budget"
_NUMBERS, _PAGE = "budget.json", "budget.html"
_EXCEEDED = 3

_USAGE = """Adds up what several releases cost the people they were trained on.

  bandmf-budget --program=program.yaml --output=budget

A program file lists the releases in their order, each by its report, a run folder, a planned
mechanism or a rho:

  delta: 1.0e-8
  max_epsilon: 12
  releases:
    - name: next word, spring
      report: spring/report.json
    - name: next word, autumn
      mechanism: plan/mechanism.bandmf

The exit status is 3 where max_epsilon or max_rho is exceeded.

Flags:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    return run_program(_NAME, _USAGE, _define(), _run, argv)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("program", None, "The program file (YAML).", **where)
    define_limits(values)
    flags.DEFINE_string("output", None, f"Folder for {_NUMBERS} and {_PAGE}.", **where)
    flags.DEFINE_boolean("json", False, "Print one JSON object instead of words.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    if not values.program:
        raise UsageError("program, the program file, must be given.")
    return show(load_program(values.program), values)


def define_limits(values: flags.FlagValues) -> None:
    """Defines the limits that a budget is checked against, for every population."""
    for name in LIMITS:
        text = f"Exit status {_EXCEEDED} if {name[4:]} of all releases exceeds it."
        flags.DEFINE_float(name, None, text, flag_values=values)


def show(program: Program, values: flags.FlagValues) -> int:
    """Prints what a program costs, as flags say; returns the exit status."""
    limits: dict[str, Any] = {
        name: positive_float(name, values[name].value)
        for name in LIMITS
        if values[name].value is not None
    }
    folder = None if values.output is None else output_folder(values.output, (_NUMBERS, _PAGE))
    budget = compose(dataclasses.replace(program, **limits))
    document = json.dumps(budget.to_json(), indent=2, allow_nan=False)
    if folder is not None:
        from bandmf_tf.report import budget_page  # Drawing libraries are slow to import.

        page = budget_page.render(budget, [left(budget, total) for total in budget.last_totals])
        write_folder(folder, {_NUMBERS: f"{document}\n".encode(), _PAGE: page.encode()})
    print(document if values.json else "\n".join(_lines(budget)))
    return _EXCEEDED if budget.excesses() else 0


def left(budget: Budget, total: Total) -> str:
    """Returns what is left of the budget of one population, in words."""
    words = []
    for name, limit in (
        ("epsilon", budget.program.max_epsilon),
        ("rho", budget.program.max_rho),
    ):
        value = getattr(total, name)
        if limit is not None and value is not None and value <= limit:
            words.append(f"{round_down(limit - value):g} of {name} {exactly(limit)}")
        elif limit is not None:
            words.append(f"nothing of {name} {exactly(limit)}")
    return f"left: {' and '.join(words)}" if words else "no budget was given"


def _lines(budget: Budget) -> Iterator[str]:
    yield f"Releases, epsilon at delta = {budget.program.delta!r}"
    for cost in budget.costs:
        who = f", {', '.join(cost.populations)}" if cost.populations else ""
        how = ", amplified by sampling" if cost.is_amplified else ""
        rho = f"rho {round_up(cost.rho):g}"
        if cost.selection is not None:
            rho = f"{cost.selection.describe()}, each of {rho}"
        yield f"  {cost.name}: epsilon {round_up(cost.epsilon):g}{how}, {rho} ({cost.basis}{who})"
    yield ""
    yield "Together, one after the other"
    for total in budget.totals:
        rho = "no rho" if total.rho is None else f"rho {round_up(total.rho):g}"
        yield (
            f"  {total.population}, after {total.after}: epsilon {round_up(total.epsilon):g}, "
            f"{rho} (by {total.accounting})"
        )
    yield ""
    for total in budget.last_totals:
        yield f"{total.population}: {left(budget, total)}."
    for question in budget.open_questions():
        yield fill(f"Open: {question}", "", "  ")
    for excess in budget.excesses():
        yield fill(f"Exceeded: {excess}", "", "  ")


if __name__ == "__main__":
    sys.exit(main())
