from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bandmf_tf._numbers import round_up
from bandmf_tf.accounting.amplification import PoissonSampling, Shuffling
from bandmf_tf.accounting.gaussian import gaussian_delta, gaussian_epsilon, zcdp_epsilon
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.evidence.participation import ObservedParticipation, stated_participation
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.inverse_banded import InverseBandedStrategy
from bandmf_tf.factorization.optimization import optimize_banded
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.sensitivity import general_min_separation
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    ToeplitzStrategy,
    identity,
)
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.factorization.workloads import prefix_sum
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.report.analysis import (
    AsObserved,
    UnsupportedGuaranteeError,
    analyze,
)
from bandmf_tf.runs.basis import Basis

N = 12
NOISE = 6.0


def _strategies() -> dict[str, object]:
    rng = np.random.default_rng(0)
    triangle = np.tril(rng.normal(size=(N, N))) + 3.0 * np.eye(N)
    bands = rng.normal(size=(4, N))
    bands[0] = 2.0
    for d in range(4):
        bands[d, N - d :] = 0.0
    return {
        "banded": BandedStrategy(bands),
        "toeplitz": ToeplitzStrategy(np.array([1.0, 0.5, -0.3, 0.2]), N),
        "dense": DenseStrategy(triangle),
        "tree_online": TreeStrategy(N, "online", 0.7),
        "tree_full": TreeStrategy(N, "full", 0.7),
        "blt": BufferedStrategy(np.array([0.9, 0.4]), np.array([0.2, 0.3]), N, 0.7),
        "inverse_banded": InverseBandedStrategy(np.array([1.3, -0.6, 0.1]), N),
    }


STRATEGIES = _strategies()


@functools.cache
def _banded() -> BandedStrategy:
    return optimize_banded(prefix_sum(40), 8).strategy


def _mechanism(strategy=None, participation=None, **changes) -> Mechanism:
    strategy = strategy or _banded()
    arguments = {"noise_multiplier": NOISE, "l2_norm_clip": 1.0, "delta": 1e-6, **changes}
    return Mechanism.create(
        strategy,
        prefix_sum(strategy.num_rounds),
        participation or MinSeparation(8, 4),
        **arguments,
    )


def _brute_force(C: np.ndarray, b: int, k: int) -> float:
    """Largest sum of |X| over patterns: the sensitivity, or a bound on it (Proposition E.1)."""
    X = np.abs(C.T @ C)
    best = 0.0
    for size in range(1, k + 1):
        for pattern in itertools.combinations(range(len(X)), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(pattern)):
                best = max(best, float(X[np.ix_(pattern, pattern)].sum()))
    return math.sqrt(best)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize(("rounds", "b", "k"), [(12, 4, 3), (7, 4, 2), (9, 2, 3), (5, 3, 1)])
def test_sensitivity_of_completed_rounds_is_never_below_brute_force(name, rounds, b, k):
    strategy = STRATEGIES[name]
    block = strategy.leading_block(rounds)
    observed = stated_participation(rounds, b, k)
    found = AsObserved(observed).sensitivity(block)
    if name == "tree_full":  # The first rounds are what the streamed matrix releases.
        C = strategy.materialize()[:rounds, :rounds]
    elif name == "tree_online":
        C = block.node_matrix()
    else:
        C = block.materialize()
    exact = _brute_force(C, b, k)
    if name == "tree_full" and rounds < N:
        assert found.kind == "upper bound"
    assert found.value >= exact * (1 - 1e-12)
    if found.kind == "exact":
        assert found.value == pytest.approx(exact, rel=1e-12)


def test_several_contributions_to_a_round_multiply_the_sensitivity():
    mechanism = _mechanism()
    once = stated_participation(40, 8, 4)
    twice = dataclasses.replace(once, max_contributions_per_round=2)
    assert analyze(mechanism, twice).sensitivity.value == pytest.approx(
        2 * analyze(mechanism, once).sensitivity.value
    )
    assert analyze(mechanism, twice).sensitivity.kind == "upper bound"
    assert not analyze(mechanism, twice).plan_was_kept


def test_a_run_as_planned_has_the_planned_guarantee():
    mechanism = _mechanism()
    analysis = analyze(mechanism, stated_participation(40, 8, 4))
    assert analysis.epsilon == pytest.approx(mechanism.epsilon, rel=1e-12)
    assert analysis.rho == pytest.approx(mechanism.rho, rel=1e-12)
    assert analysis.planned.epsilon_if_kept == pytest.approx(mechanism.epsilon)
    assert analysis.plan_was_kept
    assert "What is assumed of participation is within the plan." in analysis.findings
    seen = dataclasses.replace(
        stated_participation(40, 8, 4),
        participations={4: 8},
        min_separation_basis=Basis.OBSERVED,
        max_participations_basis=Basis.OBSERVED,
    )
    assert "Participation was within the plan." in analyze(mechanism, seen).findings


