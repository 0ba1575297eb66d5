"""The frontier holds the error and the memory of every strategy, and the best that fits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bandmf_tf.factorization import error, workloads
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.planning import figures, page, planner
from bandmf_tf.planning.frontier import compute_frontier
from bandmf_tf.planning.plan import PlanRequest
from bandmf_tf.planning.planner import plan_mechanism

N, SEPARATION = 32, 12


def _request(participation=None, **changes):
    arguments = {"epsilon": 1.0, "delta": 1e-6, "workload": workloads.prefix_sum(N), **changes}
    return PlanRequest(participation=participation or MinSeparation(SEPARATION), **arguments)


@pytest.fixture(scope="module")
def frontier():
    participation = MinSeparation(SEPARATION)
    return compute_frontier(workloads.prefix_sum(N), participation, 4, largest_num_bands=12)


def test_it_holds_every_kind_of_strategy(frontier):
    found = [(point.strategy, point.size) for point in frontier.points]
    expected = {("identity", None), ("tree_full", None), ("dense", None)}
    expected |= {("blt", size) for size in range(1, 9)}
    expected |= {(key, size) for key in ("banded", "inverse_banded") for size in (2, 4, 8, 12)}
    assert set(found) == expected
    assert len(found) == len(expected)


def test_every_point_is_the_plan_that_it_stands_for(frontier):
    """An error is that of dense matrices, and a number of rows that of the plan's stream."""
    A = np.tril(np.ones((N, N)))
    for point in frontier.points:
        noun = "num_buffers" if point.strategy == "blt" else "num_bands"
        size = {noun: point.size} if point.size else {}
        plan = plan_mechanism(_request(strategy=point.strategy, **size))
        inverse = np.linalg.inv(plan.mechanism.strategy.materialize())
        rmse = math.sqrt(np.sum((A @ inverse) ** 2) / N)
        assert plan.participation.sensitivity(plan.mechanism.strategy).value == pytest.approx(1.0)
        assert point.rmse == pytest.approx(rmse, rel=2e-3)
        assert point.bytes_per_parameter == plan.bytes_per_parameter == 4 * point.rows_in_memory


@pytest.mark.parametrize(
    ("participation", "budget"),
    [
        *((MinSeparation(SEPARATION), budget) for budget in (3, 8, 44, 1e6)),
        (SingleParticipation(), 8),
        (FixedEpochs(12, 3), 44),
    ],
)
def test_the_best_that_fits_is_planned(participation, budget):
    plan = plan_mechanism(_request(participation, memory_per_parameter=budget))
    frontier = plan.frontier
    assert plan.bytes_per_parameter <= budget
    fitting = [point for point in frontier.points if point.bytes_per_parameter <= budget]
    assert frontier.chosen in fitting
    assert frontier.chosen.rmse <= min(point.rmse for point in fitting) * (1 + 1e-4)
    assert plan.rmse == pytest.approx(frontier.chosen.rmse, rel=2e-3)
    assert plan.request.strategy == frontier.chosen.strategy
    assert not any("less error" in caution for caution in plan.cautions())
    assert plan.hints() == ()


def test_a_point_is_explained_beside_the_best_without_a_limit(frontier):
    assert frontier.chosen.strategy == "blt"
    best = min(frontier.points, key=lambda point: point.rmse)
    more = frontier.chosen.rmse / best.rmse - 1.0
    assert f"fit into 4 bytes a parameter: {more:.1%} above" in frontier.explain()
    document = frontier.to_json()
    assert document["explanation"] == frontier.explain()
    (chosen,) = [point for point in document["points"] if point["is_chosen"]]
    assert chosen["num_buffers"] == frontier.chosen.size
    assert chosen["num_bands"] is None


def test_bands_of_the_budget_are_tried_and_chosen_where_they_are_best():
    """Almost all bands of a long separation beat any number of buffers."""
    plan = plan_mechanism(_request(FixedEpochs(16, 2), memory_per_parameter=14 * 4))
    assert ("banded", 15) in [(point.strategy, point.size) for point in plan.frontier.points]
    assert plan.num_bands == 15


