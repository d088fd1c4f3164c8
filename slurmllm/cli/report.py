"""`slurmllm report`: what runs cost, and where their node hours went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.analysis.usage.recoveries import Recovery
    from slurmllm.analysis.usage.utilization import Utilization
    from slurmllm.rundir import RunDir

_SHOWN_RECOVERIES = 20


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…")
@click.option("--price", type=float, metavar="USD", help="Of a node hour; adds dollars.")
@click.option("--plot", metavar="FILE.png", help="Picture: a stacked bar a run.")
@options.runs_dir
@options.as_json
def report(
    *,
    runs: tuple[str, ...],
    price: float | None,
    plot: str | None,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Say how many of the node hours of RUN… trained, and what each failure cost.

    Node hours are Slurm's own (sacct) where it keeps accounts, else the attempts'.

    Exit codes: 0; 2 no such run, unusable options; 4 the picture cannot be written.
    """
    import json

    from slurmllm.analysis.usage.utilization import total
    from slurmllm.errors import UserError
    from slurmllm.rundir import find_run, runs_root

    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"--price {price:g}: dollars for a node hour, 0 or more, such as 21.50")
    if plot is not None and Path(plot).suffix.lower() != ".png":
        raise UserError(f"--plot {plot}: the picture is a PNG; name it {Path(plot).stem}.png")
    root = runs_root(runs_dir)
    found = {run.path: run for run in (find_run(name, root) for name in runs)}
    accounts = [(run.name, *_account(run, price)) for run in found.values()]
    sums = total([used for _, used, _ in accounts])
    if plot is not None:
        from slurmllm.analysis.usage.plot import draw

        draw(_by_name(accounts), Path(plot))
    if as_json:
        entries = [_as_json(name, used, lost) for name, used, lost in accounts]
        click.echo(json.dumps({"runs": entries, "total": sums.model_dump(mode="json")}, indent=2))
        return
    _print_parts(accounts, sums)
    for name, used, lost in accounts:
        _print_recoveries(name, lost)
        for warning in used.warnings:
            click.echo(f"warning: {name}: {warning}")
    if plot is not None:
        click.echo(f"picture: {plot}")


def _account(run: RunDir, price: float | None) -> tuple[Utilization, list[Recovery]]:
    from slurmllm.analysis.usage.history import read_history, submissions
    from slurmllm.analysis.usage.incarnations import incarnations
    from slurmllm.analysis.usage.recoveries import recoveries
    from slurmllm.analysis.usage.utilization import utilization
    from slurmllm.slurm.client import SlurmCommands

    history = read_history(run, incarnations(submissions(run), SlurmCommands()))
    return utilization(history, price), recoveries(history)


def _by_name(
    accounts: Sequence[tuple[str, Utilization, list[Recovery]]],
) -> dict[str, Utilization]:
    """Runs of one name in several folders are told apart by a number."""
    named: dict[str, Utilization] = {}
    for name, used, _ in accounts:
        same = sum(other == name or other.startswith(f"{name} (") for other in named)
        named[f"{name} ({same + 1})" if same else name] = used
    return named


def _as_json(name: str, used: Utilization, lost: list[Recovery]) -> dict[str, Any]:
    from slurmllm.analysis.usage.recoveries import by_ending

    return {
        "name": name,
        "utilization": used.model_dump(mode="json"),
        "recoveries": [one.model_dump(mode="json", by_alias=True) for one in lost],
        "endings": [one.model_dump(mode="json", by_alias=True) for one in by_ending(lost)],
    }


def _print_parts(
    accounts: Sequence[tuple[str, Utilization, list[Recovery]]], sums: Utilization
) -> None:
    """A row a part, a column a run."""
    from slurmllm.analysis.usage.spending import PARTS
    from slurmllm.cli.output import print_table

    columns = _by_name(accounts)
    if len(columns) > 1:
        columns["total"] = sums
    used = columns.values()
    rows: list[tuple[str, ...]] = [("node hours", *(_hours(u.node_hours) for u in used))]
    for part in PARTS:
        if any(u.parts[part] for u in used):
            cells = (_with_share(u.parts[part], u.shares[part]) for u in used)
            rows.append((f"  {part.replace('_', ' ')}", *cells))
    rows += [
        ("effective utilization", *(_percent(u.effective) for u in used)),
        ("wall time, h", *(_hours(u.wall_hours) for u in used)),
        ("  in the queue", *(_hours(u.queue_hours) for u in used)),
        ("goodput: productive", *(_percent(u.goodput) for u in used)),
        ("uptime: steps and saves", *(_percent(u.uptime) for u in used)),
        ("train attempts", *(str(u.attempts) for u in used)),
        ("steps", *(str(u.steps) for u in used)),
        ("  made and lost", *(str(u.steps_lost) for u in used)),
    ]
    if any(u.usd is not None for u in used):
        rows.append(("dollars", *(_dollars(u.usd) for u in used)))
        rows.append(("  not productive", *(_dollars(u.wasted_usd) for u in used)))
    print_table(("", *columns), rows)


def _print_recoveries(name: str, lost: list[Recovery]) -> None:
    """What each ending cost, and all of a class together."""
    from slurmllm.analysis.usage.recoveries import RECOVERY_PHASES, by_ending
    from slurmllm.cli.output import print_table

    if not lost:
        return
    click.echo(f"\n{name}: from the last completed step before an ending to the next one, s")
    headings = ("attempt", "class", "after step", "steps lost", "seconds", "beyond requeue")
    rows = (
        (
            str(one.attempt),
            " ".join((one.ending, *(f"+ {further}" for further in one.further))),
            "-" if one.last_step is None else str(one.last_step),
            str(one.steps_lost),
            _seconds(one.seconds),
            _seconds(one.beyond_requeue_s),
            *(_seconds(one.phases_s[phase]) for phase in RECOVERY_PHASES),
        )
        for one in lost[-_SHOWN_RECOVERIES:]
    )
    names = tuple(phase.replace("_", " ") for phase in RECOVERY_PHASES)
    print_table((*headings, *names), rows)
    if len(lost) > _SHOWN_RECOVERIES:
        click.echo(f"… and {len(lost) - _SHOWN_RECOVERIES} before these; --json has all")
    click.echo("")
    print_table(
        ("class", "endings", "steps lost", "node hours", "mean seconds"),
        (
            (
                loss.ending,
                str(loss.times),
                str(loss.steps_lost),
                _hours(loss.node_hours),
                _seconds(loss.mean_s),
            )
            for loss in by_ending(lost)
        ),
    )


def _with_share(hours: float, share: float) -> str:
    return f"{_hours(hours)}  {100 * share:5.2f} %"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 100 else f"{hours:.4f}" if hours < 1 else f"{hours:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _dollars(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:,.2f}"
