"""Pictures of the matrices for n = 64: dense and banded factorisations, and the binary tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm

from bandmf_tf.factorization import strategies, trees, workloads
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.optimization import optimize_banded, optimize_banded_fixed_epochs
from bandmf_tf.factorization.strategies import Strategy
from tools.reproduce_paper import drawing, published
from tools.reproduce_paper.report import Progress, silent

_TOLERANCE = 1e-4


def factorizations(num_rounds: int) -> dict[str, Callable[[], Strategy]]:
    """Returns the eight strategies of the figure, by name, in its order.

    Banded ones are made for 4 epochs; `num_rounds` must be a multiple of 8.
    """
    if num_rounds % 8:
        raise ValueError(f"num_rounds must be a multiple of 8. Found {num_rounds}.")
    workload = workloads.prefix_sum(num_rounds)
    separation = num_rounds // 4
    few, many = separation // 2, separation
    return {
        "Single-epoch MF": lambda: optimize_dense(workload, tolerance=_TOLERANCE).strategy,
        "SGD": lambda: strategies.identity(num_rounds),
        "MF, k = 8 epochs": lambda: (
            optimize_dense(workload, num_rounds // 8, tolerance=_TOLERANCE).strategy
        ),
        "MF, k = 4 epochs": lambda: (
            optimize_dense(workload, separation, tolerance=_TOLERANCE).strategy
        ),
        f"EN-Banded, {few} bands": lambda: optimize_banded(workload, few).strategy,
        f"EN-Banded, {many} bands": lambda: optimize_banded(workload, many).strategy,
        f"Banded, {few} bands": lambda: (
            optimize_banded_fixed_epochs(workload, few, separation).strategy
        ),
        f"Banded, {many} bands": lambda: (
            optimize_banded_fixed_epochs(workload, many, separation).strategy
        ),
    }


def draw_factorizations(
    folder: Path, num_rounds: int = published.PICTURES_NUM_ROUNDS, progress: Progress = silent
) -> Path:
    """Draws C and C^-1 of every factorisation."""
    made = factorizations(num_rounds)
    path = folder / "matrix_pictures.png"
    with drawing.picture(path, 11.0, 9.4) as figure:
        axes = figure.subplots(4, 4)
        for index, (name, make) in enumerate(made.items()):
            progress(index, len(made) + 1, name)
            strategy = make()
            C = strategy.materialize()
            inverse = strategy.inverse_matmul(np.eye(num_rounds))
            row, column = divmod(index, 2)
            _draw(axes[row, 2 * column], C, f"{name}: C")
            _draw(axes[row, 2 * column + 1], inverse, "its inverse")
    return path


def draw_tree(folder: Path, num_rounds: int = published.PICTURES_NUM_ROUNDS) -> Path:
    """Draws the transposed tree matrix and its pseudo-inverse, the full estimator."""
    nodes = trees.TreeStrategy(num_rounds).node_matrix()
    path = folder / "tree_pictures.png"
    with drawing.picture(path, 8.0, 7.2) as figure:
        upper, lower = figure.subplots(2, 1)
        _draw(upper, nodes.T, "Binary tree: C^T (one column a node)")
        _draw(lower, np.linalg.pinv(nodes), "its pseudo-inverse (full Honaker estimator)")
    return path


def _draw(axes: Axes, matrix: np.ndarray, title: str) -> None:
    """Draws a matrix in colours that are logarithmic on both sides of zero."""
    largest = float(np.abs(matrix).max())
    norm = SymLogNorm(linthresh=largest * 1e-3, vmin=-largest, vmax=largest)
    image = axes.imshow(matrix, cmap="PuOr", norm=norm, interpolation="nearest")
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=6)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    ticks = [largest * share for share in (-1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0)]
    bar.set_ticks(ticks, labels=[f"{_two_digits(tick):g}" for tick in ticks])
    bar.ax.tick_params(labelsize=6)
    bar.ax.minorticks_off()


def _two_digits(value: float) -> float:
    if value == 0.0:
        return 0.0
    places = 1 - math.floor(math.log10(abs(value)))
    return round(value, places)
