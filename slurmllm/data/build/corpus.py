"""Input files → one Arrow corpus and its manifest, with bounded memory.

The corpus appears under its name whole or not at all. Memory holds one record batch (about
_BATCH_CHARS of text) and the document at hand, whatever the size of the inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from slurmllm.data.build.documents import DocumentStream, Faults
from slurmllm.data.build.inputs import FormatOption, InputFile
from slurmllm.data.build.manifest import CorpusInput, CorpusManifest, manifest_path
from slurmllm.data.build.readers import ReadOptions
from slurmllm.errors import DataError, StorageError
from slurmllm.progress import OnProgress
from slurmllm.rundir import fsync_dir

_BATCH_CHARS = 16 << 20
_BATCH_ROWS = 1 << 16


def build_corpus(
    files: Sequence[InputFile],
    out: Path,
    options: ReadOptions,
    *,
    format: FormatOption = "auto",
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> CorpusManifest:
    """Write a corpus and its manifest.

    Args:
        files: What to read, in the corpus's order.
        out: The corpus; the manifest is written beside it (`manifest_path`).
        options: How files become documents.
        format: What the files were found with, for the manifest.
        overwrite: Whether to replace a corpus that is there.
        on_progress: Called now and then while reading.

    Raises:
        DataError: `out` exists, an input cannot be read, or there is no text in any.
        StorageError: the file system refused to write.
    """
    refuse_existing(out, overwrite)
    faults = Faults(options.skip_bad)
    with _new_file(out) as sink:
        writer = _CorpusWriter(sink, [file.name for file in files])
        texts = DocumentStream(files, options, faults, on_progress)
        for text in texts:
            writer.add(text, texts.file_index)
        writer.close()
        if not writer.documents:
            raise DataError(
                f"no text in {len(files)} input file{'s' if len(files) != 1 else ''} "
                f"({texts.empty} empty documents, {faults.count} unreadable); no corpus was "
                f"written. The first input is {files[0].name if files else 'missing'}: see "
                "--format and --text-key"
            )
    manifest = CorpusManifest(
        documents=writer.documents,
        text_bytes=writer.text_bytes,
        arrow_bytes=sink.size_bytes,
        arrow_sha256=sink.sha256,
        format=format,
        text_by=options.text_by,
        text_key=options.text_key,
        empty=texts.empty,
        bad=faults.count,
        bad_examples=tuple(faults.examples),
        inputs=tuple(
            CorpusInput(path=file.name, bytes=file.size_bytes, documents=count)
            for file, count in zip(files, texts.counts, strict=True)
        ),
    )
    manifest.save(manifest_path(out))
    return manifest


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise a DataError where an output is there already and may not be replaced."""
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not overwrite:
        raise DataError(f"{out} is already there; choose another --out, or add --overwrite")


class _CorpusWriter:
    """Documents → record batches of bounded size."""

    def __init__(self, sink: _HashedFile, names: list[str]) -> None:
        # One dictionary for all batches: an IPC file cannot replace a dictionary half-way.
        self._names = pa.array(names, pa.large_string())
        self._schema = pa.schema(
            [("text", pa.large_string()), ("source", pa.dictionary(pa.int32(), pa.large_string()))]
        )
        self._writer = pa.ipc.new_file(sink, self._schema)
        self._texts: list[str] = []
        self._sources: list[int] = []
        self._chars = 0
        self.documents = 0
        self.text_bytes = 0

    def add(self, text: str, source: int) -> None:
        self._texts.append(text)
        self._sources.append(source)
        self._chars += len(text)
        if self._chars >= _BATCH_CHARS or len(self._texts) >= _BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        if self._texts:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        texts = pa.array(self._texts, pa.large_string())
        sources = pa.array(np.array(self._sources, dtype=np.int32))
        columns = [texts, pa.DictionaryArray.from_arrays(sources, self._names)]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self.documents += len(texts)
        self.text_bytes += int(np.frombuffer(texts.buffers()[1], np.int64)[len(texts)])
        self._texts, self._sources, self._chars = [], [], 0


class _HashedFile(io.RawIOBase):
    """A file that digests what is written to it, for a digest read back costs the file again."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._digest.update(data)
        try:
            self._stream.write(data)
        except OSError as error:
            raise _refused(self._path, error) from error
        self.size_bytes += count
        return count

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[_HashedFile]:
    """A file under a temporary name, which takes its own when the block ends without an error."""
    temporary: Path | None = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise _refused(path, error) from error
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            yield _HashedFile(stream, path)
            try:
                stream.flush()
                os.fsync(stream.fileno())
            except OSError as error:
                raise _refused(path, error) from error
        try:
            temporary.chmod(0o644)
            # An old manifest must not be found beside a new corpus, should this end in between.
            manifest_path(path).unlink(missing_ok=True)
            temporary.replace(path)
            temporary = None
            fsync_dir(path.parent)
        except OSError as error:
            raise _refused(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another --out. "
        "No part of the corpus was kept"
    )
