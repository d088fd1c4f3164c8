"""The directory that all nodes share, where it is a file system of its own: read-only, or full.

It is a tmpfs, mounted before the nodes start, so that each has it in its own mount namespace. A
superblock turns read-only only while no file is open for writing, and a run always has some open.
So read-only is a second, read-only mount on top, here and on each node: every path leads to it,
and what was open already can still be written.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from _devcluster.errors import Fault

_FILL = ".devcluster-fill"
_READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'


class SharedDirectory:
    """The mount at a path, in this namespace and the nodes'.

    Args:
        path: Where it is mounted, everywhere.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def mount(self, size_mb: int) -> None:
        """Make it, empty."""
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={size_mb}m,mode=0755"
        _run("mount", "-t", "tmpfs", "-o", options, "devcluster-shared", str(self.path))

    def unmount(self) -> None:
        """Remove it from this namespace, with what lies on top; the nodes' go with the nodes."""
        while self._layers(None):
            _run("umount", "--lazy", str(self.path))

    def read_only(self, nodes: Iterable[int]) -> None:
        """Refuse writes, here and in the namespaces of the nodes' processes `nodes`."""
        for process in (None, *nodes):
            if self._layers(process) == 1:
                _run(*_within(process), "sh", "-euc", _READ_ONLY, "read-only", str(self.path))

    def writable(self, nodes: Iterable[int]) -> None:
        """Undo `read_only`."""
        for process in (*nodes, None):
            while self._layers(process) > 1:
                _run(*_within(process), "umount", "--lazy", str(self.path))

    def fill(self) -> None:
        """Leave no byte free; again, where something has been freed since."""
        with (self.path / _FILL).open("ab") as stream:
            chunk = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
            while chunk >= os.sysconf("SC_PAGE_SIZE"):
                try:
                    os.posix_fallocate(stream.fileno(), os.fstat(stream.fileno()).st_size, chunk)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise Fault(f"cannot fill {self.path}: {error.strerror}") from error
                    chunk //= 2

    def free(self) -> None:
        """Undo `fill`."""
        (self.path / _FILL).unlink(missing_ok=True)

    def _layers(self, process: int | None) -> int:
        """How many mounts lie at the path in a process's namespace; None: here."""
        try:
            mounts = Path(f"/proc/{process or 'self'}/mounts").read_text().splitlines()
        except OSError:
            return 0
        return sum(line.split()[1] == str(self.path) for line in mounts)


def _within(process: int | None) -> list[str]:
    return [] if process is None else ["nsenter", f"--target={process}", "--mount", "--pid"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Fault(f"{' '.join(command)}: {done.stderr.strip()}")
