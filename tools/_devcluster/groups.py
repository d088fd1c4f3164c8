"""The control groups of the nodes: what each may use of memory, and all of a block device.

Version 1 and version 2 of the kernel's interface; without either, the nodes have no groups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from _devcluster.errors import Fault

CGROUPS = Path("/sys/fs/cgroup")
_V1 = CGROUPS / "memory"
_V1_THROTTLE = CGROUPS / "blkio" / "blkio.throttle.{}_bps_device"


class Groups:
    """The groups of the nodes of a cluster, by the cluster's number on this machine."""

    def __init__(self, number: int) -> None:
        self._is_v2 = (CGROUPS / "cgroup.controllers").exists()
        self.path = (CGROUPS if self._is_v2 else _V1) / f"devcluster-{number}"

    def make(self, node: str) -> str:
        """Make a node's group; returns the file that its first process writes itself to."""
        group = self.path / node
        try:
            if self._is_v2:
                (CGROUPS / "cgroup.subtree_control").write_text("+memory +io")
                self.path.mkdir(exist_ok=True)
                (self.path / "cgroup.subtree_control").write_text("+memory +io")
            group.mkdir(parents=True, exist_ok=True)
            self.limit_memory(node, None)
        except OSError:  # not ours to make
            return ""
        return str(group / "cgroup.procs")

    def remove(self) -> None:
        """Remove the groups of all nodes, which have ended."""
        with contextlib.suppress(OSError):
            for group in [*(entry for entry in self.path.iterdir() if entry.is_dir()), self.path]:
                group.rmdir()

    def limit_memory(self, node: str, more_bytes: int | None) -> None:
        """Let a node use only so much more memory than now; None: any amount.

        Raises a Fault if the node has no group.
        """
        group = self.path / node
        limit = group / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")
        if not limit.exists():
            raise Fault(f"this machine has no cgroups for memory: no {limit}", 2)
        if more_bytes is None:
            limit.write_text("max" if self._is_v2 else "-1")
            return
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        anonymous = int(held["anon" if self._is_v2 else "total_rss"])
        shared = int(held["shmem" if self._is_v2 else "total_shmem"])
        limit.write_text(str(anonymous + shared + more_bytes))

    def throttle(self, device: str, bytes_per_s: int) -> None:
        """Let a block device read and write only so many bytes a second; 0: any number.

        Raises a Fault if this kernel cannot.
        """
        if self._is_v2:
            rate = bytes_per_s or "max"
            limits = [(self.path / "io.max", f"{device} rbps={rate} wbps={rate}")]
        else:
            # The root group holds the kernel's own writers too: what is buffered is slow as well.
            files = [Path(str(_V1_THROTTLE).format(way)) for way in ("read", "write")]
            limits = [(file, f"{device} {bytes_per_s}") for file in files]
        for file, text in limits:
            if not file.exists():
                raise Fault(f"this machine has no cgroups for block devices: no {file}", 2)
            file.write_text(text + "\n")
