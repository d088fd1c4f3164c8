"""The analysis of a run's spikes: the keys of `slurmllm spikes --json`.

A step is one that was logged: of a log with every tenth step, windows and durations count those.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slurmllm.metrics.curves import Range, SourceKind
from slurmllm.records import Record

# passing: all returned to the mean; lasting: one did not, or went on for a whole window;
# rising: the running mean stays above its lowest value; not_finite: NaN or infinite.
State = Literal["too_short", "calm", "passing", "lasting", "rising", "not_finite"]
Direction = Literal["rising", "falling", "neither"]


class Spike(Record):
    """Steps in a row whose loss is more than the threshold above the running mean before each."""

    step: int = Field(description="its first")
    last_step: int
    duration: int = Field(description="logged steps from the first to the last")
    mean: float = Field(description="running mean before its first step")
    height: float = Field(description="largest loss above the running mean of the same step")
    peak_step: int = Field(description="the step that has it")
    loss: float = Field(description="of that step")
    returned_after: int | None = Field(
        description="logged steps from its first to one whose loss is no more than `mean`; None: "
        "there is none before the curve ends"
    )
    grad_norm_ratio: float | None = Field(
        description="largest gradient norm, from the step before it to its last / median over the "
        "window before; None: not logged"
    )
    restart: int | None = Field(description="step of a restart in it or shortly before it")
    skipped: Range | None = Field(description="batches skipped in it or shortly before it")


class NotFinite(Record):
    """Steps in a row whose loss is NaN or infinite; no spike."""

    step: int = Field(description="the first")
    last_step: int
    duration: int


class Growth(Record):
    """How far the running mean of the loss rose above its lowest value so far."""

    largest: float = Field(description="running mean - its lowest value before")
    step: int = Field(description="where that was")
    lowest: float = Field(description="the lowest value before that step")
    lowest_step: int
    at_end: float = Field(description="at the curve's last finite step")
    limit: float = Field(
        description="what noise alone does not reach: the threshold, or ten standard errors of the "
        "running mean if those are larger"
    )
    longest: int = Field(description="most logged steps in a row with more than the limit")
    longest_from: int | None = Field(description="their first; None without any")


class GradNorm(Record):
    """The gradient norm, at spikes and over the run."""

    ratio_median: float | None = Field(description="of the spikes' ratios")
    ratio_largest: float | None
    doubled: int = Field(description="spikes with a ratio above 2")
    growth: float | None = Field(
        description="largest ratio of the running mean to its lowest value so far"
    )
    growth_step: int | None


class ParamNorm(Record):
    """The trend of the parameter norm."""

    first: float
    last: float
    ratio: float | None = Field(description="last / first")
    slope: float | None = Field(
        description="per 1,000 steps over the last half: median of the slopes between all pairs of "
        "up to 200 block medians (Theil and Sen)"
    )
    direction: Direction | None = Field(
        description="of the block medians over the last half, if all go one way"
    )


class SpikeAnalysis(Record):
    """The spikes of one run."""

    name: str
    path: str
    kind: SourceKind
    window: int = Field(description="logged steps of the running mean")
    threshold: float = Field(description="above the running mean")
    min_gap: int = Field(description="calm steps between two spikes")
    state: State = "calm"
    verdict: str = ""
    steps: int = Field(description="with a loss")
    judged: int = Field(description="finite ones with a running mean before them")
    first_step: int
    last_step: int
    interval: int = Field(description="usual distance between two logged steps")
    noise: float = Field(description="standard deviation of the loss from step to step, robust")
    count: int = Field(description="number of spikes")
    per_1000_steps: float | None
    inside: int = Field(description="steps inside spikes")
    inside_share: float | None = Field(description="of the steps judged")
    one_step: int = Field(description="spikes that last one step")
    one_step_share: float | None = Field(description="HLAT: over 0.86")
    longest: int = Field(description="duration of the longest spike; 0 without any")
    highest: float | None = Field(description="largest height")
    returned_after_median: float | None = Field(description="over the spikes that returned")
    unreturned: int = Field(
        description="spikes after which no loss came back to the mean, a window or more of steps on"
    )
    at_restarts: int = Field(description="spikes that coincide with a restart")
    at_skips: int = Field(description="spikes that coincide with skipped batches")
    durations: dict[int, int] = Field(description="duration → number of spikes, shortest first")
    spikes: tuple[Spike, ...] = Field(
        description="in order of their steps; of more than 1,000 only the highest"
    )
    not_finite_steps: int
    not_finite: tuple[NotFinite, ...] = Field(description="the first 1,000")
    growth: Growth | None
    grad_norm: GradNorm | None = Field(description="None: not logged")
    param_norm: ParamNorm | None = Field(description="None: not logged")
    restarts: tuple[int, ...] = Field(description="steps at which another attempt takes over")
    warnings: tuple[str, ...]
    plot: str | None = Field(default=None, description="path of the picture")

    def highest_spikes(self, limit: int) -> list[Spike]:
        """Returns the highest spikes, highest first."""
        return sorted(self.spikes, key=lambda spike: (-spike.height, spike.step))[:limit]
