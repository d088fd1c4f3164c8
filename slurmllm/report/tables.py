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
from slurmllm.records import TIME_PARTS, AttemptRecord, CorpusRecord
from slurmllm.report.blocks import (
    Table,
)
from slurmllm.report.facts import RunFacts
from slurmllm.report.throughput import FIRST_STEPS
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
    return _by_column(runs, _throughput())


def summary_table(runs: Sequence[RunFacts]) -> Table:
    """The most important figures, one column per run."""
    cells: dict[str, Cell] = {
        "state": lambda f: f.state,
        "steps": lambda f: format_integer(f.steps),
        "planned steps": lambda f: format_integer(f.planned_steps),
        "tokens": lambda f: format_integer(f.tokens),
        "loss": lambda f: format_number(f.loss),
        "validation loss": lambda f: None if f.val_loss is None else format_number(f.val_loss),
        **_throughput(),
        "wall time, h": lambda f: (
            format_hours(f.used.wall_hours) if f.used and f.attempts else None
        ),
        "node hours": lambda f: format_hours(f.used.node_hours) if f.used and f.attempts else None,
        "dollars": lambda f: None if f.usd is None else format_dollars(f.usd),
        "effective utilization": lambda f: (
            format_percent(f.used.effective) if f.used and f.attempts else None
        ),
        "restarts": lambda f: format_integer(f.restarts),
    }
    return _by_column(runs, cells)


def _throughput() -> dict[str, Cell]:
    return {
        f"seq/s, mean of the first {FIRST_STEPS} steps": _first_steps,
        "seq/s, mean of all steps": lambda f: format_number(f.rate.seq_per_s) if f.rate else None,
        "tokens/s": lambda f: format_number(f.rate.tokens_per_s) if f.rate else None,
        "a step, median, s": lambda f: format_number(f.rate.step_s) if f.rate else None,
        "MFU": lambda f: format_percent(f.rate.mfu) if f.rate and f.rate.mfu is not None else None,
        "tokens/$": lambda f: (
            format_count(f.rate.tokens_per_usd) if f.rate and f.rate.tokens_per_usd else None
        ),
        "tokens/$, losses and waits included": lambda f: (
            None if f.tokens_per_usd_bought is None else format_count(f.tokens_per_usd_bought)
        ),
    }


def _first_steps(facts: RunFacts) -> str | None:
    """The mean, with the number of steps if there are fewer than `FIRST_STEPS`."""
    rate = facts.rate
    if rate is None or rate.seq_per_s_first_500 is None:
        return None
    fewer = f"  ({rate.first_steps} steps)" if rate.first_steps < FIRST_STEPS else ""
    return f"{format_number(rate.seq_per_s_first_500)}{fewer}"


def setting_table(runs: Sequence[RunFacts]) -> Table:
    """What ran where, one column per run."""
    cells: dict[str, Cell] = {
        "read from": lambda f: str(f.path),
        "recipe": lambda f: f.recipe,
        "model": _model,
        "parameters": lambda f: None if f.parameters is None else format_integer(f.parameters),
        "sequence length": lambda f: _whole(f, "model.seq_len"),
        "mesh": _mesh,
        "global batch": lambda f: _whole(f, "train.global_batch"),
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
        "nodes": lambda f: format_integer(f.nodes) if f.nodes else None,
        "versions": lambda f: ", ".join(f"{k} {v}" for k, v in sorted(f.versions.items())) or None,
        "data": _data,
        "price of a node hour": lambda f: (
            None if f.usd_per_node_hour is None else f"${format_dollars(f.usd_per_node_hour)}"
        ),
    }
    return _by_column(runs, cells)


def _by_column(runs: Sequence[RunFacts], cells: dict[str, Cell]) -> Table:
    """A table without rows that no run has a value for."""
    rows = []
    for heading, cell in cells.items():
        values = [cell(facts) for facts in runs]
        if any(value not in (None, ABSENT) for value in values):
            rows.append((heading, *(ABSENT if value is None else value for value in values)))
    return Table(("", *(facts.name for facts in runs)), rows)


def _whole(facts: RunFacts, path: str) -> str | None:
    value = facts.configuration.count(path)
    return None if value is None else format_integer(value)


def _model(facts: RunFacts) -> str | None:
    family = facts.configuration.text("model.family")
    layers, hidden, heads = (
        _whole(facts, f"model.{name}") for name in ("num_layers", "hidden_size", "num_heads")
    )
    if family is None:
        return None
    return f"{family}, {layers or '?'} layers, hidden size {hidden or '?'}, {heads or '?'} heads"


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
    lr = (facts.configuration.values or {}).get("optim.lr")
    return None if name is None else f"{name}, lr {lr}"


def _data(facts: RunFacts) -> str | None:
    if facts.data is None:
        return None
    return "; ".join(_corpus(corpus) for corpus in facts.data.corpora)


def _corpus(corpus: CorpusRecord) -> str:
    name = corpus.path.rstrip("/").rpartition("/")[2]
    documents = format_integer(corpus.documents)
    return f"{name}, {documents} documents, fingerprint {corpus.fingerprint[:16]}"


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
