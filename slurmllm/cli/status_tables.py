"""The texts and tables of `slurmllm status`; numbers are never truncated, whatever the width."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slurmllm.core.display.tables import PROSE, Column, fitted
from slurmllm.core.format import (
    Texts,
    format_age,
    format_bytes,
    format_duration,
    format_hours,
    format_names,
    format_plural,
    format_ranks,
    format_time,
    printable,
)
from slurmllm.core.metrics.row_reader import perplexity
from slurmllm.core.metrics.step_time import finite_number

if TYPE_CHECKING:
    from slurmllm.analysis.status.details import Details, WorkerProgress
    from slurmllm.analysis.status.runs import RunState
    from slurmllm.core.run.artifact_records import MicroBatchRecord
    from slurmllm.core.run.records import AttemptRecord
    from slurmllm.plan.mesh import Mesh

Line = tuple[str, str]  # its heading and its text


def _saved(state: RunState) -> str:
    saved = state.last_checkpoint
    return "" if saved is None else f"{saved.step}, {format_age(saved.age_s)}"


_RUNS: dict[Column, Callable[[RunState], str]] = {
    Column("run", room=16): lambda state: state.name,
    Column("state"): lambda state: state.state_text,
    Column("step"): lambda state: state.step_text,
    Column("loss", drop=1): lambda state: _number(state.loss, ".4f"),
    Column("seq/s", drop=3): lambda state: _number(state.seq_per_s, ".1f"),
    Column("left", drop=2): lambda state: format_duration(state.eta_s),
    Column("saved", drop=5): _saved,
    Column("restarts", drop=7): lambda state: str(state.restarts),
    Column("node h", drop=6): lambda state: format_hours(state.node_hours),
    Column("usd", drop=8): lambda state: _number(state.usd, ",.2f"),
    Column("nodes", drop=9): lambda state: str(state.nodes),
    Column("reason", room=PROSE, drop=4): lambda state: state.reason,
}
_COLUMNS_OF_DAMAGED = ("run", "state", "reason")
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
_SHOWN = 4  # nodes, graphs


def runs_view(
    states: Sequence[RunState], console: Console, height: int | None = None
) -> Iterator[Text]:
    """Yield a table with one row per run, the newest last, and notes on it.

    With a `height` each run takes one line, and older ones that do not fit are only counted.
    """
    # A redrawn table must not be longer than the terminal: one line per run.
    one_line = height is not None
    listed = states
    if height is not None and len(states) > height:
        # Active runs first; by identity, as two runs may have equal figures.
        fitting = {id(state) for state in sorted(states, key=lambda s: s.active)[-max(height, 1) :]}
        listed = [state for state in states if id(state) in fitting]
    rows = [
        [
            cell(state) if state.state != "damaged" or column.heading in _COLUMNS_OF_DAMAGED else ""
            for column, cell in _RUNS.items()
        ]
        for state in listed
    ]
    reasons = [f"{state.name}: {state.reason}" for state in listed if state.reason]
    yield from _table([*_RUNS], rows, console, one_line, [] if one_line else reasons)
    if len(listed) < len(states):
        yield Text(f"… and {len(states) - len(listed)} older ones", style="dim")


def run_view(state: RunState, console: Console) -> Iterator[Text]:
    """Yield a run's figures, one line each, and a table with one row per attempt."""
    for name, message in _lines(state):
        yield Text.assemble((f"{name:<14} ", "bold"), printable(message), overflow="fold")
    if state.attempts:
        open_ending = "running" if state.state == "training" else "not recorded"
        last = state.attempts[-1]
        rows = [
            _attempt_row(attempt, open_ending, state.reason if attempt is last else "")
            for attempt in state.attempts
        ]
        yield from _table(_ATTEMPTS, rows, console)


def _attempt_row(attempt: AttemptRecord, open_ending: str, reason: str) -> Texts:
    evidence = "; ".join(attempt.evidence)
    return (
        str(attempt.attempt),
        format_names(attempt.nodes, _SHOWN),
        f"{attempt.first_step}–{attempt.last_step}" if attempt.last_step else "",
        str(attempt.checkpoint_after or ""),
        format_duration(attempt.ended_at - attempt.started_at) if attempt.ended_at else "",
        attempt.ending or open_ending,
        attempt.action or "",
        "" if evidence in reason else evidence,  # it is in the line `state`
    )


