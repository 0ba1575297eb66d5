from __future__ import annotations

import dataclasses
import json
import os
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st

import registry_program
import run_program
from bandmf_tf.evidence.gather import READERS, gather_evidence
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import save_mechanism
from bandmf_tf.report.document import make_report
from bandmf_tf.report.statement import opening, statement_text
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder
from bandmf_tf.runs.ledger import read_ledger
from bandmf_tf.runs.registry import ParticipationRegistry
from bandmf_tf.runs.run_record import save_run_record
from bandmf_tf.simulation.config import RunConfig
from cases import (
    KEYS,
    NOISE,
    B,
    K,
    N,
    keras_run,
    make_run,
    planned_mechanism,
    refused,
    run_record,
    run_tool,
    sampled_mechanism,
    verify,
    write_log,
)

COUNTS = {
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


@pytest.fixture
def mechanism(tmp_path):
    path = tmp_path / "mechanism.bandmf"
    save_mechanism(planned_mechanism(), path)
    return path


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path)


# From evidence to a report.


def test_json_has_the_promised_keys(mechanism, log, capsys):
    assert run_tool(f"--mechanism={mechanism}", f"--participation={log}", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() >= KEYS
    assert printed["adjacency"] == "zero-out"
    assert printed["rho"] == pytest.approx(planned_mechanism().rho)
    assert printed["epsilon"] == pytest.approx(planned_mechanism().epsilon)


def test_limits_without_evidence_are_assumed(mechanism):
    request = ReportRequest(mechanism=mechanism, min_separation=5, max_participations=2)
    report, _ = make_report(request)
    assert report.rounds_completed == N
    assert report.min_separation_basis == "assumed"
    assert not report.plan_was_kept


def test_noise_multiplier_overrides_and_the_strategy_stays(mechanism):
    limits = {"mechanism": mechanism, "min_separation": B, "max_participations": K}
    report, _ = make_report(ReportRequest(**limits, noise_multiplier=2 * NOISE))
    assert "noise_multiplier=16.0 was stated without evidence" in report.cautions[0]
    assert report.rho == pytest.approx(planned_mechanism().rho / 4)
    assert report.sensitivity == pytest.approx(planned_mechanism().sensitivity.value)


def test_fewer_rounds_are_reported_as_such(mechanism):
    limits = {"mechanism": mechanism, "min_separation": B, "max_participations": K}
    report, _ = make_report(ReportRequest(**limits, rounds_completed=10))
    assert report.rounds_completed == 10
    assert report.max_participations == 2
    assert report.epsilon < planned_mechanism().epsilon


def test_a_timer_in_the_ledger_is_enough(tmp_path):
    run = make_run(tmp_path / "run", pseudonymous=False, timer_seconds=301.0)
    _checkpoint(run, N)
    evidence = gather_evidence(ReportRequest(run=run))
    assert evidence.observed.min_separation == 5
    assert evidence.observed.min_separation_basis is Basis.ENFORCED


@pytest.mark.parametrize(
    ("header", "limits"),
    [
        ({"timer_seconds": 1e6}, (None, 1)),  # Longer than all rounds, by their times.
        ({"timer_seconds": 301.0}, (5, 5)),
        ({"enforced_min_separation": 12, "enforced_max_participations": 1}, (12, 1)),
    ],
)
def test_a_ledger_that_was_compared_with_nothing_enforces_nothing(tmp_path, header, limits):
    """Whoever invents it invents a timer, times that advance by a microsecond, and limits."""
    run = make_run(tmp_path / "run", pseudonymous=False, **header)

    def bases(**request: object) -> tuple[Basis, Basis]:
        observed = gather_evidence(ReportRequest(run=run, **request)).observed
        assert (observed.min_separation, observed.max_participations) == limits
        return observed.min_separation_basis, observed.max_participations_basis

    assert bases() == (Basis.ASSUMED, Basis.ASSUMED)
    report, _ = make_report(ReportRequest(run=run))
    assert opening(report).startswith("If ")
    assert "on its times, or on its end before" in gather_evidence(ReportRequest(run=run)).notes[0]
    head = read_ledger(run / "ledger.jsonl").head
    assert bases(ledger_head=head) == (Basis.ENFORCED, Basis.ENFORCED)
    _checkpoint(run, N)
    assert bases() == (Basis.ENFORCED, Basis.ENFORCED)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timer_hours": 0.0}, r"has timer_hours=0.0, which contradicts ledger.jsonl"),
        ({"timer_hours": "7"}, "has timer_hours='7'"),
        ({"pinned_noise_seed": 7}, "has pinned_noise_seed=7"),
        ({"num_rounds": 9}, "has num_rounds=9"),
        ({"clients_per_round": 6}, "has clients_per_round=6"),
        ({"participation_recording": "none"}, "has participation_recording='none'"),
    ],
)
def test_a_configuration_that_contradicts_its_ledger_is_refused(tmp_path, change, reason):
    """As the simulation stores it, in the folder of a run that a program has made."""
    config = RunConfig(
        mechanism="m.bandmf",
        output="run",
        num_rounds=5,
        clients_per_round=run_program.CLIENTS_PER_ROUND,
        timer_hours=0.1,
        participation_recording="pseudonymous",
    )
    header, folder = {"timer_seconds": config.timer_seconds}, tmp_path / "run"
    with run_program.start(folder, config=config.stored(), header=header) as run:
        for number in range(5):
            run.commit(run_program.result(number, client_ids=[f"client {number}"]))
    assert gather_evidence(ReportRequest(run=folder)).timer_seconds == 360.0
    stored = json.loads((folder / "run.json").read_text())
    assert stored.keys() >= change.keys()
    (folder / "run.json").write_text(json.dumps(stored | change))
    with pytest.raises(ReportError, match=reason):
        gather_evidence(ReportRequest(run=folder))


