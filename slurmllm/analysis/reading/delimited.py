"""Metrics in tables: CSV and TSV with a header, such as Lightning's CSVLogger or wandb write."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmllm.analysis.reading.gather import Gather, plain_suffix
from slurmllm.analysis.reading.opening import open_log
from slurmllm.analysis.reading.series import Log
from slurmllm.analysis.reading.tags import step_keys
from slurmllm.errors import RunError

# wandb's table of a chart: `<run> - <metric>`, and the range that was averaged
_OF_RUN = re.compile(r"(?P<run>.+?) - (?P<metric>.+)")
_RANGE = ("__MIN", "__MAX")


def read_table(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a table; a blank cell is an absent value, and a cell that is no number too.

    Raises:
        RunError: it has no header or no rows, or no column is the step.
        OSError: the file cannot be read.
    """
    rows, warnings = Gather(), list[str]()
    with open_log(path, warnings) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
        # A node that crashed may leave NUL bytes, which csv refuses.
        lines = (line.replace("\0", "") for line in text)
        header_line = next(lines, "")
        delimiter = "\t" if plain_suffix(path) == ".tsv" else _delimiter(header_line)
        header: list[str] = []
        with contextlib.suppress(csv.Error):  # a line of 128 KiB without a separator
            cells = next(csv.reader([header_line], delimiter=delimiter), [])
            header = [name.strip() for name in cells]
        if not any(header):
            raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
        names = _names(header)
        if any(tag in header and tag not in names for tag in tags.values()):
            names = header
        reader = csv.reader(lines, delimiter=delimiter)
        short: list[int] = []  # lines, the header's being 1
        last = 0
        try:
            for cells in reader:
                if not cells:
                    continue
                last = reader.line_num + 1
                if len(cells) < len(names):
                    short.append(last)
                else:
                    rows.add(_numbers(names, cells))
        except csv.Error as error:
            warnings.append(f"{path}:{reader.line_num + 1}: {error}; read as far as that")
    if short == [last]:
        warnings.append(f"{path}:{last}: the last line is cut and left out")
    elif short:
        warnings.append(
            f"{path}:{short[0]}: {len(short)} rows have fewer than the header's {len(names)} "
            "columns and are left out"
        )
    return rows.log(path, "csv", tags, tuple(warnings))


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _names(header: list[str]) -> list[str]:
    """The columns' names, without the run's where all are of one run."""
    matches = [_OF_RUN.fullmatch(name) for name in header]
    runs = {match["run"] for match in matches if match}
    unmatched = [name for name, match in zip(header, matches, strict=True) if not match]
    if len(runs) != 1 or not all(step_keys([name], {}) or not name for name in unmatched):
        return header
    return [match["metric"] if match else name for name, match in zip(header, matches, strict=True)]


def _numbers(names: list[str], cells: list[str]) -> Iterator[tuple[str, float]]:
    for name, cell in zip(names, cells, strict=False):
        if cell and name and not name.endswith(_RANGE):
            with contextlib.suppress(ValueError):
                yield name, float(cell)
