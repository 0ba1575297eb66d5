"""Random participation, accounted for with the strategy itself.

Every example draws, independently of all others and in secret, a pattern x of the rounds it takes
part in: x_t is 0 or 1. The schemes here differ in the law of x:

    BallsInBins             one of b bins; rounds i, i + b, i + 2 b, ..      any strategy
    SecretParts             a part as above; each of its rounds with         at most b bands
                            probability q
    MinSeparationSampling   a round with probability p, unless the example   at most b bands
                            took part in one of the b - 1 rounds before
    OncePerEpoch            one round of every epoch, at least b rounds      at most b bands
                            after the one before

`amplification.py` reduces a banded strategy to a composition of sums over samples of a part that
everybody knows. Here the part, or whatever else decides about x, is secret too, and one mixture
of Gaussians stands for the whole run. Below, norms are in units of the clip norm and noise has
variance 1 (divide C by the noise multiplier).

Theorem 1 (the pair). Let C be lower triangular, and m_x = |C| x with |C| the absolute values of its
entries. For zero-out neighbours, adaptive training and any dimension, the output with the example
and the output without it are no more distinguishable than P = E_x N(m_x, I) and Q = N(0, I), in
both directions and at every alpha. Moreover P and Q become no less distinguishable if C gets
larger.

Proof. Fix all coins but those of z and x (a common mixture only lowers divergences), and subtract
what the other examples contribute, which is known given the rows released before. What remains of
row t of C X + Z is mu_(x,t) + z_t with

    mu_(x,t) = sum_(s <= t) C_ts x_s g_s,

where g_s, of norm at most 1, is the clipped gradient of the example and depends on rows before s
only. (The released x + C^-1 z is a function of these rows.) Without the example, rows are z_t. With
p_x the law of x, the ratio of densities is

    R = sum_x p_x M_x,    M_x = product over t of exp(<mu_(x,t), z_t> - |mu_(x,t)|^2 / 2),

and both divergences are means E phi(R) over z, with phi(R) = (R - alpha)_+ or (1 - alpha R)_+,
which are convex. Let phi be smooth and convex, of linear growth; limits give the two. Write z_t as
the end of a Brownian motion B of length 1, so that within round t the weights w_x = p_x M_x move by
dw_x = w_x <mu_(x,t), dB>. Compare with the scalar, fixed shifts m_(x,t) = (|C| x)_t: let U(time, w)
be E phi(sum_x w_x exp(what is left of the exponent of x)) for those. Then

    U_time + 1/2 sum_(x,x') m_(x,t) m_(x',t) w_x w_x' U_(x,x') = 0,

and all second derivatives U_(x,x') are >= 0, as means of phi'' times positive numbers. Ito's
formula for U along the weights of training leaves a drift of

    1/2 sum_(x,x') (<mu_(x,t), mu_(x',t)> - m_(x,t) m_(x',t)) w_x w_x' U_(x,x') <= 0,

for <mu_(x,t), mu_(x',t)> <= sum_(s,s') |C_ts| |C_ts'| x_s x'_s' = m_(x,t) m_(x',t). So E phi(R),
which is the mean of U at the end, is at most U at the start, which is E phi of P and Q. A larger
matrix in place of |C| only makes that drift smaller, which is the second claim. (For fixed
gradients this is Kahane's convexity inequality of 1985.)

Theorem 2 (one direction is enough). H_alpha(Q || P) <= H_alpha(P || Q) for every alpha >= 1, for
Q = N(0, I) and any mixture P of Gaussians N(m_x, I).

Proof. Let e = log alpha >= 0. Both are functions of the law of L = log dP/dQ under Q:

    A = H_alpha(P || Q) = E (exp(L) - exp(e))_+,    B = H_alpha(Q || P) = E (1 - exp(e + L))_+.

L is convex, as a logarithm of a sum of exponentials of affine functions, so by Ehrhard's inequality
(1983) for the convex sets {L <= a}, Phi^-1(Q(L <= a)) is concave in a. Hence L has the law of k(Z)
with k convex and increasing, Z standard normal in one dimension, and E exp(k(Z)) = 1. (A constant L
is 0, where there is nothing to prove.) If k > -e everywhere, B = 0. Otherwise k(z_2) = -e and
k(z_1) = e for some z_2 < z_1 (for e > 0; A = B at e = 0). Let c be the straight line through these
points, of slope mu > 0. As k is convex, k >= c outside of [z_2, z_1] and k <= c inside. So

    S+ = E[exp(k) - exp(c); Z > z_1] >= 0,    S- = E[exp(k) - exp(c); Z < z_2] >= 0,
    A = A_c + S+,    B = B_c - exp(e) S-,    S+ + S- >= 1 - exp(m),    exp(m) = E exp(c),

where A_c and B_c are A and B of c(Z) = m + mu Z - mu^2 / 2. Of the Gaussian of shift mu we need

    K(a) = E (exp(mu Z - mu^2 / 2) - exp(a))_+ = E (1 - exp(a + mu Z - mu^2 / 2))_+
         = 1 - exp(a) + exp(a) K(-a),    K'(a) = -exp(a) Phi(-a / mu - mu / 2).

If m >= 0, A_c >= K(e) >= B_c and A >= B. If m = -n < 0, then A - B >= A_c - B_c + 1 - exp(m), which
is exp(-n) D(n) with D(n) = K(n + e) - exp(e) K(n - e) + exp(e) - 1. Here D(0) = 0, and

    D'(n) = exp(n) (Phi(v) - exp(e) Phi(w)),    v = (e - n) / mu - mu / 2,    w = v - 2 e / mu.

As (log Phi)'(x) >= -x, log Phi(v) - log Phi(w) >= (w^2 - v^2) / 2 = e (1 + 2 n / mu^2) >= e. So
D' >= 0 and A >= B.

So delta = H(P || Q) of this one pair is the delta of training, and `certificates.py` bounds it.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div, exactly
from bandmf_tf.accounting import certificates
from bandmf_tf.accounting.certificates import Certificate, Moment, Replicas
from bandmf_tf.accounting.gaussian import (
    Adjacency,
    PrivacyGuarantee,
    gaussian_noise_multiplier,
)
from bandmf_tf.accounting.replicas import BinReplicas, Chain, ChainReplicas, Multisets
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import Strategy

# C is taken to be larger by this fraction, so that its rounding is on the safe side (Theorem 1).
_ROUNDING = 1e-12

# Samples lower delta by about this factor against the bound without them.
_GAIN = 10.0

# Of this an exponential is a number, and a far larger one than any 1 / q.
_LARGEST_EXPONENT = 700.0

# Largest bands of |C|, or matrix of inner products of bins.
_MAX_BYTES = 2**30


@dataclass(frozen=True)
class RandomParticipation(SamplingScheme):
    """How an example draws the rounds it takes part in, independently of all others."""

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """Probability that an example is in the batch of a given round."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What has to be true of a training run for a certificate to hold."""
        return (
            self._describe(),
            "examples draw their rounds independently of each other and of the data",
            "every contribution is clipped to the clip norm before it is summed",
            "sums are divided by a fixed number, never by the size of a batch",
            "which examples are in which batch, and how many, stays secret",
        )

    @abc.abstractmethod
    def _describe(self) -> str:
        """Returns in words how the rounds of an example are drawn."""

    @abc.abstractmethod
    def replicas(self, strategy: Strategy) -> Callable[[float, int], Replicas | None]:
        """Returns a function from noise multiplier and order to replicas; None: too many states."""

    def certificate(
        self,
        strategy: Strategy,
        noise_multiplier: float,
        delta: float,
        *,
        failure_probability: float = certificates.FAILURE_PROBABILITY,
        seed: int = 0,
    ) -> Certificate:
        """Returns a certified epsilon at `delta`, zero-out, of x + C^-1 z on batches drawn so."""
        noise = _checks.positive_float("noise_multiplier", noise_multiplier)
        return certificates.certified_epsilon(
            functools.partial(self.replicas(strategy), noise),
            delta,
            failure_probability=failure_probability,
            seed=seed,
        )

    def amplified(
        self,
        strategy: Strategy,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
        certificate: Certificate | None = None,
    ) -> PrivacyGuarantee:
        """As in the base class; without a certificate where delta or noise is too small."""
        if certificate is None:
            if delta <= 2 * certificates.FAILURE_PROBABILITY:
                return self.bounded(strategy, noise_multiplier, delta)
            try:
                certificate = self.certificate(strategy, noise_multiplier, delta)
            except certificates.NotCertifiedError:
                return self.bounded(strategy, noise_multiplier, delta)
        if certificate.delta != delta:
            raise BandMFError(
                f"the certificate must be for delta={delta!r}. Found {certificate.delta!r}."
            )
        return self._guarantee(certificate.epsilon, delta, certificate.describe(), certificate)

    def bounded(
        self,
        strategy: Strategy,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
    ) -> PrivacyGuarantee:
        # Padding may be exceeded; a certificate has room for that.
        rest = _checks.probability("delta", delta) - certificates.OVERFLOW_PROBABILITY
        epsilon = math.inf
        if rest > 0.0:
            with contextlib.suppress(certificates.NotCertifiedError):
                best: Moment = certificates.best_replicas(
                    lambda order: _moment(self, strategy, noise_multiplier, order),
                    lambda moment: certificates.epsilon_bound(moment, rest),
                )
                epsilon = certificates.epsilon_bound(best, rest)
        return self._guarantee(epsilon, delta, "Renyi divergence, a bound without samples", None)

    def _guarantee(
        self, epsilon: float, delta: float, bounded: str, certificate: Certificate | None
    ) -> PrivacyGuarantee:
        return PrivacyGuarantee(
            epsilon=epsilon,
            delta=delta,
            rho=math.inf,
            adjacency=Adjacency.ZERO_OUT,
            accounting=f"mixture of Gaussians over participation patterns, {bounded}",
            assumptions=self.assumptions,
            certificate=certificate,
        )

    def verify(self, strategy: Strategy, noise_multiplier: float, certificate: Certificate) -> None:
        replicas = self.replicas(strategy)(noise_multiplier, certificate.order)
        if replicas is None:
            raise BandMFError(f"{certificate.order} replicas have too many states to verify.")
        certificates.verify_again(replicas, certificate)

    def calibrated(
        self,
        strategy: Strategy,
        epsilon: float,
        delta: float,
        *,
        discretization: float | None = None,
    ) -> tuple[float, Certificate | None]:
        if delta > 2 * certificates.FAILURE_PROBABILITY:
            return self.noise_multiplier(strategy, epsilon, delta)
        rest = delta - certificates.OVERFLOW_PROBABILITY
        if rest <= 0.0:
            raise certificates.NotCertifiedError(f"delta is too small. Found {exactly(delta)}.")
        plain = self._plain_noise_multiplier(strategy, epsilon, delta)
        noise = certificates.noise_multiplier_bound(
            self.replicas(strategy), epsilon, rest, start=plain, most=plain
        )
        return noise, None

    def _plain_noise_multiplier(self, strategy: Strategy, epsilon: float, delta: float) -> float:
        """Returns the noise without amplification."""
        sensitivity = self.participation.sensitivity(strategy).value
        return gaussian_noise_multiplier(epsilon, delta, sensitivity)

    def noise_multiplier(
        self,
        strategy: Strategy,
        epsilon: float,
        delta: float,
        *,
        failure_probability: float = certificates.FAILURE_PROBABILITY,
        seed: int = 0,
    ) -> tuple[float, Certificate]:
        """Returns about the smallest noise multiplier that `epsilon` allows, with certificate."""
        return certificates.certified_noise_multiplier(
            self.replicas(strategy),
            epsilon,
            delta,
            start=self._plain_noise_multiplier(strategy, epsilon, delta),
            failure_probability=failure_probability,
            seed=seed,
        )

    def likely_noise_multiplier(
        self,
        strategy: Strategy,
        epsilon: float,
        delta: float,
        *,
        start: float,
        tolerance: float = 1e-7,
        most: float = math.inf,
    ) -> float:
        """Returns about the noise of `calibrated`, without samples: smooth in C; no guarantee.

        Args:
            strategy: C.
            epsilon: Epsilon.
            delta: Delta.
            start: Where the search for the noise begins.
            tolerance: Where it ends.
            most: Where it gives up, with `NotCertifiedError`.
        """
        return certificates.noise_multiplier_bound(
            self.replicas(strategy),
            epsilon,
            min(_GAIN * delta, 0.5),
            start=start,
            tolerance=tolerance,
            most=most,
        )

    def estimated_noise_multiplier(
        self, strategy: Strategy, epsilon: float, delta: float, *, start: float, tolerance: float
    ) -> float:
        """Returns about the noise of `calibrated`, by few samples; the arguments are as above.

        It takes seconds, and finds noise where so few replicas fit that there is no bound.
        """
        log_noise, _ = certificates.estimated_log_noise(
            self.replicas(strategy), epsilon, delta, start=start, tolerance=tolerance
        )
        return math.exp(log_noise)

    def check_strategy(self, strategy: Strategy) -> None:
        if strategy.num_rounds != self.num_rounds:
            raise BandMFError(
                "num_rounds must be the same in strategy and sampling. Found "
                f"{strategy.num_rounds} and {self.num_rounds}."
            )


