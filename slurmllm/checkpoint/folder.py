"""A folder made whole or not at all."""

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
    """Raise a RunError where there is anything that a new folder would replace."""
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise RunError(f"{target} is a file; name a folder that is not there yet")
        held = sorted(entry.name for entry in target.iterdir())
    except OSError as error:
        raise StorageError(f"cannot look at {target}: {error.strerror or error}") from error
    if held:
        more = f" and {len(held) - 3} more" if len(held) > 3 else ""
        raise RunError(
            f"{target} is not empty ({', '.join(held[:3])}{more}); name a folder that is not there "
            "yet, or move what is in it away"
        )


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Make a folder under a temporary name and give it its own when the block is done.

    Whatever ends the block early takes the temporary folder with it, and the parents that were
    made for it; a process killed outright leaves the temporary folder, `.<name>.<word>.tmp`.

    Yields:
        Where to write; files are to be fsynced, folders are here.

    Raises:
        RunError: there is something at the target already.
        StorageError: the file system refused a write.
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
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in parents:
                parent.rmdir()
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {target}: {error.strerror or error}; nothing is left of it: free "
                "space or mend the file system and try again"
            ) from error
        raise
