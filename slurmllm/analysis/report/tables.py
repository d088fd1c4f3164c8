"""The tables of a report: summary, setting, attempts, node hours, checkpoints, scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurmllm.analysis.evaluate.scores import ScoreTable, with_error
from slurmllm.analysis.report.facts import FIRST_STEPS, Rate, RunFacts, Runs, ScalingRow
from slurmllm.analysis.status.recoveries import RECOVERY_PHASES, FailureRecovery, sum_by_ending
from slurmllm.analysis.status.utilization import Utilization, sum_utilization
from slurmllm.core.config.load import LenientConfig
from slurmllm.core.format import (
    ABSENT,
    Texts,
    format_bytes,
    format_count,
    format_dollars,
    format_elapsed,
    format_hours,
    format_integer,
    format_mfu,
    format_names,
    format_number,
    format_percent,
    format_plural,
    format_utc,
)
from slurmllm.core.run.records import TIME_PARTS

_NUMBER = re.compile(
    r"^(-|never|(× )?[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[kMGT]?B|[KMBT]))?"
    r"( ± [\d.e-]+)?( \([+-][\d.]+ SE\))?)$"
)
_SHOWN_REMOVED = 50
_SHOWN_CHECKPOINTS = 5
_SHOWN_RECOVERIES = 20
Column = tuple[str, Callable[[Any], str]]  # name of a value, and its form
# Heading → key of `ScalingRow.to_json`, and the form of its values
_SCALING: Mapping[str, Column] = {
    "run": ("run", str),
    "model": ("recipe", lambda name: name or ABSENT),
    "parameters": ("parameters", format_count),
    "nodes": ("nodes", format_integer),
    "workers": ("workers", format_integer),
    "TP": ("tensor", format_integer),
    "PP": ("pipeline", format_integer),
    "DP": ("data", format_integer),
    "seq len": ("seq_len", format_integer),
    "global batch": ("global_batch", format_integer),
    "seq/s": ("seq_per_s", format_number),
    "tokens/s": ("tokens_per_s", format_number),
    "MFU": ("mfu", format_percent),
    "$/h": ("usd_per_hour", format_dollars),
    "tokens/$": ("tokens_per_usd", format_count),
    "scaling": ("scaling_efficiency", lambda share: format_percent(share, 1)),
}
# Heading → field of `Utilization`, and the form of its values; without a price no dollars
_UTILIZATION: Mapping[str, Column] = {
    "effective utilization": ("effective", format_percent),
    "wall time, h": ("wall_hours", format_hours),
    "  in the queue": ("queue_hours", format_hours),
    "goodput: productive": ("goodput", format_percent),
    "uptime: steps and saves": ("uptime", format_percent),
    "train attempts": ("attempts", str),
    "steps": ("steps", str),
    "  recomputed or lost": ("steps_lost", str),
    "dollars": ("usd", format_dollars),
    "  not productive": ("wasted_usd", format_dollars),
}
Figures = dict[str, str | None]  # by heading
RECOVERIES_CAPTION = "from the last completed step before an ending to the next one, s"


@dataclass(frozen=True)
class Table:
    """A table with one heading per column."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, str]], caption: str = "") -> Table:
        """Return a table of rows as heading → cell, all with the same headings."""
        return cls(tuple(rows[0]), [tuple(row.values()) for row in rows], caption)

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds only numbers, which are right-aligned."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headings)
        return [
            i > 0 and all(_NUMBER.match(cell.partition("  ")[0]) for cell in column)
            for i, column in enumerate(columns)
        ]


