"""A configuration of an older version is read, and means what it meant."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from bandmf_tf.simulation.config import FIELDS, load_config

# All fields of version 0.1.0 with the defaults that they had.
_STORED = json.loads(Path(__file__).with_name("config_0_1_0.json").read_text())


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
