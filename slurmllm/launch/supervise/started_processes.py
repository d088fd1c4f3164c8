"""The processes that a trainer's command starts itself, and what their launcher says of them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import psutil

_LOOK_S = 1.0  # interval between looks at the processes
# Variables by which torchrun, Open MPI, MPICH and DeepSpeed number the processes that they start
_RANKS = {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "CROSS_RANK"}
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")

# By name, and by the text of strsignal(3).
_SIGNALS = {str(signal.strsignal(number)): int(number) for number in signal.valid_signals()}
_SIGNALS |= {number.name: number.value for number in signal.Signals}
_CODES: dict[str, Callable[[str], int]] = {
    "code": int,  # negative: a signal
    "status": lambda value: signal_code(int(value)),  # of a shell or of Python
    "number": lambda value: -int(value),
    "signal": lambda value: -_SIGNALS[value],
}
_TEXTS = "|".join(map(re.escape, _SIGNALS))
# What launchers say of a process, with groups of `_CODES`, rank and node
_REPORTS = [
    re.compile(pattern)
    for pattern in (
        # torch/distributed/elastic/multiprocessing/errors/__init__.py, api.py
        r"^\s+host\s+: (?P<node>\S+)",
        r"^\s+rank\s+: (?P<rank>\d+) \(local_rank",
        r"^\s+exitcode\s+: (?P<code>-?\d+) \(pid",
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank",
        # torch/multiprocessing/spawn.py: a process's number on its node
        r"ProcessExitedException: process \d+ terminated with signal (?P<signal>SIG[A-Z]+)",
        # CPython, subprocess.py: accelerate launch, axolotl, llamafactory-cli
        r"Command .* died with <Signals\.SIG\w+: (?P<number>\d+)",
        r"Command .* died with unknown signal (?P<number>\d+)",
        r"Command .* returned non-zero exit status (?P<status>\d+)",
        # deepspeed/launcher/launch.py; composer/cli/launcher.py; lightning's subprocesses
        r"^(?:(?P<node>[\w.-]+): )?.*exits with return code = (?P<code>-?\d+)",
        r"\bRank (?P<rank>\d+) crashed with exit code (?P<code>-?\d+)",
        r"Global rank (?P<rank>\d+) \(PID \d+\) exited with code (?P<code>-?\d+)",
        r"Child process with PID \d+ terminated with code (?P<code>-?\d+)",
        # horovod/runner/gloo_run.py
        r"Process (?P<rank>\d+) exit with status code (?P<status>\d+)",
        # Open MPI and PRRTE: help-prterun.txt, in one line or two; MPI_Abort
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on"
        r"(?:\s*$| signal (?P<number>\d+))",
        r"^signal (?P<number>\d+) \([A-Z][\w ]+\)\.$",
        r"Process name: \[.*[,:](?P<rank>\d+)\]",
        r"^\s*Exit code: +(?P<status>\d+)",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+)",
        # MPICH's hydra, Intel MPI
        r"^= +RANK (?P<rank>\d+) PID \d+ RUNNING AT (?P<node>\S+)",
        r"^= +PID \d+ RUNNING AT (?P<node>\S+)",
        r"^= +KILLED BY SIGNAL: (?P<number>\d+)",
        r"EXIT STRING: .*\(signal (?P<number>\d+)\)",
        # The command's own srun; bash, of a line of a script
        rf"^srun: error: (?P<node>\S+): task (?P<rank>\d+): (?P<signal>{_TEXTS})\b",
        r"^srun: error: (?P<node>\S+): task (?P<rank>\d+): Exited with exit code (?P<status>\d+)",
        rf"line \d+: +\d+ (?P<signal>{_TEXTS})\b",
    )
]


class ProcessEnd(NamedTuple):
    """How a process ended, as the program that started it says."""

    line: int  # index
    code: int  # negative: ended by that signal
    rank: int | None = None
    node: str | None = None


def signal_code(status: int) -> int:
    """Return -N for the 128 + N of a shell, and the 256 - N of `sys.exit(-N)`; else the status."""
    if 128 < status <= 192:
        return 128 - status
    return status - 256 if 225 <= status <= 252 else status


def first_end(lines: Iterable[str]) -> ProcessEnd | None:
    """Return the process that ended first, as its launcher says in its output; None if it doesn't.

    It ends the other processes by SIGTERM: one that ended so counts only if there is no other.
    """
    ends = []
    before_cause = True
    fields = dict[str, str | None]()
    for index, line in enumerate(lines):
        before_cause &= "Root Cause (first observed failure)" not in line
        match = next(filter(None, (pattern.search(line) for pattern in _REPORTS)), None)
        if match is None:
            continue
        fields |= match.groupdict()
        rank = None if (number := fields.get("rank")) is None else int(number)
        codes = [read(value) for name, read in _CODES.items() if (value := fields.pop(name, None))]
        for code in filter(None, codes):
            if code < 0 or rank is not None:
                ends.append(
                    (
                        code == -signal.SIGTERM,
                        before_cause,
                        ProcessEnd(index, code, rank, fields.get("node")),
                    )
                )
            fields = {}
    return min(ends)[-1] if ends else None


class StartedProcesses:
    """Watches the processes that commands have started, for one that ends before the others."""

    def __init__(self) -> None:
        self.ended_first: dict[int, float] = {}  # rank → Unix time; empty or one
        self._running: dict[int, psutil.Process] = {}  # by rank
        self._next_look = 0.0

    def note(self, rank: int) -> None:
        """Note that a process has ended, unless one did before."""
        self.ended_first = self.ended_first or {rank: time.time()}

    def look(self, pids: Iterable[int]) -> None:
        """Look, now and then, for a process that has ended while others of its command run."""
        if time.monotonic() < self._next_look or self.ended_first:
            return
        self._next_look = time.monotonic() + _LOOK_S
        ended = [rank for rank, process in self._running.items() if not process.is_running()]
        if 0 < len(ended) < len(self._running):
            self.note(ended[0])
        elif ended or not self._running:
            self._running = {}
            with suppress(psutil.Error):
                for process in chain(*(started_by(psutil.Process(pid)) for pid in pids)):
                    number = next(filter(None, map(process.environ().get, _NUMBERS)), "")
                    if number.isdigit():
                        self._running[int(number)] = process


def started_by(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the workers below a process that starts others; nothing if it is one itself."""
    if not _RANKS & process.environ().keys():
        for child in process.children():
            if _RANKS & child.environ().keys():
                yield child
            else:
                yield from started_by(child)
