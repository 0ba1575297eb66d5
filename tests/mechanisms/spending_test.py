from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling
from bandmf_tf.accounting.gaussian import gaussian_epsilon
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.strategies import (
    BandedStrategy,
    DenseStrategy,
    ToeplitzStrategy,
    identity,
)
from bandmf_tf.factorization.trees import TreeStrategy
from bandmf_tf.mechanisms.spending import EpsilonSpent, epsilon_after
from cases import make_mechanism

N = 24
COEFFICIENTS = np.array([1.0, 0.5, 0.3, 0.2])
BANDED = ToeplitzStrategy(COEFFICIENTS, N)

STRATEGIES = {
    "Toeplitz": BANDED,
    "banded": BandedStrategy(BANDED.to_banded().bands),
    "dense": DenseStrategy(BANDED.materialize()),
    "tree": TreeStrategy(N, "online"),
    "full tree": TreeStrategy(N, "full"),
    "identity": identity(N),
}


_mechanism = functools.partial(make_mechanism, noise_multiplier=3.0)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_it_grows_from_zero_to_the_whole_epsilon(strategy):
    mechanism = _mechanism(strategy, FixedEpochs(6, 4))
    spent = [epsilon_after(mechanism, t) for t in range(N + 1)]
    assert spent[0] == 0.0
    assert spent[-1] == pytest.approx(mechanism.epsilon)
    assert np.all(np.diff(spent) >= -1e-9)
    assert spent[1] > 0.0


def test_independent_noise_costs_one_more_participation_an_epoch():
    mechanism = _mechanism(identity(N), FixedEpochs(6, 4))
    for t in (1, 6, 7, 12, 13, 24):
        participations = -(-t // 6)
        expected = gaussian_epsilon(3.0, np.sqrt(participations), 1e-5)
        assert epsilon_after(mechanism, t) == pytest.approx(expected)


def test_the_first_rounds_are_the_mechanism_of_the_leading_block():
    t = 10
    mechanism = _mechanism(STRATEGIES["banded"], MinSeparation(6))
    block = DenseStrategy(BANDED.materialize()[:t, :t])
    alone = _mechanism(block, MinSeparation(6))
    assert epsilon_after(mechanism, t) == pytest.approx(alone.epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "scheme",
    [PoissonSampling.from_sizes(N, 4, 10, 400), FixedSizeSampling(N, 4, 10, 400)],
    ids=["poisson", "fixed size"],
)
def test_sampled_rounds_compose_as_the_scheme_does(scheme):
    mechanism = _mechanism(BANDED, sampling=scheme)
    for t in (1, 4, 5, 23):
        shorter = dataclasses.replace(scheme, num_rounds=t)
        kappa = np.linalg.norm(BANDED.materialize()[:t, :t], axis=0).max()
        expected = shorter.epsilon(3.0, 1e-5, num_bands=1, max_column_norm=kappa)
        assert epsilon_after(mechanism, t) == pytest.approx(expected)
    assert epsilon_after(mechanism, 4) < epsilon_after(mechanism, 5) < mechanism.epsilon


def test_the_display_is_never_too_small_and_exact_at_the_end():
    mechanism = _mechanism(BANDED, FixedEpochs(6, 4))
    for points in (1, 5, 100):
        spent = EpsilonSpent(mechanism, points)
        for t in range(N + 1):
            assert spent(t) >= epsilon_after(mechanism, t)
        assert spent(N) == mechanism.epsilon
        assert len(spent._known) <= points + 2


def test_rounds_outside_of_the_plan_are_refused():
    mechanism = _mechanism(BANDED, FixedEpochs(6, 4))
    with pytest.raises(ValueError, match="at most num_rounds=24"):
        epsilon_after(mechanism, N + 1)
    with pytest.raises(ValueError, match="at least 0"):
        epsilon_after(mechanism, -1)
