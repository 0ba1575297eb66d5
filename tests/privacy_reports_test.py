from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import hypothesis
import jsonschema
import pytest
import yaml
from hypothesis import strategies as st

from bandmf_tf import schemas
from bandmf_tf.amplification import PoissonSampling
from bandmf_tf.cli.report import main
from bandmf_tf.ledger import LedgerHeader, LedgerWriter, Pseudonyms, RoundRecord, format_time
from bandmf_tf.mechanism_files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms import Mechanism, Participation
from bandmf_tf.observed_participation import Basis
from bandmf_tf.optimization import optimize_banded
from bandmf_tf.privacy_analysis import round_up
from bandmf_tf.privacy_reports import (
    make_report,
    read_report,
    request_of,
    verify_report,
)
from bandmf_tf.privacy_statements import (
    registry_entry,
    statement_markdown,
    statement_text,
)
from bandmf_tf.report_evidence import ReportError, ReportRequest, gather_evidence
from bandmf_tf.run_records import RunRecord, save_run_record
from bandmf_tf.workloads import prefix_sum

N, B, K = 24, 6, 4
# Much noise: accounting takes time in proportion to the privacy loss.
NOISE = 8.0
MODEL = b"a model"
FILES = {"statement.txt", "statement.md", "report.json", "deployment.yaml", "report.html"}
KEYS = {
    "min_separation",
    "max_participations",
    "rounds_completed",
    "sensitivity",
    "sensitivity_kind",
    "rho",
    "epsilon",
    "delta",
    "adjacency",
}


@functools.cache
def _mechanism(noise_multiplier: float = NOISE) -> Mechanism:
    return Mechanism.create(
        optimize_banded(prefix_sum(N), B).strategy,
        prefix_sum(N),
        Participation.separated(B, K),
        noise_multiplier=noise_multiplier,
        l2_norm_clip=0.5,
        delta=1e-6,
    )


@pytest.fixture
def mechanism(tmp_path):
    path = tmp_path / "mechanism.bandmf"
    save_mechanism(_mechanism(), path)
    return path


@pytest.fixture
def log(tmp_path):
    return _write_log(tmp_path)


def _write_log(folder: Path) -> Path:
    path = folder / "log.csv"
    rows = [f"secret-{i % B},{i}" for i in range(N)]
    path.write_text("client,round\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def run_report(tmp_path_factory):
    """A folder with a run and its report; look and do not touch."""
    folder = tmp_path_factory.mktemp("run_report")
    run = _make_run(folder / "run")
    assert _run(f"--run={run}", "--delta=1e-8", f"--output={folder / 'out'}") == 0
    return folder


@pytest.fixture(scope="module")
def _log_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log_report")
    save_mechanism(_mechanism(), folder / "mechanism.bandmf")
    arguments = [f"--mechanism={folder / 'mechanism.bandmf'}"]
    arguments.append(f"--participation={_write_log(folder)}")
    assert _run(*arguments, f"--output={folder / 'out'}") == 0
    return folder


@pytest.fixture
def log_report(_log_report, tmp_path, capsys):
    """A folder of its own with a mechanism, a log and their report."""
    folder = tmp_path / "log_report"
    shutil.copytree(_log_report, folder)
    capsys.readouterr()
    return folder


def _make_run(
    folder: Path, *, pseudonymous: bool = True, rounds: int = N, liar: bool = False, **header
) -> Path:
    (folder / "released").mkdir(parents=True)
    (folder / "released" / f"model_{rounds:06d}.npz").write_bytes(MODEL)
    save_mechanism(_mechanism(), folder / "mechanism.bandmf")
    checksum = mechanism_checksum(_mechanism())
    pseudonyms = Pseudonyms.create(folder / "salt") if pseudonymous else None
    fields = {
        "run_id": "test",
        "mechanism_checksum": checksum,
        "num_rounds": N,
        "clients_per_round": 1,
        "participation_recording": "pseudonymous" if pseudonymous else "none",
        "salt_id": pseudonyms.salt_id if pseudonyms else None,
        "clock": "simulated",
        "timer_seconds": None,
        "enforced_min_separation": None,
        "enforced_max_participations": None,
        "library_version": "0",
        **header,
    }
    with LedgerWriter.create(folder / "ledger.jsonl", LedgerHeader(**fields)) as writer:
        for i in range(rounds):
            opened = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + i * datetime.timedelta(
                minutes=1
            )
            writer.append(
                RoundRecord(
                    round=i,
                    start=format_time(opened),
                    end=format_time(opened + datetime.timedelta(seconds=30)),
                    num_participants=1,
                    mechanism_checksum=checksum,
                    model_digest=hashlib.sha256(MODEL).hexdigest(),
                    participants=pseudonyms
                    and pseudonyms.of(["secret-liar" if liar and i < 2 else f"secret-{i % B}"]),
                )
            )
    return folder


def _run(*arguments: object) -> int:
    return main(["bandmf-report", *map(str, arguments)])


def _refused(capsys, *arguments: object, status: int = 2) -> str:
    """Runs the tool, which must fail with one sentence, and returns that."""
    assert _run(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bandmf-report: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


# From evidence to a report.


def test_a_run_gives_all_files_and_a_valid_report(run_report, capsys):
    output = run_report / "out"
    assert {path.name for path in output.iterdir()} == FILES
    document = json.loads((output / "report.json").read_text())
    schema = importlib.resources.files(schemas) / "privacy-report-v1.schema.json"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema.read_text()))
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert (document["min_separation"], document["max_participations"]) == (B, K)
    assert document["min_separation_basis"] == document["max_participations_basis"] == "observed"
    assert document["delta"] == 1e-8
    assert document["plan_was_kept"]
    assert document["unit"] == "device"
    assert _run(f"--run={run_report / 'run'}", "--delta=1e-8") == 0
    assert capsys.readouterr().out == (output / "statement.txt").read_text()


