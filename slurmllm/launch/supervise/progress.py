"""Progress of a trainer that is not ours: its steps, as its output or its files show them.

They become the attempt's metrics, with steps from 1; validation losses become events. A row's time
is that of the log if it is Unix time, else that of its arrival; rows that arrive together share the
time since the row before by their steps.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmllm.core.errors import RunError, UserError
from slurmllm.core.format import Json, printable
from slurmllm.core.metrics.curves import VAL_LOSS
from slurmllm.core.metrics.following import (
    FollowedOutput,
    MetricNames,
    follow,
    is_path,
    newest,
    no_match,
)
from slurmllm.core.metrics.log_series import Numbers
from slurmllm.core.metrics.row_reader import last_rows
from slurmllm.core.metrics.tags import PATTERN_EXAMPLE, check_pattern, find_format
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import open_append, os_error_text
from slurmllm.core.run.worker_files import EventLog

log = logging.getLogger(__name__)

_EARLIER_ROWS = 10_000  # of the attempt before, in which a step is looked for
_StepRow = tuple[int, Numbers]  # step and values
_AHEAD_S = 60.0  # that another node's clock may be ahead


def check_progress(setting: str) -> None:
    """Raise a ValueError if `progress` of a recipe is no format, pattern or path."""
    if "(?P<" in setting:
        try:
            check_pattern(setting, "progress")
        except UserError as error:
            raise ValueError(str(error)) from error
    elif not is_path(setting):
        find_format(setting)


class TrainerProgress:
    """A trainer's steps, written as the attempt's metrics.

    Attributes:
        step: The newest step that was read; None before the first.
        rows: Number of rows written.
        events: What happens apart from the steps.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        progress: str | None = None,
        devices: int = 1,
        rank: int = 0,
    ) -> None:
        """Begin before the workers do: what a file holds now is of earlier attempts.

        Args:
            progress: As in the recipe, `{run}` and others filled in; None: the output of `rank`.
            devices: By which a rate of one device is multiplied.
            rank: The worker whose output is fed.
        """
        self.step: int | None = None
        self.rows = 0
        self._progress = progress
        self._attempt = attempt
        self._source = follow(progress)
        self._names = MetricNames(Path(progress or "the output"), devices)
        self._fault = ""  # of reading the file
        self._bytes = 0
        self._tail = b""
        self._rank = rank
        self._began = time.time()
        self._last: _StepRow | None = None  # step and values of the last row
        self._evaluation: tuple[int, float] | None = None
        self._run = run
        self._path = run.metrics(attempt)
        self._offsets = Numbers()  # of counters that begin again with each attempt
        self.events = EventLog(run.events(attempt), attempt)
        self._unwritten = b""

    def feed(self, output: bytes) -> None:
        self._bytes += len(output)
        self._tail = output.rstrip()[-200:] or self._tail
        if isinstance(self._source, FollowedOutput):
            self._source.feed(output)

    def missing(self) -> str:
        """Return what is missing, and which `progress` would give it; empty if nothing is."""
        log_format = self._names.format
        if self.rows:
            if log_format is not None and log_format.counts != "steps":
                return f"{log_format.name} counts {log_format.counts}, not steps"
            if isinstance(self._source, FollowedOutput) and self._source.reader.numbered:
                return (
                    "no progress bar between the rows shows the step, they are numbered 1, 2, …: "
                    "give `progress` the trainer's trainer_state.json or event folder"
                )
            return ""
        problem = self._fault or self._names.problem
        if not problem and isinstance(self._source, FollowedOutput):
            kind = "is of a known format"
            if self._progress is not None:
                kind = f"matches '{self._progress}'"
            problem = (
                f"rank {self._rank} has printed {self._bytes:,} bytes, of which no line {kind}"
            )
            if self._tail:
                last = printable(self._tail.decode("utf-8", "replace").splitlines()[-1])
                problem += f", which ends with {last!r}"
        elif not problem and newest(path := Path(self._progress or "")) is None:
            problem = no_match(path)
        return (
            f"no steps: {problem or f'no new rows in {self._progress}'}; give `progress` a format "
            "that the trainer prints (torchtitan, Megatron-LM, …: docs/compare.md), a pattern such "
            f"as {PATTERN_EXAMPLE}, or the path of its JSON lines, CSV, trainer_state.json or "
            "event folder"
        )

    def update(self, last: bool = False) -> None:
        """Append the new rows to the metrics; the `last` time take what is incomplete too."""
        rows = []
        try:
            rows = self._source.read(last)
            self._fault = ""
        except (OSError, RunError) as error:  # being written, perhaps
            self._fault = os_error_text(error)
        if rows:
            first = self._names.format is None
            self._add(list(self._names.convert(rows, self._source.format)))
            rule = self._names.format
            if first and rule is not None and rule.steps_from == 0:
                log.info("%s counts %s from 0: metrics hold them from 1", rule.name, rule.counts)
        while self._unwritten:  # a full disk keeps it for the next time
            try:
                with os.fdopen(open_append(self._path), "ab", buffering=0) as stream:
                    # Not by the stream: for a full pipe it returns None, forever.
                    count = os.write(stream.fileno(), self._unwritten)
                    self._unwritten = self._unwritten[count:]
            except OSError:
                return

    def _add(self, rows: Sequence[_StepRow]) -> None:
        """Merge the values of each step, and append the rows that are new or have changed."""
        merged: list[_StepRow] = []
        before = self._last
        for step, values in rows:
            loss = values.get(VAL_LOSS)
            if loss is not None and (step, loss) != self._evaluation:
                self._evaluation = step, loss
                times = {"time": values["time"]} if self._is_of_run(values) else {}
                self.events.add("evaluation", step, values={"validation": loss}, **times)
            values = {name: value for name, value in values.items() if name != VAL_LOSS}
            if not values.keys() - {"time", "step_time_s"}:
                continue
            if merged and merged[-1][0] == step:
                merged[-1][1].update(values)
            elif not merged and before is not None and before[0] == step:
                old = before[1]
                if any(old.get(name) != value for name, value in values.items()):
                    merged.append((step, old | values))
            else:
                merged.append((step, values))
        now = time.time()
        end = merged[-1][0] if merged else 0
        for step, values in merged:
            self._append(step, values, now, end)

    def _append(self, step: int, values: Numbers, now: float, end: float) -> None:
        """Append a row of a batch that was read at `now`, and whose last step is `end`."""
        last = self._last
        begun, before = (last[1]["time"], last[0]) if last is not None else (now, step)
        repeats = last is not None and before == step
        if not (repeats or self._is_of_run(values)):
            share = (step - before) / (end - before) if before < step <= end else 1.0
            values["time"] = begun + (now - begun) * share
        taken = values.get("step_time_s", math.nan)
        if not 0 < taken < math.inf:
            values.pop("step_time_s", None)
            if step > before and values["time"] > begun:
                values["step_time_s"] = (values["time"] - begun) / (step - before)
        row: Json = {"step": step, "attempt": self._attempt}
        for name, value in values.items():
            if name in ("tokens", "samples"):
                if name not in self._offsets:
                    self._offsets[name] = self._count_before(name, step, value)
                value += self._offsets[name]
                if math.isnan(self._offsets[name]):
                    continue
            row[name] = value if math.isfinite(value) else None  # JSON has no NaN
            if name in ("tokens", "samples") and value % 1 == 0:
                row[name] = int(value)
        self._unwritten += json.dumps(row, separators=(",", ":")).encode() + b"\n"
        self._last = (step, values)
        self.step = step
        self.rows += 1

    def _count_before(self, name: str, step: int, value: float) -> float:
        """Return what a count that began again has left out; NaN if that is unknown."""
        paths = [path for path in self._run.metrics_files() if path != self._path]
        rows = last_rows(paths[-1], _EARLIER_ROWS) if paths else []
        counts = {row["step"]: row[name] for row in rows if row.get(name) and row["step"] <= step}
        if not value < max(counts.values(), default=0):
            return 0.0
        return float(counts.get(step, math.nan)) - value

    def _is_of_run(self, values: Numbers) -> bool:
        """Return whether the logged time is Unix time, by this attempt's."""
        # Another node's clock may be ahead.
        return self._began <= values.get("time", 0.0) <= time.time() + _AHEAD_S
