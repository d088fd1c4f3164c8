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
from typing import Any, TypeVar

from slurmllm.control.wire import Kind

K = TypeVar("K")
_PART = struct.Struct("!IQ")  # rank, bytes
_REDUCTIONS: Mapping[Kind, Callable[[Iterable[Any]], Any]] = {
    Kind.SUM: sum,
    Kind.MAX: max,
    Kind.MIN: min,
}


def combine(kind: Kind, contributions: Iterable[bytes]) -> bytes:
    """Combine the contributions of all workers of a relay into one, in their order.

    Raises a ValueError if lists of numbers are not equally long.
    """
    if kind in _REDUCTIONS:
        reduction = _REDUCTIONS[kind]
        # Mostly all are equal, and their maximum needs no decoding.
        lists = [*(contributions if kind is Kind.SUM else dict.fromkeys(contributions))]
        if len(lists) == 1:
            return lists[0]
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
    parts, at = {}, 0
    while at < len(payload):
        rank, length = _PART.unpack_from(payload, at)
        at += _PART.size
        parts[rank] = payload[at : at + length]
        at += length
    return parts


def shares(kind: Kind, result: bytes, owners: Mapping[int, K]) -> Mapping[K, bytes] | None:
    """Return who gets which part of a result; None if everyone gets all of it.

    `owners` maps a rank to who gets this worker's part.
    """
    if kind is Kind.GATHER:
        return {owners[0]: result} if 0 in owners else {}
    if kind is not Kind.SCATTER:
        return None
    by_owner: dict[K, list[bytes]] = {}
    for rank, value in decode_parts(result).items():
        by_owner.setdefault(owners[rank], []).append(encode_part(rank, value))
    return {owner: b"".join(parts) for owner, parts in by_owner.items()}
