"""Time and memory of reading participation logs of 1, 13 and 100 million rows.

    python -m benchmarks.participation [--millions=1,13,100] [--formats=parquet,csv,jsonl]

Writes logs of 6500 participations a round (the cohort of the paper's production run; 13 million
rows are its 2000 rounds) with pseudonyms of 32 hexadecimal digits into a temporary folder, reads
each in a process of its own and prints wall-clock seconds, CPU seconds and peak memory. Text
formats are measured up to 13 million rows. A log of 100 million rows takes 3 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb

from benchmarks import load

CLIENTS_PER_ROUND = 6500
MIN_SEPARATION = 385
_LARGEST_TEXT = 13_000_000

# Runs in the measured process: reads one log and prints what it cost.
_MEASURED = """
import json, resource, sys, time
from bandmf_tf.evidence.logs import read_participation_log
wall, cpu = time.perf_counter(), time.process_time()
found = read_participation_log(sys.argv[1], num_rounds=int(sys.argv[2]))
print(json.dumps({
    "seconds": time.perf_counter() - wall,
    "cpu_seconds": time.process_time() - cpu,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    "min_separation": found.min_separation,
    "max_participations": found.max_participations,
    "rows": found.num_contributions,
}))
"""


def write_log(path: Path, rows: int) -> None:
    """Writes a log in which a client comes back after exactly `MIN_SEPARATION` rounds."""
    population = CLIENTS_PER_ROUND * MIN_SEPARATION
    query = f"""
        SELECT md5((i % {population})::VARCHAR) AS client, i // {CLIENTS_PER_ROUND} AS round
        FROM range({rows}) rows(i)"""
    kind = {".parquet": "PARQUET", ".csv": "CSV, HEADER", ".jsonl": "JSON"}[path.suffix]
    with duckdb.connect(config={"memory_limit": "1GB"}) as engine:
        engine.execute("SET enable_progress_bar = false")
        engine.execute(f"COPY ({query}) TO '{path}' (FORMAT {kind})")


def measure(path: Path, rows: int) -> dict[str, float]:
    """Returns what reading the log costs, measured in a new process."""
    rounds = -(-rows // CLIENTS_PER_ROUND)
    finished = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(path), str(rounds)],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(finished.stdout)
    if measured["rows"] != rows or measured["min_separation"] not in (None, MIN_SEPARATION):
        raise RuntimeError(f"The log {path.name} was not read as it was written: {measured}.")
    return measured


def main() -> None:
    """Prints one line for each log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", default="1,13,100")
    parser.add_argument("--formats", default="parquet,csv,jsonl")
    arguments = parser.parse_args()
    others = load.OtherWork()
    print(f"{'rows':>12} {'format':>8} {'file GB':>8} {'seconds':>8} {'CPU s':>8} {'peak GB':>8}")
    for millions in arguments.millions.split(","):
        rows = int(float(millions) * 1_000_000)
        for suffix in arguments.formats.split(","):
            if suffix != "parquet" and rows > _LARGEST_TEXT:
                continue
            with tempfile.TemporaryDirectory(prefix="participation-") as folder:
                path = Path(folder) / f"log.{suffix}"
                write_log(path, rows)
                size = path.stat().st_size / 1e9
                measured = measure(path, rows)
            print(
                f"{rows:>12,} {suffix:>8} {size:>8.2f} {measured['seconds']:>8.1f} "
                f"{measured['cpu_seconds']:>8.1f} {measured['peak_gb']:>8.2f}",
                flush=True,
            )
    print(others.mark())


if __name__ == "__main__":
    main()
