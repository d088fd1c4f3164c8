"""The drill: runs the reference, then one copy with a fault after the other.

The copies are started by the code of `slurmllm resume`, so that a drill tests what a user runs:
checks, graphs of earlier runs, job scripts. A local run needs a process of its own, since the drill
signals and kills it.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from slurmllm.analysis.compare.result import Tolerances
from slurmllm.analysis.drill.checks import DrillReport, DrillResult, Unbroken, check_recovery
from slurmllm.analysis.drill.injector import FAULTS, FaultKind, Injection
from slurmllm.analysis.drill.plan import DrillPlan
from slurmllm.analysis.status.runs import run_state
from slurmllm.core.config.load import load, save
from slurmllm.core.errors import (
    CodeError,
    NodeError,
    OutOfMemoryError,
    RunError,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.records import AttemptRecord, JobsRecord, NodeRecord, last_submission
from slurmllm.core.run.rundir import RunDir, storage_errors, write_atomic
from slurmllm.core.run.safe_files import open_append, read_limited
from slurmllm.core.slurm.client import SlurmClient, step_beside
from slurmllm.core.slurm.error_texts import ChildProcess
from slurmllm.core.slurm.setup import slurm_environment
from slurmllm.launch.submit.launch import submit_jobs
from slurmllm.launch.submit.prepare import RunRequest, prepare
from slurmllm.launch.supervise.allocation import SLURMLLM, node_command
from slurmllm.launch.supervise.attempts import load_attempts
from slurmllm.launch.supervise.run_lock import locked
from slurmllm.launch.supervise.run_state import is_active
from slurmllm.train.backends.environment import make_cache_folder
from slurmllm.train.control.rendezvous import die_with_parent

POLL_S = 0.25
QUEUE_POLL_S = 2.0  # slurmctld answers slowly if many clients poll it
INJECTOR_S = 30.0  # for the injector to end after its run
CANCEL_S = 60.0  # for a cancelled run to save and exit
REQUEUE_S = 120.0  # for Slurm to end a job whose batch script was killed
_NO_FILES: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
# By the exit code of `slurmllm resume`.
_ERRORS: dict[int, type[SlurmllmError]] = {
    kind.exit_code: kind for kind in (RunError, SlurmError, StorageError, OutOfMemoryError)
}


@dataclass
class SlurmRunner:
    """Jobs of a Slurm cluster."""

    client: SlurmClient

    def start(self, run: RunDir, nodes: int) -> None:
        """Start a run whose directory has a configuration; raises as `slurmllm resume` does."""
        request = RunRequest(load(run.config), nodes, run.path.parent, run=run, check_weights=False)
        with locked(run, "drill"):
            submit_jobs(prepare(request), self.client)

    def start_on_nodes(
        self, run: RunDir, nodes: Sequence[str], command: Sequence[str]
    ) -> ChildProcess:
        """Start a command on nodes of an active run."""
        srun = [*step_beside(self._job(run), nodes), *command]
        try:
            return subprocess.Popen(srun, env=slurm_environment(), **_NO_FILES)
        except OSError as error:
            raise SlurmError(f"srun cannot be started: {error}") from error

    def active(self, run: RunDir) -> bool:
        """Return whether the run is pending or running."""
        return is_active(run, self.client)

    def restart(self, run: RunDir, nodes: int) -> None:
        """Requeue the job, unless its successor follows; retries while Slurm still ends it."""
        if JobsRecord.last_of(run).restart == "chain":
            return None
        deadline = time.monotonic() + REQUEUE_S
        while True:
            try:
                return self.client.requeue(self._job(run))
            except SlurmError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def cancel(self, run: RunDir) -> None:
        if (last := last_submission(run)) is not None:
            self.client.cancel(last.own_jobs)

    def _job(self, run: RunDir) -> str:
        job = JobsRecord.last_of(run).train_job
        assert job is not None
        return job


class LocalRunner:
    """Launchers on this machine."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self, run: RunDir, nodes: int) -> None:
        # Returns at once: an error of `resume` is raised by `active`.
        self._stderr.seek(0)
        self._stderr.truncate()
        self._process = subprocess.Popen(
            [
                *SLURMLLM,
                "resume",
                run.name,
                f"--nodes={nodes}",
                f"--runs-dir={run.path.parent}",
                "--json",
                "--local",
            ],
            **{**_NO_FILES, "stderr": self._stderr},
            start_new_session=True,  # Ctrl-C reaches only the drill, which then cancels the run
            preexec_fn=die_with_parent,
        )

    def start_on_nodes(
        self, run: RunDir, nodes: Sequence[str], command: Sequence[str]
    ) -> ChildProcess:
        return subprocess.Popen(command, **_NO_FILES, preexec_fn=die_with_parent)

    def active(self, run: RunDir) -> bool:
        """Return whether the run runs; SlurmllmError if it ended before its first attempt."""
        assert self._process is not None
        if self._process.poll() is None:
            return True
        if self._process.returncode != 0 and not (run.attempts("train") or run.graphs.is_dir()):
            code = self._process.returncode
            self._stderr.seek(0)
            message = self._stderr.read().decode(errors="replace").strip().removeprefix("error: ")
            message = message or f"slurmllm resume ended with exit code {code}"
            raise _ERRORS.get(code, CodeError)(message)
        return False

    def restart(self, run: RunDir, nodes: int) -> None:
        """Resume the run; its process has ended with its supervisor."""
        assert self._process is not None
        self._process.wait()
        self.start(run, nodes)

    def cancel(self, run: RunDir) -> None:
        """SIGTERM, which saves; a second one, which does not; then SIGKILL."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(CANCEL_S)


Runner = SlurmRunner | LocalRunner


@dataclass
class Drill:
    """A drill of one run."""

    plan: DrillPlan
    runner: Runner
    client: SlurmClient
    tolerances: Tolerances
    own_reference: bool
    progress: Callable[[str], None]  # called with a status line
    show: Callable[[DrillResult], None] = lambda result: None  # with each result as its copy ends
    copies: list[RunDir] = field(default_factory=list)
    unbroken: Unbroken | None = None  # of another project's trainer

    def run(self, keep: bool) -> DrillReport:
        """Run the reference and the copies; remove those that passed, unless `keep`.

        Raises a CodeError if the reference does not finish, the error of a copy that cannot start.
        """
        plan = self.plan
        reference = plan.run.metrics(0)
        name = plan.run.name
        repeat: RunDir | None = None
        noise: dict[str, float] = {}
        if not self.own_reference:
            run = self._run_unbroken("reference")
            reference = run.path
            name = run.name
            if (trainer := plan.trainer) is not None:
                self.plan = plan = plan.with_reference(run)
                repeat = self._run_unbroken("repeat")
                self.unbroken = Unbroken(
                    read_curve(reference),
                    read_curve(repeat.path),
                    trainer,
                    plan.steps,
                    self.tolerances,
                )
                noise = self.unbroken.noise
        results = [self._test(kind, reference) for kind in plan.kinds]
        failed = {result.run for result in results if not result.passed}
        if not keep:
            for run in list(self.copies):
                # The reference is kept with a failed copy, to compare them.
                unbroken = run.name == name or run == repeat
                if run.name not in failed and not (failed and unbroken):
                    self._remove(run)
        return DrillReport(
            run=plan.run.name,
            nodes=plan.nodes,
            local=plan.local,
            steps=plan.steps,
            every_steps=plan.every_steps,
            seed=plan.seed,
            reference=name,
            own_reference=self.own_reference,
            drills=results,
            kept=[run.name for run in self.copies],
            repeat=repeat.name if repeat else None,
            noise=noise,
        )

    def _run_unbroken(self, copy: str) -> RunDir:
        run = self._create(copy, None)
        self._run_to_end(run, None, copy)
        if (state := self._state(run)) != "done":
            raise CodeError(
                f"the {copy} run {run.name} did not finish: {state}; see `slurmllm logs "
                f"{run.name}`: {self.plan.run.name} would fail in the same way"
            )
        return run

    def _state(self, run: RunDir) -> str:
        """Return state and reason of a copy that has ended; `done` if it made all its steps."""
        state = run_state(run, self.client)
        if state.state == "done" or (self.plan.is_limited and self._made_all_steps(run)):
            return "done"
        return f"{state.state} ({state.reason})" if state.reason else state.state

    def _made_all_steps(self, run: RunDir) -> bool:
        row = last_row(run)
        return row is not None and row["step"] >= self.plan.steps

    def _test(self, kind: FaultKind, reference: Path) -> DrillResult:
        run = self._create(kind, kind)
        injection = self._run_to_end(run, kind, kind)
        self.progress(f"{kind}: comparing with the reference")
        result = check_recovery(
            run,
            kind,
            injection,
            reference,
            self.plan.steps,
            self.tolerances,
            self._state(run),
            self.unbroken,
        )
        self.show(result)
        with (
            storage_errors(f"cannot write {self.plan.results}"),
            os.fdopen(open_append(self.plan.results), "a", encoding="utf-8") as stream,
        ):
            stream.write(result.model_dump_json() + "\n")
        return result

    def _create(self, copy: str, kind: FaultKind | None) -> RunDir:
        """Make the directory of a new copy, with only its configuration."""
        run = RunDir(self.plan.run.path.parent / self.plan.name(copy))
        with storage_errors(f"cannot create {run.path}"):
            try:
                run.path.parent.mkdir(parents=True, exist_ok=True)
                run.path.mkdir(0o755)
            except FileExistsError:
                raise RunError(f"{run.path} already exists; another drill has created it") from None
        self.copies.append(run)
        save(self.plan.config_of(kind), run)
        if self.plan.run.excluded.is_file():  # the copies exclude the same nodes
            write_atomic(run.excluded, read_limited(self.plan.run.excluded).decode())
        return run

    def _run_to_end(self, run: RunDir, kind: FaultKind | None, copy: str) -> Injection | None:
        """Start a copy, start the injector once its workers run, wait until the copy has ended.

        Returns the injected fault; None for the reference, or if the copy never trained.
        """
        is_cut = False
        injector: ChildProcess | None = None
        polled_at = 0.0
        try:
            self.progress(f"{copy}: starting")
            self.runner.start(run, self.plan.nodes)
            while True:
                if kind is not None and not injector:
                    injector = self._start_injector(run, kind)
                if kind == "first_node" and injector and injector.poll() is not None:
                    injection = Injection.find(run.drill)
                    if injection and not injection.missed:
                        self.progress(f"{copy}: requeueing, as Slurm does when the first node dies")
                        self.runner.restart(run, self.plan.nodes)
                    kind = None
                self.progress(f"{copy}: {self._status(run)}")
                if time.monotonic() - polled_at >= QUEUE_POLL_S or self.plan.local:
                    polled_at = time.monotonic()
                    # Between the kill of the first node and the requeue the run is not active.
                    requeued = kind == "first_node" and injector is not None
                    has_ended = not self.runner.active(run) and not requeued
                    if has_ended and (is_cut or not self._resumes_by_hand(run, copy)):
                        break
                if self.plan.is_limited and not is_cut and self._made_all_steps(run):
                    self.runner.cancel(run)
                    is_cut = True
                time.sleep(POLL_S)
        except BaseException:
            self.progress(f"{copy}: cancelling {run.name}")
            self.runner.cancel(run)
            raise
        finally:
            if injector:
                with suppress(subprocess.TimeoutExpired):
                    injector.wait(INJECTOR_S)
                injector.kill()  # does nothing if it has ended
                injector.wait()
        return Injection.find(run.drill)

    def _resumes_by_hand(self, run: RunDir, copy: str) -> bool:
        """Resume a trainer's run that its fault has stopped, once, as its user would."""
        attempts = load_attempts(run, "train")
        injection = Injection.find(run.drill)
        has_fault = (
            len(JobsRecord.of(run).submissions) == 1
            and injection is not None
            and not injection.missed
        )
        if self.plan.trainer is None or not has_fault or attempts[-1].action != "stop":
            return False
        self.progress(f"{copy}: resuming by hand: it stopped, {attempts[-1].ending}")
        self.runner.start(run, self.plan.nodes)
        return True

    def _start_injector(self, run: RunDir, kind: FaultKind) -> ChildProcess | None:
        """Start the injector on its node, if the first attempt's workers run there already."""
        path = run.attempt("train", 0).record
        if not path.is_file():
            return None
        nodes = AttemptRecord.load(path).nodes
        spec = self.plan.fault(kind, nodes)
        node = run.attempt("train", 0).node(spec.node)
        if not node.is_file() or not NodeRecord.load(node).pids:
            return None
        command = node_command(self.plan.config.cluster, "slurmllm.analysis.drill.injector")
        command += [str(run.path), spec.model_dump_json()]
        return self.runner.start_on_nodes(
            run,
            nodes if FAULTS[kind].of_commands else [spec.node],
            command,
        )

    def _status(self, run: RunDir) -> str:
        attempts = run.attempts("train")
        if not attempts:
            return "precompiling" if run.attempts("precompile") else "waiting for nodes"
        row = last_row(run)
        of_steps = f"/{self.plan.steps}" if self.plan.steps else ""
        return f"attempt {attempts[-1].number}, step {row['step'] if row else 0}{of_steps}"

    def _remove(self, run: RunDir) -> None:
        shutil.rmtree(run.path, ignore_errors=True)
        if self.plan.local:
            # The cache's name has a digest of the run's path: no other run shares it.
            with suppress(OSError, NodeError):
                cache = make_cache_folder(self.plan.config, run)
                for path in cache.parent.glob(f"{glob.escape(cache.name)}*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not run.path.exists():
            self.copies.remove(run)
