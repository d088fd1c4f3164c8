"""Input files of all formats as chunks of documents in Arrow arrays: a file here a format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.inputs import InputFile
from slurmllm.corpus.options import ReadOptions
from slurmllm.corpus.readers.base import Documents, OnError
from slurmllm.corpus.readers.columns import read_arrow, read_parquet
from slurmllm.corpus.readers.delimited import read_delimited
from slurmllm.corpus.readers.json_lines import read_json_lines
from slurmllm.corpus.readers.text import read_text
from slurmllm.errors import DataError

__all__ = ["DocumentReader", "Documents", "OnFault", "ReadOptions"]


class DocumentReader:
    """The documents of one file, in chunks; iterates once.

    Args:
        file: The file.
        options: How it becomes documents.
        on_fault: Called with `file:place: what is wrong` for each document that is unreadable.

    Attributes:
        documents: Documents read so far, blank ones included.
        position_bytes: How far into the file, as it lies on disk, reading has come.
        checksum: xxh3-128 of the file in hexadecimal, once it is read; None for Parquet and
            Arrow files, of which only the columns wanted are read.
    """

    def __init__(self, file: InputFile, options: ReadOptions, on_fault: OnError) -> None:
        self.file = file
        self.options = options
        self.documents = 0
        self.position_bytes = 0
        self.checksum: str | None = None
        self._on_fault = on_fault

    def __iter__(self) -> Iterator[Documents]:
        try:
            stream = OpenedInput(self.file)
        except OSError as error:
            self._on_fault(f"{self.file.name}: cannot be read: {error.strerror or error}", "file")
            return
        with stream:
            try:
                for chunk in self._chunks(stream):
                    self.position_bytes = max(self.position_bytes, stream.offset_bytes)
                    self.documents += len(chunk[0])
                    yield chunk
            except OSError as error:
                reason = " ".join(str(error).split()).rstrip(".")
                self._on_fault(
                    f"{self.file.name}: cannot be read to its end: {reason} (near byte "
                    f"{stream.offset_bytes:,} of {self.file.size_bytes:,} on disk, after "
                    f"{self.documents:,} documents)",
                    "rest",
                )
            if stream.offset_bytes:
                with contextlib.suppress(OSError):
                    self.checksum = stream.checksum()

    def _chunks(self, stream: OpenedInput) -> Iterator[Documents]:
        kind, options = self.file.format, self.options
        if kind == "text":
            if options.prompt_key is not None:
                raise DataError(
                    f"{self.file.name}: a text file has no fields, so no --prompt-key; give "
                    "prompts and completions as JSON lines, CSV, Parquet or Arrow"
                )
            return read_text(stream, options, self._on_fault)
        if kind == "jsonl":
            return read_json_lines(stream, options, self._on_fault)
        if kind == "csv":
            return read_delimited(stream, options, self._on_fault)
        read = read_parquet if kind == "parquet" else read_arrow
        return read(stream, options, self._on_fault, self._on_part)

    def _on_part(self, part: float) -> None:
        self.position_bytes = int(part * self.file.size_bytes)
