"""One cluster: its daemons, and its nodes in namespaces of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from _devcluster.configuration import Settings, StateDirectory
from _devcluster.errors import Fault
from _devcluster.processes import (
    Processes,
    answers,
    free_ports,
    is_namespace_init,
    kill,
    program,
    run_state,
    same_namespace,
    wait_gone,
)
from _devcluster.shared import SharedDirectory

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld")

# slurmctld calls each srun back by the name of its host, so it too must know the nodes' names.
CONTROLLER_START = 'mount --bind "$1" /etc/hosts && exec slurmctld -D -f "$2"'

# A node's first process. It collects orphans, and the node goes down with its slurmd, unless that
# was stopped on purpose (the file $off).
# -b has slurmd report that the node has booted: jobs of before are lost, and Slurm should know. Not
# where the cluster itself starts: a node that has answered a ping before would count as failed.
NODE_START = """\
name=$1 hosts=$2 disk=$3 disk_path=$4 conf=$5 off=$6 booted=$7
hostname "$name"
mount --bind "$hosts" /etc/hosts
mount --bind "$disk" "$disk_path"
mount -t tmpfs -o mode=1777 "shm-$name" /dev/shm
while :; do
  slurmd $booted -D -N "$name" -f "$conf" &
  wait $! || true
  [ -e "$off" ] || exit 1
  while [ -e "$off" ]; do sleep 0.2; done
  booted=
