"""Documents that are held out: training and validation never read the same text.

Which ones they are follows from the hash of their content alone, not from seed, order or corpus:
a text that stands in several corpora, or several times in one, is on one side everywhere.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from slurmllm.data.order import mix
from slurmllm.data.sources.base import Source
from slurmllm.errors import DataError

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
        held_out: npt.NDArray[np.bool_] = mix(hashes ^ _SALT) < self._below
        return held_out if self.name == "validation" else ~held_out
