"""Peak and limit of a worker's host memory, for backends that compute on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


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
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    status = {row[0]: int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}
    total, free = _machine()
    with suppress(OSError):
        ctypes.CDLL(None).malloc_trim(0)  # pages that glibc holds back would hide the next peak
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM
    return Memory(status["VmHWM:"], min(total // sharing, status["VmRSS:"] + free // sharing))


def count_oom_kills() -> int:
    """Return how many processes of this control group the kernel has ended for want of memory.

    Of the machine, where the group has no such count.
    """
    for path in (
        *(
            group / ("memory.events" if unified else "memory.oom_control")
            for group, unified in _memory_groups()
        ),
        _VMSTAT,
    ):
        with suppress(OSError):
            for line in path.read_text("ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _memory_groups() -> Iterator[tuple[Path, bool]]:
    """Yield this process's control groups that limit memory, and whether they are of version 2."""
    with suppress(OSError):
        for line in _OWN_CGROUP.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield _CGROUPS / path.strip("/"), True
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.strip("/"), False


def _machine() -> tuple[int, int]:
    """Return total and free memory of this machine, or of this process's control group."""
    memory = psutil.virtual_memory()
    total = memory.total
    free = memory.available
    for innermost, unified in _memory_groups():
        root = _CGROUPS if unified else _CGROUPS / "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        names = ("memory.max", "memory.current", "inactive_file") if unified else names
        for group in (innermost, *innermost.parents):
            if not group.is_relative_to(root):
                break
            # Absent at the root, "max" without a limit; a container may see none of them.
            with suppress(OSError, ValueError, KeyError):
                limit, used = (int((group / name).read_text("ascii")) for name in names[:2])
                lines = (group / "memory.stat").read_text("ascii").splitlines()
                used -= int(dict(line.split() for line in lines)[names[2]])
                total = min(total, limit)
                free = min(free, max(0, limit - used))
    return total, free