def verdict(facts: RunFacts) -> str:
    """Return the outcome of a run, in a sentence or two."""
    made = f"{format_integer(facts.steps)} steps"
    if facts.kind != "run" and facts.curve:
        made = f"steps {facts.curve.steps[0]:,} to {facts.curve.steps[-1]:,}"
    if facts.planned_steps is not None:
        made = f"{format_integer(facts.steps)} of {format_integer(facts.planned_steps)} steps"
    begin = {
        "log": f"{made} in {facts.path.name}",
        "not started": "no step yet",
        "open": f"{made}; the last attempt has no recorded end",
        "requeued": f"{made}; requeued",
        "cancelled": f"cancelled at {made}",
    }.get(facts.state, f"{facts.state_text}: {made}")
    if facts.state == "stopped" and facts.train:
        last = facts.train[-1]
        why = "; ".join(last.evidence) or "no evidence"
        begin = f"stopped at {made} ({last.ending or 'unknown'}: {why})"
    parts = [begin]
    if facts.tokens is not None:
        parts.append(f"{format_count(facts.tokens)} tokens")
    steps, losses = facts.curve.series("loss") if facts.curve else ((), np.empty(0))
    damaged = np.flatnonzero(~np.isfinite(losses))
    if damaged.size:
        name = "NaN" if np.isnan(losses[damaged[0]]) else "infinite"
        counted = format_plural(damaged.size, "step")
        parts.append(f"loss is {name} from step {steps[damaged[0]]:,} ({counted})")
    elif facts.loss is not None:
        parts.append(f"loss {format_number(facts.loss)}")
    if facts.rate and facts.rate.seq_per_s is not None:
        parts.append(f"{format_number(facts.rate.seq_per_s)} seq/s")
    more = []
    if facts.kind == "run" and facts.train:
        classes = sorted({recovery.ending.replace("_", " ") for recovery in facts.lost})
        named = f" ({', '.join(classes)})" if classes and facts.restarts else ""
        more.append(f"{format_plural(facts.restarts, 'restart')}{named}")
    if facts.used and facts.used.node_hours:
        more.append(f"{format_hours(facts.used.node_hours)} node hours")
        if facts.usd is not None:
            more[-1] += f", ${format_dollars(facts.usd)}"
        if facts.used.steps:
            more[-1] += f", of which {format_percent(facts.used.effective)} trained"
    sentences = (", ".join(parts), "; ".join(more))
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def _mfu(facts: RunFacts, rate: Rate) -> str:
    return format_mfu(rate.mfu, facts.configuration.text("train.precision"))


def throughput(facts: RunFacts) -> Figures:
    """Return throughput and cost of a run by heading."""
    rate = facts.rate
    first = format_number(rate.seq_per_s_first_500) if rate else None
    if rate and rate.seq_per_s_first_500 is not None and rate.first_steps < FIRST_STEPS:
        first = f"{first}  ({rate.first_steps} steps)"
    return {
        f"seq/s, mean of the first {FIRST_STEPS} steps": first,
        "seq/s, mean of all steps": format_number(rate.seq_per_s) if rate else None,
        "tokens/s": format_number(rate.tokens_per_s) if rate else None,
        "a step, median, s": format_number(rate.step_s) if rate else None,
        "MFU": _mfu(facts, rate) if rate else None,
        "tokens/$": format_count(rate.tokens_per_usd) if rate else None,
        "tokens/$, losses and waits included": format_count(facts.tokens_per_usd_bought),
    }


def summary(facts: RunFacts) -> Figures:
    """Return the most important figures of a run by heading."""
    # Without attempt records the node hours would be 0, which is not what the run cost.
    used = facts.used if facts.attempts else None
    return {
        "state": facts.state_text,
        "steps": format_integer(facts.steps),
        "planned steps": format_integer(facts.planned_steps),
        "tokens": format_integer(facts.tokens),
        "loss": format_number(facts.loss),
        "validation loss": format_number(facts.val_loss),
        **throughput(facts),
        "wall time, h": format_hours(used.wall_hours) if used else None,
        "node hours": format_hours(used.node_hours) if used else None,
        "dollars": format_dollars(facts.usd),
        "effective utilization": format_percent(used.effective) if used else None,
        "restarts": format_integer(facts.restarts),
    }


