"""Formats of files that are not text, recognized by their first bytes, whatever their names."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.run.error_patterns import read_rows
from slurmllm.core.run.safe_files import open_regular

HEAD_BYTES = 512  # of a file, enough for every format


class FileFormat(NamedTuple):
    """A row of file_formats.yaml."""

    name: str
    magic: str
    fix: str
    built: bool = False

    def message(self, path: str) -> str:
        """Return what a file is, and what to do where text is expected."""
        suffix = Path(path).suffix
        stem = shlex.quote(path.removesuffix(suffix))
        fix = self.fix.format(path=shlex.quote(path), stem=stem, suffix=suffix)
        return f"{path} is {self.name}, by its first bytes; {fix}"


def read_head(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read(HEAD_BYTES)


def detect_format(head: bytes) -> FileFormat | None:
    """Return the format that a file's first bytes name; None of text, and of what has no mark."""
    matches = (row for pattern, row in _formats() if pattern.match(head))
    return next(matches, None)


@cache
def _formats() -> list[tuple[re.Pattern[bytes], FileFormat]]:
    rows = [FileFormat(**row) for row in read_rows(Path(__file__).with_suffix(".yaml"))]
    return [(re.compile(row.magic.encode()), row) for row in rows]
