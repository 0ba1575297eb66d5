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
from pathlib import Path

from bandmf_tf.errors import BandMFError


class AnchorError(BandMFError):
    """An anchor contradicts the ledger that it is of."""


def append_head(path: str | os.PathLike[str], rounds: int, head: str) -> None:
    """Appends the hash after so many rounds, durably; nothing if it is there, or before round 0.

    A line that has no end, left by a full disk, is completed.

    Raises:
      AnchorError: The anchor knows of later rounds, or of another hash: the run went back.
      OSError: It cannot be written.
    """
    path = Path(path)
    line = f"{rounds} {head}\n".encode("ascii")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and line.startswith(lines[-1]):
        line = line.removeprefix(lines.pop())
    elif lines:
        known = lines[-1].split(b" ")[0]
        is_number = lines[-1].endswith(b"\n") and re.fullmatch(rb"\d{1,18}", known)
        if not is_number or int(known) >= rounds:
            raise AnchorError(
                f"{path} ends with {lines[-1][:100].decode('ascii', 'replace')!r} and the ledger "
                f"after {rounds} rounds with {head}; the run folder was replaced by an older copy, "
                "or the anchor is of another run."
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
