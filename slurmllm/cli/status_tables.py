"""What `slurmllm status` shows of runs, for people; a number is never cut, whatever the width."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from slurmllm.tables import PROSE, Column, fitted

if TYPE_CHECKING:
    from slurmllm.plan.mesh import Mesh
    from slurmllm.records import AttemptRecord, MicroBatchRecord
    from slurmllm.status.details import Details, WorkerProgress
    from slurmllm.status.runs import RunState


class View(NamedTuple):
    """What is shown: lines that may be longer than the terminal is wide, and tables that fit."""

    lines: Sequence[Text]
    tables: Sequence[Text]
    notes: Sequence[Text] = ()

    def print(self, console: Console) -> None:
        """Print it; the terminal, not we, breaks long lines, so that they can be copied."""
        for line in self.lines:
            console.print(line, soft_wrap=True)
        for table in self.tables:
            console.print(table, soft_wrap=True)
        for note in self.notes:
            console.print(note, soft_wrap=True)


_RUNS = (
    Column("run", room=16),
    Column("state"),
    Column("step"),
    Column("loss", drop=1),
    Column("seq/s", drop=3),
    Column("left", drop=2),
    Column("saved", drop=5),
    Column("restarts", drop=7),
    Column("node h", drop=6),
    Column("usd", drop=8),
    Column("nodes", drop=9),
    Column("why", room=PROSE, drop=4),
)
_ATTEMPTS = (
    Column("attempt"),
    Column("nodes", drop=3),
    Column("steps"),
    Column("checkpoint", drop=2),
    Column("time"),
    Column("ending"),
    Column("action", drop=1),
    Column("evidence", room=PROSE),
)


def runs_view(states: Sequence[RunState], console: Console, height: int | None = None) -> View:
    """A row a run.

    Args:
        states: Of the runs, the newest last.
        console: That they must fit on.
        height: Lines that there are for them: each has one, and older ones that do not fit are
            only counted.
    """
    shown = list(states)
    if height is not None and len(shown) > height:
        kept = {id(state) for state in sorted(shown, key=lambda s: s.active)[-max(height, 1) :]}
        shown = [state for state in shown if id(state) in kept]
    one_line = height is not None
    tables, left_out = _tables(_RUNS, [_run_row(state) for state in shown], console, one_line)
    notes = []
    if "why" in left_out and not one_line:
        notes = [Text(f"{state.name}: {state.why}") for state in shown if state.why]
    if left_out:
        notes.append(_no_room(left_out))
    if len(shown) < len(states):
        notes.append(Text(f"… and {len(states) - len(shown)} older ones", style="dim"))
    return View((), tables, notes)


def _run_row(state: RunState) -> tuple[str, ...]:
    saved = state.last_checkpoint
    if state.state == "damaged":
        return (state.name, state.state, *[""] * (len(_RUNS) - 3), state.why)
    return (
        state.name,
        state.state,
        f"{state.step}/{state.steps}",
        number(state.loss, ".4f"),
        number(state.seq_per_s, ".1f"),
        duration(state.eta_s),
        "" if saved is None else f"{saved.step}, {ago(saved.age_s)}",
        str(state.restarts),
        _hours(state.node_hours),
        number(state.usd, ",.2f"),
        str(state.nodes),
        state.why,
    )


def run_view(state: RunState, console: Console) -> View:
    """A run's figures, a line each, and its attempts, a row each."""
    lines = [
        Text.assemble((f"{name:<14} ", "bold"), value, overflow="fold")
        for name, value in _lines(state)
    ]
    open_word = "running" if state.state == "training" else "not recorded"
    rows = [_attempt_row(attempt, open_word) for attempt in state.attempts]
    if not rows:
        return View(lines, ())
    tables, left_out = _tables(_ATTEMPTS, rows, console)
    return View(lines, tables, [_no_room(left_out)] if left_out else ())


def _lines(state: RunState) -> Iterator[tuple[str, str]]:
    more = state.details
    yield "run", f"{state.name}  recipe {state.recipe}, {state.nodes} node(s)"
    yield "directory", state.run_dir
    yield "state", state.state + (f"  ({state.why})" if state.why else "")
    yield "step", _step(state)
    if more is not None and more.standing is not None:
        yield "workers", _doing(more.standing)
    if more is not None and more.mesh is not None:
        yield "batch", _batch(more.mesh, more.micro_batch)
    if state.metrics:
        norm = _finite(state.metrics.get("grad_norm"))
        yield "loss", f"{number(state.loss, '.4f')}, gradient norm {number(norm, '.3f')}"
        rate, tokens = number(state.seq_per_s, ".1f"), number(_tokens_per_s(state), ".0f")
        trained = f"; {state.tokens:,} tokens so far" if state.tokens is not None else ""
        yield "rate", f"{rate} seq/s, {tokens} tokens/s{trained}"
    for stage, job in state.jobs.items():
        if job.state != "UNKNOWN" or state.state == "unknown":
            yield f"{stage} job", f"{job.job_id} {job.state} {job.reason}".rstrip()
    if state.checkpoints:
        saved = state.last_checkpoint
        age = f"; step {saved.step} {ago(saved.age_s)}" if saved is not None else "; none is whole"
        yield "checkpoints", ", ".join(f"step {step}" for step in state.checkpoints) + age
    yield "restarts", str(state.restarts)
    usd = f", {state.usd:,.2f} dollars" if state.usd is not None else ""
    yield "cost so far", f"{_hours(state.node_hours)} node hours{usd}"
    if more is not None:
        yield from _detail_lines(state, more)


