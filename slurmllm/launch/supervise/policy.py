"""The action after an ending: restart, requeue, chain, stop or finish; its wait; excluded nodes.

Pure functions of records, so that a simulation of months runs the supervisor's own policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from slurmllm.core.config.operation import SlurmConfig
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.format import Texts
from slurmllm.core.run.error_patterns import matches, names_any
from slurmllm.core.run.records import (
    Action,
    Actions,
    AttemptRecord,
    Attempts,
    EndingClass,
    NodeEvidence,
    Restart,
)

# requeue and chain exclude each other: `slurm.restart`.
_QUEUE: Actions = ("requeue", "chain")
_RESTART: Actions = ("restart", *_QUEUE)
# By class, in order of preference: the first that is possible is taken.
ACTIONS: Mapping[EndingClass, Actions] = {
    "done": ("finish",),
    "advance_signal": _QUEUE,
    "node_failure": _RESTART,
    "hang": _RESTART,
    "out_of_memory": ("stop",),
    "compile_failure": ("stop",),
    "bad_configuration": ("stop",),
    "storage_failure": _QUEUE,  # if the failure is transient
    "code_error": ("stop",),
    "divergence": ("stop",),  # _RESTART after a roll-back
    "stale_graphs": _RESTART,  # with graphs of its own
    "no_progress": ("stop",),
    "cancelled": ("stop",),
    "superseded": ("stop",),
}
# The classes with a budget: its field in the recipe, and the name of the class in messages.
BUDGETS: Mapping[EndingClass, tuple[str, str]] = {
    "node_failure": ("failure_budget", "node failures"),
    "hang": ("hang_budget", "hangs"),
    "storage_failure": ("storage_budget", "failures of the shared file system"),
}


class NodeFault(NamedTuple):
    """Why a node is excluded."""

    evidence: NodeEvidence
    reason: str
    checks: Texts = ()  # health checks that failed


NodeFaults = dict[str, NodeFault]  # by name of the node
HOUR_S = 3600.0
MAX_BACKOFF_S = 3600.0


def decide(
    closed: AttemptRecord,
    earlier: Attempts,
    recipe: Recipe,
    *,
    rolled_back: bool = False,
    started: bool = True,
    restart_mode: Restart = "requeue",
    in_allocation: bool = False,
) -> AttemptRecord:
    """Decide the action after an attempt; the only place that does, for both stages.

    `earlier` are the attempts of the stage since the last submission, oldest first; `rolled_back`,
    after a divergence: the workers chose a checkpoint to go back to; `restart_mode`: how the run
    continues after the end of its job; `in_allocation`: the job holds enough healthy nodes for new
    workers. Returns the record with action and backoff; its evidence names a limit that is reached.
    """
    ending = closed.ending
    assert ending is not None
    actions = ACTIONS[ending]
    if closed.stage == "precompile" and ending == "compile_failure":
        if recipe.train.incomplete_graphs == "compile":
            message = "train.incomplete_graphs: compile: the train stage starts all the same"
            return _with_action(closed, "finish", message)
    elif closed.stage == "precompile" and started and "requeue" in actions:
        actions = ("stop",)  # the train job depends on the success of this one: Slurm's afterok
    elif ending == "divergence" and rolled_back:
        actions = _RESTART
    elif ending == "storage_failure" and not is_transient(closed.evidence):
        actions = ("stop",)
    if "requeue" not in actions:
        return _with_action(closed, actions[0])
    if restart_mode == "none":
        message = "slurm.restart is none: `slurmllm resume` continues the run"
        return _with_action(closed, "stop", message)
    limits = recipe.slurm
    streak = takewhile(lambda attempt: not gained(attempt), (closed, *reversed(earlier)))
    # guard.max_roll_backs limits divergences; `Slurm: the job is PREEMPTED` is not the run's fault.
    idle_attempts = [
        attempt
        for attempt in streak
        if attempt.ending != "divergence" and "PREEMPTED" not in str(attempt.evidence[:1])
    ]
    idle, alike = len(idle_attempts), _count_without_exclusion(idle_attempts)
    if alike >= limits.no_progress_limit and ending != "divergence":
        message = f"{alike} attempts in a row without a new checkpoint (slurm.no_progress_limit)"
        evidence = (message, f"the last one: {ending}", *closed.evidence)
        stopped = closed.model_copy(update={"ending": "no_progress", "evidence": evidence})
        return _with_action(stopped, "stop")
    backoff = 0.0
    if ending in BUDGETS:
        if message := _exceeded_budget(closed, earlier, limits, *BUDGETS[ending]):
            return _with_action(closed, "stop", message)
        backoff = backoff_s(limits.backoff_s, idle) if idle else 0.0
    # Not twice in a row without a new checkpoint: other nodes may be better. The first time there
    # is no backoff, as the nodes wait too.
    if in_allocation and "restart" in actions and idle <= 1:
        return _with_action(closed, "restart")
    return closed.model_copy(update={"action": restart_mode, "backoff_s": backoff})


def _exceeded_budget(
    closed: AttemptRecord, earlier: Attempts, limits: SlurmConfig, field: str, name: str
) -> str:
    """Return a message if more attempts than slurm.`field` ended so, else an empty text."""
    budget = int(getattr(limits, field))
    begin = _end(closed) - limits.budget_hours * HOUR_S
    within = takewhile(lambda attempt: _end(attempt) >= begin, reversed(earlier))
    used = 1 + sum(attempt.ending == closed.ending for attempt in within)
    if used <= budget:
        return ""
    return f"{used} {name} within {limits.budget_hours:g} h, slurm.{field} is {budget}"


def _count_without_exclusion(idle: Attempts) -> int:
    """Count the attempts that excluded no new node.

    `idle`: those without a new checkpoint, latest first.

    After an exclusion the next attempt has another node: several bad nodes, which Slurm allocates
    because they are idle, must not end the run; the failure budget limits them. A node that is
    excluded again was used because the job cannot start without it.
    """
    before: set[str] = set()
    count = 0
    for attempt in reversed(idle):
        count += before.issuperset(attempt.excluded_nodes)
        before.update(attempt.excluded_nodes)
    return count


def _with_action(closed: AttemptRecord, action: Action, *reasons: str) -> AttemptRecord:
    return closed.model_copy(
        update={"action": action, "backoff_s": 0.0, "evidence": (*closed.evidence, *reasons)}
    )


def backoff_s(first_s: float, failures: int) -> float:
    """Return the wait before the next start after some failures in a row, doubled with each."""
    # Not 2.0 ** failures: with a high limit of attempts a float overflows.
    return min(first_s * 2.0 ** min(failures - 1, 20), MAX_BACKOFF_S)


def is_transient(evidence: Sequence[str]) -> bool:
    """Whether a storage failure may be over when the job starts again.

    A file system that is read-only, stale or full is fixed by its administrators, or by the run's
    own retention. A damaged file, a checkpoint that does not verify, an exceeded quota and a limit
    on file sizes persist until the user acts.
    """
    lasting = any(matches(line, "storage_lasting") for line in evidence)
    return not lasting and any(matches(line, "storage") for line in evidence)


def failing_nodes(
    closed: AttemptRecord, earlier: Attempts, proven: Mapping[str, NodeEvidence]
) -> NodeFaults:
    """Return the fault of each node to exclude after an attempt.

    `earlier` are of both stages, oldest first. One ending is enough with evidence that is about the
    node (`proven`); without it, a node is excluded if the last two attempts there are blamed on it
    and another node of the run was never blamed.
    """
    failing = {}
    attempts = [a for a in (*earlier, closed) if a.ending not in ("superseded", "cancelled")]
    other_nodes = {name for a in attempts for name in a.nodes} - {
        name for a in attempts for name in a.blamed_nodes
    }
    for name in closed.blamed_nodes:
        last = [a for a in attempts if name in (*a.nodes, *a.blamed_nodes)][-2:]
        if name in proven:
            reason = [*lines_about(closed.evidence, name), *closed.evidence, str(closed.ending)][0]
            failing[name] = NodeFault(proven[name], reason[:2000])
        elif other_nodes and len(last) == 2 and all(name in a.blamed_nodes for a in last):
            which = ", ".join(f"{a.stage} {a.attempt}" for a in last)
            failing[name] = NodeFault("repeated", f"blamed for 2 attempts in a row: {which}")
    return failing


def lines_about(lines: Sequence[str], node: str) -> list[str]:
    """Return the lines that name a node; `n1` is not in `n10` or `n1-b`."""
    return [line for line in lines if names_any(line, [node])]


def exclusion_hours(evidence: NodeEvidence, exclusions: int, longest: float) -> tuple[float, float]:
    """Return how long a run, and others, exclude a node, the `exclusions`-th time: 1 h, 4 h, …

    A device error lasts until somebody repairs it. `repeated` and `slow` may be caused by the run's
    own program, so other runs try the node again soon.
    """
    hours = min(4.0 ** min(exclusions - 1, 20), longest)
    if evidence in ("repeated", "slow"):
        return hours, min(hours / 4, 1.0)
    return hours, longest if evidence == "hardware" else hours


def gained(attempt: AttemptRecord) -> bool:
    if attempt.steps_gained is not None:
        return attempt.steps_gained > 0
    before = attempt.checkpoint_before
    after = attempt.checkpoint_after
    return after is not None and (before is None or after > before)


def _end(attempt: AttemptRecord) -> float:
    return attempt.ended_at or attempt.started_at
