"""Numbers and times as text for people: the same in tables, reports, plans and log lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Texts = tuple[str, ...]
Json = dict[str, Any]  # an object of JSON
Values = Mapping[str, Any]  # by name
ABSENT = "-"
# What a terminal executes or hides: CSI, OSC, DCS, SOS, PM and APC sequences (ECMA-48; with their
# text), other escapes and control characters, marks that reorder or hide text (UAX #9), and lone
# surrogates, which stand for bytes that are no UTF-8.
_UNPRINTABLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90\x9e\x9f\x98])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
# The styles of the command line's own: bold, dim and colours of text.
_STYLE = re.compile(r"\x1b\[(?:(?:[0-2]|22|3[0-79]|9[0-7])(?:;(?=\d)|(?=m)))*m")


def by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in the order of the pairs."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def format_lines(lines: Iterable[object]) -> str:
    """Return the lines of a list below a title that ends with a colon."""
    return "".join(f"\n  {line}" for line in lines)


def printable(value: str, styles: bool = False) -> str:
    """Remove from a text what would steer a terminal; lines and tabs stay.

    Args:
        styles: Whether bold, dim and coloured text stays.
    """

    def replacement(match: re.Match[str]) -> str:
        if "\ud800" <= match[0] <= "\udfff":
            return "\ufffd"
        return match[0] if styles and _STYLE.fullmatch(match[0]) else ""

    if value.isascii() and value.isprintable():
        return value
    return _UNPRINTABLE.sub(replacement, value)


def format_integer(number: int | None) -> str:
    """`500,000`."""
    return ABSENT if number is None else f"{number:,}"


def format_number(value: float | None) -> str:
    """`0.0213`, `14.2`, `1,234`: three or four significant digits."""
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def format_count(number: float | None) -> str:
    """`1.23B`: parameters, tokens, tokens per dollar."""
    return ABSENT if number is None else _scaled(number, "TBMK", "")


def _scaled(number: float, letters: str, unit: str) -> str:
    """Return a number with three digits and the letter of its power of 1,000."""
    for power, letter in enumerate(letters):
        scale = 1000.0 ** (len(letters) - power)
        if number >= 0.9995 * scale:  # three digits of less are not rounded up to 1000
            return f"{number / scale:.3g}{letter}{unit}"
    return f"{number:.3g}{unit}"


def format_plural(number: int, noun: str) -> str:
    """`1 node`, `1,234 nodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_percent(share: float | None, decimals: int = 2) -> str:
    """`35.70 %` of a share of 0.357."""
    return ABSENT if share is None else f"{100 * share:.{decimals}f} %"


def format_mfu(share: float | None, precision: str | None, decimals: int = 2) -> str:
    """`35.70 %`, or `35.70 % of bf16` if some products are faster than bf16's peak."""
    of_bf16 = share is not None and precision == "fp8_mixed"
    return format_percent(share, decimals) + (" of bf16" if of_bf16 else "")


def format_dollars(usd: float | None, decimals: int = 2) -> str:
    """`1,234.50`."""
    return ABSENT if usd is None else f"{usd:,.{decimals}f}"


def format_bytes(num_bytes: float | None) -> str:
    """`1.25 GB`, of 10^9 bytes."""
    if num_bytes is None or num_bytes < 1e3:
        return ABSENT if num_bytes is None else f"{num_bytes:.0f} B"
    scaled = _scaled(num_bytes, "TGMk", "B")
    return f"{scaled[:-2]} {scaled[-2:]}"


def format_gib(num_bytes: float) -> str:
    """`14.12`: device memory in GiB, without the unit."""
    count = num_bytes / 2**30
    return f"{count:.2f}" if count >= 0.1 else f"{count:.2g}"


def format_hours(hours: float | None) -> str:
    """`0.0639`, `14.20`, `1,234.5`: node hours, without the unit."""
    if hours is None:
        return ABSENT
    return f"{hours:,.1f}" if hours >= 100 else f"{hours:.4f}" if hours < 1 else f"{hours:.2f}"


def format_seconds(seconds: float) -> str:
    """`21.3 ms`, `1.25 s`: parts of a step."""
    if seconds == 0 or seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def format_estimate(value: float) -> str:
    """`0.068`, `2.4`, `1,235`: as few digits as suit the interval of a prediction."""
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def format_days(hours: float, interval: Sequence[float] | None = None) -> str:
    """`5.2 h`, `22.7 days (20.1–25.6)`: time to the end of a run, with its bounds in hours."""
    unit, unit_h = ("days", 24) if hours >= 24 else ("h", 1)
    bounds = "–".join(format_estimate(bound / unit_h) for bound in interval or ())
    return f"{format_estimate(hours / unit_h)} {unit}" + (f" ({bounds})" if bounds else "")


def format_elapsed(seconds: float | None) -> str:
    """`1,234.5`: seconds, without the unit."""
    return ABSENT if seconds is None else f"{seconds:,.1f}"


def format_duration(seconds: float | None) -> str:
    """`1:02:03`; empty if unknown, zero if negative, as between machines' clocks."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, seconds_left = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}"


def format_age(seconds: float) -> str:
    """`12 s ago`, `3 min ago`, `5 h ago`, `2 days ago`."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def format_time(unix_s: float) -> str:
    """`2026-11-23 08:31` in the time zone of this machine."""
    return _format_time(unix_s, "%Y-%m-%d %H:%M")


def format_utc(unix_s: float | None) -> str:
    """`2026-11-23 08:31:05 UTC`, for pages that travel between time zones."""
    return ABSENT if unix_s is None else _format_time(unix_s, "%Y-%m-%d %H:%M:%S UTC", UTC)


def _format_time(unix_s: float, form: str, zone: tzinfo | None = None) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_s, zone):{form}}"
    except (OverflowError, ValueError, OSError):  # a damaged record's time
        return f"{unix_s:g}"


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """`n1, n2 and 5 more`."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


def format_ranks(ranks: Sequence[int], verb: str = "", plural_verb: str = "") -> str:
    """Return `rank 3` or `ranks 3, 7`, followed by the verb."""
    noun, verb = ("rank", verb) if len(ranks) == 1 else ("ranks", plural_verb)
    return f"{noun} {format_names([str(rank) for rank in ranks])} {verb}".rstrip()
