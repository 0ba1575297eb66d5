"""The deployment of docs/how_to/deploy.md, scaled down, ends as it should, as its files say."""

from __future__ import annotations

import json

import pytest

from bandmf_tf.errors import BandMFError
from bandmf_tf.runs import ledger
from production import deploy_drill


def test_every_step_of_the_deployment_ends_as_it_should(tmp_path, capsys):
    pytest.importorskip("tensorflow_federated")
    folder = tmp_path / "drill"
    assert deploy_drill.main(["deploy_drill", str(folder)]) == 0, capsys.readouterr().err
    found = ledger.verify_ledger(folder / "run" / "ledger.jsonl", num_records=6)
    header, records = found.header, found.records
    assert (header.clock, header.enforced_min_separation) == (ledger.CLOCK_REAL, 3)
    # Round 2 was killed when the registry had counted it, and went to others.
    attempts = [record.flags.get(ledger.FLAG_EARLIER_ATTEMPTS, 0) for record in records]
    assert attempts == [0, 0, 1, 0, 0, 0]
    assert sum(record.flags.get(ledger.FLAG_DROPPED_CLIENTS, 0) for record in records) >= 6
    report = json.loads((folder / "report" / "report.json").read_text())
    assert 0.0 < report["epsilon"] <= 4.0


def test_a_step_that_ends_otherwise_is_told(tmp_path):
    drill = deploy_drill.Drill(tmp_path / "drill")
    with pytest.raises(BandMFError, match="false ended with 1 and not 0"):
        drill.run("false")
    assert deploy_drill.main(["deploy_drill", str(tmp_path / "drill")]) == 1  # It exists.
    assert deploy_drill.main(["deploy_drill"]) == 1
