"""Text files: paragraphs, lines or whole files as documents.

A line ends at `\\n`, `\\r\\n` or `\\r`, which all become `\\n`; a line of only ASCII white space is
blank. Line ends around a paragraph or line are not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slurmllm.data.corpus.decompress import OpenedInput
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.readers import base
from slurmllm.data.corpus.readers.base import (
    BOM,
    CHUNK_BYTES,
    Documents,
    OnError,
    large_strings,
    line_blocks,
    valid_utf8,
)
from slurmllm.data.sources.base import Integers

_NULS = b"\0" * 4
_BLANK = rb"[ \t\r\x0b\x0c]*"
_LEADING_BLANK_LINES = re.compile(rb"(?:" + _BLANK + rb"\n)*")
_BLANK_LINES = re.compile(rb"\n(?:" + _BLANK + rb"\n)+")


def read_text(stream: OpenedInput, options: ReadOptions, on_error: OnError) -> Iterator[Documents]:
    read_blocks, split = _READERS[options.text_by]
    offset = 0  # in the decompressed file
    for block in read_blocks(stream, on_error):
        if offset == 0 and block.startswith(BOM):
            offset = len(BOM)
            block = block[len(BOM) :]
        if options.text_by != "document" and block.isspace():
            spans = np.empty((0, 2), np.int64)
        else:
            spans = split(block)
        if _NULS in block or not valid_utf8(block):
            valid = []
            for begin, end in spans.tolist():
                text = block[begin:end]
                if (index := text.find(_NULS)) >= 0:
                    on_error(
                        f"{stream.file.name}: byte {offset + begin + index} begins a run of NUL "
                        "bytes, which text has not: a binary file, or one that a crash damaged"
                    )
                    continue
                try:
                    text.decode("utf-8")
                    valid.append((begin, end))
                except UnicodeDecodeError as error:
                    on_error(
                        f"{stream.file.name}: byte {offset + begin + error.start} is not UTF-8 "
                        f"(0x{text[error.start]:02x})"
                    )
            spans = np.array(valid, np.int64).reshape(-1, 2)
        texts = pa.array([], pa.large_string())  # progress
        if len(spans):
            # Without a copy, the block is an array of documents and the gaps between them,
            # alternating; every second one is a document.
            texts = large_strings(spans.reshape(-1), block)[::2]
            if b"\r" in block:
                texts = pc.replace_substring(texts, "\r\n", "\n")
                if options.text_by != "document":
                    texts = pc.utf8_trim(texts, "\r\n")
        yield (texts,)
        offset += len(block)


def _whole_file(stream: OpenedInput, on_error: OnError) -> Iterator[bytes]:
    content = bytearray()
    try:
        for data in stream.blocks(CHUNK_BYTES):
            content += data
            if len(content) > base.LARGEST_DOCUMENT:
                on_error(f"{stream.file.name}: {base.too_large('document')}", "file")
                return
    except OSError:
        yield bytes(content[: content.rfind(b"\n") + 1])
        raise
    yield bytes(content)


def _paragraph_blocks(stream: OpenedInput, on_error: OnError) -> Iterator[bytes]:
    held: list[bytes] = []  # the beginning of a paragraph
    offset = 0
    skipping = False
    try:
        for block in line_blocks(stream, on_error):
            offset += len(block)
            if not any(held) and block.isspace():
                skipping = False
                yield block  # there are files of line ends only
                continue
            end = 0
            if leading := _LEADING_BLANK_LINES.match(block):
                end = leading.end()
            if skipping and not end:  # the rest of a paragraph
                blank = _BLANK_LINES.search(block)
                block = block[blank.start() :] if blank else b""
            skipping = skipping and not block
            for blank in _BLANK_LINES.finditer(block):
                end = blank.end()
            if end:
                yield b"".join([*held, memoryview(block)[:end]])
                held = []
            held.append(block[end:])
            if sum(map(len, held)) > base.LARGEST_DOCUMENT:
                on_error(f"{stream.file.name}: near byte {offset:,}: {base.too_large('paragraph')}")
                held = []
                skipping = True
    except OSError:
        yield b"".join(held)
        raise
    yield b"".join(held)


# These two return begin and end of each document of a block: int64 [documents, 2].
def _paragraphs(block: bytes) -> Integers:
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
    return np.array([begins, ends], np.int64).T


def _lines(block: bytes) -> Integers:
    feeds = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    begins = np.concatenate([[0], feeds + 1])
    spans = np.stack([begins, np.append(feeds, len(block))], axis=1)
    spans = spans[spans[:, 0] < spans[:, 1]]
    # Only lines that begin with white space can be blank, and most of those are indented code.
    spaced = np.flatnonzero(np.frombuffer(block, np.uint8)[spans[:, 0]] <= ord(" "))
    blank = [block[begin:end].isspace() for begin, end in spans[spaced].tolist()]
    return np.delete(spans, spaced[blank], axis=0)


# How to read blocks of whole documents, and how to find the documents in one.
_READERS = {
    "paragraph": (_paragraph_blocks, _paragraphs),
    "line": (line_blocks, _lines),
    "document": (_whole_file, lambda block: np.array([[0, len(block)]], np.int64)),
}
