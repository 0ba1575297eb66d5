"""Privacy amplification of banded strategies by cyclic sampling and shuffling.

The scheme of the paper (Algorithms 2 and 6): split the data set into `num_parts` parts of
floor(dataset_size / num_parts) examples, discard the rest, and draw the batch of round i from part
i mod num_parts.

    round       1    2    3    4    5    6    7   ...          num_parts = 3
    part        1    2    3    1    2    3    1   ...
    example x   ?    .    .    ?    .    .    ?   ...          x lies in part 1

One example can participate in every `num_parts`-th round only. If the strategy C is lower
triangular with at most `num_parts` bands, the rows of C x + z that depend on different
participations are disjoint, and the whole release is as private as ceil(num_rounds / num_parts)
Gaussian sums over batches of *one part*, each of sensitivity kappa = the largest column norm of C
(Theorem 5). In units of that sensitivity their noise is
noise_multiplier / kappa; this is the number that every event here carries.

A scheme is a small value that knows how batches are drawn. It gives the `DpEvent` of a training
run, the neighbouring relation to account it with, what it assumes in words, epsilon for a noise
multiplier and the noise multiplier for an epsilon. Strategies enter as two numbers, `num_bands`
and `max_column_norm` (kappa, of C as stored).

Treating shuffled batches as if they were Poisson samples is the convention of the paper's own
experiments. It is not a theorem, and nothing here returns it: `Shuffling` states what is proven,
and whoever wants to reproduce the convention has to ask for `PoissonSampling` by name.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import scipy

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div, exactly, round_down, round_up
from bandmf_tf.accounting.bounded_samples import (
    FEWEST_FIT,
    BoundedPoissonGaussian,
    choose_bound,
    fits,
    kept,
)
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.composition import Losses
from bandmf_tf.accounting.gaussian import (
    Adjacency,
    PrivacyGuarantee,
    calibrate_noise_multiplier,
    describe_gaussian_accounting,
    gaussian_delta,
    gaussian_epsilon,
    largest_gdp_mu,
    zcdp_rho,
)
from bandmf_tf.accounting.privacy_loss import (
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    SampledGaussian,
    composed_epsilon,
    loss_of_guarantee,
    sampled_epsilon,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.strategies import Strategy

if TYPE_CHECKING:
    import dp_accounting
    from dp_accounting import NeighboringRelation


@dataclass(frozen=True)
class _Bound:
    """An epsilon and how it was obtained."""

    epsilon: float
    accounting: str


@dataclass(frozen=True)
class CyclicScheme(SamplingScheme):
    """How batches are drawn from the parts of a data set, one part a round.

    Attributes:
        num_parts: Number of parts; the strategy must not have more bands.
    """

    num_parts: int

    _relation: ClassVar[str]  # By its name in dp_accounting, which is imported when it is needed.

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("num_parts", self.num_parts)

    @property
    def min_separation(self) -> int:
        return self.num_parts

    @property
    def neighboring_relation(self) -> NeighboringRelation:
        """The relation to give an accountant of `dp_accounting` together with `event`."""
        from dp_accounting import NeighboringRelation

        return NeighboringRelation[self._relation]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What has to be true of a training run for the guarantees to hold."""
        return (
            (
                f"the data set is split into {self.num_parts} parts before training, without "
                f"looking at the data, and round i draws its batch from part i mod {self.num_parts}"
            ),
            f"the strategy is lower triangular with at most {self.num_parts} bands",
            "every contribution is clipped to the clip norm before it is summed",
            "which examples are in which batch stays secret",
        )

    def check_strategy(self, strategy: Strategy) -> None:
        if strategy.num_bands > self.num_parts:
            raise BandMFError(
                f"amplification needs num_bands of at most num_parts={self.num_parts}. Found "
                f"num_bands={strategy.num_bands}."
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
        if certificate is not None:
            self.verify(strategy, noise_multiplier, certificate)  # There is none.
        return self.guarantee(
            noise_multiplier, delta, **_sizes(strategy), discretization=discretization
        )

    def calibrated(
        self,
        strategy: Strategy,
        epsilon: float,
        delta: float,
        *,
        discretization: float | None = None,
    ) -> tuple[float, None]:
        noise = self.noise_multiplier(
            epsilon, delta, **_sizes(strategy), discretization=discretization
        )
        return noise, None

    def event(
        self, noise_multiplier: float, *, num_bands: int, max_column_norm: float
    ) -> dp_accounting.DpEvent:
        """Returns a training run as an event for the accountants of `dp_accounting`."""
        return self._event(
            self._event_noise_multiplier(noise_multiplier, num_bands, max_column_norm)
        )

    def epsilon(
        self,
        noise_multiplier: float,
        delta: float,
        *,
        num_bands: int,
        max_column_norm: float,
        discretization: float | None = None,
    ) -> float:
        """Returns an upper bound on epsilon at `delta` for zero-out neighbours."""
        return self.guarantee(
            noise_multiplier,
            delta,
            num_bands=num_bands,
            max_column_norm=max_column_norm,
            discretization=discretization,
        ).epsilon

    def guarantee(
        self,
        noise_multiplier: float,
        delta: float,
        *,
        num_bands: int,
        max_column_norm: float,
        discretization: float | None = None,
    ) -> PrivacyGuarantee:
        """Returns the guarantee of a training run with everything it rests on."""
        noise = self._event_noise_multiplier(noise_multiplier, num_bands, max_column_norm)
        delta = _checks.probability("delta", delta)
        if discretization is not None:
            discretization = _checks.positive_float("discretization", discretization)
        bound = self._bound(noise, delta, discretization)
        return PrivacyGuarantee(
            epsilon=bound.epsilon,
            delta=delta,
            rho=zcdp_rho(noise, math.sqrt(self.max_participations)),
            adjacency=Adjacency.ZERO_OUT,
            accounting=bound.accounting,
            assumptions=self.assumptions,
        )

    def noise_multiplier(
        self,
        epsilon: float,
        delta: float,
        *,
        num_bands: int,
        max_column_norm: float,
        discretization: float | None = None,
    ) -> float:
        """Returns the smallest noise multiplier with `self.epsilon` at most `epsilon`.

        Smallest up to a relative gap of 1e-6 in epsilon, and on the safe side of it.
        """
        kappa = self._checked_max_column_norm(num_bands, max_column_norm)
        delta = _checks.probability("delta", delta)
        if discretization is not None:
            discretization = _checks.positive_float("discretization", discretization)
        return calibrate_noise_multiplier(
            lambda noise: self._bound(noise / kappa, delta, discretization).epsilon,
            epsilon,
            start=kappa * self._first_guess(largest_gdp_mu(epsilon, delta)),
        )

    def steps(self, strategy: Strategy, noise_multiplier: float) -> Losses | None:
        step = self._step(self._event_noise_multiplier(noise_multiplier, **_sizes(strategy)))
        return None if step is None else Losses(step, self.rounds_per_part)

    def _step(self, noise_multiplier: float) -> SampledGaussian | None:
        """Returns the sum over one sample, for a noise multiplier in units of the column norm."""
        del noise_multiplier
        return None

    @abc.abstractmethod
    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event for a noise multiplier in units of the column norm."""

    @abc.abstractmethod
    def _bound(self, noise_multiplier: float, delta: float, discretization: float | None) -> _Bound:
        """Returns epsilon for a noise multiplier in units of the column norm."""

    @abc.abstractmethod
    def _first_guess(self, mu: float) -> float:
        """Returns a noise multiplier, in units of the column norm, that is roughly mu-GDP."""

    def _event_noise_multiplier(
        self, noise_multiplier: float, num_bands: int, max_column_norm: float
    ) -> float:
        noise_multiplier = _checks.positive_float("noise_multiplier", noise_multiplier)
        return noise_multiplier / self._checked_max_column_norm(num_bands, max_column_norm)

    def _checked_max_column_norm(self, num_bands: int, max_column_norm: float) -> float:
        if _checks.positive_int("num_bands", num_bands) > self.num_parts:
            raise BandMFError(
                "amplification needs num_bands of at most the number of parts of the data set; "
                f"got num_bands={num_bands}, num_parts={self.num_parts}. Use at most "
                f"{self.num_parts} bands or split the data set into {num_bands} parts."
            )
        return _checks.positive_float("max_column_norm", max_column_norm)


@dataclass(frozen=True)
class PoissonSampling(CyclicScheme):
    """Each example of the part enters the batch independently with the same probability.

    The event is ceil(num_rounds / num_parts) Poisson-sampled Gaussians, exactly as private as the
    training run in the worst case. With a Poisson sample of a *given part*, removing an example
    and replacing it by zeros give the same distribution of sums, so the accountants of
    `dp_accounting`, which ask for add-or-remove neighbours, account for zero-out ones. That is all:
    the guarantee is not for add-or-remove neighbours, because the parts are equal and the rest of
    the data set is discarded. Of 19 examples in 4 parts 16 are used, and removing one of them can
    move another one from the rest into a part and shift all others. The event stays a sampled one
    even at probability 1, as in the paper's tables.

    The paper's listing (Example F.1) swaps the letters of the two sizes: with n rounds and m
    examples the probability is batch_size / floor(m / num_parts) and the count ceil(n / num_parts).

    Attributes:
        sampling_probability: Probability q in (0, 1] that an example of the part is in the batch.
    """

    kind = "poisson"
    _relation = "ADD_OR_REMOVE_ONE"
    sampling_probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        probability = _checks.positive_float("sampling_probability", self.sampling_probability)
        object.__setattr__(self, "sampling_probability", probability)
        if probability > 1:
            raise BandMFError(
                f"sampling_probability must be at most 1; got {self.sampling_probability}. "
                "Use smaller batches or fewer parts."
            )

    @classmethod
    def from_sizes(
        cls, num_rounds: int, num_parts: int, batch_size: float, dataset_size: int
    ) -> PoissonSampling:
        """Returns the scheme with `batch_size` examples a round in expectation."""
        batch_size = _checks.positive_float("batch_size", batch_size)
        part_size = _part_size(num_parts, batch_size, dataset_size)
        return cls(num_rounds, num_parts, batch_size / part_size)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            *super().assumptions,
            (
                "every example of the part enters the batch independently with probability "
                f"{exactly(self.sampling_probability)}, in every round anew"
            ),
            "sums are divided by the expected batch size, never by the size that was drawn",
        )

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(
                self.sampling_probability, dp_accounting.GaussianDpEvent(noise_multiplier)
            ),
            self.rounds_per_part,
        )

    def _bound(self, noise_multiplier: float, delta: float, discretization: float | None) -> _Bound:
        step = self._step(noise_multiplier)
        return _sampled_bound(step, self.rounds_per_part, self._samples, delta, discretization)

    @property
    def _samples(self) -> str:
        return f"Poisson samples of probability {exactly(self.sampling_probability)}"

    def _step(self, noise_multiplier: float) -> SampledGaussian:
        return PoissonSampledGaussian(1 / noise_multiplier, self.sampling_probability)

    def _first_guess(self, mu: float) -> float:
        return _central_limit_noise(mu, self.sampling_probability, self.rounds_per_part)


@dataclass(frozen=True)
class BoundedPoissonSampling(PoissonSampling):
    """Poisson samples of at most `max_batch_size` examples: a fixed shape, with a proof.

    A larger sample is drawn again, as a whole. `bounded_samples.py` has the account, by which this
    costs next to nothing. `dp_accounting` knows no such event, so `event` is unsupported; its
    truncated batches keep a subset of a larger sample, which is another scheme.

    Attributes:
        max_batch_size: Largest batch, B.
        dataset_size: Examples in the data set, m; a part has floor(m / num_parts).
    """

    kind = "bounded_poisson"
    _relation = "REPLACE_SPECIAL"
    max_batch_size: int
    dataset_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        most = _part_size(self.num_parts, 1, self.dataset_size)
        if _checks.positive_int("max_batch_size", self.max_batch_size) > most:
            raise BandMFError(
                f"max_batch_size must be at most {most}, the examples in a part. Found "
                f"{self.max_batch_size}."
            )
        fitting = fits(self.sampling_probability, self.max_batch_size, most)
        if not fitting >= FEWEST_FIT:
            raise BandMFError(
                f"of samples with sampling_probability={exactly(self.sampling_probability)} at "
                f"least {FEWEST_FIT:.0%} must have max_batch_size or less, as all others are drawn "
                f"again. Found {fitting:.2g} for max_batch_size={self.max_batch_size}; use a "
                "larger one, or a smaller probability."
            )

    @classmethod
    def from_sizes(
        cls, num_rounds: int, num_parts: int, batch_size: float, dataset_size: int
    ) -> BoundedPoissonSampling:
        """Returns the scheme with `batch_size` examples a round in expectation.

        The largest batch is the smallest one that costs about half a percent of epsilon, compared
        with samples of the same mean size which have no bound: 532 for 500 of 50,000 examples, 79
        for 64 of 1,280.
        """
        batch_size = _checks.positive_float("batch_size", batch_size)
        probability, largest = choose_bound(
            batch_size, _part_size(num_parts, batch_size, dataset_size)
        )
        return cls(num_rounds, num_parts, probability, largest, dataset_size)

    @property
    def part_size(self) -> int:
        """Examples in a part."""
        return self.dataset_size // self.num_parts

    @property
    def batch_size(self) -> float:
        """Examples in a batch, in expectation."""
        q = self.sampling_probability
        size = q * kept(q, self.max_batch_size, self.part_size) * self.part_size
        return float(f"{size:.12g}")  # What was asked for, not what it is rounded to.

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            *super().assumptions,
            (
                f"a sample of more than {self.max_batch_size} of the {self.part_size} examples of "
                "the part is drawn again, as a whole, until it has no more"
            ),
        )

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        import dp_accounting

        del noise_multiplier
        return dp_accounting.UnsupportedDpEvent()

    @property
    def _samples(self) -> str:
        most = f"at most {self.max_batch_size} of {self.part_size} examples"
        return f"{super()._samples}, {most},"

    def _step(self, noise_multiplier: float) -> SampledGaussian:
        return BoundedPoissonGaussian(
            1 / noise_multiplier, self.sampling_probability, self.max_batch_size, self.part_size
        )


@dataclass(frozen=True)
class _EqualBatches(CyclicScheme):
    """Batches of one size.

    Attributes:
        batch_size: Examples in every batch, B.
        dataset_size: Examples in the data set, m.
    """

    batch_size: int
    dataset_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive_int("batch_size", self.batch_size)
        _part_size(self.num_parts, self.batch_size, self.dataset_size)

    @property
    def part_size(self) -> int:
        """Examples in a part."""
        return self.dataset_size // self.num_parts


@dataclass(frozen=True)
class FixedSizeSampling(_EqualBatches):
    """The batch is a random subset of fixed size of the part, drawn anew in every round.

    Two things differ from Poisson sampling. Whether an example is in the batch decides who else is,
    so a batch with it and a batch without it differ by two records, up to 2 kappa apart; and
    zero-out neighbours are not add-or-remove neighbours. Two accounts are given:

    * `event` samples without replacement and carries noise_multiplier / (2 kappa), because the
      `RdpAccountant` of `dp_accounting` wants the noise relative to the *replace-one* sensitivity
      of the sum (Wang, Balle, Kasiviswanathan 2019, Theorem 27). What it returns holds for
      replace-one neighbours and hence for zero-out ones. The `PLDAccountant` of dp_accounting
      0.4.3 does not know this event.
    * `epsilon` is tighter and for zero-out neighbours: `FixedSizeSampledGaussian` composed,
      or no amplification at all (the zero record keeps its place, so given the batches the run is
      a Gaussian release of sensitivity kappa sqrt(participations)), whichever is smaller.
    """

    kind = "fixed_size"
    _relation = "REPLACE_ONE"

    @property
    def sampling_probability(self) -> float:
        """Probability that an example of the part is in the batch."""
        return self.batch_size / self.part_size

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            *super().assumptions,
            (
                f"every batch is a uniformly random subset of {self.batch_size} of the "
                f"{self.part_size} examples of the part, drawn anew in every round"
            ),
        )

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.SampledWithoutReplacementDpEvent(
                self.part_size,
                self.batch_size,
                dp_accounting.GaussianDpEvent(noise_multiplier / 2),
            ),
            self.rounds_per_part,
        )

    def _bound(self, noise_multiplier: float, delta: float, discretization: float | None) -> _Bound:
        samples = f"random subsets of {self.batch_size} of {self.part_size} examples"
        step = self._step(noise_multiplier)
        amplified = _sampled_bound(step, self.rounds_per_part, samples, delta, discretization)
        return _smaller(amplified, noise_multiplier, self.max_participations, delta, discretization)

    def _step(self, noise_multiplier: float) -> SampledGaussian:
        return FixedSizeSampledGaussian(1 / noise_multiplier, self.sampling_probability)

    def _first_guess(self, mu: float) -> float:
        return _central_limit_noise(mu, self.sampling_probability, self.rounds_per_part)


@dataclass(frozen=True)
class Shuffling(_EqualBatches):
    """Each part is shuffled and its batches are taken in order, pass after pass (Corollary F.1).

    A pass over a part yields floor(part size / batch_size) whole batches, the rest sits out, so an
    example takes part at most once a pass and at most

        max_participations = ceil(ceil(num_rounds / num_parts) / batches a pass)

    times in all. Proven are:

    * no amplification: given the order, the run is a Gaussian release of sensitivity
      kappa sqrt(max_participations). This is what `event` describes (`dp_accounting` has no event
      for shuffling).
    * batches of one example, each pass in a fresh order: a pass over a part of s examples is the
      adaptive shuffle of Feldman, McMillan, Talwar 2021 ("Hiding among the clones"). Clip the
      density of N(x, sigma^2) to within exp(+-epsilon0 / 2) of N(0, sigma^2) and move the clipped
      mass elsewhere: an epsilon0-DP local randomizer within total variation
      delta0 = `gaussian_delta` at epsilon0 / 2 of the Gaussian one. Their Theorem 3.1 holds for it
      if epsilon0 <= log(s / (16 log(2 / delta1))) and gives (epsilon1, delta1) with

          epsilon1 = log(1 + (e0 - 1) / (e0 + 1) (8 sqrt(e0 log(4 / delta1) / s) + 8 e0 / s)),
          e0 = exp(epsilon0),

      so a pass is (epsilon1, delta1 + (1 + exp(epsilon1)) s delta0)-DP, and passes compose.

    `epsilon` is the smaller of both. For larger batches no useful bound is known; calling shuffled
    batches Poisson samples is a convention, not a guarantee.

    Attributes:
        reshuffled: Whether every pass uses a fresh, independent order.
    """

    kind = "shuffling"
    _relation = "REPLACE_SPECIAL"
    reshuffled: bool

    @property
    def max_participations(self) -> int:
        return ceil_div(self.rounds_per_part, (self.part_size // self.batch_size))

    @property
    def assumptions(self) -> tuple[str, ...]:
        order = "in a fresh random order every time" if self.reshuffled else "in one random order"
        return (
            *super().assumptions,
            (
                f"passes over a part go through its examples {order}, in whole batches of "
                f"{self.batch_size}, and a pass starts only when the one before is complete"
            ),
        )

    def _event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(noise_multiplier), self.max_participations
        )

    def _bound(self, noise_multiplier: float, delta: float, discretization: float | None) -> _Bound:
        amplified = _Bound(math.inf, "")
        if self.batch_size == 1 and (self.reshuffled or self.max_participations == 1):
            amplified = _Bound(
                self._shuffled_epsilon(noise_multiplier, delta),
                f"{self.max_participations} shuffled passes over {self.part_size} examples with "
                f"noise multiplier {round_down(noise_multiplier, 6):g}, Theorem 3.1 of Feldman, "
                "McMillan, Talwar 2021",
            )
        return _smaller(amplified, noise_multiplier, self.max_participations, delta, discretization)

    def _shuffled_epsilon(self, noise_multiplier: float, delta: float) -> float:
        passes = self.max_participations
        if passes == 1:
            return _one_pass_epsilon(noise_multiplier, self.part_size, delta)
        delta_of_pass = delta / (2 * passes)
        epsilon_of_pass = _one_pass_epsilon(noise_multiplier, self.part_size, delta_of_pass)
        if math.isinf(epsilon_of_pass):
            return math.inf
        step = loss_of_guarantee(epsilon_of_pass, delta_of_pass)
        return composed_epsilon(step, passes, delta)

    def _first_guess(self, mu: float) -> float:
        return math.sqrt(self.max_participations) / mu


def _sizes(strategy: Strategy) -> dict[str, Any]:
    """Returns all that the theorem knows of a strategy."""
    norm = float(strategy.column_norms().max())
    return {"num_bands": strategy.num_bands, "max_column_norm": norm}


def _sampled_bound(
    step: SampledGaussian, rounds: int, samples: str, delta: float, grid: float | None
) -> _Bound:
    """Returns epsilon of Gaussian sums over `samples`."""
    width = "that follows the loss of one sum" if grid is None else f"of {grid:g}"
    return _Bound(
        sampled_epsilon(step, rounds, delta, grid),
        f"{rounds} Gaussian sums over {samples} with noise multiplier "
        f"{round_down(1 / step.mu, 6):g}, PLD on a grid {width}, rounded up",
    )


def _part_size(num_parts: int, batch_size: float, dataset_size: int) -> int:
    """Returns the size of a part that can hold a batch."""
    dataset_size = _checks.positive_int("dataset_size", dataset_size)
    part_size = dataset_size // _checks.positive_int("num_parts", num_parts)
    if batch_size > part_size:
        raise BandMFError(
            f"a part has floor(dataset_size / num_parts) = floor({dataset_size} / {num_parts}) = "
            f"{part_size} examples, fewer than batch_size={batch_size:g}. Use smaller batches or "
            f"at most {math.floor(dataset_size / batch_size)} parts."
        )
    return part_size


def _central_limit_noise(mu: float, sampling_probability: float, compositions: int) -> float:
    """Returns the noise at which sampled Gaussians compose to roughly mu-GDP.

    mu = q sqrt(T (exp(1 / noise^2) - 1)) in the central limit (Bu et al. 2020).
    """
    ratio = mu / (sampling_probability * math.sqrt(compositions))
    return 1 / math.sqrt(math.log1p(ratio * ratio))


def _smaller(
    amplified: _Bound,
    noise_multiplier: float,
    participations: int,
    delta: float,
    grid: float | None,
) -> _Bound:
    """Returns `amplified` or, if that is better, the bound without amplification."""
    sensitivity = math.sqrt(participations)
    if math.isfinite(amplified.epsilon) and delta < gaussian_delta(
        noise_multiplier, sensitivity, amplified.epsilon
    ):
        return amplified
    epsilon = gaussian_epsilon(noise_multiplier, sensitivity, delta, discretization=grid)
    if amplified.epsilon <= epsilon:
        return amplified
    return _Bound(
        epsilon,
        f"no amplification: one Gaussian release of sensitivity {round_up(sensitivity, 6):g} "
        f"(column norm 1) with noise multiplier {round_down(noise_multiplier, 6):g}, "
        f"{describe_gaussian_accounting(grid)}",
    )


def _one_pass_epsilon(noise_multiplier: float, part_size: int, delta: float) -> float:
    """Returns epsilon of one shuffled pass in batches of one, infinite outside of the theorem."""
    delta1 = delta / 2
    largest = math.log(part_size / (16 * math.log(2 / delta1)))
    if largest <= 0:
        return math.inf

    def amplified(epsilon0: float) -> float:
        e0 = math.exp(epsilon0)
        spread = 8 * math.sqrt(e0 * math.log(4 / delta1) / part_size) + 8 * e0 / part_size
        return math.log1p(math.tanh(epsilon0 / 2) * spread)

    def excess(epsilon0: float) -> float:
        delta0 = gaussian_delta(noise_multiplier, 1.0, epsilon0 / 2)
        return (1 + math.exp(amplified(epsilon0))) * part_size * delta0 / (delta - delta1) - 1

    if excess(largest) > 0:
        return math.inf
    smallest = largest * 1e-6
    if excess(smallest) <= 0:
        return amplified(smallest)
    epsilon0 = scipy.optimize.brentq(excess, smallest, largest, xtol=1e-10)
    # On the side of the root where the condition holds.
    epsilon0 = min(epsilon0 + 1e-9, largest)
    return amplified(epsilon0)
