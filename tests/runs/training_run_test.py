"""What a run releases, and which folders, results and programs it refuses, without TensorFlow."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bandmf_tf.runs import ledger
from bandmf_tf.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
)
from bandmf_tf.runs.folder import RunError
from bandmf_tf.runs.ledger import LedgerError
from bandmf_tf.runs.training_run import POINTS, TrainingRun
from cases import largest_file
from run_program import content, forked, make_header, make_mechanism, result, start


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A run of which three of five rounds are done."""
    with start(tmp_path / "run") as run:
        for number in range(3):
            run.commit(result(number))
    return tmp_path / "run"


def test_a_run_continues_where_it_was(folder):
    with start(folder) as run:
        assert run.next_round == 3
        np.testing.assert_array_equal(run.state["weights"], np.full(3, 3.0))
        for number in range(3, 5):
            run.commit(result(number))
        assert run.is_complete
    assert len(list((folder / "released").iterdir())) == 5


def test_nothing_is_visible_before_the_commit(folder):
    before = content(folder)

    def stop(point, number):
        if (point, number) == ("computed", 3):
            raise KeyboardInterrupt

    with start(folder, on_point=stop) as run, pytest.raises(KeyboardInterrupt):
        run.commit(result(3))
    assert content(folder) == before


@pytest.mark.parametrize("point", POINTS[POINTS.index("checkpoint_written") :])
def test_a_committed_result_is_released_as_it_is(folder, point):
    def stop(name, number):
        if (name, number) == (point, 3):
            raise KeyboardInterrupt

    published = []
    with start(folder, on_point=stop) as run, pytest.raises(KeyboardInterrupt):
        run.commit(result(3))
    with start(folder, publishers=[published.append]) as run:
        assert run.next_round == 4
    assert [p.round for p in published] == [3]
    np.testing.assert_array_equal(published[0].model["weights"], np.full(3, 4.0))
    model = np.load(folder / "released" / "model_000004.npz")
    np.testing.assert_array_equal(model["weights"], np.full(3, 4.0))
    assert len((folder / "metrics.csv").read_text().splitlines()) == 5


def test_a_disk_that_is_full_during_the_commit_loses_nothing(folder):
    before = content(folder)
    with start(folder) as run, largest_file(300), pytest.raises(OSError, match="too large"):
        run.commit(result(3))
    assert content(folder) == before
    with start(folder) as run:
        run.commit(result(3))
        assert run.next_round == 4


def test_a_disk_that_is_full_after_the_commit_loses_nothing(folder):
    """The checkpoint fits, the ledger does not: the result is released at the next start."""
    size = (folder / "ledger.jsonl").stat().st_size
    assert (folder / "secret" / "checkpoint_000000003").stat().st_size + 100 < size
    with (
        start(folder) as run,
        largest_file(size + 10),
        pytest.raises(OSError, match="too large"),
    ):
        run.commit(result(3))
    assert not (folder / "released" / "model_000004.npz").exists()
    with start(folder) as run:
        assert run.next_round == 4
    assert (folder / "released" / "model_000004.npz").exists()


def test_a_truncated_checkpoint_is_refused_and_left_alone(folder):
    path = folder / "secret" / "checkpoint_000000003"
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        before = content(folder)
        with pytest.raises(CheckpointError, match=r"is damaged .* restore the file from a backup"):
            start(folder)
        assert content(folder) == before
    path.write_bytes(whole)
    start(folder).close()


def test_a_flipped_bit_in_a_checkpoint_is_detected(folder):
    path = folder / "secret" / "checkpoint_000000003"
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError):
            start(folder)


def test_a_tampered_ledger_line_is_refused_and_left_alone(folder):
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"num_participants":2', b'"num_participants":1', 1))
    before = content(folder)
    with pytest.raises(LedgerError, match=r"line 2: .* edited or damaged"):
        start(folder)
    assert content(folder) == before


def test_a_shortened_ledger_is_refused(folder):
    path = folder / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(LedgerError, match=r"ends after 1 rounds .* restore both"):
        start(folder)


