from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting.floating_losses import FloatingLosses, floating_grid
from bandmf_tf.accounting.privacy_loss import gaussian_profile

M = 4
UNIT = 0.01


def _random(seed: int, levels: int, density: float = 0.5) -> FloatingLosses:
    """Losses of both signs on a few levels, with gaps, and a few infinite ones."""
    rng = np.random.default_rng(seed)
    made = []
    for k in range(levels):
        level = rng.random(4 * M + 1) * (rng.random(4 * M + 1) < density)
        level[[0, -1]] = 0.0
        if k:
            level[M + 1 : 3 * M] = 0.0
        made.append(level)
    made[0][2 * M] = 0.3
    total = sum(level.sum() for level in made)
    return FloatingLosses(UNIT, [0.99 * level / total for level in made], 0.01)


def _atoms(found: FloatingLosses) -> tuple[np.ndarray, np.ndarray]:
    losses = [UNIT * 2.0**k * (np.arange(4 * M + 1) - 2 * M) for k in range(len(found.levels))]
    return (
        found.origin + np.concatenate(losses) * (found.unit / UNIT),
        np.concatenate(found.levels),
    )


def _profile(losses: np.ndarray, probabilities: np.ndarray, epsilon: float) -> float:
    above = losses > epsilon
    return float(-(probabilities[above] @ np.expm1(epsilon - losses[above])))


