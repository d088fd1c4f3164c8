"""The texts of evaluations: sequences of a corpus that training does not read.

The sequences are those that training would have packed of the text, in the order of the seed, at
most once through the documents: the same ones at every step, on every mesh and for all checkpoints
of a run. Tokens that do not fill a last sequence are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from slurmllm.data.slots import POSITION
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import Batch, PackedStream

HELD_OUT = "held_out"  # the name of the documents that `data.validation` holds out


def evaluation_texts(training: StreamSpec, corpora: Mapping[str, str]) -> dict[str, StreamSpec]:
    """Return the texts of a run's evaluations, held-out documents first, one sequence a batch."""
    texts = {}
    if training.validation:
        texts[HELD_OUT] = replace(training, global_batch=1, split="validation")
    for name, path in corpora.items():
        texts[name] = replace(training, corpora=[(Path(path), 1.0)], global_batch=1, validation=0.0)
    return texts


def single_sequences(spec: StreamSpec, limit: int) -> Iterator[Batch]:
    """Single sequences, at most once through the documents and at most `limit`; at least one."""
    assert spec.global_batch == 1
    with closing(PackedStream(spec, 0, 1)) as stream:
        documents = [corpus["documents"] for corpus in stream.identity["corpora"]]
        for number in range(limit):
            batch = stream.next_batch()
            (slot,) = stream.state()["slots"]
            # Past its last document a slot starts over: such a sequence has documents that were
            # read before.
            if number and any(
                slot[place * POSITION] >= count for place, count in enumerate(documents)
            ):
                return
            yield batch
