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

from _devcluster.configuration import NODE_LOCAL, Settings, StateDirectory
from _devcluster.errors import Fault
from _devcluster.groups import Groups
from _devcluster.loops import LoopFileSystem
from _devcluster.network import Network, wired_node
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

# Each failure of the shared directory, and what undoes it.
SHARED_STATES = ("read-only", "writable", "full", "free", "slow", "fast", "frozen", "thawed")
SLOW_BYTES_PER_S = 200_000
DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld")

# slurmctld calls each srun back by the name of its host, so it too must know the nodes' names.
CONTROLLER_START = 'mount --bind "$1" /etc/hosts && exec slurmctld -D -f "$2"'

# A node's first process. It collects orphans, and the node goes down with its slurmd, unless that
# was stopped on purpose (the file $off).
# -b has slurmd report that the node has booted: jobs of before are lost, and Slurm should know. Not
# where the cluster itself starts: a node that has answered a ping before would count as failed.
NODE_START = """\
name=$1 hosts=$2 disk=$3 disk_path=$4 conf=$5 off=$6 booted=$7 group=$8 address=$9
[ -z "$group" ] || echo 0 > "$group"
hostname "$name"
if [ -n "$address" ]; then
  ip link set lo up
  until ip addr add "$address" dev eth0 2> /dev/null; do sleep 0.01; done
  ip link set eth0 up
fi
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
# The clock of a node's processes: an offset in a file of the node's own disk.
CLOCK_FILE = ".devcluster-clock"
CLOCK_SOURCE = Path(__file__).with_name("clock.c")
NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--kill-child")


class Cluster:
    """The cluster of one state directory, running or not."""

    def __init__(self, root: Path, slurm: str = ""):
        self.directory = StateDirectory(root)
        if not slurm and self.directory.settings_file.exists():
            slurm = self.directory.settings().slurm
        prefix_path = f"{slurm}/bin:{slurm}/sbin:" if slurm else ""
        # Not the caller's environment: SLURM_… variables would change what the commands print.
        self.env = {
            "PATH": prefix_path + os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
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
        directory.write(settings := replace(settings, first_port=port))
        if settings.clock:
            library = str(directory.clock)
            self.run("cc", "-shared", "-fPIC", "-O1", "-o", library, str(CLOCK_SOURCE), "-ldl")
        if settings.network:
            self.network().start()
        self._start_daemon("munged", str(directory.munge_socket))
        report("munged")
        self._make_database()
        self._start_daemon("mariadbd", str(directory.mariadb_socket))
        report("mariadbd")
        self._start_daemon("slurmdbd", (settings.controller, port + 1))
        report("slurmdbd")
        self._start_daemon("slurmctld", (settings.controller, port))
        report("slurmctld")
        if settings.shared:
            Path(settings.shared).mkdir(parents=True, exist_ok=True)
            self.shared().mount(settings.shared_mb)
        for node in settings.nodes:
            self.power_on(node, rebooted=False)
        self.wait_idle(30 + count)
        report(f"{count} slurmd")

    def stop(self) -> None:
        settings = self.directory.settings() if self.directory.settings_file.exists() else None
        if settings is not None:
            if settings.shared:  # what waits for a frozen disk cannot be killed
                self.shared().thaw()
            for node in settings.nodes if settings.node_disk_mb else ():
                self.node_disk(node).thaw()
            self.power_off(*settings.nodes)
        self.processes.kill_all()
        if settings is not None:
            self.groups().remove()
            for node in settings.nodes if settings.node_disk_mb else ():
                self.node_disk(node).unmount()
            if settings.shared:
                self.shared().unmount()
            if settings.network:
                self.network().stop()

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise Fault(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def slurm_states(self) -> dict[str, str]:
        """What slurmctld holds of each node, such as `idle` or `down*`."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    # -- nodes

    def power_on(self, node: str, keep_disk: bool = False, rebooted: bool = True) -> None:
        """Start a node's namespaces and its slurmd, by default with an empty disk (replaced).

        `rebooted` is whether Slurm has known the node before.
        """
        settings = self.directory.settings()
        if not keep_disk:
            self.node_disk(node).unmount()
            shutil.rmtree(self.directory.node(node), ignore_errors=True)
        disk, spool = self.directory.disk(node), self.directory.node(node) / "spool"
        for folder in (disk, spool):
            folder.mkdir(parents=True, exist_ok=True)
        if settings.node_disk_mb and not disk.is_mount():
            self.node_disk(node).mount(settings.node_disk_mb)
        disk.chmod(0o1777)
        off = self.directory.slurmd_off(node)
        off.unlink(missing_ok=True)
        if settings.clock:
            self.set_clock(node, 0)
        address = f"{settings.subnet}.{node.removeprefix('n')}/24" if settings.network else ""
        arguments = [node, str(self.directory.hosts), str(disk), NODE_LOCAL]
        arguments += [str(self.directory.slurm_conf), str(off), "-b" if rebooted else ""]
        arguments += [self.groups().make(node), address]
        script = ["sh", "-euc", NODE_START, "node", *arguments]
        namespaces = (*NODE_NAMESPACES, "--net") if settings.network else NODE_NAMESPACES
        process = self.processes.start(node, ["unshare", *namespaces, *script], self.clock_env())
        if settings.network:
            self.network().attach(node, process)

    def power_off(self, *nodes: str) -> None:
        """Kill everything on the nodes at one blow, and wait until nothing is left."""
        running = list(self.processes.all())
        for node in {wired_node(name) for name, _ in running}.intersection(nodes):
            self.network().restore(node, None)
        for name, pid in running:
            if name in nodes and is_namespace_init(pid):
                kill(pid, signal.SIGKILL)
        # A node's `unshare` outlives every process in its namespace.
        wait_gone(lambda: [pid for name, pid in self.processes.all() if name in nodes])

    def freeze(self, node: str) -> None:
        """Stop every process of a node where it stands; its connections stay open."""
        init = self.init(node)
        while init and (moving := [p for p in same_namespace(init) if run_state(p) not in "TtZX"]):
            for pid in moving:
                kill(pid, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        """Let every process of a frozen node go on, the first one last."""
        init = self.init(node)
        if init is not None:
            for pid in sorted(same_namespace(init), reverse=True):
                kill(pid, signal.SIGCONT)

    def stop_slurmd(self, node: str) -> None:
        """Kill a node's slurmd; jobs on the node go on."""
        init = self.init(node)
        self.directory.slurmd_off(node).touch()

        def slurmds() -> list[int]:
            return [pid for pid in same_namespace(init or 0) if program(pid) == "slurmd"]

        for pid in slurmds():
            kill(pid, signal.SIGKILL)
        wait_gone(slurmds)

    def start_slurmd(self, node: str) -> None:
        self.directory.slurmd_off(node).unlink(missing_ok=True)

    def power(self, node: str) -> str:
        """`on`, `off` or `frozen`: the state of the node itself, whatever Slurm holds of it."""
        init = self.init(node)
        if init is None:
            return "off"
        return "frozen" if run_state(init) == "T" else "on"

    def wait_in_service(self, node: str, since: float) -> None:
        """Wait until slurmctld uses a node whose slurmd was started at `since` or later."""

        def late() -> list[str]:
            shown = self.run("scontrol", "-o", "show", "node", node)
            state, started = (
                match.group(1) if (match := re.search(rf"\b{field}=(\S+)", shown)) else ""
                for field in ("State", "SlurmdStartTime")
            )
            is_old = not started.startswith("2") or _timestamp(started) < int(since)
            if is_old or "NOT_RESPONDING" in state:
                return [node]
            if re.search("DOWN|DRAIN|FAIL", state):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
                return [node]
            return []

        self.processes.wait(60, late)

    def wait_idle(self, limit_s: float) -> None:
        def not_idle() -> list[str]:
            states = self.slurm_states()
            return [node for node in self.directory.settings().nodes if states[node] != "idle"]

        self.processes.wait(limit_s, not_idle)

    def shared(self) -> SharedDirectory:
        """The nodes' shared directory; raises a Fault if they have none of their own."""
        settings = self.directory.settings()
        if not settings.shared:
            raise Fault("this cluster has no shared directory of its own; `up --shared PATH`", 2)
        return SharedDirectory(Path(settings.shared))

    def shared_states(self) -> dict[str, Callable[[], None]]:
        """Return the functions that bring the shared directory into each of SHARED_STATES."""
        shared = self.shared()
        return {
            "read-only": lambda: shared.read_only(self.inits()),
            "writable": lambda: shared.writable(self.inits()),
            "full": shared.fill,
            "free": shared.free,
            "slow": lambda: shared.slow(SLOW_BYTES_PER_S, self.groups()),
            "fast": lambda: shared.slow(0, self.groups()),
            "frozen": shared.freeze,
            "thawed": shared.thaw,
        }

    def inits(self) -> list[int]:
        return [pid for _, pid in self.processes.all() if is_namespace_init(pid)]

    def init(self, node: str) -> int | None:
        """The first process of a node's namespace; None where the node has no power."""
        return next(filter(is_namespace_init, self.processes.named(node)), None)

    # -- what a node or all of them have to share

    def network(self) -> Network:
        return Network(self.directory.settings(), self.processes)

    def groups(self) -> Groups:
        return Groups(self.directory.settings().number)

    def node_disk(self, node: str) -> LoopFileSystem:
        return LoopFileSystem(self.directory.disk(node))

    def set_clock(self, node: str, offset_s: int) -> None:
        """Set a node's clock ahead or behind; raises a Fault if `up` had no `--clock`."""
        if not self.directory.settings().clock:
            raise Fault("the nodes have the machine's clock; `up --clock`", 2)
        (self.directory.disk(node) / CLOCK_FILE).write_text(f"{offset_s:+d}\n")

    def clock_env(self) -> dict[str, str]:
        """The variables with which a process has its node's clock; empty: that of the machine."""
        settings = self.directory.settings()
        if not settings.clock:
            return {}
        file = f"{NODE_LOCAL}/{CLOCK_FILE}"
        return {"LD_PRELOAD": str(self.directory.clock), "DEVCLUSTER_CLOCK": file}

    # -- daemons

    def stop_daemon(self, name: str, number: signal.Signals) -> None:
        """End slurmctld or slurmdbd; by SIGTERM it saves its state, by SIGKILL it may lose some."""
        for pid in self.processes.named(name):
            kill(pid, number)
        wait_gone(lambda: self.processes.named(name))

    def start_daemon(self, name: str) -> None:
        """Start slurmctld or slurmdbd from the state that it has saved; wait until it answers."""
        settings = self.directory.settings()
        port = settings.first_port + (name == "slurmdbd")
        self._start_daemon(name, (settings.controller, port))

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
        # A database is a folder. slurmdbd would make it, but not with MariaDB's client 11.8.9: its
        # second connection, after the first was refused for want of a database, gets no columns.
        (self.directory.mariadb / "slurm").mkdir()


def _timestamp(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