def test_an_older_checkpoint_is_refused(folder):
    """Going back would compute, and release, a step a second time."""
    (folder / "secret" / "checkpoint_000000003").unlink()
    with pytest.raises(LedgerError, match=r"ends after 3 rounds .* checkpoint after 2"):
        start(folder)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("ledger.jsonl", "restore the ledger"),
        ("run.json", "restore the configuration"),
        ("mechanism.bandmf", "restore the mechanism"),
        ("secret/participation_salt", "Restore it"),
    ],
)
def test_a_lost_file_is_refused(folder, lost, message):
    (folder / lost).unlink()
    with pytest.raises(RunError, match=message):
        start(folder)
    assert not (folder / lost).exists()


def test_a_ledger_without_checkpoints_is_refused(folder):
    for path in (folder / "secret").glob("checkpoint_*"):
        path.unlink()
    with pytest.raises(RunError, match="no checkpoint"):
        start(folder)


def test_a_swapped_mechanism_is_refused(folder):
    before = content(folder)
    with pytest.raises(RunError, match="keeps its mechanism to the end"):
        start(folder, noise_multiplier=1.0)
    assert content(folder) == before


def test_a_swapped_mechanism_file_is_refused(folder, tmp_path):
    start(tmp_path / "other", noise_multiplier=1.0).close()
    shutil.copy(tmp_path / "other" / "mechanism.bandmf", folder / "mechanism.bandmf")
    with pytest.raises(RunError, match="uses the mechanism"):
        start(folder)
    with pytest.raises(LedgerError, match=r"began with other values of .*mechanism_checksum"):
        start(folder, noise_multiplier=1.0)


def test_another_configuration_is_refused(folder):
    with pytest.raises(RunError, match=r"differs in \['rate'\]"):
        start(folder, config={"rate": 2})


def test_a_mechanism_that_is_too_short_is_refused(tmp_path):
    mechanism = make_mechanism(4)
    header = make_header(mechanism, 5)
    with pytest.raises(RunError, match="covers 4 rounds and the run has num_rounds=5"):
        TrainingRun.start(tmp_path / "run", mechanism, {}, header)


def test_a_second_program_on_the_folder_is_refused(folder):
    before = content(folder)
    (folder / "secret" / ".checkpoint_000000004.0.tmp").touch(0o600)  # It is writing just now.
    with start(folder):
        (folder / "secret" / ".checkpoint_000000004.0.tmp").touch(0o600)
        before = content(folder)
        with pytest.raises(RunError, match="in use by another process"):
            start(folder)
        assert content(folder) == before


def test_of_programs_that_start_at_the_same_moment_one_writes(tmp_path):
    outcomes = forked(tmp_path, "race", 200, 3)
    assert len(outcomes) == 200
    for number, outcome in enumerate(outcomes):
        assert sorted(outcome) == ["refused", "refused", "started"], number


def test_a_program_that_is_stopped_anywhere_keeps_others_out_and_goes_on(tmp_path):
    outcomes = forked(tmp_path, "stop_everywhere")
    locked_from = next(o["number"] for o in outcomes if not o["second_started"])
    assert locked_from == 4  # Making the folder, opening the lock, locking it.
    assert len(outcomes) > 40
    for outcome in outcomes:
        assert outcome["first"] == 0, outcome
        if outcome["number"] < locked_from:  # The second one has done the run meanwhile.
            assert not outcome["first_changed"], outcome
        else:
            assert not outcome["second_started"], outcome
            assert not outcome["second_changed"], outcome


def test_a_program_that_is_killed_anywhere_goes_on(tmp_path):
    outcomes = forked(tmp_path, "kill_everywhere")
    assert len(outcomes) > 40
    for outcome in outcomes:
        number = outcome["number"]
        expected = {"number": number, "completed": True, "replaced": [], "left": [], "lines": 3}
        assert outcome == expected


def test_a_folder_that_was_moved_away_gets_nothing_more_and_can_go_on(folder):
    with start(folder) as run:
        moved = folder.rename(folder.with_name("moved"))
        with start(folder) as other:
            before = content(folder)
            for attempt in (
                lambda: run.begin_round(result(3).start),
                lambda: run.commit(result(3)),
            ):
                with pytest.raises(RunError, match="moved or replaced"):
                    attempt()
            assert content(folder) == before
            assert other.next_round == 0
    with start(moved, header={"run_id": "moved"}) as run:
        run.commit(result(3))
    assert ledger.read_ledger(moved / "ledger.jsonl").num_records == 4


