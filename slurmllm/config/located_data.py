"""Where the published data sets of a run are.

A recipe names the data sets that its source used (`data.source`). What training reads of one is, in
this order: `data.corpus` and `data.tokenizer`, if they are set; what the user's configuration or
the cluster profile has for it (`cluster.data`); what `slurmllm data fetch` has written.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurmllm.config.data_sources import read_source
from slurmllm.config.resolve import RunConfig
from slurmllm.safe_files import own_folder

BUILTIN_ORIGIN = "--data builtin"


def data_folder(config: RunConfig, root: Path) -> Path:
    """The folder of fetched data sets: `cluster.data_folder`, else `.data` in that of the runs."""
    if config.cluster.data_folder is not None:
        return Path(config.cluster.data_folder).expanduser()
    return own_folder(root, ".data", config.cluster.trusted_group)


def source_folder(folder: Path, name: str) -> Path:
    return folder / Path(name).stem


class LocatedData(NamedTuple):
    """What training reads, as far as it is there."""

    values: dict[str, str]  # `corpus` and `tokenizer`
    origins: dict[str, str]  # dotted path → where its value comes from
    missing: list[str]  # data sets that are not there


def locate(config: RunConfig, root: Path) -> LocatedData:
    """Find corpus and tokenizer of a recipe's `data.source`, if `data.corpus` is not set.

    Raises:
        ConfigError: an unknown data set.
    """
    data, located = config.recipe.data, LocatedData({}, {}, [])
    for name in data.sources if data.corpus is None else ():
        source, site = read_source(name), config.cluster.data.get(name)
        for field in ("corpus", "tokenizer"):
            path, how = getattr(site, field, None), f"cluster.data.{name}.{field}"
            how = f"cluster.data.{name} ({config.origins.get(how, 'default')})"
            if site is None and (file := getattr(source, field)) is not None:
                folder = source_folder(data_folder(config, root), name)
                path, how = str(folder / file), f"fetched: {name}"
                if not _exists(Path(path)) and name not in located.missing:
                    located.missing.append(name)
            if path is not None and getattr(data, field) is None:
                located.values.setdefault(field, path)
                located.origins.setdefault(f"data.{field}", how)
    return located


def _exists(path: Path) -> bool:
    """Whether a file is there, or both files of a tokenized corpus that is named by its prefix."""
    return path.is_file() or all(Path(f"{path}{end}").is_file() for end in (".bin", ".idx"))


def is_trial(config: RunConfig) -> bool:
    """Whether a run reads the built-in texts in place of its recipe's (`submit --data builtin`)."""
    return config.origins.get("data.corpus") == BUILTIN_ORIGIN
