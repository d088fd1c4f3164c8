"""Input files: found from files, folders and globs, and classified by their endings."""

from __future__ import annotations

import glob
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from slurmllm.core.config.variables import hide_passwords
from slurmllm.core.display.progress import OnNote
from slurmllm.core.errors import DataError
from slurmllm.core.run.file_formats import HEAD_BYTES, foreign_format
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.data.corpus.addresses import open_input, paths_of, state_of
from slurmllm.data.corpus.splits import DEFAULT, list_some, missing_shards, select_data
from slurmllm.data.sources.dataset_folder import (
    dataset_files,
    dataset_splits,
    is_dataset,
)

if TYPE_CHECKING:
    from upath import UPath

    from slurmllm.data.corpus.addresses import AnyPath

P = TypeVar("P", bound="AnyPath")
Format = Literal["text", "jsonl", "csv", "parquet", "arrow"]
FormatOption = Literal["auto", "text", "jsonl", "csv", "parquet", "arrow"]
Compression = Literal["gzip", "zstd", "bz2", "xz"]

_ENDINGS: dict[Format, str] = {
    "text": ".txt .py .rst .md",
    "jsonl": ".jsonl .json .ndjson",
    "csv": ".csv .tsv",
    "parquet": ".parquet",
    "arrow": ".arrow .feather",
}
ENDINGS = {ending: format for format, endings in _ENDINGS.items() for ending in endings.split()}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_KNOWN = f"known endings are {' '.join(ENDINGS)} (also with .gz, .zst, .bz2 or .xz)"


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    path: AnyPath
    name: str  # in corpus and manifest: the path as the user wrote it, or the address
    format: Format
    compression: Compression | None
    size_bytes: int  # on disk
    version: str  # modification time, or the server's tag: changes with the content


def input_file(path: AnyPath, format: FormatOption = "auto", name: str | None = None) -> InputFile:
    """Describe one file; `name` is its name in the corpus, by default the path."""
    with storage_errors(f"cannot read {path}", kind=DataError):
        size_bytes, version = state_of(path)
    if isinstance(path, Path) and not path.is_file():
        raise DataError(f"{path} is not a regular file; write the text to a file first")
    classified = _classify(path, format)
    if classified is None:
        raise DataError(
            _recognize(path)
            or f"{path} has an unknown ending; {_KNOWN}; name the format with --format"
        )
    kind, compression = classified
    if kind == "parquet" and compression is not None:
        raise DataError(
            f"{path}: a Parquet file is read from its end and cannot be compressed as a whole; "
            "unpack it first"
        )
    # File names are bytes to the system; Arrow and JSON take only UTF-8.
    display_name = (
        (name or hide_passwords(str(path))).encode("utf-8", "backslashreplace").decode("utf-8")
    )
    return InputFile(path, display_name, kind, compression, size_bytes, version)


def _classify(path: AnyPath, format: FormatOption) -> tuple[Format, Compression | None] | None:
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = Path(path.stem) if compression else path
    if format != "auto":
        return format, compression
    kind = ENDINGS.get(inner.suffix.lower())
    return None if kind is None else (kind, compression)


def _recognize(path: AnyPath) -> str | None:
    """Return what a file with an unknown ending is, and what to do; None if that is unknown."""
    with open_input(path) as opened:
        return foreign_format(str(path), opened.read(HEAD_BYTES) or b"")


def find_inputs(
    arguments: Sequence[str],
    format: FormatOption = "auto",
    *,
    split: str | None = None,
    exclude: Iterable[Path] = (),
    on_note: OnNote = lambda note: None,
) -> list[InputFile]:
    """Expand files, folders, globs and addresses into the files to read, in a fixed order.

    Folders are read to any depth; hidden entries and links to folders are ignored, and with
    `auto` also files with unknown endings. A folder with a saved Hugging Face dataset is replaced
    by the dataset's files. Of several splits of a folder one is read, and documentation next to
    data is not (`select_data`). A file that is found twice is read once, at its first place.

    Args:
        split: The split to read of each folder that has several, or `all`; None: `train`.
        exclude: Files and folders of the output, which a folder or a glob may contain.
        on_note: Called with a line on what is ignored.
    """
    excluded = {path.resolve() for path in exclude}
    unknown: list[AnyPath] = []
    files: dict[AnyPath, InputFile] = {}
    for argument in arguments:
        candidates: Sequence[AnyPath] = (
            _at_address(argument, format, split, unknown, on_note)
            if "://" in argument
            else _candidates(argument, format, split, excluded, unknown, on_note)
        )
        for path in candidates:
            if (resolved := path.resolve()) not in files:
                files[resolved] = input_file(path, format)
        if not candidates:
            formats = f"{_KNOWN}, and --format text takes any file"
            raise DataError(
                f"{argument}: no file to read; {(unknown and _recognize(unknown[0])) or formats}"
            )
    if missing := missing_shards(file.path for file in files.values()):
        reason = f"missing shard, by the names of the others: {list_some(missing)}"
        if any(Path(argument).is_dir() for argument in arguments):
            raise DataError(
                f"{reason}; copy them, or name the files to read, by a glob or --files-from"
            )
        on_note(reason)
    if unknown:
        plural = "s with unknown endings" if len(unknown) > 1 else " with an unknown ending"
        example = min(unknown, key=str)
        reason = _recognize(example) or f"{example}; --format names their format"
        on_note(f"ignored {len(unknown):,} file{plural}, such as {reason}")
    return list(files.values())


