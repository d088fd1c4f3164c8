"""What happened to a run at a step: restarts, saves and spikes, as marks on its curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slurmllm.analysis.reporting.facts import RunFacts
from slurmllm.analysis.reporting.words import figure, listed, seconds

_MOST = 300  # of a kind and run: the latest


@dataclass(frozen=True)
class Mark:
    """Something at a step.

    Attributes:
        run: Which of the report's.
        kind: What it is.
        step: Where.
        lines: What a reader who points at it is told.
    """

    run: int
    kind: Literal["restart", "save", "spike"]
    step: int
    lines: tuple[str, ...]


def marks(number: int, facts: RunFacts, everything: bool = True) -> list[Mark]:
    """The marks of a run.

    Args:
        number: Which of the report's it is.
        facts: The run.
        everything: Saves and spikes too, not restarts alone.
    """
    if facts.curve is None:
        return []
    found = list(_restarts(number, facts))[-_MOST:]
    if everything:
        found += list(_saves(number, facts))[-_MOST:]
        found += list(_spikes(number, facts))[-_MOST:]
    return found


def _restarts(number: int, facts: RunFacts) -> Iterator[Mark]:
    assert facts.curve is not None
    records = {attempt.attempt: attempt for attempt in facts.train}
    steps, attempts = facts.curve.steps, facts.curve.attempts
    for row in (np.flatnonzero(np.diff(attempts) != 0) + 1).tolist():
        before, after = int(attempts[row - 1]), int(attempts[row])
        lines = [f"{facts.name}: attempt {after} from step {steps[row]}"]
        for one in range(before, after):
            record = records.get(one)
            if record is not None and record.ending is not None:
                why = "; ".join(record.evidence)
                lines.append(
                    f"attempt {one} ended: {record.ending}{f' ({why:.150})' if why else ''}"
                )
        if after in records:
            lines.append(f"nodes: {listed(records[after].nodes)}")
        yield Mark(number, "restart", int(steps[row]), tuple(lines))


def _saves(number: int, facts: RunFacts) -> Iterator[Mark]:
    for one in facts.saved:
        took = "" if one.seconds is None else f", {seconds(one.seconds)} s"
        yield Mark(number, "save", one.step, (f"{facts.name}: saved step {one.step}{took}",))


def _spikes(number: int, facts: RunFacts) -> Iterator[Mark]:
    for one in () if facts.spikes is None else facts.spikes.spikes:
        words = f"{facts.name}: spike at step {one.peak_step}, {figure(one.height)} above the mean"
        yield Mark(number, "spike", one.peak_step, (words,))
