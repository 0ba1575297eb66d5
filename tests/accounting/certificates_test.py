from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from bandmf_tf.accounting import certificates, gaussian_noise_multiplier
from bandmf_tf.accounting.certificates import NotCertifiedError, Replicas
from bandmf_tf.accounting.privacy_loss import gaussian_profile
from bandmf_tf.errors import BandMFError


class _Gaussian(Replicas):
    """Replicas of N(mu, 1) against N(0, 1), whose delta is known in closed form."""

    def __init__(self, mu: float, order: int, chunk: int = 4096):
        self.mu, self.order, self.chunk = mu, order, chunk
        self.log_largest_weight = order * (order - 1) / 2 * mu**2
        self.largest_drawn = 0

    def sample(self, rng, size):
        self.largest_drawn += size
        y = self.order * self.mu + rng.standard_normal(size)
        return self.mu * y - self.mu**2 / 2, np.full(size, self.log_largest_weight)


class _Coins(Replicas):
    """Values of the integrand are `most` with probability `mean` / `most`, otherwise 0."""

    order, chunk = 2, 64

    def __init__(self, mean: float, most: float):
        self.mean, self.most = mean, most
        self.log_largest_weight = math.log(4 * most)  # At epsilon = 0.

    def sample(self, rng, size):
        losses = np.where(rng.random(size) < self.mean / self.most, math.log(2), -1.0)
        return losses, np.full(size, self.log_largest_weight)


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.0, 1e-10), (3.0, 1e-6)])
def test_certified_epsilon_of_a_gaussian_is_a_percent_above_the_exact_one(mu, delta):
    certificate = certificates.certified_epsilon(lambda order: _Gaussian(mu, order), delta)
    assert gaussian_profile(mu, certificate.epsilon) <= delta
    assert gaussian_profile(mu, 0.99 * certificate.epsilon) > delta
    assert certificate.failure_probability == 1e-12
    assert "confidence 1 - 1e-12" in certificate.describe()


def test_bound_without_samples_is_above_delta_and_is_taken_where_it_suffices():
    replicas = _Gaussian(1.0, 4)
    for epsilon in (0.5, 2.0, 5.0):
        bound = math.exp(certificates.log_delta_bound(replicas, epsilon))
        assert gaussian_profile(1.0, epsilon) < bound
    epsilon = certificates.epsilon_bound(replicas, 1e-6 - certificates.FAILURE_PROBABILITY)
    certificate = certificates.verify(replicas, epsilon, 1e-6)
    assert certificate.samples == replicas.largest_drawn == 0
    assert certificate.failure_probability == 0.0
    assert "without samples" in certificate.describe()
    assert certificates.verify(replicas, epsilon - 1e-3, 1e-6).samples > 0


def test_false_statements_are_certified_as_rarely_as_stated():
    wrong, runs = 0, 200
    for seed in range(runs):
        replicas = _Coins(0.02, 0.1)
        try:
            certificates.verify(
                replicas,
                0.0,
                0.02 + 0.0078,
                failure_probability=0.0078,
                seed=seed,
                max_samples=3000,
            )
        except NotCertifiedError:
            continue
        wrong += 1
    assert stats.binom.sf(wrong - 1, runs, 0.0078 / 2) > 1e-4


def test_bets_reach_the_rate_of_errors_that_they_allow():
    """At a level of 1/5: a test that never certified anything would pass the one above."""
    outcomes = []
    for seed in range(200):
        bettor = certificates._Bettor(0.02, 0.1)
        rng = np.random.default_rng(seed)
        reached = False
        for _ in range(60):
            bettor.see(np.where(rng.random(64) < 0.2, 0.1, 0.0))
            reached |= bettor.log_capital >= math.log(5)
        outcomes.append(reached)
    errors = sum(outcomes)
    assert errors >= 3
    assert stats.binom.sf(errors - 1, 200, 1 / 5) > 1e-4


def test_stakes_never_depend_on_the_values_they_are_for():
    """If they did, errors would be far more frequent than allowed."""
    cheated = 0
    for seed in range(100):
        bettor = certificates._Bettor(0.02, 0.1)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            values = np.where(rng.random(64) < 0.2, 0.1, 0.0)
            ahead = certificates._Bettor(0.02, 0.1)
            ahead.see(values)
            bettor._stake = ahead._stake
            bettor.see(values)
        cheated += bettor.log_capital >= math.log(5)
    assert stats.binom.sf(cheated - 1, 100, 1 / 5) < 1e-9


