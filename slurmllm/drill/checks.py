"""Whether a broken run went on exactly: against the reference, and by what it left behind."""

from __future__ import annotations

from pathlib import Path

from slurmllm.analysis.comparing.compare import compare
from slurmllm.analysis.comparing.comparison import Tolerances
from slurmllm.analysis.curves import Curve, describe_ranges
from slurmllm.analysis.reading.source import read_curve
from slurmllm.checkpoint.catalogue import look_at, verify
from slurmllm.drill.agent import Injection
from slurmllm.drill.kinds import KINDS, KindName
from slurmllm.drill.measure import recovery
from slurmllm.drill.results import Drilled
from slurmllm.errors import RunError
from slurmllm.records import AttemptRecord
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
        faults += verify(look_at(run.checkpoint(steps))).faults or ()
    return faults
