from __future__ import annotations

import dataclasses
import json
import math
import shutil

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from bandmf_tf._numbers import round_up
from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling
from bandmf_tf.evidence.gather import READERS, gather_evidence
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.report.document import make_report, verify_report
from bandmf_tf.report.registry import registry_entry
from bandmf_tf.report.statement import opening, statement_text
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.checkpoints import Checkpoint, CheckpointFolder
from bandmf_tf.runs.ledger import read_ledger
from bandmf_tf.runs.run_record import save_run_record
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
    assert "and on its times, is assumed" in gather_evidence(ReportRequest(run=run)).notes[0]
    head = read_ledger(run / "ledger.jsonl").head
    assert bases(ledger_head=head) == (Basis.ENFORCED, Basis.ENFORCED)
    _checkpoint(run, N)
    assert bases() == (Basis.ENFORCED, Basis.ENFORCED)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"timer_seconds": 61.0}', "has timer_seconds=61.0, which contradicts ledger.jsonl"),
        ('{"num_rounds": 9}', "has num_rounds=9"),
        ('{"noise_seed": 7}', "has noise_seed=7"),
        ('{"timer_seconds": 61.0, "timer_seconds": 301.0}', "two entries"),
        ("{", "is not JSON"),
    ],
)
def test_a_configuration_that_contradicts_its_ledger_is_refused(tmp_path, config, reason):
    run = make_run(tmp_path / "run", pseudonymous=False, timer_seconds=301.0)
    (run / "run.json").write_text(f'{{"timer_seconds": 301.0, "num_rounds": {N}}}')
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
    files = {
        "run record": "keras/record.json",
        "ledger": "run/ledger.jsonl",
        "timeline": "rounds.csv",
        "participation counts": "counts.json",
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


def test_what_a_run_has_left_cannot_be_passed_over(tmp_path, log, capsys):
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
    copied = shutil.copy(run / "ledger.jsonl", tmp_path / "copy.jsonl")
    assert run_tool(f"--mechanism={run / 'mechanism.bandmf'}", f"--participation={copied}") == 0
    capsys.readouterr()
    save_run_record(run_record(), run / "record.json")
    assert "may contradict each other" in refused(capsys, f"--run={run}")


def test_a_log_beside_a_run_record_is_refused(tmp_path, log, capsys):
    run = keras_run(tmp_path / "run")
    assert "leave participation" in refused(capsys, f"--run={run}", f"--participation={log}")


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
        assert run_tool(f"--verify={output / 'report.json'}") == 0
        capsys.readouterr()
    shards[1].write_text(shards[1].read_text() + "secret-0,1\n")
    assert run_tool(f"--verify={output / 'report.json'}") == 1


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
    stated = [f"--mechanism={mechanism}", "--max_participations=1"]
    log = [f"--mechanism={mechanism}", f"--participation={write_log(tmp_path)}"]
    for flags in (stated, log, [f"--run={keras_run(tmp_path / 'keras')}"]):
        assert "belongs to a ledger" in refused(capsys, *flags, f"--ledger_head={head}")


# Keras runs.


def test_a_keras_run_has_the_amplified_guarantee_beside_the_other(tmp_path):
    run = keras_run(tmp_path / "run")
    report, _ = make_report(ReportRequest(run=run))
    assert report.epsilon == report.epsilon_amplified
    assert report.epsilon == pytest.approx(sampled_mechanism().epsilon)
    assert report.epsilon < report.epsilon_unamplified
    assert report.unit == "example"
    assert report.min_separation_basis == "enforced"
    assert report.plan_was_kept
    statement = " ".join(statement_text(report).split())
    without = round_up(report.epsilon_unamplified)
    assert (
        f"of one example; epsilon is amplified by sampling, and {without:g} without." in statement
    )
    assert "drawn in which round must stay secret" in statement
    assert "clients" not in statement
    entry = yaml.safe_load(registry_entry(report))
    assert entry["dp_variant"]["variant_name"] == "Approximate DP"
    assert "takes part" not in entry["dp_variant"]["unprotected_quantities"]
    assert "without amplification" in entry["privacy_loss"]["privacy_parameters_details"]
    request = ReportRequest(mechanism=run / "mechanism.bandmf", participation=run / "record.json")
    forged = dataclasses.replace(report, epsilon_unamplified=report.epsilon)
    assert verify_report(report, request) > 80
    with pytest.raises(ReportError, match="epsilon_unamplified"):
        verify_report(forged, request)


def test_a_keras_run_that_stopped_early_has_spent_less(tmp_path):
    report, _ = make_report(ReportRequest(run=keras_run(tmp_path / "run", rounds_completed=9)))
    assert report.rounds_completed == 9
    assert report.epsilon < sampled_mechanism().epsilon


def test_a_record_that_spent_more_than_its_rounds_cost_is_not_believed(tmp_path):
    epsilon = sampled_mechanism().epsilon
    for rounds, basis in ((N, Basis.OBSERVED), (9, Basis.ASSUMED)):
        run = keras_run(tmp_path / f"run{rounds}", rounds_completed=rounds, epsilon=epsilon)
        observed = gather_evidence(ReportRequest(run=run)).observed
        assert observed.rounds_completed_basis is basis
        assert ("contradicts itself" in " ".join(observed.cautions)) == (rounds < N)


def test_the_epsilon_that_a_mechanism_file_states_is_not_believed(tmp_path):
    true = sampled_mechanism()
    forged = dataclasses.replace(true, guarantee=dataclasses.replace(true.guarantee, epsilon=1e-3))
    run = keras_run(tmp_path / "run")
    save_mechanism(forged, run / "mechanism.bandmf")
    checksum = mechanism_checksum(forged)
    save_run_record(run_record(mechanism_checksum=checksum), run / "record.json")
    report, _ = make_report(ReportRequest(run=run))
    assert report.planned.epsilon == report.epsilon == true.epsilon
    assert epsilon_after(forged, N) == true.epsilon
    assert epsilon_after(forged, 9) > 1e-3


@pytest.mark.parametrize("basis", ["enforced", "assumed"])
def test_microbatches_are_clipped_to_half_and_not_counted_again(tmp_path, basis):
    """`keras.clipping` halves the clip norm of microbatches; the callback counts on it, too."""
    run = keras_run(tmp_path / "run", microbatch_size=4, sampling_basis=basis)
    report, _ = make_report(ReportRequest(run=run))
    mechanism = sampled_mechanism()
    assert report.sensitivity == pytest.approx(mechanism.sensitivity.value)
    assert report.plan_was_kept
    if basis == "enforced":
        assert report.epsilon == pytest.approx(mechanism.epsilon)
    else:
        assert report.epsilon_amplified is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"sampling": None, "sampling_basis": "assumed"}, "how batches were drawn"),
        ({"mechanism_checksum": "0" * 64}, "mechanism"),
        ({"mechanism_checksum": None}, "mechanism"),
        ({"rounds_completed": 0}, "no completed round"),
        ({"cautions": ("The seed of the batches was pinned.",)}, "seed"),
        ({"noise_source": "pinned"}, "source of the noise is pinned"),
        ({"noise_source": "unknown"}, "source of the noise is unknown"),
    ],
)
def test_keras_runs_without_support_are_refused(tmp_path, capsys, changes, missing):
    run = keras_run(tmp_path / "run", **changes)
    assert missing in refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise_multiplier": 100.0}, "noise_multiplier=100.0 and its mechanism 8.0"),
        ({"l2_norm_clip": 5.0}, "l2_norm_clip=5.0 and its mechanism 0.5"),
        ({"num_rounds": 30}, "num_rounds=30 and its mechanism 24"),
        ({"microbatch_size": -4}, "microbatch_size=-4"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"unit": "user", "examples_per_user": 2, "microbatch_size": 4}, "users and microbatch"),
        ({"batch_sizes_seen": {"smallest": 9, "largest": 3, "mean": 8}}, "contradict each other"),
        ({"batch_sizes_seen": {"smallest": -1, "largest": 3, "mean": 2}}, "contradict each other"),
        ({"batch_sizes_seen": {"smallest": "3", "mean": 8}}, "contradict each other"),
        ({"batch_sizes_seen": {"mean": math.nan}}, "finite numbers alone"),
        ({"sampling": FixedSizeSampling(N, B, 5, 60)}, "how it says that batches were drawn"),
    ],
)
def test_a_run_record_that_contradicts_its_mechanism_or_itself_is_refused(
    tmp_path, capsys, changes, sentence
):
    run = keras_run(tmp_path / "run")
    text = json.dumps(run_record(**changes).to_json())  # With NaN, which no run writes.
    (run / "record.json").write_text(text)
    assert sentence in refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")


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
    stated = gather_evidence(dataclasses.replace(report.request, rounds_completed=21))
    assert stated.observed.rounds_completed_basis is Basis.ASSUMED


