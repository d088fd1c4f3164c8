"""Peak and limit of a worker's host memory, for backends that compute on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMINFO, _OWN_CGROUP = Path("/proc/meminfo"), Path("/proc/self/cgroup")
_CGROUPS, _VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/vmstat")


class Memory(NamedTuple):
    """A worker's memory, of its device, or of the host if it computes on the CPU.

    Attributes:
        peak_bytes: The maximum so far.
        limit_bytes: What it may use: its own and its share of what is free.
    """

    peak_bytes: int
    limit_bytes: int


def host_memory(sharing: int) -> Memory:
    """Return this process's resident set and its share of the machine; resets the peak.

    Args:
        sharing: Workers that share the machine, this one included.
    """
    status = _table(_STATUS)
    peak, now = status["VmHWM"], status["VmRSS"]
    total, free = _machine()
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).malloc_trim(0)  # pages that glibc holds back would hide the next peak
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5", encoding="ascii")  # proc(5): resets VmHWM
    return Memory(peak, min(total // sharing, now + free // sharing))


def free_memory() -> int:
    """Return the bytes that this process may still take."""
    return _machine()[1]


def count_oom_kills() -> int:
    """Return how many processes of this control group the kernel has ended for want of memory.

    Of the machine, where the group has no such count.
    """
    counts = [group / name for group, name in _memory_groups("memory.events", "memory.oom_control")]
    for path in (*counts, _VMSTAT):
        with contextlib.suppress(OSError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _memory_groups(unified: str, older: str) -> Iterator[tuple[Path, str]]:
    """Yield this process's control groups that limit memory, each with its version's name."""
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield _CGROUPS / path.strip("/"), unified
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.strip("/"), older


def _machine() -> tuple[int, int]:
    """Return total and free memory of this machine, or of this process's control group."""
    memory = _table(_MEMINFO)
    total, free = memory["MemTotal"], memory["MemAvailable"]
    for limit, used in _cgroup_limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group around this process."""
    for line in _OWN_CGROUP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names, reclaimable = _CGROUPS, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, reclaimable = _CGROUPS / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        innermost = root / path.strip("/")
        for group in (innermost, *innermost.parents):
            if not group.is_relative_to(root):
                break
            # Absent at the root, "max" without a limit; a container may see none of them.
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit, used = (int((group / name).read_text(encoding="ascii")) for name in names)
                lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
                stat = dict(line.split() for line in lines)
                yield limit, used - int(stat[reclaimable])


def _table(path: Path) -> dict[str, int]:
    """Return name → bytes, of the lines of a /proc file that count kB."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}
