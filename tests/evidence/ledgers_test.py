from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from bandmf_tf._provenance import format_time
from bandmf_tf.evidence.ledgers import (
    ledger_participation,
    pseudonymous_participation,
    timer_violators,
)
from bandmf_tf.evidence.participation import ParticipationError
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.ledger import (
    LedgerHeader,
    LedgerWriter,
    Pseudonyms,
    RoundRecord,
    read_ledger,
)

CHECKSUM = "a" * 64


def _header(**changes: object) -> LedgerHeader:
    header = LedgerHeader(
        run_id="run",
        mechanism_checksum=CHECKSUM,
        num_rounds=50,
        clients_per_round=2,
        participation_recording="none",
        salt_id=None,
        clock="simulated",
        timer_seconds=None,
        enforced_min_separation=None,
        enforced_max_participations=None,
        library_version="0",
        noise_source="system",
    )
    return dataclasses.replace(header, **changes)


def _ledger(path: Path, header: LedgerHeader, names: list[list[str]], pseudonyms=None):
    start = datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC)
    with LedgerWriter.create(path, header) as writer:
        for i, clients in enumerate(names):
            opened = start + datetime.timedelta(minutes=i)
            writer.append(
                RoundRecord(
                    round=i,
                    start=format_time(opened),
                    end=format_time(opened + datetime.timedelta(seconds=30)),
                    num_participants=len(clients),
                    mechanism_checksum=CHECKSUM,
                    model_digest=f"{i:064x}",
                    participants=pseudonyms and pseudonyms.of(clients),
                )
            )
    return read_ledger(path)


def test_pseudonyms_of_a_ledger_are_observed(tmp_path):
    pseudonyms = Pseudonyms.create(tmp_path / "salt")
    header = _header(participation_recording="pseudonymous", salt_id=pseudonyms.salt_id)
    names = [["a", "b"], ["c"], [], ["b"], ["a", "c"]]
    found = ledger_participation(_ledger(tmp_path / "ledger", header, names, pseudonyms))
    assert (found.min_separation, found.max_participations, found.rounds_completed) == (3, 2, 5)
    assert found.min_separation_basis is Basis.OBSERVED
    assert found.closest.count == 2
    assert found.closest.first_time == "2024-02-29T00:00:00.000000Z"
    assert found.closest.last_time == "2024-02-29T00:03:30.000000Z"
    assert found.contributions_by_round == (2, 1, 0, 1, 2)


def test_violators_are_those_that_no_times_of_joining_excuse(tmp_path):
    pseudonyms = Pseudonyms.create(tmp_path / "salt")
    header = _header(
        participation_recording="pseudonymous", salt_id=pseudonyms.salt_id, timer_seconds=150.0
    )
    # Rounds are open for 30 s every 60 s: two rounds apart, joins are at most 150 s apart.
    names = [["a", "b"], ["b"], ["a"], ["c"], [], ["a", "c"]]
    ledger = _ledger(tmp_path / "ledger", header, names, pseudonyms)
    assert timer_violators(ledger) == frozenset(pseudonyms.of(["b"]))
    assert timer_violators(ledger, 151.0) == frozenset(pseudonyms.of(["a", "b", "c"]))
    others = pseudonymous_participation(ledger, timer_violators(ledger))
    assert (others.min_separation, others.num_units) == (2, 2)
    without_timer = dataclasses.replace(ledger, header=_header())
    assert timer_violators(without_timer) == frozenset()


def test_who_joined_a_later_round_first_is_no_violator(tmp_path):
    pseudonyms = Pseudonyms.create(tmp_path / "salt")
    header = _header(
        participation_recording="pseudonymous", salt_id=pseudonyms.salt_id, timer_seconds=100.0
    )
    ledger = _ledger(tmp_path / "ledger", header, [["a", "b"], ["a"], ["b"]], pseudonyms)
    assert timer_violators(ledger) == frozenset(pseudonyms.of(["a"]))
    long = dataclasses.replace(ledger.records[0], end="2024-02-29T00:03:00.000000Z")
    ledger = dataclasses.replace(ledger, records=(long, *ledger.records[1:]))
    assert timer_violators(ledger) == frozenset()
    with pytest.raises(ParticipationError, match=r"timer of 100\.0 seconds"):
        ledger_participation(ledger, 1e6)


