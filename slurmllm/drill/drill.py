"""The drill itself: the reference, then one broken run after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slurmllm.compare.comparison import Tolerances
from slurmllm.drill.checks import examine
from slurmllm.drill.injector import Injection, Order
from slurmllm.drill.kinds import Drilled, DrillReport, KindName
from slurmllm.drill.plan import Plan
from slurmllm.drill.runner import Runner
from slurmllm.errors import CodeError, RunError, StorageError
from slurmllm.metrics.row_reader import last_row
from slurmllm.records import AttemptRecord, NodeRecord
from slurmllm.rundir import RunDir, write_atomic
from slurmllm.slurm.client import SlurmClient
from slurmllm.status.runs import run_state
from slurmllm.submit.render import node_local_cache

POLL_S = 0.25
ASK_S = 2.0  # between two questions to Slurm
AGENT_S = 30.0  # for an agent to end after its run
Tell = Callable[[str], None]


class Drill:
    """A drill of one run.

    Args:
        plan: What is done.
        runner: Where.
        client: Slurm, for the state of the runs.
        tolerances: How far the curves may lie apart.
        own_reference: Whether the run itself is the reference.
        tell: Called with a line that says how far it is.
    """

    def __init__(
        self,
        plan: Plan,
        runner: Runner,
        client: SlurmClient,
        tolerances: Tolerances,
        own_reference: bool,
        tell: Tell,
    ) -> None:
        self.plan, self.runner, self.client = plan, runner, client
        self.tolerances, self.own_reference, self.tell = tolerances, own_reference, tell
        self.made: list[RunDir] = []

    def run(self, keep: bool) -> DrillReport:
        """Make the reference and the broken runs.

        Args:
            keep: Whether runs that passed stay too.

        Raises:
            CodeError: the reference itself did not come to its end.
            SlurmllmError: a run could not be started.
        """
        plan = self.plan
        reference, name = self._reference()
        drills = [self._one(kind, reference) for kind in plan.kinds]
        passed = all(one.passed for one in drills)
        failed = {one.run for one in drills if not one.passed}
        if not keep:
            # With a run that failed stays what it was compared with.
            for run in list(self.made):
                if run.name not in failed and (passed or run.name != name):
                    self._remove(run)
        return DrillReport(
            run=plan.run.name,
            nodes=plan.nodes,
            local=plan.local,
            steps=plan.steps,
            every_steps=plan.every_steps,
            seed=plan.seed,
            reference=name,
            own_reference=self.own_reference,
            drills=tuple(drills),
            kept=tuple(run.name for run in self.made),
        )

    def _reference(self) -> tuple[Path, str]:
        """What the broken runs are compared with, and the name of its run."""
        if self.own_reference:
            return self.plan.run.metrics(0), self.plan.run.name
        run = self._make("reference", None)
        self._see_through(run, None)
        state = run_state(run, self.client)
        if state.state != "done":
            raise CodeError(
                f"the unbroken run {run.name} did not come to its end: {state.state} {state.why}; "
                f"see `slurmllm logs {run.name}`: what stops it would stop {self.plan.run.name} too"
            )
        return run.path, run.name

    def _one(self, kind: KindName, reference: Path) -> Drilled:
        run = self._make(kind, kind)
        done = self._see_through(run, kind)
        self.tell(f"{kind}: comparing with the reference")
        state = run_state(run, self.client)
        words = f"{state.state} ({state.why})" if state.why else state.state
        return examine(run, kind, done, reference, self.plan.steps, self.tolerances, words)

    def _make(self, part: str, kind: KindName | None) -> RunDir:
        """The directory of a run to come; it has the configuration and nothing else."""
        run = RunDir(self.plan.run.path.parent / self.plan.name(part))
        try:
            run.path.mkdir()
        except FileExistsError:
            raise RunError(f"{run.path} is there already; another drill has begun it") from None
        except OSError as error:
            raise StorageError(f"cannot make {run.path}: {error.strerror or error}") from error
        self.made.append(run)
        write_atomic(run.config, self.plan.config_of(kind).to_yaml())
        if self.plan.run.excluded.is_file():  # the same nodes are to be kept off
            write_atomic(run.excluded, self.plan.run.excluded.read_text(encoding="utf-8"))
        return run

    def _see_through(self, run: RunDir, kind: KindName | None) -> Injection | None:
        """Start a run, break it when its moment comes, wait until nothing of it runs any more.

        Returns:
            What was done to it; None for the reference, or where it never trained.
        """
        part = kind or "reference"
        agent: subprocess.Popen[bytes] | None = None
        asked_at = 0.0
        try:
            self.tell(f"{part}: starting")
            self.runner.start(run, self.plan.nodes)
            while True:
                if kind is not None and agent is None:
                    agent = self._agent(run, kind)
                if kind == "first_node" and agent is not None and agent.poll() is not None:
                    if (done := _injection(run)) is not None and not done.missed:
                        self.tell(f"{part}: requeueing, as Slurm does when the first node dies")
                        self.runner.start_again(run, self.plan.nodes)
                    kind = None
                self.tell(f"{part}: {self._standing(run)}")
                if time.monotonic() - asked_at >= ASK_S or self.plan.local:
                    asked_at = time.monotonic()
                    if not self.runner.active(run) and (kind != "first_node" or agent is None):
                        break
                time.sleep(POLL_S)
        except BaseException:
            self.tell(f"{part}: cancelling {run.name}")
            self.runner.cancel(run)
            raise
        finally:
            _end(agent)
        return _injection(run)

    def _agent(self, run: RunDir, kind: KindName) -> subprocess.Popen[bytes] | None:
        """Send for what breaks the run, once the first attempt's workers are there."""
        path = run.attempt("train", 0).record
        if not path.is_file():
            return None
        order: Order = self.plan.order(kind, AttemptRecord.load(path).nodes)
        node = run.attempt("train", 0).node(order.node)
        if not node.is_file() or not NodeRecord.load(node).pids:
            return None
        command = [
            sys.executable, "-m", "slurmllm.drill.injector", str(run.path), order.model_dump_json(),
        ]  # fmt: skip
        return self.runner.agent(run, order.node, command)

    def _standing(self, run: RunDir) -> str:
        attempts = run.attempts("train")
        if not attempts:
            return "precompiling" if run.attempts("precompile") else "waiting for nodes"
        row = last_row(run)
        return f"attempt {attempts[-1].number}, step {row['step'] if row else 0}/{self.plan.steps}"

    def _remove(self, run: RunDir) -> None:
        shutil.rmtree(run.path, ignore_errors=True)
        if self.plan.local:  # a name with a digest of the run's path: nobody else's
            cache = Path(node_local_cache(self.plan.config, run))
            shutil.rmtree(cache, ignore_errors=True)
            with suppress(OSError):
                cache.with_name(f"{cache.name}.lock").unlink()
        if not run.path.exists():
            self.made.remove(run)


def _injection(run: RunDir) -> Injection | None:
    return Injection.load(run.drill) if run.drill.is_file() else None


def _end(agent: subprocess.Popen[bytes] | None) -> None:
    if agent is None:
        return
    with suppress(subprocess.TimeoutExpired):
        agent.wait(AGENT_S)
    if agent.poll() is None:
        agent.kill()
        agent.wait()