def test_json_has_the_promised_keys(mechanism, log, capsys):
    assert _run(f"--mechanism={mechanism}", f"--participation={log}", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() >= KEYS
    assert printed["adjacency"] == "zero-out"
    assert printed["rho"] == pytest.approx(_mechanism().rho)
    assert printed["epsilon"] == pytest.approx(_mechanism().epsilon)


def test_limits_without_evidence_are_assumed(mechanism):
    request = ReportRequest(mechanism=mechanism, min_separation=5, max_participations=2)
    document, _ = make_report(request)
    assert document["rounds_completed"] == N
    assert document["min_separation_basis"] == "assumed"
    assert not document["plan_was_kept"]


def test_noise_multiplier_overrides_and_the_strategy_stays(mechanism):
    limits = {"mechanism": mechanism, "min_separation": B, "max_participations": K}
    document, _ = make_report(ReportRequest(**limits, noise_multiplier=2 * NOISE))
    assert "noise_multiplier=16.0 was stated without evidence" in document["cautions"][0]
    assert document["rho"] == pytest.approx(_mechanism().rho / 4)
    assert document["sensitivity"] == pytest.approx(_mechanism().sensitivity.value)


def test_fewer_rounds_are_reported_as_such(mechanism):
    limits = {"mechanism": mechanism, "min_separation": B, "max_participations": K}
    document, _ = make_report(ReportRequest(**limits, rounds_completed=10))
    assert document["rounds_completed"] == 10
    assert document["max_participations"] == 2
    assert document["epsilon"] < _mechanism().epsilon


def test_a_timer_in_the_ledger_is_enough(tmp_path):
    run = _make_run(tmp_path / "run", pseudonymous=False, timer_seconds=301.0)
    evidence = gather_evidence(ReportRequest(run=run))
    assert evidence.observed.min_separation == 5
    assert evidence.observed.min_separation_basis is Basis.ENFORCED


def test_a_ledger_and_a_timer_can_be_given_as_files(tmp_path, mechanism):
    run = _make_run(tmp_path / "run", pseudonymous=False)
    request = ReportRequest(
        mechanism=mechanism, participation=run / "ledger.jsonl", timer_seconds=301.0
    )
    assert gather_evidence(request).observed.min_separation == 5


def test_a_timeline_and_a_timer_are_enough(tmp_path, mechanism):
    path = tmp_path / "rounds.csv"
    path.write_text(
        "round,start,end\n" + "".join(f"{i},{60 * i},{60 * i + 30}\n" for i in range(N))
    )
    request = ReportRequest(mechanism=mechanism, participation=path, timer_seconds=301.0)
    observed = gather_evidence(request).observed
    assert (observed.min_separation, observed.max_participations) == (5, 5)
    with pytest.raises(ReportError, match="timer_seconds"):
        gather_evidence(dataclasses.replace(request, timer_seconds=None))
    # A timer bounds how close participations are. A cap is possible beside it, and assumed; a
    # larger separation than the timer allows is not.
    stated = dataclasses.replace(request, max_participations=3, min_separation=6)
    capped = gather_evidence(stated).observed
    assert (capped.min_separation, capped.max_participations) == (5, 3)
    assert capped.min_separation_basis is Basis.ENFORCED
    assert capped.max_participations_basis is Basis.ASSUMED
    assert "can have taken part in 5 rounds" in " ".join(capped.cautions)


def test_a_timer_that_allows_nearly_everything_is_no_guarantee(tmp_path, mechanism, capsys):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end\n0,0,1e9\n1,1e9,2e9\n")
    arguments = [f"--mechanism={mechanism}", f"--participation={path}", "--timer_seconds=1e-6"]
    error = _refused(capsys, *arguments, f"--output={tmp_path / 'out'}")
    assert "the privacy loss is too large to be computed" in error
    assert not (tmp_path / "out").exists()


def test_a_log_with_times_is_no_timeline(tmp_path, mechanism):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end,client_id\n0,0,1,a\n7,60,61,a\n")
    observed = gather_evidence(ReportRequest(mechanism=mechanism, participation=path)).observed
    assert observed.min_separation == 7


def test_a_log_beside_a_run_must_have_the_ledgers_counts(tmp_path, log):
    run = _make_run(tmp_path / "run", pseudonymous=False)
    evidence = gather_evidence(ReportRequest(run=run, participation=log))
    assert evidence.observed.min_separation_basis is Basis.OBSERVED
    with log.open("a") as file:
        file.write("secret-9,3\n")
    with pytest.raises(ReportError, match="round 3 has 1 contributions in the ledger and 2"):
        gather_evidence(ReportRequest(run=run, participation=log))


def test_a_client_that_lies_does_not_weaken_the_guarantee_of_the_others(tmp_path):
    honest, _ = make_report(ReportRequest(run=_make_run(tmp_path / "a", timer_seconds=330.0)))
    assert honest["well_behaved"] is None
    run = _make_run(tmp_path / "b", timer_seconds=330.0, liar=True)
    document, _ = make_report(ReportRequest(run=run))
    assert document["min_separation"] == 1  # The main figures are for everybody.
    assert document["epsilon"] > honest["epsilon"]
    others = document["well_behaved"]
    assert (others["violators"], others["num_units"]) == (1, B)
    assert others["min_separation"] == B
    assert others["epsilon"] <= honest["epsilon"]
    assert "1 device did not keep to the timer" in " ".join(statement_text(document).split())


def test_where_all_clients_lie_there_are_no_others(tmp_path):
    run = _make_run(tmp_path / "run", timer_seconds=1e6)
    evidence = gather_evidence(ReportRequest(run=run))
    assert (evidence.violators, evidence.well_behaved) == (B, None)
    assert "No device kept to the timer" in " ".join(evidence.notes)
    assert evidence.observed.min_separation == B


def test_the_statement_says_where_and_when_participation_was_at_its_worst(run_report):
    statement = " ".join((run_report / "out" / "statement.txt").read_text().split())
    assert (
        "Smallest separation: 6 rounds (observed), first from round 0 to round 6 "
        "(2024-01-01T00:00:00Z to 2024-01-01T00:06:30Z), 18 pairs in all." in statement
    )
    assert "Largest number of participations: 4 (observed), first from round 0" in statement
    assert f"Rounds completed: 24 (observed), with 24 contributions of {B} devices." in statement


def test_counts_of_a_log_stand_for_the_log(tmp_path, mechanism, log):
    counts = {
        "format": "bandmf_tf participation counts",
        "version": 1,
        "rows": N,
        "anonymous_rows": 0,
        "roundless_rows": 0,
        "repetitions": 0,
        "separations": [[B, N - B, B]],
        "participations": [[K, B, 0, N - B]],
        "contributions": [[i, 1] for i in range(N)],
    }
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(counts))
    by_counts, _ = make_report(ReportRequest(mechanism=mechanism, participation=path))
    by_log, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    assert by_counts["epsilon"] == by_log["epsilon"]
    del by_counts["observed"]["source"], by_log["observed"]["source"]
    assert by_counts["observed"] == by_log["observed"]


