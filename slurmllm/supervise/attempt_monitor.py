"""From the launchers' start to their end: signals passed on, deadlines kept, hangs found.

What it sees on the way, the supervisor needs to name the ending.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from slurmllm.config.recipe import leaving_s
from slurmllm.config.resolve import RunConfig
from slurmllm.error_patterns import meaning_of
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.records import AttemptRecord, HangRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise import attempts
from slurmllm.supervise.classify import reported_all
from slurmllm.supervise.watchdog import LOOK_S, Watchdog

POLL_S = 0.1
REPEAT_SIGNAL_S = 5.0
# From the first failure to the end of launchers that have not left: where the cause is known,
# where all nodes but one that gives no sign have reported, and where neither is so.
CLEAR_GRACE_S, REPORTED_GRACE_S, LAUNCHER_GRACE_S = 3.0, 2.5, 20.0
GRACE_LOOK_S = 0.5
HANG_GRACE_S = 60.0  # for launchers to see that they are to take stacks: NFS caches directories


class StopSignals:
    """The wish that the attempt ends: the first signal, and when it came.

    Attributes:
        name: The signal; None: nobody has asked.
        at: time.monotonic() at which it came.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.at = 0.0

    def install(self) -> None:
        """Take signals as wishes, from now on."""
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self.at = signal.Signals(number).name, time.monotonic()


@dataclass
class Outcome:
    """What was seen while the launchers ran.

    Attributes:
        failed_first: Whether somebody failed before a stop was asked for: a signal after that is
            Slurm cleaning up.
        overran_s: Seconds from the stop signal to the end, where the workers had to be ended.
        hang: What the watchdog found.
        superseded_by: The newer attempt of another supervisor.
        unwritable: Why the run directory could not be written, when it was tried.
        sign_at: Unix time of the first sign of the end.
    """

    failed_first: bool = False
    overran_s: float | None = None
    hang: HangRecord | None = None
    superseded_by: int | None = None
    unwritable: str | None = None
    sign_at: float | None = None


def newer_attempt(run: RunDir, stage: Stage, number: int) -> int | None:
    """An attempt that another supervisor has begun since, if there is one."""
    try:
        newest = max((attempt.number for attempt in run.attempts(stage)), default=number)
    except OSError:
        return None
    return newest if newest > number else None


