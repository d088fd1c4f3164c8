"""The state of a stream in a checkpoint: its position, and the data that it belongs to.

A state is a JSON object: the stream's `identity`, `counts` (sequences drawn from each corpus), and
under `slots` three numbers per corpus for each slot from `first_slot` on: documents finished, piece
of the current document, tokens of that piece returned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from slurmllm.data.sources.base import Source
from slurmllm.data.spec import StreamSpec
from slurmllm.errors import DataError
from slurmllm.plugins import absolute

State = dict[str, Any]

VERSION = 2
# Must be equal for a position to mean the same tokens; with their names in error messages.
_IDENTITY = {
    "version": "format of the data state",
    "seed": "train.seed",
    "global_batch": "train.global_batch",
    "corpora": "corpora",
    "tokenizer": "tokenizer (fingerprint)",
    "validation": "data.validation",
    "split": "side of the split",
}
_MERGED = (*_IDENTITY, "corpus", "counts")
_FIX = "resume with the data that the run began with, or start a new run"


def identity(spec: StreamSpec, sources: Sequence[Source], tokenizer: str | None) -> State:
    """Return the part of a stream's states that identifies its data.

    `tokenizer` is the fingerprint of tokenizer and chat templates, None without a tokenizer.
    """
    corpora = [
        {
            "path": absolute(path),
            "fingerprint": source.fingerprint,
            "weight": weight,
            "documents": len(source),
        }
        for (path, weight), source in zip(spec.corpora, sources, strict=True)
    ]
    combined = str(corpora[0]["fingerprint"])
    if len(corpora) > 1:
        contents = [(corpus["fingerprint"], corpus["weight"]) for corpus in corpora]
        combined = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
    return {
        "version": VERSION,
        "seed": spec.seed,
        "global_batch": spec.global_batch,
        "corpus": combined,
        "corpora": corpora,
        "tokenizer": tokenizer,
        "validation": spec.validation,
        "split": spec.split,
    }


def merge_states(states: Sequence[State]) -> State:
    """Merge the states of all ranks into one.

    Ranks that differ only in tensor or pipeline rank have the same slots, and equal states.

    Raises:
        DataError: the states are from different steps or streams, or slots are missing.
    """
    if not states:
        raise DataError("no data state to merge; pass the state of every data-parallel rank")
    by_slot: dict[int, list[int]] = {}
    for state in states:
        check_same_stream(states[0], state)
        for slot, position in enumerate(state["slots"], start=state["first_slot"]):
            if by_slot.setdefault(slot, position) != position:
                raise DataError(
                    f"two ranks report different positions for slot {slot} of the data stream: "
                    f"{by_slot[slot]} and {position}; merge states taken after the same step"
                )
        if state["counts"] != states[0]["counts"]:
            raise DataError(
                f"two ranks have drawn {states[0]['counts']} and {state['counts']} sequences from "
                "the corpora; merge states taken after the same step"
            )
    missing = sorted(set(range(states[0]["global_batch"])) - set(by_slot))
    if missing:
        raise DataError(
            f"{len(missing)} of {states[0]['global_batch']} slots of the data stream are in no "
            f"state, the first is {missing[0]}; pass the state of every data-parallel rank"
        )
    merged = {key: states[0][key] for key in _MERGED}
    return {**merged, "first_slot": 0, "slots": [by_slot[slot] for slot in sorted(by_slot)]}


def check_same_stream(here: State, saved: State) -> None:
    """Raise a DataError that names the difference if a state belongs to another stream."""
    for key, name in _IDENTITY.items():
        if key != "corpora":
            if saved.get(key) != here[key]:
                raise DataError(
                    f"the data state was saved with {name} {saved.get(key)}, this stream has "
                    f"{here[key]}; {_FIX}"
                )
            continue
        # Contents and weights, not paths: a corpus may have been moved.
        corpora = saved.get(key, [])
        if len(here[key]) != len(corpora):
            raise DataError(
                f"the data state was saved with {len(corpora)} corpora, this stream has "
                f"{len(here[key])}; {_FIX}"
            )
        for now, then in zip(here[key], corpora, strict=True):
            if now["fingerprint"] != then["fingerprint"]:
                raise DataError(
                    f"the data state was saved with corpus {then['path']} (fingerprint "
                    f"{then['fingerprint']}, {then['documents']} documents), this stream has "
                    f"{now['path']} ({now['fingerprint']}, {now['documents']}): changed after the "
                    f"run began, or another corpus; {_FIX}"
                )
            if now["weight"] != then["weight"]:
                raise DataError(
                    f"the data state was saved with weight {then['weight']:g} of {now['path']}, "
                    f"this stream has {now['weight']:g}; {_FIX}"
                )


def slot_positions(state: State, slots: range) -> list[list[int]]:
    """Return the positions of consecutive slots; a DataError if the state lacks some of them."""
    held = range(state["first_slot"], state["first_slot"] + len(state["slots"]))
    if slots.start not in held or slots[-1] not in held:
        raise DataError(
            f"the data state holds slots {held.start} to {held.stop - 1}, this rank needs "
            f"{slots.start} to {slots[-1]}; load the merged state of all ranks"
        )
    begin = slots.start - held.start
    positions: list[list[int]] = state["slots"][begin : begin + len(slots)]
    return positions
