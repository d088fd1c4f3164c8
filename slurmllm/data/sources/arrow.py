"""Columns of Arrow corpora, memory-mapped: the processes of a machine share the pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slurmllm.data.sources.arrow_batches import ArrowBatches
from slurmllm.data.sources.base import Integers, fingerprint
from slurmllm.data.sources.dataset_folder import corpus_files
from slurmllm.data.sources.tokenized import Ids, TokenizedSource
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError, StorageError
from slurmllm.staged_files import local_copy

_FIX = "build it again with `slurmllm data build`"
_TOKENS = "input_ids"
# Batches that stay open: mapped ones take a kilobyte, decompressed ones their size.
_OPEN_BATCHES = 4096
_OPEN_COPIES = 4
# Largest batch that is copied into the memory of each process, in bytes.
_LARGEST_COPY = 256 << 20


class ArrowFile:
    """Columns of an Arrow file or stream, or of a folder of Hugging Face datasets.

    Raises:
        DataError: missing, not an Arrow file, truncated, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = corpus_files(path)
        file = path
        try:
            self._parts: list[ArrowBatches] = []
            for file in self.files:
                part = ArrowBatches(local_copy(file))
                if part.fault is not None:
                    raise pa.ArrowInvalid(part.fault)
                if part.compressed:
                    self._refuse_large_copies("compressed", part)
                elif part.rows:
                    part[0]  # raises an error if it is damaged
                self._parts.append(part)
        except FileNotFoundError as error:
            raise DataError(
                f"no corpus {path}; make one with `slurmllm data build INPUT... --out {path}`"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read corpus {file}: {error}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
            raise DataError(
                f"{file} is not a complete Arrow file: {error}; was it cut while it was copied, or "
                f"is it another format? {_FIX.capitalize()}"
            ) from error
        self._schema = self._parts[0].schema
        self.names: list[str] = self._schema.names
        for file, part in zip(self.files, self._parts, strict=True):
            if not part.schema.equals(self._schema):
                raise DataError(
                    f"{file} has other columns than {self.files[0].name} ({part.schema.names} and "
                    f"{self.names}, or of other types); {_FIX}"
                )
        self._first_batch = np.cumsum([0, *(len(part.rows) for part in self._parts)]).tolist()
        # [batches + 1], the index of each batch's first row
        rows = [0, *(rows for part in self._parts for rows in part.rows)]
        self.first: list[int] = np.cumsum(rows).tolist()
        if len(self) == 0:
            raise DataError(f"{path} has no documents; {_FIX} from files with text")
        copies = any(part.compressed for part in self._parts)
        # How many batches of a column stay open.
        self.open_batches = _OPEN_COPIES if copies else _OPEN_BATCHES
        self.batch = lru_cache(self.open_batches)(self._read)

    def __len__(self) -> int:
        return self.first[-1]

    def strings(self, name: str) -> Strings:
        """A column of text; a DataError if there is none of this name and type."""
        index = self._schema.get_field_index(name)
        kind = self._schema.field(index).type if index >= 0 else None
        if kind is not None and pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind not in (pa.string(), pa.large_string(), pa.string_view()):
            raise DataError(
                f"{self.path} has no string column {name!r} (columns: {', '.join(self.names)}); "
                f"{_FIX}, whose --text-key names the column of the text"
            )
        if kind == pa.string_view():
            self.open_batches = _OPEN_COPIES
            self._refuse_large_copies("of the type string_view", *self._parts)
        return Strings(self, name)

    def ids(self) -> DocumentIds | None:
        """The hashes of the documents that `data build` writes, None if the file has none."""
        if not self.has("id", pa.uint64()) or self.batch(0).column("id").null_count:
            return None  # or an `id` of another tool
        return DocumentIds(self)

    def has(self, name: str, *types: pa.DataType) -> bool:
        """Whether there is exactly one column of this name, of one of these types."""
        index = self._schema.get_field_index(name)
        return index >= 0 and self._schema.field(index).type in types

    def has_tokens(self) -> bool:
        """Whether the documents are lists of token ids."""
        index = self._schema.get_field_index(_TOKENS)
        kind = self._schema.field(index).type if index >= 0 else None
        is_list = kind is not None and (
            pa.types.is_list(kind) or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        )  # fmt: skip
        return is_list and pa.types.is_integer(kind.value_type)

    @property
    def layout(self) -> str:
        """Hex digest of the size and the batches of each file."""
        return "".join(part.layout for part in self._parts)

    def decoded(self, document: int, data: memoryview, begin: int = 0) -> str:
        """Decode bytes of a document, from the offset `begin` in it; a StorageError if damaged."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(
                document, f"byte {begin + error.start} of it is not UTF-8 "
                f"(0x{data[error.start]:02x})",
            ) from error  # fmt: skip

    def damaged(self, document: int, reason: str) -> StorageError:
        return StorageError(
            f"document {document} of {self.path} is damaged: {reason}; compare the file with the "
            f"sha256 in its manifest, and {_FIX}"
        )

    def changed_error(self, document: int) -> StorageError:
        """The error for a document whose hash differs from its `id`."""
        return StorageError(
            f"document {document} of {self.path} was changed or damaged since it was built: its "
            "content does not have the hash in the column `id`; compare the file with the sha256 "
            f"in its manifest, and {_FIX}"
        )

    def _read(self, index: int) -> pa.RecordBatch:
        part = bisect_right(self._first_batch, index) - 1
        try:
            return self._parts[part][index - self._first_batch[part]]
        except (pa.ArrowException, OSError) as error:
            raise self.damaged(self.first[index], f"its batch cannot be read: {error}") from error

    def _refuse_large_copies(self, what: str, *parts: ArrowBatches) -> None:
        """Raise a DataError if a batch is too large to be copied by every process."""
        largest = max(part.largest_bytes for part in parts)
        if largest > _LARGEST_COPY:
            raise DataError(
                f"{self.path} is {what} with a batch of {largest / 1e6:,.0f} MB, which cannot be "
                f"mapped into memory; {_FIX}, or write it in batches of up to "
                f"{_LARGEST_COPY >> 20} MiB"
            )


class _View(NamedTuple):
    """A batch of a column: row r is `values[offsets[r] : offsets[r + 1]]`.

    Attributes:
        rows: The column, if it has nulls, whose values are empty.
        indices: Of a dictionary, the index in `offsets` of each row.
    """

    offsets: memoryview | range
    values: Any
    rows: pa.Array | None
    indices: memoryview | None


class _Column:
    """A column of values of any length, by row."""

    def __init__(self, file: ArrowFile, name: str) -> None:
        self._file, self._name, self._first = file, name, file.first
        self._view: Callable[[int], _View] = lru_cache(file.open_batches)(self._open)

    def _open(self, batch: int) -> _View:
        """The column of a batch, not copied where it can be mapped."""
        raise NotImplementedError

    def data(self, row: int) -> Any:
        """The value of a row, not copied; that of a null is empty."""
        batch = bisect_right(self._first, row) - 1
        offsets, values, rows, indices = self._view(batch)
        at = row - self._first[batch]
        if rows is not None and rows.slice(at, 1).null_count:
            return values[:0]
        if indices is not None:
            at = indices[at]
        inside = 0 <= at < len(offsets) - 1
        begin, end = (offsets[at], offsets[at + 1]) if inside else (-1, -1)
        if not 0 <= begin <= end <= len(values):
            raise self._file.damaged(
                row, f"column {self._name!r} has it from {begin} to {end} of {len(values)}"
            )
        return values[begin:end]

    def __len__(self) -> int:
        return self._first[-1]

    def size(self, row: int) -> int:
        return len(self.data(row))

    @cached_property
    def total_size(self) -> int:
        """Size of all rows, from the first and last offset of each batch."""
        total = 0
        for batch, begin in enumerate(self._first[:-1]):
            rows, view = self._first[batch + 1] - begin, self._view(batch)
            if view.indices is not None:
                total += sum(self.size(row) for row in range(begin, begin + rows))
            elif rows:
                total += view.offsets[rows] - view.offsets[0]
        return total


class Strings(_Column):
    """A column of text, as UTF-8 bytes."""

    def _open(self, batch: int) -> _View:
        array = self._file.batch(batch).column(self._name)
        rows, indices = array if array.null_count else None, None
        if pa.types.is_dictionary(array.type):
            numbers = array.indices
            kind = np.dtype(numbers.type.to_pandas_dtype())
            indices = np.frombuffer(numbers.buffers()[1] or b"", kind, len(array)).data
            array = array.dictionary
        if array.type == pa.string_view():
            try:
                array.cast(pa.binary_view()).validate(full=True)
            except pa.ArrowException as error:
                raise self._file.damaged(self._first[batch], str(error)) from error
            array = array.cast(pa.large_string())
        _, offsets, values = array.buffers()
        kind = np.int64 if array.type == pa.large_string() else np.int32
        return _View(_bounds(offsets, kind, len(array)), _bytes(values), rows, indices)


class TokenLists(_Column):
    """A column of lists of token ids."""

    def _open(self, batch: int) -> _View:
        array = self._file.batch(batch).column(self._name)
        kind, child = array.type, array.values
        values = np.frombuffer(
            _bytes(child.buffers()[1]), child.type.to_pandas_dtype(), len(child)
        )  # fmt: skip
        offsets: memoryview | range
        if pa.types.is_fixed_size_list(kind):
            offsets = range(0, (len(array) + 1) * kind.list_size, kind.list_size)
        else:
            width = np.int64 if pa.types.is_large_list(kind) else np.int32
            offsets = _bounds(array.buffers()[1], width, len(array))
        if child.null_count:
            raise DataError(
                f"{self._file.path} has null among the token ids of column {self._name!r} "
                f"(documents from {self._first[batch]} on); remove them, or write it again"
            )
        return _View(offsets, values, array if array.null_count else None, None)


def _bytes(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(b"") if buffer is None else memoryview(buffer).cast("B")


def _bounds(buffer: pa.Buffer | None, kind: type[np.integer[Any]], rows: int) -> memoryview:
    """The offsets of rows. Indexing a memoryview yields an int without a numpy scalar."""
    return np.frombuffer(_bytes(buffer), kind, rows + 1 if rows else 0).data


class DocumentIds:
    """Hashes of documents, by row."""

    def __init__(self, file: ArrowFile) -> None:
        self._file, self._first = file, file.first
        self._open: Callable[[int], npt.NDArray[np.uint64]] = lru_cache(file.open_batches)(
            self._values
        )

    def __getitem__(self, row: int) -> int:
        batch = bisect_right(self._first, row) - 1
        return int(self._open(batch)[row - self._first[batch]])

    def take(self, rows: Integers) -> npt.NDArray[np.uint64]:
        taken = np.empty(len(rows), dtype=np.uint64)
        batches = np.searchsorted(self._first, rows, side="right") - 1
        for batch in np.unique(batches):
            here = batches == batch
            taken[here] = self._open(int(batch))[rows[here] - self._first[batch]]
        return taken

    def _values(self, batch: int) -> npt.NDArray[np.uint64]:
        # Not `to_numpy`: it imports pandas if it is installed, a third of a second of a start.
        array = self._file.batch(batch).column("id")
        return np.frombuffer(array.buffers()[1] or b"", np.uint64, len(array))


class ArrowTokenSource(TokenizedSource):
    """Rows of lists of token ids, as scripts write them that tokenize with Hugging Face datasets.

    Raises:
        DataError: a list has nulls.
    """

    def __init__(
        self, file: ArrowFile, encoder: TokenEncoder | None, vocab_size: int | None
    ) -> None:
        super().__init__(None if encoder is None else encoder.end_of_document, vocab_size)
        self.path = file.path
        self.fingerprint = fingerprint(file.files, file.layout)
        self._rows = TokenLists(file, _TOKENS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def total_size(self) -> int:
        return self._rows.total_size

    def document(self, document: int) -> Ids:
        ids: Ids = self._rows.data(document)
        return ids
