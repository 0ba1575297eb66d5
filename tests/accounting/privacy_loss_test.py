from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from bandmf_tf.accounting import privacy_loss

# Outputs of one-dimensional mechanisms, for integrating hockey-stick divergences.
OUTPUTS = np.linspace(-25, 25, 20_001)
# What that rule misses at a kink: width^2 times the jump of the slope, over 8.
INTEGRATION = 3e-7


def _hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    width = OUTPUTS[1] - OUTPUTS[0]
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * width)


def _exact_delta(mu: float, epsilon: float) -> float:
    """The closed form of Balle and Wang in 50 digits."""
    with mpmath.workdps(50):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        upper = mpmath.ncdf(mu / 2 - epsilon / mu)
        return float(upper - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [-2.0, 0.0, 0.1, 1.0, 5.0, 20.0])
def test_gaussian_profile_is_the_closed_form(mu, epsilon):
    expected = _exact_delta(mu, epsilon)
    assert privacy_loss.gaussian_profile(mu, epsilon) == pytest.approx(
        expected, rel=1e-8, abs=1e-25
    )


@pytest.mark.parametrize(
    ("noise", "q", "compositions"),
    [(0.914, 1001 / 342477, 2052), (1.94, 0.0263, 228), (1.07, 0.187, 33), (5.0, 1.0, 20)],
)
def test_sampled_pld_gives_the_epsilon_of_dp_accounting(noise, q, compositions):
    ours = privacy_loss.PoissonSampledGaussian(1 / noise, q).pld(1e-3)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=q, value_discretization_interval=1e-3
    )
    composed = theirs.self_compose(compositions)
    for delta, tolerance in ((1e-9, 1e-3), (1e-6, 1e-6), (1e-2, 1e-8)):
        epsilon = privacy_loss.composed_epsilon(ours, compositions, delta)
        assert epsilon == pytest.approx(composed.get_epsilon_for_delta(delta), rel=tolerance)


@pytest.mark.parametrize("q", [0.01, 0.2])
@pytest.mark.parametrize("delta", [1e-14, 1e-11, 1e-9, 1e-6])
def test_fourier_transforms_never_lower_epsilon(q, delta):
    """Compares with convolutions term by term, in extended precision."""
    pld = privacy_loss.PoissonSampledGaussian(1.0, q).pld(2e-2)
    probabilities, first = pld.remove.probabilities.astype(np.longdouble), pld.remove.first
    for _ in range(7):
        probabilities, first = np.convolve(probabilities, probabilities), 2 * first
        enough = np.cumsum(probabilities[::-1])[::-1] > 1e-20
        probabilities = probabilities[enough]
    direct = pld_pmf.DensePLDPmf(2e-2, first, probabilities.astype(np.float64), 0.0, True)
    epsilon = privacy_loss.composed_epsilon(pld, 2**7, delta)
    assert epsilon >= direct.get_epsilon_for_delta(delta)
    assert epsilon == pytest.approx(direct.get_epsilon_for_delta(delta), rel=1e-5)


def test_a_delta_below_the_tail_that_was_cut_off_gets_no_epsilon():
    pld = privacy_loss.PoissonSampledGaussian(1.0, 0.01).pld(1e-2)
    assert math.isinf(privacy_loss.composed_epsilon(pld, 1000, 1e-27))


def test_many_steps_and_a_small_delta_have_an_epsilon():
    """Rounding errors of the composition, 20,000 times 1e-15, would be larger than delta."""
    make = privacy_loss.PoissonSampledGaussian
    found = {
        delta: privacy_loss.sampled_epsilon(make(1.0, 0.01), 20_000, delta)
        for delta in (1e-6, 1e-11, 1e-15)
    }
    assert found[1e-6] < found[1e-11] < found[1e-15] < math.inf
    # Of the central limit: mu = q sqrt(T (e - 1)).
    limit = privacy_loss.gaussian_closed_epsilon(0.01 * math.sqrt(20_000 * math.expm1(1)), 1e-11)
    assert found[1e-11] == pytest.approx(limit, rel=0.05)


