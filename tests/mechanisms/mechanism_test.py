"""A mechanism exists only if its parts agree, and its participation covers its sampling."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.accounting.gaussian import Adjacency, gaussian_epsilon
from bandmf_tf.accounting.releases import Release
from bandmf_tf.factorization import sensitivity, strategies, trees, workloads
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    SingleParticipation,
)
from bandmf_tf.mechanisms.files import decode_mechanism, encode_mechanism
from bandmf_tf.mechanisms.mechanism import Mechanism, Provenance
from cases import random_banded

N, BANDS = 12, 3


def _mechanism(**changes) -> Mechanism:
    arguments = {
        "strategy": random_banded(BANDS, N),
        "workload": workloads.prefix_sum(N),
        "participation": MinSeparation(BANDS, 3),
        "noise_multiplier": 4.0,
        "l2_norm_clip": 0.25,
        "delta": 1e-6,
        **changes,
    }
    return Mechanism.create(**arguments)


SAMPLED = {
    "sampling": PoissonSampling.from_sizes(N, 4, batch_size=5, dataset_size=400),
    "participation": FixedEpochs(4, 3),
}
# Amplification knows the largest column norm alone; here only one column has it.
LOPSIDED = {
    "strategy": strategies.BandedStrategy(np.array([[1.0, *[0.1] * (N - 1)]])),
    "sampling": PoissonSampling(N, 4, 0.9),
    "participation": PoissonSampling(N, 4, 0.9).participation,
    "noise_multiplier": 1.0,
}


def test_noise_and_rho_follow_their_formulas():
    mechanism = _mechanism()
    expected = sensitivity.min_separation_participation(mechanism.strategy, BANDS, 3)
    assert mechanism.sensitivity == expected
    assert mechanism.stddev == 4.0 * 0.25
    assert mechanism.rho == pytest.approx(expected.value**2 / (2 * 4.0**2), rel=1e-14)
    assert mechanism.epsilon == gaussian_epsilon(4.0, expected.value, 1e-6)
    assert (mechanism.delta, mechanism.num_rounds, mechanism.num_bands) == (1e-6, N, BANDS)
    assert mechanism.guarantee.adjacency is Adjacency.ZERO_OUT


def test_sampling_amplifies_epsilon_and_leaves_rho():
    sampled = _mechanism(**SAMPLED)
    plain = _mechanism(participation=SAMPLED["participation"])
    kappa = sampled.strategy.column_norms().max()
    expected = SAMPLED["sampling"].epsilon(4.0, 1e-6, num_bands=BANDS, max_column_norm=kappa)
    assert sampled.epsilon == expected
    assert sampled.epsilon < plain.epsilon / 2
    assert sampled.rho == plain.rho


@pytest.mark.parametrize("changes", [{}, SAMPLED])
def test_verify_epsilon_accepts_the_stated_one_and_rejects_others(changes):
    mechanism = _mechanism(**changes)
    assert mechanism.verify_epsilon().epsilon == mechanism.epsilon
    overstated = dataclasses.replace(mechanism.guarantee, epsilon=1.01 * mechanism.epsilon)
    with pytest.raises(ValueError, match="plan it again"):
        dataclasses.replace(mechanism, guarantee=overstated).verify_epsilon()


def test_a_sampled_epsilon_of_fewer_digits_still_verifies():
    mechanism = _mechanism(**SAMPLED)
    earlier = dataclasses.replace(mechanism.guarantee, epsilon=1.002 * mechanism.epsilon)
    found = dataclasses.replace(mechanism, guarantee=earlier).verify_epsilon()
    assert found.epsilon == mechanism.epsilon


def test_the_smaller_of_both_epsilons_is_stated():
    mechanism = _mechanism(**LOPSIDED)
    amplified = mechanism.sampling.epsilon(1.0, 1e-6, num_bands=1, max_column_norm=1.0)
    alone = gaussian_epsilon(1.0, mechanism.sensitivity.value, 1e-6)
    assert mechanism.epsilon == alone < 0.8 * amplified
    assert not any("secret" in text for text in mechanism.guarantee.assumptions)
    noise = mechanism.release.noise_multiplier(2.0, 1e-6)
    assert mechanism.release.guarantee(noise, 1e-6).epsilon == pytest.approx(2.0, rel=1e-5)


def test_the_larger_amplified_epsilon_that_version_0_1_stated_still_verifies():
    mechanism = _mechanism(**LOPSIDED, discretization=1e-4)
    amplified = mechanism.sampling.guarantee(
        1.0, 1e-6, num_bands=1, max_column_norm=1.0, discretization=1e-4
    )
    stated = dataclasses.replace(mechanism.guarantee, epsilon=amplified.epsilon)
    old = decode_mechanism(encode_mechanism(dataclasses.replace(mechanism, guarantee=stated)))
    assert old.verify_epsilon().epsilon < old.epsilon == amplified.epsilon
    stated = dataclasses.replace(stated, epsilon=1.01 * amplified.epsilon)
    with pytest.raises(ValueError, match="plan it again"):
        dataclasses.replace(mechanism, guarantee=stated).verify_epsilon()


def test_an_understated_amplified_epsilon_is_found_by_verify_epsilon():
    mechanism = _mechanism(**SAMPLED)
    understated = dataclasses.replace(mechanism.guarantee, epsilon=0.99 * mechanism.epsilon)
    with pytest.raises(ValueError, match="states epsilon"):
        dataclasses.replace(mechanism, guarantee=understated).verify_epsilon()


def test_epsilon_is_computed_again_once_and_only_where_it_was_not_computed_here(monkeypatch):
    made = _mechanism(**SAMPLED)
    loaded = decode_mechanism(encode_mechanism(made))
    understated = dataclasses.replace(made.guarantee, epsilon=0.99 * made.epsilon)
    with pytest.raises(ValueError, match="states epsilon"):
        dataclasses.replace(made, guarantee=understated).require_verified()
    loaded.require_verified()
    plain = decode_mechanism(encode_mechanism(_mechanism()))
    monkeypatch.setattr(Release, "guarantee", None)
    for mechanism in (made, loaded, plain):
        mechanism.require_verified()


def test_an_understated_epsilon_without_sampling_is_refused_at_once():
    mechanism = _mechanism()
    understated = dataclasses.replace(mechanism.guarantee, epsilon=0.999 * mechanism.epsilon)
    with pytest.raises(ValueError, match="states epsilon"):
        dataclasses.replace(mechanism, guarantee=understated)


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6, 0.5, math.nan, math.inf])
def test_a_rho_that_does_not_follow_from_the_noise_is_refused(factor):
    mechanism = _mechanism()
    wrong = dataclasses.replace(mechanism.guarantee, rho=factor * mechanism.rho)
    with pytest.raises(ValueError, match="states rho"):
        dataclasses.replace(mechanism, guarantee=wrong)


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6, 2.0, -1.0, math.nan])
def test_an_exact_sensitivity_that_the_strategy_does_not_have_is_refused(factor):
    mechanism = _mechanism()
    wrong = dataclasses.replace(mechanism.sensitivity, value=factor * mechanism.sensitivity.value)
    with pytest.raises(ValueError, match="states a sensitivity"):
        dataclasses.replace(mechanism, sensitivity=wrong)


def test_an_upper_bound_may_be_loose_but_never_too_small_and_never_called_exact():
    dense = strategies.DenseStrategy(random_banded(N, N, 1).materialize())
    mechanism = _mechanism(strategy=dense)
    stated = mechanism.sensitivity
    assert stated.kind == sensitivity.UPPER_BOUND

    def restated(**changes) -> Mechanism:
        changed = dataclasses.replace(stated, **changes)
        rho = changed.value**2 / (2 * mechanism.noise_multiplier**2)
        epsilon = gaussian_epsilon(mechanism.noise_multiplier, changed.value, 1e-6)
        guarantee = dataclasses.replace(mechanism.guarantee, rho=rho, epsilon=epsilon)
        return dataclasses.replace(mechanism, sensitivity=changed, guarantee=guarantee)

    assert restated(value=1.5 * stated.value).rho == pytest.approx(2.25 * mechanism.rho)
    for changes in ({"value": 0.99 * stated.value}, {"kind": sensitivity.EXACT}):
        with pytest.raises(ValueError, match="states a sensitivity"):
            restated(**changes)


@pytest.mark.parametrize("epsilon", [-1.0, math.inf, math.nan])
def test_epsilon_must_be_finite_and_not_negative(epsilon):
    mechanism = _mechanism(**SAMPLED)
    wrong = dataclasses.replace(mechanism.guarantee, epsilon=epsilon)
    with pytest.raises(ValueError, match="epsilon must be finite"):
        dataclasses.replace(mechanism, guarantee=wrong)


def test_only_zero_out_guarantees_are_accepted():
    mechanism = _mechanism()
    wrong = dataclasses.replace(mechanism.guarantee, adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(ValueError, match="zero-out"):
        dataclasses.replace(mechanism, guarantee=wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": workloads.prefix_sum(N + 1)}, "num_rounds must be the same"),
        ({**SAMPLED, "sampling": PoissonSampling(N + 1, 4, 0.1)}, "num_rounds must be the same"),
        ({**SAMPLED, "sampling": PoissonSampling(N, 2, 0.1)}, "num_bands"),
        ({**SAMPLED, "participation": SingleParticipation()}, "use sampling.participation"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"l2_norm_clip": -1.0}, "l2_norm_clip must be positive"),
        ({"delta": 1.0}, "delta must be strictly"),
        ({"discretization": 0.0}, "discretization must be positive"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        _mechanism(**changes)


@pytest.mark.parametrize("changes", [{}, SAMPLED, {"strategy": trees.TreeStrategy(N)}])
def test_the_description_says_what_the_guarantee_rests_on(changes):
    mechanism = _mechanism(**changes)
    text = mechanism.describe()
    assert mechanism.participation.describe() in text
    assert mechanism.workload.describe() in text
    assert mechanism.sensitivity.theorem in text
    assert str(mechanism.guarantee) in text
    assert all(assumption in text for assumption in mechanism.guarantee.assumptions)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    num_bands=st.integers(1, 6),
    separation=st.integers(1, 8),
    cap=st.none() | st.integers(1, 5),
    noise=st.floats(0.5, 50.0),
)
def test_created_mechanisms_always_verify(seed, num_bands, separation, cap, noise):
    mechanism = _mechanism(
        strategy=random_banded(num_bands, N, seed),
        participation=MinSeparation(separation, cap),
        noise_multiplier=noise,
        discretization=1e-3,
    )
    assert mechanism.verify_epsilon().rho == mechanism.rho


def test_provenance_is_dated_in_utc_and_cannot_be_changed():
    notes = {"loss": 1.5, "method": "L-BFGS", "converged": True, "iterations": 7}
    provenance = Provenance.now(notes)
    notes["loss"] = 2.5
    assert provenance.notes["loss"] == 1.5
    assert provenance.created.endswith("Z")
    with pytest.raises(TypeError):
        provenance.notes["loss"] = 0.0


@pytest.mark.parametrize(
    ("created", "notes"),
    [
        ("2024-02-30T12:00:00Z", {}),
        ("2024-02-28 12:00:00", {}),
        (None, {}),
        ("2024-02-28T12:00:00Z", {"loss": math.nan}),
        ("2024-02-28T12:00:00Z", {"list": [1]}),
        ("2024-02-28T12:00:00Z", {"array": np.zeros(2)}),
        ("2024-02-28T12:00:00Z", {1: "one"}),
    ],
)
def test_malformed_provenance_is_refused(created, notes):
    with pytest.raises((TypeError, ValueError)):
        Provenance("1.0", created, notes)
