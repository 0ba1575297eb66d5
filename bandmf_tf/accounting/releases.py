"""Releases: what the noise of a strategy costs, in one place.

A *release* is x + C^-1 z for units that keep to a participation schema, on batches that are drawn
as `sampling` says, if that is known. As post-processing of C x + z it is

* one Gaussian release of the sensitivity of C under the schema (`gaussian.py`); or,
* amplified by sampling, whatever the scheme has a theorem for (`schemes.py`): a composition of
  sampled Gaussians, or a mixture of Gaussians that samples bound with a stated confidence.

Both are proven, so epsilon is the smaller one. rho never profits from sampling: it is that of the
Gaussian release, for units that keep to the schema, which therefore has to allow whatever the
sampling can do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

import scipy

from bandmf_tf.accounting.certificates import Certificate, NotCertifiedError
from bandmf_tf.accounting.composition import Losses, ProvenPoints, deltas_below
from bandmf_tf.accounting.gaussian import (
    PrivacyGuarantee,
    gaussian_delta,
    gaussian_guarantee,
    gaussian_noise_multiplier,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.sensitivity import UPPER_BOUND, Sensitivity
from bandmf_tf.factorization.strategies import Strategy

_T = TypeVar("_T")

# Smaller ones are not needed: the tails of privacy losses are cut off at 1e-24 a step.
_SMALLEST_LOG_DELTA = math.log(1e-22)


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """A strategy, who may take part, and how batches are drawn; see the top of this file.

    Attributes:
      strategy: C, as it is used.
      participation: In which rounds one unit may contribute.
      sampling: How batches are drawn, if epsilon is amplified by it; otherwise None.
      stated_sensitivity: A proven sensitivity to account for in place of the one that
        `participation` finds; None for that one.
      group_size: How many units are protected together; see `of_group`.
    """

    strategy: Strategy
    participation: Participation
    sampling: SamplingScheme | None = None
    stated_sensitivity: Sensitivity | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        self._if_sampled(self._check_sampling)

    def _check_sampling(self, sampling: SamplingScheme) -> None:
        if sampling.num_rounds > self.strategy.num_rounds:
            raise BandMFError(
                "num_rounds must be the same in strategy and sampling. Found "
                f"{self.strategy.num_rounds} and {sampling.num_rounds}."
            )
        sampling.check_strategy(self.strategy)
        if not self.participation.allows(sampling):
            raise BandMFError(
                "The participation must allow whatever the sampling can do, or rho would not hold; "
                f"use sampling.participation. Found {self.participation} with {sampling}."
            )

    def _if_sampled(self, ask: Callable[[SamplingScheme], _T]) -> _T | None:
        """Returns what the sampling answers; None without. All that differs goes through here."""
        return None if self.sampling is None else ask(self.sampling)

    @functools.cached_property
    def sensitivity(self) -> Sensitivity:
        """For clip norm 1 and zero-out neighbours."""
        return self.stated_sensitivity or self.participation.sensitivity(self.strategy)

    @property
    def max_column_norm(self) -> float:
        """Largest column norm of the strategy: all that a cyclic scheme knows of its size."""
        return float(self.strategy.column_norms().max())

    def guarantee(
        self,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
        assumptions: tuple[str, ...] = (),
        certificate: Certificate | None = None,
    ) -> PrivacyGuarantee:
        """Returns epsilon at `delta` and rho, for zero-out neighbours.

        If sampling is accounted for by samples, the guarantee has the certificate that says how
        sure it is; it takes seconds to make one.

        Args:
          noise_multiplier: Standard deviation of z over the clip norm.
          delta: Delta of the guarantee.
          discretization: Width of the grid of privacy losses; None for the closed form of a
            Gaussian release, and a grid that follows the loss of a step with sampling.
          assumptions: What the guarantee rests on beside participation and sampling.
          certificate: For this noise and delta, where it is known (`calibrated`); for one unit.
        """
        if self.group_size > 1:
            return self.bounded(
                noise_multiplier, delta, discretization=discretization, assumptions=assumptions
            )
        amplified = self._if_sampled(
            lambda sampling: sampling.amplified(
                self.strategy,
                noise_multiplier,
                delta,
                discretization=discretization,
                certificate=certificate,
            )
        )
        return self._better(amplified, noise_multiplier, delta, discretization, assumptions)

    def bounded(
        self,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
        assumptions: tuple[str, ...] = (),
    ) -> PrivacyGuarantee:
        """Returns `guarantee`, or where that takes samples a larger one without them.

        Cheap enough for curves, groups and progress bars.
        """

        def bound(sampling: SamplingScheme) -> PrivacyGuarantee:
            bound_at = functools.partial(
                sampling.bounded, self.strategy, noise_multiplier, discretization=discretization
            )
            found = bound_at(delta)
            if self.group_size == 1:
                return found
            return dataclasses.replace(
                found,
                epsilon=_group_epsilon(lambda at: bound_at(at).epsilon, self.group_size, delta),
                accounting=f"{found.accounting}; {self.group_size} units one after the other",
            )

        amplified = self._if_sampled(bound)
        return self._better(amplified, noise_multiplier, delta, discretization, assumptions)

    def _better(
        self,
        amplified: PrivacyGuarantee | None,
        noise_multiplier: float,
        delta: float,
        discretization: float | None,
        assumptions: tuple[str, ...],
    ) -> PrivacyGuarantee:
        """Returns the amplified guarantee or, if that is better, the one of the Gaussian release.

        rho is that of the latter.
        """
        unamplified = gaussian_guarantee(
            noise_multiplier,
            self.sensitivity.value,
            delta,
            assumptions=(self.participation.describe(), *assumptions),
            discretization=discretization,
        )
        if amplified is None or not amplified.epsilon < unamplified.epsilon:
            return unamplified
        return dataclasses.replace(
            amplified,
            rho=unamplified.rho,
            assumptions=(*amplified.assumptions, *assumptions),
        )

    def is_amplified(self, noise_multiplier: float, guarantee: PrivacyGuarantee) -> bool:
        """Whether sampling makes epsilon smaller than that of the Gaussian release."""
        unamplified = self._better(None, noise_multiplier, guarantee.delta, None, ())
        return guarantee.epsilon < unamplified.epsilon

    def losses(
        self, noise_multiplier: float, guarantee: PrivacyGuarantee, certified_at: float
    ) -> Losses | None:
        """Returns what dominates the release beside others; None if sampling gains nothing.

        It is then the Gaussian release alone.

        Args:
          noise_multiplier: Standard deviation of z over the clip norm.
          guarantee: Of this release with this noise, at the delta of all releases together.
          certified_at: A smaller delta; a guarantee that rests on samples is certified there, too.
        """
        delta = guarantee.delta
        if not self.is_amplified(noise_multiplier, guarantee):
            return None
        steps = self._if_sampled(lambda sampling: sampling.steps(self.strategy, noise_multiplier))
        if steps is not None and self.group_size == 1:
            return steps
        found = [guarantee]
        if guarantee.failure_probability is not None:
            found.append(self.guarantee(noise_multiplier, certified_at))
        found += [self.bounded(noise_multiplier, at) for at in deltas_below(delta)]
        # Where samples mislead, no point holds; a certified one has its own part of that already.
        failures = [one.failure_probability or 0.0 for one in found]
        misled = math.fsum(failures)
        return Losses(
            ProvenPoints(
                tuple(
                    (one.epsilon, one.delta + (misled - own))
                    for one, own in zip(found, failures, strict=True)
                )
            )
        )

    def noise_multiplier(
        self, epsilon: float, delta: float, *, discretization: float | None = None
    ) -> float:
        """Returns the smallest noise multiplier with an epsilon of at most `epsilon`.

        Smallest up to a relative gap of 1e-6 in epsilon, or what samples can tell, and on the safe
        side of it.
        """
        return self.calibrated(epsilon, delta, discretization=discretization)[0]

    def calibrated(
        self, epsilon: float, delta: float, *, discretization: float | None = None
    ) -> tuple[float, Certificate | None]:
        """Returns the noise multiplier, and the certificate of `epsilon` with it if there is one.

        Give the certificate to `guarantee` or `Mechanism.create`: they would make another one,
        whose epsilon is that of other samples.
        """
        unamplified = gaussian_noise_multiplier(
            epsilon, delta, self.sensitivity.value, discretization=discretization
        )
        amplified = None
        with contextlib.suppress(NotCertifiedError):  # The noise without amplification holds.
            amplified = self._if_sampled(
                lambda sampling: sampling.calibrated(
                    self.strategy, epsilon, delta, discretization=discretization
                )
            )
        if amplified is None or not amplified[0] < unamplified:
            return unamplified, None
        return amplified

    def closed_form_delta(self, noise_multiplier: float, epsilon: float) -> float | None:
        """Returns the smallest delta at `epsilon`; None with sampling, which has no formula."""
        if self.sampling:
            return None
        return gaussian_delta(noise_multiplier, self.sensitivity.value, epsilon)

    def first(self, num_rounds: int) -> Release:
        """Returns the release of the first rounds.

        C is lower triangular, so they release the mechanism of its leading block, under the same
        schema and on batches drawn in the same way. It is the release of a run whose length was
        fixed in advance: one that stops because of what it has released costs all its rounds.
        """
        block = self.strategy.leading_block(num_rounds)
        sampling = self._if_sampled(lambda sampling: sampling.first(num_rounds))
        return Release(block, self.participation, sampling)

    def of_group(self, size: int) -> Release:
        """Returns the release for the protection of `size` units together.

        The triangle inequality adds up their sensitivities. Members of a group are sampled
        separately, so with sampling their data are zeroed one after the other: if one unit is
        (epsilon, delta)-DP, g of them are (g epsilon, delta (1 + e^epsilon + .. + e^((g - 1)
        epsilon)))-DP (Vadhan 2017, Lemma 2.2). The better of the two counts.
        """
        together = Sensitivity(
            size * self.sensitivity.value,
            UPPER_BOUND,
            f"{self.sensitivity.theorem}, times {size} units (triangle inequality)",
        )
        return Release(self.strategy, self.participation, self.sampling, together, size)


def _group_epsilon(epsilon_at: Callable[[float], float], size: int, delta: float) -> float:
    """Returns epsilon at `delta` of so many units, from epsilon as a function of delta of one."""

    @functools.cache
    def excess(log_delta: float) -> float:
        """How far delta of the group is above `delta`, if that of one unit is given."""
        epsilon = epsilon_at(math.exp(log_delta))
        steps = math.fsum(math.exp(-j * epsilon) for j in range(size))
        return log_delta + (size - 1) * epsilon + math.log(steps) - math.log(delta)

    high, low = math.log(delta / size), math.log(delta / size) - 1.0
    if excess(high) - high + _SMALLEST_LOG_DELTA > 0.0:  # A smaller delta has a larger epsilon.
        return math.inf
    while not excess(low) <= 0.0:
        low = 2 * low - math.log(delta)
        if low < _SMALLEST_LOG_DELTA or math.isinf(excess(low)):
            return math.inf
    if excess(high) <= 0.0:
        low = high
    else:
        root = scipy.optimize.brentq(excess, low, high, xtol=1e-3)
        low = root if excess(root) <= 0.0 else max(root - 2e-3, low)
    return size * epsilon_at(math.exp(low)) if excess(low) <= 0.0 else math.inf
