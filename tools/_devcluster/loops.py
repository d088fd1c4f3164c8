"""A file system of its own in a file in memory, which can be slow or frozen.

An ext4 on a loop device, not a tmpfs: the kernel throttles block devices only, and freezes only
file systems that have one.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from _devcluster.errors import Fault
from _devcluster.groups import Groups

IMAGES = "/dev/shm"  # noqa: S108 - of root only: unpredictable names, made for this process


class LoopFileSystem:
    """The file system that is mounted at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, size_mb: int) -> None:
        """Make it, empty; it is gone when its last mount is. A tmpfs where there are no loops."""
        if not Path("/dev/loop-control").exists():
            options = f"size={size_mb}m,mode=0755"
            run("mount", "-t", "tmpfs", "-o", options, "devcluster", self.path)
            return
        with tempfile.NamedTemporaryFile(dir=IMAGES, prefix="devcluster-") as image:
            image.truncate(size_mb << 20)
            run(
                "mkfs.ext4", "-q", "-F", "-m0", "-O^has_journal", "-Elazy_itable_init=1", image.name
            )
            run("mount", "-o", "loop", image.name, self.path)  # the mount keeps it
        (self.path / "lost+found").rmdir()

    def unmount(self) -> None:
        """Remove it from this namespace, with what is on top; the nodes' go with the nodes."""
        while self.layers(None):
            run("umount", "--lazy", self.path)

    def slow(self, bytes_per_s: int, groups: Groups) -> None:
        """Let all processes together read and write only so many bytes a second; 0: any number.

        Raises a Fault if it is not on a loop device, or this kernel cannot throttle.
        """
        groups.throttle(self._device(), bytes_per_s)

    def freeze(self) -> None:
        """Let every write wait, without an error, until `thaw`."""
        self._device()
        run("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """Undo `freeze`; without a frozen one, nothing happens."""
        subprocess.run(["fsfreeze", "--unfreeze", self.path], capture_output=True)

    def layers(self, process: int | None) -> int:
        """How many mounts are at the path in a process's namespace; None: here."""
        try:
            mounts = Path(f"/proc/{process or 'self'}/mounts").read_text().splitlines()
        except OSError:
            return 0
        return sum(line.split()[1] == str(self.path) for line in mounts)

    def _device(self) -> str:
        number = self.path.stat().st_dev
        if os.major(number) != 7:  # of loop devices, in the kernel's devices.txt
            raise Fault(f"{self.path} is not on a loop device of its own", 2)
        return f"{os.major(number)}:{os.minor(number)}"


def run(*command: str | Path, text: str = "") -> None:
    """Run a program with a text as its input; raises a Fault if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise Fault(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
