"""How a trainer of another project resumed: from which step, and whether its curve is the same.

Such a trainer need not be reproducible: the difference of two runs without a fault is its noise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from slurmllm.checkpoint.foreign import list_trainer_checkpoints
from slurmllm.compare.compare import compare
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
        return result.model_copy(update={"text": f"went on without a restart: {result.text}"})
    steps = unbroken.reference.steps
    if first <= steps[0]:
        text = f"did not resume: began again at step {first}"
        return result.model_copy(update={"verdict": "began_again", "text": text, "from_step": 0})
    # The checkpoint tells the step between two rows of a sparse log.
    before = int(steps[steps < first][-1])
    entries = list_trainer_checkpoints(run, unbroken.command)
    source = next((entry for entry in reversed(entries) if before <= entry.step < first), None)
    checkpoint = {} if source is None else {"checkpoint": str(source.path)}
    from_step = before if source is None else source.step
    return result.model_copy(update={"from_step": from_step, **checkpoint})


def _compare(curve: Curve, unbroken: Unbroken, first: int) -> Resumption:
    noises, of_user = unbroken.noise, unbroken.tolerances
    noise = max(noises.values())
    limits = {
        name: max(of_user.of(name), _NOISES * noises.get(name, 0.0))
        for name in ("loss", "grad_norm")
    }
    tolerances = Tolerances(**limits, exact=not any(limits.values()))
    after = compare(
        unbroken.reference,
        curve,
        tolerances,
        from_step=first,
        to_step=unbroken.steps,
        shifts=(0, 0),
        basis="tolerance",
    )
    count, metrics = after.steps_compared, after.metrics.values()
    largest = max(metric.max_rel_diff or 0.0 for metric in metrics)
    digits = max(len(f"{loss!r}".strip("0").replace(".", "")) for loss in curve.columns["loss"])
    of_two = f"two runs without a fault differ by up to {format_figure(noise)}"
    of_two = of_two if noise else "two runs without a fault are identical"
    verdict: Verdict = "differs"
    confidence: Confidence = "certain"
    if after.verdict in ("identical", "match"):
        verdict = "exact" if after.verdict == "identical" and not noise else "within_noise"
        few = count < _FEW_STEPS or digits < _FEW_DIGITS
        confidence = "weak" if few else "certain" if verdict == "exact" else "likely"
        reason = f"{count} steps, loss of {digits} digits; {of_two}"
        if after.only_in_a:
            reason += f"; without steps {describe_ranges(after.only_in_a)}"
        if verdict == "within_noise":
            reason += f"; more than {format_figure(max(after.power.values()))} would have shown"
        text = "exact" if verdict == "exact" else f"within the noise of {format_figure(noise)}"
        return Resumption(
            verdict=verdict,
            text=text,
            max_rel_diff=largest,
            noise=noise,
            confidence=confidence,
            confidence_reason=reason,
        )
    onset = min(metric.onset_step or metric.first_departure_step or first for metric in metrics)
    size = format_figure(largest)
    return Resumption(
        verdict="differs",
        text=f"differs from step {onset} by up to {size}",
        differs_from_step=onset,
        max_rel_diff=largest,
        noise=noise,
        confidence="certain" if largest >= _CLEAR_NOISES * noise else "likely",
        confidence_reason=f"{of_two}; {after.reason}",
    )
