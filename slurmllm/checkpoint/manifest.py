"""The list of a checkpoint's files with sizes and checksums, and whether they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from slurmllm.errors import StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest

MANIFEST = "manifest.json"


def describe(directory: Path, name: str) -> CheckpointFile:
    """Size and checksum of one file.

    Raises:
        OSError: it cannot be read.
    """
    path = directory / name
    with path.open("rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    return CheckpointFile(path=name, bytes=path.stat().st_size, sha256=checksum)


def read_manifest(directory: Path) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    if not (directory / MANIFEST).is_file():
        raise StorageError(f"{directory.name} has no {MANIFEST}: its save did not finish")
    return CheckpointManifest.load(directory / MANIFEST)


def faults(directory: Path, files: Sequence[CheckpointFile]) -> list[str]:
    """What is wrong with files of a checkpoint: sizes first, then checksums of those that fit."""
    found = []
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
            if size != file.bytes:
                found.append(f"{file.path} has {size} bytes instead of {file.bytes}")
            elif describe(directory, file.path).sha256 != file.sha256:
                found.append(f"{file.path} does not match its checksum")
        except OSError as error:
            found.append(f"{file.path} cannot be read: {error.strerror or error}")
    return found
