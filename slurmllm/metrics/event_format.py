"""One TensorBoard event as it lies in a file: protobuf's wire format, without protobuf.

Only what a curve needs is looked at: wall time, step, and the scalars, be they `simple_value` or
tensors of one element. The places of the values are told, not the values: events of the same
layout are then read many at a time (`eventfile`).

Source of the field numbers: tensorboard/compat/proto/event.proto, summary.proto, tensor.proto,
tensor_shape.proto and types.proto of tensorflow/tensorboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Of a tensor's dtype: numpy's name, and the field that holds the values one by one
_DTYPES = {
    1: ("<f4", 5),  # DT_FLOAT, float_val
    2: ("<f8", 6),  # DT_DOUBLE, double_val
    3: ("<i4", 7),  # DT_INT32, int_val
    9: ("<i8", 10),  # DT_INT64, int64_val
    14: ("bf2", 13),  # DT_BFLOAT16, half_val
    19: ("<f2", 13),  # DT_HALF, half_val
    22: ("<u4", 16),  # DT_UINT32, uint32_val
    23: ("<u8", 17),  # DT_UINT64, uint64_val
}
_START = 1  # SessionLog.START


class MalformedEventError(ValueError):
    """Bytes that are no event."""


@dataclass(frozen=True)
class Scalar:
    """Where an event holds the value of a tag.

    Attributes:
        tag: The tag.
        offset: Of the value in the event's bytes.
        dtype: numpy's name of it, `bf2` for bfloat16, or `varint`.
    """

    tag: str
    offset: int
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Where an event holds what.

    Attributes:
        wall_time: Offset of the wall time, a double; None where it has none.
        step: Offset and size of the step, a varint; None for step 0.
        scalars: The scalars.
        starts: Whether a process says here that it begins to write.
    """

    wall_time: int | None
    step: tuple[int, int] | None
    scalars: tuple[Scalar, ...]
    starts: bool


def read_layout(event: bytes) -> Layout:
    """Find out where an event holds what.

    Raises:
        MalformedEventError: the bytes are no event.
    """
    wall_time, step, starts = None, None, False
    scalars: list[Scalar] = []
    for number, wire, begin, end in _fields(event, 0, len(event)):
        if number == 1 and wire == 1:
            wall_time = begin
        elif number == 2 and wire == 0:
            step = (begin, end - begin)
        elif number == 5 and wire == 2:
            for inner, kind, first, last in _fields(event, begin, end):
                if inner == 1 and kind == 2:
                    scalar = _scalar(event, first, last)
                    if scalar is not None:
                        scalars.append(scalar)
        elif number == 7 and wire == 2:
            for inner, kind, first, _ in _fields(event, begin, end):
                starts |= inner == 1 and kind == 0 and read_varint(event, first)[0] == _START
    return Layout(wall_time, step, tuple(scalars), starts)


def read_varint(text: bytes, at: int) -> tuple[int, int]:
    """A varint and where it ends; as a signed number of 64 bits.

    Raises:
        MalformedEventError: it does not end.
    """
    value = shift = 0
    for end in range(at, min(at + 10, len(text))):
        value |= (text[end] & 0x7F) << shift
        if text[end] < 0x80:
            value &= (1 << 64) - 1
            return value - (1 << 64) if value >> 63 else value, end + 1
        shift += 7
    raise MalformedEventError(f"no number at byte {at}")


def _fields(text: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, begin and end of each field of a message."""
    while at < end:
        key, at = read_varint(text, at)
        wire, begin = key & 7, at
        if wire == 0:
            at = read_varint(text, at)[1]
        elif wire == 1:
            at += 8
        elif wire == 2:
            size, begin = read_varint(text, at)
            at = begin + size
        elif wire == 5:
            at += 4
        else:
            raise MalformedEventError(f"no field at byte {begin}")
        if not begin <= at <= end:
            raise MalformedEventError(f"field at byte {begin} goes beyond its message")
        yield key >> 3, wire, begin, at


def _scalar(event: bytes, at: int, end: int) -> Scalar | None:
    """A summary's value, where it is a scalar."""
    tag, plugin = "", "scalars"
    found: tuple[int, str] | None = None
    for number, wire, begin, last in _fields(event, at, end):
        if number == 1 and wire == 2:
            tag = event[begin:last].decode("utf-8", errors="replace")
        elif number == 2 and wire == 5:
            found = (begin, "<f4")
        elif number == 8 and wire == 2:
            found = _element(event, begin, last)
        elif number == 9 and wire == 2:
            plugin = _plugin(event, begin, last) or plugin
    return Scalar(tag, *found) if found is not None and plugin == "scalars" else None


def _plugin(event: bytes, at: int, end: int) -> str:
    """Name of the plugin that a value's metadata is for."""
    for number, wire, begin, last in _fields(event, at, end):
        if number == 1 and wire == 2:
            for inner, kind, first, close in _fields(event, begin, last):
                if inner == 1 and kind == 2:
                    return event[first:close].decode("utf-8", errors="replace")
    return ""


def _element(event: bytes, at: int, end: int) -> tuple[int, str] | None:
    """Place and dtype of the one element of a tensor; None where it is no number or not one."""
    fields = list(_fields(event, at, end))
    dtypes = [read_varint(event, begin)[0] for n, wire, begin, _ in fields if n == 1 and wire == 0]
    dtype, one_by_one = _DTYPES.get(dtypes[-1] if dtypes else 0, ("", 0))
    if not dtype or not all(_is_one(event, b, e) for n, w, b, e in fields if n == 2 and w == 2):
        return None
    size = int(dtype[-1])
    for number, wire, begin, last in fields:
        if number == 4 and wire == 2 and last - begin == size:
            return begin, dtype
        if number == one_by_one and one_by_one in (5, 6):
            return (begin, dtype) if last - begin >= size else None
        if number == one_by_one and last > begin:
            return begin, {"bf2": "varint bf2", "<f2": "varint <f2"}.get(dtype, "varint")
    return None


def _is_one(event: bytes, at: int, end: int) -> bool:
    """Whether a shape is that of one element."""
    for number, wire, begin, last in _fields(event, at, end):
        if number == 2 and wire == 2:
            sizes = [
                read_varint(event, b)[0] for n, _, b, _ in _fields(event, begin, last) if n == 1
            ]
            if sizes != [1]:
                return False
    return True


_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(_entry(byte) for byte in range(256))


def masked_crc32c(text: bytes) -> int:
    """The checksum of some bytes as a TFRecord file holds it."""
    crc = 0xFFFFFFFF
    for byte in text:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
