"""Pictures of a privacy report."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from bandmf_tf import drawing
from bandmf_tf._numbers import ceil_div, round_up
from bandmf_tf.planning import figures
from bandmf_tf.report.analysis import PrivacyAnalysis
from bandmf_tf.report.document import PrivacyReport

# Bars of a histogram, at most.
_BARS = 80


def strategy_picture(analysis: PrivacyAnalysis) -> bytes:
    """Returns the heat map of the strategy as PNG."""
    return figures.strategy_picture(figures.matrix_view(analysis.strategy))


def curve_picture(report: PrivacyReport) -> bytes:
    """Returns epsilon against delta as PNG."""
    deltas = [point.delta for point in report.curve]
    epsilons = [point.epsilon for point in report.curve]
    with drawing.figure(6.4, 3.6) as figure:
        axes = figure.add_subplot()
        axes.plot(deltas, epsilons, color=drawing.BLUE, marker="o", markersize=4)
        axes.plot(
            [report.delta],
            [report.epsilon],
            color=drawing.ORANGE,
            marker="D",
            markersize=8,
            linestyle="none",
            label=f"stated: ε = {round_up(report.epsilon):g} at δ = {report.delta!r}",
        )
        axes.set_xscale("log")
        axes.set_ylim(0, None)
        axes.set_xlabel("δ")
        axes.set_ylabel("ε")
        axes.set_title("Epsilon at every delta")
        axes.grid(axis="y")
        axes.legend(loc="lower left")
        return drawing.png(figure)


def planned_picture(report: PrivacyReport) -> bytes:
    """Returns epsilon as planned, of the run and of tree aggregation as PNG."""
    this = "this run,\nassumed" if report.assumed else "this run"
    bars = [
        ("tree aggregation,\nsame error", report.tree_aggregation.epsilon, drawing.GREY),
        (this, report.epsilon, drawing.BLUE),
        ("planned", report.planned.epsilon, drawing.GREY),
    ]
    if report.epsilon_amplified is not None:
        unamplified = ("this run,\nnot amplified", report.epsilon_unamplified, drawing.BLUE)
        bars.insert(1, unamplified)
    largest = max(value for _, value, _ in bars)
    with drawing.figure(6.4, 1.2 + 0.5 * len(bars)) as figure:
        axes = figure.add_subplot()
        for position, (_, value, colour) in enumerate(bars):
            axes.barh(position, value, color=colour, height=0.66)
            axes.text(value + 0.012 * largest, position, f"{round_up(value):g}", va="center")
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.set_xlim(0, 1.18 * largest)
        axes.set_xlabel(f"ε at δ = {report.delta!r} (less is better)")
        axes.set_title("Plan and run")
        axes.tick_params(axis="y", length=0)
        return drawing.png(figure)


def separation_picture(report: PrivacyReport) -> bytes:
    """Returns the histogram of separations as PNG."""
    observed = report.observed
    # Of merged cells, all that is in one is drawn where it begins.
    histogram = observed.separations or {c.lowest: c.count for c in observed.separation_cells}
    separations = np.array(list(histogram))
    counts = np.array(list(histogram.values()))
    smallest, largest = int(separations.min()), int(separations.max())
    width = ceil_div(largest - smallest + 1, _BARS)
    planned = report.planned.min_separation
    # Bars end where the plan begins, so that what violates it has a colour of its own.
    first = smallest if planned is None else smallest - (smallest - planned) % width
    bins = np.bincount((separations - first) // width, weights=counts)
    lefts = first + width * np.arange(bins.size)
    kept = lefts >= (first if planned is None else planned)
    colours = np.where(kept, drawing.BLUE, drawing.ORANGE)
    with drawing.figure(6.4, 3.6) as figure:
        axes = figure.add_subplot()
        axes.bar(
            lefts - 0.5,
            bins,
            width=width,
            align="edge",
            color=colours,
            edgecolor="white",
            linewidth=0.3,
        )
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(0, 8 * bins.max())  # Room for the legend.
        if planned is not None:
            label = f"planned: at least {planned:,}"
            axes.axvline(planned - 0.5, 0, 0.85, color=drawing.ORANGE, linestyle="--", label=label)
            axes.legend(loc="upper right")
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.set_xlabel("rounds between successive participations of a unit")
        axes.set_ylabel("pairs of participations")
        axes.set_title(f"Separations; the smallest is {smallest:,}")
        return drawing.png(figure)


def rounds_picture(report: PrivacyReport) -> bytes:
    """Returns the contributions to each round as PNG."""
    counts = np.array(report.observed.contributions_by_round)
    shown = drawing.shown_rounds(counts.size)
    with drawing.figure(6.4, 3.2) as figure:
        axes = figure.add_subplot()
        axes.plot(shown, counts[shown], color=drawing.BLUE, linewidth=1.2, drawstyle="steps-mid")
        place = report.observed.closest
        if place is not None:
            first, last = place.first_round, place.last_round
            label = f"closest participations: rounds {first:,} and {last:,}"
            for i, round_number in enumerate((first, last)):
                axes.axvline(
                    round_number,
                    color=drawing.ORANGE,
                    linestyle="--",
                    label=label if i == 0 else None,
                )
            axes.legend(loc="best")
        axes.set_ylim(0, 1.15 * max(1, counts.max()))
        axes.set_xlim(0, max(1, counts.size - 1))
        axes.set_xlabel("round")
        axes.set_ylabel("contributions")
        axes.set_title("Participation over time")
        return drawing.png(figure)
