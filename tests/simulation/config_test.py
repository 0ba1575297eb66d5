"""A configuration comes from YAML and flags and is checked before anything runs."""

from __future__ import annotations

import contextlib
import dataclasses

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandmf_tf.accounting.amplification import PoissonSampling
from bandmf_tf.factorization.participation import FixedEpochs, MinSeparation
from bandmf_tf.factorization.strategies import identity
from bandmf_tf.mechanisms.mechanism import Mechanism
from bandmf_tf.simulation import config as run_config
from bandmf_tf.simulation.config import ConfigError, RunConfig, load_config
from bandmf_tf.simulation.population import Availability
from cases import make_mechanism

REQUIRED = {"mechanism": "m.bandmf", "output": "run"}
APART = MinSeparation(4)


def _mechanism(num_rounds: int, participation=APART, **changes) -> Mechanism:
    return make_mechanism(identity(num_rounds), participation, noise_multiplier=5.0, **changes)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mechanism: m.bandmf\noutput: run\nnum_rounds: 7\nlocal_epochs: 3\n")
    config = load_config(path, {"num_rounds": 9})
    assert (config.num_rounds, config.local_epochs, config.server_momentum) == (9, 3, 0.95)


def test_whole_numbers_are_fine_for_real_ones():
    config = load_config(None, {**REQUIRED, "server_learning_rate": 1})
    assert isinstance(config.server_learning_rate, float)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_rounds", 0),
        ("num_rounds", 2.5),
        ("num_rounds", "ten"),
        ("num_rounds", True),
        ("server_momentum", 1.0),
        ("zeroing", "yes"),
        ("availability", "sometimes"),
        ("task", "mnist"),
        ("mechanism", ""),
        ("warmup_fraction", 0.9),
        ("clients_per_round", 5000),
        ("strict_separation", False),
        ("misbehaving_fraction", 1.0),
        ("local_learning_rate", float("nan")),
        ("min_round_seconds", 1e12),
        ("clip_quantile", 1.0),
        ("clip_quantile", -0.1),
        ("clip_vote_weight", 0.6),
        ("clip_learning_rate", 0.0),
        ("clock", "sundial"),
    ],
)
def test_invalid_values_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        load_config(None, {**REQUIRED, field: value})


def test_unknown_fields_are_refused():
    with pytest.raises(ConfigError, match=r"Unknown fields \['rounds'\]"):
        load_config(None, {**REQUIRED, "rounds": 5})


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text", "", "\x00"])
def test_files_that_are_no_mappings_are_refused(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml")


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(sorted(run_config.FIELDS)),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
    )
)
def test_any_values_give_a_configuration_or_a_config_error(values):
    config = None
    with contextlib.suppress(ConfigError):
        config = load_config(None, {**REQUIRED, **values})
    assert config is None or config.num_rounds >= 1


def test_the_schema_accepts_the_defaults_and_documents_every_field():
    schema = run_config.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"].keys() == {f.name for f in dataclasses.fields(RunConfig)}
    assert all(entry["description"].endswith(".") for entry in schema["properties"].values())


def test_the_mechanism_must_cover_the_run():
    config = load_config(None, {**REQUIRED, "num_rounds": 11})
    config.check_mechanism(_mechanism(11))
    with pytest.raises(ConfigError, match="covers num_rounds=10"):
        config.check_mechanism(_mechanism(10))


def test_amplified_mechanisms_are_refused():
    mechanism = _mechanism(4, None, sampling=PoissonSampling(4, 1, sampling_probability=0.1))
    with pytest.raises(ConfigError, match="amplified by sampling"):
        load_config(None, {**REQUIRED, "num_rounds": 4}).check_mechanism(mechanism)


