"""The Beam job counts what the embedded engine counts, on Beam's local runner.

Beam has an environment of its own, `.venv-beam`, made by `make beam-setup`.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import duckdb
import pytest

from bandmf_tf.evidence.counts import (
    ParticipationLogError,
    observed_participation,
    read_participation_counts,
)
from bandmf_tf.evidence.logs import read_participation_log
from cases import ROOT

PYTHON = ROOT / ".venv-beam" / "bin" / "python"

needs_beam = pytest.mark.skipif(
    not PYTHON.exists(), reason="Apache Beam is not installed: run `make beam-setup`"
)


def _rows(seed: int) -> list[tuple[str, int]]:
    generator = random.Random(seed)
    rows = [(f"c{generator.randrange(60)}", generator.randrange(90)) for _ in range(700)]
    return rows + rows[:5]


def _write(folder: Path, name: str, rows: list[tuple[str, int]]) -> None:
    path = folder / name
    if name.endswith(".parquet"):
        with duckdb.connect() as engine:
            engine.execute("CREATE TABLE log (client VARCHAR, round BIGINT)")
            engine.executemany("INSERT INTO log VALUES (?, ?)", rows)
            engine.execute(f"COPY log TO '{path}'")
    elif name.endswith(".csv"):
        path.write_text("client,round\n" + "".join(f"{c},{r}\n" for c, r in rows))
    else:
        path.write_text("".join(json.dumps({"client": c, "round": r}) + "\n" for c, r in rows))


def _beam(pattern: Path, output: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            PYTHON,
            "-m",
            "tools.participation_beam",
            f"--input={pattern}",
            f"--output={output}",
            "--runner=DirectRunner",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@needs_beam
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_job_gives_the_answer_of_the_embedded_engine(tmp_path, suffix):
    rows = _rows(0)
    _write(tmp_path, f"whole.{suffix}", rows)
    (tmp_path / "parts").mkdir()
    for i in range(3):  # One log in several files.
        _write(tmp_path / "parts", f"part-{i}.{suffix}", rows[i::3])
    output = tmp_path / "counts.json"
    finished = _beam(tmp_path / "parts" / f"part-*.{suffix}", output)
    assert finished.returncode == 0, finished.stderr
    expected = read_participation_log(tmp_path / f"whole.{suffix}", num_rounds=90)
    found = observed_participation(read_participation_counts(output), num_rounds=90)
    assert found == expected
    assert expected.max_contributions_per_round > 1
    assert "c1" not in output.read_text()


@needs_beam
def test_rows_that_cannot_be_understood_are_refused_by_both(tmp_path):
    path = tmp_path / "log.jsonl"
    clients, rounds = ["a", None, " NaN", "<NA>", "b", "c\nd"], [1, 1.5, 2, 3, "four", 5]
    rows = [{"client": c, "round": r} for c, r in zip(clients, rounds, strict=True)]
    rows.append({"client": "a", "client_id": "b", "round": 6})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "counts.json"
    assert _beam(path, output).returncode == 0
    message = "5 of 7 rows have no client and 2 no integer"
    with pytest.raises(ParticipationLogError, match=message):
        observed_participation(read_participation_counts(output), num_rounds=90)
    with pytest.raises(ParticipationLogError, match=message):
        read_participation_log(path, num_rounds=90)


@needs_beam
@pytest.mark.parametrize(
    "text", ["client,round,round\na,0,1\n", 'client,round,note\na,0,"\na,1,"\n']
)
def test_csv_that_hides_rounds_is_refused(tmp_path, text):
    (tmp_path / "log.csv").write_text(text)
    assert _beam(tmp_path / "log.csv", tmp_path / "counts.json").returncode != 0
    assert not (tmp_path / "counts.json").exists()


COUNTS = {
    "format": "bandmf_tf participation counts",
    "version": 1,
    "rows": 3,
    "anonymous_rows": 0,
    "roundless_rows": 0,
    "repetitions": 0,
    "separations": [[4, 1, 4]],
    "participations": [[1, 1, 2, 2], [2, 1, 0, 4]],
    "contributions": [[0, 1], [2, 1], [4, 1]],
}


def test_counts_of_a_small_log(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(COUNTS))
    log = tmp_path / "log.csv"
    log.write_text("client,round\na,0\nb,2\na,4\n")
    found = observed_participation(read_participation_counts(path), num_rounds=9)
    assert found == read_participation_log(log, num_rounds=9)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "x"},
        {"rows": 4},
        {"rows": -1},
        {"rows": True},
        {"repetitions": 1},
        {"separations": []},
        {"separations": [[4, 1]]},
        {"separations": [[0, 1, 4]]},
        {"separations": [[9, 1, 4], [4, 0, 4]]},
        {"participations": [[3, 1, 0, 4]]},
        {"participations": "x"},
        {"participations": [[1, 1, 2, 2], [2, 1, 0, 3]]},
        {"separations": [[5, 1, 4]]},
        {"separations": [[100, 1, 100]]},
        {"contributions": [[0, 3.0]]},
        {"more": 1},
    ],
)
def test_counts_that_cannot_be_true_are_refused(tmp_path, change):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({**COUNTS, **change}))
    with pytest.raises(ParticipationLogError):
        read_participation_counts(path)
