"""How a trainer of another project resumed: from which step, and whether its curve is the same.

Such a trainer need not be reproducible: the difference of two runs without a fault is its noise.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from slurmllm.checkpoint.foreign import list_trainer_checkpoints
from slurmllm.compare.compare import METRICS, compare
from slurmllm.compare.comparison import Tolerances, format_figure
from slurmllm.config.command import CommandConfig
from slurmllm.metrics.curves import Curve, describe_ranges
from slurmllm.run.records import AttemptRecord, Record
from slurmllm.run.rundir import RunDir

_NOISES = 3.0  # a difference of as many times the noise is not noise
_CLEAR_NOISES = 10.0
_FEW_STEPS, _FEW_DIGITS = 5, 4  # that show little

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


def judge_resume(run: RunDir, curve: Curve, unbroken: Unbroken, hit: AttemptRecord) -> Resumption:
    """Return how a run continued after the attempt `hit`, by its curve."""
    later = curve.steps[curve.attempts > hit.attempt]
    first = int(curve.steps[0])
    if len(later):
        first = int(later.min())
    elif hit.ending != "done":
        return Resumption(verdict="not_resumed", text="did not resume: no step after the fault")
    elif int(curve.steps[-1]) < unbroken.steps:
        text = f"did not resume: exited with 0 at step {curve.steps[-1]}, as if it were done"
        return Resumption(verdict="not_resumed", text=text)
    result = _compare(curve, unbroken, first)
    if not len(later):
        return result.model_copy(update={"text": f"continued without a restart: {result.text}"})
    # The checkpoint tells the step between two rows of a sparse log.
    steps = unbroken.reference.steps
    from_step, path = int(max(steps[steps < first], default=0)), ""
    for entry in list_trainer_checkpoints(run, unbroken.command):
        if from_step <= entry.step < first:
            from_step, path = entry.step, str(entry.path)
    update: dict[str, Any] = {"from_step": from_step, "checkpoint": path}
    if from_step == 0:
        update |= {"verdict": "began_again", "text": "did not resume: began again at step 1"}
    return result.model_copy(update={**update, "by_hand": hit.action == "stop"})


def _compare(curve: Curve, unbroken: Unbroken, first: int) -> Resumption:
    """Compare a curve from a step on with the run without a fault."""
    noises, reference = unbroken.noise, unbroken.reference
    noise = max(noises.values())
    loss, grad_norm = (
        max(unbroken.tolerances.of(name), _NOISES * noises.get(name, 0.0)) for name in METRICS
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
        text = f"differs from step {onset} by up to {format_figure(largest)}"
        confidence: Confidence = "certain" if largest >= _CLEAR_NOISES * noise else "likely"
        reason += f"; {after.reason}"
    else:
        digits = max(
            len(f"{float(x)!r}".strip("0").replace(".", "")) for x in curve.columns["loss"]
        )
        few = after.steps_compared < _FEW_STEPS or digits < _FEW_DIGITS
        confidence = "weak" if few else "certain" if verdict == "exact" else "likely"
        text = "exact" if verdict == "exact" else f"within the noise of {format_figure(noise)}"
        reason += f"; {after.steps_compared} steps, loss of {digits} digits"
        if noise:
            reason += f"; more than {format_figure(max(after.power.values()))} would have shown"
        if after.only_in_a:
            reason += f"; without steps {describe_ranges(after.only_in_a)}"
    return Resumption(
        verdict=verdict,
        text=text,
        differs_from_step=onset,
        max_rel_diff=largest,
        noise=noise,
        confidence=confidence,
        confidence_reason=reason,
    )