def _candidates(
    argument: str,
    format: FormatOption,
    split: str | None,
    excluded: set[Path],
    unknown: list[AnyPath],
    on_note: OnNote,
) -> list[Path]:
    """Return the files of an argument to read; those with unknown endings go to `unknown`."""
    folder = Path(argument)
    saved: set[Path] = set()
    paths: Iterable[Path] = [folder]
    if folder.is_dir():
        paths = _walk(folder, split, on_note, saved)
    elif not folder.exists() and glob.has_magic(argument):
        # Path.glob takes no absolute pattern.
        matches = map(Path, sorted(glob.glob(argument, recursive=True)))  # noqa: PTH207
        paths = filter(_is_data, matches)
    candidates: list[Path] = []
    for path in paths:
        resolved = path.resolve()
        if resolved in excluded and path == folder:
            raise DataError(f"{argument}: input and output are the same file; choose another --out")
        if excluded.isdisjoint((resolved, *resolved.parents)):
            candidates.append(path)
    if not folder.is_dir():
        return candidates
    return _select(str(folder), candidates, saved, format, split, unknown, on_note)


def _at_address(
    url: str,
    format: FormatOption,
    split: str | None,
    unknown: list[AnyPath],
    on_note: OnNote,
) -> list[UPath]:
    """Return the files at an address to read; those with unknown endings go to `unknown`."""
    paths = paths_of(url)
    if glob.has_magic(url) or [str(path) for path in paths] == [url]:
        return paths
    candidates = [path for path in paths if not is_dataset([path.name])]
    return _select(url.rstrip("/"), candidates, set(), format, split, unknown, on_note)


def _select(
    folder: str,
    candidates: Iterable[P],
    saved: set[P],
    format: FormatOption,
    split: str | None,
    unknown: list[AnyPath],
    on_note: OnNote,
) -> list[P]:
    """Return the files of a folder to read, all `saved` ones among them."""
    kinds: dict[P, bool] = {}
    for path in candidates:
        if classified := _classify(path, format):
            kinds[path] = classified[0] == "text"
        else:
            unknown.append(path)
    data = [(path, is_text) for path, is_text in kinds.items() if path not in saved]
    selected = saved.union(select_data(folder, data, split, on_note))
    return [path for path in kinds if path in selected]


def _walk(folder: Path, split: str | None, on_note: OnNote, saved: set[Path]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        # os.walk ignores folders it cannot list, and a part of the corpus would be missing.
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    # A file, or a dataset with its files in the dataset's own order, and the path to sort by.
    entries = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        if (
            is_dataset(names)
            and (listed := dataset_files(Path(root), split or DEFAULT)) is not None
        ):
            folders.clear()
            saved.update(listed)
            splits = dataset_splits(Path(root)) if split is None else []
            if len(splits) > 1:
                left_out = ", ".join(name for name in splits if name != DEFAULT)
                on_note(f"read the split {DEFAULT} of {root}; left out {left_out}; --split chooses")
            elif splits not in ([], [DEFAULT]):
                on_note(f"{root} has only the split {splits[0]}, which is read")
            entries.append((root, listed))
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = os.path.join(root, name)  # noqa: PTH118
                entries.append((path, [Path(path)]))
    # Sorted: the order of directory entries differs between file systems.
    for _, paths in sorted(entries):
        yield from filter(_is_data, paths)


def _is_data(path: Path) -> bool:
    """Return whether a path is a regular file, or a link to one, and no JSON about other files.

    A broken link is a DataError: a part of the corpus would be missing.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
    except OSError as error:
        if path.is_symlink():
            raise DataError(
                f"{path} is a link to {path.readlink()}, which cannot be read: {error.strerror}; "
                "fix the link or remove it"
            ) from error
        raise DataError(f"cannot read {path}: {os_error_text(error)}") from error
    # A corpus's manifest, a dataset's state.
    if path.name.endswith((".arrow.json", ".bin.json")):
        return False
    if not is_dataset([path.name]):
        return True
    try:
        return dataset_files(path.parent) is None
    except DataError:
        return False


def read_list(path: str) -> list[str]:
    """Return the paths of a list (`-`: standard input), without blank lines and `#` comments."""
    with storage_errors(f"cannot read the list {path}", kind=DataError):
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    names = [os.fsdecode(line.strip()) for line in data.splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    if not names:
        raise DataError(f"--files-from {path} names no file; write one path a line")
    return names
