"""Programs that a model wrote, run against their tests; pass@k as HumanEval has it.

The harness has a metric for it, fetched from a hub at run time. This one needs no network. Each
program runs in a process of its own, in an empty folder, with limits on time and memory. That
stops mishaps and is no sandbox: a program can read and write whatever its user can.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb
from typing import Any

TIME_LIMIT_S = 10
_LIMITS = {resource.RLIMIT_AS: 4 << 30, resource.RLIMIT_FSIZE: 64 << 20}


def programs(
    responses: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A filter of the harness: prompts with what the model wrote behind them."""
    return [
        [doc["prompt"] + response for response in samples]
        for samples, doc in zip(responses, docs, strict=True)
    ]


def pass_at_k(
    references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
) -> dict[str, float]:
    """A metric of the harness: the chance that one of k samples passes, unbiased.

    1 - C(n - c, k) / C(n, k) for c passing ones of n (Chen et al. 2021, arXiv 2107.03374,
    section 2.1). A k above n is left out.

    Args:
        references: The tests, of one problem.
        predictions: The programs, of one problem.
        k: Numbers of samples.
    """
    (tests,), (samples,) = references, predictions
    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        passed = sum(pool.map(lambda program: passes(f"{program}\n\n{tests}\n"), samples))
    n = len(samples)
    return {f"pass@{i}": 1 - comb(n - passed, i) / comb(n, i) for i in k if i <= n}


def passes(program: str, limit_s: float = TIME_LIMIT_S) -> bool:
    """Whether a program runs to its last line, in time."""
    word = secrets.token_hex(16)  # an early exit does not print it
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", f"{program}\nprint({word!r})"],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(ProcessLookupError):
            for kind, most in _LIMITS.items():
                resource.prlimit(process.pid, kind, (most, most))
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # Also what the program started itself and left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read().rstrip().endswith(word.encode())
