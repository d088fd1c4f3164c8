"""An input file as a stream of decompressed bytes, hashed while it is read.

Files of several compressed streams (`cat a.gz b.gz`) are read to their end. A cut or corrupt
stream raises an OSError with every compression.
"""

from __future__ import annotations

import functools
import io
import lzma
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import pyarrow as pa
import xxhash

from slurmllm.corpus.inputs import InputFile

# Bytes requested of a decompressor at once: an error loses no more text than this.
_STEP_BYTES = 64 << 10
_PACKED_STEP_BYTES = 64 << 10


class _Decompressed(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


class OpenedInput(io.RawIOBase):
    """One open input file; a Python file for libraries that need one.

    Attributes:
        file: The file.
        mapped_bytes: Position of a reader that maps the file instead of reading it here.
    """

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self.mapped_bytes = 0
        self._raw = _HashedFile(file)
        self._stream: _Decompressed = self._raw
        if file.compression == "xz":
            self._stream = _XzStreams(self._raw)
        elif file.compression is not None:
            # Arrow's decompressors raise at a cut stream, which Python's zstandard ignores.
            packed = pa.PythonFile(self._raw, "r")
            self._stream = pa.CompressedInputStream(packed, file.compression)
        self._error: OSError | None = None
        self._ahead: Future[bytes] | None = None

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._join_thread()
        self._raw.close()
        super().close()

    @property
    def offset_bytes(self) -> int:
        """Position in the file on disk; decompressors read up to 64 KiB ahead."""
        return self._raw.offset_bytes

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes; fewer, but some, before an error or the end; then none.

        Raises:
            OSError: the rest of the file cannot be read.
        """
        if self.file.compression is None:
            return self._raw.read(size)
        if self._error is not None:
            raise self._error
        parts: list[bytes] = []
        while size > 0:
            try:
                part = self._stream.read(min(size, _STEP_BYTES))
            except OSError as error:
                if not parts:
                    raise
                self._error = error  # raised by the next call: what came before it is intact
                break
            if not part:
                # An empty compressed file is a cut one: even no text has a header.
                if self.offset_bytes == 0:
                    raise OSError("Truncated compressed stream: the file is empty")
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Yield all bytes, `size` at a time; a thread decompresses while the caller computes.

        Raises:
            OSError: the rest of the file cannot be read.
        """
        while data := self.read(size) if self._ahead is None else self._ahead.result():
            self._ahead = None
            if self.file.compression is not None and len(data) == size:
                self._ahead = _threads().submit(self.read, size)
            yield data

    def checksum(self) -> str:
        """xxh3-128 of the file on disk, in hexadecimal; reads the rest of it."""
        self._join_thread()
        while self._raw.read(1 << 20):
            pass
        return self._raw.digest.hexdigest()

    def _join_thread(self) -> None:
        if self._ahead is not None:
            wait([self._ahead])
            self._ahead = None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "decompress")


class _HashedFile(io.RawIOBase):
    """A file read from beginning to end, with the digest of the bytes read."""

    def __init__(self, file: InputFile) -> None:
        self._stream = file.path.open("rb", buffering=0)
        self.digest = xxhash.xxh3_128()
        self.offset_bytes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size) or b""
        self.digest.update(data)
        self.offset_bytes += len(data)
        return data

    def close(self) -> None:
        self._stream.close()
        super().close()


class _XzStreams:
    """One or more xz streams in a row; unlike lzma.open, a damaged one is not taken for the end."""

    def __init__(self, raw: _HashedFile) -> None:
        self._raw = raw
        self._decompressor = lzma.LZMADecompressor()
        self._packed = b""

    def read(self, nbytes: int, /) -> bytes:
        data = b""
        while not data:
            if self._decompressor.eof:
                # Streams are padded with zero bytes to a multiple of four.
                self._packed = self._decompressor.unused_data.lstrip(b"\0")
                while not self._packed:
                    padding = self._raw.read(_PACKED_STEP_BYTES)
                    if not padding:
                        return b""
                    self._packed = padding.lstrip(b"\0")
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input:
                self._packed = self._raw.read(_PACKED_STEP_BYTES)
                if not self._packed:
                    raise OSError("Truncated compressed stream")
            try:
                data = self._decompressor.decompress(self._packed, nbytes)
            except lzma.LZMAError as error:
                raise OSError(f"xz decompress failed: {error}") from error
            self._packed = b""
        return data
