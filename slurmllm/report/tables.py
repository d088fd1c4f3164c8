"""The tables of a report: summary, setting, attempts, node hours, checkpoints, scores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmllm.config.load import LenientConfig
from slurmllm.evaluate.scores import ScoreTable
from slurmllm.format import (
    ABSENT,
    format_bytes,
    format_count,
    format_dollars,
    format_elapsed,
    format_hours,
    format_integer,
    format_names,
    format_number,
    format_percent,
    format_plural,
    format_utc,
)
from slurmllm.plan.mesh import Mesh
from slurmllm.report.facts import RunFacts
from slurmllm.report.throughput import FIRST_STEPS, ScalingRow
from slurmllm.run.records import TIME_PARTS
from slurmllm.status.recoveries import RECOVERY_PHASES, FailureRecovery, sum_by_ending
from slurmllm.status.utilization import Utilization, sum_utilization

_NUMBER = re.compile(
    r"^(-|never|(× )?[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[kMGT]?B|[KMBT]))?"
    r"( ± [\d.e-]+)?( \([+-][\d.]+ SE\))?)$"
)
_SHOWN_REMOVED = 50
_SHOWN_CHECKPOINTS = 5
_SHOWN_RECOVERIES = 20
RECOVERIES_CAPTION = "from the last completed step before an ending to the next one, s"


@dataclass(frozen=True)
class Table:
    """A table with one heading per column."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold only numbers and are right-aligned."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headings)
        return [
            i > 0 and all(_NUMBER.match(cell.partition("  ")[0]) for cell in column)
            for i, column in enumerate(columns)
        ]


def verdict(facts: RunFacts) -> str:
    """The outcome of a run, in a sentence or two."""
    made = f"{format_integer(facts.steps)} steps"
    if facts.planned_steps is not None:
        made = f"{format_integer(facts.steps)} of {format_integer(facts.planned_steps)} steps"
    begin = {
        "log": f"{made} in a {facts.kind} log",
        "not started": "no step yet",
        "open": f"{made}; the last attempt has no recorded end",
        "requeued": f"{made}; requeued",
        "cancelled": f"cancelled at {made}",
    }.get(facts.state, f"{facts.state}: {made}")
    if facts.state == "stopped" and facts.train:
        last = facts.train[-1]
        why = "; ".join(last.evidence) or "no evidence"
        begin = f"stopped at {made} ({last.ending or 'unknown'}: {why})"
    parts = [begin]
    if facts.tokens is not None:
        parts.append(f"{format_count(facts.tokens)} tokens")
    if facts.loss is not None:
        parts.append(f"loss {format_number(facts.loss)}")
    if facts.rate is not None and facts.rate.seq_per_s is not None:
        parts.append(f"{format_number(facts.rate.seq_per_s)} seq/s")
    sentence = f"{', '.join(parts)}."
    if facts.kind == "run" and facts.train:
        classes = sorted({one.ending.replace("_", " ") for one in facts.lost})
        sentence += f" {format_plural(facts.restarts, 'restart')}"
        sentence += f" ({', '.join(classes)})" if classes and facts.restarts else ""
    if facts.used is not None and facts.used.node_hours:
        sentence += f"; {format_hours(facts.used.node_hours)} node hours"
        if facts.usd is not None:
            sentence += f", ${format_dollars(facts.usd)}"
        if facts.used.steps:
            sentence += f", of which {format_percent(facts.used.effective)} trained"
        sentence += "."
    elif not sentence.endswith("."):
        sentence += "."
    return sentence


def throughput_table(runs: Sequence[RunFacts]) -> Table:
    """Throughput and cost, one column per run."""
    return _by_column(runs, [_throughput(facts) for facts in runs])


def _throughput(facts: RunFacts) -> dict[str, str | None]:
    rate = facts.rate
    first = format_number(rate.seq_per_s_first_500) if rate else None
    if rate and rate.seq_per_s_first_500 is not None and rate.first_steps < FIRST_STEPS:
        first = f"{first}  ({rate.first_steps} steps)"
    return {
        f"seq/s, mean of the first {FIRST_STEPS} steps": first,
        "seq/s, mean of all steps": format_number(rate.seq_per_s) if rate else None,
        "tokens/s": format_number(rate.tokens_per_s) if rate else None,
        "a step, median, s": format_number(rate.step_s) if rate else None,
        "MFU": format_percent(rate.mfu) if rate else None,
        "tokens/$": format_count(rate.tokens_per_usd) if rate else None,
        "tokens/$, losses and waits included": format_count(facts.tokens_per_usd_bought),
    }


def summary_table(runs: Sequence[RunFacts]) -> Table:
    """The most important figures, one column per run."""
    columns: list[dict[str, str | None]] = []
    for facts in runs:
        # Without attempt records the node hours would be 0, which is not what the run cost.
        used = facts.used if facts.attempts else None
        columns.append(
            {
                "state": facts.state,
                "steps": format_integer(facts.steps),
                "planned steps": format_integer(facts.planned_steps),
                "tokens": format_integer(facts.tokens),
                "loss": format_number(facts.loss),
                "validation loss": format_number(facts.val_loss),
                **_throughput(facts),
                "wall time, h": format_hours(used.wall_hours) if used else None,
                "node hours": format_hours(used.node_hours) if used else None,
                "dollars": format_dollars(facts.usd),
                "effective utilization": format_percent(used.effective) if used else None,
                "restarts": format_integer(facts.restarts),
            }
        )
    return _by_column(runs, columns)


