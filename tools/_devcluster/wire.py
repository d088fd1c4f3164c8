"""The bad link of a node where the kernel has no netem: packets are held back, and some dropped.

    python wire.py PROCESS BRIDGE DEVICE ADDRESS DELAY_MS LOSS_PERCENT

PROCESS is one of the node's. Until SIGTERM, its packets go from a TAP device in its network
namespace through this program to the TAP device DEVICE at the bridge, and back. Ethernet and
internet addresses stay as they are, so that open connections go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x2, 0x1000, 0x40000000
_LARGEST = 65536


def main(process: str, bridge: str, device: str, address: str, delay: str, loss: str) -> None:
    """Take the node's link over, relay, and give it back."""
    outside = _tap(device)
    _ip(f"link set {device} master {bridge}", f"link set {device} up")
    _enter(int(process))
    mac = subprocess.run(
        ["ip", "-brief", "link", "show", "eth0"], capture_output=True, text=True, check=True
    ).stdout.split()[2]
    inside = _tap("wire0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    take = f"link set wire0 address {mac}", "link set eth0 down", f"addr del {address} dev eth0"
    _ip(*take, f"addr add {address} dev wire0", "link set wire0 up")
    try:
        relay(inside, outside, float(delay) / 1000, float(loss) / 100)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # the node has gone
            _ip(
                f"addr del {address} dev wire0",
                "link set wire0 down",
                f"addr add {address} dev eth0",
                "link set eth0 up",
            )


def relay(inside: int, outside: int, delay_s: float, loss: float) -> None:
    """Pass packets on in both directions, each later by `delay_s`, or not at all."""
    chance = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order in which they are due
    other = {inside: outside, outside: inside}
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([inside, outside], [], [], timeout)[0]:
            packet = os.read(source, _LARGEST)
            if chance.random() >= loss:
                waiting.append((time.monotonic() + delay_s, other[source], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # that end is down
                os.write(target, packet)


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _enter(process: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _ip(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