def _lines(state: RunState) -> Iterator[Line]:
    details = state.details
    yield "run", f"{state.name}  recipe {state.recipe}, {format_plural(state.nodes, 'node')}"
    yield "directory", state.run_dir
    if details is not None and details.trial:
        yield "data", "trial: texts that ship with Python (--data builtin), not the recipe's data"
    yield "state", state.state_text + (f"  ({state.reason})" if state.reason else "")
    step = state.step_text
    if state.eta_s is not None and state.finish_at is not None:
        step += f", {format_duration(state.eta_s)} left (until {format_time(state.finish_at)})"
    yield "step", step
    if details is not None:
        yield from _worker_lines(details)
    if state.metrics:
        yield from _metric_lines(state)
    for stage, job in state.jobs.items():
        if job.state != "UNKNOWN" or state.state == "unknown":
            yield f"{stage} job", f"{job.job_id} {job.state} {job.reason}".rstrip()
    if state.checkpoints:
        saved = state.last_checkpoint
        age = f"; step {saved.step} {format_age(saved.age_s)}" if saved else "; none is complete"
        yield "checkpoints", ", ".join(f"step {step}" for step in state.checkpoints) + age
    elif state.step and details is not None and details.trainer and details.trainer.unmatched:
        yield "checkpoints", details.trainer.unmatched
    yield "restarts", str(state.restarts)
    usd = _number(state.usd, ",.2f", ", {} dollars")
    yield "cost so far", f"{format_hours(state.node_hours)} node hours{usd}"
    if details is not None:
        yield from _detail_lines(state, details)


def _worker_lines(details: Details) -> Iterator[Line]:
    workers = details.workers
    trainer = details.trainer
    if details.compiling_s is not None:
        so_far = format_duration(details.compiling_s)
        yield "workers", f"compiling the first step …, {so_far} so far{_limit_and_others(workers)}"
    elif workers is not None:
        yield "workers", _progress(workers)
    if trainer is not None:
        yield "command", trainer.command
        if trainer.missing:
            yield "progress", trainer.missing
        if trainer.incomplete:
            why = "may be half-written"
            if trainer.completion_file:
                why = f"has no {trainer.completion_file} (command.completion_file)"
            yield "incomplete", f"{', '.join(trainer.incomplete)}: {why}"
        for entry in trainer.passed_over:
            yield "passed over", str(entry)
    elif details.mesh is not None:
        yield "batch", _batch(details.mesh, details.micro_batch)


def _metric_lines(state: RunState) -> Iterator[Line]:
    norm = _number(finite_number(state.metrics, "grad_norm"), ".3f", ", gradient norm {}")
    yield "loss", f"{_number(state.loss, '.4f')}{norm}"
    if state.details is not None and (evaluation := state.details.evaluation) is not None:
        texts = "; ".join(
            f"{name} {value:.4f}, perplexity {perplexity(value):.2f}"
            for name, value in evaluation.values.items()
        )
        yield "validation", f"{texts} (step {evaluation.step})"
    rates = [
        _number(state.seq_per_s, ".1f", "{} seq/s")
        # of another trainer
        or _number(state.step_s, ".3g", "{} s per step"),
        _number(state.tokens_per_s, ".0f", "{} tokens/s"),
    ]
    trained = _number(state.tokens, ",", "{} tokens so far")
    if rate := "; ".join(filter(None, [", ".join(filter(None, rates)), trained])):
        yield "rate", rate