# Keras runs.


@functools.cache
def _sampled_mechanism() -> Mechanism:
    sampling = PoissonSampling(N, B, 0.1)
    return Mechanism.create(
        optimize_banded(prefix_sum(N), B).strategy,
        prefix_sum(N),
        Participation.of_sampling(sampling),
        noise_multiplier=NOISE,
        l2_norm_clip=0.5,
        delta=1e-6,
        sampling=sampling,
    )


def _record(**changes: object) -> RunRecord:
    mechanism = _sampled_mechanism()
    record = RunRecord(
        mechanism_checksum=mechanism_checksum(mechanism),
        num_rounds=N,
        rounds_completed=N,
        sampling=mechanism.sampling,
        sampling_basis="enforced",
        batch_size=8.0,
        batch_sizes_seen={"smallest": 3, "largest": 12, "mean": 8.1},
        noise_multiplier=NOISE,
        l2_norm_clip=0.5,
        microbatch_size=1,
        accumulation_steps=1,
        epsilon=None,
        delta=None,
        adjacency="zero-out",
        started="2024-01-01T00:00:00Z",
        finished="2024-01-01T00:01:00Z",
    )
    return dataclasses.replace(record, **changes)


def _keras_run(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    save_mechanism(_sampled_mechanism(), folder / "mechanism.bandmf")
    save_run_record(_record(**changes), folder / "record.json")
    return folder


def test_a_keras_run_has_the_amplified_guarantee_beside_the_other(tmp_path):
    run = _keras_run(tmp_path / "run")
    document, _ = make_report(ReportRequest(run=run))
    assert document["epsilon"] == document["epsilon_amplified"]
    assert document["epsilon"] == pytest.approx(_sampled_mechanism().epsilon)
    assert document["epsilon"] < document["epsilon_unamplified"]
    assert document["unit"] == "example"
    assert document["min_separation_basis"] == "enforced"
    assert document["plan_was_kept"]
    statement = " ".join(statement_text(document).split())
    without = round_up(document["epsilon_unamplified"])
    assert (
        f"of one example; epsilon is amplified by sampling, and {without:g} without." in statement
    )
    assert "drawn in which round must stay secret" in statement
    assert "clients" not in statement
    entry = yaml.safe_load(registry_entry(document))
    assert entry["dp_variant"]["variant_name"] == "Approximate DP"
    assert "takes part" not in entry["dp_variant"]["unprotected_quantities"]
    assert "without amplification" in entry["privacy_loss"]["privacy_parameters_details"]
    request = ReportRequest(mechanism=run / "mechanism.bandmf", participation=run / "record.json")
    forged = {**document, "epsilon_unamplified": document["epsilon"]}
    assert verify_report(document, request) > 80
    with pytest.raises(ReportError, match="epsilon_unamplified"):
        verify_report(forged, request)


def test_a_keras_run_that_stopped_early_has_spent_less(tmp_path):
    document, _ = make_report(ReportRequest(run=_keras_run(tmp_path / "run", rounds_completed=9)))
    assert document["rounds_completed"] == 9
    assert document["epsilon"] < _sampled_mechanism().epsilon


def test_microbatches_double_the_sensitivity_and_end_amplification(tmp_path):
    document, _ = make_report(ReportRequest(run=_keras_run(tmp_path / "run", microbatch_size=4)))
    assert document["sensitivity"] == pytest.approx(2 * _sampled_mechanism().sensitivity.value)
    assert document["epsilon_amplified"] is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"sampling": None, "sampling_basis": "assumed"}, "how batches were drawn"),
        ({"mechanism_checksum": "0" * 64}, "mechanism"),
        ({"mechanism_checksum": None}, "mechanism"),
        ({"rounds_completed": 0}, "no completed round"),
        ({"cautions": ("The seed of the noise was pinned.",)}, "seed"),
    ],
)
def test_keras_runs_without_support_are_refused(tmp_path, capsys, changes, missing):
    run = _keras_run(tmp_path / "run", **changes)
    assert missing in _refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_two_run_records_in_a_folder_are_refused(tmp_path, capsys):
    run = _keras_run(tmp_path / "run")
    save_run_record(_record(), run / "another.json")
    assert "several run records" in _refused(capsys, f"--run={run}")


