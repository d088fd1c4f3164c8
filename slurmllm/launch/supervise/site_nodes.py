"""The site's excluded nodes: a node that one run excludes is excluded from other runs' new jobs.

Each node and source of evidence (a run, a user, `health`) has a file of its own in `.nodes` of the
runs folder, written whole: no writer loses another's record, and none needs a lock. A record is an
exclusion, or ends earlier ones. All records of this cluster together give the excluded nodes
(`in_effect`); new jobs avoid at most a share of their partition (`within_share`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import get_args

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmError, UserError
from slurmllm.core.format import Json
from slurmllm.core.run.records import (
    ExcludedNode,
    ExcludedNodes,
    NodeEvidence,
    NodeHealths,
    SiteNodeRecord,
)
from slurmllm.core.run.rundir import RunDir, node_records, read_all, storage_errors
from slurmllm.core.run.safe_files import read_limited, user_name
from slurmllm.core.slurm.client import Names, PartitionNode, SlurmClient

# Of a partition's nodes (of two or three, one): more faults at a time are likelier to be in what
# the nodes share (switch, file system, profile), and false records must not empty a partition.
MAX_SHARE = 0.25
LONGEST_S = 720 * 3600.0  # 30 days
MAX_RECORDS = 4096
MAX_RECORD_BYTES = 1 << 16
MAX_SKEW_S = 600.0  # of clocks: records of a later time are ignored
# The checks that can end an exclusion by `hardware` evidence.
DEVICE_CHECKS = ("devices", "device errors")
_STRENGTH: Sequence[str | None] = (*get_args(NodeEvidence), None)

log = logging.getLogger(__name__)


def read_records(root: Path) -> list[SiteNodeRecord]:
    """Read the records of a runs folder, with their owners; unreadable ones are left out."""
    paths = sorted(node_records(root).glob("[!.]*.json"))[:MAX_RECORDS]
    records = read_all(_read, paths)
    if count := records.count(None):
        log.warning("%d unreadable records, such as %s", count, paths[records.index(None)])
    return [r for r in records if r is not None and r.since < time.time() + MAX_SKEW_S]


def _read(path: Path) -> SiteNodeRecord | None:
    with suppress(OSError, ValueError):
        record = SiteNodeRecord.model_validate_json(read_limited(path, MAX_RECORD_BYTES))
        user, until = user_name(path.lstat().st_uid), min(record.until, record.since + LONGEST_S)
        return record.model_copy(update={"user": user, "until": until})
    return None


def next_time(root: Path) -> float:
    """Return the time of a new record, later than all others: clocks of machines differ."""
    return max([time.time(), *(record.since + 1e-3 for record in read_records(root))])


def add_record(root: Path, record: SiteNodeRecord, source: str) -> None:
    """Write a record; it replaces an equal one of this user and source. Raises StorageError.

    A record with other evidence stays: a weaker suspicion must not replace a stronger one.
    """
    folder = node_records(root)
    with storage_errors(f"cannot make {folder}"), suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(stat.S_IMODE(root.stat().st_mode))  # who may make runs may record nodes
    key = f"{record.kind} {record.evidence} {record.cluster} {os.geteuid()} {source}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    record.save(folder / f"{record.node}.{digest}.json")
    for path in folder.glob("*.json"):
        with suppress(OSError):  # another user's
            if path.lstat().st_mtime < time.time() - LONGEST_S:
                path.unlink()


def has_ended(exclusion: ExcludedNode, records: Iterable[SiteNodeRecord]) -> bool:
    """Whether a later record ends an exclusion: a user's, or a passed `health`.

    After `hardware` or `check`, it must include the checks concerned. No check can end what a user
    recorded, or `slow`, which only training shows.
    """
    required = {*(DEVICE_CHECKS if exclusion.evidence == "hardware" else exclusion.checks)}
    by_health = exclusion.evidence not in ("user", "slow")
    return any(
        record.kind == "cleared"
        or (by_health and record.kind == "healthy" and required <= {*record.checks})
        for record in records
        if record.node == exclusion.node and record.since > exclusion.since
        if exclusion.cluster in ("", record.cluster)
    )


def in_effect(records: Sequence[SiteNodeRecord], cluster: str) -> list[SiteNodeRecord]:
    """Return an exclusion for each excluded node of a cluster, the strongest and latest first."""
    strongest: dict[str, SiteNodeRecord] = {}
    for record in sorted(records, key=lambda r: (_STRENGTH.index(r.evidence), -r.since)):
        applies = record.cluster == cluster and record.until > time.time()
        if record.kind == "excluded" and applies and not has_ended(record, records):
            strongest.setdefault(record.node, record)
    return [*strongest.values()]


def within_share(
    nodes: Sequence[PartitionNode], records: Sequence[SiteNodeRecord], partition: str | None
) -> list[str]:
    """Return the nodes that a new job avoids: at most `MAX_SHARE` of its partition."""
    names = (partition or "").split(",")
    members = {n.name for n in nodes if (n.partition in names if partition else n.default)}
    limit = max(int(len(members) * MAX_SHARE), min(len(members) - 1, 1))
    return [record.node for record in records if record.node in members][:limit]


def recorded_excluded_nodes(run: RunDir) -> ExcludedNodes:
    return ExcludedNodes.find(run.excluded) or ExcludedNodes()


def site_exclusions(client: SlurmClient, config: RunConfig, root: Path, run: RunDir) -> list[str]:
    """Return the nodes that the site excludes from a run's next job, strongest evidence first.

    Nodes that the run includes are left out. Empty if Slurm does not respond.
    """
    if not (records := read_records(root)):
        return []
    slurm = config.recipe.slurm
    partition = str(
        slurm.directives.train.get("partition") or slurm.partition or config.cluster.partition or ""
    )
    included = recorded_excluded_nodes(run).included
    try:
        effective = in_effect(
            [r for r in records if r.kind != "excluded" or included.get(r.node, 0.0) < r.since],
            client.cluster_name(),
        )
        return within_share(client.partition_nodes(), effective, partition)
    except SlurmError as error:
        log.warning("ignoring the site's excluded nodes: %s", error)
        return []


def site_rows(root: Path, client: SlurmClient) -> list[Json]:
    """Return the excluded nodes of this cluster for JSON; `avoided`: by new jobs of a partition."""
    if not (records := read_records(root)):
        return []
    effective = in_effect(records, client.cluster_name())
    nodes = client.partition_nodes()
    shares = (within_share(nodes, effective, name) for name in {n.partition for n in nodes})
    avoided = {*chain.from_iterable(shares)}
    return [
        {**record.model_dump(exclude={"kind", "exclusions"}), "avoided": record.node in avoided}
        for record in effective
    ]


def change_by_user(
    root: Path, client: SlurmClient, lists: Names, reason: str = "", hours: float = 0.0
) -> list[SiteNodeRecord]:
    """Exclude nodes, such as `n[1-4]`, for some hours; 0 ends their exclusion. Returns the records.

    Raises a UserError if a node is not in slurm.conf or, to end an exclusion, not excluded.
    """
    cluster = client.cluster_name()
    if not any(lists):
        raise UserError("no node is named")
    names = client.hostnames(",".join(lists))
    candidates = (
        {*client.node_states()}
        if hours
        else {r.node for r in in_effect(read_records(root), cluster)}
    )
    if unknown := [name for name in names if name not in candidates]:
        kind = "nodes of the cluster" if hours else "excluded nodes"
        listed = " ".join(sorted(candidates)) or "none"
        raise UserError(f"{' '.join(unknown)} is not among the {kind}: {listed}")
    now = next_time(root)
    records = [
        SiteNodeRecord(
            node=name,
            kind="excluded" if hours else "cleared",
            evidence="user",
            reason=reason,
            since=now,
            until=now + hours * 3600.0,
            cluster=cluster,
        )
        for name in names
    ]
    for record in records:
        add_record(root, record, "user")
    return records


def end_by_health(
    root: Path, cluster: str, nodes: NodeHealths
) -> Iterator[tuple[SiteNodeRecord, bool]]:
    """Record which excluded nodes passed `health`; yields each exclusion and whether it ended."""
    now = next_time(root)
    for record in in_effect(read_records(root), cluster):
        health = nodes.get(record.node)
        if health is None or health.checks_s is None or health.of("fail"):
            continue
        passed = tuple(sorted({finding.check for finding in health.of("ok")}))
        update = {"kind": "healthy", "checks": passed, "since": now, "run": None}
        end = record.model_copy(update=update)
        if ended := has_ended(record, [end]):
            # A file for each set of checks: a record of other checks must not replace this one.
            add_record(root, end, f"health {passed}")
        yield record, ended
