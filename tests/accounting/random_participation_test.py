"""Every claim has an oracle that enumerates all patterns and integrates over outputs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from bandmf_tf.accounting import (
    Adjacency,
    PoissonSampling,
    Release,
    certificates,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    zcdp_rho,
)
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    RandomParticipation,
    SecretParts,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.buffered import BufferedStrategy
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    Strategy,
    ToeplitzStrategy,
    identity,
)

# Integrals over outputs: enough deviations, and a rule fine enough for a kink in three dimensions.
_AXIS = np.linspace(-6.0, 10.0, 81)

Law = dict[tuple[int, ...], float]


def _banded(bands: list[float], num_rounds: int) -> BandedStrategy:
    rng = np.random.default_rng(num_rounds)
    array = np.array(bands)[:, None] * rng.uniform(0.7, 1.0, (len(bands), num_rounds))
    for d in range(1, len(bands)):
        array[d, num_rounds - d :] = 0.0
    return BandedStrategy(array)


def _law(scheme: RandomParticipation) -> Law:
    """All patterns with their probabilities, by following every coin of the scheme's definition."""
    n, law = scheme.num_rounds, {}

    def walk(x: tuple[int, ...], probability: float, coin_in) -> None:
        if probability == 0.0:
            return
        if len(x) == n:
            law[x] = law.get(x, 0.0) + probability
            return
        q = coin_in(x)
        walk((*x, 1), probability * q, coin_in)
        walk((*x, 0), probability * (1 - q), coin_in)

    if isinstance(scheme, MinSeparationSampling):
        b, p = scheme.separation, scheme.sampling_probability
        for wait in range(b):
            first = (p if wait else 1.0) / (1 + (b - 1) * p)
            walk(
                (),
                first,
                lambda x, wait=wait: (
                    0.0 if len(x) < wait or any(x[max(0, len(x) - b + 1) :]) else p
                ),
            )
    elif isinstance(scheme, OncePerEpoch):
        epoch, b = scheme.epoch_rounds, scheme.separation

        def coin(x: tuple[int, ...]) -> float:
            start = len(x) // epoch * epoch
            if any(x[start:]) or any(x[max(0, len(x) - b + 1) :]):
                return 0.0
            return 1 / (epoch - max(len(x) - start, b - 1 if start else 0))

        walk((), 1.0, coin)
    else:
        is_bins = isinstance(scheme, BallsInBins)
        b = scheme.num_bins if is_bins else scheme.num_parts
        q = 1.0 if is_bins else scheme.sampling_probability
        for i in range(b):
            walk((), 1 / b, lambda x, i=i: q if len(x) % b == i else 0.0)
    return law


def _release(scheme: SamplingScheme, strategy: Strategy) -> Release:
    return Release(strategy, scheme.participation, scheme)


def _means(scheme: RandomParticipation, strategy: Strategy, noise: float):
    law = _law(scheme)
    patterns = np.array(list(law))
    return np.array(list(law.values())), patterns @ np.abs(strategy.materialize()).T / noise


def _log_ratio(probabilities: np.ndarray, means: np.ndarray, y: np.ndarray) -> np.ndarray:
    exponents = means @ y.T - np.sum(means**2, axis=1)[:, None] / 2
    return np.log(probabilities @ np.exp(exponents))  # Means are small enough for that.


@functools.cache
def _grid(n: int) -> tuple[np.ndarray, np.ndarray]:
    axis = _AXIS if n > 2 else np.linspace(-8.0, 12.0, 401)
    y = np.stack(np.meshgrid(*[axis] * n, indexing="ij"), axis=-1).reshape(-1, n)
    density = np.exp(-np.sum(y**2, axis=1) / 2) / (2 * math.pi) ** (n / 2)
    return y, density * (axis[1] - axis[0]) ** n


def _profiles(probabilities, means, epsilon):
    """H(P || Q) and H(Q || P) by integration."""
    y, mass = _grid(means.shape[1])
    ratio = np.exp(_log_ratio(probabilities, means, y))
    alpha = math.exp(epsilon)
    return (
        float(mass @ np.maximum(ratio - alpha, 0.0)),
        float(mass @ np.maximum(1 - alpha * ratio, 0.0)),
    )


