"""The seeded order of the documents: a permutation for each epoch in O(1) memory.

A Feistel network over the bits of the index permutes 0 … 2^b - 1; cycle walking (apply again
until the result is below the size) narrows that to 0 … size - 1. J. Black and P. Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3 and 4.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of 0 … size - 1, another one for each (seed, epoch).

    Args:
        size: Number of documents, at least 1.
        seed: The run's seed.
        epoch: Passes over the corpus before this one.
    """

    __slots__ = ("_high_mask", "_keys", "_low_bits", "_low_mask", "size")

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._keys = _round_keys(seed, epoch)

    def __getitem__(self, index: int) -> int:
        # The range is below twice the size (four times for size 1), so this takes two
        # turns or fewer on average; it ends, because the cycle leads back to `index` itself.
        while True:
            index = self._feistel(index)
            if index < self.size:
                return index

    def _feistel(self, index: int) -> int:
        high, low = index >> self._low_bits, index & self._low_mask
        keys = iter(self._keys)
        for key in keys:
            # Halves of unequal width keep their places and are altered in turn.
            high ^= _mix(low ^ key) & self._high_mask
            low ^= _mix(high ^ next(keys)) & self._low_mask
        return high << self._low_bits | low


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (G. Steele et al., OOPSLA 2014): every bit moves every bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), person=b"slurmllm order")
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


class DocumentOrder:
    """Document positions 0, 1, 2, … without end → document indices, epoch after epoch.

    Args:
        documents: Documents of the corpus.
        seed: The run's seed.
    """

    def __init__(self, documents: int, seed: int) -> None:
        self.documents = documents
        self.seed = seed
        self._permutation = Permutation(documents, seed, 0)
        self._epoch = 0

    def document(self, position: int) -> int:
        """Index of the document at a position."""
        epoch, place = divmod(position, self.documents)
        if epoch != self._epoch:
            self._permutation = Permutation(self.documents, self.seed, epoch)
            self._epoch = epoch
        return self._permutation[place]
