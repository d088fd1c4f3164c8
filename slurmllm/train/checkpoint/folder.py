"""A checkpoint folder: manifest with checksums, verification, atomic creation and replacement."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.run.artifact_records import CheckpointFile, CheckpointManifest
from slurmllm.core.run.rundir import fsync_dir, storage_errors
from slurmllm.core.run.safe_files import open_regular

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress

MANIFEST = "manifest.json"


def fsync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def describe(directory: Path, name: str, sha256: str | None = None) -> CheckpointFile:
    """Return size and checksum of one file, which is read unless its `sha256` is given."""
    path = directory / name
    if sha256 is None:
        with open_regular(path) as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return CheckpointFile(path=name, bytes=path.stat().st_size, sha256=sha256)


def read_manifest(directory: Path) -> CheckpointManifest:
    """Raise a StorageError if the manifest is missing or damaged."""
    # The manifest is a save's last file: without it the folder is incomplete.
    if not (directory / MANIFEST).is_file():
        raise StorageError(f"{directory.name} has no {MANIFEST}: its save did not finish")
    return CheckpointManifest.load(directory / MANIFEST)


def write_manifest(
    folder: Path, started_at: float, described: Sequence[CheckpointFile] = (), **fields: Any
) -> CheckpointManifest:
    """Write the manifest of a folder begun at `started_at`, reading no file `described` before."""
    by_name = {file.path: file for file in described}
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    files = tuple(by_name.get(name) or describe(folder, name) for name in names)
    manifest = CheckpointManifest(
        **fields, saved_at=time.time(), save_s=time.time() - started_at, files=files
    )
    manifest.save(folder / MANIFEST)
    return manifest


def file_faults(
    directory: Path,
    files: Sequence[CheckpointFile],
    *,
    checksums: bool = True,
    on_progress: OnProgress = lambda _: None,
) -> list[str]:
    """Return one line for each file of another size or checksum.

    `on_progress` receives the bytes checked so far.
    """
    faults = []
    done_bytes = 0
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
            if size != file.bytes:  # a file of another size is not worth reading
                faults.append(f"{file.path} has {size} bytes instead of {file.bytes}")
            elif checksums and describe(directory, file.path).sha256 != file.sha256:
                faults.append(f"{file.path} does not match its checksum")
        except OSError as error:
            faults.append(f"{file.path} cannot be read: {error.strerror or error}")
        done_bytes += file.bytes
        on_progress(done_bytes)
    return faults


def require_absent(target: Path) -> None:
    """Raise a RunError if the target is a file or a folder that is not empty."""
    with storage_errors(f"cannot read {target}"):
        if not target.exists():
            return
        if not target.is_dir():
            raise RunError(f"{target} is a file; name a folder that does not exist yet")
        if any(target.iterdir()):
            raise RunError(
                f"{target} is not empty; name a folder that does not exist yet, or move its "
                "content away"
            )


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Create a folder under a temporary name and rename it when the block completes.

    The block must fsync its files. If it raises, nothing is left; SIGKILL leaves a `.<name>.….tmp`.
    Raises a RunError if the target exists, a StorageError if the file system failed a write.
    """
    require_absent(target)
    # A symbolic link to an empty folder stays a link: rename() would refuse to replace it.
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
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
        with contextlib.suppress(OSError):  # another process may have put something there
            for parent in parents:
                parent.rmdir()
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {target}: {error.strerror or error}; nothing is left of it: free "
                "space or fix the file system and try again"
            ) from error
        raise


def publish(temporary: Path, target: Path) -> None:
    """Rename a complete checkpoint to its final name durably, in place of an existing one."""
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # damaged or invalidated: the resume skipped it
        # rename() does not replace a folder that has content.
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    temporary.rename(target)
    fsync_dir(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