CASES = [
    (BallsInBins(2, 2), _banded([1.0, 0.6], 2)),
    (BallsInBins(3, 2), DenseStrategy(np.array([[1.0, 0, 0], [-0.7, 0.9, 0], [0.4, 0.5, 1.0]]))),
    (BallsInBins(3, 3), BufferedStrategy(np.array([0.9]), np.array([0.4]), 3)),
    (SecretParts(3, 2, 0.3), _banded([1.0, -0.6], 3)),
    (SecretParts(2, 1, 0.2), _banded([1.0], 2)),
    (MinSeparationSampling(3, 2, 0.3), _banded([1.0, 0.6], 3)),
    (MinSeparationSampling(3, 3, 0.4), _banded([1.0, 0.6], 3)),
    (OncePerEpoch(3, 1, 2), _banded([1.0], 3)),
    (OncePerEpoch(3, 2, 2), _banded([1.0, 0.6], 3)),
    (OncePerEpoch(3, 2, 3), _banded([1.0, -0.6], 3)),
    (BallsInBins(3, 7), _banded([1.0, -0.6], 3)),  # Most bins have no round.
]
NAMES = [f"{type(scheme).__name__}-{i}" for i, (scheme, _) in enumerate(CASES)]

LONGER = [
    (SecretParts(7, 3, 0.35), _banded([1.0, 0.6, 0.4], 7)),
    (SecretParts(7, 3, 0.35), _banded([1.0, 0.6], 7)),
    (SecretParts(6, 2, 1.0), _banded([1.0, 0.6], 6)),
    (SecretParts(5, 1, 0.2), _banded([1.0], 5)),
    (MinSeparationSampling(7, 3, 0.35), _banded([1.0, 0.6, 0.4], 7)),
    (MinSeparationSampling(7, 3, 0.35), _banded([1.0, 0.6], 7)),
    (MinSeparationSampling(6, 2, 1.0), _banded([1.0, 0.6], 6)),
    (MinSeparationSampling(5, 1, 0.2), _banded([1.0], 5)),
    (OncePerEpoch(9, 2, 4), _banded([1.0, 0.6], 9)),
    (OncePerEpoch(8, 3, 4), _banded([1.0, 0.6], 8)),
    (OncePerEpoch(9, 3, 3), _banded([1.0, 0.6, 0.4], 9)),
    (OncePerEpoch(4, 2, 7), _banded([1.0, 0.6], 4)),
    (OncePerEpoch(6, 1, 3), _banded([1.0], 6)),
    (OncePerEpoch(4, 1, 1), _banded([1.0], 4)),
]


@pytest.mark.parametrize(("scheme", "strategy"), CASES + LONGER)
def test_ratio_of_densities_is_that_of_all_patterns_and_has_mean_one(scheme, strategy):
    noise = 0.8
    probabilities, means = _means(scheme, strategy, noise)
    assert probabilities.sum() == pytest.approx(1.0, rel=1e-12)  # So E_Q[P/Q] = 1.
    y = np.random.default_rng(1).normal(size=(50, scheme.num_rounds)) * 2
    expected = _log_ratio(probabilities, means, y)
    if isinstance(scheme, BallsInBins):
        gram = scheme.gram(strategy) / noise**2
        used = means[: scheme.num_rounds]
        assert gram == pytest.approx(used @ used.T, rel=1e-9)
        return
    columns = np.abs(strategy.materialize()) / noise
    u = columns.T @ y.T - np.sum(columns**2, axis=0)[:, None] / 2
    assert scheme.loss(u) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("scheme", "strategy"), LONGER)
@pytest.mark.parametrize("order", [2, 3])
def test_weight_of_chains_is_the_moment_of_that_order(scheme, strategy, order):
    probabilities, means = _means(scheme, strategy, 0.8)
    gram = means @ means.T
    moment = 0.0
    for replicas in itertools.product(range(len(means)), repeat=order):
        pairs = sum(gram[i, j] for i, j in itertools.combinations(replicas, 2))
        moment += math.exp(pairs) * math.prod(probabilities[list(replicas)])
    found = scheme.replicas(strategy)(0.8, order)
    assert found.log_largest_weight == pytest.approx(math.log(moment), rel=1e-9)


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("scheme", [BallsInBins(12, 4), BallsInBins(3, 4)])
def test_weights_of_bins_have_the_moment_as_their_mean_and_never_exceed_the_largest(order, scheme):
    strategy = _banded([1.0, 0.6, 0.4], scheme.num_rounds)
    replicas = scheme.replicas(strategy)(0.8, order)
    _, log_weights = replicas.sample(np.random.default_rng(2), 40_000)
    means = _means(scheme, strategy, 0.8)[1]
    gram = means @ means.T
    moment = np.mean(
        [
            math.exp(sum(gram[i, j] for i, j in itertools.combinations(r, 2)))
            for r in itertools.product(range(4), repeat=order)
        ]
    )
    weights = np.exp(log_weights)
    assert abs(weights.mean() - moment) < 5 * weights.std() / math.sqrt(weights.size)
    assert log_weights.max() <= replicas.log_largest_weight + 1e-9
    # Attained where all replicas are in the bin of the largest norm, so it could not be smaller.
    assert log_weights.max() > replicas.log_largest_weight - 0.05 * order