@given(first=st.integers(0, 9999), second=st.integers(0, 9999), levels=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_sums_keep_both_probabilities_and_are_not_easier_to_hide(first, second, levels):
    """Every outcome is split so that P and Q keep theirs; the profile only grows by that."""
    a, b = _random(first, levels), _random(second, 3)
    for x, y in ((a, b), (b, a), (a, a)):
        found = x.plus(y)
        losses, probabilities = _atoms(found)
        (x_losses, x_mass), (y_losses, y_mass) = _atoms(x), _atoms(y)
        exact_losses, exact = np.add.outer(x_losses, y_losses).ravel(), np.outer(x_mass, y_mass)
        exact = exact.ravel()
        assert probabilities.sum() == pytest.approx(exact.sum(), rel=1e-12)
        assert probabilities @ np.exp(-losses) == pytest.approx(
            exact @ np.exp(-exact_losses), rel=1e-12
        )
        assert found.infinity >= 1 - (1 - x.infinity) * (1 - y.infinity)
        for epsilon in (0.0, 0.013, 0.1, 0.4, 1.0):
            found_profile = _profile(losses, probabilities, epsilon)
            assert found_profile >= _profile(exact_losses, exact, epsilon) * (1 - 1e-12)


def test_losses_are_at_the_level_of_their_size():
    found = _random(1, 4).plus(_random(2, 2))
    for level in found.levels[1:]:
        assert not level[M + 1 : 3 * M].any()  # These have finer cells.
        assert not level[[0, -1]].any()


@given(seed=st.integers(0, 9999), k=st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_powers_keep_probabilities_but_for_what_becomes_infinite(seed, k):
    one = _random(seed, 3)
    found = one.composed(k, 1e-3)
    losses, probabilities = _atoms(found)
    finite = 1 - one.infinity
    assert probabilities.sum() <= finite**k * (1 + 1e-12)
    assert probabilities.sum() + found.infinity >= 1.0 - 1e-12
    assert found.infinity <= k * one.infinity + 1e-9
    # The exponential moment at -1, which is Q's probability, is that of k independent losses.
    moment = np.dot(_atoms(one)[1], np.exp(-_atoms(one)[0]))
    assert probabilities @ np.exp(-losses) == pytest.approx(moment**k, rel=1e-6)


def test_coarser_cells_keep_both_probabilities():
    one = _random(3, 3)
    (fine, p), (coarse, p_coarse) = _atoms(one), _atoms(one.coarsened())
    assert p_coarse.sum() == pytest.approx(p.sum(), rel=1e-13)
    assert p_coarse @ np.exp(-coarse) == pytest.approx(p @ np.exp(-fine), rel=1e-13)


@given(seed=st.integers(0, 9999), delta=st.floats(0.011, 0.5))
@settings(deadline=None, max_examples=60)
def test_epsilon_is_where_the_profile_is_delta(seed, delta):
    one = _random(seed, 4)
    epsilon, (losses, probabilities) = one.epsilon(delta), _atoms(one)
    at = one.infinity + _profile(losses, probabilities, epsilon)
    assert at <= delta * (1 + 1e-12)
    if epsilon > 0.0:
        assert one.infinity + _profile(losses, probabilities, epsilon - 1e-9) > delta
    assert one.epsilon(0.01) == math.inf


def test_a_grid_has_few_digits_and_reaches_beyond():
    grid = floating_grid(0.5, 4, 21.0)
    assert grid.tolist() == [0.5 * i for i in range(8)] + [
        4,
        5,
        6,
        7,
        8,
        10,
        12,
        14,
        16,
        20,
        24,
        28,
    ]


def test_a_profile_comes_back_from_its_losses():
    """Of a mechanism with two outcomes, on the grid: the losses are these two."""
    loss = 12 * UNIT
    p = 1 / (1 + math.exp(-loss))
    grid = floating_grid(UNIT, M, 1.0)
    profile = np.maximum(p - np.exp(grid) * (1 - p), 0.0)
    found = FloatingLosses.from_profiles(UNIT, M, grid, profile, profile)
    losses, probabilities = _atoms(found)
    kept = probabilities > 1e-12
    assert sorted(losses[kept]) == pytest.approx([-loss, loss])
    assert sorted(probabilities[kept]) == pytest.approx([1 - p, p])


def test_probabilities_that_are_left_out_become_infinite():
    one = _random(4, 3)
    found = one.without(0.02)
    assert 0.0 < _atoms(found)[1].sum() < _atoms(one)[1].sum()
    assert _atoms(found)[1].sum() + found.infinity == pytest.approx(1.0, rel=1e-13)


def test_sums_that_are_never_small_get_wider_cells_and_stay_right():
    level = np.zeros(4 * M + 1)
    level[[-2, -4]] = 0.4, 0.6  # 7 and 5 cells.
    one = FloatingLosses(UNIT, [np.zeros(4 * M + 1), level], 0.0)
    found = one.composed(7, 1e-3)
    assert found.unit > one.unit
    losses, probabilities = _atoms(found)
    moment = 0.4 * math.exp(-14 * UNIT) + 0.6 * math.exp(-10 * UNIT)
    assert probabilities @ np.exp(-losses) == pytest.approx(moment**7, rel=1e-9)
    assert losses[probabilities > 0].max() >= 7 * 14 * UNIT


@given(
    seed=st.integers(0, 9999),
    levels=st.integers(1, 4),
    origin=st.floats(-3.0, 3.0),
    shift=st.floats(-9.0, 9.0),
)
@settings(deadline=None, max_examples=60)
def test_losses_counted_from_their_mean_are_no_smaller(seed, levels, origin, shift):
    """Both probabilities are kept, and the profile only grows, wherever losses are counted from."""
    one = dataclasses.replace(_random(seed, levels), origin=origin)
    cells = np.clip(round(shift / UNIT / 2**levels), 1 - 2 * M, 2 * M - 1)
    far = np.zeros(4 * M + 1)
    far[2 * M + cells] = 1.0
    nothing = np.zeros(4 * M + 1)
    moved = one.plus(FloatingLosses(UNIT, [*[nothing] * levels, far], 0.0))
    found = moved.recentred()
    (losses, mass), (before, mass_before) = _atoms(found), _atoms(moved)
    assert mass.sum() == pytest.approx(mass_before.sum(), rel=1e-12)
    assert mass @ np.exp(-losses) == pytest.approx(mass_before @ np.exp(-before), rel=1e-12)
    for epsilon in np.linspace(0.0, float(before.max()) + 0.1, 7):
        assert _profile(losses, mass, epsilon) >= _profile(before, mass_before, epsilon) - 1e-15
    spread = math.sqrt(mass @ (losses - mass @ losses / mass.sum()) ** 2 / mass.sum())
    assert abs(mass @ (losses - found.origin)) / mass.sum() <= max(
        4 * spread, 2 * M * found.unit
    ) * (1 + 1e-9)


def test_many_losses_far_from_zero_keep_the_digits_of_their_deviation():
    """64 losses of 4 or 6 with two binary digits: counted from zero, they would be 12 % off."""
    level = np.zeros(4 * M + 1)
    level[[2 * M + 4, 2 * M + 6]] = 0.5
    one = FloatingLosses(1.0, [level], 0.0)
    found = one.composed(64, 1e-3)
    exact = [(4 * 64 + 2 * j, math.comb(64, j) / 2.0**64) for j in range(65)]
    losses, probabilities = np.array(exact).T
    delta = 1e-3
    wanted = next(
        e for e in np.arange(256, 385, 0.01) if _profile(losses, probabilities, e) < delta
    )
    assert wanted - 0.01 <= found.epsilon(delta) <= wanted * 1.001


def test_probabilities_of_a_profile_add_up_to_one_with_what_lies_beyond_the_grid():
    grid = floating_grid(0.05, M, 1.0)  # A Gaussian of mu = 1 has a sixth of its losses beyond.
    forward = gaussian_profile(1.0, grid)
    found = FloatingLosses.from_profiles(0.05, M, grid, forward, forward)
    assert found.infinity == forward[-1] > 0.01
    total = math.fsum(float(level.sum()) for level in found.levels) + found.infinity
    assert total == pytest.approx(1.0, rel=1e-12)
