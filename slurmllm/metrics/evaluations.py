"""The evaluations of a run, from its events: losses on the texts of `eval`; without numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.metrics.row_reader import read_events
from slurmllm.run.records import Event
from slurmllm.run.rundir import RunDir


def read_evaluations(run: RunDir, files: Iterable[Path]) -> dict[int, Event]:
    """Return the evaluation of each step, of the latest attempt that made one.

    Args:
        files: The metrics files of the attempts, oldest first.

    Raises:
        RunError: a file cannot be read.
    """
    evaluations = {}
    for path in files:
        for event in read_events(run, int(path.stem.removeprefix("attempt_"))):
            if event.kind == "evaluation":
                evaluations[event.step] = event
    return evaluations


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
