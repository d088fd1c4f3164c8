"""A folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from slurmllm.errors import RunError, StorageError
from slurmllm.rundir import fsync_dir


def require_absent(target: Path) -> None:
    """Raises a RunError if the target is a file or a folder that is not empty."""
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise RunError(f"{target} is a file; name a folder that does not exist yet")
        names = sorted(entry.name for entry in target.iterdir())
    except OSError as error:
        raise StorageError(f"cannot read {target}: {error.strerror or error}") from error
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RunError(
            f"{target} is not empty ({', '.join(names[:3])}{more}); name a folder that does not "
            "exist yet, or move its content away"
        )


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Creates a folder under a temporary name and renames it when the block completes.

    If the block raises, the temporary folder and the parents created for it are removed. A process
    killed by SIGKILL leaves the temporary folder, `.<name>.<random>.tmp`.

    Yields:
        The temporary folder. The block must fsync its files; folders are fsynced here.

    Raises:
        RunError: The target exists already.
        StorageError: The file system failed a write.
    """
    require_absent(target)
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    parents = [parent for parent in target.parents if not parent.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for folder, _, _ in os.walk(temporary):
            fsync_dir(Path(folder))
        temporary.rename(target)  # replaces an empty folder, and no other
        fsync_dir(target.parent)
    except BaseException as error:  # KeyboardInterrupt too: no half folder may remain
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in parents:
                parent.rmdir()
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {target}: {error.strerror or error}; nothing is left of it: free "
                "space or fix the file system and try again"
            ) from error
        raise