def test_a_budget_for_all_bands_is_not_worse_than_none(monkeypatch):
    """In long training a frontier of seconds ends before the bands of a plan of minutes."""
    monkeypatch.setattr(planner, "_LARGEST_COMPARED_WORK", N * 4**2)
    free = plan_mechanism(_request())
    assert free.num_bands == SEPARATION
    plan = plan_mechanism(_request(memory_per_parameter=1e6))
    assert (plan.request.strategy, plan.num_bands) == ("banded", SEPARATION)
    assert plan.rmse == pytest.approx(free.rmse, rel=1e-9)
    almost = plan_mechanism(_request(memory_per_parameter=4 * (SEPARATION - 2)))
    bands = [point.size for point in almost.frontier.points if point.strategy == "banded"]
    assert bands == [2, 4, SEPARATION - 1]
    little = plan_mechanism(_request(memory_per_parameter=4)).frontier
    assert max(point.size for point in little.points if point.strategy == "banded") == 4
    assert "above the best that was tried" in little.explain()


def test_a_banded_inverse_is_chosen_where_it_is_best():
    """Half as many rows as participations are apart are too few for BandMF."""
    participation = MinSeparation(8)
    changes = {"workload": workloads.prefix_sum(64), "compare_dense": False}
    plan = plan_mechanism(_request(participation, memory_per_parameter=16, **changes))
    assert plan.request.strategy == "inverse_banded"
    assert plan.rows_in_memory == plan.frontier.chosen.size - 1
    best = min(point.rmse for point in plan.frontier.points if point.strategy == "blt")
    assert plan.rmse < best


