"""The plan of a drill: steps, checkpoints, and the step and the worker of each fault."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmllm.config.resolve import RunConfig, change
from slurmllm.drill.injector import FAULT_KINDS, FAULTS, FaultKind, FaultSpec
from slurmllm.errors import RunError
from slurmllm.graphs import reuse
from slurmllm.plan.mesh import adapt_to_nodes, make_mesh
from slurmllm.run.records import JobsRecord
from slurmllm.run.rundir import RUN_NAME, RunDir
from slurmllm.supervise.attempts import load_attempts
from slurmllm.supervise.watchdog import recent_step_times

NUM_CHECKPOINTS = 3  # of each run: before the fault, after it, at the end
MIN_STEPS = 4  # between two checkpoints, so that there is a step to lose
MIN_INTERVAL_S = 2.0  # likewise: long enough that the fault comes between two checkpoints
DEFAULT_STEPS = 20  # between two checkpoints, if the run has no step times yet


@dataclass(frozen=True)
class DrillPlan:
    """A drill of a run."""

    run: RunDir  # the run; it is only read
    config: RunConfig  # of the copies, as `nodes`
    nodes: int
    local: bool  # whether the nodes are launchers on this machine
    number: int  # number of the drill among those of the run
    kinds: tuple[FaultKind, ...]
    steps: int
    every_steps: int  # steps between checkpoints
    seed: int  # decides steps and victims of the faults

    @property
    def results(self) -> Path:
        """The file with a line for each copy that has ended, of which each is a `DrillResult`."""
        return self.run.reports / f"drill-{self.number}.jsonl"

    def name(self, part: str) -> str:
        """The name of a copy: `reference`, or that of a kind of fault."""
        return f"{self.run.name}-drill-{self.number}-{part}"

    def config_of(self, kind: FaultKind | None) -> RunConfig:
        """The configuration of a copy; None: of the reference."""
        overrides = FAULTS[kind].overrides if kind is not None else ()
        return change(self.config, None, overrides) if overrides else self.config

    def fault(self, kind: FaultKind, nodes: Sequence[str]) -> FaultSpec:
        """Step and victim of a fault, the same for the same seed.

        `nodes` are those of the attempt, the supervisor's first.
        """
        generator = random.Random(f"{self.seed} {kind}")  # noqa: S311 (repeatable, no secret)
        per_node = self.config.cluster.devices_per_node
        at_step = generator.randint(
            self.every_steps + 1, max(self.every_steps + 1, 2 * self.every_steps - 1)
        )
        index = generator.randrange(1, len(nodes)) if kind == "node" else 0
        if kind in ("worker", "hang"):
            index = generator.randrange(len(nodes))
        if kind == "save":
            # The second checkpoint, on the node of rank 0, where its start is visible first.
            at_step = 2 * self.every_steps
        rank = index * per_node + generator.randrange(per_node)
        return FaultSpec(
            kind=kind, attempt=0, node=nodes[index], rank=rank, at_step=at_step, local=self.local
        )


def make_plan(
    run: RunDir,
    config: RunConfig,
    nodes: int,
    local: bool,
    kinds: tuple[FaultKind, ...],
    *,
    steps: int | None,
    seed: int,
    overrides: Sequence[str] = (),
) -> DrillPlan:
    """Plan a drill of a run with this configuration.

    Without `steps`, three checkpoint intervals at the run's pace. Raises a RunError if there are
    too few steps for three checkpoints, a ConfigError for invalid overrides, or if the mesh does
    not fit the nodes.
    """
    changed = change(config, None, overrides) if overrides else config
    train, optim = changed.recipe.train, changed.recipe.optim
    if steps is None:
        times = recent_step_times(run)
        step_s = statistics.median(times) if times else 0.0
        every = max(MIN_STEPS, math.ceil(MIN_INTERVAL_S / step_s)) if step_s else DEFAULT_STEPS
        every_steps = changed.recipe.checkpoint.every_steps
        every = every if every_steps == "auto" else min(every, every_steps)
        total = min(NUM_CHECKPOINTS * every, train.steps)
    else:
        total = steps
    every = total // NUM_CHECKPOINTS
    if every < 1 or total > train.steps:
        raise RunError(
            f"--steps {total}: must be {NUM_CHECKPOINTS} at least, for as many checkpoints, and no "
            f"more than the run's {train.steps} (train.steps)"
        )
    values = [
        f"train.steps={total}",
        # The first steps of the run's own schedule, not a whole schedule of so many steps.
        f"optim.decay_steps={optim.decay_steps or train.steps}",
        "optim.warmup_ratio=null",
        f"optim.warmup_steps={optim.warmup(train.steps)}",
        f"checkpoint.every_steps={every}",
        "checkpoint.replica=null",  # the folder is the run's own
        "slurm.drain=false",  # the node of an injected fault is healthy
    ]
    if optim.decay_start is not None and optim.decay_start >= total:
        values += ["optim.decay=constant", "optim.decay_start=null"]
    drilled = change(changed, None, values)
    drilled = adapt_to_nodes(drilled, nodes)
    make_mesh(drilled, nodes, reuse.measured_micro_batch(run))
    pattern = re.compile(rf"(?:{re.escape(run.name)}-)?drill-(\d+)[-.]")
    entries = (*run.path.parent.iterdir(), *run.reports.glob("drill-*.jsonl"))
    matches = (pattern.match(entry.name) for entry in entries)
    number = max((int(match.group(1)) for match in matches if match), default=0) + 1
    plan = DrillPlan(run, drilled, nodes, local, number, kinds, total, every, seed)
    longest = plan.name("first_node")
    if not RUN_NAME.fullmatch(longest):
        raise RunError(f"run name {longest!r} is too long; rename the run's directory")
    return plan


def why_no_reference(plan: DrillPlan, overrides: Sequence[str]) -> str | None:
    """Return why the run itself cannot be the reference; None if it can.

    Its first attempt must have completed all steps of the drill, with the same number of workers,
    configuration and versions.
    """
    if overrides:
        return "--set changes values"
    run = plan.run
    submissions = JobsRecord.of(run).submissions
    if len(submissions) != 1:
        return "it was never submitted" if not submissions else "it was resumed by hand"
    if (submissions[0].nodes, submissions[0].local) != (plan.nodes, plan.local):
        return "it ran on other nodes"
    attempts = load_attempts(run, "train")
    if not attempts or attempts[0].first_step != 1 or (attempts[0].last_step or 0) < plan.steps:
        return f"its first attempt did not complete steps 1 to {plan.steps}"
    if not run.metrics(0).is_file():
        return "its metrics file is missing"
    if not reuse.has_all_graphs(plan.config, plan.nodes, plan.local, run):
        return "versions or code may have changed"
    return None


def parse_kinds(text: str, nodes: int) -> tuple[FaultKind, ...]:
    """Return the kinds of `--kinds`: names separated by commas, or all.

    Raises a RunError if a name is unknown, or needs more nodes than there are.
    """
    if text == "all":
        return tuple(kind for kind in FAULT_KINDS if FAULTS[kind].min_nodes <= nodes)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(FAULT_KINDS):
        raise RunError(
            f"--kinds {text!r}: must be all, or some of {', '.join(FAULT_KINDS)}, with commas "
            "between"
        )
    kinds = tuple(kind for kind in FAULT_KINDS if kind in names)
    for kind in kinds:
        if FAULTS[kind].min_nodes > nodes:
            raise RunError(
                f"--kinds {kind}: takes {FAULTS[kind].min_nodes} nodes and the run has {nodes}; "
                "add --nodes 2 (for the first node there is the kind first_node)"
            )
    return kinds
