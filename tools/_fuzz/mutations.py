"""Hostile files: valid ones that were cut, spliced, or given values that no writer writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hypothesis import strategies as st

# A string in quotes, or what is between the punctuation of JSON, YAML, CSV and Slurm's tables.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s,:|=\[\]{}"]+')
_ODD_VALUES = [
    *b"-1 0 1 -0.0 1e400 1e308 1e12 1e-400 NaN Infinity -Infinity .inf 2147483648".split(),
    *b"9007199254740993 9223372036854775808 18446744073709551616 1_000 0x7f null true".split(),
    *rb"""~ [] {} "" "x" ' " [1] {"a":1} [["a",[null]]] "NaN" "\ud800" "\u0000" """.split(),
    *rb'"\u202e" "\u001b[2J" "../../../x" "/dev/null" 2026-13-45T99:99:99'.split(),
    *b"9999-12-31T23:59:59 n[1-99999999] !!python/name:os.system *a".split(),
    *(b"", b"&a [*a]", b"<<: *a", b"\r", b"\n", b"\t", b"\x00", b"\xff\xfe", b"\xed\xa0\x80"),
    *(b"\x1b]0;x\x07", "\u202e".encode(), b"9" * 400, b"9" * 5000, b"[" * 3000),
    *(b'{"a":' * 3000, b"- " * 3000, b'"' + b"x" * 70000),
]
_ODD_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62]
_MOST_BYTES = 1 << 18


def _token(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    """Replace a token by an odd value, or by a token of another file."""
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return text
    begin, end = tokens[draw(st.integers(0, len(tokens) - 1))].span()
    foreign = _TOKEN.findall(other[:4096])
    values = st.sampled_from(_ODD_VALUES)
    value = draw(st.one_of(values, values, st.sampled_from(foreign)) if foreign else values)
    return text[:begin] + value + text[end:]


def _flip(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    place = draw(st.integers(0, len(text) - 1))
    flipped = text[place] ^ (1 << draw(st.integers(0, 7)))
    return text[:place] + bytes([flipped]) + text[place + 1 :]


def _number(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    """Overwrite one to eight bytes by an extreme number."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    place = draw(st.integers(0, len(text) - 1))
    number = draw(st.sampled_from(_ODD_NUMBERS)) % (1 << 8 * width)
    return text[:place] + number.to_bytes(width, "little") + text[place + width :]


def _span(draw: st.DrawFn, text: bytes) -> tuple[int, int]:
    begin = draw(st.integers(0, len(text) - 1))
    return begin, min(len(text), begin + draw(st.sampled_from([1, 4, 16, 64, 1024])))


def _cut(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    begin, end = _span(draw, text)
    return text[:begin] if draw(st.booleans()) else text[:begin] + text[end:]


def _repeat(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    begin, end = _span(draw, text)
    count = draw(st.sampled_from([2, 3, 100, 3000]))
    return text[:end] + text[begin:end] * count + text[end:]


def _splice(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    begin, end = _span(draw, text)
    first, last = _span(draw, other or b"\0")
    return text[:begin] + other[first:last] + text[end:]


def _line(draw: st.DrawFn, text: bytes, other: bytes) -> bytes:
    """Put a line somewhere else, once more or instead of another."""
    lines = text.splitlines(keepends=True)
    source, target = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    lines[target : target + draw(st.integers(0, 1))] = [lines[source]]
    return b"".join(lines)


_OPERATIONS: list[Callable[[st.DrawFn, bytes, bytes], bytes]] = [
    *(_token, _token, _token),
    *(_flip, _number, _cut, _repeat, _splice, _line),
]


@st.composite
def hostile_files(draw: st.DrawFn, valid: Mapping[str, bytes]) -> tuple[str, bytes]:
    """The name of a valid file, and its content after one to four mutations."""
    name = draw(st.sampled_from(sorted(valid)))
    text, other = valid[name], valid[draw(st.sampled_from(sorted(valid)))]
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(_OPERATIONS))(draw, text or b"\0", other)[:_MOST_BYTES]
    return name, text
