"""The list of a checkpoint's files with sizes and checksums, and whether they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurmllm.errors import StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest

MANIFEST = "manifest.json"


def describe(directory: Path, name: str, sha256: str | None = None) -> CheckpointFile:
    """Size and checksum of one file.

    Args:
        directory: The checkpoint's.
        name: The file's.
        sha256: Its checksum, where it is known already; else the file is read.

    Raises:
        OSError: it cannot be read.
    """
    path = directory / name
    if sha256 is None:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return CheckpointFile(path=name, bytes=path.stat().st_size, sha256=sha256)


def read_manifest(directory: Path) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    if not (directory / MANIFEST).is_file():
        raise StorageError(f"{directory.name} has no {MANIFEST}: its save did not finish")
    return CheckpointManifest.load(directory / MANIFEST)


def file_faults(directory: Path, files: Sequence[CheckpointFile]) -> list[str]:
    """What is wrong with files of a checkpoint: sizes first, then checksums of those that fit."""
    found = []
    for file in files:
        fault = _size_fault(directory, file)
        try:
            if fault is None and describe(directory, file.path).sha256 != file.sha256:
                fault = f"{file.path} does not match its checksum"
        except OSError as error:
            fault = _unreadable(file, error)
        if fault is not None:
            found.append(fault)
    return found


def size_faults(directory: Path, files: Sequence[CheckpointFile]) -> list[str]:
    """What is wrong with files of a checkpoint, by their sizes alone."""
    return [fault for file in files if (fault := _size_fault(directory, file)) is not None]


def _size_fault(directory: Path, file: CheckpointFile) -> str | None:
    try:
        size = (directory / file.path).stat().st_size
    except OSError as error:
        return _unreadable(file, error)
    if size != file.bytes:
        return f"{file.path} has {size} bytes instead of {file.bytes}"
    return None


def _unreadable(file: CheckpointFile, error: OSError) -> str:
    return f"{file.path} cannot be read: {error.strerror or error}"
