"""Certified (epsilon, delta) of random participation: replicas, a bounded integrand, a bet.

The pair. With Q = N(0, I) and P = E_x N(m_x, I), a mixture over finitely many participation
patterns x, let r = dP/dQ = E_x exp(<m_x, y> - |m_x|^2 / 2) and L = log r. Wanted is a proven bound
on

    delta = H_alpha(P || Q) = E_Q (exp(L) - exp(epsilon))_+,    alpha = exp(epsilon) >= 1.

Why this pair stands for training, and why the other direction needs no bound of its own, is
proven at the top of `random_participation.py`.

Replicas. Let `order` be an integer l >= 2, and x_1 .. x_l independent patterns, the replicas. Then

    r^l dQ = E_(x_1 .. x_l) exp(S) N(m_1 + .. + m_l, I),    S = sum_(i < j) <m_i, m_j>,

for <sum m_i, y> - sum |m_i|^2 / 2 = S + (<sum m_i, y> - |sum m_i|^2 / 2). With
h(L) = exp(-(l - 1) L) (1 - exp(epsilon - L))_+ therefore

    delta = E_Q r^l h(L) = E_(x_1 .. x_l) exp(S) E[h(L(y)) | y ~ N(m_1 + .. + m_l, I)].

If replicas are drawn from any law t instead of the product p of their own laws, the *weight*
w = exp(S) p / t corrects for that: delta is the mean of w h(L). It is an integral over outputs
where L is of the size of epsilon, instead of one over outputs that are seen once in 1 / delta runs.

The integrand is bounded. As a function of L, h has its maximum where exp(epsilon - L) = 1 - 1 / l:

    0 <= w h(L) <= M = W exp(-(l - 1) epsilon) (l - 1)^(l - 1) / l^l,    W = max w.

M is itself a bound on delta that needs no samples (`log_delta_bound`). If t is proportional to
exp(S) p, every weight is E_Q r^l, and M is the tight conversion of the Renyi divergence of order l
(Canonne, Kamath, Steinke 2020). That bound is some ten times delta; samples remove the factor.

The bet (`verify`). Values f_1, f_2, .. of w h(L) are independent, in [0, M], of mean delta.
Who holds that delta < d bets on it: with 0 <= c_i < 1 / (M - d), chosen before f_i is seen, the
capital

    V_N = product over i <= N of (1 + c_i (d - f_i))

never gets negative, and its mean given the past does not grow if delta >= d. So (Ville 1939) it
ever reaches 1 / beta with probability at most beta. When it does, one may stop: delta < d is
certified, with a failure probability of beta. (Waudby-Smith and Ramdas 2024 bet in the same way.)
Stakes are chosen for growth on the values seen before, with one value of M added to them, so that
what has not been seen is not taken to be impossible.

What is certified. The failure probability is that of the analyst's coins: beta = 1e-12 unless told.
`verify` shows delta <= stated delta - beta, so that "propose epsilon, verify, release or refuse" is
(epsilon, stated delta)-DP as a whole, coins included. All proposals together use up half of beta;
the other half is for what else may go wrong once in so many runs, such as a batch that exceeds its
padding (`keras/batches.py`). The coins come from a seed in the certificate: whoever doubts it runs
them again. A seed that makes `verify` err must be searched for among 1 / beta of them.

Rounding. Losses are sums of thousands of rounded numbers of moderate size, wrong by 1e-11 at most;
delta is verified with a relative slack of 1e-9. (An error d of L changes h by a factor of e^(l d).)
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.errors import BandMFError

# Probability, over the coins of the analyst, that a certificate is wrong.
FAILURE_PROBABILITY = 1e-12

# In all rounds of a run together, a batch exceeds its padding with at most this probability, which
# is part of delta (`keras/batches.py`). Beside samples, half of the probability above covers it.
OVERFLOW_PROBABILITY = 1e-15

# Samples after which `verify` gives up. What has no bound is tried where far fewer may be enough:
# few of a pilot's samples are then all of an estimate.
MAX_SAMPLES = 10_000_000
_MOST_WITHOUT_BOUND = MAX_SAMPLES // 30

# Everything that is rounded.
_SLACK = 1e-9

# Samples for a proposal, and by how much delta is expected to stay below what is to be verified,
# beside two standard errors of the proposal.
_PILOT = 16_384
_MARGIN = 0.04

# Proposals that may be refused before the bound without samples counts.
_ATTEMPTS = 5

# Stakes are computed from so many values, the last ones.
_REMEMBERED = 65_536

# Calibration looks for noise from that without amplification over the first number on, in these
# steps of its logarithm. Bounds beyond the second one leave no hope of less noise than that.
_LEAST_GAIN = 8.0
_LARGEST_LOSS = 20.0
_FIRST_STEP, _LARGEST_STEP = 0.1, 0.4
_LARGEST_LOG_NOISE = 30.0
_LARGEST_EXCESS = 1e3

# Orders that are tried.
_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


class NotCertifiedError(BandMFError):
    """The samples do not support what was proposed."""


@dataclasses.dataclass
class Moment:
    """What is known of replicas without drawing them.

    Attributes:
        order: Number of replicas, l >= 2.
        log_largest_weight: log W; no weight is larger. Infinite where it is beyond floating point.
    """

    order: int
    log_largest_weight: float


_Replicas = TypeVar("_Replicas", bound=Moment)


class Replicas(Moment, abc.ABC):
    """Draws replicas of one participation pattern and outputs around them; see the file's top.

    Attributes:
        chunk: Samples that are drawn at a time.
    """

    chunk: int

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses L(y) and logarithms of weights of independent draws."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A verified statement: delta at `epsilon` is at most `delta`.

    Attributes:
        epsilon: Epsilon.
        delta: Delta, with `failure_probability` in it.
        failure_probability: Of the samples, over the analyst's coins; 0 without samples.
        order: Number of replicas.
        samples: How many draws were needed; 0 if the bound without samples suffices.
        seed: Of the draws; verifying again with it and `attempt` repeats them.
        attempt: How many proposals had been refused before.
        estimate: Mean of the draws, an estimate of delta without any guarantee.
    """

    epsilon: float
    delta: float
    failure_probability: float
    order: int
    samples: int
    seed: int
    attempt: int
    estimate: float

    @property
    def confidence(self) -> str:
        """Returns in words how sure it is; nothing without samples, which is sure."""
        if self.samples == 0:
            return ""
        return f" (estimated with confidence 1 - {round_up(self.failure_probability, 1):g})"

    def describe(self) -> str:
        """Returns in words how delta was bounded."""
        if self.samples == 0:
            return f"Renyi divergence of order {self.order}, a bound without samples"
        return (
            f"estimated with confidence 1 - {round_up(self.failure_probability, 1):g} from "
            f"{self.samples:,} draws of {self.order} replicas (seed {self.seed})"
        )


