"""How much memory a program can still have, and the refusal of what cannot fit into it.

Linux gives out memory that it does not have and kills the program when it is used, so whoever needs
gigabytes asks here first.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from bandmf_tf.errors import BandMFError

_ROOT = Path("/")  # Tests have a system of their own.


class NotEnoughMemoryError(BandMFError):
    """What was asked for does not fit into memory."""


def require_bytes(needed: int, what: str, way_out: str) -> None:
    """Raises NotEnoughMemoryError if so many more bytes cannot be had.

    Args:
      needed: Bytes that will be allocated at the same time.
      what: What needs them, a noun.
      way_out: What to do about it, an imperative.
    """
    available, limit = min(_limits(), default=(needed, ""))
    if needed > available:
        raise NotEnoughMemoryError(
            f"{what} needs {needed / 1e9:.2f} GB of memory and {max(available, 0) / 1e9:.2f} GB "
            f"can be had ({limit}); {way_out}."
        )


def _limits() -> Iterator[tuple[int, str]]:
    """Yields how many bytes each limit still allows for, and its name."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        free = _table(_ROOT / "proc/meminfo")["MemAvailable:"]
        yield 1024 * free, "what the machine has available"
    yield from _group_limits()
    with contextlib.suppress(OSError, ValueError, KeyError):
        used = _table(_ROOT / "proc/self/status")
        for name, kind, taken in (
            ("RLIMIT_AS", resource.RLIMIT_AS, used["VmSize:"]),
            ("RLIMIT_DATA", resource.RLIMIT_DATA, used["VmData:"]),
        ):
            soft, _ = resource.getrlimit(kind)
            if soft != resource.RLIM_INFINITY:
                yield soft - 1024 * taken, f"{name} of {soft / 1e9:.2f} GB"


def _group_limits() -> Iterator[tuple[int, str]]:
    """Yields the limits of the control groups around this process, of either version."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = _ROOT / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be that of the host, and the mount begins at the container.
        inside = mount / path.strip("/")
        for folder in {mount, inside, *(p for p in inside.parents if mount in p.parents)}:
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit, and no number.
                limit, used = (int((folder / name).read_text()) for name in names)
                kept = _table(folder / "memory.stat")
                reclaimable = kept.get("total_inactive_file", kept.get("inactive_file", 0))
                yield limit - used + reclaimable, f"memory limit of {limit / 1e9:.2f} GB"


def _table(path: Path) -> dict[str, int]:
    """Returns the lines `name number ..` of a file of the kernel."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
