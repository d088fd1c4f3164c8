"""A batch of packed sequences, with what is known of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slurmllm.data.sources.base import BEGINS, UNTRAINED, Marks


class Batch(NamedTuple):
    """Packed sequences, each with the token that follows it.

    Attributes:
        tokens: int64 [rows, seq_len + 1].
        begins: bool [rows, seq_len + 1], whether a token is its document's first. None where
            documents do not matter.
        untrained: bool [rows, seq_len + 1], whether a token is read but not learnt. None where
            all are learnt.
    """

    tokens: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_] | None = None
    untrained: npt.NDArray[np.bool_] | None = None

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        """What the model reads, int64 [rows, seq_len]."""
        return np.ascontiguousarray(self.tokens[:, :-1])

    def labels(self, ignored: int) -> npt.NDArray[np.int64]:
        """What the model is to predict, int64 [rows, seq_len]; `ignored` where nothing is."""
        labels = np.ascontiguousarray(self.tokens[:, 1:])
        if self.untrained is not None:
            labels[self.untrained[:, 1:]] = ignored
        return labels

    @property
    def positions(self) -> npt.NDArray[np.int64] | None:
        """Place of each input in its document, int64 [rows, seq_len].

        Counted from the sequence's begin for the document that the sequence begins in.
        """
        if self.begins is None:
            return None
        places = np.arange(self.tokens.shape[1] - 1)
        begins = np.where(self.begins[:, :-1], places, 0)
        return places - np.maximum.accumulate(begins, axis=1)


def marked_batch(
    tokens: npt.NDArray[np.int32], marks: Marks, *, begins: bool, untrained: bool
) -> Batch:
    """A batch with what is asked for of the tokens' marks, [rows, seq_len + 1] both."""
    return Batch(
        tokens.astype(np.int64),
        (marks & BEGINS).astype(bool) if begins else None,
        (marks & UNTRAINED).astype(bool) if untrained else None,
    )
