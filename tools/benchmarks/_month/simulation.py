"""Attempts one after another in simulated time, under the supervisor's own policy.

nodes → preflight → cache → start-up → steps and saves → failure → noticed → closed
  ↑         ↑                                                                  │
  │         └── restart in the job, on its healthy nodes: supervise.policy ────┤
  └──────────── requeue, backoff, excluded nodes: supervise.policy ────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from _month.scenario import BREAKS_NODE, ENDINGS, Failure, FailureQuery, Scenario
from slurmllm.analysis.status.history import Incarnation, RunHistory, Steps
from slurmllm.core.metrics.curves import Floats, Ints
from slurmllm.core.run.records import AttemptRecord, EndingClass
from slurmllm.launch.supervise.policy import decide, exclusion_hours, failing_nodes
from slurmllm.plan.lost_time import FAILURES, HOUR_S, best_interval_s, mtbf_s

_JOB = "1"
# Text that the policy classifies as a transient fault.
_EVIDENCE: dict[str, str] = {"storage": "OSError: [Errno 30] Read-only file system"}


def simulate(scenario: Scenario, seed: int) -> RunHistory:
    """Simulate a run; equal seeds give equal histories."""
    return _Simulation(scenario, np.random.default_rng(seed)).run()


class Partition:
    """The nodes of a partition that no other run uses: broken, excluded, or available."""

    def __init__(self, names: Sequence[str]) -> None:
        self._broken_until = dict.fromkeys(names, -math.inf)
        self._excluded_until = dict.fromkeys(names, -math.inf)
        self._order = list(names)

    def allocate(self, now: float, count: int) -> tuple[float, tuple[str, ...]]:
        """Allocate the next job's nodes; return its start time, s, and the nodes.

        Those of the job before come first; excluded ones, only if others are too few, last.
        """
        repaired = sorted(self._broken_until.values())[count - 1]
        start = max(now, repaired)
        available = [name for name in self._order if self._broken_until[name] <= start]
        preferred = [name for name in available if self._excluded_until[name] <= start]
        excluded = [name for name in available if self._excluded_until[name] > start]
        taken = tuple((preferred + excluded)[:count])
        taken_names = set(taken)
        self._order = [*taken, *(name for name in self._order if name not in taken_names)]
        return start, taken

    def break_down(self, name: str, until: float) -> None:
        self._broken_until[name] = until

    def exclude(self, names: Iterable[str], until: float) -> None:
        self._excluded_until.update(dict.fromkeys(names, until))


@dataclass
class _Made:
    """The steps of an attempt, as arrays to concatenate."""

    numbers: list[Ints] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)
    ends: list[Floats] = field(default_factory=list)

    def add(self, first: int, count: int, begin: float, step_s: float, extra_s: float) -> float:
        """Add steps, the first of them longer; returns when the next one can begin."""
        seconds = np.full(count, step_s)
        seconds[0] += extra_s
        self.numbers.append(np.arange(first, first + count, dtype=np.int64))
        self.seconds.append(seconds)
        self.ends.append(begin + np.cumsum(seconds))
        return float(self.ends[-1][-1])

    def steps(self) -> Steps | None:
        if not self.numbers:
            return None
        return Steps(
            np.concatenate(self.numbers), np.concatenate(self.seconds), np.concatenate(self.ends)
        )


class _Simulation:
    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self.scenario, self.rng = scenario, rng
        self.nodes = Partition(scenario.names)
        self.held: tuple[str, ...] = ()  # healthy nodes of the job, spare ones at the end
        self.job_began = 0.0
        self.outages: list[tuple[float, float]] = []
        self.checkpoint = self.position = 0  # steps: of the newest checkpoint, and made
        self.attempts: list[AttemptRecord] = []
        self.exclusions: dict[str, int] = {}  # node → how often it was excluded
        self.counted_from = 0  # the attempt that the last submission began with
        self.steps: dict[int, Steps] = {}
        self.waited_s: dict[int, float] = {}
        self.incarnations: list[Incarnation] = []
        self.node_s = 0.0

    def run(self) -> RunHistory:
        now, going = 0.0, True
        while going and now < self.scenario.horizon_s:
            restarted = bool(self.held)
            if not restarted:
                slurm = self.scenario.recipe.slurm
                count = self.scenario.nodes + slurm.spare_nodes
                now, self.held = self.nodes.allocate(now, count)
                self.job_began = now
            if now >= self.scenario.horizon_s:
                break
            nodes = self.held[: self.scenario.nodes]
            closed, failure = _SimulatedAttempt(self, now, nodes, restarted).play()
            assert closed.ended_at is not None
            self.node_s += (closed.ended_at - now) * len(nodes)
            self.incarnations.append(Incarnation(_JOB, "train", len(nodes), now, closed.ended_at))
            now, going = self._act(closed, failure)
        return RunHistory(
            name="simulation",
            attempts=tuple(self.attempts),
            steps=self.steps,
            waited_s=self.waited_s,
            incarnations=tuple(self.incarnations),
            submissions=(0.0,),
        )

    def _act(self, closed: AttemptRecord, failure: Failure | None) -> tuple[float, bool]:
        """Apply the policy; returns when the next job may start, and whether there is one."""
        scenario = self.scenario
        assert closed.ended_at is not None
        earlier = self.attempts[self.counted_from :]
        broken = [failure.node] if failure and failure.node and failure.kind in BREAKS_NODE else []
        failing = failing_nodes(closed, self.attempts, dict.fromkeys(broken, "slurm"))
        healthy = tuple(name for name in self.held if name not in failing)
        # The supervisor is on the first node.
        in_allocation = (
            scenario.restarts_in_job
            and len(healthy) >= scenario.nodes
            and healthy[0] == self.held[0]
            and closed.ended_at < self.signal_at
        )
        decided = decide(closed, earlier, scenario.recipe, in_allocation=in_allocation)
        for name, fault in failing.items():
            self.exclusions[name] = count = self.exclusions.get(name, 0) + 1
            longest = scenario.recipe.slurm.exclude_hours
            hours, _ = exclusion_hours(fault.evidence, count, longest)
            self.nodes.exclude([name], closed.ended_at + hours * HOUR_S)
        for name in broken:
            self.nodes.break_down(name, closed.ended_at + scenario.repair_s)
        self.attempts.append(decided)
        self.held = healthy if decided.action == "restart" else ()
        if decided.action == "restart":
            return closed.ended_at, True
        if decided.action == "finish":
            return closed.ended_at, False
        requeue_s = scenario.draw("requeue", self.rng)
        if decided.action == "requeue" and (scenario.recovery == "auto" or failure is None):
            return closed.ended_at + max(requeue_s, decided.backoff_s), True
        self.counted_from = len(self.attempts)  # an engineer resumes it, which resets the budgets
        return closed.ended_at + scenario.engineer_s + requeue_s, True

    @property
    def signal_at(self) -> float:
        """When the signal comes that is sent ahead of the job's time limit."""
        limit_s = self.scenario.time_limit_s
        if limit_s is None:
            return math.inf
        return self.job_began + limit_s - self.scenario.recipe.slurm.signal_lead_s

    def interval(self) -> int:
        """Steps to the next save, as the schedule would choose them now."""
        scenario, every = self.scenario, self.scenario.recipe.checkpoint.every_steps
        if every != "auto":
            return every - self.position % every
        failures = sum(attempt.ending in FAILURES for attempt in self.attempts)
        between_s = mtbf_s(scenario.nodes, failures, self.node_s, scenario.node_mtbf_hours)
        best_s = best_interval_s(scenario.save.waited_s, between_s)
        return max(1, math.ceil(max(best_s, scenario.save.total_s) / scenario.step_s))

    def refuses(self, now: float) -> bool:
        """Whether the shared file system fails at `now`."""
        return any(begin <= now < end for begin, end in self.outages)


