"""The columns of the finished shards → the output, without duplicates.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from slurmllm.corpus.finished_shard import FinishedShard, mark_duplicates
from slurmllm.corpus.options import BuildOptions, TokenDtype
from slurmllm.corpus.work_folder import OutputFile, WorkFolder, write_error
from slurmllm.data.sources.arrow_batches import FILE_BEGIN
from slurmllm.data.sources.tokenized import (
    MEGATRON_HEADER,
    MEGATRON_MAGIC,
    MEGATRON_TYPES,
    MEGATRON_VERSION,
)
from slurmllm.errors import DataError

_AT_ONCE = 1 << 20
# The index stores lengths as int32.
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class BuildCallbacks:
    """Functions that a build calls as it advances.

    Attributes:
        on_read: Called with the input bytes read so far.
        on_join: Called with the output bytes written so far, and their total.
        on_note: Called with a line for the user.
    """

    on_read: Callable[[int], None] = field(default=lambda done: None)
    on_join: Callable[[int, int], None] = field(default=lambda done, total: None)
    on_note: Callable[[str], None] = field(default=lambda note: None)


class JoinResult(NamedTuple):
    """The output's counts and digests."""

    documents: int
    text_bytes: int
    tokens: int | None  # None for text
    columns: tuple[str, ...]  # of an Arrow output
    duplicates: int
    by_input: list[int]  # documents of each input file
    files: dict[str, tuple[int, str]]  # size in bytes and sha256, by ending


def join(
    shards: Sequence[FinishedShard],
    inputs: Sequence[str],
    files: Mapping[str, OutputFile],
    options: BuildOptions,
    work: WorkFolder,
    callbacks: BuildCallbacks,
) -> JoinResult:
    """Write the documents of all shards to `files`, by ending `arrow`, or `bin` and `idx`.

    Raises:
        DataError: no input has text.
        StorageError: the output cannot be written, or a shard is damaged.
    """
    if not any(shard.record.documents for shard in shards):
        # Wrong options (--text-key) are the usual cause: shards read with them are of no use.
        work.remove_except(())
        empty, short, bad = (
            sum(getattr(shard.record, name) for shard in shards)
            for name in ("empty", "short", "bad")
        )
        raise DataError(
            f"no text in {len(inputs)} input file{'s' if len(inputs) != 1 else ''} ({empty} empty "
            f"documents, {short} short, {bad} unreadable); no corpus was written. The first input "
            f"is {inputs[0]}: see --format and --text-key"
        )
    duplicates = 0
    if options.clean.dedup:
        duplicates = mark_duplicates(shards, work.scratch("keep"))
    by_input = [count for shard in shards for count in shard.kept_by_input()]
    documents = sum(by_input)
    sizes = {
        column: sum(shard.kept_length(column) for shard in shards)
        for column in (*options.read.columns, *(["tokens"] if options.tokenize else []))
    }
    tokens = sizes.pop("tokens", None)
    columns: tuple[str, ...] = ()
    if options.tokenize and tokens is not None:
        dtype = options.tokenize.dtype
        total = tokens * np.dtype(dtype).itemsize
        write_tokens(
            files["bin"], files["idx"], shards, documents, dtype,
            lambda done: callbacks.on_join(done, total),
        )  # fmt: skip
    else:
        total = sum(sizes.values())
        # The file also holds ids, offsets and metadata: report no more than the text's bytes.
        schema = write_arrow(
            files["arrow"], shards, documents, sizes, inputs, work,
            lambda done: callbacks.on_join(min(done, total), total),
        )  # fmt: skip
        columns = tuple(schema.names)
    return JoinResult(
        documents=documents,
        text_bytes=sum(sizes.values()),
        tokens=tokens,
        columns=columns,
        duplicates=duplicates,
        by_input=by_input,
        files={ending: (file.size_bytes, file.sha256) for ending, file in files.items()},
    )


class TokenFiles(NamedTuple):
    """The two files of an indexed dataset."""

    bin: Path
    idx: Path


def token_files(out: Path) -> TokenFiles:
    """The files of `--out NAME`, `NAME.bin` or `NAME.idx`."""
    prefix = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
    return TokenFiles(*(prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx")))


def write_tokens(
    bin_file: OutputFile,
    idx_file: OutputFile,
    shards: Sequence[FinishedShard],
    documents: int,
    dtype: TokenDtype,
    on_progress: Callable[[int], None],
) -> None:
    """Write the tokens of all kept documents, and the index.

    Raises:
        DataError: a document is too long for the format.
        StorageError: the file system refused, or a shard is damaged.
    """
    itemsize = np.dtype(dtype).itemsize
    for shard in shards:
        for part in shard.contents("tokens", itemsize):
            bin_file.write(part)
            on_progress(bin_file.size_bytes)
    code = next(code for code, kind in MEGATRON_TYPES.items() if np.dtype(kind) == np.dtype(dtype))
    idx_file.write(
        MEGATRON_HEADER.pack(MEGATRON_MAGIC, MEGATRON_VERSION, code, documents, documents + 1)
    )
    for shard in shards:
        for lengths in shard.values("tokens.lengths", np.int64):
            if lengths.max(initial=0) > _LONGEST:
                raise DataError(
                    f"a document has {lengths.max():,} tokens, and the .idx format allows "
                    f"{_LONGEST:,} a document; cut it into several"
                )
            idx_file.write(lengths.astype("<i4"))
    begin = 0
    for shard in shards:
        for lengths in shard.values("tokens.lengths", np.int64):
            ends = np.cumsum(lengths * itemsize) + begin
            idx_file.write((ends - lengths * itemsize).astype("<i8"))
            begin = int(ends[-1]) if len(ends) else begin
    # A sequence is a document, so the bounds of documents are 0 … documents.
    for first in range(0, documents + 1, _AT_ONCE):
        idx_file.write(np.arange(first, min(first + _AT_ONCE, documents + 1), dtype="<i8"))


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
        begin = _stream_begin(batch.schema)
        file.write(begin)
        sink = _StreamedFile(file, len(begin), streamed, on_progress)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    assert not sink.missing, "Arrow did not write the buffers as they were passed"
    return batch.schema


def _stream_begin(schema: pa.Schema) -> bytes:
    """The schema's message, padded by the size of the magic: offsets in the footer stay right."""
    # Four bytes, the int32 size of the rest, the rest.
    message: bytes = schema.serialize().to_pybytes()
    rest = message[8:] + bytes(len(FILE_BEGIN))
    return message[:4] + len(rest).to_bytes(4, "little") + rest


class _StreamedFile(io.RawIOBase):
    """A file without its first `skipped` bytes.

    It writes `contents` instead of buffers, by the buffers' address and size.
    """

    def __init__(
        self,
        file: OutputFile,
        skipped: int,
        contents: dict[tuple[int, int], Iterator[Any]],
        on_progress: Callable[[int], None],
    ) -> None:
        self._file, self._contents, self._on_progress = file, contents, on_progress
        self._skipped = skipped
        self.missing = {key for key in contents if key[1]}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        key = (data.address, data.size) if isinstance(data, pa.Buffer) else None
        if key not in self._contents:
            data = memoryview(data)
            self._file.write(data[self._skipped :])
            self._skipped -= min(self._skipped, len(data))
            return len(data)
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
