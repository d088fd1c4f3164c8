"""Shards: runs of consecutive input files, each read by one process and written as columns.

The cuts depend only on the files, not on the number of processes. A shard's name depends on its
files and options, so a finished shard need not be read again, whatever else changed between two
builds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from slurmllm.corpus.cleaning import clean
from slurmllm.corpus.inputs import InputFile
from slurmllm.corpus.options import BuildOptions, InputErrors, TokenizeOptions
from slurmllm.corpus.readers import DocumentReader, Documents
from slurmllm.corpus.work_folder import WorkFolder
from slurmllm.data.sources.base import prompt_content
from slurmllm.errors import DataError, StorageError
from slurmllm.run.records import Record
from slurmllm.run.safe_files import write_whole

Digests = npt.NDArray[np.uint64]

RECORD = "shard.json"
DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW = "digest.high", "digest.low", "digest.row"

# Enough shards to keep processes busy to the end and to lose little when one is killed.
_SHARDS = 16
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
# Cost of a compressed byte, in plain ones: it takes about as long to read as three.
_COMPRESSED_COST = 3
# Cost of opening a file, in bytes: with a million small files it is most of the time.
_OPEN_COST_BYTES = 64 << 10
# Part of a shard's name; raise it when equal inputs and options give other columns.
_VERSION = 1
# Seconds between two writes of the progress: the file is on a shared file system.
_PROGRESS_S = 0.5
# Digests sorted at once for the search of duplicates, in documents.
_RUN_DOCUMENTS = 1 << 20
# Text tokenized at once.
_ENCODE_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """A run of input files, in their order, and how they are read."""

    name: str  # hash of the files (path, size, modification time) and of the options
    files: tuple[InputFile, ...]
    options: BuildOptions

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def plan_shards(files: Sequence[InputFile], options: BuildOptions) -> list[Shard]:
    """Group the inputs into shards of similar cost; a file is never in two.

    Paths become absolute, since the process that reads a shard may run in another folder.
    """
    files = [replace(file, path=file.path.absolute()) for file in files]
    costs = [
        _OPEN_COST_BYTES + file.size_bytes * (_COMPRESSED_COST if file.compression else 1)
        for file in files
    ]
    target = min(max(sum(costs) // _SHARDS, _LEAST_BYTES), _MOST_BYTES)
    runs: list[list[InputFile]] = []
    total = 0
    for file, cost in zip(files, costs, strict=True):
        if not runs or total + cost > target:
            runs.append([])
            total = 0
        runs[-1].append(file)
        total += cost
    if options.tokenize:
        tokenizer = options.tokenize.tokenizer.absolute()
        options = replace(options, tokenize=replace(options.tokenize, tokenizer=tokenizer))
    # skip_bad makes no difference to a shard without errors, so it is not part of the name.
    named = asdict(replace(options, read=replace(options.read, skip_bad=False)))
    shards = []
    for run in runs:
        content = json.dumps([_VERSION, named, [asdict(file) for file in run]], default=str)
        shards.append(Shard(xxhash.xxh3_64_hexdigest(content.encode()), tuple(run), options))
    return shards


class ColumnRecord(Record):
    """A file of a shard."""

    bytes: int
    xxh3: str  # xxh3-128 of its content


class ShardInput(Record):
    """Documents and digest of one input file."""

    documents: int  # kept, duplicates included
    xxh3: str | None  # of the file on disk; None if it is not read whole


class ShardRecord(Record):
    """`shard.json`: contents of a finished shard."""

    documents: int  # kept, duplicates included
    empty: int
    short: int
    bad: int
    bad_examples: tuple[str, ...]
    inputs: tuple[ShardInput, ...]  # in the order of the shard's files
    runs: tuple[int, ...]  # documents of each sorted run of digests
    columns: dict[str, ColumnRecord]


def column_files(options: BuildOptions) -> list[str]:
    names = [DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW] if options.clean.dedup else []
    if options.tokenize:
        return [*names, "tokens", "tokens.lengths", "text.lengths"]
    for column in options.read.columns:
        names += [column, f"{column}.lengths"]
    return [*names, "id"]


def load_shard(folder: Path, skip_bad: bool) -> ShardRecord | None:
    """The record of a finished shard; None if it is damaged, or has errors without `skip_bad`."""
    try:
        record = ShardRecord.load(folder / RECORD)
        for name, column in record.columns.items():
            if (folder / name).stat().st_size != column.bytes:
                return None
    except (StorageError, OSError):
        return None
    return None if record.bad and not skip_bad else record


def write_shard(
    shard: Shard, work: WorkFolder, on_progress: Callable[[int], None] | None = None
) -> None:
    """Read a shard's files and write its columns.

    Without `on_progress`, the number of bytes read is written to `work.progress`.

    Raises:
        DataError: an input cannot be read, or changed since the build began.
        StorageError: the file system refused to write.
    """
    folder = work.partial(shard.name)
    progress = work.progress(shard.name)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        writer = _ShardWriter(shard, folder, on_progress or _ProgressFile(progress))
        with contextlib.closing(writer):
            writer.write()
        if work.shard(shard.name).exists():  # another process was faster
            shutil.rmtree(folder)
        else:
            folder.rename(work.shard(shard.name))
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or folder}: {error.strerror or error}; free space or "
            "choose another --out. Finished shards are kept; run the same command again to continue"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        progress.unlink(missing_ok=True)


class _ProgressFile:
    """Writes the number of input bytes read to a file, at most twice a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_s = 0.0

    def __call__(self, done_bytes: int) -> None:
        now = time.monotonic()
        if now - self._written_s >= _PROGRESS_S:
            self._written_s = now
            write_whole(self._path, str(done_bytes).encode(), durable=False)