def test_figures_of_one_release_agree_with_each_other():
    analysis = analyze(_mechanism(), stated_participation(40, 8, 4), delta=1e-8)
    mu = analysis.mu
    assert mu == pytest.approx(analysis.sensitivity.value / NOISE)
    assert analysis.rho == pytest.approx(mu**2 / 2)
    assert analysis.epsilon_zcdp == zcdp_epsilon(analysis.rho, 1e-8) > analysis.epsilon
    for delta, epsilon in analysis.curve:
        assert gaussian_delta(NOISE, analysis.sensitivity.value, epsilon) <= delta
    assert dict(analysis.curve)[1e-8] == pytest.approx(analysis.epsilon)
    epsilons = [epsilon for _, epsilon in analysis.curve]
    assert epsilons == sorted(epsilons)


def test_a_smaller_separation_costs_privacy_and_the_report_says_how_much():
    mechanism = _mechanism()
    analysis = analyze(mechanism, stated_participation(40, 7, 4))
    assert analysis.epsilon > mechanism.epsilon
    assert not analysis.plan_was_kept
    words = " ".join(analysis.findings)
    assert "a unit could take part 7 rounds apart and at least 8 were planned" in words
    assert f"{round_up(analysis.epsilon):g}; had the plan been kept, it would be" in words


def test_theorem_3_stands_beside_a_sharper_sensitivity():
    analysis = analyze(_mechanism(), stated_participation(40, 6, 4))
    assert analysis.sensitivity.kind == "exact"
    assert analysis.theorem_3_bound == general_min_separation(_banded(), 6, 4).value
    assert analysis.theorem_3_bound > analysis.sensitivity.value
    far = analyze(_mechanism(), stated_participation(40, 2, 4))
    assert far.sensitivity.theorem.startswith("Theorem 3")
    assert far.theorem_3_bound == far.sensitivity.value
    assert analyze(_mechanism(), stated_participation(40, 8, 4)).theorem_3_bound is None


def test_theorem_3_is_left_out_only_where_its_band_takes_too_much_memory(monkeypatch):
    """8 bands are 15 diagonals of C^T C, 600 entries for 40 rounds and not 1,600."""
    for entries, is_stated in ((600, True), (599, False)):
        monkeypatch.setattr("bandmf_tf.report.analysis._LARGEST_GRAM", entries)
        bound = analyze(_mechanism(), stated_participation(40, 6, 4)).theorem_3_bound
        assert (bound is not None) == is_stated


def test_more_participations_than_planned_are_a_violation():
    analysis = analyze(_mechanism(), stated_participation(40, 8, 5))
    planned = "part in 5 rounds and at most 4 were planned"
    assert f"could take {planned}" in " ".join(analysis.findings)
    seen = dataclasses.replace(stated_participation(40, 8, 5), participations={5: 1})
    assert f"took {planned}" in " ".join(analyze(_mechanism(), seen).findings)
    assert analysis.epsilon > analysis.planned.epsilon


def test_fewer_rounds_never_cost_privacy():
    mechanism = _mechanism()
    epsilons = [analyze(mechanism, stated_participation(t, 8, 4)).epsilon for t in (3, 9, 20, 40)]
    assert epsilons == sorted(epsilons)
    assert (
        "20 of 40 planned rounds" in analyze(mechanism, stated_participation(20, 8, 4)).findings[0]
    )


def test_a_run_that_ended_early_assumes_that_its_releases_did_not_decide_it():
    early = analyze(_mechanism(), stated_participation(20, 8, 4))
    assert "20 of 40 planned rounds was not decided" in " ".join(early.guarantee.assumptions)
    whole = analyze(_mechanism(), stated_participation(40, 8, 4))
    assert not any("decided" in assumption for assumption in whole.guarantee.assumptions)


def test_a_delta_that_allows_publishing_somebodys_data_is_cautioned_against():
    observed = dataclasses.replace(stated_participation(40, 8, 4), num_units=1000)
    assert "one over the number of units" in analyze(_mechanism(), observed, delta=1e-3).cautions[0]
    assert analyze(_mechanism(), observed, delta=9e-4).cautions == ()


@hypothesis.given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_what_is_rounded_up_is_never_less_and_hardly_more(value, digits):
    shown = round_up(value, digits)
    assert value * (1 - 1e-11) <= shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-11)
    assert float(f"{shown:.{digits}g}") == pytest.approx(shown, rel=1e-15)