SAMPLES = [privacy_loss.PoissonSampledGaussian, privacy_loss.FixedSizeSampledGaussian]
CASES = [
    # mu, q, compositions, delta: from where the fixed grid of version 0.1 was far off, to large mu.
    (0.02, 1e-3, 1000, 1e-6),
    (1e-3, 1e-2, 3000, 1e-8),
    (0.5, 1e-2, 200, 1e-9),
    (1.0, 0.01, 500, 1e-6),
    (1.0, 0.2, 7, 1e-5),
    (4.0, 1e-3, 50, 1e-6),
    (4.0, 0.3, 2, 1e-3),
    (2.0, 0.9, 1, 1e-7),
]


@pytest.mark.parametrize(("mu", "q", "compositions", "delta"), CASES)
@pytest.mark.parametrize("make", SAMPLES)
def test_few_digits_cost_less_than_a_thousandth(make, mu, q, compositions, delta):
    """Against a uniform grid and its Fourier transform, another upper bound."""
    step = make(mu, q)
    epsilon = privacy_loss.sampled_epsilon(step, compositions, delta)
    width = max(q * min(1.0, mu) / 100, max(step.largest_losses(10.0)) / 2**18)
    fine = privacy_loss.composed_epsilon(step.pld(width), compositions, delta)
    assert epsilon == pytest.approx(fine, rel=1e-3)


def _exact_delta_of_one(mu: float, q: float, epsilon: np.ndarray, sign: int) -> np.ndarray:
    profiles = privacy_loss.PoissonSampledGaussian(mu, q).profiles(np.abs(epsilon))
    forward, reverse = profiles[::sign]
    alpha = np.exp(np.minimum(epsilon, 0.0))
    return np.where(epsilon >= 0, forward, 1 - alpha + alpha * reverse)


def _exact_delta_of_sums(mu: float, q: float, k: int, epsilon: float, sign: int) -> float:
    """The profile of k Poisson samples: integrals over all outputs but one, then the closed form.

    Of P against Q, or of Q against P if `sign` is -1. Given the loss of one output, the rest is a
    profile at epsilon minus this loss, which has a kink of width q at 0, and another one at the
    smallest loss of an output: panels get finer there.
    """
    edges = [np.arange(-13, 13 + mu, 0.5)]
    for loss in (sign * epsilon, sign * epsilon - math.log1p(-q)):
        kink = math.expm1(loss) / q
        centre = (math.log1p(kink) + mu * mu / 2) / mu if kink > -1 else 0.0
        fine = 2.0 ** -np.arange(-6, 40)
        edges += [centre - fine, [centre], centre + fine]
    edges = np.concatenate(edges)
    edges = np.unique(np.clip(edges, -13, 13 + mu))
    nodes, weights = np.polynomial.legendre.leggauss(8)
    halves = np.diff(edges)[:, None] / 2
    outputs = (edges[:-1, None] + halves * (1 + nodes)).ravel()
    weights = (halves * weights).ravel() * stats.norm.pdf(outputs)
    unsampled = mu * outputs - mu * mu / 2
    losses = np.where(
        unsampled < 1,
        np.log1p(q * np.expm1(np.minimum(unsampled, 1))),
        np.logaddexp(math.log1p(-q), math.log(q) + unsampled),
    )
    if sign > 0:
        weights = weights * np.exp(losses)
    left = epsilon - sign * losses
    if k == 2:
        return float(weights @ _exact_delta_of_one(mu, q, left, sign))
    return float(weights @ [_exact_delta_of_sums(mu, q, k - 1, at, sign) for at in left])


def _exact_delta_of_samples(mu: float, q: float, k: int, epsilon: float) -> float:
    return max(_exact_delta_of_sums(mu, q, k, epsilon, sign) for sign in (1, -1))


@pytest.mark.parametrize("k", [2])
@pytest.mark.parametrize("delta", [1e-3, 1e-7, 1e-12])
@pytest.mark.parametrize("q", [1e-9, 1e-7, 1e-5, 1e-3, 0.1, 0.9])
@pytest.mark.parametrize("mu", [0.02, 0.2, 1.0, 2.0, 5.0])
def test_epsilon_of_rare_samples_is_exact_to_a_thousandth(mu, q, delta, k):
    """A uniform grid has too many cells: a crude bound was 3.42 for 0.1476 (50 steps, q 1e-5)."""
    epsilon = privacy_loss.sampled_epsilon(privacy_loss.PoissonSampledGaussian(mu, q), k, delta)
    assert _exact_delta_of_samples(mu, q, k, epsilon) <= delta
    if epsilon > 0.0:
        assert _exact_delta_of_samples(mu, q, k, epsilon * (1 - 1e-3)) > delta


