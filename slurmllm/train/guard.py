"""The divergence guard: warns, stops, or rolls back and skips the batches that caused divergence.

A gradient norm more than `guard.factor` times the lowest smoothed norm is a spike; one that does
not return within a window is a divergence, as is a value that is not finite.

1. The smoothed norm is the mean over `guard.smoothing_steps` steps.
2. The lowest is taken over the last 20 times as many steps, not over the whole run: norms may grow
   slowly, as they do late in a decay, and training at a stable higher level continues.
3. No step is checked before the first smoothed norm, nor during the warm-up of the learning rate,
   because norms rise and fall with it; a norm that is still high after the warm-up is a spike.
4. A spike ends after several norms in a row below the limit: a single low one is noise.

Every worker checks every step, and acts only when all have exchanged their findings, as flags.
For a roll-back, rank 0 writes the batches to skip and the step from which on checkpoints are
invalid into `skips.json`. All workers then fail, and the next attempt resumes from a checkpoint
before the divergence: steps keep their numbers and use later batches. The detector's whole state is
saved in checkpoints, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, NoReturn

from slurmllm.core.config.operation import GuardConfig
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.errors import DivergenceError, SlurmllmError, StaleGraphsError, StorageError
from slurmllm.core.format import Json
from slurmllm.core.metrics.curves import spike_height
from slurmllm.core.run.records import SkippedBatches, SkipsRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.worker_files import EventLog
from slurmllm.train.backends.base import Backend
from slurmllm.train.checkpoint.catalogue import usable_steps

log = logging.getLogger(__name__)


# Window of the lowest smoothed norm, in units of `guard.smoothing_steps`.
_HORIZON = 20
# Norms in a row below the limit that end a spike.
_RETURN_STEPS = 5


@dataclass
class OpenSpike:
    """A spike that has not returned yet."""

    onset: int  # its first step
    batch: int  # number of that step's global batch in the stream, from 1
    norm: float  # gradient norm of that step
    lowest: float  # lowest smoothed norm before it
    quiet_steps: int = 0  # the latest steps in a row with a norm below the limit


class SpikeChange(NamedTuple):
    """A spike began, returned, or did not return within the window."""

    kind: Literal["began", "over", "stays"]
    spike: OpenSpike


@dataclass
class SpikeDetector:
    """A detector of spikes, which gets the gradient norms of all steps in turn."""

    config: GuardConfig
    warmup_steps: int
    spike: OpenSpike | None = None  # the one that has begun and not returned

    def __post_init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=self.config.smoothing_steps)
        # (step, smoothed norm), both increasing: the first is the lowest of the window, each other
        # one becomes the lowest when those before it leave the window.
        self._lows: deque[tuple[int, float]] = deque()

    def update(self, step: int, batch: int, norm: float) -> SpikeChange | None:
        """Add the norm of a step, a finite one; `batch` is its global batch in the stream."""
        change = self._check(step, batch, norm) if step > self.warmup_steps else None
        self._norms.append(norm)
        if len(self._norms) == self.config.smoothing_steps:
            smoothed = math.fsum(self._norms) / len(self._norms)
            while self._lows and self._lows[-1][1] >= smoothed:
                self._lows.pop()
            self._lows.append((step, smoothed))
            while self._lows[0][0] <= step - _HORIZON * self.config.smoothing_steps:
                self._lows.popleft()
        return change

    def _check(self, step: int, batch: int, norm: float) -> SpikeChange | None:
        if not self._lows:
            return None
        config = self.config
        spike = self.spike
        lowest = self._lows[0][1]
        high = spike_height(norm, lowest, config.factor) > 0
        if spike is None:
            if not high:
                return None
            self.spike = OpenSpike(step, batch, norm, lowest)
            return SpikeChange("began", self.spike)
        spike.quiet_steps = 0 if high else spike.quiet_steps + 1
        if spike.quiet_steps >= min(_RETURN_STEPS, config.window_steps):
            self.spike = None
            return SpikeChange("over", spike)
        stays = high and step - spike.onset >= config.window_steps
        return SpikeChange("stays", spike) if stays else None

    def state(self) -> Json:
        return {
            "norms": list(self._norms),
            "lows": [list(low) for low in self._lows],
            "spike": None if self.spike is None else asdict(self.spike),
        }

    def load_state(self, state: Json) -> None:
        self._norms.clear()
        self._norms.extend(state.get("norms", ()))
        self._lows = deque((step, norm) for step, norm in state.get("lows", ()))
        spike = state.get("spike")
        self.spike = None if spike is None else OpenSpike(**spike)


class Divergence(NamedTuple):
    """A divergence found by a worker."""

    reason: str
    setting: Literal["guard.not_finite", "guard.spike"]  # the one that decides on the action
    policy: Literal["stop", "roll_back"]  # its value
    onset: int  # first step of the divergence
    first: int  # number of the global batch of that step
    last: int  # that of the last step checked
    stale: bool = False  # the first step, with graphs that were compiled before


@dataclass
class Guard:
    """The check of every step of the train stage; on every worker."""

    run: RunDir
    stage: Stage
    attempt: int
    recipe: Recipe
    backend: Backend
    events: EventLog
    reused_graphs: bool = False  # see `worker_files.wait_for_graphs`
    _divergence: Divergence | None = None
    _warned: bool = False
    _first_step: int | None = None  # that this worker checked

    def __post_init__(self) -> None:
        recipe = self.recipe
        self._config = recipe.guard
        self._detector = SpikeDetector(recipe.guard, recipe.optim.warmup(recipe.train.steps))
        self.state = self._detector.state
        self.load_state = self._detector.load_state

    @property
    def diverged(self) -> bool:
        """Whether this worker found a divergence; the others may not know of it yet."""
        return self._divergence is not None

    def check_finite(self, name: str, value: float, step: int, batch: int) -> None:
        self._first_step = self._first_step or step
        # A compiler that only collects graphs (precompile on trn1) returns uninitialized memory.
        if math.isfinite(value) or self.stage == "precompile" or self.diverged:
            return
        reason = f"the {name} of step {step} is {value}"
        self.events.add("not_finite", step, message=reason)
        onset = step
        first = batch
        if spike := self._detector.spike:  # the divergence began with it
            reason += f", after a spike of the gradient norm from step {spike.onset} on"
            onset = spike.onset
            first = spike.batch
        stale = self.reused_graphs and step == self._first_step
        self._divergence = Divergence(
            reason, "guard.not_finite", self._config.not_finite, onset, first, batch, stale
        )

    def check_norm(self, step: int, batch: int, norm: float) -> None:
        if self._config.spike == "off" or self.diverged:
            return
        change = self._detector.update(step, batch, norm)
        if change is None:
            return
        (kind, spike), policy = change, self._config.spike
        if kind == "stays":
            reason = (
                f"the gradient norm has not returned in the {step - spike.onset} steps since step "
                f"{spike.onset}: it is {norm:.3g} at step {step}, more than "
                f"{self._config.factor:g} times the lowest smoothed norm ({spike.lowest:.3g})"
            )
            if policy == "stop" or policy == "roll_back":
                self._divergence = Divergence(
                    reason, "guard.spike", policy, spike.onset, spike.batch, batch
                )
            elif not self._warned:
                self._warned = True
                log.warning(reason)
            return
        if kind == "began":
            self._warned = False
            message = (
                f"spike: the gradient norm of step {step} is {norm:.3g}, more than "
                f"{self._config.factor:g} times the lowest smoothed norm ({spike.lowest:.3g})"
            )
        else:
            message = f"the spike of step {spike.onset} is over: gradient norm {norm:.3g}"
        log.log(logging.WARNING if kind == "began" else logging.INFO, message)
        values = {"onset": spike.onset, "grad_norm": norm, "lowest": spike.lowest}
        values["factor"] = self._config.factor
        event = "spike" if kind == "began" else "spike_over"
        self.events.add(event, step, message=message, values=values)

    def fail(self) -> NoReturn:
        """Raise a DivergenceError on all workers, as one of them found one (collective).

        A StaleGraphsError instead if graphs that were compiled before may be to blame.
        """
        control = self.backend.control
        mine = self._divergence
        # Nodes of another processor have compiled graphs of their own.
        if stale := control.first(mine if mine and mine.stale else None):
            raise StaleGraphsError(
                f"{stale.reason}, with graphs that an earlier attempt or run compiled; these are "
                "rejected, and the next attempt compiles new ones"
            )
        divergence = control.first(mine)
        assert divergence is not None
        # Broadcast, so that no worker fails before rank 0 has written `skips.json`: soon after a
        # worker fails, the launcher kills the others.
        action = self._act(divergence) if control.rank == 0 else None
        raise DivergenceError(f"{divergence.reason}; {control.broadcast(action)}")

    def protected_steps(self) -> tuple[int, ...]:
        """Return the checkpoint needed if the current spike leads to a roll-back; on rank 0."""
        spike = self._detector.spike
        if spike is None or self.backend.worker.rank:
            return ()
        try:
            checkpoint_step = self._newest_before(spike.onset)
        except StorageError:  # retention gets the same error, and then removes nothing
            return ()
        return () if checkpoint_step is None else (checkpoint_step,)

    def _act(self, divergence: Divergence) -> str:
        """Write a roll-back if the recipe asks for it; returns the action for the error message."""
        if divergence.policy == "stop":
            return (
                f"checkpoints before step {divergence.onset} have earlier weights: lower optim.lr "
                f"or lengthen optim.warmup_steps in a new run, or skip the data with `slurmllm "
                f"resume {self.run.name} --set {divergence.setting}=roll_back`"
            )
        try:
            return self._roll_back(divergence)
        except (SlurmllmError, OSError) as error:
            return f"the run stops, because the roll-back could not be written: {error}"

    def _roll_back(self, divergence: Divergence) -> str:
        run = self.run
        config = self._config
        record = SkipsRecord.of(run)
        skips = record.skips
        if len(skips) >= config.max_roll_backs:
            return (
                f"the run stops after {len(skips)} roll-backs (guard.max_roll_backs "
                f"{config.max_roll_backs}); lower optim.lr, or allow more with "
                f"`slurmllm resume {run.name} --set guard.max_roll_backs=…`"
            )
        skip = SkippedBatches(
            first=max(1, divergence.first - config.skip_batches),
            last=divergence.last,
            roll_back_to=self._newest_before(divergence.onset),
            onset=divergence.onset,
            attempt=self.attempt,
            reason=divergence.reason,
        )
        record.model_copy(update={"skips": (*skips, skip)}).save(run.skips)
        return (
            f"roll-back {len(skips) + 1} of at most {config.max_roll_backs}: the next attempt "
            f"resumes from step {skip.roll_back_to or 0} and skips batches {skip.first} to "
            f"{skip.last}"
        )

    def _newest_before(self, step: int) -> int | None:
        return max((s for s in usable_steps(self.run) if s < step), default=None)
