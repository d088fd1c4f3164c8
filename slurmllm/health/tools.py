"""Programs of vendors that know the hardware: called with a limit, found where they are put."""

from __future__ import annotations

import os
import shutil
import subprocess

from slurmllm.errors import NodeError

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