@dataclass(frozen=True)
class BallsInBins(RandomParticipation):
    """Every example is put into one of `num_bins` bins; round t takes bin t mod num_bins.

    One pass over the bins is an epoch. The strategy may be any lower-triangular one, in particular
    a BLT: an output matters by its b inner products with m_i = |C| x_i, x_i the rounds of bin i, so
    all depends on the b x b matrix of <m_i, m_j>. Of more bins than rounds, those behind have none.

    Attributes:
        num_bins: Number of bins, b.
    """

    kind = "balls_in_bins"
    num_bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("num_bins", self.num_bins)
        if 8 * self._num_used**2 > _MAX_BYTES:
            raise BandMFError(
                f"num_bins must be at most {math.isqrt(_MAX_BYTES // 8)}. Found {self.num_bins}."
            )

    @property
    def _num_used(self) -> int:
        """How many bins have a round."""
        return min(self.num_bins, self.num_rounds)

    @property
    def min_separation(self) -> int:
        return self.num_bins

    @property
    def rate(self) -> float:
        return 1 / self.num_bins

    def _describe(self) -> str:
        return (
            f"every example is put into one of {self.num_bins} bins, each with the same "
            f"probability, once before training, and takes part in the rounds of its bin, every "
            f"{self.num_bins}th one"
        )

    def replicas(self, strategy: Strategy) -> Callable[[float, int], Replicas | None]:
        gram, idle = self.gram(strategy), self.num_bins - self._num_used
        return lambda noise, order: BinReplicas(gram / noise**2, order, idle)

    def gram(self, strategy: Strategy) -> np.ndarray:
        """Returns the inner products of m_i = |C| x_i of the bins that have a round, rounded up."""
        self.check_strategy(strategy)
        rounds = np.arange(self.num_rounds)
        x = np.zeros((self.num_rounds, self._num_used))
        x[rounds, rounds % self.num_bins] = 1.0
        coefficients = strategy.toeplitz_coefficients
        if coefficients is not None and np.all(coefficients >= 0.0):
            m = strategy.matmul(x) * (1 + _ROUNDING)
        else:
            m = _absolute(strategy) @ x
        return m.T @ m


