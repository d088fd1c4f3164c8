"""Log files that grow: the lines appended since the last read, and the last lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmllm.format import printable
from slurmllm.run.records import AttemptRecord
from slurmllm.run.safe_files import open_regular

_BLOCK_BYTES = 64 * 1024
# A program without newlines must not fill the memory: a longer line is cut into pieces.
_LONGEST_BYTES = 1024 * 1024
_LONGEST_TAIL_BYTES = 64 << 20  # without the lines that are looked for


@dataclass
class GrowingLog:
    """A log file and the position up to which it has been read.

    Only whole lines are returned: a line without its newline may still be written to.
    """

    path: Path
    position: int = 0
    rest: bytes = b""

    def lines(self) -> Iterator[str]:
        """Yield the lines appended since the last call; none if the file is unreadable.

        The file is opened for every block: a merge reads the logs of thousands of ranks at a time,
        more than the limit of open files. Most have one block: the end is not looked for again.
        """
        while True:
            block = b""
            with suppress(OSError), open_regular(self.path) as stream:
                if stream.seek(0, 2) < self.position:  # the file was truncated
                    self.position, self.rest = 0, b""
                stream.seek(self.position)
                block = stream.read(_BLOCK_BYTES)
            self.position += len(block)
            *whole, self.rest = (self.rest + block).split(b"\n")
            yield from map(text_of, whole)
            if len(self.rest) > _LONGEST_BYTES:
                yield from self.flush()
            if len(block) < _BLOCK_BYTES:
                return

    def flush(self) -> Iterator[str]:
        """Yield the text after the last newline, if any."""
        rest, self.rest = self.rest, b""
        if rest:
            yield text_of(rest)

    def skip_to_last(self, lines: int) -> None:
        """Continue before the last `lines` lines."""
        with suppress(OSError):
            self.position = start_of_last(self.path, lines)


def start_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file; OSError if it cannot be read."""
    with open_regular(path) as stream:
        at = end = stream.seek(0, 2)
        newlines = lines  # to step over, backwards
        while at > max(end - _LONGEST_TAIL_BYTES, 0):
            begin = max(0, at - _BLOCK_BYTES)
            stream.seek(begin)
            block = stream.read(at - begin)
            if at == end:
                newlines += block.endswith(b"\n")
            if block.count(b"\n") >= newlines:
                for _ in range(newlines):
                    block = block[: block.rindex(b"\n")]
                return begin + len(block) + 1
            newlines -= block.count(b"\n")
            at = begin
    return at


def text_of(line: bytes) -> str:
    """Return a line made safe for a terminal; of a progress bar only its last state."""
    text = line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
    return printable(text)


def node_of(record: AttemptRecord, rank: int) -> str:
    """Return the node of a worker of an attempt; empty if it has no such worker."""
    per_node = record.world_size // max(len(record.nodes), 1)
    if per_node < 1 or rank // per_node >= len(record.nodes):
        return ""
    return record.nodes[rank // per_node]
