"""Options of a build, and what it does with input that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slurmllm.core.errors import DataError
from slurmllm.core.format import Texts

ERROR_EXAMPLES = 20

# What an error makes unreadable: a document, a whole file, or the rest of a file.
Extent = Literal["document", "file", "rest"]
_SKIPPING: dict[Extent, str] = {
    "document": "skip such documents",
    "file": "skip such files",
    "rest": "read such files up to the error",
}


@dataclass
class InputErrors:
    """Raises at the first unreadable input, or with `skip_bad` counts them.

    Of the `only` file, an error of the first documents is raised once a good one shows that the
    advice to skip them works, or at the file's end.
    """

    skip_bad: bool
    only: bool = False  # and no document was good yet
    count: int = 0  # documents and files skipped so far
    examples: list[str] = field(default_factory=list)  # the first of them: file, place, reason
    _first: tuple[str, Extent] | None = None  # not raised yet

    def add(self, error: str, extent: Extent = "document") -> None:
        if not self.skip_bad:
            self._first = self._first or (error, extent)
            if not self.only or extent != "document":
                self.raise_first()
        self.count += 1
        if len(self.examples) < ERROR_EXAMPLES:
            self.examples.append(error)

    def raise_first(self, documents: int = 0) -> None:
        """Raise the error that waits, now that a file is read to its end or had good documents."""
        self.only = self.only and not documents
        if self._first is not None:
            error, extent = self._first
            fix = "" if self.only else f". Fix the file, or {_SKIPPING[extent]} with --skip-bad"
            raise DataError(error.rstrip(".") + fix)


TextBy = Literal["paragraph", "document", "line"]
TokenDtype = Literal["uint16", "int32"]


@dataclass(frozen=True)
class ReadOptions:
    """How inputs become documents.

    Attributes:
        text_by: The document of a text file: the lines between two blank ones (`paragraph`), the
            whole file (`document`) or a line (`line`).
        text_key: Field (JSON lines) or column (other formats) of the text.
        prompt_key: Field or column of the prompt, for fine-tuning data; None for plain text.
        completion_key: Field or column of the completion; set if `prompt_key` is.
        skip_bad: Whether unreadable input is skipped and counted instead of an error.
        zstd_long: Largest window of zstd files that is read, as log2 of its bytes; the default is
            the `zstd` command's.
    """

    text_by: TextBy = "paragraph"
    text_key: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    skip_bad: bool = False
    zstd_long: int = 27

    @property
    def content(self) -> ReadOptions:
        """These options without those that change no document that is read."""
        return replace(self, skip_bad=False, zstd_long=ReadOptions.zstd_long)

    @property
    def keys(self) -> Texts:
        """The fields or columns read, in the order of `columns`."""
        if self.prompt_key is None or self.completion_key is None:
            return (self.text_key,)
        return (self.prompt_key, self.completion_key)

    @property
    def columns(self) -> Texts:
        return ("text",) if self.prompt_key is None else ("prompt", "completion")


@dataclass(frozen=True)
class TokenizeOptions:
    """How `--tokenize` encodes documents."""

    tokenizer: Path
    fingerprint: str  # of the tokenizer
    dtype: TokenDtype  # of the token ids


@dataclass(frozen=True)
class BuildOptions:
    """All options that decide a shard's content."""

    read: ReadOptions = field(default_factory=ReadOptions)
    dedup: bool = False  # skip later documents with equal bytes
    tokenize: TokenizeOptions | None = None  # None: the output is text