@dataclass(frozen=True)
class _ChainParticipation(RandomParticipation):
    """Participations of one example are at least as far apart as the strategy has bands."""

    @abc.abstractmethod
    def chain(self, num_bands: int) -> Chain:
        """Returns the pattern of one example as a chain."""

    @abc.abstractmethod
    def loss(self, u: np.ndarray) -> np.ndarray:
        """Returns L from u_t = <c_t, y> - |c_t|^2 / 2, the exponents of single participations.

        The columns c_t that one pattern uses do not overlap, so its exponent is the sum of u_t over
        the rounds it takes part in.
        """

    def check_strategy(self, strategy: Strategy) -> None:
        super().check_strategy(strategy)
        if strategy.num_bands > self.min_separation:
            raise BandMFError(
                f"the strategy must have at most {self.min_separation} bands, as many as there are "
                f"rounds between two participations. Found {strategy.num_bands}."
            )

    def replicas(self, strategy: Strategy) -> Callable[[float, int], Replicas | None]:
        self.check_strategy(strategy)
        n, absolute, chain = self.num_rounds, _absolute(strategy), self.chain(strategy.num_bands)
        multisets = functools.cache(functools.partial(Multisets, chain))

        def make(noise: float, order: int) -> Replicas | None:
            if not ChainReplicas.fits(len(chain.initial), n, order):
                return None
            return ChainReplicas(absolute / noise, multisets(order), self.loss)

        return make