@pytest.mark.parametrize(
    ("config", "reason"),
    [('{"a": 1, "a": 2}', "two entries"), ("{", "is not JSON"), ("[]", "is no JSON object")],
)
def test_a_configuration_that_no_program_writes_is_refused(tmp_path, config, reason):
    run = make_run(tmp_path / "run")
    (run / "run.json").write_text('{"rate": 1}')
    gather_evidence(ReportRequest(run=run))
    (run / "run.json").write_text(config)
    with pytest.raises(ReportError, match=reason):
        gather_evidence(ReportRequest(run=run))


@pytest.mark.parametrize("name", ["record", "run.JSON", "ledger.jsonl.old"])
def test_what_a_run_has_left_is_not_passed_over_whatever_it_is_called(tmp_path, name):
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "mechanism.bandmf"
    if "ledger" in name:
        run = make_run(tmp_path / "run")
        shutil.copy(run / "mechanism.bandmf", path)
        shutil.copy(run / "ledger.jsonl", path.parent / name)
    else:
        save_mechanism(sampled_mechanism(), path)
        save_run_record(run_record(), path.parent / name)
    with pytest.raises(ReportError, match="says more than what was given"):
        gather_evidence(ReportRequest(mechanism=path, min_separation=N, max_participations=1))


def test_a_log_does_not_show_that_the_noise_was_added(mechanism, log):
    """A mechanism of more noise, which nobody used, would otherwise be as good as the true one."""
    report, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    assert report.noise_multiplier_basis is Basis.ASSUMED
    assert opening(report).startswith("If the noise of this mechanism was added, with noise mult")


@pytest.mark.parametrize("name", ["Client", " client_id"])
def test_rounds_with_clients_are_no_timeline(tmp_path, mechanism, name):
    path = tmp_path / "rounds.csv"
    rows = "".join(f"{i},{60 * i},{60 * i + 30},a\n" for i in range(N))
    path.write_text(f"round,start,end,{name}\n{rows}")
    request = ReportRequest(mechanism=mechanism, participation=path, timer_seconds=1e6)
    with pytest.raises(ReportError, match="timer_seconds belongs to a ledger or a timeline"):
        gather_evidence(request)


def test_a_ledger_and_a_timer_can_be_given_as_files(tmp_path, mechanism):
    run = make_run(tmp_path / "run", pseudonymous=False)
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
    assert observed.rounds_completed_basis is Basis.OBSERVED  # It has all that were planned.
    assert "The timeline ends" not in " ".join(observed.cautions)
    with pytest.raises(ReportError, match="timer_seconds"):
        gather_evidence(dataclasses.replace(request, timer_seconds=None))
    # A timer bounds how close participations are. A cap is possible beside it, and assumed; a
    # larger separation than the timer allows is not.
    stated = dataclasses.replace(request, max_participations=3, min_separation=6)
    capped = gather_evidence(stated).observed
    assert (capped.min_separation, capped.max_participations) == (5, 3)
    assert capped.min_separation_basis is Basis.ASSUMED  # Somebody says that there is a timer.
    assert capped.max_participations_basis is Basis.ASSUMED
    assert "can have taken part in 5 rounds" in " ".join(capped.cautions)


