"""How long the start took and what the graph cache did, known after the first step."""

from __future__ import annotations

from slurmllm.records import WorkerRecord
from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job


class StartUpHook(Hook):
    """Writes `records.WorkerRecord` after the first step; on each node's first worker."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = False

    def after_step(self, moment: Moment) -> None:
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