@dataclass(frozen=True)
class SecretParts(_ChainParticipation):
    """Cyclic Poisson sampling from parts that are drawn at random and kept secret.

    Every example draws one of `num_parts` parts; whenever it is the turn of its part, it takes part
    with probability q, in every round anew. With parts of equal size that everybody knows this is
    `PoissonSampling`, which is at most as private. With q = 1 it is `BallsInBins`.

    Attributes:
        num_parts: Number of parts, b.
        sampling_probability: q in (0, 1].
    """

    kind = "secret_parts"
    num_parts: int
    sampling_probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("num_parts", self.num_parts)
        _check_probability("sampling_probability", self.sampling_probability)

    @property
    def min_separation(self) -> int:
        return self.num_parts

    @property
    def rate(self) -> float:
        return self.sampling_probability / self.num_parts

    def _describe(self) -> str:
        return (
            f"every example is put into one of {self.num_parts} parts, each with the same "
            f"probability, once before training; round i draws every example of part i mod "
            f"{self.num_parts} with probability {exactly(self.sampling_probability)}, anew "
            "each time"
        )

    def chain(self, num_bands: int) -> Chain:
        """States 0 .. b - 1 count the rounds to the next turn; more if the last one was used.

        State b - 1 + i is that of an example that took part i rounds ago, i < num_bands.
        """
        b, waiting = self.num_parts, np.arange(self.num_parts)
        used = np.arange(1, num_bands)  # Rounds ago.
        after_used = np.where(used + 1 < num_bands, b + used, b - 1 - used)
        following = np.concatenate([(waiting - 1) % b, after_used]).astype(int)
        return Chain(
            initial=np.concatenate([np.full(b, 1 / b), np.zeros(num_bands - 1)]),
            coins=np.full(self.num_rounds, self.sampling_probability),
            kinds=np.zeros(self.num_rounds, int),
            following=following[None],
            joined=np.array([b if num_bands > 1 else b - 1]),
            since=np.concatenate([np.zeros(b, int), used]),
        )

    def loss(self, u: np.ndarray) -> np.ndarray:
        n, size = u.shape
        b, q = self.num_parts, self.sampling_probability
        terms = np.zeros((ceil_div(n, b) * b, size))
        beyond = np.maximum(u - _LARGEST_EXPONENT, 0.0)  # Where 1 - q is nothing beside q e^u.
        terms[:n] = u if q == 1.0 else np.log1p(q * np.expm1(u - beyond)) + beyond
        parts = terms.reshape(-1, b, size).sum(axis=0)
        largest = parts.max(axis=0)
        return np.log(np.mean(np.exp(parts - largest), axis=0)) + largest


