"""Files of logs, whole or growing: a reader for each, and what it has not read yet."""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import DamageWarning
from slurmllm.core.metrics.event_files import (
    EventReader,
    is_event_file,
    training_files,
)
from slurmllm.core.metrics.log_series import Log, LogReader, RowCollector, Rows, log_suffix
from slurmllm.core.metrics.row_logs import TAG_CSV, JsonReader, TableReader, json_numbers
from slurmllm.core.metrics.row_reader import parse_row
from slurmllm.core.metrics.tags import FILES, TABLES, TEXTS, Tags
from slurmllm.core.metrics.text_logs import TextReader
from slurmllm.core.run.file_formats import foreign_format
from slurmllm.core.run.safe_files import (
    LONGEST_LINE,
    open_regular,
    read_limited,
)

_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
_SPOOLED_BYTES = 256 << 20  # in memory; what is longer is in a file
_STEP_JSON = re.compile(r"metrics_step(?P<step>\d+)\.json")  # OLMo-core's metric_saver.py


def is_log(path: Path) -> bool:
    return is_event_file(path) or log_suffix(path) in FILES


def make_reader(path: Path, tags: Tags, pattern: str | None = None) -> LogReader:
    suffix = log_suffix(path)
    if pattern is not None or suffix in TEXTS:
        return TextReader(pattern)
    if is_event_file(path):
        return EventReader(path)
    return TableReader(path, tags) if suffix in TABLES else JsonReader(path)


class LogFile:
    """A log that grows, or is written again from its beginning."""

    def __init__(self, path: Path, tags: Tags) -> None:
        self._path = path
        self._tags = tags
        self.reader = make_reader(path, tags)
        self._state = (0, 0, 0)  # inode, size and time of change, as last read
        self._offset = 0
        self._head = b""  # of a table
        self._count = 0  # rows that were taken
        self._rows: Rows = []  # of a document

    def take_new(self, last: bool) -> Rows:
        info = self._path.stat()
        state = (info.st_ino, info.st_size, info.st_mtime_ns)
        if state == self._state and self.reader.is_document:
            return []
        is_same_file = state[0] == self._state[0]
        head = self._read_head()
        repeated = 0
        is_rewritten = not is_same_file or state[1] < self._offset or head != self._head
        if is_rewritten:
            if is_same_file and self._head:  # Lightning's CSVLogger writes all with a new column
                repeated = self._count
            self._count = 0
        if is_rewritten or self.reader.is_document:
            self.reader = make_reader(self._path, self._tags)
            self._offset = 0
        self._offset = feed(self.reader, self._path, self._offset)
        if last or self.reader.is_document or state == self._state:
            self.reader.flush(last or self.reader.is_document)  # or nothing new for a while
        self._state = state
        self._head = head
        rows = self.reader.take()
        self._count += len(rows)
        if not self.reader.is_document:
            return rows[repeated:]
        # A resume may have cut what a document held, and its files count anew.
        before = self._rows
        self._rows = rows
        pairs = enumerate(zip(before, rows, strict=False))
        return rows[next((n for n, (old, new) in pairs if old != new), len(before)) :]

    def _read_head(self) -> bytes:
        """Return the header of a table, once it is whole."""
        if not isinstance(self.reader, TableReader):
            return b""
        with open_regular(self._path) as stream:
            head = stream.readline(LONGEST_LINE)
        return head if head.endswith(b"\n") else b""


def feed(reader: LogReader, path: Path, offset: int = 0) -> int:
    """Have a reader read a file from an offset to its end, and return where that is."""
    with open_log(path, reader.warnings) as stream:
        stream.seek(offset)
        while chunk := stream.read(_CHUNK_BYTES):
            reader.feed(chunk)
        return stream.tell()


def read_file(path: Path, tags: Tags, pattern: str | None = None) -> Log:
    """Read a file to its end; raise RunError without rows or steps, OSError if it is unreadable."""
    reader = make_reader(path, tags, pattern)
    feed(reader, path)
    reader.flush(last=True)
    return reader.log(path, tags)


def read_events(source: Path, tags: Tags) -> Log:
    """Read an event file, or the files of a training: those of a folder, or of one below it."""
    files = training_files(source)
    reader = EventReader(files[0])
    for path in files:
        if path != files[0]:
            reader.begin_file(path)
        feed(reader, path)
        reader.flush(last=True)
    return reader.log(source, tags)


def split_log_files(folder: Path) -> list[tuple[int, Path]]:
    """Return OLMo-core's files of a step each, by step, and TensorBoard's tables of a tag each."""
    files = []
    for path in folder.iterdir():
        if step := _STEP_JSON.fullmatch(path.name):
            files.append((int(step["step"]), path))
        elif TAG_CSV.fullmatch(path.name):
            files.append((0, path))
    return sorted(files)


def read_split_log(folder: Path, tags: Tags) -> Log:
    """Read a folder of such files as one log."""
    rows = RowCollector()
    warnings = list[str]()
    series = {}
    for step, path in split_log_files(folder):
        if path.suffix == ".json":
            row = parse_row(read_limited(path))
            if isinstance(row, dict):
                rows.add([("step", float(step)), *json_numbers(row)])
            else:
                warnings.append(DamageWarning(f"{path} is not complete JSON; skipped it"))
            continue
        log = read_file(path, tags)
        times = log.series.get("Wall time")
        for tag, values in log.series.items():
            if tag != "Wall time":
                series[tag] = replace(values, times=None if times is None else times.values)
        warnings += log.warnings
    if len(rows):
        return rows.log(folder, "jsonl", tags, warnings)
    return Log(folder, "csv", series, warnings=tuple(warnings))


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log; a .gz is decompressed to a temporary file.

    If a .gz is damaged, it ends at the last complete line, and a warning is appended to `warnings`.
    Raises RunError if a .gz is not gzip, and of a format that is not text.
    """
    stream = open_regular(path)
    begin = stream.peek()
    if refusal := foreign_format(str(path), begin, "gzip" if path.suffix == ".gz" else ""):
        stream.close()
        raise RunError(refusal)
    if path.suffix != ".gz":
        return stream
    with stream:
        if not _GZIP_MAGIC.startswith(begin := begin[:2]):
            raise RunError(
                f"{path} is not a gzip file: it begins with {begin!r} instead of {_GZIP_MAGIC!r}; "
                f"rename it to {path.stem} if it is not compressed, or restore it"
            )
        content = cast(BinaryIO, tempfile.SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115
        # Bytes of complete lines: in a truncated line, the last number may lack digits
        complete = 0
        try:
            with gzip.open(stream) as compressed:
                while block := compressed.read1(_BLOCK_BYTES):
                    content.write(block)
                    if end := block.rfind(b"\n") + 1:
                        complete = content.tell() - len(block) + end
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # If the file is truncated, or other data are appended to it, all lines before that are
            # correct; if a checksum fails, any line may be wrong.
            correct = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            warning = f"{path} is damaged: {error}; read as far as possible"
            warning += "" if correct else ", and some of it may be wrong"
            warnings.append(warning if isinstance(error, EOFError) else DamageWarning(warning))
            content.truncate(complete)
    content.seek(0)
    return content
