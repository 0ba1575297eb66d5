"""A participation bounds what its sampling can do, and comes back from JSON."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.factorization import sensitivity, strategies
from bandmf_tf.factorization.participation import (
    FixedEpochs,
    MinSeparation,
    SingleParticipation,
    participation_from_json,
)
from cases import random_banded

N = 12


def _patterns(sampling) -> set[tuple[int, ...]]:
    """Every set of steps in which the scheme can draw one example, by brute force."""
    patterns = set()
    for part in range(min(sampling.num_parts, sampling.num_rounds)):
        steps = range(part, sampling.num_rounds, sampling.num_parts)
        if isinstance(sampling, Shuffling):
            batches = sampling.part_size // sampling.batch_size
            passes = [steps[i : i + batches] for i in range(0, len(steps), batches)]
            choices = itertools.product(*[[(), *((s,) for s in p)] for p in passes])
            patterns |= {tuple(itertools.chain(*choice)) for choice in choices}
        else:
            for size in range(len(steps) + 1):
                patterns |= set(itertools.combinations(steps, size))
    return patterns


SCHEMES = [
    PoissonSampling(N, 4, 0.5),
    PoissonSampling(N, 5, 0.5),
    FixedSizeSampling(N, 3, 2, 30),
    Shuffling(N, 3, 2, 12, True),  # Two batches a pass: two participations in four rounds.
    Shuffling(N, 3, 1, 30, False),  # A pass is longer than training: one participation.
    Shuffling(N, 5, 1, 10, True),
]
PARTICIPATIONS = [
    SingleParticipation(),
    *(FixedEpochs(b, k) for b in range(1, 7) for k in range(1, 6)),
    *(MinSeparation(b, k) for b in range(1, 7) for k in (1, 2, 3, 4, None)),
]


@pytest.mark.parametrize("sampling", SCHEMES, ids=str)
def test_a_participation_that_allows_a_sampling_bounds_all_its_patterns(sampling):
    patterns = _patterns(sampling)
    assert max(map(len, patterns)) == sampling.max_participations
    allowing = [p for p in PARTICIPATIONS if p.allows(sampling)]
    assert sampling.participation in allowing
    for seed in range(5):
        C = random_banded(3, N, seed)
        X = np.abs(C.gram())
        worst = math.sqrt(max(X[np.ix_(p, p)].sum() for p in patterns))
        for participation in allowing:
            assert participation.sensitivity(C).value >= worst * (1 - 1e-12)


@pytest.mark.parametrize("sampling", SCHEMES, ids=str)
def test_a_participation_that_is_too_narrow_does_not_allow_a_sampling(sampling):
    """Column norms that grow in one part tell a pattern from those a narrower schema knows."""
    allowed_everywhere = set(PARTICIPATIONS)
    for pattern in _patterns(sampling):
        C = strategies.BandedStrategy(np.where(np.isin(np.arange(N), pattern), 1.0, 1e-3)[None])
        for participation in PARTICIPATIONS:
            if participation.sensitivity(C).value < math.sqrt(len(pattern)) * (1 - 1e-5):
                allowed_everywhere.discard(participation)
    for participation in set(PARTICIPATIONS) - allowed_everywhere:
        assert not participation.allows(sampling)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("often", 1, 1), ValueError),
        (("single", 3, 1), ValueError),
        (("single", None, 2), ValueError),
        (("fixed_epochs", 3, None), TypeError),
        (("fixed_epochs", None, 3), TypeError),
        (("fixed_epochs", 0, 3), ValueError),
        (("min_separation", None, 3), TypeError),
        (("min_separation", 3, 0), ValueError),
        (("min_separation", 2.5, 1), TypeError),
    ],
)
def test_malformed_participations_are_refused(arguments, error):
    names = ("schema", "min_separation", "max_participations")
    with pytest.raises(error):
        participation_from_json(dict(zip(names, arguments, strict=True)))


def test_each_schema_uses_its_own_sensitivity():
    C = random_banded(3, N, 2)
    assert SingleParticipation().sensitivity(C) == sensitivity.single_participation(C)
    assert FixedEpochs(2, 4).sensitivity(C) == sensitivity.fixed_epochs(C, 2, 4)
    for k in (2, None):
        expected = sensitivity.min_separation_participation(C, 2, k)
        assert MinSeparation(2, k).sensitivity(C) == expected


def test_descriptions_name_the_convention_of_separation():
    assert "at most one round" in SingleParticipation().describe()
    for participation in (FixedEpochs(7, 4), MinSeparation(7, 4)):
        assert "at most 4 times" in participation.describe()
        assert "7 apart (min-separation b = r2 - r1" in participation.describe()
    assert "times" not in MinSeparation(7).describe()


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
def test_participations_come_back_from_json(participation):
    written = json.dumps(participation.to_json())
    assert participation_from_json(json.loads(written)) == participation


def test_json_is_that_of_version_0_1():
    keys = ("schema", "min_separation", "max_participations")
    expected = {
        SingleParticipation(): ("single", None, 1),
        FixedEpochs(np.int64(4), 3): ("fixed_epochs", 4, 3),
        MinSeparation(4): ("min_separation", 4, None),
    }
    for participation, values in expected.items():
        assert json.dumps(participation.to_json()) == json.dumps(
            dict(zip(keys, values, strict=True))
        )


@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=str)
def test_most_is_the_length_of_the_longest_pattern(participation):
    b, k = participation.min_separation, participation.max_participations
    for n in range(1, N + 1):
        longest = range(0, n, b)[:k] if b else range(1)
        assert participation.most(n) == len(longest)
        assert participation.separation(n) == (b or n)
