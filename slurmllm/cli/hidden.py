"""The verbs that job scripts and srun call on the nodes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click
from click.exceptions import Exit

from slurmllm.core.log import setup_logging
from slurmllm.core.run.rundir import RunDir, Stage

_RUN = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
_STAGE = click.option("--stage", type=click.Choice(["precompile", "train"]), required=True)
_ATTEMPT = click.option("--attempt", type=int, required=True)


@click.command(hidden=True)
@_RUN
@_STAGE
def supervise(run: Path, stage: Stage) -> None:
    """Run one attempt of a stage on this allocation (called by the batch script)."""
    from slurmllm.launch.supervise.supervisor import supervise as run_supervisor

    setup_logging()
    raise Exit(run_supervisor(RunDir(run), stage))


@click.command(hidden=True)
@_RUN
@_STAGE
@_ATTEMPT
def launch(run: Path, stage: Stage, attempt: int) -> None:
    """Start this node's workers (called by the supervisor through srun)."""
    from slurmllm.core.config.load import load
    from slurmllm.core.errors import NodeError
    from slurmllm.launch.supervise.launcher import Launcher

    setup_logging()
    if "SLURMLLM_CACHE" not in os.environ:
        raise NodeError("SLURMLLM_CACHE is not set: `launch` is started by the job scripts")
    kind = Launcher
    if not load(run / "config.yaml", trusted=True).recipe.worker.has_model:
        from slurmllm.launch.supervise.trainer import TrainerLauncher

        kind = TrainerLauncher
    raise Exit(kind(RunDir(run), stage, attempt).main())


@click.command(hidden=True)
# Unchecked: thousands of workers start at once, and their launchers have just read the run.
@click.argument("run")
@_STAGE
@_ATTEMPT
def worker(run: str, stage: Stage, attempt: int) -> None:
    """Run one worker of an attempt of RUN, a run directory (called by the launcher)."""
    # Before the import of torch, which takes seconds and may warn.
    rank = os.environ.get("RANK", "")
    setup_logging(int(rank) if rank.isdigit() else None)
    from slurmllm.train.worker import run_worker

    code = run_worker(RunDir(Path(run)), stage, attempt)
    if "torch" in sys.modules and "torch_xla" not in sys.modules:
        # Threads of torch's C++ may outlive the interpreter and abort the process when all is done
        # and saved ("terminate called without an active exception"; seen with gloo).
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise Exit(code)


@click.command("evaluate-checkpoint", hidden=True)
@_RUN
@click.argument("step", type=int, required=False)
def evaluate_checkpoint(run: Path, step: int | None) -> None:
    """Evaluate a checkpoint of RUN; without STEP, watch for new ones (called by the supervisor)."""
    from slurmllm.analysis.evaluate import evaluator
    from slurmllm.cli.track import stop_event
    from slurmllm.core.config.load import load
    from slurmllm.core.run.records import JobsRecord
    from slurmllm.core.slurm.client import SlurmClient

    setup_logging()
    directory = RunDir(run)
    config = load(directory.config, trusted=True)
    if step is not None:
        evaluator.evaluate_checkpoint(directory, config, step)
        return
    client = None if JobsRecord.last_of(directory).local else SlurmClient()
    evaluator.Evaluator(directory, config, client).watch(stop_event())


@click.command("check-node", hidden=True)
@click.option("--profile", required=True, help="The cluster profile, as JSON.")
@click.option("--backend", required=True)
@click.option("--marker-file", type=click.Path(path_type=Path), required=True)
def check_node(profile: str, backend: str, marker_file: Path) -> None:
    """Check this node and report one line per finding (called through srun)."""
    from slurmllm.core.config.cluster import Cluster
    from slurmllm.launch.diagnose import node
    from slurmllm.train.control.rendezvous import NODE_NAME

    name = os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    node.check_node(name, Cluster.model_validate_json(profile), backend, marker_file)


@click.command(hidden=True)
@click.option("--nodes", type=int, required=True)
@click.option("--workers", type=int, required=True, help="On each node.")
@click.option("--device", required=True)
@click.option("--address", required=True, help="Of the rendezvous.")
@click.option("--port", required=True, help="Of the rendezvous.")
@click.option("--floor", required=True, help="GB/s; below it, pairs of nodes are measured.")
def allreduce(nodes: int, workers: int, device: str, address: str, port: str, floor: str) -> None:
    """Run this node's workers of an all-reduce (called through srun)."""
    import subprocess

    from slurmllm.train.control.rendezvous import (
        die_with_parent,
        own_node_rank,
        rendezvous_variables,
    )

    command = [sys.executable, "-P", "-m", "slurmllm.launch.diagnose.allreduce", device, floor]
    processes = []
    for local_rank in range(workers):
        variables = rendezvous_variables(
            address,
            port,
            nodes=nodes,
            workers_per_node=workers,
            node_rank=own_node_rank(),
            local_rank=local_rank,
        )
        # One thread each: workers of one node would compete for its CPUs.
        env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=env, preexec_fn=die_with_parent))
    raise Exit(max(abs(worker.wait()) for worker in processes))
