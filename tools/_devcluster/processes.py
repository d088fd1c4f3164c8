"""Starting, finding and killing the processes of a cluster.

No process ids are written down. Every daemon carries MARK in its environment, with the state
directory and its own name, and is found by that in /proc: nothing is stale after an unclean end,
and nothing is killed that is not ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from _devcluster.configuration import PORT_BLOCKS, StateDirectory
from _devcluster.errors import Fault

MARK = "SLURMLLM_DEVCLUSTER_PROCESS"
PROC = Path("/proc")
GONE_S = 180.0  # for killed processes to end: hundreds of nodes with hundreds of workers take long


class Processes:
    """The processes of one cluster, by the names of its daemons and nodes."""

    def __init__(self, directory: StateDirectory, env: Mapping[str, str]):
        self.directory = directory
        self.env = env
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def all(self) -> Iterator[tuple[str, int]]:
        """The name and the id of every marked process."""
        mark = f"{MARK}={self.directory.root}:".encode()
        for pid in all_pids():
            with contextlib.suppress(OSError):  # gone, or not ours to read
                for variable in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(mark):
                        yield variable.removeprefix(mark).decode(), pid

    def named(self, name: str) -> list[int]:
        return sorted(pid for process_name, pid in self.all() if process_name == name)

    def start(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> int:
        """Start a daemon or a node; what it prints goes to its log. Returns its process id."""
        with self.directory.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                command,
                env={**self.env, **(env or {}), MARK: f"{self.directory.root}:{name}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        return self._children[name].pid

    def wait(self, limit_s: float, late: Callable[[], list[str]]) -> None:
        """Wait until `late` names none of the processes that were started.

        Raises a Fault with the end of its log if one has ended, or is late after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while names := late():
            for name in names:
                child = self._children.get(name)
                if child is not None and child.poll() is not None:
                    raise Fault(f"{name} has ended\n{self.tail(name)}")
            if time.monotonic() > deadline:
                listed = ", ".join(names)
                raise Fault(f"not ready after {limit_s:.0f} s: {listed}\n{self.tail(names[0])}")
            time.sleep(0.2)

    def tail(self, name: str) -> str:
        """The end of the log of a daemon or a node, with a heading."""
        log = self.directory.log(name)
        last = log.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"the end of {log}:", *last])

    def kill_all(self) -> None:
        for child in self._children.values():  # amid its exec, a process shows no mark
            child.kill()
        for _, pid in self.all():
            kill(pid, signal.SIGKILL)
        wait_gone(lambda: [pid for _, pid in self.all()])


def all_pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(pids: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := pids():
        if time.monotonic() > deadline:
            raise Fault(f"killed, but still there after {GONE_S:.0f} s: processes {left}")
        time.sleep(0.1)


def run_state(pid: int) -> str:
    """The letter of a process's state as in ps(1); X where there is no such process."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def program(pid: int) -> str:
    """The name of the program that a process runs, at most 15 letters; empty where it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text().strip()
    return ""


def is_namespace_init(pid: int) -> bool:
    """Whether a process is the first of a process namespace below ours."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                inner = line.split()[2:]
                return inner[-1:] == ["1"]
    return False


def same_namespace(pid: int) -> list[int]:
    """Every process in a process's own process namespace."""

    def namespace(pid: int) -> Path | None:
        with contextlib.suppress(OSError):
            return (PROC / str(pid) / "ns/pid").readlink()
        return None

    its_namespace = namespace(pid)
    return [other for other in all_pids() if its_namespace and namespace(other) == its_namespace]


def answers(address: str | tuple[str, int]) -> bool:
    """Whether connections are accepted at a Unix socket's path, or at a host and port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        return client.connect_ex(address) == 0


@contextlib.contextmanager
def free_ports(count: int, preferred: int) -> Iterator[int]:
    """The first of `count` free consecutive ports, at the start of a block.

    The block is claimed until the end by a socket in the abstract namespace, so that another
    cluster that starts at the same moment takes another one. Then slurmctld holds its first port,
    even while nodes have failed. `preferred` numbers the block to look at first.
    """
    first = preferred % len(PORT_BLOCKS)
    blocks: list[int] = [*PORT_BLOCKS[first:], *PORT_BLOCKS[:first]]
    for block in blocks:
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0slurmllm-devcluster-{block}")
            except OSError:
                continue
            if all(_is_free(port) for port in range(block, block + count)):
                yield block
                return
    raise Fault(f"no {count} consecutive ports are free in {PORT_BLOCKS[0]}-{PORT_BLOCKS.stop}", 2)


def _is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True
