"""Checkpoints of a training run: durable, owner-only files of named arrays that verify themselves.

A checkpoint holds secrets (the noise that results were protected with), so its folder and its file
are readable by their owner only from the first moment on. It is written under a temporary name,
flushed, renamed, and its folder flushed: a crash leaves the old checkpoint or the new one, never
half of one. Older checkpoints are removed only after the new one is durable.

Format: one line of text with the SHA-256 of the rest, one line with the length of a JSON object,
the object (metadata, and name, dtype and shape of every array), and the arrays' bytes, one after
the other. No pickle: loading a checkpoint runs no code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bandmf_tf import _checks
from bandmf_tf._files import sync_folder, write_atomically
from bandmf_tf.secret_files import make_secret_folder

_MAGIC = b"bandmf_tf checkpoint 1 "
_NAME = re.compile(r"checkpoint_(\d{9})")


class CheckpointError(ValueError):
    """A checkpoint is damaged, missing or not of this run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on.

    Attributes:
      round: Number of rounds completed; the next round has this number.
      metadata: JSON values.
      arrays: Named arrays.
    """

    round: int
    metadata: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class CheckpointFolder:
    """Keeps the newest checkpoints of a run.

    Args:
      folder: Folder of the checkpoints; made, and closed to others, if it does not exist.
      keep: How many to keep.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
        self._folder = make_secret_folder(folder)
        self._keep = _checks.positive_int("keep", keep)
        for leftover in self._folder.glob(".checkpoint_*.tmp"):
            leftover.unlink()  # Of a write that a crash interrupted; it was never a checkpoint.

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint at all."""
        return not self._rounds()

    def path(self, round_number: int) -> Path:
        """Returns where the checkpoint after `round_number` rounds is."""
        return self._folder / f"checkpoint_{round_number:09d}"

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the checkpoint; it is durable when this returns."""
        write_atomically(self.path(checkpoint.round), _encode(checkpoint), owner_only=True)

    def remove_old(self) -> None:
        """Removes all but the newest checkpoints."""
        for number in self._rounds()[: -self._keep]:
            with contextlib.suppress(FileNotFoundError):
                self.path(number).unlink()
        sync_folder(self._folder)

    def load_newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint; None if there is none.

        Raises:
          CheckpointError: It is damaged. Going back to an older one is not offered: results after
            it may have been released, and their rounds must not be computed again.
        """
        rounds = self._rounds()
        if not rounds:
            return None
        path = self.path(rounds[-1])
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise CheckpointError(
                f"{path} has permissions {mode:o}: others could read the noise in it; find out who "
                f"did, then run `chmod 600 {path}`."
            )
        try:
            checkpoint = _decode(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); restore the file from a backup. An older checkpoint "
                "must not take its place, because rounds after it were released."
            ) from error
        if checkpoint.round != rounds[-1]:
            raise CheckpointError(
                f"{path} is the checkpoint after {checkpoint.round} rounds; it was renamed."
            )
        return checkpoint

    def _rounds(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def _encode(checkpoint: Checkpoint) -> bytes:
    arrays = {name: np.ascontiguousarray(array) for name, array in checkpoint.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"A checkpoint holds numbers and fixed strings. Found {name!r}.")
    described = [
        [name, array.dtype.str, list(np.shape(checkpoint.arrays[name]))]
        for name, array in arrays.items()
    ]
    header = {
        "round": checkpoint.round,
        "metadata": dict(checkpoint.metadata),
        "arrays": described,
    }
    text = json.dumps(header, allow_nan=False).encode("ascii")
    parts = [b"%d\n" % len(text), text, *(array.tobytes() for array in arrays.values())]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([_MAGIC, digest.hexdigest().encode(), b"\n", *parts])


def _decode(data: bytes) -> Checkpoint:
    line_end = data.find(b"\n", 0, 200)
    first_line = data[:line_end]
    if line_end < 0 or not first_line.startswith(_MAGIC):
        raise ValueError("it does not begin like a checkpoint")
    content = memoryview(data)[line_end + 1 :]
    if hashlib.sha256(content).hexdigest().encode() != first_line[len(_MAGIC) :]:
        raise ValueError("its content does not match its SHA-256")
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
    return Checkpoint(header["round"], header["metadata"], arrays)
