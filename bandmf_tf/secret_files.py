"""Files that hold noise: readable by their owner and nobody else.

A checkpoint of a noise stream, or a TFF state with the noise inside, holds rows that past results
were protected with. Whoever reads it can subtract them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OWNER_ONLY_FOLDER = stat.S_IRWXU
_OWNER_ONLY_FILE = stat.S_IRUSR | stat.S_IWUSR


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
    files = sorted(path.parent.glob(f"{_escaped(path.name)}.*"))
    files += [path, *sorted(path.rglob("*"))] if path.exists() else []
    if not files:
        raise FileNotFoundError(f"No checkpoint file starts with {path}.")
    for file in files:
        _require_own(file)
        file.chmod(_OWNER_ONLY_FOLDER if file.is_dir() else _OWNER_ONLY_FILE)
    return files


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _require_own(path: Path) -> None:
    if path.is_symlink():
        raise PermissionError(f"{path} is a symbolic link; give the place that it points to.")
    if path.stat().st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to another user, who could read the noise in it; use a folder of your "
            "own."
        )