def test_a_timer_that_allows_nearly_everything_is_no_guarantee(tmp_path, mechanism, capsys):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end\n0,0,1e9\n1,1e9,2e9\n")
    arguments = [f"--mechanism={mechanism}", f"--participation={path}", "--timer_seconds=1e-6"]
    error = refused(capsys, *arguments, f"--output={tmp_path / 'out'}")
    assert "protects nobody" in error
    assert not (tmp_path / "out").exists()


def test_a_log_with_times_is_no_timeline(tmp_path, mechanism):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end,client_id\n0,0,1,a\n7,60,61,a\n")
    observed = gather_evidence(ReportRequest(mechanism=mechanism, participation=path)).observed
    assert observed.min_separation == 7


def test_every_kind_of_file_has_one_reader(tmp_path, log):
    make_run(tmp_path / "run")
    keras_run(tmp_path / "keras")
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    (tmp_path / "rounds.csv").write_text("round,start,end\n0,0,1\n")
    ParticipationRegistry.start(tmp_path / "registry", registry_program.make_mechanism()).close()
    files = {
        "run record": "keras/record.json",
        "ledger": "run/ledger.jsonl",
        "timeline": "rounds.csv",
        "participation counts": "counts.json",
        "participation registry": "registry/registry.sqlite",
        "participation log": "log.csv",
    }
    assert [reader.KIND for reader in READERS] == list(files)
    for kind, name in files.items():
        found = [reader.KIND for reader in READERS if reader.supports(tmp_path / name)]
        assert found[0] == kind
        assert set(found[1:]) <= {"participation log"}  # By its name alone, and last.


def test_a_log_beside_a_run_must_have_the_ledgers_counts(tmp_path, log):
    run = make_run(tmp_path / "run", pseudonymous=False)
    evidence = gather_evidence(ReportRequest(run=run, participation=log))
    assert evidence.observed.min_separation_basis is Basis.OBSERVED
    with log.open("a") as file:
        file.write("secret-9,3\n")
    with pytest.raises(ReportError, match="round 3 has 1 contributions in the ledger and 2"):
        gather_evidence(ReportRequest(run=run, participation=log))


def test_a_client_that_lies_does_not_weaken_the_guarantee_of_the_others(tmp_path):
    honest, _ = make_report(ReportRequest(run=make_run(tmp_path / "a", timer_seconds=330.0)))
    assert honest.well_behaved is None
    run = make_run(tmp_path / "b", timer_seconds=330.0, liar=True)
    report, _ = make_report(ReportRequest(run=run))
    assert report.min_separation == 1  # The main figures are for everybody.
    assert report.epsilon > honest.epsilon
    others = report.well_behaved
    assert (others.violators, others.num_units) == (1, B)
    assert others.min_separation == B
    assert others.epsilon <= honest.epsilon
    assert "1 device did not keep to the timer" in " ".join(statement_text(report).split())


def test_a_timer_that_only_the_request_knows_is_called_assumed_beside_the_others(tmp_path):
    run = make_run(tmp_path / "run", liar=True)
    report, _ = make_report(ReportRequest(run=run, timer_seconds=330.0))
    assert report.well_behaved.epsilon < report.epsilon
    words = "did not keep to the timer of 330 seconds, which is assumed as stated"
    assert words in " ".join(statement_text(report).split())


def test_where_all_clients_lie_there_are_no_others(tmp_path):
    run = make_run(tmp_path / "run", timer_seconds=1e6)
    evidence = gather_evidence(ReportRequest(run=run))
    assert (evidence.violators, evidence.well_behaved) == (B, None)
    assert "No device kept to the timer" in " ".join(evidence.notes)
    assert evidence.observed.min_separation == B


