"""The guarantees of the production run: Online TreeAgg against BandMF, 2000 rounds.

The paper prints rho and epsilon but neither noise multiplier nor the participation cap. The cap of
4 and the multiplier 7 of the tree reproduce both its digits. For BandMF the multiplier is the one
that Google's notebook states for the launched model, 1.411, relative to a matrix whose column norms
follow from the notebook's own figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from decimal import Decimal

from bandmf_tf._numbers import round_down
from bandmf_tf.accounting import gaussian
from bandmf_tf.factorization import error, sensitivity, trees, workloads
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.factorization.strategies import Strategy
from tools.reproduce_paper import published
from tools.reproduce_paper.report import Entry, Progress, Table, silent

MAX_PARTICIPATIONS = 4
TREE_NOISE_MULTIPLIER = 7.0

# The matrix was scaled to sensitivity 1 for the five participations that 2000 rounds at separation
# 400 allow: equal column norms of 1 / sqrt(5).
_SCALED_FOR_PARTICIPATIONS = 5

_N = published.PRODUCTION_NUM_ROUNDS
_DELTA = published.PRODUCTION_DELTA
_BANDED_B = published.PRODUCTION_BANDED_MIN_SEPARATION
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class ProductionFigures:
    """Both mechanisms of the production run.

    Attributes:
      banded: Optimal 400-banded strategy with the column norms of the production matrix.
      tree_sensitivity: Of the tree, min-separation 390.
      theorem_3: Of the banded strategy, min-separation 385, by Algorithm 4.
      chain: The same by the chain programme.
      equal_rmse_noise_multiplier: At which BandMF has the prefix-sum RMSE of the tree.
    """

    banded: Strategy
    tree_sensitivity: Sensitivity
    theorem_3: Sensitivity
    chain: Sensitivity
    equal_rmse_noise_multiplier: float


def production_figures(
    tolerance: float = _TOLERANCE, progress: Progress = silent
) -> ProductionFigures:
    """Optimises the banded strategy and returns the figures of both mechanisms."""
    workload = workloads.prefix_sum(_N)
    tree = trees.TreeStrategy(_N, "online")
    progress(0, 2, "optimising the matrix of 400 bands")
    unit_norms = optimize_banded(
        workload, published.PRODUCTION_NUM_BANDS, tolerance=tolerance
    ).strategy
    banded = unit_norms.scaled(1.0 / math.sqrt(_SCALED_FOR_PARTICIPATIONS))
    progress(1, 2, "sensitivities")
    error_ratio = error.squared_error(workload, tree) / error.squared_error(workload, banded)
    return ProductionFigures(
        banded=banded,
        tree_sensitivity=sensitivity.min_separation_participation(
            tree, published.PRODUCTION_TREE_MIN_SEPARATION, MAX_PARTICIPATIONS
        ),
        theorem_3=sensitivity.general_min_separation(banded, _BANDED_B, MAX_PARTICIPATIONS),
        chain=sensitivity.chain_min_separation(banded, _BANDED_B, MAX_PARTICIPATIONS),
        equal_rmse_noise_multiplier=TREE_NOISE_MULTIPLIER * math.sqrt(error_ratio),
    )


def production_table(figures: ProductionFigures) -> Table:
    """Returns the guarantees beside the paper's."""
    noise = published.LAUNCH_NOISE_MULTIPLIER
    launch = sensitivity.min_separation_participation(
        figures.banded, published.LAUNCH_MIN_SEPARATION, published.LAUNCH_MAX_PARTICIPATIONS
    )
    less_error = 1.0 - noise / figures.equal_rmse_noise_multiplier
    implied = _implied_squared_sensitivity(noise)
    squared_norms = 1.0 / _SCALED_FOR_PARTICIPATIONS
    difference = (
        "BandMF: in units of the squared column norm the squared sensitivity by Theorem 3 is "
        f"{figures.theorem_3.value**2 / squared_norms:.3f}, and epsilon = 4.35 needs "
        f"{implied / squared_norms:.3f}. What exceeds the 4 participations are entries of X at the "
        "outer edge of the band (offsets 385 to 399), which hardly touch the error: tightening our "
        "tolerance from 1e-4 to 1e-7 lowers the error by 0.005 % and raises the excess by 5 %. So "
        "a production matrix as good as ours but converged differently there would explain the "
        "paper's digits; it was not at hand to confirm that."
    )
    return Table(
        name="production",
        title="Guarantees of the production run, delta = 1e-10",
        label=published.PRODUCTION_LABEL,
        conventions=(
            (
                "A client takes part at most 4 times; the paper says 'limited times'. With the "
                "noise multiplier 7 of Online TreeAgg this gives both its digits."
            ),
            (
                f"BandMF has the noise multiplier {noise} of Google's notebook on the launched "
                "model, for a matrix with equal column norms 1 / sqrt(5), scaled to five "
                "participations 400 apart: that is what the notebook's figures imply (rows "
                "'launch'). That the paper's run used the same is our assumption."
            ),
            (
                f"With it the RMSE of prefix sums is {less_error:.1%} below that of the tree, the "
                "paper's 'comparable RMSE'. Exactly equal RMSE would be the multiplier "
                f"{round_down(figures.equal_rmse_noise_multiplier, 5):g}."
            ),
            (
                "The matrix is optimised for prefix sums. The learning-rate cool-down of the run "
                "is not at hand; optimising for a linear one over the last 25 or 50 % of the "
                "rounds changes the squared sensitivity by less than 1 %."
            ),
            (
                "The chain programme is not in the paper: between 385 and 400 only neighbouring "
                "participations interact, so it finds the maximum that Theorem 3 bounds."
            ),
        ),
        entries=(
            *_entries(
                "Online TreeAgg",
                figures.tree_sensitivity,
                TREE_NOISE_MULTIPLIER,
                published.PRODUCTION_TREE,
            ),
            *_entries(
                "BandMF, Theorem 3",
                figures.theorem_3,
                noise,
                published.PRODUCTION_BANDED,
                difference,
            ),
            *_entries("BandMF, chain programme", figures.chain, noise, {}),
            *_entries(
                "BandMF at the RMSE of the tree, Theorem 3",
                figures.theorem_3,
                figures.equal_rmse_noise_multiplier,
                {},
            ),
            *_entries("BandMF, launch (Google's notebook)", launch, noise, published.LAUNCH),
        ),
    )


def _entries(
    row: str,
    found: Sensitivity,
    noise_multiplier: float,
    digits: Mapping[str, Decimal],
    note: str = "",
) -> tuple[Entry, Entry]:
    guarantee = gaussian.gaussian_guarantee(noise_multiplier, found.value, _DELTA)
    return (
        Entry(row, "rho", digits.get("rho"), guarantee.rho, note),
        Entry(row, "epsilon", digits.get("epsilon"), guarantee.epsilon, note),
    )


def _implied_squared_sensitivity(noise_multiplier: float) -> float:
    """Returns the squared sensitivity at which BandMF has the paper's epsilon."""
    epsilon = float(published.PRODUCTION_BANDED["epsilon"])
    return (noise_multiplier * gaussian.largest_gdp_mu(epsilon, _DELTA)) ** 2