def test_a_scheme_that_is_only_assumed_is_cautioned_about(tmp_path):
    run = _keras_run(tmp_path / "run", sampling_basis="assumed")
    evidence = gather_evidence(ReportRequest(run=run))
    assert evidence.sampling is not None
    assert "How batches were drawn is assumed" in evidence.observed.cautions[0]


def test_limits_weaker_than_the_scheme_end_amplification(tmp_path):
    run = _keras_run(tmp_path / "run")
    kept = gather_evidence(ReportRequest(run=run, min_separation=B, max_participations=K))
    assert kept.sampling is not None
    weaker = gather_evidence(ReportRequest(run=run, min_separation=B - 1))
    assert weaker.sampling is None
    assert weaker.observed.min_separation == B - 1
    capped = gather_evidence(ReportRequest(run=run, max_participations=1))
    assert capped.observed.max_participations == K  # Sampling can draw an example every time.


# Refusals.


def test_another_noise_than_the_evidence_is_of_is_refused(tmp_path, capsys):
    stated = "--noise_multiplier=80"
    run = _make_run(tmp_path / "run")
    files = [f"--mechanism={run / 'mechanism.bandmf'}"]
    ledger = f"--participation={run / 'ledger.jsonl'}"
    assert "noise_multiplier" in _refused(capsys, *files, ledger, stated)
    keras = _keras_run(tmp_path / "keras")
    files = [f"--mechanism={keras / 'mechanism.bandmf'}"]
    record = f"--participation={keras / 'record.json'}"
    assert "has noise_multiplier=8. Found" in _refused(capsys, *files, record, stated)


