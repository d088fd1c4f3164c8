"""Folders that Hugging Face's `Dataset.save_to_disk` makes, read without the `datasets` package.

Such a folder holds Arrow stream files, named in their order by `state.json`; beside them may lie
`cache-*.arrow` files, which are no part of it. A folder with `dataset_dict.json` holds one such
folder a split; of a single split it stands for that.
"""

from __future__ import annotations

import glob
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurmllm.errors import DataError

STATE = "state.json"
SPLITS = "dataset_dict.json"
_INFO = "dataset_info.json"


def is_dataset(names: list[str]) -> bool:
    """Whether a folder with these file names may be a saved dataset, or several splits of one."""
    return STATE in names or SPLITS in names


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a saved dataset in their order; None where the folder is something else.

    Raises:
        DataError: the folder holds several splits, or does not hold what its state says.
    """
    if (folder / SPLITS).is_file():
        content = _load(folder / SPLITS)
        splits = content.get("splits") if isinstance(content, dict) else None
        if isinstance(splits, list) and len(splits) == 1:
            return _split_files(folder / str(splits[0]))
        if isinstance(splits, list) and splits:
            choices = " or ".join(str(folder / str(split)) for split in splits)
            raise DataError(
                f"{folder} holds a dataset of several splits; name the one to read: {choices}"
            )
    if not (folder / STATE).is_file():
        return None
    content = _load(folder / STATE)
    listed = content.get("_data_files") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        return None
    if content.get("_indices_data_files"):  # written by datasets 1: rows chosen by an index file
        raise DataError(
            f"{folder} keeps its rows in another order than its files do (`_indices_data_files` "
            f"in {STATE}); save it again with `dataset.flatten_indices().save_to_disk(...)`"
        )
    paths = [folder / str(entry.get("filename")) for entry in listed if isinstance(entry, dict)]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{folder / STATE} names {path.name}, which is not there; copy it too")
    return paths


def _split_files(split: Path) -> list[Path]:
    files = dataset_files(split)
    if files is None:
        raise DataError(
            f"{split.parent / SPLITS} names the split {split.name}, which is not there as "
            "`save_to_disk` leaves it; copy it too"
        )
    return files


def describes_dataset(path: Path) -> bool:
    """Whether a file is a saved dataset's own JSON, which is no text to train on."""
    if path.name not in (STATE, SPLITS, _INFO):
        return False
    try:
        return dataset_files(path.parent) is not None
    except DataError:
        return True


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError:
        return None  # some other file of that name


Format = Literal["text", "jsonl", "csv", "parquet", "arrow"]
FormatOption = Literal["auto", "text", "jsonl", "csv", "parquet", "arrow"]
Compression = Literal["gzip", "zstd", "bz2", "xz"]

ENDINGS: dict[str, Format] = {
    ".txt": "text",
    ".py": "text",
    ".rst": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
}


@dataclass(frozen=True)
class InputFile:
    """One file to read.

    Attributes:
        path: Where it is.
        name: What the corpus and the manifest call it: the path as the user wrote it.
        format: How it is coded.
        compression: How it is compressed, None for a plain file.
        size_bytes: Its size on disk.
        mtime_ns: When it was last changed, ns since 1970.
    """

    path: Path
    name: str
    format: Format
    compression: Compression | None
    size_bytes: int
    mtime_ns: int

    @property
    def tabs(self) -> bool:
        """Whether a CSV file separates its columns by tabs, as its ending says."""
        inner = Path(self.path.stem) if self.compression else self.path
        return inner.suffix.lower() == ".tsv"


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
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; write the text to a file first")
    classified = _classify(path, format)
    if classified is None:
        raise DataError(
            f"{path}: the ending does not say how the file is coded; {_known()}; "
            "name the coding with --format"
        )
    kind, compression = classified
    if kind == "parquet" and compression is not None:
        raise DataError(
            f"{path}: a Parquet file is read from its end and cannot be compressed as a whole; "
            "unpack it first"
        )
    # File names are bytes to the system; Arrow and JSON take only what is UTF-8.
    shown = (name or str(path)).encode("utf-8", "backslashreplace").decode("utf-8")
    return InputFile(path, shown, kind, compression, found.st_size, found.st_mtime_ns)


