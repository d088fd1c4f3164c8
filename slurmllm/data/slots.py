"""Slots of the global batch: each reads a token stream of its own from its documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from slurmllm.core.errors import DataError
from slurmllm.data.order import Blend, DocumentOrder
from slurmllm.data.sources.base import Integers, Marks, Request, Source, Tokens
from slurmllm.data.spec import Split, StreamSpec

# Numbers per corpus in a saved position: document number of the slot, piece, offset.
POSITION = 3
# Pieces that a slot requests at once, at most.
_MOST_PIECES = 1024
# Documents looked up at once, of one epoch: a hundred cost little more than one.
_MOST_AHEAD = 256
_LEAST_AHEAD = 8


def document_pieces(
    source: Source,
    order: DocumentOrder,
    split: Split,
    slot: int,
    stride: int,
    number: int,
    piece: int,
) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of a slot's documents without end, as (number, document, piece).

    The slot reads positions slot, slot + stride, …

    Args:
        number: Documents of the slot already read, on both sides of the split.
        piece: First piece of the current document to read.
    """
    ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, len(source) // stride))
    searched = 0
    while True:
        numbers = np.arange(number, number + ahead)
        documents = order.take(slot + numbers * stride)
        number += ahead
        searched += ahead
        if split.validation:
            mask = split.document_mask(source.document_hashes(documents))
            numbers = numbers[mask]
            documents = documents[mask]
        if len(documents):
            searched = 0
        # A slot may be unlucky for long. Once, after as many documents as the corpus has, check
        # that there is any on this side.
        elif searched - ahead < len(source) <= searched:
            split.require_documents(source)
        for counted, document in zip(numbers.tolist(), documents.tolist(), strict=True):
            for index in range(piece, source.num_pieces(document)):
                yield counted, document, index
            piece = 0


class SlotStream:
    """A slot's tokens of one corpus: documents joined and cut into sequences, without padding.

    `documents` are from `document_pieces`; of the current piece, `offset` tokens were returned.

    Attributes:
        position: Number, piece and offset of the next token.
        resuming: Whether the piece at a restored position is not yet read.
    """

    def __init__(
        self, documents: Iterator[tuple[int, int, int]], number: int, piece: int, offset: int
    ) -> None:
        self._documents = documents
        self.position = (number, piece, offset)
        self.resuming = piece != 0 or offset != 0
        self._head = offset
        self._tokens = np.empty(0, np.int32)
        self._marks = np.empty(0, np.uint8)
        self._ends = np.empty(0, np.int64)
        # (number, piece) of each buffered piece
        self._buffered: list[tuple[int, int]] = []

    def missing(self, count: int) -> int:
        """Return the number of tokens to read until `count` can be taken."""
        return max(0, self._head + count - len(self._tokens))

    def request(self, count: int) -> list[Request]:
        """Return the next pieces to read; `append` must follow with them."""
        pieces = [next(self._documents) for _ in range(count)]
        self._buffered += [(number, piece) for number, _, piece in pieces]
        return [(document, piece) for _, document, piece in pieces]

    def append(self, tokens: Tokens, marks: Marks, ends: Integers) -> None:
        """Add the pieces that were read; a DataError if the restored position does not exist."""
        self._ends = np.concatenate([self._ends, ends + len(self._tokens)])
        self._tokens = np.concatenate([self._tokens, tokens])
        self._marks = np.concatenate([self._marks, marks])
        if not self.resuming:
            return
        self.resuming = False
        number, piece, offset = self.position
        length = int(self._ends[0]) if self._buffered[0] == (number, piece) else 0
        if offset >= length:
            raise DataError(
                f"the saved data position is token {offset} of a part of a document of {length} "
                "tokens: corpus or tokenizer changed since the checkpoint; restore the old ones "
                "or start a new run"
            )

    def take(self, tokens: Tokens, marks: Marks) -> None:
        """Fill both [seq_len + 1] with the next sequence and the token that follows it.

        The last token is returned again as the first of the next sequence: every token of the
        stream is an input once and, except the very first, a label once.
        """
        end = self._head + len(tokens)
        tokens[:] = self._tokens[self._head : end]
        marks[:] = self._marks[self._head : end]
        piece = int(np.searchsorted(self._ends, end - 1, side="right"))
        begin = int(self._ends[piece - 1]) if piece else 0
        self._head = end - 1 - begin
        self._tokens = self._tokens[begin:]
        self._marks = self._marks[begin:]
        self._ends = self._ends[piece:] - begin
        self._buffered = self._buffered[piece:]
        self.position = (*self._buffered[0], self._head)


