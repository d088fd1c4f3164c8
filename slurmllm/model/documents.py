"""Which tokens of a packed sequence see each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def begins(positions: Tensor) -> Tensor:
    """Where in the sequence each token's document begins, [batch, seq]; equal within a document.

    Args:
        positions: [batch, seq], each token's place in its document, counted from the sequence's
            begin for the document that the sequence begins in.
    """
    return torch.arange(positions.shape[1], device=positions.device) - positions


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention within documents, for all layers.

    Not a mask of booleans, of which torch's attention makes one like this, in every layer anew, and
    keeps each for the backward pass.

    Args:
        positions: As for `begins`.
        dtype: Of queries and keys.

    Returns:
        [batch, 1, seq, seq], to be added to the scores: 0 where the token of a row attends to that
        of a column, else -inf.
    """
    begin = begins(positions)
    seen = (begin.unsqueeze(2) == begin.unsqueeze(1)).tril().unsqueeze(1)
    none = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return none.masked_fill_(~seen, -math.inf)