def log_delta_bound(replicas: Moment, epsilon: float) -> float:
    """Returns log M: the logarithm of a bound on delta, and on every value of the integrand."""
    return replicas.log_largest_weight + _log_peak(replicas.order) - (replicas.order - 1) * epsilon


def epsilon_bound(replicas: Moment, delta: float) -> float:
    """Returns the epsilon at which `log_delta_bound` allows `delta`: proven, without samples."""
    excess = replicas.log_largest_weight + _log_peak(replicas.order) - math.log(delta)
    if math.isnan(excess):  # Which no comparison would notice.
        return math.inf
    return max(0.0, (excess + _SLACK) / (replicas.order - 1))


def verify(
    replicas: Replicas,
    epsilon: float,
    delta: float,
    *,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: int = 0,
    attempt: int = 0,
    max_samples: int = MAX_SAMPLES,
) -> Certificate:
    """Returns a certificate that delta at `epsilon` is at most `delta`, or raises.

    Args:
        replicas: Of the pair in question.
        epsilon: The proposal, at least 0.
        delta: What is to be certified, failure probability included.
        failure_probability: beta, for this proposal and all others together.
        seed: Seed of all draws. Nothing that was seen of them may have led to the proposal, unless
            it was seen in another attempt.
        attempt: Number of the proposal, from 0 on. It gets draws of its own and the share
            2^-(attempt + 2) of beta.
        max_samples: Where to give up.

    Raises:
        NotCertifiedError: Delta is larger, or too close to `delta` to be sure.
    """
    delta, beta = _checked(delta, failure_probability, seed)
    epsilon = float(epsilon)
    if not epsilon >= 0.0:
        raise BandMFError(f"epsilon must be at least 0. Found {epsilon}.")
    log_bound = log_delta_bound(replicas, epsilon)
    if not math.isfinite(log_bound):
        raise NotCertifiedError(
            f"weights of {replicas.order} replicas are beyond floating point; use a smaller order."
        )
    if log_bound <= math.log(_without_samples(delta, beta)) - _SLACK:
        bound = math.exp(log_bound)
        return Certificate(epsilon, delta, 0.0, replicas.order, 0, seed, attempt, bound)
    enough = (attempt + 2) * math.log(2) - math.log(beta)
    if _is_hopeless(log_bound, delta, enough, max_samples):
        raise NotCertifiedError(
            f"delta={exactly(delta)} at epsilon={round_up(epsilon, 6):g} would take more than "
            f"{max_samples:,} samples of order {replicas.order}; use a larger epsilon or more "
            "noise."
        )
    bettor = _Bettor((delta - beta) * (1 - _SLACK), math.exp(log_bound))
    rng = np.random.default_rng((seed, 1 + attempt))
    while bettor.log_capital < enough:
        if max(bettor.samples, bettor.expected(enough)) >= max_samples:
            raise NotCertifiedError(
                f"delta={exactly(delta)} at epsilon={round_up(epsilon, 6):g} is not supported by "
                f"{bettor.samples:,} samples, which estimate {bettor.mean:.3g}; use a larger "
                "epsilon or more noise."
            )
        losses, log_weights = replicas.sample(rng, replicas.chunk)
        bettor.see(integrand(replicas, losses, log_weights, epsilon))
    return Certificate(
        epsilon, delta, beta, replicas.order, bettor.samples, seed, attempt, bettor.mean
    )