class _ShardWriter:
    def __init__(self, shard: Shard, folder: Path, on_progress: Callable[[int], None]) -> None:
        self._shard, self._folder, self._on_progress = shard, folder, on_progress
        options = shard.options
        self._errors = InputErrors(options.read.skip_bad)
        self._columns = {name: _ColumnFile(folder / name) for name in column_files(options)}
        self._encoder = _Encoder(options.tokenize) if options.tokenize else None
        self._digests = _SortedRuns(self._columns) if options.clean.dedup else None
        self._documents = self._empty = self._short = 0

    def write(self) -> None:
        inputs = []
        done_bytes = 0
        for file in self._shard.files:
            before = self._documents
            _check_unchanged(file)
            reader = DocumentReader(file, self._shard.options.read, self._errors.add)
            for chunk in reader:
                self._write_chunk(chunk)
                self._on_progress(done_bytes + reader.position_bytes)
            # Again: a file that was written to while it was read is a mixture of both versions.
            _check_unchanged(file)
            done_bytes += file.size_bytes
            self._on_progress(done_bytes)
            inputs.append(ShardInput(documents=self._documents - before, xxh3=reader.checksum))
        if self._digests:
            self._digests.flush()
        record = ShardRecord(
            documents=self._documents,
            empty=self._empty,
            short=self._short,
            bad=self._errors.count,
            bad_examples=tuple(self._errors.examples),
            inputs=tuple(inputs),
            runs=tuple(self._digests.lengths) if self._digests else (),
            columns={name: column.finish() for name, column in self._columns.items()},
        )
        record.save(self._folder / RECORD)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()

    def _write_chunk(self, chunk: Documents) -> None:
        documents, empty, short = clean(chunk, self._shard.options.clean)
        self._empty += empty
        self._short += short
        if not len(documents[0]):
            return
        high, low = digest(documents)
        if self._digests:
            self._digests.add(high, low)
        self._documents += len(low)
        if self._encoder:
            self._columns["text.lengths"].write(np.diff(text_of(documents[0])[0]))
            for tokens, lengths in self._encoder.encode(documents[0]):
                self._columns["tokens"].write(tokens)
                self._columns["tokens.lengths"].write(lengths)
            return
        self._columns["id"].write(low)
        for name, column in zip(self._shard.options.read.columns, documents, strict=True):
            offsets, values = text_of(column)
            self._columns[name].write(values[offsets[0] : offsets[-1]])
            self._columns[f"{name}.lengths"].write(np.diff(offsets))


