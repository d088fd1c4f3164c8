"""The packed token stream that training reads, and its resumable position.

How the documents become batches:

1. The documents of a corpus get positions 0, 1, 2, … without end. Of D documents, position p is
   in epoch p // D, and is the document at index p % D of that epoch's permutation, which the seed
   and the epoch determine (`order`). Those on the other side of the split are skipped.
2. The global batch has G slots (rows). Slot s reads the documents at positions s, s + G, s + 2G,
   …, so every document is read by one slot in each epoch, and no slot needs what another reads.
3. A slot tokenizes its documents, ends each with the end-of-document token, joins them, and cuts
   the stream into sequences of seq_len tokens; nothing is padded or dropped (`slots`).
4. A sequence is returned with the token that follows it, [seq_len + 1]: inputs are all but the
   last, labels all but the first. That token begins the slot's next sequence.
5. Of several corpora, each slot has a stream of its own for each, and `order.Blend` draws the
   corpus of its next sequence.
6. Data-parallel rank r of N owns slots r * G/N … (r + 1) * G/N - 1: the concatenated batches of
   all ranks are the global batch.

No step depends on the number of ranks or workers, so neither does the batch at step t.

How it resumes: a slot's position in a corpus is three numbers: documents finished, pieces of the
current document finished (`sources.base`), tokens of the current piece returned. A checkpoint has
those of all G slots and the draws so far (`spec`). Restoring tokenizes one piece per slot, at any
position; nothing is replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from slurmllm.core.errors import DataError, StorageError
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.prefetch import WorkerProcess
from slurmllm.data.slots import POSITION, SlotGroup
from slurmllm.data.sources import open_all
from slurmllm.data.sources.base import (
    BEGINS,
    UNTRAINED,
    Flags,
    Integers,
    Marks,
    Tokens,
    short_digest,
)
from slurmllm.data.spec import Split, State, StreamSpec, check_same_stream, identity

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Packed sequences, each with the token that follows it: [rows, seq_len + 1].

    Attributes:
        tokens: Ids.
        begins: Whether a token is the first of its document; None if bounds are not needed.
        untrained: Whether a token is read but not trained; None if all are trained.
    """

    tokens: Integers
    begins: Flags | None = None
    untrained: Flags | None = None

    @property
    def inputs(self) -> Integers:
        """The model's inputs, int64 [rows, seq_len]."""
        # A copy: backends move contiguous memory to the device.
        return np.ascontiguousarray(self.tokens[:, :-1])

    def labels(self, ignored: int) -> Integers:
        """Return the model's targets, int64 [rows, seq_len]; `ignored` at untrained tokens."""
        # Always a copy: of one row, `ascontiguousarray` returns a view, and `ignored` would be
        # written into the inputs.
        labels = self.tokens[:, 1:].copy()
        if self.untrained is not None:
            labels[self.untrained[:, 1:]] = ignored
        return labels

    @property
    def positions(self) -> Integers | None:
        """Position of each input in its document, int64 [rows, seq_len].

        Counted from the sequence's begin for the document that the sequence begins in.
        """
        if self.begins is None:
            return None
        indices = np.arange(self.tokens.shape[1] - 1)
        return indices - np.maximum.accumulate(indices * self.begins[:, :-1], axis=1)


