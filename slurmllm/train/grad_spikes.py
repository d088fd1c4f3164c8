"""Detection of spikes of the gradient norm while training.

After HLAT (Fan et al., 2024, arXiv 2404.10630): a norm more than `guard.factor` times the lowest
smoothed norm is a spike; a spike that does not return within a window is a divergence.

1. The smoothed norm is the mean over `guard.smoothing_steps` steps.
2. The lowest is taken over the last 20 times as many steps, not over the whole run: norms may grow
   slowly, as they do late in a decay, and training at a stable higher level continues.
3. No step is checked before the first smoothed norm, nor during the warm-up of the learning rate,
   because norms rise and fall with it; a norm that is still high after the warm-up is a spike.
4. A spike ends after several norms in a row below the limit: a single low one is noise.

The whole state is saved in checkpoints, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from slurmllm.config.recipe import GuardConfig

# Window of the lowest smoothed norm, in units of `guard.smoothing_steps`.
_HORIZON = 20
# Norms in a row below the limit that end a spike.
_RETURN_STEPS = 5


@dataclass
class OpenSpike:
    """A spike that has not returned yet.

    Attributes:
        onset: Its first step.
        batch: Number of that step's global batch in the stream, from 1.
        norm: Gradient norm of that step.
        lowest: Lowest smoothed norm before it.
        quiet_steps: Number of the latest steps in a row with a norm below the limit.
    """

    onset: int
    batch: int
    norm: float
    lowest: float
    quiet_steps: int = 0


class SpikeChange(NamedTuple):
    """A change of the state of a spike.

    Attributes:
        kind: The spike began, returned, or did not return within the window.
    """

    kind: Literal["began", "over", "stays"]
    spike: OpenSpike


class SpikeDetector:
    """Detects spikes from the gradient norms of all steps in turn.

    Args:
        warmup_steps: Of the learning rate.
    """

    def __init__(self, config: GuardConfig, warmup_steps: int) -> None:
        self._config, self._warmup_steps = config, warmup_steps
        self._norms: deque[float] = deque(maxlen=config.smoothing_steps)
        # (step, smoothed norm), both increasing: the first is the lowest of the window, each other
        # one becomes the lowest when those before it leave the window.
        self._lows: deque[tuple[int, float]] = deque()
        self._spike: OpenSpike | None = None

    @property
    def spike(self) -> OpenSpike | None:
        """The spike that has begun and not returned."""
        return self._spike

    def update(self, step: int, batch: int, norm: float) -> SpikeChange | None:
        """Add the norm of a step.

        Args:
            batch: Number of the step's global batch in the stream.
            norm: Its gradient norm, finite.
        """
        change = self._check(step, batch, norm) if step > self._warmup_steps else None
        self._norms.append(norm)
        if len(self._norms) == self._config.smoothing_steps:
            smoothed = math.fsum(self._norms) / len(self._norms)
            while self._lows and self._lows[-1][1] >= smoothed:
                self._lows.pop()
            self._lows.append((step, smoothed))
            while self._lows[0][0] <= step - _HORIZON * self._config.smoothing_steps:
                self._lows.popleft()
        return change

    def _check(self, step: int, batch: int, norm: float) -> SpikeChange | None:
        if not self._lows:
            return None
        config, spike, lowest = self._config, self._spike, self._lows[0][1]
        high = norm > config.factor * lowest
        if spike is None:
            if not high:
                return None
            self._spike = OpenSpike(step, batch, norm, lowest)
            return SpikeChange("began", self._spike)
        spike.quiet_steps = 0 if high else spike.quiet_steps + 1
        if spike.quiet_steps >= min(_RETURN_STEPS, config.window_steps):
            self._spike = None
            return SpikeChange("over", spike)
        if high and step - spike.onset >= config.window_steps:
            return SpikeChange("stays", spike)
        return None

    def state(self) -> dict[str, Any]:
        """Return the whole state; JSON types."""
        return {
            "norms": list(self._norms),
            "lows": [list(low) for low in self._lows],
            "spike": None if self._spike is None else asdict(self._spike),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state; an empty one resets it."""
        self._norms.clear()
        self._norms.extend(state.get("norms", ()))
        self._lows = deque((step, norm) for step, norm in state.get("lows", ()))
        spike = state.get("spike")
        self._spike = None if spike is None else OpenSpike(**spike)
