"""Text files: paragraphs, lines or whole files as documents.

A line ends at its line feed; a line of ASCII white space alone is blank. `\\r\\n` becomes `\\n`,
and line ends around a paragraph or line are no part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ReadOptions, TextBy
from slurmllm.corpus.readers.base import (
    BOM,
    CHUNK_BYTES,
    Documents,
    OnError,
    line_blocks,
    valid_utf8,
)

_BLANK = rb"[ \t\r\x0b\x0c]*"
_LEADING_BLANK_LINES = re.compile(rb"(?:" + _BLANK + rb"\n)*")
_BLANK_LINES = re.compile(rb"\n(?:" + _BLANK + rb"\n)+")

# Begin and end of each document of a block: int64 [documents, 2].
Spans = npt.NDArray[np.int64]


def read_text(stream: OpenedInput, options: ReadOptions, on_fault: OnError) -> Iterator[Documents]:
    """The documents of a text file."""
    offset = 0  # in the unpacked file
    for block in _blocks(stream, options.text_by):
        if offset == 0 and block.startswith(BOM):
            offset, block = len(BOM), block[len(BOM) :]
        spans = _SPANS[options.text_by](block)
        if not valid_utf8(block):
            spans = _readable(block, spans, offset, stream.file.name, on_fault)
        if len(spans):
            yield (_cut(block, spans, options.text_by),)
        offset += len(block)


def _blocks(stream: OpenedInput, text_by: TextBy) -> Iterator[bytes]:
    """Blocks that hold whole documents."""
    if text_by == "paragraph":
        yield from _paragraph_blocks(stream)
    elif text_by == "line":
        yield from line_blocks(stream)
    else:
        yield b"".join(stream.blocks(CHUNK_BYTES))


def _paragraph_blocks(stream: OpenedInput) -> Iterator[bytes]:
    held: list[bytes] = []  # the beginning of a paragraph
    for block in line_blocks(stream):
        end = 0
        if leading := _LEADING_BLANK_LINES.match(block):
            end = leading.end()
        for blank in _BLANK_LINES.finditer(block):
            end = blank.end()
        if end:
            yield b"".join([*held, memoryview(block)[:end]])
            held = []
        held.append(block[end:])
    yield b"".join(held)


def _paragraphs(block: bytes) -> Spans:
    leading = _LEADING_BLANK_LINES.match(block)
    begins = [leading.end() if leading else 0]
    ends = []
    for blank in _BLANK_LINES.finditer(block, begins[0]):
        ends.append(blank.start())
        begins.append(blank.end())
    # The last line may lack its line feed, and may be blank.
    last_line = block.rfind(b"\n", begins[-1]) + 1 or begins[-1]
    if block[last_line:].strip():
        ends.append(len(block))
    elif last_line > begins[-1]:
        ends.append(last_line - 1)
    else:
        begins.pop()
    return np.stack([np.array(begins, np.int64), np.array(ends, np.int64)], axis=1)


def _lines(block: bytes) -> Spans:
    feeds = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    begins = np.concatenate([[0], feeds + 1])
    spans = np.stack([begins, np.append(feeds, len(block))], axis=1)
    spans = spans[spans[:, 0] < spans[:, 1]]
    # White space in front is frequent, in program code; white space alone is not.
    spaced = np.flatnonzero(np.frombuffer(block, np.uint8)[spans[:, 0]] <= ord(" "))
    keep = np.ones(len(spans), bool)
    keep[spaced] = [not block[begin:end].isspace() for begin, end in spans[spaced].tolist()]
    return spans[keep]


def _whole(block: bytes) -> Spans:
    return np.array([[0, len(block)]], np.int64)


_SPANS: dict[TextBy, Callable[[bytes], Spans]] = {
    "paragraph": _paragraphs,
    "line": _lines,
    "document": _whole,
}


def _readable(block: bytes, spans: Spans, offset: int, name: str, on_fault: OnError) -> Spans:
    """The spans that are UTF-8; the others are faults."""
    good = []
    for row, (begin, end) in enumerate(spans.tolist()):
        try:
            block[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            place = begin + error.start
            on_fault(f"{name}: byte {offset + place} is not UTF-8 (0x{block[place]:02x})")
        else:
            good.append(row)
    return spans[good]


def _cut(block: bytes, spans: Spans, text_by: TextBy) -> pa.LargeStringArray:
    # Documents and what lies between them in turn, of which Arrow copies the documents.
    buffers = [None, pa.py_buffer(spans.reshape(-1)), pa.py_buffer(block)]
    pieces = pa.Array.from_buffers(pa.large_string(), 2 * len(spans) - 1, buffers, null_count=0)
    texts = pieces.take(pa.array(np.arange(0, 2 * len(spans), 2)))
    if b"\r" in block:
        texts = pc.replace_substring(texts, "\r\n", "\n")
        if text_by != "document":
            texts = pc.utf8_trim(texts, "\r\n")
    return texts
