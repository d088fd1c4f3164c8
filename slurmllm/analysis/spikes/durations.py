"""A histogram of durations, for tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping

_LIMITS = (1, 2, 3, 5, 10, 20, 50, 100)


def binned(durations: Mapping[int, int]) -> list[tuple[str, int]]:
    """The number of spikes by ranges of durations, to the last that has any: `4–5` → 3.

    Args:
        durations: Duration → number of spikes.
    """
    if not durations:
        return []
    found, first = [], 1
    for limit in (*_LIMITS, max(durations)):
        if first > max(durations):
            break
        number = sum(count for length, count in durations.items() if first <= length <= limit)
        found.append((f"{first}" if first == limit else f"{first}–{limit}", number))
        first = limit + 1
    return found