def test_more_rounds_than_the_mechanism_has_are_refused():
    with pytest.raises(UnsupportedGuaranteeError, match="more than the num_rounds=40"):
        analyze(_mechanism(), stated_participation(41, 8, 4))


def test_the_noise_that_was_used_counts_not_the_planned_one():
    analysis = analyze(_mechanism(), stated_participation(40, 8, 4), noise_multiplier=NOISE / 2)
    assert analysis.rho == pytest.approx(4 * analysis.planned.rho)
    assert not analysis.plan_was_kept
    assert (
        "The noise multiplier was 3 and 6 was planned: rho is 4 times that of the planned noise."
        in analysis.findings
    )


def test_groups_are_one_release_with_a_multiple_of_the_sensitivity():
    analysis = analyze(_mechanism(), stated_participation(40, 8, 4))
    for group in analysis.groups:
        assert group.rho == pytest.approx(group.group_size**2 * analysis.rho)
        together = group.group_size * analysis.sensitivity.value
        assert group.epsilon == gaussian_epsilon(NOISE, together, 1e-6)


def test_every_epsilon_is_on_the_grid_of_the_mechanism():
    coarse, delta = 0.05, 1e-7
    mechanism = _mechanism(discretization=coarse)
    analysis = analyze(mechanism, stated_participation(40, 8, 4), delta=delta)

    def epsilon(noise: float, sensitivity: float, at: float = delta) -> float:
        found = gaussian_epsilon(noise, sensitivity, at, discretization=coarse)
        assert found != gaussian_epsilon(noise, sensitivity, at)
        return found

    value = analysis.sensitivity.value
    assert analysis.epsilon == epsilon(NOISE, value)
    assert analysis.planned.epsilon == analysis.planned.epsilon_if_kept == analysis.epsilon
    assert analysis.curve == tuple((at, epsilon(NOISE, value, at)) for at, _ in analysis.curve)
    for group in analysis.groups:
        assert group.epsilon == epsilon(NOISE, group.group_size * value)
    assert analysis.tree.epsilon == epsilon(
        analysis.tree.noise_multiplier, analysis.tree.sensitivity
    )
    assert analyze(mechanism, stated_participation(40, 8, 4)).epsilon == mechanism.epsilon


def test_an_amplified_report_is_on_the_grid_of_the_mechanism():
    sampling = PoissonSampling(40, 8, 0.05)
    mechanism = _mechanism(
        participation=sampling.participation, sampling=sampling, discretization=0.02
    )
    analysis = analyze(mechanism, stated_participation(40, 8, 5), sampling=sampling)
    assert analysis.amplified.epsilon == mechanism.epsilon
    assert dict(analysis.curve)[1e-6] == pytest.approx(mechanism.epsilon)


def test_amplified_and_unamplified_stand_side_by_side():
    sampling = PoissonSampling(40, 8, 0.05)
    mechanism = _mechanism(participation=sampling.participation, sampling=sampling)
    observed = stated_participation(40, 8, 5)
    analysis = analyze(mechanism, observed, sampling=sampling)
    assert analysis.epsilon == analysis.amplified.epsilon == pytest.approx(mechanism.epsilon)
    assert analysis.amplified.epsilon < analysis.unamplified.epsilon
    assert analysis.amplified.rho == analysis.rho
    without = analyze(mechanism, observed)
    assert without.amplified is None
    assert without.epsilon == analysis.unamplified.epsilon
    shorter = analyze(mechanism, stated_participation(16, 8, 2), sampling=sampling)
    assert shorter.epsilon < analysis.epsilon


def test_sampling_that_amplifies_nothing_is_not_called_amplification():
    for sampling in (Shuffling(40, 8, 10, 160, reshuffled=True), PoissonSampling(40, 8, 1.0)):
        observed = stated_participation(40, 8, sampling.max_participations)
        analysis = analyze(_mechanism(), observed, sampling=sampling)
        assert analysis.amplified is None
        assert analysis.epsilon == analysis.unamplified.epsilon
        assert "makes no proven figure smaller" in analysis.findings[-1]
        assert not any("secret" in text for text in analysis.guarantee.assumptions)


def test_where_amplification_does_not_hold_the_guarantee_is_the_one_without():
    kept = stated_participation(40, 8, 4)
    twice = dataclasses.replace(kept, max_contributions_per_round=2)
    wide = PoissonSampling(40, 4, 0.05)  # Fewer parts than the strategy has bands.
    for observed, sampling, words in (
        (kept, wide, "Found num_bands=8"),
        (twice, PoissonSampling(40, 8, 0.05), "one contribution"),
    ):
        analysis = analyze(_mechanism(), observed, sampling=sampling)
        assert analysis.amplified is None
        assert analysis.epsilon == analyze(_mechanism(), observed).epsilon
        assert words in analysis.findings[-1]


