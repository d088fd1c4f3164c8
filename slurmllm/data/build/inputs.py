"""Which files a build reads, in which order, and how each is coded.

The order is a function of the arguments and the file names alone: arguments as given, the
matches of a glob and the files of a folder sorted by path. Reading order is corpus order.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmllm.errors import DataError

Format = Literal["text", "jsonl", "parquet", "arrow"]
FormatOption = Literal["auto", "text", "jsonl", "parquet"]
TextBy = Literal["paragraph", "document", "line"]
Compression = Literal["gzip", "zstd"]

ENDINGS: dict[str, Format] = {
    ".txt": "text",
    ".py": "text",
    ".rst": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class InputFile:
    """One file to read.

    Attributes:
        path: Where it is.
        name: What the corpus and the manifest call it: the path as the user wrote it.
        format: How it is coded.
        compression: How it is compressed, None for a plain file.
        size_bytes: Its size on disk.
    """

    path: Path
    name: str
    format: Format
    compression: Compression | None
    size_bytes: int


def input_file(path: Path, format: FormatOption = "auto", name: str | None = None) -> InputFile:
    """Describe one file.

    Args:
        path: The file.
        format: How it is coded; `auto` reads it off the ending.
        name: What to call it in the corpus; the path where left out.

    Raises:
        DataError: no such file, or an ending that says nothing.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; write the text to a file first")
    found = _classify(path, format)
    if found is None:
        raise DataError(
            f"{path}: the ending does not say how the file is coded; known endings are "
            f"{' '.join(ENDINGS)}, also with {' or '.join(COMPRESSIONS)}; "
            "name the coding with --format"
        )
    kind, compression = found
    if kind == "parquet" and compression is not None:
        raise DataError(
            f"{path}: a Parquet file is read from its end and cannot be compressed as a whole; "
            "unpack it first"
        )
    # File names are bytes to the system; Arrow and JSON take only what is UTF-8.
    shown = (name or str(path)).encode("utf-8", "backslashreplace").decode("utf-8")
    return InputFile(path, shown, kind, compression, size)


def find_inputs(
    arguments: Sequence[str],
    format: FormatOption = "auto",
    *,
    arrow: bool = False,
    leave_out: Iterable[Path] = (),
) -> list[InputFile]:
    """Expand files, folders and globs into the files to read, in a fixed order.

    Folders are read to any depth; hidden entries and links to folders are passed over, and with
    `auto` so are files of unknown endings. A file that comes up twice is read once, where it
    comes up first.

    Args:
        arguments: Files, folders and glob patterns (`**` crosses folders).
        format: How the files are coded.
        arrow: Whether Arrow corpora (`.arrow`) are inputs too.
        leave_out: Files of the output, which a folder or a glob may well hold.

    Raises:
        DataError: an argument that names nothing, or a file that cannot be read as asked.
    """
    excluded = {path.resolve() for path in leave_out}
    files: dict[Path, InputFile] = {}
    for argument in arguments:
        found = 0
        for path in _expand(argument, format, arrow):
            resolved = path.resolve()
            if resolved in excluded:
                continue
            found += 1
            if resolved not in files:
                corpus = arrow and path.suffix == ".arrow"
                files[resolved] = _arrow_file(path) if corpus else input_file(path, format)
        if not found:
            raise DataError(
                f"{argument}: no file to read there; known endings are {' '.join(ENDINGS)} "
                f"(also with {' or '.join(COMPRESSIONS)}), and --format text takes any file"
            )
    return list(files.values())


def _arrow_file(path: Path) -> InputFile:
    size = path.stat().st_size if path.is_file() else 0  # Corpus says what is wrong with it
    return InputFile(path, str(path), "arrow", None, size)


def _classify(path: Path, format: FormatOption) -> tuple[Format, Compression | None] | None:
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = Path(path.stem) if compression else path
    if format != "auto":
        return format, compression
    kind = ENDINGS.get(inner.suffix.lower())
    return None if kind is None else (kind, compression)


def _expand(argument: str, format: FormatOption, arrow: bool) -> Iterator[Path]:
    path = Path(argument)
    if path.is_dir():
        yield from _walk(path, format, arrow)
    elif path.exists() or not glob.has_magic(argument):
        yield path
    else:
        # Path.glob takes no absolute pattern.
        for match in sorted(glob.glob(argument, recursive=True)):  # noqa: PTH207
            if Path(match).is_file() and not _is_manifest(Path(match)):
                yield Path(match)


def _walk(folder: Path, format: FormatOption, arrow: bool) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        # os.walk passes over folders it cannot list, and a part of the corpus would be missing.
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    paths: list[str] = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(root, name) for name in names if not name.startswith(".")]  # noqa: PTH118
    for path in map(Path, sorted(paths)):
        known = _classify(path, format) is not None or (arrow and path.suffix == ".arrow")
        if known and not _is_manifest(path) and path.is_file():
            yield path


def _is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a corpus, which is JSON but no text to train on."""
    return path.name.endswith(".arrow.json")
