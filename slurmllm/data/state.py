"""The position of a stream as a checkpoint keeps it, and whose position it is.

A state is a JSON object: what the stream reads, `counts` (sequences drawn from each corpus), and
under `slots` three numbers a corpus for each slot from `first_slot` on: visits finished, piece of
the document at hand, tokens of that piece handed out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from slurmllm.data.slots import WHOLE_DOCUMENT
from slurmllm.data.sources.base import Source
from slurmllm.data.spec import StreamSpec
from slurmllm.errors import DataError

State = dict[str, Any]

VERSION = 2
# What must be equal for a position to mean the same tokens, and how to say that it is not.
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
_REMEDY = "resume with what the run began with, or start a new run"


def identity(spec: StreamSpec, sources: Sequence[Source], tokenizer: str | None) -> State:
    """What a stream reads, as its states say it.

    Args:
        spec: The stream.
        sources: Its corpora, opened.
        tokenizer: Fingerprint of tokenizer and chat template, None without one.
    """
    corpora = [
        {
            "path": str(path.absolute()),
            "fingerprint": source.fingerprint,
            "weight": weight,
            "documents": len(source),
        }
        for (path, weight), source in zip(spec.corpora, sources, strict=True)
    ]
    return {
        "version": VERSION,
        "seed": spec.seed,
        "global_batch": spec.global_batch,
        "corpus": _one_word(corpora),
        "corpora": corpora,
        "tokenizer": tokenizer,
        "validation": spec.validation,
        "split": spec.split,
    }


def _one_word(corpora: Sequence[dict[str, Any]]) -> str:
    """All corpora and their weights in one fingerprint; of a single one, its own."""
    if len(corpora) == 1:
        return str(corpora[0]["fingerprint"])
    contents = [(corpus["fingerprint"], corpus["weight"]) for corpus in corpora]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]


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
    """That a state is of this stream.

    Raises:
        DataError: it is of another corpus, tokenizer, seed or global batch; the message says what
            differs.
    """
    for key, name in _IDENTITY.items():
        if key == "corpora":
            _require_same_corpora(here[key], saved.get(key, []))
        elif saved.get(key) != here[key]:
            raise DataError(
                f"the data state was saved with {name} {saved.get(key)}, this stream has "
                f"{here[key]}; {_REMEDY}"
            )


def _require_same_corpora(here: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """A corpus may be elsewhere by now, but must hold what it held."""
    if len(here) != len(saved):
        raise DataError(
            f"the data state was saved with {len(saved)} corpora, this stream has {len(here)}; "
            f"{_REMEDY}"
        )
    for now, then in zip(here, saved, strict=True):
        if now["fingerprint"] != then["fingerprint"]:
            raise DataError(
                f"the data state was saved with corpus {then['path']} (fingerprint "
                f"{then['fingerprint']}, {then['documents']} documents), this stream has "
                f"{now['path']} ({now['fingerprint']}, {now['documents']}): changed after the run "
                f"began, or another one; {_REMEDY}"
            )
        if now["weight"] != then["weight"]:
            raise DataError(
                f"the data state was saved with weight {then['weight']:g} of {now['path']}, this "
                f"stream has {now['weight']:g}; {_REMEDY}"
            )


def upgrade_state(state: State, here: State, former: str | None) -> State:
    """A state of this version, from one that may be of version 1.

    Version 1 knew one Arrow corpus, by its footer alone, and documents without pieces: a slot's
    position was (documents finished, tokens of the document at hand).

    Args:
        state: Of any version.
        here: `identity` of this stream.
        former: `Source.former_fingerprint` of the stream's only corpus, None where it has none.
    """
    if state.get("version") != 1 or former is None or state["corpus"] != former:
        return state
    return {
        **state,
        "version": VERSION,
        "corpus": here["corpus"],
        "corpora": here["corpora"],
        "validation": 0.0,
        "split": "train",
        "counts": state.get("counts", [0]),
        "slots": [
            [visit, WHOLE_DOCUMENT if offset else 0, offset] for visit, offset in state["slots"]
        ],
    }


def slot_positions(state: State, slots: range) -> list[list[int]]:
    """The positions of some slots.

    Raises:
        DataError: the state lacks some of them.
    """
    held = range(state["first_slot"], state["first_slot"] + len(state["slots"]))
    if slots.start not in held or slots[-1] not in held:
        raise DataError(
            f"the data state holds slots {held.start} to {held.stop - 1}, this rank needs "
            f"{slots.start} to {slots[-1]}; load the merged state of all ranks"
        )
    begin = slots.start - held.start
    found: list[list[int]] = state["slots"][begin : begin + len(slots)]
    return found
