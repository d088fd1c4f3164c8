"""Data, splits and documentation in a folder, told apart as Hugging Face's `datasets` does.

A dataset repository names its splits in README.md (`configs`), or files and folders by them
(`data/test-00000-of-00001.parquet`, `valid/a.jsonl`: `datasets/data_files.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from slurmllm.errors import DataError

ALL = "all"
DEFAULT = "train"
_KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev|held[-_]?out|hold[-_]?out",
    "test": "test|testing|eval|evaluation",
}
# A keyword alone, or with what follows it by `_` if a number of shards shows that it is a split.
_SHARDS = re.compile(
    rf"(?:^|[-.])((?:{'|'.join(_KEYWORDS.values())})_\w+)-\d{{5}}-of-\d{{5}}", re.I
)
_NAMES = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)", re.I)
    for split, words in _KEYWORDS.items()
}
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|change(s|log)|citation|contributing|authors)\b.*|"
    r"dataset_infos?\.json",
    re.I,
)


def select_data(
    folder: Path,
    files: Sequence[tuple[Path, bool]],
    split: str | None,
    on_note: Callable[[str], None],
) -> list[Path]:
    """Return the files of a folder to read: of one split, and without documentation.

    `files` are each file, and whether it is plain text. Without `split`, `train` of several.
    """
    if not files:
        return []
    splits = _without_documentation(folder, files, split, on_note)
    names = {name for name in splits.values() if name is not None}
    if split == ALL or (not names and split in (None, DEFAULT)):
        return list(splits)
    # Files that name no split belong to `train`, unless others name it.
    chosen = split or (DEFAULT if len(names) > 1 or None in splits.values() else min(names))
    unnamed = "" if DEFAULT in names else DEFAULT
    taken = [path for path, name in splits.items() if (name or unnamed) == chosen]
    if not taken:
        raise DataError(
            f"{folder} has no split {chosen!r} but {', '.join(sorted(names)) or 'no splits'}; "
            f"choose one with --split, or --split {ALL}"
        )
    if left_out := [path for path in splits if path not in taken]:
        on_note(
            f"read the split {chosen} of {folder}, {_some(taken, folder)}; left out "
            f"{_some(left_out, folder)}; --split chooses ({', '.join(sorted(names))}, {ALL})"
        )
    elif split is None and chosen != DEFAULT:
        on_note(f"{folder} has only the split {chosen}")
    return taken


def _without_documentation(
    folder: Path,
    files: Sequence[tuple[Path, bool]],
    split: str | None,
    on_note: Callable[[str], None],
) -> dict[Path, str | None]:
    """Return the split that each file of data names, in the order of the files.

    Documentation is left out next to tables or splits; among plain texts it is one of them.
    """
    tables = [path for path, is_text in files if not is_text and not _is_documentation(path)]
    configured = _configured_splits(folder)
    splits: dict[Path, str | None] = {}
    documentation = set()
    for path, _ in files:
        if (path.suffix in (".md", ".rst", ".py") and tables) or _is_documentation(path):
            documentation.add(path)
        else:
            splits[path] = _split_of(path.relative_to(folder), configured)
    if not tables and split is None and DEFAULT not in splits.values():
        splits = dict.fromkeys(splits)  # plain texts may be called anything
    named = bool(tables) or any(splits.values())
    if documentation and splits and named:
        on_note(
            f"left out {_some([*documentation], folder)}: documentation; name it to read it too"
        )
        return splits
    if documentation and splits:
        on_note(f"{_some([*documentation], folder)}: documentation that is read as text too")
    return {path: splits.get(path) for path, _ in files}


def _some(paths: Sequence[Path], folder: Path) -> str:
    first = min(paths).relative_to(folder)
    return str(first) if len(paths) == 1 else f"{len(paths):,} files such as {first}"


def _is_documentation(path: Path) -> bool:
    return _DOCUMENTATION.fullmatch(path.name) is not None


def _split_of(path: Path, configured: Sequence[tuple[str, str]]) -> str | None:
    """Return the split that a path below the folder names, from the file up."""
    if configured:
        return next((name for name, glob in configured if fnmatch(path.as_posix(), glob)), None)
    if path.suffix in (".md", ".rst", ".py"):
        return None  # code has tests
    for part in reversed(path.parts):
        if shards := _SHARDS.search(part):
            return shards[1]
        for split, words in _NAMES.items():
            if words.search(part):
                return split
    return None


def _configured_splits(folder: Path) -> list[tuple[str, str]]:
    """Return split and glob of the `data_files` in README.md: of the default, or of all."""
    try:
        text = (folder / "README.md").read_text("utf-8")
        header = text.split("\n---", 1)[0].removeprefix("---")
        configs = yaml.safe_load(header)["configs"]
        default = [entry for entry in configs if entry.get("default") or len(configs) == 1]
        return [pair for entry in default or configs for pair in _globs(entry["data_files"])]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []


def _globs(data_files: Any) -> Iterator[tuple[str, str]]:
    entries = data_files if isinstance(data_files, list) else [data_files]
    for entry in entries:
        split, globs = (
            (entry["split"], entry["path"]) if isinstance(entry, dict) else (DEFAULT, entry)
        )
        for glob in globs if isinstance(globs, list) else [globs]:
            yield str(split), str(glob)
