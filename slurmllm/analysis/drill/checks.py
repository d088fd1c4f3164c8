"""Whether a run recovered exactly from a fault: compared with the reference, and by its files.

A trainer of another project need not be reproducible: the difference of two runs without a fault
is its noise, and a resume is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from slurmllm.analysis.compare.alignment import decimals
from slurmllm.analysis.compare.compare import METRICS, compare
from slurmllm.analysis.compare.result import Tolerances, format_figure
from slurmllm.analysis.drill.injector import FAULTS, FaultKind, Injection
from slurmllm.analysis.status.history import read_history
from slurmllm.analysis.status.recoveries import find_recoveries
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.errors import RunError
from slurmllm.core.format import Json, Texts
from slurmllm.core.metrics.curves import Curve, describe_ranges
from slurmllm.core.metrics.row_reader import last_row_of
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.records import AttemptRecord, EndingClass, Record, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.attempts import load_attempts
from slurmllm.train.checkpoint.catalogue import read_entry, verify_entry
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints

_NOISES = 3.0  # a difference of as many times the noise is not noise
_CLEAR_NOISES = 10.0
# That show little
_FEW_STEPS = 5
_FEW_DIGITS = 4
# That equal values need to be certain
_MANY_STEPS = 20
_MANY_DIGITS = 7

Verdict = Literal["exact", "within_noise", "differs", "began_again", "not_resumed"]
Confidence = Literal["certain", "likely", "weak"]


class Resumption(Record):
    """What a trainer did after a fault."""

    verdict: Verdict
    text: str
    from_step: int | None = None  # after which it continued; 0: it began again
    checkpoint: str = ""  # of that step, if watched
    differs_from_step: int | None = None
    max_rel_diff: float | None = None  # from the run without a fault, after the resume
    noise: float | None = None  # largest relative difference of two such runs
    confidence: Confidence = "certain"
    confidence_reason: str = ""
    by_hand: bool = False  # whether the supervisor had stopped, and the drill resumed the run


class Unbroken(NamedTuple):
    """Two runs of a trainer without a fault, for its noise."""

    reference: Curve
    repeat: Curve
    command: CommandConfig
    steps: int
    tolerances: Tolerances  # of the user

    @property
    def noise(self) -> dict[str, float]:
        """The largest relative difference of each metric."""
        pair = compare(
            self.reference, self.repeat, Tolerances(exact=True), to_step=self.steps, shifts=(0, 0)
        )
        # 0 only if the bits are the same.
        return {
            name: 0.0 if metric.bit_identical else max(metric.max_rel_diff or 1.0, 1e-15)
            for name, metric in pair.metrics.items()
        }


class RecoveryTimes(Record):
    """Seconds from a fault to the next completed step, by phase."""

    total_s: float
    requeue_s: float  # between attempts: Slurm's requeue, or the local restart
    detection_s: float  # until the attempt was closed, with its last save
    preflight_s: float  # checks of the nodes
    cache_s: float  # compiled graphs onto the nodes
    launch_s: float  # the rest: supervisor, srun, launchers, interpreters
    start_up_s: float  # workers: imports, rendezvous, model, resume
    first_step_s: float


class DrillResult(Record):
    """The result of one fault."""

    kind: FaultKind
    run: str
    passed: bool
    faults: Texts  # why it did not pass, one line each
    tested: bool = True  # whether the fault was injected before the last step
    at_step: int | None = None  # last step seen before the fault
    node: str = ""
    ending: EndingClass | None = None  # class of the attempt it hit
    attempts: int = 0  # number of attempts of the run
    steps_lost: int | None = None  # beyond the last checkpoint
    steps_recomputed: int = 0
    recovery: RecoveryTimes | None = None
    resume: Resumption | None = None  # of another project's trainer


class DrillReport(Record):
    """The results of a whole drill."""

    run: str
    nodes: int
    local: bool
    steps: int
    every_steps: int  # between checkpoints
    seed: int
    reference: str  # name of the run without a fault
    own_reference: bool  # whether the run itself was the reference
    drills: tuple[DrillResult, ...]
    kept: Texts  # runs of the drill that were not removed
    repeat: str | None = None  # of another project's trainer: a second run without a fault
    # By metric, the largest relative difference of these two
    noise: Mapping[str, float] = Field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.drills)

    @property
    def failed(self) -> list[str]:
        """The copies that did not recover."""
        return [result.run for result in self.drills if result.tested and not result.passed]


def check_recovery(
    run: RunDir,
    kind: FaultKind,
    injection: Injection | None,  # None if the injector never started
    reference: Path,  # a run directory or a metrics file
    steps: int,
    tolerances: Tolerances,
    state: str,  # of the run, with its reason
    unbroken: Unbroken | None = None,  # of another project's trainer
) -> DrillResult:
    """Compare a run that had a fault, and has ended, with the reference."""
    attempts = load_attempts(run, "train")
    if not injection:
        injection = Injection(
            kind=kind, attempt=-1, node="", time=0.0, missed="the injector never started there"
        )
    hit = next((a for a in attempts if a.attempt == injection.attempt), None)
    untested = "no fault was injected" if injection.missed else ""
    faults = [] if state == "done" else [f"did not finish: {state}"]
    expected = FAULTS[kind].expected
    if hit and not untested and expected and hit.ending != expected:
        faults.append(f"attempt {hit.attempt} was classified as {hit.ending}, not {expected}")
    recomputed = 0
    resume = None
    try:
        curve = read_curve(run.path)
        recomputed = curve.overlap_rows
        if hit and not untested and _came_too_late(kind, curve, hit, steps):
            untested = "the fault came after the last step"
            faults = []
        if not unbroken:
            faults += _curve_faults(curve, read_curve(reference), steps, tolerances)
        elif hit and not untested:
            resume = judge_resume(run, curve, unbroken, hit)
            if resume.verdict not in ("exact", "within_noise"):
                faults.append(f"{resume.text} ({resume.confidence_reason or resume.confidence})")
    except RunError as error:
        faults.append(str(error))
    if not unbroken:
        faults += _checkpoint_faults(run, steps)
    if untested:
        fix = "; use more --steps" if state == "done" else ""
        faults.insert(0, untested + fix + (f" ({injection.missed})" if injection.missed else ""))
    return DrillResult(
        kind=kind,
        run=run.name,
        passed=not faults,
        faults=faults,
        tested=not untested,
        at_step=injection.step,
        node=injection.node,
        ending=hit.ending if hit else None,
        attempts=len(attempts),
        steps_lost=_steps_lost(run, hit, resume) if hit else None,
        steps_recomputed=recomputed,
        recovery=None if untested else recovery_times(run, injection),
        resume=resume,
    )


def _steps_lost(run: RunDir, hit: AttemptRecord, resume: Resumption | None) -> int | None:
    """Return the steps that the attempt with the fault completed after its checkpoint."""
    if resume and resume.from_step is not None:
        last = last_row_of(run.metrics(hit.attempt))
        if last is not None:
            return max(0, int(last["step"]) - resume.from_step)
    if hit.steps_lost is None and hit.last_step is not None:
        return max(0, hit.last_step - (hit.checkpoint_after or 0))
    return hit.steps_lost


def _came_too_late(kind: FaultKind, curve: Curve, hit: AttemptRecord, steps: int) -> bool:
    """Return whether the attempt with the fault made the last step, and no later one a step.

    A trainer may ignore a fault without an expected class, such as SIGTERM, and finish.
    """
    ignored = hit.ending == "done" and FAULTS[kind].expected is None
    return not ignored and int(curve.attempts.max()) <= hit.attempt and curve.steps[-1] >= steps


def _curve_faults(curve: Curve, reference: Curve, steps: int, tolerances: Tolerances) -> list[str]:
    comparison = compare(reference, curve, tolerances, from_step=1, to_step=steps)
    # Scatter of its own is no resume of the same training.
    faults = [] if comparison.verdict in ("identical", "match") else [comparison.reason]
    if comparison.only_in_a:
        faults.append(f"steps {describe_ranges(comparison.only_in_a)} are missing")
    if comparison.only_in_b or int(curve.steps[-1]) > steps:
        faults.append(f"steps beyond the reference's: up to {curve.steps[-1]}")
    if comparison.steps_compared != steps and not faults:
        faults.append(f"only {comparison.steps_compared} of {steps} steps could be compared")
    if comparison.data and not comparison.data.same:
        faults.append(f"different data: {'; '.join(comparison.data.differences)}")
    difference = curve.overlap_max_rel_diff or 0.0
    tolerated = difference <= max(tolerances.loss, tolerances.grad_norm)
    if curve.overlap_rows and not (curve.overlap_identical if tolerances.exact else tolerated):
        faults.append(
            f"{curve.overlap_rows} recomputed steps differ from the first computation by up to "
            f"{difference:.2g} relative"
        )
    return faults


def _checkpoint_faults(run: RunDir, steps: int) -> Iterator[str]:
    if partial := sorted(path.name for path in run.checkpoints.glob(".*")):
        yield f"an incomplete checkpoint is left: {', '.join(partial)}"
    newest = max(run.checkpoint_steps(), default=None)
    if newest != steps:
        yield f"the newest checkpoint is of step {newest}, not {steps}"
    else:
        yield from verify_entry(read_entry(run.checkpoint(steps))).faults or ()


def recovery_times(run: RunDir, injection: Injection) -> RecoveryTimes | None:
    """Return the recovery from the fault on, by phase; None if no step was completed since."""
    history = read_history(run)
    attempt = injection.attempt
    recovery = next((r for r in find_recoveries(history) if r.attempt == attempt), None)
    if not recovery or recovery.seconds is None:
        return None
    hit = history.steps.get(attempt)
    broken = next(a for a in history.attempts if a.stage == "train" and a.attempt == attempt)
    # `status` measures from the last completed step, which is before or after the fault.
    last_step_at = float(hit.ends[-1]) if hit else broken.started_at
    before_s = injection.time - last_step_at
    resumed = next(n for n in sorted(history.steps) if n > attempt)
    worker = WorkerRecord.find(run.attempt("train", resumed).worker(0))
    start_up_s = worker.start_up_s if worker else 0.0
    phases_s = recovery.phases_s
    times = {
        "detection_s": max(0.0, phases_s["noticing"] + phases_s["stopping"] - before_s),
        "requeue_s": phases_s["requeue"],
        "preflight_s": phases_s["preflight"],
        "cache_s": phases_s["cache"],
        # An attempt in between that completed no step is part of it.
        "launch_s": max(0.0, phases_s["start_up"] - start_up_s) + phases_s["failed_attempts"],
        "start_up_s": min(start_up_s, phases_s["start_up"]),
        "first_step_s": phases_s["first_step"],
    }
    return RecoveryTimes(
        total_s=round(recovery.seconds - before_s, 3),
        **{name: round(seconds, 3) for name, seconds in times.items()},
    )


def judge_resume(run: RunDir, curve: Curve, unbroken: Unbroken, hit: AttemptRecord) -> Resumption:
    """Return how a run continued after the attempt `hit`, by its curve."""
    later = curve.steps[curve.attempts > hit.attempt]
    first = int(curve.steps[0])
    if len(later):
        first = int(later.min())
    elif hit.ending != "done":
        return Resumption(verdict="not_resumed", text="did not resume: no step after the fault")
    elif int(curve.steps[-1]) < unbroken.steps:
        return Resumption(
            verdict="not_resumed",
            text=f"did not resume: exited with 0 at step {curve.steps[-1]}, as if it were done",
        )
    result = _compare(curve, unbroken, first)
    if not len(later):
        return result.model_copy(update={"text": f"continued without a restart: {result.text}"})
    # The checkpoint tells the step between two rows of a sparse log.
    steps = unbroken.reference.steps
    from_step = int(max(steps[steps < first], default=0))
    path = ""
    entries = list_trainer_checkpoints(run, unbroken.command)
    for entry in entries:
        if from_step <= entry.step < first:
            from_step = entry.step
            path = str(entry.path)
    update: Json = {"from_step": from_step, "checkpoint": path}
    if from_step == 0 and first > 1 and not entries:  # a sparse log shows no earlier step
        update["from_step"] = None
    elif from_step == 0:
        update |= {"verdict": "began_again", "text": "did not resume: began again at step 1"}
    return result.model_copy(update={**update, "by_hand": hit.action == "stop"})


def _compare(curve: Curve, unbroken: Unbroken, first: int) -> Resumption:
    """Compare a curve from a step on with the run without a fault."""
    noises = unbroken.noise
    reference = unbroken.reference
    noise = max(noises.values())
    loss, grad_norm = (
        max(unbroken.tolerances.limit(name), _NOISES * noises.get(name, 0.0)) for name in METRICS
    )
    tolerances = Tolerances(loss=loss, grad_norm=grad_norm, exact=not (loss or grad_norm))
    span: Any = {"from_step": first, "to_step": unbroken.steps, "shifts": (0, 0)}
    after = compare(reference, curve, tolerances, **span, basis="tolerance")
    metrics = after.metrics.values()
    largest = max(metric.max_rel_diff or 0.0 for metric in metrics)
    onset: int | None = None
    reason = "two runs without a fault are identical"
    if noise:
        reason = f"two runs without a fault differ by up to {format_figure(noise)}"
    verdict: Verdict = "exact" if not noise and after.verdict == "identical" else "within_noise"
    if after.verdict not in ("identical", "match"):
        verdict = "differs"
        onset = min(metric.onset_step or metric.first_departure_step or first for metric in metrics)
        sentence = f"differs from step {onset} by up to {format_figure(largest)}"
        confidence: Confidence = "certain" if largest >= _CLEAR_NOISES * noise else "likely"
        reason += f"; {after.reason}"
    else:
        digits, proves = _printed_digits(curve, first, [n for n in METRICS if n in after.metrics])
        few = after.steps_compared < _FEW_STEPS or digits < _FEW_DIGITS
        confidence = "weak" if few else "likely"
        limit = max(unbroken.tolerances.limit(name) for name in METRICS)
        sentence = f"within the noise of {format_figure(noise)}"
        if limit > _NOISES * noise:
            sentence = f"within the tolerance of {format_figure(limit)}"
        if verdict == "exact":
            confidence = "certain" if proves else confidence
            sentence = "exact" if proves else f"exact in the {digits} digits printed"
        reason += f"; {after.steps_compared} steps of up to {digits} digits"
        if noise:
            reason += f"; more than {format_figure(max(after.power.values()))} would have shown"
        if after.only_in_a:
            reason += f"; without steps {describe_ranges(after.only_in_a)}"
    return Resumption(
        verdict=verdict,
        text=sentence,
        differs_from_step=onset,
        max_rel_diff=largest,
        noise=noise,
        confidence=confidence,
        confidence_reason=reason,
    )


def _printed_digits(curve: Curve, first: int, names: Sequence[str]) -> tuple[int, bool]:
    """Return the most digits of the values from a step on, and whether equal ones are proof."""
    digits = [
        [len(number.digits) for number in decimals(curve.columns[name][curve.steps >= first])]
        for name in names
    ]
    return max(chain(*digits), default=0), any(
        sum(n >= _MANY_DIGITS for n in column) >= _MANY_STEPS for column in digits
    )
