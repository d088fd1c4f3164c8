"""Folders that Hugging Face's `Dataset.save_to_disk` makes, read without the `datasets` package.

Such a folder holds Arrow stream files, named in their order by `state.json`; beside them may lie
`cache-*.arrow` files, which are no part of it. A folder with `dataset_dict.json` holds one such
folder a split; of a single split it stands for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