def find_inputs(
    arguments: Sequence[str],
    format: FormatOption = "auto",
    *,
    leave_out: Iterable[Path] = (),
    on_note: Callable[[str], None] = lambda note: None,
) -> list[InputFile]:
    """Expand files, folders and globs into the files to read, in a fixed order.

    Folders are read to any depth; hidden entries and links to folders are passed over, and with
    `auto` so are files of unknown endings. A folder in which a Hugging Face dataset was saved
    stands for the dataset's files. A file that comes up twice is read once, where it comes up
    first.

    Args:
        arguments: Files, folders and glob patterns (`**` crosses folders).
        format: How the files are coded.
        leave_out: Files and folders of the output, which a folder or a glob may well hold.
        on_note: Called with a line on files of unknown endings, if any are passed over.

    Raises:
        DataError: an argument that names nothing or the output, a link that leads nowhere, or a
            file that cannot be read as asked.
    """
    excluded = {path.resolve() for path in leave_out}
    unknown: list[Path] = []
    files: dict[Path, InputFile] = {}
    for argument in arguments:
        found = 0
        for path in _expand(argument):
            resolved = path.resolve()
            if resolved in excluded and str(path) == str(Path(argument)):
                raise DataError(
                    f"{argument}: input and output are the same file; choose another --out"
                )
            if resolved in excluded or not excluded.isdisjoint(resolved.parents):
                continue
            if _classify(path, format) is None and Path(argument).is_dir():
                unknown.append(path)
                continue
            found += 1
            if resolved not in files:
                files[resolved] = input_file(path, format)
        if not found:
            raise DataError(
                f"{argument}: no file to read there; {_known()}, and --format text takes any file"
            )
    if unknown:
        plural = "s of unknown endings" if len(unknown) > 1 else " of unknown ending"
        on_note(
            f"passed over {len(unknown):,} file{plural}, such as {min(unknown)}; "
            "--format names their coding"
        )
    return list(files.values())


def read_list(path: str) -> list[str]:
    """The paths of a list: one a line, without blank lines and `#` comments.

    Args:
        path: A text file; `-` is the standard input.

    Raises:
        DataError: the list cannot be read, or names nothing.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the list {path}: {error.strerror or error}") from error
    names = [os.fsdecode(line.strip()) for line in data.splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    if not names:
        raise DataError(f"--files-from {path} names no file; write one path a line")
    return names


def _known() -> str:
    return (
        f"known endings are {' '.join(ENDINGS)} (also with {', '.join(list(COMPRESSIONS)[:-1])} "
        f"or {list(COMPRESSIONS)[-1]})"
    )


def _classify(path: Path, format: FormatOption) -> tuple[Format, Compression | None] | None:
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = Path(path.stem) if compression else path
    if format != "auto":
        return format, compression
    kind = ENDINGS.get(inner.suffix.lower())
    return None if kind is None else (kind, compression)


def _expand(argument: str) -> Iterator[Path]:
    path = Path(argument)
    if path.is_dir():
        yield from _walk(path)
    elif path.exists() or not glob.has_magic(argument):
        yield path
    else:
        # Path.glob takes no absolute pattern.
        for match in sorted(glob.glob(argument, recursive=True)):  # noqa: PTH207
            if _is_file(Path(match)) and not _describes_others(Path(match)):
                yield Path(match)


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        # os.walk passes over folders it cannot list, and a part of the corpus would be missing.
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    # A file, or the files of a dataset in the dataset's own order; sorted by where each lies.
    found: list[tuple[str, list[Path]]] = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        if is_dataset(names) and (listed := dataset_files(Path(root))) is not None:
            folders.clear()
            found.append((root, listed))
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = os.path.join(root, name)  # noqa: PTH118
                found.append((path, [Path(path)]))
    for _, paths in sorted(found):
        for candidate in paths:
            if _is_file(candidate) and not _describes_others(candidate):
                yield candidate


def _is_file(path: Path) -> bool:
    """Whether a path is a regular file, or a link to one.

    Raises:
        DataError: a link that leads nowhere; a part of the corpus would be missing.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if path.is_symlink():
            raise DataError(
                f"{path} is a link to {path.readlink()}, which cannot be read: {error.strerror}; "
                "mend the link or remove it"
            ) from error
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _describes_others(path: Path) -> bool:
    """Whether a file is JSON about other files: a corpus's manifest, a dataset's state."""
    return path.name.endswith((".arrow.json", ".bin.json")) or describes_dataset(path)
