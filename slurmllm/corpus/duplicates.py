"""Documents whose bytes came before, found by their 128-bit digests in bounded memory.

Each shard's digests lie sorted, run by run. The digests of one range of values are so found in
every run by bisection, and a few million at a time are sorted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmllm.corpus.finished_shard import FinishedShard
from slurmllm.corpus.shard import DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW, Words

_AT_ONCE = 1 << 21


def mark_duplicates(shards: Sequence[FinishedShard], scratch: Path) -> int:
    """Set `keep` of all shards: of equal documents the first stays.

    Args:
        shards: In the order of the corpus.
        scratch: A file to make, of one byte a document; to be removed when `keep` is not needed.

    Returns:
        How many documents do not stay.
    """
    for shard in shards:
        for column in (DIGEST_HIGH, DIGEST_LOW, DIGEST_ROW):
            shard.verify(column)
    firsts = np.cumsum([0, *(shard.record.documents for shard in shards)])
    total = int(firsts[-1])
    keep = np.memmap(scratch, np.bool_, "w+", shape=(max(total, 1),))
    keep[:] = True
    duplicates = 0
    ranges = -(-total // _AT_ONCE)
    for index in range(ranges):
        low, high = index * 2**64 // ranges, (index + 1) * 2**64 // ranges - 1
        found = _repeated(shards, firsts, np.uint64(low), np.uint64(high))
        keep[found] = False
        duplicates += len(found)
    for shard, first in zip(shards, firsts, strict=False):
        shard.keep = keep[first : first + shard.record.documents]
    return duplicates


def _repeated(
    shards: Sequence[FinishedShard],
    firsts: npt.NDArray[np.int64],
    least: np.uint64,
    most: np.uint64,
) -> npt.NDArray[np.int64]:
    """Numbers of the documents that came before, of those with the high half in a range."""
    highs: list[Words] = []
    lows: list[Words] = []
    documents: list[npt.NDArray[np.int64]] = []
    for shard, first in zip(shards, firsts, strict=False):
        begin = 0
        for length in shard.record.runs:
            run = slice(begin, begin + length)
            high = _mapped(shard, DIGEST_HIGH, np.uint64)[run]
            part = slice(
                begin + int(np.searchsorted(high, least, side="left")),
                begin + int(np.searchsorted(high, most, side="right")),
            )
            highs.append(np.array(_mapped(shard, DIGEST_HIGH, np.uint64)[part]))
            lows.append(np.array(_mapped(shard, DIGEST_LOW, np.uint64)[part]))
            documents.append(_mapped(shard, DIGEST_ROW, np.int64)[part] + first)
            begin += length
    high, low = np.concatenate(highs), np.concatenate(lows)
    order = np.lexsort((low, high))  # stable: of equal ones, the first document comes first
    high, low = high[order], low[order]
    again = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return np.sort(np.concatenate(documents)[order[1:][again]])


def _mapped(shard: FinishedShard, column: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.memmap(shard.folder / column, dtype, "r")
