"""A network between the nodes: each has an address and a link of its own, which can be bad.

A node's link is a veth pair, whose other end is at a bridge. Where the kernel has netem, a bad
link is a queueing discipline at both ends. Where it has not, the node's packets take another way
for so long: two TAP devices and a program between them (`wire.py`), which delays and drops them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from _devcluster.configuration import Settings
from _devcluster.errors import Fault
from _devcluster.loops import run
from _devcluster.processes import Processes, kill, wait_gone

WIRE = Path(__file__).with_name("wire.py")
NODE_END = "eth0"


class Network:
    """The network of a cluster, if it has one."""

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self.settings, self.processes = settings, processes
        self.bridge = f"dc{settings.number}"

    def start(self) -> None:
        """Make the bridge, which has the daemons' address."""
        self.stop()
        address = f"{self.settings.controller}/24"
        _ip(
            f"link add {self.bridge} type bridge",
            f"addr add {address} dev {self.bridge}",
            f"link set {self.bridge} up",
        )

    def stop(self) -> None:
        """Remove the bridge; the links end with their nodes."""
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def attach(self, node: str, process: int) -> None:
        """Give a node its link, once its process is in a network namespace of its own."""
        deadline = time.monotonic() + 30
        while _namespace(process) == _namespace("self"):
            if time.monotonic() > deadline or not Path(f"/proc/{process}").exists():
                raise Fault(f"{node} got no network namespace\n{self.processes.tail(node)}")
            time.sleep(0.002)
        end = self._end(node)
        # The link of the node's last life may still be there: the kernel removes it later.
        subprocess.run(["ip", "link", "del", end], capture_output=True)
        _ip(
            f"link add {end} type veth peer name {NODE_END} netns {process}",
            f"link set {end} master {self.bridge}",
            f"link set {end} up",
        )

    def impair(self, node: str, init: int, delay_ms: int, loss_percent: int) -> None:
        """Delay a node's packets, those to it and those from it, and drop some."""
        if not self.settings.network:
            raise Fault("the nodes share one network; `up --network`", 2)
        if self.processes.named(_wire(node)):
            raise Fault(f"the link of {node} is bad already")
        netem = ["netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
        here = ["tc", "qdisc", "replace", "dev", self._end(node), "root", *netem]
        there = ["tc", "qdisc", "replace", "dev", NODE_END, "root", *netem]
        if subprocess.run(here, capture_output=True).returncode == 0:
            subprocess.run([*_within(init), *there], check=True, capture_output=True)
            return
        address = f"{self.settings.subnet}.{node.removeprefix('n')}/24"
        arguments = [str(init), self.bridge, f"{self._end(node)}w", address]
        wire = [sys.executable, str(WIRE), *arguments, str(delay_ms), str(loss_percent)]
        self.processes.start(_wire(node), wire)

    def restore(self, node: str, init: int | None) -> None:
        for pid in self.processes.named(_wire(node)):
            kill(pid, signal.SIGTERM)  # it gives the node its link back
        wait_gone(lambda: self.processes.named(_wire(node)))
        subprocess.run(["tc", "qdisc", "del", "dev", self._end(node), "root"], capture_output=True)
        if init is not None:
            there = ["tc", "qdisc", "del", "dev", NODE_END, "root"]
            subprocess.run([*_within(init), *there], capture_output=True)

    def _end(self, node: str) -> str:
        return f"{self.bridge}{node}"


def wired_node(process: str) -> str:
    """The node whose link a process relays, by the process's name; empty for other processes."""
    return process.removesuffix("-wire") if process.endswith("-wire") else ""


def _wire(node: str) -> str:
    return f"{node}-wire"


def _namespace(process: int | str) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:
        return ""


def _within(process: int) -> list[str]:
    return ["nsenter", f"--target={process}", "--net"]


def _ip(*commands: str) -> None:
    run("ip", "-batch", "-", text="\n".join(commands))
