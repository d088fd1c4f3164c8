"""Which network interface the workers meet on: nodes such as trn1's have eight, all in one subnet.

The first interface is the one of the default route; the others are there for EFA. A node's name
may resolve to the addresses of all of them, in any order.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

# Read by gloo and by Neuron's collectives; both would take whichever interface they find.
VARIABLES = ("GLOO_SOCKET_IFNAME", "CCOM_SOCKET_IFNAME")
_ROUTES = Path("/proc/net/route")
_UP, _ANYWHERE = 0x1, "00000000"  # linux/route.h: RTF_UP; the destination of a default route


def interface_variables(master_addr: str, routes: Path = _ROUTES) -> dict[str, str]:
    """What a node's workers must be told of its interfaces.

    Args:
        master_addr: The rendezvous of the attempt.
        routes: The kernel's table of IPv4 routes.

    Returns:
        The variables that nobody has set yet. Nothing where all workers are on one machine, or
        where there is no default route to go by.
    """
    addresses = _addresses(master_addr)
    if addresses and all(_is_loopback(address) for address in addresses):
        return {}
    interface = default_interface(routes)
    if interface is None:
        return {}
    return {name: interface for name in VARIABLES if name not in os.environ}


def default_interface(routes: Path = _ROUTES) -> str | None:
    """The interface of the default route with the lowest metric; None where there is none."""
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return None
    found = []
    for line in lines:
        interface, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if destination == _ANYWHERE and mask == _ANYWHERE and int(flags, 16) & _UP:
            found.append((int(metric), interface))
    return min(found)[1] if found else None


def reachable_address(name: str) -> str:
    """An IPv4 address of this node by which all nodes reach it, looked up on the node itself.

    An address and not a name: it is one of several, and Neuron's runtime cannot resolve names
    longer than 63 characters (Neuron, runtime troubleshooting). The one of the default route is
    preferred, else the first, as AWS's scripts take it. Where the name says nothing but loopback,
    as Debian writes it into a node's own hosts file, it is left to the other nodes to resolve.
    """
    addresses = [address for address in _addresses(name) if not _is_loopback(address)]
    if not addresses:
        return name
    own = _default_address()
    return own if own in addresses else addresses[0]


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _default_address() -> str | None:
    """This machine's address towards the outside; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that nobody has
        except OSError:
            return None
        return str(probe.getsockname()[0])