def setting_table(runs: Sequence[RunFacts]) -> Table:
    """What ran where, one column per run."""
    columns: list[dict[str, str | None]] = []
    for facts in runs:
        given, mesh = facts.configuration, facts.mesh
        family, optimizer = given.text("model.family"), given.text("optim.name")
        columns.append(
            {
                "read from": str(facts.path),
                "recipe": facts.recipe,
                "model": family and f"{family}, {_layers(given)}",
                "parameters": format_integer(facts.parameters),
                "sequence length": format_integer(given.count("model.seq_len")),
                "mesh": _format_mesh(mesh) if mesh else None,
                "global batch": format_integer(given.count("train.global_batch")),
                "micro batch × accumulation": (
                    f"{mesh.micro_batch} × {mesh.accumulation}"
                    if mesh is not None and not mesh.unmeasured
                    else None
                ),
                "precision": given.text("train.precision"),
                "optimizer": (
                    optimizer and f"{optimizer}, lr {(given.values or {}).get('optim.lr')}"
                ),
                "backend": given.config.backend if given.config else None,
                "cluster": given.text("cluster.name"),
                "instance type": given.text("cluster.instance_type"),
                "nodes": format_integer(facts.nodes or None),
                "versions": ", ".join(f"{k} {v}" for k, v in sorted(facts.versions.items())),
                "data": "; ".join(
                    f"{corpus.path.rstrip('/').rpartition('/')[2]}, "
                    f"{format_integer(corpus.documents)} documents, fingerprint "
                    f"{corpus.fingerprint[:16]}"
                    for corpus in (facts.data.corpora if facts.data is not None else ())
                ),
                "price of a node hour": None if facts.price is None else str(facts.price),
            }
        )
    return _by_column(runs, columns)


def _layers(given: LenientConfig) -> str:
    # A configuration of a newer version may lack any of them.
    layers, hidden, heads = (
        "?" if value is None else format_integer(value)
        for value in map(given.count, ("model.num_layers", "model.hidden_size", "model.num_heads"))
    )
    return f"{layers} layers, hidden size {hidden}, {heads} heads"


def _format_mesh(mesh: Mesh) -> str:
    stages = f" × {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    workers = format_plural(mesh.world_size, "worker")
    return f"tensor {mesh.tensor}, pipeline {mesh.pipeline}{stages}, data {mesh.data}: {workers}"


def _by_column(runs: Sequence[RunFacts], columns: Sequence[Mapping[str, str | None]]) -> Table:
    """A table of one column per run, without rows that no run has a value for."""
    rows = []
    for heading in columns[0] if columns else ():
        values = [column[heading] or ABSENT for column in columns]
        if any(value != ABSENT for value in values):
            rows.append((heading, *values))
    return Table(("", *(facts.name for facts in runs)), rows)


def attempts_table(facts: RunFacts) -> Table:
    """Every attempt with its nodes, steps, ending and evidence."""
    return Table(
        ("attempt", "stage", "began", "nodes", "steps", "kept", "lost", "seconds", "ending",
         "action", "evidence"),
        [
            (
                str(one.attempt),
                one.stage,
                format_utc(one.started_at),
                f"{len(one.nodes)}: {format_names(one.nodes)}",
                f"{one.first_step}–{one.last_step}"
                if one.first_step is not None and one.last_step is not None
                else ABSENT,
                format_integer(one.steps_gained),
                format_integer(one.steps_lost),
                format_elapsed(None if one.ended_at is None else one.ended_at - one.started_at),
                one.ending or ("open" if one.ended_at is None else "unknown"),
                one.action or ABSENT,
                "; ".join(one.evidence) or ABSENT,
            )
            for one in facts.attempts
        ],
    )  # fmt: skip


def checkpoints_table(facts: RunFacts) -> Table:
    """The checkpoints on disk, and the latest removed ones."""
    gone = [one for one in facts.saved if one.state == "removed"]
    left_out = set(gone[:-_SHOWN_REMOVED])
    return Table(
        ("step", "tokens", "size", "saved", "save, s", "training waited, s", "attempt", "state"),
        [
            (
                format_integer(one.step),
                format_integer(one.tokens),
                format_bytes(one.bytes),
                format_utc(one.saved_at),
                format_number(one.seconds),
                format_number(one.waited_s),
                ABSENT if one.attempt is None else str(one.attempt),
                one.state,
            )
            for one in facts.saved
            if one not in left_out
        ],
    )


