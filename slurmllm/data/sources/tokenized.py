"""Corpora of token ids, checked as they are read: `.npy`, and Megatron-LM's `.bin` with `.idx`."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.core.errors import DataError
from slurmllm.core.run.file_formats import foreign_format
from slurmllm.core.run.safe_files import open_regular
from slurmllm.data.sources.base import (
    BEGINS,
    Marks,
    Pieces,
    Request,
    Source,
    Tokens,
    document_hash,
    fingerprint,
    joined,
)
from slurmllm.data.tokenizer import TokenEncoder

Ids = npt.NDArray[np.integer]

NPY_MAGIC = b"\x93NUMPY"
# Megatron's index (megatron/core/datasets/indexed_dataset.py), little endian: magic, version (u64),
# type (u8), sequences S (u64), document bounds D (u64), then int32 [S] tokens of each sequence,
# int64 [S] byte offsets of them, int64 [D] the first sequence of each document and, as the last, S;
# some builders add a byte per sequence (its modality).
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_VERSION = 1
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FIX = "copy both files again from their origin, or make them again"

PIECE_TOKENS = 16384
# Tokens that are shuffled as a unit: long compared with the context that helps a prediction, short
# enough that the order mixes a corpus well.
BLOCK_TOKENS = 4096
_LARGEST = 2**31


class TokenizedSource(Source):
    """Documents that are token ids, in memory-mapped arrays.

    A document begins at the corpus's own bounds, and after each end-of-document token.

    Args:
        encoder: Determines the end-of-document token; None: unknown.
        vocab_size: The model's; ids must be below it. None: any id of 31 bits.

    Attributes:
        adds_end: Whether that token is added to documents without it.
    """

    size_unit = "tokens"
    adds_end = False

    def __init__(self, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        self._end_of_document = None if encoder is None else encoder.end_of_document
        self._vocab_size = vocab_size

    @abstractmethod
    def document(self, document: int) -> Ids:
        """Return the token ids of a document, not copied; a DataError if the index is wrong."""

    def document_size(self, document: int) -> int:
        return len(self.document(document))

    def num_pieces(self, document: int) -> int:
        return max(1, -(-len(self.document(document)) // PIECE_TOKENS))

    def read(self, requests: Sequence[Request]) -> Pieces:
        return joined([self._piece(document, piece) for document, piece in requests])

    def content_hash(self, document: int) -> int:
        """Hash the ids as int32, so that the type in the file does not matter."""
        return document_hash(self.document(document).astype("<i4").tobytes())

    def _piece(self, document: int, piece: int) -> tuple[Tokens, Marks]:
        ids = self.document(document)
        begin = piece * PIECE_TOKENS
        piece_ids = ids[begin : begin + PIECE_TOKENS]
        limit = self._vocab_size or _LARGEST
        if len(piece_ids) and (int(piece_ids.max()) >= limit or int(piece_ids.min()) < 0):
            index = int(np.flatnonzero((piece_ids < 0) | (piece_ids >= limit))[0])
            raise DataError(
                f"token {begin + index} of document {document} of {self.path} is "
                f"{piece_ids[index]}, and ids must be in 0 … {limit - 1}: model.vocab_size is "
                f"{limit}; was the file made with another tokenizer? Set model.vocab_size to that "
                "tokenizer's size, or name another corpus"
            )
        tokens = piece_ids.astype(np.int32)
        end = self._end_of_document
        is_last = begin + PIECE_TOKENS >= len(ids)
        if self.adds_end and end is not None and is_last and end not in ids[-1:]:
            tokens = np.append(tokens, np.int32(end))
        marks = np.zeros(len(tokens), np.uint8)
        if end is not None:
            marks[1:][tokens[:-1] == end] = BEGINS
        if begin == 0 or ids[begin - 1] == end:
            marks[:1] = BEGINS
        return tokens, marks


class NumpySource(TokenizedSource):
    """Token ids of a `.npy` file, read unchanged.

    One axis: the file has no index of documents, so blocks of BLOCK_TOKENS are shuffled (the last
    may be shorter); a mask still separates documents, at end-of-document tokens and at the edges of
    blocks. Two axes: each row is a document.
    """

    def __init__(self, path: Path, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        super().__init__(encoder, vocab_size)
        self.path = path
        try:
            open_regular(path).close()  # numpy waits for whoever writes to a pipe
            # Without pickle, which could run code.
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"no corpus {path}; name a .npy file of token ids") from error
        except Exception as error:  # numpy parses the header as Python, which fails in many ways
            if "Object arrays" in str(error):
                raise DataError(
                    f"{path} has Python objects; token ids must be integers: save them so with "
                    "numpy.save"
                ) from error
            raise DataError(
                f"{path} is not a whole .npy file: {error}; was it cut while it was copied? Copy "
                "or save it again"
            ) from error
        if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or tokens.size == 0:
            raise DataError(
                f"{path} has {tokens.dtype} of shape {list(tokens.shape)}; token ids must be "
                "integers in one axis, or in two with a document a row: save it so with numpy.save"
            )
        self._tokens: Ids = tokens
        self.in_blocks = tokens.ndim == 1
        self.knows_documents = not self.in_blocks or encoder is not None
        self.fingerprint = fingerprint([path], "numpy")

    def __len__(self) -> int:
        return -(-len(self._tokens) // (BLOCK_TOKENS if self.in_blocks else 1))

    @property
    def total_size(self) -> int:
        return int(self._tokens.size)

    def document(self, document: int) -> Ids:
        if self.in_blocks:
            return self._tokens[document * BLOCK_TOKENS :][:BLOCK_TOKENS]
        row: Ids = self._tokens[document]
        return row


def is_megatron(path: Path) -> bool:
    """Return whether a path names such files: one of the two, or their common prefix."""
    if path.suffix in (".idx", ".bin"):
        return True
    # `.` and an empty path have no name.
    return bool(path.name) and with_ending(path, ".idx").is_file()


def with_ending(path: Path, ending: str) -> Path:
    stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    return stem.with_name(stem.name + ending)


class MegatronSource(TokenizedSource):
    """The documents of Megatron-LM's token files; the sequences of a document are joined.

    `path` is either file, or their name without the ending.
    """

    adds_end = True

    def __init__(self, path: Path, encoder: TokenEncoder | None, vocab_size: int | None) -> None:
        super().__init__(encoder, vocab_size)
        self.path = with_ending(path, ".bin")
        self._index = with_ending(path, ".idx")
        for file in (self._index, self.path):
            if not file.is_file():
                if self.path.is_file() and (refusal := foreign_format(self.path)):
                    raise DataError(refusal)
                raise DataError(
                    f"no file {file}: Megatron data are an .idx and a .bin of the same name; {_FIX}"
                    "; nanoGPT's .bin is ids without an index: save them as .npy: "
                    f"np.save('{self.path.with_suffix('.npy')}', "
                    f"np.fromfile('{self.path}', np.uint16))"
                )
        self._read_index()
        expected = int(self._offsets[-1]) + int(self._sizes[-1]) * self._type.itemsize
        actual = self.path.stat().st_size
        if expected != actual:
            raise DataError(
                f"{self._index} does not fit {self.path}: it describes {expected} bytes, the file "
                f"has {actual}; {_FIX}"
            )
        if not actual:
            raise DataError(f"{self.path} has no tokens; make it from files that hold text")
        self._tokens = np.memmap(self.path, self._type, mode="r")
        self.fingerprint = fingerprint([self._index, self.path], "megatron")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def total_size(self) -> int:
        return len(self._tokens)

    def document(self, document: int) -> Ids:
        first, end = self._bounds[document : document + 2].tolist()
        if first == end:
            return self._tokens[:0]
        if 0 <= first < end <= len(self._sizes):
            item = self._type.itemsize
            begin, remainder = divmod(int(self._offsets[first]), item)
            sizes = self._sizes[first:end].astype(np.int64)
            last = int(self._offsets[end - 1]) // item + int(sizes[-1])
            if not remainder and begin >= 0 and last == begin + sizes.sum() <= len(self._tokens):
                return self._tokens[begin:last]
        raise DataError(
            f"document {document} of {self._index} (sequences {first} to {end - 1} of "
            f"{len(self._sizes)}) is not one run of tokens inside the {len(self._tokens)} of "
            f"{self.path}; {_FIX}"
        )

    def _read_index(self) -> None:
        index = self._index
        with index.open("rb") as stream:
            header = stream.read(MEGATRON_HEADER.size)
        if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
            raise DataError(
                f"{index} is no index of Megatron data: it begins with {header[:9]!r}, not "
                f"{MEGATRON_MAGIC!r}; {_FIX}"
            )
        _, version, code, sequences, bounds = MEGATRON_HEADER.unpack(header)
        if version != MEGATRON_VERSION or code not in MEGATRON_TYPES:
            raise DataError(
                f"{index} has version {version} and token type {code}; supported are version "
                f"{MEGATRON_VERSION} and types {', '.join(map(str, MEGATRON_TYPES))}: make it "
                "again with a Megatron-LM of 2020 or later, from integer ids"
            )
        # Before the file is mapped: reading beyond its end would be a SIGBUS.
        size = index.stat().st_size
        described = MEGATRON_HEADER.size + 12 * sequences + 8 * bounds
        if size not in (described, described + sequences):
            raise DataError(
                f"{index} has {size} bytes, but describes {sequences} sequences and "
                f"{bounds} document bounds, which take {described}; {_FIX}"
            )
        if sequences == 0 or bounds < 2:
            raise DataError(f"{index} has no documents; make it from files that hold text")
        self._type = np.dtype(MEGATRON_TYPES[code])
        # Mapped, not read: an index of a billion documents takes gigabytes.
        begin = MEGATRON_HEADER.size
        self._sizes = np.memmap(index, "<i4", "r", begin, (sequences,))
        begin += self._sizes.nbytes
        self._offsets = np.memmap(index, "<i8", "r", begin, (sequences,))
        begin += self._offsets.nbytes
        self._bounds = np.memmap(index, "<i8", "r", begin, (bounds,))
        if self._bounds[0] != 0 or self._bounds[-1] != sequences:
            raise DataError(
                f"the documents of {index} reach from sequence {self._bounds[0]} to "
                f"{self._bounds[-1]}, but there are 0 to {sequences}; {_FIX}"
            )
