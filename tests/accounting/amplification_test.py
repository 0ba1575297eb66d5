from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting import gaussian
from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.accounting.gaussian import Adjacency
from bandmf_tf.accounting.privacy_loss import PAPER_DISCRETIZATION

# DP-SGD or BandMF with amplification in the centralized StackOverflow table: sigma by bands and
# epsilon, for matrices of sensitivity 1 under (k=6, b=342), that is, column norm 1 / sqrt(6).
PAPER_SIGMAS = {
    (1, 1): 0.37313,
    (9, 1): 0.79118,
    (18, 2): 0.64708,
    (32, 4): 0.52224,
    (64, 8): 0.43490,
}
PAPER_KAPPA = 1 / math.sqrt(6)
UNIT = {"num_bands": 1, "max_column_norm": 1.0}


def _paper(num_bands: int) -> dict[str, float]:
    return {
        "num_bands": num_bands,
        "max_column_norm": PAPER_KAPPA,
        "discretization": PAPER_DISCRETIZATION,
    }


def _paper_scheme(num_bands: int) -> PoissonSampling:
    return PoissonSampling.from_sizes(2052, num_bands, batch_size=1001, dataset_size=342477)


@pytest.mark.parametrize(("num_bands", "epsilon"), [(1, 1), (9, 1), (64, 8)])
def test_amplified_noise_multipliers_of_the_paper(num_bands, epsilon):
    """Part sizes are rounded down: q = 1001 / floor(342477 / b); reproduction_test.py has all."""
    sigma = _paper_scheme(num_bands).noise_multiplier(epsilon, 1e-6, **_paper(num_bands))
    assert sigma == pytest.approx(PAPER_SIGMAS[num_bands, epsilon], abs=0.5e-5)


@pytest.mark.parametrize(("num_bands", "epsilon"), [(18, 2), (32, 4), (64, 8)])
def test_the_paper_did_not_use_parts_of_fractional_size(num_bands, epsilon):
    """With q = 1001 b / 342477 the last printed digit is missed."""
    scheme = PoissonSampling(2052, num_bands, 1001 * num_bands / 342477)
    sigma = scheme.noise_multiplier(epsilon, 1e-6, **_paper(num_bands))
    assert sigma == pytest.approx(PAPER_SIGMAS[num_bands, epsilon], abs=2e-5)
    assert abs(sigma - PAPER_SIGMAS[num_bands, epsilon]) > 0.5e-5


@pytest.mark.parametrize(
    ("num_bands", "probability", "count"),
    [(1, 0.01, 2000), (2, 0.02, 1000), (10, 0.1, 200), (100, 1.0, 20)],
)
def test_cifar_examples_of_the_paper(num_bands, probability, count):
    """20 epochs over 50,000 images in batches of 500."""
    scheme = PoissonSampling.from_sizes(2000, num_bands, batch_size=500, dataset_size=50_000)
    event = scheme.event(1.5, num_bands=num_bands, max_column_norm=0.5)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(3.0)), count
    )


def test_the_listing_of_the_paper_swaps_rounds_and_examples():
    """The listing has q = B / floor(n / b) and ceil(m / b) compositions.

    The text around it, and the paper's notation, have n rounds and m examples. Batches are drawn
    from parts of the *examples* and there is one event for each pass through the *rounds*, so
    q = B / floor(m / b) and ceil(n / b). Taken literally, the listing gives no probability at all
    for the paper's CIFAR-10 runs.
    """
    num_rounds, dataset_size, batch_size, num_bands = 2000, 50_000, 500, 10
    literal_probability = batch_size / math.floor(num_rounds / num_bands)
    assert literal_probability == 2.5
    with pytest.raises(ValueError, match="at most 1"):
        PoissonSampling(num_rounds, num_bands, literal_probability)

    right = PoissonSampling.from_sizes(num_rounds, num_bands, batch_size, dataset_size)
    assert right.sampling_probability == batch_size / math.floor(dataset_size / num_bands)
    assert right.rounds_per_part == math.ceil(num_rounds / num_bands)
    # One example participates `epochs` times in expectation, whatever the number of bands.
    epochs = num_rounds * batch_size / dataset_size
    assert right.sampling_probability * right.rounds_per_part == epochs


