"""A network that drops all packets between two nodes: found, and named."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest

from slurmllm.core.run.error_patterns import meaning_of

# One node: relay and worker; says when it has exchanged something, and why that ended.
NODE = """
    import sys, time
    from pathlib import Path
    from slurmllm.train.control.plane import ControlPlane
    from slurmllm.train.control.relay import Position, Relay
    from slurmllm.core.errors import NodeError

    index, path = int(sys.argv[1]), Path(sys.argv[2])
    relay = Relay(Position(index, ("n0", "n1"), 1), path, ("10.213.250.1", 41001), b"secret")
    relay.start()
    plane = ControlPlane(index, 2, str(path), b"secret")
    plane.barrier()
    print("beats", flush=True)
    try:
        if index:
            sys.stdin.readline()  # has nothing in flight: only keep-alive finds out
        while True:
            plane.barrier()
            time.sleep(0.05)
    except NodeError as error:
        print(error, flush=True)
"""
ADDRESSES = ("10.213.250.1", "10.213.250.2")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr}")


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip netns`")
    names = f"slurmllm-{os.getpid()}-0", f"slurmllm-{os.getpid()}-1"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            link = ["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns"]
            ip("-n", names[0], *link, names[1])
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def drop_packets(names: tuple[str, str]) -> None:
    """Send all packets to a hardware address that nobody has: nothing comes back, not even RST."""
    for name, peer in zip(names, reversed(ADDRESSES), strict=True):
        nobody = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
        ip("-n", name, "neighbour", "replace", peer, *nobody)


def test_dropped_packets_are_noticed_on_both_sides(namespaces: tuple[str, str]) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        nodes = []
        for index, name in enumerate(namespaces):
            command = ["ip", "netns", "exec", name, sys.executable, "-c", textwrap.dedent(NODE)]
            command += [str(index), f"{folder}/control-{index}"]
            nodes.append(subprocess.Popen(command, **pipes, text=True))  # type: ignore[call-overload]
        try:
            for node in nodes:
                assert node.stdout.readline() == "beats\n"
            drop_packets(namespaces)
            # The limits of a test wait for what must happen; the kernel's is 35 s.
            outputs = [node.communicate("\n", timeout=200) for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.communicate()
    for peer, (output, errors) in zip(("n1", "n0"), outputs, strict=True):
        message = output.strip()
        assert message.startswith(f"Connection closed by peer: the launcher of {peer} ("), errors
        assert "timed out" in message
        assert meaning_of(message) == "lost_peer"
