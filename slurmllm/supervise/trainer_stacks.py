"""The stacks of a trainer's processes that hang: by py-spy if it is there, else the kernel's."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil

from slurmllm.supervise.watchdog import inspect_process

_MOST_PROCESSES = 16  # of a worker


def stacks_of(pid: int) -> str:
    """Return what can be seen of a worker and the processes below it, a stopped one first.

    A process that has faulthandler gets SIGABRT, and prints its stack into its log before it ends.
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
            texts[stopped].append(head + inspect_process(process.pid))
    for process in processes:
        if _handles_abort(process.pid):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGABRT)
    # The others wait for what does not run.
    return ("no answer; " if texts[True] else "") + "\n".join(texts[True] + texts[False])


def _handles_abort(pid: int) -> bool:
    """Whether a process has a handler of SIGABRT, as faulthandler installs one."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGABRT - 1) & 1)
    return False
