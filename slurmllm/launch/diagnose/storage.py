"""Checks of file systems: local and shared disk of a node, the runs folder on the login node."""

from __future__ import annotations

import os
import shutil
import stat
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from slurmllm.core.config.cluster import GIB, Cluster
from slurmllm.core.config.recipe import MUON
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.format import format_names
from slurmllm.core.run.rundir import is_run, storage_errors, write_atomic
from slurmllm.core.run.safe_files import os_error_text, replaceable_error, untrusted_error
from slurmllm.core.slurm.client import wait_for
from slurmllm.launch.diagnose import Findings, fail, judge, ok, skipped, unfit, warn
from slurmllm.plan.parameters import parameter_counts
from slurmllm.plan.step import formats

GB = 10**9
# File systems that other machines mount too (the types of /proc/mounts).
SHARED_TYPES = {"9p", "afs", "ceph", "cifs", "nfs", "nfs4", "smb3", "virtiofs"}
SHARED_TYPES |= {"beegfs", "glusterfs", "gpfs", "lustre", "panfs", "pvfs2", "wekafs"}
SHARED_TYPES |= {f"fuse.{kind}" for kind in ("ceph", "glusterfs", "juicefs", "sshfs", "weka")}
MIN_FREE_BYTES = GIB
# Shared memory of NCCL and of data workers (NCCL's user guide, "Shared memory": --shm-size=1g).
SHM = Path("/dev/shm")  # noqa: S108
MIN_SHM_GB = 1.0
# Every attempt, checkpoint and node writes records with fsync, some of them while a save waits.
SLOW_WRITE_S = 0.25
NUM_WRITES = 5
CLOCK_TOLERANCE_S = 2.0
VISIBLE_S = 3.0  # until a file that another node has just created must be visible; NFS caches


def file_system(path: Path) -> tuple[str, str]:
    """Return type and mount point of the file system of an absolute path."""
    best = ("unknown", "/")
    for mount in psutil.disk_partitions(all=True):
        # >=: of two mounts at the same point, the later one is visible.
        if path.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= len(best[1]):
            best = (mount.fstype, mount.mountpoint)
    return best


def median_write_seconds(path: Path) -> float:
    """Return the median time of some writes, as `write_seconds`."""
    return statistics.median(write_seconds(path) for _ in range(NUM_WRITES))


def write_seconds(path: Path) -> float:
    """Time the write of one record (temporary name, fsync, rename, fsync of the folder), s.

    Raises a StorageError if it cannot be written or read, a NodeError if it is read differently.
    """
    record = f"{time.time_ns()} " * 100
    start = time.monotonic()
    write_atomic(path, record)
    seconds = time.monotonic() - start
    with storage_errors(f"cannot read {path} back"):
        content = path.read_text("utf-8")
    if content != record:
        raise NodeError(f"{path}: the content read back differs from what was written")
    return seconds


def node_local_findings(cluster: Cluster) -> Findings:
    """Check on a node that its disk exists, is not shared, can be written, and has space."""
    folder = Path(cluster.node_local)
    required = cluster.health.min_node_local_gb
    if not folder.is_dir():
        yield fail(
            "node-local disk",
            "missing",
            str(folder),
            f"{folder} does not exist; is the disk mounted? (cluster.node_local)",
        )
        return
    with tempfile.NamedTemporaryFile(prefix=".slurmllm-health-", dir=folder) as probe:
        probe.write(b"x" * 4096)
        probe.flush()
        os.fsync(probe.fileno())  # a full or failing disk may report the error only here
    free = round(shutil.disk_usage(folder).free / GB, 1)
    kind, _ = file_system(folder.resolve())
    if free < required:
        yield fail(
            "node-local disk",
            free,
            required,
            f"{free} GB free in {folder}; profile {cluster.name} requires {required:g}",
        )
    elif kind in SHARED_TYPES:
        yield warn(
            "node-local disk",
            free,
            required,
            f"{folder} is on {kind}, which all nodes share; choose a disk of the node's own",
        )
    elif risk := replaceable_error(folder, cluster.trusted_group):
        # The workers would refuse to make their caches there.
        yield fail("node-local disk", free, required, risk)
    else:
        yield ok("node-local disk", free, required or "")


def shm_findings() -> Findings:
    """Check free space in /dev/shm: too little fails if files fill it, and warns if it is small."""
    usage = shutil.disk_usage(SHM)
    free = round(usage.free / GB, 2)
    status = ok if free >= MIN_SHM_GB else fail if usage.used > usage.free else warn
    yield status(
        "shared memory",
        free,
        MIN_SHM_GB,
        f"{free} of {usage.total / GB:.2f} GB free in {SHM}; workers may need {MIN_SHM_GB:g}",
    )


