"""What several runs cost each unit, where their ledgers name units by the same pseudonyms.

Whoever took part in every run at its worst bears the sum of all losses. With ledgers under one salt
(the header's `salt_id`) one can see what each unit really took part in. Releases without
amplification are Gaussian, so a unit u bears

    mu(u)^2 = sum over runs of (||C_r x_r(u)|| / noise_r)^2,

and the loss of the program is the largest of all units. ||C x(u)|| is exact where no two columns of
the unit's rounds overlap: the norm of all of them together. Otherwise it is the sensitivity of its
own separation and number of participations.

It assumes what every figure from observed participation does: that when a unit takes part does not
depend on what was released, of earlier runs too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from bandmf_tf.evidence.reader import Evidence
from bandmf_tf.report.analysis import AsObserved, PrivacyAnalysis
from bandmf_tf.runs.ledger import RECORDING_PSEUDONYMOUS

_OF_A_LEDGER = {"mechanism", "ledger", "audit", "facts"}

# Below this share of recurring pseudonyms units may have got new ones between the runs.
_LEAST_RECURRING = 1 / 2


@dataclasses.dataclass(frozen=True, eq=False)
class UnitLosses:
    """What one run cost each unit.

    Attributes:
      salt_id: Under which salt the pseudonyms are.
      units: Pseudonyms, folded to 64 bits, each once; a collision only merges two units.
      squared_mus: mu^2 of each.
    """

    salt_id: str
    units: np.ndarray
    squared_mus: np.ndarray

    def shared(self, other: UnitLosses) -> int:
        """Returns how many units took part in both."""
        if self.salt_id != other.salt_id:
            return 0
        return int(np.intersect1d(self.units, other.units, assume_unique=True).size)

    def recurring(self, other: UnitLosses) -> float:
        """Returns which share of the units of the smaller run is in both, by their pseudonyms."""
        return self.shared(other) / min(self.units.size, other.units.size)

    def can_be_joined(self, other: UnitLosses) -> bool:
        """Whether units kept their pseudonyms from one run to the other, as far as can be seen."""
        return self.recurring(other) >= _LEAST_RECURRING


def unit_losses(evidence: Evidence, analysis: PrivacyAnalysis) -> UnitLosses | None:
    """Returns what a run cost each of its units; None where its ledger does not tell.

    Nor does it where the report is of something worse than the ledger: a log beside it, or limits
    that were stated.
    """
    ledger, stated = evidence.ledger, evidence.observed
    if (
        ledger is None
        or ledger.header.participation_recording != RECORDING_PSEUDONYMOUS
        or ledger.header.salt_id is None
        or analysis.amplified is not None
        or not {file.kind for file in evidence.run.files} <= _OF_A_LEDGER
    ):
        return None
    names = [
        (int(name[:16], 16), record.round)
        for record in ledger.records
        for name in record.participants or ()
    ]
    if not names:
        return None
    # One row for each unit and round, with how often it contributed to that.
    pairs = np.array(names, dtype=[("unit", np.uint64), ("round", np.int64)])
    pairs, times = np.unique(pairs, return_counts=True)
    units, first, counts = np.unique(pairs["unit"], return_index=True, return_counts=True)
    gaps = np.diff(pairs["round"], append=0)
    gaps[np.append(first[1:], len(pairs)) - 1] = ledger.num_records  # The last one of a unit.
    closest = np.minimum.reduceat(gaps, first)
    most = np.maximum.reduceat(times, first)
    if (int(counts.max()), int(most.max())) != (
        stated.max_participations,
        stated.max_contributions_per_round,
    ) or (counts.max() > 1 and int(closest[counts > 1].min()) != stated.min_separation):
        return None
    strategy = analysis.strategy
    squares = np.asarray(strategy.column_norms(), dtype=np.float64) ** 2
    losses = most.astype(np.float64) ** 2 * np.add.reduceat(squares[pairs["round"]], first)
    overlapping = (counts > 1) & (closest < strategy.num_bands)
    for b, k, m in sorted(set(_triples(closest, counts, most, overlapping))):
        same = overlapping & (closest == b) & (counts == k) & (most == m)
        own = dataclasses.replace(
            stated,
            min_separation=b,
            max_participations=k,
            max_contributions_per_round=m,
            separations={},
        )
        losses[same] = AsObserved(own).sensitivity(strategy).value ** 2
    return UnitLosses(ledger.header.salt_id, units, losses / analysis.noise_multiplier**2)


def joined_mu(losses: Iterable[UnitLosses]) -> float:
    """Returns the largest mu that a unit bears of several runs, under one salt."""
    runs: Sequence[UnitLosses] = tuple(losses)
    units = np.concatenate([run.units for run in runs])
    _, which = np.unique(units, return_inverse=True)
    squares = np.bincount(which, np.concatenate([run.squared_mus for run in runs]))
    return math.sqrt(float(squares.max()))


def _triples(
    closest: np.ndarray, counts: np.ndarray, most: np.ndarray, chosen: np.ndarray
) -> Iterable[tuple[int, int, int]]:
    columns = (column[chosen].tolist() for column in (closest, counts, most))
    return zip(*columns, strict=True)
