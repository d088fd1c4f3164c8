"""Digests of a chunk of documents: 128 bits each, of which the low 64 are a document's id."""

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
from pydantic import Field

from slurmllm.corpus.cleaning import clean
from slurmllm.corpus.inputs import InputFile
from slurmllm.corpus.options import BuildOptions, InputErrors, TokenizeOptions
from slurmllm.corpus.readers import DocumentReader, Documents
from slurmllm.corpus.work_folder import WorkFolder
from slurmllm.errors import DataError, StorageError
from slurmllm.records import Record

Digests = npt.NDArray[np.uint64]


def digest(documents: Documents) -> tuple[Digests, Digests]:
    """High and low half of each document's digest.

    The low half is `document_hash` of a text, and `prompt_hash` of a prompt and its completion.

    Returns:
        uint64 [documents] twice.
    """
    xxh3 = xxhash.xxh3_128_digest
    if len(documents) == 1:
        offsets, values = text_of(documents[0])
        ends = offsets.tolist()
        parts = [xxh3(values[a:b]) for a, b in itertools.pairwise(ends)]
    else:
        spans = []
        for column in documents:
            offsets, values = text_of(column)
            ends = offsets.tolist()
            spans.append([values[a:b] for a, b in itertools.pairwise(ends)])
        parts = [
            xxh3(b"".join((len(prompt).to_bytes(8, "little"), prompt, completion)))
            for prompt, completion in zip(*spans, strict=True)
        ]
    halves = np.frombuffer(b"".join(parts), ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def text_of(column: pa.LargeStringArray) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Offsets int64 [documents + 1] into the UTF-8 bytes, and the bytes; no copies."""
    if not len(column):
        return np.zeros(1, np.int64), memoryview(b"")
    _, offsets, values = column.buffers()
    begin, end = column.offset, column.offset + len(column) + 1
    return np.frombuffer(offsets, np.int64)[begin:end], memoryview(values or b"")


RECORD = "shard.json"
DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW = "digest.high", "digest.low", "digest.row"
_PROGRESS_S = 0.5
# Documents of which the digests are sorted at once, for the search of duplicates.
_RUN_DOCUMENTS = 1 << 20
# Text that is tokenized at once.
_ENCODE_BYTES = 1 << 20


class ColumnRecord(Record):
    """A file of a shard."""

    bytes: int
    xxh3: str = Field(description="xxh3-128 of its content")


class ShardInput(Record):
    """What became of one input file."""

    documents: int = Field(description="kept, duplicates included")
    xxh3: str | None = Field(description="of the file as it lies on disk, where it is all read")


class ShardRecord(Record):
    """`shard.json`."""

    documents: int = Field(description="kept, duplicates included")
    empty: int
    short: int
    bad: int
    bad_examples: tuple[str, ...]
    inputs: tuple[ShardInput, ...] = Field(description="in the order of the shard's files")
    runs: tuple[int, ...] = Field(description="documents of each sorted run of digests")
    columns: dict[str, ColumnRecord]

    def values(self, column: str, dtype: npt.DTypeLike) -> int:
        """How many values a column has."""
        return self.columns[column].bytes // np.dtype(dtype).itemsize


def write_shard(
    shard: Shard, work: WorkFolder, on_progress: Callable[[int], None] | None = None
) -> None:
    """Read a shard's files and write its columns.

    Args:
        shard: The shard.
        work: Where it goes.
        on_progress: Called with the bytes read; where left out, a file says how many.

    Raises:
        DataError: an input cannot be read, or changed since the build began.
        StorageError: the file system refused to write.
    """
    folder = work.partial(shard.name)
    progress = work.progress(shard.name)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        writer = _ShardWriter(shard, folder, on_progress or _Progress(progress))
        with contextlib.closing(writer):
            writer.write()
        if work.shard(shard.name).exists():  # another process was faster
            shutil.rmtree(folder)
        else:
            folder.rename(work.shard(shard.name))
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or folder}: {error.strerror or error}; free space or "
            "choose another --out. Finished shards are kept: the same command goes on from them"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        progress.unlink(missing_ok=True)


def load_shard(folder: Path, skip_bad: bool) -> ShardRecord | None:
    """What a finished shard holds; None if it is damaged, or has faults that are not wanted."""
    try:
        record = ShardRecord.load(folder / RECORD)
        for name, column in record.columns.items():
            if (folder / name).stat().st_size != column.bytes:
                return None
    except (StorageError, OSError):
        return None
    return None if record.bad and not skip_bad else record


class _Progress:
    """How much of the input is read, in a file that whoever waits can read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0.0

    def __call__(self, done_bytes: int) -> None:
        now = time.monotonic()
        if now - self._written >= _PROGRESS_S:
            self._written = now
            self._path.write_text(str(done_bytes))


class _ShardWriter:
    def __init__(self, shard: Shard, folder: Path, on_progress: Callable[[int], None]) -> None:
        self._shard, self._folder, self._on_progress = shard, folder, on_progress
        options = shard.options
        self._faults = InputErrors(options.read.skip_bad)
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
            reader = DocumentReader(file, self._shard.options.read, self._faults.add)
            for chunk in reader:
                self._add(chunk)
                self._on_progress(done_bytes + reader.position_bytes)
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
            bad=self._faults.count,
            bad_examples=tuple(self._faults.examples),
            inputs=tuple(inputs),
            runs=tuple(self._digests.lengths) if self._digests else (),
            columns={name: column.finish() for name, column in self._columns.items()},
        )
        record.save(self._folder / RECORD)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()

    def _add(self, chunk: Documents) -> None:
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


