"""Assumed durations of the phases of a run, and the lost time that follows from them.

Start-up times and save costs of such runs are not published. These assumptions are conservative;
the presets of tools/benchmarks/month.py use them too. Durations of real runs are better, if there
are any (`month.py --from RUN`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmllm.config.resolve import RunConfig
from slurmllm.config.rules import minutes_of
from slurmllm.config.yaml_source import read_yaml
from slurmllm.errors import ConfigError
from slurmllm.plan.lost_time import (
    HOUR_S,
    REPORTED_S,
    SLURMD_TIMEOUT_S,
    UNWATCHED_S,
    DetectionDelay,
    Durations,
    LostTime,
    SaveCost,
    expected_losses,
)
from slurmllm.plan.parameters import parameters

FailureKind = Literal[
    "device",  # an accelerator reports a fault: its worker exits at once
    "node",  # a host stops responding
    "network",  # a link or a switch: collectives wait, no node is to blame
    "hang",  # a worker makes no progress
    "storage",  # the shared file system fails: found at the next save or start
    "software",  # an exception in code
    "signal",  # preemption: the run saves and leaves
]
# Of a checkpoint: bf16 weights, fp32 weights and AdamW's two averages, bytes per parameter.
STATE_BYTES = 14
COPY_BYTES_S = 4e9  # from the devices of a node into its memory, and from there to storage
STORAGE_BYTES_S = 16e9  # what the shared file system takes and gives, all nodes together
# Slurm lets a requeued job wait until its last credential has expired (cred_expire, 120 s by
# default), and its scheduler looks every few seconds.
REQUEUE_S = 125.0


def assumed(
    num_parameters: int,
    nodes: int,
    device: Literal["cpu", "cuda", "neuron"] = "neuron",
    asynchronous: bool = True,
) -> tuple[Durations, SaveCost]:
    """Phases and saves of a run by the size of its model.

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
        requeue=(REQUEUE_S,),
        preflight=(15.0,),
        cache=(0.0 if device == "cpu" else 4.5 + 0.08 * billions,),
        start_up=(begun_s + moved_s + 3.4 * billions,),
        first_step=(27.0 + 0.5 * billions,),
        stopping=(10.0,),
    )
    waited_s = min(copied_s, written_s) if asynchronous else written_s
    return durations, SaveCost(waited_s, written_s)


def noticing(config: RunConfig, step_s: float) -> DetectionDelay:
    """Detection delay of failures, with the mix of Llama 3's run and the recipe's watchdog."""
    watchdog = config.recipe.watchdog
    hang_s = max(watchdog.min_step_s, watchdog.step_factor * step_s)

    def mean_s(limit_s: float) -> float:
        silent: dict[FailureKind, float] = {
            "node": min(limit_s, SLURMD_TIMEOUT_S), "network": limit_s, "hang": limit_s
        }  # fmt: skip
        counts = PUBLISHED["llama3"].counts
        total_s = sum(count * silent.get(kind, REPORTED_S) for kind, count in counts.items())
        return total_s / sum(counts.values())

    if not watchdog.enabled:
        return DetectionDelay(mean_s(UNWATCHED_S), mean_s(UNWATCHED_S))
    return DetectionDelay(start_up_s=mean_s(watchdog.start_up_s), training_s=mean_s(hang_s))


def restarts(config: RunConfig, nodes: int, leaves_s: float) -> float:
    """Share of the failures after which a run restarts in its job, with the mix of Llama 3's run.

    A failure of a network or a hang leaves the nodes healthy. One that breaks a node takes a spare
    node; with none left, or if it was the supervisor's node, the job returns to the queue, and has
    all of them again.
    """
    slurm, counts = config.recipe.slurm, PUBLISHED["llama3"].counts
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
    """Expected time that a run of `steps`, or the recipe's, loses to saves, failures and restarts.

    Raises:
        ConfigError: the run would make no progress: its time limit ends before the first step
            begins, or a failure comes before every checkpoint.
    """
    recipe, cluster = config.recipe, config.cluster
    durations, save = assumed(
        parameters(recipe.model), nodes, cluster.device, recipe.checkpoint.asynchronous
    )
    every = recipe.checkpoint.every_steps
    leaves_s = minutes_of(recipe.slurm.time) * 60 - recipe.slurm.signal_lead_s
    found = expected_losses(
        nodes, step_s, save, durations, cluster.node_mtbf_hours,
        every_steps=None if every == "auto" else every,
        leaves_s=leaves_s,
        training_s=(recipe.train.steps if steps is None else steps) * step_s,
        noticing=noticing(config, step_s),
        restarts=restarts(config, nodes, leaves_s),
    )  # fmt: skip
    if found.effective > 0:
        return found
    if found.shares["start_up"] == 1:
        fault = (
            f"slurm.time: {recipe.slurm.time} less slurm.signal_lead_s "
            f"{recipe.slurm.signal_lead_s} is shorter than a start-up, here assumed as "
            f"{durations.describe()}; choose a longer slurm.time"
        )
    else:
        fault = (
            f"cluster.node_mtbf_hours: {cluster.node_mtbf_hours:g} is a failure every "
            f"{found.mtbf_s:.2g} s of {nodes} nodes, before a checkpoint after "
            f"{found.interval_steps} steps of {step_s:.3g} s; choose fewer nodes, or a smaller "
            "checkpoint.every_steps"
        )
    raise ConfigError("the run would make no progress", [fault])


@dataclass(frozen=True)
class Published:
    """Published failure counts."""

    name: str  # short name
    source: str  # the publication
    counts: Mapping[FailureKind, int]  # Kind → interruptions
    hosts: int  # hosts of the run
    days: float  # length of the observation
    note: str  # how the kinds were distinguished

    @property
    def node_hours(self) -> float:
        return self.hosts * self.days * 24.0

    @property
    def per_node_hour(self) -> dict[FailureKind, float]:
        return {kind: count / self.node_hours for kind, count in self.counts.items()}

    @property
    def node_mtbf_hours(self) -> float:
        """Hours between two failures of one node."""
        return self.node_hours / sum(self.counts.values())


# The rows of published_failures.yaml, by name.
PUBLISHED: Mapping[str, Published] = {
    name: Published(name, **row)
    for name, row in read_yaml(Path(__file__).with_name("published_failures.yaml"))[0].items()
}