def _roll_back(folder, *names) -> Path:
    """Does a round more, puts back what had these names before it; returns a copy of the folder."""
    old = folder.with_name("old")
    shutil.copytree(folder, old)
    with start(folder) as run:
        run.commit(result(3))
    for name in names:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
            shutil.copytree(old / name, folder / name)
        else:
            shutil.copy(old / name, folder / name)
    return old


@pytest.mark.parametrize(
    ("restored", "message"),
    [
        ((), r"model_000004.npz is the model after 4 rounds, and .* end after 3: .* older copy"),
        (
            ("released",),
            r"metrics.csv has a line for round 3, .* end after 3 rounds: .* older copy",
        ),
    ],
)
def test_an_older_ledger_with_its_secrets_does_not_release_a_round_again(folder, restored, message):
    _roll_back(folder, "ledger.jsonl", "secret", *restored)
    before = content(folder)
    with pytest.raises(RunError, match=message):
        start(folder)
    assert content(folder) == before


def test_released_models_are_not_taken_for_those_of_a_new_run(folder):
    for name in ("ledger.jsonl", "run.json", "mechanism.bandmf", "metrics.csv"):
        (folder / name).unlink()
    shutil.rmtree(folder / "secret")
    before = content(folder)
    with pytest.raises(RunError, match=r"is the model after 1 rounds, and .* end after 0"):
        start(folder)
    assert content(folder) == before


def test_a_released_model_is_never_replaced(folder):
    path = folder / "released" / "model_000002.npz"
    whole = path.read_bytes()
    path.write_bytes(b"another model")
    before = content(folder)
    with pytest.raises(RunError, match="not the model that the ledger names for round 1"):
        start(folder)
    assert content(folder) == before
    path.write_bytes(whole)
    with start(folder) as run:
        (folder / "released" / "model_000004.npz").write_bytes(b"another model")
        before = content(folder)
        with pytest.raises(RunError, match="holds another model than that of round 3"):
            run.commit(result(3))
        assert content(folder) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "2024-01-01T00:01:59.000000Z"}, "start in order of time"),
        ({"end": "2024-01-01T00:02:59.000000Z"}, "cannot end before it starts"),
        ({"start": "yesterday"}, "A time must look like"),
        ({"flags": {"Late": 1}}, "small letters"),
        ({"flags": {"late": 0}}, "late"),
        ({"metrics": {"accuracy": 0.5}}, "metrics keep their names"),
        ({"metrics": {}}, "metrics keep their names"),
        ({"metrics": {"loss\n9": 0.5}}, "named in letters"),
        ({"metrics": {"loss": "low"}}, "could not convert"),
        ({"model": {"weights": np.array([{}])}}, "numbers and fixed strings"),
        ({"state": {"weights": np.array([{}])}}, "numbers and fixed strings"),
    ],
)
def test_a_result_that_cannot_be_recorded_is_refused_before_the_commit(folder, changes, message):
    before = content(folder)
    with start(folder) as run, pytest.raises(ValueError, match=message):
        run.commit(result(3, **changes))
    assert content(folder) == before
    with start(folder) as run:
        run.commit(result(3, metrics={"loss": math.nan}))
    with start(folder) as run:
        assert run.next_round == 4


def test_rounds_without_metrics_are_counted(tmp_path):
    for number in range(2):
        with start(tmp_path / "run") as run:
            run.commit(result(number, metrics={}))
    assert (tmp_path / "run" / "metrics.csv").read_text() == "round\n0\n1\n"


def test_a_commit_past_the_end_leaves_a_complete_run(folder):
    with start(folder) as run:
        for number in (3, 4):
            run.commit(result(number))
        before = content(folder)
        with pytest.raises(LedgerError, match="planned for num_rounds=5"):
            run.commit(result(5))
        with pytest.raises(RunError, match="All 5 rounds"):
            run.begin_round(result(5).start)
    assert content(folder) == before
    start(folder).close()


