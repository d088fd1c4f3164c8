"""Before an attempt's launchers: every node checks itself, and gets the graphs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import AttemptRecord, EndingClass, Finding, NodeHealths, PhaseSeconds
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.slurm.error_texts import StopCheck
from slurmllm.core.slurm.setup import Variables
from slurmllm.launch.diagnose.bandwidth import with_bandwidth
from slurmllm.launch.diagnose.probe import LaunchError, check_nodes
from slurmllm.launch.graphs.archive import load_manifest, require_complete
from slurmllm.launch.supervise.allocation import SLURMLLM, Allocation
from slurmllm.launch.supervise.classify import Ending, launch_ending
from slurmllm.train.backends.environment import (
    BROADCAST,
    broadcast_path,
    make_cache_folder,
    node_local_cache,
    requires_graphs,
)

SHARED = "shared file system"
MANY_NODES = 4
_OF_PEERS = {"answer", "clock", "all-reduce"}  # which one bad node, or the network, fails for all

log = logging.getLogger(__name__)


@dataclass
class Preparation:
    """Checks of an allocation's nodes, and what is copied to them once for all attempts there."""

    run: RunDir
    stage: Stage
    config: RunConfig
    allocation: Allocation
    stop: StopCheck
    failed_nodes: set[str] = field(default_factory=set)  # of this job
    _diagnosed: bool = False  # whether an earlier attempt of this job ran the DCGM diagnostic
    _sent_graphs: str = ""  # checksum of the graphs' archive that all nodes have

    def prepare(self, record: AttemptRecord, phases: PhaseSeconds) -> Ending | None:
        """Check the nodes and send the graphs to them, at the same time.

        Returns the ending if a node fails its checks, which also ends the copying. The phase
        `cache` is what the copying takes longer than the checks.
        """
        ended = threading.Event()

        def stop() -> bool:
            return ended.is_set() or self.stop()

        # What the all-reduce reaches must not depend on a broadcast.
        checks_first = self.config.cluster.health.bandwidth == "always"
        ending = self._check(record, phases) if checks_first else None
        if ending is not None:
            return ending
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as pool:
            try:
                graphs = pool.submit(self._broadcast_graphs, stop)
                if not checks_first:
                    ending = self._check(record, phases)
                started = time.monotonic()
                if ending is None:
                    os.environ.update(graphs.result())
                    phases["cache"] = time.monotonic() - started
            finally:
                ended.set()
        return ending

    def _check(self, record: AttemptRecord, phases: PhaseSeconds) -> Ending | None:
        if not self.config.cluster.health.enabled:
            return None
        started = time.monotonic()
        config = self.config
        if config.cluster.health.dcgm == "health" or self._diagnosed:
            # Once in a job: a restart must not wait for the diagnostic again.
            health = config.cluster.health.model_copy(update={"dcgm": "never"})
            config = replace(config, cluster=config.cluster.model_copy(update={"health": health}))
        self._diagnosed = True
        ending = preflight(self.run, record, config, self.allocation, self.stop)
        phases["preflight"] = time.monotonic() - started
        return ending

    def _broadcast_graphs(self, stop: StopCheck) -> Variables:
        """Copy the archive to every node's own disk; returns the launchers' variables."""
        run = self.run
        # The launchers of --local share the folder, and start at once.
        make_cache_folder(self.config, run)
        if self.stage == "precompile":
            return {}
        started = time.monotonic()
        if not run.graphs_manifest.is_file():
            if not requires_graphs(self.config):
                return {}
            raise StorageError(
                f"{run.graphs_manifest} is missing: the precompile stage did not finish; "
                f"see {run.stage_log('precompile')}, then `slurmllm resume {run.name}`"
            )
        manifest = load_manifest(run, self.config.cluster.trusted_group)
        require_complete(manifest, run, self.config.recipe.train.incomplete_graphs)
        if manifest.rejected or manifest.archive_sha256 == self._sent_graphs:
            return {}  # in this job, to the spare nodes too
        if self.failed_nodes:
            return {BROADCAST: ""}  # sbcast would wait for them; the nodes read the shared archive
        target = broadcast_path(Path(node_local_cache(self.config, run)))
        archive = run.graphs_archive(manifest.archive)
        fault = self.allocation.broadcast(archive, target, stop)
        seconds = time.monotonic() - started
        if fault is None:
            self._sent_graphs = manifest.archive_sha256
            log.info("graph cache: %d graphs to all nodes in %.1f s", manifest.graphs, seconds)
        elif not stop():
            log.warning("sbcast: %s; the nodes read %s", fault, archive)
        return {BROADCAST: str(target)}


