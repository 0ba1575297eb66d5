"""Pictures show the entries they claim to show, for every strategy; the page holds them all."""

from __future__ import annotations

import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest

from bandmf_tf.factorization import optimization, strategies, trees, workloads
from bandmf_tf.factorization.participation import MinSeparation
from bandmf_tf.planning import figures
from bandmf_tf.planning import page as plan_page
from bandmf_tf.planning.plan import STRATEGIES, PlanRequest
from bandmf_tf.planning.planner import plan_mechanism


def _plan(**changes):
    arguments = {"epsilon": 1.0, "delta": 1e-6, **changes}
    return plan_mechanism(PlanRequest(workload=workloads.prefix_sum(24), **arguments))


@pytest.fixture(scope="module")
def plan():
    return _plan(participation=MinSeparation(8, 3))


@pytest.fixture(scope="module")
def page(plan):
    return plan_page.render(plan)


def _random_banded(num_bands, num_rounds, seed):
    bands = np.random.default_rng(seed).uniform(0.1, 1.0, (num_bands, num_rounds))
    bands[0] += 2.0  # Keeps the inverse tame.
    return strategies.BandedStrategy(
        np.where(strategies.inside_matrix(num_bands, num_rounds), bands, 0.0)
    )


STRATEGIES_TO_VIEW = [
    _random_banded(1, 30, 0),
    _random_banded(9, 30, 1),
    _random_banded(20, 100, 2),
    optimization.square_root(workloads.prefix_sum(100), 40),
    optimization.square_root(workloads.prefix_sum(30), 30),
    strategies.identity(100),
    strategies.DenseStrategy(_random_banded(100, 100, 3).materialize()),
    trees.TreeStrategy(100, "full"),
    trees.TreeStrategy(100, "online", scale=0.3),
]


@pytest.mark.parametrize("pixels", [16, 33, 128])
@pytest.mark.parametrize("strategy", STRATEGIES_TO_VIEW)
def test_a_view_holds_the_entries_of_c_and_its_inverse(strategy, pixels):
    view = figures.matrix_view(strategy, pixels)
    C = strategy.materialize()
    shown = np.ix_(view.rounds, view.rounds)
    np.testing.assert_allclose(view.strategy, C[shown])
    np.testing.assert_allclose(view.inverse, np.linalg.inv(C)[shown], atol=1e-9)
    assert view.rounds.size <= pixels


def test_a_view_says_what_it_shows():
    wide, narrow = _random_banded(20, 100, 4), _random_banded(2, 100, 5)
    assert figures.matrix_view(wide, 100).caption == "all 100 rounds"
    assert figures.matrix_view(wide, 50).caption == "every 2nd of 100 rounds"
    assert figures.matrix_view(wide, 34).caption == "every 3rd of 100 rounds"
    assert figures.matrix_view(narrow, 100).caption == "first 64 of 100 rounds"


@pytest.mark.parametrize(
    ("number", "word"), [(1, "1st"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")]
)
def test_ordinals_read_well(number, word):
    assert figures._ordinal(number) == word


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.identity(1_000_000),
        optimization.square_root(workloads.prefix_sum(200_000), 64),
        _random_banded(200, 8_000, 6),
    ],
)
def test_a_large_strategy_is_viewed_without_a_dense_matrix(strategy, monkeypatch):
    monkeypatch.setattr(strategies.Strategy, "materialize", None)
    view = figures.matrix_view(strategy)
    assert view.strategy.shape == view.inverse.shape == (view.rounds.size, view.rounds.size)
    assert view.rounds.size <= 512
    np.testing.assert_allclose(np.diagonal(view.inverse) * np.diagonal(view.strategy), 1.0)


def _pixels(png):
    return matplotlib.image.imread(io.BytesIO(png))


def _is_a_picture(png):
    height, width, _ = _pixels(png).shape
    return height > 200 and width > 400 and _pixels(png)[..., :3].std() > 0.05


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_drawn(strategy):
    planned = _plan(participation=MinSeparation(8), strategy=strategy)
    assert _is_a_picture(figures.overview(planned))


def test_an_amplified_plan_and_a_single_round_can_be_drawn():
    sampled = _plan(batch_size=10, dataset_size=100, num_bands=2)
    assert _is_a_picture(figures.overview(sampled))
    one_round = PlanRequest(workload=workloads.prefix_sum(1), epsilon=1.0, delta=1e-6)
    assert _is_a_picture(figures.overview(plan_mechanism(one_round)))


def test_the_single_pictures_are_pictures(plan):
    view = figures.matrix_view(plan.mechanism.strategy)
    for png in (
        figures.strategy_picture(view),
        figures.inverse_picture(view),
        figures.error_picture(plan),
        figures.comparison_picture(plan),
    ):
        assert _is_a_picture(png)


def test_drawing_twice_gives_the_same_bytes(plan):
    assert figures.error_picture(plan) == figures.error_picture(plan)


def test_drawing_leaves_the_settings_of_the_process_alone(plan):
    before = dict(matplotlib.rcParams)
    figures.comparison_picture(plan)
    assert dict(matplotlib.rcParams) == before


def test_the_page_holds_its_pictures_and_loads_nothing(page):
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(embedded) == page.count("<img") == 4
    assert all(_is_a_picture(base64.b64decode(picture)) for picture in embedded)
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert 'name="viewport"' in page
    assert page.count(" alt=") == 4


def test_the_page_states_the_plan(plan, page):
    mechanism = plan.mechanism
    for value in (mechanism.noise_multiplier, plan.rmse, mechanism.rho):
        assert f"{value:.6g}" in page
    assert "Error against memory" not in page  # Nobody has asked for a budget.
    for text in (plan.name, mechanism.participation.describe().split(" (")[0], "zero-out"):
        assert text in page
    for entry in plan.comparison.alternatives:
        assert entry.name in page
        assert f"{entry.calibrated_rmse:.4g}" in page


def test_the_page_of_a_search_shows_what_was_tried():
    searched = _plan(batch_size=10, dataset_size=100)
    page = plan_page.render(searched)
    for candidate in searched.band_search.tried:
        assert f"{candidate.rmse:.5g}" in page
    assert page.count('<tr class="plan">') == 2  # In the comparison and among the numbers of bands.
