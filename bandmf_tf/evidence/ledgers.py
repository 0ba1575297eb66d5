"""How clients took part in a run, by the pseudonyms, the timer and the limits in its ledger."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from bandmf_tf._numbers import ceil_div
from bandmf_tf.evidence.logs import summarize_participation
from bandmf_tf.evidence.participation import (
    ObservedParticipation,
    Occurrence,
    ParticipationError,
    worse_of,
)
from bandmf_tf.evidence.reader import (
    UNIT_DEVICE,
    Evidence,
    Run,
    adaptive_clip_note,
    check_noise_source,
    shown_count,
    stated_format,
)
from bandmf_tf.evidence.timers import (
    RoundTimeline,
    microseconds,
    timer_microseconds,
    timer_participation,
)
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.ledger import (
    FLAG_DROPPED_CLIENTS,
    FLAG_FAILED_CLIENTS,
    FLAG_TIMER_VIOLATIONS,
    FORMAT,
    RECORDING_PSEUDONYMOUS,
    Ledger,
    verify_ledger,
)

KIND = "ledger"


def supports(path: Path) -> bool:
    """Whether the file is a ledger, by its first line."""
    return stated_format(path) == FORMAT


def read(path: Path, run: Run) -> Evidence:
    """Returns the evidence of a ledger outside of the folder of its run."""
    ledger = verify_ledger(path, mechanism_checksum=run.checksum, head=run.request.ledger_head)
    return ledger_evidence(run.with_file(KIND, path), ledger)


def ledger_evidence(
    run: Run,
    ledger: Ledger,
    logged: ObservedParticipation | None = None,
    *,
    compared: bool = False,
) -> Evidence:
    """Returns the evidence of a verified ledger, and of a log beside it if there is one.

    Args:
      run: The run.
      ledger: Its ledger.
      logged: What a log beside it says.
      compared: Whether a checkpoint of the run has the last hash of the ledger. Whoever invents a
        ledger invents its timer, its times and its limits as well, so without a record outside of
        it (or the hash that the request knows) none of them is enforced.
    """
    request = run.request
    check_noise_source(ledger.header.noise_source, KIND)
    run.check_rounds(ledger.num_records, KIND)
    run.check_noise(run.mechanism.noise_multiplier, "mechanism of the ledger")
    observed, contradicted = logged, False
    if logged is None or _says_who(ledger, request.timer_seconds):
        observed = ledger_participation(ledger, request.timer_seconds)
        if logged is not None:
            contradicted = observed.participations != logged.participations
            observed = worse_of(observed, logged)
    assert observed is not None
    compared = compared or request.ledger_head is not None
    if not compared:
        observed = observed.by_its_own_word(run.mechanism.num_rounds)
    violators = timer_violators(ledger, request.timer_seconds)
    timer = ledger.header.timer_seconds or request.timer_seconds
    broken = violators or _flagged(ledger, FLAG_TIMER_VIOLATIONS)
    kept = compared and ledger.header.timer_seconds is not None and not broken
    told = Basis.ENFORCED if kept else Basis.ASSUMED
    num_units = observed.num_units or 0
    return Evidence(
        run=run,
        observed=run.limited(
            observed,
            # A cap that the program enforced is in the ledger, and so is what a log shows.
            cap_may_bind=not observed.units_were_seen
            and ledger.header.enforced_max_participations is None,
        ),
        enforced=_enforced(ledger, observed) if compared and not broken else None,
        unit=UNIT_DEVICE,
        clip_norm_adapts=ledger.header.adaptive_clipping is not None,
        noise_multiplier=run.mechanism.noise_multiplier,
        ledger=ledger,
        timer_seconds=timer,
        timer_seconds_basis=None if timer is None else told,
        violators=len(violators),
        well_behaved=(
            pseudonymous_participation(ledger, violators)
            if 0 < len(violators) < num_units and not contradicted
            else None
        ),
        notes=tuple(_notes(run, ledger, compared, all_violated=0 < num_units <= len(violators))),
    )


def _enforced(ledger: Ledger, observed: ObservedParticipation) -> ObservedParticipation | None:
    """Returns what devices could do at most, where it is seen that they kept to it."""
    header = ledger.header
    limits = (header.timer_seconds, header.enforced_min_separation)
    if not observed.units_were_seen or limits == (None, None):
        return None
    enforced = _bounded_participation(ledger, header.timer_seconds)
    closest = observed.min_separation or observed.rounds_completed
    kept = (
        closest >= (enforced.min_separation or 1)
        and observed.max_participations <= enforced.max_participations
        and observed.max_contributions_per_round == 1
    )
    return enforced if kept else None


def _says_who(ledger: Ledger, timer_seconds: float | None) -> bool:
    """Whether the ledger bounds by itself how clients took part."""
    header = ledger.header
    return (
        header.participation_recording == RECORDING_PSEUDONYMOUS
        or header.enforced_min_separation is not None
        or (timer_seconds or header.timer_seconds) is not None
    )


def _notes(run: Run, ledger: Ledger, compared: bool, *, all_violated: bool) -> list[str]:
    end = (
        "No released model or checkpoint in the run folder is of a later round."
        if run.request.run is not None
        else "That no line was cut off its end cannot be seen from the ledger alone."
    )
    if run.request.ledger_head is not None:
        known = (
            "it is the hash that whoever made this report had kept elsewhere; compare it with that "
            "record"
        )
    elif compared:
        known = (
            "it is the hash in the newest checkpoint of the run; it was not compared with a record "
            "kept elsewhere"
        )
    else:
        known = (
            "not compared with an independent record, so what rests on a timer or on limits that "
            "it states, on its times, or on its end before the last planned round, is assumed"
        )
    chain = f"The ledger is internally consistent; its last line has the hash {ledger.head}"
    notes = [f"{chain}: {known}. {end}"]
    if all_violated:
        notes.append("No device kept to the timer; the figures include all of them.")
    if flagged := _flagged(ledger, FLAG_TIMER_VIOLATIONS):
        shown = shown_count(flagged, run.request.smallest_count)
        notes.append(
            f"The ledger flags participations before a client's timer allowed them: {shown}."
        )
    if failed := _flagged(ledger, FLAG_FAILED_CLIENTS):
        shown = shown_count(failed, run.request.smallest_count)
        notes.append(f"Clients whose data failed were left out, by the ledger: {shown}.")
    if dropped := _flagged(ledger, FLAG_DROPPED_CLIENTS):
        shown = shown_count(dropped, run.request.smallest_count)
        notes.append(f"Clients that were asked and are in no sum, by the ledger: {shown}.")
    if (adaptive := ledger.header.adaptive_clipping) is not None:
        notes.append(adaptive_clip_note("updates", adaptive, run.mechanism.l2_norm_clip))
    if ledger.header.clock == "simulated":
        notes.append("The clock of this run is simulated: it is no deployment.")
    return notes


def _flagged(ledger: Ledger, flag: str) -> int:
    return sum(record.flags.get(flag, 0) for record in ledger.records)


def timeline_of(ledger: Ledger) -> RoundTimeline:
    """Returns the timeline of the rounds in a ledger."""
    return RoundTimeline(
        np.array([microseconds(record.start) for record in ledger.records], dtype=np.int64),
        np.array([microseconds(record.end) for record in ledger.records], dtype=np.int64),
        ledger.contributions_by_round,
    )


def ledger_participation(
    ledger: Ledger, timer_seconds: float | None = None
) -> ObservedParticipation:
    """Returns how clients took part in the run of a ledger, by the best evidence that it holds.

    Pseudonyms, where they were recorded; otherwise the timer of the clients, of the ledger's header
    or as given, and what the program itself enforced.

    Raises:
      ParticipationError: The ledger has no round, or nothing that bounds the participation.
    """
    if not ledger.records:
        raise ParticipationError("the ledger has no completed round; there is nothing to report.")
    header = ledger.header
    timer = header.timer_seconds if timer_seconds is None else timer_seconds
    if header.timer_seconds not in (None, timer):
        raise ParticipationError(
            f"the ledger says that clients kept a timer of {header.timer_seconds} seconds. Found "
            f"timer_seconds={timer_seconds}."
        )
    if header.participation_recording == RECORDING_PSEUDONYMOUS:
        return pseudonymous_participation(ledger)
    if timer is None and header.enforced_min_separation is None:
        raise ParticipationError(
            "the ledger names no clients, no timer and no enforced separation, so nothing bounds "
            "how often a client took part; give timer_seconds, the period of the clients' timer, "
            "or a participation log."
        )
    return _bounded_participation(ledger, timer)


def _bounded_participation(ledger: Ledger, timer: float | None) -> ObservedParticipation:
    """Returns what a timer, and what the program enforced, leave room for."""
    header = ledger.header
    if timer is None:
        observed = _enforced_participation(ledger)
    else:
        # Who did not keep to it is not known, so that the others did is all that can be assumed.
        kept = header.timer_seconds is not None and not _flagged(ledger, FLAG_TIMER_VIOLATIONS)
        basis = Basis.ENFORCED if kept else Basis.ASSUMED
        observed = timer_participation(timeline_of(ledger), timer, basis)
    return _with_enforced_limits(observed, ledger)


def timer_violators(ledger: Ledger, timer_seconds: float | None = None) -> frozenset[str]:
    """Returns the pseudonyms of clients that cannot have kept to their timer.

    A client that kept to it can take part in round r1 and then in r2 only if
    `end[r2] - start[r1] >= T`, in either order, see `timers.py`. Empty where the ledger has no
    pseudonyms or no timer is known.
    """
    period = ledger.header.timer_seconds if timer_seconds is None else timer_seconds
    if period is None or ledger.header.participation_recording != RECORDING_PSEUDONYMOUS:
        return frozenset()
    timer, timeline = timer_microseconds(period), timeline_of(ledger)
    starts, ends = timeline.starts, timeline.ends
    violators: set[str] = set()
    last_round: dict[str, int] = {}
    for record in ledger.records:
        for name in record.participants or ():
            before, this = last_round.get(name), record.round
            last_round[name] = this
            if before is None:
                continue
            if max(ends[this] - starts[before], ends[before] - starts[this]) < timer:
                violators.add(name)
    return frozenset(violators)


def pseudonymous_participation(
    ledger: Ledger, without: frozenset[str] = frozenset()
) -> ObservedParticipation:
    """Returns how the clients in a ledger took part, leaving out those in `without`."""
    # Pseudonyms are folded to 64 bits; a collision only merges two clients.
    clients, rounds = [], []
    for record in ledger.records:
        kept = [int(name[:16], 16) for name in record.participants or () if name not in without]
        clients += kept
        rounds += [record.round] * len(kept)
    observed = summarize_participation(
        np.array(clients, dtype=np.uint64),
        np.array(rounds, dtype=np.int64),
        rounds_completed=ledger.num_records,
        source="pseudonyms in the ledger",
    )
    timeline = timeline_of(ledger)
    changes: dict[str, Occurrence] = {}
    for name in ("closest", "most_active"):
        place: Occurrence | None = getattr(observed, name)
        if place is not None:
            first_time, last_time = timeline.times(place.first_round, place.last_round)
            changes[name] = dataclasses.replace(place, first_time=first_time, last_time=last_time)
    return dataclasses.replace(observed, **changes)  # type: ignore[arg-type]


def _enforced_participation(ledger: Ledger) -> ObservedParticipation:
    b, t = ledger.header.enforced_min_separation, ledger.num_records
    assert b is not None
    contributions = ledger.contributions_by_round
    return ObservedParticipation(
        source=f"a separation of {b} rounds that the training program enforced",
        rounds_completed=t,
        min_separation=b,
        max_participations=ceil_div(t, b),
        rounds_completed_basis=Basis.OBSERVED,
        min_separation_basis=Basis.ENFORCED,
        max_participations_basis=Basis.ENFORCED,
        num_contributions=sum(contributions),
        contributions_by_round=contributions,
    )


def _with_enforced_limits(observed: ObservedParticipation, ledger: Ledger) -> ObservedParticipation:
    """Sharpens the worst case by what the program enforced beside the timer."""
    b, k = observed.min_separation, observed.max_participations
    enforced_b = ledger.header.enforced_min_separation
    enforced_k = ledger.header.enforced_max_participations
    changes: dict[str, object] = {}
    if b is not None and enforced_b is not None and enforced_b > b:
        changes.update(min_separation=enforced_b, closest=None, min_separation_basis=Basis.ENFORCED)
    if enforced_k is not None and enforced_k < k:
        changes.update(
            max_participations=enforced_k, most_active=None, max_participations_basis=Basis.ENFORCED
        )
    return dataclasses.replace(observed, **changes)  # type: ignore[arg-type]
