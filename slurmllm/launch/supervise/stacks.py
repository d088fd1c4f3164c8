"""The stacks of workers that hang: what launchers write, and what the supervisor reads in them.

Our own workers dump theirs by faulthandler. Of what does not answer, such as another project's
trainer, /proc tells the state, and py-spy the stack if it is installed. Without frames, the rank
that hangs is the one that waits for something else than the others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.format import by_key, format_ranks
from slurmllm.core.run.records import Lines, Ranks
from slurmllm.core.run.rundir import AttemptDir, read_by_rank
from slurmllm.core.run.safe_files import read_limited

# Frames as faulthandler and py-spy print them.
_FAULTHANDLER = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^:)]+):(?P<line>\d+)\)$", re.M)
# Frames of a worker that computes or waits for the others.
# py-spy shortens their paths.
_COLLECTIVE = re.compile(r"\b(torch|torch_xla|neuronx_distributed)/|slurmllm/train/backends/")
_MAIN = re.compile(r'"MainThread"\n((?:\s+\S+ \(.*\)\n?)+)')  # as py-spy prints it
# Variables that torchrun and its like set for each process that they start; the third is its rank
# if the first two do not differ from their own.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_STARTED = re.compile(r"^rank (\d+), ", re.M)
# Not of what waits for its children or their output.
_STATE = re.compile(
    r"^.{0,200}state (?P<state>\w).{0,80}, waits in (?!do_wait|pipe_read)(?P<channel>\S{1,80})",
    re.M,
)
# Channels of the kernel in which a process usually waits for its peers
_FOR_PEERS = re.compile(r"futex|poll|ep_|do_epoll|sk_wait|wait_woken|unix_stream|inet_|tcp_")
_PROCESS = re.compile(r"^process \d+, ")
_COMPUTING = "computing"
_IN_PYTHON = "Python"


class StackLocation(NamedTuple):
    """Location of a worker's main thread."""

    text: str
    outside_step: bool  # whether it surely neither computed nor waited for the others
    wait: str = ""  # what it waits for, as far as known; empty: for the others
    worker: int = -1  # rank of the worker, which may have started several


def read_locations(attempt: AttemptDir) -> dict[int, StackLocation]:
    """Return the locations by rank, also of what programs like torchrun have started."""
    locations = {}
    for worker, dump in read_stacks(attempt).items():
        _, *pieces = _STARTED.split(dump)
        ranks = [int(rank) for rank in pieces[::2]] or [worker]
        for rank, section in zip(ranks, pieces[1::2] or [dump], strict=True):
            locations[rank] = stack_location(section)._replace(worker=worker)
    return locations


def read_stacks(attempt: AttemptDir) -> dict[int, str]:
    """Return the dumps of the workers' stacks that can be read, by rank."""
    return read_by_rank(attempt.stacks, lambda path: read_limited(path).decode(errors="replace"))


def stack_location(dump: str) -> StackLocation:
    """Return the location of a worker's main thread in a dump of its stacks."""
    if frozen := re.search(r"^(process .*: )?no answer.*", dump, re.M):
        return StackLocation(frozen[0], outside_step=True)
    # faulthandler prints the thread that took the signal, the main one, under "Current thread",
    # and the innermost frame first.
    main = dump.rpartition("Current thread")[2]
    spied = _MAIN.search(main)
    frames = list(_FAULTHANDLER.finditer(main))
    frames = frames or list(_PY_SPY.finditer(spied[1] if spied else main))
    states = {_wait_of(state): state[0] for state in reversed(list(_STATE.finditer(dump)))}
    wait = next((wait for wait in states if wait not in ("", _COMPUTING)), next(iter(states), ""))
    if not frames:
        return StackLocation(states.get(wait, "no Python frames"), False, wait)
    caller = next((frame for frame in frames if "slurmllm/" in frame["path"]), frames[0])
    description = " from ".join(
        f"{frame['name']} ({'/'.join(frame['path'].split('/')[-2:])}:{frame['line']})"
        for frame in dict.fromkeys((frames[0], caller))
    )
    # A frame of a library or a backend: it is in the step that all workers take together.
    if any(_COLLECTIVE.search(frame["path"]) for frame in frames):
        return StackLocation(description, outside_step=False)
    # Another project's trainer, whose state is known, may wait for the others anywhere.
    return StackLocation(description, not states, wait or _IN_PYTHON)