def test_a_ledger_whose_end_was_cut_off_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-3]))
    assert "holds the result of 24 rounds and its ledger ends after 21" in _refused(
        capsys, f"--run={run}"
    )
    (run / "released" / "model_000024.npz").unlink()
    assert gather_evidence(ReportRequest(run=run)).observed.rounds_completed == 21
    (run / "secret").mkdir()
    (run / "secret" / "checkpoint_000000022").touch()
    assert "result of 22 rounds" in _refused(capsys, f"--run={run}")


def test_a_model_that_is_not_the_ledgers_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run")
    (run / "released" / "model_000024.npz").write_bytes(b"another model")
    assert "not the model that the ledger names for round 23" in _refused(capsys, f"--run={run}")


def test_a_missing_cap_is_refused(mechanism, capsys):
    error = _refused(capsys, f"--mechanism={mechanism}", "--min_separation=6")
    assert "max_participations" in error
    assert "missing" in error


def test_missing_participation_is_refused(mechanism, capsys):
    assert "missing" in _refused(capsys, f"--mechanism={mechanism}")


def test_a_run_without_any_bound_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run", pseudonymous=False)
    error = _refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")
    assert "nothing bounds how often a client took part; give timer_seconds" in error
    assert not (tmp_path / "out").exists()


def test_another_mechanism_than_the_ledgers_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run")
    save_mechanism(_mechanism(3.0), run / "mechanism.bandmf")
    assert "mechanism" in _refused(capsys, f"--run={run}")


def test_a_broken_chain_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    for changed in (lines[:3] + lines[4:], [lines[0], lines[2], lines[1], *lines[3:]]):
        ledger.write_bytes(b"".join(changed))
        assert "does not continue the line before it" in _refused(capsys, f"--run={run}")
    ledger.write_bytes(b"".join(lines).replace(b'"num_participants":1', b'"num_participants":2', 1))
    assert "line 2" in _refused(capsys, f"--run={run}")


