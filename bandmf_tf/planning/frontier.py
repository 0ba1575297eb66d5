"""Error against memory: what every kind of strategy achieves for the rows of noise that it keeps.

Training keeps rows of noise of the size of the model, in float32: none for independent noise, one a
buffer for a BLT, one a level for a tree, all bands but one for BandMF and for a banded inverse, all
rounds but one for a dense matrix. Without sampling all of them need the same noise multiplier once
they have sensitivity 1, so that their errors at noise 1 compare what they achieve at the same
privacy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from bandmf_tf.factorization import error, strategies, trees
from bandmf_tf.factorization.buffered import MOST_BUFFERS, optimize_buffered
from bandmf_tf.factorization.inverse_banded import optimize_inverse_banded
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.workloads import Workload
from bandmf_tf.planning.comparison import (
    LARGEST_DENSE,
    NotOptimalError,
    Progress,
    banded_optimum,
    dense_optimum,
)

BYTES_PER_ENTRY = 4  # Training keeps its noise rows in float32.

# Banded inverses gain slowly, in many iterations.
_INVERSE_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """One strategy: its memory and its error.

    Attributes:
      strategy: Key of the strategy, as in `plan.STRATEGIES`.
      size: Number of bands or buffers; None where there is nothing to choose.
      rows_in_memory: Rows of noise that training keeps.
      rmse: The paper's sqrt(L(B, C) / n) at sigma = 1 and sensitivity 1.
    """

    strategy: str
    size: int | None
    rows_in_memory: int
    rmse: float

    @property
    def bytes_per_parameter(self) -> int:
        """Memory of these rows for every parameter of the model."""
        return self.rows_in_memory * BYTES_PER_ENTRY

    def describe(self) -> str:
        """Returns the strategy in a few words."""
        plural = "" if self.size == 1 else "s"
        return {
            "identity": "DP-SGD",
            "tree_full": "OptTreeAgg (full)",
            "blt": f"a BLT with {self.size} buffer{plural}",
            "banded": f"BandMF with {self.size} band{plural}",
            "inverse_banded": f"a banded inverse with {self.size} band{plural}",
            "dense": "MF (dense)",
        }[self.strategy]


@dataclasses.dataclass(frozen=True)
class Frontier:
    """All points, in order of memory, and the one that was chosen."""

    points: tuple[FrontierPoint, ...]
    chosen: FrontierPoint
    memory_per_parameter: float

    def explain(self) -> str:
        """Returns why the chosen point was chosen, in a sentence."""
        best = min(self.points, key=_by_error)
        budget = f"{self.memory_per_parameter:,.6g} bytes a parameter"
        words = (
            f"{self.chosen.describe()} ({self.chosen.bytes_per_parameter:,} bytes) has the least "
            f"error of all that fit into {budget}"
        )
        if best == self.chosen:
            return f"{words}, and no strategy that needs more was found to have less"
        more = self.chosen.rmse / best.rmse - 1.0
        return (
            f"{words}: {more:.1%} above the best that was tried, {best.describe()} "
            f"({best.bytes_per_parameter:,} bytes)"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the frontier as plain values."""
        return {
            "explanation": self.explain(),
            "points": [
                {
                    "strategy": point.strategy,
                    "num_bands": None if point.strategy == "blt" else point.size,
                    "num_buffers": point.size if point.strategy == "blt" else None,
                    "bytes_per_parameter": point.bytes_per_parameter,
                    "rmse": point.rmse,
                    "is_chosen": point == self.chosen,
                }
                for point in self.points
            ],
        }


def compute_frontier(
    workload: Workload,
    participation: Participation,
    memory_per_parameter: float,
    *,
    largest_num_bands: int,
    affordable_num_bands: int = 0,
    include_dense: bool | None = None,
    progress: Progress = lambda stage, detail: None,
) -> Frontier:
    """Returns error against memory without sampling, and the best that fits into a budget.

    Args:
      workload: The workload A.
      participation: In which rounds a unit may take part.
      memory_per_parameter: Bytes that the noise may take for every parameter of the model.
      largest_num_bands: Up to how many bands BandMF and banded inverses are tried.
      affordable_num_bands: Up to how many BandMF is tried if the budget holds them: as many as it
        has without a budget, or a budget for all of them would plan what is worse.
      include_dense: Whether to optimise the dense strategy; None decides by its size.
      progress: Called before every strategy.
    """
    n = workload.num_rounds
    rows = int(memory_per_parameter // BYTES_PER_ENTRY)
    points = []
    if include_dense is None:
        include_dense = n <= LARGEST_DENSE
    most = min(rows + 1, affordable_num_bands)
    for key, size, make in _candidates(workload, participation, rows, largest_num_bands, most):
        if key == "dense" and not include_dense:
            continue
        progress("choosing", key if size is None else f"{key}, size {size}")
        try:
            strategy = make()
        except NotOptimalError:
            continue
        rmse = error.rmse(workload, strategy, participation.sensitivity(strategy))
        points.append(FrontierPoint(key, size, strategy.rows_in_memory, rmse))
    fitting = [point for point in points if point.rows_in_memory <= rows]
    points.sort(key=lambda point: (point.rows_in_memory, point.rmse))
    return Frontier(tuple(points), min(fitting, key=_by_error), memory_per_parameter)


def _by_error(point: FrontierPoint) -> tuple[float, int]:
    # More digits than the optimisers were asked for would prefer memory for nothing.
    return float(f"{point.rmse:.5g}"), point.rows_in_memory


def _candidates(
    workload: Workload, participation: Participation, rows: int, largest_num_bands: int, most: int
) -> Iterator[tuple[str, int | None, Callable[[], Strategy]]]:
    """Yields keys, sizes and makers of all strategies of the frontier."""
    n = workload.num_rounds

    def buffered(num_buffers: int) -> Strategy:
        return optimize_buffered(workload, num_buffers, participation).strategy

    def banded(num_bands: int) -> Strategy:
        return banded_optimum(workload, num_bands, participation)

    def inverse_banded(num_bands: int) -> Strategy:
        return optimize_inverse_banded(
            workload, num_bands, participation, tolerance=_INVERSE_TOLERANCE
        ).strategy

    yield "identity", None, lambda: strategies.identity(n)
    yield "tree_full", None, lambda: trees.TreeStrategy(n, "full")
    for buffers in range(1, min(MOST_BUFFERS, n - 1) + 1):
        yield "blt", buffers, functools.partial(buffered, buffers)
    powers = {2**i for i in range(1, largest_num_bands.bit_length())}
    for bands in sorted({*powers, rows + 1, largest_num_bands}):
        if 2 <= bands <= largest_num_bands:
            yield "banded", bands, functools.partial(banded, bands)
            yield "inverse_banded", bands, functools.partial(inverse_banded, bands)
    if most > largest_num_bands:
        yield "banded", most, functools.partial(banded, most)
    yield "dense", None, functools.partial(dense_optimum, workload, participation)
