"""Figures in words, as the tables of a report have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

ABSENT = "-"


def hours(value: float | None) -> str:
    """`0.0639`, `14.20`, `1,234.5`."""
    if value is None:
        return ABSENT
    return f"{value:,.1f}" if value >= 100 else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """`35.70 %`."""
    return ABSENT if share is None else f"{100 * share:.2f} %"


def seconds(value: float | None) -> str:
    """`26.8`."""
    return ABSENT if value is None else f"{value:,.1f}"


def dollars(usd: float | None) -> str:
    """`1,234.50`."""
    return ABSENT if usd is None else f"{usd:,.2f}"


def whole(number: int | None) -> str:
    """`500,000`."""
    return ABSENT if number is None else f"{number:,}"


def figure(value: float | None) -> str:
    """`0.0213`, `14.2`, `1,234`: three or four digits that count."""
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def count(number: float | None) -> str:
    """`1.23B`."""
    if number is None:
        return ABSENT
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def size(num_bytes: int | None) -> str:
    """`1.25 GB`, of 10^9 bytes."""
    if num_bytes is None:
        return ABSENT
    for unit, letters in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {letters}"
    return f"{num_bytes} B"


def moment(unix_s: float | None) -> str:
    """`2026-11-22 01:20:50 UTC`."""
    if unix_s is None:
        return ABSENT
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{unix_s:g}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """`n1, n2 and 126 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def several(number: int, noun: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
