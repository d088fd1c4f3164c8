"""How much memory the workers' steps take: read twice an attempt, for reading slows a step."""

from __future__ import annotations

from contextlib import suppress

from slurmllm.backends.base import Memory
from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job

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

    def after_step(self, moment: Moment) -> None:
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
