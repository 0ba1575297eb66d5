"""RMSE of DP-SGD, multi-epoch MF and BandMF for n = 1024: the three panels of the comparison.

At every (epsilon, k epochs) DP-SGD and BandMF are amplified by Poisson sampling (DP-SGD is one
band), BandMF with its best number of bands, and dense multi-epoch MF is one Gaussian release. Here
and in `bands` the RMSE is that of prefix sums of gradient *sums*, clip norm 1.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bandmf_tf._numbers import exactly
from bandmf_tf.accounting.gaussian import gaussian_noise_multiplier
from bandmf_tf.accounting.privacy_loss import PAPER_DISCRETIZATION
from bandmf_tf.factorization import workloads
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.optimization import optimize_banded_fixed_epochs
from bandmf_tf.planning.bands import BandSearch
from tools.reproduce_paper import drawing, published
from tools.reproduce_paper.optimal_bands import Cell
from tools.reproduce_paper.report import Entry, Progress, Table, silent

_N = published.OPTIMAL_BANDS_NUM_ROUNDS
_DELTA = published.OPTIMAL_BANDS_DELTA

# A duality gap of 1 % in the loss is at most 0.5 % in the RMSE: invisible in a heat map.
_DENSE_TOLERANCE = 1e-2
# With more epochs the dual of the dense problem is too ill-conditioned to be solved in minutes.
_MOST_DENSE_EPOCHS = 32
# The advantage of MF at k = n that still counts as small.
_SMALL_ADVANTAGE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class RmseGrid:
    """RMSE by (epsilon, epochs).

    Attributes:
      epsilons: Rows, ascending.
      epochs: Columns, ascending.
      dp_sgd: Amplified DP-SGD.
      banded: Amplified BandMF at its best number of bands.
      num_bands: That number.
      dense: Dense multi-epoch MF; None if it was left out.
    """

    epsilons: tuple[float, ...]
    epochs: tuple[int, ...]
    dp_sgd: np.ndarray
    banded: np.ndarray
    num_bands: np.ndarray
    dense: np.ndarray | None


def dense_losses(
    epochs: tuple[int, ...] = published.OPTIMAL_BANDS_EPOCHS, progress: Progress = silent
) -> dict[int, float]:
    """Returns for each number of epochs k the loss of multi-epoch MF, column norms free.

    From 64 epochs on it is the loss with n / k bands: a feasible point of the same problem, whose
    classes are orthogonal because the bands are no wider than an epoch. At k = n, where X must be
    diagonal, it is the optimum itself; a descent from it over all of X lowered the RMSE by 2.6 % at
    k = 64 and by 0.3 % at k = 512.
    """
    workload = workloads.prefix_sum(_N)
    losses = {}
    for done, k in enumerate(epochs):

        def show(iteration: int, loss: float, done: int = done, k: int = k) -> None:
            progress(done, len(epochs), f"dense MF, {k} epochs: iteration {iteration}")

        show(0, 0.0)
        separation = _N // k
        if k > _MOST_DENSE_EPOCHS:
            result = optimize_banded_fixed_epochs(workload, separation, separation, progress=show)
        else:
            result = optimize_dense(workload, separation, tolerance=_DENSE_TOLERANCE, progress=show)
            if not result.converged:
                raise RuntimeError(f"Dense MF did not converge for {k} epochs; raise its limits.")
        losses[k] = result.loss
    return losses


def rmse_grid(searches: Mapping[Cell, BandSearch], losses: Mapping[int, float] | None) -> RmseGrid:
    """Returns the RMSE of every mechanism from the band searches and the dense losses."""
    epsilons = tuple(sorted({epsilon for epsilon, _ in searches}))
    epochs = tuple(sorted({k for _, k in searches}))
    best = [[searches[epsilon, k].best for k in epochs] for epsilon in epsilons]
    one_band = [
        [
            next(tried for tried in searches[epsilon, k].tried if tried.num_bands == 1)
            for k in epochs
        ]
        for epsilon in epsilons
    ]
    dense = None
    if losses is not None:
        noise = [
            gaussian_noise_multiplier(epsilon, _DELTA, 1.0, discretization=PAPER_DISCRETIZATION)
            for epsilon in epsilons
        ]
        dense = np.outer(noise, np.sqrt([losses[k] / _N for k in epochs]))
    return RmseGrid(
        epsilons=epsilons,
        epochs=epochs,
        dp_sgd=np.array([[candidate.rmse for candidate in row] for row in one_band]),
        banded=np.array([[candidate.rmse for candidate in row] for row in best]),
        num_bands=np.array([[candidate.num_bands for candidate in row] for row in best]),
        dense=dense,
    )


def heat_map_table(grid: RmseGrid) -> Table:
    """Returns what the paper says of the panels, and whether our numbers show it."""
    checks = _checks_of_banded(grid)
    left_out: tuple[str, ...] = ("panel (a) and the MF line of panel (c)",)
    if grid.dense is not None:
        checks = {**_checks_of_dense(grid, grid.dense), **checks}
        left_out = ()
    return Table(
        name="heatmaps",
        title="What the text says of the RMSE panels (1: it holds)",
        label=published.RMSE_LABEL,
        counted="statements of the text hold",
        conventions=(
            (
                "The figure prints no digits; its statements in the text are checked instead, and "
                "heatmaps_cells.csv holds every RMSE."
            ),
            (
                "DP-SGD is amplified (q = k / n, n compositions); multi-epoch MF is the dense "
                "optimum for (k, n / k)-participation with free column norms and without "
                "amplification."
            ),
            (
                f"Above {_MOST_DENSE_EPOCHS} epochs multi-epoch MF has n / k bands instead of "
                "being dense, which costs a few per cent of RMSE at most."
            ),
            (
                "In panel (c) the RMSE is divided by the batch size, which grows with k (in units "
                "of the batch of one epoch): the RMSE of summed gradients grows with k, and only "
                "that of mean gradients improves as the text says."
            ),
        ),
        entries=tuple(
            Entry(claim, "holds", Decimal(1), float(checks[key][0]), checks[key][1])
            for key, claim in published.RMSE_CLAIMS.items()
            if key in checks
        ),
        left_out=left_out,
    )


def _checks_of_dense(grid: RmseGrid, dense: np.ndarray) -> dict[str, tuple[bool, str]]:
    """Returns key -> (whether it holds, the numbers) for the claims about multi-epoch MF."""
    ratio = grid.dp_sgd / dense
    advantage = 1.0 - dense[:, -1] / grid.dp_sgd[:, -1]
    row = grid.epsilons.index(published.RMSE_VS_EPOCHS_EPSILON)
    last = dense[row, -1] / grid.banded[row, -1]
    return {
        "regimes": (
            bool((ratio < 1.0).any() and (ratio > 1.0).any()),
            (
                f"(a) DP-SGD is better in {np.count_nonzero(ratio < 1.0)} of {ratio.size} cells; "
                f"the ratio of its RMSE to that of MF runs from {ratio.min():.3f} to "
                f"{ratio.max():.3f}."
            ),
        ),
        "advantage": (
            bool(((advantage > 0.0) & (advantage < _SMALL_ADVANTAGE)).all()),
            (
                f"(a) at k = n the RMSE of MF is {advantage.min():.2%} to {advantage.max():.2%} "
                "below that of DP-SGD: X is diagonal there, and only its weights differ from the "
                "identity."
            ),
        ),
        "many epochs": (
            bool(last < 1.0),
            f"(c) at k = n the RMSE of MF is {1.0 - last:.2%} below that of BandMF.",
        ),
    }


def _checks_of_banded(grid: RmseGrid) -> dict[str, tuple[bool, str]]:
    """Returns key -> (whether it holds, the numbers) for the claims about BandMF."""
    ratio = grid.dp_sgd / grid.banded
    corner = np.unravel_index(np.argmax(ratio), ratio.shape)
    row = grid.epsilons.index(published.RMSE_VS_EPOCHS_EPSILON)
    lines = [line[row] / np.array(grid.epochs) for line in _mechanisms(grid).values()]
    one_band = [k for k, bands in zip(grid.epochs, grid.num_bands[row], strict=True) if bands == 1]
    return {
        "never worse": (
            bool((ratio >= 1.0).all()),
            (
                f"(b) the RMSE of DP-SGD is {ratio.min():.3f} to {ratio.max():.3f} times that of "
                f"BandMF, and the same in {np.count_nonzero(ratio == 1.0)} of {ratio.size} cells."
            ),
        ),
        "gain": (
            (int(corner[0]), int(corner[1])) == (len(grid.epsilons) - 1, 0),
            (
                f"(b) the largest gain is at epsilon = {exactly(grid.epsilons[corner[0]])}, k = "
                f"{grid.epochs[corner[1]]}."
            ),
        ),
        "epochs": (
            all(bool((np.diff(line) <= 1e-6 * line[1:]).all()) for line in lines),
            "(c) RMSE of mean gradients, from the fewest to the most epochs: "
            + "; ".join(
                f"{name} {line[0]:.3f} to {line[-1]:.3f}"
                for name, line in zip(_mechanisms(grid), lines, strict=True)
            )
            + ".",
        ),
        "reduction": (
            bool(one_band) and one_band == [k for k in grid.epochs if k >= one_band[0]],
            f"(c) one band is best for k in {one_band}.",
        ),
    }


def write_cells(grid: RmseGrid, folder: Path) -> Path:
    """Writes the RMSE of every mechanism in every cell."""
    path = folder / "heatmaps_cells.csv"
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("epsilon", "epochs", "dp_sgd", "bandmf", "bandmf_num_bands", "multi_epoch_mf"))
    for i, epsilon in enumerate(grid.epsilons):
        for j, k in enumerate(grid.epochs):
            dense = "" if grid.dense is None else f"{grid.dense[i, j]:.6g}"
            cell = (f"{grid.dp_sgd[i, j]:.6g}", f"{grid.banded[i, j]:.6g}", grid.num_bands[i, j])
            writer.writerow((epsilon, k, *cell, dense))
    path.write_text(buffer.getvalue(), encoding="utf-8")
    return path


def draw_heat_maps(grid: RmseGrid, folder: Path) -> Path:
    """Draws the panels."""
    panels = [("(b) DP-SGD / BandMF, amplified", grid.dp_sgd / grid.banded)]
    if grid.dense is not None:
        panels.insert(0, ("(a) DP-SGD / multi-epoch MF", grid.dp_sgd / grid.dense))
    path = folder / "heatmaps.png"
    with drawing.picture(path, 6.0 * (len(panels) + 1), 5.0) as figure:
        *maps, lines = figure.subplots(1, len(panels) + 1)
        for axes, (title, ratio) in zip(maps, panels, strict=True):
            _draw_ratio(figure, axes, grid, title, ratio)
        _draw_lines(lines, grid)
    return path


def _draw_ratio(figure: Figure, axes: Axes, grid: RmseGrid, title: str, ratio: np.ndarray) -> None:
    extreme = max(ratio.max(), 1.0 / ratio.min(), 1.1)
    image = axes.imshow(
        ratio, cmap="PuOr_r", norm=LogNorm(1.0 / extreme, extreme), aspect="auto", origin="lower"
    )
    texts = np.array([[f"{value:.2f}" for value in row] for row in ratio], dtype=object)
    drawing.label_cells(axes, texts, np.abs(np.log(ratio)) > 0.6 * np.log(extreme), fontsize=7)
    axes.set_xticks(range(len(grid.epochs)), [str(k) for k in grid.epochs], fontsize=7)
    axes.set_yticks(range(len(grid.epsilons)), [exactly(epsilon) for epsilon in grid.epsilons])
    axes.set_xlabel("epochs k")
    axes.set_ylabel("epsilon")
    axes.set_title(title)
    bar = figure.colorbar(image, ax=axes, label="ratio of RMSE (above 1: DP-SGD is worse)")
    ticks = [value for value in (0.1, 0.2, 0.5, 1, 2, 5, 10) if 1 / extreme <= value <= extreme]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()


def _draw_lines(axes: Axes, grid: RmseGrid) -> None:
    row = grid.epsilons.index(published.RMSE_VS_EPOCHS_EPSILON)
    styles = (("#D55E00", "o-"), ("#0072B2", "s-"), ("#CC79A7", "^--"))
    for (name, rmse), (colour, style) in zip(_mechanisms(grid).items(), styles, strict=False):
        values = rmse[row] / np.array(grid.epochs)
        axes.plot(grid.epochs, values, style, color=colour, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(grid.epochs, [str(k) for k in grid.epochs], fontsize=7)
    axes.set_xlabel("epochs k")
    axes.set_ylabel("RMSE of prefix sums of mean gradients")
    axes.set_title(f"(c) epsilon = {exactly(published.RMSE_VS_EPOCHS_EPSILON)}")
    axes.grid(color="#EEEEEE")
    axes.legend()


def _mechanisms(grid: RmseGrid) -> dict[str, np.ndarray]:
    mechanisms = {"DP-SGD, amplified": grid.dp_sgd, "BandMF, amplified": grid.banded}
    return mechanisms if grid.dense is None else {**mechanisms, "multi-epoch MF": grid.dense}