@pytest.mark.parametrize(("scheme", "strategy"), CASES, ids=NAMES)
@pytest.mark.parametrize("order", [2, 3])
def test_mean_of_the_integrand_is_delta(scheme, strategy, order):
    noise = 1.0
    replicas = scheme.replicas(strategy)(noise, order)
    losses, log_weights = replicas.sample(np.random.default_rng(3), 40_000)
    for epsilon in (0.2, 0.8):
        exact, _ = _profiles(*_means(scheme, strategy, noise), epsilon)
        values = certificates.integrand(replicas, losses, log_weights, epsilon)
        error = values.std() / math.sqrt(values.size)
        assert abs(values.mean() - exact) < 5 * error + 1e-2 * exact, (values.mean(), exact)
        # The test would see a wrong weight, and samples are a gain over the bound.
        assert 5 * error < 0.4 * exact
        assert exact < math.exp(certificates.log_delta_bound(replicas, epsilon))
        # No value exceeds the bound, also where rounding is not cut off.
        raw = np.exp(log_weights - (order - 1) * losses) * np.maximum(
            -np.expm1(epsilon - losses), 0
        )
        assert raw.max() <= math.exp(certificates.log_delta_bound(replicas, epsilon)) * (1 + 1e-9)


@pytest.mark.parametrize(("scheme", "strategy"), CASES, ids=NAMES)
def test_certified_epsilon_is_just_above_the_exact_one(scheme, strategy):
    noise, delta = 1.3, 1e-3
    certificate = scheme.certificate(strategy, noise, delta, seed=4)
    assert certificate.samples > 0
    probabilities, means = _means(scheme, strategy, noise)
    # 1 % for the integration.
    assert _profiles(probabilities, means, certificate.epsilon)[0] <= delta * 1.01
    assert _profiles(probabilities, means, 0.97 * certificate.epsilon)[0] > delta


def _integrated(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0)))


def test_removal_dominates_addition():
    rng = np.random.default_rng(5)
    y, mass = _grid(2)
    skewed = 0
    for trial in range(60):
        k = rng.integers(1, 6)
        probabilities = rng.dirichlet(np.full(k, 0.5))
        # Any mixture, also one with negative means.
        means = np.clip(rng.normal(size=(k, 2)) * rng.uniform(0.1, 2.5), -3.0, 3.0)
        log_ratio = _log_ratio(probabilities, means, y)
        for epsilon in (0.1, 0.7, 2.0):
            p = mass * np.exp(log_ratio)
            remove, add = _integrated(p, mass, epsilon), _integrated(mass, p, epsilon)
            assert add <= remove + 2e-5, (trial, probabilities, means, epsilon)
            skewed += add < remove / 2
            # Below alpha = 1 it is the other way round: the claim is not an empty one.
            below = _integrated(p, mass, -epsilon), _integrated(mass, p, -epsilon)
            assert below[0] <= below[1] + 2e-5
    assert skewed > 40


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_adaptive_gradients_are_dominated_by_absolute_values_of_the_strategy(epsilon):
    rng = np.random.default_rng(6)
    y, mass = _grid(2)
    exceeded_without = 0
    for _ in range(25):
        strategy = np.array([[1.0, 0.0], [rng.uniform(-1.0, 1.0), rng.uniform(0.3, 1.0)]])
        patterns = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
        probabilities = rng.dirichlet(np.ones(4))
        first = rng.choice([-1.0, 1.0])
        # The second gradient is chosen when the first row has been seen.
        second = np.clip(np.sign(y[:, 0] - rng.normal()) * rng.uniform(0.5, 2.0), -1.0, 1.0)
        log_ratio = np.full(len(y), -np.inf)
        for x, probability in zip(patterns, probabilities, strict=True):
            shift0 = strategy[0, 0] * x[0] * first
            shift1 = strategy[1, 0] * x[0] * first + strategy[1, 1] * x[1] * second
            exponent = shift0 * y[:, 0] - shift0**2 / 2 + shift1 * y[:, 1] - shift1**2 / 2
            log_ratio = np.logaddexp(log_ratio, np.log(probability) + exponent)
        p = mass * np.exp(log_ratio)
        bounds = _profiles(probabilities, patterns @ np.abs(strategy).T, epsilon)
        found = _integrated(p, mass, epsilon), _integrated(mass, p, epsilon)
        assert found[0] <= bounds[0] + 1e-4
        assert found[1] <= bounds[1] + 1e-4
        as_is = _profiles(probabilities, patterns @ strategy.T, epsilon)
        exceeded_without += found[0] > as_is[0] + 1e-3
    assert exceeded_without > 0  # Without absolute values the claim is wrong.


