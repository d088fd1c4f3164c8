"""Start a prepared run: submit its jobs to Slurm, or run its stages on this machine.

`submit --local` runs the scripts that sbatch would get with bash, restarts included; the log of
each stage also goes to the terminal. Ctrl-C asks the run to save and exit, as Slurm does ahead of
the time limit; a second Ctrl-C kills it.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from slurmllm.core.config.directives import as_arguments
from slurmllm.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, SlurmError, SlurmllmError
from slurmllm.core.format import Json, format_plural
from slurmllm.core.run.records import JobsRecord, Submission, last_submission
from slurmllm.core.run.rundir import STAGES, RunDir, Stage
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.slurm.client import ELSEWHERE, ENDED_STATES, SlurmClient, UnansweredError
from slurmllm.core.slurm.setup import new_job_environment
from slurmllm.launch.submit.prepare import PreparedRun, RunRequest, prepare
from slurmllm.launch.submit.render import precompile_nodes
from slurmllm.launch.submit.run_folder import remove_unsubmitted, run_umask
from slurmllm.launch.supervise.allocation import HELD_NODES, LOCAL_NODES, LOCAL_RESTARTS
from slurmllm.launch.supervise.attempts import this_process
from slurmllm.launch.supervise.run_lock import locked
from slurmllm.launch.supervise.successor import choose_restart
from slurmllm.train.backends.environment import load_environment, worker_environment
from slurmllm.train.control.rendezvous import die_with_parent

log = logging.getLogger(__name__)

_SIGNAL_AGAIN_S = 1.0  # it is lost until the supervisor has its handlers
# Whether a job has completed → the kind of dependency that can then never be met
_NEVER_AFTER = {True: "afternotok", False: "afterok"}


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was submitted, has trained on this machine, or, after a dry run, could be."""

    prepared: PreparedRun
    sent: Submission | None = None  # its jobs; None after a dry run
    exit_code: int | None = None  # of a run on this machine that has ended

    def __repr__(self) -> str:
        nodes = format_plural(self.prepared.mesh.nodes, "node")
        mode = "a dry run" if self.sent is None else f"train job {self.sent.train_job or 'here'}"
        return f"<SubmittedRun {self.name} on {nodes}, {mode}>"

    @property
    def name(self) -> str:
        """The run's name, for `read_status` and the verbs of the command line."""
        return self.prepared.run.name

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.prepared.run.path

    @property
    def warnings(self) -> list[str]:
        """Why it may be slow or start late."""
        return list(self.prepared.warnings)

    @property
    def scripts(self) -> dict[Stage, str]:
        """Text of each stage's batch script."""
        return self.prepared.scripts

    def run_to_end(self, quiet: bool = True) -> SubmittedRun:
        """Run the recorded stages on this machine or in an allocation; `quiet`: without output."""
        assert self.sent is not None, "recorded by `start`"
        return replace(
            self, exit_code=run_locally(self.prepared, quiet, allocation=self.sent.allocation)
        )

    def to_dict(self) -> Json:
        """Return it for JSON, as `slurmllm submit --json` prints it."""
        prepared = self.prepared
        run = prepared.run
        planner = None if prepared.fit is None else prepared.fit.to_json()
        if self.sent is None:
            config = prepared.config
            command = prepared.command_line
            variables = worker_environment(config, run)
            return {
                "run_dir": str(run.path),
                "from_step": prepared.from_step,
                "changes": prepared.changes,
                "config": config.values(),
                "mesh": prepared.mesh_json(),
                "scripts": prepared.scripts,
                "defaults": {
                    # Variable of the user's shell → option of sbatch that nothing else sets
                    source: path.removeprefix("slurm.")
                    for path, _, source in config.rows()
                    if source.startswith("SBATCH_")
                },
                "environment": [{"name": name, **v._asdict()} for name, v in variables.items()],
                "backend_arguments": load_environment(config.backend).arguments(
                    config, prepared.mesh
                ),
                "refusals": prepared.refusals,
                "excluded": prepared.excluded,
                **({} if command is None else {"command": command}),
                "planner": planner,
            }
        jobs = {"precompile": self.sent.precompile_job, "train": self.sent.train_job}
        result: Json = {"exit_code": self.exit_code}
        if not self.sent.local:
            result = {"jobs": jobs, "mesh": prepared.mesh_json()}
        result = {"run": run.name, "run_dir": str(run.path), **result}
        result |= {"graphs_from": prepared.graphs_from, "excluded": prepared.excluded}
        return {**result, "planner": planner}


def start_run(
    request: RunRequest,
    allocation: str | None = None,
    on_prepared: Callable[[PreparedRun], object] = lambda _: None,
) -> SubmittedRun:
    """Prepare a new run, and submit its jobs or record that this process runs its stages.

    Args:
        allocation: Slurm job whose nodes run the stages, instead of jobs or this machine.
        on_prepared: Called before anything is submitted.

    Raises:
        SlurmllmError: as `prepare` and `submit_jobs` do.
    """
    with ExitStack() as locks:
        claimed = lambda run: locks.enter_context(locked(run, "submit"))  # noqa: E731
        prepared = prepare(replace(request, claimed=claimed))
        on_prepared(prepared)
        return start(prepared, request, allocation)


