"""How examples took part in a Keras run, by its run record."""

from __future__ import annotations

import dataclasses

from bandmf_tf._numbers import ceil_div
from bandmf_tf.accounting.amplification import (
    CyclicScheme,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.evidence.participation import ObservedParticipation
from bandmf_tf.mechanisms.mechanism import SINGLE, Mechanism
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.run_record import RunRecord

_WORDS: dict[type[CyclicScheme], str] = {
    PoissonSampling: "Poisson samples",
    FixedSizeSampling: "random subsets of a fixed size",
    Shuffling: "shuffled passes",
}


def participation_of_record(record: RunRecord, mechanism: Mechanism) -> ObservedParticipation:
    """Returns how examples took part, by the sampling scheme or, unknown, by the plan."""
    if record.sampling is not None:
        separation: int | None = record.sampling.num_parts
        # A scheme's count is over all its rounds; fewer were perhaps completed.
        completed = max(record.rounds_completed, 1)
        scheme = dataclasses.replace(record.sampling, num_rounds=completed)
        participations = scheme.max_participations
        source = f"how batches were drawn ({_WORDS[type(record.sampling)]}), by the run record"
    else:
        plan = mechanism.participation
        separation = None if plan.schema == SINGLE else plan.min_separation
        most = ceil_div(record.rounds_completed, separation) if separation else 1
        participations = min(plan.max_participations or most, max(most, 1))
        source = "run record without a sampling scheme: the participation of the plan is assumed"
    if participations == 1:
        separation = None
    return ObservedParticipation(
        source=source,
        rounds_completed=record.rounds_completed,
        min_separation=separation,
        max_participations=participations,
        rounds_completed_basis=Basis.OBSERVED,
        min_separation_basis=Basis(record.sampling_basis),
        max_participations_basis=Basis(record.sampling_basis),
        cautions=record.cautions,
    )
