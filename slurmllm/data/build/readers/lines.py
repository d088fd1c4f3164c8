"""A stream of bytes in blocks of whole lines."""

from __future__ import annotations

from collections.abc import Iterator

from slurmllm.data.build.opening import OpenedInput
from slurmllm.data.build.readers.base import CHUNK_BYTES


def line_blocks(stream: OpenedInput) -> Iterator[bytes]:
    """Blocks that end after a line feed, or with the file.

    A block holds about CHUNK_BYTES, or one line that is longer.
    """
    held: list[bytes] = []  # the beginning of a line
    for data in stream.blocks(CHUNK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join([*held, memoryview(data)[:end]])
            held = []
        held.append(data[end:])
    last = b"".join(held)
    if last:
        yield last
