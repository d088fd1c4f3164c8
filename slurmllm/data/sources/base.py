"""What every kind of corpus gives to the stream: documents as token ids, by number and in pieces.

A document is read piece by piece, and where the pieces are depends on the document alone: whoever
resumes in the middle of a book of a gigabyte tokenizes one piece of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    Attributes:
        tokens: int32 [n], the end-of-document token included in the last piece.
        last: Whether the document ends here.
        untrained: Of the tokens, the first so many are read but not learnt: a prompt's.
    """

    tokens: Tokens
    last: bool
    untrained: int = 0


class Source(ABC):
    """The documents of one corpus, by number in 0 … len - 1.

    Opening one costs the same at any size. Every process opens its own.

    Attributes:
        path: Of the corpus.
        fingerprint: Short hex digest that tells this content from another, at once at any size.
        trains_every_token: Whether `untrained` is 0 in all pieces.
    """

    path: Path
    fingerprint: str
    trains_every_token: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Documents, at least 1."""

    @abstractmethod
    def piece(self, document: int, index: int) -> Piece:
        """Piece `index` of a document; pieces are numbered from 0 without gaps.

        Raises:
            DataError: the document cannot serve, such as a token id beyond the vocabulary.
            StorageError: it is damaged.
        """

    @abstractmethod
    def document_hash(self, document: int) -> int:
        """64 bits that depend on the document's content alone, for the validation split."""
