"""A registry is evidence as far as it is whole, of this run, and says the same as a ledger."""

import contextlib
import dataclasses
import shutil
import sqlite3

import pytest

import cases
from bandmf_tf.evidence.gather import gather_evidence
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.report import make_report
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.ledger import LedgerWriter
from bandmf_tf.runs.registry import ParticipationRegistry
from registry_program import make_mechanism

NUM_ROUNDS, MIN_SEPARATION, MOST = 6, 2, 3
MECHANISM = make_mechanism(NUM_ROUNDS, MIN_SEPARATION, MOST)


@pytest.fixture
def folder(tmp_path):
    """A registry, its export, the ledger and the mechanism of five rounds, one begun twice.

    Clients come back after three rounds, but for one, of whom something arrived in an attempt that
    failed. That client is in no released sum of that round, and in the registry.
    """
    registry = ParticipationRegistry.start(tmp_path / "secret", MECHANISM)
    header = cases.ledger_header(
        mechanism_checksum=registry.mechanism_checksum,
        num_rounds=NUM_ROUNDS,
        participation_recording="pseudonymous",
        salt_id=registry.identity,
        clock="real",
        enforced_min_separation=MIN_SEPARATION,
        enforced_max_participations=MOST,
    )
    save_mechanism(MECHANISM, tmp_path / "mechanism.bandmf")
    with registry, LedgerWriter.create(tmp_path / "ledger.jsonl", header) as ledger:
        for number in range(5):
            attempt = registry.begin_round(number)
            if number == 2:
                attempt.arrived(attempt.invite(["0 a"]))
                attempt = registry.begin_round(number)
            attempt.arrived(attempt.invite([f"{number % 3} {name}" for name in "abcd"])[:3])
            ledger.append(attempt.count().record(f"{number:064x}"))
        registry.export(tmp_path / "copy.sqlite")
    return tmp_path


def _evidence(folder, name="copy.sqlite"):
    apart = folder / "apart"
    apart.mkdir(exist_ok=True)
    for file in ("mechanism.bandmf", name):
        shutil.copy(folder / file, apart)
    request = ReportRequest(mechanism=apart / "mechanism.bandmf", participation=apart / name)
    return gather_evidence(request)


def test_everybody_of_whom_something_arrived_is_evidence(folder):
    evidence = _evidence(folder)
    observed = evidence.observed
    assert (observed.min_separation, observed.max_participations) == (2, 2)
    assert (observed.rounds_completed, observed.num_contributions) == (5, 15 + 1)
    assert observed.min_separation_basis is observed.max_participations_basis is Basis.OBSERVED
    assert any("at least 2 rounds apart and at most 3 times" in note for note in evidence.notes)


def test_a_report_is_made_from_it(folder):
    _evidence(folder)
    apart = folder / "apart"
    report, _ = make_report(
        ReportRequest(mechanism=apart / "mechanism.bandmf", participation=apart / "copy.sqlite")
    )
    assert report.epsilon <= report.planned.epsilon


def test_beside_a_ledger_it_must_name_the_same_clients(folder):
    request = ReportRequest(run=folder, participation=folder / "copy.sqlite")
    evidence = gather_evidence(request)
    assert evidence.observed.num_contributions == sum(evidence.ledger.contributions_by_round)
    assert not any("contradicts" in text for text in evidence.observed.cautions)
    with contextlib.closing(sqlite3.connect(folder / "copy.sqlite")) as file:
        file.execute("UPDATE participations SET outcome = 2 WHERE round = 4 AND outcome = 4")
        file.commit()
    with pytest.raises(ReportError, match="round 4 has other participants in the ledger"):
        gather_evidence(request)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ("DELETE FROM participations WHERE round = 3", "contradicts itself"),
        ("UPDATE participations SET outcome = 1 WHERE round = 3", "contradicts itself"),
        ("UPDATE clients SET participations = 3 WHERE last_round = 4", "contradicts itself"),
        ("DELETE FROM rounds WHERE round = 2", "contradicts itself"),
        ("UPDATE settings SET value = '9' WHERE name = 'min_separation'", "another min_separation"),
        ("UPDATE settings SET value = 'ab' WHERE name = 'mechanism_checksum'", "another mechanism"),
        ("DELETE FROM settings", "another format"),
        # Of a client's two rounds, another first one: as many as before, up to the same round.
        ("UPDATE participations SET round = 1 WHERE round = 0", "contradicts itself"),
        ("UPDATE participations SET previous = 0 WHERE round = 4", "contradicts itself"),
        (
            (
                "UPDATE participations SET round = round - 9 WHERE round < 2;"
                "UPDATE clients SET last_round = last_round - 9 WHERE last_round < 2"
            ),
            "contradicts itself|damaged",
        ),
        (
            (
                "UPDATE participations SET round = 'never' WHERE round = 4;"
                "UPDATE clients SET last_round = 'never' WHERE last_round = 4"
            ),
            "contradicts itself",
        ),
        (
            (
                "UPDATE rounds SET state = 0 WHERE round = 4; "
                "DELETE FROM participations WHERE outcome = 1"
            ),
            "contradicts itself",
        ),
        (
            (
                "UPDATE participations SET outcome = 9 WHERE round = 4;"
                "UPDATE clients SET last_round = 1, participations = 1 WHERE last_round = 4"
            ),
            "contradicts itself",
        ),
        ("DROP TABLE clients", "other tables than a registry"),
        (
            (
                "ALTER TABLE clients RENAME TO all_clients;"
                "CREATE VIEW clients AS SELECT * FROM all_clients WHERE last_round < 4;"
                "ALTER TABLE participations RENAME TO all_of_them;"
                "CREATE VIEW participations AS SELECT * FROM all_of_them WHERE client IN clients"
            ),
            "other tables than a registry",
        ),
        ("DELETE FROM rounds; DELETE FROM clients; DELETE FROM participations", "no round"),
    ],
)
def test_a_registry_that_was_edited_is_refused(folder, edit, sentence):
    with contextlib.closing(sqlite3.connect(folder / "copy.sqlite")) as file:
        file.executescript(edit)
    with pytest.raises(ReportError, match=sentence):
        _evidence(folder)