def _exact_delta_of_large_shifts(mu: float, q: float, k: int, epsilon: float) -> float:
    """The profile of k Poisson samples where an output shows whether the example was in it.

    Of j samples with it the sum of losses is normal, and log(1 - q) or log(q) is all that the
    others, and not knowing which, add to it; mu >= 20 makes an exception in 1e-23 of the outputs.
    """
    j = np.arange(1, k + 1)
    mean = (k - j) * math.log1p(-q) + j * (math.log(q) + mu * mu / 2)
    deviation = mu * np.sqrt(j)
    t = (epsilon - mean) / deviation
    above = special.log_ndtr(-t)
    below = epsilon - mean + deviation**2 / 2 + special.log_ndtr(-t - deviation)
    parts = np.exp(above) * -np.expm1(np.minimum(below - above, 0.0))
    return float(stats.binom.pmf(j, k, q) @ parts)


def test_an_epsilon_that_protects_nobody_gets_the_fewest_digits():
    """More would take half a minute where a million steps add up."""
    asked = []

    def epsilon_at(cells: int, direction: int) -> float:
        asked.append(cells)
        return 1e9 + direction

    assert privacy_loss.refined_epsilon(epsilon_at, 1000.0) == 1e9 + 1
    assert set(asked) == {128}
    step = privacy_loss.PoissonSampledGaussian(1000.0, 0.01)
    epsilon = privacy_loss.sampled_epsilon(step, 10**6, 1e-6)
    assert _exact_delta_of_large_shifts(1000.0, 0.01, 10**6, epsilon) <= 1e-6
    assert _exact_delta_of_large_shifts(1000.0, 0.01, 10**6, 0.99 * epsilon) > 1e-6


@pytest.mark.parametrize(
    ("mu", "q", "k", "delta"),
    [
        (20.0, 0.5, 64, 1e-6),
        (20.0, 0.1, 2000, 1e-9),
        (20.0, 0.5, 20_000, 1e-6),
        (50.0, 0.9, 300, 1e-3),
        (100.0, 0.5, 40, 1e-6),
    ],
)
def test_large_epsilon_is_exact_to_a_thousandth(mu, q, k, delta):
    """From 7,000 to 2,000,000, far more than a cell of few digits can hold a loss of 1 apart."""
    epsilon = privacy_loss.sampled_epsilon(privacy_loss.PoissonSampledGaussian(mu, q), k, delta)
    assert _exact_delta_of_large_shifts(mu, q, k, epsilon) <= delta
    assert _exact_delta_of_large_shifts(mu, q, k, epsilon * (1 - 1e-3)) > delta


@pytest.mark.parametrize("less", [1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize(("mu", "q"), [(0.2, 0.1), (1.0, 1e-3), (1.0, 0.5), (5.0, 1e-5)])
def test_epsilon_near_zero_is_exact_to_a_small_part_of_a_loss(mu, q, less):
    """Where delta is almost the total variation, by which epsilon would be 0."""
    step = privacy_loss.PoissonSampledGaussian(mu, q)
    delta = _exact_delta_of_samples(mu, q, 2, 0.0) * (1 - less)
    epsilon = privacy_loss.sampled_epsilon(step, 2, delta)
    assert _exact_delta_of_samples(mu, q, 2, epsilon) <= delta * (1 + 1e-9)
    typical = q * min(1.0, mu)
    smaller = epsilon * (1 - 1e-3) - 1e-4 * typical
    assert smaller < 0.0 or _exact_delta_of_samples(mu, q, 2, smaller) > delta


@given(
    mu=st.floats(0.01, 4.0),
    q=st.floats(0.01, 1.0),
    k=st.integers(1, 12),
    log_delta=st.floats(-20.0, -3.0),
)
@settings(deadline=None, max_examples=40)
def test_composition_is_above_direct_convolution_in_extended_precision(mu, q, k, log_delta):
    """Losses of the mechanism itself, floor to the grid: a lower bound without any FFT."""
    step = 0.05 * max(mu, 0.02)
    outputs = np.linspace(-12, 12 + mu, 40_001).astype(np.longdouble)
    density = np.exp(-(outputs**2) / 2)
    ratio = np.exp(mu * outputs - mu * mu / 2)
    mixture = density * (1 - q + q * ratio)
    losses = np.floor(np.log1p(q * (ratio - 1)) / step).astype(int)
    first = losses.min()
    one = np.bincount(losses - first, weights=np.asarray(mixture / density.sum(), float))
    one = one.astype(np.longdouble)
    total, start = one, first
    for _ in range(k - 1):
        total, start = np.convolve(total, one), start + first
    delta = 10.0**log_delta
    epsilon = privacy_loss.sampled_epsilon(privacy_loss.PoissonSampledGaussian(mu, q), k, delta)
    grid = (start + np.arange(len(total))) * np.longdouble(step)
    below = -np.sum((total * np.expm1(epsilon - grid))[grid > epsilon])
    assert below <= delta * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-30, 1e-12, 1e-6, 1e-2, 0.3, 0.9])
