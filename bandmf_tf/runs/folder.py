"""The folder of a training run: what is in it, under which name, and for whose eyes.

RUN/
  .lock                  empty; locked by the program that works on the run, and never removed
  run.json               configuration; public
  mechanism.bandmf       the mechanism file
  ledger.jsonl           what was released, see `ledger.py`
  metrics.csv            one line a round; made owner-only, exact metrics of clients are in it
  metrics.prom           the last round for Prometheus, see `progress.py`; public
  tensorboard/           the same for TensorBoard
  released/              models, `model_<rounds>.npz`; their SHA-256 stands in the ledger
  secret/                owner only: checkpoints with the noise, the salt of pseudonyms
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import stat
from pathlib import Path

from bandmf_tf.errors import BandMFError

_MODEL = re.compile(r"model_(\d{1,18})\.npz")
_CHECKPOINT = re.compile(r"checkpoint_(\d{1,18})")


class RunError(BandMFError):
    """A run cannot go on; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where the files of the run in the folder `path` are, whether they exist or not."""

    path: Path

    @property
    def lock(self) -> Path:
        """The file that is locked while a program works on the run."""
        return self.path / ".lock"

    @property
    def config(self) -> Path:
        """The configuration, JSON."""
        return self.path / "run.json"

    @property
    def mechanism(self) -> Path:
        """The mechanism file."""
        return self.path / "mechanism.bandmf"

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        """The metrics of every round."""
        return self.path / "metrics.csv"

    @property
    def prometheus(self) -> Path:
        """The metrics of the last round, without those of clients, for Prometheus."""
        return self.path / "metrics.prom"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard."""
        return self.path / "tensorboard"

    @property
    def released(self) -> Path:
        """The folder of released models."""
        return self.path / "released"

    @property
    def secret(self) -> Path:
        """The folder that nobody but the owner may see."""
        return self.path / "secret"

    @property
    def salt(self) -> Path:
        """The salt of pseudonyms."""
        return self.secret / "participation_salt"

    def model(self, rounds: int) -> Path:
        """Returns where the model after so many rounds is."""
        return self.released / f"model_{rounds:06d}.npz"

    def models(self) -> list[tuple[int, Path]]:
        """Returns the released models that exist, by the number of rounds."""
        return _numbered(self.released, _MODEL)

    def leftovers(self) -> list[Path]:
        """Returns files of writes that a crash interrupted; they were never finished."""
        public = (
            self.config,
            self.mechanism,
            self.metrics,
            self.prometheus,
            self.released / "model_",
        )
        found = [p for path in public for p in path.parent.glob(f".{path.name}*.tmp")]
        return found + list(self.secret.rglob(".*.tmp"))


class FolderLock:
    """Keeps other programs out of a run folder until it is closed, or its process ends.

    Take it before anything in the folder is read, made or removed. The lock is the operating
    system's (`flock`) on a file that is never removed: a lock on a file that somebody may unlink
    excludes nobody who opens the next file of that name. A folder that does not exist is made,
    which two programs may do at the same time; one of them gets the lock.

    Raises:
      RunError: Another program has the lock; nothing was touched.
    """

    def __init__(self, folder: RunFolder):
        self._path = folder.lock
        self._process = os.getpid()
        folder.path.mkdir(0o755, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor: int | None = os.open(self._path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise RunError(
                f"{self._path} must be a plain file, which keeps other programs out; remove what "
                "is there, if no program uses the folder."
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise RunError(f"{self._path} must be a plain file; remove what is there.")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.check()
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):  # Held by another program, or its fork.
                raise RunError(
                    f"{folder.path} is in use by another process; one run has one program at a "
                    "time, end that one first."
                ) from None
            raise

    def check(self) -> None:
        """Raises RunError unless the lock is held on what now has the name of the folder."""
        if self._process != os.getpid():
            raise RunError(
                f"The run in {self._path.parent} belongs to the process that started it, and this "
                "is its fork; one run has one program at a time."
            )
        if self._descriptor is None:
            raise RunError(f"The run in {self._path.parent} was closed; start it again.")
        locked = os.fstat(self._descriptor)
        try:
            found = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (locked.st_dev, locked.st_ino):
            raise RunError(
                f"{self._path.parent} was moved or replaced while its program was running; nothing "
                "more was written, start the program on the folder that it began with."
            )

    def close(self) -> None:
        """Lets other programs in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def checkpoint_path(folder: Path, rounds: int) -> Path:
    """Returns where the checkpoint after so many rounds is in a folder of checkpoints."""
    return folder / f"checkpoint_{rounds:09d}"


def checkpoint_paths(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints that exist in a folder of checkpoints, by the number of rounds."""
    return _numbered(folder, _CHECKPOINT)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    paths = list(folder.iterdir()) if folder.is_dir() else []
    matches = ((pattern.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)