def test_mechanisms_for_fixed_epochs_are_refused():
    """Clients at least b rounds apart are not exactly b apart, and may have more sensitivity."""
    mechanism = _mechanism(8, FixedEpochs(4, 2))
    with pytest.raises(ConfigError, match=r"in rounds 4 apart .* plan it with MinSeparation"):
        load_config(None, {**REQUIRED, "num_rounds": 8}).check_mechanism(mechanism)


def test_the_rule_of_the_clients_comes_from_the_mechanism():
    mechanism = _mechanism(10)
    strict = load_config(None, REQUIRED).participation_rule(mechanism)
    assert (strict.min_separation, strict.timer_seconds) == (4, None)
    timed = {**REQUIRED, "timer_hours": 2.0, "strict_separation": False}
    rule = load_config(None, timed).participation_rule(mechanism)
    assert (rule.min_separation, rule.timer_seconds) == (None, 7200.0)


def test_the_rhythm_of_the_clients_comes_from_the_configuration():
    changes = {"plugged_in_hour": 24.0, "idle_probability": 0.5, "time_zone_hours": 0}
    model = load_config(None, {**REQUIRED, **changes}).availability_model()
    assert (model.plugged_in_hour, model.idle_probability, model.time_zone_hours) == (0.0, 0.5, 0.0)
    assert load_config(None, REQUIRED).availability_model() == Availability()
    assert load_config(None, {**REQUIRED, "availability": "always"}).availability_model() is None


@pytest.mark.parametrize(
    ("num_clients", "message"),
    [(79, r"twice in 4 rounds, so at least 80"), (80, None)],
)
def test_a_population_that_cannot_fill_the_rounds_is_refused(num_clients, message):
    values = {**REQUIRED, "num_rounds": 8, "clients_per_round": 20, "num_clients": num_clients}
    config = load_config(None, values)
    if message is None:
        config.check_mechanism(_mechanism(8))
        return
    with pytest.raises(ConfigError, match=message):
        config.check_mechanism(_mechanism(8))


def test_a_population_that_may_not_come_often_enough_is_refused():
    mechanism = _mechanism(20, participation=MinSeparation(2, max_participations=3))
    values = {**REQUIRED, "num_rounds": 20, "clients_per_round": 6}
    load_config(None, {**values, "num_clients": 40}).check_mechanism(mechanism)
    with pytest.raises(ConfigError, match="in more than 3 of 20 rounds, so at least 40"):
        load_config(None, {**values, "num_clients": 39}).check_mechanism(mechanism)


@pytest.mark.parametrize(
    ("clients", "field", "value"),
    [
        ("registered", "timer_hours", 2.0),
        ("registered", "strict_separation", False),
        ("registered", "dropout_fraction", 0.1),
        ("data_source", "over_selection", 1.5),
        ("data_source", "participation_recording", "pseudonymous"),
        ("simulated", "minimum_clients", 21),
        ("simulated", "clock", "real"),
        ("registered", "clock", "simulated"),
        ("data_source", "clock", "simulated"),
    ],
)
def test_what_these_clients_cannot_do_is_refused(clients, field, value):
    with pytest.raises(ConfigError, match=field):
        load_config(None, {**REQUIRED, "clients": clients, field: value})


def test_the_clock_that_clients_have_may_be_asked_for():
    for clients, clock in (("simulated", "simulated"), ("registered", "real")):
        loaded = load_config(None, {**REQUIRED, "clients": clients, "clock": clock})
        assert loaded.clock == clock


def test_a_population_must_be_enough_for_those_who_are_invited_too_many():
    values = {**REQUIRED, "num_rounds": 8, "clients_per_round": 20, "over_selection": 1.3}
    load_config(None, {**values, "num_clients": 104}).check_mechanism(_mechanism(8))
    with pytest.raises(ConfigError, match=r"26 invited, .* so at least 104"):
        load_config(None, {**values, "num_clients": 103}).check_mechanism(_mechanism(8))
    registered = {**values, "num_clients": 20, "clients": "registered"}
    load_config(None, registered).check_mechanism(_mechanism(8))