def shared_findings(cluster: Cluster, marker: Path, node: str) -> Findings:
    """Check on a node that the folder of the run is the shared one and fast enough.

    The machine that started the checks has just created `marker` in the folder.
    """
    folder = marker.parent
    limit = cluster.health.max_write_s
    if not wait_for(marker.is_file, VISIBLE_S, 0.1):
        yield fail(
            "shared file system",
            "another",
            str(folder),
            f"{marker} is not visible: {folder} is not the shared file system here",
        )
        return
    path = folder / f".health-{node}"
    try:
        seconds = round(median_write_seconds(path), 4)
    finally:
        path.unlink(missing_ok=True)
    message = f"a fsynced write to {folder} takes {seconds:.2f} s"
    if limit is not None and seconds > limit:
        message += f"; profile {cluster.name} allows {limit:g}"
        yield fail("shared file system", seconds, limit, message)
    elif seconds > SLOW_WRITE_S:
        yield warn("shared file system", seconds, limit or SLOW_WRITE_S, message)
    elif risk := replaceable_error(folder, cluster.trusted_group):
        yield warn("shared file system", seconds, limit or "", risk)
    else:
        yield ok("shared file system", seconds, limit or "")


def checkpoints_bytes(config: RunConfig) -> int:
    """Return what the checkpoints of a run take: weights and moments, `keep` + 1 times."""
    recipe = config.recipe
    counts = parameter_counts(recipe.model, 1, 1, 0, 1)
    numbers = 3 * counts.total
    if recipe.optim.name == MUON:
        numbers -= counts.matrices
    return numbers * formats(config).stored * (recipe.checkpoint.keep + 1)


def storage_findings(
    runs: Path, cluster: Cluster, with_slurm: bool, run_bytes: int | None
) -> Findings:
    """Check on the login node the folder of all runs.

    `runs` need not exist yet; with Slurm, the nodes of the cluster must share it. `run_bytes` are
    those that a run's checkpoints will take.
    """
    # May be a file, whose use as a folder then fails below.
    existing = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmllm-doctor-", dir=existing) as folder:
            path = Path(folder) / "record.json"
            seconds = median_write_seconds(path)
            ahead_s = path.stat().st_mtime - time.time()
    except (OSError, SlurmllmError) as error:
        yield unfit(
            "runs folder",
            f"{runs}: {os_error_text(error)}",
            fix="another --runs-dir or $SLURMLLM_RUNS",
        )
        for check in ("file system", "free space", "fsynced write", "clock"):
            yield skipped(check, "the runs folder cannot be written")
    else:
        writable = _writable_runs(runs, cluster.trusted_group)
        state = str(runs)
        fix = ""
        if existing != runs:
            state += ", created by submit"
        if reason := replaceable_error(existing, cluster.trusted_group):
            state = reason
            fix = "use a folder that only you can write to, or others can replace your runs"
        elif writable:
            names = format_names([path.name for path in writable])
            state = f"others may write to {len(writable)} of your runs: {names}"
            mode = stat.S_IMODE(writable[0].stat().st_mode)
            fix = f"`chmod -R go-w {writable[0]}`, which has mode {mode:o}"
        yield judge("runs folder", state, fix)
        yield from _runs_folder_findings(existing, seconds, ahead_s, with_slurm, run_bytes)


def _writable_runs(runs: Path, group: str | None) -> list[Path]:
    """Return this user's runs whose folders others may write to."""
    writable = []
    paths = []
    with suppress(OSError):  # not there yet, or closed to this user: the other checks say so
        paths = sorted(runs.iterdir())
    for path in paths:
        with suppress(OSError):  # removed meanwhile
            users_run = is_run(path) and path.stat().st_uid == os.geteuid()
            if users_run and untrusted_error(path.stat(), group):
                writable.append(path)
    return writable


def _runs_folder_findings(
    folder: Path, write_s: float, ahead_s: float, with_slurm: bool, run_bytes: int | None
) -> Findings:
    kind, point = file_system(folder.resolve())
    state = f"{kind}, mounted at {point}"
    fix = ""
    if kind not in SHARED_TYPES and with_slurm:
        state += ": not a type that other machines share"
        fix = "choose a folder that all nodes share, with --runs-dir or $SLURMLLM_RUNS"
    yield judge("file system", state, fix)
    free = shutil.disk_usage(folder).free
    fix = ""
    if free < MIN_FREE_BYTES:
        fix = "free some; a full disk stops a run"
    elif run_bytes is not None and free < run_bytes:
        fix = f"checkpoint.keep + 1 checkpoints of the recipe take {run_bytes / GIB:,.1f} GiB"
    state = f"{free / GIB:,.1f} GiB free"
    if run_bytes is None:
        state += "; --recipe RECIPE compares it with a run's checkpoints"
    yield judge("free space", state, fix, fail if free < MIN_FREE_BYTES else warn)
    fix = "a faster file system; saves and records wait for it" if write_s > SLOW_WRITE_S else ""
    yield judge("fsynced write", f"{write_s * 1000:.1f} ms, median of {NUM_WRITES}", fix)
    state = f"within {CLOCK_TOLERANCE_S:.0f} s of the file server's"
    fix = ""
    if abs(ahead_s) > CLOCK_TOLERANCE_S:
        state = f"the file server's clock differs by {ahead_s:+.1f} s from this machine's"
        fix = "check the time service (chrony); records of several machines are compared by time"
    yield judge("clock", state, fix)
