"""The verbs that the job scripts call: supervise, launch (one process per node), worker."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from slurmllm.run.rundir import Stage

_RUN = click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
# Unchecked: thousands of workers start at once, and their launchers have just read the run.
_RUN_OF_WORKER = click.argument("run")
_STAGE = click.option("--stage", type=click.Choice(["precompile", "train"]), required=True)
_ATTEMPT = click.option("--attempt", type=int, required=True)


@click.command(hidden=True)
@_RUN
@_STAGE
@click.pass_context
def supervise(ctx: click.Context, run: Path, stage: Stage) -> None:
    """Run one attempt of a stage on this allocation (called by the batch script)."""
    from slurmllm.log import setup_logging
    from slurmllm.run.rundir import RunDir
    from slurmllm.supervise.supervisor import supervise as run_supervisor

    setup_logging()
    ctx.exit(run_supervisor(RunDir(run), stage))


@click.command(hidden=True)
@_RUN
@_STAGE
@_ATTEMPT
@click.pass_context
def launch(ctx: click.Context, run: Path, stage: Stage, attempt: int) -> None:
    """Start this node's workers (called by the supervisor through srun)."""
    from slurmllm.config.load import load
    from slurmllm.errors import NodeError
    from slurmllm.log import setup_logging
    from slurmllm.run.rundir import RunDir
    from slurmllm.supervise.launcher import Launcher

    setup_logging()
    if "SLURMLLM_CACHE" not in os.environ:
        raise NodeError("SLURMLLM_CACHE is not set: `launch` is started by the job scripts")
    kind = Launcher
    if load(run / "config.yaml", trusted=True).recipe.command is not None:
        from slurmllm.supervise.trainer import TrainerLauncher

        kind = TrainerLauncher
    ctx.exit(kind(RunDir(run), stage, attempt).main())


@click.command(hidden=True)
@_RUN_OF_WORKER
@_STAGE
@_ATTEMPT
@click.pass_context
def worker(ctx: click.Context, run: str, stage: Stage, attempt: int) -> None:
    """Train on one device (called by the launcher)."""
    from slurmllm.log import setup_logging
    from slurmllm.run.rundir import RunDir

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
    ctx.exit(code)
