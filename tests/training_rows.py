"""Rows of metrics as the trainer writes them, with known values."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from slurmllm.core.run.rundir import RunDir

Row = dict[str, Any]


def make_row(step: int, attempt: int = 0, **changed: Any) -> Row:
    """A row of a smooth training run; the values depend on the step alone."""
    row: Row = {
        "step": step,
        "attempt": attempt,
        "loss": 4.0 + 6.0 * math.exp(-step / 30) + 0.05 * math.sin(2.3 * step),
        "grad_norm": 0.8 + 2.0 * math.exp(-step / 15) + 0.1 * math.sin(1.7 * step),
        "param_norm": 100.0 + 0.01 * step,
        "lr": 1e-3 * min(1.0, step / 10),
        "tokens": 4096 * step,
        "seq_per_s": 30.0,
        "tokens_per_s": 30.0 * 256,
        "step_time_s": 0.5,
        "data_wait_s": 0.001,
        "forward_backward_s": 0.4,
        "optimizer_s": 0.09,
        "time": 1.7e9 + 0.5 * step,
    }
    return row | changed


def make_rows(first: int, last: int, attempt: int = 0) -> list[Row]:
    return [make_row(step, attempt) for step in range(first, last + 1)]


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class MakeRun(Protocol):
    def __call__(self, name: str, *attempts: Iterable[Row]) -> RunDir: ...


class MakeFile(Protocol):
    def __call__(self, name: str, rows: Iterable[Row]) -> Path: ...
