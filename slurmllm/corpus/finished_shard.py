"""The documents of finished shards, batch by batch, without duplicates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slurmllm.corpus.shard import DOCUMENTS, ShardRecord
from slurmllm.data.sources.arrow_batches import ArrowBatches

# Digests sorted at once, about; in at most so many files, which are open at the same time.
_BUCKET_DOCUMENTS = 1 << 20
_MOST_BUCKETS = 256
_DIGEST = np.dtype([("high", np.uint64), ("low", np.uint64), ("document", np.int64)])


class FinishedShard:
    """A shard, and which of its documents are kept.

    Attributes:
        record: Contents of the shard.
        keep: bool [documents]; None if all are kept.
    """

    def __init__(self, folder: Path, record: ShardRecord) -> None:
        self.folder, self.record = folder, record
        self.keep: npt.NDArray[np.bool_] | None = None

    def batches(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """Yield some columns of the kept documents; a batch is valid until the next one."""
        file, row = ArrowBatches(self.folder / DOCUMENTS), 0
        for index, rows in enumerate(file.rows):
            batch = file[index].select(columns)
            keep = None if self.keep is None else np.asarray(self.keep[row : row + rows])
            yield batch if keep is None or keep.all() else batch.filter(pa.array(keep))
            row += rows
            file.release()

    def documents_by_input(self) -> list[int]:
        """Return the number of kept documents of each input file."""
        counts = [file.documents for file in self.record.inputs]
        if self.keep is None:
            return counts
        ends = np.cumsum(counts).tolist()
        parts = (self.keep[end - count : end] for count, end in zip(counts, ends, strict=True))
        return [int(np.count_nonzero(part)) for part in parts]


def mark_duplicates(shards: Sequence[FinishedShard], scratch: Path) -> int:
    """Set `keep` of all shards, so that the first of equal documents is kept.

    Digests are distributed by their value over files in the folder `scratch`, each small enough to
    be sorted in memory.

    Returns:
        The number of duplicates.
    """
    total = sum(shard.record.documents for shard in shards)
    buckets = min(1 + total // _BUCKET_DOCUMENTS, _MOST_BUCKETS)
    duplicates = 0
    with ExitStack() as stack:
        # A byte a document: on the disk, like the digests.
        keep_file, *files = (
            stack.enter_context(tempfile.TemporaryFile(dir=scratch)) for _ in range(buckets + 1)
        )
        keep = np.memmap(keep_file, np.bool_, "w+", shape=(max(total, 1),))
        keep[:] = True
        for digests in _digests(shards):
            bucket = digests["high"] % np.uint64(buckets)
            for index in np.unique(bucket):
                files[index].write(digests[bucket == index].tobytes())
        for file in files:
            file.seek(0)
            digests = np.frombuffer(file.read(), _DIGEST)
            order = np.lexsort((digests["low"], digests["high"]))  # stable: the first stays first
            high, low = digests["high"][order], digests["low"][order]
            repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
            keep[digests["document"][order[1:][repeated]]] = False
            duplicates += int(repeated.sum())
    first = 0
    for shard in shards:
        shard.keep = keep[first : first + shard.record.documents]
        first += shard.record.documents
    return duplicates


def _digests(shards: Sequence[FinishedShard]) -> Iterator[npt.NDArray[np.void]]:
    """Yield the digests of all documents, numbered from 0."""
    first = 0
    for shard in shards:
        for batch in shard.batches("digest", "id"):
            digests = np.empty(batch.num_rows, _DIGEST)
            digests["high"], digests["low"] = batch["digest"].to_numpy(), batch["id"].to_numpy()
            digests["document"] = np.arange(first, first + len(digests))
            yield digests
            first += len(digests)
