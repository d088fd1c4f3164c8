"""Which corpus each sequence comes from: shares by weight, exact at every moment.

R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of those whose
share is due, draw the one whose deadline is nearest. After any number of draws q, the draws of a
corpus differ from weight · q by less than 1, which no scheme can better for two corpora or more.
The counts of the draws so far are all that it needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from slurmllm.data.order import Permutation


class Blend:
    """Draws corpora, a global batch at a time; the same on every machine.

    The draws of a step go to its slots in an order of the step's own. Else a weight like 1/8 with
    8 slots would always fall on the same slot, which would read its share of that corpus alone.

    Args:
        weights: Of the corpora, relative to each other.
        global_batch: Draws of a step.
        seed: Of the slots' order.
        counts: Draws of each corpus so far.

    Attributes:
        counts: Draws of each corpus so far.
    """

    def __init__(
        self, weights: Sequence[float], global_batch: int, seed: int, counts: Sequence[int]
    ) -> None:
        # By their decimal text: 0.1 is a tenth on every machine.
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._shares = [int(share * scale) for share in shares]
        self._total = sum(self._shares)
        self._global_batch = global_batch
        self._seed = seed
        self.counts = list(counts)

    def next_step(self) -> list[int]:
        """The corpus of each slot in the next step, [global_batch]."""
        if len(self.counts) == 1:
            self.counts[0] += self._global_batch
            return [0] * self._global_batch
        step = sum(self.counts) // self._global_batch
        order = Permutation(self._global_batch, self._seed, "slots", step)
        corpora = [0] * self._global_batch
        for slot in order.take(np.arange(self._global_batch)).tolist():
            corpora[slot] = self._draw()
        return corpora

    def _draw(self) -> int:
        total, draw, parts = self._total, sum(self.counts) + 1, 2 * len(self.counts) - 2
        drawn, deadline, its_share = -1, 0, 1
        for corpus, (share, count) in enumerate(zip(self._shares, self.counts, strict=True)):
            owed = parts * (share * draw - total * count)
            if owed < total:
                continue
            due = total * (parts - 1) - owed  # over `share`, the draws until its deadline
            if drawn < 0 or due * its_share < deadline * share:
                drawn, deadline, its_share = corpus, due, share
        self.counts[drawn] += 1
        return drawn