@dataclass(frozen=True)
class WaitingParticipation(_ChainParticipation):
    """An example that is ready takes part with a probability, and then waits until it is ready.

    Attributes:
        separation: b, how many rounds it waits at least, the one that it took part in included.
    """

    is_periodic = False
    separation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("separation", self.separation)

    @property
    def min_separation(self) -> int:
        return self.separation

    @property
    @abc.abstractmethod
    def initial(self) -> np.ndarray:
        """Probabilities to wait for 0, 1, .., b - 1 rounds before the first chance."""

    @property
    @abc.abstractmethod
    def coins(self) -> np.ndarray:
        """Probability that an example which is ready takes part, of every round."""

    @property
    @abc.abstractmethod
    def ready_again(self) -> np.ndarray:
        """The round in which an example that took part is ready again, of every round."""

    def _since(self, num_bands: int) -> np.ndarray:
        """Rounds since an example took part that waits for 0, 1, .., b - 1 rounds; see `Chain`."""
        waits = np.arange(self.separation)
        return np.where(waits > max(0, self.separation - num_bands), self.separation - waits, 0)

    def loss(self, u: np.ndarray) -> np.ndarray:
        """f_t = (1 - p_t) f_(t + 1) + p_t e^u_t f_(ready again), of an example ready in round t."""
        n, size = u.shape
        coins, again = self.coins, np.minimum(self.ready_again, n)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            terms = coins[:, None] * np.exp(u)
            ratios = np.ones((n + self.separation, size))
            for t in reversed(range(n)):
                ratios[t] = (1 - coins[t]) * ratios[t + 1] + terms[t] * ratios[again[t]]
            return np.log(self.initial @ ratios[: self.separation])


