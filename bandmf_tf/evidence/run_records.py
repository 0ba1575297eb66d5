"""How examples, or users, took part in a Keras run, by its run record.

That a unit is a user is called assumed. Whose examples are whose is what the training program was
told, and nothing but the record's word says that it was told anything: all else that a run leaves
looks the same. That a unit is an example is assumed of records which do not say it. Neither
implies the other, because zeroing one example of several can turn the clipped mean of a user round,
which moves it by twice the clip norm.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bandmf_tf._numbers import round_up
from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
)
from bandmf_tf.accounting.random_participation import (
    BallsInBins,
    MinSeparationSampling,
    OncePerEpoch,
    SecretParts,
)
from bandmf_tf.accounting.schemes import SamplingScheme
from bandmf_tf.evidence.participation import ObservedParticipation, ParticipationError
from bandmf_tf.evidence.reader import (
    UNIT_EXAMPLE,
    UNIT_USER,
    Evidence,
    Run,
    adaptive_clip_note,
    check_noise_source,
    stated_format,
)
from bandmf_tf.mechanisms.spending import EpsilonSpent
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.run_record import EXAMPLE, FORMAT, USER, RunRecord, load_run_record

KIND = "run record"

# The same computation agrees far better, and a sharper one of a later version may not.
_NOTICEABLE = 1.001

_ITS_OWN_WORD = (
    "The run record agrees with its mechanism and with itself, and was compared with nothing else: "
    "how batches were drawn, what a row of them was, where the noise came from, and that no round "
    "is missing is what it says."
)

_WORDS: dict[type[SamplingScheme], str] = {
    PoissonSampling: "Poisson samples",
    BoundedPoissonSampling: "Poisson samples of bounded size",
    FixedSizeSampling: "random subsets of a fixed size",
    Shuffling: "shuffled passes",
    BallsInBins: "balls in bins",
    SecretParts: "Poisson samples of secret parts",
    MinSeparationSampling: "samples of examples that have waited long enough",
    OncePerEpoch: "every example in one random round of every epoch",
}


def supports(path: Path) -> bool:
    """Whether the file is a run record."""
    return stated_format(path) == FORMAT


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of a Keras run; refuses where its sampling is not known."""
    record = load_run_record(path)
    _check(record, run)
    observed = participation_of_record(record)
    if record.cautions:
        raise ParticipationError(f"the run record says, {record.cautions[0]}")
    sampling, notes = record.sampling, [_ITS_OWN_WORD]
    planned, basis = run.mechanism.sampling, Basis(record.sampling_basis)
    if sampling != planned:  # The record alone says so, and anybody can edit it.
        basis = Basis.ASSUMED
        if planned is not None or _improves(record, run):
            observed = dataclasses.replace(
                observed, min_separation_basis=basis, max_participations_basis=basis
            )
    if record.microbatch_size > 1:
        notes.append(
            f"Gradients were averaged over {record.microbatch_size} examples before clipping. Such "
            "means are clipped to half the clip norm, so that one example moves the sum by at most "
            "the clip norm."
        )
        if basis == Basis.ASSUMED:
            # Which examples share a mean must not depend on the one in question.
            sampling = None
            notes.append(
                "No amplification is stated, because it is not known that the library put the "
                "examples of every batch in a random order itself."
            )
    adaptive = record.adaptive_clipping
    if adaptive is not None:
        notes.append(adaptive_clip_note("gradients", adaptive, record.l2_norm_clip))
    if record.rounds_completed < record.num_rounds:  # As whoever cuts a record says.
        observed = dataclasses.replace(observed, rounds_completed_basis=Basis.ASSUMED)
    limited = run.limited(_with_epsilon_compared(observed, record, run))
    same = (observed.min_separation, observed.max_participations)
    if sampling is not None and same != (limited.min_separation, limited.max_participations):
        sampling = None
        notes.append(
            "Limits were stated that are weaker than the sampling scheme; no amplification is "
            "stated for them."
        )
    elif sampling is not None and basis == Basis.ASSUMED:
        reason = (
            "the library did not draw all of them itself"
            if record.sampling_basis == Basis.ASSUMED
            else "the run record has another way than its mechanism was planned for, if any"
        )
        caution = f"How batches were drawn is assumed: {reason}. The amplified figures rest on it."
        limited = dataclasses.replace(limited, cautions=(*limited.cautions, caution))
    return Evidence(
        run=run.with_file(KIND, path),
        observed=limited,
        unit=UNIT_USER if record.unit == USER else UNIT_EXAMPLE,
        unit_basis=None if record.unit == EXAMPLE else Basis.ASSUMED,
        examples_per_user=record.examples_per_user,
        clip_norm_adapts=adaptive is not None,
        sampling=sampling,
        sampling_basis=None if sampling is None else basis,
        noise_multiplier=record.noise_multiplier,
        notes=tuple(notes),
    )


def _improves(record: RunRecord, run: Run) -> bool:
    """Whether the record allows a unit less than the mechanism was planned for."""
    assert record.sampling is not None
    plan, n = run.mechanism.participation, run.mechanism.num_rounds
    scheme = record.sampling.first(n)
    fewer = scheme.max_participations < plan.most(n)
    return fewer or scheme.min_separation > (plan.min_separation or n)


