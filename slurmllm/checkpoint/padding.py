"""Parameters with a row for each entry of the vocabulary, and padding rows after them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slurmllm.checkpoint.safetensors_files import Region, StoredTensor
from slurmllm.errors import StorageError

VOCABULARY = ("embed.weight", "head.weight")


def read_padded(
    name: str,
    region: Region,
    stored: StoredTensor,
    read: Callable[[str, Region | None], Tensor],
    filled: int,
) -> Tensor:
    """A part of a parameter, or of a moment of it; rows of the vocabulary not read are 0.

    Args:
        name: The parameter's.
        region: Of the parameter with as many padding rows as the reader wants.
        stored: What the files have.
        read: Reads from them, by the parameter's name and a region; None: all of it.
        filled: Rows of the vocabulary that are read; those after them are 0.

    Raises:
        StorageError: the region lies outside of what is stored.
    """
    size = [part.stop - part.start for part in region]
    rows = size[0]
    if name in VOCABULARY:
        rows = min(max(filled - region[0].start, 0), rows)
        region = (slice(region[0].start, region[0].start + rows), *region[1:])
    if rows == 0 or 0 in size:  # nothing but padding; more workers than rows
        return torch.zeros(size, dtype=stored.dtype)
    shape = stored.shape
    if len(shape) != len(region) or any(r.stop > s for r, s in zip(region, shape, strict=True)):
        raise StorageError(
            f"{name} is {list(shape)} in the checkpoint, too small for "
            f"{[r.stop for r in region]}; restore the checkpoint, or import the model again"
        )
    whole = tuple(slice(0, length) for length in shape)
    values = read(name, None if region == whole else region)
    if rows == size[0]:
        return values
    return torch.cat([values, values.new_zeros(size[0] - rows, *size[1:])])
