"""Folders of Hugging Face datasets, read without the `datasets` package.

A folder of `save_to_disk` has Arrow streams, listed in their order by `state.json`; several splits
are such folders below one with `dataset_dict.json`. A folder of the cache, which `load_dataset`
fills, has the streams of all splits, and a `dataset_info.json` that names the splits. In both,
files named `cache-*.arrow` hold the results of `map` and are no part of the dataset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from slurmllm.core.errors import DataError
from slurmllm.core.format import Json
from slurmllm.core.run.rundir import storage_errors

STATE = "state.json"
SPLITS = "dataset_dict.json"
INFO = "dataset_info.json"


def corpus_files(path: Path) -> list[Path]:
    """Return the files of an Arrow corpus: the path itself, or those of a dataset's folder."""
    if not path.is_dir():
        return [path]
    files = dataset_files(path)
    if not files:
        raise DataError(
            f"{path} is a folder, and not of Hugging Face's `save_to_disk`; name a file, or build "
            f"a corpus of its files with `slurmllm data build {path} --out corpus.arrow`"
        )
    return files


def is_dataset(names: Collection[str]) -> bool:
    """Return whether a folder with these file names may be a dataset, or several splits of one."""
    return not {STATE, SPLITS, INFO}.isdisjoint(names)


def dataset_splits(folder: Path) -> list[str]:
    """Return the names of the splits of a dataset; empty if its folder does not name them."""
    for name in (SPLITS, INFO):
        splits = _load(folder / name).get("splits") if (folder / name).is_file() else None
        if isinstance(splits, list | dict) and splits and not (folder / STATE).is_file():
            return [str(split) for split in splits]
    return []


def dataset_files(folder: Path, split: str | None = None) -> list[Path] | None:
    """Return the Arrow files of a dataset in their order; None if the folder is not one.

    Of several splits, `split` is read, or `all`.
    """
    splits = dataset_splits(folder)
    if len(splits) > 1 and split != "all":
        if split not in splits:
            raise DataError(
                f"{folder} has a dataset of several splits ({', '.join(splits)}); build a corpus "
                "of one of them with `slurmllm data build --split`, or name its files"
            )
        splits = [split]
    if (folder / SPLITS).is_file() and splits:
        files = []
        for name in splits:
            if (files_of := dataset_files(folder / name)) is None:
                raise DataError(
                    f"{folder / SPLITS} names the split {name}, which is missing or was not "
                    "saved by `save_to_disk`; copy it too"
                )
            files += files_of
        return files
    if not (folder / STATE).is_file():
        return _cached_files(folder, splits) if splits else None
    state = _load(folder / STATE)
    listed = state.get("_data_files")
    if not isinstance(listed, list):
        return None
    if state.get("_indices_data_files"):  # written by datasets 1: rows chosen by an index file
        raise DataError(
            f"{folder} keeps its rows in another order than its files do (`_indices_data_files` "
            f"in {STATE}); save it again with `dataset.flatten_indices().save_to_disk(...)`"
        )
    paths = [folder / str(entry.get("filename")) for entry in listed if isinstance(entry, dict)]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{folder / STATE} names {path.name}, which is missing; copy it too")
    return paths


def _cached_files(folder: Path, splits: list[str]) -> list[Path] | None:
    name = rf"(?!cache-).*-({'|'.join(map(re.escape, splits))})(-\d+-of-\d+)?\.arrow"
    return sorted(path for path in folder.iterdir() if re.fullmatch(name, path.name)) or None


def _load(path: Path) -> Json:
    """Return the object of a JSON file; empty if some other file has that name."""
    with storage_errors(f"cannot read {path}", kind=DataError):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return {}
    return content if isinstance(content, dict) else {}
