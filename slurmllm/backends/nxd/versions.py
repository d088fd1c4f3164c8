"""Versions of what a Neuron node runs: packages, driver, runtime."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

NOT_INSTALLED = "not installed"
_PACKAGES = (
    "neuronx-distributed", "torch-neuronx", "libneuronxla", "neuronx-cc", "torch-xla", "torch",
)  # fmt: skip
_DRIVER = Path("/sys/module/neuron/version")
_LIBRARIES = Path("/opt/aws/neuron/lib")
_LIMIT_S = 10.0


def versions() -> dict[str, str]:
    """The packages that make the graphs."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found


def node_versions() -> dict[str, str]:
    """Those, and the driver, the runtime and its collectives on this node."""
    return {
        **versions(),
        "neuron-driver": _driver(),
        "neuron-runtime": _library("libnrt.so.1", "aws-neuronx-runtime-lib"),
        "neuron-collectives": _library("libnccom.so.2", "aws-neuronx-collectives"),
    }


def _driver() -> str:
    """Of the kernel module that is loaded, else of the one that would be."""
    try:
        return _DRIVER.read_text(encoding="utf-8").strip()
    except OSError:
        return _said_by(["modinfo", "--field", "version", "neuron"]) or NOT_INSTALLED


def _library(name: str, package: str) -> str:
    """By the file that the library's name points to, else by the distribution's package."""
    file = _LIBRARIES / name
    if file.exists() and (found := re.search(r"\.so\.(\d+\.\d[\w.+-]*)$", file.resolve().name)):
        return found.group(1)
    return (
        _said_by(["dpkg-query", "--show", "--showformat=${Version}", package])
        or _said_by(["rpm", "--query", "--queryformat", "%{VERSION}", package])
        or NOT_INSTALLED
    )


def _said_by(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
