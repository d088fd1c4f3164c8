"""Writes pictures to files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from slurmllm.errors import StorageError


def write_picture(picture: Figure, path: Path, fix: str) -> None:
    """Write a PNG whole or not at all.

    Args:
        picture: The picture.
        path: Path of the file; its folder is created.
        fix: What to do if it cannot be written.

    Raises:
        StorageError: the file system refused.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".picture.", suffix=".png", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            picture.savefig(stream, format="png", pil_kwargs={"compress_level": 3})
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write the picture {path}: {error.strerror or error}; {fix}"
        ) from error