def setting(facts: RunFacts) -> Figures:
    """Return what ran where, by heading."""
    config = facts.configuration
    mesh = facts.mesh
    family = config.text("model.family")
    optimizer = config.text("optim.name")
    return {
        "read from": str(facts.path),
        "recipe": facts.recipe,
        "command": config.text("command.run"),
        "model": family and f"{family}, {_layers(config)}",
        "parameters": format_integer(facts.parameters),
        "sequence length": format_integer(config.count("model.seq_len")),
        "mesh": (
            f"{mesh.description}: {format_plural(mesh.world_size, 'worker')}" if mesh else None
        ),
        "global batch": format_integer(config.count("train.global_batch")),
        "micro batch × accumulation": (
            f"{mesh.micro_batch} × {mesh.accumulation}" if mesh and not mesh.unmeasured else None
        ),
        "precision": config.text("train.precision"),
        "optimizer": (optimizer and f"{optimizer}, lr {(config.values or {}).get('optim.lr')}"),
        "backend": config.config.backend if config.config else None,
        "cluster": config.text("cluster.name"),
        "instance type": config.text("cluster.instance_type"),
        "nodes": format_integer(facts.nodes or None),
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(facts.versions.items())),
        "data": "; ".join(
            f"{corpus.path.rstrip('/').rpartition('/')[2]}, "
            f"{format_integer(corpus.documents)} documents, fingerprint "
            f"{corpus.fingerprint[:16]}"
            for corpus in (facts.data.corpora if facts.data else ())
        ),
        "price of a node hour": str(facts.price) if facts.price else None,
    }


def _layers(config: LenientConfig) -> str:
    # A configuration of a newer version may lack any of them.
    layers, hidden, heads = (
        "?" if value is None else format_integer(value)
        for value in map(config.count, ("model.num_layers", "model.hidden_size", "model.num_heads"))
    )
    return f"{layers} layers, hidden size {hidden}, {heads} heads"


def by_column(runs: Runs, figures: Callable[[RunFacts], Figures]) -> Table:
    """Return a table of one column per run, without rows that no run has a value for."""
    columns = [figures(facts) for facts in runs]
    rows = []
    for heading in columns[0] if columns else ():
        values = [column[heading] or ABSENT for column in columns]
        if any(value != ABSENT for value in values):
            rows.append((heading, *values))
    return Table(("", *(facts.name for facts in runs)), rows)


def attempts_table(facts: RunFacts) -> Table:
    """Return every attempt with its nodes, steps, ending and evidence."""
    rows = []
    for attempt in facts.attempts:
        ended = attempt.ended_at
        first = attempt.first_step
        last = attempt.last_step
        rows.append(
            {
                "attempt": str(attempt.attempt),
                "stage": attempt.stage,
                "began": format_utc(attempt.started_at),
                "nodes": f"{len(attempt.nodes)}: {format_names(attempt.nodes)}",
                "steps": ABSENT if first is None or last is None else f"{first}–{last}",
                "kept": format_integer(attempt.steps_gained),
                "lost": format_integer(attempt.steps_lost),
                "seconds": format_elapsed(None if ended is None else ended - attempt.started_at),
                "ending": attempt.ending or ("open" if ended is None else "unknown"),
                "action": attempt.action or ABSENT,
                "evidence": "; ".join(attempt.evidence) or ABSENT,
            }
        )
    return Table.from_rows(rows)


def checkpoints_table(facts: RunFacts) -> Table:
    """Return the checkpoints on disk, and the latest removed ones."""
    removed = [checkpoint for checkpoint in facts.saved if checkpoint.state == "removed"]
    left_out = set(removed[:-_SHOWN_REMOVED])
    return Table.from_rows(
        [
            {
                "step": format_integer(checkpoint.step),
                "tokens": format_integer(checkpoint.tokens),
                "size": format_bytes(checkpoint.bytes),
                "saved": format_utc(checkpoint.saved_at),
                "save, s": format_number(checkpoint.seconds),
                "training waited, s": format_number(checkpoint.waited_s),
                "attempt": format_integer(checkpoint.attempt),
                "state": checkpoint.state,
            }
            for checkpoint in facts.saved
            if checkpoint not in left_out
        ]
    )


