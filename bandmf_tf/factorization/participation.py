"""Participation schemas: in which rounds one unit (example or user) may contribute.

The three of the paper. A *single* participation, at most k participations *exactly* b rounds apart
((k, b)-participation, epochs in a fixed order), and at most k participations *at least* b rounds
apart (b-min-separation). The separation is the paper's `b = r2 - r1` for rounds r1 < r2 of a unit.

JSON, as mechanism files hold it: {"schema": .., "min_separation": .., "max_participations": ..}.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from bandmf_tf import _checks
from bandmf_tf._numbers import ceil_div
from bandmf_tf.errors import BandMFError
from bandmf_tf.factorization import sensitivity as sensitivities
from bandmf_tf.factorization.sensitivity import Sensitivity
from bandmf_tf.factorization.strategies import Strategy

_CONVENTION = "min-separation b = r2 - r1 for rounds r1 < r2"


class Patterns(Protocol):
    """What a sampling scheme can do with one unit."""

    @property
    def min_separation(self) -> int:
        """How far apart two rounds of a unit are, at least."""

    @property
    def is_periodic(self) -> bool:
        """Whether they are multiples of that apart: a unit has rounds of i, i + b, .. only."""

    @property
    def rounds_per_part(self) -> int:
        """How many such rounds there are."""

    @property
    def max_participations(self) -> int:
        """In how many rounds a unit can be drawn."""


class Participation(abc.ABC):
    """In which rounds one unit may contribute.

    Attributes:
      schema: Name of the schema in files.
      min_separation: b; None if no unit takes part twice.
      max_participations: k; None stands for what the separation allows.
    """

    schema: ClassVar[str]
    min_separation: int | None
    max_participations: int | None

    @abc.abstractmethod
    def sensitivity(self, strategy: Strategy) -> Sensitivity:
        """Returns the sensitivity of `strategy`, for clip norm 1 and zero-out neighbours."""

    @abc.abstractmethod
    def allows(self, sampling: Patterns) -> bool:
        """Whether every participation pattern of the sampling scheme keeps to this schema.

        A periodic scheme draws a unit in some of the rounds i, i + b, ..: any subset of them for
        samples drawn anew, at most `sampling.max_participations` for all schemes. A subset of a
        (k, b)-pattern never has a larger sensitivity than the pattern.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the schema in words, as printed in plans and reports."""

    def separation(self, num_rounds: int) -> int:
        """Returns how far apart two participations are in `num_rounds` rounds; all if none are."""
        return num_rounds if self.min_separation is None else self.min_separation

    def most(self, num_rounds: int) -> int:
        """Returns in how many of `num_rounds` rounds a unit can take part."""
        fitting = ceil_div(num_rounds, self.separation(num_rounds))
        return min(fitting, self.max_participations or fitting)

    def to_json(self) -> dict[str, Any]:
        """Returns the schema as it is stored in files."""
        return {
            "schema": self.schema,
            "min_separation": self.min_separation,
            "max_participations": self.max_participations,
        }


@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """Every unit takes part at most once."""

    schema = "single"
    min_separation: None = dataclasses.field(default=None, init=False, repr=False)
    max_participations: int = dataclasses.field(default=1, init=False, repr=False)

    def sensitivity(self, strategy: Strategy) -> Sensitivity:
        return sensitivities.single_participation(strategy)

    def allows(self, sampling: Patterns) -> bool:
        return sampling.max_participations == 1

    def describe(self) -> str:
        return "every unit takes part in at most one round"


@dataclasses.dataclass(frozen=True)
class FixedEpochs(Participation):
    """(k, b)-participation: at most k times, exactly b rounds apart."""

    schema = "fixed_epochs"
    min_separation: int
    max_participations: int

    def __post_init__(self) -> None:
        for name in ("min_separation", "max_participations"):
            object.__setattr__(self, name, _checks.positive_int(name, getattr(self, name)))

    def sensitivity(self, strategy: Strategy) -> Sensitivity:
        return sensitivities.fixed_epochs(strategy, self.min_separation, self.max_participations)

    def allows(self, sampling: Patterns) -> bool:
        return (
            sampling.is_periodic
            and self.min_separation == sampling.min_separation
            and self.max_participations >= sampling.rounds_per_part
        )

    def describe(self) -> str:
        return (
            f"every unit takes part at most {self.max_participations} times, in rounds "
            f"{self.min_separation} apart ({_CONVENTION})"
        )


@dataclasses.dataclass(frozen=True)
class MinSeparation(Participation):
    """b-min-separation: at most k times, at least b rounds apart; k may be left open."""

    schema = "min_separation"
    min_separation: int
    max_participations: int | None = None

    def __post_init__(self) -> None:
        b = _checks.positive_int("min_separation", self.min_separation)
        object.__setattr__(self, "min_separation", b)
        if self.max_participations is not None:
            k = _checks.positive_int("max_participations", self.max_participations)
            object.__setattr__(self, "max_participations", k)

    def sensitivity(self, strategy: Strategy) -> Sensitivity:
        return sensitivities.min_separation_participation(
            strategy, self.min_separation, self.max_participations
        )

    def allows(self, sampling: Patterns) -> bool:
        return self.min_separation <= sampling.min_separation and (
            self.max_participations is None
            or self.max_participations >= sampling.max_participations
        )

    def describe(self) -> str:
        times = (
            "" if self.max_participations is None else f"at most {self.max_participations} times, "
        )
        return (
            f"every unit takes part {times}in rounds at least {self.min_separation} apart "
            f"({_CONVENTION})"
        )


def participation_from_json(value: Mapping[str, Any]) -> Participation:
    """Returns the participation that `Participation.to_json` has described."""
    b, k = value["min_separation"], value["max_participations"]
    makers = {
        SingleParticipation.schema: lambda: SingleParticipation(),
        FixedEpochs.schema: lambda: FixedEpochs(b, k),
        MinSeparation.schema: lambda: MinSeparation(b, k),
    }
    if value["schema"] not in makers:
        raise BandMFError(f"schema must be one of {tuple(makers)}. Found {value['schema']!r}.")
    found = makers[value["schema"]]()
    if found.to_json() != value:
        raise BandMFError(f"The schema is that of {found.to_json()}. Found {dict(value)}.")
    return found
