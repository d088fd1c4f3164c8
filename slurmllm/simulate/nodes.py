"""The nodes of a simulated partition: broken, kept off, or there to be had."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Nodes:
    """A partition in which the run is alone.

    Args:
        names: Of all nodes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._broken_until = dict.fromkeys(names, -math.inf)
        self._excluded_until = dict.fromkeys(names, -math.inf)
        self._order = list(names)

    def allocate(self, now: float, wanted: int) -> tuple[float, tuple[str, ...]]:
        """The nodes of the next job: those that it keeps off only where there are no others.

        Returns:
            When it starts, and on what; nodes that it had before come first.
        """
        repaired = sorted(self._broken_until.values())[wanted - 1]
        start = max(now, repaired)
        there = [name for name in self._order if self._broken_until[name] <= start]
        welcome = [name for name in there if self._excluded_until[name] <= start]
        unwelcome = [name for name in there if self._excluded_until[name] > start]
        taken = tuple((welcome + unwelcome)[:wanted])
        kept = set(taken)
        self._order = [*taken, *(name for name in self._order if name not in kept)]
        return start, taken

    def breaks(self, name: str, until: float) -> None:
        """A node is gone until it is repaired."""
        self._broken_until[name] = until

    def exclude(self, names: Iterable[str], until: float) -> None:
        """The run keeps off nodes."""
        self._excluded_until.update(dict.fromkeys(names, until))
