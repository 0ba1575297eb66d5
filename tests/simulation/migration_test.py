"""A configuration of an older version is read, and means what it meant."""

from __future__ import annotations

import yaml

from bandmf_tf.simulation.config import FIELDS, load_config

# All fields of version 0.1.0 with the defaults that they had.
_STORED = {
    "mechanism": "",
    "output": "",
    "task": "digits",
    "num_rounds": 100,
    "clients_per_round": 20,
    "num_clients": 4000,
    "examples_per_client": 20,
    "local_learning_rate": 0.1,
    "local_epochs": 1,
    "local_batch_size": 10,
    "server_learning_rate": 0.1,
    "server_momentum": 0.95,
    "warmup_fraction": 0.15,
    "cooldown_fraction": 0.25,
    "zeroing": True,
    "zeroing_norm": 10.0,
    "aggregator": "stream",
    "availability": "diurnal",
    "plugged_in_hour": 22.0,
    "plugged_in_hours": 8.0,
    "time_zone_hours": 3.0,
    "idle_probability": 0.8,
    "unmetered_probability": 0.85,
    "check_in_seconds": 1800.0,
    "min_round_seconds": 60.0,
    "timer_hours": 0.0,
    "strict_separation": True,
    "misbehaving_fraction": 0.0,
    "participation_recording": "none",
    "population_seed": 0,
    "pinned_noise_seed": -1,
    "publish_every": 10,
    "evaluate_every": 10,
}


def test_fields_are_only_ever_added_and_defaults_never_change():
    assert {name: FIELDS[name].default for name in _STORED} == _STORED


def test_a_file_of_an_older_version_is_read_as_it_is(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**_STORED, "mechanism": "m.bandmf", "output": "run"}))
    config = load_config(path)
    assert {name: getattr(config, name) for name in _STORED} == {
        **_STORED,
        "mechanism": "m.bandmf",
        "output": "run",
    }