def test_a_clock_that_went_back_is_told_before_anything_is_computed(folder):
    with start(folder) as run:
        with pytest.raises(RunError, match=r"clock went back: round 3 would start at .*00:01:59"):
            run.begin_round("2024-01-01T00:01:59.000000Z")
        run.begin_round(result(3).start)
        run.commit(result(3))


def test_what_failed_after_the_commit_is_left_to_the_next_start(folder):
    def fail(published):
        if published.round == 3:
            raise OSError("TensorBoard")

    with start(folder, publishers=[fail]) as run:
        with pytest.raises(OSError, match="TensorBoard"):
            run.commit(result(3))
        with pytest.raises(RunError, match="was closed"):
            run.commit(result(4))
    with start(folder) as run:
        assert run.next_round == 4


@pytest.mark.parametrize("stored_whole", [False, True], ids=["today", "version 0.1"])
def test_a_model_is_stored_once_and_released_after_a_crash_as_before_it(tmp_path, stored_whole):
    """Arrays of the model that are arrays of the state, and one that is not, in their own order."""
    shared, alone = np.arange(1e4), np.arange(1e4) + 0.5
    fields = {"state": {"b": shared}, "model": {"z": shared, "a": alone}}
    folder = tmp_path / "run"

    def crash(point, number):
        if point == "checkpoint_written":
            raise KeyboardInterrupt

    with start(folder, on_point=crash) as run, pytest.raises(KeyboardInterrupt):
        run.commit(result(0, **fields))
    (path,) = (folder / "secret").glob("checkpoint_*")
    assert path.stat().st_size < 2.5 * shared.nbytes
    if stored_whole:
        checkpoints = CheckpointFolder(folder / "secret")
        found = checkpoints.load_newest()
        arrays = {"state/b": shared, "model/z": shared, "model/a": alone}
        metadata = {name: found.metadata[name] for name in found.metadata if name != "model"}
        path.unlink()
        checkpoints.save(Checkpoint(found.round, metadata, arrays))
    with start(folder) as run:
        np.testing.assert_array_equal(run.state["b"], shared)
    released = np.load(folder / "released" / "model_000001.npz")
    assert released.files == ["z", "a"]
    np.testing.assert_array_equal(released["z"], shared)
    np.testing.assert_array_equal(released["a"], alone)
    found = ledger.verify_ledger(folder / "ledger.jsonl")
    model = (folder / "released" / "model_000001.npz").read_bytes()
    assert found.records[0].model_digest == hashlib.sha256(model).hexdigest()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff", "[" * 100_000])
def test_a_damaged_configuration_is_named(folder, text):
    (folder / "run.json").write_text(text, "latin-1")
    before = content(folder)
    with pytest.raises(RunError, match=r"run\.json is damaged; restore"):
        start(folder)
    assert content(folder) == before


def test_a_run_cannot_be_continued_with_noise_of_another_source(folder):
    """Not even if run.json is edited: the chain of the ledger begins with what says it."""
    with pytest.raises(LedgerError, match=r"other values of \['noise_source'\]"):
        start(folder, header={"noise_source": "pinned"})


def test_a_field_that_the_run_began_without_has_its_default(folder):
    newer = {"rate": 1, "depth": 2}
    with pytest.raises(RunError, match=r"differs in \['depth'\]"):
        start(folder, config=newer)
    with pytest.raises(RunError, match=r"differs in \['depth'\]"):
        start(folder, config=newer, config_defaults={"depth": 1})
    start(folder, config=newer, config_defaults={"depth": 2, "rate": 5}).close()
    with pytest.raises(RunError, match=r"differs in \['rate'\]"):
        start(folder, config={"depth": 2}, config_defaults={"depth": 2})


def test_metrics_are_for_their_owner_and_keep_the_mode_that_they_are_given(folder):
    path = folder / "metrics.csv"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with start(folder) as run:
        run.commit(result(3))
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "hello", "round,loss\nnone,2\n"])
def test_metrics_that_somebody_else_wrote_are_left_alone(folder, text):
    (folder / "metrics.csv").write_text(text)
    before = content(folder)
    with pytest.raises(RunError, match="restore it or move it away"):
        start(folder)
    assert content(folder) == before


