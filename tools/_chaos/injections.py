"""The failures: each is injected into the cluster or a process of the run, and later undone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from _devcluster.cluster import Cluster
from _devcluster.errors import Fault
from _devcluster.processes import program, same_namespace

from _chaos.bench import Bench
from _chaos.plan import Failure
from _chaos.watching import RunFiles
from slurmllm.analysis.drill.injector import RunProcess, find_processes, kill

Undo = Callable[[], "subprocess.Popen[bytes] | None"]
CLOCK_JUMP_S = 3600
LEFT_BYTES, HOG_BYTES = 8 << 20, 64 << 20
# A neighbour's job that takes the memory; the kernel ends the largest process, and spares it.
HOG = """\
import sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1], "w").write("0")
memory = b"x" * int(sys.argv[2])
time.sleep(float(sys.argv[3]))
"""


class Impossible(Exception):
    """A failure that cannot happen now, such as the death of a dead node."""


class Unsupported(Impossible):
    """A failure that this machine cannot have."""


class Target(NamedTuple):
    """The run in which a failure is to happen."""

    bench: Bench
    files: RunFiles
    job: str
    failure: Failure

    def processes(self, role: str) -> list[RunProcess]:
        """The processes of a role in the newest attempt, by rank."""
        attempt = ("--attempt", str(self.files.attempt()))
        processes = [
            process
            for process in find_processes(self.files.run)
            if process.role == role and (role != "worker" or process.rank is not None)
        ]
        if role != "supervise":
            processes = [p for p in processes if attempt in pairwise(p.command)]
        if not processes:
            raise Impossible(f"no process of the role {role} runs")
        return sorted(processes, key=lambda process: (process.rank or 0, process.pid))

    def process(self, role: str) -> RunProcess:
        """One of them, as the plan has it."""
        processes = self.processes(role)
        return processes[int(self.failure.victim * len(processes))]

    def node(self) -> str:
        """A node of the newest attempt that has not failed."""
        nodes: list[str] = self.files.record(self.files.attempt()).get("nodes", [])
        if self.failure.kind == "first_node_dies":
            nodes = nodes[:1]
        elif self.failure.kind in ("node_dies", "node_replaced", "memory_short"):
            nodes = nodes[1:]
        off = self.bench.cluster.directory.slurmd_off
        nodes = [n for n in nodes if self.bench.cluster.power(n) == "on" and not off(n).exists()]
        if not nodes:
            raise Impossible("its node has failed already")
        return nodes[int(self.failure.victim * len(nodes))]


Injection = Callable[[Target], tuple[str, Undo | None]]


def inject(bench: Bench, files: RunFiles, job: str, failure: Failure) -> tuple[str, Undo | None]:
    """Inject a failure; return its victim, and the function that undoes it.

    Raises Impossible if the target does not run, Unsupported if this machine cannot have it.
    """
    try:
        return INJECTIONS[failure.kind](Target(bench, files, job, failure))
    except Fault as why:
        # Of code 1, for instance: the disk is frozen already.
        raise (Unsupported if why.code == 2 else Impossible)(str(why)) from why


# -- processes


def _worker_signalled(number: signal.Signals) -> Injection:
    def send(target: Target) -> tuple[str, None]:
        worker = target.process("worker")
        kill([worker.pid], number)
        return f"rank {worker.rank}", None

    return send


def _role_stopped(role: str) -> Injection:
    def stop(target: Target) -> tuple[str, Undo | None]:
        process = target.process(role)
        name = role if process.rank is None else f"rank {process.rank}"
        return _stop(f"{name}, process {process.pid}", [process.pid])

    return stop


def _program_stopped(name: str) -> Injection:
    def stop(target: Target) -> tuple[str, Undo | None]:
        cluster, chosen = target.bench.cluster, target.node()
        # The run's only srun is the supervisor's, on the first node.
        nodes = target.files.record(target.files.attempt())["nodes"] if name == "srun" else [chosen]
        for node in nodes:
            pids = [pid for pid in same_namespace(cluster.init(node) or 0) if program(pid) == name]
            if name == "slurmstepd" and pids:  # of the batch script or of the step
                pids = [pids[int(target.failure.victim * 1000) % len(pids)]]
            if pids:
                return _stop(f"{name} on {node}", pids)
        raise Impossible(f"no {name} runs")

    return stop


def _stop(name: str, pids: list[int]) -> tuple[str, Undo | None]:
    kill(pids, signal.SIGSTOP)
    return name, lambda: kill(pids, signal.SIGCONT)


def _two_supervisors(target: Target) -> tuple[str, Undo | None]:
    """The supervisor's own command, once more, in its environment and on its node."""
    first = target.process("supervise")
    try:
        environ = Path(f"/proc/{first.pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise Impossible("the supervisor has ended") from error
    pairs = (os.fsdecode(variable).partition("=") for variable in environ if variable)
    within = ["nsenter", f"--target={first.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
    log = target.bench.root / "log" / "second_supervisor.log"
    with log.open("ab") as stream:
        subprocess.Popen(
            [*within, *first.command],
            env={name: value for name, _, value in pairs},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    return f"the node of process {first.pid}", None


# -- nodes


def _node_fails(fail: Callable[[Cluster, str], None], *healing: str) -> Injection:
    def inject(target: Target) -> tuple[str, Undo]:
        node = target.node()
        fail(target.bench.cluster, node)
        return node, lambda: target.bench.tool_beside("heal", node, *healing)

    return inject


def _network_bad(target: Target) -> tuple[str, Undo | None]:
    node, cluster = target.node(), target.bench.cluster
    delay_ms, loss_percent = (100, 10) if target.failure.hard else (20, 2)
    cluster.network().impair(node, cluster.init(node) or 0, delay_ms, loss_percent)
    restore = lambda: cluster.network().restore(node, cluster.init(node))  # noqa: E731
    return f"{node}: {delay_ms} ms, {loss_percent} % lost", restore


def _clock_jump(target: Target) -> tuple[str, Undo | None]:
    if shutil.which("cc") is None:
        raise Unsupported("there is no C compiler; on Debian: apt-get install gcc libc6-dev")
    node, cluster = target.node(), target.bench.cluster
    offset_s = CLOCK_JUMP_S if target.failure.hard else -CLOCK_JUMP_S
    cluster.set_clock(node, offset_s)
    return f"{node}: {offset_s:+d} s", lambda: cluster.set_clock(node, 0)


def _node_disk_frozen(target: Target) -> tuple[str, Undo | None]:
    node = target.node()
    disk = target.bench.cluster.node_disk(node)
    disk.freeze()
    return node, disk.thaw


def _memory_short(target: Target) -> tuple[str, Undo | None]:
    node, groups = target.node(), target.bench.cluster.groups()
    groups.limit_memory(node, LEFT_BYTES)
    arguments = [groups.path / node / "cgroup.procs", HOG_BYTES, target.failure.lasts_s]
    subprocess.Popen([sys.executable, "-c", HOG, *map(str, arguments)])
    return node, lambda: groups.limit_memory(node, None)


# -- Slurm and the shared directory


def _time_limit(target: Target) -> tuple[str, Undo | None]:
    if target.bench.slurm("scancel", "--signal=USR1", "--batch", target.job) is None:
        raise Impossible("the job does not run")
    return f"job {target.job}", None


def _slurmctld_restart(target: Target) -> tuple[str, Undo | None]:
    number = signal.SIGKILL if target.failure.hard else signal.SIGTERM
    target.bench.cluster.stop_daemon("slurmctld", number)
    return "slurmctld", lambda: target.bench.tool_beside("restart", "--start")


def _slurmdbd_away(target: Target) -> tuple[str, Undo | None]:
    target.bench.cluster.stop_daemon("slurmdbd", signal.SIGKILL)
    return "slurmdbd", lambda: target.bench.tool_beside("restart", "--start", "--database")


def _shared(state: str, undone: str) -> Injection:
    def change(target: Target) -> tuple[str, Undo]:
        changes = target.bench.cluster.shared_states()
        changes[state]()
        return "shared directory", changes[undone]

    return change


INJECTIONS: Mapping[str, Injection] = {
    "worker_killed": _worker_signalled(signal.SIGKILL),
    "node_dies": _node_fails(Cluster.power_off),
    "first_node_dies": _node_fails(Cluster.power_off),
    "node_replaced": _node_fails(Cluster.power_off),
    "node_frozen": _node_fails(Cluster.freeze, "--thaw"),
    "slurmctld_restart": _slurmctld_restart,
    "slurmd_dies": _node_fails(Cluster.stop_slurmd),
    "time_limit": _time_limit,
    "read_only": _shared("read-only", "writable"),
    "disk_full": _shared("full", "free"),
    "hang": _worker_signalled(signal.SIGSTOP),
    "network_bad": _network_bad,
    "disk_slow": _shared("slow", "fast"),
    "disk_frozen": _shared("frozen", "thawed"),
    "node_disk_frozen": _node_disk_frozen,
    "clock_jump": _clock_jump,
    "memory_short": _memory_short,
    "supervisor_stopped": _role_stopped("supervise"),
    "launcher_stopped": _role_stopped("launch"),
    "worker_stopped": _role_stopped("worker"),
    "srun_stopped": _program_stopped("srun"),
    "slurmstepd_stopped": _program_stopped("slurmstepd"),
    "slurmd_stopped": _program_stopped("slurmd"),
    "slurmdbd_away": _slurmdbd_away,
    "two_supervisors": _two_supervisors,
}