def _wait_of(state: re.Match[str]) -> str:
    if state["state"] == "R":
        return _COMPUTING
    return "" if _FOR_PEERS.match(state["channel"]) else state["channel"]


def outliers(locations: Mapping[int, StackLocation]) -> Ranks:
    """Return the ranks for which the others wait; empty if nothing tells them apart."""
    ranks = [rank for rank, location in locations.items() if location.outside_step]
    waits = Counter(location.wait for location in locations.values())
    if not ranks and waits:
        usual, count = waits.most_common(1)[0]
        usuals = {_COMPUTING, "" if "" in waits else _IN_PYTHON}
        usuals = {usual} if 2 * count > len(locations) else usuals
        ranks = [rank for rank, location in locations.items() if location.wait not in usuals]
    return tuple(sorted(ranks)) if len(ranks) < len(locations) else ()


def stack_lines(locations: Mapping[int, StackLocation], missing: Sequence[int] = ()) -> Lines:
    """Return a line for each location with its ranks, `missing` ranks or outliers first."""
    first = [rank for rank in missing if rank in locations] or outliers(locations)
    ranks_by_line = by_key(
        ((rank in first, _PROCESS.sub("", location.text)), rank)
        for rank, location in sorted(locations.items())
    )
    groups = sorted(
        ranks_by_line.items(), key=lambda item: (item[0][0], len(item[1])), reverse=True
    )
    return tuple(f"{format_ranks(ranks)}: {text}" for (_, text), ranks in groups[:5])


def inspect_process(pid: int, by_spy: bool = True) -> str:
    """Return what /proc and py-spy show of a process: its state, where it waits, its stack."""
    channel = ""
    with suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text().strip()
    head = f"state {_status(pid, 'State') or '?'}, waits in {channel or 'nothing'}\n"
    if by_spy and (spy := shutil.which("py-spy")):
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=10.0
            )
            head += (done.stdout or done.stderr).decode(errors="replace")
    return head


def stacks_of(pid: int, until: float) -> str:
    """Return what can be seen of a worker and of the ranks that it has started.

    After `until`, by time.monotonic(), without py-spy: the supervisor waits for the node.
    """
    import psutil  # here: `status` reads stacks, and needs no processes

    sections: dict[str, str] = defaultdict(str)  # `rank 3, ` → its processes
    seen: dict[int, tuple[list[str | None], str]] = {}  # process → its variables and section
    with suppress(psutil.Error):
        worker = psutil.Process(pid)
        for process in [worker, *worker.children(recursive=True)][:16]:
            with suppress(psutil.Error):
                variables = process.environ()
                values = [variables.get(name) for name in _RANKS]
                of_parent, head = seen.get(process.ppid(), (values, ""))
                if values != of_parent and any(values):
                    mpi = [rank for rank in values[:2] if rank not in of_parent[:2]]
                    head = f"rank {[*mpi, *values[2:]][0]}, "
                seen[process.pid] = values, head
                frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
                answer = "no answer; " if frozen else ""  # the others wait for what does not run
                text = inspect_process(process.pid, time.monotonic() < until)
                sections[head] += f"process {process.pid}, {process.name()}: {answer}{text}\n"
    return "".join(head + texts for head, texts in sections.items())


def catches(pid: int, number: int) -> bool:
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def _status(pid: int, field: str) -> str:
    """Return a field of a process's status (proc(5)); empty if it cannot be read."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return status.partition(f"\n{field}:")[2].partition("\n")[0].strip()
    return ""