def test_a_timer_that_clients_are_known_to_have_broken_is_not_enforced(tmp_path):
    ledger = _ledger(tmp_path / "ledger", _header(timer_seconds=301.0), [["a"]] * 20)
    flagged = dataclasses.replace(ledger.records[0], flags={"timer_violations": 1})
    ledger = dataclasses.replace(ledger, records=(flagged, *ledger.records[1:]))
    assert ledger_participation(ledger).min_separation_basis is Basis.ASSUMED


@pytest.mark.parametrize("frozen", [range(20), range(5, 7)])
def test_times_that_stand_still_enforce_nothing(tmp_path, frozen):
    ledger = _ledger(tmp_path / "ledger", _header(timer_seconds=301.0), [["a"]] * 20)
    first = ledger.records[frozen[0]]
    records = [
        dataclasses.replace(record, start=first.start, end=first.start) if i in frozen else record
        for i, record in enumerate(ledger.records)
    ]
    found = ledger_participation(dataclasses.replace(ledger, records=tuple(records)))
    assert found.min_separation_basis is found.max_participations_basis is Basis.ASSUMED
    assert "a clock stands still" in found.cautions[1]


def test_without_pseudonyms_the_timer_decides(tmp_path):
    ledger = _ledger(tmp_path / "ledger", _header(timer_seconds=301.0), [["a"]] * 20)
    found = ledger_participation(ledger)
    assert (found.min_separation, found.max_participations) == (5, 4)
    assert found.min_separation_basis is Basis.ENFORCED
    assert ledger_participation(ledger, 301.0) == found
    with pytest.raises(ParticipationError, match=r"timer of 301\.0 seconds"):
        ledger_participation(ledger, 600.0)


def test_a_timer_can_be_given_where_the_ledger_has_none(tmp_path):
    ledger = _ledger(tmp_path / "ledger", _header(), [["a"]] * 20)
    with pytest.raises(ParticipationError, match="nothing bounds how often"):
        ledger_participation(ledger)
    assert ledger_participation(ledger, 301.0).min_separation == 5


def test_enforcement_by_the_program_sharpens_the_timer(tmp_path):
    header = _header(timer_seconds=301.0, enforced_min_separation=7, enforced_max_participations=2)
    found = ledger_participation(_ledger(tmp_path / "ledger", header, [["a"]] * 20))
    assert (found.min_separation, found.max_participations) == (7, 2)
    header = _header(enforced_min_separation=7)
    found = ledger_participation(_ledger(tmp_path / "other", header, [["a"]] * 20))
    assert (found.min_separation, found.max_participations) == (7, 3)


@pytest.mark.parametrize(("b", "k"), [(5, 4), (4, 9)])
def test_limits_that_the_timer_keeps_anyway_change_nothing(tmp_path, b, k):
    """The first rounds in which somebody could have been so close, or so often, stay named."""
    header, names = _header(timer_seconds=301.0), [["a"]] * 20
    alone = ledger_participation(_ledger(tmp_path / "timer", header, names))
    assert (alone.min_separation, alone.max_participations) == (5, 4)
    limited = _header(timer_seconds=301.0, enforced_min_separation=b, enforced_max_participations=k)
    assert ledger_participation(_ledger(tmp_path / "limited", limited, names)) == alone


def test_an_empty_ledger_is_refused(tmp_path):
    with pytest.raises(ParticipationError, match="no completed round"):
        ledger_participation(_ledger(tmp_path / "ledger", _header(timer_seconds=1.0), []))