def _detail_lines(state: RunState, details: Details) -> Iterator[Line]:
    if details.cold_first_step_s is not None:
        line = f"first step {details.cold_first_step_s:.1f} s with an empty cache (precompile)"
        warm = [
            f"{node} {step.first_step_s:.1f} s, {step.cache_hits} hits, {step.cache_misses} misses"
            for node, step in details.first_steps.items()
        ]
        if warm:
            line += f"; last attempt: {'; '.join(warm[:_SHOWN])}"
        yield "graph cache", line
    if details.graphs is not None and details.graphs.reused_from is not None:
        yield "graphs", f"compiled by run {details.graphs.reused_from}"
    for line in details.uncompiled:
        if line not in state.reason:
            yield "uncompiled", line
    for reason in dict.fromkeys(details.unused_graphs.values()):
        nodes = [node for node, message in details.unused_graphs.items() if message == reason]
        yield "graphs", f"not used on {format_names(nodes, _SHOWN)}: {reason}"
    if state.attempts and (added := state.attempts[-1].new_graphs):
        yield "new graphs", f"{len(added)} by the last attempt: {format_names(added, _SHOWN)}"
    evaluations = [record for record in details.evaluations if record.state != "skipped"]
    for record in evaluations[-_SHOWN:]:
        error = f": {record.error}" if record.error else ""
        yield "evaluation", f"step {record.step} {record.state}{error}"
    for node in details.excluded:
        yield "excluded", f"{node.node} until {format_time(node.until)} ({node.reason})"
    for node in details.not_excluded:
        yield "excluded", f"{node.node}: not excluded, no spare node ({node.reason})"
    for rank in details.slow_ranks or ():
        yield "slow rank", rank.text(time.time())
    for skip in details.skips:
        yield "skips", f"batches {skip.first}–{skip.last}: {skip.reason}"
    if details.unequal_versions:
        yield "warning", details.unequal_versions
    if cores := details.core_files:
        names = format_names(sorted(cores), _SHOWN)
        size = format_bytes(sum(cores.values()))
        yield "warning", f"core files, {size}, in the run's directory: {names}"


def _batch(mesh: Mesh, measured: MicroBatchRecord | None) -> str:
    """`8 = data 2 × 1 × micro batch 4`, and how an automatic micro batch was chosen."""
    if mesh.unmeasured:
        return f"{mesh.global_batch}; micro batch auto: measured by the precompile stage"
    batch = (
        f"{mesh.global_batch} = data {mesh.data} × {mesh.accumulation} × "
        f"micro batch {mesh.micro_batch}"
    )
    if measured is None:
        return batch
    tried = ", ".join(str(candidate.micro_batch) for candidate in measured.candidates)
    return f"{batch}; auto: {measured.micro_batch} chosen of {tried} on {measured.nodes[0]}"


def _progress(workers: WorkerProgress) -> str:
    """`stepping after step 41`, with the time since the last change if it exceeds 10 s."""
    message = f"{workers.phase.replace('_', ' ')} after step {workers.step}"
    if workers.unchanged_s < 10:
        return message + _limit_and_others(replace(workers, limit_s=None))
    subject = "step" if workers.phase == "stepping" else "change"
    message += f", no {subject} for {format_duration(workers.unchanged_s)}"
    return message + _limit_and_others(workers)


def _limit_and_others(workers: WorkerProgress | None) -> str:
    """` (limit 0:10:00); behind the others: rank 3`, each part if it applies."""
    if workers is None:
        return ""
    message = "" if workers.limit_s is None else f" (limit {format_duration(workers.limit_s)})"
    if workers.behind:
        message += f"; behind the others: {format_ranks(workers.behind)}"
    return message


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    console: Console,
    one_line: bool = False,
    reasons: Sequence[str] = (),
) -> Iterator[Text]:
    """Yield a table without its empty columns, then what has no room: `reasons`, and headings."""
    used = [index == 0 or any(row[index] for row in rows) for index in range(len(columns))]
    cells = [[*compress(row, used)] for row in rows]
    table = fitted([*compress(columns, used)], cells, console.width, one_line)
    heading, *lines = table.lines
    yield Text.assemble((heading, "bold"), *(f"\n{line}" for line in lines), no_wrap=True)
    if "reason" in table.left_out:
        yield from (Text(printable(reason)) for reason in reasons)
    if table.left_out:
        yield Text(f"no room for {', '.join(table.left_out)}; see --json", style="dim")


def _number(value: float | None, form: str, text: str = "{}") -> str:
    return "" if value is None else text.format(format(value, form))
