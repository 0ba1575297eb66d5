"""A ledger holds what was appended, survives crashes, and shows every change."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf._provenance import format_time, parse_time
from bandmf_tf.errors import BandMFError
from bandmf_tf.runs import ledger
from bandmf_tf.runs.ledger import LedgerError, LedgerHeader, LedgerWriter, Pseudonyms, RoundRecord
from cases import CHECKSUM, largest_file, ledger_header, round_record

_header = functools.partial(
    ledger_header, clock="real", timer_seconds=3600.0, enforced_max_participations=4
)


def _write(path: Path, num_records: int = 3) -> Path:
    with LedgerWriter.create(path, _header()) as writer:
        for number in range(num_records):
            writer.append(
                round_record(number, flags={"timer_violations": 2} if number == 1 else {})
            )
    return path


@pytest.fixture(name="path")
def _path(tmp_path):
    return _write(tmp_path / "ledger.jsonl")


def test_what_was_appended_is_read_back(path):
    found = ledger.read_ledger(path)
    assert found.header == _header()
    assert found.records == (
        round_record(0),
        round_record(1, flags={"timer_violations": 2}),
        round_record(2),
    )
    assert found.num_records == 3
    assert json.loads(path.read_text().splitlines()[-1])["hash"] == found.head


def test_every_line_is_json_with_the_documented_chain(path):
    previous = "0" * 64
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        assert fields["previous"] == previous
        previous = fields["hash"]


def test_a_ledger_holds_no_other_fields_than_the_documented_ones(path):
    header, *rounds = [json.loads(line) for line in path.read_text().splitlines()]
    chain = {"hash", "previous", "kind"}
    own = {field.name for field in dataclasses.fields(LedgerHeader)}
    assert header.keys() == chain | {"format", "version", "min_separation"} | own - {
        "adaptive_clipping"
    }
    for record in rounds:
        assert record.keys() == chain | {field.name for field in dataclasses.fields(RoundRecord)}


def test_changing_any_byte_is_detected(path):
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= (1, 0x20, 0x80)[position % 3]
        with pytest.raises(LedgerError, match="line"):
            ledger._parse(bytes(damaged), path)


def test_the_error_names_the_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"num_participants":3', b'"num_participants":2')
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"line 3: .*edited or damaged"):
        ledger.read_ledger(path)


@pytest.mark.parametrize("order", [[0, 2, 3], [0, 1, 3], [0, 2, 1, 3], [0, 1, 1, 2], [1, 2, 3], []])
def test_removed_moved_and_repeated_lines_are_detected(path, order):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(LedgerError):
        ledger.read_ledger(path)


def test_a_replaced_line_is_detected_even_with_a_fresh_hash(path):
    lines = path.read_bytes().splitlines(keepends=True)
    fields = json.loads(lines[1])
    del fields["hash"]
    lines[1] = ledger._line({**fields, "num_participants": 1})
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="line 3: the record does not continue"):
        ledger.read_ledger(path)


def test_lines_cut_off_at_the_end_are_detected_from_outside(path):
    head = ledger.read_ledger(path).head
    ledger.verify_ledger(path, mechanism_checksum=CHECKSUM, num_records=3, head=head)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert ledger.read_ledger(path).num_records == 2
    with pytest.raises(LedgerError, match="ends after 2 rounds and 3 were committed"):
        ledger.verify_ledger(path, num_records=3)
    with pytest.raises(LedgerError, match="written again"):
        ledger.verify_ledger(path, head=head)
    with pytest.raises(LedgerError, match="line 1: the ledger is of the mechanism"):
        ledger.verify_ledger(path, mechanism_checksum="cd" * 32)


def test_an_interrupted_append_is_refused_by_readers_and_repaired_by_the_writer(path):
    data = path.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    for length in [*range(last + 1, len(data), 41), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(LedgerError, match="line 4: the line has no end"):
            ledger.read_ledger(path)
        with LedgerWriter.open(path) as writer:
            assert writer.num_records == 2
            writer.append(round_record(2))
        assert path.read_bytes() == data


def test_a_damaged_committed_line_is_not_repaired(path):
    data = path.read_bytes()
    damaged = data[:-10] + b"x" + data[-9:]
    path.write_bytes(damaged)
    with pytest.raises(LedgerError, match="line 4"):
        LedgerWriter.open(path)
    assert path.read_bytes() == damaged


def test_a_reopened_ledger_continues_the_same_chain(tmp_path, path):
    with LedgerWriter.open(path) as writer:
        expected = writer.next_head(round_record(3))
        assert writer.append(round_record(3)) == expected == writer.head
    assert path.read_bytes() == _write(tmp_path / "whole", 4).read_bytes()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (round_record(2), "the next round is 3"),
        (round_record(4), "the next round is 3"),
        (round_record(3, mechanism_checksum="cd" * 32), "from its first round"),
        (round_record(3, participants=("0" * 32,) * 3), "has pseudonyms"),
        (dataclasses.replace(round_record(0), round=3), "in order of time"),
    ],
)
def test_a_record_that_does_not_follow_is_refused_and_nothing_is_written(path, record, message):
    data = path.read_bytes()
    with LedgerWriter.open(path) as writer, pytest.raises(LedgerError, match=message):
        writer.append(record)
    assert path.read_bytes() == data


def test_no_round_is_taken_past_the_plan(tmp_path):
    with LedgerWriter.create(tmp_path / "ledger", _header(num_rounds=1)) as writer:
        writer.append(round_record(0))
        with pytest.raises(LedgerError, match="planned for num_rounds=1"):
            writer.append(round_record(1))


def test_a_ledger_of_version_1_is_read_and_continued_with_noise_of_unknown_source(tmp_path):
    """As 0.1 wrote it: without noise_source."""
    fields = {**_header()._fields(), "version": 1, "previous": ledger.NO_PREVIOUS}
    del fields["noise_source"]
    path = tmp_path / "ledger"
    path.write_bytes(ledger._line(fields))
    with LedgerWriter.open(path) as writer:
        assert writer.header == _header(noise_source="unknown")
        writer.append(round_record(0))
    assert ledger.read_ledger(path).num_records == 1
    for changes in ({"noise_source": "system"}, {"version": 3}, {"version": True}, {"version": 0}):
        path.write_bytes(ledger._line({**fields, **changes}))
        with pytest.raises(LedgerError, match=r"line 1: it (lacks fields|has version)"):
            ledger.read_ledger(path)


def test_a_clip_norm_that_adapts_is_in_the_header_and_needs_a_reader_that_knows_it(tmp_path):
    settings = {"target_quantile": 0.5, "learning_rate": 0.2, "vote_weight": 0.1}
    header, path = _header(adaptive_clipping=settings), tmp_path / "ledger"
    LedgerWriter.create(path, header).close()
    assert ledger.read_ledger(path).header == header
    fields = json.loads(path.read_text())
    assert fields.pop("hash")
    assert fields["version"] == ledger.VERSION == _header()._fields()["version"] + 1
    for wrong in ([], {}, {**settings, "target_quantile": 2.0}, {**settings, "vote_weight": "0.1"}):
        path.write_bytes(ledger._line({**fields, "adaptive_clipping": wrong}))
        with pytest.raises(LedgerError, match="line 1: adaptive_clipping"):
            ledger.read_ledger(path)
    path.write_bytes(ledger._line({**fields, "version": 2}))
    with pytest.raises(LedgerError, match="unknown ones"):
        ledger.read_ledger(path)


def test_one_writer_at_a_time(path):
    with LedgerWriter.open(path), pytest.raises(LedgerError, match="open in another process"):
        LedgerWriter.open(path)
    LedgerWriter.open(path).close()


def test_an_existing_ledger_is_never_replaced(path):
    data = path.read_bytes()
    with pytest.raises(FileExistsError):
        LedgerWriter.create(path, _header())
    assert path.read_bytes() == data


def test_a_full_disk_leaves_the_ledger_as_it_was(path):
    data = path.read_bytes()
    writer = LedgerWriter.open(path)
    with largest_file(len(data) + 20), pytest.raises(OSError, match="too large"):
        writer.append(round_record(3))
    assert path.read_bytes() == data
    with pytest.raises(LedgerError, match="closed"):
        writer.append(round_record(3))
    with LedgerWriter.open(path) as again:
        again.append(round_record(3))
    assert ledger.read_ledger(path).num_records == 4


def test_a_full_disk_at_the_start_leaves_nothing_of_a_ledger(tmp_path):
    with largest_file(50), pytest.raises(OSError, match="too large"):
        LedgerWriter.create(tmp_path / "ledger", _header())
    assert (tmp_path / "ledger").read_bytes() == b""
    LedgerWriter.create(tmp_path / "ledger", _header()).close()


def test_a_header_that_somebody_is_writing_is_left_alone(tmp_path):
    path = tmp_path / "ledger"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, b"{")
    with pytest.raises(LedgerError, match="open in another process"):
        LedgerWriter.create(path, _header())
    assert path.read_bytes() == b"{"
    os.close(descriptor)  # A crash: what is there is of nobody now.
    LedgerWriter.create(path, _header()).close()
    assert ledger.read_ledger(path).num_records == 0


def test_records_survive_kill_minus_nine(tmp_path):
    """The child says after every append that it returned; what it said must be in the file."""
    path = tmp_path / "ledger.jsonl"
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import ledger_test
        from bandmf_tf.runs.ledger import LedgerWriter
        with LedgerWriter.create({str(path)!r}, ledger_test._header(num_rounds=10**6)) as writer:
            for number in range(10**6):
                writer.append(ledger_test.round_record(number))
                print(number, flush=True)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=environment
    ) as child:
        said = [int(child.stdout.readline()) for _ in range(50)]
        child.kill()
        said += [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
    with LedgerWriter.open(path) as writer:
        assert writer.num_records in (len(said), len(said) + 1)
    assert ledger.read_ledger(path).records[-1].round >= said[-1]


def test_pseudonyms_link_rounds_but_need_the_salt(tmp_path):
    names = Pseudonyms.create(tmp_path / "salt")
    again = Pseudonyms.load(tmp_path / "salt")
    other = Pseudonyms.create(tmp_path / "other")
    assert names.of(["b", "a"]) == again.of(["a", "b"]) == tuple(sorted(names.of("ab")))
    assert not set(names.of(["a", "b"])) & set(other.of(["a", "b"]))
    assert names.salt_id == again.salt_id != other.salt_id
    assert (tmp_path / "salt").stat().st_mode & 0o777 == 0o600


def test_a_salt_that_others_can_read_is_refused(tmp_path):
    Pseudonyms.create(tmp_path / "salt")
    (tmp_path / "salt").chmod(0o640)
    with pytest.raises(LedgerError, match="readable by its owner only"):
        Pseudonyms.load(tmp_path / "salt")
    (tmp_path / "short").write_bytes(b"salt")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(LedgerError, match="32 bytes"):
        Pseudonyms.load(tmp_path / "short")


def test_pseudonymous_participation_is_recorded(tmp_path):
    names = Pseudonyms.create(tmp_path / "salt")
    header = _header(participation_recording="pseudonymous", salt_id=names.salt_id)
    record = round_record(0, participants=names.of(["x", "y", "z"]))
    with LedgerWriter.create(tmp_path / "ledger", header) as writer:
        writer.append(record)
        with pytest.raises(LedgerError, match="has no pseudonyms"):
            writer.append(round_record(1))
    assert ledger.read_ledger(tmp_path / "ledger").records == (record,)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": ""},
        {"mechanism_checksum": "xyz"},
        {"num_rounds": 0},
        {"participation_recording": "names"},
        {"participation_recording": "pseudonymous"},
        {"salt_id": CHECKSUM},
        {"clock": "sundial"},
        {"timer_seconds": -1.0},
        {"enforced_max_participations": 0},
    ],
)
def test_invalid_headers_are_refused(changes):
    with pytest.raises(ValueError):
        _header(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": -1},
        {"end": "2023-12-31T23:00:00.000000Z"},
        {"start": "yesterday"},
        {"num_participants": -1},
        {"model_digest": ""},
        {"participants": ("0" * 32,)},
        {"participants": ("client 1", "client 2", "client 3")},
        {"participants": ("2" * 32, "1" * 32, "3" * 32)},
        {"flags": {"Names": 1}},
        {"flags": {"timer_violations": 0}},
    ],
)
def test_invalid_records_are_refused(changes):
    with pytest.raises(ValueError):
        round_record(0, **changes)


@settings(max_examples=200)
@given(data=st.binary(min_size=1, max_size=300), position=st.integers(0, 2000))
def test_foreign_bytes_give_an_error_and_never_a_traceback(path, data, position):
    whole = path.read_bytes()
    with pytest.raises(LedgerError):
        ledger._parse(whole[:position] + data + whole[position:], path)


def test_times_are_utc_and_round_trip():
    east = datetime.timezone(datetime.timedelta(hours=2))
    time = datetime.datetime(2024, 7, 1, 1, 30, 0, 5, tzinfo=east)
    assert format_time(time) == "2024-06-30T23:30:00.000005Z"
    assert parse_time(format_time(time)) == time
    with pytest.raises(ValueError, match="time zone"):
        format_time(datetime.datetime(2024, 7, 1))


@pytest.mark.parametrize("name", [7, None, "\ud800"])
def test_a_client_id_that_cannot_be_written_is_refused(tmp_path, name):
    pseudonyms = Pseudonyms.create(tmp_path / "salt")
    with pytest.raises(BandMFError, match="client id must be a string"):
        pseudonyms.of(["a", name])
