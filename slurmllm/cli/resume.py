"""`slurmllm resume RUN`: submit a run again, from its newest checkpoint."""

from __future__ import annotations

import click

from slurmllm.cli import options


@click.command()
@click.argument("run")
@click.option("--nodes", type=int, help="Nodes from now on.  [default: as before]")
@click.option("--local", is_flag=True, help="Go on on this machine, without Slurm.")
@options.runs_dir
@options.as_json
@click.pass_context
def resume(
    ctx: click.Context,
    run: str,
    nodes: int | None,
    local: bool,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Continue RUN after it was cancelled or stopped: same directory, next attempt.

    The precompile stage runs again only where it left no complete archive. A run that was
    started with --local goes on locally.
    """
    from slurmllm.cli import submission
    from slurmllm.cli.submit import print_submission, run_and_report
    from slurmllm.config.resolve import load
    from slurmllm.errors import RunError
    from slurmllm.rundir import Stage, find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.supervise.state import is_active, run_state

    root = runs_root(runs_dir)
    found = find_run(run, root)
    client = SlurmCommands()
    submissions = submission.jobs_of(found).submissions
    before = submissions[-1] if submissions else None
    if before is not None and is_active(found, client):
        raise RunError(
            f"{found.name} still waits or runs; follow it with `slurmllm status {found.name}` or "
            f"`slurmllm cancel {found.name}` first"
        )
    if run_state(found, client).state == "done":
        raise RunError(f"{found.name} is done: it has trained all its steps; nothing to resume")
    config = load(found.config)
    submission.check_trainable(config)
    config = submission.with_inputs(config, root, build=True)
    wanted = nodes if nodes is not None else before.nodes if before else 1
    prepared = submission.prepare(config, wanted, found)
    submission.write_run(prepared)
    stages: tuple[Stage, ...] = ("precompile", "train")
    if submission.has_graphs(found):
        stages = ("train",)
    if local or (before is not None and before.local):
        ctx.exit(run_and_report(prepared, stages, as_json))
    print_submission(prepared, submission.submit_jobs(prepared, stages, client), as_json)