@pytest.mark.parametrize(
    "changes",
    [
        # A hundred contributions to every round by one client, and nobody contributes thrice.
        {"rows": 100 * N, "contributions": [[i, 100] for i in range(N)], "repetitions": 1},
        # Two of each of all six clients at most, and fifteen contributions to a round.
        {"rows": N + 14, "contributions": [[i, 1 + 14 * (i == 0)] for i in range(N)]}
        | {"repetitions": 1},
        # One client in one round, and contributions to all of them.
        {"separations": [], "participations": [[1, 1, 0, 0]], "repetitions": N - 1},
    ],
)
def test_counts_in_which_somebody_must_have_contributed_more_often_are_refused(
    tmp_path, mechanism, capsys, changes
):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({**COUNTS, **changes}))
    flags = [f"--mechanism={mechanism}", f"--participation={path}"]
    assert "its numbers contradict each other" in refused(capsys, *flags)


def test_counts_of_a_log_stand_for_the_log(tmp_path, mechanism, log):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(COUNTS))
    by_counts, _ = make_report(ReportRequest(mechanism=mechanism, participation=path))
    by_log, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    assert by_counts.epsilon == by_log.epsilon
    assert dataclasses.replace(by_counts.observed, source=by_log.observed.source) == by_log.observed


# Where two sources speak.


def test_a_log_never_improves_on_the_ledger_beside_it(tmp_path):
    run = make_run(tmp_path / "run", liar=True)  # One client in rounds 0 and 1.
    alone, _ = make_report(ReportRequest(run=run))
    invented = tmp_path / "log.csv"
    invented.write_text("client,round\n" + "".join(f"c{i},{i}\n" for i in range(N)))
    report, _ = make_report(ReportRequest(run=run, participation=invented))
    assert (report.min_separation, report.epsilon) == (1, alone.epsilon)
    assert "The log contradicts the ledger" in report.cautions[0]
    worse = tmp_path / "worse.csv"
    worse.write_text("client,round\n" + "".join(f"c,{i}\n" for i in range(N)))
    report, _ = make_report(ReportRequest(run=run, participation=worse))
    assert (report.min_separation, report.max_participations) == (1, N)
    assert "The log contradicts the ledger" in report.cautions[0]


def test_a_log_that_says_what_the_ledger_says_changes_nothing(tmp_path, log):
    run = make_run(tmp_path / "run")
    alone, _ = make_report(ReportRequest(run=run))
    report, _ = make_report(ReportRequest(run=run, participation=log))
    assert report.cautions == alone.cautions
    assert (report.epsilon, report.observed.separations) == (alone.epsilon, {B: N - B})


def test_a_log_never_improves_on_the_timer_of_the_ledger(tmp_path, log):
    run = make_run(tmp_path / "run", pseudonymous=False, timer_seconds=120.0)
    _checkpoint(run, N)
    observed = gather_evidence(ReportRequest(run=run, participation=log)).observed
    assert (observed.min_separation, observed.min_separation_basis) == (2, Basis.ENFORCED)
    assert "does not improve on the ledger" in " ".join(observed.cautions)
    run = make_run(tmp_path / "slow", pseudonymous=False, timer_seconds=1200.0)
    observed = gather_evidence(ReportRequest(run=run, participation=log)).observed
    assert (observed.min_separation, observed.max_participations) == (B, K)
    assert "The log contradicts the ledger" in observed.cautions[0]


def test_what_a_run_has_left_cannot_be_passed_over(tmp_path, log, capsys, monkeypatch):
    run, keras = make_run(tmp_path / "run", liar=True), keras_run(tmp_path / "keras")
    better = make_run(tmp_path / "better") / "ledger.jsonl"
    for folder, name, evidence in (
        (run, "ledger.jsonl", f"--participation={log}"),
        (run, "ledger.jsonl", f"--participation={better}"),
        (run, "ledger.jsonl", "--max_participations=1"),
        (keras, "record.json", "--max_participations=1"),
    ):
        error = refused(capsys, f"--mechanism={folder / 'mechanism.bandmf'}", evidence)
        assert f"{name} is a " in error
        assert f"give run={folder}" in error
    # Nor by a link in the place of the mechanism, or a ledger that may not be read.
    (run / "mechanism.bandmf").rename(tmp_path / "elsewhere.bandmf")
    (run / "mechanism.bandmf").symlink_to(tmp_path / "elsewhere.bandmf")
    monkeypatch.setattr(os, "access", lambda *unused: False)
    error = refused(capsys, f"--mechanism={run / 'mechanism.bandmf'}", "--max_participations=1")
    assert "ledger.jsonl is a ledger of this mechanism" in error
    monkeypatch.undo()
    copied = shutil.copy(run / "ledger.jsonl", tmp_path / "copy.jsonl")
    assert run_tool(f"--mechanism={run / 'mechanism.bandmf'}", f"--participation={copied}") == 0
    capsys.readouterr()
    save_run_record(run_record(), run / "record.json")
    assert "may contradict each other" in refused(capsys, f"--run={run}")


