"""Copies of small shared files on the node's own disk, as `staging.node` makes them.

A copy is named by the path, size and time of its original: an original that was changed since has
no copy, and is read itself. What workers compute from larger files is kept there in the same way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

STAGED_INPUTS = "SLURMLLM_STAGED_INPUTS"  # the folder of the copies


def local_copy(path: Path) -> Path:
    """Return the copy of a file on this node's own disk, or the file itself if there is none."""
    folder = os.environ.get(STAGED_INPUTS)
    if folder is None:
        return path
    try:
        copy = Path(folder) / copy_name(path)
    except OSError:
        return path  # whoever opens it reports the reason
    return copy if copy.is_file() else path


def once_a_node(paths: Sequence[Path], identity: str, compute: Callable[[], str]) -> str:
    """Return a text that depends on files, which the first worker of a node computes for all.

    Args:
        identity: Distinguishes what is computed from the same files.
    """
    folder = os.environ.get(STAGED_INPUTS)
    if folder is None:
        return compute()
    try:
        names = "\0".join([identity, *map(copy_name, paths)])
        name = hashlib.sha256(names.encode()).hexdigest()[:32]
        with (Path(folder) / f"{name}.txt").open("a+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # the others wait for the first one
            stream.seek(0)
            text = stream.read()
            if not text:
                text = compute()
                stream.write(text)
            return text
    except OSError:  # a full disk, or no such file: reported by whoever reads it
        return compute()


def copy_name(path: Path) -> str:
    """Return the name of a file's copy; raises an OSError if there is no such file."""
    info = path.stat()
    identity = f"{path.absolute()}\0{info.st_size}\0{info.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]