class PackedStream:
    """Batches of packed sequences for one data-parallel rank.

    Args:
        num_workers: Processes that tokenize ahead; 0 tokenizes in this process on demand.

    Attributes:
        trains_every_token: Whether every token is trained; otherwise batches have `untrained`.
    """

    def __init__(self, spec: StreamSpec, dp_rank: int, dp_size: int, num_workers: int = 0) -> None:
        batch = spec.global_batch
        if batch % dp_size:
            raise DataError(
                f"global_batch {batch} is not a multiple of the {dp_size} data-parallel ranks; "
                f"choose {batch // dp_size * dp_size or dp_size}, or another number of ranks"
            )
        assert 0 <= dp_rank < dp_size, f"rank {dp_rank} of {dp_size}"
        Split(spec.split, spec.validation)  # raises for an empty validation split
        self._spec = spec
        rows = batch // dp_size
        self._slots = range(dp_rank * rows, (dp_rank + 1) * rows)
        self._num_workers = min(num_workers, rows)
        # First, so that they start while this process opens the same files.
        self._workers = self._start_workers()
        try:
            self._sources, encoder = open_all(spec)
        except BaseException:
            self.close()
            raise
        special_tokens = sorted({source.special_tokens for source in self._sources} - {""})
        tokenizer = None if encoder is None else encoder.fingerprint
        if tokenizer is not None and special_tokens:
            tokenizer = short_digest("\0".join([tokenizer, *special_tokens]))
        self._identity = identity(spec, self._sources, tokenizer)
        self.trains_every_token = all(source.trains_every_token for source in self._sources)
        # Positions after the batches returned, not after those tokenized ahead.
        self._positions = np.zeros((rows, POSITION * len(self._sources)), np.int64)
        self._counts = [0] * len(self._sources)
        self._readers: Sequence[SlotGroup | WorkerProcess] = ()  # once a batch was drawn

    @property
    def identity(self) -> State:
        """Everything that decides which token is at which place, as JSON."""
        names = ("corpora", "tokenizer", "seed", "global_batch", "validation")
        settings = {"seq_len": self._spec.seq_len, "mask": self._spec.mask}
        return settings | {name: self._identity[name] for name in names}

    def next_batch(self) -> Batch:
        """Return this rank's part of the next batch, [global_batch // dp_size, seq_len + 1]."""
        tokens, marks = self._draw()
        return Batch(
            tokens.astype(np.int64),
            (marks & BEGINS).astype(bool) if self._spec.mask == "document" else None,
            None if self.trains_every_token else (marks & UNTRAINED).astype(bool),
        )

    def skip_batch(self) -> None:
        """Skip the next global batch; every rank must do so."""
        self._draw()

    @property
    def batches(self) -> int:
        """Global batches drawn so far, skipped ones included: the number of the last one."""
        return sum(self._counts) // self._spec.global_batch

    def state(self) -> State:
        """Return the positions of this rank's slots after the batches returned, as JSON.

        `merge_states` merges those of all ranks into one that any rank of any dp_size can load.
        """
        return {
            **self._identity,
            "counts": list(self._counts),
            "first_slot": self._slots.start,
            "slots": self._positions.tolist(),
        }

    def load_state(self, merged: State) -> None:
        """Restore a position from `merge_states`, taken at this or another dp_size.

        A DataError if the state is of other data, or lacks slots of this rank.
        """
        check_same_stream(self._identity, merged)
        slots = self._slots
        first = merged["first_slot"]
        held = range(first, first + len(merged["slots"]))
        if slots.start not in held or slots[-1] not in held:
            raise DataError(
                f"the data state holds slots {held.start} to {held.stop - 1}, this rank needs "
                f"{slots.start} to {slots[-1]}; load the merged state of all ranks"
            )
        self._positions = np.array(merged["slots"], np.int64)[slots.start - first :][: len(slots)]
        self._counts = list(merged["counts"])
        if self._readers:  # workers cannot go back: start new ones
            self.close()
            self._workers = self._start_workers()
        self._readers = ()
        if self._workers:
            self._begin()

    def close(self) -> None:
        """End the workers; no batch can be drawn after that."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draw(self) -> tuple[Tokens, Marks]:
        self._begin()
        batches = (reader.next_batch() for reader in self._readers)
        positions, counts, tokens, marks = zip(*batches, strict=True)
        self._positions = np.concatenate(positions)
        self._counts = counts[0].tolist()
        return np.concatenate(tokens), np.concatenate(marks)

    def _begin(self) -> None:
        if self._readers:
            return
        positions = self._positions.tolist()
        first = self._slots.start
        for worker in self._workers:
            worker.begin(positions[worker.slots[0] - first :][: len(worker.slots)], self._counts)
        self._readers = self._workers or [
            SlotGroup(self._spec, self._sources, self._slots, positions, self._counts)
        ]

    def _start_workers(self) -> list[WorkerProcess]:
        # Consecutive slots each, whose numbers differ by one at most.
        workers = self._num_workers
        rows = len(self._slots)
        return [
            WorkerProcess(self._spec, self._slots[rows * i // workers : rows * (i + 1) // workers])
            for i in range(workers)
        ]


def single_sequences(spec: StreamSpec, limit: int) -> Iterator[Batch]:
    """Yield single sequences of an evaluation's text, at most `limit` and at least one.

    The sequences are those that training would have packed of the text, in the order of the seed,
    at most once through the documents: the same ones at every step, on every mesh and for all
    checkpoints of a run. Tokens that do not fill a last sequence are dropped.
    """
    with PackedStream(spec, 0, 1) as stream:
        documents = [corpus["documents"] for corpus in stream.identity["corpora"]]
        for number in range(limit):
            batch = stream.next_batch()
            (slot,) = stream.state()["slots"]
            # Past its last document a slot starts over: such a sequence has documents that were
            # read before.
            finished = zip(slot[::POSITION], documents, strict=True)
            if number and any(read >= count for read, count in finished):
                return
            yield batch


def check_data(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Write `PackedStream.identity` to `data.json` in the first attempt, compare in later ones.

    Checkpoints record the data too; this file covers the time before the first one, and lets
    `compare` check whether two runs read the same data. A DataError if they have changed.
    """
    current = DataRecord.model_validate(identity)
    try:
        began_with = DataRecord.load(run.data) if run.data.is_file() else None
    except StorageError as error:
        # The checkpoints hold the data's order too: a resume still refuses another one.
        log.warning(
            "%s; written again, from the data as they are now", str(error).partition("; ")[0]
        )
        began_with = None
    if began_with is None:
        current.save(run.data)
        return
    if changed := began_with.differences(current):
        raise DataError(
            f"the data changed after {run.name} began: {'; '.join(changed)}; restore the old data "
            "or start a new run"
        )
