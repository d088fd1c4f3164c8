"""One node's part in an attempt of a trainer of another project (`command` of the recipe).

Its processes know nothing of slurmllm: their variables are torchrun's and Slurm's, their end is
told by exit codes and by what they printed, their progress by one rank's output, or by files.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from slurmllm.core.config.command import fill
from slurmllm.core.config.operation import leaving_s
from slurmllm.core.errors import EXIT_OK, EXIT_REQUEUE, ConfigError, StorageError
from slurmllm.core.metrics.following import is_path, printing_rank
from slurmllm.core.run.records import ByRank
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.safe_files import os_error_text, write_whole
from slurmllm.core.run.worker_files import PHASE_FILE, PhaseWriter, diagnostic
from slurmllm.core.slurm.error_texts import ChildProcess
from slurmllm.core.slurm.setup import Variables
from slurmllm.launch.supervise.launcher import Launcher
from slurmllm.launch.supervise.progress import TrainerProgress
from slurmllm.launch.supervise.stacks import catches, stacks_of
from slurmllm.launch.supervise.started_processes import StartedProcesses, started_by
from slurmllm.launch.supervise.trainer_command import (
    command_line,
    command_values,
    exit_code_of,
    failure_of,
    peer_variables,
    slurm_variables,
)
from slurmllm.launch.supervise.watchdog import Heartbeats
from slurmllm.launch.supervise.worker_output import WorkerOutput
from slurmllm.launch.supervise.workers import STACKS_S, WORKER_SIGNAL
from slurmllm.plan.mesh import Mesh
from slurmllm.train.checkpoint.foreign import (
    TrainerCheckpoint,
    list_trainer_checkpoints,
    remove_old,
    unmatched_checkpoints,
)
from slurmllm.train.control.rendezvous import SECRET, die_with_parent

_MISSING_S = 60.0  # after which it is said that no steps are known
_OUTPUT_S = 5.0  # interval at which output counts as a sign of life before the first step

log = logging.getLogger(__name__)


class TrainerLauncher(Launcher):
    """One node's processes of a trainer, and its progress on the node whose worker prints it."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        super().__init__(run, stage, attempt)
        assert self.config.recipe.command is not None
        self.command = self.config.recipe.command
        self.values = command_values(run, self.config, attempt, len(self.record.nodes), self.record)
        self.text = command_line(self.command, self.values)
        self.printing = printing_rank(self.command.progress, self.record.world_size)
        self.output = WorkerOutput(self.printing)
        self._codes: ByRank = {}  # rank → exit code
        self._recorded: set[int] = set()  # ranks whose failures are recorded
        self._started = StartedProcesses()
        self._asked = False  # whether the workers were asked to stop
        self._asked_at = 0.0
        self.observer: TrainerObserver | None = None
        # Processes that outlive their worker become children of this one, which ends them.
        ctypes.CDLL(None).prctl(36, 1)  # linux/prctl.h: PR_SET_CHILD_SUBREAPER

    def start_services(self, heartbeats: Heartbeats, per_node: int) -> None:
        if self.node_rank == 0:
            log.info("command: %s", self.text)
        if self.node_rank == self.printing // per_node:
            phases = heartbeats.environment(self.printing).get(PHASE_FILE)
            self.observer = TrainerObserver(self, Path(phases) if phases else None)

    def environment(self, mesh: Mesh, rank: int, local_rank: int) -> Variables:
        variables = super().environment(mesh, rank, local_rank)
        variables = {n: v for n, v in variables.items() if not n.startswith("SLURMLLM_")}
        variables |= peer_variables(self.config, self.record, self.node_rank)
        if not self.command.one_per_node:
            variables |= slurm_variables(self.record, rank, local_rank)
        elif "OMP_NUM_THREADS" not in os.environ:
            del variables["OMP_NUM_THREADS"]  # of all CPUs: what it starts shares them
        return variables

    def start_worker(self, rank: int, environment: Variables) -> ChildProcess:
        output = self.output.open(rank, self.logs.open(rank))
        try:
            return subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", self.text],  # `python … | tee log` fails too
                env={name: value for name, value in environment.items() if name != SECRET},
                cwd=self.command.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(_prepare_child, self.command.stop_signal),
            )
        except OSError as error:
            if error.filename != self.command.folder:
                raise
            raise ConfigError(
                f"command.folder: {self.command.folder} on {self.node}: {os_error_text(error)}; "
                "name a folder that all nodes can read"
            ) from error
        finally:
            os.close(output)

    def wait(self) -> bool:
        self.output.start()
        return super().wait()

    def ask_to_stop(self) -> None:
        """Send the trainer's signal once; without one, or if it does not leave, end it."""
        now = time.monotonic()
        if self._asked:
            late = now - self._asked_at > leaving_s(self.config.recipe.slurm.signal_lead_s)
            if self.local and late:  # in a job the supervisor ends it
                self.kill([*self.pids()])
            return
        self.exit_codes()  # those that ended before
        self._asked = True
        self._asked_at = now
        number = self.command.stop_signal
        if number is None:
            self.kill([*self.pids()])
            return
        for pid in self.pids().values():
            for process in _receivers(pid, number):
                with suppress(psutil.Error):
                    process.send_signal(number)

    def observe(self) -> None:
        super().observe()
        if self.command.one_per_node:
            self._started.look(self.pids().values())
        if self.observer is not None:
            self.observer.observe()

    def exit_codes(self) -> ByRank:
        """Rank → exit code; who ends after being asked to has left, whatever its own code."""
        for rank, worker in self.processes.items():
            code = worker.poll()
            if code is not None and rank not in self._codes:
                code = exit_code_of(code)
                # Slurm's SIGTERM reaches it at the same time as this process.
                left = self._asked or (self.stop_requested and code == -signal.SIGTERM)
                self._codes[rank] = EXIT_REQUEUE if left else code
                if code == EXIT_OK and not self.command.one_per_node:
                    self._started.note(rank)
        return dict(self._codes)

    def record_failures(self) -> None:
        """Record why workers failed, by what they printed."""
        now = time.time()
        for rank, code in self.exit_codes().items():
            stopped = rank in self.node_record.stopped_ranks
            if code in (EXIT_OK, EXIT_REQUEUE) or stopped or rank in self._recorded:
                continue
            self._recorded.add(rank)
            time.sleep(0.1)  # for its last lines
            self.observe()
            failure = failure_of(
                rank,
                self.node,
                code,
                self.output.lines(rank),
                None if self.observer is None else self.observer.progress.step,
                now,
                self.record.nodes,
                self.command.one_per_node,
            )
            if failure is not None:
                with suppress(StorageError):
                    failure.save(self.attempt.failure(rank))

    def dump_stacks(self, heartbeats: Heartbeats) -> None:
        until = time.monotonic() + STACKS_S
        for rank, pid in self.pids().items():
            with suppress(OSError):
                write_whole(
                    self.attempt.stacks(rank), stacks_of(pid, until).encode(), durable=False
                )

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with suppress(OSError):
                os.killpg(self.processes[rank].pid, signal.SIGKILL)
        _kill_children(except_for={worker.pid for worker in self.processes.values()})

    def save_with_retries(self, **update: object) -> None:
        """End what the workers have left behind, and write the last lines, before the record."""
        _kill_children(except_for=set(self.pids().values()))
        self.output.close()
        if self.observer is not None:
            self.observer.close(finished=not any(self.exit_codes().values()))
        super().save_with_retries(ended_first=self._started.ended_first, **update)


