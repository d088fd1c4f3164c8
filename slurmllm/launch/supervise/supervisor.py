"""The batch script's own process: the attempts of one stage in one job, from nodes to actions.

    close orphaned attempts → open one → check the nodes, broadcast graphs and environment →
      ↑                       launchers → wait (signals, deadlines) → classify → record →
      └───────────── restart in the allocation ───────────── or requeue, chain, stop, finish

It runs on the first node of the job. If that node dies, the next attempt closes this one's record
by Slurm's accounting.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from slurmllm import __version__
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import (
    EXIT_NEGATIVE,
    EXIT_OK,
    EXIT_OUT_OF_MEMORY,
    EXIT_REQUEUE,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.core.format import format_names
from slurmllm.core.run.records import (
    AttemptRecord,
    NodeNames,
    PhaseSeconds,
    last_submission,
)
from slurmllm.core.run.rundir import RunDir, Stage, SweepDir
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.core.slurm.client import to_unix, wait_for
from slurmllm.core.slurm.container import check_container, paths_of
from slurmllm.core.slurm.error_texts import fault_of
from slurmllm.core.slurm.setup import check_setup_ran
from slurmllm.launch.graphs import reuse
from slurmllm.launch.graphs.archive import IncompleteGraphsError
from slurmllm.launch.graphs.merge import merge_new_graphs, reject_graphs
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.allocation import (
    Allocation,
    SlurmAllocation,
    current_allocation,
    is_requeued,
)
from slurmllm.launch.supervise.attempt_monitor import AttemptMonitor, Observations, StopSignals
from slurmllm.launch.supervise.attempts import ending_of_orphaned, incarnation, log_attempt
from slurmllm.launch.supervise.classify import LAUNCH_ENDINGS, Ending, classify
from slurmllm.launch.supervise.evidence import gather_evidence
from slurmllm.launch.supervise.exclusion import (
    UNPROVEN,
    drain,
    exclude_failed,
    excluded_names,
    failed_nodes,
    failing,
    slow_nodes,
)
from slurmllm.launch.supervise.next_job import (
    NextJob,
    close_when_writable,
    requeue_unrecorded,
    unrecorded_ending,
)
from slurmllm.launch.supervise.notify import Notifier
from slurmllm.launch.supervise.policy import NodeFaults
from slurmllm.launch.supervise.preflight import Preparation
from slurmllm.launch.supervise.resume_check import judge_resume, resume_check_of
from slurmllm.launch.supervise.run_lock import (
    lost_start,
    not_recorded,
    other_supervisor,
    still_runs,
)
from slurmllm.launch.supervise.side_processes import SideProcesses
from slurmllm.launch.supervise.successor import cancel_successor, register_train_job, restart_of
from slurmllm.plan.mesh import load_mesh, possible_nodes, save_mesh
from slurmllm.train.checkpoint.selection import use_checkpoint

RETURNS = ("requeue", "chain")  # actions that return a run to the queue
# For what is left of an attempt's processes to end before a restart in the allocation; a step that
# holds a lost node does not end before Slurm notices the loss.
STEPS_END_S = 15.0
LOST_STEPS_END_S = 2.0
EXIT_FAILED = {  # by class of ending; 70 for the others
    **{"bad_configuration": 2, "storage_failure": 4, "divergence": 71, "stale_graphs": 71},
    **{"out_of_memory": EXIT_OUT_OF_MEMORY, "cancelled": EXIT_NEGATIVE},
    "superseded": EXIT_NEGATIVE,
}

log = logging.getLogger(__name__)


class Supervisor:
    """The attempts of one stage in one job."""

    def __init__(self, run: RunDir, stage: Stage, allocation: Allocation) -> None:
        self.run = run
        self.stage = stage
        self.allocation = allocation
        self.config: RunConfig = load(run.config, trusted=True)
        self.stop = StopSignals()
        self.notifier = Notifier(run, self.config)
        self.side_processes = SideProcesses(run, self.config)
        if stage == "train" and is_requeued(allocation):
            slurm = self.config.recipe.slurm
            used = len(allocation.nodes) - slurm.spare_nodes
            if slurm.min_nodes is not None and slurm.min_nodes < used:
                used = possible_nodes(self.config, slurm.min_nodes, used)[-1]
            avoided = self._avoided(allocation)
            allocation.nodes = allocation.choose((), used, avoided)
            if names := " ".join(name for name in avoided if name in allocation.nodes):
                log.warning("using excluded nodes, without a spare node: %s", names)
        self.next_job = NextJob(run, stage, self.config, allocation)
        self._failing: NodeFaults = {}  # nodes to exclude after the last attempt
        self._next_nodes: NodeNames = ()
        self._preparation = Preparation(
            run, stage, self.config, allocation, lambda: self.stop.name is not None
        )

    def main(self) -> int:
        """Run the attempts; returns 0 finished, 75 to be started again, or a code of errors.py.

        Raises a StorageError, with the attempt's record open, if the run is no longer writable.
        """
        self.stop.install()
        if (exit_code := self._leave_early()) is not None:
            return exit_code
        if (stopped := self._close_orphaned()) is not None:
            return self._act(stopped)
        closed, error = self._attempt()
        while closed.action == "restart":
            self._restart(closed)
            closed, error = self._attempt()
        if error is None or closed.action in RETURNS:
            return self._act(closed)
        log.error("%s", error)
        self._act(closed)
        return error.exit_code

    def _leave_early(self) -> int | None:
        """Return the exit code if this job must not run an attempt; None if it may."""
        if reason := register_train_job(self.run, self.allocation):
            reason += "; this job, which would have continued it, leaves"
        elif reason := lost_start(self.allocation):
            log.warning("%s", reason)
            self.next_job.replace()
            return EXIT_REQUEUE  # Slurm ignores the end of a script that it does not know of
        else:
            reason = not_recorded(self.run, self.allocation)
            reason = reason or other_supervisor(self.run, self.stage, self.allocation)
        if reason is None:
            return None
        log.error("%s", reason)
        return EXIT_NEGATIVE

    def _attempt(self) -> tuple[AttemptRecord, SlurmllmError | None]:
        """Run one attempt; returns its closed record, and the error that ended it, if any."""
        run = self.run
        config = self.config
        record = attempts.open_attempt(run, self.stage, config, self.allocation)
        log_attempt(record, f"{len(record.nodes)} node(s): {' '.join(record.nodes)}")
        self.notifier.started(record)
        self.next_job.submit_ahead()
        phases: PhaseSeconds = {}
        observed = Observations()
        try:
            check_setup_ran(__version__)
            if self.stage == "train" and is_requeued(self.allocation):
                self.allocation.check_time_limit(config.recipe.slurm.signal_lead_s)
            if config.cluster.container is not None and record.attempt == 0:
                check_container(__version__, paths_of(config.cluster.container))
            self._link_graphs()
            if self.stage == "train":
                self._fit_mesh(len(record.nodes))
                self._merge_new_graphs()
                if (command := config.recipe.command) is not None:
                    record = use_checkpoint(run, command, record)
                    for entry in record.passed_over:
                        log_attempt(record, f"passed over: {entry}")
            ending = self._preparation.prepare(record, phases)
            if ending is None:
                record = record.model_copy(update={"phases_s": dict(phases)})
                record.save(record.files(run).record)
                check = resume_check_of(run, config, record)
                launchers = self.allocation.launch(run.path, self.stage, record.attempt)
                self.side_processes.start(self.stage)
        except SlurmllmError as error:
            ending = ending_of_error(error, record.nodes[0])
            return self._close(record, ending, phases, observed), error
        if ending is None:
            observed = AttemptMonitor(
                run,
                record,
                config,
                launchers,
                self.stop,
                self.notifier,
                check,
                self._kill_wait_s(),
            ).wait()
            phases["workers"] = observed.launchers_s
            ending = classify(
                gather_evidence(
                    run,
                    record,
                    self.allocation,
                    observed,
                    None if observed.failed_first else self.stop.name,
                    launchers,
                    config,
                )
            )
            if self.stop.name is None and check is not None:
                ending = judge_resume(run, record, ending, check)
        return self._close(record, ending, phases, observed), None

    def _kill_wait_s(self) -> float:
        """Return the time from Slurm's SIGTERM to its SIGKILL, s."""
        if isinstance(self.allocation, SlurmAllocation):
            with suppress(SlurmError):
                return float(self.allocation.client.settings().get("KillWait", "30").split()[0])
        return math.inf

    def _restart(self, closed: AttemptRecord) -> None:
        assert isinstance(self.allocation, SlurmAllocation)
        left_out = [name for name in closed.nodes if name not in self._next_nodes]
        self.allocation.restart(self._next_nodes, STEPS_END_S if not left_out else LOST_STEPS_END_S)
        if left_out:
            spares = [name for name in self._next_nodes if name not in closed.nodes]
            log_attempt(closed, f"{' '.join(spares)} in place of {' '.join(left_out)}")

    def _nodes_for_restart(self, record: AttemptRecord) -> NodeNames:
        """Return the nodes for new workers in this job; empty if too few, or time is over."""
        if not isinstance(self.allocation, SlurmAllocation) or self.stage != "train":
            return ()
        if self.stop.name is not None or not self.config.recipe.slurm.restart_in_allocation:
            return ()
        failed = self._preparation.failed_nodes
        failed.update(name for name, fault in self._failing.items() if fault.evidence != "slow")
        # A slow node is better than a wait in the queue.
        chosen = self.allocation.choose(
            failed, len(record.nodes), [*self._failing, *self._avoided(self.allocation)]
        )
        try:
            if chosen:
                self.allocation.give_up(failed.union(self._failing).difference(chosen))
        except SlurmError as error:
            log.warning("no restart in the allocation: %s", error)
            return ()
        return chosen

    def _avoided(self, allocation: SlurmAllocation) -> list[str]:
        """Return the excluded nodes in this job; spare nodes replace as many as they can."""
        with suppress(StorageError):  # a damaged record: the requeue reports it
            names = excluded_names(allocation.client, self.run, self.config)
            return [name for name in names if name in allocation.all_nodes]
        return []

    def _close(
        self,
        record: AttemptRecord,
        ending: Ending,
        phases: PhaseSeconds,
        observed: Observations,
    ) -> AttemptRecord:
        """Record the ending and the action, unless another supervisor has done so."""
        run = self.run
        if ending.ending == "node_failure" and (reason := lost_start(self.allocation)):
            ending = Ending("superseded", (reason,))  # srun was refused: no node has failed
            self.next_job.replace()
        # Read again: after a network partition another supervisor may have closed it.
        on_disk = AttemptRecord.load(record.files(run).record)
        if on_disk.ended_at is not None:
            log_attempt(on_disk, "another supervisor has closed this attempt and continues the run")
            return on_disk.model_copy(update={"ending": "superseded", "action": "stop"})
        # The queue time of a requeued attempt follows from the records.
        first = record.restart_count == 0 and not self.allocation.restarted
        row = incarnation(record, self.allocation) if first else None

        def close() -> AttemptRecord:
            self._failing = failing(run, record, ending, self.allocation)
            if self.config.recipe.slurm.exclude_slow:
                self._failing = slow_nodes(run, record) | self._failing
            self._next_nodes = self._nodes_for_restart(record)
            return attempts.close_attempt(
                run,
                record,
                ending,
                phases,
                first_symptom_at=observed.first_symptom_at,
                row=row,
                restart_mode=restart_of(run, self.allocation),
                in_allocation=bool(self._next_nodes),
                excluded_nodes=self._failing,
            )

        closed = close_when_writable(run, self.allocation, record, ending, close)
        self._exclude_failed()
        if ending.ending == "stale_graphs":
            try:
                reject_graphs(run, f"{self.stage} attempt {closed.attempt} failed with it")
            except StorageError as error:
                log.warning("%s", error)
        log_attempt(closed, f"{closed.ending} → {closed.action}: {'; '.join(closed.evidence)}")
        self.notifier.closed(closed)
        if line := attempts.unequal_versions(
            {name: n.versions for name, n in attempts.node_records(run, record).items()}
        ):
            log_attempt(closed, f"warning: {line}")
        # A requeue must not wait for the merge: the next attempt begins with it.
        ended = closed.action in ("finish", "stop") and closed.ending != "superseded"
        if ended and self.stage == "train":
            self._merge_new_graphs()
        return closed

    def _link_graphs(self) -> None:
        """Link a run of a sweep to the graphs that another one has compiled for it."""
        run = self.run
        last = last_submission(run)
        if last is None or last.graphs_of is None or run.graphs_manifest.is_file():
            return
        source = SweepDir(run.path.parent).graph_run(last.graphs_of)
        if reason := reuse.link_or_copy_graphs(source, run, self.config.cluster.trusted_group):
            raise StorageError(
                f"cannot use the graphs of {source.path}: {reason}; `slurmllm resume "
                f"{run.name}` compiles them"
            )
        save_mesh(reuse.make_run_mesh(self.config, last.nodes, run), run.plan)

    def _fit_mesh(self, nodes: int) -> None:
        """Write the mesh again if Slurm gave the job another number of nodes than the last one."""
        flexible = self.config.recipe.slurm.min_nodes is not None
        if flexible and load_mesh(self.run.plan).nodes != nodes:
            save_mesh(reuse.make_run_mesh(self.config, nodes, self.run), self.run.plan)
            log.info("%d nodes: mesh and accumulation follow, the global batch stays", nodes)

    def _merge_new_graphs(self) -> None:
        try:
            names = merge_new_graphs(self.run, self.config.cluster.trusted_group)
        except StorageError as error:
            log.warning("%s", error)  # the graphs can be compiled again
            return
        if names:
            listed_names = format_names(names, 4)
            log.info("graph cache: %d new graphs in the archive: %s", len(names), listed_names)

    def _act(self, closed: AttemptRecord) -> int:
        """Carry out the action of a closed attempt; returns the exit code."""
        self.next_job.stop_retries()
        if closed.action not in RETURNS:
            if closed.ending != "superseded" and self.next_job.chained:
                cancel_successor(self.run, self.allocation)
            return exit_code_of(closed)
        newer = attempts.newer_attempt(self.run, self.stage, closed.attempt)
        if newer is not None:
            log_attempt(closed, f"superseded by attempt {newer}: not requeued")
            return EXIT_NEGATIVE
        if is_requeued(self.allocation):
            closed = self.next_job.return_to_queue(
                closed,
                [name for name, fault in self._failing.items() if fault.evidence not in UNPROVEN],
            )
            return EXIT_REQUEUE if closed.action in RETURNS else exit_code_of(closed)
        # A requeued job waits in Slurm's queue, a local run here.
        if closed.backoff_s:
            log.info("waiting %.0f s before the next attempt", closed.backoff_s)
        wait_for(lambda: self.stop.name, closed.backoff_s, 0.2)
        return EXIT_REQUEUE

    def _exclude_failed(self) -> None:
        """Record the failing nodes; with slurm.drain, drain those with broken hardware."""
        if not self._failing or not isinstance(self.allocation, SlurmAllocation):
            return
        client, cluster = self.allocation.client, ""
        with suppress(SlurmError):
            cluster = client.cluster_name()
        try:
            new = exclude_failed(self.run, self._failing, cluster)
        except StorageError as error:
            log.warning("%s", error)  # the requeued job's own list still excludes them
            return
        if self.config.recipe.slurm.drain:
            drain(client, new)

    def _close_orphaned(self) -> AttemptRecord | None:
        """Close earlier attempts whose supervisors died; returns the last if it ended the run."""
        run = self.run
        allocation = self.allocation
        closed = None
        for record in attempts.load_attempts(run, self.stage):
            if record.ended_at is not None:
                continue
            if reason := still_runs(run, record, allocation):
                log_attempt(record, f"is still open and is superseded by this attempt: {reason}")
                continue
            row = incarnation(record, allocation)
            ending = ending_of_orphaned(
                record, attempts.node_records(run, record), row, failed_nodes(allocation)
            )
            this_job = record.job_id is not None and record.job_id == allocation.job_id
            if this_job and record.restart_count == allocation.restart_count:
                ending = Ending(
                    "node_failure",
                    (f"slurmctld lost this start of job {record.job_id}, and started it again",),
                )  # and no node is to blame
                row = None
            ended_at = None if row is None else to_unix(row.end)
            if unrecorded := unrecorded_ending(allocation, record):
                ended_at = unrecorded.ended_at
                ending = Ending(unrecorded.ending, unrecorded.evidence, unrecorded.blamed_nodes)
            self._failing = failing(run, record, ending, allocation)
            closed = attempts.close_attempt(
                run,
                record,
                ending,
                ended_at=ended_at,
                row=row,
                restart_mode=restart_of(run, allocation),
                excluded_nodes=self._failing,
            )
            log_attempt(closed, f"{closed.ending}: {'; '.join(closed.evidence)}")
            self.notifier.closed(closed)
            self._exclude_failed()
        if closed is None or self.stage == "precompile" or closed.action not in ("finish", "stop"):
            return None
        return closed if closed.attempt >= attempts.first_attempt(run) else None