def test_larger_strategies_are_less_private():
    rng = np.random.default_rng(7)
    for _ in range(20):
        probabilities = rng.dirichlet(np.ones(3))
        means = rng.uniform(0.0, 1.0, (3, 2))
        larger = means + rng.uniform(0.0, 0.5, (3, 2))
        for epsilon in (0.0, 1.0):
            small = _profiles(probabilities, means, epsilon)
            large = _profiles(probabilities, larger, epsilon)
            assert small[0] <= large[0] + 1e-5
            assert small[1] <= large[1] + 1e-5


def test_a_guarantee_says_how_sure_it_is_and_is_never_worse_than_without_amplification():
    strategy = _banded([1.0, 0.5], 12)
    amplified = _release(BallsInBins(12, 6), strategy).guarantee(2.0, 1e-6)
    assert "(estimated with confidence 1 - 1e-12)" in str(amplified)
    assert "estimated with confidence 1 - 1e-12" in amplified.accounting
    assert "one of 6 bins" in amplified.assumptions[0]
    assert amplified.adjacency == Adjacency.ZERO_OUT
    plain = _release(BallsInBins(12, 1), strategy).guarantee(2.0, 1e-6)
    sensitivity = BallsInBins(12, 1).participation.sensitivity(strategy).value
    assert plain.epsilon == gaussian_epsilon(2.0, sensitivity, 1e-6)
    assert "confidence" not in str(plain) + plain.accounting
    assert plain.certificate is None


@pytest.mark.parametrize(
    "scheme",
    [
        BallsInBins(12, 6),
        SecretParts(12, 3, 0.4),
        MinSeparationSampling(12, 3, 0.2),
        OncePerEpoch(12, 3, 5),
    ],
)
def test_a_release_has_bounds_without_samples_for_first_rounds_groups_and_tiny_deltas(scheme):
    release = _release(scheme, _banded([1.0, 0.5], 12))
    exact = release.guarantee(1.5, 1e-6)
    bound = release.bounded(1.5, 1e-6)
    assert bound.certificate is None
    assert bound.rho == exact.rho == zcdp_rho(1.5, release.sensitivity.value)
    assert exact.epsilon < bound.epsilon < 1.3 * exact.epsilon
    spent = [release.first(t).bounded(1.5, 1e-6).epsilon for t in (1, 2, 5, 11, 12)]
    assert spent == sorted(spent)
    assert spent[-1] == bound.epsilon
    # More than the padding can be exceeded with is never stated without amplification alone.
    tiny = release.guarantee(1.5, 1e-13)
    assert tiny.certificate is None
    assert tiny.epsilon == release.bounded(1.5, 1e-13).epsilon
    plain = Release(release.strategy, release.participation)
    assert release.guarantee(1.5, 1e-15).epsilon == plain.guarantee(1.5, 1e-15).epsilon
    # One unit after the other: delta of two is e^epsilon + 1 times that of one.
    pair = release.of_group(2).guarantee(1.5, 1e-6)
    assert pair.certificate is None
    of_one = release.bounded(1.5, 1e-6 / (1 + math.exp(pair.epsilon / 2))).epsilon
    assert pair.epsilon == pytest.approx(2 * of_one, rel=1e-2)


