"""The tables of a report: summary, setting, attempts, node hours, checkpoints, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from slurmllm.evaluate.scores import ScoreRow, ScoreTable
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
from slurmllm.records import TIME_PARTS, AttemptRecord
from slurmllm.report.blocks import Table
from slurmllm.report.facts import RunFacts
from slurmllm.report.throughput import FIRST_STEPS, Rate
from slurmllm.status.recoveries import RECOVERY_PHASES, FailureRecovery, sum_by_ending
from slurmllm.status.utilization import Utilization, sum_utilization

_SHOWN_REMOVED = 50
_SHOWN_SPIKES = 10
_SHOWN_CHECKPOINTS = 5
SHOWN_RECOVERIES = 20
RECOVERIES_CAPTION = "from the last completed step before an ending to the next one, s"

Cell = Callable[[RunFacts], str | None]


def verdict(facts: RunFacts) -> str:
    """The outcome of a run, in a sentence or two."""
    parts = [_progress(facts)]
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


def _progress(facts: RunFacts) -> str:
    made = f"{format_integer(facts.steps)} steps"
    if facts.planned_steps is not None:
        made = f"{format_integer(facts.steps)} of {format_integer(facts.planned_steps)} steps"
    last = facts.train[-1] if facts.train else None
    texts = {
        "log": f"{made} in a {facts.kind} log",
        "not started": "no step yet",
        "open": f"{made}; the last attempt has no recorded end",
        "requeued": f"{made}; requeued",
        "cancelled": f"cancelled at {made}",
    }
    if facts.state == "stopped" and last is not None:
        ending = last.ending or "unknown"
        return f"stopped at {made} ({ending}: {'; '.join(last.evidence) or 'no evidence'})"
    return texts.get(facts.state, f"{facts.state}: {made}")


def throughput_table(runs: Sequence[RunFacts]) -> Table:
    """Throughput and cost, one column per run."""
    return _by_column(runs, _THROUGHPUT)


def summary_table(runs: Sequence[RunFacts]) -> Table:
    """The most important figures, one column per run."""
    cells: dict[str, Cell] = {
        "state": lambda f: f.state,
        "steps": lambda f: format_integer(f.steps),
        "planned steps": lambda f: format_integer(f.planned_steps),
        "tokens": lambda f: format_integer(f.tokens),
        "loss": lambda f: format_number(f.loss),
        "validation loss": lambda f: format_number(f.val_loss),
        **_THROUGHPUT,
        "wall time, h": _of_use(lambda used: format_hours(used.wall_hours)),
        "node hours": _of_use(lambda used: format_hours(used.node_hours)),
        "dollars": lambda f: format_dollars(f.usd),
        "effective utilization": _of_use(lambda used: format_percent(used.effective)),
        "restarts": lambda f: format_integer(f.restarts),
    }
    return _by_column(runs, cells)


def _of_rate(text: Callable[[Rate], str]) -> Cell:
    return lambda facts: text(facts.rate) if facts.rate else None


def _of_use(text: Callable[[Utilization], str]) -> Cell:
    # Without attempt records the node hours would be 0, which is not what the run cost.
    return lambda facts: text(facts.used) if facts.used and facts.attempts else None


def _first_steps(rate: Rate) -> str:
    """The mean, with the number of steps if there are fewer than `FIRST_STEPS`."""
    fewer = f"  ({rate.first_steps} steps)" if rate.first_steps < FIRST_STEPS else ""
    known = rate.seq_per_s_first_500 is not None
    return f"{format_number(rate.seq_per_s_first_500)}{fewer}" if known else ABSENT


_THROUGHPUT: dict[str, Cell] = {
    f"seq/s, mean of the first {FIRST_STEPS} steps": _of_rate(_first_steps),
    "seq/s, mean of all steps": _of_rate(lambda rate: format_number(rate.seq_per_s)),
    "tokens/s": _of_rate(lambda rate: format_number(rate.tokens_per_s)),
    "a step, median, s": _of_rate(lambda rate: format_number(rate.step_s)),
    "MFU": _of_rate(lambda rate: format_percent(rate.mfu)),
    "tokens/$": _of_rate(lambda rate: format_count(rate.tokens_per_usd)),
    "tokens/$, losses and waits included": lambda f: format_count(f.tokens_per_usd_bought),
}


def setting_table(runs: Sequence[RunFacts]) -> Table:
    """What ran where, one column per run."""
    cells: dict[str, Cell] = {
        "read from": lambda f: str(f.path),
        "recipe": lambda f: f.recipe,
        "model": _model,
        "parameters": lambda f: format_integer(f.parameters),
        "sequence length": lambda f: format_integer(f.configuration.count("model.seq_len")),
        "mesh": _mesh,
        "global batch": lambda f: format_integer(f.configuration.count("train.global_batch")),
        "micro batch × accumulation": lambda f: (
            None
            if f.mesh is None or f.mesh.unmeasured
            else f"{f.mesh.micro_batch} × {f.mesh.accumulation}"
        ),
        "precision": lambda f: f.configuration.text("train.precision"),
        "optimizer": _optimizer,
        "backend": lambda f: f.configuration.config.backend if f.configuration.config else None,
        "cluster": lambda f: f.configuration.text("cluster.name"),
        "instance type": lambda f: f.configuration.text("cluster.instance_type"),
        "nodes": lambda f: format_integer(f.nodes or None),
        "versions": lambda f: ", ".join(f"{k} {v}" for k, v in sorted(f.versions.items())) or None,
        "data": _data,
        "price of a node hour": lambda f: (
            None if f.usd_per_node_hour is None else f"${format_dollars(f.usd_per_node_hour)}"
        ),
    }
    return _by_column(runs, cells)


def _by_column(runs: Sequence[RunFacts], cells: Mapping[str, Cell]) -> Table:
    """A table without rows that no run has a value for."""
    rows = []
    for heading, cell in cells.items():
        values = [cell(facts) or ABSENT for facts in runs]
        if any(value != ABSENT for value in values):
            rows.append((heading, *values))
    return Table(("", *(facts.name for facts in runs)), rows)


def _model(facts: RunFacts) -> str | None:
    family = facts.configuration.text("model.family")
    layers, hidden, heads = (
        "?" if value is None else format_integer(value)
        for name in ("num_layers", "hidden_size", "num_heads")
        for value in (facts.configuration.count(f"model.{name}"),)
    )
    return family and f"{family}, {layers} layers, hidden size {hidden}, {heads} heads"


def _mesh(facts: RunFacts) -> str | None:
    mesh = facts.mesh
    if mesh is None:
        return None
    stages = f" × {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    return (
        f"tensor {mesh.tensor}, pipeline {mesh.pipeline}{stages}, data {mesh.data}: "
        f"{format_plural(mesh.world_size, 'worker')}"
    )


def _optimizer(facts: RunFacts) -> str | None:
    name = facts.configuration.text("optim.name")
    return name and f"{name}, lr {(facts.configuration.values or {}).get('optim.lr')}"


def _data(facts: RunFacts) -> str | None:
    return "; ".join(
        f"{corpus.path.rstrip('/').rpartition('/')[2]}, {format_integer(corpus.documents)} "
        f"documents, fingerprint {corpus.fingerprint[:16]}"
        for corpus in (facts.data.corpora if facts.data is not None else ())
    )


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
                _steps(one),
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


def _steps(attempt: AttemptRecord) -> str:
    first, last = attempt.first_step, attempt.last_step
    return ABSENT if first is None or last is None else f"{first}–{last}"


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
                format_bytes(one.num_bytes),
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


def spikes_table(facts: RunFacts) -> Table:
    """The highest spikes of a run."""
    assert facts.spikes is not None
    return Table(
        ("step", "steps", "height", "loss", "back after", "gradient norm, ratio"),
        [
            (
                format_integer(one.step),
                format_integer(one.duration),
                format_number(one.height),
                format_number(one.loss),
                format_integer(one.returned_after),
                format_number(one.grad_norm_ratio),
            )
            for one in facts.spikes.highest_spikes(_SHOWN_SPIKES)
        ],
    )


def scores_table(found: ScoreTable) -> Table:
    """The scores of a suite: the newest checkpoints and published models."""
    steps = found.steps[-_SHOWN_CHECKPOINTS:]
    models = list(dict.fromkeys(name for row in found.rows for name in row.references))
    columns = [f"step {format_integer(step)}" for step in steps]
    rows = [tuple(_score_cells(row, steps, models)) for row in found.rows]
    tokens = ", ".join(
        f"step {format_integer(step)}: {format_count(found.tokens[step])} tokens"
        for step in steps
        if step in found.tokens
    )
    sources = "; ".join(
        f"{name}: {found.sources[name]}" for name in models if name in found.sources
    )
    caption = ". ".join(part for part in (tokens, sources) if part)
    return Table(("group", "task", "shots", "metric", *columns, *models), rows, caption)


def _score_cells(row: ScoreRow, steps: Sequence[int], models: Sequence[str]) -> Iterator[str]:
    yield row.group
    yield row.name
    yield ABSENT if row.shots is None else str(row.shots)
    yield row.metric
    for step in steps:
        error = row.errors.get(step)
        value = format_number(row.scores.get(step))
        yield value if error is None or value == ABSENT else f"{value} ± {error:.2g}"
    for model in models:
        yield format_number(row.references.get(model))


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
        for one in lost[-SHOWN_RECOVERIES:]
    ]
    headings = ("attempt", "class", "after step", "steps lost", "seconds", "beyond requeue", *names)
    return Table(headings, rows)


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