def _check(record: RunRecord, run: Run) -> None:
    """Raises unless the record is of this run, and of what the request says about it."""
    if record.mechanism_checksum != run.checksum:
        raise ParticipationError(
            f"the run record is of the mechanism {(record.mechanism_checksum or 'none')[:12]} and "
            f"not of {run.checksum[:12]}; give the mechanism file of this run."
        )
    mechanism = run.mechanism
    for name in ("noise_multiplier", "l2_norm_clip", "num_rounds", "delta", "adjacency"):
        stated = getattr(record, name)
        planned = getattr(mechanism.guarantee if name == "adjacency" else mechanism, name)
        if stated != planned:
            raise ParticipationError(
                f"the run record has {name}={stated} and its mechanism {planned}; one of them "
                "was edited, restore the record that training wrote."
            )
    if record.epsilon is None or not record.epsilon >= 0:
        raise ParticipationError(
            f"the run record has epsilon={record.epsilon!r}, which training always writes of a "
            "mechanism; restore the record that training wrote."
        )
    _check_batches(record)
    if record.rounds_completed == 0:
        raise ParticipationError("the run record has no completed round.")
    run.check_rounds(record.rounds_completed, KIND)
    run.check_no_timer(KIND)
    run.check_noise(record.noise_multiplier, KIND)


def _with_epsilon_compared(
    observed: ObservedParticipation, record: RunRecord, run: Run
) -> ObservedParticipation:
    """Returns what it says; raises if it spent more than its rounds, and more were planned."""
    assert record.epsilon is not None
    completed, planned = record.rounds_completed, record.num_rounds
    spent = EpsilonSpent(run.mechanism)(completed)
    if record.epsilon <= spent * _NOTICEABLE:
        return observed
    contradiction = (
        f"states epsilon={round_up(record.epsilon, 6):g}, and the {completed} of {planned} rounds "
        f"that it has spend {round_up(spent, 6):g}"
    )
    if completed < planned:
        raise ParticipationError(
            f"the run record {contradiction}: rounds are missing; restore the record that training "
            "wrote."
        )
    caution = f"The run record contradicts itself: it {contradiction}."
    return dataclasses.replace(
        observed,
        rounds_completed_basis=Basis.ASSUMED,
        cautions=(caution, *observed.cautions),
    )


def _check_batches(record: RunRecord) -> None:
    """Raises if the sizes of batches contradict each other, or how they were drawn."""
    for name in ("microbatch_size", "accumulation_steps"):
        if getattr(record, name) < 1:
            raise ParticipationError(
                f"the run record has {name}={getattr(record, name)}, which must be at least 1; "
                "restore the record that training wrote."
            )
    if record.microbatch_size > 1 and record.unit == USER:
        raise ParticipationError(
            f"the run record has users and microbatch_size={record.microbatch_size}, which do not "
            "go together; restore the record that training wrote."
        )
    seen = [record.batch_sizes_seen.get(name) for name in ("smallest", "mean", "largest")]
    sizes = [size if isinstance(size, int | float) else -1 for size in seen if size is not None]
    sampling, m = record.sampling, record.microbatch_size
    # Microbatches that are not full are counted as full ones.
    if isinstance(sampling, FixedSizeSampling | Shuffling) and m == 1:
        sizes = [*sizes, sampling.batch_size, *reversed(sizes)]
    elif isinstance(sampling, BoundedPoissonSampling):
        not_full = record.accumulation_steps * (m - 1)
        sizes = [*sizes, (sampling.max_batch_size + not_full) // m * m]
    if sizes != sorted(sizes) or not all(size >= 0 for size in sizes):
        raise ParticipationError(
            f"the run record saw batches of {record.batch_sizes_seen}, which contradict each other "
            "or how it says that batches were drawn; restore the record that training wrote."
        )


def participation_of_record(record: RunRecord) -> ObservedParticipation:
    """Returns how often, and how far apart, the sampling scheme can have drawn a unit.

    Raises:
      ParticipationError: The record does not say how batches were drawn, or its noise may be known
        to others.
    """
    check_noise_source(record.noise_source, KIND)
    if record.sampling is None:
        raise ParticipationError(
            "the run record does not say how batches were drawn, so nothing bounds how often an "
            "example took part; draw them with a pipeline of bandmf_tf.keras.batches."
        )
    # A scheme's count is over all its rounds; fewer were perhaps completed.
    scheme = record.sampling.first(record.rounds_completed)
    participations = scheme.max_participations
    return ObservedParticipation(
        source=f"how batches were drawn ({_WORDS[type(scheme)]}), by the run record",
        rounds_completed=record.rounds_completed,
        min_separation=None if participations == 1 else scheme.min_separation,
        max_participations=participations,
        rounds_completed_basis=Basis.OBSERVED,
        min_separation_basis=Basis(record.sampling_basis),
        max_participations_basis=Basis(record.sampling_basis),
        separation_multiple=scheme.min_separation if scheme.is_periodic else None,
        cautions=record.cautions,
    )
