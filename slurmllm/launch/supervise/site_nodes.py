"""The site's memory of bad nodes: what excluded a node in one run counts for the next ones.

A node and a source of evidence (a run, a user, `health`) have a file of their own in `.nodes`
beside the runs, written whole: no writer loses another's record, and none needs a lock. A record is
an exclusion or the end of earlier ones. All records of this cluster together give the excluded
nodes (`in_effect`), of which new jobs avoid a share of their partition at most (`within_share`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    NodeHealth,
    SiteNodeRecord,
)
from slurmllm.core.run.rundir import RunDir, node_records, read_all, storage_errors
from slurmllm.core.run.safe_files import read_limited, user_name
from slurmllm.core.slurm.client import PartitionNode, SlurmClient

# Of a partition's nodes, but one of two: more suspicions at a time are rather of what the nodes
# share (switch, file system, profile), and false records must not empty a partition.
MAX_SHARE = 0.25
LONGEST_S = 720 * 3600.0  # 30 days: no record counts for ever
MAX_RECORDS = 4096
MAX_RECORD_BYTES = 1 << 16
MAX_SKEW_S = 600.0  # of clocks: a later record would end, or outlive, all others
# The checks that look at what `hardware` evidence is about.
DEVICE_CHECKS = ("devices", "device errors")
_STRENGTH: Sequence[str | None] = (*get_args(NodeEvidence), None)

log = logging.getLogger(__name__)


def read_records(root: Path) -> list[SiteNodeRecord]:
    """Read the records of a runs folder, with their owners; those unreadable are left out."""
    paths = sorted(node_records(root).glob("[!.]*.json"))[:MAX_RECORDS]
    records = read_all(_read, paths)
    if count := records.count(None):
        log.warning("%d unreadable records, such as %s", count, paths[records.index(None)])
    return [r for r in records if r is not None and r.since < time.time() + MAX_SKEW_S]


def _read(path: Path) -> SiteNodeRecord | None:
    with suppress(OSError, ValueError):
        content = read_limited(path, MAX_RECORD_BYTES)
        record = SiteNodeRecord.model_validate_json(content)
        user, until = user_name(path.lstat().st_uid), min(record.until, record.since + LONGEST_S)
        return record.model_copy(update={"user": user, "until": until})
    return None


def next_time(root: Path) -> float:
    """Return the time of a new record, after those there: clocks of machines differ."""
    return max([time.time(), *(record.since + 1e-3 for record in read_records(root))])


def add_record(root: Path, record: SiteNodeRecord, source: str) -> None:
    """Write a record in place of an equal one of this user and source; raises StorageError.

    One with other evidence stays: a weaker suspicion must not end a stronger one.
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
    """Whether a later record ends an exclusion: a user's, or checks that looked at its cause.

    That a node answers and passes is all that the weaker kinds of evidence question; no check
    knows what a user knows, or how fast the node trains.
    """
    required = {*(DEVICE_CHECKS if exclusion.evidence == "hardware" else exclusion.checks)}
    heals = exclusion.evidence not in ("user", "slow")
    return any(
        record.kind == "cleared"
        or (heals and record.kind == "healthy" and required <= {*record.checks})
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
    """Return those that a new job in a partition avoids: of its nodes, `MAX_SHARE` at most."""
    names = (partition or "").split(",")
    members = {n.name for n in nodes if (n.partition in names if partition else n.default)}
    limit = max(int(len(members) * MAX_SHARE), min(len(members) - 1, 1))
    return [record.node for record in records if record.node in members][:limit]


def site_exclusions(client: SlurmClient, config: RunConfig, root: Path, run: RunDir) -> list[str]:
    """Return the nodes that a run's next job avoids for the site's records, the strongest first.

    Without those that it includes. Empty if Slurm does not answer.
    """
    if not (records := read_records(root)):
        return []
    slurm = config.recipe.slurm
    partition = slurm.directives.train.get("partition") or slurm.partition
    partition = partition or config.cluster.partition
    included = (ExcludedNodes.find(run.excluded) or ExcludedNodes()).included
    try:
        effective = in_effect(
            [r for r in records if r.kind != "excluded" or included.get(r.node, 0.0) < r.since],
            client.cluster_name(),
        )
        return within_share(client.partition_nodes(), effective, partition)
    except SlurmError as error:
        log.warning("the site's excluded nodes are not avoided: %s", error)
        return []


def site_rows(root: Path, client: SlurmClient) -> list[Json]:
    """Return the excluded nodes of this cluster for JSON; `avoided`: by jobs of a partition."""
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
    root: Path, client: SlurmClient, lists: Sequence[str], reason: str = "", hours: float = 0.0
) -> list[SiteNodeRecord]:
    """Exclude nodes, such as `n[1-4]`, for some hours, or end that with 0; returns the records.

    Raises a UserError if one is not in slurm.conf or, to end it, is not excluded.
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
        kind = "nodes" if hours else "excluded nodes"
        listed = " ".join(sorted(candidates)) or "none"
        raise UserError(f"{' '.join(unknown)}: not of the cluster's {kind}: {listed}")
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
    root: Path, cluster: str, nodes: Mapping[str, NodeHealth]
) -> Iterator[tuple[SiteNodeRecord, bool]]:
    """Record the nodes that passed `health`; yields their exclusions and whether that ends them."""
    now = next_time(root)
    for record in in_effect(read_records(root), cluster):
        health = nodes.get(record.node)
        if health is None or health.checks_s is None or health.of("fail"):
            continue
        passed = tuple(sorted({finding.check for finding in health.of("ok")}))
        update = {"kind": "healthy", "checks": passed, "since": now, "run": None}
        end = record.model_copy(update=update)
        if ended := has_ended(record, [end]):
            # Of other checks, another file: this one ends what those did not look at.
            add_record(root, end, f"health {passed}")
        yield record, ended
