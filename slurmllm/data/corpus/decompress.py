"""An input file as a stream of decompressed bytes, hashed while it is read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import xxhash

from slurmllm.core.run.file_formats import foreign_format
from slurmllm.data.corpus.addresses import open_input
from slurmllm.data.corpus.inputs import InputFile

# Bytes requested of a decompressor at once: an error loses no more text than this.
_STEP_BYTES = 64 << 10
_LONE_RETURN = re.compile(rb"\r(?!\n)")
# A few kilobytes can unpack to terabytes of line ends.
_MOST_BLANK_BYTES = 1 << 30


class ForeignFormatError(Exception):
    """A file is of another format; the message names it, and what to do."""


class OpenedInput(io.RawIOBase):
    """One open input file; a Python file for libraries that need one.

    A cut or damaged file raises an OSError with every compression.

    Attributes:
        offset_bytes: Position in the file on disk; decompressors read ahead.
        mapped_bytes: Position of a reader that maps the file instead of reading it here.
        blank_bytes: Bytes decompressed since the last document, which the reader sets to 0.
    """

    def __init__(self, file: InputFile, zstd_long: int) -> None:
        self.file = file
        self.mapped_bytes = self.blank_bytes = 0
        self._zstd_long = zstd_long
        self._raw = _HashedFile(file)
        self._unpacked: Any = self._raw if file.compression is None else self._decompressor()
        self._error: OSError | None = None
        self._is_checked = file.format in ("parquet", "arrow")  # they name what they are not

    @property
    def offset_bytes(self) -> int:
        return self._raw.offset_bytes

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes; fewer, but some, before an error or the end; then none.

        Raises ForeignFormatError if the first bytes are of a format that is not text.
        """
        data = self._read(size)
        if not self._is_checked and (refusal := foreign_format(self.file.name, data)):
            raise ForeignFormatError(refusal)
        self._is_checked = True
        return data

    def _read(self, size: int) -> bytes:
        if self.file.compression is None:
            return self._raw.read(size)
        if self._error is not None:
            raise self._error
        blocks: list[bytes] = []
        while size > 0:
            try:
                block = self._unpack(min(size, _STEP_BYTES))
            except OSError as error:
                if not blocks:
                    raise
                self._error = error  # raised by the next call: what came before it is intact
                break
            if not block:
                break
            blocks.append(block)
            size -= len(block)
        return b"".join(blocks)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Yield all bytes, about `size` at a time; a carriage return ends a line like a feed.

        In the two formats whose text has none: JSON escapes them.
        """
        held = b""  # a carriage return, whose line feed may follow
        while data := self.read(size):
            if self.file.format in ("text", "jsonl") and (held or b"\r" in data):
                data = held + data
                held = data[-1:] if data.endswith(b"\r") else b""
                data = _LONE_RETURN.sub(b"\n", data.removesuffix(b"\r"))
            if data:
                yield data
        if held:
            yield b"\n"

    def checksum(self) -> str:
        """xxh3-128 of the file on disk, in hexadecimal; reads the rest of it."""
        while self._raw.read(1 << 20):
            pass
        return self._raw.digest.hexdigest()

    def _unpack(self, size: int) -> bytes:
        if self.blank_bytes > _MOST_BLANK_BYTES:
            raise OSError(
                f"it unpacks to more than {_MOST_BLANK_BYTES >> 30} GiB without a document; if "
                "that is right, decompress the file first"
            )
        try:
            if self.file.size_bytes == 0:
                raise EOFError
            block: bytes = self._unpacked.read1(size)
        except EOFError as error:
            raise OSError("Truncated compressed stream") from error
        except Exception as error:  # each library has its own
            reason = f"it is not {self.file.compression}, or damaged: {error}"
            if "too much memory" in str(error):
                reason = (
                    f"its zstd window is larger than 2^{self._zstd_long} bytes; a process that "
                    "reads it needs as much memory: allow it with --zstd-long 31, or less"
                )
            raise OSError(reason) from error
        self.blank_bytes += len(block)
        return block

    def _decompressor(self) -> Any:
        if self.file.compression == "zstd":
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                from backports import zstd
            options = {int(zstd.DecompressionParameter.window_log_max): self._zstd_long}
            return _Streams(self._raw, partial(zstd.ZstdDecompressor, options=options))
        if self.file.compression == "gzip":
            return gzip.GzipFile(fileobj=self._raw)
        if self.file.compression == "bz2":
            return _Streams(self._raw, bz2.BZ2Decompressor)
        # Not the older .lzma, of which zeros are an empty file.
        return _Streams(self._raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))


class _Streams:
    """Compressed streams in a row, with zeros between and after them, as xz pads.

    CAUTION: Python's own file classes take a damaged stream after the first for the end.
    """

    def __init__(self, file: _HashedFile, new_decompressor: Callable[[], Any]) -> None:
        self._file = file
        self._new = new_decompressor
        self._decompressor = new_decompressor()

    def read1(self, size: int) -> bytes:
        data = b""
        while not data:
            packed = b""
            if self._decompressor.eof:
                packed = self._decompressor.unused_data
                while not (packed := packed.lstrip(b"\0")):
                    packed = self._file.read(_STEP_BYTES)
                    if not packed:
                        return b""
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                packed = self._file.read(_STEP_BYTES)
                if not packed:
                    raise EOFError
            data = self._decompressor.decompress(packed, size)
        return data


class _HashedFile(io.RawIOBase):
    """The bytes of a file on disk, hashed while they are read in their order."""

    def __init__(self, file: InputFile) -> None:
        self._file = open_input(file.path)
        self.digest = xxhash.xxh3_128()
        self.offset_bytes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size) or b""
        self.digest.update(data)
        self.offset_bytes += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()
