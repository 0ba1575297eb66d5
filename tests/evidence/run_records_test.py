"""Run records of Keras: what they prove, and what is refused, assumed or cautioned about."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import yaml

from bandmf_tf._numbers import round_up
from bandmf_tf.accounting.amplification import (
    BoundedPoissonSampling,
    FixedSizeSampling,
    PoissonSampling,
)
from bandmf_tf.evidence.gather import gather_evidence
from bandmf_tf.evidence.reader import ReportError, ReportRequest
from bandmf_tf.mechanisms.files import mechanism_checksum, save_mechanism
from bandmf_tf.mechanisms.spending import epsilon_after
from bandmf_tf.report.document import PrivacyReport, make_report, verify_report
from bandmf_tf.report.registry import registry_entry
from bandmf_tf.report.statement import opening, statement_text
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.run_record import save_run_record
from cases import (
    B,
    K,
    N,
    keras_run,
    planned_mechanism,
    refused,
    run_record,
    sampled_mechanism,
    write_log,
)

# Of at most 11 examples, where the record has seen 12.
CUT = BoundedPoissonSampling(N, B, 0.1, max_batch_size=11, dataset_size=600)


def test_a_log_beside_a_run_record_is_refused(tmp_path, capsys):
    run, log = keras_run(tmp_path / "run"), write_log(tmp_path)
    assert "leave participation" in refused(capsys, f"--run={run}", f"--participation={log}")


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
    entry = yaml.safe_load(registry_entry(report))["deployment"]
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
    # Who cuts a record, and its epsilon with it, says the same.
    assert opening(report).startswith("If training ended after 9 rounds, which is assumed")
    assert any("compared with nothing else" in note for note in report.evidence.notes)


def test_a_record_that_spent_more_than_its_rounds_cost_is_refused(tmp_path, capsys):
    """Whoever cuts a record to half of its rounds leaves the epsilon of all of them in it."""
    epsilon = sampled_mechanism().epsilon
    cut = keras_run(tmp_path / "cut", rounds_completed=N // 2, epsilon=epsilon)
    message = refused(capsys, f"--run={cut}", f"--output={tmp_path / 'out'}")
    assert f"states epsilon={epsilon:.6g}, and the {N // 2} of {N} rounds" in message
    assert not (tmp_path / "out").exists()
    # All rounds are there: a later version may compute less.
    whole = keras_run(tmp_path / "whole", epsilon=1.01 * epsilon)
    observed = gather_evidence(ReportRequest(run=whole)).observed
    assert observed.rounds_completed_basis is Basis.ASSUMED
    assert "contradicts itself" in observed.cautions[0]
    # And a record that says what its rounds spend is taken.
    gather_evidence(ReportRequest(run=keras_run(tmp_path / "honest", rounds_completed=N // 2)))


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
        ({"delta": 0.5}, "delta=0.5 and its mechanism 1e-06"),
        ({"adjacency": "add-or-remove"}, "adjacency=add-or-remove and its mechanism zero-out"),
        ({"epsilon": None}, "epsilon=None, which training always writes"),
        ({"epsilon": -1.0}, "epsilon=-1.0, which training always writes"),
        ({"microbatch_size": -4}, "microbatch_size=-4"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"unit": "user", "examples_per_user": 2, "microbatch_size": 4}, "users and microbatch"),
        ({"batch_sizes_seen": {"smallest": 9, "largest": 3, "mean": 8}}, "contradict each other"),
        ({"batch_sizes_seen": {"smallest": -1, "largest": 3, "mean": 2}}, "contradict each other"),
        ({"batch_sizes_seen": {"smallest": "3", "mean": 8}}, "contradict each other"),
        ({"batch_sizes_seen": {"mean": math.nan}}, "finite numbers alone"),
        ({"sampling": FixedSizeSampling(N, B, 5, 60)}, "how it says that batches were drawn"),
        ({"sampling": CUT}, "how it says that batches were drawn"),
        (
            {"sampling": dataclasses.replace(CUT, max_batch_size=10), "microbatch_size": 5},
            "how it says that batches were drawn",
        ),
    ],
)
def test_a_run_record_that_contradicts_its_mechanism_or_itself_is_refused(
    tmp_path, capsys, changes, sentence
):
    run = keras_run(tmp_path / "run")
    text = json.dumps(run_record(**changes).to_json())  # With NaN, which no run writes.
    (run / "record.json").write_text(text)
    assert sentence in refused(capsys, f"--run={run}", f"--output={tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"kind": "balls_in_bins", "num_rounds": N, "num_bins": True}, "num_bins must be a number"),
        (
            {
                "kind": "shuffling",
                "num_rounds": N,
                "num_parts": B,
                "batch_size": 8,
                "dataset_size": 600,
                "reshuffled": "no",
            },
            "reshuffled must be true or false",
        ),
    ],
)
def test_a_scheme_of_other_types_is_refused(tmp_path, capsys, sampling, sentence):
    run = keras_run(tmp_path / "run")
    text = json.dumps(run_record().to_json() | {"sampling": sampling})
    (run / "record.json").write_text(text)
    assert sentence in refused(capsys, f"--run={run}")


def test_a_batch_that_fills_its_last_microbatch_is_as_large_as_it_may_be(tmp_path):
    run = keras_run(tmp_path / "run", sampling=CUT, microbatch_size=4)
    assert gather_evidence(ReportRequest(run=run)).observed.rounds_completed == N


def test_a_clip_norm_that_adapts_is_named_and_costs_nothing(tmp_path):
    adaptive = {"target_quantile": 0.5, "learning_rate": 0.2, "vote_weight": 0.1}
    plain, _ = make_report(ReportRequest(run=keras_run(tmp_path / "plain")))
    run = keras_run(tmp_path / "run", adaptive_clipping=adaptive)
    report, _ = make_report(ReportRequest(run=run))
    assert (report.epsilon, report.rho) == (plain.epsilon, plain.rho)
    assert "and adaptive clip norm, starting at 0.5, is" in opening(report)
    assert "and clip norm 0.5, is" in opening(plain)
    assert any("one more coordinate of the same releases" in n for n in report.evidence.notes)
    assert PrivacyReport.from_json(report.to_json()) == report
    assert "clip_norm_adapts" not in plain.to_json()


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
