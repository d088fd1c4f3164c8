"""`slurmllm shell` and `run-stage`: look into a running job, and run a stage by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.errors import SlurmError, UserError
from slurmllm.run.rundir import RunDir, Stage, find_run

if TYPE_CHECKING:
    from slurmllm.slurm.client import SlurmClient


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.argument("command", metavar="[-- COMMAND …]", nargs=-1, type=click.UNPROCESSED)
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Enter this worker's node.")
@options.runs_dir
def shell(run: str, command: tuple[str, ...], rank: int, runs_dir: Path) -> None:
    """Open a shell on a node of RUN's running job, or run COMMAND there.

    It has the environment variables of RUN's workers and starts in RUN's directory, after the
    profile's setup and in its container. It shares the node with the workers, and ends with the
    job.
    """
    from slurmllm.backends.environment import node_local_cache, worker_environment
    from slurmllm.config.load import load
    from slurmllm.slurm.client import SlurmClient, step_options
    from slurmllm.slurm.environment import slurm_environment
    from slurmllm.submit.render import shared_folders
    from slurmllm.supervise.allocation import export_site, task_command

    run_dir = find_run(run, runs_dir)
    config = load(run_dir.config, trusted=True)
    job, node = _node_of(run_dir, rank, config.cluster.devices_per_node, SlurmClient())
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not command and not on_terminal:
        raise UserError("a shell needs a terminal; give a command: `slurmllm shell RUN -- COMMAND`")
    export_site(config, shared_folders(config, run_dir), on_terminal)
    workers = {name: value.value for name, value in worker_environment(config, run_dir).items()}
    cache = node_local_cache(config, run_dir)
    names = {"SLURMLLM_RUN": str(run_dir.path), "SLURMLLM_CACHE": cache}
    srun = ["srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap"]
    srun += ["--cpu-bind=none", f"--chdir={run_dir.path}", *(["--pty"] if on_terminal else [])]
    srun += [*step_options(), *task_command(command or ("bash",))]
    try:
        # Secrets too: the environment, unlike the command line, is this user's only.
        environment = {**slurm_environment(), **workers, **names, **config.worker_secrets()}
        os.execvpe("srun", srun, environment)  # noqa: S606 (no shell)
    except OSError as error:
        raise SlurmError(f"srun cannot be started: {error}") from error


def _node_of(run: RunDir, rank: int, workers_per_node: int, client: SlurmClient) -> tuple[str, str]:
    """Return the running job of a run, and the node of a worker.

    Raises:
        UserError: no job is running, or it has no such worker.
    """
    from slurmllm.run.records import JobsRecord
    from slurmllm.supervise.attempts import load_attempts

    last = JobsRecord.of(run).last
    if last is not None and last.local and last.allocation is None:
        raise UserError(f"{run.name} was started with --local: its workers run on {last.host}")
    ids = [] if last is None else [last.train_job, last.precompile_job, last.allocation]
    jobs = [job for job in ids if job is not None]
    queue = client.queue(jobs)
    running = [job for job in jobs if job in queue and queue[job].state == "RUNNING"]
    if not running:
        states = ", ".join(f"job {job} is {queue[job].state}" for job in jobs if job in queue)
        raise UserError(
            f"{run.name} has no running job{f': {states}' if states else ''}; `slurmllm status "
            f"{run.name}` shows its state"
        )
    job = running[0]
    # The workers' own order, if they have started.
    attempts = [*load_attempts(run, "precompile"), *load_attempts(run, "train")]
    started = [a.nodes for a in attempts if a.job_id == job and a.ended_at is None]
    nodes = started[-1] if started else client.hostnames(queue[job].nodes)
    if rank >= len(nodes) * workers_per_node:
        workers = f"{len(nodes) * workers_per_node} workers"
        raise UserError(f"--rank {rank}: job {job} has {workers}, from rank 0")
    return job, nodes[rank // workers_per_node]


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.argument("stage", type=click.Choice(["precompile", "train"]))
@options.node_count(type=int, help="Number of nodes.  [default: as before]")
@click.option("--local", is_flag=True, help="Run it on this machine, without Slurm.")
@options.runs_dir
@click.pass_context
def run_stage(
    ctx: click.Context, run: str, stage: Stage, nodes: int | None, local: bool, runs_dir: Path
) -> None:
    """Run one stage of RUN by hand, once, with its output here.

    It runs on the nodes of the allocation (salloc) of this shell, or with --local on this machine,
    as the stage's next attempt. It is never started again: exit code 75 means that a job would have
    been requeued.
    """
    from slurmllm.config.load import load
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.launch import record_local, run_locally
    from slurmllm.submit.prepare import RunRequest, prepare
    from slurmllm.submit.resume import require_ended
    from slurmllm.supervise.allocation import held_allocation
    from slurmllm.supervise.run_lock import locked

    run_dir, client, allocation = find_run(run, runs_dir), SlurmClient(), None
    require_ended(run_dir, client)  # waits: its last processes need the lock
    with locked(run_dir, "run-stage"):
        last = require_ended(run_dir, client)
        count = nodes or (last.nodes if last else 1)
        if not local:
            allocation, count = held_allocation(client, count)
        request = RunRequest(
            config=load(run_dir.config, trusted=True),
            nodes=count,
            root=runs_dir,
            run=run_dir,
            local=local,
            check_layout=False,
            check_weights=False,
            find_graphs=False,
        )
        prepared = prepare(request)
        record_local(prepared, allocation=allocation)
    ctx.exit(run_locally(prepared, stages=[stage], allocation=allocation, once=True))
