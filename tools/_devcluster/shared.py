"""The directory that all nodes share, a file system of its own: read-only, full, slow or frozen.

It is mounted before the nodes start, so that each has it in its own mount namespace. A superblock
turns read-only only while no file is open for writing, and a run always has some open. So read-only
is a second, read-only mount on top, here and on each node: every path leads to it, and what was
open already can still be written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from _devcluster.errors import Fault
from _devcluster.loops import LoopFileSystem, run

_FILL = ".devcluster-fill"
# The remount is refused while a file that was opened after the first mount is written to.
_READ_ONLY = """
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  mount --bind "$1" "$1"
  if mount -o remount,bind,ro "$1"; then exit 0; fi
  umount --lazy "$1"
done
exit 1
"""


class SharedDirectory(LoopFileSystem):
    """The mount at a path, in this namespace and the nodes'."""

    def read_only(self, nodes: Iterable[int]) -> None:
        """Refuse writes, here and in the namespaces of the nodes' processes `nodes`, or nowhere."""
        nodes = tuple(nodes)
        try:
            for process in (None, *nodes):
                if self.layers(process) == 1:
                    run(*_within(process), "sh", "-euc", _READ_ONLY, "read-only", str(self.path))
        except Fault:
            self.writable(nodes)
            raise

    def writable(self, nodes: Iterable[int]) -> None:
        for process in (*nodes, None):
            while self.layers(process) > 1:  # 0 once the process has ended
                run(*_within(process), "umount", "--lazy", str(self.path))

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
        (self.path / _FILL).unlink(missing_ok=True)


def _within(process: int | None) -> list[str]:
    return [] if process is None else ["nsenter", f"--target={process}", "--mount", "--pid"]
