"""Writing files: durably, as a whole or not at all, and without letting others read secrets.

A checkpoint of a noise stream, or a TFF state with the noise inside, holds rows that past results
were protected with. Whoever reads it can subtract them, so such files are their owner's only.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

_OWNER_ONLY_FOLDER = stat.S_IRWXU
_OWNER_ONLY_FILE = stat.S_IRUSR | stat.S_IWUSR


def write_atomically(
    path: str | os.PathLike[str], data: bytes | memoryview, *, owner_only: bool = False
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
        _write_new(temporary, data, _OWNER_ONLY_FILE if owner_only else 0o666)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_folder(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Writes files into a folder, all or none: they are made apart and moved when complete.

    A folder with nothing but files of these names is exchanged as a whole. One that holds other
    things as well, or cannot be moved, keeps them, and its files are replaced one after the other.
    """
    folder = Path(folder).resolve()
    with temporary_folder(folder) as temporary:
        for name, data in contents.items():
            _write_new(temporary / name, data)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(temporary, folder)
        elif _can_be_exchanged(folder, {*contents, temporary.name}):
            _exchange(folder, temporary.name)
        else:
            for name in contents:
                os.replace(temporary / name, folder / name)
    sync_folder(folder.parent)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder on the same disk: in `folder`, or where that would be made; removes it."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    temporary = place / f".{folder.name}.{secrets.token_hex(8)}.tmp"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes names that were created, replaced or removed in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_secret_folder(path: str | os.PathLike[str]) -> Path:
    """Makes a folder, or takes an existing one, and closes it to everybody but its owner.

    Call it before the first checkpoint is written: TensorFlow creates files as the umask says, and
    only a closed folder protects them from the first moment on.
    """
    folder = Path(path)
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    _require_own(folder)
    folder.chmod(_OWNER_ONLY_FOLDER)
    return folder


@contextlib.contextmanager
def owner_only(path: str | os.PathLike[str]) -> Iterator[None]:
    """Closes what is written to `path` while it is open, from the first moment on.

    It sets the umask of the process for that time. What is not on a local disk is left alone.
    """
    before = os.umask(~_OWNER_ONLY_FOLDER & 0o777)
    try:
        yield
    finally:
        os.umask(before)
    if "://" not in os.fspath(path):
        restrict_checkpoint(path)  # A file that was there before has kept its mode.


def restrict_checkpoint(prefix: str | os.PathLike[str]) -> list[Path]:
    """Closes the files of a checkpoint to everybody but their owner; returns them.

    Args:
      prefix: What `tf.train.Checkpoint.write` or `save` returned, or the path of a single file or
        folder, whose whole contents are then closed.
    """
    path = Path(prefix)
    files = sorted(path.parent.glob(f"{glob.escape(path.name)}.*"))
    files += [path, *sorted(path.rglob("*"))] if path.exists() else []
    if not files:
        raise FileNotFoundError(f"No checkpoint file starts with {path}.")
    for file in files:
        _require_own(file)
        file.chmod(_OWNER_ONLY_FOLDER if file.is_dir() else _OWNER_ONLY_FILE)
    return files


def _write_new(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _can_be_exchanged(folder: Path, names: set[str]) -> bool:
    has_others = any(entry.name not in names for entry in folder.iterdir())
    is_fixed = folder.is_mount() or folder == Path.cwd() or not os.access(folder.parent, os.W_OK)
    return not has_others and not is_fixed


def _exchange(folder: Path, inner: str) -> None:
    """Puts the folder `inner` of a folder in its place."""
    replaced = folder.with_name(f"{inner.removesuffix('.tmp')}.old")
    os.rename(folder, replaced)
    try:
        os.rename(replaced / inner, folder)
    except BaseException:
        os.rename(replaced, folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _require_own(path: Path) -> None:
    if path.is_symlink():
        raise PermissionError(f"{path} is a symbolic link; give the place that it points to.")
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to another user, who could read the noise in it; use a folder of your "
            "own."
        )
