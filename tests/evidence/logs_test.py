from __future__ import annotations

import collections
import dataclasses
import gzip
import itertools
import json
import random
from pathlib import Path

import duckdb
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bandmf_tf.evidence import logs
from bandmf_tf.evidence.counts import ParticipationLogError
from bandmf_tf.evidence.logs import read_participation_log, summarize_participation
from bandmf_tf.evidence.participation import (
    ObservedParticipation,
    ParticipationError,
    stated_participation,
    with_stated_limits,
    worse_of,
)
from bandmf_tf.runs.basis import Basis

Row = tuple[object, object]


def _write(path: Path, rows: list[Row], names: tuple[str, ...] = ("client", "round")) -> Path:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        with duckdb.connect() as engine:
            engine.execute("CREATE TABLE log (client VARCHAR, round BIGINT)")
            engine.executemany("INSERT INTO log VALUES (?, ?)", rows or [("x", 0)])
            if not rows:
                engine.execute("DELETE FROM log")
            engine.execute(f"COPY log TO '{path}'")
        return path
    if name.endswith(".csv"):
        text = "".join(",".join(map(str, row)) + "\n" for row in [names, *rows])
    else:
        text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _oracle(rows: list[Row]) -> tuple[int | None, int, int]:
    """Smallest separation, most rounds and most contributions to a round, of any one client."""
    rounds = collections.defaultdict(list)
    for client, round_number in rows:
        rounds[client].append(round_number)
    separations = [
        later - earlier
        for own in rounds.values()
        for earlier, later in itertools.pairwise(sorted(set(own)))
    ]
    repeated = max(max(collections.Counter(own).values()) for own in rounds.values())
    return min(separations, default=None), max(len(set(own)) for own in rounds.values()), repeated


def _values(found: ObservedParticipation) -> tuple[int | None, int, int]:
    return found.min_separation, found.max_participations, found.max_contributions_per_round


def test_all_formats_give_the_same_answer(tmp_path):
    rows = [(f"c{i % 7}", i) for i in range(40)] + [("c0", 3)]
    random.Random(0).shuffle(rows)
    for suffix in ("csv", "csv.gz", "jsonl", "ndjson", "jsonl.gz", "parquet"):
        found = read_participation_log(_write(tmp_path / f"log.{suffix}", rows), num_rounds=50)
        assert _values(found) == _oracle(rows) == (3, 7, 1)
        assert found.rounds_completed == 40
        closest, most_active = found.closest, found.most_active
        assert (closest.first_round, closest.last_round, closest.count) == (0, 3, 1)
        assert (most_active.first_round, most_active.last_round) == (0, 35)
        assert found.separations == {3: 1, 4: 1, 7: 32}
        assert found.participations == {5: 2, 6: 4, 7: 1}
        assert found.num_units == 7
        assert found.num_contributions == 41 == sum(found.contributions_by_round)
        assert found.min_separation_basis is found.max_participations_basis is Basis.OBSERVED


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30)), min_size=1, max_size=40),
    st.sampled_from(["csv", "jsonl"]),
)
def test_any_log_agrees_with_brute_force(tmp_path_factory, rows, suffix):
    path = tmp_path_factory.mktemp("log") / f"log.{suffix}"
    found = read_participation_log(_write(path, rows), num_rounds=31)
    assert _values(found) == _oracle(rows)
    assert found.num_contributions == len(rows)
    assert sum(found.participations.values()) == len({client for client, _ in rows})


def test_order_of_rows_does_not_matter(tmp_path):
    rows = [(f"c{i % 5}", i * i % 31) for i in range(60)]
    expected = read_participation_log(_write(tmp_path / "a.csv", rows), num_rounds=31)
    shuffled = random.Random(1).sample(rows, len(rows))
    found = read_participation_log(_write(tmp_path / "b.csv", shuffled), num_rounds=31)
    assert _values(found) == _values(expected)
    assert found.closest == expected.closest


