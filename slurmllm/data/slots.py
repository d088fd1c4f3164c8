"""Slots of the global batch: each a token stream of its own over its share of the documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from slurmllm.data.order import Blend, DocumentOrder
from slurmllm.data.sources.base import Marks, Pieces, Request, Source, Tokens
from slurmllm.data.spec import Split, StreamSpec
from slurmllm.errors import DataError

# Numbers of a position: visit, piece, offset.
POSITION = 3
# The piece in a position that counts its offset from the document's begin, as older ones do.
WHOLE_DOCUMENT = -1
# Pieces that a slot asks for at once, at most.
_MOST_PIECES = 1024


class SlotStream:
    """A slot's share of one corpus: documents joined and cut into sequences, without padding.

    Args:
        visits: What to read.
        visit: Documents already behind it.
        piece: Of the document at hand, the piece at hand.
        offset: Tokens of that piece already handed out.

    Attributes:
        resuming: Whether what a saved position points into is still to be read.
    """

    def __init__(self, visits: DocumentIterator, visit: int, piece: int, offset: int) -> None:
        self._visits = visits
        self.position = (visit, piece, offset)
        self.resuming = piece != 0 or offset != 0
        self._head = offset
        self._tokens: Tokens = np.empty(0, dtype=np.int32)
        self._marks: Marks = np.empty(0, dtype=np.uint8)
        self._ends = np.empty(0, dtype=np.int64)
        # (visit, piece) of the pieces at hand
        self._whose: list[tuple[int, int]] = []

    def missing(self, count: int) -> int:
        """Tokens to read until `count` can be taken."""
        return max(0, self._head + count - len(self._tokens))

    def ask(self, count: int) -> list[Request]:
        """The next pieces to read; `add` must follow with them."""
        found = [self._visits.next() for _ in range(count)]
        self._whose += [(visit, piece) for visit, _, piece in found]
        return [(document, piece) for _, document, piece in found]

    def add(self, tokens: Tokens, marks: Marks, ends: npt.NDArray[np.int64]) -> None:
        """What was read, as in `Pieces`.

        Raises:
            DataError: the saved position is none.
        """
        self._ends = np.concatenate([self._ends, ends + len(self._tokens)])
        self._tokens = np.concatenate([self._tokens, tokens])
        self._marks = np.concatenate([self._marks, marks])
        if self.resuming:
            self.resuming = not self._arrived()

    def take(self, tokens: Tokens, marks: Marks) -> None:
        """Fill both [seq_len + 1] with the next sequence and the token that follows it.

        The last token is handed out again as the first of the next sequence: every token of the
        stream is an input once and, but for the very first, a label once.
        """
        end = self._head + len(tokens)
        tokens[:] = self._tokens[self._head : end]
        marks[:] = self._marks[self._head : end]
        piece = int(np.searchsorted(self._ends, end - 1, side="right"))
        begin = int(self._ends[piece - 1]) if piece else 0
        self._head = end - 1 - begin
        self._tokens, self._marks = self._tokens[begin:], self._marks[begin:]
        self._ends, self._whose = self._ends[piece:] - begin, self._whose[piece:]
        self.position = (*self._whose[0], self._head)

    def _arrived(self) -> bool:
        """Whether the saved position is among the tokens read.

        Raises:
            DataError: what it points into is shorter.
        """
        visit, piece, offset = self.position
        held = 0
        for read_visit, read_piece in self._whose:
            if read_visit != visit or piece not in (read_piece, WHOLE_DOCUMENT):
                break
            held += 1
        length = int(self._ends[held - 1]) if held else 0
        if offset < length:
            return True
        if held < len(self._whose) or piece != WHOLE_DOCUMENT:
            raise DataError(
                f"the saved data position is token {offset} of a part of a document of {length} "
                "tokens: corpus or tokenizer changed since the checkpoint; put the old ones back "
                "or start a new run"
            )
        return False


class SlotGroup:
    """Consecutive slots of the global batch, read in this process.

    Args:
        spec: The stream.
        sources: Its corpora, opened.
        slots: The slots to read.
        positions: For each of them, visit, piece and offset in each corpus, one after the other.
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
        weights = [weight for _, weight in spec.corpora]
        self._blend = Blend(weights, spec.global_batch, spec.seed, counts)
        self._split = split = Split(spec.split, spec.validation)
        # [corpora][slots]
        self._lanes: list[list[SlotStream]] = []
        for place, source in enumerate(sources):
            order = DocumentOrder(len(source), spec.seed, place)
            lanes = []
            for slot, numbers in zip(slots, positions, strict=True):
                visit, piece, offset = numbers[place * POSITION : (place + 1) * POSITION]
                visits = DocumentIterator(
                    source, order, split, slot, spec.global_batch, visit, max(piece, 0)
                )
                lanes.append(SlotStream(visits, visit, piece, offset))
            self._lanes.append(lanes)
        # Tokens and pieces read of each corpus so far; they settle how many to read at once, and
        # nothing else. At first a piece counts as four sequences: one is read, and known then.
        self._read = [[4 * spec.seq_len, 1] for _ in sources]
        # Pieces without a token since the last one.
        self._barren = [0 for _ in sources]

    def next_batch(self) -> tuple[Tokens, Marks]:
        """The next sequence of each slot and its tokens' marks, both [slots, seq_len + 1]."""
        tokens = np.empty((len(self._slots), self._width), dtype=np.int32)
        marks = np.empty((len(self._slots), self._width), dtype=np.uint8)
        corpora = self._blend.next_step()[self._slots.start : self._slots.stop]
        lanes = [self._lanes[place][row] for row, place in enumerate(corpora)]
        for place in range(len(self._sources)):
            self._fill(place, [lane for lane, p in zip(lanes, corpora, strict=True) if p == place])
        for row, lane in enumerate(lanes):
            lane.take(tokens[row], marks[row])
        return tokens, marks

    def positions(self) -> npt.NDArray[np.int64]:
        """The positions after the last batch, int64 [slots, 3 * corpora]."""
        return np.array(
            [
                [n for lane in lanes for n in lane.position]
                for lanes in zip(*self._lanes, strict=True)
            ],
            dtype=np.int64,
        )

    @property
    def counts(self) -> list[int]:
        """Sequences drawn from each corpus so far, by all slots."""
        return self._blend.counts

    def _fill(self, place: int, lanes: list[SlotStream]) -> None:
        """Read until each lane has a sequence: for all of them at once, and hardly more."""
        source, read = self._sources[place], self._read[place]
        while short := [lane for lane in lanes if lane.missing(self._width)]:
            rate = read[1] / max(read)  # pieces a token, 1 at most
            # What a saved offset points into is one piece, however far it points.
            asked = [
                lane.ask(1 if lane.resuming else _pieces(lane.missing(self._width) * rate))
                for lane in short
            ]
            pieces = source.read([request for requests in asked for request in requests])
            read[0] += len(pieces.tokens)
            read[1] += len(pieces.ends)
            self._barren[place] = (
                0 if len(pieces.tokens) else self._barren[place] + len(pieces.ends)
            )
            if self._barren[place] > 2 * len(source) + _MOST_PIECES:
                self._require_tokens(source)
                self._barren[place] = 0
            _share_out(pieces, short, [len(requests) for requests in asked])

    def _require_tokens(self, source: Source) -> None:
        """Look for a token in the whole corpus, once many pieces have held none.

        Raises:
            DataError: there is none on this side of the split.
        """
        for begin in range(0, len(source), _MOST_PIECES):
            documents = np.arange(begin, min(begin + _MOST_PIECES, len(source)))
            if not self._split.everything:
                documents = documents[self._split.holds(source.document_hashes(documents))]
            requests = [
                (document, piece)
                for document in documents.tolist()
                for piece in range(source.num_pieces(document))
            ]
            if requests and len(source.read(requests).tokens):
                return
        raise self._split.empty(source)


def _pieces(expected: float) -> int:
    """How many to read where so many are expected to do: enough at once in most cases."""
    return min(_MOST_PIECES, math.ceil(expected + math.sqrt(expected)))


def _share_out(pieces: Pieces, lanes: Sequence[SlotStream], counts: Sequence[int]) -> None:
    """Give each lane the pieces that it asked for."""
    first = begin = 0
    for lane, count in zip(lanes, counts, strict=True):
        ends = pieces.ends[first : first + count]
        end = int(ends[-1])
        lane.add(pieces.tokens[begin:end], pieces.marks[begin:end], ends - begin)
        first, begin = first + count, end


# Looked up at once, of one epoch: a hundred cost little more than one.
_MOST_AHEAD = 256
_LEAST_AHEAD = 8
_SEARCHED_AT_ONCE = 1 << 16


class DocumentIterator:
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
