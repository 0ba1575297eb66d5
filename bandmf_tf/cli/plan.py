"""The planning tool: `bandmf-plan`, or `python -m tools.plan_mechanism` from a checkout.

Reads flags, plans a mechanism (`planning/`), prints a summary or one JSON object, and writes the
mechanism file with its pictures. Progress goes to the standard error; the standard output holds the
result and nothing else. Whatever is wrong with the flags is said in one sentence, with exit status
2, before anything is written.
"""

from __future__ import annotations

import decimal
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bandmf_tf import _checks
from bandmf_tf._files import write_folder
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.cli.program import UsageError, fill, output_folder, run_program
from bandmf_tf.cli.progress import Progress
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.mechanisms.files import (
    MAX_NUM_ROUNDS,
    SUFFIX,
    encode_mechanism,
    mechanism_checksum,
)
from bandmf_tf.planning.frontier import Frontier
from bandmf_tf.planning.plan import AUTO_SAMPLING, SAMPLINGS, STRATEGIES, Plan, PlanRequest
from bandmf_tf.planning.planner import STAGES, make_participation, plan_mechanism

_NAME = "bandmf-plan"
_MECHANISM = f"mechanism{SUFFIX}"
_PAGE, _PICTURE, _NUMBERS = "plan.html", "plan.png", "plan.json"
_FILES = (_MECHANISM, _PAGE, _PICTURE, _NUMBERS)
_DRAWING = "drawing"
_LABEL = 16