def preflight(
    run: RunDir,
    record: AttemptRecord,
    config: RunConfig,
    allocation: Allocation,
    stop: StopCheck,
) -> Ending | None:
    """Check the nodes of an attempt and record the findings; returns the ending if one fails.

    Raises a StorageError if the run directory is not writable from here, a SlurmError without srun.
    """
    try:
        nodes = check_nodes(allocation, config, run.path, SLURMLLM, stop)
    except LaunchError as error:
        return launch_ending(error.failure, record.nodes)
    if nodes is not None and config.cluster.health.bandwidth == "always":
        nodes = with_bandwidth(nodes, allocation, config, SLURMLLM, stop)
    if nodes is None or stop():  # interrupted checks are incomplete: ignore them
        return None
    paths = record.files(run)
    with ThreadPoolExecutor(16) as pool:  # a write waits for the file system's fsync
        list(pool.map(lambda health: health.save(paths.health(health.node)), nodes.values()))
    for name, health in nodes.items():
        for finding in health.of("warn"):
            log.warning("preflight: warning: %s: %s", name, finding.message)
    partition = os.environ.get("SLURM_JOB_PARTITION") or config.cluster.partition
    return preflight_ending(nodes, config.cluster.name, partition or "this machine")


def preflight_ending(nodes: NodeHealths, profile: str, partition: str) -> Ending | None:
    """Return the ending if a node failed its checks.

    A check that fails on all of several nodes, or on all but one of many, is a fault of profile or
    partition, as is a missing tool in a job of one node: no node is blamed.
    The shared file system is never a node's fault if all nodes fail with it.
    """
    failures = [(name, f) for name, health in nodes.items() for f in health.of("fail")]
    if not failures:
        return None
    counts = Counter(finding.check for _, finding in failures)
    common = {}  # check → evidence
    for name, finding in failures:
        count = counts[finding.check]
        if _is_common(finding, count, len(nodes)):
            share = f"{count} of {len(nodes)}" if count < len(nodes) else "all"
            names = f"{share} nodes" if len(nodes) > 1 else name
            common[finding.check] = f"preflight: {names}: {finding.message}"
    if SHARED in common:
        return Ending("storage_failure", (common[SHARED],), started=False)
    of_nodes = [(name, finding) for name, finding in failures if finding.check not in common]
    blamed = tuple(dict.fromkeys(name for name, _ in of_nodes))
    evidence = [*common.values()]
    ending: EndingClass = "node_failure"
    if common.keys() - _OF_PEERS:
        ending = "bad_configuration"
        evidence.append(
            f"{'no' if nodes.keys() == dict(failures).keys() else 'only one'} node of the job, in "
            f"partition {partition}, has what profile {profile} requires: `slurmllm resume` with "
            "another --partition or --cluster, or correct the profile"
        )
    evidence += [f"preflight: {name}: {finding.message}" for name, finding in of_nodes]
    if any(finding.blame == "user" and finding.check == "answer" for _, finding in failures):
        ending = "bad_configuration"
        blamed = ()
    return Ending(ending, tuple(evidence), blamed, started=False)


def _is_common(failure: Finding, count: int, num_nodes: int) -> bool:
    """Whether a check failed on all nodes, or on all but one of many, by a cause that they share.

    Three faulty nodes at once are less likely. But the connection to several nodes may be lost.
    """
    if num_nodes == 1:
        return failure.check == SHARED or "neither on $PATH" in failure.message
    many = failure.check not in _OF_PEERS and num_nodes >= MANY_NODES
    return count >= num_nodes - many