def test_a_truncated_line_of_the_ledger_is_refused(tmp_path, capsys):
    run = _make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert "never committed" in _refused(capsys, f"--run={run}")


@pytest.mark.parametrize("name", ["mechanism.bandmf", "ledger.jsonl"])
def test_a_run_without_its_files_is_refused(tmp_path, capsys, name):
    run = _make_run(tmp_path / "run")
    (run / name).unlink()
    assert name in _refused(capsys, f"--run={run}")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--delta=0"],
        ["--delta=2"],
        ["--delta=nan"],
        ["--delta=x"],
        ["--min_separation=0"],
        ["--min_separation=1.5"],
        ["--max_participations=-1"],
        ["--noise_multiplier=0"],
        ["--noise_multiplier=inf"],
        ["--timer_seconds=-1"],
        ["--rounds_completed=0"],
        ["--rounds_completed=25", "--min_separation=6", "--max_participations=2"],
        ["--participation=nowhere.csv"],
        ["--participation=."],
        ["--run=."],
        ["--nonsense=1"],
        ["something"],
        ["--timer_seconds=10", "--max_participations=1"],
        ["--verify=nowhere.json"],
        ["--noise_multiplier=1e-300", "--min_separation=6", "--max_participations=2"],
        ["--delta=1e-30", "--min_separation=6", "--max_participations=2"],
    ],
)
def test_bad_flags_give_one_sentence_and_nothing_is_written(tmp_path, mechanism, capsys, arguments):
    output = tmp_path / "out"
    flags = [f"--mechanism={mechanism}"] if "--verify" not in "".join(arguments) else []
    flags += [] if "--verify" in "".join(arguments) else [f"--output={output}"]
    _refused(capsys, *flags, *arguments)
    assert not output.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mechanism.bandmf"]


