"""What a drill does, settled before anything is started: steps, checkpoints, moments."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slurmllm.config.resolve import RunConfig, change
from slurmllm.drill.injector import Order
from slurmllm.drill.kinds import KINDS, KindName
from slurmllm.errors import RunError
from slurmllm.graphs import reuse
from slurmllm.plan.mesh import make_mesh
from slurmllm.records import JobsRecord
from slurmllm.rundir import RUN_NAME, RunDir
from slurmllm.supervise.attempts import load_attempts
from slurmllm.supervise.watchdog import recent_step_times

INTERVALS = 3  # checkpoints that a broken run comes past: before the blow, after it, at the end
LEAST_STEPS = 4  # between two checkpoints, so that there is a step to lose
LEAST_S = 2.0  # likewise: a blow must find its place between two checkpoints
UNKNOWN_STEPS = 20  # where the run has not shown yet how fast it is


@dataclass(frozen=True)
class Plan:
    """A drill of a run.

    Attributes:
        run: The run that is asked about; it is only read.
        config: Of the runs to be made.
        nodes: Nodes of each of them.
        local: Whether they are launchers on this machine.
        number: Of the drill, among those of the run.
        kinds: What is done, in order.
        steps: Steps of each run.
        every_steps: Steps between checkpoints.
        seed: Decides the moments and who is struck.
    """

    run: RunDir
    config: RunConfig
    nodes: int
    local: bool
    number: int
    kinds: tuple[KindName, ...]
    steps: int
    every_steps: int
    seed: int

    def name(self, part: str) -> str:
        """The name of one of its runs: `reference`, or a kind's."""
        return f"{self.run.name}-drill-{self.number}-{part}"

    def config_of(self, kind: KindName | None) -> RunConfig:
        """The configuration of a broken run; of the reference where there is no kind."""
        overrides = KINDS[kind].overrides if kind is not None else ()
        return change(self.config, None, overrides) if overrides else self.config

    def order(self, kind: KindName, nodes: Sequence[str]) -> Order:
        """When and whom to strike.

        Args:
            kind: How.
            nodes: Of the attempt, the supervisor's first.
        """
        dice = random.Random(f"{self.seed} {kind}")
        per_node = self.config.cluster.devices_per_node
        at_step = dice.randint(
            self.every_steps + 1, max(self.every_steps + 1, 2 * self.every_steps - 1)
        )
        index = dice.randrange(1, len(nodes)) if kind == "node" else 0
        if kind in ("worker", "hang"):
            index = dice.randrange(len(nodes))
        if kind == "save":
            # The second checkpoint's, on the node of rank 0, which sees first that it begins.
            at_step = 2 * self.every_steps
        rank = index * per_node + dice.randrange(per_node)
        return Order(
            kind=kind, attempt=0, node=nodes[index], rank=rank, at_step=at_step, local=self.local
        )


def make_plan(
    run: RunDir,
    config: RunConfig,
    nodes: int,
    local: bool,
    kinds: tuple[KindName, ...],
    *,
    steps: int | None,
    seed: int,
    overrides: Sequence[str] = (),
) -> Plan:
    """Settle a drill.

    Args:
        run: The run.
        config: The run's.
        nodes: See Plan.
        local: See Plan.
        kinds: See Plan.
        steps: As asked for; None: enough for some checkpoints at the run's pace.
        seed: See Plan.
        overrides: Values of the runs to be made, as given to --set.

    Raises:
        RunError: too few steps to break anything in between.
        ConfigError: the overrides, or the mesh on so many nodes.
    """
    given = change(config, None, overrides) if overrides else config
    train = given.recipe.train
    every = _interval(run, given) if steps is None else steps // INTERVALS
    total = min(INTERVALS * every, train.steps) if steps is None else steps
    every = min(every, total // INTERVALS)
    if every < 1 or total > train.steps:
        raise RunError(
            f"--steps {total}: must be {INTERVALS} at least, for {INTERVALS} checkpoints, and no "
            f"more than the run's {train.steps} (train.steps)"
        )
    values = [
        f"train.steps={total}",
        # The learning rates of the run's own schedule, of which these are the first steps.
        f"optim.decay_steps={given.recipe.optim.decay_steps or train.steps}",
        f"checkpoint.every_steps={every}",
        "checkpoint.replica=null",  # the run's own copies lie there
        "slurm.drain=false",  # a node that was struck on purpose is a good one
    ]
    drilled = change(given, None, values)
    make_mesh(drilled, nodes, reuse.measured_micro_batch(run))
    plan = Plan(run, drilled, nodes, local, _free_number(run), kinds, total, every, seed)
    longest = plan.name("first_node")
    if not RUN_NAME.fullmatch(longest):
        raise RunError(
            f"run name {longest!r} is too long; give the run's directory another, shorter name"
        )
    return plan


def _interval(run: RunDir, config: RunConfig) -> int:
    """Steps between checkpoints: few, and yet long enough to be hit between two of them."""
    times = recent_step_times(run)
    step_s = statistics.median(times) if times else 0.0
    wanted = max(LEAST_STEPS, math.ceil(LEAST_S / step_s)) if step_s else UNKNOWN_STEPS
    own = config.recipe.checkpoint.every_steps
    return wanted if own == "auto" else min(wanted, own)


def _free_number(run: RunDir) -> int:
    pattern = re.compile(rf"{re.escape(run.name)}-drill-(\d+)-")
    matches = (pattern.match(entry.name) for entry in run.path.parent.iterdir())
    return max((int(match.group(1)) for match in matches if match), default=0) + 1


def why_no_reference(plan: Plan, overrides: Sequence[str]) -> str:
    """Why the run itself cannot be what its broken copies are compared with; empty: it can.

    Its first attempt must have made the steps without a break, on as many workers, from the
    configuration and the versions that hold now.
    """
    if overrides:
        return "--set changes values"
    run = plan.run
    submissions = JobsRecord.load(run.jobs).submissions if run.jobs.is_file() else ()
    if len(submissions) != 1:
        return "it was never submitted" if not submissions else "it was resumed by hand"
    if (submissions[0].nodes, submissions[0].local) != (plan.nodes, plan.local):
        return "it ran on other nodes"
    attempts = load_attempts(run, "train")
    if not attempts or attempts[0].first_step != 1 or (attempts[0].last_step or 0) < plan.steps:
        return f"its first attempt did not make steps 1 to {plan.steps}"
    if not run.metrics(0).is_file():
        return "its metrics are gone"
    if not reuse.serves(plan.config, plan.nodes, plan.local, run, run):
        return "versions or code have changed since"
    return ""
