"""torch.profiler's traces of the steps of `profile.steps`, on the workers of `profile.ranks`."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from slurmllm.core.run.worker_files import diagnostic
from slurmllm.train.backends.native.device import Device
from slurmllm.train.hooks import Hook
from slurmllm.train.job import Job

log = logging.getLogger(__name__)

_PREFIX = "slurmllm."  # of the names of our annotations
_MEMORY_EVENTS = 200_000  # allocations and frees of a snapshot, the newest


class ProfilingHook(Hook):
    """A profiler from the first profiled step to the last, after which its files are written.

    On every worker, because all of them begin the first profiled step together: otherwise those
    that do not start a profiler would seem to wait for those that do.
    """

    _begun = False
    _profiler: profile | None = None
    _step: Any = None

    def __init__(self, job: Job) -> None:
        config = job.config.recipe.profile
        assert config.steps is not None
        self._job = job
        self._memory = config.memory
        self._first, self._last = config.steps
        self._is_profiled = job.worker.rank in config.ranks
        self._device = job.backend.worker_device or Device()

    def before_step(self, step: int) -> None:
        """Start or stop the profiler, and annotate the step (collective before the first)."""
        inside = self._first <= step <= self._last
        self._end_step(last=not inside)
        if inside and not self._begun:
            self._begun = True
            if self._is_profiled:
                with diagnostic("the profiler", self._drop):
                    self._start()
            self._job.control.barrier()
        if self._profiler is None:
            return
        if not inside:
            self._finish()
            return
        self._step = record_function(f"{_PREFIX}step {step}")
        self._step.__enter__()

    def close(self) -> None:
        """Write the profile of fewer steps; not after an error, as peers may be lost."""
        if self._profiler is not None and sys.exc_info()[0] is None:
            self._end_step(last=True)
            self._finish()

    def _start(self) -> None:
        device = self._device
        device.synchronize()  # its work of earlier steps is not in the trace
        if self._memory and device.memory_history:
            device.memory_history._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profiler = profile(
            activities={ProfilerActivity.CPU, device.activity},
            profile_memory=self._memory and not device.memory_history,
        )
        self._profiler.start()
        self._job.backend.part = lambda name: record_function(_PREFIX + name)

    def _drop(self) -> None:
        self._profiler = None
        vars(self._job.backend).pop("part", None)  # the class's annotates nothing

    def _end_step(self, *, last: bool) -> None:
        if self._step is None:
            return
        if last:
            self._device.synchronize()  # ends with its work; the host runs ahead of it
        self._step.__exit__(None, None, None)
        self._step = None

    def _finish(self) -> None:
        """Write trace and snapshot; what cannot be written does not end the training."""
        job = self._job
        profiler = self._profiler
        assert profiler is not None
        self._drop()
        job.phases.begin("saving", job.step)  # peers wait meanwhile
        began = time.monotonic()
        rank = job.worker.rank
        trace = job.run.trace(job.attempt, rank)
        with diagnostic(f"the profile of rank {rank}"):
            profiler.stop()
            trace.parent.mkdir(parents=True, exist_ok=True)
            if self._memory and (history := self._device.memory_history):
                history._dump_snapshot(str(job.run.memory_snapshot(job.attempt, rank)))
                history._record_memory_history(enabled=None)
            profiler.export_chrome_trace(str(trace))
            log.info("profile written in %.1f s: %s", time.monotonic() - began, trace)
