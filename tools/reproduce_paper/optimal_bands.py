"""The optimal number of bands for n = 1024, ten epsilons and eleven numbers of epochs.

In the setting of the paper's comparison an epoch is n / k rounds, so a batch is the share k / n of
the data set and a sampled part of one b-th of it has the sampling probability q = b k / n, used
T = n / b times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm

from bandmf_tf._numbers import exactly
from bandmf_tf.accounting.privacy_loss import PAPER_DISCRETIZATION
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.planning import bands
from bandmf_tf.planning.bands import BandSearch
from tools.reproduce_paper import drawing, published
from tools.reproduce_paper.report import Entry, Progress, Table, silent

_N = published.OPTIMAL_BANDS_NUM_ROUNDS
_DELTA = published.OPTIMAL_BANDS_DELTA

# A cell of the table: (epsilon, number of epochs k).
Cell = tuple[float, int]
ALL_CELLS: tuple[Cell, ...] = tuple(
    (epsilon, k) for epsilon in published.OPTIMAL_BANDS for k in published.OPTIMAL_BANDS_EPOCHS
)


@functools.cache
def banded_loss(num_bands: int) -> float:
    """Returns `|A C^-1|_F^2` of the optimal banded strategy with unit column norms."""
    return optimize_banded(workloads.prefix_sum(_N), num_bands).loss


def search_cells(
    cells: Iterable[Cell] = ALL_CELLS, progress: Progress = silent
) -> dict[Cell, BandSearch]:
    """Returns for every cell the best power of two and everything that was tried."""
    cells = tuple(cells)
    searches = {}
    for done, (epsilon, k) in enumerate(cells):
        progress(done, len(cells), f"epsilon = {exactly(epsilon)}, {k} epochs")
        searches[epsilon, k] = bands.choose_num_bands(
            banded_loss,
            epsilon=epsilon,
            delta=_DELTA,
            num_rounds=_N,
            batch_size=k,
            dataset_size=_N,
            refine=False,
            discretization=PAPER_DISCRETIZATION,
        )
    return searches


def optimal_bands_table(searches: dict[Cell, BandSearch]) -> Table:
    """Returns the best numbers of bands beside the paper's."""
    return Table(
        name="bands",
        title=f"Optimal number of bands for n = {_N}",
        label=published.OPTIMAL_BANDS_LABEL,
        conventions=(
            (
                "An epoch has n / k rounds: with b bands the sampling probability is b k / n and "
                "there are n / b compositions."
            ),
            (
                "Candidates are the powers of two up to n / k, where a part is one batch; at that "
                "largest number nothing is hidden by sampling, and the paper still accounts n / b "
                "Poisson-sampled Gaussians."
            ),
            (
                "PLD with a grid of 1e-4, rounded up, delta = 1e-6; a grid of 1e-3 changes the "
                "answer for small epsilon."
            ),
            "Every strategy is optimal for Problem 2 (equal column norms).",
        ),
        entries=tuple(_entry(cell, search) for cell, search in searches.items()),
    )


def published_bands(epsilon: float, epochs: int) -> int:
    """Returns the paper's entry."""
    return published.OPTIMAL_BANDS[epsilon][published.OPTIMAL_BANDS_EPOCHS.index(epochs)]


def draw_optimal_bands(searches: dict[Cell, BandSearch], folder: Path) -> Path:
    """Draws the table; entries that differ from the paper show both."""
    epsilons = sorted({epsilon for epsilon, _ in searches})
    epochs = sorted({k for _, k in searches})
    found = np.full((len(epsilons), len(epochs)), np.nan)
    texts = np.full(found.shape, "", dtype=object)
    for (epsilon, k), search in searches.items():
        position = epsilons.index(epsilon), epochs.index(k)
        found[position] = search.best.num_bands
        theirs = published_bands(epsilon, k)
        same = theirs == search.best.num_bands
        texts[position] = (
            f"{search.best.num_bands}" if same else (f"{search.best.num_bands}\n(paper {theirs})")
        )
    path = folder / "bands.png"
    with drawing.picture(path, 7.6, 5.2) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(found, cmap="Blues", norm=LogNorm(1, _N), aspect="auto")
        drawing.label_cells(axes, texts, found > 64)
        axes.set_xticks(range(len(epochs)), [str(k) for k in epochs])
        axes.set_yticks(range(len(epsilons)), [exactly(epsilon) for epsilon in epsilons])
        axes.set_xlabel("epochs k")
        axes.set_ylabel("epsilon")
        axes.set_title(f"Optimal number of bands, n = {_N}, delta = {exactly(_DELTA)}")
        figure.colorbar(image, ax=axes, label="bands")
    return path


def _entry(cell: Cell, search: BandSearch) -> Entry:
    epsilon, k = cell
    theirs, best = published_bands(epsilon, k), search.best
    note = ""
    if theirs != best.num_bands:
        rmse = next(tried.rmse for tried in search.tried if tried.num_bands == theirs)
        note = (
            f"epsilon = {exactly(epsilon)}, k = {k}: {best.num_bands} bands have RMSE "
            f"{best.rmse:.5g} and the paper's {theirs} have {rmse:.5g}, "
            f"{rmse / best.rmse - 1.0:.2%} more."
        )
    return Entry(
        f"epsilon = {exactly(epsilon)}", f"k = {k}", Decimal(theirs), float(best.num_bands), note
    )
