"""The lines of a metrics file, one row a step, without numpy: cheap enough for `status`.

A worker that is killed can leave its last line cut in the middle, so the last line of a file
may be broken and is then left out. A broken line before it is damage, and an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slurmllm.errors import RunError
from slurmllm.records import Event
from slurmllm.rundir import RunDir

Row = dict[str, Any]

NOT_WHOLE = "not one whole JSON value"
_TAIL_BYTES = 16 * 1024


@dataclass
class MetricsFile:
    """A metrics file as it is read.

    Attributes:
        path: The file.
        line: Number of the line read last, from 1.
        cut_line: Number of a last line that was cut and left out, once the file is read.
    """

    path: Path
    line: int = 0
    cut_line: int | None = field(default=None, init=False)

    def rows(self) -> Iterator[Row]:
        """Read the rows from the first to the last whole one.

        Raises:
            RunError: a line is not a row, or the file cannot be read.
        """
        broken: RunError | None = None
        try:
            with self.path.open("rb") as stream:
                for self.line, text in enumerate(stream, start=1):
                    if not text.strip():
                        continue
                    if broken is not None:
                        raise broken
                    row = parse_row(text)
                    if row is None:
                        broken = self.fault(NOT_WHOLE)
                        self.cut_line = self.line
                        continue
                    wrong = fault_of_row(row)
                    if wrong is not None:
                        raise self.fault(wrong)
                    yield row
        except OSError as error:
            raise unreadable(self.path, error) from error

    def fault(self, what: str) -> RunError:
        """The error for the line read last."""
        return fault_at(self.path, self.line, what)


def fault_at(path: Path, line: int, what: str) -> RunError:
    """The error for a line that is no row."""
    return RunError(
        f"{path}:{line}: {what}; every line but a cut last one must be a JSON "
        "object with a step; mend or remove the line"
    )


def parse_row(text: bytes) -> Any:
    """The JSON value of a line; None where the line is broken (a bare `null` counts as such)."""
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def fault_of_row(row: Any) -> str | None:
    """Why a JSON value is no row; None where it is one."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, not an object"
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        shown = "absent" if "step" not in row else f"{step!r:.40}"
        return f"step is {shown}, not a whole number from 0"
    return None


def last_row(run: RunDir) -> Row | None:
    """The newest whole row of a run, read from the end of its newest metrics file.

    An attempt that has not finished a step yet leaves the row of the attempt before it.

    Returns:
        The row as written (`records.MetricsRow`), or None where the run has made no step.

    Raises:
        RunError: a metrics file cannot be read.
    """
    try:
        for path in reversed(run.metrics_files()):
            row = last_row_of(path)
            if row is not None:
                return row
    except OSError as error:
        raise unreadable(run.path, error) from error
    return None


def last_row_of(path: Path) -> Row | None:
    """The last whole row of a metrics file, read from its end.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        start, tail = size, b""
        while start > 0:
            begin = max(0, start - max(_TAIL_BYTES, len(tail)))
            stream.seek(begin)
            tail = stream.read(start - begin) + tail
            start = begin
            lines = tail.split(b"\n")
            # The first piece is the end of a line that begins before what was read.
            for text in reversed(lines if start == 0 else lines[1:]):
                row = parse_row(text) if text.strip() else None
                if isinstance(row, dict) and type(row.get("step")) is int:
                    return row
    return None


def unreadable(path: Path, error: OSError) -> RunError:
    """The error for a metrics file that the system refuses to read."""
    return RunError(
        f"cannot read {error.filename or path}: {error.strerror or error}; a metrics file must "
        "be readable: check its permissions and the file system"
    )


def read_events(run: RunDir, attempt: int, left_out: list[int] | None = None) -> Iterator[Event]:
    """The events of a train attempt, oldest first; none where it wrote none.

    Lines that are no events (a last one that was cut, a newer version's kind) are left out.

    Args:
        run: The run.
        attempt: Number of the train attempt.
        left_out: The numbers of these lines, from 1, are put here.

    Raises:
        RunError: the file cannot be read.
    """
    path = run.events(attempt)
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield Event.model_validate_json(line)
        except ValidationError:
            if left_out is not None:
                left_out.append(number)
