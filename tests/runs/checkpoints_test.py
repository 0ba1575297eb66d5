"""Checkpoints bring everything back, write what changed, and trust nothing that they find."""

from __future__ import annotations

import functools
import hashlib
import signal

import numpy as np
import pytest

from bandmf_tf.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    LargeArray,
)
from cases import largest_file
from run_program import content, forked


def test_checkpoints_bring_every_array_back(tmp_path):
    arrays = {
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "text": np.array("configuration"),
        "flags": np.array([True, False]),
    }
    folder = CheckpointFolder(tmp_path / "secret")
    folder.save(Checkpoint(7, {"name": "x"}, arrays))
    found = CheckpointFolder(tmp_path / "secret").load_newest()
    assert (found.round, found.metadata) == (7, {"name": "x"})
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
    with pytest.raises(TypeError, match="numbers"):
        folder.save(Checkpoint(8, {}, {"object": np.array([{}])}))


def test_large_arrays_are_written_when_they_change_and_removed_when_not_needed(tmp_path):
    folder = CheckpointFolder(tmp_path / "secret")
    asked = []

    def save(number, *values):
        def read(value):
            asked.append(value)
            return np.full(4, float(value))

        large = {
            f"chunk {i}": LargeArray(str(v), functools.partial(read, v))
            for i, v in enumerate(values)
        }
        folder.save(Checkpoint(number, {}, {}, large))
        folder.remove_old()
        return len(list((tmp_path / "secret" / "large_arrays").iterdir()))

    assert save(1, 1, 2, 2) == 2
    assert save(2, 1, 2, 2) == 2
    assert asked == [1, 2]
    assert save(3, 2, 2, 3) == 3  # Checkpoint 2 still needs 1; 2 is shared.
    assert save(4, 2, 2, 3) == 2
    assert asked == [1, 2, 3]
    (tmp_path / "secret" / "large_arrays" / _digest(np.full(4, 2.0))).unlink()
    assert save(5, 2, 2, 3) == 2  # What somebody removed is written again.
    found = CheckpointFolder(tmp_path / "secret").load_newest().large_arrays
    for name, value in {"chunk 0": 2.0, "chunk 1": 2.0, "chunk 2": 3.0}.items():
        np.testing.assert_array_equal(found[name].read(), np.full(4, value))
    (tmp_path / "secret" / "large_arrays" / _digest(np.full(4, 3.0))).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        CheckpointFolder(tmp_path / "secret").load_newest()


def test_who_holds_a_large_array_is_given_it_mapped_once_it_is_stored(tmp_path):
    held = {"1": np.arange(6.0).reshape(2, 3), "2": np.zeros([0, 3])}
    given = []

    def replace(key, mapped):
        given.append(key)
        np.testing.assert_array_equal(mapped, held[key])
        held[key] = mapped

    large = {
        key: LargeArray(key, lambda key=key: held[key], functools.partial(replace, key))
        for key in held
    }
    folder = CheckpointFolder(tmp_path / "secret")
    for number in (1, 2):
        folder.save(Checkpoint(number, {}, {}, large))
    assert given == ["1", "2"]
    assert isinstance(held["1"], np.memmap)
    (path,) = [p for p in (tmp_path / "secret" / "large_arrays").iterdir() if p.stat().st_size]
    assert path.samefile(held["1"].filename)
    folder.save(Checkpoint(3, {}, {}))
    folder.save(Checkpoint(4, {}, {}))
    folder.remove_old()
    assert not path.exists()
    np.testing.assert_array_equal(held["1"], np.arange(6.0).reshape(2, 3))


def _digest(array) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.fixture(name="chunked")
def _chunked(tmp_path):
    """Returns a folder with a checkpoint of two chunks, and the paths of these."""
    arrays = [np.arange(1000.0), np.arange(1000.0) + 1]
    large = {str(i): LargeArray(str(i), lambda a=a: a) for i, a in enumerate(arrays)}
    CheckpointFolder(tmp_path / "secret").save(Checkpoint(1, {}, {}, large))
    return tmp_path / "secret", [
        tmp_path / "secret" / "large_arrays" / _digest(array) for array in arrays
    ]


def _truncate(ours, theirs):
    ours.write_bytes(ours.read_bytes()[:-8])


def _append(ours, theirs):
    ours.write_bytes(ours.read_bytes() + b"12345678")


def _flip(ours, theirs):
    ours.write_bytes(ours.read_bytes()[:-1] + b"?")


def _remove(ours, theirs):
    ours.unlink()


def _swap(ours, theirs):
    before = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    theirs.write_bytes(before)


@pytest.mark.parametrize("damage", [_truncate, _append, _flip, _remove, _swap])
def test_a_damaged_chunk_is_refused_and_left_alone(chunked, damage):
    secret, paths = chunked
    read = CheckpointFolder(secret).load_newest().large_arrays["0"].read
    damage(*paths)
    before = content(secret)
    with pytest.raises(CheckpointError, match=r"is damaged .* does not match its SHA-256"):
        CheckpointFolder(secret).load_newest()
    if damage is not _append:  # What was appended is not read.
        with pytest.raises(CheckpointError, match="was changed since the program started"):
            read()
    assert content(secret) == before


def test_a_chunk_that_a_crash_left_is_not_trusted(chunked):
    """Its name is taken for its content only by whoever has written or verified it."""
    secret, (path, _) = chunked
    path.write_bytes(b"damaged")
    large = {"0": LargeArray("0", lambda: np.arange(1000.0))}
    CheckpointFolder(secret).save(Checkpoint(2, {}, {}, large))
    found = CheckpointFolder(secret).load_newest().large_arrays
    np.testing.assert_array_equal(found["0"].read(), np.arange(1000.0))


def test_a_full_disk_in_the_middle_of_a_chunk_leaves_the_old_checkpoint(chunked):
    secret, _ = chunked
    before = content(secret)
    large = {
        str(size): LargeArray(str(size), lambda size=size: np.full(size, 2.0))
        for size in (10, 20_000)
    }
    with largest_file(1 << 16), pytest.raises(OSError):
        CheckpointFolder(secret).save(Checkpoint(2, {}, {}, large))
    kept = content(secret)
    assert kept.items() >= before.items()
    assert len(kept) == len(before) + 1  # The small chunk, complete.
    assert CheckpointFolder(secret).load_newest().round == 1
    folder = CheckpointFolder(secret)
    folder.save(Checkpoint(2, {}, {}, large))
    folder.remove_old()
    assert CheckpointFolder(secret).load_newest().round == 2


def test_a_kill_between_chunks_loses_nothing(tmp_path):
    for written, outcome in enumerate(forked(tmp_path, "kill_between_chunks", 3)):
        assert outcome == {
            "exit": -signal.SIGKILL,
            "round": 1,
            "values": [[10.0], [11.0], [12.0]],
            "files": [3 + written, 3],  # What the crash left is gone.
        }