def test_secrets_are_readable_by_their_owner_only(folder):
    secret = folder / "secret"
    assert secret.stat().st_mode & 0o777 == 0o700
    files = [path for path in secret.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (secret / "large_arrays").stat().st_mode & 0o777 == 0o700
    for path, mode in ((secret / "checkpoint_000000003", 0o644), (secret, 0o777)):
        closed = path.stat().st_mode
        path.chmod(mode)
        before = content(folder)
        with pytest.raises(PermissionError, match=f"permissions {mode:o}: others could read"):
            start(folder)
        assert content(folder) == before
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(closed)
    start(folder).close()


def test_nobody_else_can_change_what_a_run_writes_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        with start(tmp_path / "run") as run:
            run.commit(result(0))
    finally:
        os.umask(umask)
    written = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(written) > 10
    assert all(path.stat().st_mode & 0o022 == 0 for path in written)


def test_old_checkpoints_are_removed_and_two_are_kept(folder):
    names = sorted(path.name for path in (folder / "secret").glob("checkpoint_*"))
    assert names == ["checkpoint_000000002", "checkpoint_000000003"]


def test_models_are_published_as_often_as_asked_and_at_the_end(tmp_path):
    with start(tmp_path / "run", publish_every=2) as run:
        for number in range(5):
            run.commit(result(number))
    names = sorted(path.name for path in (tmp_path / "run" / "released").iterdir())
    assert names == ["model_000002.npz", "model_000004.npz", "model_000005.npz"]


def test_a_fork_of_the_program_commits_nothing(tmp_path, monkeypatch):
    run = start(tmp_path / "run", 3, publish_every=3)
    first = result(0)
    run.begin_round(first.start)
    with monkeypatch.context() as child:  # What a forked process sees.
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RunError, match="this is its fork"):
            run.commit(first)
        with pytest.raises(RunError, match="this is its fork"):
            run.begin_round(first.start)
    run.commit(first)
    run.close()
    assert ledger.read_ledger(tmp_path / "run" / "ledger.jsonl").num_records == 1


@pytest.mark.parametrize("cut", [1, 20])
def test_a_ledger_that_changes_under_a_running_program_stops_it_before_the_commit(tmp_path, cut):
    folder = tmp_path / "run"
    with start(folder, 3) as run:
        run.begin_round(result(0).start)
        run.commit(result(0))
        path = folder / "ledger.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole[:-cut])
        before = content(folder)
        run.begin_round(result(1).start)
        with pytest.raises(LedgerError, match="somebody changed it"):
            run.commit(result(1))
        assert content(folder) == before
    path.write_bytes(whole)
    with start(folder, 3) as run:
        assert run.next_round == 1


def test_a_ledger_that_is_replaced_under_a_running_program_stops_it(folder):
    """Even by a copy of itself: what is appended to the old file is lost."""
    path = folder / "ledger.jsonl"
    with start(folder) as run:
        shutil.copy(path, folder / "copy")
        (folder / "copy").replace(path)
        before = content(folder)
        with pytest.raises(LedgerError, match=r"was replaced by a file of .* somebody changed it"):
            run.commit(result(3))
        assert content(folder) == before
    with start(folder) as run:
        run.commit(result(3))


def test_where_locks_are_worth_nothing_a_round_is_still_committed_once(folder, monkeypatch):
    """Two hosts on a volume that does not share flock: both are past every check."""
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    with start(folder, publish_every=5) as first, start(folder, publish_every=5) as second:
        monkeypatch.setattr(ledger.LedgerWriter, "next_head", lambda writer, record: "0" * 64)
        monkeypatch.setattr(ledger.LedgerWriter, "append", lambda writer, record: None)
        first.commit(result(3, 1.0))
        before = content(folder)
        with pytest.raises(CheckpointError, match="another program has committed round 3"):
            second.commit(result(3, 2.0))
        assert content(folder) == before


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_a_lock_that_is_not_a_plain_file_is_refused(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = folder / ".lock"
    if kind == "folder":
        lock.mkdir()
    elif kind == "link":
        lock.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(lock)
    with pytest.raises(RunError, match="must be a plain file"):
        start(folder, 3)
    assert not (tmp_path / "elsewhere").exists()
