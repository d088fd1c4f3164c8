"""A log file opened, unpacked if it is a .gz; of one that is cut or damaged, what is whole."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from slurmllm.errors import RunError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
# A line that has not ended by then is handed on in pieces.
_MOST_LINE_BYTES = 1 << 20


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log to be read from its beginning.

    Args:
        path: The file.
        warnings: Of a .gz that breaks off, one is added when it has been read as far as it goes.

    Raises:
        RunError: it is called .gz and is none.
        OSError: the file cannot be read.
    """
    stream = path.open("rb")
    if path.suffix != ".gz":
        return stream
    with stream:
        begin = stream.read(len(_MAGIC))
    if begin and not _MAGIC.startswith(begin):
        raise RunError(
            f"{path} is no gzip file: it begins with {begin!r}, such a file with {_MAGIC!r}; name "
            f"it {path.stem} if it is not packed, or restore it"
        )
    return cast(BinaryIO, io.BufferedReader(_Unpacked(path, warnings)))


class _Unpacked(io.RawIOBase):
    """What is in a .gz, up to the last whole line where it breaks off."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        super().__init__()
        self._path, self._warnings = path, warnings
        self._stream = gzip.GzipFile(path, "rb")
        self._blocks, self._left = self._whole_lines(), memoryview(b"")

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Hand on the next bytes; 0 of them at the end."""
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        target = memoryview(buffer).cast("B")
        taken = min(len(target), len(self._left))
        target[:taken], self._left = self._left[:taken], self._left[taken:]
        return taken

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()

    def _whole_lines(self) -> Iterator[bytes]:
        """Blocks that are not empty; a number at the end of a cut line may lack digits."""
        rest = b""
        try:
            while block := self._stream.read1(_BLOCK_BYTES):
                text = rest + block
                at = text.rfind(b"\n") + 1
                if len(text) - at > _MOST_LINE_BYTES:
                    at = len(text)
                whole, rest = text[:at], text[at:]
                if whole:
                    yield whole
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # What is cut, and what something else is appended to, is right up to there.
            right = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            found = f"{self._path} is damaged: {error}; read as far as it goes"
            self._warnings.append(found if right else f"{found}, and some of it may be wrong")
            return
        if rest:
            yield rest
