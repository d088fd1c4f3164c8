"""How relays combine the workers' contributions to an operation, and which part each one gets.

Contributions are bytes, and relays unpickle none of them:

    SUM, MAX, MIN   a JSON list of numbers, element by element
    FIRST           rank and value of one worker, or nothing: that of the lowest rank wins
    GATHER          values by rank; only rank 0 gets them
    BROADCAST       the value of rank 0; nothing from the others
    SCATTER         values by rank, from rank 0; every worker gets its own
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurmllm.control.wire import Kind

_PART = struct.Struct("!IQ")  # rank, bytes
_REDUCTIONS: Mapping[Kind, Callable[[Iterable[Any]], Any]] = {
    Kind.SUM: sum,
    Kind.MAX: max,
    Kind.MIN: min,
}


def combine(kind: Kind, contributions: Iterable[bytes]) -> bytes:
    """Combine the contributions of all workers below a relay into one."""
    if kind in _REDUCTIONS:
        reduction = _REDUCTIONS[kind]
        lists = {*contributions} if kind is not Kind.SUM else [*contributions]
        if len(lists) == 1:
            return next(iter(lists))
        columns = zip(*map(json.loads, lists), strict=True)
        return encode_numbers(reduction(column) for column in columns)
    present = [part for part in contributions if part]
    if kind is Kind.FIRST:
        # The rank comes first in the bytes, in big-endian order.
        return min(present, key=lambda part: part[:4], default=b"")
    return b"".join(present)  # parts by rank, or one part from rank 0


def encode_numbers(numbers: Iterable[float]) -> bytes:
    return json.dumps([*numbers]).encode()


def encode_part(rank: int, value: bytes) -> bytes:
    return _PART.pack(rank, len(value)) + value


def decode_parts(payload: bytes) -> dict[int, bytes]:
    """Rank → value."""
    found, at = {}, 0
    while at < len(payload):
        rank, length = _PART.unpack_from(payload, at)
        at += _PART.size
        found[rank] = payload[at : at + length]
        at += length
    return found


def share(kind: Kind, result: bytes, ranks: Callable[[int], bool]) -> bytes:
    """The part of a result for those workers of whose ranks `ranks` is true."""
    if kind is Kind.GATHER:
        return result if ranks(0) else b""
    if kind is Kind.SCATTER:
        parts = decode_parts(result).items()
        return b"".join(encode_part(rank, value) for rank, value in parts if ranks(rank))
    return result