def test_statements_are_refused_on_the_wrong_side_and_verified_on_the_right_one():
    replicas = _Gaussian(1.0, 5)
    epsilon = 4.0
    exact = float(gaussian_profile(1.0, epsilon))
    assert certificates.verify(replicas, epsilon, 1.03 * exact).estimate < 1.02 * exact
    with pytest.raises(NotCertifiedError, match="not supported by"):
        certificates.verify(replicas, epsilon, 0.99 * exact, max_samples=500_000)


def test_a_certificate_is_repeated_bit_for_bit_from_its_seed():
    first = certificates.certified_epsilon(lambda order: _Gaussian(1.0, order), 1e-8, seed=3)
    again = certificates.verify(
        _Gaussian(1.0, first.order),
        first.epsilon,
        first.delta,
        failure_probability=first.failure_probability,
        seed=first.seed,
        attempt=first.attempt,
    )
    assert again == first
    other = certificates.verify(
        _Gaussian(1.0, first.order), first.epsilon, first.delta, seed=first.seed + 1
    )
    assert other.estimate != first.estimate
    assert dataclasses.replace(other, epsilon=0.0) != other


@pytest.mark.parametrize("mu", [8.0, 40.0, 200.0])
def test_where_no_order_is_small_enough_the_bound_without_samples_counts(mu):
    replicas = _Gaussian(mu, 2)
    with pytest.raises(NotCertifiedError, match="more than 10,000,000 samples of order 2"):
        certificates.verify(replicas, mu**2 / 2, 1e-5)
    assert replicas.largest_drawn == 0
    certificate = certificates.certified_epsilon(lambda order: _Gaussian(mu, order), 1e-5)
    assert gaussian_profile(mu, certificate.epsilon) <= 1e-5


@pytest.mark.parametrize("weight", [math.nan, -math.inf, math.inf])
def test_weights_beyond_floating_point_certify_nothing(weight):
    """As of 64 replicas in a certificate that was edited: nothing they say bounds anything."""
    replicas = _Gaussian(1.0, 3)
    replicas.log_largest_weight = weight
    with pytest.raises(NotCertifiedError, match="3 replicas are beyond floating point"):
        certificates.verify(replicas, 1.0, 1e-5)


def test_losses_that_are_no_numbers_count_as_the_largest_value():
    replicas = _Gaussian(1.0, 3)
    losses = np.array([math.nan, math.inf, -math.inf, 5.0])
    log_weights = np.array([0.0, 0.0, 0.0, math.inf])
    values = certificates.integrand(replicas, losses, log_weights, 1.0)
    assert values == pytest.approx(math.exp(certificates.log_delta_bound(replicas, 1.0)))


def test_calibration_goes_beyond_its_start_where_there_is_no_amplification():
    exact = 1.0
    epsilon = 2.0
    delta = float(gaussian_profile(exact, epsilon))
    noise, certificate = certificates.certified_noise_multiplier(
        lambda noise, order: _Gaussian(1.0 / noise, order), epsilon, delta, start=exact
    )
    assert certificate.epsilon == epsilon
    assert 1.0 <= noise <= 1.02


@pytest.mark.parametrize("start", [0.01, 1.0, 30.0])
def test_noise_without_samples_is_enough_and_follows_what_is_needed(start):
    def make(noise, order):
        return _Gaussian(1.0 / noise, order)

    found = certificates.noise_multiplier_bound(make, 2.0, 1e-5, start=start)
    needed = gaussian_noise_multiplier(2.0, 1e-5, 1.0)
    assert needed < found < 1.25 * needed
    epsilons = [certificates.epsilon_bound(make(found, order), 1e-5) for order in range(2, 20)]
    assert min(epsilons) == pytest.approx(2.0, rel=1e-2)
    assert min(epsilons) <= 2.0


def test_wrong_requests_are_refused_in_one_sentence():
    with pytest.raises(BandMFError, match="twice the failure probability"):
        certificates.verify(_Gaussian(1.0, 2), 1.0, 1e-12)
    with pytest.raises(BandMFError, match="twice the failure probability"):
        certificates.certified_noise_multiplier(
            lambda noise, order: _Gaussian(1 / noise, order),
            1.0,
            1e-5,
            start=1.0,
            failure_probability=1e-4,
        )
    with pytest.raises(BandMFError, match="seed must be at least 0"):
        certificates.certified_epsilon(lambda order: _Gaussian(1.0, order), 1e-5, seed=-1)
    with pytest.raises(BandMFError, match="epsilon must be at least 0"):
        certificates.verify(_Gaussian(1.0, 2), math.nan, 1e-5)
    with pytest.raises(BandMFError, match="too many states"):
        certificates.certified_epsilon(lambda _: None, 1e-5)
