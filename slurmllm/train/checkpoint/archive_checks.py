"""Checks of archives that torch.save wrote, without torch: their tables of contents and headers.

Tensors are not read: torch.load ignores the checksums (CRC32) of its archives, so that only a
`full` check sees a flipped bit of a weight, if it was saved with checksums.
https://github.com/pytorch/pytorch v2.13.0 caffe2/serialize/inline_container.cc
"""

from __future__ import annotations

import os
import zipfile
import zlib
from io import RawIOBase
from operator import attrgetter
from pathlib import Path
from struct import error as struct_error
from struct import unpack_from
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_ZIP = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_ENDS = (_ZIP_END, b"PK\x06\x06")  # also above 4 GiB
_ENTRY = 46  # bytes of an entry of the table of contents without its name
_END = 22  # bytes of the archive's end
_DESCRIBED = 8  # flag of a member whose sizes follow it, in 16 or 24 bytes
_SMALL = 1 << 20  # bytes of a member whose checksum is always compared, such as the pickle's
_BLOCK = 1 << 22


class DamagedError(Exception):
    """A file of a checkpoint is damaged and cannot be loaded."""


class FilePart(RawIOBase):
    """A section of a file that can be read as a file."""

    _at = 0

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream = stream
        self._offset = offset
        self._length = length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._stream.seek(self._offset + self._at)
        count: int = self._stream.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


def check_archive(stream: BinaryIO, offset: int, length: int, full: bool = False) -> bool:
    """Return whether a part of a file is an archive of torch.save; DamagedError if it is damaged.

    `full`: compare the checksums of all members, if it was saved with them.
    """
    archive_part = cast(BinaryIO, FilePart(stream, offset, length))
    head = archive_part.read(len(_ZIP))
    has_start = head == _ZIP
    archive_part.seek(max(length - _END, 0))
    has_end = archive_part.read(_END).startswith(_ZIP_END)
    if not head.strip(b"\0"):  # what was never written reads as zeros
        raise DamagedError("its first bytes are zeros" if head else "it is empty")
    if not has_start and not has_end:
        return False
    if has_start != has_end:
        raise DamagedError("it is cut off" if has_start else "its first bytes are damaged")
    try:
        _check_members(archive_part, full)
    except (
        *(zipfile.BadZipFile, EOFError, ValueError, RuntimeError, OverflowError),
        *(struct_error, zlib.error),
    ) as error:
        raise DamagedError(f"its table of contents is damaged ({error})") from error
    return True


def _check_members(archive_part: BinaryIO, full: bool) -> None:
    with zipfile.ZipFile(archive_part) as archive:
        members = sorted(archive.infolist(), key=attrgetter("header_offset"))
        missing = {"data.pkl", "version"} - {Path(m.filename).name for m in members}
        if len(missing) == 1:  # one that lacks both is not torch's
            raise DamagedError(f"its table of contents lacks {', '.join(missing)}")
        has_sums = any(m.CRC for m in members)
        end = 0
        is_described = 0
        for member, begin in [*((m, m.header_offset) for m in members), (None, archive.start_dir)]:
            if begin - end not in ((16, 24) if is_described else (0,)):
                raise DamagedError(f"bytes {end:,} to {begin:,} are in no table of contents")
            if member is None:
                break
            with archive.open(member) as content:  # checks the header and, once read, the checksum
                end = archive_part.tell() + member.compress_size  # it is read up to the content
                if has_sums and (full or member.file_size <= _SMALL):
                    while content.read(_BLOCK):
                        pass
            if member.compress_type == zipfile.ZIP_STORED and member.volume | (
                member.compress_size ^ member.file_size
            ):
                raise DamagedError(f"the sizes of {member.filename} are not those of the table")
            is_described = member.flag_bits & _DESCRIBED
        archive_part.seek(archive.start_dir)
        table = archive_part.read()
        end = 0
        for _ in members:  # each with the bytes of its name and of two more fields
            end += _ENTRY + sum(unpack_from("<3H", table, end + 28))
        if table[end : end + 4] not in _ZIP_ENDS:
            raise DamagedError("its table of contents does not end at the archive's end")
