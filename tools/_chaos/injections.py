"""The failures: each is injected into the cluster or a process of the run, and later undone."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

from _chaos.bench import Bench
from _chaos.plan import Failure
from _chaos.watching import RunFiles
from slurmllm.drill.injector import find_processes, kill
from slurmllm.rundir import RunDir

Undo = Callable[[], "subprocess.Popen[bytes] | None"]


class Impossible(Exception):
    """A failure that cannot happen now, such as the death of a dead node."""


def inject(bench: Bench, files: RunFiles, job: str, failure: Failure) -> tuple[str, Undo | None]:
    """Inject a failure.

    Returns:
        What it hit, and the function that undoes it.

    Raises:
        Impossible: its target does not run.
    """
    kind = failure.kind
    if kind in ("worker_killed", "hang"):
        rank, pid = _worker(bench, files, failure.victim)
        kill([pid], signal.SIGKILL if kind == "worker_killed" else signal.SIGSTOP)
        return f"rank {rank}", None
    if kind == "time_limit":
        if bench.slurm("scancel", "--signal=USR1", "--batch", job) is None:
            raise Impossible("the job does not run")
        return f"job {job}", None
    if kind == "slurmctld_restart":
        bench.cluster.stop_controller(signal.SIGKILL if failure.hard else signal.SIGTERM)
        return "slurmctld", lambda: bench.tool_beside("restart", "--start")
    if kind == "read_only":
        bench.cluster.shared().read_only(bench.cluster.inits())
        return "shared directory", lambda: _writable(bench)
    if kind == "disk_full":
        bench.cluster.shared().fill()
        return "shared directory", lambda: _free(bench)
    node = _node(bench, files, failure)
    if kind == "node_frozen":
        bench.cluster.freeze(node)
        return node, lambda: bench.tool_beside("heal", node, "--thaw")
    if kind == "slurmd_dies":
        bench.cluster.stop_slurmd(node)
        return node, lambda: bench.tool_beside("heal", node)
    bench.cluster.power_off(node)
    return node, lambda: bench.tool_beside("heal", node)


def _writable(bench: Bench) -> None:
    bench.cluster.shared().writable(bench.cluster.inits())


def _free(bench: Bench) -> None:
    bench.cluster.shared().free()


def _worker(bench: Bench, files: RunFiles, victim: float) -> tuple[int, int]:
    """A rank of the newest attempt, and its process id."""
    attempt = ("--attempt", str(files.attempt()))
    workers = sorted(
        (process.rank, process.pid)
        for process in find_processes(RunDir(files.path))
        if process.role == "worker"
        and process.rank is not None
        and attempt in zip(process.command, process.command[1:], strict=False)
    )
    if not workers:
        raise Impossible("no worker runs")
    return workers[int(victim * len(workers))]


def _node(bench: Bench, files: RunFiles, failure: Failure) -> str:
    """A node of the newest attempt that has not failed."""
    nodes: list[str] = files.record(files.attempt()).get("nodes", [])
    if failure.kind == "first_node_dies":
        nodes = nodes[:1]
    elif failure.kind in ("node_dies", "node_replaced"):
        nodes = nodes[1:]
    off = bench.cluster.directory.slurmd_off
    nodes = [n for n in nodes if bench.cluster.power(n) == "on" and not off(n).exists()]
    if not nodes:
        raise Impossible("its node has failed already")
    return nodes[int(failure.victim * len(nodes))]
