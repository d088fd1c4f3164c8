"""Another Slurm than the machine's, in a root directory that debootstrap has made.

A command is run there by chroot, in a mount namespace of its own: what is mounted ends with it and
with the daemons that it started. The machine's `/tmp`, this repository and the Python interpreter
with its packages have the same paths inside.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from _devcluster.errors import Fault

INSIDE = "SLURMLLM_DEVCLUSTER_ROOT"  # the root that a process is in
REPOSITORY = Path(__file__).resolve().parents[2]

# The root must be a mount point itself: `unshare` changes the propagation of what is at `/`.
ENTER = """\
root=$1 folder=$2 count=$3
shift 3
mount --bind "$root" "$root"
while [ "$count" -gt 0 ]; do
  mkdir -p "$root$1"
  mount --rbind "$1" "$root$1"
  count=$((count - 1))
  shift
done
for file in /etc/hosts /etc/resolv.conf; do
  touch "$root$file"
  mount --bind "$file" "$root$file"
done
exec chroot "$root" sh -euc 'cd "$0"; exec "$@"' "$folder" "$@"
"""


def enter(root: Path, command: list[str], shown: tuple[Path, ...] = ()) -> NoReturn:
    """Replace this process by a command in a root; `shown` are further folders to see there."""
    if not (root / "bin/sh").exists():
        raise Fault(f"--root {root} holds no system; `debootstrap SUITE {root}` makes one", 2)
    folders = [*map(Path, ("/proc", "/sys", "/dev", "/tmp")), REPOSITORY, *shown]  # noqa: S108
    folders += map(Path, (sys.base_prefix, sys.prefix, *(path for path in sys.path if path)))
    binds: list[str] = []
    for folder in sorted({folder.absolute() for folder in folders if folder.is_dir()}):
        # What is in a folder that is shown already, is shown with it.
        if not any(folder.is_relative_to(other) for other in binds):
            binds.append(str(folder))
    script = ["sh", "-euc", ENTER, "enter", str(root), str(Path.cwd()), str(len(binds)), *binds]
    environment = {**os.environ, INSIDE: str(root)}
    arguments = ["unshare", "--mount", *script, *command]
    os.execvpe("unshare", arguments, environment)  # noqa: S606 (no shell)
