"""JSON lines: an object a line, the text in one field, prompt and completion in two, or messages.

Arrow parses whole blocks, five times as fast as Python parses lines. A block with an unreadable
line, a null or an empty line is parsed again line by line, which finds place and reason of each
error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json as pj

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ReadOptions
from slurmllm.corpus.readers.base import (
    SEE_KEYS,
    Documents,
    OnError,
    conversation_text,
    line_blocks,
    valid_utf8,
)


def read_json_lines(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    line = 1
    for block in line_blocks(stream, on_error):
        feeds = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        # Messages differ in their fields, which Arrow would unite.
        whole = options.messages_key is None
        documents = _parse_block(block, feeds, options.keys) if whole else None
        if documents is None:
            documents = _parse_lines(block, line, stream.file.name, options, on_error)
        yield documents
        line += len(feeds)


def _parse_block(
    block: bytes, feeds: npt.NDArray[np.int64], keys: tuple[str, ...]
) -> Documents | None:
    """Parse all lines of a block at once; None if they must be parsed one by one."""
    # Arrow ignores line ends. If there is a brace on either side of each, none is inside an
    # object, and as many objects as lines mean one object a line.
    data = np.frombuffer(block, np.uint8)
    inner = feeds[: len(feeds) - block.endswith(b"\n")]
    last = data[inner - 1]
    if (last == ord("\r")).any():
        last = np.where(last == ord("\r"), data[inner - 2], last)
    if (last != ord("}")).any() or (data[inner + 1] != ord("{")).any():
        return None
    if not valid_utf8(block):
        return None
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            # One block, since Arrow refuses objects that straddle two; one thread, since other
            # processes read other shards.
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(key, pa.large_string()) for key in keys]),
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != len(inner) + 1 or any(column.null_count for column in table.columns):
        return None
    return tuple(column.combine_chunks() for column in table.columns)


def _parse_lines(
    block: bytes, first_line: int, name: str, options: ReadOptions, on_error: OnError
) -> Documents:
    rows: list[tuple[str, ...]] = []
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if not line or line.isspace():
            continue
        place = f"{name}:{number}"
        try:
            record = json.loads(line.decode("utf-8").rstrip())
        except UnicodeDecodeError as error:
            on_error(f"{place}: byte {error.start} of the line is not UTF-8")
            continue
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):  # its message counts lines of its own
                reason = f"{error.msg} at character {error.pos + 1}"
            on_error(f"{place}: not JSON: {reason}; a line must hold one whole object")
            continue
        if not isinstance(record, dict):
            on_error(f"{place}: a JSON {type(record).__name__}, not an object")
            continue
        if options.messages_key is not None:
            try:
                rows.append((conversation_text(record, options.messages_key),))
            except ValueError as error:
                on_error(f"{place}: {error}")
            continue
        unusable = next(filter(None, (_field_error(record, key) for key in options.keys)), None)
        if unusable is None:
            rows.append(tuple(record[key] for key in options.keys))
        else:
            on_error(f"{place}: {unusable}")
    return tuple(
        pa.array([row[index] for row in rows], pa.large_string())
        for index in range(len(options.keys))
    )


def _field_error(row: dict[str, Any], key: str) -> str | None:
    """Return why a field is not text, None if it is."""
    text = row.get(key)
    if isinstance(text, str):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # JSON can escape what UTF-8 cannot encode
            return f"field {key!r} has half a surrogate pair, which is no text"
        return None
    if key in row:
        return f"field {key!r} is {json.dumps(text)[:40]}, not a string"
    fields = ", ".join(sorted(row)[:10]) or "none"
    return f"no field {key!r} (fields: {fields}); {SEE_KEYS}"
