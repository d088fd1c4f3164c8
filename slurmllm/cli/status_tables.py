"""The tables of `slurmllm status`; numbers are never truncated, whatever the width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.text import Text

from slurmllm.display.tables import PROSE, Column, fitted
from slurmllm.format import format_age, format_duration, format_hours, format_time, printable
from slurmllm.metrics.evaluations import perplexity
from slurmllm.metrics.step_time import finite_number

if TYPE_CHECKING:
    from slurmllm.plan.mesh import Mesh
    from slurmllm.run.artifact_records import MicroBatchRecord
    from slurmllm.status.details import Details, WorkerProgress
    from slurmllm.status.runs import RunState


class View(NamedTuple):
    """Lines, which may be longer than the terminal is wide, and tables that fit into it."""

    lines: Sequence[Text]
    tables: Sequence[Text]
    notes: Sequence[Text] = ()

    def print(self, console: Console) -> None:
        for text in (*self.lines, *self.tables, *self.notes):
            # The terminal breaks long lines, so that they are copied without line breaks.
            console.print(text, soft_wrap=True)


_RUNS = (
    Column("run", room=16), Column("state"), Column("step"), Column("loss", drop=1),
    Column("seq/s", drop=3), Column("left", drop=2), Column("saved", drop=5),
    Column("restarts", drop=7), Column("node h", drop=6), Column("usd", drop=8),
    Column("nodes", drop=9), Column("reason", room=PROSE, drop=4),
)  # fmt: skip
_ATTEMPTS = (
    Column("attempt"), Column("nodes", drop=3), Column("steps"), Column("checkpoint", drop=2),
    Column("time"), Column("ending"), Column("action", drop=1), Column("evidence", room=PROSE),
)  # fmt: skip


def runs_view(states: Sequence[RunState], console: Console, height: int | None = None) -> View:
    """A table with one row per run, the newest last.

    With a `height` each run takes one line, and older ones that do not fit are only counted.
    """
    shown = list(states)
    if height is not None and len(shown) > height:
        # Active runs first; by identity, as two runs may have equal figures.
        kept = {id(state) for state in sorted(shown, key=lambda s: s.active)[-max(height, 1) :]}
        shown = [state for state in shown if id(state) in kept]
    # A redrawn table must not be longer than the terminal: one line per run.
    one_line = height is not None
    tables, left_out = _tables(_RUNS, [_run_row(state) for state in shown], console, one_line)
    notes = []
    if "reason" in left_out and not one_line:
        notes = [
            Text(printable(f"{state.name}: {state.reason}")) for state in shown if state.reason
        ]
    if left_out:
        notes.append(_no_room(left_out))
    if len(shown) < len(states):
        notes.append(Text(f"… and {len(states) - len(shown)} older ones", style="dim"))
    return View((), tables, notes)


def _run_row(state: RunState) -> tuple[str, ...]:
    saved = state.last_checkpoint
    if state.state == "damaged":  # no figure is known
        return (state.name, state.state, *[""] * (len(_RUNS) - 3), state.reason)
    return (
        state.name,
        state.state,
        f"{state.step}/{state.steps}",
        _number(state.loss, ".4f"),
        _number(state.seq_per_s, ".1f"),
        format_duration(state.eta_s),
        "" if saved is None else f"{saved.step}, {format_age(saved.age_s)}",
        str(state.restarts),
        format_hours(state.node_hours),
        _number(state.usd, ",.2f"),
        str(state.nodes),
        state.reason,
    )


def run_view(state: RunState, console: Console) -> View:
    """A run's figures, one line each, and a table with one row per attempt."""
    lines = [
        Text.assemble((f"{name:<14} ", "bold"), printable(value), overflow="fold")
        for name, value in _lines(state)
    ]
    open_ending = "running" if state.state == "training" else "not recorded"
    rows = [
        (
            str(one.attempt),
            " ".join(one.nodes[:4]) + (" …" if len(one.nodes) > 4 else ""),
            f"{one.first_step}–{one.last_step}" if one.last_step else "",
            str(one.checkpoint_after or ""),
            format_duration(one.ended_at - one.started_at) if one.ended_at else "",
            one.ending or open_ending,
            one.action or "",
            "; ".join(one.evidence),
        )
        for one in state.attempts
    ]
    if not rows:
        return View(lines, ())
    tables, left_out = _tables(_ATTEMPTS, rows, console)
    return View(lines, tables, [_no_room(left_out)] if left_out else ())


