"""The description of a stream: everything that decides which token is at which place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from slurmllm.data.order import splitmix64
from slurmllm.data.sources.base import Source
from slurmllm.errors import DataError

if TYPE_CHECKING:
    from slurmllm.config.recipe import Recipe

SplitName = Literal["train", "validation"]

# The golden ratio's fraction: decorrelates the split from other uses of the same hash.
_SALT = np.uint64(0x9E3779B97F4A7C15)
# Documents whose hashes are computed at once.
_AT_ONCE = 1 << 10


@dataclass(frozen=True)
class StreamSpec:
    """A stream, the same for all ranks and workers.

    Attributes:
        corpora: Path and weight of each; the weights are relative to each other.
        tokenizer: tokenizer.json; None if all corpora are token ids.
        seq_len: Tokens in a sequence.
        global_batch: Sequences in one step over all ranks.
        seed: Seed of the order.
        vocab_size: The model's; the ids of tokenized corpora must be below it. None: unknown.
        mask: `document` if batches mark where documents begin.
        validation: Fraction of the documents held out.
        split: Side of the split to read.
        plugins: Modules that may register data sources.
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
    plugins: Sequence[str] = ()

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


class Split:
    """One side of the split into training and validation documents.

    Args:
        validation: Fraction of the documents held out, in 0 … 0.5.

    Raises:
        DataError: the validation side of a fraction of 0.
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

    @property
    def all_documents(self) -> bool:
        return self.validation == 0

    def document_mask(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which documents are on this side, by the hashes of their content."""
        held_out: npt.NDArray[np.bool_] = splitmix64(hashes ^ _SALT) < self._below
        return held_out if self.name == "validation" else ~held_out

    def documents(self, source: Source) -> Iterator[int]:
        """Yield the documents of a corpus on this side, in the order of the file."""
        for begin in range(0, len(source), _AT_ONCE):
            documents = np.arange(begin, min(begin + _AT_ONCE, len(source)))
            if not self.all_documents:
                documents = documents[self.document_mask(source.document_hashes(documents))]
            yield from documents.tolist()

    def require_documents(self, source: Source) -> None:
        """Raise a DataError if a corpus has no document on this side."""
        if next(self.documents(source), None) is None:
            raise self.empty_error(source)

    def empty_error(self, source: Source) -> DataError:
        """Return the error for a corpus without a document on this side."""
        return DataError(
            f"none of the {len(source)} documents of {source.path} is on the {self.name} side of "
            f"data.validation {self.validation} and holds a token; "
            "change data.validation, or add documents"
        )