# Logs in several files.


def _split(log, folder):
    folder.mkdir(parents=True)
    header, *rows = log.read_text().splitlines(keepends=True)
    shards = [folder / "a.csv", folder / "b.csv"]
    for i, shard in enumerate(shards):
        shard.write_text(header + "".join(rows[i::2]))
    return shards


def test_shards_are_one_log_however_they_are_given(tmp_path, mechanism, log, capsys):
    folder = tmp_path / "shards"
    shards = _split(log, folder)
    (folder / "_SUCCESS").touch()
    whole, _ = make_report(ReportRequest(mechanism=mechanism, participation=log))
    given = [
        [f"--participation={shard}" for shard in shards],
        [f"--participation={folder}"],
        [f"--participation={folder}/*.csv"],
    ]
    for number, flags in enumerate(given):
        output = tmp_path / f"out{number}"
        assert run_tool(f"--mechanism={mechanism}", *flags, "--json", f"--output={output}") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["epsilon"], found["min_separation"]) == (whole.epsilon, B)
        # By their names alone, two folders of evidence are not one: the caller says where it is.
        assert run_tool(*verify(output / "report.json"), *flags) == 0
        capsys.readouterr()
    shards[1].write_text(shards[1].read_text() + "secret-0,1\n")
    assert run_tool(*verify(output / "report.json"), *flags) == 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("notes.txt", "", "logs and nothing else"),
        ("counts.json", json.dumps(COUNTS), "logs and nothing else"),
        ("rounds.csv", "round,start,end\n0,0,1\n", "is a timeline"),
        ("c.csv", "", "empty"),
    ],
)
def test_a_folder_of_shards_holds_nothing_else(
    tmp_path, mechanism, log, capsys, name, content, sentence
):
    _split(log, tmp_path / "shards")
    (tmp_path / "shards" / name).write_text(content)
    flags = [f"--mechanism={mechanism}", f"--participation={tmp_path / 'shards'}"]
    assert sentence in refused(capsys, *flags)


@pytest.mark.parametrize("name", ["more", "_part.csv.zst", ".b.csv.bz2"])
def test_nothing_in_a_folder_of_shards_is_passed_over(tmp_path, mechanism, log, capsys, name):
    folder = tmp_path / "shards"
    _split(log, folder)
    if name == "more":
        (tmp_path / "elsewhere").mkdir()
        (folder / name).symlink_to(tmp_path / "elsewhere")
    else:
        (folder / name).touch()
    flags = [f"--mechanism={mechanism}", f"--participation={folder}"]
    assert f"move {folder / name}" in refused(capsys, *flags)


def test_hidden_shards_and_those_in_folders_count(tmp_path, mechanism, log):
    first, second = _split(log, tmp_path / "shards")
    (tmp_path / "shards" / "deep").mkdir()
    first.rename(tmp_path / "shards" / "deep" / "_a.csv")
    second.rename(tmp_path / "shards" / ".b.csv")
    request = ReportRequest(mechanism=mechanism, participation=tmp_path / "shards")
    assert gather_evidence(request).observed.num_contributions == N


@pytest.mark.parametrize("name", ["counts.json", "record.json"])
def test_two_entries_of_one_name_in_evidence_are_refused(tmp_path, capsys, name):
    mechanism = shutil.move(keras_run(tmp_path / "run") / "mechanism.bandmf", tmp_path)
    path = tmp_path / name
    path.write_text(json.dumps(COUNTS if name == "counts.json" else run_record().to_json()))
    path.write_text(path.read_text().replace("{", '{"version": 1, ', 1))
    flags = [f"--mechanism={mechanism}", f"--participation={path}"]
    assert "two entries called 'version'" in refused(capsys, *flags)


