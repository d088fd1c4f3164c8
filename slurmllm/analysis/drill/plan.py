"""The plan of a drill: steps, checkpoints, and the step and the worker of each fault."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from slurmllm.analysis.drill.injector import FAULT_KINDS, FAULTS, FaultKind, FaultKinds, FaultSpec
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.resolve import RunConfig, change
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.following import is_path
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.run.records import AttemptRecord, JobsRecord, NodeRecord
from slurmllm.core.run.rundir import RUN_NAME, RunDir
from slurmllm.launch.graphs import reuse
from slurmllm.launch.supervise.attempts import load_attempts
from slurmllm.launch.supervise.watchdog import recent_step_times
from slurmllm.plan.mesh import adapt_to_nodes
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints

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
    kinds: FaultKinds
    steps: int  # 0: another project's trainer does not say, before the reference has ended
    every_steps: int  # steps between checkpoints; 0 if not known
    seed: int  # decides steps and victims of the faults
    first_checkpoint: int = 0  # of another project's trainer: that of the reference
    is_limited: bool = False  # whether another project's trainer is ended at the last step

    @property
    def trainer(self) -> CommandConfig | None:
        return self.config.recipe.command

    @property
    def results(self) -> Path:
        """The file with a line for each copy that has ended, of which each is a `DrillResult`."""
        if self.run.path.is_dir():
            return self.run.reports / f"drill-{self.number}.jsonl"
        return self.run.path.parent / f"{self.run.name}-drill-{self.number}.jsonl"

    def name(self, copy: str) -> str:
        """The name of a copy: `reference`, or that of a kind of fault."""
        return f"{self.run.name}-drill-{self.number}-{copy}"

    def config_of(self, kind: FaultKind | None) -> RunConfig:
        """The configuration of a copy; None: of the reference."""
        overrides = FAULTS[kind].overrides if kind else ()
        return change(self.config, None, overrides) if overrides else self.config

    def fault(self, kind: FaultKind, nodes: Sequence[str]) -> FaultSpec:
        """Return step and victim of a fault, the same for the same seed and nodes."""
        generator = random.Random(f"{self.seed} {kind}")  # noqa: S311 (repeatable, no secret)
        per_node = self.config.workers_per_node
        trainer = self.trainer
        first = self.first_checkpoint if trainer else self.every_steps
        step = generator.randint(first + 1, max(first + 1, first + self.every_steps - 1))
        index = generator.randrange(1, len(nodes)) if kind == "node" else 0
        if kind in ("worker", "hang"):
            index = generator.randrange(len(nodes))
        rank = index * per_node + generator.randrange(per_node)
        if kind == "save":
            # The second checkpoint, on the node of rank 0, where its start is visible first.
            step = first + (1 if trainer else self.every_steps)
            rank = 0 if trainer else rank
        return FaultSpec(
            kind=kind,
            attempt=0,
            node=nodes[index],
            rank=rank,
            at_step=step,
            local=self.local,
            trainer=trainer,
        )

    def with_reference(self, reference: RunDir) -> Self:
        """Return the plan with the steps and checkpoints of another project's trainer.

        Faults come after its first checkpoint, or half-way without any; RunError without steps.
        """
        assert self.trainer is not None
        last = last_row(reference)
        if last is None:
            nodes = AttemptRecord.load(reference.attempt("train", 0).record).nodes
            node = NodeRecord.load(reference.attempt("train", 0).node(nodes[0]))
            raise RunError(
                f"{reference.name}: {node.progress_missing or 'no steps'}; set command.progress"
            )
        steps = min(self.steps or int(last["step"]), int(last["step"]))
        entries = list_trainer_checkpoints(reference, self.trainer)
        # If one file is overwritten at each save, only the last step is known. OLMo-core and others
        # save before their first step too.
        is_named = "{step}" in (self.trainer.checkpoints or "")
        saved = [entry.step for entry in entries if is_named and 0 < entry.step < steps]
        first, *later = saved or [steps // 2]
        return replace(
            self,
            steps=steps,
            first_checkpoint=first,
            every_steps=(later[0] if later else steps) - first,
        )


def make_plan(
    run: RunDir,
    config: RunConfig,
    nodes: int,
    local: bool,
    kinds: FaultKinds,
    *,
    steps: int | None,
    seed: int,
    overrides: Sequence[str] = (),
) -> DrillPlan:
    """Plan a drill of a run; without `steps`, of three checkpoint intervals at the run's pace.

    Raises a RunError if there are too few steps for three checkpoints.
    """
    changed = change(config, None, overrides) if overrides else config
    plan = DrillPlan(run, changed, nodes, local, _next_number(run), kinds, 0, 0, seed)
    if (command := changed.recipe.command) is not None:
        return _plan_trainer(plan, command, steps)
    train = changed.recipe.train
    optim = changed.recipe.optim
    total = steps
    if total is None:
        times = recent_step_times(run)
        step_s = statistics.median(times) if times else 0.0
        every = max(MIN_STEPS, math.ceil(MIN_INTERVAL_S / step_s)) if step_s else DEFAULT_STEPS
        every_steps = changed.recipe.checkpoint.every_steps
        every = every if every_steps == "auto" else min(every, every_steps)
        total = min(NUM_CHECKPOINTS * every, train.steps)
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
        "evaluate=null",
    ]
    if optim.decay_start is not None and optim.decay_start >= total:
        values += ["optim.decay=constant", "optim.decay_start=null"]
    drilled = adapt_to_nodes(change(changed, None, values), nodes)
    reuse.make_run_mesh(drilled, nodes, run)
    return replace(plan, config=drilled, steps=total, every_steps=every)


def _plan_trainer(plan: DrillPlan, command: CommandConfig, steps: int | None) -> DrillPlan:
    """Plan a drill of another project's trainer, whose copies tell their folders by {run}."""
    paths = {"run": command.run, "checkpoints": command.checkpoints}
    if command.progress is not None and is_path(command.progress):
        paths["progress"] = command.progress
    for name, path in paths.items():
        if path is not None and "{run}" not in path:
            raise RunError(
                f"command.{name}: {path!r} has no {{run}}, so that all copies of the drill would "
                "share a folder; write the folder of its output as {run}/out"
            )
    limit_steps = command.steps
    if steps is not None and not MIN_STEPS <= steps <= (limit_steps or steps):
        limit = f", and no more than command.steps, {limit_steps}" if limit_steps else ""
        raise RunError(f"--steps {steps}: must be {MIN_STEPS} at least{limit}")
    kinds = tuple(k for k in plan.kinds if k != "save" or command.checkpoints is not None)
    if not kinds:
        raise RunError("--kinds save: takes command.checkpoints, to see a save; set it")
    config = change(plan.config, None, ["slurm.drain=false", "evaluate=null"])
    return replace(
        plan,
        config=config,
        kinds=kinds,
        steps=steps or limit_steps or 0,
        is_limited=steps not in (None, limit_steps),
    )


