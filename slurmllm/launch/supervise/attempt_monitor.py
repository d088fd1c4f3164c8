"""Monitoring of an attempt's launchers: signals passed on, deadlines, hangs, newer attempts."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

from slurmllm.core.config.operation import leaving_s
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmllmError, StorageError
from slurmllm.core.format import format_names
from slurmllm.core.run.records import AttemptRecord, HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.core.slurm.error_texts import Processes
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.classify import (
    exit_codes,
    failed_workers,
    is_echo,
    unreported_nodes,
)
from slurmllm.launch.supervise.notify import Notifier
from slurmllm.launch.supervise.resume_check import ResumeCheck
from slurmllm.launch.supervise.slow_ranks import SlowRanks
from slurmllm.launch.supervise.watchdog import LOOK_S, Watchdog

POLL_S = 0.1
REPEAT_SIGNAL_S = 5.0
SAVE_SHARE = 5 / 6  # of KillWait; the rest is to record the end before Slurm kills this process
# From the first failure to the end of the remaining launchers: if the cause is known, if all nodes
# but one unresponsive one have reported, and otherwise.
CLEAR_GRACE_S = 3.0
REPORTED_GRACE_S = 2.5
LAUNCHER_GRACE_S = 20.0
HANG_GRACE_S = 60.0  # for launchers to notice the hang and dump stacks: NFS caches directories

log = logging.getLogger(__name__)


@dataclass
class StopSignals:
    """Records the first stop signal and time.monotonic() of its arrival."""

    name: str | None = None
    received_at: float = 0.0

    def install(self) -> None:
        def on_signal(number: int, frame: object) -> None:
            if self.name is None:
                self.received_at = time.monotonic()
                self.name = signal.Signals(number).name

        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)


@dataclass
class Observations:
    """What the monitor observed while the launchers ran."""

    failed_first: bool = False  # before any stop signal: a later signal is Slurm's clean-up
    overran_s: float | None = None  # from the stop signal to the workers' forced end, if forced
    hang: HangRecord | None = None
    superseded_by: int | None = None
    unwritable: str | None = None  # why the run directory could not be written
    first_symptom_at: float | None = None  # Unix time of the first sign of the end
    launchers_s: float = 0.0  # from the launchers' start to their end


@dataclass
class AttemptMonitor:
    """Waits for one attempt's launchers, or for the srun that started them."""

    run: RunDir
    record: AttemptRecord
    config: RunConfig
    launchers: Processes
    stop: StopSignals
    notifier: Notifier
    resume_check: ResumeCheck | None = None
    kill_wait_s: float = math.inf
    observed: Observations = field(default_factory=Observations)
    _failed_at: float | None = None
    _grace_s: float = LAUNCHER_GRACE_S
    _next_failures_look: float = 0.0
    _nodes: dict[str, NodeRecord] = field(default_factory=dict)
    _kill_at: float | None = None
    _refused: bool = False  # whether the shared file system has refused a look

    def __post_init__(self) -> None:
        limits = self.config.recipe.watchdog
        self._watchdog: Watchdog | None = None
        if self.record.stage == "train" and limits.enabled:
            reporting = None
            if (command := self.config.recipe.command) is not None:
                from slurmllm.core.metrics.following import printing_rank  # only such runs need it

                reporting = [printing_rank(command.progress, self.record.world_size)]
            self._watchdog = Watchdog(self.run, self.record, limits, reporting)
        self._slow_ranks = SlowRanks(self.run, self.record, limits.window_s)

    def wait(self) -> Observations:
        recipe = self.config.recipe
        stop = self.stop
        leaves_within_s = leaving_s(recipe.slurm.signal_lead_s)
        look_s = min(LOOK_S, max(recipe.watchdog.min_step_s / 4, 0.25))
        started = time.monotonic()
        next_look = started + look_s
        signalled_at = -REPEAT_SIGNAL_S
        while any(launcher.poll() is None for launcher in self.launchers):
            now = time.monotonic()
            stop_signal = stop.name  # read before its time: a signal may come at any point
            stopping_s = now - stop.received_at
            # Repeated: launchers and workers ignore it until their handlers are installed.
            if stop_signal is not None and now - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = now
                self._note_symptom(stopping_s)
                self._send(signal.SIGUSR2)  # srun forwards it to the launchers
            with self._tolerating():
                self._check_failures(now)
            # The time limit or Slurm's SIGKILL is near, and the workers have not saved and left.
            limit_s = leaves_within_s
            if stop_signal == "SIGTERM":
                limit_s = min(limit_s, SAVE_SHARE * self.kill_wait_s)
            limited = stop_signal is not None and self.record.job_id is not None
            if limited and stopping_s > limit_s and self.observed.overran_s is None:
                self.observed.overran_s = stopping_s
                self._kill_at = now
            if now >= next_look:
                next_look = now + look_s
                with self._tolerating():
                    # One call instead of a listing: attempts are numbered without gaps.
                    if self.run.attempt(self.record.stage, self.record.attempt + 1).path.is_dir():
                        self._look_for_newer(now)
                with self._tolerating():
                    self._look(now)
            if self._kill_at is not None and now >= self._kill_at:
                self._send(signal.SIGKILL)
            time.sleep(POLL_S)
        self.observed.launchers_s = time.monotonic() - started
        # The launchers may have noticed a newer attempt before this process did.
        self._look_for_newer(time.monotonic())
        return self.observed

    def _send(self, number: signal.Signals) -> None:
        for launcher in self.launchers:
            if launcher.poll() is not None:
                continue
            below = []
            # A killed launcher can no longer end what another project's workers started.
            if number == signal.SIGKILL and not self.config.recipe.worker.has_model:
                with suppress(psutil.Error):
                    below = psutil.Process(launcher.pid).children(recursive=True)
            launcher.send_signal(number)
            for process in below:
                with suppress(psutil.Error):
                    process.kill()

    def _check_failures(self, now: float) -> None:
        """After the first failure, give the other launchers a grace period."""
        look = now >= self._next_failures_look
        if look:
            self._next_failures_look = now + 0.5
        if self._failed_at is None:
            # The folder appears with the first failure record: one look at the shared file system
            # for any number of nodes. The peers of a worker that was killed record failures too.
            folder = self.record.files(self.run).failure(0).parent
            failed = any(launcher.poll() for launcher in self.launchers)
            if not failed and not (look and folder.is_dir()):
                return
            self._failed_at = now
            look = True
            self._note_symptom()
            self.observed.failed_first = self.stop.name is None
        if look:
            self._grace_s = self._grace()
        # Never later than a deadline that has passed already.
        if now - self._failed_at > self._grace_s:
            self._kill_at = min(now, self._kill_at or now)

    def _grace(self) -> float:
        """Seconds from the first failure to the end of the other launchers."""
        if self.record.stage == "precompile":
            return LAUNCHER_GRACE_S  # the other nodes submit the graphs that they have
        try:
            # The record of a node whose workers have all ended changes no more.
            unreported = unreported_nodes(self.record.nodes, self._nodes)
            self._nodes |= attempts.node_records(self.run, self.record, unreported)
            failures = attempts.failure_records(self.run, self.record)
            nodes = self._nodes
        except SlurmllmError:
            return LAUNCHER_GRACE_S
        # A node with a failure record is alive: its launcher waits for its other workers.
        alive = {failure.node for failure in failures}
        alive |= {name for name, node in nodes.items() if node.exit_codes}
        pending = unreported_nodes(self.record.nodes, nodes)
        all_reported = not pending or (len(pending) == 1 and pending[0] not in alive)
        if self.observed.hang is not None:  # the cause is known, but stacks take time
            return REPORTED_GRACE_S if all_reported else HANG_GRACE_S
        if StorageError.exit_code in exit_codes(nodes):
            return LAUNCHER_GRACE_S  # the others' records may be late or never written
        killed = any(worker.code < 0 for worker in failed_workers(nodes))
        if killed or not all(map(is_echo, failures)):
            return CLEAR_GRACE_S
        return REPORTED_GRACE_S if all_reported else LAUNCHER_GRACE_S

    def _look_for_newer(self, now: float) -> None:
        newer = attempts.newer_attempt(self.run, self.record.stage, self.record.attempt)
        if newer is not None and self.observed.superseded_by is None:
            self.observed.superseded_by = newer
            self._note_symptom()
            self._kill_at = now

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Go on while the shared file system refuses; the first refusal is logged."""
        try:
            yield
        except OSError as error:
            if not self._refused:
                log.warning("the run directory cannot be read: %s; retrying", os_error_text(error))
            self._refused = True

    def _look(self, now: float) -> None:
        ending = self._failed_at is not None or self._kill_at is not None
        attempt = self.record.attempt
        if not ending and self.resume_check is not None and (fault := self.resume_check.look()):
            self._note_symptom()
            self._kill_at = now
            log.warning("train attempt %d: %s: ending it", attempt, fault)
            return
        if self._watchdog is None or ending:
            return
        hang = self._watchdog.look()
        if hang is None:
            if slow := self._slow_ranks.update(self._watchdog.phases):
                line = format_names([rank.text(time.time()) for rank in slow])
                log.warning("train attempt %d: %s", attempt, line)
                self.notifier.send("slow_rank", self.record, line)
            return
        self._note_symptom(hang.waited_s)
        try:
            hang.save(self.record.files(self.run).hang)
        except StorageError as error:
            # A full disk stops heartbeats and failure records too: it is the cause, not a hang.
            self.observed.unwritable = str(error)
            self._kill_at = now + LAUNCHER_GRACE_S
            log.error("train attempt %d: %s", attempt, error)
            return
        self.observed.hang = hang
        self._kill_at = now + HANG_GRACE_S
        log.warning(
            f"train attempt {attempt}: no progress for {hang.waited_s:.0f} s after "
            f"step {hang.step} (limit {hang.limit_s:.0f} s): dumping stacks, then ending it"
        )

    def _note_symptom(self, ago_s: float = 0.0) -> None:
        if self.observed.first_symptom_at is None:
            self.observed.first_symptom_at = time.time() - ago_s
