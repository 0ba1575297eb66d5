"""A release costs what its accountant says, and its first rounds cost no more than all of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bandmf_tf.accounting import releases, replicas
from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.gaussian import gaussian_delta, gaussian_epsilon
from bandmf_tf.accounting.random_participation import MinSeparationSampling
from bandmf_tf.accounting.releases import Release
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, SingleParticipation
from bandmf_tf.factorization.sensitivity import UPPER_BOUND
from bandmf_tf.factorization.strategies import ToeplitzStrategy, identity

N, NOISE, DELTA = 24, 5.0, 1e-6
STRATEGY = ToeplitzStrategy(np.array([1.0, 0.5, 0.25]), N)
GRID = {"discretization": 1e-2}
SCHEMES = [
    PoissonSampling(N, 4, 0.1),
    FixedSizeSampling(N, 4, 5, 200),
    Shuffling(N, 4, 1, 12, reshuffled=True),
    BoundedPoissonSampling(N, 4, 0.1, 30, 400),
]
RELEASES = [
    Release(STRATEGY, SingleParticipation()),
    Release(STRATEGY, FixedEpochs(4, 6)),
    Release(STRATEGY, MinSeparation(2, 3)),
    *(Release(STRATEGY, scheme.participation, scheme) for scheme in SCHEMES),
]


@pytest.mark.parametrize("release", RELEASES)
def test_calibrated_noise_reaches_its_target(release):
    noise = release.noise_multiplier(1.5, DELTA, **GRID)
    assert 1.4999 <= release.guarantee(noise, DELTA, **GRID).epsilon <= 1.5


@pytest.mark.parametrize("delta", [1e-6, 1e-13])
def test_without_a_certificate_the_noise_is_that_without_amplification(delta, monkeypatch):
    monkeypatch.setattr(replicas, "_MAX_MULTISETS", 1)
    scheme = MinSeparationSampling(N, 4, 0.1)
    noise, certificate = Release(STRATEGY, scheme.participation, scheme).calibrated(1.5, delta)
    plain = Release(STRATEGY, scheme.participation)
    assert (noise, certificate) == (plain.noise_multiplier(1.5, delta), None)


@pytest.mark.parametrize("release", RELEASES)
def test_rho_is_that_of_the_gaussian_release_and_never_amplified(release):
    guarantee = release.guarantee(NOISE, DELTA, **GRID, assumptions=("said",))
    assert guarantee.rho == pytest.approx(release.sensitivity.value**2 / (2 * NOISE**2))
    assert "said" in guarantee.assumptions
    plain = Release(STRATEGY, release.participation).guarantee(NOISE, DELTA, **GRID)
    assert plain.rho == guarantee.rho
    assert guarantee.epsilon <= plain.epsilon * (1 + 1e-6)


@pytest.mark.parametrize("release", RELEASES)
def test_the_first_rounds_are_a_release_of_their_own(release):
    spent = []
    for t in (1, 2, 3, 9, N):
        first = release.first(t)
        C = STRATEGY.materialize()[:t, :t]
        np.testing.assert_array_equal(first.strategy.materialize(), C)
        assert first.max_column_norm == pytest.approx(np.linalg.norm(C, axis=0).max())
        assert first.sampling is None or first.sampling.num_rounds == t
        spent.append(first.guarantee(NOISE, DELTA, **GRID).epsilon)
    assert spent == sorted(spent)
    assert spent[-1] == release.guarantee(NOISE, DELTA, **GRID).epsilon


@pytest.mark.parametrize("release", RELEASES)
def test_groups_add_up_unless_amplification_is_better(release):
    together = release.of_group(3)
    expected = gaussian_epsilon(NOISE, 3 * release.sensitivity.value, DELTA, **GRID)
    epsilon = together.guarantee(NOISE, DELTA, **GRID).epsilon
    assert epsilon <= expected
    assert epsilon == expected or release.sampling is not None
    assert epsilon >= release.guarantee(NOISE, DELTA, **GRID).epsilon
    assert together.sensitivity.kind == UPPER_BOUND


@pytest.mark.parametrize("release", RELEASES)
def test_a_closed_form_exists_without_sampling_alone(release):
    plain = gaussian_delta(NOISE, release.sensitivity.value, 1.0)
    expected = plain if release.sampling is None else None
    assert release.closed_form_delta(NOISE, 1.0) == expected


@pytest.mark.parametrize(
    ("strategy", "participation", "scheme", "words"),
    [
        (
            STRATEGY,
            FixedEpochs(2, 12),
            PoissonSampling(N, 2, 0.1),
            "num_parts=2. Found num_bands=3",
        ),
        (identity(N), FixedEpochs(4, 5), SCHEMES[0], "use sampling.participation"),
        (
            identity(N),
            FixedEpochs(4, 6),  # Rounds are at least 4 apart, not multiples of 4.
            MinSeparationSampling(N, 4, 0.1),
            "use sampling.participation",
        ),
        (
            STRATEGY,
            MinSeparation(2),
            MinSeparationSampling(N, 2, 0.1),
            "at most 2 bands, as many as there are rounds between two participations. Found 3",
        ),
        (
            identity(N),
            MinSeparation(1),
            dataclasses.replace(SCHEMES[0], num_rounds=N + 1),
            "num_rounds must be the same in strategy and sampling. Found 24 and 25",
        ),
    ],
)
def test_what_does_not_fit_is_refused(strategy, participation, scheme, words):
    with pytest.raises(ValueError, match=words):
        Release(strategy, participation, scheme)


def test_a_group_without_any_bound_is_given_up_after_one_epsilon():
    asked = []
    assert releases._group_epsilon(lambda delta: asked.append(delta) or 1e6, 3, 1e-6) == math.inf
    assert len(asked) == 1