def test_a_certificate_is_of_one_delta_and_repeats_from_its_seed_alone():
    scheme, strategy = SecretParts(12, 3, 0.4), _banded([1.0, 0.5], 12)
    release = _release(scheme, strategy)
    noise, certificate = release.calibrated(2.0, 1e-6)
    assert certificate.epsilon == 2.0
    assert release.guarantee(noise, 1e-6, certificate=certificate).certificate is certificate
    with pytest.raises(BandMFError, match="must be for delta=1e-07"):
        release.guarantee(noise, 1e-7, certificate=certificate)
    scheme.verify(strategy, noise, certificate)
    for forged in (
        dataclasses.replace(certificate, samples=certificate.samples + 1),
        dataclasses.replace(certificate, estimate=certificate.estimate * 1.001),
        dataclasses.replace(certificate, failure_probability=1e-30),
        dataclasses.replace(certificate, epsilon=1.8),
        dataclasses.replace(certificate, seed=1),
        dataclasses.replace(certificate, attempt=1),
    ):
        with pytest.raises(BandMFError, match=r"seed gives|not supported by"):
            scheme.verify(strategy, noise, forged)
    with pytest.raises(BandMFError, match=r"seed gives|not supported by"):
        scheme.verify(strategy, 0.99 * noise, certificate)
    cyclic = PoissonSampling(12, 3, 0.4)
    with pytest.raises(BandMFError, match="poisson sampling is accounted for without samples"):
        _release(cyclic, strategy).guarantee(noise, 1e-6, certificate=certificate)


def test_more_bins_than_rounds_leave_some_out():
    """Of three bins one has no round: two patterns and one that is nothing."""
    scheme, strategy = BallsInBins(2, 3), _banded([1.0, 0.6], 2)
    probabilities, means = _means(scheme, strategy, 1.0)
    certificate = scheme.certificate(strategy, 1.0, 1e-4)
    delta = _profiles(probabilities, means, certificate.epsilon)[0]
    assert 0.85e-4 < delta < 1e-4


def test_one_bin_is_a_gaussian_release():
    strategy = _banded([1.0, 0.5], 6)
    scheme = BallsInBins(6, 1)
    sensitivity = scheme.participation.sensitivity(strategy).value
    certificate = scheme.certificate(strategy, 2.0, 1e-6)
    exact = gaussian_epsilon(2.0, sensitivity, 1e-6)
    assert exact <= certificate.epsilon <= 1.01 * exact


@pytest.mark.parametrize("scheme", [SecretParts(30, 1, 0.1), MinSeparationSampling(30, 1, 0.1)])
def test_separation_one_is_poisson_sampling(scheme):
    exact = PoissonSampling(30, 1, 0.1).epsilon(1.0, 1e-6, num_bands=1, max_column_norm=1.0)
    certificate = scheme.certificate(identity(30), 1.0, 1e-6)
    # The composed figure is itself an upper bound, by 5e-4.
    assert 0.999 * exact <= certificate.epsilon <= 1.01 * exact


def test_certain_participation_is_balls_in_bins():
    strategy = _banded([1.0, 0.6, 0.3], 24)
    bins = BallsInBins(24, 6).certificate(strategy, 1.5, 1e-6)
    for scheme in (
        SecretParts(24, 6, 1.0),
        MinSeparationSampling(24, 6, 1.0),
        OncePerEpoch(24, 6, 6),
    ):
        other = scheme.certificate(strategy, 1.5, 1e-6)
        assert other.epsilon == pytest.approx(bins.epsilon, rel=0.01)


@pytest.mark.parametrize(
    "scheme",
    [
        BallsInBins(40, 4),
        SecretParts(40, 4, 0.3),
        MinSeparationSampling(40, 4, 0.1),
        OncePerEpoch(40, 4, 13),
    ],
)
def test_certificates_follow_noise_and_delta(scheme):
    strategy = _banded([1.0, 0.6, 0.3], 40)
    certificates_ = {
        (noise, delta): scheme.certificate(strategy, noise, delta).epsilon
        for noise in (1.0, 2.0)
        for delta in (1e-5, 1e-10)
    }
    assert certificates_[2.0, 1e-5] < 0.8 * certificates_[1.0, 1e-5]
    assert certificates_[2.0, 1e-10] < 0.8 * certificates_[1.0, 1e-10]
    assert certificates_[1.0, 1e-5] < 0.9 * certificates_[1.0, 1e-10]
    # In the limit of much noise nothing is lost but delta. (The order 2 is enough to see it.)
    much = scheme.replicas(strategy)(1e6, 2)
    assert certificates.verify(much, 0.0, 1e-3, failure_probability=1e-6).estimate < 1e-5


