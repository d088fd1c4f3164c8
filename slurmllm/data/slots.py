"""Slots of the global batch: each a token stream of its own over its share of the documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slurmllm.data.order import DocumentOrder
from slurmllm.data.sources.arrow import Corpus
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

Tokens = npt.NDArray[np.int32]


class Slot:
    """One row of the global batch: documents joined and cut into sequences, without padding.

    Args:
        index: The slot's place in the global batch, which is the position of its first document.
        stride: Slots of the global batch; the slot reads positions index, index + stride, …
        visit: Documents of the slot already finished.
        offset: Tokens of the document at hand already handed out.
        read: Token ids of the document at a position, its end-of-document token included.
    """

    __slots__ = ("_read", "_tokens", "index", "offset", "stride", "visit")

    def __init__(
        self, index: int, stride: int, visit: int, offset: int, read: Callable[[int], Tokens]
    ) -> None:
        self.index = index
        self.stride = stride
        self.visit = visit
        self.offset = offset
        self._read = read
        self._tokens: Tokens | None = None

    def take(self, out: Tokens) -> None:
        """Fill `out` [seq_len + 1] with the next sequence and the token that follows it.

        The last token is handed out again as the first of the next sequence: every token of the
        stream is an input once and, but for the very first, a label once.
        """
        filled = 0
        while filled < len(out):
            tokens = self._document()
            if self.offset == len(tokens):
                self._tokens = None
                self.visit += 1
                self.offset = 0
                continue
            piece = tokens[self.offset : self.offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            self.offset += len(piece)
        # The last piece came from the document at hand, so this stays inside it.
        self.offset -= 1

    def _document(self) -> Tokens:
        if self._tokens is None:
            self._tokens = self._read(self.index + self.visit * self.stride)
            if self.offset >= len(self._tokens):
                raise DataError(
                    f"the saved data position is token {self.offset} of a document of "
                    f"{len(self._tokens)} tokens: corpus or tokenizer changed since the "
                    "checkpoint; put the old ones back or start a new run"
                )
        return self._tokens


class SlotGroup:
    """Consecutive slots of the global batch, read in this process.

    Args:
        corpus: The documents.
        encoder: Their way to tokens.
        seq_len: Tokens in a sequence.
        global_batch: Slots of the global batch.
        seed: Seed of the document order.
        slots: The slots to read.
        positions: (visit, offset) for each of them.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: TokenEncoder,
        seq_len: int,
        global_batch: int,
        seed: int,
        slots: range,
        positions: Sequence[Sequence[int]],
    ) -> None:
        self._corpus = corpus
        self._encoder = encoder
        self._order = DocumentOrder(len(self._corpus), seed)
        self.seq_len = seq_len
        self._slots = [
            Slot(slot, global_batch, visit, offset, self._read)
            for slot, (visit, offset) in zip(slots, positions, strict=True)
        ]

    def _read(self, position: int) -> Tokens:
        return self._encoder.encode(self._corpus.text(self._order.document(position)))

    def next_batch(self) -> Tokens:
        """The next sequence of each slot, int32 [slots, seq_len + 1]."""
        batch = np.empty((len(self._slots), self.seq_len + 1), dtype=np.int32)
        for slot, row in zip(self._slots, batch, strict=True):
            slot.take(row)
        return batch

    def positions(self) -> npt.NDArray[np.int64]:
        """(visit, offset) of the next sequence of each slot, int64 [slots, 2]."""
        return np.array([(slot.visit, slot.offset) for slot in self._slots], dtype=np.int64)
