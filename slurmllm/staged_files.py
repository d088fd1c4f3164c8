"""Copies of small shared files on the node's own disk, as `staging.inputs` makes them.

A copy is named by the path, size and time of its original: an original that was changed since has
no copy, and is read itself.
"""

from __future__ import annotations

import hashlib
import os
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


def copy_name(path: Path) -> str:
    """The name of a file's copy; raises an OSError if there is no such file."""
    info = path.stat()
    identity = f"{path.absolute()}\0{info.st_size}\0{info.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]