def scores_table(found: ScoreTable) -> Table:
    """The scores of a suite: the newest checkpoints and published models."""
    steps = found.steps[-_SHOWN_CHECKPOINTS:]
    models = list(dict.fromkeys(name for row in found.rows for name in row.references))
    columns = [f"step {format_integer(step)}" for step in steps]
    rows = []
    for row in found.rows:
        values = [format_number(row.scores.get(step)) for step in steps]
        errors = [row.errors.get(step) for step in steps]
        rows.append(
            (
                row.group,
                row.name,
                ABSENT if row.shots is None else str(row.shots),
                row.metric,
                *(
                    value if error is None or value == ABSENT else f"{value} ± {error:.2g}"
                    for value, error in zip(values, errors, strict=True)
                ),
                *(row.published(model, steps, format_number) for model in models),
            )
        )
    tokens = ", ".join(
        f"step {format_integer(step)}: {format_count(found.tokens[step])} tokens"
        for step in steps
        if step in found.tokens
    )
    sources = "; ".join(
        f"{name}: {found.sources[name]}" for name in models if name in found.sources
    )
    compared = any(row.difference(m, steps[-1]) is not None for row in found.rows for m in models)
    note = "SE: newest score less published one, in standard errors of the two" if compared else ""
    caption = ". ".join(part for part in (tokens, sources, note) if part)
    return Table(("group", "task", "shots", "metric", *columns, *models), rows, caption)


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """AWS's columns that `slurmllm plan` has too, with the same names."""
    return Table(
        ("run", "model", "parameters", "nodes", "workers", "TP", "PP", "DP", "seq len",
         "global batch", "seq/s", "tokens/s", "MFU", "$/h", "tokens/$", "scaling"),
        [
            (
                row.facts.name,
                row.facts.recipe or ABSENT,
                format_count(row.facts.parameters),
                format_integer(row.rate.nodes),
                format_integer(row.rate.workers),
                *map(format_integer, row.degrees),
                format_integer(row.facts.configuration.count("model.seq_len")),
                format_integer(row.facts.configuration.count("train.global_batch")),
                format_number(row.speed),
                format_number(row.rate.tokens_per_s_first_500 or row.rate.tokens_per_s),
                format_percent(row.rate.mfu),
                format_dollars(row.rate.usd_per_hour),
                format_count(row.rate.tokens_per_usd),
                format_percent(row.efficiency, 1),
            )
            for row in rows
        ],
    )  # fmt: skip


def parts_table(used: Mapping[str, Utilization]) -> Table:
    """Node hours: one row per part, one column per run, and their total."""
    columns = dict(used)
    if len(columns) > 1:
        columns["total"] = sum_utilization(list(used.values()))
    every = columns.values()
    rows: list[tuple[str, ...]] = [("node hours", *(format_hours(u.node_hours) for u in every))]
    for part in TIME_PARTS:
        if any(u.parts[part] for u in every):
            cells = (f"{format_hours(u.parts[part])}  {100 * u.shares[part]:5.2f} %" for u in every)
            rows.append((f"  {part.replace('_', ' ')}", *cells))
    rows += [
        ("effective utilization", *(format_percent(u.effective) for u in every)),
        ("wall time, h", *(format_hours(u.wall_hours) for u in every)),
        ("  in the queue", *(format_hours(u.queue_hours) for u in every)),
        ("goodput: productive", *(format_percent(u.goodput) for u in every)),
        ("uptime: steps and saves", *(format_percent(u.uptime) for u in every)),
        ("train attempts", *(str(u.attempts) for u in every)),
        ("steps", *(str(u.steps) for u in every)),
        ("  recomputed or lost", *(str(u.steps_lost) for u in every)),
    ]
    if any(u.usd is not None for u in every):
        rows.append(("dollars", *(format_dollars(u.usd) for u in every)))
        rows.append(("  not productive", *(format_dollars(u.wasted_usd) for u in every)))
    return Table(("", *columns), rows)


def recoveries_table(lost: Sequence[FailureRecovery]) -> Table:
    """The recovery from each ending, the newest last."""
    names = (phase.replace("_", " ") for phase in RECOVERY_PHASES)
    rows = [
        (
            str(one.attempt),
            " ".join((one.ending, *(f"+ {further}" for further in one.further))),
            "-" if one.last_step is None else str(one.last_step),
            str(one.steps_lost),
            format_elapsed(one.seconds),
            format_elapsed(one.beyond_requeue_s),
            *(format_elapsed(one.phases_s[phase]) for phase in RECOVERY_PHASES),
        )
        for one in lost[-_SHOWN_RECOVERIES:]
    ]
    headings = ("attempt", "class", "after step", "steps lost", "seconds", "beyond requeue", *names)
    more = len(lost) - len(rows)
    return Table(headings, rows, f"… and {more} before these" if more else "")


def endings_table(lost: Sequence[FailureRecovery]) -> Table:
    """The recoveries summed by class, the costliest first."""
    rows = [
        (
            loss.ending,
            str(loss.times),
            str(loss.steps_lost),
            format_hours(loss.node_hours),
            format_elapsed(loss.mean_s),
        )
        for loss in sum_by_ending(lost)
    ]
    return Table(("class", "endings", "steps lost", "node hours", "mean seconds"), rows)
