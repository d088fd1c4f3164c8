"""The rendezvous of workers: torchrun's variables, the network interface, a port, a secret.

Every process that starts workers (launcher, `calibrate`, `health`) takes their variables from
`rendezvous_variables`. Nodes such as trn1's have eight interfaces in one subnet: the first one is
that of the default route, the others serve EFA, and a node's name may resolve to the addresses of
all of them in any order.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import secrets
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from slurmllm.core.errors import ConfigError, NodeError

Environment = dict[str, str]
NODE_RANK = "SLURMLLM_NODE_RANK"
NODE_NAME = "SLURMLLM_NODE"
SHARING = "SLURMLLM_SHARING"  # workers that share a machine
SECRET = "SLURMLLM_SECRET"  # noqa: S105 (a name): by it the workers of one start know each other
# Read by gloo and by Neuron's collectives; both would take whichever interface they find.
INTERFACES = ("GLOO_SOCKET_IFNAME", "CCOM_SOCKET_IFNAME")
_ROUTES = Path("/proc/net/route")
_UP, _ANYWHERE = 0x1, "00000000"  # linux/route.h: RTF_UP; the destination of a default route
_BACKLOG = 4096  # workers that connect at once; Linux's default limit
_PORTS = range(20000, 32768)  # below net.ipv4.ip_local_port_range
_PORT_S = 10.0  # for a port that an ending process still holds
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def own_node_rank() -> int:
    """Return the index of this node in its allocation, as --local or srun sets it."""
    return int(os.environ.get(NODE_RANK) or os.environ.get("SLURM_NODEID") or 0)


def rendezvous_variables(
    master_addr: str,
    master_port: int | str,
    *,
    nodes: int,
    workers_per_node: int,
    node_rank: int,
    local_rank: int,
    threads: int | None = None,
) -> Environment:
    """Return the variables with which a worker finds its peers, as torchrun sets them.

    $OMP_NUM_THREADS takes precedence over `threads`, the CPU threads of a worker.
    """
    omp = os.environ.get("OMP_NUM_THREADS") or (None if threads is None else str(threads))
    return {
        "RANK": str(node_rank * workers_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * workers_per_node),
        "LOCAL_WORLD_SIZE": str(workers_per_node),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        **({} if omp is None else {"OMP_NUM_THREADS": omp}),
        **interface_variables(master_addr),
    }


def new_secret() -> Environment:
    """Return the variable with a new secret, for all workers that are started together.

    Only for their environment, which other users cannot read: they can read command lines.
    """
    return {SECRET: secrets.token_hex(32)}


def own_secret() -> bytes:
    """Return the secret that this worker shares with its peers."""
    if SECRET not in os.environ:
        raise ConfigError(
            f"{SECRET} is not set: several workers are started by the launcher, which makes it"
        )
    return os.environ[SECRET].encode()


def listen(address: str, port: int) -> socket.socket:
    """Listen, on every interface only if `address` is a name or of another machine."""
    try:
        ipaddress.IPv4Address(address)
        return socket.create_server((address, port), backlog=_BACKLOG)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def listen_for_nodes(address: str, port: int, name: str) -> socket.socket:
    """`listen` on a port that an ending process may still hold; `name` is this node's.

    Raises:
        NodeError: another program uses the port, or it is refused.
    """
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise NodeError(
                f"the control plane cannot listen on port {port} of {name}: {error.strerror}; end "
                "the program that uses it, or set another cluster.master_port (the control plane "
                "uses the port after it)"
            ) from error


def interface_variables(master_addr: str, routes: Path = _ROUTES) -> Environment:
    """Return the variables that name the network interface, as far as they are not set yet.

    Empty if all workers are on one machine, or if there is no default route in `routes`, the
    kernel's table of IPv4 routes.
    """
    addresses = _addresses(master_addr)
    if addresses and all(_is_loopback(address) for address in addresses):
        return {}
    interface = default_interface(routes)
    if interface is None:
        return {}
    return {name: interface for name in INTERFACES if name not in os.environ}


def default_interface(routes: Path = _ROUTES) -> str | None:
    """Return the interface of the default route with the lowest metric, if there is one."""
    defaults = []
    with suppress(OSError):
        for line in routes.read_text().splitlines()[1:]:
            interface, destination, _, flags, _, _, metric, mask, *_ = line.split()
            if destination == mask == _ANYWHERE and int(flags, 16) & _UP:
                defaults.append((int(metric), interface))
    return min(defaults, default=(0, None))[1]


def reachable_address(name: str) -> str:
    """Return an IPv4 address by which all nodes reach this one, looked up on the node itself.

    An address and not a name: a name has several, and Neuron's runtime cannot resolve names longer
    than 63 characters (Neuron, runtime troubleshooting). The address of the default route is
    preferred, else the first, as in AWS's scripts. A name that resolves only to loopback, as
    Debian's own hosts file has it, is returned for the other nodes to resolve.
    """
    addresses = [address for address in _addresses(name) if not _is_loopback(address)]
    default = _default_address()
    return default if default in addresses else [*addresses, name][0]


def free_ports(count: int) -> list[int]:
    """Return `count` ports of this machine on which nothing listens; another process may take one.

    Below the range of outgoing connections, which take ports at any time, unless all are in use.
    """
    with ExitStack() as stack:
        ports = list[int]()
        # All are held until the last is bound, so that no two are equal.
        for port in (*secrets.SystemRandom().sample(_PORTS, 1000), *[0] * count):
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:  # it has a listener
                if port == 0:
                    raise
            else:
                ports.append(int(probe.getsockname()[1]))
        return ports


def free_port() -> int:
    return free_ports(1)[0]


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Have the kernel end this process with its parent, by a signal; called before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def _addresses(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in answers))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _default_address() -> str | None:
    """Return this machine's address on its default route; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # RFC 5737: an address that nobody has, to which a datagram socket sends nothing.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None