@pytest.mark.parametrize("mu", [1e-12, 1e-7, 1e-3, 0.019, 0.021, 0.5, 5.0, 60.0, 1e4])
def test_the_closed_epsilon_is_tight_and_not_too_small(mu, delta):
    epsilon = privacy_loss.gaussian_closed_epsilon(mu, delta)
    with mpmath.workdps(120):

        def exact(epsilon: float) -> float:
            m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

        assert exact(epsilon) <= delta
        if epsilon > 1e-6 * mu:
            assert exact(epsilon * (1 - 1e-5)) > delta


def test_noise_that_is_almost_none_has_an_infinite_epsilon_and_no_error():
    make = privacy_loss.PoissonSampledGaussian
    assert privacy_loss.gaussian_closed_epsilon(1e200, 1e-6) == math.inf
    assert privacy_loss.sampled_epsilon(make(1e200, 0.1), 5, 1e-6) == math.inf


@given(
    mu=st.floats(0.02, 5.0),
    q=st.floats(1e-4, 1.0),
    make=st.sampled_from(SAMPLES),
)
@example(mu=4.0, q=1 - 2.0**-53, make=privacy_loss.PoissonSampledGaussian)
@example(mu=5.0, q=1 - 1e-15, make=privacy_loss.PoissonSampledGaussian)
@settings(deadline=None, max_examples=60)
def test_probabilities_of_losses_sum_to_one_in_both_directions(mu, q, make):
    pld = make(mu, q).pld(1e-2)
    for losses in (pld.remove, pld.add):
        assert losses.delta(-1e3) == pytest.approx(1.0, abs=1e-10)


@given(mu=st.floats(0.05, 3.0), q=st.floats(1e-3, 1.0), compositions=st.integers(1, 50))
@settings(deadline=None, max_examples=40)
def test_a_coarser_grid_never_lowers_epsilon(mu, q, compositions):
    for make in SAMPLES:
        fine, coarse = (
            privacy_loss.composed_epsilon(make(mu, q).pld(grid), compositions, 1e-5)
            for grid in (5e-3, 2e-2)
        )
        assert coarse >= fine - 1e-9


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("q", [0.01, 0.3, 0.9])
def test_fixed_size_profile_is_attained_by_the_worst_data_sets(mu, q):
    pld = privacy_loss.FixedSizeSampledGaussian(mu, q).pld(1e-3)
    record, zeroed = stats.norm.pdf(OUTPUTS - mu), stats.norm.pdf(OUTPUTS)
    opposite = stats.norm.pdf(OUTPUTS + mu)
    for epsilon in (0.0, 0.1, 1.0, 3.0):
        # All others contribute the opposite of the record.
        others = (1 - q) * opposite
        worst = _hockey_stick(others + q * record, others + q * zeroed, epsilon)
        bound = pld.remove.delta(epsilon)
        assert bound == pytest.approx(worst, rel=1e-5, abs=1e-12)
        # All others contribute the same as the record.
        others = (1 - q) * record
        worst = _hockey_stick(others + q * zeroed, others + q * record, epsilon)
        bound = pld.add.delta(epsilon)
        assert bound == pytest.approx(worst, rel=1e-5, abs=1e-12)


def _fixed_size_output(contributions: np.ndarray, batch_size: int) -> np.ndarray:
    batches = itertools.combinations(contributions, batch_size)
    return np.mean([stats.norm.pdf(OUTPUTS - sum(batch)) for batch in batches], axis=0)


