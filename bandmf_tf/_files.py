"""Writing files: durably, as a whole or not at all, and without letting others read secrets.

A checkpoint of a noise stream, or a TFF state with the noise inside, holds rows that past results
were protected with. Whoever reads it can subtract them, so such files are their owner's only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_OWNER_ONLY_FOLDER = stat.S_IRWXU
_OWNER_ONLY_FILE = stat.S_IRUSR | stat.S_IWUSR

# Seconds to wait for another program that writes the same folder; that takes milliseconds.
_LONGEST_WAIT = 60.0


def write_atomically(
    path: str | os.PathLike[str],
    data: bytes | memoryview,
    *,
    owner_only: bool = False,
    replace: bool = True,
) -> None:
    """Replaces the file at `path` by one that holds `data`, durably.

    The data go to a temporary file in the same folder, which is flushed to disk and then renamed;
    the folder is flushed last, so that the new name survives a power failure. If anything fails
    before the renaming, the old file stays as it was and the temporary file is removed.
    With `owner_only`, nobody but the owner can read the file at any moment. Without `replace`, one
    of several programs that write it gets the name, locked or not.

    Raises:
      FileExistsError: There is such a file, and it is not to be replaced.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, data, _OWNER_ONLY_FILE if owner_only else 0o644)
        if replace:
            os.replace(temporary, path)
        else:
            _rename_new(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_folder(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Writes files into a folder, all or none: they are made apart and moved when complete.

    A folder with nothing but files of these names is exchanged as a whole. One that holds other
    things as well, or cannot be moved, keeps them, and its files are replaced one after the other.
    Programs that write the same folder do so one after the other; the last one's files stay.
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as temporary:
        for name, data in contents.items():
            _write_new(temporary / name, data)
        if not folder.exists():
            os.rename(temporary, folder)
        elif _can_be_exchanged(folder, {*contents, temporary.name}):
            _exchange(folder, temporary.name)
        else:
            for name in contents:
                os.replace(temporary / name, folder / name)
    sync_folder(folder.parent)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder on the same disk: in `folder`, or where that would be made; removes it.

    Meanwhile other programs that ask for one of the same `folder` wait.
    """
    parent = next(path for path in (*folder.resolve().parents, folder) if path.exists())
    place = folder if folder.exists() else parent
    with locked(parent if os.access(parent, os.R_OK) else place):
        place = folder if folder.exists() else parent
        temporary = place / f".{folder.name}.{secrets.token_hex(8)}.tmp"
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder itself, which leaves no file behind; waits for it, not for ever."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LONGEST_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BlockingIOError(
                        errno.EAGAIN, f"another program has {folder} locked", str(folder)
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes names that were created, replaced or removed in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_secret_folder(path: str | os.PathLike[str]) -> Path:
    """Makes a folder that nobody but its owner can open, or takes one that is closed.

    Call it before the first checkpoint is written: TensorFlow creates files as the umask says, and
    only a closed folder protects them from the first moment on. An empty folder is closed. One that
    holds something and is open to others is refused, not closed: they may have seen it, or put
    something there.

    Raises:
      PermissionError: The folder is a link, somebody else's, or open to others and not empty.
    """
    folder = Path(path)
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    _require_own(folder)
    if any(folder.iterdir()):
        _require_closed(folder)
    folder.chmod(_OWNER_ONLY_FOLDER)
    return folder


def require_closed(folder: Path) -> None:
    """Raises PermissionError if others could open anything in the folder, or the folder itself."""
    for path in (folder, *sorted(folder.rglob("*"))):
        _require_closed(path)


@contextlib.contextmanager
def owner_only_umask() -> Iterator[None]:
    """Whatever the process creates meanwhile can be opened by its owner only."""
    before = os.umask(~_OWNER_ONLY_FOLDER & 0o777)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def owner_only(path: str | os.PathLike[str]) -> Iterator[None]:
    """Closes what is written to `path` while it is open, from the first moment on.

    It sets the umask of the process for that time. What is not on a local disk is left alone.
    """
    is_local = "://" not in os.fspath(path)
    if is_local and Path(path).exists():  # It keeps its mode, and what is written is seen at once.
        restrict_checkpoint(path)
    with owner_only_umask():
        yield
    if is_local:
        restrict_checkpoint(path)


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


def _rename_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():  # A file system without links, where this is all that can be asked.
            raise FileExistsError(errno.EEXIST, "File exists", str(path)) from None
        os.replace(temporary, path)
    else:
        temporary.unlink()


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


def _require_closed(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        closed = "700" if path.is_dir() else "600"
        raise PermissionError(
            f"{path} has permissions {mode:o}: others could read the noise in it, or change it; "
            f"find out who did, then run `chmod {closed} {path}`."
        )
