import inspect
import subprocess
import sys

import pytest

import bandmf_tf

LATE = {*bandmf_tf._LATE, *bandmf_tf._LATE_MODULES}


@pytest.mark.parametrize("name", bandmf_tf.__all__)
def test_public_name_is_documented(name: str):
    documentation = inspect.getdoc(getattr(bandmf_tf, name)) or ""
    first_sentence = documentation.split("\n\n")[0]
    assert first_sentence.endswith((".", ":")), f"{name} has no docstring"


def test_all_is_sorted_and_complete():
    defined = {
        name
        for name, value in vars(bandmf_tf).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("bandmf_tf.")
    }
    assert set(bandmf_tf.__all__) == defined | LATE
    assert bandmf_tf.__all__ == sorted(bandmf_tf.__all__)
    assert set(dir(bandmf_tf)) >= set(bandmf_tf.__all__)


def test_late_names_are_not_imported_before_they_are_asked_for():
    code = """
import sys
import bandmf_tf
assert not {"tensorflow", "tensorflow_federated", "duckdb"} & sys.modules.keys()
bandmf_tf.read_participation_log
assert "duckdb" in sys.modules and "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'privacy'"):
        bandmf_tf.privacy  # noqa: B018