def _detail_lines(state: RunState, more: Details) -> Iterator[tuple[str, str]]:
    if more.cold_first_step_s is not None:
        cold = f"first step {more.cold_first_step_s:.1f} s with an empty cache (precompile)"
        warm = "; ".join(
            f"{node} {seconds:.1f} s, {hits} hits, {misses} misses"
            for node, (seconds, hits, misses) in list(more.first_steps.items())[:4]
        )
        yield "graph cache", f"{cold}{'; last attempt: ' + warm if warm else ''}"
    if more.graphs is not None and more.graphs.reused_from is not None:
        yield "graphs", f"compiled by run {more.graphs.reused_from}"
    for line in more.uncompiled:
        yield "uncompiled", line
    if state.attempts and state.attempts[-1].new_graphs:
        added = state.attempts[-1].new_graphs
        words = ", ".join(added[:4]) + (" …" if len(added) > 4 else "")
        yield "graphs added", f"{len(added)} by the last attempt: {words}"
    for off in more.excluded:
        yield "keeps off", f"{off.node} until {time.ctime(off.until)}: {off.reason}"
    for skip in more.skips:
        yield "skips", f"batches {skip.first}–{skip.last}: {skip.reason}"
    if more.unequal_versions:
        yield "warning", more.unequal_versions


def _step(state: RunState) -> str:
    words = f"{state.step}/{state.steps}"
    if state.eta_s is None or state.finish_at is None:
        return words
    day = "%H:%M" if state.eta_s < 12 * 3600 else "%a %d %b %H:%M"
    return (
        f"{words}, {duration(state.eta_s)} left (until "
        f"{time.strftime(day, time.localtime(state.finish_at))})"
    )


def _tokens_per_s(state: RunState) -> float | None:
    """At the steady rate: by what the last row says that a sequence holds."""
    sequences, tokens = (_finite(state.metrics.get(k)) for k in ("seq_per_s", "tokens_per_s"))
    if state.seq_per_s is None or not sequences or tokens is None:
        return tokens
    return state.seq_per_s * tokens / sequences


def _batch(mesh: Mesh, measured: MicroBatchRecord | None) -> str:
    """`8 = data 2 × 1 × micro batch 4`, and where that came from."""
    if mesh.unmeasured:
        return f"{mesh.global_batch}; micro batch auto: measured by the precompile stage"
    words = (
        f"{mesh.global_batch} = data {mesh.data} × {mesh.accumulation} × micro batch "
        f"{mesh.micro_batch}"
    )
    if measured is None:
        return words
    tried = ", ".join(str(candidate.micro_batch) for candidate in measured.candidates)
    return f"{words}; auto: {measured.micro_batch} chosen of {tried} on {measured.nodes[0]}"


def _doing(standing: WorkerProgress) -> str:
    """`stepping after step 41`, and how long nothing has moved, where that is worth a word."""
    words = f"{standing.phase.replace('_', ' ')} after step {standing.step}"
    if standing.unchanged_s >= 10:
        what = "no step" if standing.phase == "stepping" else "no change"
        words += f", {what} for {duration(standing.unchanged_s)}"
        if standing.limit_s is not None:
            words += f" (limit {duration(standing.limit_s)})"
    if standing.behind:
        ranks = ", ".join(map(str, standing.behind[:8]))
        words += f"; behind the others: rank {ranks}" + (" …" if len(standing.behind) > 8 else "")
    return words


def _attempt_row(attempt: AttemptRecord, open_word: str) -> tuple[str, ...]:
    ended = attempt.ended_at
    return (
        str(attempt.attempt),
        " ".join(attempt.nodes[:4]) + (" …" if len(attempt.nodes) > 4 else ""),
        f"{attempt.first_step}–{attempt.last_step}" if attempt.last_step else "",
        str(attempt.checkpoint_after or ""),
        duration(ended - attempt.started_at) if ended else "",
        attempt.ending or open_word,
        attempt.action or "",
        "; ".join(attempt.evidence),
    )


def _tables(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    console: Console,
    one_line: bool = False,
) -> tuple[list[Text], list[str]]:
    """The tables of those columns that say anything, and the names of those without room."""
    told = [at for at in range(len(columns)) if at == 0 or any(row[at] for row in rows)]
    chosen = [[row[at] for at in told] for row in rows]
    found = fitted([columns[at] for at in told], chosen, console.width, one_line)
    tables = [
        Text.assemble((heading, "bold"), *(f"\n{line}" for line in lines), no_wrap=True)
        for heading, *lines in found.parts
    ]
    return tables, found.left_out


def _no_room(columns: Sequence[str]) -> Text:
    return Text(f"no room for {', '.join(columns)}; --json has them", style="dim")


def number(value: float | None, form: str) -> str:
    """A number in a format; empty where there is none."""
    return "" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """`1:02:03`; empty where it is not known."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def ago(seconds: float) -> str:
    """`12 s ago`, `3 min ago`, `5 h ago`, `2 days ago`."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 100 else f"{hours:.4f}" if hours < 1 else f"{hours:.2f}"


def _finite(value: object) -> float | None:
    from slurmllm.metrics.step_time import finite_number

    return finite_number({"value": value}, "value")
