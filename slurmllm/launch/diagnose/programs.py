"""Runs the vendors' programs on a node, within a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess

from slurmllm.core.errors import NodeError
from slurmllm.core.run.safe_files import os_error_text

# Where AWS's packages install their tools: not on a batch job's $PATH by default.
FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin", "/usr/sbin")
TIMEOUT_S = 20.0  # nvidia-smi takes some seconds if the driver has to wake the GPUs up


class UnknownStateError(NodeError):
    """A program timed out, or its output cannot be parsed."""


def find(name: str) -> str | None:
    """Return a program's path, on $PATH or in the vendors' folders."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def run_program(
    name: str, *arguments: str, limit_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a program, whatever its exit code; NodeError if it is not installed or too slow."""
    path = find(name)
    if path is None:
        raise NodeError(f"{name} is neither on $PATH nor in {', '.join(FOLDERS)}")
    try:
        return subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except OSError as error:
        raise NodeError(f"{path} cannot be started: {os_error_text(error)}") from error
    except subprocess.TimeoutExpired as error:
        raise UnknownStateError(f"{name} did not end within {limit_s:.0f} s") from error


def output_of(name: str, *arguments: str) -> str:
    """Return a program's output; NodeError if it is not installed, too slow or fails."""
    done = run_program(name, *arguments)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise NodeError(f"{name} failed with exit code {done.returncode}: {lines[-1]}")
    return done.stdout
