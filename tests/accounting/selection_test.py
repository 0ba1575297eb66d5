"""Private selection costs what the theorems of Papernot and Steinke say, and more than one run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bandmf_tf.accounting.gaussian import zcdp_epsilon
from bandmf_tf.accounting.selection import PrivateSelection, selected_epsilon
from bandmf_tf.errors import BandMFError

DELTA = 1e-6


def _geometric_epsilon(rho, mean, delta):
    """Theorem 2 for eta = 1, where gamma = 1 / mean, at every pair of orders of a fine grid."""
    orders = 1 + np.geomspace(1e-3, 1e5, 20_000)
    hat = (1 - 1 / orders) * rho * orders + math.log(mean) / orders
    renyi = rho * orders + 2 * hat.min() + math.log(mean) / (orders - 1)
    # Canonne, Kamath, Steinke 2020, Proposition 12.
    converted = np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return float((renyi + converted).min())


@pytest.mark.parametrize(("rho", "mean"), [(0.05, 10), (0.5, 3), (0.01, 100)])
def test_a_geometric_number_of_runs_costs_what_theorem_2_says(rho, mean):
    found = selected_epsilon([(rho, PrivateSelection(mean, "geometric"))], 0.0, DELTA)
    assert found == pytest.approx(_geometric_epsilon(rho, mean, DELTA), rel=0.01)
    assert found >= _geometric_epsilon(rho, mean, DELTA) * (1 - 1e-9)  # Of fewer orders.


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic", "poisson"])
def test_selection_costs_more_than_one_run_and_less_than_all(distribution):
    rho = 0.1
    costs = [
        selected_epsilon([(rho, PrivateSelection(mean, distribution))], 0.0, DELTA)
        for mean in (2, 8, 64)
    ]
    assert zcdp_epsilon(rho, DELTA) < costs[0] < costs[1] < costs[2] < zcdp_epsilon(64 * rho, DELTA)


def test_selected_releases_compose_with_others():
    chosen = (0.1, PrivateSelection(5, "geometric"))
    alone = selected_epsilon([chosen], 0.0, DELTA)
    beside = selected_epsilon([chosen], 0.2, DELTA)
    assert alone < beside < alone + zcdp_epsilon(0.2, DELTA)
    assert beside < selected_epsilon([chosen, chosen], 0.2, DELTA)
    assert selected_epsilon([], 0.2, DELTA) == pytest.approx(zcdp_epsilon(0.2, DELTA), rel=2e-3)


@pytest.mark.parametrize(
    ("mean", "distribution"),
    [
        (0.5, "poisson"),
        (1, "geometric"),
        (math.nan, "geometric"),
        (4, "binomial"),
    ],
)
def test_distributions_that_are_none_are_refused(mean, distribution):
    with pytest.raises(BandMFError):
        PrivateSelection(mean, distribution)
