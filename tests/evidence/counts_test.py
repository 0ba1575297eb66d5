"""The counts of a log stand for the log, and numbers that no log has are refused."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from bandmf_tf.evidence.counts import (
    FORMAT,
    VERSION,
    ParticipationLogError,
    observed_participation,
    read_participation_counts,
)
from bandmf_tf.evidence.logs import read_participation_log

Row = tuple[int, int]


def _counts(rows: list[Row]) -> dict[str, object]:
    """Counts by brute force."""
    rounds = collections.defaultdict(set)
    for client, number in rows:
        rounds[client].add(number)
    pairs = [pair for own in rounds.values() for pair in itertools.pairwise(sorted(own))]
    apart = sorted({b - a for a, b in pairs})
    often = sorted({len(own) for own in rounds.values()})
    ends = {k: [(min(r), max(r)) for r in rounds.values() if len(r) == k] for k in often}
    later = {gap: [b for a, b in pairs if b - a == gap] for gap in apart}
    return {
        "rows": len(rows),
        "anonymous_rows": 0,
        "roundless_rows": 0,
        "repetitions": max(collections.Counter(rows).values()) - 1,
        "separations": [[gap, len(later[gap]), min(later[gap])] for gap in apart],
        "participations": [[k, len(ends[k]), *min(ends[k])] for k in often],
        "contributions": sorted(map(list, collections.Counter(r for _, r in rows).items())),
    }


def _read(folder, fields):
    path = folder / "counts.json"
    path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **fields}))
    return read_participation_counts(path)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), min_size=1))
def test_the_counts_of_any_log_say_what_the_log_says(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("counts")
    log = folder / "log.csv"
    log.write_text("client,round\n" + "".join(f"c{client}_,{r}\n" for client, r in rows))
    by_log = read_participation_log(log, num_rounds=13)
    by_counts = observed_participation(_read(folder, _counts(rows)), num_rounds=13)
    assert dataclasses.replace(by_counts, source=by_log.source) == by_log


# Clients 0 and 1 are two rounds apart at least, and 1 is in three rounds; client 2 is in one.
ROWS = [(0, 0), (0, 2), (1, 0), (1, 2), (1, 4), (2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"participations": [[1, 1, 3, 3], [2, 1, 0, 2], [3, 1, 0, 3]]},  # Needs rounds 0 to 4.
        {"participations": [[1, 1, 3, 3], [2, 1, 0, 2], [3, 1, 1, 5]]},
        {"participations": [[1, 2, 3, 3], [2, 1, 0, 2], [3, 1, 0, 4]]},
        {"separations": [[2, 3, 1]]},
        {"separations": [[2, 3, 5]]},
        {"separations": [[2, 2, 2]]},
        {"contributions": [[0, 2], [2, 2], [3, 1], [4, 0]], "rows": 5},
        {"repetitions": 1},
        {"rows": 7},
    ],
)
def test_numbers_that_no_log_has_are_refused(tmp_path, changes):
    counts = _counts(ROWS)
    assert counts.keys() >= changes.keys()
    assert _read(tmp_path, counts).rows == len(ROWS)
    with pytest.raises(ParticipationLogError, match="its numbers contradict each other"):
        _read(tmp_path, counts | changes)


@pytest.mark.parametrize(("rounds", "stranger"), [((0, 9), 9), ((-1, 9), -1), ((1, 10), 10)])
def test_a_round_that_is_not_of_the_run_is_named(tmp_path, rounds, stranger):
    counts = _read(tmp_path, _counts([(0, number) for number in rounds]))
    with pytest.raises(ParticipationLogError, match=f"it has round {stranger}, so"):
        observed_participation(counts, num_rounds=9)