@pytest.mark.parametrize(("num_bands", "epsilon"), [(1, 1), (9, 1), (64, 8)])
def test_poisson_epsilon_is_what_dp_accounting_makes_of_the_event(num_bands, epsilon):
    scheme = _paper_scheme(num_bands)
    sigma = PAPER_SIGMAS[num_bands, epsilon]
    strategy = {"num_bands": num_bands, "max_column_norm": PAPER_KAPPA}
    accountant = PLDAccountant(scheme.neighboring_relation, value_discretization_interval=1e-3)
    expected = accountant.compose(scheme.event(sigma, **strategy)).get_epsilon(1e-6)
    assert scheme.epsilon(sigma, 1e-6, **strategy, discretization=1e-3) == pytest.approx(
        expected, rel=1e-6
    )
    renyi = RdpAccountant(neighboring_relation=scheme.neighboring_relation)
    renyi.compose(scheme.event(sigma, **strategy))
    assert scheme.epsilon(sigma, 1e-6, **strategy) < renyi.get_epsilon(1e-6)


def _log_density(outputs: np.ndarray, means: np.ndarray, weights: np.ndarray) -> np.ndarray:
    distances = ((outputs[:, None, :] - means[None]) ** 2).sum(axis=2)
    return np.log(np.exp(-distances / 2) @ weights)


def _delta_of_matrix_mechanism(
    strategy: np.ndarray, num_parts: int, q: float, noise: float, epsilon: float
) -> tuple[float, float]:
    """Estimates delta of C x + z for an example that may participate in each `num_parts`-th round.

    Enumerates its participation patterns under Poisson sampling and integrates by Monte Carlo.

    Returns:
        The estimate and its standard error.
    """
    rounds = range(0, len(strategy), num_parts)
    patterns = np.array(list(itertools.product([0, 1], repeat=len(rounds))))
    weights = np.prod(np.where(patterns == 1, q, 1 - q), axis=1)
    means = patterns @ strategy[:, rounds].T / noise
    rng = np.random.default_rng(7)
    chosen = rng.choice(len(patterns), size=200_000, p=weights)
    outputs = means[chosen] + rng.standard_normal((len(chosen), len(strategy)))
    with_example = _log_density(outputs, means, weights)
    without = _log_density(outputs, means[:1], np.ones(1))
    values = np.maximum(-np.expm1(epsilon - (with_example - without)), 0)
    return values.mean(), values.std() / math.sqrt(len(values))


@pytest.mark.parametrize("epsilon", [0.5, 1.5])
def test_banded_mechanisms_are_exactly_as_private_as_their_event(epsilon):
    num_rounds, num_bands, q, noise = 6, 2, 0.3, 0.8
    columns = np.random.default_rng(0).uniform(0.3, 1.0, (num_rounds, num_bands))
    columns[-1, 1] = 0.0
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    strategy = np.diag(columns[:, 0]) + np.diag(columns[:-1, 1], -1)
    estimate, error = _delta_of_matrix_mechanism(strategy, num_bands, q, noise, epsilon)

    scheme = PoissonSampling(num_rounds, num_bands, q)
    accountant = PLDAccountant(scheme.neighboring_relation, value_discretization_interval=1e-3)
    accountant.compose(scheme.event(noise, num_bands=num_bands, max_column_norm=1.0))
    assert accountant.get_delta(epsilon) == pytest.approx(estimate, abs=4 * error)


