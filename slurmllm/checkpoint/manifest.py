"""A checkpoint's manifest: its files with sizes and checksums, and their verification."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurmllm.errors import StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest

MANIFEST = "manifest.json"


def describe(directory: Path, name: str, sha256: str | None = None) -> CheckpointFile:
    """Returns size and checksum of one file, which is read unless its `sha256` is given."""
    path = directory / name
    if sha256 is None:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return CheckpointFile(path=name, bytes=path.stat().st_size, sha256=sha256)


def read_manifest(directory: Path) -> CheckpointManifest:
    """Raises a StorageError if the manifest is missing or damaged."""
    # The manifest is a save's last file: without it the folder is incomplete.
    if not (directory / MANIFEST).is_file():
        raise StorageError(f"{directory.name} has no {MANIFEST}: its save did not finish")
    return CheckpointManifest.load(directory / MANIFEST)


def file_faults(directory: Path, files: Sequence[CheckpointFile]) -> list[str]:
    """Verifies sizes, and checksums of files whose size is correct; returns one line per fault."""
    faults = []
    for file in files:
        fault = _size_fault(directory, file)
        try:
            if fault is None and describe(directory, file.path).sha256 != file.sha256:
                fault = f"{file.path} does not match its checksum"
        except OSError as error:
            fault = _unreadable(file, error)
        if fault is not None:
            faults.append(fault)
    return faults


def size_faults(directory: Path, files: Sequence[CheckpointFile]) -> list[str]:
    """Verifies sizes only; returns one line per fault."""
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
