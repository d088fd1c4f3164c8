"""The folder of all runs: writable, shared, large and quick enough; and the nodes' own disk."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slurmllm.config.cluster import GIB, Cluster
from slurmllm.diagnose.finding import (
    Finding,
    cluster_fail,
    finding_fail,
    finding_ok,
    finding_warn,
    skipped,
)
from slurmllm.errors import StorageError
from slurmllm.rundir import write_atomic

# File systems that other machines see too (the types of /proc/mounts).
SHARED_TYPES = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs",
        "fuse.sshfs", "fuse.weka", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "pvfs2",
        "smb3", "virtiofs", "wekafs",
    }
)  # fmt: skip
LITTLE_BYTES = 200 * GIB  # a checkpoint of neox_20b with its optimizer: 124 GB
TOO_LITTLE_BYTES = GIB
# Every attempt, checkpoint and node writes records in this way, some of them while a save waits.
SLOW_WRITE_S = 0.25
NUM_WRITES = 5
CLOCK_TOLERANCE_S = 2.0


def storage_findings(runs: Path, cluster: Cluster, with_slurm: bool) -> Iterator[Finding]:
    """Everything about the runs folder and the node-local one.

    Args:
        runs: The folder of all runs; it need not exist yet.
        cluster: The profile.
        with_slurm: Whether other machines are to read the runs.
    """
    place = _nearest(runs)
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmllm-doctor-", dir=place) as folder:
            probe = Path(folder)
            writes = [_timed_write(probe / f"record{n}.json") for n in range(NUM_WRITES)]
            ahead = (probe / f"record{NUM_WRITES - 1}.json").stat().st_mtime - time.time()
    except (OSError, StorageError) as error:
        words = getattr(error, "strerror", None) or str(error)
        yield finding_fail(
            "runs folder", f"{runs}: {words}", "another --runs-dir or $SLURMLLM_RUNS"
        )
        names = ("file system", "free space", "fsynced write", "clock")
        yield from (skipped(name, "the runs folder cannot be written") for name in names)
    else:
        yield finding_ok(
            "runs folder", f"{runs}" + ("" if place == runs else ", made by the first submit")
        )
        yield _shared(place, with_slurm)
        yield _space(place)
        yield _latency(statistics.median(writes))
        yield _clock(ahead)
    yield _node_local(cluster.node_local)


def file_system(path: Path, mounts: str | None = None) -> tuple[str, str]:
    """(type, mount point) of the file system that holds a path.

    Args:
        path: Absolute; it exists.
        mounts: The text of /proc/mounts, for tests.
    """
    text = Path("/proc/mounts").read_text(encoding="utf-8") if mounts is None else mounts
    best = ("unknown", "/")
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        # Of two mounts over each other the later one counts.
        if path.is_relative_to(point) and len(point) >= len(best[1]):
            best = (fields[2], point)
    return best


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest one above that is there; a file too, which then fails."""
    return next(place for place in (path, *path.parents) if place.exists())


def _timed_write(path: Path) -> float:
    """Seconds of one record's write: temporary name, fsync, rename, fsync of the folder."""
    start = time.monotonic()
    write_atomic(path, "{}" * 1024)
    return time.monotonic() - start


def _shared(place: Path, with_slurm: bool) -> Finding:
    kind, point = file_system(place.resolve())
    found = f"{kind}, mounted at {point}"
    if kind in SHARED_TYPES or not with_slurm:
        return finding_ok("file system", found)
    return finding_warn(
        "file system", f"{found}: other machines do not see this type of file system by themselves",
        "name a folder that all nodes share, with --runs-dir or $SLURMLLM_RUNS",
    )  # fmt: skip


def _space(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:,.1f} GiB free"
    if free < TOO_LITTLE_BYTES:
        return cluster_fail("free space", found, "free some; a full disk stops a run")
    if free < LITTLE_BYTES:
        return finding_warn("free space", found, "a checkpoint of neox_20b takes 115 GiB")
    return finding_ok("free space", found)


def _latency(seconds: float) -> Finding:
    found = f"{seconds * 1000:.1f} ms, median of {NUM_WRITES}"
    if seconds > SLOW_WRITE_S:
        return finding_warn(
            "fsynced write", found, "a faster file system; saves and records wait for it"
        )
    return finding_ok("fsynced write", found)


def _clock(ahead: float) -> Finding:
    """The file server's clock against this machine's: a file just written is as old as that."""
    if abs(ahead) > CLOCK_TOLERANCE_S:
        return finding_warn(
            "clock", f"the file server is {ahead:+.1f} s from this machine",
            "mend the time service (chrony); records of several machines are compared by time",
        )  # fmt: skip
    return finding_ok("clock", f"within {CLOCK_TOLERANCE_S:.0f} s of the file server's")


def _node_local(folder: str) -> Finding:
    """As far as it can be seen from here: the folder is meant to be on the nodes."""
    path = Path(folder)
    if not path.is_dir():
        return finding_ok(
            "node-local disk", f"{folder}; not on this machine, the nodes must have it"
        )
    kind, point = file_system(path.resolve())
    found = f"{folder}: {kind}, mounted at {point} here"
    if kind in SHARED_TYPES:
        return finding_warn(
            "node-local disk", found,
            "a folder on every node's own disk: --set cluster.node_local=/var/tmp",
        )  # fmt: skip
    if not os.access(path, os.W_OK):
        return finding_warn(
            "node-local disk", f"{found}, not writable for you", "cluster.node_local"
        )
    return finding_ok("node-local disk", found)
