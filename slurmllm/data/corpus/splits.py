"""Splits and documentation of a folder, by the conventions of Hugging Face's `datasets`.

A dataset repository names its splits in README.md (`configs`), or files and folders by them
(`data/test-00000-of-00001.parquet`, `valid/a.jsonl`): `datasets.data_files` reads both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slurmllm.core.display.progress import OnNote
from slurmllm.core.errors import DataError

if TYPE_CHECKING:
    from slurmllm.data.corpus.addresses import AnyPath

P = TypeVar("P", bound="AnyPath")
log = logging.getLogger(__name__)
ALL = "all"
DEFAULT = "train"
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|change(s|log)|citation|contributing|authors)\b.*|"
    r"dataset_infos?\.json",
    re.I,
)
# A number, and how many there are: `train-00000-of-00003.parquet`
_SHARD = re.compile(r"(.*?)(?<!\d)(\d{1,6})([-_. ]?of[-_. ]?(\d{1,6})(?!\d)[^/]*)", re.I | re.S)
_CODE = (".md", ".rst", ".py")  # documentation next to tables


def select_data(
    folder: str,
    files: Sequence[tuple[P, bool]],
    split: str | None,
    on_note: OnNote,
) -> list[P]:
    """Return the files of a folder, or at an address, to read: of one split, no documentation.

    `files` are each file, and whether it is plain text. Without `split`, `train` of several.
    """
    every = [path for path, _ in files]
    data = [path for path in every if not _DOCUMENTATION.fullmatch(path.name)]
    tables = {path for path, is_text in files if not is_text}.intersection(data)
    no_code = [path for path in data if path.suffix not in _CODE]
    if tables:
        data = no_code
    if not data:
        return every
    splits = _splits(folder)
    unnamed = {str(path.absolute()) for path in data}.difference(*splits.values())
    has_no_split = not no_code or (unnamed and not {DEFAULT} < splits.keys())
    if not tables and split is None and has_no_split:
        splits = {}  # plain texts and code may be called anything
    if documentation := {*every} - {*data}:
        left_out = list_some(documentation, folder)
        if not tables and not splits:
            on_note(f"{left_out}: documentation that is read as text too")
            return every
        on_note(f"left out {left_out}: documentation; name it to read it")
    if split == ALL or not splits:
        return data
    if unnamed and not _configured_patterns(folder):
        if split is None:
            raise DataError(
                f"{folder}: the names of some files contain a split, and others, such as "
                f"{min(unnamed)}, do not; choose with --split ({', '.join(sorted(splits))}, or "
                f"{ALL} for every file)"
            )
        splits.setdefault(DEFAULT, unnamed)
    return _of_split(folder, data, splits, split, on_note)


def _of_split(
    folder: str,
    data: list[P],
    splits: dict[str, set[str]],
    split: str | None,
    on_note: OnNote,
) -> list[P]:
    names = ", ".join(sorted(splits))
    chosen = split or (DEFAULT if len(splits) > 1 else min(splits))
    selected = [path for path in data if str(path.absolute()) in splits.get(chosen, ())]
    if not selected:
        raise DataError(
            f"{folder} has no split {chosen!r} but {names}; choose one with --split, or "
            f"--split {ALL}"
        )
    omitted = [path for path in data if path not in selected]
    if omitted:
        on_note(
            f"read the split {chosen} of {folder}, {list_some(selected, folder)}; left out "
            f"{list_some(omitted, folder)}; --split chooses ({names}, {ALL})"
        )
    elif chosen != DEFAULT and split is None:
        on_note(f"{folder} has only the split {chosen}, which is read")
    return selected


def missing_shards(paths: Iterable[AnyPath]) -> list[str]:
    """Return the missing shards that the names of others imply, as `b-1-of-3` implies `b-0-of-3`.

    Shards are numbered from 0, or from 1 if the last number is there.
    """
    names = {str(path) for path in paths}
    missing = []
    matches = filter(None, map(_SHARD.fullmatch, names))
    for begin, digits, end, total in {(m[1], len(m[2]), m[3], int(m[4])) for m in matches}:
        shards = [f"{begin}{number:0{digits}}{end}" for number in range(total + 1)]
        starts_at_1 = shards[0] not in names and shards[-1] in names
        shards.pop(0 if starts_at_1 else -1)
        missing += sorted({*shards} - names)
    return missing


def _splits(folder: str) -> dict[str, set[str]]:
    """Return the files of each split that README.md or the names in a folder tell."""
    from datasets.data_files import (
        DataFilesDict,
        EmptyDatasetError,
        get_data_patterns,
        sanitize_patterns,
    )
    from upath import UPath

    base = str(UPath(folder).absolute())
    try:
        patterns = sanitize_patterns(_configured_patterns(folder) or get_data_patterns(base))
        files = DataFilesDict.from_patterns(patterns, base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        return {}
    return {str(split): {str(UPath(file)) for file in names} for split, names in files.items()}


def _configured_patterns(folder: str) -> Any:
    """Return `data_files` of the default configuration in README.md, else of the first."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard
    from upath import UPath

    page = UPath(folder) / "README.md"
    if not page.is_file():
        return None
    try:
        configs = MetadataConfigs.from_dataset_card_data(
            DatasetCard(page.read_text(encoding="utf-8")).data
        )
        name = configs.get_default_config_name() or next(iter(configs), None)
    except Exception as error:  # each library has its own
        log.warning("%s: splits are found by names: unreadable metadata: %s", page, error)
        return None
    return None if name is None else configs[name].get("data_files")


def list_some(paths: Collection[AnyPath | str], folder: str = ".") -> str:
    first = min(map(str, paths)).removeprefix(f"{folder}/")
    return first if len(paths) == 1 else f"{len(paths):,} files such as {first}"
