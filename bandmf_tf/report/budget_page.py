"""One self-contained HTML page of a program of releases: its history, and what is left."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from bandmf_tf import _provenance, drawing, pages
from bandmf_tf._numbers import round_up
from bandmf_tf.report.budget import Budget


def render(budget: Budget, left: Sequence[str]) -> str:
    """Returns the page; `left` says what is left for each population, in words."""
    cards = [
        (f"{round_up(total.epsilon):g}", f"epsilon of {total.population}; {words}")
        for total, words in zip(budget.last_totals, left, strict=True)
    ]
    return pages.render(
        "budget.html",
        budget=budget,
        cards=cards,
        lead=(
            f"{len(budget.costs)} releases, composed in their order; epsilon at delta = "
            f"{budget.program.delta!r}, zero-out neighbours."
        ),
        up=lambda value: f"{round_up(value):g}",
        picture=history_picture(budget),
        version=_provenance.version_of(),
        created=_provenance.now(),
    )


def history_picture(budget: Budget) -> bytes:
    """Returns epsilon of every population after each of its releases as PNG."""
    names = [cost.name for cost in budget.costs]
    with drawing.figure(6.4, 3.6) as figure:
        axes = figure.add_subplot()
        for population in dict.fromkeys(total.population for total in budget.totals):
            totals = [total for total in budget.totals if total.population == population]
            places = [names.index(total.after) for total in totals]
            epsilons = [total.epsilon for total in totals]
            axes.plot(places, epsilons, marker="o", markersize=4, label=population)
        if budget.program.max_epsilon is not None:
            axes.axhline(budget.program.max_epsilon, color=drawing.ORANGE, label="max_epsilon")
        axes.set_xticks(range(len(names)), [textwrap.shorten(name, 24) for name in names])
        axes.set_ylim(0, None)
        axes.set_ylabel("ε of all releases so far")
        axes.set_title("What the releases cost together")
        axes.grid(axis="y")
        axes.legend()
        return drawing.png(figure)
