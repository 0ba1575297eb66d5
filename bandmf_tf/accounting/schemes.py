"""Sampling schemes: how batches are drawn, as the accounting, files and pipelines see it.

    CyclicScheme          parts of the data that everybody may know, one a round; epsilon by
                          composition of sampled sums                    (`amplification.py`)
    RandomParticipation   every example draws its rounds in secret; epsilon of the whole run
                          at once, certified by samples          (`random_participation.py`)

Both answer the same questions: what one example can do (`participation`), which strategies are
accounted for (`check_strategy`), epsilon for a noise multiplier (`amplified`) and back
(`calibrated`). A figure that rests on samples comes with its `Certificate`, which says how sure it
is and repeats the samples from their seed; other figures have none.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting.certificates import Certificate
from bandmf_tf.accounting.composition import Losses
from bandmf_tf.accounting.gaussian import PrivacyGuarantee
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation, Participation
from bandmf_tf.factorization.strategies import Strategy

_KINDS: dict[str, type[SamplingScheme]] = {}


@dataclass(frozen=True)
class SamplingScheme(abc.ABC):
    """How batches are drawn; see the top of this file.

    Attributes:
        num_rounds: Number of rounds, n.
        kind: Name of the scheme in flags and files.
        is_periodic: Whether the rounds of one example are multiples of `min_separation` apart.
    """

    num_rounds: int
    kind: ClassVar[str]
    is_periodic: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            _KINDS.setdefault(cls.kind, cls)

    def __post_init__(self) -> None:
        _checks.positive_int("num_rounds", self.num_rounds)

    @property
    @abc.abstractmethod
    def min_separation(self) -> int:
        """How far apart two rounds of one example are, at least."""

    @property
    def rounds_per_part(self) -> int:
        """How many rounds so far apart there are, at most: ceil(num_rounds / min_separation)."""
        return ceil_div(self.num_rounds, self.min_separation)

    @property
    def max_participations(self) -> int:
        """In how many rounds one example can take part, at most."""
        return self.rounds_per_part

    @property
    def participation(self) -> Participation:
        """The narrowest participation that allows all that the scheme can do."""
        if self.is_periodic and self.max_participations == self.rounds_per_part:
            return FixedEpochs(self.min_separation, self.rounds_per_part)
        return MinSeparation(self.min_separation, self.max_participations)

    @property
    @abc.abstractmethod
    def assumptions(self) -> tuple[str, ...]:
        """What has to be true of a training run for the guarantees to hold."""

    @abc.abstractmethod
    def check_strategy(self, strategy: Strategy) -> None:
        """Raises `BandMFError` if the theorems of the scheme do not hold for the strategy."""

    @abc.abstractmethod
    def amplified(
        self,
        strategy: Strategy,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
        certificate: Certificate | None = None,
    ) -> PrivacyGuarantee:
        """Returns the guarantee of x + C^-1 z on batches drawn so, zero-out; rho is no part of it.

        Args:
            strategy: C, as it is used.
            noise_multiplier: Standard deviation of z over the clip norm.
            delta: Delta, all that a certificate adds to it included.
            discretization: Width of the grid of privacy losses; None for one that follows them.
                Certificates need no grid.
            certificate: For this noise and delta, if it is known; otherwise it is made.
        """

    def bounded(
        self,
        strategy: Strategy,
        noise_multiplier: float,
        delta: float,
        *,
        discretization: float | None = None,
    ) -> PrivacyGuarantee:
        """Returns a guarantee that needs no samples: cheap, and no better than `amplified`."""
        return self.amplified(strategy, noise_multiplier, delta, discretization=discretization)

    def steps(self, strategy: Strategy, noise_multiplier: float) -> Losses | None:
        """Returns the sums over samples that x + C^-1 z is a composition of; None: of none."""
        del strategy, noise_multiplier
        return None

    def verify(self, strategy: Strategy, noise_multiplier: float, certificate: Certificate) -> None:
        """Draws the samples of a certificate again; raises `BandMFError` if they do not repeat."""
        raise BandMFError(
            f"{self.kind} sampling is accounted for without samples; leave out the certificate."
        )

    @abc.abstractmethod
    def calibrated(
        self,
        strategy: Strategy,
        epsilon: float,
        delta: float,
        *,
        discretization: float | None = None,
    ) -> tuple[float, Certificate | None]:
        """Returns about the smallest noise multiplier for `epsilon`, with its certificate if any.

        Smallest up to a relative gap of 1e-6 in epsilon, or to what samples can tell, and on the
        safe side of it.
        """

    def first(self, num_rounds: int) -> Self:
        """Returns the scheme of the first rounds."""
        return dataclasses.replace(self, num_rounds=num_rounds)

    def to_json(self) -> dict[str, Any]:
        """Returns the scheme as files hold it: {"kind": .., fields}."""
        if _KINDS.get(self.kind) is not type(self):  # A subclass may behave differently.
            raise BandMFTypeError(
                f"Files hold {', '.join(_KINDS)} sampling. Found {type(self).__name__}."
            )
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in fields.items()
        }
        return {"kind": self.kind, **plain}


def scheme_from_json(stored: Mapping[str, Any]) -> SamplingScheme:
    """Returns the scheme that `SamplingScheme.to_json` has described."""
    fields = dict(stored)
    kind = fields.pop("kind")
    if kind not in _KINDS:
        raise BandMFError(f"kind must be one of {', '.join(_KINDS)}. Found {kind!r}.")
    for field in dataclasses.fields(_KINDS[kind]):
        value, is_flag = fields.get(field.name), str(field.type) == "bool"
        if field.name in fields and isinstance(value, bool) != is_flag:
            wanted = "true or false" if is_flag else "a number"
            raise BandMFTypeError(f"{field.name} must be {wanted}. Found {value!r}.")
    return _KINDS[kind](**fields)
