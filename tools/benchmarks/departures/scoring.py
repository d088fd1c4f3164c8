"""Compares the logs, reads the answers and scores them."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from departures.kinds import Half, Kind, all_kinds
from departures.logs import INTERVALS, VIEWS, Log, View, log_path, make_logs, write_log
from departures.store import Case, load_pair
from departures.truth import (
    COLUMN_SETS,
    INDISTINCT,
    ColumnSet,
    Verdict,
    first_difference,
    visible_verdicts,
)
from slurmllm.compare.compare import compare
from slurmllm.metrics.curves import Curve
from slurmllm.metrics.source import read_curve


@dataclass(frozen=True)
class Cause:
    """A cause that compare names."""

    kind: str
    confidence: str  # certain, likely, possible
    step: int | None


@dataclass(frozen=True)
class Answer:
    """What compare finds, whichever version of its JSON."""

    verdict: str
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Score:
    """One comparison and how right its answer is.

    Attributes:
        expected: Right verdicts.
        borderline: The log shows so little that any verdict but `identical` is right.
        asked: A cause is due: the verdict must be `differ`, or may be and is.
        outright: The first cause is right.
        listed: The true cause is in the list, or the answer is `unknown`.
        step_right: The first cause has the right step too.
        certain_wrong: Causes stated as certain that are not true.
    """

    case: str
    kind: str
    group: str
    half: Half
    since: int
    columns: ColumnSet
    interval: int
    expected: tuple[str, ...]
    borderline: bool
    verdict: str
    causes: tuple[str, ...]
    verdict_right: bool
    asked: bool
    outright: bool
    listed: bool
    step_right: bool
    certain_wrong: tuple[str, ...]


def read_answer(found: Mapping[str, Any]) -> Answer:
    """Read the `--json` of a comparison, today's keys where the coming ones are missing.

    Today's has no confidence: a cause is certain there if recorded learning rates differ, and
    likely else; and no `identical`, which is a match whose metrics have the same bits.
    """
    causes = found.get("causes") or ()
    diagnosis = found.get("diagnosis")
    if causes and isinstance(causes[0], Mapping):
        named = [Cause(one["kind"], one["confidence"], one.get("step")) for one in causes]
    elif diagnosis:
        kind = "batches" if diagnosis["kind"] == "batch" else diagnosis["kind"]
        recorded = kind == "lr" and (found["statistics"].get("lr") or {}).get("max_rel_diff")
        named = [Cause(kind, "certain" if recorded else "likely", diagnosis["step"])]
    else:
        named = []
    verdict = found["verdict"]
    has_power = "power" in found  # only the coming JSON has it, and four verdicts with it
    metrics = found["metrics"].values()
    if verdict == "match" and not has_power and all(one["bit_identical"] for one in metrics):
        verdict = "identical"
    return Answer(verdict, tuple(named))


def score_all(folder: Path, wanted: Sequence[Case], jobs: int) -> list[Score]:
    """Compare every view of every case."""
    work = [(folder, case) for case in wanted]
    if jobs == 1:
        return [score for job in work for score in score_case(*job)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.starmap(score_case, work, chunksize=8)
    return [score for scores in found for score in scores]


def score_case(folder: Path, case: Case) -> list[Score]:
    """Compare the two trainings of a case, for each choice of what is logged."""
    kind = all_kinds()[case.kind]
    reference, other = load_pair(folder / "trainings", case)
    scores = []
    for view in VIEWS:
        if kind.log == "steps_from_0" and view.interval > 1:
            continue  # steps 10 and 11 are logged: nothing in common
        a, b = make_logs(kind, case.since, case.seed, reference, other, view)
        logs = folder / "logs"
        suffix = f"{view.columns}-{view.interval}"
        curve_a = _curve_of(a, logs, f"reference-{suffix}")
        curve_b = _curve_of(b, logs, f"{case.name}-{suffix}")
        answer = read_answer(compare(curve_a, curve_b).model_dump(mode="json"))
        scores.append(score_answer(kind, case, view, (a, b), answer))
    return scores


def _curve_of(log: Log, folder: Path, name: str) -> Curve:
    """Write a log, unless it is there, and read it as `compare` does."""
    held = b"".join(column.tobytes() for column in log.values())
    path = log_path(folder, f"{name}-{zlib.crc32(held):08x}")
    if not path.exists():
        write_log(log, path)
    return read_curve(path)


def expected_verdicts(kind: Kind, view: View, a: Log, b: Log) -> tuple[frozenset[Verdict], bool]:
    """Returns the right verdicts, and whether the log leaves them open."""
    names = [name for name in COLUMN_SETS[view.columns] if name in a]
    _, at_a, at_b = np.intersect1d(a["step"], b["step"], return_indices=True)
    shown = visible_verdicts({n: a[n][at_a] for n in names}, {n: b[n][at_b] for n in names})
    if kind.log == "means_of_intervals" and view.interval < INTERVALS[-1]:
        return frozenset({"identical", "match"}), False
    if kind.verdicts is not None:
        same = shown & {"identical"}  # a log of few digits hides the last ones
        return frozenset(kind.verdicts) | same, False
    if shown != {"identical"} and kind.equivalent:
        return shown | {"equivalent"}, len(shown) > 1
    return shown, len(shown) > 1


def score_answer(
    kind: Kind, case: Case, view: View, logs: tuple[Log, Log], answer: Answer
) -> Score:
    expected, borderline = expected_verdicts(kind, view, *logs)
    verdict_right = answer.verdict in expected
    asked = expected == {"differ"} or (answer.verdict == "differ" and verdict_right)
    kinds = [cause.kind for cause in answer.causes]
    true = set(kind.causes)
    alike = INDISTINCT[view.columns][kind.signature_from(case.since)]
    listed = bool(true & set(kinds))
    first = kinds[0] if kinds else None
    outright = first in true or (listed and first in alike)
    step = answer.causes[0].step if answer.causes else None
    differs = answer.verdict == "differ"
    return Score(
        case=case.name,
        kind=kind.name,
        group=kind.group,
        half=kind.half,
        since=case.since,
        columns=view.columns,
        interval=view.interval,
        expected=tuple(sorted(expected)),
        borderline=borderline,
        verdict=answer.verdict,
        causes=tuple(f"{cause.kind} ({cause.confidence})" for cause in answer.causes),
        verdict_right=verdict_right,
        asked=asked,
        outright=differs and outright,
        listed=differs and (listed or first == "unknown"),
        step_right=differs and outright and _step_right(step, case, view, logs),
        certain_wrong=tuple(
            cause.kind
            for cause in answer.causes
            if cause.confidence == "certain" and cause.kind not in true
        ),
    )


def _step_right(step: int | None, case: Case, view: View, logs: tuple[Log, Log]) -> bool:
    """Whether a step is that of the departure, as far as the logged points show it.

    From the step at which the change begins to the first logged point that differs, and one point
    more.
    """
    if step is None:
        return False
    steps, at_a, at_b = np.intersect1d(logs[0]["step"], logs[1]["step"], return_indices=True)
    logged = [name for name in COLUMN_SETS[view.columns] if name in logs[0]]
    seen = first_difference(
        steps.astype(np.int64),
        {n: logs[0][n][at_a] for n in logged},
        {n: logs[1][n][at_b] for n in logged},
    )
    return seen is not None and case.since <= step <= seen + view.interval
