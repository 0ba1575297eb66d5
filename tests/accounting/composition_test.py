"""Releases composed by their privacy losses cost what brute force says, and never less."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting import certificates, releases
from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.accounting.bounded_samples import BoundedPoissonGaussian
from bandmf_tf.accounting.composition import Composer, Losses, ProvenPoints, deltas_below
from bandmf_tf.accounting.gaussian import gaussian_epsilon, zcdp_epsilon
from bandmf_tf.accounting.privacy_loss import (
    DominatingPair,
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    gaussian_profile,
    sampled_epsilon,
)
from bandmf_tf.accounting.random_participation import BallsInBins
from bandmf_tf.accounting.releases import Release
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity

DELTA = 1e-6


@dataclasses.dataclass(frozen=True)
class _Discrete(DominatingPair):
    """Two distributions on a few outcomes."""

    p: tuple[float, ...]
    q: tuple[float, ...]

    @property
    def scale(self):
        return 0.1

    def largest_losses(self, tail):
        del tail
        largest = float(np.abs(np.log(self.p) - np.log(self.q)).max())
        return largest, largest

    def profiles(self, epsilon):
        p, q = np.array(self.p), np.array(self.q)
        alpha = np.exp(epsilon)[:, None]
        return np.maximum(p - alpha * q, 0).sum(1), np.maximum(q - alpha * p, 0).sum(1)


def _random_pair(rng, outcomes=3, spread=1.0):
    p, q = rng.dirichlet(np.ones(outcomes), 2) * 0.9 + 0.1 / outcomes
    p = (1 - spread) * q + spread * p
    return _Discrete(tuple(p / p.sum()), tuple(q / q.sum()))


def _product(*parts):
    """P and Q of all outcomes together."""
    p = q = np.ones(1)
    for part in parts:
        for _ in range(part.times):
            p, q = np.outer(p, part.pair.p).ravel(), np.outer(q, part.pair.q).ravel()
    return p, q


def _delta(p, q, epsilon):
    """The larger of both directions, of which each is one for all releases."""
    alpha = math.exp(epsilon)
    return max(np.maximum(p - alpha * q, 0).sum(), np.maximum(q - alpha * p, 0).sum())


@given(seed=st.integers(0, 9999), log_delta=st.floats(-4, -0.7))
@settings(deadline=None, max_examples=40)
def test_sums_of_losses_are_those_of_all_outcomes(seed, log_delta):
    rng, delta = np.random.default_rng(seed), 10**log_delta
    spreads = rng.choice([0.05, 0.3, 1.0], 3)
    parts = [Losses(_random_pair(rng, 3, s), int(rng.integers(1, 4))) for s in spreads]
    found = Composer(delta).epsilon(parts)
    p, q = _product(*parts)
    assert _delta(p, q, found) <= delta
    if found > 0:  # And hardly more than it must be.
        assert _delta(p, q, found - 1e-3 * found - 1e-4) > delta


def test_the_direction_is_one_for_all_releases():
    """One release is worse with the unit, the other without: never both at once."""
    pair = _Discrete((0.9, 0.1), (0.999, 0.001))
    mirrored = _Discrete(pair.q, pair.p)
    delta = 0.05
    same, mixed = (Composer(delta).epsilon([Losses(pair), Losses(x)]) for x in (pair, mirrored))
    for found, other in ((same, pair), (mixed, mirrored)):
        p, q = _product(Losses(pair), Losses(other))
        assert _delta(p, q, found) <= delta < _delta(p, q, found * 0.998)
    assert mixed < 0.95 * same


def _own_points(mechanisms, epsilons=(0.05, 0.3, 0.8, 1.5)):
    """What one would know of mechanisms by their guarantees alone."""
    points = [
        (e, max(_delta(np.array(m.p), np.array(m.q), e) for m in mechanisms)) for e in epsilons
    ]
    return ProvenPoints(tuple((e, max(delta, 1e-9)) for e, delta in points))


@given(seed=st.integers(0, 9999), delta=st.floats(0.01, 0.3))
@settings(deadline=None, max_examples=60)
def test_guarantees_bound_whatever_has_them_also_chosen_adaptively(seed, delta):
    """The second mechanism depends on what the first has released."""
    rng = np.random.default_rng(seed)
    first, seconds = _random_pair(rng), [_random_pair(rng) for _ in range(3)]
    pairs = [_own_points([first]), _own_points(seconds)]
    found = Composer(delta).epsilon(Losses(pair) for pair in pairs)
    p = np.concatenate([a * np.array(m.p) for a, m in zip(first.p, seconds, strict=True)])
    q = np.concatenate([a * np.array(m.q) for a, m in zip(first.q, seconds, strict=True)])
    assert _delta(p, q, found) <= delta
    # Never more than basic composition of any two guarantees.
    for (e1, d1), (e2, d2) in itertools.product(*(pair.points for pair in pairs)):
        if d1 + d2 <= delta:
            assert found <= (e1 + e2) * (1 + 1e-3)


def test_one_guarantee_is_randomised_response_that_may_fail():
    epsilon, delta = 1.3, 1e-3
    pair = ProvenPoints(((epsilon, delta),))
    more = math.exp(epsilon) / (1 + math.exp(epsilon)) * (1 - delta)
    p = np.array([delta, 0.0, more, 1 - delta - more])
    at = np.array([0.0, 0.2, 0.9, epsilon, 2.0])
    exact = [_delta(p, p[[1, 0, 3, 2]], e) for e in at]
    assert pair.profiles(at)[0] == pytest.approx(exact, rel=1e-12)
    twice = Composer(0.02).epsilon([Losses(pair, 2)])
    q = p[[1, 0, 3, 2]]
    both = (np.outer(p, p).ravel(), np.outer(q, q).ravel())
    assert _delta(*both, twice) <= 0.02 < _delta(*both, twice * 0.998)


def test_many_guarantees_are_as_good_as_the_pair_that_has_them():
    """Of a Gaussian, and a point that says nothing new changes nothing."""
    for mu in (0.1, 1.0, 5.0):
        points = [(gaussian_epsilon(1.0, mu, delta), delta) for delta in deltas_below(DELTA)]
        pair = ProvenPoints((*points, (points[5][0] + 1, points[4][1]), (math.inf, 1e-30)))
        assert pair.profiles(np.array([0.0, 0.5]))[0] == pytest.approx(
            ProvenPoints(tuple(points)).profiles(np.array([0.0, 0.5]))[0]
        )
        epsilons = np.linspace(0, points[-1][0], 50)
        assert np.all(pair.profiles(epsilons)[0] >= gaussian_profile(mu, epsilons) * (1 - 1e-9))
        found = Composer(DELTA).epsilon([Losses(pair)], mu)
        exact = gaussian_epsilon(1.0, math.sqrt(2) * mu, DELTA)
        assert exact < found < 1.02 * exact


def _sampled(noise, q, times, is_pessimistic):
    one = pld.from_gaussian_mechanism(
        noise,
        value_discretization_interval=1e-3,
        sampling_prob=q,
        pessimistic_estimate=is_pessimistic,
        use_connect_dots=is_pessimistic,
    )
    return one.self_compose(times)


@pytest.mark.parametrize(
    "events",
    [
        ((2.0, 0.05, 24), (1.0, 0.02, 100)),
        ((2.0, 0.05, 24), (1.5, 1.0, 1)),
        ((0.7, 0.01, 300), (3.0, 0.3, 50), (4.0, 1.0, 1)),
    ],
)
def test_epsilon_is_that_of_composed_events(events):
    """`dp_accounting` rounded down is never above it, and rounded up hardly below."""
    losses = [Losses(PoissonSampledGaussian(1 / noise, q), k) for noise, q, k in events]
    found = Composer(DELTA).epsilon(losses)
    bounds = []
    for is_pessimistic in (False, True):
        total, *others = (_sampled(*event, is_pessimistic) for event in events)
        for other in others:
            total = total.compose(other)
        bounds.append(total.get_epsilon_for_delta(DELTA))
    assert bounds[0] <= found <= 1.002 * bounds[1]


@pytest.mark.parametrize(("mu", "q", "other"), [(1.0, 0.1, 0.5), (3.0, 0.02, 1.0), (0.4, 0.9, 2)])
def test_one_sampled_sum_and_a_gaussian_are_an_integral(mu, q, other):
    """Delta by quadrature over the outcomes of the first, of the second in closed form."""
    y = np.linspace(-14.0, 14.0 + mu, 40_001)
    without = np.exp(-y * y / 2) / math.sqrt(2 * math.pi)
    ratio = (1 - q) + q * np.exp(mu * y - mu * mu / 2)

    def exact(epsilon):
        remove = without * ratio * gaussian_profile(other, epsilon - np.log(ratio))
        add = without * gaussian_profile(other, epsilon + np.log(ratio))
        return max(remove.sum(), add.sum()) * (y[1] - y[0])  # It vanishes at both ends.

    release = Losses(PoissonSampledGaussian(mu, q))
    for delta in (1e-3, 1e-6, 1e-10):
        found = Composer(delta).epsilon([release], other)
        assert exact(found) <= delta < exact(found * 0.999)


STEPS = [
    PoissonSampledGaussian(0.5, 0.05),
    BoundedPoissonGaussian(0.5, 0.05, 79, 1280),
    FixedSizeSampledGaussian(0.5, 0.05),
    PoissonSampledGaussian(1.0, 1e-4),
    FixedSizeSampledGaussian(2.0, 1.0),
]


@pytest.mark.parametrize("step", STEPS)
def test_two_halves_are_the_whole(step):
    whole = sampled_epsilon(step, 100, DELTA)
    assert Composer(DELTA).epsilon([Losses(step, 40), Losses(step, 60)]) == whole
    # Also where they cannot be seen to be alike.
    other = dataclasses.replace(step, mu=step.mu * (1 + 1e-9))
    halves = Composer(DELTA).epsilon([Losses(step, 40), Losses(other, 60)])
    assert whole * (1 - 1e-6) <= halves * (1 + 1e-3)
    assert halves == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.3, 2.0, 30.0])
def test_gaussians_compose_to_gaussians(mu):
    for other in (0.1 * mu, mu):
        found = Composer(DELTA).epsilon([Losses(PoissonSampledGaussian(other, 1.0))], mu)
        exact = gaussian_epsilon(1.0, math.hypot(mu, other), DELTA)
        assert exact <= found <= exact * 1.001 + 1e-9


def test_what_is_known_by_rho_alone_is_composed_too():
    alone = Composer(DELTA).epsilon([], rho=0.02)
    assert zcdp_epsilon(0.02, DELTA) * (1 - 1e-6) <= alone <= 1.002 * zcdp_epsilon(0.02, DELTA)
    release = Losses(PoissonSampledGaussian(0.5, 0.05), 24)
    least = Composer(DELTA).epsilon([release], mu=0.2)  # A release of this rho.
    beside = Composer(DELTA).epsilon([release], rho=0.02)
    assert least < beside < 1.1 * least


RELEASES = [
    Losses(PoissonSampledGaussian(0.5, 0.05), 24),
    Losses(FixedSizeSampledGaussian(0.3, 0.1), 40),
    Losses(ProvenPoints(((0.5, 1e-7), (0.3, 1e-5), (0.1, 0.01))), 1),
    Losses(PoissonSampledGaussian(1.0, 1e-3), 5000),
]


def test_order_does_not_matter_and_more_costs_more():
    orders = [Composer(DELTA).epsilon(order, 0.3) for order in (RELEASES, RELEASES[::-1])]
    assert orders[0] == pytest.approx(orders[1], rel=1e-3)
    composer, last = Composer(DELTA), 0.0
    for count in range(1, len(RELEASES) + 1):
        found = composer.epsilon(RELEASES[:count], 0.3)
        assert found > last
        # What a composer remembers of earlier sums changes nothing.
        assert found == Composer(DELTA).epsilon(RELEASES[:count], 0.3)
        last = found
    assert composer.epsilon(RELEASES, 0.31) > last
    assert composer.epsilon(RELEASES, 0.3, 0.001) > last
    assert Composer(DELTA / 2).epsilon(RELEASES, 0.3) > last


def test_extremes_have_an_answer():
    one = RELEASES[0]
    assert Composer(DELTA).epsilon([one], 1e5) == math.inf
    assert Composer(DELTA).epsilon([Losses(PoissonSampledGaussian(1e6, 0.5), 3), one]) == math.inf
    assert Composer(1e-300).epsilon(RELEASES) == math.inf
    assert Composer(1e-320).epsilon(RELEASES, rho=0.1) == math.inf
    # A release that may fail more often than all together may.
    failing = Losses(ProvenPoints(((0.5, 1e-3),)))
    assert Composer(DELTA).epsilon([one, failing]) == math.inf
    assert Composer(2e-3).epsilon([one, failing]) < math.inf
    # Nothing to speak of.
    tiny = [Losses(PoissonSampledGaussian(mu, 1e-4), 3) for mu in (1e-5, 1e-6)]
    assert Composer(DELTA).epsilon(tiny) == 0.0
    nothing = Losses(ProvenPoints(((0.0, 1e-12),)))
    beside = Composer(DELTA).epsilon([one, nothing])
    assert beside == pytest.approx(Composer(DELTA).epsilon([one]), rel=1e-3)
    many = Composer(DELTA).epsilon([Losses(PoissonSampledGaussian(1.0, 1e-3), 100_000)], 0.1)
    alone = sampled_epsilon(PoissonSampledGaussian(1.0, 1e-3), 100_000, DELTA)
    assert alone < many < alone + gaussian_epsilon(1.0, 0.1, DELTA)


def test_what_is_no_guarantee_is_refused():
    for points in ((), ((math.inf, 1e-6),), ((math.nan, 1e-6),), ((-1.0, 1e-6),), ((1.0, 0.0),)):
        with pytest.raises(BandMFError, match=r"epsilon|delta"):
            ProvenPoints(points)
    with pytest.raises(BandMFError, match="delta"):
        Composer(math.nan)
    for name in ("mu", "rho"):
        with pytest.raises(BandMFError, match=name):
            Composer(DELTA).epsilon(RELEASES[:1], **{name: math.nan})


def test_many_releases_cost_what_they_would_as_one():
    """Each has noise of its own; together they are close to one run of the noise in between."""
    noises = np.linspace(1.9999, 2.0001, 32)
    losses = [Losses(PoissonSampledGaussian(1 / noise, 0.05), 8) for noise in noises]
    found = Composer(DELTA).epsilon(losses)
    one = sampled_epsilon(PoissonSampledGaussian(0.5, 0.05), 8 * 32, DELTA)
    assert found == pytest.approx(one, rel=2e-3)


# Losses of a `Release`.

STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5]), 12)


def _losses(scheme, strategy=STRATEGY, noise=3.0, group=1, share=DELTA / 3):
    release = Release(strategy, scheme.participation, scheme)
    release = release if group == 1 else release.of_group(group)
    return release.losses(noise, release.guarantee(noise, DELTA), share)


def test_a_cyclic_release_is_a_composition_of_its_sums():
    scheme = PoissonSampling(12, 3, 0.1)
    losses = _losses(scheme)
    norm = STRATEGY.column_norms().max()
    assert losses == Losses(PoissonSampledGaussian(norm / 3.0, 0.1), 4)
    guarantee = scheme.amplified(STRATEGY, 3.0, DELTA)
    assert Composer(DELTA).epsilon([losses]) == guarantee.epsilon


def test_a_release_that_sampling_does_not_help_has_no_losses():
    assert _losses(FixedSizeSampling(12, 3, 10, 30)) is None
    assert _losses(Shuffling(12, 3, 2, 30, reshuffled=True)) is None


def test_groups_are_composed_by_their_guarantees(monkeypatch):
    monkeypatch.setattr(releases, "deltas_below", lambda delta: (1e-2, delta / 9, 1e-4 * delta))
    scheme = PoissonSampling(12, 3, 0.1)
    losses = _losses(scheme, group=2)
    assert isinstance(losses.pair, ProvenPoints)
    whole = Release(STRATEGY, scheme.participation, scheme).of_group(2).guarantee(3.0, DELTA)
    assert Composer(DELTA).epsilon([losses]) == pytest.approx(whole.epsilon, rel=1e-3)
    # Two members that are zeroed one after the other in both runs, not one in each.
    both, units = (Composer(DELTA).epsilon([x, x]) for x in (losses, _losses(scheme)))
    assert both > max(whole.epsilon, 2 * units)


def test_certified_releases_cost_less_than_their_epsilons_added():
    scheme = BallsInBins(12, 4)
    strategy = identity(12)
    losses = _losses(scheme, strategy)
    alone = scheme.amplified(strategy, 3.0, DELTA).epsilon
    basic = 2 * scheme.amplified(strategy, 3.0, DELTA / 3).epsilon
    unamplified = gaussian_epsilon(3.0, math.sqrt(6), DELTA)
    both = Composer(DELTA).epsilon([losses, losses])
    assert alone < both < min(basic, unamplified)
    # Two certificates may be wrong, and then nothing holds.
    assert losses.pair.profiles(np.array([100.0]))[0] >= 2 * certificates.FAILURE_PROBABILITY