@pytest.mark.parametrize(
    ("scheme", "less_often"),
    [
        (BallsInBins(40, 4), BallsInBins(40, 8)),
        (SecretParts(40, 4, 0.4), SecretParts(40, 4, 0.2)),
        (SecretParts(40, 3, 0.3), SecretParts(40, 6, 0.3)),
        (MinSeparationSampling(40, 4, 0.1), MinSeparationSampling(40, 4, 0.05)),
        (MinSeparationSampling(40, 3, 0.2), MinSeparationSampling(40, 6, 0.2)),
        (OncePerEpoch(40, 4, 8), OncePerEpoch(40, 4, 16)),
    ],
)
def test_epsilon_follows_how_often_and_how_long_examples_take_part(scheme, less_often):
    strategy = _banded([1.0, 0.6, 0.3], 40)
    epsilon = scheme.certificate(strategy, 1.5, 1e-6).epsilon
    assert less_often.certificate(strategy, 1.5, 1e-6).epsilon < 0.97 * epsilon
    shorter = dataclasses.replace(scheme, num_rounds=20)
    assert shorter.certificate(strategy.leading_block(20), 1.5, 1e-6).epsilon < 0.97 * epsilon
    # Bounds without samples follow, too.
    bounds = [
        _release(s, strategy.leading_block(s.num_rounds)).bounded(1.5, 1e-6).epsilon
        for s in (less_often, shorter, scheme)
    ]
    assert max(bounds[:2]) < bounds[2]


def test_calibrated_noise_reaches_epsilon_and_no_more_than_needed():
    scheme, strategy = BallsInBins(40, 8), _banded([1.0, 0.6, 0.3], 40)
    noise, certificate = scheme.noise_multiplier(strategy, 3.0, 1e-6)
    assert certificate.epsilon == 3.0
    again = certificates.verify(
        scheme.replicas(strategy)(noise, certificate.order),
        certificate.epsilon,
        certificate.delta,
        failure_probability=certificate.failure_probability,
        seed=certificate.seed,
        attempt=certificate.attempt,
    )
    assert again == certificate
    less = scheme.certificate(strategy, 0.97 * noise, 1e-6)
    assert less.epsilon > 3.0
    likely = scheme.likely_noise_multiplier(strategy, 3.0, 1e-6, start=noise)
    assert likely == pytest.approx(noise, rel=0.15)


def test_samples_calibrate_noise_where_so_few_replicas_fit_that_there_is_no_bound():
    scheme, strategy = MinSeparationSampling(2, 50, 0.2), _banded([1.0, 0.6], 2)
    plain = gaussian_noise_multiplier(1.0, 1e-3, scheme.participation.sensitivity(strategy).value)
    with pytest.raises(certificates.NotCertifiedError, match="has a bound"):
        scheme.likely_noise_multiplier(strategy, 1.0, 1e-4, start=plain)
    noise, certificate = scheme.calibrated(strategy, 1.0, 1e-3)
    assert noise < 0.5 * plain
    scheme.verify(strategy, noise, certificate)
    assert _profiles(*_means(scheme, strategy, noise), 1.0)[0] <= 1.01e-3
    assert _profiles(*_means(scheme, strategy, 0.9 * noise), 1.0)[0] > 1e-3


@pytest.mark.parametrize("delta", [2e-12, 1e-13, 1.1e-15])
@pytest.mark.parametrize("scheme", [BallsInBins(5, 100), MinSeparationSampling(5, 2, 0.2)])
def test_a_delta_too_small_for_samples_has_the_noise_of_a_bound_without_them(scheme, delta):
    release = _release(scheme, _banded([1.0, 0.6], 5))
    noise, certificate = release.calibrated(8.0, delta)
    assert certificate is None
    assert noise < 0.9 * gaussian_noise_multiplier(8.0, delta, release.sensitivity.value)
    assert 0.999 * 8.0 < release.guarantee(noise, delta).epsilon <= 8.0


@pytest.mark.parametrize(
    ("scheme", "noise"),
    [(MinSeparationSampling(5, 50, 0.2), 0.6), (BallsInBins(4, 4), 2.0), (BallsInBins(4, 4), 0.3)],
)
@pytest.mark.parametrize("delta", [2.1e-12, 3e-12, 1e-10])
def test_a_certificate_is_never_above_the_bound_without_samples(scheme, noise, delta):
    """Where delta is a few failure probabilities, samples may cost more of it than they gain."""
    certified = scheme.amplified(identity(scheme.num_rounds), noise, delta)
    assert certified.epsilon <= scheme.bounded(identity(scheme.num_rounds), noise, delta).epsilon


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("epsilon", [50.0, 1e5])
@pytest.mark.parametrize(
    "scheme",
    [SecretParts(8, 2, 0.4), MinSeparationSampling(8, 2, 0.2), BallsInBins(8, 4)],
)
def test_calibration_to_an_enormous_epsilon_ends_without_overflow(scheme, epsilon):
    noise, certificate = scheme.noise_multiplier(identity(8), epsilon, 1e-5)
    assert certificate.epsilon == epsilon
    unamplified = gaussian_noise_multiplier(
        epsilon, 1e-5, scheme.participation.sensitivity(identity(8)).value
    )
    assert 0.5 * unamplified < noise < 10 * unamplified  # Weights are numbers from there on.


