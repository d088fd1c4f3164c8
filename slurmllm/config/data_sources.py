"""Published data sets (`configs/data/`), and where a site has them.

A recipe names the data sets that its source used (`data.source`). What training reads of one is, in
this order: `data.corpus` and `data.tokenizer`, if they are set; what the user's configuration or
the cluster profile has for it (`cluster.data`); what `slurmllm data fetch` has written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from slurmllm.config.operation import PositiveInt, Section
from slurmllm.config.profiles import available, did_you_mean, find_yaml
from slurmllm.config.yaml_source import read_yaml
from slurmllm.errors import ConfigError
from slurmllm.safe_files import own_folder

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.name in ("", "."):
        raise ValueError("must be a path inside the folder of the data set")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


class PublishedFile(Section):
    """A file of a data set, or several of one pattern."""

    # Address that fsspec opens: https://, s3:// (read without credentials), hf://. With a `*`, all
    # files of the pattern, in the order of their names.
    url: str
    # Its name in the folder, if not that of the address; files of a pattern are joined under it.
    name: FileName | None = None
    size: PositiveInt | None = None  # Bytes, where published.
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # Where published.


class TextInput(Section):
    """How the files become a corpus (`slurmllm data build`)."""

    text_key: str = "text"  # Field or column of the text.
    prompt_key: str | None = None  # Field or column of the prompt, for fine-tuning.
    completion_key: str | None = None  # Field or column of the completion.


class DataSource(Section):
    """A published data set: a corpus, a tokenizer, or both."""

    description: str  # One line on what it is.
    origin: str  # Where addresses, sizes and sums come from, and what could not be tried.
    licence: str  # Under which terms it is published.
    gigabytes: Annotated[float, Field(gt=0)] | None = None  # Download, about, in 10^9 bytes.
    files: Annotated[tuple[PublishedFile, ...], Field(strict=False, min_length=1)]
    build: TextInput | None = None  # Set if the corpus is built from the files.
    corpus: FileName | None = None  # What `data.corpus` reads, in the folder.
    # What `data.tokenizer` reads, in the folder. If no file has that name, it is made from GPT-2's
    # two vocabulary files, *vocab.json and *merges.txt.
    tokenizer: FileName | None = None


class SiteData(Section):
    """Where a site has a published data set."""

    corpus: str | None = None  # As `data.corpus`.
    tokenizer: str | None = None  # As `data.tokenizer`.


def data_dir() -> Path:
    from slurmllm.config.resolve import shipped_dir

    return shipped_dir() / "configs" / "data"


def _is_published(name: str) -> str:
    # A file is read when it is needed: that of an old run may be gone.
    if Path(name).suffix not in (".yaml", ".yml") and name not in (names := available(data_dir())):
        guess = did_you_mean(name, names)
        raise ValueError(f"unknown data set; {guess}known here: {', '.join(names)}")
    return name


SourceName = Annotated[str, AfterValidator(_is_published)]


def read_source(name: str) -> DataSource:
    """Read a published data set by its name, or a file of that form by its path.

    Raises:
        ConfigError: no such data set, or a fault of its file.
    """
    path = find_yaml(name, data_dir(), "data set", "`slurmllm data fetch --list`")
    values, lines = read_yaml(path, form="see docs/data.md#published-data-sets")
    try:
        return DataSource.model_validate(values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        ]
        raise ConfigError(f"data set {path}: {len(faults)} fault(s)", faults) from error


def user_configuration() -> Path:
    """The file of this user's settings for every run, which need not exist."""
    if path := os.environ.get("SLURMLLM_CONFIG"):
        return Path(path)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "slurmllm" / "config.yaml"


_USER_FIELDS = ("data", "data_folder", "data_mirrors")


def add_user_configuration(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Put the user's own settings over those of a cluster profile, in place.

    Raises:
        ConfigError: the file is not this user's own, not YAML, or has other fields.
    """
    path = user_configuration()
    if not path.is_file():
        return
    form = f"it may set {', '.join(_USER_FIELDS)}; see docs/data.md#what-a-site-has-already"
    settings, lines = read_yaml(path, trusted=True, form=form)
    if unknown := settings.keys() - set(_USER_FIELDS):
        raise ConfigError(f"{path}: unknown field {min(unknown)!r}; {form}")
    for key, value in settings.items():
        former = values.get(key)
        mapping = isinstance(former, Mapping) and isinstance(value, Mapping)
        values[key] = {**former, **value} if mapping else value  # type: ignore[dict-item]
        for name in value if mapping else [""]:
            section = f"{key}.{name}" if name else key
            for dotted in [one for one in origins if f"{one}.".startswith(f"{section}.")]:
                del origins[dotted]
    origins |= {dotted: f"{path.parent.name}/{where}" for dotted, where in lines.items()}


def data_folder(config: RunConfig, root: Path) -> Path:
    """The folder of fetched data sets: `cluster.data_folder`, else `.data` in that of the runs."""
    if config.cluster.data_folder is not None:
        return Path(config.cluster.data_folder).expanduser()
    return own_folder(root, ".data", config.cluster.trusted_group)


def source_folder(folder: Path, name: str) -> Path:
    return folder / Path(name).stem


@dataclass(frozen=True)
class LocatedData:
    """What training reads, as far as it is there."""

    corpus: str | None
    tokenizer: str | None
    origins: Mapping[str, str]  # `data.corpus`, `data.tokenizer` → where the value comes from
    missing: tuple[str, ...] = ()  # data sets that are not there


def locate(config: RunConfig, root: Path) -> LocatedData:
    """Find corpus and tokenizer of a recipe's `data.source`; values that are set take precedence.

    Raises:
        ConfigError: an unknown data set.
        OSError: the folder of the runs cannot be read.
    """
    data = config.recipe.data
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    missing = []
    names: Sequence[str] = data.sources if data.corpus is None else ()
    for name in names:
        source, site = read_source(name), config.cluster.data.get(name)
        folder = source_folder(data_folder(config, root), name)
        for field in ("corpus", "tokenizer"):
            file, dotted = getattr(source, field), f"data.{field}"
            if site is not None:
                path, how = getattr(site, field), f"cluster.data.{name}"
                how = f"{how} ({config.origins.get(f'{how}.{field}', 'default')})"
            else:
                path, how = None if file is None else str(folder / file), f"fetched: {name}"
            if path is None or getattr(data, field) is not None:
                continue
            values.setdefault(field, path)
            origins.setdefault(dotted, how)
            if site is None and not _exists(Path(path)) and name not in missing:
                missing.append(name)
    corpus, tokenizer = values.get("corpus"), values.get("tokenizer")
    return LocatedData(corpus, tokenizer, origins, tuple(missing))


def _exists(path: Path) -> bool:
    """Whether a file is there, or both files of a tokenized corpus that is named by its prefix."""
    with suppress(OSError):
        return path.is_file() or all(Path(f"{path}{end}").is_file() for end in (".bin", ".idx"))
    return False


def is_trial(config: RunConfig) -> bool:
    """Whether a run reads the built-in texts in place of its recipe's (`submit --data builtin`)."""
    return config.origins.get("data.corpus") == BUILTIN_ORIGIN


BUILTIN_ORIGIN = "--data builtin"
