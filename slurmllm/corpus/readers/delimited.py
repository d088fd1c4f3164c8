"""CSV and TSV files: one row per document, the text in one column, or in two.

Python's reader knows the line of a row, takes cells of any bytes, and continues after a row that
cannot be read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import Extent, ReadOptions
from slurmllm.corpus.readers.base import (
    BOM,
    CHUNK_BYTES,
    Documents,
    OnError,
    line_blocks,
    no_column,
)

# Bytes of a line and characters of a cell; Python's reader needs some ten times the memory.
_LARGEST = 64 << 20


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    path = stream.file.path
    name = path.stem if stream.file.compression else path.name
    delimiter = "\t" if name.lower().endswith(".tsv") else ","
    return _Rows(stream, delimiter, on_error).documents(options.keys)


class _Rows:
    """The rows of a file, by Python's reader; bytes that are not UTF-8 are half surrogates."""

    def __init__(self, stream: OpenedInput, delimiter: str, on_error: OnError) -> None:
        self._stream, self._delimiter, self._on_error = stream, delimiter, on_error
        self._hole = False  # a line of the row was too long
        self._ended = False

    def documents(self, keys: tuple[str, ...]) -> Iterator[Documents]:
        with ExitStack() as stack:
            stack.callback(csv.field_size_limit, csv.field_size_limit(_LARGEST))
            rows = self._rows()
            header = next(rows, (0, []))[1]
            if not header:
                self._on_error(f"{self._stream.file.name}: an empty file, without a header", "file")
                return
            for key in keys:
                if key not in header:
                    names = [name.encode("utf-8", "replace").decode() for name in header]
                    self._on_error(f"{self._stream.file.name}: {no_column(key, names)}", "file")
                    return
            places = [header.index(key) for key in keys]
            texts: list[list[str]] = [[] for _ in keys]
            size = 0
            failure: OSError | None = None
            try:
                for number, (line, cells) in enumerate(rows, start=1):
                    reason = self._fault(cells, header, places)
                    if reason:
                        self._on_error(f"{self._stream.file.name}:{line}: row {number} {reason}")
                        continue
                    for column, place in zip(texts, places, strict=True):
                        column.append(cells[place])
                    # Of all cells: the text may be a small part of the file.
                    size += len(cells) + sum(map(len, cells))
                    if size >= CHUNK_BYTES:
                        yield tuple(pa.array(column, pa.large_string()) for column in texts)
                        texts, size = [[] for _ in keys], 0
            except OSError as error:  # what came before it is intact
                failure = error
            if texts[0]:
                yield tuple(pa.array(column, pa.large_string()) for column in texts)
            if failure is not None:
                raise failure

    def _fault(self, cells: list[str], header: list[str], places: list[int]) -> str | None:
        if self._ended:
            return "has a quotation mark that is never closed"
        if len(cells) != len(header):
            text = self._delimiter.join(cells[:60])[:60]
            return f"has {len(cells)} columns, the header has {len(header)}: {text!r}"
        for place in places:
            try:
                cells[place].encode()
            except UnicodeEncodeError:
                return f"of column {header[place]!r} is not UTF-8"
        return None

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield first line and cells of each row that is not blank."""
        reader = csv.reader(self._lines(), delimiter=self._delimiter)
        while True:
            first = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error:  # of a cell of more than the limit; the next line begins a row
                what = f"a cell of more than {_LARGEST:,} characters"
                extent: Extent = "document"
                if reader.line_num > first:
                    what, extent = f"{what}, or a quotation mark that is never closed", "rest"
                self._on_error(f"{self._stream.file.name}:{first}: {what}", extent)
                if extent == "rest":
                    return
                continue
            if cells and not self._hole:
                yield first, cells
            self._hole = False

    def _lines(self) -> Iterator[str]:
        begin = next(self._stream.blocks(CHUNK_BYTES), b"").removeprefix(BOM)
        feed = b"\r" if b"\r" in begin and b"\n" not in begin else b"\n"  # the first: of old Macs
        for block in line_blocks(
            self._stream, self._on_long_line, begin=begin, feed=feed, longest=_LARGEST
        ):
            for line in block.splitlines(keepends=True):
                yield line.decode("utf-8", "surrogateescape")
        self._ended = True
        yield "\n"  # a blank row, or the end of an open quotation

    def _on_long_line(self, error: str, extent: Extent = "document", /) -> None:
        self._hole = True
        self._on_error(error, extent)
