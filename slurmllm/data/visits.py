"""The documents that a slot reads of a corpus, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmllm.data.order import DocumentOrder
from slurmllm.data.sources.base import Source
from slurmllm.data.split import Split

# Looked up at once, of one epoch: a hundred cost little more than one.
_MOST_AHEAD = 256
_LEAST_AHEAD = 8
_SEARCHED_AT_ONCE = 1 << 16


class Visits:
    """(visit, document, piece) without end; documents on the other side of the split left out.

    Args:
        source: The corpus.
        order: Its documents by position.
        split: Which of them to read.
        slot: The position of the first document.
        stride: The slot reads positions slot, slot + stride, …
        visit: Documents of the slot already behind it.
        piece: Where in the document at hand to begin.
    """

    def __init__(
        self,
        source: Source,
        order: DocumentOrder,
        split: Split,
        slot: int,
        stride: int,
        visit: int,
        piece: int,
    ) -> None:
        self._source = source
        self._order = order
        self._split = split
        self._slot = slot
        self._stride = stride
        self._looked_up = visit
        self._ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, len(source) // stride))
        self._pieces = self._walk(piece)

    def next(self) -> tuple[int, int, int]:
        """The next piece to read.

        Raises:
            DataError: this side of the split has no document.
        """
        return next(self._pieces)

    def _walk(self, piece: int) -> Iterator[tuple[int, int, int]]:
        while True:
            for visit, document in self._look_up():
                for index in range(piece, self._source.num_pieces(document)):
                    yield visit, document, index
                piece = 0

    def _look_up(self) -> list[tuple[int, int]]:
        """The next documents, at least one, and the visits that they are."""
        searched = 0
        while True:
            visits = np.arange(self._looked_up, self._looked_up + self._ahead)
            documents = self._order.take(self._slot + visits * self._stride)
            self._looked_up += self._ahead
            if not self._split.everything:
                held = self._split.holds(self._source.document_hashes(documents))
                visits, documents = visits[held], documents[held]
            if len(documents):
                return list(zip(visits.tolist(), documents.tolist(), strict=True))
            searched += self._ahead
            if searched - self._ahead < len(self._source) <= searched:
                self._require_documents()

    def _require_documents(self) -> None:
        """Look for a document in the whole corpus, once a slot has met none in as many visits."""
        for begin in range(0, len(self._source), _SEARCHED_AT_ONCE):
            documents = np.arange(begin, min(begin + _SEARCHED_AT_ONCE, len(self._source)))
            if self._split.holds(self._source.document_hashes(documents)).any():
                return
        raise self._split.empty(self._source)
