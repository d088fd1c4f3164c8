"""What a run's checkpoints scored and how its loss spiked, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmllm.analysis.reporting.blocks import Table
from slurmllm.analysis.reporting.facts import RunFacts
from slurmllm.analysis.reporting.words import ABSENT, count, figure, whole
from slurmllm.evaluate.scores import ScoreRow, ScoreTable

_SHOWN_SPIKES = 10
_SHOWN_CHECKPOINTS = 5


def spikes_table(facts: RunFacts) -> Table:
    """The highest spikes of a run."""
    assert facts.spikes is not None
    return Table(
        ("step", "steps", "height", "loss", "back after", "gradient norm, ratio"),
        [
            (
                whole(one.step),
                whole(one.duration),
                figure(one.height),
                figure(one.loss),
                whole(one.returned_after),
                figure(one.grad_norm_ratio),
            )
            for one in facts.spikes.highest_spikes(_SHOWN_SPIKES)
        ],
    )


def scores_table(found: ScoreTable) -> Table:
    """A suite: the newest checkpoints beside published models."""
    steps = found.steps[-_SHOWN_CHECKPOINTS:]
    models = list(dict.fromkeys(name for row in found.rows for name in row.references))
    columns = [f"step {whole(step)}" for step in steps]
    rows = [tuple(_score_cells(row, steps, models)) for row in found.rows]
    tokens = ", ".join(
        f"step {whole(step)}: {count(found.tokens[step])} tokens"
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
        value = figure(row.scores.get(step))
        yield value if error is None or value == ABSENT else f"{value} ± {error:.2g}"
    for model in models:
        yield figure(row.references.get(model))
