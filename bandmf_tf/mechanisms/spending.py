"""Epsilon spent so far: what the first t of n planned rounds have released.

The number is that of `Release.first(t)` at the mechanism's noise, for a run whose length was fixed
in advance. A run that stops because of what it has released so far has the epsilon of all rounds.
Where epsilon takes samples, the first rounds have a bound without them, and all rounds together
have the mechanism's certificate, verified.
"""

from __future__ import annotations

import weakref

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.mechanisms.mechanism import Mechanism

_POINTS = 32

# What is known of a mechanism, as long as it lives: several runs with it compute nothing twice.
_KNOWN: weakref.WeakKeyDictionary[Mechanism, dict[int, float]] = weakref.WeakKeyDictionary()


def epsilon_after(mechanism: Mechanism, rounds_completed: int) -> float:
    """Returns epsilon, at the mechanism's delta, of the first `rounds_completed` rounds."""
    t = _checks.int_at_least("rounds_completed", rounds_completed, 0)
    if t > mechanism.num_rounds:
        raise BandMFError(
            f"rounds_completed must be at most num_rounds={mechanism.num_rounds}. Found {t}."
        )
    if t == 0:
        return 0.0
    if t == mechanism.num_rounds and mechanism.guarantee.certificate is not None:
        mechanism.require_verified()
        return mechanism.epsilon
    release = mechanism.release.first(t)  # A file may state any epsilon of a sampled mechanism.
    return release.bounded(
        mechanism.noise_multiplier, mechanism.delta, discretization=mechanism.discretization
    ).epsilon


class EpsilonSpent:
    """`epsilon_after` for every round of a run, computed at a few of them.

    Between those it returns the value at the next one, which is never too small: more rounds never
    cost less. An evaluation can take a second, and a progress bar asks for every round.
    """

    def __init__(self, mechanism: Mechanism, points: int = _POINTS):
        self._mechanism = mechanism
        self._stride = ceil_div(mechanism.num_rounds, _checks.positive_int("points", points))
        self._known = _KNOWN.setdefault(mechanism, {})

    def __call__(self, rounds_completed: int) -> float:
        """Returns an upper bound on `epsilon_after(mechanism, rounds_completed)`."""
        n = self._mechanism.num_rounds
        t = min(ceil_div(rounds_completed, self._stride) * self._stride, n)
        if t not in self._known:
            self._known[t] = epsilon_after(self._mechanism, t)
        return self._known[t]