class TrainerObserver:
    """Watches a running trainer: its progress and checkpoints become metrics and events."""

    def __init__(self, launcher: TrainerLauncher, phases: Path | None) -> None:
        self._launcher = launcher
        self._command = launcher.command
        run = launcher.run
        number = launcher.attempt.number
        self._run = run
        progress = self._command.progress and fill(self._command.progress, launcher.values)
        if progress and "(?P<" not in progress and is_path(progress):
            progress = str(Path(self._command.folder or ".", progress))
        self.progress = TrainerProgress(
            run,
            number,
            progress,
            devices=len(launcher.record.nodes) * launcher.config.cluster.devices_per_node,
            rank=launcher.printing,
        )
        self._phases = PhaseWriter(phases)
        self._step: int | None = None
        self._had_steps = any(path != run.metrics(number) for path in run.metrics_files())
        self._fault = ""  # of reading progress
        self._printed = 0
        self._next_output = 0.0
        self._next_look = 0.0
        self._newest = self._newest_checkpoint()
        self._missing = ""
        self._judged_at = time.monotonic() + _MISSING_S

    def observe(self) -> None:
        now = time.monotonic()
        output = self._launcher.output
        self._follow(last=False)
        step = self.progress.step
        # Until there are steps, any output is a sign of life; where none need ever come, no
        # silence is a hang.
        expects_steps = self._command.progress is not None or self._had_steps
        sign = output.printed != self._printed or not expects_steps
        if step is None and sign and now >= self._next_output:
            self._printed = output.printed
            self._next_output = now + _OUTPUT_S
            self._phases.begin("first_step", 0)
        if step is not None and step != self._step:
            self._step = step
            self._phases.begin("stepping", step)
        # Where an earlier attempt had steps, they are waited for.
        if (self._missing and step is not None) or (now >= self._judged_at and not self._had_steps):
            self._judged_at = now + _MISSING_S
            self._save_missing()
        if now >= self._next_look:
            with diagnostic("a look at the checkpoints"):
                self._look_at_checkpoints()
            # Of many files on a slow file system rarely: looks take a twentieth of the time.
            self._next_look = now + max(5.0, 20 * (time.monotonic() - now))

    def _save_missing(self) -> None:
        """Record for `status` why no steps are known."""
        if (missing := self._fault or self.progress.missing()) != self._missing:
            self._missing = missing
            with suppress(StorageError):
                self._launcher.save(progress_missing=missing)

    def _newest_checkpoint(self) -> TrainerCheckpoint | None:
        return next(
            reversed(list_trainer_checkpoints(self._run, self._command, newest_only=True)), None
        )

    def _look_at_checkpoints(self) -> None:
        before = self._newest
        self._newest = newest = self._newest_checkpoint()
        if newest is None or newest == before:
            return
        if not newest.complete:  # it grows
            self._phases.begin("saving", self._step or 0)
            return
        if self._step is not None:
            self._phases.begin("stepping", self._step)
        if before is None or not before.complete or before.step != newest.step:
            self.progress.events.add("save", newest.step, message=str(newest.path))
            config = self._launcher.config
            if config.is_set("checkpoint.keep"):
                keep = config.recipe.checkpoint.keep
                for path in remove_old(self._run, self._command, keep, config.recipe.evaluate):
                    log.info("removed %s: checkpoint.keep is %s", path, keep)

    def _follow(self, last: bool) -> None:
        """Read new steps; a reader's fault is no reason to end a trainer that trains."""
        try:
            self.progress.feed(self._launcher.output.take())
            self.progress.update(last)
        except Exception as error:
            if not self._fault:
                log.exception("progress cannot be read")
            self._fault = f"progress cannot be read: {error!r}; see the log of rank 0"

    def close(self, finished: bool) -> None:
        self._follow(last=True)
        with diagnostic("a look at the checkpoints"):
            self._look_at_checkpoints()
        if unmatched := unmatched_checkpoints(self._run, self._command):
            log.warning("%s", unmatched)
        if finished or self._missing:
            self._save_missing()
        if self._missing:
            log.warning("%s", self._missing)


def _prepare_child(stop_signal: signal.Signals | None) -> None:
    """In the child before exec: die with the launcher, and ignore only the launcher's signal.

    srun passes that one on to all processes of its step, and it would end a trainer that saves.
    """
    die_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if stop_signal != WORKER_SIGNAL:
        signal.signal(WORKER_SIGNAL, signal.SIG_IGN)


def _receivers(pid: int, number: int) -> list[psutil.Process]:
    """Return the processes for a signal: a worker, or those that a shell or torchrun started.

    torchrun itself ends at SIGUSR1, and gives its workers half a minute at SIGTERM. Of a pipeline
    only what handles the signal gets it: without `tee` the trainer could not print any more.
    """
    try:
        worker = psutil.Process(pid)
        children = worker.children()
        processes = children if worker.name() in ("bash", "sh") and children else [worker]
        if len(processes) > 1:
            processes = [p for p in processes if catches(p.pid, number)] or processes
        return [started for process in processes for started in started_by(process)] or processes
    except psutil.Error:
        return []


def _kill_children(except_for: set[int]) -> None:
    """Kill all processes below this one, but for some that end by themselves."""
    with suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        children = [child for child in children if child.pid not in except_for]
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=2.0)
