"""How a value about a run is known, and where its noise came from."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from bandmf_tf.errors import BandMFError

# Where the seed of the noise came from: the operating system, or a test (anybody can subtract it).
SYSTEM, PINNED, UNKNOWN = "system", "pinned", "unknown"
NOISE_SOURCES = (SYSTEM, PINNED, UNKNOWN)


def check_adaptive_clipping(settings: Mapping[str, float] | None) -> None:
    """Raises unless these say how a clip norm followed a quantile; None: it did not."""
    if settings is not None and (
        not isinstance(settings, Mapping)
        or settings.keys() != {"target_quantile", "learning_rate", "vote_weight"}
        or not all(isinstance(value, float) and 0 < value <= 1 for value in settings.values())
    ):
        raise BandMFError(
            "adaptive_clipping has a target_quantile, learning_rate and vote_weight between 0 and "
            f"1. Found {settings}."
        )


class Basis(enum.StrEnum):
    """How a value is known."""

    ENFORCED = "enforced"
    """The system kept to it by construction: a timer on the clients, or a check in the program."""

    OBSERVED = "observed"
    """It is the extreme value over a complete record of what happened."""

    ASSUMED = "assumed"
    """Somebody says so, or the record has gaps."""
