"""A report carries an audit of its mechanism in its own words, and none that found a fault."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bandmf_tf._numbers import round_down, round_up
from bandmf_tf.mechanisms.files import mechanism_checksum
from bandmf_tf.runs.audit_errors import Errors, epsilon_of_mu, mu_lower_bound, mu_p_value
from bandmf_tf.runs.audit_record import (
    PROVES_NOTHING,
    AuditedPath,
    AuditRecord,
    Comparison,
    load_audit_record,
    save_audit_record,
)
from cases import make_run, planned_mechanism, refused, run_tool, verify

ERRORS = Errors(430, 1_000, 400, 1_000)
MU = mu_lower_bound(ERRORS, 0.95)
RECORD = AuditRecord(
    mechanism_checksum=mechanism_checksum(planned_mechanism()),
    num_rounds=24,
    rounds=24,
    delta=1e-6,
    claimed_mu=0.25,
    claimed_epsilon=0.8,
    claimed_epsilon_unamplified=0.8,
    confidence=0.95,
    significance=1e-6,
    paths=(
        AuditedPath(
            name="stream",
            trials=2_000,
            trials_with_canary=1_000,
            mu_lower=MU,
            epsilon_lower=epsilon_of_mu(MU, 1e-6),
            tests=(
                Comparison("size of kernel", 0.3, "variance 1.01 for 1"),
                Comparison("bound", mu_p_value(ERRORS, 0.25), ERRORS.describe()),
            ),
        ),
    ),
)


# Without a bound, which would contradict what is changed in it.
NO_BOUND = dataclasses.replace(
    RECORD,
    paths=(
        dataclasses.replace(
            RECORD.paths[0], mu_lower=None, epsilon_lower=None, tests=RECORD.paths[0].tests[:1]
        ),
    ),
)


def _flags(tmp_path, record=RECORD):
    run = make_run(tmp_path / "run")
    save_audit_record(record, tmp_path / "audit.json")
    return [f"--run={run}", f"--audit={tmp_path / 'audit.json'}"]


def test_the_statement_says_what_was_attacked_and_that_it_proves_nothing(tmp_path, capsys):
    assert run_tool(*_flags(tmp_path), f"--output={tmp_path / 'report'}") == 0
    text = " ".join((tmp_path / "report" / "statement.txt").read_text().split())
    claim = f"0.25 is claimed, which is an epsilon of {round_up(planned_mechanism().epsilon):g}"
    for words in (
        "rows of a noise stream",
        "95 % confidence",
        f"{round_down(MU):g}",
        claim,
        PROVES_NOTHING,
    ):
        assert words in text
    assert "rows of a noise stream" in (tmp_path / "report" / "report.html").read_text()
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    assert document["audit"] == RECORD.sentences()
    assert "audit" in [file["kind"] for file in document["evidence"]["files"]]
    # The words are compared with the file when the report is verified.
    assert run_tool(*verify(tmp_path / "report" / "report.json")) == 0
    better = dataclasses.replace(RECORD.paths[0], name="stream_restored")
    save_audit_record(dataclasses.replace(RECORD, paths=(better,)), tmp_path / "audit.json")
    assert run_tool(*verify(tmp_path / "report" / "report.json")) == 1
    assert "does not hold" in capsys.readouterr().err


def test_without_an_audit_nothing_is_said_of_one(tmp_path):
    assert run_tool(f"--run={make_run(tmp_path / 'run')}", f"--output={tmp_path / 'report'}") == 0
    assert "Audit" not in (tmp_path / "report" / "statement.txt").read_text()


def _violated():
    fault = Comparison("size of kernel", 1e-9, "variance 0.81 for 1")
    return dataclasses.replace(
        RECORD,
        paths=(dataclasses.replace(RECORD.paths[0], tests=(fault, RECORD.paths[0].tests[1])),),
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (_violated(), "No guarantee can be stated: the audit VIOLATES the claim"),
        (
            dataclasses.replace(RECORD, mechanism_checksum="ab" * 32),
            "audit the mechanism of the run",
        ),
        (dataclasses.replace(NO_BOUND, claimed_mu=100.0), "claim mu=100 and the mechanism claims"),
        (dataclasses.replace(RECORD, claimed_epsilon=9.0), "epsilon=9 and the mechanism claims at"),
        (dataclasses.replace(RECORD, rounds=12), "the mechanism claims"),
        (dataclasses.replace(NO_BOUND, delta=0.5), "delta=0.5 and the mechanism 1e-06"),
        (dataclasses.replace(RECORD, num_rounds=25), "24 of 25 rounds and the mechanism has 24"),
        (dataclasses.replace(_violated(), significance=1e-300), "invalid at $.significance"),
    ],
)
def test_an_audit_of_a_fault_or_another_claim_or_that_was_edited_is_refused(
    tmp_path, capsys, record, words
):
    assert words in refused(capsys, *_flags(tmp_path, record))


def test_no_word_of_the_file_is_in_the_statement(tmp_path, capsys):
    flags, path = _flags(tmp_path), tmp_path / "audit.json"
    document = RECORD.to_json()
    text = json.dumps({**document, "claimed_epsilon_unamplified": 0.01})
    path.write_text(text)
    assert load_audit_record(path).sentences() == RECORD.sentences()
    path.write_text(text.replace('"stream"', '"of all data, epsilon is at most zero"'))
    assert "is no path" in refused(capsys, *flags)
    path.write_text('{"rounds": 1, ' + json.dumps(document)[1:])
    assert "two entries called 'rounds'" in refused(capsys, *flags)


def test_what_is_no_audit_is_refused(tmp_path, capsys):
    flags = _flags(tmp_path)
    (tmp_path / "audit.json").write_text("{}")
    assert "The audit is invalid" in refused(capsys, *flags)
    (tmp_path / "audit.json").unlink()
    assert "No such file" in refused(capsys, *flags)
