"""What a run reads: its corpora, and published data sets (`configs/data/`).

A recipe names the data sets that its source used (`data.source`). What training reads of one is, in
this order: `data.corpus` and `data.tokenizer`, if they are set; what the user's configuration or
the cluster profile has for it (`cluster.data`); what `slurmllm data fetch` has written.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, NonNegativeInt, Tag, ValidationError

from slurmllm.core.config.operation import PositiveFloat, PositiveInt, Section
from slurmllm.core.config.profiles import available, did_you_mean, find_yaml, shipped_dir
from slurmllm.core.config.yaml_source import read_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts, format_count, format_estimate
from slurmllm.core.run.safe_files import read_limited

_FORM = "see docs/data.md#published-data-sets"


MANIFEST = "fetched.json"  # of a data set that was fetched, in its folder
# fsspec has others, which read archives, run commands or fill in templates.
PROTOCOLS = ("https", "http", "s3", "gs", "gcs", "abfs", "abfss", "az", "hf", "file", "memory")


def inside(name: str) -> str:
    """Return a file's name in the folder of a data set; ValueError if it is none, or ours."""
    path = PurePosixPath(name)
    hidden = any(name_part.startswith(".") for name_part in path.parts)
    if path.is_absolute() or hidden or not path.name or not name.isprintable():
        raise ValueError("must be a path inside the folder of the data set, without hidden names")
    if path.parts[0] == MANIFEST:
        raise ValueError(f"must not be {MANIFEST}, which slurmllm writes there")
    return name


def known_address(url: str) -> str:
    """Return an address that opens one file; ValueError for chains and protocols that run code."""
    protocol, separator, _ = url.partition("://")
    if "::" in url:
        raise ValueError("must be a single address, without `::`")
    if not url.startswith("/") and not (separator and protocol in PROTOCOLS):
        raise ValueError("must begin with https://, s3://, gs://, abfs://, hf://, file:// or /")
    return url


FileName = Annotated[str, AfterValidator(inside)]


class PublishedFile(Section):
    """A file of a data set, or several of one pattern."""

    url: Annotated[str, AfterValidator(known_address)]
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
    tokens: PositiveFloat | None = None
    """Of the corpus, about, where its origin says so: what an epoch is."""
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
        raise ValueError(
            f"unknown data set; {did_you_mean(name, names)}known here: {', '.join(names)}"
        )
    return name


SourceName = Annotated[str, AfterValidator(_is_published)]


class CorpusShare(Section):
    """One corpus of a blend."""

    path: str
    """As `data.corpus`."""
    weight: PositiveFloat = 1.0
    """Its share of the sequences, relative to the others'."""


_ONE_OR_SEVERAL = Discriminator(
    lambda value: "[several]" if isinstance(value, list | tuple) else "[one]"
)
_Blend = Annotated[tuple[CorpusShare, ...], Field(strict=False, min_length=1)]
_Corpora = Annotated[
    Annotated[str, Tag("[one]")] | Annotated[_Blend, Tag("[several]")],
    _ONE_OR_SEVERAL,
]
_Sources = Annotated[
    Annotated[SourceName, Tag("[one]")]
    | Annotated[tuple[SourceName, ...], Field(strict=False), Tag("[several]")],
    _ONE_OR_SEVERAL,
]


class DataConfig(Section):
    """What the model reads."""

    source: _Sources | None = None
    """Published data sets that the recipe's source used (`slurmllm data fetch --list`), one or
    several: a corpus and its tokenizer. They are read if data.corpus is not set."""
    corpus: _Corpora | None = None
    """Corpus made by `slurmllm data build`, a Megatron .bin/.idx, a .npy of token ids, or `stdlib`:
    the texts of this machine's Python standard library, built at the first submit. A list of {path,
    weight} blends several."""
    tokenizer: str | None = None
    """A tokenizer.json, or `stdlib`: trained on the stdlib corpus at the first submit."""
    mask: Literal["none", "document"] = "none"
    """Attention across document boundaries: `none` masks nothing, `document` keeps attention and
    positions within each document."""
    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the documents, chosen by the hash of their content, that training never sees."""
    num_workers: NonNegativeInt = 1
    """Processes that tokenize ahead of the training, for each worker."""

    @property
    def sources(self) -> Texts:
        """Names of the published data sets; empty if none is set."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()

    @property
    def corpora(self) -> tuple[CorpusShare, ...]:
        if isinstance(self.corpus, str):
            return (CorpusShare(path=self.corpus),)
        return self.corpus or ()


def _not_held_out(name: str) -> str:
    if name == "held_out":
        raise ValueError(
            "is reserved for the documents held out by data.validation; choose another name"
        )
    return name


# Part of tags, and of dotted paths.
_TextName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"), AfterValidator(_not_held_out)
]


class EvalConfig(Section):
    """Validation while training: the loss on text that training does not read."""

    every_steps: PositiveInt | None = None
    """Steps between evaluations; the last step is always evaluated. Null turns evaluation off."""
    sequences: PositiveInt = 256
    """Sequences of each text, at most; the same ones at every evaluation."""
    corpora: dict[_TextName, str] = Field(default_factory=dict)
    """Further corpora by name, in the forms of `data.corpus`. With `data.validation`, the held-out
    documents are another one, `held_out`."""


def read_source(name: str) -> DataSource:
    """Read a published data set by name, or a file of that form by path; raises ConfigError."""
    path = find_yaml(name, data_dir(), "data set", "`slurmllm data fetch --list`")
    try:
        return DataSource.model_validate(read_yaml(path, form=_FORM)[0])
    except ValidationError as error:
        from slurmllm.core.run.records import first_problem

        raise ConfigError(f"data set {path}: {first_problem(error)}; {_FORM}") from error


@functools.cache
def _published_size(sources: Texts) -> CorpusSize | None:
    """Return name and tokens of the data set that has the corpus; None if they are unknown."""
    with contextlib.suppress(ConfigError):  # the file of an old run's data set may be gone
        for name in sources:
            source = read_source(name)
            if source.corpus is not None:
                return None if source.tokens is None else (name, source.tokens)
    return None


CorpusSize = tuple[str, float]  # name, and tokens or epochs of it
_USEFUL_EPOCHS = 4  # Muennighoff et al. 2023 (arXiv 2305.16264), section 5


def _built_size(corpus: Path) -> CorpusSize | None:
    """Return the name and approximate tokens of a corpus that `data build` made, else None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads(read_limited(Path(f"{corpus}.json")))
        return f"{corpus.name}, if a token is 4 bytes of text", summary["text_bytes"] / 4
    return None


def corpus_epochs(data: DataConfig, tokens: int, origin: str = "") -> CorpusSize | None:
    """Return the corpus and its approximate number of epochs; None if unknown.

    In your own corpus a token counts as 4 bytes, about GPT-2's average for English.

    Args:
        origin: Where `data.corpus` comes from: the path of a published corpus, or another one.
    """
    is_published = data.corpus is None or origin.startswith(("fetched: ", "cluster.data."))
    size = _published_size(data.sources) if is_published else _built_size(Path(str(data.corpus)))
    return None if size is None else (size[0], tokens / size[1])


def epochs_text(data: DataConfig, tokens: int, origin: str = "") -> str | None:
    if (epochs := corpus_epochs(data, tokens, origin)) is None:
        return None
    name, count = epochs
    text = f"{format_count(tokens)} tokens are about {format_estimate(count)} epochs of {name}"
    return f"{text}; after four, more add little" if count > _USEFUL_EPOCHS else text
