"""The rows of our own metrics files (JSON lines, one per step) and events, read without numpy.

Here is the definition of a row and of a damaged line, which the fast columnar reader
(`attempt_metrics`) shares. A worker that is killed can leave its last line cut in the middle: a
last line that is no JSON is skipped. Before the end of a file such a line is damage, and an error.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmllm.core.errors import RunError
from slurmllm.core.run.rundir import RunDir, storage_errors
from slurmllm.core.run.safe_files import open_regular, os_error_text, read_limited, read_lines

if TYPE_CHECKING:
    from slurmllm.core.run.records import Event

Row = dict[str, Any]

CUT_LINE = "not one whole JSON value"
_TAIL_BYTES = 16 * 1024
_LONGEST_TAIL_BYTES = 8 << 20
# pydantic's names of the numbers that JSON does not have, and Python's
_NAMED_NUMBERS = {"NaN": math.nan, "nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a metrics file with their lines' numbers, up to the last whole one.

    Raises RunError if a line is not a row, or the file cannot be read.
    """
    cut_line = None
    with reading(path), open_regular(path) as stream:
        for line, content in enumerate(read_lines(stream), start=1):
            if not content.strip():
                continue
            if cut_line is not None:
                raise line_error(path, cut_line, CUT_LINE)
            row = parse_row(content)
            if row is None:
                cut_line = line
            elif (fault := row_fault(row)) is not None:
                raise line_error(path, line, fault)
            else:
                yield line, row


def line_error(path: Path, line: int, fault: str) -> RunError:
    return RunError(
        f"{path}:{line}: {fault}; every line but a cut last one must be a JSON "
        "object with a step; fix or remove the line"
    )


@contextmanager
def reading(path: Path, kind: str = "metrics file") -> Iterator[None]:
    """Raise OSErrors of a block as RunErrors, which name the file, else `path`."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot read {error.filename or path}: {os_error_text(error)}; a {kind} must be "
            "readable: check its permissions and the file system"
        ) from error


def parse_row(line: bytes) -> Any:
    """Parse a line as JSON; None if it is broken (a bare `null` counts as such)."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


def json_number(value: object) -> float | None:
    """Convert a JSON value; None if not a number. pydantic writes NaN as null or as its name."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        return _NAMED_NUMBERS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def row_fault(row: Any) -> str | None:
    """Return the reason why a JSON value is not a row; None if it is one."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, not an object"
    step = row.get("step")
    # Beyond 2**53 a float64 no longer holds every whole number.
    if type(step) is not int or not 0 <= step < 2**53:
        value = "absent" if "step" not in row else f"{step!r:.40}"
        return f"step is {value}, not a whole number from 0"
    return None


def last_row(run: RunDir) -> Row | None:
    """Read the newest row of a run as written; None if the run has made no step."""
    with reading(run.path):
        return next(filter(None, map(last_row_of, reversed(run.metrics_files()))), None)


def last_row_of(path: Path) -> Row | None:
    return next(iter(last_rows(path, 1)), None)


def last_rows(path: Path, count: int) -> list[Row]:
    """Read the last rows of a metrics file from its end, oldest first; lines without are skipped.

    Raises OSError if the file cannot be read, or its end holds no rows.
    """
    rows: list[Row] = []
    with open_regular(path) as stream:
        position = size = stream.seek(0, 2)
        tail = b""
        while position > 0 and len(rows) < count:
            # Grows with what is left of a long line: reading stays linear in its length.
            begin = max(0, position - max(_TAIL_BYTES, len(tail)))
            if size - begin > _LONGEST_TAIL_BYTES:
                if rows:
                    break
                raise OSError(
                    errno.EFBIG, f"its last {_LONGEST_TAIL_BYTES:,} bytes hold no row", str(path)
                )
            stream.seek(begin)
            lines = (stream.read(position - begin) + tail).split(b"\n")
            # The first piece is the end of a line that begins before what was read.
            tail = lines.pop(0) if begin > 0 else b""
            for content in reversed(lines):
                row = parse_row(content) if content.strip() else None
                if row is not None and row_fault(row) is None:
                    rows.append(row)
                    if len(rows) == count:
                        break
            position = begin
    return rows[::-1]


def read_events(
    run: RunDir, attempt: int, skipped_lines: list[int] | None = None
) -> Iterator[Event]:
    """Yield the events of a train attempt, oldest first; none if it wrote none.

    Lines that are not events (a cut last one, a kind of a newer version) are skipped; their
    numbers are appended to `skipped_lines`. Raises RunError if the file cannot be read.
    """
    # Here, so that the rows above are read without pydantic.
    from pydantic import ValidationError

    from slurmllm.core.run.records import Event

    path = run.events(attempt)
    with storage_errors(f"cannot read {path}", kind=RunError):
        try:
            lines = read_limited(path).splitlines()
        except FileNotFoundError:
            return
    for number, line in enumerate(lines, start=1):
        try:
            yield Event.model_validate_json(line)
        except ValidationError:
            if skipped_lines is not None:
                skipped_lines.append(number)


def read_evaluations(run: RunDir, files: Iterable[Path]) -> dict[int, Event]:
    """Return the evaluation of each step, of the latest of attempts, by their metrics files."""
    return {
        event.step: event
        for path in files
        for event in read_events(run, int(path.stem.removeprefix("attempt_")))
        if event.kind == "evaluation"
    }


def last_evaluation(run: RunDir) -> Event | None:
    """Return the newest evaluation; None without one, or if its file cannot be read."""
    for path in reversed(run.metrics_files()):
        with suppress(RunError):
            if evaluations := read_evaluations(run, [path]):
                return list(evaluations.values())[-1]
    return None


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(710) overflows a double


def evaluation_values(losses: Mapping[str, float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, loss in losses.items():
        values |= {f"eval/{name}/loss": loss, f"eval/{name}/perplexity": perplexity(loss)}
    return values
