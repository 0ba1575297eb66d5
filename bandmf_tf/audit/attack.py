"""The strongest attack on a mechanism: everybody's data but one canary's known, all that is seen.

A mechanism releases `R = sums + C^-1 z`, a row a round. Who knows all contributions but those of
one unit computes `Y = C (R - sums of the others) / stddev`, which is, if the claim holds,

    Y = C x u^T clip / stddev + independent standard Gaussians

for a canary that contributes along the direction u in the rounds of the pattern x (entries ±1),
and the Gaussians alone without it. The likelihood ratio of the two is a function of the score
`<v, Y u> / |v|` with `v = C x clip / stddev`: Gaussian of variance 1 and mean `|v|` or 0. With the
worst pattern `|v|` is the mechanism's mu, so the attack is as strong as the claim allows, and an
honest lower bound comes close to the claim.

A canary along one coordinate leaves all others alone. So one run of a model with d coordinates is
d independent trials of the whole mechanism, half of them with a canary.

Where the noise is found not to be what was claimed, the attack adapts: it takes the covariance S
of rows from half of the trials without canaries and scores the rest along Fisher's direction
`S^-1 v`, which finds what noise too small, repeated or missing gives away.

`tests` of one path: size, directions and means of the noise tensor by tensor, shifts, the signal,
and the bound. See `statistics.py` for each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import round_up
from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.audit import statistics
from bandmf_tf.audit.statistics import all_of
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import FixedEpochs, Participation
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.runs import audit_errors
from bandmf_tf.runs.audit_errors import LEAST_P_VALUE, Errors
from bandmf_tf.runs.audit_record import Comparison

# A claim is violated if what was found has at most this probability under it, all tests together.
SIGNIFICANCE = 1e-6

# Rounds of an audit, at most: C is written down, and all pairs of rounds are compared.
MOST_ROUNDS = 2500

# Canaries whose exposure is at least this fraction of the largest are attacked.
EXPOSED = 0.97

# Participations that are moved one by one in search of the worst pattern, at most.
_MOST_MOVED = 64

# The shift test works on a copy in frequencies: so many values at most.
_MOST_SHIFTED = 1 << 24


class AuditError(BandMFError):
    """The audit could not be done, or not as it was asked for."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What is attacked: a mechanism, or its first rounds.

    Attributes:
      mechanism: The mechanism, all of it: its real noise is drawn.
      rounds: How many of its rounds are done.
    """

    mechanism: Mechanism
    rounds: int

    def __post_init__(self) -> None:
        _checks.positive_int("rounds", self.rounds)
        if self.rounds > self.mechanism.num_rounds:
            raise AuditError(
                f"rounds must be at most the mechanism's num_rounds={self.mechanism.num_rounds}. "
                f"Found {self.rounds}."
            )
        if self.rounds > MOST_ROUNDS:
            raise AuditError(
                f"An audit is of at most {MOST_ROUNDS} rounds; attack the first ones, by rounds. "
                f"Found {self.rounds}."
            )

    @functools.cached_property
    def strategy(self) -> Strategy:
        """C of these rounds."""
        if self.rounds == self.mechanism.num_rounds:
            return self.mechanism.strategy
        return self.mechanism.strategy.leading_block(self.rounds)

    @functools.cached_property
    def claimed_mu(self) -> float:
        """The claim: these rounds are mu-GDP for all that the participation allows."""
        if self.rounds == self.mechanism.num_rounds:
            sensitivity = self.mechanism.sensitivity
        else:
            sensitivity = self.mechanism.release.first(self.rounds).sensitivity
        return sensitivity.value / self.mechanism.noise_multiplier

    def claimed_epsilon(self, delta: float) -> float:
        """The other claim: epsilon at `delta`, amplified if the mechanism assumes sampling."""
        release = self.mechanism.release
        if self.rounds < self.mechanism.num_rounds:
            release = release.first(self.rounds)
        return release.guarantee(self.mechanism.noise_multiplier, delta).epsilon

    @functools.cached_property
    def pattern(self) -> np.ndarray:
        """The worst pattern that was found, entries 0 and ±1; it owes nothing to the claim."""
        return worst_pattern(self.strategy, self.mechanism.participation)

    @property
    def clip(self) -> float:
        """Clip norm of a contribution."""
        return self.mechanism.l2_norm_clip

    def signals(self, patterns: np.ndarray) -> np.ndarray:
        """Returns v of canaries that take part in these ways, `[rounds, canaries]`."""
        scale = self.clip / self.mechanism.stddev
        return self.strategy.matmul(patterns.astype(np.float64)) * scale

    def whitened(self, rows: np.ndarray, first: int = 0) -> np.ndarray:
        """Returns `C rows / stddev` from row `first` on; `rows` may end before the last round."""
        strategy = self.strategy
        if len(rows) < self.rounds:
            strategy = strategy.leading_block(len(rows))
        return strategy.matmul(rows.astype(np.float64))[first:] / self.mechanism.stddev


@dataclasses.dataclass(frozen=True)
class Undone:
    """Rounds that were released and then, after a return to an older state, done again.

    Attributes:
      first: The first of them.
      released: Their rows, `[rounds, coordinates]`.
      sums: What the sums should have been.
    """

    first: int
    released: np.ndarray
    sums: np.ndarray


@dataclasses.dataclass(frozen=True)
class Observation:
    """One run of a path: what came out, and what had been put in.

    Attributes:
      released: All rows, `[rounds, coordinates]`.
      sums: The sums that belong into them: of the contributions of canaries that were in, each
        clipped, `[rounds, coordinates]`.
      patterns: In which rounds each canary takes part, `[rounds, canaries]`, entries 0 and ±1; less
        than 1 where a part of its contribution is along a coordinate that it shares with others.
      directions: The coordinate of each canary, `[canaries]`.
      included: Whether it was in, `[canaries]`.
      tensors: Names and coordinates of the tensors that rows consist of.
      undone: Rounds that were done twice.
      parts: The part of the data set that each canary is in; None without sampling from parts.
    """

    released: np.ndarray
    sums: np.ndarray
    patterns: np.ndarray
    directions: np.ndarray
    included: np.ndarray
    tensors: Mapping[str, slice]
    undone: Sequence[Undone] = ()
    parts: np.ndarray | None = None

    def noise(self, target: Target) -> np.ndarray:
        """Returns what should be independent standard Gaussians, `[rounds, coordinates]`."""
        rows = [target.whitened(self.released - self.sums)]
        for again in self.undone:
            first, kept = again.first, self.released[: again.first] - self.sums[: again.first]
            rows.append(target.whitened(np.r_[kept, again.released - again.sums], first))
        return np.concatenate(rows)


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Canaries along the worst pattern, one for each coordinate, half of them in.

    Attributes:
      target: What they attack.
      included: Whether the canary of a coordinate is in, `[coordinates]`.
      tensors: Names and coordinates of the tensors that rows consist of.
    """

    target: Target
    included: np.ndarray
    tensors: Mapping[str, slice]

    @classmethod
    def draw(cls, target: Target, coordinates: int, rng: np.random.Generator) -> Canaries:
        """Draws who is in; rows are a large tensor and a small one."""
        small = max(1, coordinates // 32)
        large = coordinates - small
        tensors = {"kernel": slice(0, large), "bias": slice(large, coordinates)}
        included = rng.permutation(coordinates) < coordinates // 2
        return cls(target, included, tensors)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the tensors."""
        return [part.stop - part.start for part in self.tensors.values()]

    def sums(self, rounds: slice = slice(None)) -> np.ndarray:
        """Returns the sum of every round if each contribution is clipped, `[rounds, ..]`."""
        return np.outer(self.target.pattern[rounds], self.target.clip * self.included)

    def observed(self, released: np.ndarray, undone: Sequence[Undone] = ()) -> Observation:
        """Returns the observation of a path that these canaries went through."""
        pattern = self.target.pattern[:, None]
        shape = (self.target.rounds, len(self.included))
        return Observation(
            released=released,
            sums=self.sums(),
            patterns=np.broadcast_to(pattern, shape),
            directions=np.arange(len(self.included)),
            included=self.included,
            tensors=self.tensors,
            undone=undone,
        )


@dataclasses.dataclass(frozen=True)
class Attack:
    """What an attack found.

    Attributes:
      tests: Comparisons with the claim.
      errors: Of calling "with" the canary above the threshold.
      with_canary: Scores of the trials that were counted.
      without: Likewise.
      threshold: What they were compared with; chosen without them.
    """

    tests: tuple[Comparison, ...]
    errors: Errors
    with_canary: np.ndarray
    without: np.ndarray
    threshold: float

    def mu_lower(self, confidence: float) -> float:
        """Returns the lower confidence bound on mu."""
        return audit_errors.mu_lower_bound(self.errors, confidence)


def attack(target: Target, observations: Sequence[Observation]) -> Attack:
    """Attacks independent runs of one path, and compares what they released with the claim."""
    noises = [observation.noise(target) for observation in observations]
    if not all(np.all(np.isfinite(noise)) for noise in noises):
        test = Comparison("numbers", LEAST_P_VALUE, "values that are not finite were released")
        nothing = np.zeros(0)
        return Attack((test,), Errors(0, 0, 0, 0), nothing, nothing, 0.0)
    tests = _noise_tests(noises, observations[0].tensors)
    is_as_claimed = all_of([test.p_value for test in tests]) > SIGNIFICANCE
    tests += _signal_tests(target, observations, noises)
    score = _scores if is_as_claimed else _adapted_scores
    parts = [score(target, *pair) for pair in zip(observations, noises, strict=True)]
    with_canary = np.concatenate([part[0] for part in parts])
    without = np.concatenate([part[1] for part in parts])
    threshold = float(np.mean([part[2] for part in parts]))
    errors = Errors.at(threshold, with_canary, without)
    mu = target.claimed_mu
    tests.append(Comparison("bound", audit_errors.mu_p_value(errors, mu), errors.describe()))
    return Attack(tuple(tests), errors, with_canary, without, threshold)


def _noise_tests(noises: Sequence[np.ndarray], tensors: Mapping[str, slice]) -> list[Comparison]:
    """Returns the tests of noise; rows of all runs together, so that runs that share any show."""
    rows = np.concatenate(noises)
    tests = []
    for name, part in tensors.items():
        values = rows[:, part]
        found = f"variance {np.square(values).mean():.5g} for 1"
        tests.append(Comparison(f"size of {name}", statistics.size_p_value(values), found))
        tests.append(Comparison(f"directions of {name}", *statistics.direction_p_value(values)))
        tests.append(Comparison(f"means of {name}", statistics.mean_p_value(values)))
    shifted = rows[:, : max(1, _MOST_SHIFTED // len(rows))]
    return [*tests, Comparison("shifts", statistics.shift_p_value(shifted))]


def _signal_tests(
    target: Target, observations: Sequence[Observation], noises: Sequence[np.ndarray]
) -> list[Comparison]:
    """Returns, for each tensor, whether its canaries move the release by no more than is claimed.

    Contributions that were not clipped, or counted twice, do.
    """
    scores, places = [], []
    for observation, noise in zip(observations, noises, strict=True):
        scores.append(_scores(target, observation, noise)[0])
        chosen = _exposed(target, observation)[1]
        places.append(observation.directions[chosen[observation.included[chosen]]])
    found, where = np.concatenate(scores), np.concatenate(places)
    tests = []
    for name, part in observations[0].tensors.items():
        there = found[(where >= part.start) & (where < part.stop)]
        if there.size:
            words = f"mean {there.mean():.5g}, at most {round_up(target.claimed_mu, 5):g}"
            p_value = statistics.at_most_p_value(there, target.claimed_mu)
            tests.append(Comparison(f"signal in {name}", p_value, words))
    return tests


def _exposed(target: Target, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
    """Returns v of the canaries that are exposed the most, `[rounds, canaries]`, and which."""
    signals = target.signals(observation.patterns)
    exposure = np.linalg.norm(signals, axis=0)
    chosen = np.flatnonzero(exposure >= max(EXPOSED * exposure.max(), 1e-12))
    return signals[:, chosen], chosen


def _seen(
    observation: Observation, noise: np.ndarray, signals: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """Returns Y of each canary, whose own contribution nobody has subtracted."""
    rows = noise[: len(signals), observation.directions[chosen]]
    return rows + signals * observation.included[chosen]


def _scores(
    target: Target, observation: Observation, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns scores with and without the canary by the likelihood ratio, and a threshold."""
    signals, chosen = _exposed(target, observation)
    seen = _seen(observation, noise, signals, chosen)
    exposure = np.linalg.norm(signals, axis=0)
    scores = np.sum(signals * seen, axis=0) / exposure
    included = observation.included[chosen]
    return scores[included], scores[~included], float(np.median(exposure)) / 2


def _adapted_scores(
    target: Target, observation: Observation, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns scores along Fisher's direction, for noise that is not the claimed one."""
    signals, chosen = _exposed(target, observation)
    seen = _seen(observation, noise, signals, chosen)
    without = np.flatnonzero(~observation.included[chosen])
    learned, rest = without[::2], without[1::2]
    covariance = seen[:, learned] @ seen[:, learned].T / max(len(learned), 1)
    # What is singular may be noise that is missing: a little is added for the inverse to exist.
    covariance += 1e-6 * np.eye(len(covariance))
    directions = np.linalg.solve(covariance, signals)
    exposure = np.sqrt(np.sum(directions * signals, axis=0))
    scores = np.sum(directions * seen, axis=0) / exposure
    with_canary = scores[observation.included[chosen]]
    return with_canary, scores[rest], float(np.median(exposure)) / 2


def sampled_attack(
    target: Target,
    scheme: PoissonSampling,
    observations: Sequence[Observation],
    delta: float,
) -> Attack:
    """Attacks what is amplified: the adversary knows a canary's part, but not when it is drawn.

    In each visit of its part the canary is drawn with probability q, so the likelihood ratio of a
    visit in round i is `1 - q + q exp(<v, Y> - |v|^2 / 2)` with `v = C e_i clip / stddev`. With at
    most as many bands as parts the visits touch different rows and the ratios multiply; the score
    is the logarithm. Half of the trials choose the threshold, the other half is counted.
    """
    scale, q = target.clip / target.mechanism.stddev, scheme.sampling_probability
    with_canary, without = [], []
    for observation in observations:
        assert observation.parts is not None
        noise = observation.noise(target)[: target.rounds, observation.directions]
        seen = noise + target.signals(observation.patterns) * observation.included
        scores = np.zeros(seen.shape[1])
        for part in range(scheme.num_parts):
            visits = np.zeros((target.rounds, len(range(part, target.rounds, scheme.num_parts))))
            visits[range(part, target.rounds, scheme.num_parts), range(visits.shape[1])] = scale
            v = target.strategy.matmul(visits)
            there = observation.parts == part
            exponents = v.T @ seen[:, there] - np.sum(v * v, axis=0)[:, None] / 2
            missed = math.log1p(-q) if q < 1 else -math.inf
            scores[there] = np.sum(np.logaddexp(missed, math.log(q) + exponents), axis=0)
        with_canary.append(scores[observation.included])
        without.append(scores[~observation.included])
    having, lacking = np.concatenate(with_canary), np.concatenate(without)
    threshold = statistics.best_threshold(having[::2], lacking[::2], delta, 0.95)
    errors = Errors.at(threshold, having[1::2], lacking[1::2])
    claim = target.claimed_epsilon(delta)
    test = Comparison(
        "amplified bound", audit_errors.epsilon_p_value(errors, claim, delta), errors.describe()
    )
    return Attack((test,), errors, having[1::2], lacking[1::2], threshold)


def worst_pattern(strategy: Strategy, participation: Participation) -> np.ndarray:
    """Returns the pattern x, entries 0 and ±1, with the largest `|C x|` that was found.

    Evenly spaced patterns from every start, or, where participations need not be evenly spaced,
    those as starting points for moving one participation at a time. It is a pattern that the
    participation allows, so `|C x|` never exceeds the sensitivity; it is the sensitivity for all
    strategies whose worst pattern is known.
    """
    n = strategy.num_rounds
    b, k = participation.separation(n), participation.most(n)
    X = strategy.gram()
    starts = [tuple(range(start, n, b)[:k]) for start in range(n)]
    best = max(starts, key=lambda rounds: _signed(X, rounds)[0])
    if not isinstance(participation, FixedEpochs) and k <= _MOST_MOVED:
        best = _improved(X, best, b)
    pattern = np.zeros(n)
    pattern[list(best)] = _signed(X, best)[1]
    return pattern


def _improved(X: np.ndarray, rounds: tuple[int, ...], b: int) -> tuple[int, ...]:
    """Moves one participation after the other where that increases `|C x|`."""
    value = _signed(X, rounds)[0]
    for _, place in itertools.product(range(4), range(len(rounds))):
        before = rounds[place - 1] + b if place else 0
        after = rounds[place + 1] - b if place + 1 < len(rounds) else len(X) - 1
        for moved in range(before, after + 1):
            other = (*rounds[:place], moved, *rounds[place + 1 :])
            if (found := _signed(X, other)[0]) > value:
                rounds, value = other, found
    return rounds


def _signed(X: np.ndarray, rounds: Sequence[int]) -> tuple[float, np.ndarray]:
    """Returns `|C x|^2` and the signs of x, chosen one after the other."""
    block = X[np.ix_(rounds, rounds)]
    signs = np.ones(len(rounds))
    for j in range(1, len(rounds)):
        signs[j] = -1.0 if signs[:j] @ block[:j, j] < 0 else 1.0
    return float(signs @ block @ signs), signs