done
"""
NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--kill-child")


class Cluster:
    """The cluster of one state directory, running or not."""

    def __init__(self, root: Path):
        self.directory = StateDirectory(root)
        # Not the caller's environment: SLURM_… variables would change what the commands print.
        self.env = {
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.directory.slurm_conf),
            "MYSQL_UNIX_PORT": str(self.directory.mariadb_socket),
        }
        self.processes = Processes(self.directory, self.env)

    def is_up(self) -> bool:
        """Whether every daemon runs; nodes may have failed."""
        running = {name for name, _ in self.processes.all()}
        return self.directory.settings_file.exists() and running.issuperset(DAEMONS)

    def start(self, settings: Settings, report: Callable[[str], None]) -> None:
        """Start the daemons in order, then the nodes, and wait until all nodes are idle."""
        preferred = zlib.crc32(bytes(self.directory.root))
        with free_ports(settings.num_nodes + 2, preferred) as port:
            self._start(settings, port, report)

    def _start(self, settings: Settings, port: int, report: Callable[[str], None]) -> None:
        directory, count = self.directory, settings.num_nodes
        directory.write(replace(settings, first_port=port))
        self._start_daemon("munged", str(directory.munge_socket))
        report("munged")
        self._make_database()
        self._start_daemon("mariadbd", str(directory.mariadb_socket))
        report("mariadbd")
        self._start_daemon("slurmdbd", ("127.0.0.1", port + 1))
        report("slurmdbd")
        self._start_daemon("slurmctld", ("127.0.0.1", port))
        report("slurmctld")
        if settings.shared:
            self.shared().mount(settings.shared_mb)
        for node in settings.nodes:
            self.power_on(node, again=False)

        def not_idle() -> list[str]:
            states = self.slurm_states()
            return [node for node in settings.nodes if states[node] != "idle"]

        self.processes.wait(30 + count, not_idle)
        report(f"{count} slurmd")

    def stop(self) -> None:
        """Kill every process of the cluster."""
        self.power_off(*{name for name, _ in self.processes.all()}.difference(DAEMONS))
        self.processes.kill_all()
        if self.directory.settings_file.exists() and self.directory.settings().shared:
            self.shared().unmount()

    def run(self, *command: str) -> str:
        """Run a program for this cluster; what it prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise Fault(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def slurm_states(self) -> dict[str, str]:
        """What slurmctld holds of each node, such as `idle` or `down*`."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    # -- nodes

    def power_on(self, node: str, keep_disk: bool = False, again: bool = True) -> None:
        """Start a node's namespaces and in them its slurmd, by default with an empty disk.

        Args:
            node: Its name.
            keep_disk: Rebooted, not replaced.
            again: Whether Slurm has known the node before.
        """
        if not keep_disk:
            shutil.rmtree(self.directory.node(node), ignore_errors=True)
        disk, spool = self.directory.disk(node), self.directory.node(node) / "spool"
        for folder in (disk, spool):
            folder.mkdir(parents=True, exist_ok=True)
        disk.chmod(0o1777)
        off = self.directory.slurmd_off(node)
        off.unlink(missing_ok=True)
        disk_path = self.directory.settings().node_local
        arguments = [node, str(self.directory.hosts), str(disk), disk_path]
        arguments += [str(self.directory.slurm_conf), str(off), "-b" if again else ""]
        script = ["sh", "-euc", NODE_START, "node", *arguments]
        self.processes.start(node, ["unshare", *NODE_NAMESPACES, *script])

    def power_off(self, *nodes: str) -> None:
        """Kill everything on the nodes at one blow, and wait until nothing is left."""
        for node in nodes:
            if init := self._init(node):
                kill(init, signal.SIGKILL)
        # A node's `unshare` outlives every process in its namespace.
        wait_gone(lambda: [pid for node in nodes for pid in self.processes.named(node)])

    def freeze(self, node: str) -> None:
        """Stop every process of a node where it stands; its connections stay open."""
        init = self._init(node)
        while init and (moving := [p for p in same_namespace(init) if run_state(p) not in "TtZX"]):
            for pid in moving:
                kill(pid, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        """Let every process of a frozen node go on, the first one last."""
        init = self._init(node)
        if init is not None:
            for pid in sorted(same_namespace(init), reverse=True):
                kill(pid, signal.SIGCONT)

    def stop_slurmd(self, node: str) -> None:
        """Kill a node's slurmd; jobs on the node go on."""
        init = self._init(node)
        self.directory.slurmd_off(node).touch()

        def slurmds() -> list[int]:
            return [pid for pid in same_namespace(init or 0) if program(pid) == "slurmd"]

        for pid in slurmds():
            kill(pid, signal.SIGKILL)
        wait_gone(slurmds)

    def start_slurmd(self, node: str) -> None:
        """Start it again; it finds the jobs of before."""
        self.directory.slurmd_off(node).unlink(missing_ok=True)

    def power(self, node: str) -> str:
        """`on`, `off` or `frozen`: the state of the node itself, whatever Slurm holds of it."""
        init = self._init(node)
        if init is None:
            return "off"
        return "frozen" if run_state(init) == "T" else "on"

    def wait_in_service(self, node: str, since: float) -> None:
        """Wait until slurmctld uses a node whose slurmd was started at `since` or later."""

        def late() -> list[str]:
            shown = self.run("scontrol", "-o", "show", "node", node)
            state, started = (
                found.group(1) if (found := re.search(rf"\b{field}=(\S+)", shown)) else ""
                for field in ("State", "SlurmdStartTime")
            )
            if not started.startswith("2") or _timestamp(started) < int(since):
                return [node]
            if "NOT_RESPONDING" in state:
                return [node]
            if re.search("DOWN|DRAIN|FAIL", state):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
                return [node]
            return []

        self.processes.wait(60, late)

    def shared(self) -> SharedDirectory:
        """The nodes' shared directory.

        Raises:
            Fault: it is none of its own.
        """
        settings = self.directory.settings()
        if not settings.shared:
            raise Fault("this cluster has no shared directory of its own; `up --shared PATH`", 2)
        return SharedDirectory(settings.shared)

    def inits(self) -> list[int]:
        """The first processes of all nodes that have power."""
        return [pid for _, pid in self.processes.all() if is_namespace_init(pid)]

    def _init(self, node: str) -> int | None:
        """The first process of a node's namespace; None where the node has no power."""
        return next(filter(is_namespace_init, self.processes.named(node)), None)

    # -- daemons

    def stop_controller(self, number: signal.Signals) -> None:
        """End slurmctld: by SIGTERM it saves its state, by SIGKILL it may lose some seconds."""
        for pid in self.processes.named("slurmctld"):
            kill(pid, number)
        wait_gone(lambda: self.processes.named("slurmctld"))

    def start_controller(self) -> None:
        """Start slurmctld from the state that it has saved, and wait until it answers."""
        self._start_daemon("slurmctld", ("127.0.0.1", self.directory.settings().first_port))

    def _start_daemon(self, name: str, address: str | tuple[str, int]) -> None:
        self.processes.start(name, self._command(name))
        self.processes.wait(60, lambda: [] if answers(address) else [name])

    def _command(self, daemon: str) -> list[str]:
        root, conf = self.directory.root, str(self.directory.slurm_conf)
        if daemon == "munged":
            return [
                "munged",
                "--foreground",
                "--force",  # though others may write to the directory above, such as /tmp
                "--num-threads=10",
                f"--socket={self.directory.munge_socket}",
                f"--key-file={self.directory.munge_key}",
                f"--seed-file={root / 'munge.seed'}",
                f"--pid-file={root / 'munged.pid'}",
            ]
        if daemon == "mariadbd":
            return [
                "mariadbd",
                "--no-defaults",
                "--user=root",
                "--skip-networking",
                f"--datadir={self.directory.mariadb}",
                f"--tmpdir={self.directory.mariadb_temporary}",
                f"--socket={self.directory.mariadb_socket}",
                f"--pid-file={root / 'mariadbd.pid'}",
                "--innodb-buffer-pool-size=16M",
                "--innodb-log-file-size=8M",
                "--innodb-flush-log-at-trx-commit=0",
            ]
        if daemon == "slurmdbd":
            return ["slurmdbd", "-D"]
        script = ["sh", "-euc", CONTROLLER_START, "slurmctld", str(self.directory.hosts), conf]
        return ["unshare", "--mount", *script]

    def _make_database(self) -> None:
        self.directory.mariadb_temporary.mkdir()
        self.run(
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            f"--datadir={self.directory.mariadb}",
            f"--tmpdir={self.directory.mariadb_temporary}",
            "--skip-test-db",
            "--skip-name-resolve",
            "--innodb-log-file-size=8M",
        )


def _timestamp(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