def _check_unchanged(file: InputFile) -> None:
    try:
        now = file.path.stat()
    except OSError as error:
        raise DataError(f"cannot read {file.name}: {error.strerror or error}") from error
    if (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise DataError(
            f"{file.name} has changed since the build began (it had {file.size_bytes:,} bytes and "
            f"has {now.st_size:,}); start the build again when no other program writes to it"
        )


def text_of(column: pa.LargeStringArray) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Offsets int64 [documents + 1] into the UTF-8 bytes, and the bytes; no copies."""
    if not len(column):
        return np.zeros(1, np.int64), memoryview(b"")
    _, offsets, values = column.buffers()
    begin, end = column.offset, column.offset + len(column) + 1
    return np.frombuffer(offsets, np.int64)[begin:end], memoryview(values or b"")


def digest(documents: Documents) -> tuple[Digests, Digests]:
    """High and low 64 bits of each document's xxh3-128, uint64 [documents] twice.

    The low half is `document_hash` of a text, and `prompt_hash` of a prompt and its completion.
    """
    xxh3 = xxhash.xxh3_128_digest
    spans = []
    for column in documents:
        offsets, values = text_of(column)
        spans.append([values[a:b] for a, b in itertools.pairwise(offsets.tolist())])
    if len(documents) == 1:
        parts = [xxh3(text) for text in spans[0]]
    else:
        parts = [
            xxh3(prompt_content(prompt, completion))
            for prompt, completion in zip(*spans, strict=True)
        ]
    # The digest's bytes are big endian.
    halves = np.frombuffer(b"".join(parts), ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


class _ColumnFile:
    """A file of values, hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._path = path
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, values: Any) -> None:
        data = memoryview(values).cast("B") if len(values) else memoryview(b"")
        try:
            self._file.write(data)
        except OSError as error:
            error.filename = str(self._path)
            raise
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> ColumnRecord:
        try:
            self._file.close()
        except OSError as error:
            error.filename = str(self._path)
            raise
        return ColumnRecord(bytes=self._bytes, xxh3=self._digest.hexdigest())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _SortedRuns:
    """Digests with their documents' row numbers in the shard, sorted run by run."""

    def __init__(self, columns: dict[str, _ColumnFile]) -> None:
        self._columns = columns
        self._high: list[Digests] = []
        self._low: list[Digests] = []
        self._buffered = 0
        self._rows = 0
        self.lengths: list[int] = []

    def add(self, high: Digests, low: Digests) -> None:
        self._high.append(high)
        self._low.append(low)
        self._buffered += len(high)
        if self._buffered >= _RUN_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        if not self._buffered:
            return
        high, low = np.concatenate(self._high), np.concatenate(self._low)
        order = np.argsort(high, kind="stable")
        self._columns[DIGEST_HIGH].write(high[order])
        self._columns[DIGEST_LOW].write(low[order])
        self._columns[DIGEST_ROW].write(order + self._rows)
        self._rows += len(order)
        self.lengths.append(len(order))
        self._high, self._low, self._buffered = [], [], 0


class _Encoder:
    """Texts → token ids, each with its end-of-document token."""

    def __init__(self, options: TokenizeOptions) -> None:
        from slurmllm.data.tokenizer import TokenEncoder

        self._encoder = TokenEncoder(options.tokenizer)
        self._dtype = np.dtype(options.dtype)
        if self._encoder.fingerprint != options.fingerprint:
            raise DataError(
                f"{options.tokenizer} has changed since the build began; start the build again"
            )

    def encode(
        self, column: pa.LargeStringArray
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
        """Yield the token ids of some documents and the number of ids of each."""
        offsets, _ = text_of(column)
        begin = 0
        while begin < len(column):
            end = int(np.searchsorted(offsets, offsets[begin] + _ENCODE_BYTES, side="right")) - 1
            end = max(end, begin + 1)
            batch = self._encoder.encode_batch(column.slice(begin, end - begin).to_pylist())
            for ids in batch:
                ids.append(self._encoder.end_of_document)
            lengths = np.array([len(ids) for ids in batch], np.int64)
            flat = itertools.chain.from_iterable(batch)
            yield np.fromiter(flat, self._dtype, int(lengths.sum())), lengths
            begin = end
