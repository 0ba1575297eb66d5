"""Pictures of a plan: the strategy and its inverse, the error of every round, the alternatives.

Nothing here builds a dense n x n matrix of a large strategy. A picture of a matrix shows either
every entry, or evenly spaced rows and columns, or, where that would leave nothing of a narrow band,
the first rounds alone, in full. Matrices are drawn in a purple-orange map, which readers with any
colour vision can tell apart; lines differ in style as well as in colour.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bandmf_tf import drawing
from bandmf_tf._numbers import ceil_div, exactly, round_up
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.planning.comparison import Alternative
from bandmf_tf.planning.frontier import Frontier
from bandmf_tf.planning.plan import Plan

# Rows and columns of a matrix in a picture, at most.
_PIXELS = 512

# With more than this many rounds a band, the whole matrix would show no more than its diagonal: the
# first rounds are shown instead.
_ROUNDS_PER_BAND = 40

# Entries of a block of columns of C^-1 that are in memory at once.
_BLOCK_ENTRIES = 4_000_000

_STYLES = {
    "banded": (drawing.SKY, "--"),
    "identity": (drawing.ORANGE, "-."),
    "tree_online": (drawing.AMBER, "-"),
    "tree_full": (drawing.GREEN, "-"),
    "dense": (drawing.PINK, ":"),
    "blt": (drawing.DARK_GREY, "--"),
    "inverse_banded": (drawing.AMBER, "--"),
}
_FRONTIER_NAMES = {
    "identity": "DP-SGD",
    "tree_full": "OptTreeAgg (full)",
    "blt": "BLT, 1 to 8 buffers",
    "banded": "BandMF",
    "inverse_banded": "banded inverse",
    "dense": "MF (dense)",
}
_STRATEGY_TITLE = "Strategy C"
_INVERSE_TITLE = "Inverse of C, which correlates the noise"
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixView:
    """What a picture shows of a strategy.

    Attributes:
      rounds: The rounds whose rows and columns are shown.
      strategy: Their entries of C.
      inverse: Their entries of C^-1.
      caption: Which part of the matrix that is, in words.
    """

    rounds: np.ndarray
    strategy: np.ndarray
    inverse: np.ndarray
    caption: str


def matrix_view(strategy: Strategy, pixels: int = _PIXELS) -> MatrixView:
    """Returns the entries of C and C^-1 to show, at most `pixels` rows and columns of each."""
    n, shown = strategy.num_rounds, strategy.num_rounds
    if n > _ROUNDS_PER_BAND * strategy.num_bands:
        shown = min(n, pixels, max(64, 6 * strategy.num_bands))
    if shown > pixels:
        stride = ceil_div(n, pixels)
        rounds = np.arange(0, n, stride)
        caption = f"every {_ordinal(stride)} of {n:,} rounds"
        return MatrixView(
            rounds, _entries(strategy, rounds), _inverse_entries(strategy, rounds), caption
        )
    # The leading block of C^-1 is the inverse of the leading block of C, as C is triangular.
    rounds = np.arange(shown)
    block = _entries(strategy, rounds)
    inverse = scipy.linalg.solve_triangular(block, np.eye(shown), lower=True)
    caption = f"all {n:,} rounds" if shown == n else f"first {shown:,} of {n:,} rounds"
    return MatrixView(rounds, block, inverse, caption)


def overview(plan: Plan) -> bytes:
    """Returns one PNG with all pictures of the plan."""
    view = matrix_view(plan.mechanism.strategy)
    more = 0 if plan.frontier is None else 1
    with drawing.figure(12.0, 10.4 + 4.8 * more) as figure:
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        # Every part has a layout of its own, as the widths of labels differ.
        parts: Any = figure.subfigures(3 + more, 1, height_ratios=(0.8, *[4.8] * (2 + more)))
        parts[0].text(0.02, 0.85, _headline(plan), va="top", fontsize=16, fontweight="bold")
        parts[0].text(0.02, 0.45, _subtitle(plan), va="top", color="#444444", linespacing=1.4)
        left, right = parts[1].subfigures(1, 2)
        _draw_matrix(left.add_subplot(), view.strategy, view, _STRATEGY_TITLE)
        _draw_matrix(right.add_subplot(), view.inverse, view, _INVERSE_TITLE)
        left, right = parts[2].subfigures(1, 2)
        _draw_errors(left.add_subplot(), plan)
        _draw_comparison(right.add_subplot(), plan)
        if plan.frontier is not None:
            _draw_frontier(parts[3].add_subplot(), plan.frontier)
        return drawing.png(figure)


def strategy_picture(view: MatrixView) -> bytes:
    """Returns the heat map of C as PNG."""
    with drawing.figure(6.4, 5.2) as figure:
        _draw_matrix(figure.add_subplot(), view.strategy, view, _STRATEGY_TITLE)
        return drawing.png(figure)


def inverse_picture(view: MatrixView) -> bytes:
    """Returns the heat map of C^-1 as PNG."""
    with drawing.figure(6.4, 5.2) as figure:
        _draw_matrix(figure.add_subplot(), view.inverse, view, _INVERSE_TITLE)
        return drawing.png(figure)


def error_picture(plan: Plan) -> bytes:
    """Returns the error of every round, for the plan and its alternatives, as PNG."""
    with drawing.figure(6.4, 4.2) as figure:
        _draw_errors(figure.add_subplot(), plan)
        return drawing.png(figure)


def comparison_picture(plan: Plan) -> bytes:
    """Returns the errors of the plan and its alternatives at the same privacy as PNG."""
    bars = 1 + len(plan.comparison.alternatives)
    with drawing.figure(6.4, 1.4 + 0.45 * bars) as figure:
        _draw_comparison(figure.add_subplot(), plan)
        return drawing.png(figure)


def frontier_picture(frontier: Frontier) -> bytes:
    """Returns the error of every kind of strategy against its memory as PNG."""
    with drawing.figure(6.4, 4.2) as figure:
        _draw_frontier(figure.add_subplot(), frontier)
        return drawing.png(figure)


def _draw_frontier(axes: Axes, frontier: Frontier) -> None:
    for key, name in _FRONTIER_NAMES.items():
        points = [point for point in frontier.points if point.strategy == key]
        colour = drawing.BLUE if key == "banded" else _STYLES[key][0]
        axes.plot(
            [point.bytes_per_parameter for point in points],
            [point.rmse for point in points],
            color=colour,
            linestyle=_STYLES[key][1],
            marker="o",
            markersize=4,
            label=name if points else None,
        )
    chosen = frontier.chosen
    axes.plot(
        [chosen.bytes_per_parameter],
        [chosen.rmse],
        "o",
        markersize=12,
        markerfacecolor="none",
        color=drawing.ORANGE,
        label=f"chosen: {chosen.describe()}",
    )
    axes.axvline(frontier.memory_per_parameter, color=drawing.GREY, linewidth=1.0)
    axes.set_xscale("symlog", linthresh=4.0, base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(left=0.0)
    axes.set_xlabel("bytes of noise a parameter (the budget is the grey line)")
    axes.set_ylabel("RMSE at sigma 1, sensitivity 1")
    axes.set_title("Error against memory, at the same privacy")
    axes.grid(axis="y")
    axes.legend(fontsize=9)


def _draw_matrix(axes: Axes, entries: np.ndarray, view: MatrixView, title: str) -> None:
    stride = int(view.rounds[1] - view.rounds[0]) if view.rounds.size > 1 else 1
    end = int(view.rounds[-1]) + stride
    image = axes.imshow(
        entries / np.abs(entries).max(),
        cmap="PuOr",
        norm=SymLogNorm(linthresh=1e-3, vmin=-1.0, vmax=1.0),
        extent=(0, end, end, 0),
        interpolation="nearest",
    )
    axes.set_title(title)
    axes.set_xlabel(f"column ({view.caption})")
    axes.set_ylabel("row")
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_major_formatter(_THOUSANDS)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, label="of the largest entry")
    decades = [0.0, 0.01, 0.1, 1.0]
    ticks = decades
    if entries.min() < 0.0:
        ticks = [-tick for tick in decades[:0:-1]] + decades
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.set_ylim(ticks[0], 1.0)
    bar.ax.minorticks_off()
    bar.outline.set_edgecolor(drawing.DARK_GREY)


def _draw_errors(axes: Axes, plan: Plan) -> None:
    n = plan.num_rounds
    shown = drawing.shown_rounds(n)
    for entry in sorted(plan.comparison.alternatives, key=lambda entry: -entry.calibrated_rmse):
        colour, style = _STYLES[entry.strategy]
        errors = entry.round_errors[shown]
        axes.plot(shown + 1, errors, color=colour, linestyle=style, linewidth=1.1, label=entry.name)
    label = f"{plan.name} (this plan)"
    errors = plan.planned.round_errors[shown]
    axes.plot(shown + 1, errors, color=drawing.BLUE, linewidth=2.6, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, n)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.set_xlabel("round")
    axes.set_ylabel("standard deviation of the error")
    axes.set_title("Error of every round, clip norm 1")
    axes.grid(axis="y")
    legend = axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9, columnspacing=1.4
    )
    for line in legend.get_lines():
        line.set_linewidth(2.2)


def _draw_comparison(axes: Axes, plan: Plan) -> None:
    entries: list[Alternative] = sorted(
        (plan.planned, *plan.comparison.alternatives), key=lambda entry: -entry.calibrated_rmse
    )
    largest = entries[0].calibrated_rmse
    for position, entry in enumerate(entries):
        is_plan = entry is plan.planned
        value = entry.calibrated_rmse
        axes.barh(position, value, color=drawing.BLUE if is_plan else drawing.GREY, height=0.66)
        ratio = value / plan.calibrated_rmse
        label = f"{value:.3g}" if is_plan else f"{value:.3g}  (×{ratio:.2f})"
        axes.text(
            value + 0.012 * largest,
            position,
            label,
            va="center",
            fontweight="bold" if is_plan else "normal",
        )
    axes.set_yticks(range(len(entries)), [_bar_name(entry) for entry in entries])
    axes.set_xlim(0, 1.28 * largest)
    axes.set_xlabel("RMSE over all rounds, clip norm 1 (less is better)")
    axes.set_title(
        f"At the same privacy: ε = {round_up(_target(plan)):g}, δ = {exactly(plan.mechanism.delta)}"
    )
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _bar_name(entry: Alternative) -> str:
    return f"{entry.name},\namplified" if entry.setting.startswith("amplified") else entry.name


def _headline(plan: Plan) -> str:
    return f"{plan.name} for {plan.num_rounds:,} rounds"


def _subtitle(plan: Plan) -> str:
    mechanism = plan.mechanism
    sampling = "" if mechanism.sampling is None else ", amplified by sampling"
    return (
        f"ε = {round_up(mechanism.epsilon):g} at δ = {exactly(mechanism.delta)} "
        f"({mechanism.guarantee.adjacency} "
        f"neighbours{sampling});  {plan.size};  noise multiplier "
        f"{round_up(mechanism.noise_multiplier, 5):g}\n"
        f"{mechanism.participation.describe()}"
    )


def _target(plan: Plan) -> float:
    return plan.request.epsilon or plan.mechanism.epsilon


def _entries(strategy: Strategy, rounds: np.ndarray) -> np.ndarray:
    """Returns the rows and columns `rounds` of C."""
    block = np.zeros((rounds.size, rounds.size))
    for position, i in enumerate(rounds):
        row = strategy.row(int(i))
        first = int(i) + 1 - len(row)
        inside = (rounds >= first) & (rounds <= i)
        block[position, inside] = row[rounds[inside] - first]
    return block


def _inverse_entries(strategy: Strategy, rounds: np.ndarray) -> np.ndarray:
    """Returns the rows and columns `rounds` of C^-1, from a few of its columns at a time."""
    block = np.empty((rounds.size, rounds.size))
    width = max(1, _BLOCK_ENTRIES // strategy.num_rounds)
    for start in range(0, rounds.size, width):
        columns = rounds[start : start + width]
        block[:, start : start + width] = strategy.inverse_columns(columns)[rounds]
    return block


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else suffix}"
