"""Plans have sensitivity 1, the noise they need, the paper's numbers, and honest comparisons."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bandmf_tf.accounting import replicas
from bandmf_tf.accounting.amplification import BoundedPoissonSampling, PoissonSampling
from bandmf_tf.accounting.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    SecretParts,
    WaitingParticipation,
)
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import dense_optimization, workloads
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.planning import planner
from bandmf_tf.planning.plan import BANDED_STRATEGIES, SAMPLINGS, STRATEGIES, PlanRequest
from bandmf_tf.planning.planner import make_participation, plan_mechanism

# The paper's StackOverflow setting; tests/plan_cli_test.py has the amplified one.
ROUNDS, SEPARATION, PARTICIPATIONS = 2052, 342, 6


def _request(num_rounds=24, participation=None, **changes):
    arguments = {"epsilon": 1.0, "delta": 1e-6, **changes}
    arguments.setdefault("workload", workloads.prefix_sum(num_rounds))
    return PlanRequest(participation=participation, **arguments)


def _paper_request(**changes):
    participation = MinSeparation(SEPARATION, PARTICIPATIONS)
    return _request(ROUNDS, participation, **changes)


def _patterns(num_rounds, participation):
    """All maximal sets of steps in which a unit may take part; subsets never have more."""
    b, k = participation.min_separation, participation.max_participations
    if isinstance(participation, FixedEpochs):
        return [range(i, num_rounds, b)[:k] for i in range(num_rounds)]
    if b is None:
        return [(i,) for i in range(num_rounds)]
    return [
        steps
        for size in range(1, k + 1)
        for steps in itertools.combinations(range(num_rounds), size)
        if all(later - earlier >= b for earlier, later in itertools.pairwise(steps))
    ]


def _brute_force_sensitivity(strategy, participation):
    """Maximises |C u| over patterns and signs, which is exact for contributions of dimension 1."""
    C = strategy.materialize()
    best = 0.0
    for steps in _patterns(strategy.num_rounds, participation):
        for signs in itertools.product((1.0, -1.0), repeat=len(steps) - 1):
            best = max(best, np.linalg.norm(C[:, list(steps)] @ np.array([1.0, *signs])))
    return best


# The paper's numbers


@pytest.fixture(scope="module")
def paper_plan():
    return plan_mechanism(_paper_request())


def test_the_papers_banded_mechanism_has_its_noise_and_error(paper_plan):
    assert paper_plan.num_bands == SEPARATION
    assert paper_plan.mechanism.noise_multiplier == pytest.approx(4.22468, abs=5e-6)
    assert paper_plan.rmse == pytest.approx(8.595, abs=1.5e-3)
    assert paper_plan.sensitivity.kind == "exact"
    assert paper_plan.sensitivity.value == pytest.approx(1.0, rel=1e-12)
    assert paper_plan.mechanism.rho == pytest.approx(1.0 / (2.0 * 4.22468**2), rel=1e-5)


def test_the_papers_alternatives_are_in_the_comparison(paper_plan):
    noise = paper_plan.mechanism.noise_multiplier
    found = {entry.strategy: entry for entry in paper_plan.comparison.alternatives}
    assert found.keys() == {"identity", "tree_online", "tree_full", "blt"}
    assert found["identity"].calibrated_rmse / noise == pytest.approx(78.48, abs=5e-3)
    assert found["tree_full"].calibrated_rmse / noise == pytest.approx(12.47, abs=5e-3)
    assert len(paper_plan.comparison.left_out) == 1  # Dense MF, as there are 2052 rounds.
    assert paper_plan.cautions() == ()


# Scaling and error


SMALL_REQUESTS = [
    _request(participation=SingleParticipation()),
    *(_request(participation=MinSeparation(7, 3), strategy=s) for s in STRATEGIES),
    *(_request(participation=MinSeparation(5, 3), num_bands=b) for b in (1, 3, 5, 8, 13)),
    _request(participation=MinSeparation(6, 2), num_bands=9),
    _request(participation=FixedEpochs(6, 4), equal_column_norms=False),
    _request(participation=FixedEpochs(6, 3), equal_column_norms=False),
    _request(participation=MinSeparation(6, 4), equal_column_norms=False),
    _request(participation=FixedEpochs(8, 3), equal_column_norms=False, strategy="dense"),
    *(
        _request(
            participation=MinSeparation(8, 3),
            strategy=s,
            workload=workloads.sgd(24, 0.9, workloads.warmup_cooldown_schedule(24)),
        )
        for s in STRATEGIES
    ),
]


@pytest.mark.parametrize("request_", SMALL_REQUESTS)
def test_a_plan_has_sensitivity_one_and_the_error_it_states(request_):
    plan = plan_mechanism(request_)
    strategy = plan.mechanism.strategy
    # The guarantee of the online estimator is that of the tree matrix, not of the streamed one.
    if request_.strategy != "tree_online":
        found = _brute_force_sensitivity(strategy, plan.participation)
        assert found <= 1.0 + 1e-9
        if plan.sensitivity.kind == "exact":
            assert found == pytest.approx(1.0, rel=1e-9)
    B = request_.workload.materialize() @ np.linalg.inv(strategy.materialize())
    assert plan.rmse == pytest.approx(math.sqrt(np.sum(B**2) / 24), rel=1e-9)
    noise = plan.mechanism.noise_multiplier
    assert plan.calibrated_rmse == pytest.approx(noise * plan.rmse, rel=1e-9)
    np.testing.assert_allclose(plan.planned.round_errors, noise * np.linalg.norm(B, axis=1))


def test_every_plan_keeps_to_its_target():
    for request_ in SMALL_REQUESTS[:6]:
        mechanism = plan_mechanism(request_).mechanism
        assert 0.999 < mechanism.verify_epsilon().epsilon <= 1.0


def test_epsilon_follows_from_a_noise_multiplier_and_leads_back_to_it():
    participation = MinSeparation(8, 3)
    forward = plan_mechanism(
        _request(participation=participation, epsilon=None, noise_multiplier=2.5)
    )
    assert forward.mechanism.epsilon == pytest.approx(gaussian_epsilon(2.5, 1.0, 1e-6), rel=1e-9)
    back = plan_mechanism(_request(participation=participation, epsilon=forward.mechanism.epsilon))
    assert back.mechanism.noise_multiplier == pytest.approx(2.5, rel=1e-5)


def test_the_clip_norm_scales_the_noise_and_nothing_else():
    plain, clipped = (plan_mechanism(_request(l2_norm_clip=clip)) for clip in (1.0, 0.25))
    assert clipped.mechanism.stddev == pytest.approx(0.25 * plain.mechanism.stddev)
    assert clipped.mechanism.noise_multiplier == plain.mechanism.noise_multiplier
    assert clipped.rmse == plain.rmse


def test_column_norms_that_may_differ_are_better_for_exact_epochs_only():
    exact, separated = FixedEpochs(8, 3), MinSeparation(8, 3)

    def rmse(participation, equal):
        request_ = _request(participation=participation, equal_column_norms=equal, tolerance=1e-7)
        return plan_mechanism(request_).rmse

    assert rmse(exact, False) < rmse(exact, True) == pytest.approx(rmse(separated, True))
    assert rmse(separated, False) > rmse(separated, True)


# Amplification


def _sampled(participation=None, **changes):
    sizes = {"batch_size": 10, "dataset_size": 200, **changes}
    return _request(32, participation, **sizes)


def test_without_a_participation_the_sampling_itself_fixes_the_scale():
    plan = plan_mechanism(_sampled(num_bands=4))
    assert plan.participation == plan.mechanism.participation == FixedEpochs(4, 8)
    assert plan.sensitivity.value == pytest.approx(1.0, rel=1e-12)
    assert plan.mechanism.sensitivity.value == pytest.approx(1.0, rel=1e-12)
    assert plan.max_column_norm == pytest.approx(1.0 / math.sqrt(8), rel=1e-9)


def test_the_participation_of_a_sampled_plan_changes_its_scale_and_not_its_error():
    own = plan_mechanism(_sampled(num_bands=4))
    scaled = plan_mechanism(_sampled(MinSeparation(16, 2), num_bands=4))
    ratio = scaled.mechanism.noise_multiplier / own.mechanism.noise_multiplier
    assert ratio == pytest.approx(math.sqrt(8 / 2), rel=1e-5)
    assert scaled.sensitivity.value == pytest.approx(1.0, rel=1e-12)
    assert scaled.calibrated_rmse == pytest.approx(own.calibrated_rmse, rel=1e-5)
    # rho is the guarantee without amplification, for all that the sampling can do.
    kappa, noise = scaled.max_column_norm, scaled.mechanism.noise_multiplier
    assert scaled.mechanism.rho == pytest.approx(kappa**2 * 8 / (2 * noise**2), rel=1e-9)
    assert scaled.mechanism.rho == pytest.approx(own.mechanism.rho, rel=1e-5)
    assert "WITHOUT amplification" in scaled.rho_note
    assert "scale" in scaled.sensitivity_note


def test_amplified_noise_is_that_of_the_sampling_scheme():
    plan = plan_mechanism(_sampled(num_bands=4))
    sizes = {"num_bands": 4, "max_column_norm": plan.max_column_norm}
    bounded = plan.mechanism.sampling
    # A batch has at most that many examples, for half a percent of epsilon; noise pays for it.
    assert bounded == BoundedPoissonSampling.from_sizes(32, 4, 10, 200)
    assert 10 < bounded.max_batch_size < 20
    assert plan.to_json()["sampling"]["max_batch_size"] == bounded.max_batch_size
    poisson = PoissonSampling.from_sizes(32, 4, 10, 200).noise_multiplier(1.0, 1e-6, **sizes)
    assert poisson < plan.mechanism.noise_multiplier < 1.01 * poisson
    exact = bounded.noise_multiplier(1.0, 1e-6, **sizes)
    assert plan.mechanism.noise_multiplier == pytest.approx(exact, rel=1e-5)
    assert 0.9999 < plan.mechanism.verify_epsilon().epsilon <= 1.0


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_the_number_of_bands_that_is_chosen_is_the_best(sampling):
    plan = plan_mechanism(_sampled(sampling=sampling))
    errors = {}
    for num_bands in range(1, 21):
        scheme = _sampled(sampling=sampling).sampling_scheme(num_bands)
        loss = optimize_banded(workloads.prefix_sum(32), num_bands, tolerance=1e-3).loss
        noise = scheme.noise_multiplier(
            1.0, 1e-6, num_bands=num_bands, max_column_norm=1.0, discretization=4e-3
        )
        errors[num_bands] = noise * math.sqrt(loss / 32)
    assert errors[plan.num_bands] < 1.01 * min(errors.values())
    assert plan.band_search.best.num_bands == plan.num_bands
    assert plan.num_bands in [entry.num_bands for entry in plan.band_search.tried]
    assert plan.band_search.best.rmse == pytest.approx(plan.calibrated_rmse, rel=2e-3)


@pytest.mark.parametrize("strategy", ["toeplitz", "square_root", "identity"])
def test_all_banded_strategies_can_be_amplified(strategy):
    plan = plan_mechanism(_sampled(strategy=strategy))
    assert plan.mechanism.sampling.num_parts == plan.num_bands
    assert plan.mechanism.verify_epsilon().epsilon <= 1.0


def test_shuffling_takes_as_many_bands_as_there_are_batches():
    plan = plan_mechanism(_sampled(sampling="shuffling"))
    assert plan.num_bands == 20
    assert plan.mechanism.participation.max_participations == 2
    assert plan.mechanism.verify_epsilon().epsilon <= 1.0


def _few(**changes):
    return _sampled(
        workload=workloads.prefix_sum(16),
        epsilon=4.0,
        dataset_size=80,
        compare_dense=False,
        **changes,
    )


@pytest.fixture(scope="module")
def auto():
    return plan_mechanism(_few(sampling="auto"))


def test_auto_takes_the_sampling_of_least_error(auto):
    assert sorted(entry.sampling for entry in auto.samplings) == sorted(SAMPLINGS)
    errors = {entry.sampling: entry.rmse for entry in auto.samplings}
    assert auto.calibrated_rmse == min(errors.values()) == errors[auto.request.sampling]
    # The others are what they cost by themselves, and secrets are worth something.
    for sampling in ("poisson", "shuffling"):
        own = plan_mechanism(_few(sampling=sampling))
        assert errors[sampling] == pytest.approx(own.calibrated_rmse, rel=1e-6)
    assert max(errors["min_separation"], errors["secret_parts"]) < 0.99 * errors["poisson"]
    assert errors["once_per_epoch"] < errors["min_separation"]
    for entry in auto.samplings:
        is_cyclic = entry.sampling in ("poisson", "fixed_size", "shuffling")
        assert entry.confidence.startswith("proven" if is_cyclic else "estimated with confidence 1")
    assert 3.9 < auto.mechanism.verify_epsilon().epsilon <= 4.0
    assert auto.to_json()["samplings"][0]["sampling"] == auto.request.sampling


def test_random_schemes_keep_batches_as_large_as_asked_for():
    for sampling in ("secret_parts", "min_separation", "once_per_epoch", "balls_in_bins"):
        scheme = _sampled(sampling=sampling).sampling_scheme(4)
        assert scheme.rate * 200 == pytest.approx(10)
        whole = _sampled(sampling=sampling).sampling_scheme(20)  # As far apart as can be.
        assert whole.min_separation == 20
        assert whole.rate * 200 == pytest.approx(10)


@pytest.mark.parametrize(
    "changes", [{"noise_multiplier": 1.0, "epsilon": None}, {"strategy": "blt"}]
)
def test_auto_needs_a_target_and_chooses_the_strategy(changes):
    with pytest.raises(BandMFError):
        _sampled(sampling="auto", **changes)


def test_auto_keeps_the_strategy_that_was_asked_for():
    plan = plan_mechanism(_few(sampling="auto", strategy="identity"))
    assert plan.request.strategy == "identity"


def _unamplified_noise(mechanism, epsilon):
    return gaussian_noise_multiplier(epsilon, mechanism.delta, mechanism.sensitivity.value)


def test_a_delta_that_no_certificate_reaches_has_the_noise_without_amplification(monkeypatch):
    monkeypatch.setattr(replicas, "_MAX_MULTISETS", 500)
    plan = plan_mechanism(_few(sampling="secret_parts", delta=1e-13, num_bands=4))
    assert plan.mechanism.noise_multiplier == _unamplified_noise(plan.mechanism, 4.0)
    assert plan.mechanism.verify_epsilon().epsilon <= 4.0


@pytest.mark.parametrize("sampling", ["secret_parts", "min_separation", "once_per_epoch"])
@pytest.mark.parametrize("most_multisets", [50, 2])
def test_where_few_replicas_fit_there_are_fewer_bands_or_no_amplification(
    sampling, most_multisets, monkeypatch
):
    monkeypatch.setattr(replicas, "_MAX_MULTISETS", most_multisets)
    plan = plan_mechanism(_few(sampling=sampling, delta=1e-9))
    mechanism = plan.mechanism
    assert mechanism.verify_epsilon().epsilon <= 4.0
    unamplified = _unamplified_noise(mechanism, 4.0)
    if most_multisets == 2:
        assert plan.num_bands == 8  # All that batches of 10 of 80 allow.
        assert mechanism.noise_multiplier == unamplified
        assert any("gains nothing" in sentence for sentence in plan.cautions())
        assert plan.planned.setting.startswith("not amplified")
    else:
        assert plan.num_bands < 8
        assert mechanism.noise_multiplier < 0.9 * unamplified
        assert not any("gains nothing" in sentence for sentence in plan.cautions())


def test_bands_for_which_samples_alone_certify_noise_are_weighed(monkeypatch):
    monkeypatch.setattr(replicas, "_MAX_MULTISETS", 50)  # At 8 bands 2 replicas, without a bound.
    request = _few(sampling="once_per_epoch", delta=1e-4)
    plan = plan_mechanism(dataclasses.replace(request, epsilon=1.0, dataset_size=8_000))
    assert plan.num_bands >= 8
    unamplified = _unamplified_noise(plan.mechanism, 1.0)
    assert plan.mechanism.noise_multiplier < 0.5 * unamplified
    assert plan.mechanism.verify_epsilon().epsilon <= 1.0


@pytest.mark.parametrize(("epsilon", "best"), [(0.5, "blt"), (8.0, "banded")])
def test_in_bins_the_better_one_of_blt_and_bands_is_planned(epsilon, best):
    sizes = {"workload": workloads.prefix_sum(64), "dataset_size": 160, "epsilon": epsilon}
    in_bins = {"sampling": "balls_in_bins", "compare_dense": False, **sizes}
    plan = plan_mechanism(_sampled(**in_bins))
    assert plan.request.strategy == best
    others = [{"strategy": "blt"}, *({"num_bands": b} for b in (1, 4, 16))]
    errors = [plan_mechanism(_sampled(**in_bins, **other)).calibrated_rmse for other in others]
    # Samples find noise within a percent.
    assert plan.calibrated_rmse < 1.01 * min(errors) < 0.97 * max(errors[0], errors[-1])


def test_a_data_set_of_many_more_bins_than_rounds_is_planned_at_once():
    sizes = {"dataset_size": 10**7, "workload": workloads.prefix_sum(16)}
    request = _sampled(sampling="balls_in_bins", epsilon=4.0, compare_dense=False, **sizes)
    assert plan_mechanism(request).mechanism.verify_epsilon().epsilon <= 4.0


def test_samplings_that_cannot_be_planned_say_why(monkeypatch):
    def refuse(*_):
        raise BandMFError("too many states.")

    for scheme in (SecretParts, WaitingParticipation, BallsInBins):
        monkeypatch.setattr(scheme, "replicas", refuse)
    plan = plan_mechanism(_few(sampling="auto"))
    assert plan.request.sampling in ("poisson", "fixed_size")
    assert [entry.plan for entry in plan.samplings if entry.rmse is None] == 4 * [
        "too many states."
    ]
    assert "not planned: too many states." in plan.samplings[-1].describe()


def test_a_baseline_is_drawn_as_good_as_it_is():
    sizes = {"batch_size": 100, "dataset_size": 1000, "epsilon": 8.0, "delta": 1e-5}
    plan = plan_mechanism(_request(100, num_bands=10, **sizes))
    errors = {entry.strategy: entry.calibrated_rmse for entry in plan.comparison.alternatives}
    assert errors["dense"] == pytest.approx(5.175, abs=2e-3)
    assert errors["dense"] < errors["banded"] < plan.calibrated_rmse
    assert "in rounds 10 apart" in plan.to_json()["comparison_participation"]


def test_unamplified_alternatives_go_through_the_data_in_order():
    comparison = plan_mechanism(_sampled(num_bands=4)).comparison
    in_order = FixedEpochs(20, 2)  # What `keras.cyclic_scheme` does.
    assert comparison.participation == in_order
    assert _sampled(dataset_size=207).unsampled_participation() == in_order  # 7 examples sit out.
    for strategy in ("banded", "dense"):  # As good as they can be there.
        own = plan_mechanism(_request(32, in_order, strategy=strategy, equal_column_norms=False))
        drawn = next(a for a in comparison.alternatives if a.strategy == strategy)
        assert drawn.calibrated_rmse == pytest.approx(own.calibrated_rmse, rel=2e-3)
        worse = plan_mechanism(_request(32, MinSeparation(20), strategy=strategy))
        assert drawn.calibrated_rmse < 0.99 * worse.calibrated_rmse
    dp_sgd = next(a for a in comparison.alternatives if a.strategy == "identity")
    amplified = plan_mechanism(_sampled(strategy="identity"))
    # Of alternatives batches have no largest size.
    assert dp_sgd.calibrated_rmse == pytest.approx(amplified.calibrated_rmse, rel=1e-3)


# Choosing bands without amplification


def test_bands_are_as_many_as_participations_are_apart():
    for strategy in BANDED_STRATEGIES:
        plan = plan_mechanism(_request(participation=MinSeparation(7), strategy=strategy))
        assert plan.num_bands == 7
    assert plan_mechanism(_request()).num_bands == 24  # A single participation.


def test_no_other_number_of_bands_is_better():
    participation = MinSeparation(6, 4)
    chosen = plan_mechanism(_request(participation=participation))
    for num_bands in (1, 3, 5, 8, 12, 24):
        other = plan_mechanism(_request(participation=participation, num_bands=num_bands))
        assert chosen.rmse < other.rmse


def test_bands_that_nobody_asked_for_stay_affordable(monkeypatch):
    monkeypatch.setattr(planner, "_LARGEST_BANDED_ENTRIES", 5 * 24)
    plan = plan_mechanism(_request(participation=MinSeparation(12)))
    assert plan.num_bands == 5
    assert "12" in plan.size_reason
    asked = plan_mechanism(_request(participation=MinSeparation(12), num_bands=12))
    assert asked.num_bands == 12


def test_a_search_leaves_out_what_is_not_affordable(monkeypatch):
    monkeypatch.setattr(planner, "_LARGEST_BANDED_ENTRIES", 2 * 32)
    plan = plan_mechanism(_sampled(epsilon=4.0))
    assert plan.num_bands == 2
    assert all(entry.num_bands <= 2 for entry in plan.band_search.tried)
    assert "would be better" in plan.size_reason


# The comparison


def test_alternatives_have_the_privacy_and_the_error_they_claim():
    participation = MinSeparation(8, 3)
    plan = plan_mechanism(_request(participation=participation))
    noise = gaussian_noise_multiplier(1.0, 1e-6, 1.0)
    for entry in plan.comparison.alternatives:
        own = plan_mechanism(
            _request(participation=participation, strategy=entry.strategy, tolerance=1e-3)
        )
        assert own.mechanism.noise_multiplier == pytest.approx(noise, rel=1e-9)
        rmse = own.rmse
        if entry.strategy == "tree_online":  # By what it releases, not by its nodes.
            tree = TreeStrategy(entry.round_errors.size, "online")
            sensitivities = [participation.sensitivity(c).value for c in (tree.released(), tree)]
            rmse *= sensitivities[0] / sensitivities[1]
            assert sensitivities[0] < 0.98 * sensitivities[1]
        assert entry.calibrated_rmse == pytest.approx(noise * rmse, rel=1e-6)
        expected = math.sqrt(np.mean(entry.round_errors**2))
        assert entry.calibrated_rmse == pytest.approx(expected, rel=1e-12)


def test_dense_mf_is_compared_when_it_is_small_or_asked_for(monkeypatch):
    def compared(**changes):
        comparison = plan_mechanism(_request(**changes)).comparison
        return any(entry.strategy == "dense" for entry in comparison.alternatives)

    assert compared()
    assert not compared(compare_dense=False)
    monkeypatch.setattr("bandmf_tf.planning.comparison.LARGEST_DENSE", 10)
    assert not compared()
    assert compared(compare_dense=True)


def test_dense_mf_that_nobody_asked_for_is_bounded_and_shows_its_progress(monkeypatch):
    monkeypatch.setattr("bandmf_tf.planning.comparison._DENSE_WORK", 1.0)
    details: list[str] = []

    def dense(**changes):
        details.clear()
        plan = plan_mechanism(_request(**changes), lambda stage, detail: details.append(detail))
        return [text for text in plan.comparison.left_out if "not found in 1 iterations" in text]

    assert dense()
    assert details[-1] == "MF (dense), iteration 1"
    assert not dense(compare_dense=True)
    assert "MF (dense), iteration 2" in details


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_is_not_its_own_alternative(strategy):
    plan = plan_mechanism(_request(participation=MinSeparation(8), strategy=strategy))
    assert strategy not in [entry.strategy for entry in plan.comparison.alternatives]
    assert plan.planned.strategy == strategy


def test_a_plan_warns_of_what_should_not_be_overlooked():
    worse = plan_mechanism(_request(participation=MinSeparation(8), strategy="identity"))
    assert any("less error" in caution for caution in worse.cautions())
    loose = plan_mechanism(_sampled(num_bands=4, delta=0.01))
    assert any("dataset_size" in caution for caution in loose.cautions())
    bound = plan_mechanism(_request(participation=MinSeparation(3, 5), num_bands=20))
    assert bound.sensitivity.kind == "upper bound"
    assert any("upper bound" in caution for caution in bound.cautions())


# What comes in and what goes out


def test_a_dense_strategy_that_was_not_optimised_is_neither_planned_nor_compared(monkeypatch):
    """With momentum, equal norms and many epochs the optimum takes thousands of iterations."""
    workload = workloads.sgd(70, momentum=0.9)
    request = _request(workload=workload, participation=MinSeparation(7, 10), strategy="dense")
    plan = plan_mechanism(request)
    others = {entry.strategy: entry.calibrated_rmse for entry in plan.comparison.alternatives}
    assert plan.calibrated_rmse < 0.5 * others["identity"]
    monkeypatch.setattr(dense_optimization, "_ITERATIONS", (20, 20))
    with pytest.raises(BandMFError, match="the dense optimum was not found in 20 iterations"):
        plan_mechanism(request)
    comparison = plan_mechanism(dataclasses.replace(request, strategy="banded")).comparison
    assert "dense" not in {entry.strategy for entry in comparison.alternatives}
    assert any("was not found" in sentence for sentence in comparison.left_out)


@pytest.mark.parametrize("strategy", ["banded", "dense", "identity"])
def test_json_holds_plain_finite_values_under_the_flag_names(strategy):
    document = plan_mechanism(_request(strategy=strategy)).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    wanted = "num_rounds num_bands rmse sensitivity sensitivity_kind noise_multiplier rho"
    assert document.keys() >= {*wanted.split(), "epsilon", "delta", "adjacency", "assumptions"}


def test_progress_goes_through_the_stages_in_order():
    seen = []
    plan = plan_mechanism(_sampled(), progress=lambda stage, detail: seen.append(stage))
    assert [stage for stage, _ in itertools.groupby(seen)] == list(planner.STAGES)
    document = plan.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["sampling"]["num_parts"] == document["num_bands"]


@hypothesis.given(
    n=st.integers(1, 60), b=st.integers(1, 60), k=st.one_of(st.none(), st.integers(1, 60))
)
@hypothesis.settings(deadline=None)
def test_participation_is_what_fits_into_training(n, b, k):
    b = min(b, n)
    found = make_participation(n, min_separation=b, max_participations=k)
    fitting = math.ceil(n / b)
    most = min(fitting, k or fitting)
    expected = SingleParticipation() if most == 1 else MinSeparation(b, most)
    assert found == expected


@hypothesis.given(n=st.integers(1, 60), k=st.integers(1, 60))
@hypothesis.settings(deadline=None)
def test_epochs_fit_into_training(n, k):
    hypothesis.assume(k <= n)
    found = make_participation(n, num_epochs=k)
    if k == 1:
        assert found == SingleParticipation()
    else:
        assert found == (MinSeparation if n % k else FixedEpochs)(n // k, k)
        assert (k - 1) * found.min_separation < n


def test_no_numbers_mean_no_participation():
    assert make_participation(10) is None
    assert make_participation(10, max_participations=1) == SingleParticipation()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_separation": 5, "num_epochs": 2}, "num_epochs stands for"),
        ({"max_participations": 2, "num_epochs": 2}, "num_epochs stands for"),
        ({"max_participations": 2}, "need a min_separation"),
        ({"min_separation": 11}, "at most num_rounds=10"),
        ({"num_epochs": 11}, "at most num_rounds=10"),
        ({"num_epochs": 3, "schema": FixedEpochs}, "multiple of num_epochs"),
        ({"min_separation": 0}, "at least 1"),
        ({"min_separation": 5, "max_participations": 0}, "at least 1"),
    ],
)
def test_contradictory_participations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_participation(10, **changes)


SAMPLES = {"batch_size": 4, "dataset_size": 100}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.0}, "Exactly one of epsilon"),
        ({"epsilon": None}, "Exactly one of epsilon"),
        ({"epsilon": -1.0}, "epsilon must be positive"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"epsilon": None, "noise_multiplier": 1e-9}, "noise_multiplier must be at least 0.001"),
        ({"epsilon": 1e9}, "epsilon must be at most 100000"),
        ({"delta": 1.0}, "delta must be strictly between 0 and 1"),
        ({"l2_norm_clip": 0.0}, "l2_norm_clip must be positive"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"participation": MinSeparation(25)}, "min_separation must be at most"),
        ({"batch_size": 4}, "given together"),
        ({"dataset_size": 4}, "given together"),
        ({"batch_size": 5, "dataset_size": 4}, "batch_size must be at most"),
        ({"batch_size": 0, "dataset_size": 4}, "batch_size must be at least 1"),
        ({**SAMPLES, "sampling": "urn"}, "sampling must be one of"),
        ({**SAMPLES, "strategy": "tree_full"}, "needs a banded strategy"),
        ({**SAMPLES, "strategy": "dense"}, "needs a banded strategy"),
        ({**SAMPLES, "equal_column_norms": False}, "largest column norm"),
        ({**SAMPLES, "epsilon": None, "noise_multiplier": 1.0}, "give num_bands"),
        ({"batch_size": 40, "dataset_size": 100, "num_bands": 3}, "fewer than batch_size"),
        ({"strategy": "magic"}, "strategy must be one of"),
        ({"strategy": "identity", "num_bands": 2}, "num_bands is for"),
        ({"strategy": "toeplitz", "equal_column_norms": False}, "equal_column_norms=false is for"),
        ({"num_bands": 25}, "num_bands must be at most num_rounds=24"),
        ({"num_bands": 0}, "num_bands must be at least 1"),
        (
            {
                "participation": FixedEpochs(6, 4),
                "num_bands": 7,
                "equal_column_norms": False,
            },
            "at most min_separation=6",
        ),
    ],
)
def test_contradictory_requests_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _request(**changes)


def test_enormous_noise_needs_no_comparison():
    plan = plan_mechanism(_request(epsilon=None, noise_multiplier=1e12))
    assert plan.mechanism.epsilon == 0.0
    assert plan.comparison.alternatives == ()
    assert len(plan.comparison.left_out) == 1


def test_a_longer_optimisation_is_at_least_as_good():
    rough = plan_mechanism(_request(tolerance=1e-2))
    fine = plan_mechanism(dataclasses.replace(_request(), tolerance=1e-8))
    assert fine.rmse <= rough.rmse
    assert fine.optimization.relative_change < 1e-8


def test_memory_counts_the_rows_that_training_keeps():
    def rows(**changes):
        return plan_mechanism(_request(participation=MinSeparation(8), **changes))

    assert rows().rows_in_memory == 7
    assert rows().bytes_per_parameter == 28
    assert rows(strategy="identity").rows_in_memory == 0
    assert rows(strategy="tree_full").rows_in_memory == 4  # Trees of 16 and 8 leaves.
    assert rows(strategy="dense").rows_in_memory == 23