def _is_hopeless(log_bound: float, delta: float, enough: float, max_samples: int) -> bool:
    """Whether so many samples cannot gain enough capital; each gains d / (M - d) at most."""
    return not log_bound - math.log(delta) <= math.log(max_samples / enough)


def integrand(
    replicas: Replicas, losses: np.ndarray, log_weights: np.ndarray, epsilon: float
) -> np.ndarray:
    """Returns w h(L), whose mean is delta at `epsilon`; what is no number counts as the largest."""
    most = math.exp(min(log_delta_bound(replicas, epsilon), 700.0))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.exp(log_weights - (replicas.order - 1) * losses)
        values *= -np.expm1(np.minimum(epsilon - losses, 0.0))
    return np.where(np.isfinite(losses), np.fmin(values, most), most)


def certified_epsilon(
    make: Callable[[int], Replicas | None],
    delta: float,
    *,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: int = 0,
) -> Certificate:
    """Returns a certificate at about the smallest epsilon that `delta` allows.

    A pilot proposes epsilon, fresh draws verify it. A refused proposal is followed by a larger one;
    after the last one there is the bound without samples.

    Args:
        make: From an order to replicas; None where the order is too large to handle.
        delta: Delta, failure probability included.
        failure_probability: Of all proposals together.
        seed: Of all draws.
    """
    delta, beta = _checked(delta, failure_probability, seed)
    rest = _without_samples(delta, beta)
    replicas = best_replicas(make, lambda candidate: epsilon_bound(candidate, rest))
    bound = epsilon_bound(replicas, rest)
    pilot = _Pilot(replicas, seed)
    verified = functools.partial(
        verify, replicas, delta=delta, failure_probability=failure_probability, seed=seed
    )
    margin = _MARGIN
    for attempt in range(_ATTEMPTS):
        proposed = pilot.epsilon((delta - failure_probability) / (1 + margin), bound)
        if proposed >= bound:
            break
        try:
            return verified(proposed, attempt=attempt)
        except NotCertifiedError:
            margin *= 3
    return verified(bound)