@pytest.mark.parametrize("strategy", ["inverse_banded", "inverse_square_root"])
def test_a_banded_inverse_has_the_bands_that_are_asked_for_or_as_many_as_help(strategy):
    asked = plan_mechanism(_request(strategy=strategy, num_bands=3))
    assert (asked.size, asked.size_reason) == ("3 bands of the inverse", "as asked for")
    assert (asked.to_json()["num_inverse_bands"], asked.rows_in_memory) == (3, 2)
    assert not np.any(np.tril(np.linalg.inv(asked.mechanism.strategy.materialize()), -3) > 1e-9)
    assert "bands of the inverse" in page.render(asked)
    chosen = plan_mechanism(_request(strategy=strategy))
    p = chosen.num_inverse_bands
    twice = plan_mechanism(_request(strategy=strategy, num_bands=2 * p))
    half = plan_mechanism(_request(strategy=strategy, num_bands=p // 2))
    assert twice.rmse > 0.99 * chosen.rmse
    assert chosen.rmse < 0.99 * half.rmse
    assert chosen.bytes_per_parameter == 4 * (p - 1)


def test_with_sampling_bands_are_chosen_within_the_budget():
    sizes = {"batch_size": 10, "dataset_size": 200, "epsilon": 8.0}
    request = PlanRequest(workload=workloads.prefix_sum(32), delta=1e-6, **sizes)
    free = plan_mechanism(request)
    assert free.num_bands > 4
    arguments = {**sizes, "memory_per_parameter": 12, "delta": 1e-6}
    tight = plan_mechanism(PlanRequest(workload=workloads.prefix_sum(32), **arguments))
    assert tight.num_bands == 4
    assert "fit into 12 bytes" in tight.size_reason
    assert all(candidate.num_bands <= 4 for candidate in tight.band_search.tried)
    shuffled = PlanRequest(workload=workloads.prefix_sum(32), sampling="shuffling", **arguments)
    assert plan_mechanism(shuffled).num_bands == 4


@pytest.mark.parametrize(
    ("budget", "buffers", "reason"),
    [(8, 2, "more gain little"), (7, 1, "fit into 7 bytes")],
)
@pytest.mark.parametrize("sampling", ["balls_in_bins", "auto"])
def test_with_balls_in_bins_a_budget_is_for_a_blt(sampling, budget, buffers, reason, monkeypatch):
    """Bins need no bands; as many bands as buffers have twice their error."""
    bins = {name: planner.SAMPLINGS[name] for name in ("balls_in_bins",)}
    monkeypatch.setattr(planner, "SAMPLINGS", bins)  # Others take seconds.
    sizes = {"batch_size": 10, "dataset_size": 80, "epsilon": 8.0, "delta": 1e-5}
    arguments = {"workload": workloads.prefix_sum(16), "compare_dense": False, **sizes}
    plan = plan_mechanism(PlanRequest(sampling=sampling, memory_per_parameter=budget, **arguments))
    assert (plan.request.strategy, plan.num_buffers) == ("blt", buffers)
    assert plan.bytes_per_parameter <= budget
    assert reason in plan.size_reason
    assert plan.to_json()["memory_per_parameter"] == budget
    assert plan.hints() == ()
    banded = PlanRequest(sampling="balls_in_bins", num_bands=buffers + 1, **arguments)
    assert plan.calibrated_rmse < plan_mechanism(banded).calibrated_rmse


def test_balls_in_bins_without_memory_have_one_band():
    sizes = {"batch_size": 10, "dataset_size": 80, "epsilon": 8.0, "delta": 1e-5}
    arguments = {"workload": workloads.prefix_sum(16), "compare_dense": False, **sizes}
    plan = plan_mechanism(
        PlanRequest(sampling="balls_in_bins", memory_per_parameter=3, **arguments)
    )
    assert (plan.request.strategy, plan.num_bands, plan.bytes_per_parameter) == ("banded", 1, 0)


def test_the_frontier_is_drawn(frontier):
    plan = plan_mechanism(_request(memory_per_parameter=12))
    assert figures.frontier_picture(plan.frontier).startswith(b"\x89PNG")
    height = int.from_bytes(figures.overview(plan)[20:24])  # In the header of a PNG file.
    assert height == round(150 * (10.4 + 4.8))  # Inches, of which the frontier has the last ones.
    html = page.render(plan)
    assert "Error against memory" in html
    assert "fit into 12 bytes a parameter" in html


def test_a_hint_is_given_where_little_memory_costs_little_error():
    """A single participation in 256 rounds: 255 rows of memory, and two buffers 1 % behind."""
    changes = {"workload": workloads.prefix_sum(256), "strategy": "toeplitz"}
    plan = plan_mechanism(_request(SingleParticipation(), **changes))
    (blt,) = [entry for entry in plan.comparison.alternatives if entry.strategy == "blt"]
    assert blt.calibrated_rmse < 1.05 * plan.calibrated_rmse
    (hint,) = plan.hints()
    assert f"{blt.name} has " in hint
    assert "this plan keeps 255" in hint
    assert plan.to_json()["hints"] == [hint]
    # Twelve rows of memory leave nothing below a tenth but independent noise.
    assert plan_mechanism(_request()).hints() == ()


@pytest.mark.parametrize("changes", [{"num_bands": 1}, {"workload": workloads.prefix_sum(1)}])
def test_a_plan_that_keeps_nothing_gets_no_hint_to_keep_less(changes):
    plan = plan_mechanism(_request(SingleParticipation(), **changes))
    assert plan.rows_in_memory == 0
    assert plan.hints() == ()
    assert "BLT (0 buffers)" not in [entry.name for entry in plan.comparison.alternatives]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_per_parameter": 8, "strategy": "blt"}, "Found strategy=blt"),
        ({"memory_per_parameter": 8, "num_bands": 3}, "num_bands=3"),
        ({"memory_per_parameter": 8, "equal_column_norms": False}, "equal_column_norms=False"),
        ({"memory_per_parameter": 0.0}, "memory_per_parameter must be positive"),
        ({"num_buffers": 2}, "num_buffers is for strategy=blt; leave it out for strategy=banded"),
        ({"num_buffers": 0, "strategy": "blt"}, "num_buffers must be at least 1"),
        (
            {"strategy": "blt", "batch_size": 2, "dataset_size": 50},
            "Amplification needs a banded strategy, which blt is not",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        _request(**changes)


def test_a_blt_has_the_buffers_that_are_asked_for_or_as_many_as_help():
    asked = plan_mechanism(_request(strategy="blt", num_buffers=3))
    assert asked.num_buffers == 3
    assert (asked.to_json()["num_buffers"], asked.size) == (3, "3 buffers")
    assert asked.size_reason == "as asked for"
    chosen = plan_mechanism(_request(strategy="blt"))
    workload, participation = chosen.request.workload, chosen.participation
    assert chosen.rmse == pytest.approx(
        error.rmse(
            workload,
            chosen.mechanism.strategy,
            participation.sensitivity(chosen.mechanism.strategy),
        ),
        rel=1e-9,
    )
    more = plan_mechanism(_request(strategy="blt", num_buffers=chosen.num_buffers + 1))
    assert more.rmse > 0.99 * chosen.rmse
    if chosen.num_buffers > 1:
        fewer = plan_mechanism(_request(strategy="blt", num_buffers=chosen.num_buffers - 1))
        assert chosen.rmse < 0.99 * fewer.rmse
