"""`slurmllm profile`: the time of profiled steps by part, and their longest operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.display.tables import print_line, print_table
from slurmllm.format import format_bytes, format_percent, format_seconds
from slurmllm.run.rundir import find_run

if TYPE_CHECKING:
    from slurmllm.profile.profile import RankResult

_SHOWN = 10  # operations
_Number = click.IntRange(min=0)


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.option("--attempt", type=_Number, help="Attempt.  [default: the newest with a profile]")
@click.option("--rank", type=_Number, help="Show its operations.  [default: the lowest profiled]")
@options.runs_dir
@options.as_json
def profile(run: str, attempt: int | None, rank: int | None, runs_dir: Path, as_json: bool) -> None:
    """Show where the time of RUN's profiled steps goes.

    By part of the step, with the ten longest operations and, if several workers were profiled, who
    waits for whom. Steps are profiled with --set profile.steps=[FIRST, LAST] of submit or resume.

    Exit codes: 0 success; 2 no profile; 4 a trace cannot be read.
    """
    from slurmllm.profile.profile import read_profile

    run_dir = find_run(run, runs_dir)
    profile = read_profile(run_dir, attempt, rank)
    if as_json:
        ranks = [_json(worker) for worker in profile.ranks if rank in (None, worker.profile.rank)]
        neuron = None if profile.neuron is None else str(profile.neuron)
        values = {"run": run_dir.name, "attempt": profile.attempt, "neuron": neuron}
        options.echo_json({**values, "ranks": ranks})
        return
    shown = next((w for w in profile.ranks if w.profile.rank == rank), profile.ranks[0])
    steps = f"steps {shown.profile.first_step}–{shown.profile.last_step}"
    if shown.profile.num_steps == 1:
        steps = f"step {shown.profile.first_step}"
    where = "of the device" if shown.profile.device else "of the host"
    print_line(f"{run_dir.name}, attempt {profile.attempt}, {steps}: time {where}, a step")
    print_line()
    if len(profile.ranks) > 1:
        _print_ranks(profile.ranks)
        print_line(f"rank {shown.profile.rank}:")
    _print_worker(shown)
    if profile.neuron is not None:
        print_line(f"Neuron's profiles: {profile.neuron}")


def _json(worker: RankResult) -> dict[str, object]:
    profile, files = worker.profile, worker.files
    fields = {"rank", "first_step", "last_step", "step_s", "evaluation_s", "peak_bytes"}
    return {
        **profile.model_dump(include=fields),
        "node": profile.node or None,
        "parts": worker.parts,
        "waits_for": [{"rank": rank, "seconds": s} for rank, s in worker.waits_for.items()],
        "operations": [operation.model_dump() for operation in profile.operations[:_SHOWN]],
        "trace": str(files.trace),
        "snapshot": str(files.snapshot) if files.snapshot.is_file() else None,
    }


def _print_ranks(ranks: Sequence[RankResult]) -> None:
    from slurmllm.profile.trace import PARTS

    rows = []
    for worker in ranks:
        longest = list(worker.waits_for.items())[:3]
        waits = ", ".join(f"rank {rank}: {format_seconds(seconds)}" for rank, seconds in longest)
        shares = (_share(worker, part) for part in PARTS)
        profile = worker.profile
        step = format_seconds(profile.step_s)
        rows.append((str(profile.rank), profile.node or "?", step, *shares, waits))
    print_table(("rank", "node", "step", *PARTS, "waits for"), rows)
    print_line()


def _print_worker(worker: RankResult) -> None:
    """Print the parts of a step, the longest operations, and the files."""
    from slurmllm.profile.trace import PARTS

    profile, files = worker.profile, worker.files
    rows = [(part, format_seconds(worker.parts[part]), _share(worker, part)) for part in PARTS]
    print_table(("part", "time", "share"), [*rows, ("step", format_seconds(profile.step_s), "")])
    if profile.evaluation_s:
        seconds = format_seconds(profile.evaluation_s)
        print_line(f"evaluation after these steps, not in their time: {seconds}")
    print_line()
    operations = []
    for operation in profile.operations[:_SHOWN]:
        share = format_percent(operation.self_s / profile.step_s, 1)
        seconds = format_seconds(operation.self_s)
        operations.append((operation.name[:80], seconds, share, f"{operation.calls:,}"))
    print_table(("operation", "self time", "share", "calls"), operations)
    print_line()
    if profile.peak_bytes is not None:
        print_line(f"allocated at most: {format_bytes(profile.peak_bytes)}")
    print_line(f"trace: {files.trace}")
    print_line("open it at https://ui.perfetto.dev (Open trace file), which uploads nothing")
    if files.snapshot.is_file():
        print_line(f"memory: {files.snapshot}")
        print_line("open it at https://docs.pytorch.org/memory_viz")


def _share(worker: RankResult, part: str) -> str:
    return format_percent(worker.parts[part] / worker.profile.step_s, 1)
