"""One run with its failures: injected at their moments, undone later."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from _chaos.bench import Bench, read_json
from _chaos.injections import Impossible, Undo, Unsupported, inject
from _chaos.plan import Failure
from _chaos.watching import RunFiles

POLL_S = 0.02
QUEUE_S = 1.5  # interval between queries of Slurm
LOST_S = 15.0  # out of the queue with an open record
PATIENCE_S = 60.0  # for a moment to come; then the failure is injected anyway


@dataclass
class Injected:
    """A failure that was injected, or could not be."""

    failure: Failure
    attempt: int  # the one that it hit
    at: float  # Unix time, s
    step: int  # the run's newest one at that time
    victim: str  # or the reason why the injection was impossible
    happened: bool = True
    unsupported: bool = False  # this machine cannot have it


@dataclass
class Course:
    """The course of a run."""

    job: str  # of its training
    ended: str = "late"  # `finished`, `lost` (Slurm no longer has the job) or `late`
    seconds: float = 0.0  # from the submission to the end
    injected: list[Injected] = field(default_factory=list)


class Running:
    """A run in progress, with the failures of its plan."""

    def __init__(self, bench: Bench, name: str, plan: Sequence[Failure]) -> None:
        self.bench, self.plan = bench, list(plan)
        self.files = RunFiles(bench.runs / name)
        self._undo: list[tuple[float, Undo]] = []
        self._undoing: list[subprocess.Popen[bytes]] = []
        self._came: float | None = None  # time of the moment of the next failure
        self._waiting_since = 0.0
        self._ready = False  # the failure before was undone or is over
        has_clock = any(failure.kind == "clock_jump" for failure in plan)
        self.course = Course(bench.submit(name, bench.cluster.clock_env() if has_clock else {}))

    def to_end(self) -> Course:
        began = asked = time.monotonic()
        gone_since: float | None = None
        while (now := time.monotonic()) - began < self.bench.setup.limit_s:
            self._undo_due(now)
            if self.plan and self._due(now):
                self._inject(self.plan.pop(0))
                self._came, self._waiting_since = None, now
            if now - asked > QUEUE_S:
                asked = now
                if self._finished():
                    self.course.ended = "finished"
                    break
                queued = self.bench.in_queue(self._job())
                gone_since = (gone_since or now) if queued is False else None
                if gone_since is not None and now - gone_since > LOST_S:
                    self.course.ended = "lost"
                    break
            time.sleep(POLL_S)
        self.course.seconds = time.monotonic() - began
        self._undo_due(None)
        return self.course

    def _job(self) -> str:
        """The run's train job: after the loss of a node, it may be another one."""
        jobs = read_json(self.files.run.jobs)
        return str(jobs["submissions"][-1]["train_job"]) if jobs else self.course.job

    def _finished(self) -> bool:
        record = self.files.record(self.files.attempt())
        return record.get("action") in ("finish", "stop")

    def _undo_due(self, now: float | None) -> None:
        """Undo the failures that are due; None: all of them, and wait."""
        for due, undo in list(self._undo):
            if now is None or now >= due:
                self._undo.remove((due, undo))
                if (undoing := undo()) is not None:
                    self._undoing.append(undoing)
        if now is None:
            for undoing in self._undoing:
                undoing.wait()

    def _due(self, now: float) -> bool:
        """Whether the moment of the next failure has come, and its delay has passed."""
        failure = self.plan[0]
        if self._came is None:
            waited = self._waiting_since and now - self._waiting_since > PATIENCE_S
            if not (waited or self._moment(failure)):
                return False
            self._came = now
        return now - self._came >= failure.delay_s

    def _moment(self, failure: Failure) -> bool:
        files, attempt = self.files, self.files.attempt()
        hit = self.course.injected[-1].attempt if self.course.injected else -1
        if failure.moment == "requeueing":
            return attempt > hit or files.record(attempt).get("ended_at") is not None
        if failure.moment == "recovering":
            return attempt > hit
        if failure.moment == "starting":
            return attempt > hit and files.workers_started(attempt)
        if files.last_step(attempt) < failure.step:
            return False
        return failure.moment == "stepping" or files.saving()

    def _inject(self, failure: Failure) -> None:
        attempt = self.files.attempt()
        done = Injected(failure, attempt, time.time(), self.files.last_step(attempt), "")
        try:
            done.victim, undo = inject(self.bench, self.files, self._job(), failure)
        except Impossible as why:
            done.victim, done.happened, undo = str(why), False, None
            done.unsupported = isinstance(why, Unsupported)
        self.course.injected.append(done)
        if undo is not None:
            self._undo.append((time.monotonic() + failure.lasts_s, undo))
