"""The documents of the finished shards → the output, without duplicates.

Token ids become Megatron-LM's indexed dataset, `<name>.bin` and `<name>.idx`
(megatron/core/datasets/indexed_dataset.py, `_IndexWriter`; GPT-NeoX has the same format); a
sequence is a document.

Text becomes an Arrow stream of one record batch, larger than memory, and the footer of Arrow's file
format: readers of streams (Hugging Face datasets) stop before the footer, and readers of files find
the batch by it. Arrow writes a file from placeholder buffers: slices of a memory-mapped sparse
file, of the right sizes, which are never read. When Arrow passes such a buffer to the sink, its
content is streamed instead. Schema, metadata and footer are therefore Arrow's own, except that the
schema's message begins where the file's magic was.
"""

from __future__ import annotations

import io
import mmap
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.core.errors import DataError
from slurmllm.core.format import Texts
from slurmllm.data.corpus.options import TokenDtype
from slurmllm.data.corpus.shard import DOCUMENTS, ShardRecord, spans
from slurmllm.data.corpus.work_folder import OutputFile, WorkFolder, writing
from slurmllm.data.sources.arrow import FILE_BEGIN, MappedBatches
from slurmllm.data.sources.base import Flags, Integers
from slurmllm.data.sources.tokenized import (
    MEGATRON_HEADER,
    MEGATRON_MAGIC,
    MEGATRON_TYPES,
    MEGATRON_VERSION,
)

_BUCKET_DOCUMENTS = 1 << 20  # approximate number of digests per sort
_MOST_BUCKETS = 256  # files of digests, all open at once
_DIGEST = np.dtype([("high", np.uint64), ("low", np.uint64), ("document", np.int64)])
_AT_ONCE = 1 << 20
# The index stores lengths as int32.
_LONGEST = 2**31 - 1