def scores_table(scores: ScoreTable) -> Table:
    """Return the scores of a suite: the newest checkpoints and published models."""
    steps = scores.steps[-_SHOWN_CHECKPOINTS:]
    models = list(dict.fromkeys(name for row in scores.rows for name in row.references))
    columns = [f"step {format_integer(step)}" for step in steps]
    rows = [
        (
            row.group,
            row.name,
            format_integer(row.shots),
            row.metric,
            *(with_error(format_number(row.scores.get(s)), row.errors.get(s)) for s in steps),
            *(row.published(model, steps, format_number) for model in models),
        )
        for row in scores.rows
    ]
    tokens = ", ".join(
        f"step {format_integer(step)}: {format_count(scores.tokens[step])} tokens"
        for step in steps
        if step in scores.tokens
    )
    sources = "; ".join(
        f"{name}: {scores.sources[name]}" for name in models if name in scores.sources
    )
    compared = any(row.difference(m, steps[-1]) is not None for row in scores.rows for m in models)
    note = "SE: newest score less published one, in standard errors of the two" if compared else ""
    caption = ". ".join(sentence for sentence in (tokens, sources, note) if sentence)
    return Table(("group", "task", "shots", "metric", *columns, *models), rows, caption)


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """Return AWS's columns that `slurmllm plan` has too, with the same names."""
    return Table.from_rows(
        [
            {heading: form(values[key]) for heading, (key, form) in _SCALING.items()}
            | {"MFU": _mfu(row.facts, row.rate)}
            for row in rows
            for values in [row.to_json()]
        ]
    )


def parts_table(used: Mapping[str, Utilization]) -> Table:
    """Return node hours: one row per part, one column per run, and their total."""
    columns = dict(used)
    if len(columns) > 1:
        columns["total"] = sum_utilization(list(used.values()))
    every = columns.values()
    rows: list[Texts] = [("node hours", *(format_hours(u.node_hours) for u in every))]
    for part in TIME_PARTS:
        if any(u.parts[part] for u in every):
            cells = (f"{format_hours(u.parts[part])}  {100 * u.shares[part]:5.2f} %" for u in every)
            rows.append((f"  {part.replace('_', ' ')}", *cells))
    for heading, (name, form) in _UTILIZATION.items():
        values = [getattr(u, name) for u in every]
        if any(value is not None for value in values) or form != format_dollars:
            rows.append((heading, *map(form, values)))
    return Table(("", *columns), rows)


def recoveries_table(lost: Sequence[FailureRecovery]) -> Table:
    """Return the recovery from each ending, the newest last."""
    rows = [
        {
            "attempt": str(recovery.attempt),
            "class": " ".join((recovery.ending, *(f"+ {ending}" for ending in recovery.further))),
            "after step": ABSENT if recovery.last_step is None else str(recovery.last_step),
            "steps lost": str(recovery.steps_lost),
            "seconds": format_elapsed(recovery.seconds),
            "beyond requeue": format_elapsed(recovery.beyond_requeue_s),
            **{p.replace("_", " "): format_elapsed(recovery.phases_s[p]) for p in RECOVERY_PHASES},
        }
        for recovery in lost[-_SHOWN_RECOVERIES:]
    ]
    more = len(lost) - len(rows)
    return Table.from_rows(rows, f"… and {more} before these" if more else "")


def endings_table(lost: Sequence[FailureRecovery]) -> Table:
    """Return the recoveries summed by class, the costliest first."""
    return Table.from_rows(
        [
            {
                "class": loss.ending,
                "endings": str(loss.times),
                "steps lost": str(loss.steps_lost),
                "node hours": format_hours(loss.node_hours),
                "mean seconds": format_elapsed(loss.mean_s),
            }
            for loss in sum_by_ending(lost)
        ]
    )
