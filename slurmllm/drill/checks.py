"""Whether a broken run went on exactly: against the reference, and by what it left behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from slurmllm.checkpoint.catalogue import read_entry, verify_entry
from slurmllm.compare.compare import compare
from slurmllm.compare.comparison import Tolerances
from slurmllm.drill.injector import Injection
from slurmllm.drill.kinds import KINDS, Drilled, KindName, Recovery
from slurmllm.errors import RunError
from slurmllm.metrics.curves import Curve, describe_ranges
from slurmllm.metrics.row_reader import MetricsFile
from slurmllm.metrics.source import read_curve
from slurmllm.records import AttemptRecord, WorkerRecord
from slurmllm.rundir import RunDir
from slurmllm.supervise.attempts import load_attempts


def examine(
    run: RunDir,
    kind: KindName,
    done: Injection | None,
    reference: Path,
    steps: int,
    tolerances: Tolerances,
    state: str,
) -> Drilled:
    """Hold a broken run against the reference.

    Args:
        run: The broken run; nothing of it runs any more.
        kind: How it was broken.
        done: What was done to it; None where nothing was.
        reference: The unbroken run's directory, or its metrics file.
        steps: Steps of the drill.
        tolerances: How far the curves may lie apart.
        state: Where the run stands, and why (`supervise.state.RunState`), `done` if all went well.
    """
    attempts = load_attempts(run, "train")
    faults: list[str] = []
    if done is None or done.missed:
        why = done.missed if done is not None else "nothing came to strike it on its node"
        faults.append(f"it was not hit: {why}")
    if state != "done":
        faults.append(f"it did not come to its end: {state}")
    hit = next((a for a in attempts if done is not None and a.attempt == done.attempt), None)
    if hit is not None and done is not None and not done.missed:
        faults += _faults_of_ending(kind, hit)
    again = 0
    try:
        curve = read_curve(run.path)
        again = curve.overlap_rows
        faults += _faults_of_curve(curve, read_curve(reference), steps, tolerances)
    except RunError as error:
        faults.append(str(error))
    faults += _faults_of_checkpoints(run, steps)
    return Drilled(
        kind=kind,
        run=run.name,
        passed=not faults,
        faults=tuple(faults),
        at_step=None if done is None else done.step,
        node="" if done is None else done.node,
        ending=None if hit is None else hit.ending,
        attempts=len(attempts),
        steps_lost=None if hit is None else _steps_lost(hit),
        steps_made_again=again,
        recovery=None if done is None or done.missed else recovery(run, done, attempts),
    )


def _faults_of_ending(kind: KindName, hit: AttemptRecord) -> list[str]:
    expected = KINDS[kind].expected
    if hit.ending == expected:
        return []
    return [f"attempt {hit.attempt} was called {hit.ending}, not {expected}"]


def _steps_lost(hit: AttemptRecord) -> int | None:
    if hit.steps_lost is not None:
        return hit.steps_lost
    if hit.last_step is None:
        return None
    return max(0, hit.last_step - (hit.checkpoint_after or 0))


def _faults_of_curve(
    curve: Curve, reference: Curve, steps: int, tolerances: Tolerances
) -> list[str]:
    found = compare(reference, curve, tolerances, from_step=1, to_step=steps)
    faults = [] if found.match else [found.reason]
    if found.only_in_a:
        faults.append(f"steps {describe_ranges(found.only_in_a)} are missing")
    if found.only_in_b or int(curve.steps[-1]) > steps:
        faults.append(f"it made steps that the reference has not: up to {curve.steps[-1]}")
    if found.steps_compared != steps and not faults:
        faults.append(f"{found.steps_compared} of {steps} steps could be compared")
    if found.data is not None and not found.data.same:
        faults.append(f"it read other data: {'; '.join(found.data.differences)}")
    if curve.overlap_rows and not _same_again(curve, tolerances):
        faults.append(
            f"{curve.overlap_rows} steps made again differ from the first time by up to "
            f"{curve.overlap_max_rel_diff:.2g} relative"
        )
    return faults


def _same_again(curve: Curve, tolerances: Tolerances) -> bool:
    if tolerances.exact:
        return bool(curve.overlap_identical)
    return (curve.overlap_max_rel_diff or 0.0) <= max(tolerances.loss, tolerances.grad_norm)


def _faults_of_checkpoints(run: RunDir, steps: int) -> list[str]:
    """Half-written folders, and a last checkpoint that is none."""
    faults = []
    if run.checkpoints.is_dir():
        hidden = sorted(e.name for e in run.checkpoints.iterdir() if e.name.startswith("."))
        if hidden:
            faults.append(f"half a checkpoint is left: {', '.join(hidden)}")
    newest = max(run.checkpoint_steps(), default=None)
    if newest != steps:
        faults.append(f"its newest checkpoint is of step {newest}, not {steps}")
    else:
        faults += verify_entry(read_entry(run.checkpoint(steps))).faults or ()
    return faults


def recovery(run: RunDir, done: Injection, attempts: Sequence[AttemptRecord]) -> Recovery | None:
    """Seconds from the blow to the first step that a later attempt completed.

    Where an attempt in between came to no step, its time is in `launch_s`.

    Returns:
        None where no later attempt has made a step.
    """
    broken = next((a for a in attempts if a.attempt == done.attempt), None)
    after = [a for a in attempts if a.attempt > done.attempt]
    for index, attempt in enumerate(after):
        completed = _first_step_at(run, attempt.attempt)
        if completed is not None and broken is not None and broken.ended_at is not None:
            return _parts(run, done.time, completed, [broken, *after[: index + 1]])
    return None


def _parts(
    run: RunDir, struck: float, completed: float, chain: Sequence[AttemptRecord]
) -> Recovery:
    """The seconds in between, by attempts' records and the first worker's."""
    pairs = itertools.pairwise(chain)
    detection = max(0.0, (chain[0].ended_at or struck) - struck)
    requeue = sum(max(0.0, b.started_at - max(a.ended_at or 0.0, struck)) for a, b in pairs)
    last = chain[-1]
    worker = _first_worker(run, last.attempt)
    parts = {
        "detection_s": detection,
        "requeue_s": requeue,
        "preflight_s": last.phases_s.get("preflight", 0.0),
        "cache_s": last.phases_s.get("cache", 0.0),
        "start_up_s": worker.start_up_s if worker is not None else 0.0,
        "first_step_s": worker.first_step_s if worker is not None else 0.0,
    }
    total = completed - struck
    rounded = {name: round(seconds, 3) for name, seconds in parts.items()}
    left = max(0.0, total - sum(parts.values()))
    return Recovery(total_s=round(total, 3), launch_s=round(left, 3), **rounded)


def _first_worker(run: RunDir, attempt: int) -> WorkerRecord | None:
    path = run.attempt("train", attempt).worker(0)
    return WorkerRecord.load(path) if path.is_file() else None


def _first_step_at(run: RunDir, attempt: int) -> float | None:
    """Unix time at which an attempt completed its first step."""
    path = run.metrics(attempt)
    try:
        row = next(MetricsFile(path).rows(), None) if path.is_file() else None
    except RunError:
        return None
    return float(row["time"]) if row is not None and "time" in row else None
