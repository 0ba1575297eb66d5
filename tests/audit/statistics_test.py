"""Bounds hold as often as they say, come close, and find nothing in nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from bandmf_tf.accounting.gaussian import gaussian_epsilon
from bandmf_tf.audit import statistics
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs import audit_errors
from bandmf_tf.runs.audit_errors import Errors, mu_lower_bound

RNG_SEED = 4


def _gaussian_errors(rng, mu, trials):
    return Errors.at(mu / 2, rng.normal(size=trials) + mu, rng.normal(size=trials))


@pytest.mark.parametrize(("mu", "trials"), [(1.0, 4_000), (2.0, 2_000), (4.0, 2_000)])
def test_the_bound_on_mu_holds_as_often_as_it_says_and_is_tight(mu, trials):
    rng = np.random.default_rng(RNG_SEED)
    bounds = [mu_lower_bound(_gaussian_errors(rng, mu, trials), 0.95) for _ in range(400)]
    assert np.mean(np.array(bounds) > mu) <= 0.05
    assert np.median(bounds) > 0.9 * mu
    assert np.mean(np.array(bounds) > 0.8 * mu) > 0.95  # The test would see a wrong scale.


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0, 6.0, 8.0])
def test_so_many_trials_show_nine_tenths_of_mu_nearly_always_and_fewer_do_not(mu):
    rng = np.random.default_rng(RNG_SEED)
    trials = statistics.trials_for(mu, 0.9 * mu, 0.95, 1 << 20)
    assert trials < 1 << 20

    def how_often(count):
        errors = rng.binomial(count // 2, stats.norm.sf(mu / 2), [400, 2])
        bounds = [mu_lower_bound(Errors(a, count // 2, b, count // 2), 0.95) for a, b in errors]
        return np.mean(np.array(bounds) >= 0.9 * mu)

    assert how_often(trials) >= 0.995
    assert how_often(trials // 3) < 0.95


def test_what_no_trials_can_show_takes_as_many_as_there_may_be():
    assert statistics.trials_for(0.8, 0.9, 0.95, 1_000_000) == 1_000_000


def test_a_claim_that_is_true_is_rejected_as_rarely_as_its_p_value_says():
    rng = np.random.default_rng(RNG_SEED)
    errors = [_gaussian_errors(rng, 1.5, 300) for _ in range(500)]
    p_values = np.array([audit_errors.mu_p_value(one, 1.5) for one in errors])
    for level in (0.01, 0.05, 0.2):
        assert np.mean(p_values <= level) <= level + 3 * math.sqrt(level / 500)
    assert np.mean([audit_errors.mu_p_value(one, 0.9) <= 0.05 for one in errors]) > 0.9


def test_the_p_value_is_where_the_bound_reaches_the_claim():
    errors = Errors(30, 500, 25, 500)
    p_value = audit_errors.mu_p_value(errors, 2.8)
    assert 0 < p_value < 1
    assert (
        mu_lower_bound(errors, 1 - p_value * 1.01)
        > 2.8
        > mu_lower_bound(errors, 1 - p_value / 1.01)
    )
    epsilon = audit_errors.epsilon_lower_bound(errors, 1e-5, 0.99)
    assert audit_errors.epsilon_p_value(errors, epsilon, 1e-5) == pytest.approx(0.01, rel=1e-3)
    assert audit_errors.epsilon_p_value(errors, 50.0, 1e-5) == 1.0


def test_no_scores_prove_nothing():
    assert mu_lower_bound(Errors(0, 0, 0, 0), 0.95) == 0.0
    assert audit_errors.epsilon_lower_bound(Errors(5, 5, 0, 5), 1e-5, 0.95) == 0.0
    # A score that is no number is an error of the attack, on either side.
    nan = np.full(9, np.nan)
    assert Errors.at(0.0, nan, nan) == Errors(9, 9, 9, 9)


def test_epsilon_bounds_are_below_what_the_mechanism_has():
    """Randomised response with probability p of the truth has epsilon log(p / (1 - p)) exactly."""
    rng, truth = np.random.default_rng(RNG_SEED), 0.75
    bounds = []
    for _ in range(300):
        said = [rng.random(2_000) < p for p in (truth, 1 - truth)]
        errors = Errors.at(0.5, *(answers.astype(float) for answers in said))
        bounds.append(audit_errors.epsilon_lower_bound(errors, 1e-6, 0.95))
    exact = math.log(truth / (1 - truth))
    assert np.mean(np.array(bounds) > exact) <= 0.05
    assert np.median(bounds) > 0.85 * exact


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.7, 6.0])
def test_epsilon_of_mu_is_that_of_accounting_rounded_down(mu):
    accounted = gaussian_epsilon(1 / mu, 1.0, 1e-5)
    found = audit_errors.epsilon_of_mu(mu, 1e-5)
    assert found <= accounted
    assert found == pytest.approx(accounted, rel=1e-6, abs=1e-6)


class TestOneRun:
    def test_the_p_value_is_that_of_brute_force(self):
        m, r, v, epsilon, delta = 40, 20, 16, 0.7, 1e-3
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        mass = [math.comb(r, w) * q**w * (1 - q) ** (r - w) for w in range(r + 1)]
        tail = sum(mass[v:])
        steepest = max((sum(mass[v - i :]) - tail) / i for i in range(1, v + 1))
        expected = tail + 2 * m * delta * steepest
        assert statistics.one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(expected)

    def test_nothing_gives_nothing(self):
        """Scores that know nothing of the coins: no bound more often than its confidence says."""
        rng = np.random.default_rng(RNG_SEED)
        bounds = [
            statistics.one_run_epsilon(rng.normal(size=200), rng.random(200) < 0.5, 1e-5, 0.95)
            for _ in range(300)
        ]
        assert np.mean(np.array(bounds) > 0.0) <= 0.05
        assert np.median(bounds) == 0.0

    def test_randomised_response_is_bounded_from_below_and_closely(self):
        rng, epsilon = np.random.default_rng(RNG_SEED), 2.0
        bounds = []
        for _ in range(40):
            included = rng.random(1_000) < 0.5
            told = included ^ (rng.random(1_000) > 1 / (1 + math.exp(-epsilon)))
            bounds.append(statistics.one_run_epsilon(told.astype(float), included, 1e-9, 0.95))
        assert np.mean(np.array(bounds) > epsilon) <= 0.05
        assert np.median(bounds) > 1.5

    def test_equal_scores_are_not_ordered_by_their_coins(self):
        included = np.arange(1_000) < 500
        assert statistics.one_run_epsilon(np.zeros(1_000), included, 1e-5, 0.95) == 0.0
        assert statistics.one_run_epsilon(np.zeros(1_000), ~included, 1e-5, 0.95) == 0.0

    @pytest.mark.parametrize("scores", [np.array([1.0, np.nan]), np.ones(3), np.ones((2, 2))])
    def test_what_are_no_scores_are_refused(self, scores):
        with pytest.raises(BandMFError):
            statistics.one_run_epsilon(scores, np.array([True, False]), 1e-5, 0.95)

    @pytest.mark.parametrize(
        "as_user", [lambda coins: 2 * coins - 1, lambda coins: np.where(coins, "in", "out")]
    )
    def test_coins_that_are_not_true_or_false_are_refused(self, as_user):
        """Taken for truth values, -1 and 1 would hide the best attack there is."""
        coins = np.random.default_rng(RNG_SEED).integers(2, size=1_000)
        assert statistics.one_run_epsilon(1.0 * coins, coins, 1e-5, 0.95) > 4.0
        with pytest.raises(BandMFError, match=r"True or False.*Found values such as \["):
            statistics.one_run_epsilon(1.0 * coins, as_user(coins), 1e-5, 0.95)

    @pytest.mark.parametrize("delta", [-1.0, 1.0, math.nan])
    def test_what_is_no_delta_is_refused(self, delta):
        with pytest.raises(BandMFError, match=r"Found epsilon=0\.0, delta="):
            statistics.one_run_epsilon(np.arange(9.0), np.arange(9) > 4, delta, 0.95)


TESTS = {
    "size": statistics.size_p_value,
    "direction": lambda noise: statistics.direction_p_value(noise)[0],
    "mean": statistics.mean_p_value,
    "shift": statistics.shift_p_value,
    "at most": lambda noise: statistics.at_most_p_value(noise.ravel(), 0.0),
}


@pytest.mark.parametrize("name", TESTS)
def test_noise_as_claimed_is_rejected_as_rarely_as_p_values_say(name):
    rng = np.random.default_rng(RNG_SEED)
    p_values = np.array([TESTS[name](rng.normal(size=(6, 50))) for _ in range(1_000)])
    for level in (0.003, 0.05):
        assert np.mean(p_values <= level) <= level + 3 * math.sqrt(level / 1_000)


def _too_small(noise):
    return 0.9 * noise


def _repeated(noise):
    return np.r_[noise[:-1], noise[:1]]


def _opposed(noise):
    return np.r_[noise[:-1], -noise[:1]]


def _shared(noise):
    half = noise.shape[1] // 2
    return np.c_[noise[:, :half], noise[:, :half]]


def _overlapping(noise):
    """Row i + 1 begins in the middle of row i, as if their counters overlapped."""
    flat = noise.ravel()
    width = noise.shape[1]
    return np.array([flat[i * width // 2 : i * width // 2 + width] for i in range(len(noise))])


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (_too_small, "size"),
        (_repeated, "direction"),
        (_opposed, "direction"),
        (lambda noise: noise + 0.3, "mean"),
        (_shared, "shift"),
        (_overlapping, "shift"),
        (lambda noise: noise + 0.1, "at most"),
        (lambda noise: np.full_like(noise, np.nan), "mean"),
    ],
)
def test_noise_of_another_kind_is_found(fault, name):
    noise = np.random.default_rng(RNG_SEED).normal(size=(8, 800))
    assert TESTS[name](fault(noise)) < 1e-8 < TESTS[name](noise)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_directions_are_those_of_brute_force(rows):
    noise = np.random.default_rng(rows).normal(size=(rows, 30))
    sums = [np.sum(noise[i] ** 2) for i in range(rows)]
    for i, j in itertools.combinations(range(rows), 2):
        sums += [np.sum((noise[i] + sign * noise[j]) ** 2) / 2 for sign in (1, -1)]
    tails = [min(stats.chi2.cdf(value, 30), stats.chi2.sf(value, 30)) for value in sums]
    p_value, words = statistics.direction_p_value(noise)
    assert p_value == pytest.approx(min(1.0, 2 * rows * rows * min(tails)))
    variance = float(words.split("variance ")[1].split(" for")[0])
    assert variance == pytest.approx(sums[int(np.argmin(tails))] / 30, rel=1e-3)


def test_chi_square_tails_are_right_far_out():
    values = np.ones((1, 2_000)) * math.sqrt(1.5)
    expected = 2 * stats.chi2.sf(3_000.0, 2_000)
    assert statistics.size_p_value(values) == pytest.approx(expected, rel=1e-6)
    assert statistics.size_p_value(np.zeros((2, 9))) == statistics.LEAST_P_VALUE


def test_bonferroni_joins_p_values():
    assert statistics.all_of([0.3, 0.01]) == pytest.approx(0.02)
    assert statistics.all_of([0.9, 0.8]) == 1.0
    assert statistics.all_of([0.5, math.nan]) == statistics.LEAST_P_VALUE
    for values in itertools.product([0.0, 1.0], repeat=2):
        assert 0 < statistics.all_of(values) <= 1