def test_that_nothing_followed_the_last_round_of_a_registry_is_assumed(folder):
    """A registry that was put back looks like one of a run that ended there."""
    assert _evidence(folder).observed.rounds_completed_basis is Basis.ASSUMED
    with ParticipationRegistry.start(folder / "secret", MECHANISM) as registry:
        attempt = registry.begin_round(5)
        attempt.arrived(attempt.invite(["2 a"]))
        attempt.count()
        registry.export(folder / "whole.sqlite")
    shutil.rmtree(folder / "apart")
    whole = _evidence(folder, "whole.sqlite").observed
    assert (whole.rounds_completed, whole.rounds_completed_basis) == (6, Basis.OBSERVED)


@pytest.mark.parametrize(
    "given",
    [
        {"participation": "log.csv"},
        {"participation": "another.sqlite"},
        {"min_separation": 5, "max_participations": 1},
    ],
)
def test_a_registry_beside_the_mechanism_is_not_passed_over(folder, given):
    _evidence(folder)
    apart = folder / "apart"
    shutil.copy(apart / "copy.sqlite", apart / "another.sqlite")
    with contextlib.closing(sqlite3.connect(apart / "another.sqlite")) as file:
        file.executescript("UPDATE rounds SET begun = '2024-01-01T00:00:00.000000Z'")
    (apart / "log.csv").write_text("client,round\na,0\nb,1\nc,2\nd,3\ne,4\n")
    if "participation" in given:
        given = {"participation": apart / given["participation"]}
    with pytest.raises(ReportError, match="sqlite is a participation registry of this mechanism"):
        gather_evidence(ReportRequest(mechanism=apart / "mechanism.bandmf", **given))
    run = ReportRequest(run=folder, participation=apart / "log.csv")
    with pytest.raises(ReportError, match=r"copy\.sqlite is a participation registry"):
        gather_evidence(run)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["copy.sqlite", "secret/registry.sqlite"])
def test_a_ledger_that_its_registry_has_left_behind_is_refused(folder, given, name):
    """Rounds are counted before they are released, one at a time: the ledger was cut."""
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / ("copy.sqlite" if name != "copy.sqlite" else "secret/registry.sqlite")).unlink()
    request = ReportRequest(run=folder, participation=folder / name if given else None)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:5]))  # Four of five rounds.
    assert gather_evidence(request).observed.rounds_completed == 4
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:4]))
    with pytest.raises(ReportError, match="has 3 rounds and the registry has counted 5"):
        gather_evidence(request)


@pytest.mark.parametrize("name", ["copy.sqlite", "secret/registry.sqlite"])
def test_a_ledger_that_was_written_again_is_found_by_the_registry_beside_it(folder, name):
    (folder / ("copy.sqlite" if name != "copy.sqlite" else "secret/registry.sqlite")).unlink()
    request = ReportRequest(run=folder)
    found = gather_evidence(request).ledger
    (folder / "ledger.jsonl").unlink()
    with LedgerWriter.create(folder / "ledger.jsonl", found.header) as ledger:
        for record in found.records:
            names = tuple(sorted(f"{record.round:02x}{name[2:]}" for name in record.participants))
            ledger.append(dataclasses.replace(record, participants=names))
    with pytest.raises(ReportError, match="round 0 has other participants in the ledger"):
        gather_evidence(request)


def test_a_registry_in_use_is_refused_and_a_closed_one_taken(folder):
    with ParticipationRegistry.start(folder / "secret", MECHANISM) as registry:
        registry.begin_round(5)
        request = ReportRequest(run=folder, participation=folder / "secret" / "registry.sqlite")
        with pytest.raises(ReportError, match="is in use"):
            gather_evidence(request)
    assert gather_evidence(request).observed.rounds_completed == 5


def test_a_copy_that_was_not_finished_is_refused(folder):
    (folder / "copy.sqlite-journal").write_bytes(b"what the file held before")
    request = ReportRequest(run=folder, participation=folder / "copy.sqlite")
    with pytest.raises(ReportError, match="is in use, or its program has crashed"):
        gather_evidence(request)


def test_a_damaged_registry_is_refused(folder):
    data = (folder / "copy.sqlite").read_bytes()
    (folder / "copy.sqlite").write_bytes(data[: len(data) // 2])
    with pytest.raises(ReportError, match="damaged"):
        _evidence(folder)
