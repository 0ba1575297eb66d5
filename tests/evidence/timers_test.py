from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bandmf_tf.evidence.participation import ParticipationError
from bandmf_tf.evidence.timers import RoundTimeline, read_round_timeline, timer_participation
from bandmf_tf.runs.basis import Basis

SECOND = 1_000_000


def _timeline(windows: list[tuple[int, int]]) -> RoundTimeline:
    starts, ends = zip(*windows, strict=True)
    return RoundTimeline(np.array(starts) * SECOND, np.array(ends) * SECOND)


def _oracle(windows: list[tuple[int, int]], timer: int) -> tuple[int | None, int, int]:
    """Tries every second of every round: closest rounds, most contributions, most to one round."""
    moments = [(time, i) for i, (a, b) in enumerate(windows) for time in range(a, b + 1)]
    moments.sort()
    separations = [
        abs(i - j)
        for (x, i), (y, j) in itertools.permutations(moments, 2)
        if y >= x + timer and i != j
    ]
    # Most contributions that end at each moment; and the same within one round.
    best: dict[tuple[int, int], int] = {}
    for time, i in moments:
        before = [count for (other, _), count in best.items() if other + timer <= time]
        best[time, i] = 1 + max(before, default=0)
    within = max((b - a) // timer + 1 for a, b in windows)
    return min(separations, default=None), max(best.values()), within


@st.composite
def _windows(draw: st.DrawFn) -> list[tuple[int, int]]:
    starts = sorted(draw(st.lists(st.integers(0, 25), min_size=1, max_size=7)))
    return [(start, start + draw(st.integers(0, 8))) for start in starts]


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(_windows(), st.integers(1, 20))
def test_the_worst_case_is_that_of_brute_force_over_all_join_times(windows, timer):
    separation, contributions, within = _oracle(windows, timer)
    found = timer_participation(_timeline(windows), timer)
    assert found.min_separation == separation
    assert found.max_contributions_per_round == within
    t = len(windows)
    fits = 1 if separation is None else min(contributions, t, -(-t // separation))
    assert found.max_participations == fits


def test_a_client_joins_early_first_and_late_then():
    # Rounds of 10 s every 100 s: whoever joins round 0 at 0 s can join round 3 until 310 s.
    windows = [(100 * i, 100 * i + 10) for i in range(20)]
    assert timer_participation(_timeline(windows), 380).min_separation == 4
    assert timer_participation(_timeline(windows), 310).min_separation == 3
    assert timer_participation(_timeline(windows), 311).min_separation == 4


def test_one_slow_stretch_decides_and_is_named():
    # Rounds take 10 s, but rounds 5 .. 7 stayed open for 100 s each.
    windows, now = [], 0
    for i in range(20):
        length = 100 if i in (5, 6, 7) else 10
        windows.append((now, now + length))
        now += length
    found = timer_participation(_timeline(windows), 201)
    assert found.min_separation == 2
    assert (found.closest.first_round, found.closest.last_round) == (4, 6)
    assert found.closest.first_time == "1970-01-01T00:00:40.000000Z"
    assert found.min_separation_basis is Basis.ASSUMED
    assert found.rounds_completed_basis is Basis.OBSERVED


def test_a_round_longer_than_the_timer_allows_two_contributions_to_it():
    found = timer_participation(_timeline([(0, 25), (30, 31), (60, 61)]), 10)
    assert found.max_contributions_per_round == 3
    assert "3 times to it" in " ".join(found.cautions)


@pytest.mark.parametrize(
    ("open_microseconds", "contributions"), [(2 * SECOND, 2), (2 * SECOND - 1, 1), (4 * SECOND, 3)]
)
def test_every_contribution_more_to_one_round_is_told(open_microseconds, contributions):
    start = np.array([0, 10 * SECOND])
    found = timer_participation(RoundTimeline(start, start + open_microseconds), 2.0)
    assert found.max_contributions_per_round == contributions
    told = f"could contribute {contributions} times" in " ".join(found.cautions)
    assert told == (contributions > 1)


@pytest.mark.parametrize(
    ("starts", "ends", "stands_still"),
    [
        ([0, 0], [5, 9], True),  # The second round started when the first one did,
        ([0, 9], [0, 9], True),  # or no round took any time.
        ([0, 1], [0, 2], False),  # A microsecond is time.
    ],
)
def test_times_of_a_clock_that_stands_still_enforce_nothing(starts, ends, stands_still):
    timeline = RoundTimeline(np.array(starts), np.array(ends))
    found = timer_participation(timeline, 1.0, Basis.ENFORCED)
    basis = Basis.ASSUMED if stands_still else Basis.ENFORCED
    assert found.min_separation_basis is found.max_participations_basis is basis
    assert ("clock stands still" in " ".join(found.cautions)) == stands_still


def test_a_timer_longer_than_the_run_leaves_one_participation():
    found = timer_participation(_timeline([(0, 1), (2, 3)]), 100)
    assert found.min_separation is None
    assert found.max_participations == 1
    found = timer_participation(_timeline([(0, 9), (2, 3)]), 100)
    assert "all 2 rounds took 9 seconds, less than the timer" in found.cautions[-1]


def test_the_timer_is_rounded_down():
    windows = [(0, 0), (1, 1), (2, 2)]
    assert timer_participation(_timeline(windows), 1 + 1e-9).min_separation == 1
    assert timer_participation(_timeline(windows), 1 + 1e-5).min_separation == 2
    assert timer_participation(_timeline(windows), 1e-6).max_contributions_per_round == 1
    with pytest.raises(ParticipationError, match="microsecond"):
        timer_participation(_timeline(windows), 0.99e-6)


def test_a_timeline_must_be_in_order():
    for starts, ends in [([1, 0], [2, 2]), ([0], [-1]), ([], []), ([0], [1, 2])]:
        with pytest.raises(ParticipationError):
            RoundTimeline(np.array(starts), np.array(ends))


def test_a_timeline_file_is_read(tmp_path):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end\n0,0,10\n1,100,110.5\n")
    timeline = read_round_timeline(path)
    assert timeline.ends.tolist() == [10 * SECOND, 110_500_000]
    path.write_text("round,start,end\n1,2024-02-29T12:00:00.000000Z,2024-02-29T12:00:01.000000Z\n")
    assert read_round_timeline(path).num_rounds == 1


def test_times_finer_than_a_microsecond_are_rounded_to_allow_more(tmp_path):
    path = tmp_path / "rounds.csv"
    path.write_text("round,start,end\n0,0.0000005,0.0000014\n1,7.0000009,7.0000011\n")
    timeline = read_round_timeline(path)
    assert timeline.starts.tolist() == [0, 7_000_000]
    assert timeline.ends.tolist() == [2, 7_000_002]
    # However many digits there are.
    path.write_text(f"round,start,end\n0,0.{'9' * 40},1.{'0' * 40}1\n")
    timeline = read_round_timeline(path)
    assert (timeline.starts.tolist(), timeline.ends.tolist()) == ([999_999], [1_000_001])


_CELLS = st.one_of(
    st.text("0123456789.-+eE_naifNT:Zxy \"'\x00", max_size=12),
    st.floats().map(repr),
    st.integers().map(str),
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(st.tuples(_CELLS, _CELLS), max_size=4))
def test_any_times_give_a_timeline_or_one_kind_of_error(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("fuzz") / "rounds.csv"
    rows = "".join(f"{i},{start},{end}\n" for i, (start, end) in enumerate(cells))
    path.write_text(f"round,start,end\n{rows}")
    try:
        found = timer_participation(read_round_timeline(path), 1000.0)
    except ParticipationError:
        return
    assert found.rounds_completed == len(cells)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "round,start\n0,1\n",
        "round,start,end\n",
        "round,start,end\n0,1,2\n2,3,4\n",
        "round,start,end\n0,a,b\n",
        "round,start,end\n0,1e300,1e301\n",
        "round,start,end\n0,1e999999999,1e999999999\n",
        "round,start,end\n0,nan,nan\n",
        "round,start,end\n0,5,4\n",
        "round,start,end,End\n0,1,2,1\n",
        "round,start,end\n0\n",
        "\x00",
    ],
)
def test_a_malformed_timeline_is_refused(tmp_path, text):
    path = tmp_path / "rounds.csv"
    path.write_text(text)
    with pytest.raises(ParticipationError):
        read_round_timeline(path)