def test_two_run_records_in_a_folder_are_refused(tmp_path, capsys):
    run = keras_run(tmp_path / "run")
    save_run_record(run_record(), run / "another.json")
    assert "several run records" in refused(capsys, f"--run={run}")


def test_a_scheme_that_is_only_assumed_is_cautioned_about(tmp_path):
    run = keras_run(tmp_path / "run", sampling_basis="assumed")
    evidence = gather_evidence(ReportRequest(run=run))
    assert evidence.sampling is not None
    assert "How batches were drawn is assumed" in evidence.observed.cautions[0]


@pytest.mark.parametrize(
    ("changes", "unit", "words"),
    [
        ({"unit": "user", "examples_per_user": 3}, "user", "one user, as the run record alone"),
        ({"unit": "unknown"}, "example", "every row of a batch was one example"),
    ],
)
def test_what_a_row_was_is_assumed_where_nothing_shows_it(tmp_path, changes, unit, words):
    run = keras_run(tmp_path / "run", **changes)
    report, _ = make_report(ReportRequest(run=run))
    assert (report.unit, report.unit_basis) == (unit, "assumed")
    assert report.examples_per_user == changes.get("examples_per_user")
    assert opening(report).startswith("If ")
    assert words in opening(report)
    assert f"at the level of one {unit}" in opening(report)
    assert ("called an example below, is a user" in report.assumptions[0]) == (unit == "user")
    told = keras_run(tmp_path / "example")
    plain, _ = make_report(ReportRequest(run=told))
    assert (plain.unit, plain.unit_basis, plain.epsilon) == ("example", None, report.epsilon)


