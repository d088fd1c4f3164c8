"""What a stream reads, and how: all that settles which token stands where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from slurmllm.data.order import splitmix64
from slurmllm.data.sources.base import Source
from slurmllm.errors import DataError


@dataclass(frozen=True)
class StreamSpec:
    """A stream, the same for all ranks and workers.

    Attributes:
        corpora: Path and weight of each; the weights are relative to each other.
        tokenizer: tokenizer.json; None where all corpora are token ids.
        seq_len: Tokens in a sequence.
        global_batch: Sequences in one step over all ranks.
        seed: Of the order.
        vocab_size: The model's; the ids of tokenized corpora must be below it. None: not known.
        mask: `document` where the begins of documents are to be told.
        validation: Share of the documents held out.
        split: Which side of that to read.
    """

    corpora: Sequence[tuple[Path, float]]
    tokenizer: Path | None
    seq_len: int
    global_batch: int
    seed: int
    vocab_size: int | None = None
    mask: Literal["none", "document"] = "none"
    validation: float = 0.0
    split: SplitName = "train"

    def to_json(self) -> dict[str, Any]:
        """For a process that may be in another folder."""
        return {
            **asdict(self),
            "corpora": [(str(path.absolute()), weight) for path, weight in self.corpora],
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer.absolute()),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """What `to_json` wrote."""
        corpora = [(Path(path), weight) for path, weight in fields["corpora"]]
        tokenizer = None if fields["tokenizer"] is None else Path(fields["tokenizer"])
        return cls(**{**fields, "corpora": corpora, "tokenizer": tokenizer})


SplitName = Literal["train", "validation"]

# The golden ratio's fraction: keeps the split apart from other uses of the same hash.
_SALT = np.uint64(0x9E3779B97F4A7C15)


class Split:
    """One side of the split.

    Args:
        name: Which side.
        validation: Share of the documents held out, in 0 … 0.5.

    Raises:
        DataError: there is nothing on this side.
    """

    def __init__(self, name: SplitName, validation: float) -> None:
        if name == "validation" and validation == 0:
            raise DataError(
                "data.validation is 0: no document is held out, so there are none to validate "
                "on; set data.validation before a run begins"
            )
        self.name = name
        self.validation = validation
        self._below = np.uint64(int(Fraction(str(validation)) * 2**64))

    @property
    def everything(self) -> bool:
        """Whether no hash need be looked at."""
        return self.validation == 0

    def empty(self, source: Source) -> DataError:
        """The error for a corpus without a document on this side."""
        return DataError(
            f"none of the {len(source)} documents of {source.path} is on the {self.name} side of "
            f"data.validation {self.validation} and holds a token; "
            "change data.validation, or add documents"
        )

    def holds(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which documents are on this side, by the hashes of their content."""
        held_out: npt.NDArray[np.bool_] = splitmix64(hashes ^ _SALT) < self._below
        return held_out if self.name == "validation" else ~held_out
