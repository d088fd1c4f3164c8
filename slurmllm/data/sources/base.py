"""The interface of all kinds of corpora: documents as token ids, by index and in pieces.

Documents are read piece by piece, and the pieces depend only on the document: a resume in the
middle of a document of a gigabyte tokenizes one piece of it.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from slurmllm.core.run.rundir import storage_errors

Tokens = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

# Bits of a token's mark.
BEGINS = 1  # the first of a document
UNTRAINED = 2  # read but not trained: a prompt's

# (document, piece)
Request = tuple[int, int]

_LOW_64 = (1 << 64) - 1
# Files up to this size are hashed completely, which takes some hundredths of a second.
_WHOLE_BYTES = 32 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class Pieces(NamedTuple):
    """Consecutive tokens of documents, one piece after the other.

    Attributes:
        tokens: int32 [n]; the last piece of a text includes its end-of-document token.
        marks: uint8 [n], BEGINS and UNTRAINED of each token.
        ends: int64 [pieces], end of each piece in `tokens`.
    """

    tokens: Tokens
    marks: Marks
    ends: Integers


def joined(parts: Sequence[tuple[Tokens, Marks]]) -> Pieces:
    return Pieces(
        np.concatenate([tokens for tokens, _ in parts]),
        np.concatenate([marks for _, marks in parts]),
        np.cumsum([len(tokens) for tokens, _ in parts], dtype=np.int64),
    )


class Source(ABC):
    """The documents of one corpus, by index in 0 … len - 1 (len is at least 1).

    Opening one takes the same time at any size. Every process opens its own.

    Attributes:
        path: The corpus.
        fingerprint: Short hex digest that identifies the content, in constant time.
        trains_every_token: Whether no token is marked UNTRAINED.
        in_blocks: Whether blocks of tokens are shuffled instead of documents.
        knows_documents: Whether BEGINS marks documents, not only what is shuffled as a unit.
        special_tokens: Short hex digest of special tokens that the tokenizer's fingerprint does
            not cover, empty without them.
        size_unit: Unit of `total_size` and `document_size`: UTF-8 bytes of text, or token ids.
    """

    path: Path
    fingerprint: str
    trains_every_token: bool = True
    in_blocks: bool = False
    knows_documents: bool = True
    special_tokens: str = ""
    size_unit: Literal["bytes", "tokens"]

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def total_size(self) -> int:
        """Size of all documents, in constant time."""

    @abstractmethod
    def document_size(self, document: int) -> int: ...

    @abstractmethod
    def num_pieces(self, document: int) -> int:
        """Return the number of pieces, at least 1, in constant time; a piece may be empty."""

    @abstractmethod
    def read(self, requests: Sequence[Request]) -> Pieces:
        """Read one or more pieces.

        Raises:
            DataError: a document cannot be used, such as a token id beyond the vocabulary.
            StorageError: a document is damaged, or was changed after the corpus was built.
        """

    @abstractmethod
    def content_hash(self, document: int) -> int:
        """Return the 64-bit hash of a document's content."""

    def document_hashes(self, documents: Integers) -> Hashes:
        """Return `content_hash` of each document, for the validation split."""
        hashes = map(self.content_hash, documents.tolist())
        return np.fromiter(hashes, np.uint64, count=len(documents))


# CAUTION: these hashes are the `id` of documents and decide the validation split. The same document
# must have the same hash in every corpus, on every machine and in every version.
def document_hash(utf8: bytes | memoryview) -> int:
    """Return a document's id: the low 64 bits of the xxh3-128 of its text's UTF-8 bytes."""
    return xxhash.xxh3_128_intdigest(utf8) & _LOW_64


def prompt_content(prompt: bytes | memoryview, completion: bytes | memoryview) -> bytes:
    """Return what is hashed: the prompt's length first, so that the cut between the two counts."""
    return b"".join((len(prompt).to_bytes(8, "little"), prompt, completion))


def fingerprint(paths: Sequence[Path], *identity: str) -> str:
    """Return a short digest of files: sizes, and all of a small file or evenly spaced samples.

    It detects another, a rewritten or a truncated file, but not a change between two samples of a
    large file. (If a corpus has hashes of its documents, each is verified when it is read.)

    `identity` is what else distinguishes them, such as the kind; a StorageError if a file cannot be
    read.
    """
    content = "\0".join(identity).encode()
    for path in paths:
        with storage_errors(f"cannot read {path}"), path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            content += size.to_bytes(8, "little")
            if size <= _WHOLE_BYTES:
                content += xxhash.xxh3_128_digest(stream.read())
                continue
            for i in range(_SAMPLES):
                offset = (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)
                content += os.pread(stream.fileno(), _SAMPLE_BYTES, offset)
    return short_digest(content)


def short_digest(content: str | bytes) -> str:
    """Return 16 hex digits of the sha256 of a content."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]
