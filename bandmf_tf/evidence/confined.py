"""What may be opened of the evidence that a report names: a stranger may have written the report.

It must not lead whoever verifies it to a pipe that never ends, to files of their own, or to work
without end. So `check` takes regular files alone, under one folder and of so many bytes in all, and
`limited_time` ends what takes longer.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bandmf_tf.evidence.reader import UnreadableError

MOST_BYTES = 1 << 34
MOST_SECONDS = 600.0
# From so many bytes on, a file of holes costs its sender nothing and its reader memory.
_LARGE = 1 << 28

# What ends code that is not Python's, from another thread.
_interrupts: list[Callable[[], None]] = []


def check(
    paths: Iterable[Path], root: Path, most_bytes: int = MOST_BYTES, *, beside: bool = True
) -> None:
    """Raises unless files, folders and patterns stand for regular files under `root`.

    What is missing, or closed to the reader, is left to whoever opens it.

    Args:
      paths: What is to be opened.
      root: The folder.
      most_bytes: How many bytes all of it may have.
      beside: Whether what is in the folders and beside the files is looked at, as
        `gather_evidence` does.
    """
    root = Path(os.path.realpath(root))
    found = [match for path in paths for match in _matches(path, root)]
    todo, named, seen, total = list(found), {*found}, set(), 0
    while todo:
        path = todo.pop()
        place = _place(path, root)
        if place in seen or not place.exists():
            continue
        seen.add(place)
        status = place.stat()
        total += status.st_size
        if total > most_bytes:
            raise UnreadableError(
                f"{root} holds more evidence than {most_bytes:,} bytes, as far as {path}; name "
                "each file of it yourself, if you trust it."
            )
        if status.st_size > max(_LARGE, 100 * 512 * status.st_blocks):
            raise UnreadableError(
                f"{path} has {status.st_size:,} bytes and hardly any on disk; it is no evidence, "
                "restore it."
            )
        if stat.S_ISDIR(status.st_mode) and beside:
            todo += _entries(place)
        elif not stat.S_ISREG(status.st_mode):
            raise UnreadableError(f"{path} is no regular file; give evidence in files.")
        elif beside and path in named:
            folders = {place.parent, Path(os.path.realpath(path.parent))}
            todo += [entry for folder in folders for entry in _entries(folder) if entry.is_file()]


def _place(path: Path, root: Path) -> Path:
    """Returns where a path leads."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(root):
        raise UnreadableError(
            f"{path} leads out of {root}; put it there, state a folder that holds all evidence as "
            "evidence_root, or name the file yourself."
        )
    return place


def _matches(path: Path, root: Path) -> list[Path]:
    """Returns the path, or what it matches as a pattern."""
    text = os.fspath(path)
    if not glob.has_magic(text) or path.exists():
        return [path]
    base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    _place(base, root)
    if ".." in path.parts[len(base.parts) :]:
        raise UnreadableError(f"{path} leads upwards from a pattern; name the files yourself.")
    # Patterns follow links, out of the folder and round in circles.
    for parent, folders, _ in os.walk(base) if "**" in path.parts else ():
        for link in (Path(parent, name) for name in folders if Path(parent, name).is_symlink()):
            raise UnreadableError(f"{link} is a link, which ** would follow; name files yourself.")
    return [Path(match) for match in glob.glob(text, recursive=True, include_hidden=True)]


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK) else []


class _OutOfTimeError(BaseException):
    """Passes whatever takes an error of the evidence for an answer."""


@contextlib.contextmanager
def limited_time(seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Ends what takes longer, waiting for a file included; in the main thread alone.

    Raises:
      UnreadableError: It took longer.
    """
    done, expired = threading.Event(), threading.Event()

    def stop(*unused: object) -> None:
        if not done.is_set():
            raise _OutOfTimeError

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):  # More than once: a query may follow the one that was ended.
            expired.set()
            signal.pthread_kill(main, signal.SIGALRM)
            for interrupt in tuple(_interrupts):
                interrupt()
            wait = 1.0

    main = threading.get_ident()
    before = signal.signal(signal.SIGALRM, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        done.set()
    except BaseException:
        done.set()
        if not expired.is_set():
            raise
        raise UnreadableError(
            f"The evidence took longer than {seconds:g} seconds; name each file of it yourself, if "
            "you trust it."
        ) from None
    finally:
        watcher.join()
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Says how `limited_time` ends the code in it."""
    _interrupts.append(interrupt)
    try:
        yield
    finally:
        _interrupts.remove(interrupt)
