"""Checkpoints of a training run: durable, owner-only files of named arrays that verify themselves.

A checkpoint holds secrets (the noise that results were protected with), so its folder and its file
are readable by their owner only from the first moment on. It is written under a temporary name,
flushed, renamed, and its folder flushed: a crash leaves the old checkpoint or the new one, never
half of one. Older checkpoints are removed only after the new one is durable.

Format: one line of text with the SHA-256 of the rest, one line with the length of a JSON object,
the object (metadata, and name, dtype and shape of every array), and the arrays' bytes, one after
the other. No pickle: loading a checkpoint runs no code.

Large arrays that rarely change (past noise: gigabytes, of which one chunk changes every few dozen
rounds) are stored once each, in files named after their SHA-256; checkpoints refer to them. They
are written and read one at a time, so that a checkpoint takes the memory of one of them and not of
all. A file is never changed, so whoever holds an array can map its file in place of it: the kernel
then keeps in memory what there is room for, and reads the rest when it is needed. A mapped file
that is removed is there until nobody maps it; one that cannot be read ends the program (SIGBUS), as
a kill would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bandmf_tf._files import make_secret_folder, require_closed, sync_folder, write_atomically
from bandmf_tf.errors import BandMFError, BandMFTypeError
from bandmf_tf.runs.folder import checkpoint_path, checkpoint_paths

_MAGIC = b"bandmf_tf checkpoint 1 "
_BLOB_FOLDER = "large_arrays"
_KEPT = 2
_PIECE = 1 << 20


class CheckpointError(BandMFError):
    """A checkpoint is damaged, missing or not of this run."""


@dataclasses.dataclass(frozen=True)
class LargeArray:
    """An array that is worth a file of its own, and in memory only while it is used.

    Attributes:
      key: Names the content within this process: as long as it is the same, so is the array.
      read: Returns the array; of a stored one, mapped from its file, and raises CheckpointError if
        that was changed.
      replace: Called with the array mapped from its file as soon as there is one.
    """

    key: str
    read: Callable[[], np.ndarray]
    replace: Callable[[np.ndarray], object] = lambda mapped: None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
      round: Number of rounds completed; the next round has this number.
      metadata: JSON values.
      arrays: Named arrays.
      large_arrays: Named arrays that are stored apart; read only if they changed.
    """

    round: int
    metadata: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    large_arrays: Mapping[str, LargeArray] = dataclasses.field(default_factory=dict)


class CheckpointFolder:
    """Keeps the newest checkpoints of a run.

    Args:
      folder: Folder of the checkpoints; made, and closed to others, if it does not exist.

    Raises:
      PermissionError: Others could open the folder or a file in it.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = make_secret_folder(folder)
        self._blobs = make_secret_folder(self._folder / _BLOB_FOLDER)
        require_closed(self._folder)
        self._references: list[list[Any]] = []
        self._stored: dict[str, list[Any]] = {}  # By the keys of this process.
        self._verified: set[str] = set()  # Digests of files that this process wrote or checked.

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the checkpoint; it is durable when this returns.

        Raises:
          CheckpointError: There is one of this round: whatever locks are worth on this file system,
            a round is committed by one program.
        """
        stored: dict[str, list[Any]] = {}
        for array in checkpoint.large_arrays.values():
            if array.key not in stored:
                known = self._stored.get(array.key)
                if known is None or not (self._blobs / known[0]).exists():
                    known = self._store(array.read())
                    array.replace(_mapped(self._blobs / known[0], *known[1:]))
                stored[array.key] = known
        self._stored = stored
        self._references = [[n, *stored[a.key]] for n, a in checkpoint.large_arrays.items()]
        data = _encode(checkpoint, self._references)
        path = checkpoint_path(self._folder, checkpoint.round)
        try:
            write_atomically(path, data, owner_only=True, replace=False)
        except FileExistsError:
            raise CheckpointError(
                f"{path} exists: another program has committed round {checkpoint.round - 1}, whose "
                "result here was not released; end one of the two."
            ) from None

    def remove_old(self) -> None:
        """Removes all but the newest checkpoints, and large arrays that none of these refers to."""
        for _, path in checkpoint_paths(self._folder)[:-_KEPT]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        sync_folder(self._folder)
        stored = {path.name for path in self._blobs.iterdir()}
        if stored == {reference[1] for reference in self._references}:
            return
        try:
            needed = {
                reference[1]
                for _, path in checkpoint_paths(self._folder)
                for reference in _decode(path.read_bytes())[1]
            }
        except ValueError:
            return  # An older checkpoint is damaged: what it needs is unknown, so all is kept.
        for name in stored - needed:
            (self._blobs / name).unlink()

    def _store(self, array: np.ndarray) -> list[Any]:
        """Stores an array under its digest, if it is not there yet; returns what refers to it."""
        data = _bytes(np.ascontiguousarray(array))
        digest = hashlib.sha256(data).hexdigest()
        path = self._blobs / digest
        if digest not in self._verified or not path.exists():
            write_atomically(path, data, owner_only=True)
            self._verified.add(digest)
        return [digest, array.dtype.str, list(array.shape)]

    def _found(self, references: list[list[Any]]) -> dict[str, LargeArray]:
        """Returns the arrays that references are to; raises a ValueError if one is damaged."""
        for digest in dict.fromkeys(reference[1] for reference in references):
            _require_digest(self._blobs / digest)
            self._verified.add(digest)
        return {
            name: LargeArray(digest, functools.partial(_read, self._blobs / digest, dtype, shape))
            for name, digest, dtype, shape in references
        }

    def load_newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint; None if there is none.

        Raises:
          CheckpointError: It is damaged. Going back to an older one is not offered: results after
            it may have been released, and their rounds must not be computed again.
        """
        found = checkpoint_paths(self._folder)
        if not found:
            return None
        rounds, path = found[-1]
        try:
            checkpoint, references = _decode(path.read_bytes())
            large = self._found(references)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); restore the file from a backup. An older checkpoint "
                "must not take its place, because rounds after it were released."
            ) from error
        if checkpoint.round != rounds:
            raise CheckpointError(
                f"{path} is the checkpoint after {checkpoint.round} rounds; it was renamed."
            )
        return dataclasses.replace(checkpoint, large_arrays=large)


def _require_digest(path: Path) -> None:
    """Raises a ValueError unless the file's content has the SHA-256 that it is named after."""
    digest = hashlib.sha256()
    if path.exists():
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    if digest.hexdigest() != path.name:
        raise BandMFError(f"{path} is missing or does not match its SHA-256")


