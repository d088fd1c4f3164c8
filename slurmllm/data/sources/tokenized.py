"""What corpora of token ids have in common: ids are checked as they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmllm.data.document_hash import document_hash
from slurmllm.data.sources.base import (
    BEGINS,
    Integers,
    Marks,
    Pieces,
    Request,
    Source,
    Tokens,
    joined,
)
from slurmllm.errors import DataError

Ids = npt.NDArray[np.integer]

PIECE_TOKENS = 16384
_LARGEST = 2**31


class TokenizedSource(Source):
    """Documents that are token ids already, in memory-mapped arrays.

    A document begins where the corpus says so, and after each end-of-document token in it.

    Args:
        end_of_document: Id of the token that ends a document, where it is known.
        vocab_size: The model's; ids must be below it. None: any id of 31 bits.
        adds_end: Whether a document that does not end with that token gets one.
    """

    size_unit = "tokens"

    def __init__(
        self, end_of_document: int | None, vocab_size: int | None, adds_end: bool = False
    ) -> None:
        self._end_of_document = end_of_document
        self._vocab_size = vocab_size
        self._adds_end = adds_end and end_of_document is not None

    @abstractmethod
    def document(self, document: int) -> Ids:
        """The token ids of a document, of the file's type and not copied.

        Raises:
            DataError: the file is not what its index says.
        """

    def document_size(self, document: int) -> int:
        """Token ids of a document."""
        return len(self.document(document))

    def num_pieces(self, document: int) -> int:
        """As many as PIECE_TOKENS go into the document, rounded up."""
        return max(1, -(-len(self.document(document)) // PIECE_TOKENS))

    def read(self, requests: Sequence[Request]) -> Pieces:
        """Read and check some pieces."""
        return joined([self._piece(document, piece) for document, piece in requests])

    def document_hashes(self, documents: Integers) -> npt.NDArray[np.uint64]:
        """Of the ids as int32, so that the type in the file does not matter."""
        hashes = (
            document_hash(self.document(document).astype("<i4").tobytes())
            for document in documents.tolist()
        )
        return np.fromiter(hashes, dtype=np.uint64, count=len(documents))

    def _piece(self, document: int, piece: int) -> tuple[Tokens, Marks]:
        ids = self.document(document)
        begin = piece * PIECE_TOKENS
        found = ids[begin : begin + PIECE_TOKENS]
        self._check(found, document, begin)
        tokens = found.astype(np.int32)
        end = self._end_of_document
        if (
            self._adds_end
            and begin + PIECE_TOKENS >= len(ids)
            and (len(ids) == 0 or int(ids[-1]) != end)
        ):
            tokens = np.append(tokens, np.int32(end))  # type: ignore[arg-type]
        marks = np.zeros(len(tokens), dtype=np.uint8)
        if end is not None:
            marks[1:][tokens[:-1] == end] = BEGINS
        if len(tokens) and (begin == 0 or (end is not None and int(ids[begin - 1]) == end)):
            marks[0] = BEGINS
        return tokens, marks

    def _check(self, ids: Ids, document: int, begin: int) -> None:
        limit = self._vocab_size or _LARGEST
        if not len(ids) or (int(ids.max()) < limit and int(ids.min()) >= 0):
            return
        place = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
        raise DataError(
            f"token {begin + place} of document {document} of {self.path} is {ids[place]}, and "
            f"ids must be in 0 … {limit - 1}: model.vocab_size is {limit}; was the file made with "
            "another tokenizer? Set model.vocab_size to that tokenizer's size, or name another "
            "corpus"
        )