def verify_again(replicas: Replicas, certificate: Certificate) -> None:
    """Repeats a certificate from its seed; raises `BandMFError` unless it comes out the same.

    The failure probability is that of this library, whatever the certificate states.
    """
    again = verify(
        replicas,
        certificate.epsilon,
        certificate.delta,
        seed=certificate.seed,
        attempt=certificate.attempt,
    )
    if dataclasses.replace(again, estimate=certificate.estimate) != certificate or not math.isclose(
        again.estimate, certificate.estimate, rel_tol=1e-6
    ):
        raise NotCertifiedError(f"the certificate is {certificate}, and its seed gives {again}.")


def certified_noise_multiplier(
    make: Callable[[float, int], Replicas | None],
    epsilon: float,
    delta: float,
    *,
    start: float,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: int = 0,
) -> tuple[float, Certificate]:
    """Returns about the smallest noise multiplier that `epsilon` allows, and its certificate.

    Args:
        make: From a noise multiplier and an order to replicas; None for orders too large.
        epsilon: Epsilon.
        delta: Delta, failure probability included.
        start: A noise multiplier to start from, such as that without amplification.
        failure_probability: Of all proposals together.
        seed: Of all draws.
    """
    log_noise, best_at = estimated_log_noise(
        make,
        epsilon,
        delta,
        start=start,
        tolerance=2e-4,
        failure_probability=failure_probability,
        seed=seed,
    )
    for attempt in range(2 * _ATTEMPTS):
        noise = math.exp(log_noise)
        try:
            return noise, verify(
                best_at(log_noise),
                epsilon,
                delta,
                failure_probability=failure_probability,
                seed=seed,
                attempt=attempt,
            )
        except NotCertifiedError:
            log_noise += 2e-3 * 2**attempt
    raise NotCertifiedError(
        f"no noise multiplier up to {math.exp(log_noise):.6g} was certified at "
        f"epsilon={exactly(epsilon)} and delta={exactly(delta)}; account for the release without "
        "amplification."
    )


def estimated_log_noise(
    make: Callable[[float, int], Replicas | None],
    epsilon: float,
    delta: float,
    *,
    start: float,
    tolerance: float,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: int = 0,
) -> tuple[float, _BestOrder]:
    """Returns log of the noise at which a pilot's estimate is `delta`, and replicas near it.

    No guarantee. It has the arguments of `certified_noise_multiplier`, and a tolerance.
    """
    epsilon = _checks.positive_float("epsilon", epsilon)
    delta, beta = _checked(delta, failure_probability, seed)

    best_at = _BestOrder(make, epsilon)

    def log_excess(log_noise: float) -> float:
        """How far delta is above where it should be, by an estimate where one can be had."""
        try:
            replicas = best_at(log_noise)
        except NotCertifiedError:  # By far too little noise.
            return _LARGEST_EXCESS
        log_bound = log_delta_bound(replicas, epsilon)
        if _is_hopeless(log_bound, delta, -math.log(beta), most_samples):
            return _LARGEST_EXCESS
        estimate = _Pilot(replicas, seed).delta(epsilon)
        return math.log(max(estimate, 1e-300) * (1 + _MARGIN) / (delta - failure_probability))

    most_samples, most = MAX_SAMPLES, start * _LARGEST_LOSS
    try:  # From below, where orders are small and cheap.
        bound = noise_multiplier_bound(
            make, epsilon, delta, start=start / _LEAST_GAIN, tolerance=0.01, most=most
        )
    except NotCertifiedError:  # Samples may show what so few replicas have no bound for.
        bound, most_samples = start / _LEAST_GAIN, _MOST_WITHOUT_BOUND
    low, high = _bracket(log_excess, math.log(bound), math.log(most))
    return scipy.optimize.brentq(log_excess, low, high, xtol=tolerance), best_at


