"""The description of a stream: everything that decides which token is at which place.

A checkpoint has it as a state, a JSON object: the stream's `identity`, `counts` (sequences drawn
from each corpus), and under `slots` three numbers per corpus for each slot from `first_slot` on:
documents finished, piece of the current document, tokens of that piece returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from slurmllm.core.errors import DataError
from slurmllm.core.format import Json
from slurmllm.core.plugins import absolute
from slurmllm.data.order import splitmix64
from slurmllm.data.sources.base import Flags, Hashes, Source, short_digest

if TYPE_CHECKING:
    from slurmllm.core.config.recipe import Recipe

SplitName = Literal["train", "validation"]
State = Json

HELD_OUT = "held_out"  # the name of the documents that `data.validation` holds out
# The golden ratio's fraction: decorrelates the split from other uses of the same hash.
_SALT = np.uint64(0x9E3779B97F4A7C15)
# Documents whose hashes are computed at once.
_AT_ONCE = 1 << 10
_STATE_VERSION = 2
# Must be equal for a position to mean the same tokens; with their names in error messages.
_IDENTITY = {
    "version": "format of the data state",
    "seed": "train.seed",
    "global_batch": "train.global_batch",
    "tokenizer": "tokenizer (fingerprint)",
    "validation": "data.validation",
    "split": "side of the split",
}
_FIX = "resume with the data that the run began with, or start a new run"


@dataclass(frozen=True)
class StreamSpec:
    """A stream, the same for all ranks and workers."""

    corpora: Sequence[tuple[Path, float]]  # weights are relative to each other
    tokenizer: Path | None  # tokenizer.json; None if all corpora are token ids
    seq_len: int
    global_batch: int  # sequences in one step over all ranks
    seed: int  # of the order
    vocab_size: int | None = None  # the model's: ids of corpora must be below it. None: unknown
    mask: Literal["none", "document"] = "none"  # document: batches mark where documents begin
    validation: float = 0.0  # fraction of the documents held out
    split: SplitName = "train"
    plugins: Sequence[str] = ()  # modules that may register data sources

    @classmethod
    def of(cls, recipe: Recipe, global_batch: int | None = None) -> Self:
        """Return the stream that a recipe trains on; `global_batch` replaces the recipe's."""
        data = recipe.data
        return cls(
            corpora=[(Path(share.path), share.weight) for share in data.corpora],
            tokenizer=None if data.tokenizer is None else Path(data.tokenizer),
            seq_len=recipe.model.seq_len,
            global_batch=global_batch or recipe.train.global_batch,
            seed=recipe.train.seed,
            vocab_size=recipe.model.vocab_size,
            mask=data.mask,
            validation=data.validation,
            plugins=recipe.plugins,
        )


def evaluation_texts(training: StreamSpec, corpora: Mapping[str, str]) -> dict[str, StreamSpec]:
    """Return the texts of a run's evaluations, held-out documents first, one sequence a batch."""
    texts = {}
    if training.validation:
        texts[HELD_OUT] = replace(training, global_batch=1, split="validation")
    for name, path in corpora.items():
        texts[name] = replace(training, corpora=[(Path(path), 1.0)], global_batch=1, validation=0.0)
    return texts


class Split:
    """One side of the split into training and validation documents.

    `validation` is the fraction of the documents held out, in 0 … 0.5.
    """

    def __init__(self, name: SplitName, validation: float) -> None:
        if name == "validation" and validation == 0:
            raise DataError(
                "data.validation is 0: no document is held out, so there are none to validate "
                "on; set data.validation before a run begins"
            )
        self.name = name
        self.validation = validation
        # As an integer, so that the bound is exact on every machine.
        self._below = np.uint64(int(Fraction(str(validation)) * 2**64))

    def document_mask(self, hashes: Hashes) -> Flags:
        """Return which documents are on this side, by the hashes of their content."""
        held_out: Flags = splitmix64(hashes ^ _SALT) < self._below
        return held_out if self.name == "validation" else ~held_out

    def documents(self, source: Source) -> Iterator[int]:
        for begin in range(0, len(source), _AT_ONCE):
            documents = np.arange(begin, min(begin + _AT_ONCE, len(source)))
            if self.validation:
                documents = documents[self.document_mask(source.document_hashes(documents))]
            yield from documents.tolist()

    def require_documents(self, source: Source) -> None:
        if next(self.documents(source), None) is None:
            raise self.empty_error(source)

    def empty_error(self, source: Source) -> DataError:
        return DataError(
            f"none of the {len(source)} documents of {source.path} is on the {self.name} side of "
            f"data.validation {self.validation} and holds a token; "
            "change data.validation, or add documents"
        )


def identity(spec: StreamSpec, sources: Sequence[Source], tokenizer: str | None) -> State:
    """Return the part of a stream's states that identifies its data.

    `tokenizer` is the fingerprint of tokenizer and special tokens, None without a tokenizer.
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
    combined = sources[0].fingerprint
    if len(corpora) > 1:
        contents = [(corpus["fingerprint"], corpus["weight"]) for corpus in corpora]
        combined = short_digest(json.dumps(contents))
    return {
        "version": _STATE_VERSION,
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
    """
    first = states[0]
    by_slot: dict[int, list[int]] = {}
    for state in states:
        check_same_stream(first, state)
        for slot, position in enumerate(state["slots"], start=state["first_slot"]):
            if by_slot.setdefault(slot, position) != position:
                raise DataError(
                    f"two ranks report different positions for slot {slot} of the data stream: "
                    f"{by_slot[slot]} and {position}; merge states taken after the same step"
                )
        if state["counts"] != first["counts"]:
            raise DataError(
                f"two ranks have drawn {first['counts']} and {state['counts']} sequences from "
                "the corpora; merge states taken after the same step"
            )
    slots = range(first["global_batch"])
    if missing := [slot for slot in slots if slot not in by_slot]:
        raise DataError(
            f"{len(missing)} of {len(slots)} slots of the data stream are in no "
            f"state, the first is {missing[0]}; pass the state of every data-parallel rank"
        )
    return {**first, "first_slot": 0, "slots": [by_slot[slot] for slot in slots]}


def check_same_stream(here: State, saved: State) -> None:
    """Raise a DataError that names the difference if a state belongs to another stream."""
    for key, name in _IDENTITY.items():
        if saved.get(key) != here[key]:
            raise DataError(
                f"the data state was saved with {name} {saved.get(key)}, this stream has "
                f"{here[key]}; {_FIX}"
            )
    # Contents and weights, not paths: a corpus may have been moved.
    corpora = here["corpora"]
    saved_corpora = saved.get("corpora", [])
    if len(corpora) != len(saved_corpora):
        raise DataError(
            f"the data state was saved with {len(saved_corpora)} corpora, this stream has "
            f"{len(corpora)}; {_FIX}"
        )
    for now, then in zip(corpora, saved_corpora, strict=True):
        if now["fingerprint"] != then["fingerprint"]:
            raise DataError(
                f"the data state was saved with corpus {then['path']} (fingerprint "
                f"{then['fingerprint']}, {then['documents']} documents), this stream has "
                f"{now['path']} ({now['fingerprint']}, {now['documents']}): changed after the run "
                f"began, or another corpus; {_FIX}"
            )
        if now["weight"] != then["weight"]:
            raise DataError(
                f"the data state was saved with weight {then['weight']:g} of {now['path']}, this "
                f"stream has {now['weight']:g}; {_FIX}"
            )
