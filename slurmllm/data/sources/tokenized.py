"""Corpora of token ids, checked as they are read; `.npy` files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.data.sources.base import (
    BEGINS,
    Integers,
    Marks,
    Pieces,
    Request,
    Source,
    Tokens,
    document_hash,
    fingerprint,
    joined,
)
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

Ids = npt.NDArray[np.integer]

PIECE_TOKENS = 16384
_LARGEST = 2**31


class TokenizedSource(Source):
    """Documents that are token ids, in memory-mapped arrays.

    A document begins at the corpus's own bounds, and after each end-of-document token.

    Args:
        end_of_document: Id of the token that ends a document, None if unknown.
        vocab_size: The model's; ids must be below it. None: any id of 31 bits.
        adds_end: Whether that token is added to documents without it.
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
            DataError: the file does not match its index.
        """

    def document_size(self, document: int) -> int:
        return len(self.document(document))

    def num_pieces(self, document: int) -> int:
        return max(1, -(-len(self.document(document)) // PIECE_TOKENS))

    def read(self, requests: Sequence[Request]) -> Pieces:
        return joined([self._piece(document, piece) for document, piece in requests])

    def document_hashes(self, documents: Integers) -> npt.NDArray[np.uint64]:
        """Hashes of the ids as int32, so that the type in the file does not matter."""
        hashes = (
            document_hash(self.document(document).astype("<i4").tobytes())
            for document in documents.tolist()
        )
        return np.fromiter(hashes, dtype=np.uint64, count=len(documents))

    def _piece(self, document: int, piece: int) -> tuple[Tokens, Marks]:
        ids = self.document(document)
        begin = piece * PIECE_TOKENS
        found = ids[begin : begin + PIECE_TOKENS]
        limit = self._vocab_size or _LARGEST
        if len(found) and (int(found.max()) >= limit or int(found.min()) < 0):
            place = int(np.flatnonzero((found < 0) | (found >= limit))[0])
            raise DataError(
                f"token {begin + place} of document {document} of {self.path} is {found[place]}, "
                f"and ids must be in 0 … {limit - 1}: model.vocab_size is {limit}; was the file "
                "made with another tokenizer? Set model.vocab_size to that tokenizer's size, or "
                "name another corpus"
            )
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


MAGIC = b"\x93NUMPY"
# Tokens that are shuffled as a unit: long compared with the context that helps a prediction, short
# enough that the order mixes a corpus well.
BLOCK_TOKENS = 4096


class NumpySource(TokenizedSource):
    """Token ids of a `.npy` file, read unchanged.

    One axis: the file has no index of documents, so blocks of BLOCK_TOKENS are shuffled (the last
    may be shorter); a mask still separates documents, at end-of-document tokens and at the edges of
    blocks. Two axes: each row is a document.

    Args:
        path: The file.
        encoder: Determines the end-of-document token. None: only blocks and rows begin documents.
        vocab_size: The model's.

    Raises:
        DataError: missing, truncated, or not of integers in one or two axes.
    """

    def __init__(self, path: Path, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        super().__init__(None if encoder is None else encoder.end_of_document, vocab_size)
        self.path = path
        try:
            # Without pickle, which could run code.
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"no corpus {path}; name a .npy file of token ids") from error
        except (OSError, ValueError, EOFError) as error:
            if "Object arrays" in str(error):
                raise DataError(
                    f"{path} has Python objects; token ids must be integers: save them so with "
                    "numpy.save"
                ) from error
            raise DataError(
                f"{path} is not a whole .npy file: {error}; was it cut while it was copied? Copy "
                "or save it again"
            ) from error
        if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or tokens.size == 0:
            raise DataError(
                f"{path} has {tokens.dtype} of shape {list(tokens.shape)}; token ids must be "
                "integers in one axis, or in two with a document a row: save it so with numpy.save"
            )
        self._tokens: Ids = tokens
        self.in_blocks = tokens.ndim == 1
        self.knows_documents = tokens.ndim == 2 or encoder is not None
        self.fingerprint = fingerprint([path], "numpy")

    def __len__(self) -> int:
        rows = len(self._tokens)
        return rows if self._tokens.ndim == 2 else -(-rows // BLOCK_TOKENS)

    @property
    def total_size(self) -> int:
        return int(self._tokens.size)

    def document(self, document: int) -> Ids:
        begin = document * BLOCK_TOKENS
        end = begin + BLOCK_TOKENS
        ids: Ids = self._tokens[document] if self._tokens.ndim == 2 else self._tokens[begin:end]
        return ids