def start(prepared: PreparedRun, request: RunRequest, allocation: str | None) -> SubmittedRun:
    """Submit a run's jobs, or record that this process runs its stages, unless it is a dry run."""
    if request.dry_run:
        return SubmittedRun(prepared)
    if request.local or allocation is not None:
        return SubmittedRun(prepared, record_local(prepared, allocation=allocation))
    return SubmittedRun(prepared, submit_jobs(prepared))


def _submission(prepared: PreparedRun, **fields: object) -> Submission:
    return Submission.model_validate(
        {
            "submitted_at": time.time(),
            "nodes": prepared.mesh.nodes,
            "first_attempt": prepared.run.next_attempt_number("train"),
            "from_scratch": prepared.from_scratch,
            "changes": prepared.changes,
            "git_commit": _git_commit() if prepared.config.recipe.trackers else None,
            **fields,
        }
    )


def _git_commit() -> str | None:
    """Return the commit of this folder's repository, with -dirty after changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()[:200] or None


def check_dependency(dependency: str, client: SlurmClient) -> list[str]:
    """Raise SlurmError if a dependency can never be met; returns warnings of unknown jobs."""
    jobs = re.findall(r"\d+", re.sub(r"\+\d+", "", dependency))
    states = {row.job_id: row.state for row in client.accounting(*jobs)}
    states |= {job.job_id: job.state for job in client.queue(jobs).values()}
    warnings = []
    never = []
    for kind, ids in re.findall(r"(after[a-z]*)((?::[\d_*+]+)+)", dependency):
        for job in re.findall(r":(\d+)", ids):
            state = states.get(job)
            if state is None:
                warnings.append(f"--dependency={dependency}: Slurm knows no job {job}")
            elif state in ENDED_STATES and kind == _NEVER_AFTER[state == "COMPLETED"]:
                never.append(f"job {job} has ended as {state}")
    # `?` separates alternatives, of which one is enough.
    if never and "?" not in dependency:
        raise SlurmError(
            f"--dependency={dependency} can never be met: {'; '.join(never)}; leave it out, or "
            "name a job that is yet to end"
        )
    return warnings


def submit_jobs(
    prepared: PreparedRun,
    client: SlurmClient | None = None,
    stages: Sequence[Stage] | None = None,
    **fields: object,
) -> Submission:
    """Submit the stages' scripts, each after the success of the one before, and record the ids.

    Args:
        stages: By default those that the run needs.
        fields: Further fields of the submission, of a run of a sweep.

    Raises:
        SlurmError: sbatch refused; a precompile job that was submitted before is cancelled, and the
            directory of a new run is removed.
    """
    client = client or SlurmClient()
    run = prepared.run
    earlier = JobsRecord.of(prepared.run)
    slurm = prepared.config.recipe.slurm
    container = prepared.config.cluster.container
    submission = _submission(
        prepared, local=False, restart=choose_restart(slurm.restart, earlier.last, client), **fields
    )
    try:
        if "sbatch" in client.missing_commands():
            raise SlurmError(
                f"sbatch is not on the PATH; {ELSEWHERE}, or add --local to train on this machine"
            )
        srun = as_arguments(slurm.directives.srun)
        if container is not None and container.srun_runs_it:
            srun = ["--container-image=any", *srun]
        client.check_srun(srun)
        for line in check_dependency(slurm.dependency, client) if slurm.dependency else ():
            log.warning("%s", line)
        if not earlier.submissions and not fields:  # the directory of a sweep is new
            _cancel_unrecorded(run, client)
        for stage in stages or prepared.stages:
            submission = submission.model_copy(
                update={f"{stage}_job": _sbatch(prepared, stage, submission, client)}
            )
            # Saved after each job: if this process is killed here, no job is without a record.
            JobsRecord(submissions=(*earlier.submissions, submission)).save(run.jobs)
    except SlurmError as error:
        if (precompile := submission.precompile_job) is not None and submission.graphs_of is None:
            try:
                client.cancel([precompile])
            except SlurmError as reason:
                raise SlurmError(
                    f"{error}\n  and the precompile job is still queued: {reason}; `scancel "
                    f"{precompile}` ends it, {run.path} is kept"
                ) from error
            if earlier.submissions:
                earlier.save(run.jobs)
            else:
                run.jobs.unlink(missing_ok=True)  # `remove_unsubmitted` keeps runs with a record
        if prepared.is_new and not isinstance(error.__cause__, UnansweredError):
            remove_unsubmitted(run)
        raise
    return submission


def _cancel_unrecorded(run: RunDir, client: SlurmClient) -> None:
    """Cancel the jobs of a `submit` of this name that was killed before it recorded them."""
    if jobs := client.jobs_with_output(
        [f"{run.name}-{stage}" for stage in STAGES], [*map(run.stage_log, STAGES)]
    ):
        log.warning("cancelling job %s of a submit that was killed", ", ".join(jobs))
        client.cancel(jobs)


def _sbatch(
    prepared: PreparedRun, stage: Stage, submission: Submission, client: SlurmClient
) -> str:
    """Submit the script of a stage after the jobs of the stages before; returns the job id."""
    try:
        return client.submit(
            prepared.scripts[stage],
            exclude=prepared.excluded,
            after_ok=submission.precompile_job,
            requeue=submission.restart == "requeue",
            name=submission.lane if stage == "train" else None,
            umask=run_umask(prepared.config.cluster),
        )
    except SlurmError as error:
        raise SlurmError(f"{error}; --dry-run shows the scripts") from error


def record_local(prepared: PreparedRun, **fields: object) -> Submission:
    """Record this process as the one that runs the stages: from then on the run is active."""
    run = prepared.run
    submission = _submission(prepared, local=True, **this_process(), **fields)
    JobsRecord(submissions=(*JobsRecord.of(run).submissions, submission)).save(run.jobs)
    return submission


def run_locally(
    prepared: PreparedRun,
    quiet: bool = False,
    stages: Sequence[Stage] | None = None,
    allocation: str | None = None,
) -> int:
    """Run the stages in order; returns 0, the exit code of the failed stage, or 130 for Ctrl-C.

    Args:
        quiet: Whether the stages' logs do not go to the terminal too.
        stages: By default those that the run needs.
        allocation: Slurm job that holds the nodes, instead of this machine.
    """
    run = prepared.run
    stages = stages or prepared.stages
    # Handlers belong to the process: restored after all stages, also if one raises.
    previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for stage in stages:
            nodes = prepared.mesh.nodes
            if stage == "precompile":
                nodes = precompile_nodes(prepared.config, nodes)
            job = LocalJob(
                run,
                stage,
                prepared.scripts[stage],
                nodes,
                quiet,
                allocation,
                run_umask(prepared.config.cluster),
            )
            for number in previous:
                signal.signal(number, job.on_interrupt)
            if (code := job.run_to_end()) != EXIT_OK:
                return code
            if job.interrupts and stage != stages[-1]:
                return EXIT_INTERRUPTED
        return EXIT_OK
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        with suppress(SlurmllmError):  # a full disk
            last = last_submission(run)
            if last is not None and last.pid == os.getpid():  # not resumed elsewhere, by --force
                JobsRecord.change_last(run, ended_at=time.time())


@dataclass
class LocalJob:
    """A batch script on this machine, started again as long as its supervisor asks for it.

    Its text is run, not its file, which others may be able to replace.
    """

    run: RunDir
    stage: Stage
    script: str
    nodes: int
    quiet: bool
    allocation: str | None = None
    umask: int = -1  # of the script; -1: this process's
    interrupts: int = 0
    restarts: int = 0
    process: subprocess.Popen[str] | None = None

    def run_to_end(self) -> int:
        while True:
            if self.interrupts:
                return EXIT_INTERRUPTED
            code = self._run_once()
            if code != EXIT_REQUEUE:
                return EXIT_INTERRUPTED if self.interrupts and code != EXIT_OK else code
            if self.allocation is not None:  # Slurm ends it if one of its nodes dies
                job = SlurmClient().queue([self.allocation]).get(self.allocation)
                if job is None or not job.has_nodes:
                    log.error("job %s, which held the nodes, has ended", self.allocation)
                    return code
            self.restarts += 1

    def on_interrupt(self, number: int, frame: object) -> None:
        self.interrupts += 1
        if self.process is not None and self.process.poll() is None:
            kill = self.interrupts > 1
            # SIGUSR1 is what Slurm sends ahead of the time limit: save and exit.
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGUSR1)

    def _run_once(self) -> int:
        log = os.fdopen(open_append(self.run.stage_log(self.stage)), "a", encoding="utf-8")
        self.process = subprocess.Popen(
            ["bash", "-c", self.script, str(self.run.script(self.stage))],
            env=new_job_environment()
            | {
                HELD_NODES if self.allocation else LOCAL_NODES: str(self.nodes),
                LOCAL_RESTARTS: str(self.restarts),
            },
            cwd=self.run.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            umask=self.umask,
            start_new_session=True,  # Ctrl-C must reach only this process
            preexec_fn=die_with_parent,
        )
        if self.interrupts:  # a signal during Popen found no process to forward to
            self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None
        reader = threading.Thread(target=self._copy, args=(self.process.stdout, log), daemon=True)
        reader.start()
        code = self._wait(self.process)
        # A process that outlives the script may keep the pipe open.
        reader.join(timeout=10)
        return code

    def _wait(self, process: subprocess.Popen[str]) -> int:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_SIGNAL_AGAIN_S)
            if self.interrupts:
                process.send_signal(signal.SIGUSR1)

    def _copy(self, stream: IO[str], log: IO[str]) -> None:
        # The pipe must be read even if log or terminal fail, or the run would block on it.
        with stream, log:
            for line in stream:
                with suppress(OSError):
                    log.write(line)
                    log.flush()
                if not self.quiet:
                    try:
                        sys.stdout.write(line)
                        sys.stdout.flush()
                    except OSError:  # the reader is gone: `submit --local | head`
                        self.quiet = True
