"""The divergence guard: warns, stops, or rolls back and skips the data that training diverged on.

1. Every worker judges every step's figures, which are equal on all of them. The last bits of a norm
   may not be where it is summed in groups, so what one worker finds is acted on only once all
   have heard of it: it goes with what they tell each other after each step anyway (`agree`).
2. To roll back, rank 0 writes down which batches are skipped and from which step on checkpoints
   count no more (`skips.json`). Then all workers fail with a DivergenceError, and the supervisor
   starts the next attempt.
3. The next attempt resumes from a checkpoint before the divergence (`checkpoint.set_aside`) and
   passes over the batches. Steps keep their numbers and are made with later data.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from slurmllm.checkpoint.catalogue import invalidated_checkpoints, read_rollbacks
from slurmllm.errors import DivergenceError, SlurmllmError, StorageError
from slurmllm.records import SkippedBatches, SkipsRecord
from slurmllm.train.grad_spikes import Spike, SpikeWatch

if TYPE_CHECKING:
    from slurmllm.train.job import Job


class Divergence(NamedTuple):
    """A divergence that a worker has found.

    Attributes:
        reason: What it saw.
        setting: Of the recipe, that says what follows.
        policy: Its value.
        onset: First step of the divergence.
        first: The global batch of that step.
        last: The global batch of the last step looked at.
    """

    reason: str
    setting: Literal["guard.not_finite", "guard.spike"]
    policy: Literal["stop", "roll_back"]
    onset: int
    first: int
    last: int


class Guard:
    """Looks at every step of the train stage.

    Args:
        job: Whose.
    """

    def __init__(self, job: Job) -> None:
        recipe = job.config.recipe
        self._job, self._config = job, recipe.guard
        self._watch = SpikeWatch(recipe.guard, recipe.optim.warmup_steps)
        self._verdict: Divergence | None = None
        self._warned = False

    def check_finite(self, name: str, value: float, step: int, batch: int) -> None:
        """Look at a figure before anything is done with it (collective where it is not finite).

        Args:
            name: Of the figure.
            value: The figure.
            step: Whose figure it is.
            batch: The global batch that the step was made with.

        Raises:
            DivergenceError: it is not finite.
        """
        # A compiler that only collects graphs (precompile on trn1) hands back what was in memory.
        if math.isfinite(value) or self._job.stage == "precompile":
            return
        reason = f"the {name} of step {step} is {value}"
        self._job.events.add("not_finite", step, message=reason)
        policy, onset, first = self._config.not_finite, step, batch
        if spike := self._watch.spike:  # which led to it
            reason += f", after a spike of the gradient norm from step {spike.onset} on"
            onset, first = spike.onset, spike.batch
        self._verdict = Divergence(reason, "guard.not_finite", policy, onset, first, batch)
        self.agree()

    def see(self, step: int, batch: int, norm: float) -> None:
        """Look at the gradient norm of a step whose figures are finite."""
        if self._config.spike == "off":
            return
        change = self._watch.see(step, batch, norm)
        if change is None:
            return
        if change.kind == "stays":
            self._stays(change.spike, step, batch, norm)
        elif change.kind == "began":
            self._warned = False
            self._tell("spike", step, norm, change.spike)
        else:
            self._tell("spike_over", step, norm, change.spike)

    def agree(self, word: str | None = None) -> list[str | None]:
        """Tell all workers something, and hear what they have found (collective).

        Args:
            word: For the others, beside what the guard says.

        Returns:
            Every worker's word, by rank.

        Raises:
            DivergenceError: on all workers, where one of them has found a divergence.
        """
        answers = self._job.backend.gather((word, self._verdict))
        found = next((verdict for _, verdict in answers if verdict is not None), None)
        if found is not None:
            self._end(found)
        return [word for word, _ in answers]

    def needed(self) -> tuple[int, ...]:
        """Step of the checkpoint to go back to if the spike at hand does not return; on rank 0."""
        spike = self._watch.spike
        if spike is None or self._job.backend.worker.rank:
            return ()
        try:
            found = self._newest_before(spike.onset)
        except StorageError:  # retention meets it too, and removes nothing
            return ()
        return () if found is None else (found,)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember; JSON-able."""
        return self._watch.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; one that knows nothing of the guard has an empty state."""
        self._watch.load_state(state)

    def _stays(self, spike: Spike, step: int, batch: int, norm: float) -> None:
        reason = (
            f"the gradient norm has not returned in the {step - spike.onset} steps since step "
            f"{spike.onset}: it is {norm:.3g} at step {step}, more than {self._config.factor:g} "
            f"times the lowest smoothed one ({spike.lowest:.3g})"
        )
        if self._config.spike in ("stop", "roll_back"):
            policy: Literal["stop", "roll_back"] = self._config.spike
            self._verdict = Divergence(
                reason, "guard.spike", policy, spike.onset, spike.batch, batch
            )
        elif not self._warned:
            self._warned = True
            self._job.say(f"warning: {reason}")

    def _tell(self, kind: Literal["spike", "spike_over"], step: int, norm: float, s: Spike) -> None:
        if kind == "spike":
            message = (
                f"warning: spike: the gradient norm of step {step} is {norm:.3g}, more than "
                f"{self._config.factor:g} times the lowest smoothed one ({s.lowest:.3g})"
            )
        else:
            message = f"the spike of step {s.onset} is over: gradient norm {norm:.3g}"
        self._job.say(message)
        values = {
            "onset": s.onset,
            "grad_norm": norm,
            "lowest": s.lowest,
            "factor": self._config.factor,
        }
        self._job.events.add(kind, step, message=message, values=values)

    def _end(self, verdict: Divergence) -> NoReturn:
        """Write down what follows, then end training (collective)."""
        backend = self._job.backend
        first = backend.worker.rank == 0
        # Nobody fails before it is written: a failed worker has the others killed soon.
        consequence = backend.gather(self._consequence(verdict) if first else None)[0]
        raise DivergenceError(f"{verdict.reason}; {consequence}")

    def _consequence(self, verdict: Divergence) -> str:
        if verdict.policy == "stop":
            return (
                f"checkpoints before step {verdict.onset} hold earlier weights: lower optim.lr or "
                f"lengthen optim.warmup_steps in a new run, or skip the data with `slurmllm resume "
                f"{self._job.run.name} --set {verdict.setting}=roll_back`"
            )
        try:
            return self._roll_back(verdict)
        except (SlurmllmError, OSError) as error:
            return f"the roll-back could not be written down, so the run stops: {error}"

    def _roll_back(self, verdict: Divergence) -> str:
        run, config = self._job.run, self._config
        skips = read_rollbacks(run)
        if len(skips) >= config.max_roll_backs:
            return (
                f"{len(skips)} roll-backs were made, and guard.max_roll_backs is "
                f"{config.max_roll_backs}: the run stops; lower optim.lr, or allow more with "
                f"`slurmllm resume {run.name} --set guard.max_roll_backs=…`"
            )
        skip = SkippedBatches(
            first=max(1, verdict.first - config.skip_batches),
            last=verdict.last,
            roll_back_to=self._newest_before(verdict.onset),
            onset=verdict.onset,
            attempt=self._job.attempt,
            reason=verdict.reason,
        )
        SkipsRecord(skips=(*skips, skip)).save(run.skips)
        return (
            f"roll-back {len(skips) + 1} of {config.max_roll_backs} at most: the next attempt goes "
            f"on from step {skip.roll_back_to or 0} and skips batches {skip.first} to {skip.last}"
        )

    def _newest_before(self, step: int) -> int | None:
        """Step of the newest checkpoint before a step."""
        run = self._job.run
        aside = invalidated_checkpoints(run)
        return max((s for s in run.checkpoint_steps() if s < step and s not in aside), default=None)
