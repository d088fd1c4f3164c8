"""Node hours and recoveries as tables, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmllm.report.blocks import Table, dollars, hours, percent, seconds
from slurmllm.status.recoveries import RECOVERY_PHASES, Recovery, by_ending
from slurmllm.status.time_breakdown import PARTS
from slurmllm.status.utilization import Utilization, total

SHOWN_RECOVERIES = 20


def parts_table(used: Mapping[str, Utilization]) -> Table:
    """A row a part, a column a run, and one of all of them where they are several."""
    columns = dict(used)
    if len(columns) > 1:
        columns["total"] = total(list(used.values()))
    every = columns.values()
    rows: list[tuple[str, ...]] = [("node hours", *(hours(u.node_hours) for u in every))]
    for part in PARTS:
        if any(u.parts[part] for u in every):
            cells = (f"{hours(u.parts[part])}  {100 * u.shares[part]:5.2f} %" for u in every)
            rows.append((f"  {part.replace('_', ' ')}", *cells))
    rows += [
        ("effective utilization", *(percent(u.effective) for u in every)),
        ("wall time, h", *(hours(u.wall_hours) for u in every)),
        ("  in the queue", *(hours(u.queue_hours) for u in every)),
        ("goodput: productive", *(percent(u.goodput) for u in every)),
        ("uptime: steps and saves", *(percent(u.uptime) for u in every)),
        ("train attempts", *(str(u.attempts) for u in every)),
        ("steps", *(str(u.steps) for u in every)),
        ("  made and lost", *(str(u.steps_lost) for u in every)),
    ]
    if any(u.usd is not None for u in every):
        rows.append(("dollars", *(dollars(u.usd) for u in every)))
        rows.append(("  not productive", *(dollars(u.wasted_usd) for u in every)))
    return Table(("", *columns), rows)


def recoveries_table(lost: Sequence[Recovery]) -> Table:
    """What each ending cost, the newest last."""
    names = (phase.replace("_", " ") for phase in RECOVERY_PHASES)
    rows = [
        (
            str(one.attempt),
            " ".join((one.ending, *(f"+ {further}" for further in one.further))),
            "-" if one.last_step is None else str(one.last_step),
            str(one.steps_lost),
            seconds(one.seconds),
            seconds(one.beyond_requeue_s),
            *(seconds(one.phases_s[phase]) for phase in RECOVERY_PHASES),
        )
        for one in lost[-SHOWN_RECOVERIES:]
    ]
    headings = ("attempt", "class", "after step", "steps lost", "seconds", "beyond requeue", *names)
    return Table(headings, rows)


def endings_table(lost: Sequence[Recovery]) -> Table:
    """All recoveries of a class together, the costliest first."""
    rows = [
        (
            loss.ending,
            str(loss.times),
            str(loss.steps_lost),
            hours(loss.node_hours),
            seconds(loss.mean_s),
        )
        for loss in by_ending(lost)
    ]
    return Table(("class", "endings", "steps lost", "node hours", "mean seconds"), rows)