def test_output_must_be_a_folder_for_a_report(tmp_path, mechanism, capsys):
    limits = [f"--mechanism={mechanism}", "--max_participations=1"]
    _refused(capsys, *limits, f"--output={mechanism}")
    _refused(capsys, *limits, f"--output={tmp_path}")
    _refused(capsys, *limits, "--output=")
    assert mechanism.exists()


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.binary(max_size=300), name=st.sampled_from(["log.csv", "log.jsonl", "x"]))
def test_any_bytes_as_participation_give_a_report_or_a_sentence(tmp_path_factory, data, name):
    folder = tmp_path_factory.mktemp("fuzz")
    save_mechanism(_mechanism(), folder / "m.bandmf")
    (folder / name).write_bytes(data)
    output = folder / "out"
    status = _run(
        f"--mechanism={folder / 'm.bandmf'}",
        f"--participation={folder / name}",
        f"--output={output}",
    )
    assert status in (0, 2)
    assert output.exists() == (status == 0)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_any_damage_to_a_run_gives_a_sentence(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    run = _make_run(folder / "run", rounds=4)
    path = run / data.draw(st.sampled_from(["mechanism.bandmf", "ledger.jsonl"]))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert _run(f"--run={run}", f"--output={folder / 'out'}") == 2
    assert not (folder / "out").exists()


# What is written.


def test_a_failure_while_writing_leaves_the_old_report(tmp_path, mechanism, capsys, monkeypatch):
    output = tmp_path / "out"
    limits = [f"--mechanism={mechanism}", "--max_participations=1", f"--output={output}"]
    assert _run(*limits) == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    capsys.readouterr()
    rename = os.rename

    def fail(source, target):
        if Path(target) == output and Path(source).suffix == ".tmp":
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    _refused(capsys, *limits, "--delta=1e-7")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mechanism.bandmf", "out"]
    monkeypatch.undo()
    assert _run(*limits, "--delta=1e-7") == 0
    assert json.loads((output / "report.json").read_text())["delta"] == 1e-7


def test_nothing_identifies_a_client(run_report, log_report, tmp_path):
    ledger = (run_report / "run" / "ledger.jsonl").read_text()
    pseudonyms = set(re.findall(r'\["([0-9a-f]{32})"', ledger))
    assert len(pseudonyms) == B
    for path in (*(run_report / "out").iterdir(), *(log_report / "out").iterdir()):
        text = path.read_text()
        assert "secret-" not in text
        assert not any(pseudonym in text for pseudonym in pseudonyms)
        assert os.fspath(tmp_path.parent) not in text


SECTIONS = [
    "DP setting",
    "Data accesses covered",
    "hyperparameter tuning",
    "selection of a checkpoint",
    "Pre-training on public data",
    "Final mechanism output",
    "Unit of privacy",
    "Adjacency",
    "Type of accounting",
    "Assumptions",
    "Formal statement",
    "Transparency and verifiability",
    "Caveats",
    "floating point",
    "misbehaves",
]


def test_statements_have_every_section_and_the_figures(mechanism):
    document, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    for text in (statement_text(document), statement_markdown(document)):
        plain = " ".join(text.split())
        for section in SECTIONS:
            assert section in plain, section
        assert f"{document['delta']:g})-DP" in plain
        assert "1e-06" in plain
    assert max(map(len, statement_text(document).splitlines())) <= 88


def test_figures_are_rounded_up(mechanism):
    document, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    for value, shown in [(1.23401, "1.235"), (1.234, "1.234"), (0.99995, "1"), (123.41, "123.5")]:
        assert f"({shown}, 1e-06)-DP" in statement_text({**document, "epsilon": value})


# The fields of records in OpenDP's registry (deployments-registry-data, 2026), which has no others;
# those that can be left out are marked by a question mark.
REGISTRY = {
    "basic": "name data_curators intended_use data_product_type data_product_region description "
    "publication_date data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details "
    "data_source_type data_source_type_details? access_type access_type_details?",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}


def test_the_registry_entry_has_the_registrys_fields(mechanism):
    document, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    entry = yaml.safe_load(registry_entry(document))
    assert entry.keys() == REGISTRY.keys()
    for name, fields in REGISTRY.items():
        known = fields.split()
        needed = {field for field in known if not field.endswith("?")}
        assert needed <= entry[name].keys() <= {field.removesuffix("?") for field in known}
    assert entry["privacy_loss"]["privacy_unit"] == "Client-level"
    assert entry["dp_variant"]["variant_name"] == "Zero-concentrated DP"
    assert isinstance(entry["basic"]["publication_date"], str)
    parameters = entry["privacy_loss"]["privacy_parameters"]
    assert parameters["delta"] == 1e-6
    assert document["epsilon"] <= parameters["epsilon"] <= document["epsilon"] * 1.002
    assert document["rho"] * (1 - 1e-12) <= parameters["rho"] <= document["rho"] * 1.002


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.alternatives, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "img":
            self.sources.append(attributes["src"])
            self.alternatives.append(attributes["alt"])
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_has_all_pictures(run_report):
    text = (run_report / "out" / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert len(page.sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert all(page.alternatives)
    assert 'name="viewport"' in text
    assert "@media print" in text
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no headless browser is installed")
def test_the_page_fits_a_phone_and_prints_in_a_real_browser(run_report, tmp_path):
    page = run_report / "out" / "report.html"
    # The page measures itself: no sideways scrolling, and every picture is decoded.
    script = (
        "<script>addEventListener('load', () => { const d = document.documentElement;"
        "document.title = [d.scrollWidth <= d.clientWidth, "
        "[...document.images].every(i => i.naturalWidth > 100), document.images.length].join(); "
        "});</script></body>"
    )
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text().replace("</body>", script))
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    dumped = subprocess.run(
        [*command, "--window-size=500,800", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "<title>true,true,5</title>" in dumped
    pdf = tmp_path / "report.pdf"
    subprocess.run(
        [*command, f"--print-to-pdf={pdf}", page.as_uri()],
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert pdf.read_bytes().startswith(b"%PDF")


# Verification.


def test_a_report_holds_and_says_how_much_was_checked(run_report, capsys):
    assert _run(f"--verify={run_report / 'out' / 'report.json'}") == 0
    assert "holds" in capsys.readouterr().out


def test_a_report_can_be_verified_where_its_evidence_moved(log_report, capsys):
    path = log_report / "out" / "report.json"
    moved = (log_report / "mechanism.bandmf").rename(log_report / "moved.bandmf")
    assert _run(f"--verify={path}") == 1
    shutil.copytree(log_report / "out", log_report / "deeper" / "copy")
    (log_report / "log.csv").rename(log_report / "log2.csv")
    evidence = [f"--mechanism={moved}", f"--participation={log_report / 'log2.csv'}"]
    assert _run(f"--verify={log_report / 'deeper' / 'copy' / 'report.json'}", *evidence) == 0


def _numbers(entry, path=()):
    if isinstance(entry, dict):
        for name, value in entry.items():
            if name not in ("request", "version"):
                yield from _numbers(value, (*path, name))
    elif isinstance(entry, list):
        for i, value in enumerate(entry):
            yield from _numbers(value, (*path, i))
    elif isinstance(entry, int | float) and not isinstance(entry, bool):
        yield path


def test_every_number_that_was_changed_is_found(log_report):
    path = log_report / "out" / "report.json"
    document = read_report(path)
    request = request_of(document, path.parent)
    fresh, _ = make_report(request)
    changed = 0
    for place in list(_numbers(document)):
        forged = json.loads(json.dumps(document))
        parent = forged
        for name in place[:-1]:
            parent = parent[name]
        value = parent[place[-1]]
        parent[place[-1]] = value + 1 if isinstance(value, int) else value * 1.001
        with pytest.raises(ReportError, match=re.escape(str(place[0]))):
            _verify_against(forged, fresh)
        changed += 1
    assert changed > 80


def _verify_against(document, fresh):
    from bandmf_tf import privacy_reports

    privacy_reports._compare(document, {**fresh, "request": document["request"]}, "$")


def test_a_forged_report_is_refused_by_the_tool(log_report, capsys):
    path = log_report / "out" / "report.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "epsilon": document["epsilon"] / 2}))
    error = _refused(capsys, f"--verify={path}", status=1)
    assert "$.epsilon is" in error


@pytest.mark.parametrize("name", sorted(FILES - {"report.json"}))
def test_a_forged_statement_is_refused_by_the_tool(log_report, capsys, monkeypatch, name):
    # What a verification recomputes has tests of its own.
    monkeypatch.setattr("bandmf_tf.cli.report.verify_report", lambda *_: 1)
    path = log_report / "out" / "report.json"
    assert _run(f"--verify={path}") == 0
    capsys.readouterr()
    statement = log_report / "out" / name
    statement.write_text(statement.read_text().replace("zero-out", "no"))
    assert f"{name} does not say what" in _refused(capsys, f"--verify={path}", status=1)


def test_other_evidence_is_found(log_report, capsys):
    log = log_report / "log.csv"
    log.write_text(log.read_text().replace("secret-5,5\n", "secret-4,5\n"))
    path = log_report / "out" / "report.json"
    assert "does not hold" in _refused(capsys, f"--verify={path}", status=1)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": 2}', "[" * 100_000])
def test_what_is_no_report_is_refused(tmp_path, capsys, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    _refused(capsys, f"--verify={path}")


def test_verification_takes_no_numbers(log_report, capsys):
    path = log_report / "out" / "report.json"
    assert "--delta" in _refused(capsys, f"--verify={path}", "--delta=1e-3")


def test_verify_report_is_what_the_tool_uses(mechanism):
    document, _ = make_report(ReportRequest(mechanism=mechanism, max_participations=1))
    assert verify_report(document, ReportRequest(mechanism=mechanism, max_participations=1)) > 50


def test_the_module_runs_from_a_checkout(mechanism):
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tools.privacy_report", f"--mechanism={mechanism}"]
    finished = subprocess.run(
        [*command, "--max_participations=1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout).keys() >= KEYS


def test_a_reader_that_stops_reading_causes_no_traceback(mechanism):
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tools.privacy_report", f"--mechanism={mechanism}"]
    with subprocess.Popen(
        [*command, "--max_participations=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=root,
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_help_names_every_flag(capsys):
    assert _run("--help") == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(ReportRequest):
        assert f"--{field.name}\n" in printed
    for flag in ("output", "verify", "json"):
        assert f"--{flag}\n" in printed