def exit_code_of(closed: AttemptRecord) -> int:
    return EXIT_OK if closed.action == "finish" else EXIT_FAILED.get(str(closed.ending), 70)


def ending_of_error(error: SlurmllmError, node: str) -> Ending:
    if isinstance(error, IncompleteGraphsError):
        return Ending("compile_failure", tuple(line.strip() for line in str(error).splitlines()))
    if error.blame == "user":
        return Ending("bad_configuration", (str(error),))
    if isinstance(error, SlurmError):  # no command of Slurm speaks for one node
        return Ending(LAUNCH_ENDINGS.get(fault_of(str(error)), "node_failure"), (str(error),))
    if isinstance(error, StorageError):
        return Ending("storage_failure", (str(error),))
    if error.blame == "infrastructure":
        return Ending("node_failure", (str(error),), (node,))
    return Ending("code_error", (str(error),))


def supervise(run: RunDir, stage: Stage) -> int:
    allocation = current_allocation(run)
    try:
        supervisor = Supervisor(run, stage, allocation)
        code = EXIT_REQUEUE
        try:
            code = supervisor.main()
        finally:
            supervisor.side_processes.stop(
                requeued=code == EXIT_REQUEUE,
                local=not allocation.requeues,
                done=code == EXIT_OK,
                cancelled=lambda: supervisor.stop.name,
            )
            supervisor.notifier.wait()
        return code
    except StorageError as error:
        return requeue_unrecorded(run, stage, allocation, error)
    except OSError as error:  # most likely of a look at the run directory
        log.warning("the supervisor ends because of an unexpected error", exc_info=True)
        return requeue_unrecorded(
            run,
            stage,
            allocation,
            StorageError(f"{error.filename or run.path} cannot be used: {os_error_text(error)}"),
        )