# Of numbers of bytes; what does not end in one of these is in bytes.
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_USAGE = """Plans a BandMF mechanism: chooses bands, optimises the strategy, calibrates the noise.

For six epochs of 342 rounds, at epsilon 1:

  bandmf-plan --num_rounds=2052 --min_separation=342 --max_participations=6 \\
      --epsilon=1 --delta=1e-6 --output=plan

The same with batches sampled at random, which amplifies privacy:

  bandmf-plan --num_rounds=2052 --batch_size=1001 --dataset_size=342477 \\
      --epsilon=1 --delta=1e-6 --output=plan

The best mechanism for a large model, if 24 GB can be had for its noise:

  bandmf-plan --num_rounds=2052 --min_separation=342 --max_participations=6 \\
      --epsilon=1 --delta=1e-6 --model_parameters=1000000000 --memory=24GB --output=plan

What a release costs whose parameters are public, with columns of norm 1 / sqrt(5):

  bandmf-plan --num_rounds=2000 --num_bands=400 --column_norm=0.4472136 \\
      --noise_multiplier=1.411 --min_separation=485 --max_participations=3 --delta=1e-10

Flags:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    return run_program(_NAME, _USAGE, _define(), _run, argv)


def _define() -> flags.FlagValues:
    """Returns the flags of this program, which are not those of the process."""
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    integer, number = flags.DEFINE_integer, flags.DEFINE_float
    integer("num_rounds", None, "Number of training rounds n.", **where)
    integer(
        "min_separation", None, "Rounds between two participations of a unit, at least.", **where
    )
    integer(
        "max_participations",
        None,
        "How often a unit takes part, at most; by default what min_separation allows.",
        **where,
    )
    integer(
        "num_epochs",
        None,
        "Passes over the data in a fixed order, instead of the two flags above.",
        **where,
    )
    flags.DEFINE_enum(
        "participation",
        None,
        [MinSeparation.schema, FixedEpochs.schema],
        "Whether participations are at least (min_separation) or exactly (fixed_epochs) that far "
        "apart; by default exactly if num_epochs divides num_rounds or column norms are not equal.",
        **where,
    )
    number("epsilon", None, "Target epsilon, to which the noise is calibrated.", **where)
    number(
        "noise_multiplier",
        None,
        "Noise over clip norm, instead of epsilon; for a strategy of sensitivity 1 or column_norm.",
        **where,
    )
    number(
        "column_norm",
        None,
        "Largest column norm of the strategy, instead of sensitivity 1; a tree of n rounds with "
        "unit nodes has sqrt(1 + floor(log2 n)).",
        **where,
    )
    number("delta", None, "Delta of the guarantee.", **where)
    number("l2_norm_clip", 1.0, "Clip norm of one unit's contribution to one round.", **where)
    integer(
        "batch_size",
        None,
        "Examples in a batch; with dataset_size, privacy is amplified by sampling.",
        **where,
    )
    integer("dataset_size", None, "Examples in the data set.", **where)
    flags.DEFINE_enum(
        "sampling",
        "poisson",
        (*SAMPLINGS, AUTO_SAMPLING),
        "How batches are drawn; auto compares all and takes the one of least error.",
        **where,
    )
    flags.DEFINE_enum(
        "strategy",
        None,
        STRATEGIES,
        "Which kind of matrix shapes the noise; banded, or the best that fits into the memory, or "
        "with balls_in_bins the better one of banded and blt.",
        **where,
    )
    integer(
        "num_bands",
        None,
        "Number of bands, for inverse_banded and inverse_square_root (BISR) of the inverse; chosen "
        "if left out.",
        **where,
    )
    integer("num_buffers", None, "Number of buffers of strategy=blt; chosen if left out.", **where)
    number(
        "memory_per_parameter",
        None,
        "Bytes that earlier rows of noise may take for every parameter of the model; the best "
        "strategy that fits is chosen.",
        **where,
    )
    flags.DEFINE_string(
        "memory",
        None,
        "Instead of memory_per_parameter: memory for these rows in all, such as 500MB or 24GB.",
        **where,
    )
    integer("model_parameters", None, "Parameters of the model, for memory.", **where)
    flags.DEFINE_boolean(
        "equal_column_norms",
        True,
        "Whether all columns have the same norm; false is the variant for exact epochs.",
        **where,
    )
    flags.DEFINE_enum(
        "workload",
        "prefix_sum",
        ["prefix_sum", "sgd"],
        "What training computes: prefix sums, or SGD with momentum and learning_rates.",
        **where,
    )
    number("momentum", None, "Momentum of workload=sgd.", **where)
    flags.DEFINE_string(
        "learning_rates",
        None,
        "Rates of workload=sgd: constant, warmup_cooldown, numbers separated by commas, or a file "
        "of numbers (one rate a round).",
        **where,
    )
    number("tolerance", 2e-4, "Where the optimiser stops, relative to the loss.", **where)
    flags.DEFINE_boolean(
        "compare_dense",
        None,
        "Whether to compare with dense MF, O(n^3); by default up to 600 rounds.",
        **where,
    )
    flags.DEFINE_string(
        "output",
        None,
        f"Folder for {', '.join(_FILES)}; nothing is written without it.",
        **where,
    )
    flags.DEFINE_boolean("json", False, "Print one JSON object instead of the summary.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _run(values: flags.FlagValues) -> int:
    request = _request(values)
    folder = None if values.output is None else output_folder(values.output, _FILES)
    stages = (*STAGES, _DRAWING) if folder else STAGES
    with Progress(len(stages), unit="stage", name=_NAME, seconds_between_lines=math.inf) as bar:
        shown: set[str] = set()

        def progress(stage: str, detail: str) -> None:
            text = f"{stage}, {detail}" if detail else stage
            bar.show(stages.index(stage) + 1, text, milestone=stage not in shown)
            shown.add(stage)

        plan = plan_mechanism(request, progress)
        document = plan.to_json()
        if folder is not None:
            progress(_DRAWING, "")
            document["mechanism_checksum"] = mechanism_checksum(plan.mechanism)
            _write(plan, document, folder)
    if values.json:
        print(_dump(document))
    else:
        print("\n".join(_summary(plan, folder)))
    return 0


def _request(values: flags.FlagValues) -> PlanRequest:
    if values.num_rounds is None:
        raise UsageError("num_rounds, the number of training rounds, must be given.")
    if values.num_rounds > MAX_NUM_ROUNDS:
        raise UsageError(
            f"num_rounds must be at most {MAX_NUM_ROUNDS}, the most that a mechanism file is for; "
            f"plan fewer rounds. Found {values.num_rounds}."
        )
    if values.delta is None:
        raise UsageError("delta must be given; well below 1 / dataset_size, for example 1e-6.")
    schema: type[FixedEpochs | MinSeparation] | None = None
    if values.participation is not None or not values.equal_column_norms:
        is_separated = values.participation == MinSeparation.schema
        schema = MinSeparation if is_separated else FixedEpochs
    workload = _workload(values)
    budget = _memory_per_parameter(values)
    if budget is not None and values.strategy is not None:
        raise UsageError(
            "A budget of memory chooses the strategy; leave out strategy or the budget. Found "
            f"strategy={values.strategy}."
        )
    return PlanRequest(
        workload=workload,
        delta=values.delta,
        epsilon=values.epsilon,
        noise_multiplier=values.noise_multiplier,
        column_norm=values.column_norm,
        l2_norm_clip=values.l2_norm_clip,
        participation=make_participation(
            workload.num_rounds,
            min_separation=values.min_separation,
            max_participations=values.max_participations,
            num_epochs=values.num_epochs,
            schema=schema,
        ),
        batch_size=values.batch_size,
        dataset_size=values.dataset_size,
        sampling=values.sampling,
        strategy=values.strategy or "banded",
        num_bands=values.num_bands,
        num_buffers=values.num_buffers,
        memory_per_parameter=budget,
        equal_column_norms=values.equal_column_norms,
        tolerance=values.tolerance,
        compare_dense=values.compare_dense,
    )


def _memory_per_parameter(values: flags.FlagValues) -> float | None:
    """Returns the bytes that the noise may take for a parameter, however they were given."""
    if (values.memory is None) != (values.model_parameters is None):
        raise UsageError(
            "memory and model_parameters must be given together, or memory_per_parameter instead. "
            f"Found memory={values.memory}, model_parameters={values.model_parameters}."
        )
    if values.memory is None:
        return values.memory_per_parameter
    if values.memory_per_parameter is not None:
        raise UsageError(
            "memory_per_parameter is memory over model_parameters; leave out one or the other. "
            f"Found memory_per_parameter={values.memory_per_parameter:g}, memory={values.memory}."
        )
    number = values.memory.strip().upper().removesuffix("B")
    unit = _UNITS.get(number[-1:], 1)
    try:
        # As decimals: 1.13 times 1e9 is a fraction of a byte short of 1.13 GB, which is a row.
        size = float(unit * decimal.Decimal(number if unit == 1 else number[:-1]))
    except ArithmeticError:
        raise UsageError(
            "memory must be a number of bytes, or one with KB, MB, GB or TB behind it. Found "
            f"{values.memory!r}."
        ) from None
    parameters = _checks.positive_int("model_parameters", values.model_parameters)
    return _checks.positive_float("memory", size) / parameters


def _workload(values: flags.FlagValues) -> Workload:
    if values.workload == "sgd":
        rates = _learning_rates(values.learning_rates or "constant", values.num_rounds)
        return workloads.sgd(values.num_rounds, values.momentum or 0.0, rates)
    for name in ("momentum", "learning_rates"):
        if values[name].value is not None:
            raise UsageError(
                f"{name} is part of workload=sgd; add --workload=sgd. Found {name}="
                f"{values[name].value} with workload=prefix_sum."
            )
    return workloads.prefix_sum(values.num_rounds)


def _learning_rates(text: str, num_rounds: int) -> np.ndarray | None:
    if text == "constant":
        return None
    if text == "warmup_cooldown":
        return workloads.warmup_cooldown_schedule(num_rounds)
    try:
        rates = _numbers(text)
    except ValueError:
        rates = _numbers_in_file(text)
    return np.full(num_rounds, rates[0]) if rates.size == 1 else rates


def _numbers(text: str) -> np.ndarray:
    return np.array([float(number) for number in text.replace(",", " ").split()])


def _numbers_in_file(path: str) -> np.ndarray:
    try:
        return _numbers(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(
            "learning_rates must be constant, warmup_cooldown, numbers separated by commas, or a "
            f"readable file that holds nothing but numbers. Found {path!r}."
        ) from None


def _write(plan: Plan, document: dict[str, Any], folder: Path) -> None:
    from bandmf_tf.planning import figures  # Drawing libraries are slow to import.
    from bandmf_tf.planning import page as plan_page

    write_folder(
        folder,
        {
            _MECHANISM: encode_mechanism(plan.mechanism),
            _PAGE: plan_page.render(plan).encode(),
            _PICTURE: figures.overview(plan),
            _NUMBERS: f"{_dump(document)}\n".encode(),
        },
    )


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)


def _summary(plan: Plan, folder: Path | None) -> Iterator[str]:
    """Yields the lines of the summary."""
    mechanism, guarantee = plan.mechanism, plan.mechanism.guarantee
    yield f"{plan.name} for {plan.num_rounds:,} rounds"
    yield ""
    yield "Strategy"
    yield _row("strategy", f"{plan.request.strategy}, {plan.size}")
    noun = "num_bands" if plan.num_buffers is None else "num_buffers"
    count = plan.num_buffers or plan.num_inverse_bands or plan.num_bands
    yield _row(noun, f"{count}: {plan.size_reason}")
    yield _row("workload", plan.request.workload.describe())
    yield _row("rmse", f"{plan.rmse:.6g} at sigma 1, for the strategy scaled to sensitivity 1")
    if plan.optimization is not None:
        state = "converged" if plan.optimization.converged else "stopped at its limit"
        yield _row(
            "optimiser",
            f"{state} after {_count(plan.optimization.iterations, 'iteration')}, last relative "
            f"change {plan.optimization.relative_change:.1e}",
        )
    yield ""
    yield f"Privacy, for {guarantee.adjacency} neighbours (one unit's contributions become zeros)"
    yield _row("epsilon", f"{round_up(guarantee.epsilon, 6):g} at delta {exactly(guarantee.delta)}")
    yield _row("rho", f"{round_up(guarantee.rho, 6):g}: {plan.rho_note}")
    yield _row(
        "sensitivity",
        f"{round_up(plan.sensitivity.value, 6):g}, {plan.sensitivity.kind}, by "
        f"{plan.sensitivity.theorem}; {plan.sensitivity_note}",
    )
    yield _row(
        "column norm", f"{round_up(plan.max_column_norm, 6):g} at the most, of the strategy as used"
    )
    yield _row("accounting", guarantee.accounting)
    for assumption in guarantee.assumptions:
        yield _row("assumes", assumption)
    yield ""
    yield "Training"
    yield _row(
        "noise",
        f"standard deviation {round_up(mechanism.stddev, 6):g} = noise_multiplier "
        f"{round_up(mechanism.noise_multiplier, 6):g} x l2_norm_clip "
        f"{exactly(mechanism.l2_norm_clip)}; {round_up(plan.unit_noise_multiplier, 6):g} "
        "for columns of norm 1",
    )
    yield _row(
        "memory",
        f"{_count(plan.rows_in_memory, 'earlier noise row')} of the size of the model, "
        f"{plan.bytes_per_parameter:,} bytes a parameter in float32",
    )
    if plan.frontier is not None:
        yield ""
        yield from _frontier_lines(plan.frontier)
    if plan.samplings:
        yield ""
        yield from _sampling_lines(plan)
    yield ""
    yield from _comparison_lines(plan)
    for caution in plan.cautions():
        yield ""
        yield fill(f"Caution: {caution}", "", "  ")
    for hint in plan.hints():
        yield ""
        yield fill(f"Hint: {hint}", "", "  ")
    if folder is not None:
        yield ""
        yield from _next_steps(folder)


def _frontier_lines(frontier: Frontier) -> Iterator[str]:
    yield "Error against memory, at sigma 1 and sensitivity 1"
    for point in frontier.points:
        name = point.describe() + (", chosen" if point == frontier.chosen else "")
        yield f"  {point.bytes_per_parameter:>9,} bytes{point.rmse:>10.4g}  {name}"


def _sampling_lines(plan: Plan) -> Iterator[str]:
    yield "Ways to draw batches, at the same epsilon and delta, clip norm 1; the best was chosen"
    for entry in plan.samplings:
        yield _row(entry.sampling, entry.describe())


def _comparison_lines(plan: Plan) -> Iterator[str]:
    yield "RMSE at the same epsilon and delta, clip norm 1"
    entries = (plan.planned, *plan.comparison.alternatives)
    for entry in sorted(entries, key=lambda entry: entry.calibrated_rmse):
        ratio = entry.calibrated_rmse / plan.calibrated_rmse
        setting = "this plan" if entry is plan.planned else entry.setting
        yield f"  {entry.name:<20}{entry.calibrated_rmse:>10.4g}{ratio:>8.2f}x  {setting}"
    for sentence in plan.comparison.left_out:
        yield _row("left out", sentence)


def _next_steps(folder: Path) -> Iterator[str]:
    yield f"Written to {folder}{os.sep}"
    yield _row(_PAGE, "open this first: the plan with its pictures, on one page")
    yield _row(_PICTURE, "the pictures alone")
    yield _row(_NUMBERS, "every number above, for programs")
    yield _row(_MECHANISM, "the mechanism for training; it verifies itself when Python loads it:")
    yield f"{' ' * (_LABEL + 4)}bandmf_tf.load_mechanism({os.fspath(folder / _MECHANISM)!r})"


def _row(label: str, text: str) -> str:
    return fill(text, f"  {label:<{_LABEL}}  ", " " * (_LABEL + 4))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
