"""Shards: runs of consecutive input files, each read by one process into one Arrow stream.

The cuts depend only on the files, not on the number of processes. A shard's name depends on its
files and options, so a finished shard need not be read again, whatever else changed between two
builds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import xxhash

from slurmllm.core.display.progress import OnProgress
from slurmllm.core.errors import DataError, SlurmllmError, StorageError
from slurmllm.core.format import Texts
from slurmllm.core.run.records import Record
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.run.safe_files import write_whole
from slurmllm.data.corpus.addresses import state_of
from slurmllm.data.corpus.inputs import InputFile
from slurmllm.data.corpus.options import BuildOptions, InputErrors, TokenDtype, TokenizeOptions
from slurmllm.data.corpus.readers import DocumentReader
from slurmllm.data.corpus.readers.base import CHUNK_BYTES, Documents, drop_blank
from slurmllm.data.corpus.work_folder import WorkFolder, writing
from slurmllm.data.sources.base import Hashes, Integers, prompt_content

if TYPE_CHECKING:
    from slurmllm.data.tokenizer import TokenEncoder

DOCUMENTS = "documents.arrow"
RECORD = "shard.json"

# Enough shards to keep processes busy to the end and to lose little when one is killed.
_SHARDS = 16
_LEAST_BYTES = 16 << 20
_MOST_BYTES = 256 << 20
# Cost of a compressed byte, in plain ones: it takes about as long to read as three.
_COMPRESSED_COST = 3
# Cost of opening a file, in bytes: with a million small files it is most of the time.
_OPEN_COST_BYTES = 64 << 10
# Part of a shard's name; raise it when equal inputs and options give other columns.
_VERSION = 2
# Seconds between two writes of the progress: the file is on a shared file system.
_PROGRESS_S = 0.5
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
    """Group the inputs into shards of similar cost; a file is never in two."""
    # Absolute, since the process that reads a shard may run in another folder.
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
    if tokenize := options.tokenize:
        tokenize = replace(tokenize, tokenizer=tokenize.tokenizer.absolute())
        options = replace(options, tokenize=tokenize)
    # A shard without errors is the same with --skip-bad.
    named = asdict(replace(options, read=options.read.content))
    shards = []
    for run in runs:
        content = json.dumps([_VERSION, named, [asdict(file) for file in run]], default=str)
        shards.append(Shard(xxhash.xxh3_64_hexdigest(content.encode()), tuple(run), options))
    return shards


class ShardInput(Record):
    """Documents and digest of one input file."""

    documents: int  # kept, duplicates included
    xxh3: str | None  # of the file on disk; None if it is not read whole


class ShardRecord(Record):
    """`shard.json`: contents of a finished shard."""

    documents: int  # kept, duplicates included
    empty: int
    bad: int
    bad_examples: Texts
    inputs: tuple[ShardInput, ...]  # in the order of the shard's files
    xxh3: str  # of `documents.arrow`


def shard_schema(options: BuildOptions) -> pa.Schema:
    """Return the columns of a shard.

    Texts, or token ids and the size of their text; both halves of the document's digest; the index
    of its file in the shard.
    """
    fields = [(column, pa.large_string()) for column in options.read.columns]
    if options.tokenize is not None:
        ids = pa.uint16() if options.tokenize.dtype == "uint16" else pa.int32()
        fields = [("tokens", pa.large_list(ids)), ("text_bytes", pa.int64())]
    if options.dedup:
        fields.append(("digest", pa.uint64()))
    return pa.schema([*fields, ("id", pa.uint64()), ("file", pa.int32())])


def load_shard(folder: Path, skip_bad: bool) -> ShardRecord | None:
    """Return the record of a finished shard; None if it is damaged, or has errors (`skip_bad`)."""
    try:
        record = ShardRecord.load(folder / RECORD)
        if _file_digest(folder / DOCUMENTS) != record.xxh3:
            return None
    except (StorageError, OSError):
        return None
    return None if record.bad and not skip_bad else record


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def write_shard(
    shard: Shard, work: WorkFolder, on_progress: Callable[[str, int], None] | None = None
) -> None:
    """Read a shard's files and write its documents.

    `on_progress` is called with the shard's name and the bytes read; without it, their number is
    written to `work.progress`. A DataError if an input cannot be read, or changed since the build
    began.
    """
    folder = work.partial(shard.name)
    progress = work.progress(shard.name)
    show = partial(on_progress, shard.name) if on_progress else _progress_file(progress)
    try:
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            reader = _ShardReader(shard, show)
            documents = folder / DOCUMENTS
            with documents.open("xb") as file, pa.ipc.new_stream(file, reader.schema) as out:
                for batch in _joined(iter(reader)):
                    out.write_batch(batch)
            reader.record(_file_digest(documents)).save(folder / RECORD)
            if not work.shard(shard.name).exists():  # else another process was faster
                folder.rename(work.shard(shard.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        progress.unlink(missing_ok=True)


def write_shards(shards: Sequence[Shard], work: Path) -> int | SlurmllmError:
    """Write shards; return this process's peak memory in bytes, or the first error."""
    try:
        for shard in shards:
            write_shard(shard, WorkFolder(work))
    except SlurmllmError as error:
        return error
    return peak_bytes()


def peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    # Not getrusage: a child inherits the maximum of the process that forked it.
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches of about CHUNK_BYTES: a batch for each of a million files is slow to read."""
    for batch in batches:
        held = [batch]
        size = batch.nbytes
        while size < CHUNK_BYTES and (batch := next(batches, None)) is not None:
            held.append(batch)
            size += batch.nbytes
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _progress_file(path: Path) -> OnProgress:
    """Return a function that writes a number to a file, at most twice a second."""
    written_s = 0.0

    def write(done_bytes: int) -> None:
        nonlocal written_s
        now = time.monotonic()
        if now - written_s >= _PROGRESS_S:
            written_s = now
            write_whole(path, str(done_bytes).encode(), durable=False)

    return write


class _ShardReader:
    """The documents of a shard as record batches; iterates once."""

    def __init__(self, shard: Shard, on_progress: OnProgress) -> None:
        self.schema = shard_schema(shard.options)
        self._shard = shard
        self._on_progress = on_progress
        self._encoder = _open_encoder(shard.options.tokenize) if shard.options.tokenize else None
        self._errors = InputErrors(shard.options.read.skip_bad, len(shard.files) == 1)
        self._inputs: list[ShardInput] = []
        self._empty = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        done_bytes = 0
        for index, file in enumerate(self._shard.files):
            documents = 0
            _check_unchanged(file)
            reader = DocumentReader(file, self._shard.options.read, self._errors.add)
            for chunk in reader:
                filled = drop_blank(chunk)
                count = len(filled[0])
                self._empty += len(chunk[0]) - count
                if count:
                    documents += count
                    self._errors.raise_first(documents)
                    yield self._batch(filled, index)
                self._on_progress(done_bytes + reader.position_bytes)
            self._errors.raise_first()
            # A file that was written to while it was read is a mixture of both versions.
            _check_unchanged(file)
            done_bytes += file.size_bytes
            self._on_progress(done_bytes)
            self._inputs.append(ShardInput(documents=documents, xxh3=reader.checksum))

    def record(self, xxh3: str) -> ShardRecord:
        return ShardRecord(
            documents=sum(file.documents for file in self._inputs),
            empty=self._empty,
            bad=self._errors.count,
            bad_examples=self._errors.examples,
            inputs=self._inputs,
            xxh3=xxh3,
        )

    def _batch(self, documents: Documents, file: int) -> pa.RecordBatch:
        high, low = digest(documents)
        options = self._shard.options
        columns = dict(
            zip(options.read.columns, documents, strict=True),
            digest=high,
            id=low,
            file=np.full(len(low), file, np.int32),
        )
        if self._encoder is not None and options.tokenize is not None:
            columns["tokens"] = _encode(self._encoder, documents[0], options.tokenize.dtype)
            columns["text_bytes"] = np.diff(spans(documents[0])[0])
        columns = {name: columns[name] for name in self.schema.names}
        return pa.RecordBatch.from_pydict(columns, self.schema)


def _check_unchanged(file: InputFile) -> None:
    with storage_errors(f"cannot read {file.name}", kind=DataError):
        size_bytes, version = state_of(file.path, fresh=True)
    if (size_bytes, version) != (file.size_bytes, file.version):
        raise DataError(
            f"{file.name} has changed since the build began (it had {file.size_bytes:,} bytes and "
            f"has {size_bytes:,}); start the build again when no other program writes to it"
        )


def spans(column: pa.LargeStringArray | pa.LargeListArray) -> tuple[Integers, memoryview]:
    """Return offsets int64 [rows + 1] into the bytes or items of a column, and these; no copies."""
    if not len(column):
        return np.zeros(1, np.int64), memoryview(b"")
    buffers = column.buffers()
    items = memoryview(buffers[-1] or b"")
    if pa.types.is_large_list(column.type):
        items = items.cast("B").cast("H" if column.type.value_type == pa.uint16() else "i")
    return np.frombuffer(buffers[1], np.int64)[column.offset :][: len(column) + 1], items


def digest(documents: Documents) -> tuple[Hashes, Hashes]:
    """Return high and low 64 bits of each document's xxh3-128, uint64 [documents] twice.

    The low half is `document_hash` of a text, or of `prompt_content`.
    """
    texts = []
    for column in documents:
        offsets, values = spans(column)
        texts.append([values[a:b] for a, b in itertools.pairwise(offsets.tolist())])
    contents: Any = texts[0] if len(texts) == 1 else map(prompt_content, *texts)
    # The digest's bytes are big endian.
    digests = b"".join(map(xxhash.xxh3_128_digest, contents))
    high, low = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2).T
    return high, low


def _open_encoder(options: TokenizeOptions) -> TokenEncoder:
    from slurmllm.data.tokenizer import TokenEncoder

    encoder = TokenEncoder(options.tokenizer)
    if encoder.fingerprint != options.fingerprint:
        raise DataError(
            f"{options.tokenizer} has changed since the build began; start the build again"
        )
    return encoder


def _encode(
    encoder: TokenEncoder, column: pa.LargeStringArray, dtype: TokenDtype
) -> pa.LargeListArray:
    """Return the token ids of each document, with its end-of-document token."""
    offsets, _ = spans(column)
    ids = []
    begin = 0
    while begin < len(column):
        end = int(np.searchsorted(offsets, offsets[begin] + _ENCODE_BYTES, side="right")) - 1
        end = max(end, begin + 1)
        for document in encoder.encode_batch(column[begin:end].to_pylist()):
            ids.append(np.array([*document, encoder.end_of_document], dtype))
        begin = end
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(ids)))
