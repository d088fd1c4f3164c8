"""Input files of all formats as chunks of documents in Arrow arrays: one file a format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurmllm.core.display.progress import OnProgress
from slurmllm.core.errors import DataError
from slurmllm.core.format import printable
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.data.corpus.decompress import ForeignFormatError, OpenedInput
from slurmllm.data.corpus.inputs import InputFile
from slurmllm.data.corpus.options import InputErrors, ReadOptions
from slurmllm.data.corpus.readers.base import Documents, OnError, drop_blank
from slurmllm.data.corpus.readers.columns import read_delimited, read_table
from slurmllm.data.corpus.readers.json_lines import read_json_lines
from slurmllm.data.corpus.readers.text import read_text

_READERS = {
    "text": read_text,
    "jsonl": read_json_lines,
    "csv": read_delimited,
    "parquet": read_table,
    "arrow": read_table,
}


@dataclass
class DocumentReader:
    """The documents of one file, in chunks; iterates once.

    `on_error` is called with `file:place: reason` for each document that cannot be read.

    Attributes:
        position_bytes: Position in the file on disk.
        checksum: xxh3-128 of the file in hexadecimal, once it is read; None for Parquet and
            Arrow files, of which only the needed columns are read.
    """

    file: InputFile
    options: ReadOptions
    on_error: OnError
    position_bytes: int = 0
    checksum: str | None = None

    def __iter__(self) -> Iterator[Documents]:
        file = self.file
        on_error = self.on_error
        if file.format == "text" and self.options.prompt_key is not None:
            raise DataError(
                f"{file.name}: a text file has no fields, so no --prompt-key; give "
                "prompts and completions as JSON lines, CSV, Parquet or Arrow"
            )
        try:
            stream = OpenedInput(file, self.options.zstd_long)
        except OSError as error:
            on_error(f"{file.name}: cannot be read: {os_error_text(error)}", "file")
            return

        documents = 0  # blank ones included
        with stream:
            try:
                for chunk in _READERS[file.format](stream, self.options, on_error):
                    self.position_bytes = max(stream.mapped_bytes, stream.offset_bytes)
                    documents += len(chunk[0])
                    if len(chunk[0]):
                        stream.blank_bytes = 0
                    yield chunk
            except ForeignFormatError as error:
                on_error(str(error), "file")
            except OSError as error:
                reason = printable(" ".join(str(error).split())).rstrip(".")
                on_error(
                    f"{file.name}: cannot be read to its end: {reason} (near byte "
                    f"{stream.offset_bytes:,} of {file.size_bytes:,} on disk, after "
                    f"{documents:,} documents)",
                    "rest",
                )
            if stream.offset_bytes:
                with contextlib.suppress(OSError):
                    self.checksum = stream.checksum()


@dataclass
class DocumentStream:
    """The texts of several files, without blank ones; counts the `documents`; iterates once."""

    files: Sequence[InputFile]
    options: ReadOptions
    errors: InputErrors
    on_progress: OnProgress = lambda done_bytes: None
    documents: int = 0

    def __iter__(self) -> Iterator[str]:
        done_bytes = 0
        for file in self.files:
            reader = DocumentReader(file, self.options, self.errors.add)
            for chunk in reader:
                self.on_progress(done_bytes + reader.position_bytes)
                (texts,) = drop_blank(chunk)
                self.documents += len(texts)
                self.errors.raise_first(len(texts))
                yield from texts.to_pylist()
            self.errors.raise_first()
            done_bytes += file.size_bytes
            self.on_progress(done_bytes)