@dataclass(frozen=True)
class MinSeparationSampling(WaitingParticipation):
    """An example takes part with probability p, unless it did in the b - 1 rounds before.

    It starts as if it had done so for ever: with probability p / (1 + (b - 1) p) each it has to
    wait for 1, .., b - 1 rounds, and so takes part in every round with probability p / (1 + (b - 1)
    p). With b = 1 this is Poisson sampling, with p = 1 it is `BallsInBins`.

    Attributes:
        separation: b.
        sampling_probability: p in (0, 1].
    """

    kind = "min_separation"
    sampling_probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_probability("sampling_probability", self.sampling_probability)

    @classmethod
    def from_rate(cls, num_rounds: int, separation: int, rate: float) -> MinSeparationSampling:
        """Returns the scheme in which an example is in a batch with probability `rate`."""
        if not 0.0 < rate * separation <= 1.0:
            raise BandMFError(f"rate must be in (0, 1 / {separation}]. Found {rate}.")
        return cls(num_rounds, separation, min(1.0, rate / (1 - (separation - 1) * rate)))

    @property
    def rate(self) -> float:
        p = self.sampling_probability
        return p / (1 + (self.separation - 1) * p)

    @property
    def initial(self) -> np.ndarray:
        initial = np.full(self.separation, self.rate)
        initial[0] = 1 - (self.separation - 1) * self.rate
        return initial

    @property
    def coins(self) -> np.ndarray:
        return np.full(self.num_rounds, self.sampling_probability)

    @property
    def ready_again(self) -> np.ndarray:
        return np.arange(self.num_rounds) + self.separation

    def _describe(self) -> str:
        return (
            f"in every round every example that took part in none of the {self.separation - 1} "
            f"rounds before takes part with probability {exactly(self.sampling_probability)}, and "
            f"training starts in the stationary state of that rule"
        )

    def chain(self, num_bands: int) -> Chain:
        """State w: w more rounds to wait, having taken part b - w rounds ago."""
        return Chain(
            initial=self.initial,
            coins=self.coins,
            kinds=np.zeros(self.num_rounds, int),
            following=np.maximum(np.arange(self.separation) - 1, 0)[None],
            joined=np.array([self.separation - 1]),
            since=self._since(num_bands),
        )