def column_files(options: BuildOptions) -> list[str]:
    """The columns that a shard has."""
    names = [DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW] if options.clean.dedup else []
    if options.tokenize:
        return [*names, "tokens", "tokens.lengths", "text.lengths"]
    for column in options.read.columns:
        names += [column, f"{column}.lengths"]
    return [*names, "id"]


class _ColumnFile:
    """A file of values, with its digest."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
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
    """Digests with their documents' numbers in the shard, sorted run by run."""

    def __init__(self, columns: dict[str, _ColumnFile]) -> None:
        self._columns = columns
        self._high: list[Digests] = []
        self._low: list[Digests] = []
        self._held = 0
        self._rows = 0
        self.lengths: list[int] = []

    def add(self, high: Digests, low: Digests) -> None:
        self._high.append(high)
        self._low.append(low)
        self._held += len(high)
        if self._held >= _RUN_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        high, low = np.concatenate(self._high), np.concatenate(self._low)
        order = np.argsort(high, kind="stable")
        self._columns[DIGEST_HIGH].write(high[order])
        self._columns[DIGEST_LOW].write(low[order])
        self._columns[DIGEST_ROW].write(order + self._rows)
        self._rows += len(order)
        self.lengths.append(len(order))
        self._high, self._low, self._held = [], [], 0


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
        """Token ids of some documents, and the number of them in each, a part after the other."""
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


def _check_unchanged(file: InputFile) -> None:
    try:
        now = file.path.stat()
    except OSError as error:
        raise DataError(f"cannot read {file.name}: {error.strerror or error}") from error
    if (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise DataError(
            f"{file.name} has changed since the build began (it had {file.size_bytes:,} bytes and "
            f"has {now.st_size:,}); start the build again when nobody writes to it"
        )


# Enough shards to keep processes busy to the end and to lose little when killed, and no more.
_SHARDS = 16
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
# What a compressed byte counts, for it takes as long as several plain ones.
_PACKED = 3
# What opening a file counts, which a million small ones are mostly made of.
_FILE_BYTES = 64 << 10
# Changes when the same inputs and options make other columns.
_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A run of input files.

    Attributes:
        name: Depends on the files (place, size, time of change) and on the options.
        files: In their order.
        options: How they are read.
    """

    name: str
    files: tuple[InputFile, ...]
    options: BuildOptions

    @property
    def size_bytes(self) -> int:
        """Of its files on disk."""
        return sum(file.size_bytes for file in self.files)


def plan_shards(files: Sequence[InputFile], options: BuildOptions) -> list[Shard]:
    """Cut the inputs into shards; a file is never in two.

    Paths in them are absolute, for whoever reads a shard may stand in another folder.
    """
    if options.tokenize:
        tokenizer = options.tokenize.tokenizer.absolute()
        options = replace(options, tokenize=replace(options.tokenize, tokenizer=tokenizer))
    total = sum(map(_weight, files))
    target = min(max(total // _SHARDS, _LEAST_BYTES), _MOST_BYTES)
    return [Shard(_name(run, options), run, options) for run in _runs(files, target)]


def _runs(files: Sequence[InputFile], target: int) -> Iterator[tuple[InputFile, ...]]:
    run: list[InputFile] = []
    weight = 0
    for file in files:
        if run and weight + _weight(file) > target:
            yield tuple(run)
            run, weight = [], 0
        run.append(replace(file, path=file.path.absolute()))
        weight += _weight(file)
    if run:
        yield tuple(run)


def _weight(file: InputFile) -> int:
    return _FILE_BYTES + file.size_bytes * (_PACKED if file.compression else 1)


def _name(files: tuple[InputFile, ...], options: BuildOptions) -> str:
    # Whether faults are left out or stop the build makes no difference to a shard without any.
    options = replace(options, read=replace(options.read, skip_bad=False))
    content = [_VERSION, asdict(options), [asdict(file) for file in files]]
    return xxhash.xxh3_64_hexdigest(json.dumps(content, default=str).encode())
