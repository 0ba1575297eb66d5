"""TensorFlow does not multiply wrongly where gradients of examples are computed."""

import subprocess
import sys

import pytest

from bandmf_tf import _onednn

CASES = {"2.14.1": False, "2.15.0": True, "2.20.0": True, "2.21.0": True, "2.22.0-rc0": False}


@pytest.mark.parametrize("version", CASES)
def test_versions_that_multiply_wrongly_are_known(version):
    assert _onednn.multiplies_wrongly(version) == CASES[version]


@pytest.mark.parametrize(
    ("version", "given", "is_imported", "expected"),
    [
        ("2.21.0", None, False, "0"),
        ("2.21.0", "1", False, "1"),  # Whoever sets it is told later.
        ("2.21.0", None, True, None),
        ("2.14.1", None, False, None),
    ],
)
def test_it_is_turned_off_before_tensorflow_starts(
    monkeypatch, version, given, is_imported, expected
):
    monkeypatch.setattr(_onednn.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(_onednn.os, "environ", {} if given is None else {_onednn.SWITCH: given})
    monkeypatch.setattr(_onednn.sys, "modules", {"tensorflow": None} if is_imported else {})
    _onednn.turn_off()
    assert _onednn.os.environ.get(_onednn.SWITCH) == expected


def test_training_is_refused_where_it_was_left_on():
    """With a version that multiplies wrongly, or told that this one does."""
    code = """
import tensorflow
from bandmf_tf import _onednn
_onednn.multiplies_wrongly = lambda version: True
import bandmf_tf.keras
"""
    environment = {**_onednn.os.environ, _onednn.SWITCH: "1"}
    outcome = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert "BandMFError: oneDNN in TensorFlow" in outcome.stderr
