"""How a value about a run is known, and where its noise came from."""

from __future__ import annotations

import enum

# Where the seed of the noise came from: the operating system, or a test (anybody can subtract it).
SYSTEM, PINNED, UNKNOWN = "system", "pinned", "unknown"
NOISE_SOURCES = (SYSTEM, PINNED, UNKNOWN)


class Basis(enum.StrEnum):
    """How a value is known."""

    ENFORCED = "enforced"
    """The system kept to it by construction: a timer on the clients, or a check in the program."""

    OBSERVED = "observed"
    """It is the extreme value over a complete record of what happened."""

    ASSUMED = "assumed"
    """Somebody says so, or the record has gaps."""