def test_a_certificate_is_of_the_noise_and_delta_that_it_was_made_for():
    scheme = BallsInBins(12, 4)
    mechanism = _mechanism(identity(12), scheme.participation, sampling=scheme, delta=1e-5)
    observed = stated_participation(12, 4, 3)
    own = mechanism.guarantee.certificate
    planned = analyze(mechanism, observed, sampling=scheme)
    assert planned.amplified.certificate is own
    assert planned.epsilon == mechanism.epsilon
    for changes in ({"noise_multiplier": NOISE / 2}, {"delta": 1e-7}):
        other = analyze(mechanism, observed, sampling=scheme, **changes)
        assert other.guarantee.certificate is not own
        assert other.epsilon > 1.1 * mechanism.epsilon
    shorter = analyze(mechanism, stated_participation(8, 4, 2), sampling=scheme)
    assert shorter.guarantee.certificate is not own


def test_groups_are_amplified_where_that_is_better():
    sampling = PoissonSampling(40, 8, 0.001)
    mechanism = _mechanism(
        participation=sampling.participation, sampling=sampling, noise_multiplier=1.0
    )
    observed = stated_participation(40, 8, 5)
    analysis = analyze(mechanism, observed, sampling=sampling)
    unamplified = analyze(mechanism, observed)
    for group, plain in zip(analysis.groups, unamplified.groups, strict=True):
        g = group.group_size
        assert group.epsilon < 0.5 * plain.epsilon
        assert group.rho == plain.rho
        # Group privacy, step by step: (e, d) of one unit is (g e, d (1 + e^e + ..)) of g units.
        epsilon = group.epsilon / g
        factor = sum(math.exp(j * epsilon) for j in range(g))
        one = mechanism.release.guarantee(1.0, analysis.delta / factor).epsilon
        assert epsilon == pytest.approx(one, rel=1e-3)
        assert epsilon >= one * (1 - 1e-9)


def test_a_separation_that_was_only_observed_must_not_depend_on_released_models():
    stated = stated_participation(40, 8, 4)
    seen = dataclasses.replace(stated, min_separation_basis=Basis.OBSERVED)
    for observed, expected in ((stated, False), (seen, True)):
        assumptions = analyze(_mechanism(), observed).guarantee.assumptions
        assert any("depend on models" in text for text in assumptions) == expected


def test_an_infinite_epsilon_is_refused():
    with pytest.raises(UnsupportedGuaranteeError, match="protects nobody"):
        analyze(_mechanism(), stated_participation(40, 8, 4), noise_multiplier=1e-200)


def test_epochs_that_were_kept_have_the_sensitivity_of_epochs():
    rng = np.random.default_rng(1)
    strategy = DenseStrategy(np.tril(rng.uniform(0.1, 1, size=(12, 12))))
    mechanism = _mechanism(strategy, FixedEpochs(4, 3), noise_multiplier=20.0)
    kept = ObservedParticipation(
        source="a test",
        rounds_completed=12,
        min_separation=4,
        max_participations=3,
        rounds_completed_basis=Basis.OBSERVED,
        min_separation_basis=Basis.OBSERVED,
        max_participations_basis=Basis.OBSERVED,
        separations={4: 10},
    )
    analysis = analyze(mechanism, kept)
    assert analysis.sensitivity.value == pytest.approx(mechanism.sensitivity.value)
    assert analysis.plan_was_kept
    broken = analyze(mechanism, dataclasses.replace(kept, separations={4: 10, 5: 1}))
    assert broken.sensitivity.value > analysis.sensitivity.value
    assert "exactly 4 rounds apart were planned" in " ".join(broken.findings)


def test_the_tree_of_the_comparison_has_the_same_error():
    tree = TreeStrategy(40, "online")
    mechanism = _mechanism(tree, MinSeparation(8, 4))
    analysis = analyze(mechanism, stated_participation(40, 8, 4))
    assert analysis.tree.noise_multiplier == pytest.approx(NOISE)
    assert analysis.tree.rho == pytest.approx(analysis.rho)
    banded = analyze(_mechanism(), stated_participation(40, 8, 4))
    assert banded.tree.sensitivity_kind == "exact"
    # What the online tree releases is less sensitive than its nodes; both are stated.
    assert banded.tree.released_sensitivity < banded.tree.sensitivity
    assert banded.tree.released_epsilon < banded.tree.epsilon
    assert banded.tree.rho > banded.rho
