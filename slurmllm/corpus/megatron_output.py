"""Token ids as Megatron's indexed dataset: `<name>.bin` and `<name>.idx`.

The format is that of Megatron-LM's `IndexedDataset` (megatron/core/datasets/indexed_dataset.py,
`_IndexWriter`), which the older `MMapIndexedDataset` and GPT-NeoX share. A sequence is a document.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slurmllm.corpus.finished_shard import FinishedShard
from slurmllm.corpus.options import TokenDtype
from slurmllm.corpus.output import OutputFile
from slurmllm.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_TYPE_CODES: dict[TokenDtype, int] = {"uint16": 8, "int32": 4}
_AT_ONCE = 1 << 20
# The index stores lengths as int32.
_LONGEST = 2**31 - 1


class TokenFiles(NamedTuple):
    """The two files of an indexed dataset."""

    bin: Path
    idx: Path


def token_files(out: Path) -> TokenFiles:
    """The files of `--out NAME`, `NAME.bin` or `NAME.idx`."""
    prefix = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
    return TokenFiles(*(prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx")))


def write_tokens(
    bin_file: OutputFile,
    idx_file: OutputFile,
    shards: Sequence[FinishedShard],
    documents: int,
    dtype: TokenDtype,
    on_progress: Callable[[int], None],
) -> None:
    """Write the tokens of all kept documents, and the index.

    Raises:
        DataError: a document is too long for the format.
        StorageError: the file system refused, or a shard is damaged.
    """
    itemsize = np.dtype(dtype).itemsize
    for shard in shards:
        for part in shard.contents("tokens", itemsize):
            bin_file.write(part)
            on_progress(bin_file.size_bytes)
    header = struct.pack("<QBQQ", _VERSION, _TYPE_CODES[dtype], documents, documents + 1)
    idx_file.write(_MAGIC + header)
    for shard in shards:
        for lengths in shard.values("tokens.lengths", np.int64):
            if lengths.max(initial=0) > _LONGEST:
                raise DataError(
                    f"a document has {lengths.max():,} tokens, and the .idx format allows "
                    f"{_LONGEST:,} a document; cut it into several"
                )
            idx_file.write(lengths.astype("<i4"))
    begin = 0
    for shard in shards:
        for lengths in shard.values("tokens.lengths", np.int64):
            ends = np.cumsum(lengths * itemsize) + begin
            idx_file.write((ends - lengths * itemsize).astype("<i8"))
            begin = int(ends[-1]) if len(ends) else begin
    # A sequence is a document, so the bounds of documents are 0 … documents.
    for first in range(0, documents + 1, _AT_ONCE):
        idx_file.write(np.arange(first, min(first + _AT_ONCE, documents + 1), dtype="<i8"))
