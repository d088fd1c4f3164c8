"""Metrics of other frameworks as JSON: a row a line, or one document with a list of rows.

`trainer_state.json` of the Hugging Face Trainer is such a document, and so is what wandb's API
exports. Nested keys are read by their dotted path (`metrics.loss`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmllm.analysis.reading.gather import Gather
from slurmllm.analysis.reading.opening import open_log
from slurmllm.analysis.reading.rows import parse_row
from slurmllm.analysis.reading.series import Log
from slurmllm.errors import RunError

_LISTS = ("log_history", "history", "metrics", "logs", "rows", "data")
_SPELT = {"NaN": math.nan, "nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_json_lines(path: Path, tags: Mapping[str, str]) -> Log:
    """Read JSON lines; those that are none are left out with a warning.

    Raises:
        RunError: it holds no rows, or no key is the step.
        OSError: the file cannot be read.
    """
    rows, broken, first, last = Gather(), 0, 0, 0
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            last = number
            row = parse_row(line)
            if isinstance(row, dict):
                rows.add(_numbers(row))
            else:
                broken, first = broken + 1, first or number
    if broken == 1 and first == last:
        warnings.append(f"{path}:{first}: the last line is cut and left out")
    elif broken:
        lines = "1 line is" if broken == 1 else f"{broken} lines are"
        warnings.append(f"{path}:{first}: {lines} no JSON object and left out")
    return rows.log(path, "jsonl", tags, tuple(warnings))


def read_json(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a JSON document that holds a list of rows, or a list of values for each key.

    Raises:
        RunError: it holds neither, or no key is the step.
        OSError: the file cannot be read.
    """
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith(b"{") and text.strip().count(b"\n"):
            return read_json_lines(path, tags)
        raise RunError(
            f"{path} is no whole JSON document: {error!s:.100}; restore it, or give another log"
        ) from error
    rows = Gather()
    for row in _rows(document):
        rows.add(_numbers(row))
    return rows.log(path, "jsonl", tags, tuple(warnings))


def _rows(document: Any) -> list[dict[str, Any]]:
    """The rows of a document; none where it is something else."""
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list)}
        for key in _LISTS:
            if any(isinstance(row, dict) for row in lists.get(key, ())):
                return [row for row in lists[key] if isinstance(row, dict)]
        keys = [key for key, values in lists.items() if values]
        return [
            dict(zip(keys, row, strict=False))
            for row in zip(*(lists[k] for k in keys), strict=False)
        ]
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else []


def _numbers(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, by dotted path; null counts as absent."""
    for key, value in row.items():
        kind = type(value)
        if kind is float:
            yield before + key, value
        elif kind is int:
            yield before + key, float(value) if abs(value) < 2**1023 else math.inf
        elif kind is dict:
            yield from _numbers(value, f"{before}{key}.")
        elif kind is str and value in _SPELT:
            yield before + key, _SPELT[value]
