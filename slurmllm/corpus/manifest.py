"""The manifest beside a corpus: what went into it and what came out.

The same inputs and options give the same bytes; how long it took and what memory is no part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from slurmllm.records import Record


class CorpusInput(Record):
    """One input file."""

    path: str = Field(description="as named at the build, or below the folder named there")
    bytes: int = Field(description="on disk")
    documents: int
    xxh3: str | None = Field(
        default=None,
        description="xxh3-128 of the file on disk; None for Parquet and Arrow, not read whole",
    )


class CorpusManifest(Record):
    """`<corpus>.json`: what a corpus holds."""

    version: Literal[1, 2] = 2
    documents: int
    text_bytes: int = Field(description="UTF-8 bytes of all documents")
    columns: tuple[str, ...] = Field(default=("text", "source"), description="of the corpus")
    tokens: int | None = Field(default=None, description="with --tokenize")
    tokenizer: str | None = Field(default=None, description="--tokenize")
    tokenizer_fingerprint: str | None = None
    dtype: str | None = Field(default=None, description="of the token ids")
    arrow_bytes: int | None = None
    arrow_sha256: str | None = None
    bin_bytes: int | None = None
    bin_sha256: str | None = None
    idx_bytes: int | None = None
    idx_sha256: str | None = None
    format: str = Field(description="--format")
    text_by: str = Field(description="--text-by")
    text_key: str = Field(description="--text-key")
    prompt_key: str | None = Field(default=None, description="--prompt-key")
    completion_key: str | None = Field(default=None, description="--completion-key")
    normalize: str = Field(default="none", description="--normalize")
    min_chars: int = Field(default=0, description="--min-chars")
    dedup: bool = Field(default=False, description="--dedup")
    empty: int = Field(description="documents left out because they held no text")
    short: int = Field(default=0, description="left out by --min-chars")
    duplicates: int = Field(default=0, description="left out by --dedup")
    bad: int = Field(description="documents and files left out because they could not be read")
    bad_examples: tuple[str, ...] = Field(description="the first of them: file, place, reason")
    inputs: tuple[CorpusInput, ...] = Field(description="in the order they were read")

    def content(self) -> bytes:
        """The file, without what does not apply."""
        return (self.model_dump_json(indent=2, exclude_none=True) + "\n").encode()


def manifest_path(corpus: Path) -> Path:
    """Where the manifest of a corpus (`.arrow` or `.bin`) is."""
    return corpus.with_name(corpus.name + ".json")
