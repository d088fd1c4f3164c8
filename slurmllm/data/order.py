"""The seeded order of the documents, and which corpus each sequence comes from.

Documents: a permutation for each epoch in O(1) memory. A Feistel network over the bits of the
index permutes 0 … 2^b - 1; cycle walking (apply again until the result is below the size) narrows
that to 0 … size - 1. J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002, sections 3 and 4.

Corpora: selected in proportion to their weights, without randomness. R. Tijdeman, "The chairman
assignment problem", Discrete Mathematics 32 (1980): of the corpora that are due, select the one
with the nearest deadline. After q selections from n > 1 corpora, the count of each differs from its
share of q by at most 1 - 1/(2n - 2), the best possible bound: a corpus is due when one selection
more keeps it within that bound, and its deadline is the last that does. The only state is the
number of selections of each corpus.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from slurmllm.data.sources.base import Hashes, Integers

# CAUTION: a change of the arithmetic or the keys in this file changes the data order of every run.
_ROUNDS = 8
_U64 = np.uint64


class Permutation:
    """A permutation of 0 … size - 1 (size ≥ 1), another for each key, such as seed and epoch."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = _U64(bits // 2)
        self._low_mask = _U64((1 << bits // 2) - 1)
        self._high_mask = _U64((1 << (bits - bits // 2)) - 1)
        self._keys = _round_keys("/".join(map(str, key)))

    def take(self, indices: Integers) -> Integers:
        """Return the permuted indices, int64 of the same shape [n]."""
        permuted = self._feistel(indices.astype(_U64))
        # 2^b is at most twice the size (four times for size 1), so `_feistel` is applied at most
        # twice on average. The loop ends: the permutation's cycle returns to the index itself.
        while len(beyond := np.flatnonzero(permuted >= self.size)):
            permuted[beyond] = self._feistel(permuted[beyond])
        return permuted.astype(np.int64)

    def _feistel(self, index: Hashes) -> Hashes:
        high = index >> self._low_bits
        low = index & self._low_mask
        keys = iter(self._keys)
        for key in keys:
            # The halves may differ in width, so they are updated alternately, not swapped.
            high ^= splitmix64(low ^ key) & self._high_mask
            low ^= splitmix64(high ^ next(keys)) & self._low_mask
        return high << self._low_bits | low


def splitmix64(value: Hashes) -> Hashes:
    """Apply the finalizer of SplitMix64 (G. Steele et al., OOPSLA 2014): each bit affects all."""
    value = (value ^ value >> _U64(30)) * _U64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> _U64(27)) * _U64(0x94D049BB133111EB)
    return value ^ value >> _U64(31)


# A small cache suffices: the slots of a batch are in the same epoch or in adjacent ones.
@lru_cache(maxsize=64)
def _round_keys(key: str) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(key.encode(), person=b"slurmllm order").digest()
    return tuple(np.frombuffer(digest, "<u8", count=_ROUNDS))


@dataclass(frozen=True)
class DocumentOrder:
    """Maps document positions 0, 1, 2, … to document indices, with a permutation for each epoch.

    Position p is in epoch p // documents. `corpus` is the index in a blend, so that corpora of
    equal size have different orders.
    """

    documents: int
    seed: int
    corpus: int = 0

    def take(self, positions: Integers) -> Integers:
        """Return the documents at `positions`, both int64 [n]."""
        epochs, indices = np.divmod(positions, self.documents)
        of_corpus = [self.corpus] if self.corpus else []
        documents = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            permutation = Permutation(self.documents, self.seed, int(epoch), *of_corpus)
            documents[in_epoch] = permutation.take(indices[in_epoch])
        return documents


class Blend:
    """Selects the corpus of each sequence, one global batch at a time; the same on every machine.

    The selections of a step are assigned to the slots (rows) of the batch in a different order in
    each step. Otherwise, with 8 slots, a corpus of weight 1/8 would always get the same slot,
    and the documents of that corpus that belong to other slots would never be read.

    Attributes:
        counts: Selections of each corpus so far.
    """

    def __init__(
        self, weights: Sequence[float], global_batch: int, seed: int, counts: Sequence[int]
    ) -> None:
        # From the decimal text of the weights, in which 0.1 is exactly 1/10, to exact integers.
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]
        self._total = sum(self._shares)
        self._global_batch = global_batch
        self._seed = seed
        self.counts = list(counts)

    def next_step(self) -> list[int]:
        """Return the corpus of each slot in the next step, [global_batch]."""
        if len(self.counts) == 1:  # Tijdeman's bound is that of n > 1
            self.counts[0] += self._global_batch
            return [0] * self._global_batch
        step = sum(self.counts) // self._global_batch
        order = Permutation(self._global_batch, self._seed, "slots", step)
        corpora = [0] * self._global_batch
        for slot in order.take(np.arange(self._global_batch)).tolist():
            corpora[slot] = self._select()
        return corpora

    def _select(self) -> int:
        # Tijdeman's formulas with both sides multiplied by (2n - 2) · total: exact in integers.
        total = self._total
        draw = sum(self.counts) + 1
        parts = 2 * len(self.counts) - 2
        chosen = -1
        chosen_slack = 0
        chosen_share = 1
        for corpus, (share, count) in enumerate(zip(self._shares, self.counts, strict=True)):
            deficit = parts * (share * draw - total * count)
            if deficit < total:
                continue  # not due
            slack = total * (parts - 1) - deficit  # slack / share ~ draws until the deadline
            if chosen < 0 or slack * chosen_share < chosen_slack * share:
                chosen = corpus
                chosen_slack = slack
                chosen_share = share
        self.counts[chosen] += 1
        return chosen