def test_a_link_to_itself_cannot_be_read(tmp_path, mechanism, capsys):
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    flags = [f"--mechanism={mechanism}", f"--participation={tmp_path / 'loop.csv'}"]
    assert "cannot be read: Too many levels" in refused(capsys, *flags)


def test_a_shard_given_twice_is_refused(tmp_path, mechanism, log, capsys):
    flags = [f"--participation={log}", f"--participation={tmp_path}/./log.csv"]
    assert "was given twice" in refused(capsys, f"--mechanism={mechanism}", *flags)


@pytest.mark.parametrize(
    "flag", ["delta=1e-3", "max_participations=1", "mechanism=x", "json", "nojson", "verify=x"]
)
def test_a_flag_that_is_given_twice_is_an_error(mechanism, capsys, flag):
    name = flag.partition("=")[0].removeprefix("no")
    flags = [f"--{flag}", f"--{flag}"]
    assert f"--{name} was given twice" in refused(capsys, *flags)


# Ledgers that were written again.


def _checkpoint(run, rounds):
    """Writes the checkpoint that the training program would have left."""
    head = read_ledger(run / "ledger.jsonl").head
    folder = CheckpointFolder(run / "secret")
    folder.save(Checkpoint(rounds, {"head": head, "previous_head": ""}, {}))


def test_a_rewritten_ledger_is_found_by_the_checkpoint_beside_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", liar=True)
    _checkpoint(run, N)
    evidence = gather_evidence(ReportRequest(run=run))
    assert "the hash in the newest checkpoint" in evidence.notes[0]
    shutil.copy(make_run(tmp_path / "other") / "ledger.jsonl", run / "ledger.jsonl")
    error = refused(capsys, f"--run={run}")
    assert "the ledger was written again" in error
    shutil.rmtree(run / "secret")
    notes = gather_evidence(ReportRequest(run=run)).notes
    assert "internally consistent" in notes[0]
    assert "not compared with an independent record" in notes[0]


def test_a_plan_of_fewer_rounds_that_only_the_ledger_has_is_assumed(tmp_path):
    """Whoever cuts a ledger, and writes it again, writes its header again as well."""
    run = make_run(tmp_path / "run", rounds=12, num_rounds=12)
    observed = gather_evidence(ReportRequest(run=run)).observed
    assert (observed.rounds_completed, observed.rounds_completed_basis) == (12, Basis.ASSUMED)
    _checkpoint(run, 12)
    observed = gather_evidence(ReportRequest(run=run)).observed
    assert observed.rounds_completed_basis is Basis.OBSERVED


