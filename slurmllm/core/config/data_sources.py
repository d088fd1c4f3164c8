"""Published data sets (`configs/data/`), and where a site has them.

A recipe names the data sets that its source used (`data.source`). What training reads of one is, in
this order: `data.corpus` and `data.tokenizer`, if they are set; what the user's configuration or
the cluster profile has for it (`cluster.data`); what `slurmllm data fetch` has written.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from slurmllm.core.config.operation import PositiveInt, Section
from slurmllm.core.config.profiles import available, did_you_mean, find_yaml, shipped_dir
from slurmllm.core.config.yaml_source import read_yaml
from slurmllm.core.errors import ConfigError

_FORM = "see docs/data.md#published-data-sets"


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.name in ("", "."):
        raise ValueError("must be a path inside the folder of the data set")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


class PublishedFile(Section):
    """A file of a data set, or several of one pattern."""

    url: str
    """Address that fsspec opens: https://, s3:// (read without credentials), hf://. With a `*`, all
    files of the pattern, in the order of their names."""
    name: FileName | None = None
    """Its name in the folder, if not that of the address; files of a pattern are joined under it.
    """
    size: PositiveInt | None = None
    """Bytes, where published."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Where published."""


class TextInput(Section):
    """How the files become a corpus (`slurmllm data build`)."""

    text_key: str = "text"
    """Field or column of the text."""
    prompt_key: str | None = None
    """Field or column of the prompt, for fine-tuning."""
    completion_key: str | None = None
    """Field or column of the completion."""


class DataSource(Section):
    """A published data set: a corpus, a tokenizer, or both."""

    description: str
    """One line on what it is."""
    origin: str
    """Where addresses, sizes and sums come from, and what could not be tried."""
    licence: str
    """Under which terms it is published."""
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    """Download, about, in 10^9 bytes."""
    files: Annotated[tuple[PublishedFile, ...], Field(strict=False, min_length=1)]
    build: TextInput | None = None
    """Set if the corpus is built from the files."""
    corpus: FileName | None = None
    """What `data.corpus` reads, in the folder."""
    tokenizer: FileName | None = None
    """What `data.tokenizer` reads, in the folder. If no file has that name, it is made from GPT-2's
    two vocabulary files, *vocab.json and *merges.txt."""


class SiteData(Section):
    """Where a site has a published data set."""

    corpus: str | None = None
    """As `data.corpus`."""
    tokenizer: str | None = None
    """As `data.tokenizer`."""


def data_dir() -> Path:
    return shipped_dir() / "configs" / "data"


def _is_published(name: str) -> str:
    # A file is read when it is needed: that of an old run may be gone.
    if Path(name).suffix not in (".yaml", ".yml") and name not in (names := available(data_dir())):
        guess = did_you_mean(name, names)
        raise ValueError(f"unknown data set; {guess}known here: {', '.join(names)}")
    return name


SourceName = Annotated[str, AfterValidator(_is_published)]


def read_source(name: str) -> DataSource:
    """Read a published data set by name, or a file of that form by path; raises ConfigError."""
    path = find_yaml(name, data_dir(), "data set", "`slurmllm data fetch --list`")
    try:
        return DataSource.model_validate(read_yaml(path, form=_FORM)[0])
    except ValidationError as error:
        from slurmllm.core.run.records import first_problem

        raise ConfigError(f"data set {path}: {first_problem(error)}; {_FORM}") from error
