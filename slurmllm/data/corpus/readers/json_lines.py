"""JSON lines, or one JSON array: objects with the text in one field, or in two.

Arrow parses whole blocks, five times as fast as Python parses lines. A block with an unreadable
line, a null or an empty line is parsed again line by line, which finds place and reason of each
error.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from slurmllm.core.format import Json, Texts
from slurmllm.data.corpus.decompress import OpenedInput
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.readers import base
from slurmllm.data.corpus.readers.base import (
    BOM,
    SEE_KEYS,
    Documents,
    OnError,
    line_blocks,
    valid_utf8,
)
from slurmllm.data.sources.base import Integers

_NEXT_ELEMENT = re.compile(r"[^\s,]|\Z")


def read_json_lines(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    begin = next(stream.blocks(base.CHUNK_BYTES), b"").removeprefix(BOM)
    line = 1
    if _is_array(begin):
        try:
            yield from _read_array(stream, begin, options, on_error)
        except UnicodeDecodeError:
            on_error(f"{stream.file.name}: its JSON array has bytes that are not UTF-8", "rest")
        return
    for block in line_blocks(stream, on_error, begin=begin):
        feeds = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        documents = _parse_block(block, feeds, options.keys)
        if documents is None:
            documents = _parse_lines(block, line, stream.file.name, options, on_error)
        yield documents
        line += len(feeds)


def _is_array(begin: bytes) -> bool:
    """Return whether a file is one array, by its first bytes; not lines of which one is a list."""
    first, _, remainder = begin.lstrip().partition(b"\n")
    if not first.startswith(b"["):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not remainder.strip()


def _parse_block(block: bytes, feeds: Integers, keys: Texts) -> Documents | None:
    """Parse all lines of a block at once; None if they must be parsed one by one."""
    # Arrow ignores line ends. If there is a brace on either side of each, none is inside an
    # object, and as many objects as lines mean one object a line.
    data = np.frombuffer(block, np.uint8)
    inner = feeds[: len(feeds) - block.endswith(b"\n")]
    last = data[inner - 1]
    last = np.where(last == ord("\r"), data[inner - 2], last)
    if (last != ord("}")).any() or (data[inner + 1] != ord("{")).any() or not valid_utf8(block):
        return None
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            # One block, since Arrow refuses objects that straddle two; one thread, since other
            # processes read other shards.
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(key, pa.large_string()) for key in {*keys}]),
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != len(inner) + 1 or any(column.null_count for column in table.columns):
        return None
    return tuple(table.column(key).combine_chunks() for key in keys)


def _parse_lines(
    block: bytes, first_line: int, name: str, options: ReadOptions, on_error: OnError
) -> Documents:
    rows = []
    lines = [] if block.isspace() else block.split(b"\n")  # there are files of line ends only
    for number, line in enumerate(lines, start=first_line):
        if not line.strip():
            continue
        location = f"{name}:{number}"
        try:
            record = json.loads(line.decode("utf-8").rstrip())
        except UnicodeDecodeError as error:
            on_error(f"{location}: byte {error.start} of the line is not UTF-8")
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):  # its message counts lines of its own
                reason = f"{error.msg} at character {error.pos + 1}"
            on_error(f"{location}: not JSON: {reason}; a line must hold one whole object")
        else:
            rows += _rows(record, location, options, on_error)
    return _documents(rows, options)


def _rows(record: Any, location: str, options: ReadOptions, on_error: OnError) -> list[Texts]:
    """Return the document of a record; none if it cannot be used."""
    try:
        if not isinstance(record, dict):
            raise ValueError(f"a JSON {type(record).__name__}, not an object")
        return [tuple(_field_text(record, key) for key in options.keys)]
    except ValueError as error:
        on_error(f"{location}: {error}")
        return []


def _documents(rows: list[Texts], options: ReadOptions) -> Documents:
    return tuple(
        pa.array([row[index] for row in rows], pa.large_string())
        for index in range(len(options.keys))
    )


def _read_array(
    stream: OpenedInput, begin: bytes, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    """Read a file that is one JSON array, element by element."""
    name = stream.file.name
    decode = codecs.getincrementaldecoder("utf-8")().decode
    blocks = map(decode, stream.blocks(base.CHUNK_BYTES))
    content = decode(begin)
    position = content.index("[") + 1
    number = 1
    rows = []
    while not content.startswith(
        "]", position := next(_NEXT_ELEMENT.finditer(content, position)).start()
    ):
        try:
            record, end = json.JSONDecoder().raw_decode(content, position)
            reason = "it is cut" if end == len(content) else ""  # a number may go on
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
        if not reason:
            rows += _rows(record, f"{name}: element {number}", options, on_error)
            position = end
            number += 1
            continue
        yield _documents(rows, options)
        content = content[position:]
        position = 0
        rows = []
        # Twice as much: an element that is longer than a block is decoded anew each time.
        more = "".join(itertools.islice(blocks, 1 + len(content) // base.CHUNK_BYTES))
        if not more or len(content) > base.LARGEST_DOCUMENT:
            on_error(f"{name}: element {number} of the array: not JSON: {reason}", "rest")
            return
        content += more
    yield _documents(rows, options)
    if content[position + 1 :].strip() or any(not block.isspace() for block in blocks if block):
        on_error(f"{name}: more text after the end of its JSON array", "rest")


def _field_text(row: Json, key: str) -> str:
    """Return the text of a field, empty if it is null; a ValueError says why there is none."""
    if key not in row:
        fields = ", ".join(sorted(row)[:10]) or "none"
        raise ValueError(f"no field {key!r} (fields: {fields}); {SEE_KEYS}")
    value = "" if row[key] is None else row[key]
    if not isinstance(value, str):
        raise ValueError(f"field {key!r} is {json.dumps(value)[:40]}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can escape what UTF-8 cannot encode
        raise ValueError(f"field {key!r} has half a surrogate pair, which is no text") from None
    return value