def test_a_ledger_beside_the_one_that_was_written_again_is_not_passed_over(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    backup = run / "ledger.bak"
    backup.write_bytes(b"".join(lines[:9]))  # A beginning of it contradicts nothing.
    gather_evidence(ReportRequest(run=run))
    shutil.copy(make_run(tmp_path / "liar", liar=True) / "ledger.jsonl", backup)
    assert "has another ledger, ledger.bak" in refused(capsys, f"--run={run}")


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    _checkpoint(run, N)
    path = next((run / "secret").glob("checkpoint_*"))
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in refused(capsys, f"--run={run}")


def test_a_head_that_was_kept_elsewhere_is_compared(tmp_path, mechanism, capsys):
    run = make_run(tmp_path / "run")
    head = read_ledger(run / "ledger.jsonl").head
    assert "kept elsewhere" in gather_evidence(ReportRequest(run=run, ledger_head=head)).notes[0]
    ledger = [f"--mechanism={mechanism}", f"--participation={run / 'ledger.jsonl'}"]
    for flags in ([f"--run={run}"], ledger):
        assert run_tool(*flags, f"--ledger_head={head}") == 0
        capsys.readouterr()
        assert "was written again" in refused(capsys, *flags, f"--ledger_head={'0' * 64}")
        for no_hash in ("", head[1:], f"5 {head}", f"{head}\n", "G" * 64):
            error = refused(capsys, *flags, f"--ledger_head={no_hash}")
            assert "ledger_head must be the 64 hexadecimal digits" in error
    stated = [f"--mechanism={mechanism}", "--max_participations=1"]
    log = [f"--mechanism={mechanism}", f"--participation={write_log(tmp_path)}"]
    for flags in (stated, log, [f"--run={keras_run(tmp_path / 'keras')}"]):
        assert "belongs to a ledger" in refused(capsys, *flags, f"--ledger_head={head}")


def test_a_timeline_that_was_cut_is_noticed(tmp_path, mechanism, capsys):
    path = tmp_path / "rounds.csv"
    text = "round,start,end\n" + "".join(f"{i},{60 * i},{60 * i + 30}\n" for i in range(N))
    flags = [f"--mechanism={mechanism}", f"--participation={path}", "--timer_seconds=301"]
    for cut in (text[:-2], text[:-5], text[:-1]):
        path.write_text(cut)
        refused(capsys, *flags)
    path.write_text("".join(text.splitlines(keepends=True)[:-3]))
    report, _ = make_report(
        ReportRequest(mechanism=mechanism, participation=path, timer_seconds=301.0)
    )
    assert "The timeline ends after 21 of 24 planned rounds" in " ".join(report.cautions)
    assert report.rounds_completed_basis == "assumed"
    stated = gather_evidence(dataclasses.replace(report.request_in(tmp_path), rounds_completed=21))
    assert stated.observed.rounds_completed_basis is Basis.ASSUMED


# Refusals.


def test_another_noise_than_the_evidence_is_of_is_refused(tmp_path, capsys):
    stated = "--noise_multiplier=80"
    run = make_run(tmp_path / "run")
    files = [f"--mechanism={run / 'mechanism.bandmf'}"]
    ledger = f"--participation={run / 'ledger.jsonl'}"
    assert "noise_multiplier" in refused(capsys, *files, ledger, stated)
    keras = keras_run(tmp_path / "keras")
    files = [f"--mechanism={keras / 'mechanism.bandmf'}"]
    record = f"--participation={keras / 'record.json'}"
    assert "has noise_multiplier=8. Found" in refused(capsys, *files, record, stated)


def test_a_ledger_whose_end_was_cut_off_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-3]))
    found = refused(capsys, f"--run={run}")
    assert "model_000024.npz is the model after 24 rounds, and ledger.jsonl and" in found
    assert "continue" not in found  # That would release three rounds a second time.
    (run / "released" / "model_000024.npz").unlink()
    (run / "metrics.csv").write_text("round,loss\n22,0.5\n")
    assert "metrics.csv has a line for round 22" in refused(capsys, f"--run={run}")
    (run / "metrics.csv").unlink()
    observed = gather_evidence(ReportRequest(run=run)).observed
    assert observed.rounds_completed == 21
    assert observed.rounds_completed_basis is Basis.ASSUMED  # Nothing else knows where it ended.
    (run / "secret").mkdir()
    (run / "secret" / "checkpoint_000000022").touch()
    found = refused(capsys, f"--run={run}")
    assert "the checkpoint after 22 rounds and the ledger ends after 21" in found
    assert "or continue the run, which writes the line" in found
    (run / "secret" / "checkpoint_000000023").touch()
    assert "continue" not in refused(capsys, f"--run={run}")


@pytest.mark.parametrize("source", ["pinned", "unknown"])
def test_noise_that_others_may_know_gets_no_guarantee_in_any_form(tmp_path, capsys, source):
    message = f"the source of the noise is {source} by the "
    run = make_run(tmp_path / "run", noise_source=source)
    mechanism, log = f"--mechanism={run / 'mechanism.bandmf'}", write_log(tmp_path)
    inside = write_log(run)
    for arguments in (
        [f"--run={run}"],
        [f"--run={run}", f"--participation={log}"],
        [mechanism, f"--participation={run / 'ledger.jsonl'}"],
        [mechanism, f"--participation={log}"],
        [mechanism, f"--min_separation={B}"],
    ):
        assert message in refused(capsys, *arguments, f"--output={tmp_path / 'out'}")
    shutil.move(run / "mechanism.bandmf", tmp_path / "m.bandmf")
    elsewhere = f"--mechanism={tmp_path / 'm.bandmf'}"
    assert message in refused(capsys, elsewhere, f"--participation={inside}")
    keras = keras_run(tmp_path / "keras", noise_source=source)
    mechanism = f"--mechanism={keras / 'mechanism.bandmf'}"
    for arguments in (
        [f"--run={keras}"],
        [mechanism, f"--participation={keras / 'record.json'}"],
        [mechanism, f"--min_separation={B}", f"--max_participations={K}"],
    ):
        assert message in refused(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_log_says_that_the_source_of_the_noise_is_assumed(tmp_path):
    save_mechanism(planned_mechanism(), tmp_path / "m.bandmf")
    request = ReportRequest(mechanism=tmp_path / "m.bandmf", participation=write_log(tmp_path))
    assert "where the noise came from" in gather_evidence(request).notes[-1]


def test_a_model_that_is_not_the_ledgers_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "released" / "model_000024.npz").write_bytes(b"another model")
    assert "not the model that the ledger names for round 23" in refused(capsys, f"--run={run}")


