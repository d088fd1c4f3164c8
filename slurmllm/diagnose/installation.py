"""This Python and its packages: what a backend needs, and which versions it was tried with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.finding import Finding, finding_fail, finding_ok, finding_warn, skipped

# constraints.txt names the same: numerics and compiled graphs were checked on this version.
TESTED_TORCH = "2.13.0"
IMPORT_TIMEOUT_S = 300  # a cold import of torch from a slow shared file system

# Neuron 2.28: the last SDK for training through NxD; docs/parallelcluster.md has the reasons.
# Distribution → (module, versions that serve, the one that configs/parallelcluster installs).
NEURON_PACKAGES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "torch-xla": ("torch_xla", ("2.9",), "2.9.0"),
    "torch-neuronx": ("torch_neuronx", ("2.9",), "2.9.0.2.12.22436"),
    "neuronx-cc": ("neuronxcc", ("2.23",), "2.23.6484.0"),
    "libneuronxla": ("libneuronxla", ("2.2",), "2.2.15515.0"),
    "neuronx-distributed": ("neuronx_distributed", ("0.17", "0.18"), "0.17.26814"),
}
NEURON_TORCH = "2.9"
NEURON_PYTHON = ((3, 11), (3, 12))
_NEURON_REMEDY = (
    "make the environment with `configs/parallelcluster/neuron.sh python DIR` (Neuron 2.28.1)"
)


def installation_findings(cluster: Cluster) -> Iterator[Finding]:
    """Everything about this Python, for the backend that the profile's device calls for."""
    neuron = cluster.device == "neuron"
    yield _python(neuron)
    yield _packages()
    yield _torch(cluster)
    if neuron:
        yield from _neuron()
        yield skipped("C++ compiler", "the nxd backend compiles with neuronx-cc")
    else:
        yield _compiler()


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def at_least(version: str, wanted: str) -> bool:
    """Whether a version is as new as another, by the numbers that both begin with."""
    return numbers(version) >= numbers(wanted)


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def serves(version: str, prefix: str) -> bool:
    """Whether a version is one of a series: `2.9.0` of `2.9`, `2.90` not."""
    wanted = numbers(prefix)
    return numbers(version)[: len(wanted)] == wanted


def _python(neuron: bool) -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    lowest, highest = NEURON_PYTHON
    if neuron and not lowest <= sys.version_info[:2] <= highest:
        return finding_fail(
            "python", found, "the Neuron 2.28 wheels need Python 3.11 or 3.12; a new venv"
        )
    return finding_ok("python", found)  # older than 3.11, pip refuses the package


def _packages() -> Finding:
    """What slurmllm's own metadata asks for."""
    try:
        requirements = importlib.metadata.requires("slurmllm") or []
        version = importlib.metadata.version("slurmllm")
    except importlib.metadata.PackageNotFoundError:
        return finding_warn(
            "packages", "slurmllm runs from a folder and is not installed", "pip install ."
        )
    wrong = []
    count = 0
    for requirement in requirements:
        name, _, extra = requirement.partition(";")
        if "extra" in extra or name.startswith("torch"):
            continue  # torch has a check of its own
        count += 1
        match = re.match(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?", name)
        wanted = match.group(2) if match else None
        package = match.group(1) if match else name.strip()
        present = version_of(package)
        if present is None:
            wrong.append(f"{package} missing")
        elif wanted and not at_least(present, wanted):
            wrong.append(f"{package} {present}, older than {wanted}")
    if wrong:
        return finding_fail(
            "packages", ", ".join(wrong), "pip install slurmllm again, in this environment"
        )
    return finding_ok("packages", f"slurmllm {version} and the {count} packages that it asks for")


def _torch(cluster: Cluster) -> Finding:
    """Whether torch imports, in a process of its own: this one stays light."""
    present = version_of("torch")
    if present is None:
        return finding_fail("torch", "not installed", "pip install torch, in this environment")
    words = _import_torch()
    if words is None:
        found = f"{present}; no answer in {IMPORT_TIMEOUT_S} s"
        return finding_warn("torch", found, "put the environment onto a faster file system")
    state, _, rest = words.partition(" ")
    if state != "imported":
        return finding_fail("torch", f"{present} does not import: {words}", "install it again")
    version, _, cuda = rest.partition(" ")
    if cluster.device == "neuron":
        if not serves(version, NEURON_TORCH):
            return finding_fail(
                "torch", f"{version}; torch-neuronx needs {NEURON_TORCH}", _NEURON_REMEDY
            )
        return finding_ok("torch", version)
    if not at_least(version, "2.9"):
        return finding_fail("torch", f"{version}, older than 2.9", "pip install 'torch>=2.9'")
    if cluster.device == "cuda" and cuda == "None":
        return finding_fail("torch", f"{version} is built without CUDA", "install a build for CUDA")
    if not serves(version, TESTED_TORCH):
        return finding_warn(
            "torch", f"{version}; the tests ran on {TESTED_TORCH}",
            f"pip install torch=={TESTED_TORCH}, where there is no reason against it",
        )  # fmt: skip
    return finding_ok("torch", version + ("" if cuda == "None" else f", CUDA {cuda}"))


def _import_torch() -> str | None:
    """`imported <version> <CUDA version or None>`, or the import's last line; None: too slow."""
    script = "import torch; print('imported', torch.__version__, torch.version.cuda)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True,
            timeout=IMPORT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _neuron() -> Iterator[Finding]:
    """The wheels of AWS's index, one finding each."""
    for distribution, (module, series, pinned) in NEURON_PACKAGES.items():
        present = version_of(distribution)
        if present is None:
            yield finding_fail(
                distribution, f"not installed; {pinned} is supported", _NEURON_REMEDY
            )
        elif importlib.util.find_spec(module) is None:
            yield finding_fail(
                distribution, f"{present} is the public index's placeholder: no module {module}",
                f"pip uninstall {distribution}; {_NEURON_REMEDY}",
            )  # fmt: skip
        elif not any(serves(present, prefix) for prefix in series):
            yield finding_fail(
                distribution, f"{present}; supported: {' and '.join(f'{s}.*' for s in series)}",
                _NEURON_REMEDY,
            )  # fmt: skip
        elif present.partition("+")[0] != pinned:
            yield finding_warn(distribution, f"{present}; pinned is {pinned}", _NEURON_REMEDY)
        else:
            yield finding_ok(distribution, present)


def _compiler() -> Finding:
    compiler = os.environ.get("CXX", "g++")
    path = shutil.which(compiler)
    if path is None:
        return finding_warn(
            "C++ compiler", f"no {compiler!r} here",
            "torch.compile needs one, on the nodes too: install g++, name one in $CXX, or "
            "--set train.compile=false",
        )  # fmt: skip
    return finding_ok("C++ compiler", path)
