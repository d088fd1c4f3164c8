"""An input file as a stream of decompressed bytes, hashed while it is read.

Files of several compressed streams (`cat a.gz b.gz`) are read to their end. A cut or corrupt
stream raises an OSError with every compression.
"""

from __future__ import annotations

import bz2
import functools
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from slurmllm.corpus.inputs import Compression, InputFile

# Bytes requested of a decompressor at once: an error loses no more text than this.
_STEP_BYTES = 64 << 10
# A few kilobytes can unpack to terabytes of line ends.
_MOST_BLANK_BYTES = 1 << 30


class OpenedInput(io.RawIOBase):
    """One open input file; a Python file for libraries that need one.

    Attributes:
        offset_bytes: Position in the file on disk; decompressors read up to 64 KiB ahead.
        mapped_bytes: Position of a reader that maps the file instead of reading it here.
        blank_bytes: Bytes decompressed since the last document, which the reader sets to 0.
    """

    def __init__(self, file: InputFile, zstd_long: int) -> None:
        self.file = file
        self.offset_bytes = self.mapped_bytes = self.blank_bytes = 0
        self._raw = file.path.open("rb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._streams = None
        if file.compression is not None:
            self._streams = _Streams(self._read_raw, file.compression, zstd_long)
        self._error: OSError | None = None

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes; fewer, but some, before an error or the end; then none."""
        if self._streams is None:
            return self._read_raw(size)
        if self._error is not None:
            raise self._error
        parts: list[bytes] = []
        while size > 0:
            try:
                if self.blank_bytes > _MOST_BLANK_BYTES:
                    raise OSError(
                        f"it unpacks to more than {_MOST_BLANK_BYTES >> 30} GiB without a "
                        "document; if that is right, decompress the file first"
                    )
                part = self._streams.read(min(size, _STEP_BYTES))
            except OSError as error:
                if not parts:
                    raise
                self._error = error  # raised by the next call: what came before it is intact
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self.blank_bytes += len(part)
        return b"".join(parts)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Yield all bytes, `size` at a time."""
        while data := self.read(size):
            yield data

    def checksum(self) -> str:
        """xxh3-128 of the file on disk, in hexadecimal; reads the rest of it."""
        while self._read_raw(1 << 20):
            pass
        return self._digest.hexdigest()

    def _read_raw(self, size: int) -> bytes:
        data = self._raw.read(size) or b""
        self._digest.update(data)
        self.offset_bytes += len(data)
        return data


class _GzipMember:
    """zlib's decompressor with the interface of lzma's, bz2's and zstd's."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, /, max_length: int = 0) -> bytes:
        text = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        # zlib may hold text without any input left.
        self.needs_input = len(text) < max_length and not self._member.unconsumed_tail
        return text


def _new_decompressor(compression: Compression, zstd_long: int) -> Callable[[], Any]:
    if compression == "zstd":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: zstd_long}
        return functools.partial(zstd.ZstdDecompressor, options=options)
    kinds = {"gzip": _GzipMember, "bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}
    return kinds[compression]


class _Streams:
    """One or more compressed streams in a row; a damaged one is not taken for the end.

    Zeros between and after the streams are ignored: xz pads with them, tapes and copies of blocks
    add them.
    """

    def __init__(
        self, read_packed: Callable[[int], bytes], compression: Compression, zstd_long: int
    ) -> None:
        self._read_packed, self._compression, self._zstd_long = read_packed, compression, zstd_long
        self._new = _new_decompressor(compression, zstd_long)
        self._decompressor = self._new()
        self._streams = 0  # that ended
        self._has_text = False  # the current one

    def read(self, nbytes: int) -> bytes:
        data = b""
        while not data:
            packed = b""
            if self._decompressor.eof:
                self._streams += 1
                packed = self._decompressor.unused_data.lstrip(b"\0")
                while not packed:
                    padding = self._read_packed(_STEP_BYTES)
                    if not padding:
                        return b""
                    packed = padding.lstrip(b"\0")
                self._decompressor, self._has_text = self._new(), False
            elif self._decompressor.needs_input:
                packed = self._read_packed(_STEP_BYTES)
                if not packed:
                    raise OSError("Truncated compressed stream")
            try:
                data = self._decompressor.decompress(packed, nbytes)
            except Exception as error:  # each library has its own
                raise OSError(self._reason(error)) from error
        self._has_text = True
        return data

    def _reason(self, error: Exception) -> str:
        if "too much memory" in str(error):
            return (
                f"its zstd window is larger than 2^{self._zstd_long} bytes; a process that reads "
                "it needs as much memory: allow it with --zstd-long 31, or less"
            )
        part = f"what follows its {self._streams} complete streams" if self._streams else "it"
        state = "damaged" if self._has_text else f"not {self._compression}, or damaged"
        return f"{part} is {state}: {error}"
