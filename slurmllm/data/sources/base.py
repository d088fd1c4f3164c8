"""What every kind of corpus gives to the stream: documents as token ids, by number and in pieces.

A document is read piece by piece, and where the pieces are depends on the document alone: whoever
resumes in the middle of a book of a gigabyte tokenizes one piece of it.
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

from slurmllm.errors import StorageError

Tokens = npt.NDArray[np.int32]
Marks = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

# What a token's mark may say of it.
BEGINS = 1  # the first of a document
UNTRAINED = 2  # read but not learnt: a prompt's

# (document, piece)
Request = tuple[int, int]


class Pieces(NamedTuple):
    """Consecutive tokens of documents, one piece after the other.

    Attributes:
        tokens: int32 [n]; in the last piece of a text, its end-of-document token.
        marks: uint8 [n], BEGINS and UNTRAINED of each token.
        ends: int64 [pieces], where in `tokens` each piece ends.
    """

    tokens: Tokens
    marks: Marks
    ends: Integers


def joined(parts: Sequence[tuple[Tokens, Marks]]) -> Pieces:
    """Pieces out of tokens and marks of each."""
    return Pieces(
        np.concatenate([tokens for tokens, _ in parts]),
        np.concatenate([marks for _, marks in parts]),
        np.cumsum([len(tokens) for tokens, _ in parts], dtype=np.int64),
    )


class Source(ABC):
    """The documents of one corpus, by number in 0 … len - 1.

    Opening one costs the same at any size. Every process opens its own.

    Attributes:
        path: Of the corpus.
        fingerprint: Short hex digest that tells this content from another, at once at any size.
        trains_every_token: Whether no token is marked UNTRAINED.
        in_blocks: Whether what is shuffled is not documents but blocks of tokens.
        knows_documents: Whether BEGINS marks documents, not only what is shuffled as one.
        template: Short hex digest of the chat template that shapes its tokens, if one does.
        former_fingerprint: What states of version 1 knew it by.
        size_unit: Of `total_size` and `document_size`: UTF-8 bytes of text, or token ids.
    """

    path: Path
    fingerprint: str
    trains_every_token: bool = True
    in_blocks: bool = False
    knows_documents: bool = True
    template: str = ""
    former_fingerprint: str | None = None
    size_unit: Literal["bytes", "tokens"]

    @abstractmethod
    def __len__(self) -> int:
        """Documents, at least 1."""

    @property
    @abstractmethod
    def total_size(self) -> int:
        """Size of all documents, in constant time."""

    @abstractmethod
    def document_size(self, document: int) -> int:
        """Size of one document."""

    @abstractmethod
    def num_pieces(self, document: int) -> int:
        """Pieces of a document, at least 1, in constant time; one may be without tokens."""

    @abstractmethod
    def read(self, requests: Sequence[Request]) -> Pieces:
        """Some pieces, at least one.

        Raises:
            DataError: a document cannot serve, such as a token id beyond the vocabulary.
            StorageError: one is damaged.
        """

    @abstractmethod
    def document_hashes(self, documents: Integers) -> npt.NDArray[np.uint64]:
        """64 bits of each document that depend on its content alone, for the validation split."""


_LOW_64 = (1 << 64) - 1


def document_hash(text: bytes | memoryview) -> int:
    """Id of a document: the low 64 bits of the xxh3-128 of its text's UTF-8 bytes."""
    return xxhash.xxh3_128_intdigest(text) & _LOW_64


def prompt_hash(prompt: bytes, completion: bytes) -> int:
    """Id of a prompt with its completion, both as UTF-8 bytes.

    The prompt's length goes first (8 bytes, little endian), for the cut between the two counts.
    """
    return document_hash(b"".join((len(prompt).to_bytes(8, "little"), prompt, completion)))


# Read to the end in some hundredths of a second.
_WHOLE_BYTES = 32 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(paths: Sequence[Path], *identity: str) -> str:
    """Short hex digest of files: sizes, and all of a small file or evenly spaced samples.

    It tells another file at once, and a file that was rewritten or cut; bytes of a large file
    changed between two samples it does not see. (Where a corpus has hashes of its documents, each
    is compared when it is read.)

    Args:
        paths: The files of a corpus, in a fixed order.
        identity: What else tells it from another, such as the kind.

    Raises:
        StorageError: a file cannot be read.
    """
    digest = hashlib.sha256("\0".join(identity).encode())
    for path in paths:
        try:
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                if size <= _WHOLE_BYTES:
                    digest.update(xxhash.xxh3_128_digest(stream.read()))
                    continue
                last = size - _SAMPLE_BYTES
                for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                    digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, offset))
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()[:16]