def noise_multiplier_bound(
    make: Callable[[float, int], Replicas | None],
    epsilon: float,
    delta: float,
    *,
    start: float,
    tolerance: float = 1e-7,
    most: float = math.inf,
) -> float:
    """Returns the noise multiplier at which `log_delta_bound` allows `delta`, without samples.

    It has the arguments of `certified_noise_multiplier`, costs far less, and follows it; it is
    larger than needed by ten times `tolerance` at most, relatively. The search ends beyond `most`.
    """
    best_at = _BestOrder(make, epsilon)

    def log_excess(log_noise: float) -> float:
        try:
            found = best_at(log_noise)
        except NotCertifiedError:  # By far too little noise.
            return _LARGEST_EXCESS
        return min(log_delta_bound(found, epsilon) - math.log(delta) + _SLACK, _LARGEST_EXCESS)

    low, high = _bracket(log_excess, math.log(start), math.log(most))
    root = scipy.optimize.brentq(log_excess, low, high, xtol=tolerance)
    return math.exp(root if log_excess(root) <= 0.0 else min(root + 10 * tolerance, high))


def _bracket(
    decreasing: Callable[[float], float], start: float, most: float = math.inf
) -> tuple[float, float]:
    """Returns a place where the function is positive, and one further on where it is not."""
    low = high = start
    step = _FIRST_STEP
    while decreasing(high) > 0.0:
        if high > min(most, _LARGEST_LOG_NOISE):  # So few replicas never reach so small a delta.
            raise NotCertifiedError(
                f"no noise multiplier up to {math.exp(high):.1g} has a bound; use fewer bands or a "
                "larger delta, or account for the release without amplification."
            )
        low, high = high, high + step
        step = min(2 * step, _LARGEST_STEP)
    while decreasing(low) <= 0.0:
        low, high = low - _FIRST_STEP, low
    return low, high


class _BestOrder:
    """From a noise to the replicas with the smallest bound on delta, near those found before."""

    def __init__(self, make: Callable[[float, int], Replicas | None], epsilon: float):
        self._make, self._epsilon = make, epsilon
        self._order = _ORDERS[0]

    def __call__(self, log_noise: float) -> Replicas:
        found = best_replicas(
            functools.partial(self._make, math.exp(log_noise)),
            lambda candidate: log_delta_bound(candidate, self._epsilon),
            self._order,
        )
        self._order = found.order
        return found


def best_replicas(
    make: Callable[[int], _Replicas | None],
    loss: Callable[[_Replicas], float],
    order: int = _ORDERS[0],
) -> _Replicas:
    """Returns the replicas whose order has the first minimum of `loss`, from `order` up or down.

    A loss that is not a number, by overflow, is none.
    """
    best, lowest, at, fits = None, math.inf, _ORDERS.index(order), False
    for orders in (_ORDERS[at:], _ORDERS[:at][::-1]):
        for candidate in map(make, orders):
            fits = fits or candidate is not None
            if candidate is None or not loss(candidate) < lowest:
                break
            best, lowest = candidate, loss(candidate)
        if best is not None and best.order > order:
            break
    if best is None and fits:
        raise NotCertifiedError(
            "there is so little noise that weights of replicas are beyond floating point; use more."
        )
    if best is None:
        raise NotCertifiedError(
            "two replicas have too many states to account for; use a smaller separation, fewer "
            "bands or fewer rounds."
        )
    return best


