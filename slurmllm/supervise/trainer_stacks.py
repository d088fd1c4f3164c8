"""The stacks of a trainer's processes that hang: by py-spy if it is there, else the kernel's."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from slurmllm.supervise.watchdog import inspect_process

_MOST_PROCESSES = 16  # of a worker


def stacks_of(pid: int, until: float) -> str:
    """Return what can be seen of a worker and the processes below it, a stopped one first.

    After `until`, by time.monotonic(), without py-spy: the supervisor waits for the node.
    """
    processes = list[psutil.Process]()
    with suppress(psutil.Error):
        worker = psutil.Process(pid)
        processes = [worker, *worker.children(recursive=True)][:_MOST_PROCESSES]
    texts = {True: list[str](), False: list[str]()}
    for process in processes:
        with suppress(psutil.Error):
            head = f"process {process.pid}, {process.name()}: " if len(processes) > 1 else ""
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
            texts[stopped].append(head + inspect_process(process.pid, time.monotonic() < until))
    # The others wait for what does not run.
    return ("no answer; " if texts[True] else "") + "\n".join(texts[True] + texts[False])


def abort(pid: int) -> None:
    """Have a worker and those below it that have faulthandler print their stacks, and end."""
    with suppress(psutil.Error):
        worker = psutil.Process(pid)
        for process in [worker, *worker.children(recursive=True)][:_MOST_PROCESSES]:
            if catches(process.pid, signal.SIGABRT):
                process.send_signal(signal.SIGABRT)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
