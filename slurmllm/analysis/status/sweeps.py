"""The state of a sweep, and the order of its runs by their loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmllm.analysis.status.runs import RunState, run_states
from slurmllm.core.format import format_plural
from slurmllm.core.metrics.row_reader import json_number, last_rows, read_error
from slurmllm.core.run.records import JobsRecord, SweepRecord, runs_of
from slurmllm.core.run.rundir import RunDir, SweepDir
from slurmllm.core.slurm.client import SlurmClient

LAST_PART = 0.1  # of the steps, whose mean loss ranks a run
_MOST_ROWS = 1000


@dataclass(frozen=True)
class SweepState:
    """The current state of a sweep."""

    sweep: SweepDir
    record: SweepRecord
    runs: Sequence[RunState]  # in the order of the cases, without those that were removed
    precompile_jobs: dict[str, str | None]  # run that compiles graphs for them → its job
    precompile_hours: float  # node hours of these

    @property
    def summary(self) -> str:
        states = Counter(state.state for state in self.runs)
        limit = f", {self.record.max_running} at a time" if self.record.max_running else ""
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{format_plural(len(self.runs), 'run')}{limit}: {counts}"

    def to_json(self) -> dict[str, Any]:
        hours = [self.precompile_hours, *(state.node_hours for state in self.runs)]
        return {
            "sweep": self.sweep.name,
            "sweep_dir": str(self.sweep.path),
            "recipe": self.record.recipe,
            "max_running": self.record.max_running,
            "states": Counter(state.state for state in self.runs),
            "precompile_jobs": self.precompile_jobs,
            "precompile_node_hours": self.precompile_hours,
            "node_hours": math.fsum(hours),
        }


@dataclass(frozen=True)
class RankedRun:
    """A run of a sweep with the loss that ranks it."""

    state: RunState
    values: dict[str, str]  # dotted path → value, as given
    # Mean over the last tenth of the steps; None if the run has made none, or it is not finite.
    loss: float | None

    def to_json(self) -> dict[str, Any]:
        fields = ("state", "reason", "step", "steps", "seq_per_s", "node_hours", "usd", "restarts")
        return {
            "run": self.state.name,
            "run_dir": self.state.run_dir,
            "values": self.values,
            "loss": self.loss,
            "last_loss": self.state.loss,
            **{name: getattr(self.state, name) for name in fields},
        }


def read_sweep(sweep: SweepDir, client: SlurmClient) -> SweepState:
    """Read the state of a sweep; raises StorageError if its record is damaged."""
    record = SweepRecord.load(sweep.record)
    runs, compiling = runs_of(sweep, record), sweep.graph_runs()
    submissions = {run.name: JobsRecord.of(run).last for run in compiling}
    jobs = {name: last.precompile_job if last else None for name, last in submissions.items()}
    states = run_states([*runs, *compiling], client)
    hours = math.fsum(state.node_hours for state in states[len(runs) :])
    return SweepState(sweep, record, states[: len(runs)], jobs, hours)


def rank(state: SweepState) -> list[RankedRun]:
    """Return the runs of a sweep: those that are done, then the others, each by loss."""
    values = {case.run: case.values for case in state.record.cases}
    runs = [RankedRun(run, values[run.name], _final_loss(run)) for run in state.runs]
    return sorted(runs, key=lambda r: (r.loss is None, r.state.state != "done", r.loss or 0.0))


def _final_loss(state: RunState) -> float | None:
    losses: dict[int, float] = {}
    run = RunDir(Path(state.run_dir))
    try:
        for path in reversed(run.metrics_files()):
            first = min(losses, default=math.inf)  # a later attempt has recomputed what follows
            losses |= {
                row["step"]: loss
                for row in last_rows(path, _MOST_ROWS)
                if row["step"] < first and (loss := json_number(row.get("loss", ""))) is not None
            }
            if len(losses) >= _MOST_ROWS:
                break
    except OSError as error:
        raise read_error(run.path, error) from error
    last = max(losses, default=0)
    used = [loss for step, loss in losses.items() if step > last * (1 - LAST_PART)]
    mean = math.fsum(used) / len(used) if used else math.nan
    return mean if math.isfinite(mean) else None