def test_negative_coefficients_of_a_toeplitz_strategy_count_by_their_absolute_values():
    scheme, coefficients = BallsInBins(4, 2), np.array([1.0, -0.5, 0.25])
    assert scheme.gram(ToeplitzStrategy(coefficients, 4)) == pytest.approx(
        scheme.gram(ToeplitzStrategy(np.abs(coefficients), 4)), rel=1e-14
    )


def test_calibration_begins_where_weights_of_replicas_are_beyond_floating_point():
    scheme, strategy = OncePerEpoch(8, 2, 5), _banded([1.0, 0.5], 8)
    with pytest.raises(BandMFError, match="so little noise"):
        scheme.certificate(strategy, 0.02, 1e-5)
    noise, certificate = scheme.noise_multiplier(strategy, 50.0, 1e-5)
    assert certificate.epsilon == 50.0
    sensitivity = scheme.participation.sensitivity(strategy).value
    assert 0.8 * sensitivity < noise / gaussian_noise_multiplier(50.0, 1e-5, 1.0) < sensitivity


@pytest.mark.parametrize(
    "scheme",
    [
        OncePerEpoch(8, 2, 5),
        SecretParts(8, 2, 0.4),
        MinSeparationSampling(8, 2, 0.2),
        BallsInBins(8, 4),
    ],
)
@pytest.mark.parametrize("noise", [0.05, 0.02, 0.001])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_weights_beyond_floating_point_are_no_bound_and_leave_that_without_sampling(scheme, noise):
    strategy = _banded([1.0, 0.5], 8)
    release = _release(scheme, strategy)
    plain = Release(strategy, scheme.participation).guarantee(noise, 1e-5).epsilon
    assert scheme.bounded(strategy, noise, 1e-5).epsilon > plain
    assert release.bounded(noise, 1e-5).epsilon == plain
    assert 0.5 * plain < release.guarantee(noise, 1e-5).epsilon <= plain


def _settings(count: int):
    rng = np.random.default_rng(8)
    for _ in range(count):
        n, b = int(rng.integers(4, 13)), int(rng.integers(1, 5))
        q = float(rng.uniform(0.05, 1.0))
        schemes = [BallsInBins(n, b), SecretParts(n, b, q), MinSeparationSampling(n, b, q)]
        schemes.append(OncePerEpoch(n, b, b + int(rng.integers(0, 7))))
        scheme = schemes[int(rng.integers(4))]
        bands = np.concatenate([[1.0], rng.uniform(0.0, 0.8, int(rng.integers(0, b)))])
        yield scheme, _banded(list(bands), n), float(rng.uniform(0.6, 3.0))


def _drawn(scheme: RandomParticipation, size: int, rng: np.random.Generator) -> np.ndarray:
    """Patterns by the words of the scheme, one row each."""
    n = scheme.num_rounds
    if isinstance(scheme, MinSeparationSampling):
        b, p = scheme.separation, scheme.sampling_probability
        wait = rng.choice(b, size=size, p=[1 - (b - 1) * scheme.rate] + [scheme.rate] * (b - 1))
        x = np.zeros((size, n))
        for t in range(n):
            joins = (wait == 0) & (rng.random(size) < p)
            x[:, t] = joins
            wait = np.where(joins, b - 1, np.maximum(wait - 1, 0))
        return x
    if isinstance(scheme, OncePerEpoch):
        x = np.zeros((size, n))
        epoch, b = scheme.epoch_rounds, scheme.separation
        last = np.full(size, -n - epoch)
        for t in range(n):
            u, start = t % epoch, t - t % epoch
            joins = (last < start) & (t - last >= b)
            joins &= rng.random(size) < 1 / (epoch - max(u, b - 1 if start else 0))
            last = np.where(joins, t, last)
            x[:, t] = joins
        return x
    is_bins = isinstance(scheme, BallsInBins)
    b = scheme.num_bins if is_bins else scheme.num_parts
    turns = np.arange(n) % b == rng.integers(b, size=size)[:, None]
    return turns & (rng.random((size, n)) < (1.0 if is_bins else scheme.sampling_probability))


