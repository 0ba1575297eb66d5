"""Mechanisms: a strategy with its noise and everything its privacy guarantee rests on.

A `Mechanism` is what planning produces and what training, ledgers and reports consume. It releases
`x + C^-1 z` row by row: x holds the sums of contributions clipped to `l2_norm_clip`, z independent
Gaussian rows of standard deviation `noise_multiplier * l2_norm_clip`. The strategy C is used as it
is stored; its `sensitivity` for clip norm 1 stands beside the noise multiplier and is 1 only if the
strategy was scaled that way. As one Gaussian release the mechanism is rho-zCDP with

    rho = sensitivity^2 / (2 noise_multiplier^2),

for units that keep to `participation`. If `sampling` is given, epsilon is amplified by it; what the
sampling can do must then be allowed by the participation, so that rho holds for the same run.

All guarantees are for zero-out neighbours. Min-separation is the paper's `b = r2 - r1`.

A mechanism is constructed only if its parts agree: the constructor computes the sensitivity again
and checks rho, and epsilon too where that is a closed formula. `files.py` stores it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping

from bandmf_tf import _checks, _provenance
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.gaussian import (
    Adjacency,
    PrivacyGuarantee,
    zcdp_rho,
)
from bandmf_tf.accounting.releases import Release
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.participation import Participation
from bandmf_tf.factorization.sensitivity import EXACT, UPPER_BOUND, Sensitivity
from bandmf_tf.factorization.strategies import Strategy
from bandmf_tf.factorization.workloads import Workload

# Sensitivity and rho are recomputed in double precision, possibly by another BLAS.
_TOLERANCE = 1e-9

# Epsilon is read off a distribution convolved by FFT; at small delta its last digits are rounding.
_EPSILON_TOLERANCE = 1e-4

# How much larger epsilon of sampled mechanisms has been stated.
_FEWER_DIGITS = 1.003

# Attribute of a mechanism whose epsilon was computed in this process.
_VERIFIED = "_verified"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a mechanism comes from.

    Attributes:
      library_version: Version of bandmf_tf that made the mechanism.
      created: Date and time in UTC, ISO 8601 to the second with the suffix Z.
      notes: How it was made, for example the numbers of the optimiser: a flat mapping from names to
        strings, finite numbers and truth values.
    """

    library_version: str
    created: str
    notes: Mapping[str, str | int | float | bool]

    def __post_init__(self) -> None:
        _provenance.check_time("created", self.created)
        for name, note in self.notes.items():
            if not isinstance(name, str) or not isinstance(note, str | int | float):
                raise BandMFTypeError(
                    f"notes must map strings to strings and numbers. Found {name!r}: {note!r}."
                )
            if isinstance(note, float) and not math.isfinite(note):
                raise BandMFError(f"notes must hold finite numbers. Found {name!r}: {note!r}.")
        object.__setattr__(self, "notes", types.MappingProxyType(dict(self.notes)))

    @classmethod
    def now(cls, notes: Mapping[str, str | int | float | bool] | None = None) -> Provenance:
        """Returns the provenance of something made now by the library that is installed."""
        return cls(_provenance.version_of(), _provenance.now(), notes or {})


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    """A strategy with its noise and its guarantee; see the top of this file. Immutable.

    `Mechanism.create(..)` computes what follows from the rest; the constructor only verifies it.

    Attributes:
      strategy: C, scaled as it is used.
      workload: A, on which the error of the mechanism is measured. It does not affect privacy.
      participation: In which rounds one unit may contribute.
      sampling: How batches are drawn, if epsilon is amplified by it; otherwise None.
      noise_multiplier: Standard deviation of z over the clip norm.
      l2_norm_clip: Clip norm of one unit's contribution to one round.
      sensitivity: Of `strategy` under `participation`, for clip norm 1.
      guarantee: Epsilon, delta and rho, for zero-out neighbours, with their accounting and
        assumptions.
      discretization: Width of the grid of privacy losses on which epsilon was computed; None for
        the closed form and, with sampling, a grid that follows the loss of one step.
      provenance: Where the mechanism comes from.
    """

    strategy: Strategy
    workload: Workload
    participation: Participation
    sampling: SamplingScheme | None
    noise_multiplier: float
    l2_norm_clip: float
    sensitivity: Sensitivity
    guarantee: PrivacyGuarantee
    discretization: float | None
    provenance: Provenance

    @classmethod
    def create(
        cls,
        strategy: Strategy,
        workload: Workload,
        participation: Participation,
        *,
        noise_multiplier: float,
        l2_norm_clip: float,
        delta: float,
        sampling: SamplingScheme | None = None,
        notes: Mapping[str, str | int | float | bool] | None = None,
        discretization: float | None = None,
        certificate: Certificate | None = None,
    ) -> Mechanism:
        """Returns the mechanism with its sensitivity and guarantee computed, made now.

        With the certificate that calibration has found for this noise and delta, if there is one.
        """
        release = Release(strategy, participation, sampling)
        made = cls(
            strategy=strategy,
            workload=workload,
            participation=participation,
            sampling=sampling,
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            sensitivity=release.sensitivity,
            guarantee=release.guarantee(
                noise_multiplier, delta, discretization=discretization, certificate=certificate
            ),
            discretization=discretization,
            provenance=Provenance.now(notes),
        )
        object.__setattr__(made, _VERIFIED, True)
        return made

    def __post_init__(self) -> None:
        names = ["noise_multiplier", "l2_norm_clip"]
        if self.discretization is not None:
            names.append("discretization")
        for name in names:
            object.__setattr__(self, name, _checks.positive_float(name, getattr(self, name)))
        self._check_rounds()
        self._check_sensitivity()
        self._check_guarantee()

    @functools.cached_property
    def release(self) -> Release:
        """What is released and so has a cost, with the sensitivity that the mechanism states."""
        return Release(self.strategy, self.participation, self.sampling, self.sensitivity)

    @property
    def num_rounds(self) -> int:
        """Number of rounds n that the mechanism can release."""
        return self.strategy.num_rounds

    @property
    def num_bands(self) -> int:
        """Number of bands of the strategy."""
        return self.strategy.num_bands

    @property
    def stddev(self) -> float:
        """Standard deviation of the entries of z, `noise_multiplier * l2_norm_clip`."""
        return self.noise_multiplier * self.l2_norm_clip

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon at `delta`, amplified if `sampling` makes it smaller."""
        return self.guarantee.epsilon

    @property
    def delta(self) -> float:
        """Delta of the guarantee."""
        return self.guarantee.delta

    @property
    def rho(self) -> float:
        """The mechanism is rho-zCDP, with or without sampling."""
        return self.guarantee.rho

    @property
    def is_amplified(self) -> bool:
        """Whether sampling makes epsilon smaller than it is without."""
        return self.release.is_amplified(self.noise_multiplier, self.guarantee)

    def guarantee_at(self, delta: float) -> PrivacyGuarantee:
        """Returns the guarantee computed at a delta."""
        return self.release.guarantee(
            self.noise_multiplier, delta, discretization=self.discretization
        )

    def verify_epsilon(self) -> PrivacyGuarantee:
        """Computes the guarantee again and returns it; raises if epsilon is not the one stated.

        Costs what calibration's last evaluation costs: up to seconds for amplified mechanisms,
        which is why construction and loading leave it to those who rely on epsilon
        (`require_verified`). A certificate is repeated from its seed, sample by sample.
        """
        certificate = self.guarantee.certificate
        if certificate is not None:
            assert self.sampling is not None
            self.sampling.verify(self.strategy, self.noise_multiplier, certificate)
        recomputed = self.release.guarantee(
            self.noise_multiplier,
            self.delta,
            discretization=self.discretization,
            certificate=certificate,
        )
        least = recomputed.epsilon * (1 - _EPSILON_TOLERANCE)
        if not least <= self.epsilon <= self._most_stated(recomputed) * (1 + _EPSILON_TOLERANCE):
            raise BandMFError(
                f"The mechanism states epsilon={exactly(self.epsilon)} and its noise gives "
                f"{exactly(recomputed.epsilon)} at delta={exactly(self.delta)}; plan it again."
            )
        object.__setattr__(self, _VERIFIED, True)
        return recomputed

    def require_verified(self) -> None:
        """Raises unless epsilon is the one stated; computes it once, if nobody here has yet.

        Training calls it before its first step: a file of a sampled mechanism may state any epsilon
        or certificate. Without sampling construction has compared it.
        """
        if self.sampling is not None and not getattr(self, _VERIFIED, False):
            self.verify_epsilon()

    def _most_stated(self, recomputed: PrivacyGuarantee) -> float:
        """Returns the largest epsilon that a library of this or an earlier version states.

        On a grid of fixed width, version 0.1 stated the amplified epsilon also where the one
        without amplification is smaller, and lowered delta by the rounding of its composition.
        Without such a grid, losses had fewer digits. Such files hold a valid bound, as they did.
        """
        if self.sampling is None:
            return recomputed.epsilon
        if self.discretization is None:
            return recomputed.epsilon * _FEWER_DIGITS
        rounding = 1e-15 + 1e-15 * self.sampling.rounds_per_part
        if rounding >= self.delta:
            return math.inf
        earlier = self.sampling.bounded(
            self.strategy,
            self.noise_multiplier,
            self.delta - rounding,
            discretization=self.discretization,
        )
        return max(earlier.epsilon, recomputed.epsilon)

    def describe(self) -> str:
        """Returns the mechanism in words, as printed in plans and reports."""
        size = f"{round_up(self.sensitivity.value, 6):g} at clip norm 1"
        noise = (
            f"multiplier {round_up(self.noise_multiplier, 6):g} times clip norm "
            f"{exactly(self.l2_norm_clip)}"
        )
        lines = [
            f"strategy: {self.strategy.describe()}, {self.num_rounds} rounds",
            f"workload: {self.workload.describe()}",
            f"participation: {self.participation.describe()}",
            f"sensitivity: {size} ({self.sensitivity.kind}; {self.sensitivity.theorem})",
            f"noise: {noise} = standard deviation {round_up(self.stddev, 6):g}",
            f"guarantee: {self.guarantee}",
            f"accounting: {self.guarantee.accounting}",
            *(f"assumes: {assumption}" for assumption in self.guarantee.assumptions),
        ]
        return "\n".join(lines)

    def _check_rounds(self) -> None:
        rounds = {"strategy": self.num_rounds, "workload": self.workload.num_rounds}
        if self.sampling is not None:
            rounds["sampling"] = self.sampling.num_rounds
        if len(set(rounds.values())) > 1:
            raise BandMFError(f"num_rounds must be the same in every part. Found {rounds}.")

    def _check_sensitivity(self) -> None:
        """Compares with a fresh computation; a stated upper bound may be larger than that."""
        stated = self.sensitivity
        found = Release(self.strategy, self.participation, self.sampling).sensitivity
        equal = math.isclose(stated.value, found.value, rel_tol=_TOLERANCE)
        is_bound = stated.kind == UPPER_BOUND and (equal or found.value < stated.value < math.inf)
        is_exact = stated.kind == found.kind == EXACT and equal
        if not (is_bound or is_exact):
            raise BandMFError(
                f"The mechanism states a sensitivity of {stated.value:.9g} ({stated.kind}) and its "
                f"strategy has {found.value:.9g} ({found.kind}) under its participation."
            )

    def _check_guarantee(self) -> None:
        stated = self.guarantee
        if stated.adjacency is not Adjacency.ZERO_OUT:
            raise BandMFError(
                "The guarantee of a mechanism is for zero-out neighbours. Found "
                f"{stated.adjacency}."
            )
        _checks.probability("delta", stated.delta)
        if not 0.0 <= stated.epsilon < math.inf:
            raise BandMFError(
                "epsilon must be finite and not negative; add noise or allow a larger delta than "
                f"{exactly(stated.delta)}. Found {stated.epsilon}."
            )
        rho = zcdp_rho(self.noise_multiplier, self.sensitivity.value)
        if not math.isclose(stated.rho, rho, rel_tol=_TOLERANCE):
            raise BandMFError(
                f"The mechanism states rho={exactly(stated.rho)} and its noise multiplier "
                f"{exactly(self.noise_multiplier)} with sensitivity "
                f"{exactly(self.sensitivity.value)} gives {exactly(rho)}."
            )
        certificate = stated.certificate
        if certificate is not None and (
            self.sampling is None
            or (certificate.epsilon, certificate.delta) != (stated.epsilon, stated.delta)
        ):
            raise BandMFError(
                f"The certificate must be for the sampling and the epsilon={stated.epsilon!r}, "
                f"delta={stated.delta!r} that the mechanism states. Found {certificate}."
            )
        delta = self.release.closed_form_delta(self.noise_multiplier, stated.epsilon)
        if delta is not None and delta > stated.delta * (1 + _EPSILON_TOLERANCE):
            raise BandMFError(
                f"The mechanism states epsilon={exactly(stated.epsilon)} at "
                f"delta={exactly(stated.delta)} and its noise gives delta={exactly(delta)} at that "
                "epsilon."
            )
