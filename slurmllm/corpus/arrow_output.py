"""The corpus as an Arrow IPC file of one record batch, larger than memory.

Arrow writes the file from placeholder buffers: slices of a memory-mapped sparse file, of the right
sizes, which are never read. When Arrow passes such a buffer to the sink, its content is streamed
instead. Schema, metadata and footer are therefore Arrow's own.
"""

from __future__ import annotations

import io
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.corpus.finished_shard import FinishedShard
from slurmllm.corpus.output import OutputFile, write_error
from slurmllm.corpus.work_folder import WorkFolder


def schema(columns: Sequence[str]) -> pa.Schema:
    """The schema of a corpus with these columns of text."""
    return pa.schema(
        [
            *((column, pa.large_string()) for column in columns),
            ("id", pa.uint64()),
            ("source", pa.dictionary(pa.int32(), pa.large_string())),
        ]
    )


def write_arrow(
    file: OutputFile,
    shards: Sequence[FinishedShard],
    documents: int,
    sizes: dict[str, int],
    inputs: Sequence[str],
    work: WorkFolder,
    on_progress: Callable[[int], None],
) -> pa.Schema:
    """Write the kept documents of all shards; returns the schema.

    `sizes` are the bytes of text of each column. The sparse file in `work` takes no space.

    Raises:
        StorageError: the file system refused, or a shard is damaged.
    """
    columns = list(sizes)
    # Size and content of each buffer: for each column offsets and text, then ids and sources.
    contents: list[tuple[int, Iterator[Any]]] = []
    for column in columns:
        contents.append(((documents + 1) * 8, _offsets(shards, column)))
        contents.append((sizes[column], chain.from_iterable([s.contents(column) for s in shards])))
    ids = chain.from_iterable(shard.values("id", np.uint64) for shard in shards)
    contents.append((documents * 8, ids))
    contents.append((documents * 4, chain.from_iterable(shard.inputs() for shard in shards)))
    # Of the offsets Arrow reads only the last, which is the size of the text.
    last = {2 * index: sizes[column] for index, column in enumerate(columns)}
    with tempfile.TemporaryFile(dir=work.path) as sparse:
        try:
            buffers = _placeholders(sparse, [size for size, _ in contents], last)
        except OSError as error:
            raise write_error(work.path, error) from error
        arrays = [
            pa.Array.from_buffers(
                pa.large_string(),
                documents,
                [None, buffers[2 * index], buffers[2 * index + 1]],
                null_count=0,
            )
            for index in range(len(columns))
        ]
        id_array, sources = (
            pa.Array.from_buffers(kind, documents, [None, buffer], null_count=0)
            for kind, buffer in zip((pa.uint64(), pa.int32()), buffers[-2:], strict=True)
        )
        names = pa.array(inputs, pa.large_string())
        # safe=False: checking the indices would read the placeholder.
        arrays += [id_array, pa.DictionaryArray.from_arrays(sources, names, safe=False)]
        streamed = {
            (buffer.address, buffer.size): content
            for buffer, (_, content) in zip(buffers, contents, strict=True)
        }
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema(columns))
        sink = _StreamedFile(file, streamed, on_progress)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    assert not sink.missing, "Arrow did not write the buffers as they were passed"
    return batch.schema


class _StreamedFile(io.RawIOBase):
    """A file that writes `contents` instead of buffers, by the buffers' address and size."""

    def __init__(
        self,
        file: OutputFile,
        contents: dict[tuple[int, int], Iterator[Any]],
        on_progress: Callable[[int], None],
    ) -> None:
        self._file, self._contents, self._on_progress = file, contents, on_progress
        self.missing = {key for key in contents if key[1]}

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        key = (data.address, data.size) if isinstance(data, pa.Buffer) else None
        if key not in self._contents:
            return self._file.write(data)
        begin = self._file.size_bytes
        for part in self._contents[key]:
            self._file.write(part)
            self._on_progress(self._file.size_bytes)
        self.missing.discard(key)
        written = self._file.size_bytes - begin
        assert written == data.size, f"{written} bytes for a buffer of {data.size}"
        return written


def _placeholders(sparse: Any, sizes: Sequence[int], last: dict[int, int]) -> list[pa.Buffer]:
    """Buffers that take no memory; `last` are int64 at the end of some, by the buffer's index."""
    # A page each at least, so that no two begin at the same address.
    begins = np.cumsum([0, *(-(-(size + 1) // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)])
    sparse.truncate(int(begins[-1]))
    for index, value in last.items():
        sparse.seek(int(begins[index]) + sizes[index] - 8)
        sparse.write(value.to_bytes(8, "little"))
    sparse.flush()
    whole = pa.py_buffer(mmap.mmap(sparse.fileno(), int(begins[-1]), access=mmap.ACCESS_READ))
    return [whole.slice(int(begin), size) for begin, size in zip(begins, sizes, strict=False)]


def _offsets(shards: Sequence[FinishedShard], column: str) -> Iterator[npt.NDArray[np.int64]]:
    end = 0
    yield np.zeros(1, np.int64)
    for shard in shards:
        for lengths in shard.values(f"{column}.lengths", np.int64):
            if len(lengths):
                offsets = np.cumsum(lengths) + end
                end = int(offsets[-1])
                yield offsets
