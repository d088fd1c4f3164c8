"""What becomes of input that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurmllm.errors import DataError

ERROR_EXAMPLES = 20

# What a fault makes unreadable: a document, a whole file, or what follows in the file.
Extent = Literal["document", "file", "rest"]
_REMEDIES: dict[Extent, str] = {
    "document": "leave such documents out",
    "file": "leave such files out",
    "rest": "read such files up to the fault",
}


class InputErrors:
    """An error at the first fault, or a count of them.

    Attributes:
        count: Documents and files left out so far.
        examples: The first of them: file, place, reason.
    """

    def __init__(self, skip_bad: bool) -> None:
        self.skip_bad = skip_bad
        self.count = 0
        self.examples: list[str] = []

    def add(self, fault: str, extent: Extent = "document") -> None:
        """Raise a DataError or count, as told at the start."""
        if not self.skip_bad:
            remedy = f"Mend the file, or {_REMEDIES[extent]} with --skip-bad"
            raise DataError(f"{fault.rstrip('.')}. {remedy}")
        self.count += 1
        if len(self.examples) < ERROR_EXAMPLES:
            self.examples.append(fault)


TextBy = Literal["paragraph", "document", "line"]
Normalize = Literal["none", "nfc", "nfd", "nfkc", "nfkd"]
TokenDtype = Literal["uint16", "int32"]


@dataclass(frozen=True)
class ReadOptions:
    """How inputs become documents.

    Attributes:
        text_by: What a document of a text file is: the lines between two blank ones
            (`paragraph`), the whole file (`document`) or a line (`line`).
        text_key: Field (JSON lines) or column (others) that holds the text.
        prompt_key: Field or column of the prompt, for fine-tuning data; None for plain text.
        completion_key: Field or column of the completion; set where `prompt_key` is.
        skip_bad: Whether what cannot be read is left out and counted instead of an error.
    """

    text_by: TextBy = "paragraph"
    text_key: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    skip_bad: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields or columns read, in the order of `columns`."""
        if self.prompt_key is None or self.completion_key is None:
            return (self.text_key,)
        return (self.prompt_key, self.completion_key)

    @property
    def columns(self) -> tuple[str, ...]:
        """What the corpus calls them."""
        return ("text",) if self.prompt_key is None else ("prompt", "completion")


@dataclass(frozen=True)
class CleanOptions:
    """What is changed or left out.

    Attributes:
        normalize: Unicode normalization form.
        min_chars: Documents of fewer characters (code points, after normalization) are left out.
        dedup: Whether a document whose bytes came before is left out.
    """

    normalize: Normalize = "none"
    min_chars: int = 0
    dedup: bool = False


@dataclass(frozen=True)
class TokenizeOptions:
    """What `--tokenize` writes.

    Attributes:
        tokenizer: A tokenizer.json.
        fingerprint: Of its content.
        dtype: Of the token ids.
    """

    tokenizer: Path
    fingerprint: str
    dtype: TokenDtype


@dataclass(frozen=True)
class BuildOptions:
    """All of it.

    Attributes:
        read: How inputs become documents.
        clean: What is changed or left out.
        tokenize: Set where the output is token ids.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    clean: CleanOptions = field(default_factory=CleanOptions)
    tokenize: TokenizeOptions | None = None
