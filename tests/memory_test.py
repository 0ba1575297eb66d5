"""What cannot fit is refused by the lowest of all limits, whoever set it."""

from __future__ import annotations

import re
import resource

import pytest

from bandmf_tf import _memory

GB = 10**9
PLENTY = f"MemTotal: 9 kB\nMemAvailable: {64 * GB // 1024} kB\n"


@pytest.fixture(name="system")
def _system(tmp_path, monkeypatch):
    """Returns what writes the kernel's files."""
    monkeypatch.setattr(_memory, "_ROOT", tmp_path)

    def write(**files):
        for name, text in {"proc/meminfo": PLENTY, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def _v2(folder, limit, used, cached=0):
    files = {"memory.max": limit, "memory.current": used, "memory.stat": f"inactive_file {cached}"}
    return {f"sys/fs/cgroup/{folder}{name}": str(text) for name, text in files.items()}


def _v1(folder, limit, used, cached=0):
    return {
        f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": str(limit),
        f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": str(used),
        f"sys/fs/cgroup/memory/{folder}memory.stat": f"cache 7\ntotal_inactive_file {cached}",
    }


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        ({"proc/meminfo": f"MemAvailable: {3 * GB // 1024} kB"}, 3, "what the machine has"),
        ({"proc/self/cgroup": "0::/\n", **_v2("", 8 * GB, 5 * GB)}, 3, "limit of 8.00 GB"),
        # Cached files make room when they have to.
        ({"proc/self/cgroup": "0::/\n", **_v2("", 8 * GB, 5 * GB, GB)}, 4, "limit of 8.00 GB"),
        # The parent's limit holds for its children; "max" is none.
        (
            {
                "proc/self/cgroup": "0::/pod/program\n",
                **_v2("pod/program/", "max", GB),
                **_v2("pod/", 4 * GB, 2 * GB),
            },
            2,
            "limit of 4.00 GB",
        ),
        # In a container the path is that of the host, and the files are at the top.
        ({"proc/self/cgroup": "0::/kubepods/x\n", **_v2("", 8 * GB, 7 * GB)}, 1, "limit of 8.00"),
        (
            {"proc/self/cgroup": "4:memory:/x\n0::/\n", **_v1("x/", 6 * GB, 4 * GB, GB)},
            3,
            "limit of 6.00 GB",
        ),
        ({"proc/self/cgroup": "0::/\n", **_v2("", GB, 2 * GB)}, 0, "limit of 1.00 GB"),
    ],
)
def test_the_lowest_limit_decides(system, files, available, limit):
    system(**files)
    if available:
        _memory.require_bytes(int((available - 0.01) * GB), "It", "buy more")
    with pytest.raises(
        _memory.NotEnoughMemoryError,
        match=rf"^It needs {available + 0.01:.2f} GB of memory and {available:.2f} GB can be had "
        rf"\(.*{re.escape(limit)}.*\); buy more\.$",
    ):
        _memory.require_bytes(int((available + 0.01) * GB), "It", "buy more")


def test_a_limit_of_the_process_counts(system, monkeypatch):
    system(**{"proc/self/status": f"VmSize: {GB // 1024} kB\nVmData: {GB // 2048} kB\n"})
    found = {resource.RLIMIT_AS: 5 * GB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (found[kind], -1))
    _memory.require_bytes(3 * GB, "It", "buy more")
    with pytest.raises(
        _memory.NotEnoughMemoryError, match=r"4.00 GB can be had \(RLIMIT_AS of 5.00 GB\)"
    ):
        _memory.require_bytes(5 * GB, "It", "buy more")


@pytest.mark.parametrize("text", ["", "nonsense", "MemAvailable: many kB"])
def test_a_system_that_tells_nothing_refuses_nothing(system, text):
    system(**{"proc/meminfo": text, "proc/self/cgroup": "0::/\n"})
    assert list(_memory._limits()) == []
    _memory.require_bytes(10**18, "It", "buy more")
