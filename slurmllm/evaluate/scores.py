"""What a run's checkpoints scored, by suite, beside published figures; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreRow:
    """One line of a suite's table.

    Attributes:
        group: Heading that it stands under, such as `common reasoning`.
        name: Of the task, or `average` for the mean of its group's tasks.
        shots: Examples before each question.
        metric: As the harness names it.
        scores: Checkpoint's step → value; steps without one are absent.
        errors: Checkpoint's step → standard error, where known.
        references: Name of a published model → its figure, on the same scale.
    """

    group: str
    name: str
    shots: int | None
    metric: str
    scores: Mapping[int, float]
    errors: Mapping[int, float]
    references: Mapping[str, float]


@dataclass(frozen=True)
class ScoreTable:
    """What a run scored in a suite.

    Attributes:
        suite: Its name.
        rows: In the suite's order.
        steps: Of the checkpoints that have a score, ascending.
        tokens: Checkpoint's step → tokens trained on.
        sources: Name of a published model → where its figures were published.
    """

    suite: str
    rows: tuple[ScoreRow, ...]
    steps: tuple[int, ...]
    tokens: Mapping[int, int]
    sources: Mapping[str, str]
