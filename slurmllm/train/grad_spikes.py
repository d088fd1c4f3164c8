"""Spikes of the gradient norm: where one begins, whether it returns.

After HLAT (Fan et al., 2024, arXiv 2404.10630): a norm more than `guard.factor` times the lowest
smoothed one is a spike; one that does not return within a window has diverged.

1. The smoothed norm is the mean over `guard.smoothing_steps` steps.
2. The lowest is taken over the last 20 times as many steps and not over the whole run: norms may
   grow slowly, as they do late in a decay, and a run that has settled on a higher level goes on.
3. Nothing is judged before there is a smoothed norm, nor while the learning rate warms up, for
   norms rise and fall with it; a norm that is still high when the warm-up ends is judged then.
4. A spike is over when a few norms in a row are none: a single one among many that are is noise.

All that it knows goes into a checkpoint and comes back, so a resume judges as the unbroken run.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from slurmllm.config.recipe import GuardConfig

# Steps that the lowest smoothed norm is looked for in, in units of those it is smoothed over.
_HORIZON = 20
# Norms in a row below the limit that end a spike.
_RETURN_STEPS = 5


@dataclass
class Spike:
    """A spike that has begun.

    Attributes:
        onset: Its first step.
        batch: The global batch of that step, as the stream counts them from 1.
        norm: Gradient norm of that step.
        lowest: The lowest smoothed norm before it.
        quiet_steps: Last ones in a row whose norm was below the limit.
    """

    onset: int
    batch: int
    norm: float
    lowest: float
    quiet_steps: int = 0


class Change(NamedTuple):
    """What a step's norm has changed.

    Attributes:
        kind: A spike began, returned, or did not return within the window.
    """

    kind: Literal["began", "over", "stays"]
    spike: Spike


class SpikeWatch:
    """Told the gradient norm of every step in turn.

    Args:
        config: The recipe's section.
        warmup_steps: Of the learning rate.
    """

    def __init__(self, config: GuardConfig, warmup_steps: int) -> None:
        self._config = config
        self._warmup_steps = warmup_steps
        self._norms: deque[float] = deque(maxlen=config.smoothing_steps)
        # (step, smoothed norm), both rising: the first is the lowest, the others will be once
        # those before them are too old.
        self._lows: deque[tuple[int, float]] = deque()
        self._spike: Spike | None = None

    def see(self, step: int, batch: int, norm: float) -> Change | None:
        """Judge a step.

        Args:
            step: Its number.
            batch: The global batch it was made with, as the stream counts them.
            norm: Its gradient norm, finite.
        """
        change = self._judge(step, batch, norm) if step > self._warmup_steps else None
        self._remember(step, norm)
        return change

    @property
    def spike(self) -> Spike | None:
        """The one that has begun and not returned."""
        return self._spike

    def state(self) -> dict[str, Any]:
        """What is known; JSON-able."""
        return {
            "norms": list(self._norms),
            "lows": [list(low) for low in self._lows],
            "spike": None if self._spike is None else asdict(self._spike),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what was known; from an empty state on, nothing is."""
        self._norms.clear()
        self._norms.extend(state.get("norms", ()))
        self._lows = deque((step, norm) for step, norm in state.get("lows", ()))
        spike = state.get("spike")
        self._spike = None if spike is None else Spike(**spike)

    def _judge(self, step: int, batch: int, norm: float) -> Change | None:
        if not self._lows:
            return None
        config, spike, lowest = self._config, self._spike, self._lows[0][1]
        high = norm > config.factor * lowest
        if spike is None:
            if not high:
                return None
            self._spike = Spike(step, batch, norm, lowest)
            return Change("began", self._spike)
        spike.quiet_steps = 0 if high else spike.quiet_steps + 1
        if spike.quiet_steps >= min(_RETURN_STEPS, config.window_steps):
            self._spike = None
            return Change("over", spike)
        if high and step - spike.onset >= config.window_steps:
            return Change("stays", spike)
        return None

    def _remember(self, step: int, norm: float) -> None:
        self._norms.append(norm)
        if len(self._norms) < self._config.smoothing_steps:
            return
        smoothed = math.fsum(self._norms) / len(self._norms)
        while self._lows and self._lows[-1][1] >= smoothed:
            self._lows.pop()
        self._lows.append((step, smoothed))
        while self._lows[0][0] <= step - _HORIZON * self._config.smoothing_steps:
            self._lows.popleft()
