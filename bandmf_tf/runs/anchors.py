"""Anchors: the last hash of a ledger, round by round, in a file that is kept elsewhere.

Whoever can write a run folder can write its ledger again from the first line, with hashes that fit.
What they cannot change is what somebody else holds. An anchor is a text file, on any mounted path,
to which the training program appends a line after every round:

    <rounds completed> <hash of the ledger's last line>

`bandmf-report --ledger_head` takes the hash of the last line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from bandmf_tf.errors import BandMFError


class AnchorError(BandMFError):
    """An anchor contradicts the ledger that it is of."""


def append_head(path: str | os.PathLike[str], hashes: Sequence[str]) -> None:
    """Appends the ledger's last hash, durably; nothing if it is there, or before round 0.

    A line that has no end, left by a full disk, is completed.

    Args:
      path: The anchor.
      hashes: Of the lines of the ledger: entry r is its head after r rounds.

    Raises:
      AnchorError: The anchor knows of later rounds, or of another hash: the run went back, perhaps
        long ago and while nobody kept the anchor.
      OSError: It cannot be written.
    """
    path = Path(path)
    rounds = len(hashes) - 1
    line = _line(rounds, hashes)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and line.startswith(lines[-1]):
        line = line.removeprefix(lines.pop())
    if lines:
        known = re.match(rb"\d{1,18} ", lines[-1])
        if known is None or int(known[0]) > rounds or lines[-1] != _line(int(known[0]), hashes):
            raise AnchorError(
                f"{path} ends with {lines[-1][:100].decode('ascii', 'replace')!r} and the ledger "
                f"after {rounds} rounds, with {hashes[-1]}, does not agree; the run folder was "
                "replaced by an older copy, or the anchor is of another run."
            )
    if not line or not rounds:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(f"{path} took only a part of a line; make room for it.")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(rounds: int, hashes: Sequence[str]) -> bytes:
    return f"{rounds} {hashes[rounds]}\n".encode("ascii")