class AttemptMonitor:
    """One attempt's launchers, until all of them have ended.

    Args:
        run: The run.
        record: The attempt.
        config: The run's configuration.
        launchers: Their processes, or srun's.
        stop: The wish to stop.
        job_limited: Whether Slurm ends the job at its time limit.
    """

    def __init__(
        self,
        run: RunDir,
        record: AttemptRecord,
        config: RunConfig,
        launchers: Sequence[subprocess.Popen[bytes]],
        stop: StopSignals,
        job_limited: bool,
    ) -> None:
        self._run, self._record, self._launchers, self._stop = run, record, launchers, stop
        self._lead_s = config.recipe.slurm.signal_lead_s
        self._job_limited = job_limited
        watched = config.recipe.watchdog
        self._watchdog: Watchdog | None = None
        if record.stage == "train" and watched.enabled:
            self._watchdog = Watchdog(run, record, watched)
        self._look_s = min(LOOK_S, max(watched.min_step_s / 4, 0.25))
        self._next_look = time.monotonic() + self._look_s
        self._failed_at: float | None = None
        self._grace_s, self._next_grace_look = LAUNCHER_GRACE_S, 0.0
        self._kill_at: float | None = None
        self.outcome = Outcome()

    def to_the_end(self) -> Outcome:
        """Wait for the launchers."""
        signalled_at = -REPEAT_SIGNAL_S
        while any(launcher.poll() is None for launcher in self._launchers):
            now = time.monotonic()
            if self._stop.name is not None and now - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = now
                self._sign(now - self._stop.at)
                send(self._launchers, signal.SIGUSR2)  # srun passes it on to the launchers
            self._keep_grace(now)
            if self._past_deadline(now):
                self.outcome.overran_s = now - self._stop.at
                self._kill_at = now
            if now >= self._next_look:
                self._next_look = now + self._look_s
                self._look(now)
            if self._kill_at is not None and now >= self._kill_at:
                send(self._launchers, signal.SIGKILL)
            time.sleep(POLL_S)
        # The launchers may have seen another supervisor's attempt before this process looked.
        self._look_for_newer(time.monotonic())
        return self.outcome

    def _keep_grace(self, now: float) -> None:
        """Give the others some time after the first failure."""
        if self._failed_at is None:
            if not self._failed():
                return
            self._failed_at = now
            self._sign()
            self.outcome.failed_first = self._stop.name is None
        if now >= self._next_grace_look:
            self._next_grace_look = now + GRACE_LOOK_S
            self._grace_s = self._grace()
        if now - self._failed_at > self._grace_s:
            self._kill_at = min(now, self._kill_at or now)

    def _failed(self) -> bool:
        """Whether somebody has failed."""
        # The folder appears with the first failure written: one look at the shared file system,
        # however many nodes there are. A worker killed outright is told by its peers' failures.
        failures = self._run.attempt(self._record.stage, self._record.attempt).failure(0).parent
        return any(launcher.poll() for launcher in self._launchers) or failures.is_dir()

    def _grace(self) -> float:
        if self._record.stage == "precompile":
            return LAUNCHER_GRACE_S  # the others hand in the graphs that they have
        try:
            nodes = attempts.node_records(self._run, self._record)
            failures = attempts.failure_records(self._run, self._record)
        except SlurmllmError:
            return LAUNCHER_GRACE_S
        # A node whose workers have spoken lives: its launcher waits for the others of them.
        heard = {failure.node for failure in failures}
        heard |= {name for name, node in nodes.items() if node.exit_codes}
        waited_for = [n for n in self._record.nodes if not reported_all(nodes.get(n))]
        all_reported = not waited_for or (len(waited_for) == 1 and waited_for[0] not in heard)
        if self.outcome.hang is not None:  # the cause is known, but stacks take their time
            return REPORTED_GRACE_S if all_reported else HANG_GRACE_S
        codes = [code for node in nodes.values() for code in node.exit_codes.values()]
        if StorageError.exit_code in codes:  # the others' records may come late, or not at all
            return LAUNCHER_GRACE_S
        killed = any(
            code < 0 and rank not in node.stopped_ranks
            for node in nodes.values()
            for rank, code in node.exit_codes.items()
        )
        if killed or any(meaning_of(f"{f.error} {f.message}") != "lost_peer" for f in failures):
            return CLEAR_GRACE_S
        return REPORTED_GRACE_S if all_reported else LAUNCHER_GRACE_S

    def _past_deadline(self, now: float) -> bool:
        """Whether a stop has taken so long that the time limit itself comes near."""
        if self._stop.name is None or not self._job_limited or self.outcome.overran_s is not None:
            return False
        return now - self._stop.at > leaving_s(self._lead_s)

    def _look_for_newer(self, now: float) -> None:
        newer = newer_attempt(self._run, self._record.stage, self._record.attempt)
        if newer is not None and self.outcome.superseded_by is None:
            self.outcome.superseded_by = newer
            self._sign()
            self._kill_at = now

    def _look(self, now: float) -> None:
        """Look for another supervisor, and whether the workers get on."""
        self._look_for_newer(now)
        over = self._failed_at is not None or self._kill_at is not None
        if self._watchdog is None or over:
            return
        hang = self._watchdog.look()
        if hang is None:
            return
        self._sign(hang.waited_s)
        try:
            hang.save(self._run.attempt("train", self._record.attempt).hang)
        except StorageError as error:
            # Then nobody could tell of progress, or of what went wrong: no wonder.
            self.outcome.unwritable = str(error)
            self._kill_at = now + LAUNCHER_GRACE_S
            say(f"train attempt {self._record.attempt}: {error}")
            return
        self.outcome.hang = hang
        self._kill_at = now + HANG_GRACE_S
        say(
            f"train attempt {self._record.attempt}: no progress for {hang.waited_s:.0f} s after "
            f"step {hang.step} (limit {hang.limit_s:.0f} s): taking stacks, then ending it"
        )

    def _sign(self, ago_s: float = 0.0) -> None:
        if self.outcome.sign_at is None:
            self.outcome.sign_at = time.time() - ago_s


def send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to those that still run."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def say(line: str) -> None:
    """Print a line at once; a log that cannot be written ends nothing."""
    with suppress(OSError):
        print(line, flush=True)