@dataclass(eq=False)
class FinishedShard:
    """A shard, and which of its documents are kept."""

    folder: Path
    record: ShardRecord
    keep: Flags | None = None  # [documents]; None: all

    def batches(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the kept documents; a batch is valid until the next one."""
        mapped = MappedBatches(self.folder / DOCUMENTS)
        row = 0
        for batch in mapped:
            batch = batch.select(columns)
            keep = True if self.keep is None else self.keep[row : row + len(batch)]
            row += len(batch)
            # Most batches have no duplicates: without a copy.
            yield batch if np.all(keep) else batch.filter(pa.array(np.asarray(keep)))
            mapped.release()

    def documents_by_input(self) -> list[int]:
        counts = [file.documents for file in self.record.inputs]
        if self.keep is None:
            return counts
        return [int(kept.sum()) for kept in np.split(self.keep, np.cumsum(counts)[:-1])]


def mark_duplicates(shards: Sequence[FinishedShard], scratch: Path) -> int:
    """Set `keep` of all shards so that the first of equal documents stays; return how many go.

    Digests are distributed by their value over files in the folder `scratch`, each small enough to
    be sorted in memory.
    """
    total = sum(shard.record.documents for shard in shards)
    buckets = min(1 + total // _BUCKET_DOCUMENTS, _MOST_BUCKETS)
    with ExitStack() as stack:
        # `keep` has a byte per document: it is on the disk, as the digests are.
        keep_file, *files = (
            stack.enter_context(tempfile.TemporaryFile(dir=scratch)) for _ in range(buckets + 1)
        )
        keep = np.memmap(keep_file, np.bool_, "w+", shape=(total,))
        keep[:] = True
        first = duplicates = 0
        for shard in shards:
            shard.keep = keep[first : first + shard.record.documents]
            for batch in shard.batches("digest", "id"):
                digests = np.empty(batch.num_rows, _DIGEST)
                digests["high"], digests["low"] = map(np.asarray, batch.columns)
                digests["document"] = np.arange(first, first + len(digests))
                first += len(digests)
                bucket = digests["high"] % np.uint64(buckets)
                for index in np.unique(bucket):
                    files[index].write(digests[bucket == index].tobytes())
        for file in files:
            file.seek(0)
            digests = np.frombuffer(file.read(), _DIGEST)
            # Stable: the first stays first.
            digests = digests[np.lexsort((digests["low"], digests["high"]))]
            contents = digests[["high", "low"]]
            repeated = contents[1:] == contents[:-1]
            keep[digests["document"][1:][repeated]] = False
            duplicates += int(repeated.sum())
    return duplicates


def column_size(shards: Iterable[FinishedShard], column: str) -> int:
    """Return the bytes of a text column, or the items of a list column, of kept documents."""
    return sum(int(lengths.sum()) for lengths in _lengths(shards, column))


def column_parts(shards: Iterable[FinishedShard], name: str) -> Iterator[pa.Array]:
    for shard in shards:
        for batch in shard.batches(name):
            yield batch.column(0)


def _lengths(shards: Iterable[FinishedShard], column: str) -> Iterator[Integers]:
    for column_data in column_parts(shards, column):
        yield np.diff(spans(column_data)[0])


def _contents(shards: Iterable[FinishedShard], column: str) -> Iterator[memoryview]:
    for array in column_parts(shards, column):
        offsets, items = spans(array)
        yield items[offsets[0] : offsets[-1]]


def write_tokens(
    bin_file: OutputFile,
    idx_file: OutputFile,
    shards: Sequence[FinishedShard],
    documents: int,
    dtype: TokenDtype,
) -> None:
    for tokens in _contents(shards, "tokens"):
        bin_file.write(tokens)
    item = np.dtype(dtype)
    code = next(code for code, kind in MEGATRON_TYPES.items() if kind == item)
    idx_file.write(
        MEGATRON_HEADER.pack(MEGATRON_MAGIC, MEGATRON_VERSION, code, documents, documents + 1)
    )
    for lengths in _lengths(shards, "tokens"):
        if lengths.max(initial=0) > _LONGEST:
            raise DataError(
                f"a document has {lengths.max():,} tokens, and the .idx format allows "
                f"{_LONGEST:,} a document; cut it into several"
            )
        idx_file.write(lengths.astype("<i4"))
    begin = 0
    for lengths in _lengths(shards, "tokens"):
        sizes = lengths * item.itemsize
        idx_file.write((begin + np.cumsum(sizes) - sizes).astype("<i8"))
        begin += int(sizes.sum())
    # A sequence is a document, so the bounds of documents are 0 … documents.
    for first in range(0, documents + 1, _AT_ONCE):
        idx_file.write(np.arange(first, min(first + _AT_ONCE, documents + 1), dtype="<i8"))


class _Buffer(NamedTuple):
    """A buffer of the record batch."""

    size: int  # bytes
    content: Iterator[Any]
    last: int = 0  # the last offset of an array of offsets: Arrow reads no other


def write_arrow(
    file: OutputFile,
    shards: Sequence[FinishedShard],
    documents: int,
    sizes: Mapping[str, int],
    inputs: Sequence[str],
    work: WorkFolder,
) -> Texts:
    """Write the kept documents of all shards; return the names of the columns.

    `sizes`: column of text → bytes; `inputs`: names of files, for the column `source`. The sparse
    file in `work` takes no space.
    """
    buffers = []
    for column, size in sizes.items():
        buffers.append(_Buffer((documents + 1) * 8, _offsets(shards, column), size))
        buffers.append(_Buffer(size, _contents(shards, column)))
    ids = map(np.asarray, column_parts(shards, "id"))
    buffers += [_Buffer(documents * 8, ids), _Buffer(documents * 4, _sources(shards))]
    with tempfile.TemporaryFile(dir=work.path) as sparse:
        with writing(work.path):
            placeholders = _placeholders(sparse, buffers)
        batch = _record_batch([*sizes], documents, placeholders, inputs)
        begin = _stream_begin(batch.schema)
        file.write(begin)
        contents = {
            (placeholder.address, placeholder.size): buffer.content
            for placeholder, buffer in zip(placeholders, buffers, strict=True)
        }
        sink = _StreamedFile(file, len(begin), contents)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    assert not sink.missing, "Arrow did not write the buffers as they were passed"
    return tuple(batch.schema.names)


def _offsets(shards: Sequence[FinishedShard], column: str) -> Iterator[Integers]:
    end = 0
    yield np.zeros(1, np.int64)
    for lengths in _lengths(shards, column):
        yield end + np.cumsum(lengths)
        end += int(lengths.sum())


def _sources(shards: Sequence[FinishedShard]) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the index of each document's file among all inputs."""
    first = 0
    for shard in shards:
        for array in column_parts([shard], "file"):
            yield np.asarray(array) + np.int32(first)
        first += len(shard.record.inputs)


def _placeholders(sparse: Any, buffers: Sequence[_Buffer]) -> list[pa.Buffer]:
    """Return buffers of the right sizes that take no memory."""
    # A page each at least, so that no two begin at the same address.
    page = mmap.PAGESIZE
    *begins, end = np.cumsum(
        [0, *(buffer.size // page * page + page for buffer in buffers)]
    ).tolist()
    sparse.truncate(end)
    for begin, buffer in zip(begins, buffers, strict=True):
        if buffer.last:
            sparse.seek(begin + buffer.size - 8)
            sparse.write(buffer.last.to_bytes(8, "little"))
    sparse.flush()
    whole = pa.py_buffer(mmap.mmap(sparse.fileno(), end, access=mmap.ACCESS_READ))
    return [whole.slice(begin, b.size) for begin, b in zip(begins, buffers, strict=True)]


def _record_batch(
    columns: Sequence[str], documents: int, buffers: Sequence[pa.Buffer], inputs: Sequence[str]
) -> pa.RecordBatch:
    """Return the corpus: columns of text, ids and sources."""

    def array(kind: pa.DataType, *parts: pa.Buffer) -> pa.Array:
        return pa.Array.from_buffers(kind, documents, [None, *parts], null_count=0)

    *texts, ids, sources = buffers
    arrays = [array(pa.large_string(), *pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
    arrays.append(array(pa.uint64(), ids))
    names = pa.array(inputs, pa.large_string())
    # safe=False: checking the indices would read the placeholder.
    arrays.append(pa.DictionaryArray.from_arrays(array(pa.int32(), sources), names, safe=False))
    return pa.RecordBatch.from_arrays(arrays, [*columns, "id", "source"])


def _stream_begin(schema: pa.Schema) -> bytes:
    """Return the schema's message, padded by the magic's size, for the footer's offsets."""
    # Four bytes, the int32 size of the rest, the rest.
    message: bytes = schema.serialize().to_pybytes()
    body = message[8:] + bytes(len(FILE_BEGIN))
    return message[:4] + len(body).to_bytes(4, "little") + body


class _StreamedFile(io.RawIOBase):
    """A file without its first `skipped` bytes, and with `contents` instead of buffers."""

    def __init__(
        self, file: OutputFile, skipped: int, contents: Mapping[tuple[int, int], Iterator[Any]]
    ) -> None:
        self._file = file
        self._skipped = skipped
        self._contents = contents
        self.missing = {key for key in contents if key[1]}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        key = (data.address, data.size) if isinstance(data, pa.Buffer) else (0, 0)
        if key not in self._contents:
            data = memoryview(data)
            self._file.write(data[self._skipped :])
            self._skipped -= min(self._skipped, len(data))
            return len(data)
        begin = self._file.size_bytes
        for chunk in self._contents[key]:
            self._file.write(chunk)
        self.missing.discard(key)
        written = self._file.size_bytes - begin
        assert written == data.size, f"{written} bytes for a buffer of {data.size}"
        return written