def _next_number(run: RunDir) -> int:
    """Return the next number among the drills of a run."""
    pattern = re.compile(rf"(?:{re.escape(run.name)}-)?drill-(\d+)[-.]")
    folders = (folder for folder in (run.path.parent, run.reports) if folder.is_dir())
    matches = (pattern.match(entry.name) for folder in folders for entry in folder.iterdir())
    number = max((int(match.group(1)) for match in matches if match), default=0) + 1
    longest = f"{run.name}-drill-{number}-first_node"
    if not RUN_NAME.fullmatch(longest):
        raise RunError(f"run name {longest!r} is too long; rename the run's directory")
    return number


def why_no_reference(plan: DrillPlan, overrides: Sequence[str]) -> str | None:
    """Return why the run itself cannot be the reference; None if it can.

    Its first attempt must have completed all steps of the drill, with the same number of workers,
    configuration and versions.
    """
    if overrides:
        return "--set changes values"
    if plan.trainer:
        return "its trainer may have changed"
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


def parse_kinds(choice: str, nodes: int, of_command: bool = False) -> FaultKinds:
    """Return the kinds of `--kinds`; RunError if one is unknown or needs more nodes."""
    possible = [kind for kind in FAULT_KINDS if of_command or not FAULTS[kind].of_commands]
    if choice == "all":
        return tuple(kind for kind in possible if FAULTS[kind].min_nodes <= nodes)
    names = [name.strip() for name in choice.split(",") if name.strip()]
    if not names or not set(names) <= set(possible):
        raise RunError(
            f"--kinds {choice!r}: must be all, or some of {', '.join(possible)}, with commas "
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
