"""The digits of "(Amplified) Banded Matrix Factorization", as printed. Nothing here is computed.

A digit string is a `Decimal`, which keeps trailing zeros: `Decimal("1.00")` is known to two places.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal

# Table "A comparison of matrix mechanisms for n = 2052" ------------------------------------------

MATRICES_LABEL = "tab:matrices"
MATRICES_NUM_ROUNDS = 2052
MATRICES_MIN_SEPARATION = 342
MATRICES_MAX_PARTICIPATIONS = 6


@dataclasses.dataclass(frozen=True)
class MatrixRow:
    """A row of the matrix table.

    Attributes:
      mechanism: Name of the mechanism.
      num_bands: Number of bands; None is printed as a dash.
      equal_column_norms: The column "Equal column norms?".
      single: Sensitivity for k = 1.
      fixed_epochs: Sensitivity under (6, 342)-participation.
      min_separation: Sensitivity under 342-min-separation; the last two rows print "<=".
      rmse_fixed_epochs: Error (A), under (6, 342)-participation.
      rmse_min_separation: Error (B), under 342-min-separation.
    """

    mechanism: str
    num_bands: int | None
    equal_column_norms: bool
    single: Decimal
    fixed_epochs: Decimal
    min_separation: Decimal
    rmse_fixed_epochs: Decimal
    rmse_min_separation: Decimal


def _matrix_row(
    mechanism: str, num_bands: int | None, equal_column_norms: bool, digits: str
) -> MatrixRow:
    return MatrixRow(
        mechanism, num_bands, equal_column_norms, *(Decimal(value) for value in digits.split())
    )


MATRICES = (
    _matrix_row("OptTreeAgg", None, False, "0.32 1.00 1.00 1.53 1.53"),
    _matrix_row("DP-SGD", 1, True, "0.41 1.00 1.00 9.63 9.63"),
    _matrix_row("MF (b=128)", 128, False, "0.52 1.00 1.04 1.23 1.29"),
    _matrix_row("MF (b=128)", 128, True, "0.41 1.00 1.00 1.27 1.27"),
    _matrix_row("MF (b=342)", 342, False, "0.52 1.00 1.04 1.04 1.08"),
    _matrix_row("MF (b=342)", 342, True, "0.41 1.00 1.00 1.05 1.05"),
    _matrix_row("MF", None, False, "0.50 1.00 1.15 1.00 1.15"),
    _matrix_row("MF", None, True, "0.41 1.00 1.13 1.01 1.14"),
)

# Noise multipliers of the StackOverflow tables, by epsilon ----------------------------------------

STACKOVERFLOW_DELTA = 1e-6

FEDERATED_LABEL = "tab:fed_results"
FEDERATED = {
    1: {
        "DP-SGD": Decimal("4.22468"),
        "Single-epoch MF": Decimal("4.22468"),
        "Optimal TreeAgg": Decimal("4.22468"),
        "Multi-epoch MF": Decimal("4.76079"),
        "Band MF": Decimal("4.22468"),
    },
    2: {
        "DP-SGD": Decimal("2.23048"),
        "Single-epoch MF": Decimal("2.23048"),
        "Optimal TreeAgg": Decimal("2.23048"),
        "Multi-epoch MF": Decimal("2.51352"),
        "Band MF": Decimal("2.23048"),
    },
    4: {
        "DP-SGD": Decimal("1.19352"),
        "Single-epoch MF": Decimal("1.19352"),
        "Optimal TreeAgg": Decimal("1.19352"),
        "Multi-epoch MF": Decimal("1.34498"),
        "Band MF": Decimal("1.19352"),
    },
    8: {
        "DP-SGD": Decimal("0.65294"),
        "Single-epoch MF": Decimal("0.65293"),
        "Optimal TreeAgg": Decimal("0.65294"),
        "Multi-epoch MF": Decimal("0.73579"),
        "Band MF": Decimal("0.65294"),
    },
    16: {
        "DP-SGD": Decimal("0.36861"),
        "Single-epoch MF": Decimal("0.36861"),
        "Optimal TreeAgg": Decimal("0.36861"),
        "Multi-epoch MF": Decimal("0.41539"),
        "Band MF": Decimal("0.36861"),
    },
}

AMPLIFIED_LABEL = "tab:amp_results"
AMPLIFIED = {
    1: {
        "DP-SGD, amplified": Decimal("0.37313"),
        "Multi-epoch MF, not amplified": Decimal("4.22468"),
        "Band MF, amplified": Decimal("0.79118"),
    },
    2: {
        "DP-SGD, amplified": Decimal("0.30481"),
        "Multi-epoch MF, not amplified": Decimal("2.23048"),
        "Band MF, amplified": Decimal("0.64708"),
    },
    4: {
        "DP-SGD, amplified": Decimal("0.25136"),
        "Multi-epoch MF, not amplified": Decimal("1.19352"),
        "Band MF, amplified": Decimal("0.52224"),
    },
    8: {
        "DP-SGD, amplified": Decimal("0.20567"),
        "Multi-epoch MF, not amplified": Decimal("0.65294"),
        "Band MF, amplified": Decimal("0.43490"),
    },
    16: {
        "DP-SGD, amplified": Decimal("0.16876"),
        "Multi-epoch MF, not amplified": Decimal("0.36861"),
        "Band MF, amplified": Decimal("0.36861"),
    },
}
# The number of bands of Band MF at each epsilon, from the caption of the table.
AMPLIFIED_NUM_BANDS = {1: 9, 2: 18, 4: 32, 8: 64, 16: 2052}

# Table "Optimal number of bands for each (epsilon, k) pair" ---------------------------------------

OPTIMAL_BANDS_LABEL = "table:optbands"
OPTIMAL_BANDS_NUM_ROUNDS = 1024
OPTIMAL_BANDS_DELTA = 1e-6
OPTIMAL_BANDS_EPOCHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
OPTIMAL_BANDS = {
    0.03125: (2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    0.0625: (4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    0.125: (8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1),
    0.25: (8, 4, 4, 2, 1, 1, 1, 1, 1, 1, 1),
    0.5: (16, 8, 4, 4, 2, 1, 1, 1, 1, 1, 1),
    1.0: (32, 16, 8, 4, 2, 2, 1, 1, 1, 1, 1),
    2.0: (64, 32, 16, 8, 4, 2, 2, 1, 1, 1, 1),
    4.0: (128, 64, 32, 16, 8, 4, 2, 2, 1, 1, 1),
    8.0: (1024, 512, 256, 32, 16, 8, 4, 2, 2, 1, 1),
    16.0: (1024, 512, 256, 128, 64, 32, 8, 4, 4, 2, 1),
}

# Figure "Comparison between DP-SGD, multi-epoch MF and BandMF in terms of RMSE" -------------------

RMSE_LABEL = "fig:rmse"
RMSE_VS_EPOCHS_EPSILON = 1.0

# What the text says the panels show; the figure prints no digits.
RMSE_CLAIMS = {
    "regimes": "(a) DP-SGD is better than multi-epoch MF in some cells and worse in others",
    "advantage": "(a) at k = n multi-epoch MF has a small advantage (taken as: up to 10 %)",
    "never worse": "(b) BandMF is at least as good as DP-SGD in every cell",
    "gain": "(b) BandMF gains most in the cell with the fewest epochs and the largest epsilon",
    "epochs": "(c) more epochs improve the RMSE of every mechanism",
    "reduction": "(c) with many epochs BandMF reduces to DP-SGD",
    "many epochs": "(c) with many epochs multi-epoch MF is better than BandMF",
}

# Figures of matrices ------------------------------------------------------------------------------

PICTURES_NUM_ROUNDS = 64

# Production training of a Spanish language model --------------------------------------------------

PRODUCTION_LABEL = "sec:privacy-guarantees"
PRODUCTION_NUM_ROUNDS = 2000
PRODUCTION_DELTA = 1e-10
PRODUCTION_NUM_BANDS = 400
PRODUCTION_TREE_MIN_SEPARATION = 390
PRODUCTION_BANDED_MIN_SEPARATION = 385
PRODUCTION_TREE = {"rho": Decimal("0.52"), "epsilon": Decimal("6.69")}
PRODUCTION_BANDED = {"rho": Decimal("0.24"), "epsilon": Decimal("4.35")}

# Google's notebook on the launched model (repository google-research/federated, folder
# mf_dpftrl_matrices, privacy_accounting.ipynb), trained with a matrix of 400 bands, too. Its
# min-separation counts the rounds in between, 484: the paper's r2 - r1 is one more.
LAUNCH_NOISE_MULTIPLIER = 1.411
LAUNCH_MIN_SEPARATION = 485
LAUNCH_MAX_PARTICIPATIONS = 3
LAUNCH = {"rho": Decimal("0.150684"), "epsilon": Decimal("3.42401")}
