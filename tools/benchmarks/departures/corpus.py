"""A made-up language of several sources, and the batches that a training reads of it.

Documents are walks through a random table of successors, one table per source, so that a small
model learns something in a hundred steps and sources differ. A sequence is packed with documents
and padded where the next one does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from departures.settings import Settings

VOCABULARY = 64
PADDING, END = 0, 1
SOURCES = 3
PROMPT = 3  # tokens at the start of a document that are no targets
_SUCCESSORS = 4
_SEQUENCES = 4096
_LONGEST = 24

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pass:
    """The sequences of one micro batch of one rank; each of [sequences, seq_len]."""

    tokens: Tensor
    labels: Tensor
    counts: Tensor  # 1.0 of target tokens, else 0.0
    documents: Tensor  # number of the document of each token

    @property
    def targets(self) -> int:
        return int(self.counts.sum())


@lru_cache(maxsize=8)
def sequences(seq_len: int, dropped: int | None) -> tuple[Ints, Ints]:
    """Returns the packed corpus: tokens and document numbers, both [sequences, seq_len + 3].

    It is the same for all seeds; those order it.
    """
    random = np.random.default_rng(5)
    tables = [
        random.integers(2, VOCABULARY, size=(VOCABULARY, VOCABULARY, _SUCCESSORS))
        for _ in range(SOURCES)
    ]
    likely = 1.0 / np.arange(1, _SUCCESSORS + 1) ** 1.2
    likely /= likely.sum()
    width = seq_len + 3
    tokens = np.full((_SEQUENCES, width), PADDING, dtype=np.int64)
    documents = np.zeros((_SEQUENCES, width), dtype=np.int64)
    kept = [source for source in range(SOURCES) if source != dropped]
    lengths = random.integers(6, _LONGEST, size=_SEQUENCES * width // 6)
    picks = random.choice(_SUCCESSORS, p=likely, size=_SEQUENCES * width)
    at = number = picked = 0
    for row in range(_SEQUENCES):
        at = 0
        while number < len(lengths):
            length = int(lengths[number])
            if at + length > width:
                break
            table = tables[kept[number % len(kept)]]
            # The second order is only the parity of the token before the last: learnable, but not
            # at once.
            before, last = 2, 2 + number * 7 % (VOCABULARY - 2)
            for place in range(at, at + length - 1):
                tokens[row, place] = last
                before, last = last, int(table[last, before % 2, picks[picked]])
                picked += 1
            tokens[row, at + length - 1] = END
            documents[row, at : at + length] = 1 + number
            at += length
            number += 1
    return tokens, documents


@lru_cache(maxsize=64)
def _order(seed: int) -> Ints:
    order: Ints = np.random.default_rng(1000 + seed).permutation(_SEQUENCES)
    return order


def read_passes(settings: Settings, step: int) -> list[list[Pass]]:
    """Returns the micro batches of one step, by rank. [ranks][micro batches]"""
    tokens, documents = sequences(settings.seq_len, settings.source_dropped)
    seed = settings.seed if settings.data_seed is None else settings.data_seed
    position = step - 1 + settings.batch_offset
    if settings.batches_repeated:
        position //= 2
    count = settings.global_batch
    places = np.arange(position * count, (position + 1) * count) % _SEQUENCES
    rows = _order(seed)[places]
    held, of = tokens[rows], documents[rows]
    if settings.tokens_replaced:
        random = np.random.default_rng(77 + step)
        replaced = (random.random(held.shape) < settings.tokens_replaced) & (held > END)
        held = np.where(replaced, random.integers(2, VOCABULARY, held.shape), held)
    length = settings.seq_len
    shift = 1 + settings.label_shift
    labels, label_documents = held[:, shift : shift + length], of[:, shift : shift + length]
    counts = np.ones(labels.shape, dtype=np.float32)
    if settings.mask_padding:
        counts[labels == PADDING] = 0.0
    if settings.mask_prompts:
        begins = of != np.roll(of, PROMPT, axis=1)
        begins[:, :PROMPT] = True
        begins &= of > 0
        counts[begins[:, shift : shift + length]] = 0.0
    # A document's first token is no successor of the document before.
    counts[(label_documents != of[:, :length]) & (labels != PADDING)] = 0.0
    seen = of[:, :length] if settings.separate_documents else np.ones_like(of[:, :length])
    size = settings.sequences_per_pass
    found = []
    for rank in range(settings.ranks):
        own = 0 if settings.rank_data_repeated else rank
        passes = []
        for micro in range(settings.micro_batches):
            first = (own * settings.micro_batches + micro) * size
            part = slice(first, first + size)
            passes.append(
                Pass(
                    torch.from_numpy(held[part, :length].copy()),
                    torch.from_numpy(labels[part].copy()),
                    torch.from_numpy(counts[part].copy()),
                    torch.from_numpy(seen[part].copy()),
                )
            )
        found.append(passes)
    return found
