"""Excluded nodes: recorded with evidence and an end, kept out of requeued and new jobs.

A node is excluded only with evidence that is about it (`records.NodeEvidence`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmError, StorageError, UserError
from slurmllm.core.run.error_patterns import matches
from slurmllm.core.run.records import (
    AttemptRecord,
    ExcludedNode,
    ExcludedNodes,
    NodeEvidence,
    NodeHealth,
    SiteNodeRecord,
    last_submission,
)
from slurmllm.core.run.rundir import STAGES, RunDir, root_of
from slurmllm.core.slurm.client import Names, SlurmClient, retry_unreachable
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.launch.supervise.attempts import failure_records, load_attempts, node_records
from slurmllm.launch.supervise.classify import Ending, device_fault, reported_all
from slurmllm.launch.supervise.policy import (
    HOUR_S,
    NodeFault,
    NodeFaults,
    exclusion_hours,
    failing_nodes,
    lines_about,
)
from slurmllm.launch.supervise.site_nodes import (
    add_record,
    has_ended,
    next_time,
    read_records,
    recorded_excluded_nodes,
    site_exclusions,
)
from slurmllm.launch.supervise.slow_ranks import read_slow_ranks

POLL_S = 2.0
SLURM_NOTICE_S = 330.0  # Slurm's default SlurmdTimeout (300 s) and a margin
SLOW_S = 3600.0  # for which a rank is slow before its node is excluded (`slurm.exclude_slow`)
# Evidence without a proven fault: the node is excluded only if the job can start without it.
UNPROVEN = ("repeated", "slow")
_NOT_RESPONDING = re.compile(r"(idle|mixed|allocated|completing)\*")
_UNUSABLE = ("down", "drain", "fail", "maint", "power", "reboot", "unknown", "*")

log = logging.getLogger(__name__)


def excluded(run: RunDir) -> list[ExcludedNode]:
    """Return the nodes that a run excludes itself, the latest last."""
    now = time.time()
    if nodes := [node for node in recorded_excluded_nodes(run).nodes if node.until > now]:
        ends = read_records(root_of(run))
        return [node for node in nodes if not has_ended(node, ends)]
    return []


def excluded_names(
    client: SlurmClient, run: RunDir, config: RunConfig, root: Path | None = None
) -> list[str]:
    """Return the nodes to exclude from a run's next job: its own, latest first, then the site's.

    `root`: the runs folder, for a run whose sweep is not recorded yet.
    """
    names = [node.node for node in reversed(excluded(run))]
    return list(
        dict.fromkeys([*names, *site_exclusions(client, config, root or root_of(run), run)])
    )


def failing(
    run: RunDir, record: AttemptRecord, ending: Ending, allocation: Allocation
) -> NodeFaults:
    """Return the faults of the nodes to exclude after an attempt; empty if local."""
    if not ending.blamed_nodes or not isinstance(allocation, SlurmAllocation):
        return {}
    closed = record.model_copy(update=vars(ending))  # with its evidence and the nodes it blames
    attempts = (attempt for stage in STAGES for attempt in load_attempts(run, stage))
    faults = failing_nodes(
        closed,
        [a for a in attempts if (a.stage, a.attempt) != (record.stage, record.attempt)],
        _proven(run, closed, allocation),
    )
    for name, fault in faults.items():
        if fault.evidence == "check":
            failed = _health(closed, run, name).of("fail")
            faults[name] = fault._replace(checks=tuple(finding.check for finding in failed))
    return faults


def _health(record: AttemptRecord, run: RunDir, node: str) -> NodeHealth:
    return NodeHealth.find(record.files(run).health(node)) or NodeHealth(node=node)


def slow_nodes(run: RunDir, record: AttemptRecord) -> NodeFaults:
    """Return the nodes to exclude because a rank there has been slow for long."""
    now = time.time()
    slow = read_slow_ranks(run, record) or () if record.job_id else ()
    return {
        rank.node: NodeFault("slow", rank.text(now)) for rank in slow if now - rank.since > SLOW_S
    }


def _proven(
    run: RunDir, closed: AttemptRecord, allocation: SlurmAllocation
) -> dict[str, NodeEvidence]:
    """Return the evidence against the blamed nodes of an attempt that is about the node itself."""
    broken = {f.node for f in failure_records(run, closed) if device_fault(f)}
    reported = node_records(run, closed, closed.blamed_nodes)
    failed = failed_nodes(allocation) or ()
    proven: dict[str, NodeEvidence] = {}
    unreported = []
    for name in closed.blamed_nodes:
        lines = lines_about(closed.evidence, name)
        if name in broken or any(matches(line, "device") for line in lines):
            proven[name] = "hardware"
        elif name in failed:
            proven[name] = "slurm"
        elif any(finding.check != "answer" for finding in _health(closed, run, name).of("fail")):
            proven[name] = "check"
        elif name in allocation.all_nodes[1:] and not reported_all(reported.get(name)):
            unreported.append(name)
    unresponsive = _unresponsive(allocation, unreported)
    for name in unreported:
        if name in unresponsive:
            proven[name] = "no_answer"
        else:
            log.info("not excluded: %s: healthy in Slurm, and it responds, or no node does", name)
    return proven


def _unresponsive(allocation: SlurmAllocation, names: Names) -> set[str]:
    """Return the nodes of a job on which srun starts no process."""
    if not names:
        return set()
    # srun may fail everywhere: no answer is evidence only if this node gets one.
    probed = [allocation.all_nodes[0], *names]
    from concurrent.futures import ThreadPoolExecutor

    def responds(name: str) -> bool:
        return allocation.client.responds(allocation.job_id, name)

    with ThreadPoolExecutor(16) as pool:
        here, *answers = pool.map(responds, probed)
    return {name for name, answer in zip(names, answers, strict=True) if here and not answer}


def exclude_failed(run: RunDir, failing: NodeFaults, cluster: str = "") -> list[ExcludedNode]:
    """Record the failed nodes of an attempt; returns the records.

    With the name of the Slurm `cluster`, other runs exclude them too, unless this is a drill.
    """
    longest = load(run.config).recipe.slurm.exclude_hours
    now = next_time(root_of(run))
    record = recorded_excluded_nodes(run)
    before = {node.node: node for node in record.nodes}
    new, site = [], []
    for name, fault in failing.items():
        count = 1 + (before.pop(name).exclusions if name in before else 0)
        run_hours, site_hours = exclusion_hours(fault.evidence, count, longest)
        fields = fault._asdict() | {"node": name, "since": now, "cluster": cluster}
        new.append(ExcludedNode(**fields, exclusions=count, until=now + run_hours * HOUR_S))
        site.append(
            SiteNodeRecord(**fields, kind="excluded", run=run.name, until=now + site_hours * HOUR_S)
        )
    record.model_copy(update={"nodes": (*before.values(), *new)}).save(run.excluded)
    if cluster and longest and not run.drill.exists():
        for node in site:
            try:
                add_record(root_of(run), node, str(run.path))
            except StorageError as error:
                log.warning("%s is excluded for this run only: %s", node.node, error)
    return new


def drain(client: SlurmClient, nodes: Sequence[ExcludedNode]) -> None:
    for node in nodes:
        if node.evidence != "hardware":
            continue
        try:
            client.drain(node.node, f"slurmllm: {node.reason}"[:200])
            log.info("%s is drained: %s", node.node, node.reason)
        except SlurmError as error:
            log.warning("%s is not drained (slurm.drain): %s", node.node, error)


def include(run: RunDir, client: SlurmClient, names: Names) -> list[str]:
    """End the exclusion of nodes, in the run's pending jobs too; returns those jobs.

    Raises a UserError if the run does not exclude a node.
    """
    record = recorded_excluded_nodes(run)
    config = load(run.config)
    recipe = config.recipe.slurm.exclude
    recipe_nodes = client.hostnames(recipe) if recipe else []
    last = last_submission(run)
    lists = excluded_by_jobs(client, last.own_jobs if last is not None else ())
    excluding = {*excluded_names(client, run, config)}.union(*lists.values())
    for name in names:
        if name in recipe_nodes:
            raise UserError(f"{name} is excluded by slurm.exclude {recipe}, which `resume` changes")
        if name not in excluding:
            listed = ", ".join(sorted(excluding)) or "none"
            raise UserError(f"{run.name} does not exclude {name}; excluded nodes: {listed}")
    ExcludedNodes(
        nodes=tuple(node for node in record.nodes if node.node not in names),
        included={**record.included, **dict.fromkeys(names, next_time(root_of(run)))},
    ).save(run.excluded)
    changed = [job for job, nodes in lists.items() if {*names} & {*nodes}]
    for job in changed:
        try:
            client.exclude(job, [name for name in lists[job] if name not in names])
        except SlurmError as error:
            if "no longer pending" not in str(error):  # it has started meanwhile
                raise
    return changed


def excluded_by_jobs(client: SlurmClient, jobs: Names) -> dict[str, list[str]]:
    """Return the nodes that each pending job excludes, those of the recipe included."""
    lists = {
        job.job_id: job.excluded
        for job in client.queue(jobs).values()
        if job.state == "PENDING" and job.excluded
    }
    return {job: client.hostnames(nodes) for job, nodes in lists.items()}


def usable(state: str) -> bool:
    """Whether Slurm would start a job on a node in this state (sinfo's long form)."""
    return not any(fault in state for fault in _UNUSABLE)


def slurm_failed(allocation: SlurmAllocation, states: Mapping[str, str]) -> list[str]:
    """Return the nodes whose state, in sinfo's long form, is evidence against them.

    `*` and `unknown` do not count while most nodes have them, as after a restart of slurmctld, nor
    for a node of this job on which srun starts a process.
    """
    # A node that is drained, rebooted or powered down (`powering_down`) has not failed.
    failed = [name for name, state in states.items() if re.match(r"down|fail|error", state)]
    not_responding = [
        name
        for name, state in states.items()
        if name not in failed and re.match(r"unknown|.*\*$", state)
    ]
    of_job = [name for name in not_responding if name in allocation.all_nodes]
    if 2 * len(not_responding) < len(states):
        failed += [name for name in not_responding if name not in of_job]
    return [*failed, *_unresponsive(allocation, of_job)]


def failed_nodes(allocation: Allocation) -> list[str] | None:
    """Return the nodes that Slurm counts as failed: none if it is silent; None without Slurm."""
    if not isinstance(allocation, SlurmAllocation):
        return None
    try:
        states = retry_unreachable(allocation.client.node_states, POLL_S)  # nothing is recorded yet
    except SlurmError as error:
        log.warning("the states of the nodes are unknown: %s", error)
        return []
    return slurm_failed(allocation, states)


def nodes_to_avoid(
    client: SlurmClient,
    script: str,
    lost_nodes: Names,
    excluded_before: Names,
    job_id: str | None = None,
    held_nodes: Collection[str] = (),
) -> list[str]:
    """Return the nodes to exclude: those lost and excluded before, as many as the job can spare.

    If it cannot start without the lost nodes, none is excluded, after a wait until Slurm shows them
    as unusable or they respond. `job_id` is this process's job, and `held_nodes` are its nodes;
    without a job, no node is asked to respond.
    """
    candidates = list(dict.fromkeys([*lost_nodes, *excluded_before]))
    names = " ".join(lost_nodes)
    deadline = time.monotonic() + SLURM_NOTICE_S
    waits = False
    while True:
        for count in range(len(candidates), max(len(lost_nodes), 1) - 1, -1):
            if retry_unreachable(partial(client.can_start, script, candidates[:count])):
                return sorted(candidates[:count])
        if not lost_nodes or time.monotonic() > deadline:
            return []
        if not waits:
            log.info("no spare node for %s: waiting until Slurm notices the loss", names)
            waits = True
        states = retry_unreachable(client.node_states)
        # Slurm's messages are forwarded from node to node (TreeWidth), so that healthy nodes behind
        # a lost one show as not responding too (`allocated*`), until slurmctld's next ping.
        healthy = {*held_nodes} & {*states} - {*lost_nodes}
        is_temporary = any(_NOT_RESPONDING.match(states[name]) for name in healthy)
        if not is_temporary and not all(usable(states.get(name, "unknown")) for name in lost_nodes):
            return []
        if job_id is not None and all(client.responds(job_id, name) for name in lost_nodes):
            log.info("no spare node for %s, which responds: not excluded", names)
            return []
        time.sleep(POLL_S)


def requeue(client: SlurmClient, job_id: str) -> None:
    """Requeue this process's job; the caller must ignore the SIGTERM that comes with it.

    From then on Slurm accepts a new ExcNodeList or start time for it. Raises a SlurmError if Slurm
    refuses, or does not respond for some minutes.
    """
    try:
        retry_unreachable(lambda: client.requeue(job_id))
    except SlurmError as error:
        # The job is pending if Slurm noticed the dead node first and requeued it.
        if "pending" not in str(error):
            raise
        log.info("job %s: Slurm has already requeued it", job_id)


def delay(client: SlurmClient, job_id: str, seconds: float) -> None:
    """Delay the start of a pending job by some seconds."""
    if seconds:
        retry_unreachable(lambda: client.delay(job_id, seconds))
        log.info("job %s waits at least %.0f s", job_id, seconds)
