"""Processes forked from one that has imported torch, which takes a new process four seconds."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh_pool import PRELOAD


class Forked:
    """A process that executes a text as `python -c` does; the methods are those of Popen."""

    def __init__(
        self,
        entry: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        folders: Sequence[Path],
        log: Path,
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD.split())
        self._process = context.Process(
            target=_execute, args=(entry, argv, dict(env), folders, log)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return int(self._process.exitcode)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _execute(
    entry: str, argv: Sequence[str], env: dict[str, str], folders: Sequence[Path], log: Path
) -> None:
    gc.freeze()  # collections would visit and copy all of PRELOAD
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = map(str, folders)
    sys.argv = ["-c", *argv]
    exec(compile(entry, "<string>", "exec"), {"__name__": "__main__"})
