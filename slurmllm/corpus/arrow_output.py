"""The corpus as an Arrow IPC file of one record batch, larger than memory.

Arrow writes the file, with buffers that hold nothing: parts of a sparse file mapped into memory,
of the right sizes, which are never read. Where Arrow hands such a buffer to the file, the content
is streamed instead. So schema, metadata and footer are Arrow's own.
"""

from __future__ import annotations

import io
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.corpus.finished_shard import FinishedShard
from slurmllm.corpus.output import OutputFile, write_error
from slurmllm.corpus.work_folder import WorkFolder

# What a buffer holds, part after part.
Content = Callable[[], Iterator[Any]]


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
    """Write the documents of all shards that stay.

    Args:
        file: What to write to.
        shards: In their order.
        documents: How many stay.
        sizes: Bytes of text in each column of it.
        inputs: The names of all input files.
        work: Where a scratch file goes, which takes no space.
        on_progress: Called with the bytes written.

    Returns:
        The schema.

    Raises:
        StorageError: the file system refused, or a shard is damaged.
    """
    columns = list(sizes)
    contents: list[tuple[int, Content]] = []
    for column in columns:
        contents.append(((documents + 1) * 8, _offsets(shards, column)))
        contents.append((sizes[column], _texts(shards, column)))
    contents.append((documents * 8, _ids(shards)))
    contents.append((documents * 4, _inputs(shards)))
    # Of the offsets Arrow looks at the last, to see how much text there is.
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
        ids, numbers = (
            pa.Array.from_buffers(kind, documents, [None, buffer], null_count=0)
            for kind, buffer in zip((pa.uint64(), pa.int32()), buffers[-2:], strict=True)
        )
        names = pa.array(inputs, pa.large_string())
        arrays += [ids, pa.DictionaryArray.from_arrays(numbers, names, safe=False)]
        streamed = {
            (buffer.address, buffer.size): content
            for buffer, (_, content) in zip(buffers, contents, strict=True)
        }
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema(columns))
        sink = _StreamedFile(file, streamed, on_progress)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    assert not sink.missing, "Arrow wrote the buffers in a form that was not expected"
    return batch.schema


class _StreamedFile(io.RawIOBase):
    """A file in which some buffers are replaced by what their contents yield."""

    def __init__(
        self,
        file: OutputFile,
        contents: dict[tuple[int, int], Content],
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
        begin = self._file.tell()
        for part in self._contents[key]():
            self._file.write(part)
            self._on_progress(self._file.tell())
        self.missing.discard(key)
        written = self._file.tell() - begin
        assert written == data.size, f"{written} bytes for a buffer of {data.size}"
        return written


def _placeholders(sparse: Any, sizes: Sequence[int], last: dict[int, int]) -> list[pa.Buffer]:
    """Buffers of some sizes that take no memory.

    Args:
        sparse: An empty file.
        sizes: In bytes.
        last: For some of the buffers, by index, the int64 at their end.
    """
    # A page each at least, so that no two begin at one address.
    places = np.cumsum([0, *(-(-(size + 1) // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)])
    sparse.truncate(int(places[-1]))
    for index, value in last.items():
        sparse.seek(int(places[index]) + sizes[index] - 8)
        sparse.write(value.to_bytes(8, "little"))
    sparse.flush()
    whole = pa.py_buffer(mmap.mmap(sparse.fileno(), int(places[-1]), access=mmap.ACCESS_READ))
    return [whole.slice(int(place), size) for place, size in zip(places, sizes, strict=False)]


def _offsets(shards: Sequence[FinishedShard], column: str) -> Content:
    def content() -> Iterator[npt.NDArray[np.int64]]:
        end = 0
        yield np.zeros(1, np.int64)
        for shard in shards:
            for lengths in shard.values(f"{column}.lengths", np.int64):
                if len(lengths):
                    offsets = np.cumsum(lengths) + end
                    end = int(offsets[-1])
                    yield offsets

    return content


def _texts(shards: Sequence[FinishedShard], column: str) -> Content:
    return lambda: (part for shard in shards for part in shard.contents(column))


def _ids(shards: Sequence[FinishedShard]) -> Content:
    return lambda: (part for shard in shards for part in shard.values("id", np.uint64))


def _inputs(shards: Sequence[FinishedShard]) -> Content:
    return lambda: (part for shard in shards for part in shard.inputs())
