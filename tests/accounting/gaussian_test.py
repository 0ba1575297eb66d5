from __future__ import annotations

import math

import mpmath
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting import gaussian
from bandmf_tf.accounting.gaussian import Adjacency

# Noise multipliers of both StackOverflow tables for matrices of sensitivity 1, delta = 1e-6.
PAPER_SIGMAS = {1: 4.22468, 2: 2.23048, 4: 1.19352, 8: 0.65294, 16: 0.36861}
# Multi-epoch MF in the federated table, where min-separation makes the same matrix more sensitive.
PAPER_SIGMAS_MULTI_EPOCH = {1: 4.76079, 2: 2.51352, 4: 1.34498, 8: 0.73579, 16: 0.41539}

noises = st.floats(0.3, 50.0)
deltas = st.sampled_from([1e-10, 1e-8, 1e-6, 1e-3, 0.1])


def _exact_delta(mu: float, epsilon: float) -> float:
    """The closed form of Balle and Wang in 50 digits."""
    with mpmath.workdps(50):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        upper = mpmath.ncdf(mu / 2 - epsilon / mu)
        return float(upper - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("epsilon", "sigma"), PAPER_SIGMAS.items())
def test_unamplified_noise_multipliers_of_the_paper(epsilon, sigma):
    assert gaussian.gaussian_noise_multiplier(epsilon, 1e-6, 1.0) == pytest.approx(
        sigma, abs=0.5e-5
    )


def test_noise_multipliers_of_multi_epoch_mf_follow_from_one_sensitivity():
    for epsilon, sigma in PAPER_SIGMAS_MULTI_EPOCH.items():
        noise = gaussian.gaussian_noise_multiplier(epsilon, 1e-6, sensitivity=1.1269)
        assert noise == pytest.approx(sigma, abs=1e-5)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.5204, 6.693), (0.2277, 4.27)])
def test_production_guarantees(rho, epsilon):
    """rho-zCDP and epsilon at delta = 1e-10 of the production runs."""
    noise = 1 / math.sqrt(2 * rho)
    assert gaussian.gaussian_epsilon(noise, 1.0, 1e-10) == pytest.approx(epsilon, abs=5e-3)


@given(noise=noises, delta=deltas)
@settings(deadline=None, max_examples=40)
def test_pld_epsilon_is_a_tight_upper_bound_on_the_closed_form(noise, delta):
    epsilon = gaussian.gaussian_epsilon(noise, 1.0, delta)
    assert _exact_delta(1 / noise, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 1e-3:
        assert _exact_delta(1 / noise, epsilon * (1 - 1e-4) - 1e-6) > delta


@given(noise=noises, epsilon=st.floats(0.0, 10.0))
@settings(deadline=None, max_examples=40)
def test_gaussian_delta_is_the_closed_form(noise, epsilon):
    expected = _exact_delta(1 / noise, epsilon)
    delta = gaussian.gaussian_delta(noise, 1.0, epsilon)
    assert delta == pytest.approx(expected, rel=1e-6, abs=1e-30)


@given(epsilon=st.floats(0.01, 20.0), delta=deltas)
@settings(deadline=None, max_examples=40)
def test_largest_mu_inverts_the_closed_form(epsilon, delta):
    mu = gaussian.largest_gdp_mu(epsilon, delta)
    assert _exact_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)


@given(noise=noises, sensitivity=st.floats(0.1, 10.0), delta=deltas)
@settings(deadline=None, max_examples=40)
def test_only_the_ratio_of_noise_and_sensitivity_matters(noise, sensitivity, delta):
    mu = gaussian.gdp_mu(noise, sensitivity)
    assert gaussian.zcdp_rho(noise, sensitivity) == pytest.approx(mu**2 / 2)
    epsilon = gaussian.gaussian_epsilon(noise, sensitivity, delta, discretization=1e-3)
    scaled = gaussian.gaussian_epsilon(1.0, mu, delta, discretization=1e-3)
    assert epsilon == pytest.approx(scaled, rel=1e-9)


@given(rho=st.floats(1e-3, 50.0), delta=deltas)
@settings(deadline=None, max_examples=60)
def test_zcdp_conversion_lies_between_pld_and_the_simple_bound(rho, delta):
    epsilon = gaussian.zcdp_epsilon(rho, delta)
    noise = 1 / math.sqrt(2 * rho)
    assert _exact_delta(1 / noise, epsilon) <= delta
    assert epsilon <= rho + 2 * math.sqrt(rho * math.log(1 / delta))


