"""Memory-mapped Arrow IPC files: opening takes the same time at any size.

Pages are read with their documents, and shared by the processes of a machine.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.data.sources.base import Integers
from slurmllm.errors import DataError, StorageError
from slurmllm.safe_files import open_regular
from slurmllm.staged_files import local_copy

_MAGIC = b"ARROW1"
_FIX = "build it again with `slurmllm data build`"


class ArrowFile:
    """Columns of an Arrow IPC file, in one record batch or many.

    Raises:
        DataError: missing, not an Arrow file, truncated, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = local_copy(path)
            open_regular(self._file).close()
            self._map = pa.memory_map(str(self._file))
            reader = pa.ipc.open_file(self._map)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            # Buffers as long as the rows need, in constant time: Arrow reads what is beyond them.
            for batch in self._batches:
                batch.validate()
            self._schema = reader.schema
            self.names: list[str] = self._schema.names
        except FileNotFoundError as error:
            raise DataError(
                f"no corpus {path}; make one with `slurmllm data build INPUT... --out {path}`"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read corpus {path}: {error}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
            raise DataError(
                f"{path} is not a complete Arrow file: {error}; was it cut while it was copied, or "
                f"is it another format? {_FIX.capitalize()}"
            ) from error
        # [batches + 1], the index of each batch's first row
        self._first = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()
        if len(self) == 0:
            raise DataError(f"{path} has no documents; {_FIX} from files with text")

    def __len__(self) -> int:
        return int(self._first[-1])

    def strings(self, name: str) -> Strings:
        """A column of text; a DataError if there is none of this name and type."""
        if not self.has(name, pa.string(), pa.large_string()):
            raise DataError(
                f"{self.path} has no string column {name!r} (columns: {', '.join(self.names)}); "
                f"{_FIX}"
            )
        return Strings(self.path, [batch.column(name) for batch in self._batches], self._first)

    def ids(self) -> Ids | None:
        """The hashes of the documents that `data build` writes, None if the file has none."""
        if not self.has("id", pa.uint64()):
            return None
        columns = [batch.column("id") for batch in self._batches]
        if any(column.null_count for column in columns):
            return None  # an `id` of another tool
        return Ids(columns, self._first)

    def has(self, name: str, *types: pa.DataType) -> bool:
        """Whether there is exactly one column of this name, of one of these types."""
        index = self._schema.get_field_index(name)
        return index >= 0 and self._schema.field(index).type in types

    @cached_property
    def footer(self) -> str:
        """Hex digest of the file's size and footer (schema, offset and size of each batch)."""
        with self._file.open("rb") as stream:
            size = stream.seek(0, 2)
            tail = len(_MAGIC) + 4  # the footer's length is an int32 before the magic
            stream.seek(size - tail)
            footer = int.from_bytes(stream.read(4), "little")
            stream.seek(size - tail - footer)
            digest = hashlib.sha256(stream.read(footer))
        digest.update(str(size).encode())
        return digest.hexdigest()[:16]

    def decoded(self, document: int, data: memoryview, begin: int = 0) -> str:
        """Decode bytes of a document, from the offset `begin` in it; a StorageError if damaged."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise StorageError(
                f"document {document} of {self.path} is damaged: byte {begin + error.start} of it "
                f"is not UTF-8 (0x{data[error.start]:02x}); compare the file with the sha256 in "
                f"its manifest, and {_FIX}"
            ) from error

    def changed_error(self, document: int) -> StorageError:
        """The error for a document whose hash differs from its `id`."""
        return StorageError(
            f"document {document} of {self.path} was changed or damaged since it was built: its "
            "content does not have the hash in the column `id`; compare the file with the sha256 "
            f"in its manifest, and {_FIX}"
        )


class Strings:
    """A column of text, as bytes, by row."""

    def __init__(self, path: Path, arrays: list[pa.Array], first: list[int]) -> None:
        self._path = path
        self._arrays = arrays
        self._first = first
        self._views = [_views(array) for array in arrays]

    def size(self, row: int) -> int:
        return len(self.data(row))

    def data(self, row: int) -> memoryview:
        """The bytes of a row's text, not copied; those of a null are empty."""
        batch = bisect_right(self._first, row) - 1
        offsets, values, shift = self._views[batch]
        at = row + shift - self._first[batch]
        begin, end = offsets[at], offsets[at + 1]
        if not 0 <= begin <= end <= len(values):
            raise StorageError(
                f"document {row} of {self._path} is damaged: its text is from byte {begin} to "
                f"{end} of {len(values)}; compare the file with the sha256 in its manifest, and "
                f"{_FIX}"
            )
        return values[begin:end]

    @property
    def total_bytes(self) -> int:
        """UTF-8 bytes of all rows, from the first and last offset of each batch."""
        return sum(
            offsets[shift + len(array)] - offsets[shift]
            for array, (offsets, _, shift) in zip(self._arrays, self._views, strict=True)
            if len(array)
        )


def _views(array: pa.Array) -> tuple[memoryview, memoryview, int]:
    """Offsets, values and the index of the array's first offset."""
    _, offsets, values = array.buffers()
    large = array.type == pa.large_string()
    if offsets is None:
        return memoryview(b""), memoryview(b""), 0
    width = 8 if large else 4
    bounds = memoryview(offsets).cast("B")[: offsets.size // width * width]
    return (
        bounds.cast("q") if large else bounds.cast("i"),
        memoryview(b"") if values is None else memoryview(values).cast("B"),
        array.offset,
    )


class Ids:
    """Hashes of documents, by row."""

    def __init__(self, arrays: list[pa.Array], first: list[int]) -> None:
        # Not `to_numpy`: it imports pandas if it is installed, a third of a second of a start.
        self._arrays = [
            np.frombuffer(array.buffers()[1] or b"", np.uint64, len(array), 8 * array.offset)
            for array in arrays
        ]
        # Indexing a memoryview yields an int without a numpy scalar, which is slower.
        self._views = [array.data for array in self._arrays]
        self._first = first

    def __getitem__(self, row: int) -> int:
        batch = bisect_right(self._first, row) - 1
        return int(self._views[batch][row - self._first[batch]])

    def take(self, rows: Integers) -> npt.NDArray[np.uint64]:
        if len(self._arrays) == 1:
            return np.asarray(self._arrays[0][rows], dtype=np.uint64)
        found = np.empty(len(rows), dtype=np.uint64)
        batches = np.searchsorted(self._first, rows, side="right") - 1
        for batch in np.unique(batches):
            here = batches == batch
            found[here] = self._arrays[batch][rows[here] - self._first[batch]]
        return found