def test_another_scheme_than_the_mechanisms_is_assumed(tmp_path):
    run = keras_run(tmp_path / "run", sampling=PoissonSampling(N, B, 1e-6))
    report, _ = make_report(ReportRequest(run=run))
    assert report.sampling_basis == report.min_separation_basis == "assumed"
    assert "another way than its mechanism was planned for" in report.cautions[0]
    assert "batches were drawn as the run record says" in opening(report)


@pytest.mark.parametrize("parts", [B, N])
def test_sampling_that_only_the_record_names_is_assumed(tmp_path, parts):
    run = keras_run(tmp_path / "run")
    mechanism = planned_mechanism()
    save_mechanism(mechanism, run / "mechanism.bandmf")
    scheme = PoissonSampling(N, parts, 1e-9)
    record = run_record(mechanism_checksum=mechanism_checksum(mechanism), sampling=scheme)
    save_run_record(record, run / "record.json")
    report, _ = make_report(ReportRequest(run=run))
    assert report.sampling_basis == "assumed"
    assert report.min_separation_basis == ("enforced" if parts == B else "assumed")
    assert "How batches were drawn is assumed" in report.cautions[0]
    assert opening(report).startswith("If ")


def test_limits_weaker_than_the_scheme_end_amplification(tmp_path):
    run = keras_run(tmp_path / "run")
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
    assert gather_evidence(ReportRequest(run=run)).observed.rounds_completed == 21
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