def _checked(delta: float, failure_probability: float, seed: int) -> tuple[float, float]:
    """Returns delta and beta, of which the first is above twice the second."""
    delta = _checks.probability("delta", delta)
    beta = _checks.probability("failure_probability", failure_probability)
    if delta <= 2 * beta:
        raise NotCertifiedError(
            f"delta must be above {2 * beta:g}, twice the failure probability of a certificate, or "
            f"be accounted for without samples. Found {exactly(delta)}."
        )
    _checks.int_at_least("seed", seed, 0)
    return delta, beta


def _without_samples(delta: float, beta: float) -> float:
    """Returns what of delta is left where no sample can mislead."""
    return delta - min(beta, OVERFLOW_PROBABILITY)


def _log_peak(order: int) -> float:
    """Returns the logarithm of max over t of t^(l - 1) (1 - t), l = order."""
    return (order - 1) * math.log(order - 1) - order * math.log(order)


class _Pilot:
    """Draws for proposals; nothing here is a guarantee."""

    def __init__(self, replicas: Replicas, seed: int):
        rng = np.random.default_rng((seed, 0))
        chunks = -(-_PILOT // replicas.chunk)
        draws = [replicas.sample(rng, replicas.chunk) for _ in range(chunks)]
        self._replicas = replicas
        self._losses = np.concatenate([losses for losses, _ in draws])
        self._log_weights = np.concatenate([log_weights for _, log_weights in draws])

    def delta(self, epsilon: float) -> float:
        """Returns an estimate of delta and two of its standard errors."""
        values = integrand(self._replicas, self._losses, self._log_weights, epsilon)
        largest = float(values.max()) or 1.0  # Squares of values may be beyond floating point.
        values /= largest
        return largest * float(values.mean() + 2 * values.std() / math.sqrt(values.size))

    def epsilon(self, delta: float, most: float) -> float:
        """Returns where the estimate is `delta`, at most `most`."""
        if self.delta(0.0) <= delta:
            return 0.0
        if self.delta(most) >= delta:
            return most
        return float(scipy.optimize.brentq(lambda e: self.delta(e) - delta, 0.0, most, xtol=1e-6))


class _Bettor:
    """The capital of somebody who bets that the mean of values in [0, most] is below `target`."""

    def __init__(self, target: float, most: float):
        self.log_capital = 0.0
        self.samples = 0
        self._target = target
        self._most = most
        self._seen = np.zeros(0)
        self._stake = self._sum = 0.0

    @property
    def mean(self) -> float:
        return self._sum / max(self.samples, 1)

    def expected(self, log_capital: float) -> float:
        """Returns how many samples the capital will take, by what was seen; 0: too little."""
        if self._seen.size < _REMEMBERED:
            return 0.0
        growth = float(np.mean(np.log1p(self._stake * (self._target - self._seen))))
        return self.samples + (log_capital - self.log_capital) / max(growth, 1e-300)

    def see(self, values: np.ndarray) -> None:
        """Bets on the values with the stake that was fixed before them, then learns from them."""
        self.log_capital += float(np.sum(np.log1p(self._stake * (self._target - values))))
        self.samples += values.size
        self._sum += float(values.sum())
        self._seen = np.concatenate([self._seen, values])[-_REMEMBERED:]
        self._stake = self._best_stake()

    def _best_stake(self) -> float:
        """Returns the stake with the fastest growth on the values seen and one of `most`."""
        gains = self._target - np.append(self._seen, self._most)
        largest = 0.999 / (self._most - self._target)

        def slope(stake: float) -> float:
            return float(np.sum(gains / (1 + stake * gains)))

        if slope(0.0) <= 0.0:
            return 0.0
        return (
            largest if slope(largest) >= 0.0 else float(scipy.optimize.brentq(slope, 0.0, largest))
        )
