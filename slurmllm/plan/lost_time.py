"""The checkpoint interval, and the time that a run is expected to lose to saves and failures.

Young 1974 ("A first order approximation to the optimum checkpoint interval", Comm. ACM 17(9)):
sqrt(2·δ·M) for a save of cost δ and a mean time M between failures. Daly 2006 ("A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), eq. 37) holds for costly saves and frequent failures too.

Start-up times and save costs of large runs are not published: `assumed` has conservative ones,
which the presets of tools/benchmarks/month.py use too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import minutes_of
from slurmllm.core.config.yaml_source import read_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Values, format_plural
from slurmllm.core.run.records import TIME_PARTS, EndingClass, TimePart
from slurmllm.plan.parameters import parameters

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
_HORIZON = 40.0  # mean times between failures after which an attempt has failed for certain

# Of a checkpoint: bf16 weights, fp32 weights and AdamW's two averages, bytes per parameter.
STATE_BYTES = 14
COPY_BYTES_S = 4e9  # from the devices of a node into its memory, and from there to storage
STORAGE_BYTES_S = 16e9  # what the shared file system takes and gives, all nodes together
# Slurm lets a requeued job wait until its last credential has expired (cred_expire, 120 s by
# default), and its scheduler looks every few seconds.
REQUEUE_S = 125.0


def best_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between the end of a save and the begin of the next (Daly).

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
    """Return the mean time between failures of a run after `node_s` seconds times nodes, s.

    The profile's figure counts as one failure seen in `node_mtbf_hours`: all there is at first, and
    outweighed in time by the failures of the run.
    """
    per_node_s = (node_mtbf_hours * HOUR_S + node_s) / (1 + failures)
    return per_node_s / nodes


@dataclass(frozen=True)
class Durations:
    """Mean durations of the phases of an attempt, s."""

    requeue: float  # from the end of an attempt to the start of the next
    preflight: float  # checks of the nodes
    cache: float  # broadcast of the compiled graphs to the nodes
    start_up: float  # from the launchers' start to the first step, resume included
    first_step: float  # extra time of the first step
    stopping: float  # from the first sign of an end until the attempt is closed

    def describe(self) -> str:
        """Return `requeue 125 s, preflight 15 s, …`."""
        return ", ".join(f"{name.replace('_', ' ')} {s:.3g} s" for name, s in vars(self).items())


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


def expected_losses(
    nodes: int,
    step_s: float,
    save: SaveCost,
    durations: Durations,
    node_mtbf_hours: float,
    every_steps: int | None = None,
    leaves_s: float = math.inf,
    training_s: float = math.inf,
    noticing: DetectionDelay = DetectionDelay(),
    restarts: float = 0.0,
) -> LostTime:
    """Return the expected lost time: the mean of simulated long runs (tools/benchmarks/month.py).

    Args:
        every_steps: Between two checkpoints; None: auto, from the true failure rate.
        leaves_s: After which a job saves and leaves: its time limit less `slurm.signal_lead_s`.
        training_s: All steps of the run, s: a run that is done sooner leaves sooner, and has less
            to share its start-up with.
        restarts: Share of the failures after which new workers start in the same job: no wait in
            the queue, no broadcast of graphs, and the job's time limit goes on. The others end it.
    """
    mtbf_s = node_mtbf_hours * HOUR_S / nodes
    best_s = best_interval_s(save.waited_s, mtbf_s)
    auto_steps = max(1, math.ceil(max(best_s, save.total_s) / step_s))
    steps = auto_steps if every_steps is None else every_steps
    attempt = _Attempt(step_s, steps * step_s, save, durations, mtbf_s, leaves_s, training_s)
    if leaves_s <= attempt.trains_s:
        shares: dict[TimePart, float] = dict.fromkeys(TIME_PARTS, 0.0) | {"start_up": 1.0}
        return LostTime(shares, 0.0, steps, auto_steps, mtbf_s)
    parts_s = attempt.parts_s(noticing)
    without_broadcast = replace(durations, cache=0.0)
    for weight, begins_s in _restarts(attempt.leaves_s, mtbf_s, restarts):
        left_s = attempt.leaves_s - begins_s
        restart = _Attempt(step_s, steps * step_s, save, without_broadcast, mtbf_s, left_s)
        for name, seconds in restart.parts_s(noticing).items():
            parts_s[name] += weight * seconds
    length_s = math.fsum(parts_s.values())
    return LostTime(
        shares={name: parts_s[name] / length_s for name in TIME_PARTS},
        goodput=parts_s["productive"] / (length_s + durations.requeue),
        interval_steps=steps,
        auto_steps=auto_steps,
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
        fraction = (number + 0.5) / _POINTS * integral
        yield share * integral / _POINTS, -mtbf_s * math.log1p(-ends * fraction) / ends


class _Attempt:
    """The mean attempt, which fails at the rate 1 / `mtbf_s` until it leaves.

    start ─ preflight ─ cache ─ start-up ─ first step ─ interval ─ save ─ interval ─ save ─ …

    Save j begins at `saves_s + (j - 1)·cycle_s` and counts `save.total_s` later.
    """

    def __init__(
        self,
        step_s: float,
        interval_s: float,
        save: SaveCost,
        durations: Durations,
        mtbf_s: float,
        limit_s: float,
        training_s: float = math.inf,
    ) -> None:
        self.step_s, self.interval_s, self.save, self.mtbf_s = step_s, interval_s, save, mtbf_s
        self.durations = durations
        self.trains_s = durations.preflight + durations.cache + durations.start_up
        self.ready_s = self.trains_s + durations.first_step
        self.begun_s = self.ready_s + step_s
        self.saves_s = self.ready_s + interval_s
        # A save begins once the one before is written.
        self.cycle_s = max(interval_s + save.waited_s, save.total_s)
        whole_s = training_s * self.cycle_s / self.interval_s
        # It leaves at the job's limit, or when all steps are done. Half a step is what `parts_s`
        # adds for the one under way.
        done_s = self.ready_s + whole_s - self.step_s / 2
        # A step under way is finished.
        self.leaves_s = max(min(limit_s, done_s), self.begun_s)

    def parts_s(self, noticing: DetectionDelay) -> dict[TimePart, float]:
        durations = self.durations
        checked_s = durations.preflight
        cached_s = checked_s + durations.cache
        begun, leaving = self._alive(self.begun_s), self._alive(self.leaves_s)
        failing = 1 - self._alive(self.trains_s)
        waited_s, saved_s = self._saves()
        # A signal finds half a step under way on average, which is finished.
        last_s = self.step_s / 2
        made_s = begun * self.step_s + self._within(self.begun_s, math.inf) - waited_s
        lost_s = max(0.0, made_s - saved_s)
        under_way_s = min((begun - leaving) * last_s, lost_s)
        # An attempt that fails within its first step counts as start-up until it is noticed.
        first_s = self._within(self.trains_s, self.begun_s)
        first_s -= begun * (self.begun_s - self.trains_s)
        noticed_s = failing * noticing.start_up_s + (1 - failing - begun) * noticing.training_s
        stopping_s = durations.stopping + (begun - leaving) * noticing.training_s
        return {
            **dict.fromkeys(TIME_PARTS, 0.0),
            "preflight": self._within(0.0, checked_s),
            "cache": self._within(checked_s, cached_s),
            "start_up": self._within(cached_s, self.trains_s) + first_s + noticed_s,
            "first_step": begun * durations.first_step,
            "productive": saved_s + leaving * last_s,
            "recomputation": lost_s - under_way_s,
            "saving": waited_s + leaving * self.save.total_s,
            "idle": under_way_s + stopping_s,
        }

    def _saves(self) -> tuple[float, float]:
        """Return the expected seconds in waits for saves, and in steps that are in a checkpoint.

        An interval is in a checkpoint if the attempt is alive when its save counts, or when it
        leaves, which saves the steps since the last save too.
        """
        end_s = min(self.leaves_s, _HORIZON * self.mtbf_s)
        count = max(0, math.ceil((end_s - self.saves_s) / self.cycle_s))
        before = max(0, count - 1)  # saves before the last
        last_s = self.saves_s + before * self.cycle_s
        # From each save to the next its probability falls by the same factor: a geometric series.
        series = math.expm1(-before * self.cycle_s / self.mtbf_s)
        series /= math.expm1(-self.cycle_s / self.mtbf_s)
        waited_s = saved = 0.0
        for begins_s, weight in ((self.saves_s, series), (last_s, min(1, count))):
            wait_ends_s = begins_s + self.cycle_s - self.interval_s
            waited_s += weight * self._within(begins_s, wait_ends_s)
            saved += weight * self._alive(begins_s + self.save.total_s)
        after_last_s = max(0.0, end_s - (self.ready_s + count * self.cycle_s))
        return waited_s, saved * self.interval_s + after_last_s * self._alive(self.leaves_s)

    def _alive(self, at_s: float) -> float:
        """Return the probability that no failure has come by then, or before the attempt leaves."""
        return math.exp(-min(at_s, self.leaves_s) / self.mtbf_s)

    def _within(self, begin_s: float, end_s: float) -> float:
        """Return the expected seconds that an attempt spends between two times after its start."""
        begin_s, end_s = min(begin_s, self.leaves_s), min(end_s, self.leaves_s)
        # expm1 keeps the digits that 1 - exp(-x) loses for an MTBF of years.
        return self.mtbf_s * self._alive(begin_s) * -math.expm1((begin_s - end_s) / self.mtbf_s)


def assumed(
    num_parameters: int,
    nodes: int,
    device: Literal["cpu", "cuda", "neuron"] = "neuron",
    asynchronous: bool = True,
) -> tuple[Durations, SaveCost]:
    """Return phases and saves of a run by the size of its model.

    A save is copied by all nodes at once, written as fast as the nodes and the file system can, and
    closed in a few seconds. A start-up reads as much, after imports, rendezvous and devices
    (150 s on accelerators, 15 s on CPUs) plus models and graphs, which take longer the larger they
    are. The number of workers is ignored. With `asynchronous` training goes on while a save is
    written.
    """
    state_bytes, billions = STATE_BYTES * num_parameters, num_parameters / 1e9
    moved_s = state_bytes / min(STORAGE_BYTES_S, nodes * COPY_BYTES_S)
    written_s = 3.0 + moved_s
    copied_s = 0.3 + state_bytes / nodes / COPY_BYTES_S
    begun_s = 15.0 if device == "cpu" else 150.0
    durations = Durations(
        requeue=REQUEUE_S,
        preflight=15.0,
        cache=0.0 if device == "cpu" else 4.5 + 0.08 * billions,
        start_up=begun_s + moved_s + 3.4 * billions,
        first_step=27.0 + 0.5 * billions,
        stopping=10.0,
    )
    waited_s = min(copied_s, written_s) if asynchronous else written_s
    return durations, SaveCost(waited_s, written_s)


def noticing(config: RunConfig, step_s: float) -> DetectionDelay:
    """Return the detection delay of Llama 3's mix of failures, with the recipe's watchdog."""
    watchdog = config.recipe.watchdog
    counts: Mapping[str, int] = published_failures()["llama3"]["counts"]

    def mean_s(limit_s: float) -> float:
        node_s = min(limit_s, SLURMD_TIMEOUT_S)
        silent_s = {"node": node_s, "network": limit_s, "hang": limit_s}
        total_s = sum(count * silent_s.get(kind, REPORTED_S) for kind, count in counts.items())
        return total_s / sum(counts.values())

    if not watchdog.enabled:
        return DetectionDelay(mean_s(UNWATCHED_S), mean_s(UNWATCHED_S))
    hang_s = max(watchdog.min_step_s, watchdog.step_factor * step_s)
    return DetectionDelay(start_up_s=mean_s(watchdog.start_up_s), training_s=mean_s(hang_s))


def restarts(config: RunConfig, nodes: int, leaves_s: float) -> float:
    """Return the share of failures after which a run restarts in its job, with Llama 3's mix.

    A failure of a network or a hang leaves the nodes healthy. One that breaks a node takes a spare
    node; with none left, or if it was the supervisor's node, the job returns to the queue, and has
    all of them again.
    """
    slurm = config.recipe.slurm
    counts: Mapping[str, int] = published_failures()["llama3"]["counts"]
    if not slurm.restart_in_allocation or slurm.restart == "none":
        return 0.0
    total, stays = sum(counts.values()), counts["network"] + counts["hang"]
    broken = (counts["device"] + counts["node"]) * (1 - 1 / nodes)
    mean = nodes * leaves_s / (config.cluster.node_mtbf_hours * HOUR_S) * (1 - stays / total)
    # By Poisson: the probabilities that 1, 2, … nodes break in a job before anything else ends it.
    fewer, term, asks = 0.0, math.exp(-mean), list[float]()
    for number in range(1, slurm.spare_nodes + 2):
        fewer += term
        term *= mean / number
        asks.append((1 - fewer) * (broken / (total - stays)) ** number)
    replaced = math.fsum(asks[:-1]) / (math.fsum(asks) or 1.0)
    return (stays + broken * replaced) / total


def lost_time(config: RunConfig, nodes: int, step_s: float, steps: int | None = None) -> LostTime:
    """Return the expected lost time of a run of `steps`, or the recipe's.

    Raises:
        ConfigError: the run would make no progress: its time limit ends before the first step
            begins, or a failure comes before every checkpoint.
    """
    recipe, cluster = config.recipe, config.cluster
    count, asynchronous = parameters(recipe.model), recipe.checkpoint.asynchronous
    durations, save = assumed(count, nodes, cluster.device, asynchronous)
    every = recipe.checkpoint.every_steps
    leaves_s = minutes_of(recipe.slurm.time) * 60 - recipe.slurm.signal_lead_s
    lost = expected_losses(
        nodes,
        step_s,
        save,
        durations,
        cluster.node_mtbf_hours,
        every_steps=None if every == "auto" else every,
        leaves_s=leaves_s,
        training_s=(recipe.train.steps if steps is None else steps) * step_s,
        noticing=noticing(config, step_s),
        restarts=restarts(config, nodes, leaves_s),
    )
    if lost.effective > 0:
        return lost
    if lost.shares["start_up"] == 1:
        fault = (
            f"slurm.time: {recipe.slurm.time} less slurm.signal_lead_s "
            f"{recipe.slurm.signal_lead_s} is shorter than a start-up, here assumed as "
            f"{durations.describe()}; choose a longer slurm.time"
        )
    else:
        fault = (
            f"cluster.node_mtbf_hours: {cluster.node_mtbf_hours:g} is a failure every "
            f"{lost.mtbf_s:.2g} s of {format_plural(nodes, 'node')}, before a checkpoint "
            f"after {format_plural(lost.interval_steps, 'step')} of {step_s:.3g} s; choose fewer "
            "nodes, or a smaller checkpoint.every_steps"
        )
    raise ConfigError("the run would make no progress", [fault])


@cache
def published_failures() -> Values:
    rows, _ = read_yaml(Path(__file__).with_name("published_failures.yaml"))
    return rows