def _read(path: Path, dtype: str, shape: list[int]) -> np.ndarray:
    """Returns a stored array; checked again, because time has passed since it was found."""
    try:
        array = _mapped(path, dtype, shape)
        if hashlib.sha256(_bytes(array)).hexdigest() == path.name:
            return array
    except (OSError, ValueError):
        pass  # There is no such file, or it is too short.
    raise CheckpointError(
        f"{path} was changed since the program started; restore it from a backup."
    )


def _mapped(path: Path, dtype: str, shape: list[int]) -> np.ndarray:
    """Returns the array in a file, which is read where and when the array is.

    Whoever writes to the array, which nobody should, changes it and not the file.
    """
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "c", shape=tuple(shape))


def _bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of a contiguous array without a copy."""
    return array.reshape(-1).view(np.uint8).data


def stored_head(path: Path, rounds: int) -> str:
    """Returns the ledger's last hash after so many rounds, as the checkpoint at `path` has it.

    Raises:
      CheckpointError: It is damaged or not of these rounds.
    """
    try:
        checkpoint, _ = _decode(path.read_bytes())
        head = checkpoint.metadata["head"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore the file.") from error
    if checkpoint.round != rounds:
        raise CheckpointError(
            f"{path} is the checkpoint after {checkpoint.round} rounds; it was renamed."
        )
    return head


def _encode(checkpoint: Checkpoint, references: list[list[Any]]) -> bytes:
    arrays = {name: np.ascontiguousarray(array) for name, array in checkpoint.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise BandMFTypeError(f"A checkpoint holds numbers and fixed strings. Found {name!r}.")
    described = [
        [name, array.dtype.str, list(np.shape(checkpoint.arrays[name]))]
        for name, array in arrays.items()
    ]
    header = {
        "round": checkpoint.round,
        "metadata": dict(checkpoint.metadata),
        "arrays": described,
        "large_arrays": references,
    }
    text = json.dumps(header, allow_nan=False).encode("ascii")
    parts = [b"%d\n" % len(text), text, *(array.tobytes() for array in arrays.values())]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([_MAGIC, digest.hexdigest().encode(), b"\n", *parts])


def _decode(data: bytes) -> tuple[Checkpoint, list[list[Any]]]:
    """Returns the checkpoint without its large arrays, and the references to them."""
    line_end = data.find(b"\n", 0, 200)
    first_line = data[:line_end]
    if line_end < 0 or not first_line.startswith(_MAGIC):
        raise BandMFError("it does not begin like a checkpoint")
    content = memoryview(data)[line_end + 1 :]
    if hashlib.sha256(content).hexdigest().encode() != first_line[len(_MAGIC) :]:
        raise BandMFError("its content does not match its SHA-256")
    length_end = data.find(b"\n", line_end + 1)
    length = int(data[line_end + 1 : length_end])
    position = length_end + 1 + length
    header = json.loads(data[length_end + 1 : position])
    arrays = {}
    for name, dtype_name, shape in header["arrays"]:
        dtype = np.dtype(dtype_name)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype, count, position).reshape(shape).copy()
        position += count * dtype.itemsize
    return Checkpoint(header["round"], header["metadata"], arrays), header["large_arrays"]
