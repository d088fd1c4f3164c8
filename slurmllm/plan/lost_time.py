"""The checkpoint interval and expected lost time, from the cost of saves and the failure rate.

Young 1974 ("A first order approximation to the optimum checkpoint interval", Comm. ACM 17(9)):
sqrt(2·δ·M) for a save of cost δ and a mean time M between failures. Daly 2006 ("A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), eq. 37) holds for costly saves and frequent failures too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from statistics import fmean

from slurmllm.run.records import TIME_PARTS, EndingClass, TimePart

HOUR_S = 3600.0
# Slurm's default SlurmdTimeout: a node that does not respond for so long is set to DOWN.
SLURMD_TIMEOUT_S = 300.0
# A failure that is reported: the grace period of the peers and of the other launchers.
REPORTED_S = 10.0
# Without a watchdog, a stuck collective ends by its own time-out: torch.distributed's default.
UNWATCHED_S = 1800.0
# The endings that lose the steps since the last checkpoint, and count as failures.
FAILURES: frozenset[EndingClass] = frozenset({"node_failure", "hang", "storage_failure"})
_POINTS = 4  # of a job at which its restarts are evaluated: off by 0.06 % of the time at most


def best_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between the end of a save and the begin of the next (Daly).

    sqrt(2·δ·M)·[1 + 1/3·sqrt(δ/2M) + 1/9·(δ/2M)] - δ if δ < 2·M, else M, for a save of cost δ and a
    mean time M between failures of the run, which may be infinite. The duration of a restart
    cancels out: it multiplies the time of every interval alike.
    """
    if save_cost_s < 0 or not mtbf_s > 0:
        raise ValueError(f"save cost {save_cost_s} s must be at least 0, MTBF {mtbf_s} s above 0")
    # The series of eq. 37 holds only below this.
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    if math.isinf(mtbf_s):
        return mtbf_s if save_cost_s > 0 else 0.0
    ratio = save_cost_s / (2 * mtbf_s)
    young = math.sqrt(2 * save_cost_s * mtbf_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s


def mtbf_s(nodes: int, failures: int, node_s: float, node_mtbf_hours: float) -> float:
    """Mean time between failures of a run that has run for `node_s` seconds times nodes, s.

    The profile's figure counts as one failure seen in `node_mtbf_hours`: all there is at first, and
    outweighed in time by the failures of the run.
    """
    per_node_s = (node_mtbf_hours * HOUR_S + node_s) / (1 + failures)
    return per_node_s / nodes


@dataclass(frozen=True)
class Durations:
    """Durations of the phases of an attempt, s; several values are a distribution."""

    requeue: tuple[float, ...]  # from the end of an attempt to the start of the next
    preflight: tuple[float, ...]  # checks of the nodes
    cache: tuple[float, ...]  # broadcast of the compiled graphs to the nodes
    start_up: tuple[float, ...]  # from the launchers' start to the first step, resume included
    first_step: tuple[float, ...]  # extra time of the first step
    # From the first sign of an end until the attempt is closed.
    stopping: tuple[float, ...] = (5.0,)
    # From a failure to its first sign; empty: depends on the kind of failure.
    noticing: tuple[float, ...] = ()

    def describe(self) -> str:
        """`requeue 125 s, preflight 15 s, …`, the mean of each."""
        named = ((one.name, getattr(self, one.name)) for one in fields(self))
        means = ((name, fmean(values)) for name, values in named if values)
        return ", ".join(f"{name.replace('_', ' ')} {mean:.3g} s" for name, mean in means)


@dataclass(frozen=True)
class SaveCost:
    """Time that a checkpoint costs."""

    waited_s: float  # time that training waits, s
    total_s: float  # time until the checkpoint is valid, s; `waited_s` if saving is synchronous


@dataclass(frozen=True)
class LostTime:
    """Where the node hours of a run are expected to go."""

    # Part → share of the node hours, as `status.utilization` counts them; they add up to 1.
    shares: Mapping[TimePart, float]
    goodput: float  # productive time / wall time, waits for the next allocation included
    interval_steps: int  # steps from one checkpoint to the next
    auto_steps: int  # the same with `checkpoint.every_steps: auto`
    mtbf_s: float  # mean time between two failures of the run, s of its allocations

    @property
    def effective(self) -> float:
        """Effective utilization: the share of the node hours that trains."""
        return self.shares["productive"]


@dataclass(frozen=True)
class DetectionDelay:
    """Seconds from a failure to its first sign, mean over the kinds of failures."""

    start_up_s: float = REPORTED_S  # before the first step
    training_s: float = REPORTED_S  # in steps and saves


def auto_steps(step_s: float, save: SaveCost, mtbf_s: float) -> int:
    """Steps between two checkpoints with `checkpoint.every_steps: auto`."""
    best_s = best_interval_s(save.waited_s, mtbf_s)
    return max(1, math.ceil(max(best_s, save.total_s) / step_s))


def expected_losses(
    nodes: int,
    step_s: float,
    save: SaveCost,
    durations: Durations,
    node_mtbf_hours: float,
    every_steps: int | None = None,
    leaves_s: float | None = None,
    training_s: float | None = None,
    noticing: DetectionDelay | None = None,
    restarts: float = 0.0,
) -> LostTime:
    """Expected lost time: the mean over simulations of long runs (tools/benchmarks/month.py).

    Args:
        every_steps: Between two checkpoints; None: auto, from the true failure rate.
        leaves_s: After which a job saves and leaves: its time limit less `slurm.signal_lead_s`;
            None: no limit.
        training_s: All steps of the run, s: a run that is done sooner leaves sooner, and has less
            to share its start-up with. None: it goes on for ever.
        noticing: Of failures; `durations.noticing` goes before it.
        restarts: Share of the failures after which new workers start in the same job: no wait in
            the queue, no broadcast of graphs, and the job's time limit goes on. The others end it.

    Raises:
        ValueError: a count, a duration or a rate that is not above 0.
    """
    if min(nodes, step_s, node_mtbf_hours, every_steps or 1, leaves_s or 1.0) <= 0:
        raise ValueError(
            f"nodes {nodes}, step_s {step_s}, node_mtbf_hours {node_mtbf_hours}, every_steps "
            f"{every_steps} and leaves_s {leaves_s} must all be above 0"
        )
    mtbf_s = node_mtbf_hours * HOUR_S / nodes
    auto = auto_steps(step_s, save, mtbf_s)
    steps = auto if every_steps is None else every_steps
    if durations.noticing:
        noticing = DetectionDelay(fmean(durations.noticing), fmean(durations.noticing))
    attempt = _Attempt(step_s, steps * step_s, save, durations, mtbf_s, leaves_s, training_s)
    if leaves_s is not None and leaves_s <= attempt.trains_s:
        shares: dict[TimePart, float] = dict.fromkeys(TIME_PARTS, 0.0) | {"start_up": 1.0}
        return LostTime(shares, 0.0, steps, auto, mtbf_s)
    delay = noticing or DetectionDelay()
    parts_s = attempt.parts_s(delay)
    without_broadcast = replace(durations, cache=(0.0,))
    for weight, begins_s in _restarts(attempt.leaves_s, mtbf_s, restarts):
        left_s = attempt.leaves_s - begins_s
        restart = _Attempt(step_s, steps * step_s, save, without_broadcast, mtbf_s, left_s, None)
        for part, seconds in restart.parts_s(delay).items():
            parts_s[part] += weight * seconds
    length_s = math.fsum(parts_s.values())
    return LostTime(
        shares={part: parts_s[part] / length_s for part in TIME_PARTS},
        goodput=parts_s["productive"] / (length_s + fmean(durations.requeue)),
        interval_steps=steps,
        auto_steps=auto,
        mtbf_s=mtbf_s,
    )


def _restarts(leaves_s: float, mtbf_s: float, share: float) -> Iterator[tuple[float, float]]:
    """Yield (expected number, seconds after the job's start) of the restarts in a job.

    Failures restart the workers at the rate share / M and end the job at (1 - share) / M, so that
    exp(-(1 - share)·s/M)·share/M restarts are expected at s. The points divide their integral.
    """
    ends = max(1e-9, 1 - share)  # a job without a limit ends some time
    integral = -math.expm1(-ends * leaves_s / mtbf_s) / ends
    for number in range(_POINTS if share else 0):
        part = (number + 0.5) / _POINTS * integral
        yield share * integral / _POINTS, -mtbf_s * math.log1p(-ends * part) / ends


class _Attempt:
    """The mean attempt.

    start ─ preflight ─ cache ─ start-up ─ first step ─ interval ─ save ─ interval ─ save ─ …

    Save j begins at `saves_s + (j - 1)·cycle_s` and counts `save.total_s` later.
    """

    def __init__(
        self, step_s: float, interval_s: float, save: SaveCost, durations: Durations,
        mtbf_s: float, leaves_s: float | None, training_s: float | None,
    ) -> None:  # fmt: skip
        self.step_s, self.interval_s, self.save, self.mtbf_s = step_s, interval_s, save, mtbf_s
        self.durations = durations
        phases = (durations.preflight, durations.cache, durations.start_up)
        self.trains_s = sum(map(fmean, phases))
        self.ready_s = self.trains_s + fmean(durations.first_step)
        self.saves_s = self.ready_s + interval_s
        # A save begins once the one before is written.
        self.cycle_s = max(interval_s + save.waited_s, save.total_s)
        whole_s = math.inf if training_s is None else training_s * self.cycle_s / interval_s
        # Half a step is what `parts_s` adds for the one under way.
        done_s = self.ready_s + whole_s - step_s / 2
        leaves_s = min(math.inf if leaves_s is None else leaves_s, done_s)
        self.begun_s = self.ready_s + step_s
        self.leaves_s = max(leaves_s, self.begun_s)  # a step under way is finished

    def parts_s(self, noticing: DetectionDelay) -> dict[TimePart, float]:
        durations = self.durations
        preflight_s, cache_s = fmean(durations.preflight), fmean(durations.cache)
        begun, leaving = self._alive(self.begun_s), self._alive(self.leaves_s)
        failing = 1 - self._alive(self.trains_s)
        waited_s, kept_s, left_s = self._steps()
        made_s = begun * self.step_s + self._within(self.begun_s, math.inf) - waited_s
        under_way_s = min((begun - leaving) * self.step_s / 2, made_s - kept_s - left_s)
        # An attempt that fails within its first step counts as start-up until it is noticed.
        first_s = self._within(self.trains_s, self.begun_s)
        first_s -= begun * (self.begun_s - self.trains_s)
        parts = dict.fromkeys(TIME_PARTS, 0.0)
        parts["preflight"] = self._within(0.0, preflight_s)
        parts["cache"] = self._within(preflight_s, preflight_s + cache_s)
        parts["start_up"] = (
            self._within(preflight_s + cache_s, self.trains_s) + first_s
            + failing * noticing.start_up_s + (1 - failing - begun) * noticing.training_s
        )  # fmt: skip
        parts["first_step"] = begun * fmean(durations.first_step)
        # A signal finds half a step under way on average, which is finished.
        parts["productive"] = kept_s + left_s + leaving * self.step_s / 2
        parts["recomputation"] = made_s - kept_s - left_s - under_way_s
        parts["saving"] = waited_s + leaving * self.save.total_s
        parts["idle"] = (
            under_way_s + fmean(durations.stopping) + (begun - leaving) * noticing.training_s
        )
        return parts

    def _steps(self) -> tuple[float, float, float]:
        """Mean seconds in waits for saves, and in steps: those that checkpoints keep of attempts
        that fail, and those of attempts that leave."""
        wait_s, counts_s = self.cycle_s - self.interval_s, self.saves_s + self.save.total_s
        begun, counted = self._saves(self.saves_s), self._saves(counts_s)
        # expm1 keeps the digits that 1 - exp(-x) loses for an MTBF of years.
        waits = -math.expm1(-wait_s / self.mtbf_s) * self.mtbf_s
        waited_s = waits * self._sum(self.saves_s, begun)
        kept_s = self.interval_s * self._sum(counts_s, counted)
        leaving = self._alive(self.leaves_s)
        if leaving == 0.0:  # there may be no end of saves
            return waited_s, kept_s, 0.0
        kept_s -= self.interval_s * counted * leaving
        last_s = self.saves_s + (begun - 1) * self.cycle_s
        cut_s = max(0.0, last_s + wait_s - self.leaves_s) if begun else 0.0
        # An attempt that leaves in the midst of a wait has waited until then alone.
        cut = math.exp((cut_s - wait_s) / self.mtbf_s) - math.exp(-wait_s / self.mtbf_s)
        waited_s -= cut * self.mtbf_s * math.exp(-last_s / self.mtbf_s)
        left_s = (self.leaves_s - self.ready_s - begun * wait_s + cut_s) * leaving
        return waited_s, kept_s, left_s

    def _alive(self, at_s: float) -> float:
        """Probability that no failure has come by then."""
        return math.exp(-min(at_s, self.leaves_s) / self.mtbf_s)

    def _within(self, begin_s: float, end_s: float) -> float:
        """Mean seconds that an attempt spends between two times, s after its start."""
        begin_s, end_s = min(begin_s, self.leaves_s), min(end_s, self.leaves_s)
        fails = -math.expm1((begin_s - end_s) / self.mtbf_s)
        return self.mtbf_s * self._alive(begin_s) * fails

    def _saves(self, first_s: float) -> float:
        """How many of the times `first_s`, and every cycle after it, come before the attempt
        leaves."""
        if math.isinf(self.leaves_s):
            return math.inf
        return max(0, math.ceil((self.leaves_s - first_s) / self.cycle_s))

    def _sum(self, first_s: float, count: float) -> float:
        """Probabilities that an attempt reaches each of those times, added up."""
        ratio = self.cycle_s / self.mtbf_s
        many = -math.expm1(-count * ratio) if count else 0.0
        return math.exp(-first_s / self.mtbf_s) * many / -math.expm1(-ratio)