def test_no_certificate_is_below_an_attack_on_200_settings(monkeypatch):
    """The attacker sees y and knows C, q and the scheme, and guesses by the ratio of densities."""
    monkeypatch.setattr(certificates, "_PILOT", 4096)
    rng = np.random.default_rng(9)
    attained = 0
    for scheme, strategy, noise in _settings(200):
        delta = 0.02
        certificate = scheme.certificate(strategy, noise, delta, failure_probability=1e-6)
        columns = np.abs(strategy.materialize()) / noise
        x = _drawn(scheme, 6000, rng)
        y = x @ columns.T + rng.standard_normal((6000, scheme.num_rounds))
        if isinstance(scheme, BallsInBins):
            losses = _log_ratio(*_means(scheme, strategy, noise), y)
        else:
            half = np.sum(columns**2, axis=0) / 2
            losses = scheme.loss((y @ columns - half).T)
        gains = np.maximum(-np.expm1(certificate.epsilon - losses), 0.0)
        lower = gains.mean() - 4.5 * gains.std() / math.sqrt(gains.size)
        assert lower <= delta, (scheme, noise, certificate, gains.mean())
        attained += gains.mean() > 0.8 * delta
    assert attained > 150  # The attack is as good as the certificate says it can be.


@pytest.mark.parametrize(
    ("epoch", "b", "n"), [(7, 3, 40), (9, 1, 20), (6, 6, 30), (6, 5, 33), (50, 10, 30), (1, 1, 4)]
)
def test_every_round_has_the_same_rate_and_every_epoch_each_example_once(epoch, b, n):
    scheme = OncePerEpoch(n, b, epoch)
    ready, joined = np.zeros(n + epoch + b), np.zeros(n)
    ready[0] = 1.0
    for t, (coin, again) in enumerate(zip(scheme.coins, scheme.ready_again, strict=True)):
        joined[t] = ready[t] * coin
        ready[again] += joined[t]
        ready[t + 1] += ready[t] - joined[t]
    assert joined == pytest.approx(np.full(n, scheme.rate), rel=1e-12)
    x = _drawn(scheme, 200, np.random.default_rng(11))
    whole = x[:, : n // epoch * epoch].reshape(200, -1, epoch).sum(axis=2)
    assert np.all(whole == 1)
    assert x.sum(axis=1).max() <= scheme.max_participations
    for pattern in x:
        assert np.all(np.diff(np.flatnonzero(pattern)) >= b)


def test_once_an_epoch_is_more_private_than_the_other_ways_to_take_part_as_often():
    strategy = _banded([1.0, 0.6, 0.3], 60)
    others = [SecretParts(60, 3, 0.3), MinSeparationSampling.from_rate(60, 3, 0.1)]
    others.append(MinSeparationSampling.from_rate(60, 6, 0.1))
    once = OncePerEpoch(60, 3, 10).certificate(strategy, 1.0, 1e-6).epsilon
    for other in others:
        assert once < 0.95 * other.certificate(strategy, 1.0, 1e-6).epsilon


def test_wrong_requests_are_refused_in_one_sentence():
    with pytest.raises(BandMFError, match="at most 3 bands"):
        SecretParts(6, 3, 0.5).replicas(_banded([1.0] * 4, 6))
    with pytest.raises(BandMFError, match="num_rounds must be the same"):
        BallsInBins(5, 3).replicas(_banded([1.0], 6))
    for probability in (0.0, 1.1, math.nan):
        with pytest.raises(BandMFError, match="sampling_probability must be in"):
            MinSeparationSampling(5, 2, probability)
    with pytest.raises(BandMFError, match="separation must be at most epoch_rounds=3"):
        OncePerEpoch(5, 4, 3)
    with pytest.raises(BandMFError, match="at most 2 bands"):
        OncePerEpoch(6, 2, 4).replicas(_banded([1.0] * 3, 6))
    with pytest.raises(BandMFError, match="rate must be in"):
        MinSeparationSampling.from_rate(5, 4, 0.3)
    assert MinSeparationSampling.from_rate(50, 4, 0.1).rate == pytest.approx(0.1)
    large = MinSeparationSampling(400, 400, 0.1).replicas(identity(400))
    assert large(1.0, 2) is not None
    assert large(1.0, 4) is None
