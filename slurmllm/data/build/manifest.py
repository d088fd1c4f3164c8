"""The manifest beside a corpus: what went into it and what came out."""

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


class CorpusManifest(Record):
    """`<corpus>.json`: what a corpus holds. The same inputs and options give the same bytes."""

    version: Literal[1] = 1
    documents: int
    text_bytes: int = Field(description="UTF-8 bytes of all documents")
    arrow_bytes: int
    arrow_sha256: str
    format: str = Field(description="--format")
    text_by: str = Field(description="--text-by")
    text_key: str = Field(description="--text-key")
    empty: int = Field(description="documents left out because they held no text")
    bad: int = Field(description="documents and files left out because they could not be read")
    bad_examples: tuple[str, ...] = Field(description="the first of them: file, place, reason")
    inputs: tuple[CorpusInput, ...] = Field(description="in the order they were read")


def manifest_path(corpus: Path) -> Path:
    """Where the manifest of a corpus is."""
    return corpus.with_name(corpus.name + ".json")
