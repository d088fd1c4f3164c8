"""The packed token stream that training reads, and its position.

How a token comes to its place:

1. The documents of the corpus get positions 0, 1, 2, … without end. Of D documents, position p
   is in epoch p // D, and is the document at place p % D of that epoch's permutation, which the
   seed and the epoch determine (`order`).
2. The global batch has G slots (rows). Slot s reads the documents at positions s, s + G, s + 2G,
   …, so every document is read by one slot in each epoch, and no slot needs what another reads.
3. A slot tokenizes its documents, ends each with the end-of-document token, joins them, and cuts
   the stream into sequences of seq_len tokens; nothing is padded or dropped (`slots`).
4. A sequence is handed out with the token that follows it, [seq_len + 1]: inputs are all but the
   last, labels all but the first. That token begins the slot's next sequence.
5. Data-parallel rank r of N owns slots r * G/N … (r + 1) * G/N - 1: the batches of all ranks,
   one under the other, are the global batch.

No step depends on the number of ranks or workers, so neither does the batch at step t.

How it resumes: a slot's position is two numbers, documents finished and tokens of the document
at hand handed out. A checkpoint holds those of all G slots (`merge_states`). Restoring tokenizes
one document a slot, at any position; nothing is replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slurmllm.data.prefetch import StreamSource, WorkerProcess
from slurmllm.data.slots import SlotGroup
from slurmllm.data.sources.arrow import Corpus
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

State = dict[str, Any]

_STATE_VERSION = 1
# What must be equal for a position to mean the same tokens, and how to say that it is not.
_IDENTITY = {
    "version": "format of the data state",
    "seed": "train.seed",
    "global_batch": "train.global_batch",
    "corpus": "corpus (fingerprint)",
    "tokenizer": "tokenizer (fingerprint)",
}


class PackedStream:
    """Batches of packed sequences for one data-parallel rank.

    Args:
        corpus: Arrow corpus.
        tokenizer: tokenizer.json.
        seq_len: Tokens in a sequence.
        global_batch: Sequences in one step over all ranks.
        seed: Seed of the document order.
        dp_rank: This rank's place among the data-parallel ranks.
        dp_size: Data-parallel ranks; must divide global_batch.
        num_workers: Processes that tokenize ahead; 0 tokenizes in this process when asked.

    Raises:
        DataError: corpus or tokenizer cannot serve, or the degrees do not fit.
    """

    def __init__(
        self,
        corpus: Path,
        tokenizer: Path,
        seq_len: int,
        global_batch: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
    ) -> None:
        if global_batch % dp_size:
            raise DataError(
                f"global_batch {global_batch} is not a multiple of the {dp_size} data-parallel "
                f"ranks; choose {global_batch // dp_size * dp_size or dp_size}, or another number "
                "of ranks"
            )
        assert 0 <= dp_rank < dp_size, f"rank {dp_rank} of {dp_size}"
        self._corpus = Corpus(corpus)
        self._encoder = TokenEncoder(tokenizer)
        # Absolute, for a worker started later must find them from whatever folder is current.
        self._source = StreamSource(
            corpus.absolute(), tokenizer.absolute(), seq_len, global_batch, seed
        )
        self._identity = {
            "version": _STATE_VERSION,
            "seed": seed,
            "global_batch": global_batch,
            "corpus": self._corpus.fingerprint,
            "tokenizer": self._encoder.fingerprint,
        }
        rows = global_batch // dp_size
        self._slots = range(dp_rank * rows, (dp_rank + 1) * rows)
        self._num_workers = min(num_workers, rows)
        # (visit, offset) of each slot after the batches handed out, not those tokenized ahead
        self._positions = np.zeros((rows, 2), dtype=np.int64)
        self._group: SlotGroup | None = None
        self._workers: list[WorkerProcess] = self._start_workers()
        self._begun = False

    def next_batch(self) -> npt.NDArray[np.int64]:
        """This rank's share of the next global batch.

        Returns:
            int64 [global_batch // dp_size, seq_len + 1]: each sequence and the token after it.

        Raises:
            SlurmllmError: what a worker met with.
            NodeError: a worker was killed.
        """
        self._begin()
        if self._group is not None:
            tokens = self._group.next_batch()
            self._positions = self._group.positions()
            return tokens.astype(np.int64)
        shape = (len(self._slots), self._source.seq_len + 1)
        tokens = np.empty(shape, dtype=np.int32)
        positions = np.empty((len(self._slots), 2), dtype=np.int64)
        for worker in self._workers:
            rows = self._rows(worker.slots)
            worker.next_batch(tokens[rows], positions[rows])
        self._positions = positions
        return tokens.astype(np.int64)

    def state(self) -> State:
        """Where this rank's slots stand after the batches handed out; JSON-able.

        `merge_states` joins those of all ranks into one that any rank of any dp_size can load.
        """
        return {
            **self._identity,
            "first_slot": self._slots.start,
            "slots": self._positions.tolist(),
        }

    def load_state(self, merged: State) -> None:
        """Go to a position: the next batch is the one that followed when `state` was called.

        Args:
            merged: From `merge_states`, taken at this or another dp_size.

        Raises:
            DataError: the state is of another corpus, tokenizer, seed or global batch, or lacks
                slots of this rank.
        """
        _require_same(self._identity, merged)
        held = range(merged["first_slot"], merged["first_slot"] + len(merged["slots"]))
        if self._slots.start not in held or self._slots[-1] not in held:
            raise DataError(
                f"the data state holds slots {held.start} to {held.stop - 1}, this rank needs "
                f"{self._slots.start} to {self._slots[-1]}; load the merged state of all ranks"
            )
        begin = self._slots.start - held.start
        positions = merged["slots"][begin : begin + len(self._slots)]
        self._positions = np.array(positions, dtype=np.int64)
        if self._begun:
            self.close()
            self._workers = self._start_workers()
        self._group = None
        self._begun = False
        if self._workers:
            self._begin()

    def close(self) -> None:
        """End the workers; the stream gives no batch after that."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        for worker in self._workers:
            worker.begin(self._positions[self._rows(worker.slots)].tolist())
        if not self._workers:
            source = self._source
            self._group = SlotGroup(
                self._corpus,
                self._encoder,
                source.seq_len,
                source.global_batch,
                source.seed,
                self._slots,
                self._positions.tolist(),
            )

    def _start_workers(self) -> list[WorkerProcess]:
        shares = _split(self._slots, self._num_workers) if self._num_workers else []
        return [WorkerProcess(self._source, share) for share in shares]

    def _rows(self, slots: range) -> slice:
        return slice(slots.start - self._slots.start, slots.stop - self._slots.start)


def merge_states(states: Sequence[State]) -> State:
    """Join the states of all ranks into one.

    Ranks that differ only in tensor or pipeline place hold the same slots; their states count
    once.

    Raises:
        DataError: the states are not of one moment of one stream, or slots are missing.
    """
    if not states:
        raise DataError("no data state to merge; pass the state of every data-parallel rank")
    by_slot: dict[int, list[int]] = {}
    for state in states:
        _require_same({key: states[0][key] for key in _IDENTITY}, state)
        for slot, position in enumerate(state["slots"], start=state["first_slot"]):
            if by_slot.setdefault(slot, position) != position:
                raise DataError(
                    f"two ranks report different positions for slot {slot} of the data stream: "
                    f"{by_slot[slot]} and {position}; merge states taken after the same step"
                )
    missing = sorted(set(range(states[0]["global_batch"])) - set(by_slot))
    if missing:
        raise DataError(
            f"{len(missing)} of {states[0]['global_batch']} slots of the data stream are in no "
            f"state, the first is {missing[0]}; pass the state of every data-parallel rank"
        )
    identity = {key: states[0][key] for key in _IDENTITY}
    return {**identity, "first_slot": 0, "slots": [by_slot[slot] for slot in sorted(by_slot)]}


def _require_same(identity: State, state: State) -> None:
    for key, name in _IDENTITY.items():
        if state.get(key) != identity[key]:
            raise DataError(
                f"the data state was saved with {name} {state.get(key)}, this stream has "
                f"{identity[key]}; resume with what the run began with, or start a new run"
            )


def _split(slots: range, parts: int) -> list[range]:
    """Cut a range into consecutive parts whose lengths differ by one at most."""
    bounds = [slots.start + len(slots) * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]
