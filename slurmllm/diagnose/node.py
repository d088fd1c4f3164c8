"""What a node has besides devices: memory, a disk of its own, the shared file system."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.devices import device_findings, efa_findings
from slurmllm.diagnose.finding import GB, fail, ok, warn
from slurmllm.diagnose.probe import say
from slurmllm.diagnose.storage import NUM_WRITES, SHARED_TYPES, SLOW_WRITE_S, file_system
from slurmllm.errors import NodeError, SlurmllmError, StorageError
from slurmllm.records import HealthFinding
from slurmllm.rundir import write_atomic

VISIBLE_S = 3.0  # until a file that another node has just made must be seen


def memory_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[HealthFinding]:
    """The host's memory that is free or can be freed at once."""
    wanted = cluster.health.min_memory_gb
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    found = round(kib * 1024 / GB, 1)
    if found < wanted:
        words = f"{found} GB available, profile {cluster.name} says {wanted:g}"
        yield fail("memory", found, wanted, words)
    else:
        yield ok("memory", found, wanted or "")


def node_local_findings(cluster: Cluster) -> Iterator[HealthFinding]:
    """The node's own disk: there, writable, not shared, with room.

    Raises:
        OSError: it cannot be written to.
    """
    folder, wanted = Path(cluster.node_local), cluster.health.min_node_local_gb
    if not folder.is_dir():
        words = f"{folder} is not there; is the disk mounted? (cluster.node_local)"
        yield fail("node-local disk", "missing", str(folder), words)
        return
    with tempfile.NamedTemporaryFile(prefix=".slurmllm-health-", dir=folder) as probe:
        probe.write(b"x" * 4096)
        probe.flush()
        os.fsync(probe.fileno())
    free = round(shutil.disk_usage(folder).free / GB, 1)
    kind, _ = file_system(folder.resolve())
    if free < wanted:
        words = f"{free} GB free in {folder}, profile {cluster.name} says {wanted:g}"
        yield fail("node-local disk", free, wanted, words)
    elif kind in SHARED_TYPES:
        words = f"{folder} is on {kind}, which all nodes share; name a disk of the node's own"
        yield warn("node-local disk", free, wanted, words)
    else:
        yield ok("node-local disk", free, wanted or "")


def shared_findings(cluster: Cluster, token: Path, node: str) -> Iterator[HealthFinding]:
    """The folder of the run: the one that the others see, writable, quick enough.

    Args:
        cluster: The profile.
        token: A file that whoever asks has just made there.
        node: This node's name.

    Raises:
        NodeError: what was read back is not what was written.
        StorageError: the folder cannot be written to.
    """
    folder, limit = token.parent, cluster.health.max_write_s
    if not _seen(token):
        words = f"{token} is not seen here: {folder} is not the file system that the others share"
        yield fail("shared file system", "another", str(folder), words)
        return
    path = folder / f".health-{node}"
    try:
        seconds = round(statistics.median(_timed_write(path) for _ in range(NUM_WRITES)), 4)
    finally:
        path.unlink(missing_ok=True)
    words = f"a fsynced write to {folder} takes {seconds:.2f} s"
    if limit is not None and seconds > limit:
        said = f"{words}, profile {cluster.name} says {limit:g}"
        yield fail("shared file system", seconds, limit, said)
    elif seconds > SLOW_WRITE_S:
        yield warn("shared file system", seconds, limit or SLOW_WRITE_S, words)
    else:
        yield ok("shared file system", seconds, limit or "")


def _seen(token: Path) -> bool:
    deadline = time.monotonic() + VISIBLE_S
    while not token.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _timed_write(path: Path) -> float:
    """Seconds of one record's write: temporary name, fsync, rename, fsync of the folder."""
    text = f"{time.time_ns()} " * 100
    start = time.monotonic()
    write_atomic(path, text)
    seconds = time.monotonic() - start
    try:
        read = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot read {path} back: {error.strerror or error}") from error
    if read != text:
        raise NodeError(f"{path} read back is not what was written")
    return seconds


def check_node(node: str, cluster: Cluster, backend: str, token: Path) -> None:
    """Make all checks and say what they found.

    The shared file system comes last: a process that waits for a dead one can no longer be ended.

    Args:
        node: This node's name.
        cluster: What it should have.
        backend: Whose versions to report.
        token: A file in the shared folder.
    """
    started = time.monotonic()
    say(node)  # the clock, before anything has taken time
    for finding in node_findings(node, cluster, token):
        say(node, finding=finding)
    for version in load_environment(backend).node_versions().items():
        say(node, version=version)
    say(node, took_s=time.monotonic() - started)


def node_findings(node: str, cluster: Cluster, token: Path) -> Iterator[HealthFinding]:
    """What each check finds; one that cannot be made fails."""
    yield from _made("devices", lambda: device_findings(cluster))
    yield from _made("EFA", lambda: efa_findings(cluster))
    yield from _made("memory", lambda: memory_findings(cluster))
    yield from _made("node-local disk", lambda: node_local_findings(cluster))
    yield from _made("shared file system", lambda: shared_findings(cluster, token, node))


def _made(check: str, make: Callable[[], Iterator[HealthFinding]]) -> Iterator[HealthFinding]:
    try:
        yield from make()
    except SlurmllmError as error:
        yield fail(check, "unusable", "", str(error).splitlines()[0])
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        yield fail(check, "unusable", "", f"{place}{error.strerror or error}")
