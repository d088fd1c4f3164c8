"""Megatron-LM's indexed token files: `X.bin`, the ids, and `X.idx`, the bounds of documents.

Format: megatron/core/datasets/indexed_dataset.py. The index is, little endian: magic, version
(u64), type (u8), sequences S (u64), document bounds D (u64), then int32 [S] tokens of each
sequence, int64 [S] byte offsets of them, int64 [D] the first sequence of each document and, as
the last, S; some builders add a byte per sequence (its modality).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from slurmllm.data.sources.base import fingerprint
from slurmllm.data.sources.tokenized import Ids, TokenizedSource
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FIX = "copy both files again from their origin, or make them again"


def is_megatron(path: Path) -> bool:
    """Whether a path names such files: one of the two, or their common prefix."""
    return path.suffix in (".idx", ".bin") or _with(path, ".idx").is_file()


def _with(path: Path, ending: str) -> Path:
    stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    return stem.with_name(stem.name + ending)


class MegatronSource(TokenizedSource):
    """The documents of Megatron-LM's token files; the sequences of a document are joined.

    Args:
        path: Either file, or their name without the ending.
        encoder: Its end-of-document token is added to documents without it. None: documents are
            read unchanged.
        vocab_size: The model's.

    Raises:
        DataError: missing, of another format, or the two files do not match.
    """

    def __init__(self, path: Path, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        end = None if encoder is None else encoder.end_of_document
        super().__init__(end, vocab_size, adds_end=True)
        self.path, self._index = _with(path, ".bin"), _with(path, ".idx")
        for file in (self._index, self.path):
            if not file.is_file():
                raise DataError(
                    f"no file {file}: Megatron data are an .idx and a .bin of the same name; {_FIX}"
                )
        self._read_index()
        last = len(self._sizes) - 1
        expected = int(self._offsets[last]) + int(self._sizes[last]) * self._type.itemsize
        actual = self.path.stat().st_size
        if expected != actual:
            raise DataError(
                f"{self._index} does not fit {self.path}: it describes {expected} bytes, the file "
                f"has {actual}; {_FIX}"
            )
        if not actual:
            raise DataError(f"{self.path} has no tokens; make it from files that hold text")
        self._tokens = np.memmap(self.path, dtype=self._type, mode="r")
        self.fingerprint = fingerprint([self._index, self.path], "megatron")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def total_size(self) -> int:
        return len(self._tokens)

    def document(self, document: int) -> Ids:
        """The token ids of a document.

        Raises:
            DataError: the index has no consecutive sequences inside the file for it.
        """
        first, end = int(self._bounds[document]), int(self._bounds[document + 1])
        if first == end:
            return self._tokens[:0]
        if 0 <= first < end <= len(self._sizes):
            item = self._type.itemsize
            begin, rest = divmod(int(self._offsets[first]), item)
            count = int(self._sizes[first:end].sum(dtype=np.int64))
            last = int(self._offsets[end - 1]) // item + int(self._sizes[end - 1])
            if not rest and begin >= 0 and last == begin + count <= len(self._tokens):
                return self._tokens[begin:last]
        raise DataError(
            f"document {document} of {self._index} (sequences {first} to {end - 1} of "
            f"{len(self._sizes)}) is not one run of tokens inside the {len(self._tokens)} of "
            f"{self.path}; {_FIX}"
        )

    def _read_index(self) -> None:
        size = self._index.stat().st_size
        with self._index.open("rb") as stream:
            header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise DataError(
                f"{self._index} is no index of Megatron data: it begins with {header[:9]!r}, not "
                f"{MAGIC!r}; {_FIX}"
            )
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != _VERSION or code not in _TYPES:
            raise DataError(
                f"{self._index} has version {version} and token type {code}; supported are version "
                f"{_VERSION} and types {', '.join(map(str, _TYPES))}: make it again with a "
                "Megatron-LM of 2020 or later, from integer ids"
            )
        # Before the file is mapped: reading beyond its end would be a SIGBUS.
        described = _HEADER.size + 12 * sequences + 8 * bounds
        if size not in (described, described + sequences):
            raise DataError(
                f"{self._index} has {size} bytes, but describes {sequences} sequences and "
                f"{bounds} document bounds, which take {described}; {_FIX}"
            )
        if sequences == 0 or bounds < 2:
            raise DataError(f"{self._index} has no documents; make it from files that hold text")
        self._type = np.dtype(_TYPES[code])
        # Mapped, not read: an index of a billion documents takes gigabytes.
        data = np.memmap(self._index, dtype=np.uint8, mode="r")
        begin = _HEADER.size
        self._sizes = data[begin : begin + 4 * sequences].view("<i4")
        begin += 4 * sequences
        self._offsets = data[begin : begin + 8 * sequences].view("<i8")
        begin += 8 * sequences
        self._bounds = data[begin : begin + 8 * bounds].view("<i8")
        if self._bounds[0] != 0 or self._bounds[-1] != sequences:
            raise DataError(
                f"the documents of {self._index} reach from sequence {self._bounds[0]} to "
                f"{self._bounds[-1]}, but there are 0 to {sequences}; {_FIX}"
            )