def test_a_client_twice_in_a_round_counts_twice(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", 0), ("a", 0), ("a", 4), ("b", 1)])
    found = read_participation_log(path, num_rounds=5)
    assert _values(found) == (4, 2, 2)
    assert "2 times as large" in " ".join(found.cautions)


def test_rows_of_one_named_contribution_count_once(tmp_path):
    names = ("client", "round", "contribution_id")
    rows = [("a", 0, "x"), ("a", 0, "x"), ("b", 0, "y"), ("a", 3, "w")]
    found = read_participation_log(_write(tmp_path / "log.csv", rows, names), num_rounds=4)
    assert _values(found) == (3, 2, 1)
    rows.append(("b", 0, "z"))
    found = read_participation_log(_write(tmp_path / "log.csv", rows, names), num_rounds=4)
    assert _values(found) == (3, 2, 2)


@pytest.mark.parametrize(
    "text",
    [
        "client,round,contribution_id\na,0,x\na,0,x\nb,1,y\na,2,z\n",  # Is x a name?
        "client,round\na,0\nb,1\na,2",  # Was the end cut off?
    ],
)
def test_what_a_log_leaves_open_is_assumed_unless_a_ledger_confirms_it(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    for ledger, basis in ((None, Basis.ASSUMED), ((1, 1, 1), Basis.OBSERVED)):
        found = read_participation_log(path, num_rounds=3, contributions_by_round=ledger)
        assert _values(found) == (2, 2, 1)
        assert found.min_separation_basis is found.max_participations_basis is basis
        assert "is assumed" in " ".join(found.cautions)


def test_names_that_nobody_has_twice_are_told():
    clients = np.arange(40)
    found = summarize_participation(clients, clients % 4, rounds_completed=4, source="a ledger")
    assert "No client stands in two rounds" in found.cautions[-1]
    found = summarize_participation(clients % 39, clients % 4, rounds_completed=4, source="")
    assert found.cautions == ()


def test_names_of_a_ledger_that_all_change_at_a_round_are_told():
    rounds = np.repeat(np.arange(8), 30)
    clients = np.tile(np.arange(30), 8) + 100 * (rounds >= 4)
    found = summarize_participation(clients, rounds, rounds_completed=8, source="a ledger")
    assert "before round 4 and from it on" in found.cautions[0]


@pytest.mark.parametrize("missing", [None, "", "nan", " NULL "])
def test_rows_that_name_no_contribution_all_count(tmp_path, missing):
    names = ("client", "round", "contribution_id")
    rows = [("a", 0, missing), ("a", 0, missing), ("a", 2, "x")]
    found = read_participation_log(_write(tmp_path / "log.jsonl", rows, names), num_rounds=4)
    assert _values(found) == (2, 2, 2)


def test_spaces_around_a_client_do_not_make_it_another_one(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", 0), (" a", 1), ("a ", 3)])
    assert _values(read_participation_log(path, num_rounds=4)) == (1, 3, 1)


@pytest.mark.parametrize("stranger", [-1, 10, 12])
def test_rounds_out_of_range_are_refused(tmp_path, stranger):
    path = _write(tmp_path / "log.csv", [("a", 0), ("b", stranger)])
    with pytest.raises(ParticipationLogError, match=r"rounds must be in \[0, num_rounds - 1\]"):
        read_participation_log(path, num_rounds=10)


def test_rounds_beyond_the_completed_ones_are_refused(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", 0), ("b", 7)])
    with pytest.raises(ParticipationLogError, match="rounds_completed"):
        read_participation_log(path, num_rounds=10, rounds_completed=7)
    assert read_participation_log(path, num_rounds=10, rounds_completed=9).rounds_completed == 9
    with pytest.raises(ParticipationLogError, match="more than the num_rounds=10"):
        read_participation_log(path, num_rounds=10, rounds_completed=11)


def test_rounds_counted_from_one_are_recognised_by_the_last(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", i) for i in range(1, 11)])
    found = read_participation_log(path, num_rounds=10)
    assert found.rounds_completed == 10
    assert found.missing_rounds == 0
    assert found.closest.first_round == 0
    # Otherwise they count as counted from 0, which is one round more, never one less.
    assert read_participation_log(path, num_rounds=12).rounds_completed == 11


def test_missing_rounds_turn_observed_into_assumed(tmp_path):
    rows = [("a", 0), ("b", 1), ("a", 4)]
    found = read_participation_log(_write(tmp_path / "log.csv", rows), num_rounds=9)
    assert found.missing_rounds == 2
    assert found.rounds_completed == 5  # Not 3: a round without rows was still released.
    assert found.min_separation == 4
    assert found.min_separation_basis is found.max_participations_basis is Basis.ASSUMED
    assert "no row in 2 of the completed rounds" in found.cautions[0]


def test_a_ledger_confirms_rounds_without_participants(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", 0), ("b", 1), ("a", 4)])
    counts = [1, 1, 0, 0, 1]
    found = read_participation_log(
        path, num_rounds=9, rounds_completed=5, contributions_by_round=counts
    )
    assert found.min_separation_basis is Basis.OBSERVED
    assert not found.cautions
    with pytest.raises(ParticipationLogError, match="round 2 has 1 contributions in the ledger"):
        read_participation_log(
            path, num_rounds=9, rounds_completed=5, contributions_by_round=[1, 1, 1, 0, 1]
        )


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_an_empty_log_is_refused(tmp_path, name):
    with pytest.raises(ParticipationLogError, match="no rows"):
        read_participation_log(_write(tmp_path / name, []), num_rounds=9)


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_file_without_content_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ParticipationLogError):
        read_participation_log(tmp_path / name, num_rounds=9)


@pytest.mark.parametrize(
    "text",
    [
        "client,round\n,3\n",
        "client,round\na,\n",
        "client,round\na,3.5\n",
        "client,round\na,one\n",
        "client,round\na,99999999999999999999\n",
        "client,round\na,nan\n",
        "client,round\n  ,1\n",
        "client,round\na\n",
        "client,round\na,1,2\n",
        "client,round,round\na,1,1\n",
        "user,round\na,1\n",
        "a,1\nb,2\n",
        '"client,round\na,1\n',
        "\n\n",
        "\x00\x01",
    ],
)
def test_malformed_csv_is_refused(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ParticipationLogError):
        read_participation_log(path, num_rounds=10)


@pytest.mark.parametrize(
    "text",
    [
        '{"client": "a"}\n',
        '{"client": "a", "round": null}\n',
        '{"client": null, "round": 1}\n',
        '{"client": "a", "round": 1}\n{"client": "b"}\n',
        '{"client": "a", "round": 1}\n{"client_id": "b", "round": 1}\n',
        '{"client": "a", "round": 1.5}\n',
        '{"client": "a", "round": 1}\n{"client": "b", "rou',
        '{"client": "a", "round": [1]}\n',
        '{"client": {"x": 1, "y": 2}, "round": 1}\n{"client": {"y": 2, "x": 1}, "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": ["a"], "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": true, "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": "q", "Client": "a", "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": "q", "client": "a", "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": "q", "Client_ID": "a", "round": 2}\n',
        '{"client": "a", "round": 1}\n{"client": "q", "\\u0043lient": "a", "round": 2}\n',
        '[{"client": "a", "round": 1}]\n',
        "1\n",
        "[" * 100_000,
    ],
)
def test_malformed_json_lines_are_refused(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ParticipationLogError):
        read_participation_log(path, num_rounds=10)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.binary(max_size=200)
    | st.text(alphabet='client,round\n"{}:1234 -.\r', max_size=80).map(str.encode),
    st.sampled_from(["log.csv", "log.jsonl", "log.parquet", "log.csv.gz", "log.jsonl.gz"]),
    st.booleans(),
)
def test_any_bytes_give_an_answer_or_one_kind_of_error(tmp_path_factory, data, name, prefixed):
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes((b"client,round\na,1\n" if prefixed else b"") + data)
    try:
        found = read_participation_log(path, num_rounds=2000)
    except ParticipationLogError:
        return
    assert 1 <= found.rounds_completed <= 2000


@pytest.mark.parametrize("value", ["nan", "NaN", "NULL", "None", "<NA>", "n/a", " ", ""])
def test_what_programs_write_for_a_missing_client_is_no_client(tmp_path, value):
    path = _write(tmp_path / "log.csv", [("a", 0), (value, 1)])
    with pytest.raises(ParticipationLogError, match="1 of 2 rows have no client"):
        read_participation_log(path, num_rounds=2)


@pytest.mark.parametrize(
    "text",
    [
        'client,round\n"a,0\na,1\na",5\nb,2\n',
        'client,round,a "note"\na,0,"open\na,1,closed"\nb,2,\n',
    ],
)
def test_stray_quotes_do_not_hide_rows(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ParticipationLogError, match="1 of 2 rows have no client"):
        read_participation_log(path, num_rounds=9)


def test_a_missing_client_in_a_column_of_numbers_is_no_client(tmp_path):
    path = tmp_path / "log.parquet"
    with duckdb.connect() as engine:
        engine.execute(
            "COPY (SELECT * FROM (VALUES (1.0::DOUBLE, 0), ('nan'::DOUBLE, 1)) rows(client, round))"
            f" TO '{path}'"
        )
    with pytest.raises(ParticipationLogError, match="1 of 2 rows have no client"):
        read_participation_log(path, num_rounds=2)


def test_a_log_that_ends_early_is_cautioned_about_unless_the_end_is_known(tmp_path):
    path = _write(tmp_path / "log.csv", [("a", 0), ("b", 1)])
    found = read_participation_log(path, num_rounds=9)
    assert found.rounds_completed == 2
    assert "The log ends after 2 of 9 planned rounds" in found.cautions[-1]
    known = read_participation_log(path, num_rounds=9, rounds_completed=2)
    assert known.cautions == ()


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = _write(tmp_path / "log.parquet", [("a", i) for i in range(9)])
    whole = path.read_bytes()
    for end in range(0, len(whole), 37):
        path.write_bytes(whole[:end])
        with pytest.raises(ParticipationLogError):
            read_participation_log(path, num_rounds=10)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = _write(tmp_path / "log.csv.gz", [(f"c{i}", i) for i in range(90)])
    whole = path.read_bytes()
    for position in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        for data in (bytes(damaged), whole[:position]):
            path.write_bytes(data)
            try:
                found = read_participation_log(path, num_rounds=100)
            except ParticipationLogError:
                continue
            assert found.num_contributions == 90  # Bytes of the header that mean nothing.


def test_unknown_suffixes_and_patterns_are_refused(tmp_path):
    (tmp_path / "log.xlsx").touch()
    with pytest.raises(ParticipationLogError, match="suffix"):
        read_participation_log(tmp_path / "log.xlsx", num_rounds=10)
    path = _write(tmp_path / "log[12].csv", [("a", 1)])
    with pytest.raises(ParticipationLogError, match="rename"):
        read_participation_log(path, num_rounds=10)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_participation_log(tmp_path / "log.csv", num_rounds=10)


def test_a_log_larger_than_the_memory_limit_spills_to_disk(tmp_path):
    path = tmp_path / "log.parquet"
    with duckdb.connect() as engine:
        engine.execute(
            "COPY (SELECT md5((i % 200003)::VARCHAR) AS client, i // 2000 AS round "
            f"FROM range(2000000) rows(i)) TO '{path}'"
        )
    found = read_participation_log(path, num_rounds=1000, memory_limit_mb=100)
    assert _values(found) == (100, 10, 1)


def test_nothing_in_the_result_names_a_client(tmp_path):
    rows = [("secret-name", 1), ("secret-name", 2), ("other-name", 0)]
    found = read_participation_log(_write(tmp_path / "log.csv", rows), num_rounds=4)
    assert "name" not in repr(found)


def test_contributions_in_memory_give_the_same_summary():
    rng = np.random.default_rng(0)
    clients, rounds = rng.integers(0, 9, 50), rng.integers(0, 20, 50)
    found = summarize_participation(clients, rounds, rounds_completed=20, source="a test")
    assert _values(found) == _oracle(list(zip(clients.tolist(), rounds.tolist(), strict=True)))
    with pytest.raises(ParticipationError, match="proves nothing"):
        summarize_participation(clients[:0], rounds[:0], rounds_completed=20, source="a test")


def test_a_statement_without_a_cap_is_refused():
    with pytest.raises(ParticipationError, match=r"max_participations.*missing.*alone allows 6"):
        stated_participation(2000, 385, None)
    with pytest.raises(ParticipationError, match="min_separation is missing"):
        stated_participation(2000, None, 2)
    stated = stated_participation(2000, 385, 4)
    assert stated.min_separation_basis is Basis.ASSUMED
    assert stated_participation(2000, None, 1).min_separation is None


def test_statements_never_improve_on_what_was_observed(tmp_path):
    rows = [("a", 0), ("a", 5), ("a", 9), *((f"b{i}", i) for i in range(10))]
    found = read_participation_log(_write(tmp_path / "log.csv", rows), num_rounds=10)
    assert _values(found) == (4, 3, 1)
    better = with_stated_limits(found, 7, 2)
    assert _values(better) == (4, 3, 1)
    assert len(better.cautions) == 2
    worse = with_stated_limits(found, 2, 4)
    assert _values(worse) == (2, 4, 1)
    assert worse.min_separation_basis is Basis.ASSUMED
    assert with_stated_limits(found, None, None) == found
    # No more than three participations fit, so that more were stated says nothing new.
    assert with_stated_limits(found, None, 9) == found


def test_multiples_in_a_log_are_neither_a_timers_nor_a_statements(tmp_path):
    rows = [("a", 0), ("a", 12), ("b", 1), ("b", 19), *((f"c{i}", i) for i in range(24))]
    found = read_participation_log(_write(tmp_path / "log.csv", rows), num_rounds=24)
    assert found.separation_stride == 6
    assert with_stated_limits(found, 6, 4).separation_stride is None
    timer = dataclasses.replace(stated_participation(24, 12, 2), source="a timer")
    assert worse_of(timer, found).separation_stride is None
    assert worse_of(timer, found).units_were_seen


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((None, 1), "every unit took part in at most one of 9 rounds"),
        ((4, 1), "every unit took part in at most one of 9 rounds"),
        ((4, 2), "every unit took part in at most 2 of 9 rounds, at least 4 apart"),
    ],
)
@pytest.mark.parametrize("m", [2, 1])
def test_participation_is_said_in_words(limits, words, m):
    found = dataclasses.replace(stated_participation(9, *limits), max_contributions_per_round=m)
    assert found.describe() == words + (", up to 2 times in one round" if m == 2 else "")


def test_more_participations_than_fit_are_cut():
    assert stated_participation(100, 50, 9).max_participations == 2
    assert stated_participation(100, 200, 9).max_participations == 1


# Who is who.

SPELLINGS = {
    "zeros": ("7", "007"),
    "float": ("7", "7.0"),
    "sign": ("7", "+7"),
    "uuid": ("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "{a0eebc999c0b4ef8bb6d6bb9bd380a11}"),
    "composed": ("caf\u00e9", "cafe\u0301"),
    "no width": ("ab", "a\u200bb"),
    "mark": ("ab", "\ufeffab"),
    "tab": ("ab", "ab\t"),
    "soft hyphen": ("ab", "a\u00adb"),
    "case": ("Ab", "aB"),
    "control": ("ab", "\x1aab"),
    "quotes": ("ab", "'ab'"),
    "bytes": ("ab", "b'ab'"),
    "hex": ("ab12", "AB12"),
    "wide": ("12", "\uff11\uff12"),
    "wide letters": ("ab", "\uff21\uff42"),
    "selector": ("ab", "ab\ufe0f"),
    "filler": ("ab", "a\u3164b"),
    "minus zero": ("0", "-0.0"),
    "cyrillic": ("abc", "\u0430b\u0441"),
    "greek": ("Ax", "\u0391\u03c7"),
    "bold": ("id7", "\U0001d422\U0001d41d\U0001d7d5"),
    "raised": ("id7", "id\u2077"),
    "arabic": ("7", "\u0667"),
    "ligature": ("office", "o\ufb03ce"),
    "accents": ("jose", "jos\u00e9"),
    "dotted i": ("id1z", "\u0130d1z"),
    "apostrophe": ("007", "'7"),
    "sharp s": ("strasse", "stra\u00dfe"),
    "spaces": ("a b", "a\u00a0 b"),
    "separators": ("user_1", "User-1"),
    "brackets": ("ab", "[ab];"),
    "curly quotes": ("ab", "\u201cab\u201d"),
    "dashes": (
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "a0eebc99\u20109c0b\u20104ef8\u2010bb6d\u20106bb9bd380a11",
    ),
    "unsigned": ("-5", "18446744073709551611"),
    "minus": ("-5", "\u22125"),
    "unsigned in 32 bits": ("-5", "4294967291"),
    "32 bits in 64": ("4294967291", "18446744073709551611"),
    "32 bits in hexadecimal": ("-5", "fffffffb"),
    "hexadecimal zeros": ("0a1b2c", "a1b2c"),
    "hexadecimal": ("a1b2c", "662316"),
    "prefix": ("a1b2c", "0xA1B2C"),
    "prefix and zeros": ("0x000a1b2c", "662316"),
    "address": ("00:1b:63:84:45:e6", "00-1B-63-84-45-E6"),
    "address without zeros": ("0:1b:63:84:45:e6", "001b638445e6"),
    "address in three": ("001b.6384.45e6", "1b638445e6"),
    "address of eight": ("02:1b:63:ff:fe:84:45:e6", "021b:63ff:fe84:45e6"),
    "address of digits": ("00:11:22:33:44:55", "1122334455"),
    "zeros of a uuid": (
        "00eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "eebc999c0b4ef8bb6d6bb9bd380a11",
    ),
    "zeros inside": ("user_007", "user_7"),
    "zeros of an address": ("10.0.0.1", "010.0.0.001"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_one_client_are_cautioned_about_and_folded(tmp_path, spelling):
    """In a CSV file, whose reader may change a text, and in one of the other formats."""
    first, second = SPELLINGS[spelling]
    for suffix in ("csv", ("jsonl", "parquet")[list(SPELLINGS).index(spelling) % 2]):
        path = _write(tmp_path / f"log.{suffix}", [(first, 0), (second, 1), ("other", 2)])
        found = read_participation_log(path, num_rounds=3)
        assert "Of the clients 1 are spelled like others" in " ".join(found.cautions)
        assert found.max_participations_basis is Basis.ASSUMED
        folded = read_participation_log(path, num_rounds=4, fold_clients=True)
        assert _values(folded) == (1, 2, 1)
        assert not any("spelled" in caution for caution in folded.cautions)


@pytest.mark.parametrize(
    ("names", "is_doubted"),
    [
        (["0x12", "0xab", "12"], True),  # Is the last one 12 or 18?
        (["0x12", "0xab", "7f"], False),
        (["ab", "12", "345"], True),  # As hexadecimal digits go, 345 is too long.
        (["ab", "12", "0034"], False),
        (["xy", "12", "345"], False),
        (["-5", "12", "7.0"], False),
    ],
)
def test_names_that_look_like_numbers_of_several_notations_are_told(tmp_path, names, is_doubted):
    path = _write(tmp_path / "log.csv", [(name, i) for i, name in enumerate(names)])
    for fold in (False, True):
        found = read_participation_log(path, num_rounds=3, fold_clients=fold)
        assert ("of several notations" in " ".join(found.cautions)) == is_doubted
        assert found.min_separation_basis is (Basis.ASSUMED if is_doubted else Basis.OBSERVED)


def test_names_are_folded_by_the_engine_as_by_python():
    """Which of the two folds a name is a matter of speed."""
    draw = random.Random(0)
    alphabets = ("0123456789", "0123456789abcdef", "0189abf-", "0x1ag_-.", "abz019.")
    names = ["".join(draw.choices(a, k=draw.randint(1, 42))) for a in alphabets for _ in range(400)]
    names += [f"{bits + step}" for bits in (2**31, 2**32, 2**63, 2**64) for step in (-1, 0, 1)]
    names += [f"{int(name):x}" for name in names[-12:]] + ["0", "00", "7", "10" * 19, "9" * 38]
    with logs._engine(100) as engine:
        query = f"SELECT {logs._folded('name')} FROM (SELECT unnest(?) AS name)"
        found = [folded for (folded,) in engine.execute(query, [names]).fetchall()]
    assert found == [logs.without_spelling(name) for name in names]


@pytest.mark.parametrize(("renamed", "kept"), [(None, 0), (12, 0), (12, 2), (12, 20)])
def test_a_round_at_which_nearly_all_names_change_is_told(tmp_path, renamed, kept):
    rows = [(c, r) for r in range(24) for c in range(60) if (c + r) % 6 == 0]
    if renamed:
        rows = [(c if r < renamed or c < kept else c + 100, r) for c, r in rows]
    renamed = renamed and kept < 20  # So many are no longer hardly any.
    found = read_participation_log(_write(tmp_path / "log.csv", rows), num_rounds=24)
    assert ("before round 12 and from it on" in " ".join(found.cautions)) == bool(renamed)
    assert found.min_separation_basis is (Basis.ASSUMED if renamed else Basis.OBSERVED)


def test_clients_of_different_names_are_not_folded(tmp_path):
    names = ["70", "7", "0.7", "7.1", "a-b", "ab", "0", "x0", "0x", "10.0.0.1", "1-0001", "8", "be"]
    path = _write(tmp_path / "log.csv", [(name, i) for i, name in enumerate(names)])
    for fold in (False, True):
        found = read_participation_log(path, num_rounds=len(names), fold_clients=fold)
        assert (found.num_units, found.cautions) == (len(names), ())


@pytest.mark.parametrize("name", ["NA", "\\N", "nil", "00000000-0000-0000-0000-000000000000"])
def test_what_may_stand_for_no_client_is_cautioned_about_and_refused(tmp_path, name):
    path = _write(tmp_path / "log.csv", [("a", 0), (name, 1), (name, 3)])
    assert "Rows, 2 of them" in read_participation_log(path, num_rounds=4).cautions[0]
    with pytest.raises(ParticipationLogError, match="2 of 3 rows have no client"):
        read_participation_log(path, num_rounds=4, fold_clients=True)


def test_a_column_that_names_no_contribution_merges_nothing(tmp_path):
    names = ("client", "round", "contribution_id")
    rows = [("a", 0, "1"), ("a", 0, "1"), ("b", 1, "1"), ("b", 3, "2"), ("b", 3, "2")]
    found = read_participation_log(_write(tmp_path / "log.csv", rows, names), num_rounds=4)
    assert found.max_contributions_per_round == 2
    assert (found.num_contributions, found.contributions_by_round) == (4, (2, 1, 0, 1))
    text = " ".join(found.cautions)
    assert "Values of contribution_id (1) stand with several" in text
    assert "Rows, 1 of them, repeat another one" in text


@pytest.mark.parametrize("number", ["1.2345678901234568e+18", "1.2345678901234568E18", "1e+18"])
def test_a_number_that_a_program_rounded_is_nobodys_name(tmp_path, number):
    path = _write(tmp_path / "log.csv", [("a", 0), (number, 1)])
    with pytest.raises(ParticipationLogError, match="1 of 2 rows have no client"):
        read_participation_log(path, num_rounds=2)


@pytest.mark.parametrize("name", ["client_id", "Client_ID", "client "])
def test_two_columns_of_clients_are_refused(tmp_path, name):
    path = _write(tmp_path / "log.csv", [("a", "x", 0)], ("client", name, "round"))
    with pytest.raises(ParticipationLogError, match=f"client and {name}"):
        read_participation_log(path, num_rounds=4)


def test_a_client_of_two_names_in_a_later_row_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"client": "a", "round": 0}, {"client": "q", "client_id": "a", "round": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ParticipationLogError, match="1 of 2 rows have no client"):
        read_participation_log(path, num_rounds=4)


@pytest.mark.parametrize("number", ["9007199254740993.0", "-9.007199254740993e15", "1e400"])
def test_a_json_number_that_is_rounded_does_not_name_a_client(tmp_path, number):
    path = tmp_path / "log.jsonl"
    rows = ['{"client": 9007199254740993, "round": 0}', f'{{"client": {number}, "round": 1}}']
    path.write_text("\n".join([*rows, '{"client": 1.5, "round": 2}', ""]))
    with pytest.raises(ParticipationLogError, match="1 of 3 rows have no client"):
        read_participation_log(path, num_rounds=4)


@pytest.mark.parametrize(
    "text",
    [
        ",client,round\n0,a,0\n1,a,1\n2,b,3\n",  # As pandas writes its index.
        "client,round\na,0.0\na,1.0\nb,3.\n",  # As pandas writes a column that had gaps.
        '"",client,round,note,Note,\n,a,0,,,\n,a,1,"x",,\n,b,3,,,\n',
        "column 2,round,client\n,0,a\n,1,a\n,3,b\n",
    ],
)
def test_other_columns_may_have_no_name_or_one_that_they_share(tmp_path, text):
    (tmp_path / "log.csv").write_text(text)
    assert _values(read_participation_log(tmp_path / "log.csv", num_rounds=4)) == (1, 2, 1)


@pytest.mark.parametrize("header", ["client,CLIENT,round", ",client,round,Round", "client,round,"])
def test_a_row_is_as_long_as_the_header_which_has_no_known_column_twice(tmp_path, header):
    (tmp_path / "log.csv").write_text(f"{header}\na,0\n")
    with pytest.raises(ParticipationLogError):
        read_participation_log(tmp_path / "log.csv", num_rounds=4)


@pytest.mark.parametrize(
    "meta", ["{'client': 'x', 'round': 7}", "[{'client': {'round': 1}}]", "MAP {'client': 'x'}"]
)
def test_fields_within_a_column_are_no_columns(tmp_path, meta):
    path = tmp_path / "log.parquet"
    rows = f"SELECT {meta} AS meta, client, {meta} AS note, round"
    log = "(VALUES ('a', 0), ('a', 1), ('b', 3)) log(client, round)"
    duckdb.execute(f"COPY ({rows} FROM {log}) TO '{path}'")
    assert _values(read_participation_log(path, num_rounds=4)) == (1, 2, 1)


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    path = tmp_path / "log.parquet"
    duckdb.execute(f"COPY (SELECT 'q' AS client, 'a' AS clienX, 0 AS round) TO '{path}'")
    path.write_bytes(path.read_bytes().replace(b"clienX", b"Client"))
    with pytest.raises(ParticipationLogError, match="same name"):
        read_participation_log(path, num_rounds=4)


@pytest.mark.parametrize("client", ["true", "{'x': 1}", "['a']", "MAP {'x': 1}"])
def test_a_column_that_does_not_name_clients_is_refused(tmp_path, client):
    path = tmp_path / "log.parquet"
    duckdb.execute(f"COPY (SELECT {client} AS client, 0 AS round) TO '{path}'")
    with pytest.raises(ParticipationLogError, match="clients must be texts or numbers"):
        read_participation_log(path, num_rounds=4)


def test_a_name_is_the_same_as_text_and_as_bytes(tmp_path):
    for i, kind in enumerate(("VARCHAR", "BLOB")):
        client = "'caf\u00e9'" if kind == "VARCHAR" else "encode('caf\u00e9')"
        path = tmp_path / f"{i}.parquet"
        duckdb.execute(f"COPY (SELECT {client} AS client, {i} AS round) TO '{path}'")
    shards = (tmp_path / "0.parquet", tmp_path / "1.parquet")
    assert _values(read_participation_log(*shards, num_rounds=2)) == (1, 2, 1)
    duckdb.execute(f"COPY (SELECT '\\xFF'::BLOB AS client, 0 AS round) TO '{shards[0]}'")
    with pytest.raises(ParticipationLogError, match="not a readable"):
        read_participation_log(*shards, num_rounds=2)


@pytest.mark.parametrize(("kind", "largest"), [("FLOAT", 2**24 - 1), ("DOUBLE", 2**53 - 1)])
def test_numbers_that_were_rounded_do_not_name_clients(tmp_path, kind, largest):
    """Of a client that is 16777217 in another shard nothing would say that it is 16777216 here."""
    path = tmp_path / "log.parquet"
    for client in (largest, largest + 1):
        duckdb.execute(f"COPY (SELECT {client}::{kind} AS client, 0 AS round) TO '{path}'")
        if client == largest:
            assert read_participation_log(path, num_rounds=4).num_units == 1
    with pytest.raises(ParticipationLogError, match=f"rounds numbers from {largest + 1} on"):
        read_participation_log(path, num_rounds=4)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_names_of_folders_are_not_columns(tmp_path, suffix):
    folder = tmp_path / "round=3" / "client=z"
    folder.mkdir(parents=True)
    path = _write(folder / f"log.{suffix}", [("a", 0), ("a", 1), ("b", 3)])
    found = read_participation_log(path, num_rounds=4)
    assert _values(found) == (1, 2, 1)
    assert "The folder name round=3 was not read" in " ".join(found.cautions)


# Damage.


def test_damage_to_compressed_logs_is_found(tmp_path):
    path = tmp_path / "log.csv.gz"
    text = b"client,round\n" + b"".join(b"c%d,%d\n" % (i % 50, i % 4) for i in range(5000))
    data = bytearray(gzip.compress(text))
    data[-6] ^= 1  # Of the checksum.
    path.write_bytes(data)
    with pytest.raises(ParticipationLogError, match="damaged"):
        read_participation_log(path, num_rounds=4)


def test_a_tail_of_zeros_is_found_and_a_last_line_without_end_is_told(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"client,round\na,0\nb,3\n" + bytes(64))
    with pytest.raises(ParticipationLogError, match="zero bytes"):
        read_participation_log(path, num_rounds=4)
    path.write_bytes(b"client,round\na,0\nb,3")
    assert "has no end" in " ".join(read_participation_log(path, num_rounds=4).cautions)


@pytest.mark.parametrize("header", ["client;round", "user,round", "Client,Round"])
def test_a_log_without_the_columns_is_told_its_own(tmp_path, header):
    path = tmp_path / "log.csv"
    path.write_text(f"{header}\na,0\n")
    with pytest.raises(ParticipationLogError, match=f"Found {', '.join(header.split(','))}."):
        read_participation_log(path, num_rounds=4)
