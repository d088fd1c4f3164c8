"""The devices of a node: how many there are, their driver, and errors that they have counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.finding import fail, ok, warn
from slurmllm.errors import NodeError
from slurmllm.records import HealthFinding

# The Neuron driver's counters since it was loaded (Neuron Sysfs User Guide, "hardware/"); those
# that the runtime calls uncorrectable and AWS's remedy for is another instance.
ECC_COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


def device_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[HealthFinding]:
    """Devices, driver and errors.

    Args:
        cluster: The profile.
        root: Where /sys lies.

    Raises:
        NodeError: the tool that counts them is absent or fails.
    """
    if cluster.device == "neuron":
        yield _count(neuron_cores(), "NeuronCore", cluster)
        yield from _driver(_text(root / "sys/module/neuron/version"), cluster)
        yield _errors(neuron_errors(root))
    elif cluster.device == "cuda":
        gpus = nvidia_gpus()
        yield _count(len(gpus), "GPU", cluster)
        yield from _driver(gpus[0][1] if gpus else "", cluster)
        yield _errors([f"GPU {gpu}: {count}" for gpu, _, count in gpus if count > 0])
    yield _cpus(cluster)


def neuron_cores() -> int:
    """The cores of all Neuron devices, by `neuron-ls`.

    Raises:
        NodeError: it is absent, fails, or answers something else.
    """
    words = ask("neuron-ls", "--json-output")
    try:
        return sum(int(device["nc_count"]) for device in json.loads(words))
    except (ValueError, TypeError, KeyError) as error:
        raise NodeError(f"neuron-ls answers what is no list of devices: {words[:60]!r}") from error


def neuron_errors(root: Path) -> list[str]:
    """Uncorrected memory errors that the driver has counted, a phrase each."""
    found = []
    for device in sorted((root / "sys/devices/virtual/neuron_device").glob("neuron[0-9]*")):
        for name in ECC_COUNTERS:
            count = _text(device / "stats/hardware" / name)
            if count not in ("", "0"):
                found.append(f"{device.name}: {name} {count}")
    return found


def nvidia_gpus() -> list[tuple[str, str, int]]:
    """(index, driver, uncorrected memory errors since the driver was loaded) of every GPU.

    Raises:
        NodeError: `nvidia-smi` is absent, fails, or answers something else.
    """
    words = ask(
        "nvidia-smi", "--query-gpu=index,driver_version,ecc.errors.uncorrected.volatile.total",
        "--format=csv,noheader",
    )  # fmt: skip
    found = []
    for line in words.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise NodeError(f"nvidia-smi answers {line!r}")
        index, driver, errors = fields
        found.append((index, driver, int(errors) if errors.isdigit() else 0))  # "[N/A]": no ECC
    return found


def _count(found: int, what: str, cluster: Cluster) -> HealthFinding:
    wanted = cluster.devices_per_node
    if found < wanted:
        words = f"{found} {what}s, profile {cluster.name} says {wanted}"
        return fail("devices", found, wanted, words)
    return ok("devices", found, wanted)


def _driver(found: str, cluster: Cluster) -> Iterator[HealthFinding]:
    wanted = cluster.health.driver_version
    if wanted is not None and found != wanted:
        words = f"driver {found or 'unknown'}, profile {cluster.name} says {wanted}"
        yield fail("driver", found, wanted, words)
    elif found:
        yield ok("driver", found, wanted or "")


def _errors(found: list[str]) -> HealthFinding:
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        words = f"uncorrected memory errors: {', '.join(found[:3])}{more}"
        return fail("device errors", len(found), 0, words)
    return ok("device errors", 0)


def _cpus(cluster: Cluster) -> HealthFinding:
    found = os.cpu_count() or 1
    wanted = cluster.cpus_per_node
    if wanted is not None and found < wanted:
        words = f"{found} CPUs, profile {cluster.name} says {wanted}"
        return warn("CPUs", found, wanted, words)
    return ok("CPUs", found, wanted or "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def efa_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[HealthFinding]:
    """The EFA interfaces that libfabric can use; nothing where the profile asks for none.

    Args:
        cluster: The profile.
        root: Where /sys lies.

    Raises:
        NodeError: libfabric's `fi_info` finds none.
    """
    wanted = cluster.health.efa_interfaces
    if wanted == 0:
        return
    found = fabric_interfaces() if find("fi_info") else kernel_interfaces(root)
    if found < wanted:
        words = f"{found} EFA interfaces, profile {cluster.name} says {wanted}"
        yield fail("EFA", found, wanted, words)
    else:
        yield ok("EFA", found, wanted)


def fabric_interfaces() -> int:
    """Interfaces by libfabric: every one is a domain (`domain: rdmap16s27-rdm`).

    Raises:
        NodeError: fi_info fails, which it does where there is none.
    """
    words = ask("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
    return len(set(re.findall(r"^\s*domain: (\S+)$", words, re.MULTILINE)))


def kernel_interfaces(root: Path) -> int:
    """RDMA devices of the kernel whose driver is EFA's."""
    devices = (root / "sys/class/infiniband").glob("*/device/driver")
    return sum(driver.resolve().name == "efa" for driver in devices)


# Where AWS's packages put theirs: not on a batch job's $PATH by themselves.
FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin", "/usr/sbin")
LIMIT_S = 20.0


def find(name: str) -> str | None:
    """A program's path, on $PATH or in the vendors' folders."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def ask(name: str, *arguments: str, limit_s: float = LIMIT_S) -> str:
    """What a program prints.

    Raises:
        NodeError: it is absent, too slow or fails; the message holds its last words.
    """
    path = find(name)
    if path is None:
        raise NodeError(f"{name} is neither on $PATH nor in {', '.join(FOLDERS)}")
    try:
        done = subprocess.run(
            [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=limit_s, check=False,
        )  # fmt: skip
    except OSError as error:
        raise NodeError(f"{path} cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"{name} gave no answer for {limit_s:.0f} s") from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise NodeError(f"{name} failed with exit code {done.returncode}: {words[-1]}")
    return done.stdout