def _lines(state: RunState) -> Iterator[tuple[str, str]]:
    more = state.details
    yield "run", f"{state.name}  recipe {state.recipe}, {state.nodes} node(s)"
    yield "directory", state.run_dir
    if more is not None and more.trial:
        yield "data", "trial: texts that ship with Python (--data builtin), not the recipe's data"
    yield "state", state.state + (f"  ({state.reason})" if state.reason else "")
    step = f"{state.step}/{state.steps}"
    if state.eta_s is not None and state.finish_at is not None:
        step += f", {format_duration(state.eta_s)} left (until {format_time(state.finish_at)})"
    yield "step", step
    if more is not None and more.workers is not None:
        yield "workers", _progress(more.workers)
    if more is not None and more.mesh is not None:
        yield "batch", _batch(more.mesh, more.micro_batch)
    if state.metrics:
        norm = finite_number(state.metrics, "grad_norm")
        yield "loss", f"{_number(state.loss, '.4f')}, gradient norm {_number(norm, '.3f')}"
        if more is not None and more.evaluation is not None:
            texts = "; ".join(
                f"{name} {value:.4f}, perplexity {perplexity(value):.2f}"
                for name, value in more.evaluation.values.items()
            )
            yield "validation", f"{texts} (step {more.evaluation.step})"
        # Tokens/s at the median throughput, with the tokens per sequence of the last row.
        sequences, tokens = (finite_number(state.metrics, k) for k in ("seq_per_s", "tokens_per_s"))
        if state.seq_per_s is not None and sequences and tokens is not None:
            tokens = state.seq_per_s * tokens / sequences
        rate = f"{_number(state.seq_per_s, '.1f')} seq/s, {_number(tokens, '.0f')} tokens/s"
        trained = f"; {state.tokens:,} tokens so far" if state.tokens is not None else ""
        yield "rate", rate + trained
    for stage, job in state.jobs.items():
        if job.state != "UNKNOWN" or state.state == "unknown":
            yield f"{stage} job", f"{job.job_id} {job.state} {job.reason}".rstrip()
    if state.checkpoints:
        saved = state.last_checkpoint
        age = f"; step {saved.step} {format_age(saved.age_s)}" if saved else "; none is complete"
        yield "checkpoints", ", ".join(f"step {step}" for step in state.checkpoints) + age
    yield "restarts", str(state.restarts)
    usd = f", {state.usd:,.2f} dollars" if state.usd is not None else ""
    yield "cost so far", f"{format_hours(state.node_hours)} node hours{usd}"
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
    for node, reason in list(more.unused_graphs.items())[:4]:
        yield "graphs", f"not used on {node}: {reason}"
    if state.attempts and state.attempts[-1].new_graphs:
        added = state.attempts[-1].new_graphs
        names = ", ".join(added[:4]) + (" …" if len(added) > 4 else "")
        yield "new graphs", f"{len(added)} by the last attempt: {names}"
    for one in more.excluded:
        yield "excluded", f"{one.node} until {format_time(one.until)} ({one.reason})"
    for skip in more.skips:
        yield "skips", f"batches {skip.first}–{skip.last}: {skip.reason}"
    if more.unequal_versions:
        yield "warning", more.unequal_versions


def _batch(mesh: Mesh, measured: MicroBatchRecord | None) -> str:
    """`8 = data 2 × 1 × micro batch 4`, and how an automatic micro batch was chosen."""
    if mesh.unmeasured:
        return f"{mesh.global_batch}; micro batch auto: measured by the precompile stage"
    factors = f"data {mesh.data} × {mesh.accumulation} × micro batch {mesh.micro_batch}"
    if measured is None:
        return f"{mesh.global_batch} = {factors}"
    tried = ", ".join(str(candidate.micro_batch) for candidate in measured.candidates)
    chosen = f"{measured.micro_batch} chosen of {tried} on {measured.nodes[0]}"
    return f"{mesh.global_batch} = {factors}; auto: {chosen}"


def _progress(workers: WorkerProgress) -> str:
    """`stepping after step 41`, with the time since the last change if it exceeds 10 s."""
    text = f"{workers.phase.replace('_', ' ')} after step {workers.step}"
    if workers.unchanged_s >= 10:
        what = "no step" if workers.phase == "stepping" else "no change"
        text += f", {what} for {format_duration(workers.unchanged_s)}"
        if workers.limit_s is not None:
            text += f" (limit {format_duration(workers.limit_s)})"
    if workers.behind:
        ranks = ", ".join(map(str, workers.behind[:8]))
        text += f"; behind the others: rank {ranks}" + (" …" if len(workers.behind) > 8 else "")
    return text


def _tables(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    console: Console,
    one_line: bool = False,
) -> tuple[list[Text], list[str]]:
    """The tables without empty columns, and the headings of columns without room."""
    used = [at for at in range(len(columns)) if at == 0 or any(row[at] for row in rows)]
    cells = [[row[at] for at in used] for row in rows]
    found = fitted([columns[at] for at in used], cells, console.width, one_line)
    tables = [
        Text.assemble((heading, "bold"), *(f"\n{line}" for line in lines), no_wrap=True)
        for heading, *lines in found.parts
    ]
    return tables, found.left_out


def _no_room(columns: Sequence[str]) -> Text:
    return Text(f"no room for {', '.join(columns)}; see --json", style="dim")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
