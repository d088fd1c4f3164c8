"""Columns of Arrow corpora, and their record batches, memory-mapped: processes share the pages."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.core.errors import DataError, StorageError
from slurmllm.core.run.file_formats import foreign_format
from slurmllm.core.run.safe_files import open_regular
from slurmllm.data.sources.base import fingerprint, short_digest
from slurmllm.data.sources.dataset_folder import corpus_files
from slurmllm.data.sources.tokenized import Ids, TokenizedSource
from slurmllm.data.tokenizer import TokenEncoder

FIX = "build it again with `slurmllm data build`"
_TOKENS = "input_ids"
_OPEN_BATCHES = 4096  # of a column: each takes a kilobyte
# Most that is copied of a file into the memory of each process, in bytes.
_LARGEST_COPY = 256 << 20


class ArrowFile:
    """Columns of an Arrow file or stream, or of a folder of Hugging Face datasets.

    A DataError if it is missing, truncated, empty or another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = corpus_files(path)
        self.batches: list[pa.RecordBatch] = []
        self._layouts: list[str] = []
        file = path
        try:
            for file in self.files:
                self._map(file)
        except FileNotFoundError as error:
            raise DataError(
                f"no corpus {path}; make one with `slurmllm data build INPUT... --out {path}`"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read corpus {file}: {error}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
            if refusal := foreign_format(file, expected="Arrow"):
                raise DataError(refusal) from error
            raise DataError(
                f"{file} is not a complete Arrow file: {error}; was it cut while it was copied, or "
                f"is it another format? {FIX.capitalize()}"
            ) from error
        # [batches + 1], the index of each batch's first row
        self.first: list[int] = np.cumsum([0, *(b.num_rows for b in self.batches)]).tolist()
        if len(self) == 0:
            raise DataError(f"{path} has no documents; {FIX} from files with text")

    def _map(self, file: Path) -> None:
        """Add the batches of a file; a DataError if it does not fit to those before it."""
        mapped = MappedBatches(file)
        if not self._layouts:
            self._schema = mapped.schema
            self.names: list[str] = mapped.schema.names
        if not mapped.schema.equals(self._schema):
            raise DataError(
                f"{file} has other columns than {self.files[0].name}, or of other types "
                f"({mapped.schema.names} and {self.names}); {FIX}"
            )
        before = pa.total_allocated_bytes()
        for batch in mapped:
            if pa.total_allocated_bytes() - before > _LARGEST_COPY:
                raise DataError(
                    f"{file} is compressed, so it cannot be mapped, and takes more than "
                    f"{_LARGEST_COPY / 1e6:,.0f} MB of memory; {FIX}"
                )
            self.batches.append(batch)
        self._layouts.append(mapped.layout)

    def __len__(self) -> int:
        return self.first[-1]

    def strings(self, name: str) -> ValueColumn:
        """Return a column of text; a DataError if there is none of this name and type."""
        if self._type(name) not in (pa.string(), pa.large_string()):
            raise DataError(
                f"{self.path} has no column {name!r} of the type string or large_string, but "
                f"{', '.join(f'{field.name} ({field.type})' for field in self._schema)}; {FIX}, "
                "whose --text-key names the column of the text"
            )
        return ValueColumn(self, name)

    def ids(self) -> Callable[[int], int] | None:
        """Return the function from a row to the hash that `data build` wrote, None without them."""
        if self._type("id") != pa.uint64() or self.batches[0].column("id").null_count:
            return None  # or an `id` of another tool
        hashes = lru_cache(_OPEN_BATCHES)(lambda batch: _values(self.batches[batch].column("id")))

        def hash_of(row: int) -> int:
            batch = bisect_right(self.first, row) - 1
            return int(hashes(batch)[row - self.first[batch]])

        return hash_of

    def has_tokens(self) -> bool:
        """Return whether the documents are lists of token ids."""
        kind = self._type(_TOKENS)
        lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
        return isinstance(kind, lists) and pa.types.is_integer(kind.value_type)

    def _type(self, name: str) -> pa.DataType:
        """Return the type of a column; null if there is not exactly one of this name."""
        index = self._schema.get_field_index(name)
        return self._schema.field(index).type if index >= 0 else pa.null()

    def fingerprint(self) -> str:
        return fingerprint(self.files, "".join(self._layouts))

    def decoded(self, document: int, data: memoryview, begin: int = 0) -> str:
        """Decode bytes of a document, from the offset `begin` in it; a StorageError if damaged."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(
                document,
                f"byte {begin + error.start} of it is not UTF-8 (0x{data[error.start]:02x})",
            ) from error

    def damaged(self, document: int, reason: str) -> StorageError:
        return StorageError(
            f"document {document} of {self.path} is damaged: {reason}; compare the file with the "
            f"sha256 in its manifest, and {FIX}"
        )


class _View(NamedTuple):
    """A batch of a column: row r is `values[offsets[r] : offsets[r + 1]]`."""

    offsets: memoryview | range
    values: Any
    rows: pa.Array | None  # the column, if it has nulls, whose values are empty


class ValueColumn:
    """A column of text, as UTF-8 bytes, or of lists of token ids, as arrays; by row."""

    def __init__(self, file: ArrowFile, name: str) -> None:
        self._file = file
        self._name = name
        self._first = file.first
        self._view: Callable[[int], _View] = lru_cache(_OPEN_BATCHES)(self._open)

    def data(self, row: int) -> Any:
        """Return the value of a row, not copied; that of a null is empty."""
        batch = bisect_right(self._first, row) - 1
        offsets, values, rows = self._view(batch)
        index = row - self._first[batch]
        if rows is not None and rows.slice(index, 1).null_count:
            return values[:0]
        begin = offsets[index]
        end = offsets[index + 1]
        if not 0 <= begin <= end <= len(values):
            raise self._file.damaged(
                row, f"column {self._name!r} has it from {begin} to {end} of {len(values)}"
            )
        return values[begin:end]

    @cached_property
    def total_size(self) -> int:
        """Size of all rows, from the first and last offset of each batch."""
        total = 0
        for batch, (begin, end) in enumerate(pairwise(self._first)):
            if begin < end:
                offsets = self._view(batch).offsets
                total += offsets[end - begin] - offsets[0]
        return total

    def _open(self, batch: int) -> _View:
        """Open the column of a batch, not copied where it can be mapped."""
        array = self._file.batches[batch].column(self._name)
        rows = array if array.null_count else None
        kind = array.type
        count = len(array)
        offsets: memoryview | range
        if pa.types.is_fixed_size_list(kind):
            offsets = range(0, (count + 1) * kind.list_size, kind.list_size)
        else:
            is_large = pa.types.is_large_string(kind) or pa.types.is_large_list(kind)
            # Indexing a memoryview yields an int without a numpy scalar, which is slower.
            offsets = np.frombuffer(
                array.buffers()[1] or b"", np.int64 if is_large else np.int32, count and count + 1
            ).data
        if kind in (pa.string(), pa.large_string()):
            return _View(offsets, memoryview(array.buffers()[2] or b"").cast("B"), rows)
        if array.values.null_count:
            raise DataError(
                f"{self._file.path} has null among the token ids of column {self._name!r} "
                f"(documents from {self._first[batch]} on); remove them, or write it again"
            )
        return _View(offsets, _values(array.values), rows)


def _values(array: pa.Array) -> npt.NDArray[Any]:
    """Return the values of an array of integers, not copied, whether null or not."""
    # Not `to_numpy`: it imports pandas if it is installed, a third of a second of a start.
    return np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype(), len(array))


class ArrowTokenSource(TokenizedSource):
    """Rows of lists of token ids, as scripts write them with Hugging Face datasets."""

    def __init__(
        self, file: ArrowFile, encoder: TokenEncoder | None, vocab_size: int | None
    ) -> None:
        super().__init__(encoder, vocab_size)
        self.path = file.path
        self.fingerprint = file.fingerprint()
        self._rows = ValueColumn(file, _TOKENS)
        self._documents = len(file)

    def __len__(self) -> int:
        return self._documents

    @property
    def total_size(self) -> int:
        return self._rows.total_size

    def document(self, document: int) -> Ids:
        ids: Ids = self._rows.data(document)
        return ids


# The record batches of an Arrow file, mapped into memory.
#
# The stream format (`pa.ipc.new_stream`, Hugging Face datasets) is a sequence of messages: a
# schema, dictionaries, record batches, an end marker. The file format is a stream between a magic
# and a footer. `data build` writes a stream and the footer: readers of both formats read such a
# file.
# (https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc)

_MAGIC = b"ARROW1"
FILE_BEGIN = _MAGIC + b"\0\0"  # of the file format
_FOOTER_END = 4 + len(_MAGIC)  # after the footer: its length (int32) and the magic
_INT32 = struct.Struct("<i")


class MappedBatches:
    """The record batches of a stream or a file, in their order; iterates once.

    Batches that are not compressed are not copied: their pages are read when they are used.

    Attributes:
        schema: The columns.
        size_bytes: Size of the file.
        offset_bytes: Where the next message begins.

    Raises:
        OSError: the file cannot be read.
        pa.ArrowException, UnicodeDecodeError: it is not an Arrow file, or damaged. The iterator
            raises it after the last complete batch.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            if not stream.peek(1):
                raise pa.ArrowInvalid("it is empty")
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._source = pa.BufferReader(pa.py_buffer(self._map))
        if self._map[: len(FILE_BEGIN)] == FILE_BEGIN:
            self._source.seek(len(FILE_BEGIN))
        try:
            self._reader = pa.ipc.open_stream(self._source)
        except OSError as error:  # of memory: the file was cut
            raise pa.ArrowInvalid(str(error)) from error
        self.schema: pa.Schema = self._reader.schema
        self.size_bytes = len(self._map)
        self._begins: list[int] = []
        self._rows: list[int] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        begin = self.offset_bytes
        while True:
            try:
                batch = self._reader.read_next_batch()
                # Buffers as long as the rows need, in constant time: Arrow reads what is beyond.
                batch.validate()
            except StopIteration:
                break
            except (pa.ArrowException, OSError) as error:  # the second: of memory, it was cut
                raise self._error(str(error)) from error
            self._begins.append(begin)
            self._rows.append(batch.num_rows)
            yield batch
            begin = self.offset_bytes
        # Arrow takes the end of a file that was cut between two batches for the end marker.
        if self.offset_bytes == begin:
            raise self._error(
                "it has no end marker: it was cut off, or its writer did not close it"
            )
        extra = self.size_bytes - self.offset_bytes
        has_footer = extra or self._map[: len(_MAGIC)] == _MAGIC
        if has_footer and not 0 < self._footer_length() <= extra - _FOOTER_END:
            raise self._error(f"{extra:,} bytes follow its end marker, and not a whole footer")

    def _error(self, reason: str) -> pa.ArrowInvalid:
        return pa.ArrowInvalid(
            f"{reason} (readable: {len(self._rows):,} batches, {sum(self._rows):,} rows)"
        )

    @property
    def offset_bytes(self) -> int:
        return int(self._source.tell())

    def release(self) -> None:
        """Release the pages, which count as memory of this process until then."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def layout(self) -> str:
        """Hex digest of the file's size and footer, or of offsets and rows of all its batches."""
        if footer := self._footer_length():
            layout = self._map[-_FOOTER_END - footer : -_FOOTER_END]
        else:
            layout = np.array([self._begins, self._rows], "<i8").tobytes()
        return short_digest(layout + str(self.size_bytes).encode())

    def _footer_length(self) -> int:
        """Return the size of the footer at the end of the file; 0 if there is none."""
        if self.size_bytes < _FOOTER_END or self._map[-len(_MAGIC) :] != _MAGIC:
            return 0
        (length,) = _INT32.unpack_from(self._map, self.size_bytes - _FOOTER_END)
        return int(length) if 0 < length <= self.size_bytes - _FOOTER_END else 0
