"""A run over sections of the reproduction; what sections share is computed once."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from bandmf_tf.planning.bands import BandSearch
from tools.reproduce_paper import (
    drawing,
    heat_maps,
    matrix_pictures,
    matrix_table,
    noise_multipliers,
    optimal_bands,
    production_guarantees,
    published,
    report,
)
from tools.reproduce_paper.matrix_table import StackOverflowMatrices
from tools.reproduce_paper.report import Progress, Table, silent

SECTIONS = ("matrices", "federated", "amplified", "bands", "heatmaps", "pictures", "production")

# Rows of the matrix table behind the mechanisms of the federated table that are scaled to
# (6, 342)-participation.
_FEDERATED_ROWS = {
    "DP-SGD": ("DP-SGD", True),
    "Optimal TreeAgg": ("OptTreeAgg", False),
    "Multi-epoch MF": ("MF", True),
    "Band MF": ("MF (b=342)", True),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a section led to.

    Attributes:
      table: The comparison with the paper; None for a section that only draws.
      files: What was written.
    """

    table: Table | None
    files: tuple[Path, ...]


class Reproduction:
    """Computes sections and writes their files into one folder.

    Args:
      output: An existing folder.
      quick: Leaves out everything that needs a dense optimisation with a thousand rounds or more.
      progress: Shows how far a section is.
    """

    def __init__(self, output: Path, *, quick: bool = False, progress: Progress = silent):
        self._output = output
        self._quick = quick
        self._progress = progress
        self._matrices = StackOverflowMatrices(progress)

    def run(self, section: str) -> Outcome:
        """Computes one of `SECTIONS`."""
        match section:
            case "matrices":
                return self._with_differences(self._matrix_table())
            case "federated":
                return self._with_differences(self._federated_table())
            case "amplified":
                return self._with_differences(noise_multipliers.amplified_table(self._progress))
            case "bands":
                table = optimal_bands.optimal_bands_table(self._searches)
                picture = optimal_bands.draw_optimal_bands(self._searches, self._output)
                return Outcome(table, (report.write_csv(table, self._output), picture))
            case "heatmaps":
                return self._heat_maps()
            case "pictures":
                matrices = matrix_pictures.draw_factorizations(
                    self._output, progress=self._progress
                )
                return Outcome(None, (matrices, matrix_pictures.draw_tree(self._output)))
            case "production":
                figures = production_guarantees.production_figures(progress=self._progress)
                return self._with_differences(production_guarantees.production_table(figures))
        raise ValueError(f"section must be one of {', '.join(SECTIONS)}. Found {section!r}.")

    @functools.cached_property
    def _searches(self) -> dict[optimal_bands.Cell, BandSearch]:
        return optimal_bands.search_cells(progress=self._progress)

    def _matrix_table(self) -> Table:
        rows = [
            row for row in published.MATRICES if not (self._quick and matrix_table.is_dense(row))
        ]
        return matrix_table.matrix_table(self._matrices, rows)

    def _federated_table(self) -> Table:
        sensitivities = {"Single-epoch MF": 1.0}
        for mechanism, (name, equal_column_norms) in _FEDERATED_ROWS.items():
            row = matrix_table.find_row(name, equal_column_norms)
            if not (self._quick and matrix_table.is_dense(row)):
                sensitivities[mechanism] = self._matrices.figures(row).min_separation.value
        return noise_multipliers.federated_table(sensitivities, self._progress)

    def _heat_maps(self) -> Outcome:
        losses = None if self._quick else heat_maps.dense_losses(progress=self._progress)
        grid = heat_maps.rmse_grid(self._searches, losses)
        table = heat_maps.heat_map_table(grid)
        return Outcome(
            table,
            (
                report.write_csv(table, self._output),
                heat_maps.write_cells(grid, self._output),
                heat_maps.draw_heat_maps(grid, self._output),
            ),
        )

    def _with_differences(self, table: Table) -> Outcome:
        picture = drawing.draw_differences(table, self._output)
        return Outcome(table, (report.write_csv(table, self._output), picture))
