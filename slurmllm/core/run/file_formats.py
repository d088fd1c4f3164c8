"""Formats of files that are not text, recognized by their first bytes, whatever their names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from slurmllm.core.run.error_patterns import read_rows
from slurmllm.core.run.safe_files import open_regular

HEAD_BYTES = 512  # of a file, enough for every format


def foreign_format(path: str | Path, head: bytes = b"", expected: str = "") -> str | None:
    """Return what a file is by its first bytes, and what to do with it where text is expected.

    None of text, of the `expected` format, and of what has no mark. Without `head`, it is read.
    """
    if isinstance(path, Path) and not head:
        with open_regular(path) as stream:
            head = stream.read(HEAD_BYTES)
    for row in _rows():
        if re.match(row["magic"].encode(), head) and row["name"] != expected:
            fix = row["fix"].format(
                path=path, stem=Path(path).with_suffix(""), folder=Path(path).parent
            )
            return f"{path} is {row['name']}; {fix}"
    return None


@cache
def _rows() -> list[dict[str, str]]:
    return read_rows(Path(__file__).with_suffix(".yaml"))