def test_more_bands_than_parts_break_the_theorem():
    """So `event` refuses them: this strategy is less private than the event says."""
    num_rounds, q, noise, epsilon = 6, 0.3, 0.8, 1.5
    strategy = np.tril(np.ones((num_rounds, num_rounds)))
    strategy /= np.linalg.norm(strategy, axis=0)
    estimate, error = _delta_of_matrix_mechanism(strategy, 2, q, noise, epsilon)
    scheme = PoissonSampling(num_rounds, 2, q)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(scheme.event(noise, num_bands=2, max_column_norm=1.0))
    assert estimate - 4 * error > accountant.get_delta(epsilon)
    with pytest.raises(ValueError, match=r"num_bands=6, num_parts=2. Use at most 2 bands"):
        scheme.event(noise, num_bands=num_rounds, max_column_norm=1.0)


schemes = st.one_of(
    st.builds(
        PoissonSampling,
        num_rounds=st.integers(1, 200),
        num_parts=st.integers(1, 20),
        sampling_probability=st.floats(0.01, 1.0),
    ),
    st.builds(
        FixedSizeSampling,
        num_rounds=st.integers(1, 200),
        num_parts=st.integers(1, 20),
        batch_size=st.integers(1, 50),
        dataset_size=st.integers(1000, 5000),
    ),
    st.builds(
        Shuffling,
        num_rounds=st.integers(1, 200),
        num_parts=st.integers(1, 20),
        batch_size=st.integers(1, 3),
        dataset_size=st.integers(1000, 100_000),
        reshuffled=st.booleans(),
    ),
)


@given(
    scheme=schemes,
    epsilon=st.floats(0.3, 8.0),
    kappa=st.floats(0.1, 3.0),
    delta=st.sampled_from([1e-8, 1e-5]),
)
@settings(deadline=None, max_examples=40)
def test_calibrated_noise_reaches_its_target_and_only_just(scheme, epsilon, kappa, delta):
    strategy = {"num_bands": 1, "max_column_norm": kappa, "discretization": 5e-3}
    noise = scheme.noise_multiplier(epsilon, delta, **strategy)
    assert scheme.epsilon(noise, delta, **strategy) <= epsilon
    assert scheme.epsilon(noise * (1 - 1e-5), delta, **strategy) > epsilon * (1 - 1e-9)


@given(scheme=schemes, noise=st.floats(0.7, 5.0))
@settings(deadline=None, max_examples=40)
def test_more_noise_means_more_privacy_and_only_noise_over_column_norm_matters(scheme, noise):
    def epsilon(noise, kappa):
        return scheme.epsilon(noise, 1e-5, num_bands=1, max_column_norm=kappa, discretization=5e-3)

    assert epsilon(1.1 * noise, 1.0) <= epsilon(noise, 1.0)
    assert epsilon(3 * noise, 3.0) == pytest.approx(epsilon(noise, 1.0), rel=1e-9)


@given(scheme=schemes, noise=st.floats(0.7, 5.0))
@settings(deadline=None, max_examples=40)
def test_amplification_never_hurts_and_rho_ignores_it(scheme, noise):
    guarantee = scheme.guarantee(noise, 1e-5, **UNIT, discretization=5e-3)
    sensitivity = math.sqrt(scheme.max_participations)
    plain = gaussian.gaussian_guarantee(noise, sensitivity, 1e-5, discretization=5e-3)
    # The grid rounds up once for each of the sampled sums but only once for the plain release.
    assert guarantee.epsilon <= plain.epsilon * 1.02 + 1e-3
    assert guarantee.rho == pytest.approx(plain.rho)
    assert guarantee.adjacency is Adjacency.ZERO_OUT
    assert guarantee.assumptions[: len(scheme.assumptions)] == scheme.assumptions


@pytest.mark.parametrize("num_rounds", [1, 20, 300])
def test_sampling_with_probability_one_is_the_unamplified_composition(num_rounds):
    scheme = PoissonSampling(num_rounds, 4, 1.0)
    expected = gaussian.gaussian_epsilon(6.0, math.sqrt(math.ceil(num_rounds / 4)), 1e-6)
    epsilon = scheme.epsilon(6.0, 1e-6, num_bands=4, max_column_norm=1.0)
    assert epsilon == pytest.approx(expected, rel=1e-5)
    event = scheme.event(6.0, num_bands=4, max_column_norm=1.0)
    assert isinstance(event.event, dp_accounting.PoissonSampledDpEvent)


