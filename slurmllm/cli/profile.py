"""`slurmllm profile`: the time of profiled steps by part, and their longest operations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.profile.profile import Profile, RankResult

_SHOWN = 10  # operations


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.option(
    "--attempt", type=click.IntRange(min=0), help="Attempt.  [default: the newest with a profile]"
)
@click.option(
    "--rank", type=click.IntRange(min=0),
    help="Worker whose operations are shown.  [default: the lowest profiled]",
)  # fmt: skip
@options.runs_dir
@options.as_json
def profile(run: str, attempt: int | None, rank: int | None, runs_dir: Path, as_json: bool) -> None:
    """Show where the time of RUN's profiled steps goes.

    By part of the step, with the ten longest operations and, if several workers were profiled, who
    waits for whom. Steps are profiled with --set profile.steps=[FIRST, LAST] of submit or resume.

    Exit codes: 0 success; 2 no profile; 4 a trace cannot be read.
    """
    from slurmllm.profile.profile import read_profile
    from slurmllm.run.rundir import find_run

    found_run = find_run(run, runs_dir)
    found = read_profile(found_run, attempt, rank)
    shown = next((one for one in found.ranks if one.profile.rank == rank), found.ranks[0])
    if as_json:
        options.echo_json(
            {
                "run": found_run.name,
                "attempt": found.attempt,
                "neuron": None if found.neuron is None else str(found.neuron),
                "ranks": [_json(one) for one in found.ranks if rank in (None, one.profile.rank)],
            }
        )
        return
    _print(found_run.name, found, shown)


def _json(one: RankResult) -> dict[str, object]:
    own, files = one.profile, one.files
    return {
        "rank": own.rank,
        "node": own.node or None,
        "first_step": own.first_step,
        "last_step": own.last_step,
        "step_s": own.step_s,
        "parts": one.parts,
        "evaluation_s": own.evaluation_s,
        "waits_for": [{"rank": rank, "seconds": s} for rank, s in one.waits_for.items()],
        "operations": [operation.model_dump() for operation in own.operations[:_SHOWN]],
        "peak_bytes": own.peak_bytes,
        "trace": str(files.trace),
        "snapshot": str(files.snapshot) if files.snapshot.is_file() else None,
    }


def _print(name: str, found: Profile, shown: RankResult) -> None:
    from slurmllm.display.tables import print_line, print_table
    from slurmllm.format import format_bytes, format_percent, format_seconds
    from slurmllm.profile.trace import PARTS

    own = shown.profile
    steps = f"steps {own.first_step}–{own.last_step}"
    if own.first_step == own.last_step:
        steps = f"step {own.first_step}"
    where = "of the device" if own.device else "of the host"
    print_line(f"{name}, attempt {found.attempt}, {steps}: time {where}, a step")
    print_line()
    if len(found.ranks) > 1:
        print_table(
            ("rank", "node", "step", *PARTS, "waits for"),
            [
                (
                    str(one.profile.rank), one.profile.node or "?",
                    format_seconds(one.profile.step_s),
                    *(_share(one, part) for part in PARTS),
                    ", ".join(
                        f"rank {rank}: {format_seconds(seconds)}"
                        for rank, seconds in list(one.waits_for.items())[:3]
                    ),
                )
                for one in found.ranks
            ],
        )  # fmt: skip
        print_line()
        print_line(f"rank {own.rank}:")
    print_table(
        ("part", "time", "share"),
        [
            *((part, format_seconds(shown.parts[part]), _share(shown, part)) for part in PARTS),
            ("step", format_seconds(own.step_s), ""),
        ],
    )
    if own.evaluation_s:
        seconds = format_seconds(own.evaluation_s)
        print_line(f"evaluation after these steps, not in their time: {seconds}")
    print_line()
    longest = own.operations[:_SHOWN]
    print_table(
        ("operation", "self time", "share", "calls"),
        [
            (
                one.name[:80], format_seconds(one.self_s),
                format_percent(one.self_s / own.step_s, 1), f"{one.calls:,}",
            )
            for one in longest
        ],
    )  # fmt: skip
    print_line()
    if own.peak_bytes is not None:
        print_line(f"allocated at most: {format_bytes(own.peak_bytes)}")
    print_line(f"trace: {shown.files.trace}")
    print_line("open it at https://ui.perfetto.dev (Open trace file), which uploads nothing")
    if shown.files.snapshot.is_file():
        print_line(f"memory: {shown.files.snapshot}")
        print_line("open it at https://docs.pytorch.org/memory_viz")
    if found.neuron is not None:
        print_line(f"Neuron's profiles: {found.neuron}")


def _share(one: RankResult, part: str) -> str:
    from slurmllm.format import format_percent

    return format_percent(one.parts[part] / one.profile.step_s, 1)
