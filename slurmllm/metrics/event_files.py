"""The scalars of a TensorBoard event file, many events at a time.

A training writes the same tags over and over, so that its events have few layouts, and events of
one layout differ in a few bytes alone: wall time, step and values. An event of a new layout is
taken apart (`event`); those that are like it in all other bytes are then read together by numpy.
The file is read in pieces, and events too large to be scalars are passed over: memory holds the
scalars and one piece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from slurmllm.metrics.curves import Flags, Floats, Ints
from slurmllm.metrics.event_format import (
    Layout,
    MalformedEventError,
    Scalar,
    masked_crc32c,
    read_layout,
    read_varint,
)
from slurmllm.metrics.log_series import TagSeries

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_PIECE_BYTES = 4 << 20
_MOST_EVENT_BYTES = 16 << 20
_FRAME_BYTES = 16  # length, its checksum, and the checksum of the event
_HEADER = struct.Struct("<QI")
_MOST_ALIKE_BYTES = 4096
_MOST_STEP_BYTES = 8
_MOST_LAYOUTS = 10_000
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class EventFile:
    """An event file as it was read.

    Attributes:
        events: How many it holds.
        starts: Places of the events with which a process began to write.
        series: Tag → its values.
        warnings: What a reader should know.
    """

    events: int = 0
    starts: list[int] = field(default_factory=list)
    series: dict[str, TagSeries] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_event_file(path: Path) -> EventFile:
    """Read the scalars of an event file, as far as it is whole.

    Raises:
        OSError: the file cannot be read.
    """
    found = EventFile()
    known = _Layouts()
    parts: dict[str, list[TagSeries]] = {}
    with path.open("rb") as stream:
        try:
            for text, offsets, sizes in _pieces(stream):
                piece = _Piece(text, offsets, sizes, found.events)
                known.read(piece)
                found.events += len(offsets)
                found.starts += piece.starts
                if piece.malformed:
                    found.warnings.append(
                        f"{path}: {piece.malformed} records are no TensorBoard events and left out"
                    )
                for tag, series in piece.series().items():
                    parts.setdefault(tag, []).append(series)
        except _BrokenRecordError as error:
            found.warnings.append(f"{path}: {error}; read as far as that")
    for tag, of_tag in parts.items():
        found.series[tag] = TagSeries(
            np.concatenate([part.order for part in of_tag]),
            np.concatenate([part.steps for part in of_tag]),
            np.concatenate([part.values for part in of_tag]),
            np.concatenate([part.times for part in of_tag if part.times is not None]),
        )
    return found


class _BrokenRecordError(Exception):
    """Where a file ceases to be a row of whole records."""


def _pieces(stream: BinaryIO) -> Iterator[tuple[bytes, Ints, Ints]]:
    """Pieces of the file, and where in them the events begin and how long they are.

    Raises:
        _BrokenRecordError: a record is cut, or its length is damaged.
    """
    text, before = b"", 0  # bytes that are not read yet, and how many there were before them
    lengths: dict[int, int] = {}  # checksums of lengths met before
    file_bytes = stream.seek(0, 2)
    stream.seek(0)
    while more := stream.read(_PIECE_BYTES):
        text += more
        offsets, sizes, at, whole = _frames(text, lengths)
        if offsets:
            yield text, np.array(offsets), np.array(sizes)
        text, before = text[at:], before + at
        if not whole:
            raise _BrokenRecordError(f"the record at byte {before} is damaged")
        size = _HEADER.unpack_from(text)[0] if len(text) >= _HEADER.size else 0
        if size > _MOST_EVENT_BYTES and before + size + _FRAME_BYTES <= file_bytes:
            before = stream.seek(before + size + _FRAME_BYTES)
            text = b""
    if text:
        raise _BrokenRecordError(f"the last record, at byte {before}, is cut")


def _frames(text: bytes, lengths: dict[int, int]) -> tuple[list[int], list[int], int, bool]:
    """The whole records of a piece.

    Returns:
        Where their events begin, how long these are, where the next record begins, and whether
        its length may be true.
    """
    offsets: list[int] = []
    sizes: list[int] = []
    at, end, unpack, known = 0, len(text), _HEADER.unpack_from, lengths.get
    while at + _FRAME_BYTES <= end:
        size, checksum = unpack(text, at)
        if known(size) != checksum:
            if masked_crc32c(text[at : at + 8]) != checksum:
                return offsets, sizes, at, False
            lengths[size] = checksum
        following = at + size + _FRAME_BYTES
        if following > end:
            break
        offsets.append(at + _HEADER.size)
        sizes.append(size)
        at = following
    return offsets, sizes, at, True


class _Piece:
    """The events of a piece of the file, and what was read of them."""

    def __init__(self, text: bytes, offsets: Ints, sizes: Ints, before: int) -> None:
        self.text, self.offsets, self.sizes = text, offsets, sizes
        self._before = before  # events of the file before this piece
        # Rows of whole words may reach beyond the last event.
        self.raw: Bytes = np.frombuffer(text + bytes(8), dtype=np.uint8)
        self.starts: list[int] = []
        self.malformed = 0
        self._found: dict[str, list[tuple[Ints, Ints, Floats, Floats]]] = {}

    def event(self, index: int) -> bytes:
        """The bytes of an event."""
        offset = int(self.offsets[index])
        return self.text[offset : offset + int(self.sizes[index])]

    def add(self, tag: str, indices: Ints, steps: Ints, values: Floats, times: Floats) -> None:
        """Take values of a tag down."""
        self._found.setdefault(tag, []).append((indices, steps, values, times))

    def add_start(self, index: int) -> None:
        """Take down that a process began to write."""
        self.starts.append(self._before + index)

    def series(self) -> dict[str, TagSeries]:
        """What was found, in the order of the file."""
        series = {}
        for tag, found in self._found.items():
            columns = [np.concatenate(column) for column in zip(*found, strict=True)]
            indices, steps, values, times = (
                c[np.argsort(columns[0], kind="stable")] for c in columns
            )
            series[tag] = TagSeries(indices + self._before, steps, values, times)
        return series


class _Layouts:
    """Reads events by their layouts; those met before are known."""

    def __init__(self) -> None:
        # The bits that all events of a layout share, and which bits these are → the layout
        self._known: dict[tuple[bytes, bytes], Layout | None] = {}

    def read(self, piece: _Piece) -> None:
        """Read all events of a piece."""
        for size in np.unique(piece.sizes):
            left: Ints = np.flatnonzero(piece.sizes == size)
            if size <= _MOST_ALIKE_BYTES:
                left = self._read_alike(piece, left, int(size))
            for index in left:
                _read_one(piece, int(index))
        piece.starts.sort()

    def _read_alike(self, piece: _Piece, indices: Ints, size: int) -> Ints:
        """Read events of one length by their layouts; returns those to be read alone.

        Events whose values stand at the same places are read in one round: they are sorted by
        the bits beside the values, that is by tag.
        """
        windows = np.lib.stride_tricks.sliding_window_view(piece.raw, -(-size // 8) * 8)
        rows = windows[piece.offsets[indices]]
        alone: list[int] = []
        while len(indices):
            event = piece.event(int(indices[0]))
            layout = _layout(event)
            if layout is None:
                alone.append(int(indices[0]))
                indices, rows = indices[1:], rows[1:]
                continue
            mask = _shared_bits(layout, size)
            shared = rows.view(np.uint64) & mask
            _, first, group = np.unique(_hashed(shared), return_index=True, return_inverse=True)
            alike: Flags = np.all(shared == shared[first][group], axis=1)
            members = np.argsort(group, kind="stable")
            ends = np.cumsum(np.bincount(group, minlength=len(first)))
            taken: Flags = np.zeros(len(indices), dtype=bool)
            for place, end, begin in zip(first, ends, [0, *ends[:-1]], strict=True):
                event = piece.event(int(indices[place]))
                of_group = self._layout_with(mask, shared[place].tobytes(), event)
                if of_group is not None:
                    mine = members[begin:end][alike[members[begin:end]]]
                    _read_rows(piece, indices[mine], rows[mine], of_group)
                    taken[mine] = True
            indices, rows = indices[~taken], rows[~taken]
        return np.array(alone, dtype=np.int64)

    def _layout_with(self, mask: Words, shared: bytes, event: bytes) -> Layout | None:
        """The layout of an event, if its values stand where the mask has none."""
        key = (mask.tobytes(), shared)
        if key not in self._known:
            if len(self._known) >= _MOST_LAYOUTS:
                self._known.clear()
            layout = _layout(event)
            same = layout is not None and np.array_equal(_shared_bits(layout, len(event)), mask)
            self._known[key] = layout if same else None
        return self._known[key]


def _layout(event: bytes) -> Layout | None:
    """The layout of an event with scalars; None where it has to be read alone."""
    try:
        layout = read_layout(event)
    except MalformedEventError:
        return None
    varints = any(scalar.dtype.startswith("varint") for scalar in layout.scalars)
    long_step = layout.step is not None and layout.step[1] > _MOST_STEP_BYTES
    return None if layout.starts or varints or long_step or not layout.scalars else layout


def _shared_bits(layout: Layout, size: int) -> Words:
    """The bits that are the same in all events of a layout, by words of 8 bytes."""
    mask = np.zeros(-(-size // 8) * 8, dtype=np.uint8)
    mask[:size] = 0xFF
    if layout.wall_time is not None:
        mask[layout.wall_time : layout.wall_time + 8] = 0
    if layout.step is not None:
        begin, length = layout.step
        mask[begin : begin + length] = 0x80
    for scalar in layout.scalars:
        mask[scalar.offset : scalar.offset + int(scalar.dtype[-1])] = 0
    return mask.view(np.uint64)


def _hashed(rows: Words) -> Words:
    """A number for each row, which only equal rows are likely to share. [rows]"""
    found: Words = np.zeros(len(rows), dtype=np.uint64)
    for word in range(rows.shape[1]):
        found = (found ^ rows[:, word]) * _ODD
        found ^= found >> np.uint64(29)
    return found


def _read_rows(piece: _Piece, indices: Ints, rows: Bytes, layout: Layout) -> None:
    """Take down the scalars of events of one layout."""
    times = np.zeros(len(rows))  # protobuf does not write a zero
    if layout.wall_time is not None:
        times = _column(rows, layout.wall_time, "<f8")
    steps: Ints = np.zeros(len(rows), dtype=np.int64)
    if layout.step is not None:
        begin, size = layout.step
        for place in range(size):
            steps |= (rows[:, begin + place].astype(np.int64) & 0x7F) << (7 * place)
    for scalar in layout.scalars:
        piece.add(scalar.tag, indices, steps, _column(rows, scalar.offset, scalar.dtype), times)


def _column(rows: Bytes, offset: int, dtype: str) -> Floats:
    """Numbers that stand at the same place in every row."""
    size = int(dtype[-1])
    text = np.ascontiguousarray(rows[:, offset : offset + size])
    if dtype == "bf2":
        halves = text.view("<u2").ravel().astype(np.uint32)
        return (halves << 16).view(np.float32).astype(np.float64)
    return text.view(dtype).ravel().astype(np.float64)


def _read_one(piece: _Piece, index: int) -> None:
    """Take an event down that is like no other."""
    event = piece.event(index)
    try:
        layout = read_layout(event)
        step = read_varint(event, layout.step[0])[0] if layout.step is not None else 0
        values = [_value(event, scalar) for scalar in layout.scalars]
    except MalformedEventError:
        piece.malformed += 1
        return
    if layout.starts:
        piece.add_start(index)
    at = layout.wall_time
    time = 0.0 if at is None else struct.unpack_from("<d", event, at)[0]
    here = np.array([index]), np.array([step])
    for scalar, value in zip(layout.scalars, values, strict=True):
        piece.add(scalar.tag, *here, np.array([value]), np.array([time]))


def _value(event: bytes, scalar: Scalar) -> float:
    if not scalar.dtype.startswith("varint"):
        row = np.frombuffer(event, dtype=np.uint8)[None, :]
        return float(_column(row, scalar.offset, scalar.dtype)[0])
    number, _ = read_varint(event, scalar.offset)
    bits = scalar.dtype.removeprefix("varint").strip()
    if not bits:
        return float(number)
    halves = np.array([[number & 0xFF, number >> 8 & 0xFF]], dtype=np.uint8)
    return float(_column(halves, 0, bits)[0])
