"""The divergence guard looks at each step after it is told and before it is saved."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from contextlib import suppress
from datetime import timedelta
from statistics import mean

from slurmllm.host_memory import Memory
from slurmllm.records import WorkerRecord
from slurmllm.train.hooks.base import Hook, StepEnd
from slurmllm.train.job import Job


class GuardHook(Hook):
    """Shows the gradient norm to `job.guard`; every worker has this hook."""

    def __init__(self, job: Job) -> None:
        self._guard = job.guard

    def after_step(self, moment: StepEnd) -> None:
        """Look at the step; what has diverged is not saved (collective where a save is due)."""
        self._guard.see(moment.row.step, moment.batch, moment.row.grad_norm)
        if moment.saving:
            self._guard.agree()


class MetricsHook(Hook):
    """Appends to `metrics/attempt_NNN.jsonl`."""

    def __init__(self, job: Job) -> None:
        path = job.run.metrics(job.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def after_step(self, moment: StepEnd) -> None:
        """Write and flush the row; make it durable before a checkpoint that leaves it behind."""
        self._stream.write(moment.row.model_dump_json(exclude_none=True) + "\n")
        self._stream.flush()
        if moment.saving:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._stream.close()


# After a start or a resume somebody looks whether it goes on well.
_FIRST_STEPS = 3


class ProgressHook(Hook):
    """Prints where training is; every `train.log_every` steps, the first ones and the last."""

    def __init__(self, job: Job) -> None:
        self._every = job.config.recipe.train.log_every
        self._last_step = job.last_step
        self._first_step = job.step + 1
        # Step times for the estimate; the first step compiles and tells nothing.
        self._step_times_s: deque[float] = deque(maxlen=50)

    def after_step(self, moment: StepEnd) -> None:
        """Print the line if it is time."""
        row = moment.row
        made = row.step - self._first_step + 1
        if made > 1:
            self._step_times_s.append(row.step_time_s)
        if made > _FIRST_STEPS and row.step % self._every and not moment.last:
            return
        print(
            f"step {row.step}/{self._last_step}  loss {row.loss:.4f}  "
            f"grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  {row.seq_per_s:.1f} seq/s  "
            f"{row.tokens_per_s:,.0f} tokens/s  eta {self._eta(row.step)}",
            flush=True,
        )

    def _eta(self, step: int) -> str:
        if not self._step_times_s:
            return "?"
        seconds = mean(self._step_times_s) * (self._last_step - step)
        return str(timedelta(seconds=round(seconds)))


class StartUpHook(Hook):
    """Writes `records.WorkerRecord` after the first step; on each node's first worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = False

    def after_step(self, moment: StepEnd) -> None:
        """Write the record, once."""
        if self._done:
            return
        self._done = True
        job, row = self._job, moment.row
        hits, misses = job.backend.graph_cache_counts()
        first_step_s = job.first_step_s or row.step_time_s
        WorkerRecord(
            rank=job.worker.rank,
            node=job.worker.node,
            start_up_s=row.time - row.step_time_s - job.started,
            first_step_s=first_step_s,
            cache_hits=hits,
            cache_misses=misses,
            resumed_from=job.resumed_from,
            skipped_checkpoints=job.skipped,
        ).save(job.run.attempt(job.stage, job.attempt).worker(job.worker.rank))
        job.say(f"graph cache: {hits} hits, {misses} misses; first step {first_step_s:.1f} s")


# The first step compiles and makes the optimizer's state; the second one may still compile.
_COUNTED_FROM = 2
_COUNTED_STEPS = 3


class MemoryHook(Hook):
    """Leaves a `memory` event; every worker has this hook, for any of them may need the most.

    The first is of steps alone, the second, where training ends, of saves as well.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first_step = job.first_step
        self._counted_from: int | None = None
        self._told = False

    def after_step(self, moment: StepEnd) -> None:
        """Begin to count, or tell (collective after some steps)."""
        step = moment.row.step
        if self._counted_from is None:
            if step >= self._first_step + _COUNTED_FROM and not moment.saving:
                self._read()
                self._counted_from = step
            return
        enough = moment.saving or step == self._counted_from + _COUNTED_STEPS
        if moment.leaving or (enough and not self._told):
            self._tell(step)
            self._told = True

    def _tell(self, step: int) -> None:
        """The worker that used most, and the least that one may use (collective)."""
        answers = dict(enumerate(self._job.backend.gather(self._read())))
        known = {rank: memory for rank, memory in answers.items() if memory is not None}
        if not known:
            return
        rank = max(known, key=lambda one: known[one].peak_bytes)
        peak = known[rank].peak_bytes
        limit = min(memory.limit_bytes for memory in known.values())
        beside = ", saves included" if self._told else ""
        self._job.events.add(
            "memory",
            step,
            message=f"rank {rank} used {peak / 1e9:.2f} of {limit / 1e9:.2f} GB at most{beside}",
            values={"peak_bytes": peak, "limit_bytes": limit, "rank": rank},
        )

    def _read(self) -> Memory | None:
        """What this worker used at most since the last call; None where nothing counts it."""
        with suppress(OSError, KeyError):  # not every sandbox's /proc has all
            return self._job.backend.memory()
        return None