class SlotGroup:
    """Consecutive slots of the global batch, read in this process.

    Args:
        positions: For each slot, document number, piece and offset in each corpus, concatenated.
        counts: Sequences drawn from each corpus so far, by all slots.
    """

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[Source],
        slots: range,
        positions: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> None:
        self._sources = sources
        self._slots = slots
        self._width = spec.seq_len + 1
        # Every group draws for all slots of the batch.
        weights = [weight for _, weight in spec.corpora]
        self._blend = Blend(weights, spec.global_batch, spec.seed, counts)
        self._split = split = Split(spec.split, spec.validation)
        # [corpora][slots]
        self._streams: list[list[SlotStream]] = []
        for corpus, source in enumerate(sources):
            order = DocumentOrder(len(source), spec.seed, corpus)
            streams = []
            for slot, numbers in zip(slots, positions, strict=True):
                number, piece, offset = numbers[corpus * POSITION : (corpus + 1) * POSITION]
                documents = document_pieces(
                    source, order, split, slot, spec.global_batch, number, piece
                )
                streams.append(SlotStream(documents, number, piece, offset))
            self._streams.append(streams)
        # Tokens and pieces read of each corpus so far; they only decide how many to read at once.
        # Initially a piece counts as four sequences, so that one is read, and then it is known.
        self._read = [[4 * spec.seq_len, 1] for _ in sources]
        # Pieces read since the last one with a token.
        self._empty_pieces = [0 for _ in sources]

    def next_batch(self) -> tuple[Integers, Integers, Tokens, Marks]:
        """Return the next sequence of each slot.

        These are the positions after the batch, [slots, 3 * corpora]; the sequences drawn so far
        from each corpus by all slots, [corpora]; tokens and marks, both [slots, seq_len + 1].
        """
        tokens = np.empty((len(self._slots), self._width), np.int32)
        marks = np.empty((len(self._slots), self._width), np.uint8)
        corpora = self._blend.next_step()[self._slots.start : self._slots.stop]
        streams = [self._streams[corpus][row] for row, corpus in enumerate(corpora)]
        for corpus in range(len(self._sources)):
            self._fill(corpus, [s for s, c in zip(streams, corpora, strict=True) if c == corpus])
        for row, stream in enumerate(streams):
            stream.take(tokens[row], marks[row])
        positions = [[stream.position for stream in streams] for streams in self._streams]
        # [corpora][slots][3] → [slots][3 * corpora]
        by_slot = np.hstack(positions).astype(np.int64)
        return by_slot, np.array(self._blend.counts, np.int64), tokens, marks

    def _fill(self, corpus: int, streams: list[SlotStream]) -> None:
        """Read until each stream has a sequence: for all of them at once, and hardly more.

        One request per slot and document would cost a call of the tokenizer each.
        """
        source = self._sources[corpus]
        read = self._read[corpus]
        while short := [stream for stream in streams if stream.missing(self._width)]:
            rate = read[1] / max(read)  # pieces per token, 1 at most
            requests = []
            for stream in short:
                # A restored offset is inside one piece, however large it is.
                count = 1
                if not stream.resuming:
                    # Plus the square root: enough at once in most cases.
                    expected = stream.missing(self._width) * rate
                    count = min(_MOST_PIECES, math.ceil(expected + math.sqrt(expected)))
                requests.append(stream.request(count))
            pieces = source.read([request for batch in requests for request in batch])
            read[0] += len(pieces.tokens)
            read[1] += len(pieces.ends)
            empty = 0 if len(pieces.tokens) else self._empty_pieces[corpus] + len(pieces.ends)
            if empty > 2 * len(source) + _MOST_PIECES:
                # Search the whole corpus for a token.
                for document in self._split.documents(source):
                    every_piece = range(source.num_pieces(document))
                    if len(source.read([(document, index) for index in every_piece]).tokens):
                        break
                else:
                    raise self._split.empty_error(source)
                empty = 0
            self._empty_pieces[corpus] = empty
            first = begin = 0
            for stream, batch in zip(short, requests, strict=True):
                ends = pieces.ends[first : first + len(batch)]
                end = int(ends[-1])
                stream.append(pieces.tokens[begin:end], pieces.marks[begin:end], ends - begin)
                first += len(batch)
                begin = end