def test_fixed_size_event_doubles_the_sensitivity_for_replace_one():
    scheme = FixedSizeSampling(2052, 9, 1001, 342477)
    event = scheme.event(6.0, num_bands=9, max_column_norm=1.5)
    assert event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.SampledWithoutReplacementDpEvent(
            342477 // 9, 1001, dp_accounting.GaussianDpEvent(6.0 / (2 * 1.5))
        ),
        228,
    )
    assert scheme.neighboring_relation is dp_accounting.NeighboringRelation.REPLACE_ONE
    assert not PLDAccountant(scheme.neighboring_relation).supports(event)


@pytest.mark.parametrize("noise", [2.0, 4.0])
def test_fixed_size_epsilon_lies_between_poisson_and_replace_one(noise):
    scheme = FixedSizeSampling(500, 5, 100, 10_000)
    renyi = RdpAccountant(neighboring_relation=scheme.neighboring_relation)
    renyi.compose(scheme.event(noise, **UNIT))
    poisson = PoissonSampling.from_sizes(500, 5, 100, 10_000)
    epsilon = scheme.epsilon(noise, 1e-6, **UNIT, discretization=1e-3)
    assert epsilon < renyi.get_epsilon(1e-6)
    assert epsilon > poisson.epsilon(noise, 1e-6, **UNIT, discretization=1e-3)


def test_fixed_size_batches_of_everybody_are_the_plain_release():
    scheme = FixedSizeSampling(40, 2, 50, 100)
    expected = gaussian.gaussian_epsilon(5.0, math.sqrt(20), 1e-6)
    assert scheme.epsilon(5.0, 1e-6, **UNIT) == pytest.approx(expected, rel=1e-9)


def _most_participations(scheme: Shuffling) -> int:
    """Runs through the passes of one part and counts."""
    part = list(range(scheme.part_size))
    batches = scheme.part_size // scheme.batch_size
    counts = dict.fromkeys(part, 0)
    for i in range(len(range(0, scheme.num_rounds, scheme.num_parts))):
        start = i % batches * scheme.batch_size
        for example in part[start : start + scheme.batch_size]:
            counts[example] += 1
    return max(counts.values())


@given(
    num_rounds=st.integers(1, 100),
    num_parts=st.integers(1, 8),
    batch_size=st.integers(1, 6),
    dataset_size=st.integers(48, 100),
)
def test_shuffling_counts_participations(num_rounds, num_parts, batch_size, dataset_size):
    scheme = Shuffling(num_rounds, num_parts, batch_size, dataset_size, reshuffled=False)
    assert scheme.max_participations == _most_participations(scheme)


def test_shuffled_epochs_of_the_paper():
    """20 epochs over CIFAR-10: 20 participations, whatever the number of parts."""
    for num_parts in (1, 2, 10, 100):
        scheme = Shuffling(2000, num_parts, 500, 50_000, reshuffled=True)
        assert scheme.max_participations == 20


@pytest.mark.parametrize(
    ("batch_size", "num_rounds", "reshuffled", "proven"),
    [
        (1, 50_000, False, True),  # a single pass
        (1, 150_000, True, True),
        (1, 150_000, False, False),  # the same order three times
        (2, 25_000, True, False),  # no theorem for larger batches
    ],
)
def test_shuffling_amplifies_only_where_a_theorem_says_so(
    batch_size, num_rounds, reshuffled, proven
):
    scheme = Shuffling(num_rounds, 1, batch_size, 50_000, reshuffled=reshuffled)
    guarantee = scheme.guarantee(8.0, 1e-6, **UNIT)
    accountant = PLDAccountant(scheme.neighboring_relation)
    plain = accountant.compose(scheme.event(8.0, **UNIT)).get_epsilon(1e-6)
    if proven:
        assert guarantee.epsilon < 0.8 * plain
        assert "Theorem 3.1" in guarantee.accounting
    else:
        assert guarantee.epsilon == pytest.approx(plain, rel=1e-6)
        assert "no amplification" in guarantee.accounting