class _SimulatedAttempt:
    """One attempt, from its nodes to its end."""

    def __init__(
        self, whole: _Simulation, start: float, nodes: tuple[str, ...], restarted: bool
    ) -> None:
        self.whole, self.start, self.nodes = whole, start, nodes
        self.scenario, self.rng = whole.scenario, whole.rng
        self.number, self.before = len(whole.attempts), whole.checkpoint
        draw = self.scenario.draw
        self.phases_s = {name: draw(name, self.rng) for name in ("preflight", "cache")}
        if restarted:
            self.phases_s["cache"] = 0.0  # the nodes have the graphs
        self.trains_at = start + sum(self.phases_s.values()) + draw("start_up", self.rng)
        self.extra_s = draw("first_step", self.rng)
        self.step = self.before
        self.made = _Made()
        self.waited_s = 0.0
        self.writing: tuple[int, float] | None = None  # a save under way: its step, its end

    def play(self) -> tuple[AttemptRecord, Failure | None]:
        """Simulate the attempt; returns its record without an action, and its failure."""
        if self.whole.refuses(self.start):  # found by preflight
            refused = Failure(self.start + self.phases_s["preflight"], "storage")
            return self._failed(refused), refused
        failure, horizon_s = self._next_failure(), self.scenario.horizon_s
        signal_at = self.whole.signal_at
        if failure is not None and failure.kind == "signal":
            signal_at = min(signal_at, failure.at)
        stop_at = min(signal_at, horizon_s)
        if failure is not None and failure.kind != "signal" and failure.at < stop_at:
            stop_at = failure.at
        else:
            failure = None
        signalled = stop_at == signal_at < horizon_s
        failure = self._train(stop_at, signalled) or failure
        if failure is not None and self.step != self.scenario.steps:
            return self._failed(failure), failure
        if signalled and self.step != self.scenario.steps:
            return self._left(), None
        return self._done(stop_at), None

    def _next_failure(self) -> Failure | None:
        """The next failure that ends the attempt by itself; the storage's end it at a save."""
        now = self.start
        while True:
            ready_at = self.trains_at + self.extra_s
            query = FailureQuery(self.number, self.start, ready_at, now, self.nodes)
            failure = self.scenario.failures.following(query, self.rng)
            if failure is None or failure.at >= self.scenario.horizon_s:
                return None
            if failure.kind != "storage":
                return failure
            self.whole.outages.append((failure.at, failure.at + self.scenario.outage_s))
            now = failure.at

    def _train(self, stop_at: float, signalled: bool) -> Failure | None:
        """Steps and saves until something ends them; returns a failure of the storage.

        A step that is running is finished at a signal, and lost at a failure.
        """
        step_s, last = self.scenario.step_s, self.scenario.steps
        self.clock = self.trains_at
        while self.step != last:
            self.whole.position = self.step
            count = self.whole.interval()
            if last is not None:
                count = min(count, last - self.step)
            within = math.floor((stop_at - self.clock - self.extra_s) / step_s + 1e-9)
            saving = within >= count
            if not saving:
                count = max(0, within) + (1 if signalled and stop_at > self.trains_at else 0)
            if count:
                self.clock = self.made.add(self.step + 1, count, self.clock, step_s, self.extra_s)
                self.step, self.extra_s = self.step + count, 0.0
            if not saving:
                return None
            if self.whole.refuses(self.clock):
                return Failure(self.clock, "storage")
            self._save(blocking=self.step == last)
            if self.clock >= stop_at:
                return None
        return None

    def _save(self, blocking: bool) -> None:
        """Begin a save once the one before is written."""
        cost = self.scenario.save
        if self.writing is not None and self.writing[1] > self.clock:
            self._wait(self.writing[1] - self.clock)
        self._count_written(self.clock)
        self.writing = (self.step, self.clock + cost.total_s)
        self._wait(cost.total_s if blocking else cost.waited_s)

    def _wait(self, seconds: float) -> None:
        self.waited_s += seconds
        self.clock += seconds

    def _count_written(self, now: float) -> None:
        """Make a save that is written by `now` the newest checkpoint."""
        if self.writing is not None and self.writing[1] <= now + 1e-9:
            self.whole.checkpoint = self.writing[0]
            self.writing = None

    def _failed(self, failure: Failure) -> AttemptRecord:
        self._count_written(failure.at)
        training = failure.at > self.trains_at
        self._cut_phases(failure.at)
        noticed_at = failure.at + self.scenario.noticing_s(failure.kind, training, self.rng)
        evidence = _EVIDENCE.get(failure.kind, failure.kind)
        blamed = (failure.node,) if failure.node is not None else ()
        return self._closed(noticed_at, ENDINGS[failure.kind], (evidence,), blamed)

    def _cut_phases(self, at: float) -> None:
        """Count only the phases that were reached."""
        left_s = at - self.start
        for name, seconds in self.phases_s.items():
            self.phases_s[name] = min(seconds, left_s)
            left_s -= self.phases_s[name]

    def _left(self) -> AttemptRecord:
        """Save and leave, after a signal."""
        if self.step > self.before or self.writing is not None:
            self._save(blocking=True)
            self._count_written(self.clock)
        return self._closed(self.clock, "advance_signal", ("SIGUSR1: saved and left",), ())

    def _done(self, at: float) -> AttemptRecord:
        """The last step is reached, or the horizon."""
        self.whole.checkpoint = self.step
        if self.step == self.scenario.steps:
            return self._closed(self.clock, "done", ("all workers finished",), ())
        self._cut_phases(at)
        return self._closed(at, "done", ("all workers finished",), (), stopping_s=0.0)

    def _closed(
        self,
        at: float,
        ending: EndingClass,
        evidence: tuple[str, ...],
        blamed: tuple[str, ...],
        stopping_s: float | None = None,
    ) -> AttemptRecord:
        if stopping_s is None:
            stopping_s = self.scenario.draw("stopping", self.rng)
        ended_at = at + stopping_s
        self.whole.outages = [outage for outage in self.whole.outages if outage[0] <= ended_at]
        steps = self.made.steps()
        if steps is not None:
            self.whole.steps[self.number] = steps
            self.whole.waited_s[self.number] = self.waited_s
        after = self.whole.checkpoint
        return AttemptRecord(
            attempt=self.number,
            stage="train",
            job_id=_JOB,
            restart_count=self.number,
            nodes=self.nodes,
            world_size=len(self.nodes),
            master_addr=self.nodes[0],
            master_port=1024,
            started_at=self.start,
            ended_at=ended_at,
            ending=ending,
            evidence=evidence,
            blamed_nodes=blamed,
            last_step=self.step if steps is not None else None,
            checkpoint_before=self.before or None,
            checkpoint_after=after or None,
            steps_gained=after - self.before,
            steps_lost=self.step - after,
            phases_s=self.phases_s | {"stopping": stopping_s},
        )
