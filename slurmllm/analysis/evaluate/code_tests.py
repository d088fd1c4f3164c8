"""Runs programs that a model wrote against their tests; pass@k as in HumanEval.

The harness downloads its own metric from a hub at run time; this one needs no network. Each program
runs in a process of its own, in an empty folder, with limits on time and memory. This prevents
accidents but is not a sandbox: a program can read and write whatever its user can, and one that
looks for the mark of success in its own code finds it.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb

from slurmllm.core.format import Values

TIME_LIMIT_S = 10
# Address space and file size, bytes.
_LIMITS = {resource.RLIMIT_AS: 4 << 30, resource.RLIMIT_FSIZE: 64 << 20}


def programs(responses: Sequence[Sequence[str]], docs: Sequence[Values]) -> list[list[str]]:
    """Return prompts followed by what the model wrote: a filter of the harness."""
    return [
        [doc["prompt"] + response for response in samples]
        for samples, doc in zip(responses, docs, strict=True)
    ]


def pass_at_k(
    references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
) -> dict[str, float]:
    """Return the unbiased probability that at least one of k samples passes: a harness metric.

    1 - C(n - c, k) / C(n, k) for c of n samples that pass (Chen et al. 2021, arXiv 2107.03374,
    section 2.1). A k above n is omitted. `references` are the tests and `predictions` the programs
    of one problem.
    """
    (tests,) = references
    (samples,) = predictions
    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        passed = sum(pool.map(lambda program: passes(f"{program}\n\n{tests}\n"), samples))
    n = len(samples)
    return {f"pass@{i}": 1 - comb(n - passed, i) / comb(n, i) for i in k if i <= n}


def passes(program: str, limit_s: float = TIME_LIMIT_S) -> bool:
    """Return whether a program completes its last line in time."""
    marker = secrets.token_hex(16)  # not printed if the program exits early, even with code 0
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as source,
    ):
        source.write(f"{program}\nprint({marker!r})\n".encode(errors="surrogatepass"))
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder},
            stdin=source,  # the command line can be read in /proc
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # for killpg
        )
        # Not by preexec_fn, which may deadlock in a process with threads (pass_at_k has a pool).
        with contextlib.suppress(ProcessLookupError):
            for kind, limit in _LIMITS.items():
                resource.prlimit(process.pid, kind, (limit, limit))
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _kill_others(folder)
        output.seek(0)
        return output.read().rstrip().endswith(marker.encode())


def _kill_others(folder: str) -> None:
    """Kill what a program has started in sessions of its own, by the HOME that it was given."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == folder:
                process.kill()
