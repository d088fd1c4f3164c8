"""Which interface and which address the workers meet on."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmllm.core.errors import ConfigError
from slurmllm.launch.supervise.allocation import LocalAllocation, SlurmAllocation
from slurmllm.train.control import rendezvous

# A trn1 node: every interface has a default route, the first one the lowest metric. 010200C0 is
# 192.0.2.1, as the kernel prints it. `down0` is not up.
HEADER = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
TRN1 = """
ens33 00000000 010200C0 0003 0 0 200 00000000 0 0 0
ens32 000200C0 00000000 0001 0 0 100 00FFFFFF 0 0 0
down0 00000000 010200C0 0000 0 0 10 00000000 0 0 0
ens32 00000000 010200C0 0003 0 0 100 00000000 0 0 0
half0 00000000 010200C0 0003 0 0 0 00000080 0 0 0
"""


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    path = tmp_path / "route"
    path.write_text(HEADER + TRN1)
    return path


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rendezvous.INTERFACES:
        monkeypatch.delenv(name, raising=False)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str, host: str | None = None) -> None:
    """Have every name resolve to `addresses`; `own` is this machine's on its default route."""

    def look_up(name: str, *_: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(rendezvous, "_default_address", lambda: host)


def test_the_default_route_with_the_lowest_metric(routes: Path, tmp_path: Path) -> None:
    assert rendezvous.default_interface(routes) == "ens32"
    routes.write_text(HEADER + "\n")
    assert rendezvous.default_interface(routes) is None
    assert rendezvous.default_interface(tmp_path / "none") is None
    # Of this machine.
    interface = rendezvous.default_interface()
    assert interface is None or interface in [name for _, name in socket.if_nameindex()]
    assert rendezvous.reachable_address("localhost") == "localhost"


def test_gloo_and_neuron_are_told_of_it(routes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.interface_variables("127.0.0.1", routes) == {}  # workers on one machine
    resolving(monkeypatch, "127.0.1.3")
    assert rendezvous.interface_variables("n3", routes) == {}
    resolving(monkeypatch, "10.0.0.7")
    both = {"GLOO_SOCKET_IFNAME": "ens32", "CCOM_SOCKET_IFNAME": "ens32"}
    assert rendezvous.interface_variables("10.0.0.7", routes) == both
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    assert rendezvous.interface_variables("10.0.0.7", routes) == {"CCOM_SOCKET_IFNAME": "ens32"}
    routes.write_text(HEADER + "\n")
    assert rendezvous.interface_variables("10.0.0.7", routes) == {}


@pytest.mark.parametrize(
    ("addresses", "host", "expected"),
    [
        (("10.0.0.7",), None, "10.0.0.7"),
        (("10.0.0.9", "10.0.0.7"), "10.0.0.7", "10.0.0.7"),  # of the default route
        (("10.0.0.9", "10.0.0.7"), "10.0.0.1", "10.0.0.9"),  # as AWS: the first
        (("127.0.1.1", "10.0.0.7"), None, "10.0.0.7"),
        (("127.0.1.1",), "10.0.0.7", "trn1-dy-1"),  # Debian's hosts file: others know better
        ((), "10.0.0.7", "trn1-dy-1"),
    ],
)
def test_the_address_that_all_nodes_reach(
    addresses: tuple[str, ...], host: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, *addresses, host=host)
    assert rendezvous.reachable_address("trn1-dy-1") == expected


def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[2-3]")


def test_a_slurm_jobs_rendezvous_is_its_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    in_job(monkeypatch)
    allocation = SlurmAllocation(FakeSlurm())
    resolving(monkeypatch, "10.0.0.9", "10.0.0.7", host="10.0.0.7")
    assert allocation.master_addr == "10.0.0.7"
    resolving(monkeypatch)
    assert allocation.master_addr == "n2"


def test_ports_are_free_and_none_of_outgoing_connections() -> None:
    ports = rendezvous.free_ports(50)
    assert len(set(ports)) == 50
    assert all(20000 <= port < 32768 for port in ports)
    with socket.socket() as listener:
        listener.bind(("", ports[0]))


def test_each_start_has_its_own_secret_and_no_command_line_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets: list[str] = []
    outputs: list[tuple[object, object]] = []

    def start(command: Sequence[str], env: dict[str, str], **options: object) -> None:
        secrets.append(env[rendezvous.SECRET])
        outputs.append((options.get("stdout"), options.get("stderr")))
        assert len(bytes.fromhex(env[rendezvous.SECRET])) == 32
        assert not any(env[rendezvous.SECRET] in word for word in command)

    monkeypatch.setattr(subprocess, "Popen", start)
    in_job(monkeypatch)
    monkeypatch.setenv("SLURMLLM_LOCAL_NODES", "2")
    resolving(monkeypatch)
    slurm = SlurmAllocation(FakeSlurm())
    slurm.launch(Path("r"), "train", 0)
    slurm.ask(["true"])
    LocalAllocation().ask(["true"])  # two nodes that share it
    assert outputs[:2] == [(None, None), (subprocess.PIPE, subprocess.STDOUT)]
    assert len(secrets) == 4
    assert len(set(secrets)) == 3
    assert rendezvous.SECRET not in os.environ
    with pytest.raises(ConfigError, match="SLURMLLM_SECRET is not set"):
        rendezvous.own_secret()