def test_a_shuffled_pass_follows_the_theorem_step_by_step():
    size, noise, delta = 100_000, 4.0, 1e-6
    epsilon = Shuffling(size, 1, 1, size, reshuffled=False).epsilon(noise, delta, **UNIT)
    # Undo Theorem 3.1 by bisection for the local epsilon0 ...
    low, high = 0.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        e0 = math.exp(middle)
        spread = 8 * math.sqrt(e0 * math.log(4 / (delta / 2))) / math.sqrt(size) + 8 * e0 / size
        if math.log(1 + (e0 - 1) / (e0 + 1) * spread) < epsilon:
            low = middle
        else:
            high = middle
    # ... which must be in its regime and leave half of delta for the clipped tails.
    assert low <= math.log(size / (16 * math.log(2 / (delta / 2))))
    tails = (1 + math.exp(epsilon)) * size * gaussian.gaussian_delta(noise, 1.0, low / 2)
    assert tails == pytest.approx(delta / 2, rel=1e-5)
    assert tails <= delta / 2 * (1 + 1e-6)


@pytest.mark.parametrize("noise", [2.0, 5.0, 20.0])
def test_a_shuffled_pass_is_never_better_than_an_attack(noise):
    """The sum of all outputs shifts by 1 with noise sqrt(size), whatever the order."""
    size = 50_000
    scheme = Shuffling(size, 1, 1, size, reshuffled=True)
    attack = gaussian.gaussian_epsilon(noise * math.sqrt(size), 1.0, 1e-6)
    assert scheme.epsilon(noise, 1e-6, **UNIT) > attack


def test_too_few_examples_are_outside_of_the_theorem():
    scheme = Shuffling(100, 1, 1, 100, reshuffled=True)
    assert "no amplification" in scheme.guarantee(100.0, 1e-6, **UNIT).accounting


def test_batches_larger_than_a_part_are_refused():
    message = r"floor\(50000 / 101\) = 495 examples, fewer than batch_size=500.*most 100 parts"
    with pytest.raises(ValueError, match=message):
        PoissonSampling.from_sizes(2000, 101, 500, 50_000)
    with pytest.raises(ValueError, match=message):
        FixedSizeSampling(2000, 101, 500, 50_000)
    with pytest.raises(ValueError, match=message):
        Shuffling(2000, 101, 500, 50_000, reshuffled=True)


@pytest.mark.parametrize("method", ["event", "epsilon", "guarantee", "noise_multiplier"])
def test_every_entry_checks_the_strategy(method):
    scheme = PoissonSampling(100, 4, 0.5)
    arguments = (1.0,) if method == "event" else (1.0, 1e-6)
    with pytest.raises(ValueError, match="num_bands=5, num_parts=4"):
        getattr(scheme, method)(*arguments, num_bands=5, max_column_norm=1.0)
    with pytest.raises(ValueError, match="max_column_norm"):
        getattr(scheme, method)(*arguments, num_bands=4, max_column_norm=0.0)
    with pytest.raises(ValueError, match="num_bands"):
        getattr(scheme, method)(*arguments, num_bands=0, max_column_norm=1.0)


@pytest.mark.parametrize("bad", [0, -3])
def test_sizes_must_be_positive(bad):
    with pytest.raises(ValueError, match="num_rounds"):
        PoissonSampling(bad, 4, 0.5)
    with pytest.raises(ValueError, match="num_parts"):
        PoissonSampling(10, bad, 0.5)
    with pytest.raises(ValueError, match="num_parts"):
        PoissonSampling.from_sizes(10, bad, 5, 100)
    with pytest.raises(ValueError, match="sampling_probability"):
        PoissonSampling(10, 4, bad)
    with pytest.raises(ValueError, match="dataset_size"):
        FixedSizeSampling(10, 4, 1, bad)
    with pytest.raises(ValueError, match="batch_size"):
        Shuffling(10, 4, bad, 100, reshuffled=True)
