"""Columns of finished shards, read in parts of a few megabytes and verified on the way.

Duplicates are found by their 128-bit digests in bounded memory: each shard's digests are sorted,
run by run, so the digests of one range of values are found in every run by bisection, and a few
million at a time are sorted together.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from slurmllm.corpus.shard import DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW, Digests, ShardRecord
from slurmllm.errors import StorageError

_PART_BYTES = 8 << 20
_PART_ROWS = 1 << 19
# Digests sorted together, about.
_AT_ONCE = 1 << 21


class FinishedShard:
    """A shard, and which of its documents are kept.

    Attributes:
        record: Contents of the shard.
        first_input: Index of its first file among all inputs.
        keep: bool [documents]; None if all are kept.
    """

    def __init__(self, folder: Path, record: ShardRecord, first_input: int) -> None:
        self.folder, self.record, self.first_input = folder, record, first_input
        self.keep: npt.NDArray[np.bool_] | None = None

    def values(self, column: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """Values of the kept documents, of a column with one value a document."""
        itemsize = np.dtype(dtype).itemsize
        row = 0
        for data in self._read(column, _PART_ROWS * itemsize):
            part = np.frombuffer(data, dtype)
            yield self._filter(part, row)
            row += len(part)

    def contents(self, column: str, itemsize: int = 1) -> Iterator[memoryview]:
        """Content of the kept documents; `itemsize`: bytes of a unit of the column's lengths."""
        if self.keep is None:
            for data in self._read(column, _PART_BYTES):
                yield memoryview(data)
            return
        row = 0
        with _VerifiedFile(self, column) as file:
            for data in self._read(f"{column}.lengths", _PART_ROWS * 8):
                ends = np.cumsum(np.frombuffer(data, np.int64)) * itemsize
                begin = 0
                while begin < len(ends):
                    before = int(ends[begin - 1]) if begin else 0
                    end = int(np.searchsorted(ends, before + _PART_BYTES, side="right"))
                    end = max(end, begin + 1)
                    offsets = np.concatenate([[0], ends[begin:end] - before])
                    yield from self._kept_documents(file, offsets, row + begin)
                    begin = end
                row += len(ends)

    def inputs(self) -> Iterator[npt.NDArray[np.int32]]:
        """For each kept document, the index of its input file among all."""
        row = 0
        for index, file in enumerate(self.record.inputs, start=self.first_input):
            for begin in range(0, file.documents, _PART_ROWS):
                count = min(_PART_ROWS, file.documents - begin)
                yield self._filter(np.full(count, index, np.int32), row)
                row += count

    def kept_length(self, column: str) -> int:
        """Sum of a column's lengths over the kept documents."""
        return sum(int(part.sum()) for part in self.values(f"{column}.lengths", np.int64))

    def kept_by_input(self) -> list[int]:
        """Number of kept documents of each input file."""
        counts = [entry.documents for entry in self.record.inputs]
        if self.keep is None:
            return counts
        ends = np.cumsum(counts)
        return [
            int(np.count_nonzero(self.keep[end - count : end]))
            for count, end in zip(counts, ends, strict=True)
        ]

    def verify(self, column: str) -> None:
        """Read a column to its end; raises StorageError if it differs from what was written."""
        for _ in self._read(column, _PART_BYTES):
            pass

    def mapped(self, column: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A column as a memory map, not verified."""
        return np.memmap(self.folder / column, dtype, "r")

    def _filter(self, part: npt.NDArray[Any], row: int) -> npt.NDArray[Any]:
        return part if self.keep is None else part[self.keep[row : row + len(part)]]

    def _kept_documents(
        self, file: _VerifiedFile, offsets: npt.NDArray[np.int64], row: int
    ) -> Iterator[memoryview]:
        """Content of the kept ones among the next documents of a file."""
        assert self.keep is not None
        keep = self.keep[row : row + len(offsets) - 1]
        if len(keep) == 1:  # longer than a part, perhaps a gigabyte: never held as a whole
            for part in file.parts(int(offsets[-1]), _PART_BYTES):
                if keep[0]:
                    yield memoryview(part)
            return
        data = file.read(int(offsets[-1]))
        if keep.all():
            yield memoryview(data)
            return
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        documents = pa.Array.from_buffers(pa.large_binary(), len(keep), buffers, null_count=0)
        kept = documents.filter(pa.array(np.asarray(keep)))
        if len(kept) and kept.buffers()[2] is not None:
            yield memoryview(kept.buffers()[2])

    def _read(self, column: str, part_bytes: int) -> Iterator[bytes]:
        with _VerifiedFile(self, column) as file:
            yield from file.parts(self.record.columns[column].bytes, part_bytes)


class _VerifiedFile:
    """A column's file; at its end the digest must be the one of the shard's record."""

    def __init__(self, shard: FinishedShard, column: str) -> None:
        self._expected = shard.record.columns[column]
        self._path = shard.folder / column
        self._digest = xxhash.xxh3_128()

    def __enter__(self) -> _VerifiedFile:
        # Unbuffered: parts are megabytes, and a buffer would only copy them.
        self._file: BinaryIO = self._path.open("rb", buffering=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._file.close()
        if kind is None and self._digest.hexdigest() != self._expected.xxh3:
            raise self._damaged()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._damaged()
        self._digest.update(data)
        return data

    def parts(self, size: int, part_bytes: int) -> Iterator[bytes]:
        for begin in range(0, size, part_bytes):
            yield self.read(min(part_bytes, size - begin))

    def _damaged(self) -> StorageError:
        # Without the shard, the next build reads its inputs again.
        shutil.rmtree(self._path.parent, ignore_errors=True)
        return StorageError(
            f"{self._path} differs from what was written: the disk or the machine failed in "
            "between; start the same command again, which reads these inputs again"
        )


def mark_duplicates(shards: Sequence[FinishedShard], scratch: Path) -> int:
    """Set `keep` of all shards, so that the first of equal documents is kept.

    Returns the number of duplicates. `keep` is mapped from `scratch`, one byte per document.
    """
    for shard in shards:
        for column in (DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW):
            shard.verify(column)
    firsts = np.cumsum([0, *(shard.record.documents for shard in shards)])
    total = int(firsts[-1])
    with scratch.open("x+b") as stream:  # never an existing file, by a link
        keep = np.memmap(stream, np.bool_, "w+", shape=(max(total, 1),))
    keep[:] = True
    duplicates = 0
    ranges = -(-total // _AT_ONCE)
    for index in range(ranges):
        # Digests are uniform, so equal ranges of the high half hold about equally many.
        low, high = index * 2**64 // ranges, (index + 1) * 2**64 // ranges - 1
        found = _find_duplicates(shards, firsts, np.uint64(low), np.uint64(high))
        keep[found] = False
        duplicates += len(found)
    for shard, first in zip(shards, firsts, strict=False):
        shard.keep = keep[first : first + shard.record.documents]
    return duplicates


def _find_duplicates(
    shards: Sequence[FinishedShard],
    firsts: npt.NDArray[np.int64],
    least: np.uint64,
    most: np.uint64,
) -> npt.NDArray[np.int64]:
    """Indices of duplicates among the documents whose digest's high half is in a range."""
    highs: list[Digests] = []
    lows: list[Digests] = []
    documents: list[npt.NDArray[np.int64]] = []
    for shard, first in zip(shards, firsts, strict=False):
        begin = 0
        for length in shard.record.runs:
            high = shard.mapped(DIGEST_HIGH, np.uint64)[begin : begin + length]
            part = slice(
                begin + int(np.searchsorted(high, least, side="left")),
                begin + int(np.searchsorted(high, most, side="right")),
            )
            highs.append(np.array(shard.mapped(DIGEST_HIGH, np.uint64)[part]))
            lows.append(np.array(shard.mapped(DIGEST_LOW, np.uint64)[part]))
            documents.append(shard.mapped(DIGEST_ROW, np.int64)[part] + first)
            begin += length
    high, low = np.concatenate(highs), np.concatenate(lows)
    order = np.lexsort((low, high))  # stable: of equal digests, the first document is first
    high, low = high[order], low[order]
    repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return np.sort(np.concatenate(documents)[order[1:][repeated]])
