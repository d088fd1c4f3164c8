"""What a stream reads, and how: all that settles which token stands where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from slurmllm.data.split import SplitName


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
