"""An input file as a stream of unpacked bytes, digested on the way.

What `gzip`, `zstd`, `bzip2` and `xz` join by appending is read to its end, and a stream that is
cut or corrupt raises an OSError, whatever library unpacks it.
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

# What a decompressor is asked for at once: a fault costs no more text than this.
_STEP_BYTES = 64 << 10
_PACKED_STEP_BYTES = 64 << 10


class _Unpacked(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


class OpenedInput(io.RawIOBase):
    """One open input file; a Python file to whoever wants one.

    Attributes:
        file: The file.
        offset_bytes: How far into the file, as it lies on disk, reading has come. Decompressors
            read up to 64 KiB ahead.
    """

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self._raw = _DigestedFile(file)
        self._unpacked: _Unpacked = _unpack(self._raw, file)
        self._fault: OSError | None = None
        self._ahead: Future[bytes] | None = None

    def readable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._wait()
        self._raw.close()
        super().close()

    @property
    def offset_bytes(self) -> int:
        """Bytes of the file read so far."""
        return self._raw.offset_bytes

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes; fewer, but some, before a fault or the end; none at the end.

        Raises:
            OSError: the rest of the file cannot be read.
        """
        if self.file.compression is None:
            return self._raw.read(size)
        if self._fault is not None:
            raise self._fault
        parts: list[bytes] = []
        while size > 0:
            try:
                part = self._unpacked.read(min(size, _STEP_BYTES))
            except OSError as error:
                if not parts:
                    raise
                self._fault = error  # for the next call: what came before it is whole
                break
            if not part:
                if self.offset_bytes == 0:
                    raise OSError("Truncated compressed stream: the file is empty")
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def blocks(self, size: int) -> Iterator[bytes]:
        """All there is, `size` bytes at a time; a thread unpacks while the caller computes.

        Raises:
            OSError: the rest of the file cannot be read.
        """
        while data := self.read(size) if self._ahead is None else self._ahead.result():
            self._ahead = None
            if self.file.compression is not None and len(data) == size:
                self._ahead = _threads().submit(self.read, size)
            yield data

    def checksum(self) -> str:
        """xxh3-128 of the file as it lies on disk, in hexadecimal; reads what is left of it."""
        self._wait()
        while self._raw.read(1 << 20):
            pass
        return self._raw.digest.hexdigest()

    def _wait(self) -> None:
        if self._ahead is not None:
            wait([self._ahead])
            self._ahead = None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "unpack")


class _DigestedFile(io.RawIOBase):
    """A file read from its beginning to its end, with the digest of what was read."""

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


def _unpack(raw: _DigestedFile, file: InputFile) -> _Unpacked:
    if file.compression is None:
        return raw
    if file.compression == "xz":
        return _XzStreams(raw)
    # Arrow's decompressors raise at a cut stream, which Python's zstandard passes over.
    stream: _Unpacked = pa.CompressedInputStream(pa.PythonFile(raw, "r"), file.compression)
    return stream


class _XzStreams:
    """One or more xz streams in a row; unlike lzma.open, no damage is taken for the end."""

    def __init__(self, raw: _DigestedFile) -> None:
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
