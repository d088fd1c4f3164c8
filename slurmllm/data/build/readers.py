"""Documents out of one input file, streamed: text, JSON lines, Parquet, Arrow.

A document is a non-empty piece of text that will be followed by an end-of-document token.
Whatever cannot be read is handed to `on_fault`, which either raises or counts and goes on: a
reader decides where a document ends, never what a fault costs.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from slurmllm.data.build.inputs import InputFile, TextBy
from slurmllm.data.sources.arrow import Corpus

_BUFFER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
# Rows decoded at once: bounds the memory where single documents run to megabytes.
_PARQUET_ROWS = 256

OnFault = Callable[[str], None]


@dataclass(frozen=True)
class ReadOptions:
    """How inputs become documents.

    Attributes:
        text_by: What a document of a text file is: the lines between two blank ones
            (`paragraph`), the whole file (`document`) or a line (`line`).
        text_key: Field (JSON lines) or column (Parquet) that holds the text.
        skip_bad: Whether what cannot be read is left out and counted instead of an error.
    """

    text_by: TextBy = "paragraph"
    text_key: str = "text"
    skip_bad: bool = False


class DocumentReader(AbstractContextManager["DocumentReader"]):
    """Iterates over the documents of one file; a context manager, for it holds the file open.

    Args:
        file: The file.
        options: How it becomes documents.
        on_fault: Called with `file:place: what is wrong` for each document that is unreadable.
    """

    def __init__(self, file: InputFile, options: ReadOptions, on_fault: OnFault) -> None:
        self.file = file
        self.options = options
        self._on_fault = on_fault
        self._raw: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._raw is not None:
            self._raw.close()

    @property
    def position_bytes(self) -> int:
        """How far into the file, as it lies on disk, reading has come."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def __iter__(self) -> Iterator[str]:
        # An Arrow corpus raises errors of its own; those below are the file system's and the
        # decompressors', for which a cut or corrupt file is an OSError too.
        try:
            if self.file.format == "arrow":
                yield from Corpus(self.file.path)
                return
            self._raw = self.file.path.open("rb")
            if self.file.format == "parquet":
                yield from self._parquet(self._raw)
            elif self.file.format == "jsonl":
                yield from self._json_lines(self._decompressed(self._raw))
            else:
                yield from self._text(self._decompressed(self._raw))
        except OSError as error:
            self._on_fault(f"{self.file.name}: cannot be read to its end: {error}")
        except pa.ArrowInvalid as error:
            self._on_fault(f"{self.file.name}: not a readable Parquet file: {error}")

    def _decompressed(self, raw: BinaryIO) -> BinaryIO:
        if self.file.compression is None:
            return raw
        # Arrow's decompressors raise at a cut stream, which Python's zstandard passes over.
        stream = pa.CompressedInputStream(raw, self.file.compression)
        return io.BufferedReader(stream, _BUFFER_BYTES)

    def _text(self, stream: BinaryIO) -> Iterator[str]:
        for offset, data in _pieces(stream, self.options.text_by):
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                self._on_fault(
                    f"{self.file.name}: byte {offset + error.start} is not UTF-8 "
                    f"(0x{data[error.start]:02x})"
                )
                continue
            if "\r" in text:
                text = text.replace("\r\n", "\n")
            yield text if self.options.text_by == "document" else text.strip("\r\n")

    def _json_lines(self, stream: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.isspace():
                continue
            where = f"{self.file.name}:{number}"
            try:
                row = json.loads(line.decode("utf-8").rstrip())
            except UnicodeDecodeError as error:
                self._on_fault(f"{where}: byte {error.start} of the line is not UTF-8")
                continue
            except (ValueError, RecursionError) as error:
                reason = str(error)
                if isinstance(error, json.JSONDecodeError):  # whose own text counts other lines
                    reason = f"{error.msg} at character {error.pos + 1}"
                self._on_fault(f"{where}: not JSON: {reason}; a line must hold one whole object")
                continue
            if not isinstance(row, dict):
                self._on_fault(f"{where}: a JSON {type(row).__name__}, not an object")
            elif (text := self._field(row, where)) is not None:
                yield text

    def _field(self, row: dict[str, Any], where: str) -> str | None:
        key = self.options.text_key
        text = row.get(key)
        if isinstance(text, str):
            if text.isascii() or _encodable(text):
                return text
            self._on_fault(f"{where}: field {key!r} holds half a surrogate pair, which is no text")
        elif key in row:
            self._on_fault(f"{where}: field {key!r} is {json.dumps(text)[:40]}, not a string")
        else:
            fields = ", ".join(sorted(row)[:10]) or "no field"
            self._on_fault(f"{where}: no field {key!r} (there is {fields}); see --text-key")
        return None

    def _parquet(self, raw: BinaryIO) -> Iterator[str]:
        key = self.options.text_key
        # pre_buffer would hold whole row groups, often a gigabyte, in memory.
        file = pq.ParquetFile(raw, pre_buffer=False)
        if key not in file.schema_arrow.names:
            columns = ", ".join(file.schema_arrow.names[:10])
            self._on_fault(
                f"{self.file.name}: no column {key!r} (there is {columns}); see --text-key"
            )
            return
        kind = file.schema_arrow.field(key).type
        if not _is_text(kind):
            self._on_fault(
                f"{self.file.name}: column {key!r} is {kind}, not strings; see --text-key"
            )
            return
        row = 0
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[key], use_threads=False):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    self._on_fault(f"{self.file.name}: row {row} of column {key!r} is null")
                else:
                    yield text


def _pieces(stream: BinaryIO, text_by: TextBy) -> Iterator[tuple[int, bytes]]:
    """Cut a text file into documents: (offset in bytes in the unpacked file, the bytes)."""
    if text_by == "document":
        data = stream.read()
        bom = len(_BOM) if data.startswith(_BOM) else 0
        yield bom, data[bom:]
        return
    block: list[bytes] = []
    begin = offset = 0
    for line in stream:
        begins_file = offset == 0 and line.startswith(_BOM)
        if line.isspace():
            if block:
                yield begin, b"".join(block)
                block.clear()
        else:
            if not block:
                begin = offset + (len(_BOM) if begins_file else 0)
            block.append(line.removeprefix(_BOM) if begins_file else line)
            if text_by == "line":
                yield begin, block.pop()
        offset += len(line)
    if block:
        yield begin, b"".join(block)


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
