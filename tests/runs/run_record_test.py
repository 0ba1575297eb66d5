from __future__ import annotations

import contextlib
import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting.amplification import FixedSizeSampling, PoissonSampling, Shuffling
from bandmf_tf.evidence.participation import ParticipationError
from bandmf_tf.evidence.run_records import participation_of_record
from bandmf_tf.factorization.strategies import ToeplitzStrategy
from bandmf_tf.report.analysis import analyze
from bandmf_tf.runs.basis import Basis
from bandmf_tf.runs.run_record import RunRecord, RunRecordError, load_run_record, save_run_record
from cases import make_mechanism, run_record

N = 24
SCHEMES = [
    None,
    PoissonSampling.from_sizes(N, 4, 10, 400),
    FixedSizeSampling(N, 4, 10, 400),
    Shuffling(N, 4, 10, 400, reshuffled=True),
]


_record = functools.partial(
    run_record,
    rounds_completed=10,
    sampling=SCHEMES[1],
    epsilon=1.5,
    delta=1e-5,
    cautions=("A sentence.",),
    versions={"keras": "2.14.0"},
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_a_record_comes_back_as_it_was(tmp_path, scheme):
    record = _record(sampling=scheme)
    save_run_record(record, tmp_path / "record.json")
    assert load_run_record(tmp_path / "record.json") == record


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=lambda s: type(s).__name__)
def test_a_report_can_be_made_of_it(scheme):
    mechanism = make_mechanism(ToeplitzStrategy(np.array([1.0, 0.5]), N), sampling=scheme)
    observed = participation_of_record(_record(sampling=scheme))
    assert observed.rounds_completed == 10
    assert observed.min_separation in (None, 4)
    shorter = dataclasses.replace(scheme, num_rounds=10)
    assert observed.max_participations == shorter.max_participations
    analysis = analyze(mechanism, observed, sampling=scheme)
    assert analysis.unamplified.epsilon <= mechanism.epsilon * 10


@pytest.mark.parametrize("source", ["pinned", "unknown"])
def test_noise_that_others_may_know_gets_no_guarantee(source):
    with pytest.raises(ParticipationError, match=f"source of the noise is {source}"):
        participation_of_record(_record(noise_source=source))


def test_a_record_of_a_norm_that_adapts_comes_back_as_it_was(tmp_path):
    adaptive = {"target_quantile": 0.5, "learning_rate": 0.2, "vote_weight": 0.1}
    record = _record(adaptive_clipping=adaptive)
    save_run_record(record, tmp_path / "record.json")
    assert load_run_record(tmp_path / "record.json") == record


@pytest.mark.parametrize("version", [1, 2, 3])
def test_what_an_old_record_does_not_say_is_unknown(tmp_path, version):
    added = ["adaptive_clipping", "examples_per_user", "unit", "noise_source"]
    added = added[: {1: 4, 2: 3, 3: 1}[version]]
    fields = {**_record().to_json(), "version": version}
    for name in added:
        del fields[name]
    (tmp_path / "record.json").write_text(json.dumps(fields))
    unknown = {name: "unknown" for name in added if name in ("unit", "noise_source")}
    assert load_run_record(tmp_path / "record.json") == _record(**unknown)


def test_what_nobody_enforced_is_called_assumed():
    observed = participation_of_record(_record(sampling_basis="assumed"))
    assert observed.min_separation_basis is Basis.ASSUMED
    assert observed.cautions == ("A sentence.",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format"),
        ({"version": 5}, "versions 1 to 4"),
        ({"adaptive_clipping": {}}, "adaptive_clipping has a target_quantile"),
        ({"adaptive_clipping": {"target_quantile": "<b>"}}, "adaptive_clipping has"),
        ({"version": 1, "noise_source": "system", "extra": 1}, "has the fields"),
        ({"noise_source": "hoped"}, "noise_source"),
        ({"unit": "household"}, "unit must be"),
        ({"unit": "user"}, "examples_per_user"),
        ({"unit": "user", "examples_per_user": 0}, "examples_per_user"),
        ({"examples_per_user": 3}, "examples_per_user is for users"),
        ({"extra": 1}, "has the fields"),
        ({"rounds_completed": 99}, "at most num_rounds"),
        ({"sampling": {"kind": "other"}}, "invalid"),
        ({"sampling_basis": "observed"}, "sampling_basis is enforced or assumed"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": 10**400}, "finite numbers alone"),
    ],
)
def test_files_that_are_no_record_are_refused(tmp_path, change, message):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**_record().to_json(), **change}))
    with pytest.raises(RunRecordError, match=message):
        load_run_record(path)


@settings(max_examples=100)
@given(value=st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_any_other_json_is_refused(value):
    with pytest.raises(RunRecordError):
        RunRecord.from_json(value)


@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(_record().to_json())), value=st.none() | st.text() | st.integers()
)
def test_a_wrong_field_is_refused_or_taken_but_never_crashes(name, value):
    fields = {**_record().to_json(), name: value}
    with contextlib.suppress(RunRecordError):
        assert isinstance(RunRecord.from_json(fields), RunRecord)


def test_text_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(RunRecordError, match="not JSON"):
        load_run_record(tmp_path / "record.json")
