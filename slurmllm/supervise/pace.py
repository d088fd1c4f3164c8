"""How fast a run trains now, steadily: from its recent steps, not from the last one alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slurmllm.analysis.reading.events import read_events
from slurmllm.errors import RunError
from slurmllm.records import AttemptRecord
from slurmllm.rundir import RunDir

RECENT = 100  # steps
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Pace:
    """The pace of a run's recent steps.

    Attributes:
        step_s: Median of their seconds.
        seq_per_s: Median of their rates; None where the rows have none.
        saves_s: Seconds a step that training waited for saves, over the attempt.
    """

    step_s: float
    seq_per_s: float | None
    saves_s: float

    def seconds(self, steps: int) -> float:
        """How long so many steps take, saves included and restarts not."""
        return steps * (self.step_s + self.saves_s)


def pace(run: RunDir, attempts: Sequence[AttemptRecord]) -> Pace | None:
    """The pace of the newest attempt that has made steps on as many workers as the last one.

    The first step of an attempt compiles and counts for nothing.

    Args:
        run: The run.
        attempts: Its train attempts, oldest first.

    Returns:
        None where there is no such step.
    """
    known = {attempt.attempt: attempt for attempt in attempts}
    for path in reversed(run.metrics_files()):
        number = int(path.stem.removeprefix("attempt_"))
        attempt = known.get(number)
        if attempt is not None and attempt.world_size != attempts[-1].world_size:
            continue
        rows = _recent(path)
        if not rows:
            continue
        rates = [rate for row in rows if (rate := number_of(row, "seq_per_s")) is not None]
        return Pace(
            step_s=median(row["step_time_s"] for row in rows),
            seq_per_s=median(rates) if rates else None,
            saves_s=_saves_s(run, number, rows[-1]["step"], attempt),
        )
    return None


def number_of(row: dict[str, Any], name: str) -> float | None:
    """A finite number of a row; None where it is absent or none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _recent(path: Path) -> list[dict[str, Any]]:
    """The last rows of a metrics file, oldest first, without the attempt's first."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            # The first line is the attempt's first, or cut.
            lines = stream.read().split(b"\n")[1:]
    except OSError:
        return []
    rows = []
    for line in lines[-RECENT - 1 :]:  # the last one is empty or cut
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and type(row.get("step")) is int
                and number_of(row, "step_time_s") is not None
            ):
                rows.append(row)
    return rows


def _saves_s(run: RunDir, number: int, step: int, attempt: AttemptRecord | None) -> float:
    made = step - ((attempt.checkpoint_before or 0) if attempt is not None else 0)
    with suppress(RunError):
        waited = [e.waited_s or 0.0 for e in read_events(run, number) if e.kind == "save"]
        return math.fsum(waited) / max(made, 1)
    return 0.0