@pytest.mark.parametrize("rho", [0.01, 0.2277, 3.0])
def test_zcdp_conversion_is_the_best_over_renyi_orders(rho):
    orders = [1 + 1.01**i for i in range(-400, 1200)]
    expected, _ = rdp_privacy_accountant.compute_epsilon(orders, [a * rho for a in orders], 1e-6)
    assert gaussian.zcdp_epsilon(rho, 1e-6) == pytest.approx(expected, rel=1e-4)
    assert gaussian.zcdp_epsilon(rho, 1e-6) <= expected + 1e-6


@given(epsilon=st.floats(0.05, 20.0), sensitivity=st.floats(0.1, 10.0), delta=deltas)
@settings(deadline=None, max_examples=30)
def test_calibrated_noise_reaches_its_target_and_only_just(epsilon, sensitivity, delta):
    noise = gaussian.gaussian_noise_multiplier(epsilon, delta, sensitivity, discretization=1e-3)
    reached = gaussian.gaussian_epsilon(noise, sensitivity, delta, discretization=1e-3)
    assert reached <= epsilon
    less_noise = gaussian.gaussian_epsilon(
        noise * (1 - 1e-5), sensitivity, delta, discretization=1e-3
    )
    assert less_noise > epsilon


def test_guarantee_names_its_adjacency_and_assumptions():
    guarantee = gaussian.gaussian_guarantee(
        1.19352, 1.0, 1e-6, assumptions=("at most 6 participations, 342 rounds apart",)
    )
    assert guarantee.epsilon == pytest.approx(4.0, abs=1e-4)
    assert guarantee.rho == pytest.approx(0.5 / 1.19352**2)
    assert guarantee.adjacency is Adjacency.ZERO_OUT
    assert guarantee.assumptions[0] == "at most 6 participations, 342 rounds apart"
    assert "zero-out" in str(guarantee)


def test_replace_one_neighbours_are_twice_as_far_apart():
    replaced = gaussian.gaussian_guarantee(2.0, 1.0, 1e-6, adjacency=Adjacency.REPLACE_ONE)
    doubled = gaussian.gaussian_guarantee(2.0, 2.0, 1e-6)
    assert (replaced.epsilon, replaced.rho) == (doubled.epsilon, doubled.rho)
    assert replaced.adjacency is Adjacency.REPLACE_ONE


def test_calibration_returns_the_safe_side_of_a_jump():
    noise = gaussian.calibrate_noise_multiplier(lambda x: 5.0 if x < 3.0 else 1.0, 2.0, 0.1)
    assert noise == pytest.approx(3.0, rel=1e-6)
    assert noise >= 3.0


@pytest.mark.parametrize("start", [1e-6, 1.0, 1e6])
def test_calibration_does_not_depend_on_where_it_starts(start):
    noise = gaussian.calibrate_noise_multiplier(lambda x: x**-1.7, 0.3, start)
    assert 0.3 * (1 - 1e-6) <= noise**-1.7 <= 0.3


def test_calibration_says_so_when_nothing_is_enough():
    with pytest.raises(gaussian.CalibrationError, match="choose a larger epsilon"):
        gaussian.calibrate_noise_multiplier(lambda _: math.inf, 1.0, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_noise_and_sensitivity_must_be_positive(bad):
    with pytest.raises(ValueError, match="noise_multiplier"):
        gaussian.gaussian_epsilon(bad, 1.0, 1e-6)
    with pytest.raises(ValueError, match="sensitivity"):
        gaussian.gaussian_epsilon(1.0, bad, 1e-6)
    with pytest.raises(ValueError, match="epsilon"):
        gaussian.gaussian_noise_multiplier(bad, 1e-6, 1.0)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-6, math.nan])
def test_delta_must_be_a_probability(bad):
    with pytest.raises(ValueError, match="delta"):
        gaussian.gaussian_epsilon(1.0, 1.0, bad)
    with pytest.raises(ValueError, match="delta"):
        gaussian.gaussian_noise_multiplier(1.0, bad, 1.0)
