"""What follows on an ending: requeue, stop or finish, after how long, and without which nodes.

Pure functions of records, so that the simulator runs the policy that the supervisor runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from slurmllm.config.recipe import Recipe
from slurmllm.error_patterns import LASTING_FAULT, PASSING_FAULT
from slurmllm.records import Action, AttemptRecord, EndingClass

ACTIONS: Mapping[EndingClass, Action] = {
    "done": "finish",
    "advance_signal": "requeue",
    "node_failure": "requeue",
    "hang": "requeue",
    "out_of_memory": "stop",
    "compile_failure": "stop",
    "bad_configuration": "stop",
    "storage_failure": "requeue",  # where the fault may pass
    "code_error": "stop",
    "divergence": "stop",  # requeued after a roll-back
    "no_progress": "stop",
    "cancelled": "stop",
    "superseded": "stop",
}
# The endings that have a budget, its field in the recipe, and their name for people.
BUDGETS: Mapping[EndingClass, tuple[str, str]] = {
    "node_failure": ("failure_budget", "node failures"),
    "hang": ("hang_budget", "hangs"),
    "storage_failure": ("storage_budget", "failures of the shared file system"),
}
MAX_BACKOFF_S = 3600.0
HOUR_S = 3600.0


def decide(
    closed: AttemptRecord,
    earlier: Sequence[AttemptRecord],
    recipe: Recipe,
    *,
    rolled_back: bool = False,
) -> AttemptRecord:
    """Settle what follows on an attempt.

    Args:
        closed: The attempt, with class, evidence, end and checkpoints, of the train stage.
        earlier: Those before it that count (since the last submission), oldest first.
        recipe: Limits, budgets and backoff are under `slurm`.
        rolled_back: After a divergence: whether the run goes back and passes over the data.

    Returns:
        The record with action and backoff; where a limit is reached with that as evidence, and
        with class `no_progress` where this attempt was one too many without a checkpoint.
    """
    assert closed.ending is not None
    action = ACTIONS[closed.ending]
    if closed.ending == "divergence" and rolled_back:
        action = "requeue"
    if closed.ending == "storage_failure" and not may_pass(closed.evidence):
        action = "stop"
    if action != "requeue":
        return closed.model_copy(update={"action": action, "backoff_s": 0.0})
    limits = recipe.slurm
    idle = _idle(closed, earlier)
    if idle >= limits.no_progress_limit and not _went_back(closed):
        words = f"{idle} attempts in a row without a new checkpoint (slurm.no_progress_limit)"
        evidence = (words, f"the last one: {closed.ending}", *closed.evidence)
        return _stopped(closed, evidence).model_copy(update={"ending": "no_progress"})
    if closed.ending in BUDGETS:
        field, name = BUDGETS[closed.ending]
        budget, hours = int(getattr(limits, field)), limits.budget_hours
        spent = 1 + sum(a.ending == closed.ending for a in _within(closed, earlier, hours))
        if spent > budget:
            words = f"{spent} {name} within {hours:g} h, slurm.{field} is {budget}"
            return _stopped(closed, (*closed.evidence, words))
    backoff_s = 0.0
    if idle and closed.ending in BUDGETS:
        # Not 2.0 ** idle: with a high limit of attempts that is more than a float holds.
        backoff_s = min(limits.backoff_s * 2.0 ** min(idle - 1, 20), MAX_BACKOFF_S)
    return closed.model_copy(update={"action": "requeue", "backoff_s": backoff_s})


def may_pass(evidence: Sequence[str]) -> bool:
    """Whether a fault of the storage may be gone when the job starts again.

    A file system that is read-only, stale or full for the moment is mended by others, or by the
    run's own retention. A damaged file, a checkpoint that does not verify, a used-up quota and a
    limit on file sizes stay until the user does something.
    """
    lasting = any(LASTING_FAULT.search(line) for line in evidence)
    return not lasting and any(PASSING_FAULT.search(line) for line in evidence)


def failing_nodes(
    closed: AttemptRecord,
    earlier: Sequence[AttemptRecord],
    lost: Collection[str],
    hours: float,
) -> dict[str, str]:
    """The nodes to keep off after an attempt, and why.

    Args:
        closed: The attempt.
        earlier: All before it, of both stages.
        lost: The blamed nodes that fell silent, failed their checks or have a broken device: one
            such ending is enough. Of the others it takes two.
        hours: How far back endings count.
    """
    found = {}
    for name in closed.blamed_nodes:
        if name in lost:
            naming = [line for line in closed.evidence if name in line]
            found[name] = (naming or [*closed.evidence, str(closed.ending)])[0]
            continue
        blaming = [a for a in (*earlier, closed) if name in a.blamed_nodes]
        recent = [a for a in blaming if _end(a) >= _end(closed) - hours * HOUR_S]
        if len(recent) > 1:
            which = ", ".join(f"{a.stage} {a.attempt}" for a in recent)
            found[name] = f"{len(recent)} attempts were put down to it: {which}"
    return found


def gained(attempt: AttemptRecord) -> bool:
    """Whether an attempt left a checkpoint newer than it found."""
    if attempt.steps_gained is not None:
        return attempt.steps_gained > 0
    before, after = attempt.checkpoint_before, attempt.checkpoint_after
    return after is not None and (before is None or after > before)


def _idle(closed: AttemptRecord, earlier: Sequence[AttemptRecord]) -> int:
    """How many attempts in a row, this one included, left no new checkpoint.

    Roll-backs have a limit of their own (guard.max_roll_backs) and are passed over.
    """
    idle = 0
    for attempt in (closed, *reversed(earlier)):
        if gained(attempt):
            break
        idle += not _went_back(attempt)
    return idle


def _went_back(attempt: AttemptRecord) -> bool:
    return attempt.ending == "divergence"


def _within(
    closed: AttemptRecord, earlier: Sequence[AttemptRecord], hours: float
) -> Iterator[AttemptRecord]:
    begin = _end(closed) - hours * HOUR_S
    for attempt in reversed(earlier):
        if _end(attempt) < begin:
            return
        yield attempt


def _end(attempt: AttemptRecord) -> float:
    return attempt.ended_at if attempt.ended_at is not None else attempt.started_at


def _stopped(closed: AttemptRecord, evidence: tuple[str, ...]) -> AttemptRecord:
    return closed.model_copy(update={"action": "stop", "backoff_s": 0.0, "evidence": evidence})