@dataclass(frozen=True)
class OncePerEpoch(WaitingParticipation):
    """An example takes part in one random round of every epoch, b rounds or more after the last.

    An epoch is E rounds; the last one may be cut short. In the first one, all rounds have the same
    probability. In round u = 0 .. E - 1 of a later epoch, an example that has not taken part in the
    epoch, and whose last round is at least b rounds ago, takes part with probability

        1 / (E - max(u, b - 1)).

    So it takes part in every round with probability 1 / E. Proof: let that be so in the epoch
    before, let a_u be the probability to be ready in round u, and w = E - b + 1. Who took part in
    one of the rounds 0 .. w - 1 of the epoch before is ready in round 0: a_0 = w / E. While u < b -
    1, round u is taken with probability a_u / w, and those who had round w + u get ready after it:
    a_(u + 1) = a_u - a_u / w + 1 / E, which is w / E again. In these rounds a_u / w = 1 / E. From
    u = b - 1 on, where w / E = (E - u) / E, nobody gets ready, and a_u = (E - u) / E goes on to
    hold: round u is taken with probability a_u / (E - u) = 1 / E, and none is left after u = E - 1.

    With b = 1 the rounds of epochs are independent, with b = E this is `BallsInBins`.

    Attributes:
        separation: b, at most E.
        epoch_rounds: Rounds of an epoch, E.
    """

    kind = "once_per_epoch"
    epoch_rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("epoch_rounds", self.epoch_rounds)
        if self.separation > self.epoch_rounds:
            raise BandMFError(
                f"separation must be at most epoch_rounds={self.epoch_rounds}. Found "
                f"{self.separation}."
            )

    @property
    def rate(self) -> float:
        return 1 / self.epoch_rounds

    @property
    def max_participations(self) -> int:
        return ceil_div(self.num_rounds, self.epoch_rounds)

    @property
    def initial(self) -> np.ndarray:
        return np.eye(1, self.separation)[0]

    @property
    def coins(self) -> np.ndarray:
        rounds = np.arange(self.num_rounds)
        first = np.where(rounds < self.epoch_rounds, 0, self.separation - 1)
        return 1 / (self.epoch_rounds - np.maximum(rounds % self.epoch_rounds, first))

    @property
    def ready_again(self) -> np.ndarray:
        rounds = np.arange(self.num_rounds)
        next_epoch = (rounds // self.epoch_rounds + 1) * self.epoch_rounds
        return np.maximum(next_epoch, rounds + self.separation)

    def _describe(self) -> str:
        e, b = self.epoch_rounds, self.separation
        return (
            f"every example takes part in one round of every {e}: of the first {e} in any with the "
            f"same probability; in round u = 0 .. {e - 1} of later ones, unless it already took "
            f"part in one of these or in one of the {b - 1} rounds before, with probability "
            f"1 / ({e} - max(u, {b - 1}))"
        )

    def chain(self, num_bands: int) -> Chain:
        """State w < b: w rounds are missing to b since the last; state b: the epoch is to end.

        After round u of an epoch who has waited for b rounds is ready if the next round begins an
        epoch, or if u < b - 1, so that the last participation was in the epoch before. Otherwise it
        was in this epoch.
        """
        b = self.separation
        u = np.arange(self.num_rounds) % self.epoch_rounds
        is_ready = np.append(np.maximum(np.arange(b) - 1, 0), 0)
        is_done = np.append(np.where(np.arange(b) == 1, b, is_ready[:b]), b)
        return Chain(
            initial=np.append(self.initial, 0.0),
            coins=self.coins,
            kinds=((u >= b - 1) & (u < self.epoch_rounds - 1)).astype(int),
            following=np.stack([is_ready, is_done]),
            joined=np.array([b - 1, b - 1 if b > 1 else b]),
            since=np.append(self._since(num_bands), 0),
        )


def _absolute(strategy: Strategy) -> scipy.sparse.csc_matrix:
    """Returns |C|, rounded up."""
    n, p = strategy.num_rounds, strategy.num_bands
    rows = np.broadcast_to(strategy.coefficient_rows(_MAX_BYTES), (n, p))
    diagonals = [np.abs(rows[d:, d]) * (1 + _ROUNDING) for d in range(p)]
    return scipy.sparse.diags(diagonals, -np.arange(p), format="csc")


@functools.lru_cache(maxsize=256)
def _moment(
    scheme: RandomParticipation, strategy: Strategy, noise: float, order: int
) -> Moment | None:
    """Returns what bounds at any delta need of replicas, which can take a lot of memory."""
    replicas = scheme.replicas(strategy)(noise, order)
    return None if replicas is None else Moment(order, replicas.log_largest_weight)


def _check_probability(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise BandMFError(f"{name} must be in (0, 1]. Found {value}.")
