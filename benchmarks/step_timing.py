"""CPU time and memory of training steps, for `keras_step.py` and, in their environments, its peers.

Peers run as scripts of this folder without `bandmf_tf`, so this file needs Python alone.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

Step = Callable[[], object]


def measure(make_step: Callable[[str], Step], kind: str, repetitions: int) -> dict[str, float]:
    """Measures one kind of step in this process: beside the plain one, or alone for memory.

    Args:
      make_step: Returns a step of a kind, already compiled; "plain" is one of the kinds.
      kind: The kind, or the kind and "_alone" for memory.
      repetitions: How many steps to take.
    """
    before = _peak_gib()
    if kind.endswith("_alone"):
        step = make_step(kind.removesuffix("_alone"))
        times = [_cpu_seconds(step) for _ in range(repetitions)]
        peak = _peak_gib()
        return {"peak_gib": peak, "step_gib": peak - before, "plain": statistics.median(times)}
    plain, private = make_step("plain"), make_step(kind)
    pairs = [(_cpu_seconds(plain), _cpu_seconds(private)) for _ in range(repetitions + 1)]
    # Means: noise is made for several steps at once. The first pair warms up.
    of_plain, of_private = (statistics.fmean(column[1:]) for column in zip(*pairs, strict=True))
    return {"plain": of_plain, "private": of_private}


def _cpu_seconds(step: Step) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