def test_a_missing_cap_is_refused(mechanism, capsys):
    error = refused(capsys, f"--mechanism={mechanism}", "--min_separation=6")
    assert "max_participations" in error
    assert "missing" in error


def test_missing_participation_is_refused(mechanism, capsys):
    assert "missing" in refused(capsys, f"--mechanism={mechanism}")


def test_a_run_without_any_bound_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run", pseudonymous=False)
    error = refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")
    assert "nothing bounds how often a client took part; give timer_seconds" in error
    assert not (tmp_path / "out").exists()


def test_another_mechanism_than_the_ledgers_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    save_mechanism(planned_mechanism(3.0), run / "mechanism.bandmf")
    assert "mechanism" in refused(capsys, f"--run={run}")


def test_a_broken_chain_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    for changed in (lines[:3] + lines[4:], [lines[0], lines[2], lines[1], *lines[3:]]):
        ledger.write_bytes(b"".join(changed))
        assert "does not continue the line before it" in refused(capsys, f"--run={run}")
    ledger.write_bytes(b"".join(lines).replace(b'"num_participants":1', b'"num_participants":2', 1))
    assert "line 2" in refused(capsys, f"--run={run}")


def test_a_truncated_line_of_the_ledger_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert "never committed" in refused(capsys, f"--run={run}")


@pytest.mark.parametrize("name", ["mechanism.bandmf", "ledger.jsonl"])
def test_a_run_without_its_files_is_refused(tmp_path, capsys, name):
    run = make_run(tmp_path / "run")
    (run / name).unlink()
    assert name in refused(capsys, f"--run={run}")


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
        ["--participation="],
        ["--run=."],
        ["--nonsense=1"],
        ["something"],
        ["--timer_seconds=10", "--max_participations=1"],
        ["--verify=nowhere.json"],
        ["--noise_multiplier=1e-300", "--min_separation=6", "--max_participations=2"],
        ["--noise_multiplier=1e-30", "--min_separation=6", "--max_participations=2"],
    ],
)
def test_bad_flags_give_one_sentence_and_nothing_is_written(tmp_path, mechanism, capsys, arguments):
    output = tmp_path / "out"
    flags = [f"--mechanism={mechanism}"] if "--verify" not in "".join(arguments) else []
    flags += [] if "--verify" in "".join(arguments) else [f"--output={output}"]
    refused(capsys, *flags, *arguments)
    assert not output.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mechanism.bandmf"]


def test_output_must_be_a_folder_for_a_report(tmp_path, mechanism, capsys):
    limits = [f"--mechanism={mechanism}", "--max_participations=1"]
    refused(capsys, *limits, f"--output={mechanism}")
    refused(capsys, *limits, f"--output={tmp_path}")
    refused(capsys, *limits, "--output=")
    assert mechanism.exists()


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.binary(max_size=300), name=st.sampled_from(["log.csv", "log.jsonl", "x"]))
def test_any_bytes_as_participation_give_a_report_or_a_sentence(tmp_path_factory, data, name):
    folder = tmp_path_factory.mktemp("fuzz")
    save_mechanism(planned_mechanism(), folder / "m.bandmf")
    (folder / name).write_bytes(data)
    output = folder / "out"
    status = run_tool(
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
    run = make_run(folder / "run", rounds=4)
    path = run / data.draw(st.sampled_from(["mechanism.bandmf", "ledger.jsonl"]))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert run_tool(f"--run={run}", f"--output={folder / 'out'}") == 2
    assert not (folder / "out").exists()
