"""Writing a file so that a crash leaves either the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(
    path: str | os.PathLike[str], data: bytes, *, owner_only: bool = False
) -> None:
    """Replaces the file at `path` by one that holds `data`, durably.

    The data go to a temporary file in the same folder, which is flushed to disk and then renamed;
    the folder is flushed last, so that the new name survives a power failure. If anything fails
    before the renaming, the old file stays as it was and the temporary file is removed.
    With `owner_only`, nobody but the owner can read the file at any moment.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600 if owner_only else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes names that were created, replaced or removed in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
