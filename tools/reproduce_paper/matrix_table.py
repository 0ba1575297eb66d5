"""The matrix table: eight mechanisms for n = 2052, three sensitivities, two errors.

Every strategy is scaled to sensitivity 1 under (6, 342)-participation, and errors are given in
units of the error of dense MF without equal column norms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from bandmf_tf.factorization import sensitivity, strategies, trees, workloads
from bandmf_tf.factorization.dense_optimization import optimize_dense
from bandmf_tf.factorization.error import squared_error
from bandmf_tf.factorization.optimization import optimize_banded, optimize_banded_fixed_epochs
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.factorization.strategies import Strategy
from tools.reproduce_paper import published
from tools.reproduce_paper.published import MatrixRow
from tools.reproduce_paper.report import Entry, Progress, Table, silent

_N = published.MATRICES_NUM_ROUNDS
_B = published.MATRICES_MIN_SEPARATION
_K = published.MATRICES_MAX_PARTICIPATIONS

# The sensitivity under min-separation of the rows without equal norms converges more slowly than
# their error: it needs this tolerance for the paper's digits.
_BANDED_TOLERANCE = 1e-5
# Duality gap of the dense rows.
_DENSE_TOLERANCE = 3e-5

# The unit of the two error columns as a full run finds it. The dense optimisation behind it takes
# minutes, so a run without it takes the unit from here.
RMSE_UNIT = 8.1523


@dataclasses.dataclass(frozen=True)
class MatrixFigures:
    """What the table says of one strategy, scaled to sensitivity 1 under (6, 342)-participation.

    Attributes:
      single: Sensitivity for one participation.
      fixed_epochs: Sensitivity under (6, 342)-participation: 1 by the scaling.
      min_separation: Sensitivity under 342-min-separation.
      rmse: Root mean squared error of prefix sums at unit noise.
    """

    single: Sensitivity
    fixed_epochs: Sensitivity
    min_separation: Sensitivity
    rmse: float


class StackOverflowMatrices:
    """The eight strategies of the table, each optimised when it is first asked for."""

    def __init__(self, progress: Progress = silent):
        self._progress = progress
        self._figures: dict[MatrixRow, MatrixFigures] = {}

    def figures(self, row: MatrixRow) -> MatrixFigures:
        """Returns the figures of the strategy in `row`."""
        if row not in self._figures:
            self._figures[row] = measure(self._strategy(row))
        return self._figures[row]

    def _strategy(self, row: MatrixRow) -> Strategy:
        workload = workloads.prefix_sum(_N)

        def progress(iteration: int, loss: float) -> None:
            done, total = len(self._figures), len(published.MATRICES)
            rmse = math.sqrt(loss / _N)
            self._progress(done, total, f"{row_name(row)}: iteration {iteration}, {rmse:.4f}")

        progress(0, math.nan)
        if row.mechanism == "OptTreeAgg":
            return trees.TreeStrategy(_N, "full")
        if row.num_bands == 1:
            return strategies.identity(_N)
        if row.num_bands is None:
            return optimize_dense(
                workload,
                _B,
                equal_column_norms=row.equal_column_norms,
                tolerance=_DENSE_TOLERANCE,
                progress=progress,
            ).strategy
        if row.equal_column_norms:
            return optimize_banded(
                workload, row.num_bands, tolerance=_BANDED_TOLERANCE, progress=progress
            ).strategy
        return optimize_banded_fixed_epochs(
            workload, row.num_bands, _B, tolerance=_BANDED_TOLERANCE, progress=progress
        ).strategy


def measure(strategy: Strategy) -> MatrixFigures:
    """Returns the figures of a strategy for 2052 rounds."""
    unscaled = sensitivity.fixed_epochs(strategy, _B, _K)
    scaled = strategy.scaled(1.0 / unscaled.value)
    return MatrixFigures(
        single=sensitivity.single_participation(scaled),
        fixed_epochs=sensitivity.fixed_epochs(scaled, _B, _K),
        min_separation=sensitivity.min_separation_participation(scaled, _B),
        rmse=math.sqrt(squared_error(workloads.prefix_sum(_N), scaled) / _N),
    )


def find_row(mechanism: str, equal_column_norms: bool) -> MatrixRow:
    """Returns the row of a mechanism with or without equal column norms."""
    wanted = (mechanism, equal_column_norms)
    return next(
        row for row in published.MATRICES if (row.mechanism, row.equal_column_norms) == wanted
    )


def row_name(row: MatrixRow) -> str:
    """Returns the name of a row, which tells apart the rows of one mechanism."""
    return f"{row.mechanism}, equal norms {'T' if row.equal_column_norms else 'F'}"


def is_dense(row: MatrixRow) -> bool:
    """Whether the strategy of the row takes minutes to optimise."""
    return row.mechanism == "MF"


def matrix_table(
    matrices: StackOverflowMatrices, rows: Iterable[MatrixRow] = published.MATRICES
) -> Table:
    """Returns the table for the given rows, in units of the dense row if it is one of them."""
    rows = tuple(rows)
    unit_row = find_row("MF", False)
    unit = matrices.figures(unit_row).rmse if unit_row in rows else RMSE_UNIT
    entries = [entry for row in rows for entry in _entries(row, matrices.figures(row), unit)]
    left_out = tuple(row_name(row) for row in published.MATRICES if row not in rows)
    unit_source = "computed in this run" if unit_row in rows else "taken from an earlier full run"
    return Table(
        name="matrices",
        title=f"Matrix mechanisms for n = {_N}",
        label=published.MATRICES_LABEL,
        conventions=(
            (
                "The unit 1.00 of both errors is the RMSE of dense MF without equal column norms, "
                f"{unit:.4f}, {unit_source}; the paper does not print it."
            ),
            (
                "OptTreeAgg is the forest of complete subtrees (2048 + 4 leaves), whose squared "
                "sensitivity is 118, with the full estimator; a padded tree of 4096 leaves does "
                "not give the paper's digits."
            ),
            (
                "342-min-separation allows ceil(2052 / 342) = 6 participations; dense MF has the "
                "upper bound of Theorem 3 there, all other sensitivities are exact."
            ),
            "Rows without equal norms are optimised for (6, 342)-participation (appendix B).",
        ),
        entries=tuple(entries),
        left_out=left_out,
    )


def _entries(row: MatrixRow, figures: MatrixFigures, unit: float) -> list[Entry]:
    name = row_name(row)
    bounded = figures.min_separation.kind == sensitivity.UPPER_BOUND
    bound = "<= " if bounded else ""
    relative = figures.rmse / unit
    return [
        Entry(name, "sensitivity, k = 1", row.single, figures.single.value),
        Entry(name, "sensitivity, (6, 342)", row.fixed_epochs, figures.fixed_epochs.value),
        Entry(
            name,
            f"sensitivity, min-separation {bound}".rstrip(),
            row.min_separation,
            figures.min_separation.value,
        ),
        Entry(name, "RMSE (A), (6, 342)", row.rmse_fixed_epochs, relative),
        Entry(
            name,
            "RMSE (B), min-separation",
            row.rmse_min_separation,
            relative * figures.min_separation.value,
        ),
    ]
