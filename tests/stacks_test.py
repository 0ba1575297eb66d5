"""What one stack has saved, the other reads and judges alike.

`stacks/` holds the files of a run, and the report of it, as each stack wrote them: Python 3.11 with
NumPy 1.25, SciPy 1.9 and dp-accounting 0.4.3, and Python 3.13 with NumPy 2.5, SciPy 1.18 and
dp-accounting 0.6.
"""

import json

import numpy as np
import pytest

from bandmf_tf.mechanisms.files import load_mechanism, mechanism_checksum
from bandmf_tf.runs.run_record import load_run_record
from cases import ROOT, run_tool, sampled_mechanism

_OF_THE_WRITER = {"checksum", "created", "library_version", "run", "sha256"}


def _numbers_and_words(document, name=""):
    if isinstance(document, dict):
        for key, value in sorted(document.items()):
            if key not in _OF_THE_WRITER:
                yield from _numbers_and_words(value, f"{name}.{key}")
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from _numbers_and_words(value, f"{name}[{i}]")
    else:
        yield name, document


@pytest.mark.parametrize("stack", ["federated", "modern"])
def test_files_of_either_stack_are_read_and_reported_alike(stack, tmp_path):
    folder = ROOT / "tests" / "stacks" / stack
    mechanism = load_mechanism(folder / "run" / "mechanism.bandmf")
    record = load_run_record(folder / "run" / "record.json")
    assert record.mechanism_checksum == mechanism_checksum(mechanism)
    expected = sampled_mechanism()
    np.testing.assert_allclose(  # Optimisers stop earlier or later; what a plan is stays.
        mechanism.strategy.materialize(), expected.strategy.materialize(), atol=3e-3
    )
    assert mechanism.sampling == expected.sampling == record.sampling
    assert run_tool(f"--run={folder / 'run'}", f"--output={tmp_path}") == 0
    found, stored = (
        dict(_numbers_and_words(json.loads((place / "report.json").read_text())))
        for place in (tmp_path, folder)
    )
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        expected = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert found[name] == expected, name