@given(
    contributions=st.lists(st.floats(-1, 1), min_size=3, max_size=5),
    batch_size=st.integers(1, 3),
    mu=st.floats(0.2, 2.0),
    epsilon=st.floats(0.0, 2.0),
)
@settings(deadline=None, max_examples=40)
def test_fixed_size_profile_bounds_every_data_set(contributions, batch_size, mu, epsilon):
    data = mu * np.array(contributions)
    zeroed = data.copy()
    zeroed[0] = 0.0
    p, q = _fixed_size_output(data, batch_size), _fixed_size_output(zeroed, batch_size)
    pld = privacy_loss.FixedSizeSampledGaussian(mu, batch_size / len(data)).pld(1e-2)
    bound_with, bound_without = (losses.delta(epsilon) for losses in (pld.remove, pld.add))
    assert _hockey_stick(p, q, epsilon) <= bound_with + INTEGRATION
    assert _hockey_stick(q, p, epsilon) <= bound_without + INTEGRATION


def test_fixed_size_batches_are_less_private_than_poisson_samples():
    """So accounting for them as if they were Poisson samples is wrong."""
    mu, q, epsilon = 1.0, 0.01, 1.0
    others = (1 - q) * stats.norm.pdf(OUTPUTS + mu)
    with_record = others + q * stats.norm.pdf(OUTPUTS - mu)
    zeroed = others + q * stats.norm.pdf(OUTPUTS)
    poisson = privacy_loss.PoissonSampledGaussian(mu, q).pld(1e-4).remove.delta(epsilon)
    assert _hockey_stick(with_record, zeroed, epsilon) > 5 * poisson


def test_a_batch_of_everybody_is_the_plain_gaussian():
    for mu in (0.2, 1.0):
        plain = privacy_loss.PoissonSampledGaussian(mu, 1.0).pld(1e-3)
        fixed = privacy_loss.FixedSizeSampledGaussian(mu, 1.0).pld(1e-3)
        for delta in (1e-6, 1e-3):
            expected = privacy_loss.composed_epsilon(plain, 3, delta)
            epsilon = privacy_loss.composed_epsilon(fixed, 3, delta)
            assert epsilon == pytest.approx(expected, rel=1e-9)


def test_very_little_noise_makes_a_coarser_grid_and_not_a_huge_one():
    pld = privacy_loss.PoissonSampledGaussian(1000.0, 1.0).pld(1e-4)
    assert pld.remove.probabilities.size <= 2**22 + 3
    assert 5.0e5 < privacy_loss.composed_epsilon(pld, 1, 1e-6) < 5.1e5


def test_where_floating_point_ends_the_loss_is_infinite():
    assert privacy_loss.gaussian_closed_epsilon(1.0, 5e-324) == math.inf
    rare, usual = (privacy_loss.PoissonSampledGaussian(1.0, q) for q in (1e-300, 0.01))
    assert privacy_loss.sampled_epsilon(usual, 100, 5e-324) == math.inf  # Products underflow.
    assert privacy_loss.sampled_epsilon(usual, 10**13, 1e-6) == math.inf  # Nothing is certain.
    assert privacy_loss.sampled_epsilon(rare, 10, 1e-305) == math.inf
    assert privacy_loss.sampled_epsilon(rare, 10, 1e-6) == 0.0
    # A small delta leaves no probability between two losses, a large one all in one cell.
    for mu, q, k in ((1 / 0.3, 1e-12, 10**9), (0.2, 1e-12, 2), (1.0, 1e-7, 20_000)):
        pld = privacy_loss.PoissonSampledGaussian(mu, q).pld(1e-2)
        epsilons = [privacy_loss.composed_epsilon(pld, k, 10.0**-x) for x in (1, 2, 12, 100, 300)]
        assert not any(map(math.isnan, epsilons))
        assert epsilons == sorted(epsilons)


def test_a_grid_of_any_width_gives_a_bound():
    step = privacy_loss.PoissonSampledGaussian(1.0, 0.1)
    wide = [privacy_loss.sampled_epsilon(step, 10, 1e-6, width) for width in (10.0, 800.0, 1e300)]
    assert privacy_loss.sampled_epsilon(step, 10, 1e-6) < wide[0] <= wide[1] == wide[2] < math.inf
