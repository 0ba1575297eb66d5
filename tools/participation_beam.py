"""Counts a participation log with Apache Beam, for logs that outgrow one machine.

    python -m tools.participation_beam --input='logs/part-*.parquet' --output=counts.json \
        [options of a Beam runner]

Gives the counts that `bandmf_tf/evidence/logs.py` finds with an embedded engine, by the same
rules (see there), as the JSON of `bandmf_tf/evidence/counts.py`. A report takes the file in the
place of the log: `bandmf-report --participation=counts.json ...`. Nothing in it names a client.

`--input` is a pattern of files: `.csv` with a header, `.jsonl` or `.ndjson`, or `.parquet`. Without
further options Beam runs on this machine; `--runner=...` chooses a cluster.

Beam does not install beside TensorFlow Federated 0.87, so this program has an environment of its
own (`make beam-setup`, into `.venv-beam`) and imports nothing of `bandmf_tf`.
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.io import fileio
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

FORMAT = "bandmf_tf participation counts"
VERSION = 1
CLIENT_COLUMNS = ("client", "client_id")
ROUND_COLUMN = "round"
CONTRIBUTION_COLUMN = "contribution_id"
MISSING_VALUES = ("", "nan", "null", "none", "<na>", "n/a")

_ROUND = re.compile(r"[+-]?[0-9]{1,18}")

# A row: client (None if missing), round (None if no integer), contribution (None if not named).
Row = tuple[str | None, int | None, str | None]

# Tags of what is counted; every count is one number under a key that starts with its tag.
_ROWS, _ANONYMOUS, _ROUNDLESS, _REPETITIONS = "rows", "anonymous", "roundless", "repetitions"
_SEPARATION, _PARTICIPATIONS, _CONTRIBUTIONS = "separation", "participations", "contributions"


def parse_row(record: dict[str, Any]) -> Row:
    """Returns a row of a log, whatever its format was."""
    # Which of two names tells clients apart is not known.
    names = [name for name in CLIENT_COLUMNS if record.get(name) is not None]
    client = _text(record[names[0]]) if len(names) == 1 else None
    if client is not None and (client.lower() in MISSING_VALUES or re.search(r"[\r\n]", client)):
        client = None
    number = _text(record.get(ROUND_COLUMN))
    contribution = record.get(CONTRIBUTION_COLUMN)
    if contribution is not None and (_text(contribution) or "").lower() in MISSING_VALUES:
        contribution = None
    return (
        client,
        int(number) if number is not None and _ROUND.fullmatch(number) else None,
        None if contribution is None else str(contribution),
    )


def client_counts(element: tuple[str, Iterable[tuple[int, str | None]]]) -> Iterator[Any]:
    """Yields what one client contributes to every count, as ((tag, key), value)."""
    _, contributions = element
    named: set[tuple[int, str]] = set()
    times: collections.Counter[int] = collections.Counter()
    for number, contribution in contributions:
        if contribution is not None:  # Rows of one named contribution are one contribution.
            if (number, contribution) in named:
                continue
            named.add((number, contribution))
        times[number] += 1
    rounds = sorted(times)
    for earlier, later in itertools.pairwise(rounds):
        yield (_SEPARATION, later - earlier), (1, later, 0)
    yield (_PARTICIPATIONS, len(rounds)), (1, rounds[0], rounds[-1])
    yield (_REPETITIONS, 0), (max(times.values()) - 1, 0, 0)
    for number, count in times.items():
        yield (_CONTRIBUTIONS, number), (count, 0, 0)
    yield (_ROWS, 0), (sum(times.values()), 0, 0)


class CombineCounts(beam.CombineFn):
    """Adds counts and keeps the earliest (round, round) beside them; repetitions take the largest.

    The key decides which: it travels with the values, because a CombineFn does not see it.
    """

    def create_accumulator(self) -> Any:
        return None

    def add_input(self, accumulator: Any, value: Any) -> Any:
        if accumulator is None:
            return value
        largest, (count, *place), (other, *other_place) = value[0], accumulator[1], value[1]
        total = max(count, other) if largest else count + other
        return largest, (total, *min(place, other_place))

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        merged = None
        for accumulator in accumulators:
            if accumulator is not None:
                merged = self.add_input(merged, accumulator)
        return merged

    def extract_output(self, accumulator: Any) -> Any:
        return accumulator[1]


def count_log(rows: beam.PCollection) -> beam.PCollection:
    """Returns one JSON text with the counts of all rows."""
    malformed = rows | "Malformed" >> beam.FlatMap(_malformed)
    by_client = (
        rows
        | "Understood" >> beam.Filter(lambda row: row[0] is not None and row[1] is not None)
        | "By client" >> beam.Map(lambda row: (row[0], (row[1], row[2])))
        | "Group" >> beam.GroupByKey()
        | "Count" >> beam.FlatMap(client_counts)
    )
    return (
        (malformed, by_client)
        | beam.Flatten()
        | "Mark" >> beam.MapTuple(lambda key, value: (key, (key[0] == _REPETITIONS, value)))
        | "Combine" >> beam.CombinePerKey(CombineCounts())
        | "Together" >> beam.combiners.ToList()
        | "Document" >> beam.Map(_document)
    )


def _malformed(row: Row) -> Iterator[Any]:
    client, number, _ = row
    if client is None or number is None:
        yield (_ROWS, 0), (1, 0, 0)
    if client is None:
        yield (_ANONYMOUS, 0), (1, 0, 0)
    if number is None:
        yield (_ROUNDLESS, 0), (1, 0, 0)


def _document(counts: list[Any]) -> str:
    totals = dict.fromkeys((_ROWS, _ANONYMOUS, _ROUNDLESS, _REPETITIONS), 0)
    lists: dict[str, list[list[int]]] = {
        tag: [] for tag in (_SEPARATION, _PARTICIPATIONS, _CONTRIBUTIONS)
    }
    for (tag, key), (count, first, last) in sorted(counts):
        if tag in totals:
            totals[tag] = count
        elif tag == _SEPARATION:
            lists[tag].append([key, count, first])
        elif tag == _PARTICIPATIONS:
            lists[tag].append([key, count, first, last])
        else:
            lists[tag].append([key, count])
    unclear = totals[_ANONYMOUS] or totals[_ROUNDLESS]  # Then nothing else may be relied on.
    document = {
        "format": FORMAT,
        "version": VERSION,
        "rows": totals[_ROWS],
        "anonymous_rows": totals[_ANONYMOUS],
        "roundless_rows": totals[_ROUNDLESS],
        "repetitions": 0 if unclear else totals[_REPETITIONS],
        "separations": [] if unclear else lists[_SEPARATION],
        "participations": [] if unclear else lists[_PARTICIPATIONS],
        "contributions": [] if unclear else lists[_CONTRIBUTIONS],
    }
    return json.dumps(document)


def _text(value: object) -> str | None:
    """Returns a value as text without spaces around it; None if nothing is left."""
    if value is None or isinstance(value, float | bool):
        return None if value is None else str(value)
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text.strip(" ") or None


def _parse_json(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("A line of the log is not a JSON object.")
    return record


class _ReadCsv(beam.DoFn):
    """Reads whole CSV files, because a row means nothing without the header of its file."""

    def process(self, path: str) -> Iterator[dict[str, Any]]:
        with FileSystems.open(path) as file:
            lines = (line.decode("utf-8-sig") for line in file)
            reader = csv.DictReader(lines, strict=True)
            columns = [name.lower() for name in reader.fieldnames or ()]
            if len(set(columns)) < len(columns):
                raise ValueError(f"Two columns of {path} have the same name.")
            for record in reader:
                if None in record or None in record.values():
                    raise ValueError(f"A row of {path} has another number of columns.")
                if re.search(r"[\r\n]", "".join(record.values())):
                    raise ValueError(f"Stray quotes in {path} have swallowed rows.")
                yield record


def _read(pipeline: beam.Pipeline, pattern: str) -> beam.PCollection:
    if pattern.endswith(".parquet"):
        return pipeline | "Read" >> beam.io.ReadFromParquet(pattern)
    if pattern.endswith((".jsonl", ".ndjson")):
        lines = pipeline | "Read" >> beam.io.ReadFromText(pattern)
        return lines | "Parse JSON" >> beam.Map(_parse_json)
    if pattern.endswith(".csv"):
        files = pipeline | fileio.MatchFiles(pattern) | beam.Map(lambda file: file.path)
        return files | beam.Reshuffle() | "Read" >> beam.ParDo(_ReadCsv())
    raise ValueError(f"input must end with .csv, .jsonl, .ndjson or .parquet. Found {pattern!r}.")


def main(argv: list[str] | None = None) -> int:
    """Runs the job and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", required=True, help="Pattern of the files of the log.")
    parser.add_argument("--output", required=True, help="File for the counts, JSON.")
    given = sys.argv[1:] if argv is None else argv
    for name in ("--input", "--output"):  # Of two, the last would win.
        if sum(text.split("=")[0] == name for text in given) > 1:
            parser.error(f"{name} was given twice; give it once, input as a pattern of files")
    options, rest = parser.parse_known_args(given)
    temporary = f"{options.output}.tmp"
    with beam.Pipeline(options=PipelineOptions(rest)) as pipeline:
        rows = _read(pipeline, options.input) | "Row" >> beam.Map(parse_row)
        (
            count_log(rows)
            | "Write" >> beam.io.WriteToText(temporary, num_shards=1, shard_name_template="")
        )
    # A job that failed has raised above: what has the final name is complete.
    FileSystems.rename([temporary], [options.output])
    print(f"Counted in {os.fspath(options.output)}; give it to bandmf-report as participation.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
