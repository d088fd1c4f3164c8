"""Hooks that check, record or log a step: guard, metrics, progress, start-up and memory."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean

from slurmllm.core.errors import StorageError
from slurmllm.core.metrics.step_time import step_rates
from slurmllm.core.run.host_memory import Memory
from slurmllm.core.run.records import WorkerRecord
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.train.hooks import Hook, StepEnd
from slurmllm.train.job import Job

log = logging.getLogger(__name__)

_FIRST_STEPS = 3  # logged after each start: users look whether training continues well
# The first step compiles and allocates the optimizer state; the second one may still compile.
_MEMORY_FROM = 2
_MEMORY_STEPS = 3


@dataclass
class GuardHook(Hook):
    """The check of the gradient norm by `job.guard`; on every worker."""

    job: Job

    def after_step(self, end: StepEnd) -> None:
        """Check the step; a diverged step is neither evaluated nor saved (collective if due)."""
        self.job.guard.check_norm(end.row.step, end.batch, end.row.grad_norm)
        if end.saving or end.evaluating:
            self.job.decide()


class MetricsHook(Hook):
    """The lines of `metrics/attempt_NNN.jsonl`."""

    def __init__(self, job: Job) -> None:
        self._path = job.run.metrics(job.attempt)
        self._stream = os.fdopen(open_append(self._path), "a", encoding="utf-8")

    def after_step(self, end: StepEnd) -> None:
        self._stream.write(end.row.model_dump_json(exclude_none=True) + "\n")
        self._stream.flush()
        # A resume from this checkpoint needs its rows; a stop may cut an evaluation short, to save.
        if end.saving or end.evaluating:
            os.fsync(self._stream.fileno())
            if os.fstat(self._stream.fileno()).st_nlink == 0:
                raise StorageError(f"{self._path} was removed; leave a run's metrics in place")

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()


class ProgressHook(Hook):
    """Progress in the log every `train.log_every` steps, at the first steps and at the last.

    Its rates are means over the steps since the line before.
    """

    def __init__(self, job: Job) -> None:
        recipe = job.config.recipe
        self._every = recipe.train.log_every
        self._sizes = recipe.train.global_batch, recipe.model.seq_len
        self._since_line_s: list[float] = []  # times of the steps since the last line
        self._last_step = job.last_step
        self._first_step = job.step + 1
        self._step_times_s: deque[float] = deque(maxlen=50)

    def after_step(self, end: StepEnd) -> None:
        row = end.row
        steps = row.step - self._first_step + 1
        self._since_line_s.append(row.step_time_s)
        if steps > 1:  # the first step compiles and would distort the estimate
            self._step_times_s.append(row.step_time_s)
        if steps > _FIRST_STEPS and row.step % self._every and not end.last:
            return
        eta = "?"
        if self._step_times_s:
            seconds = mean(self._step_times_s) * (self._last_step - row.step)
            eta = str(timedelta(seconds=round(seconds)))
        rates = step_rates(mean(self._since_line_s), *self._sizes)
        self._since_line_s.clear()
        # `metrics.text_logs` reads this line.
        log.info(
            f"step {row.step}/{self._last_step}  loss {row.loss:.4f}  "
            f"grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  {rates.seq_per_s:.1f} seq/s  "
            f"{rates.tokens_per_s:,.0f} tokens/s  eta {eta}"
        )


@dataclass
class StartUpHook(Hook):
    """A `records.WorkerRecord` after the first step; on the first worker of each node."""

    job: Job
    _written: bool = False

    def after_step(self, end: StepEnd) -> None:
        if self._written:
            return
        self._written = True
        job = self.job
        row = end.row
        start = job.start
        hits, misses = job.backend.graph_cache_counts()
        first_step_s = start.first_step_s or row.step_time_s
        record = WorkerRecord(
            rank=job.worker.rank,
            node=job.worker.node,
            start_up_s=row.time - row.step_time_s - start.started,
            first_step_s=first_step_s,
            cache_hits=hits,
            cache_misses=misses,
            resumed_from=start.resumed_from,
            skipped_checkpoints=start.skipped,
        )
        with diagnostic("the record of the start-up"):
            record.save(job.run.attempt(job.stage, job.attempt).worker(job.worker.rank))
        log.info("graph cache: %d hits, %d misses; first step %.1f s", hits, misses, first_step_s)


@dataclass
class MemoryHook(Hook):
    """The `memory` events; on every worker, because any of them may use the most.

    The first event is for steps without a save, the second one, at the end, for saves as well.
    """

    job: Job
    _measured_from: int | None = None
    _recorded: bool = False

    def after_step(self, end: StepEnd) -> None:
        """Start the measurement, or record it (collective after some steps)."""
        step = end.row.step
        if self._measured_from is None:
            if step >= self.job.first_step + _MEMORY_FROM and not end.saving:
                self._read()  # resets the peak
                self._measured_from = step
            return
        enough = end.saving or step == self._measured_from + _MEMORY_STEPS
        if not end.leaving and (self._recorded or not enough):
            return
        saves = ", saves included" if self._recorded else ""
        self._recorded = True
        memory = self._read() or Memory(-1, 0)
        control = self.job.control
        (peak,) = control.all_reduce([memory.peak_bytes], "max")
        has_most = memory.peak_bytes == peak
        rank, limit = control.all_reduce(
            [control.rank if has_most else math.inf, memory.limit_bytes or math.inf], "min"
        )
        if peak < 0:  # no worker's system reports it
            return
        self.job.events.add(
            "memory",
            step,
            message=f"rank {rank} used {peak / 1e9:.2f} of {limit / 1e9:.2f} GB at most{saves}",
            values={"peak_bytes": peak, "limit_bytes": limit, "rank": rank},
        )

    def _read(self) -> Memory | None:
        """Return this worker's peak since the last call; None if the system does not report it."""
        with diagnostic("the memory in use"):  # a sandbox's /proc may lack some
            return self.job.backend.memory()
        return None
