"""How busy the machine was with other work while something was measured.

The load average decays over minutes; the CPU seconds of all processes but one's own do not.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

# Figures taken beside more than this many busy cores of others are marked, and so are those at a
# load average above this, part of which may be what is measured.
BUSY, LOADED = 0.5, 1.5


class OtherWork:
    """Counts the cores that others kept busy since it was made."""

    def __init__(self) -> None:
        self._wall, self._others = time.monotonic(), _others()

    def cores(self) -> float:
        """Returns how many cores other processes used, on average."""
        return max(0.0, _others() - self._others) / max(time.monotonic() - self._wall, 1e-9)

    def mark(self) -> str:
        """Returns the load in words, with a warning where figures are not those of idle cores."""
        cores, average = self.cores(), os.getloadavg()[0]
        text = f"load {average:.1f}, others on {cores:.1f} cores"
        if cores > BUSY:
            return f"{text} (BUSY: not the figures of an idle machine)"
        return f"{text} (LOAD above {LOADED:g})" if average > LOADED else text


def _others() -> float:
    """Returns the CPU seconds of all processes but this one and its children, ended or not."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, first)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It has just ended.
            spent = child.cpu_times()
            own += spent.user + spent.system + spent.children_user + spent.children_system
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own
