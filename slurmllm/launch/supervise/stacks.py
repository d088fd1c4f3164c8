"""The stacks of workers that hang: what launchers write, and what the supervisor reads in them.

Our own workers dump theirs by faulthandler. Of what does not answer, such as another project's
trainer, /proc tells the state, and py-spy the stack if it is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.run.rundir import AttemptDir, read_all
from slurmllm.core.run.safe_files import read_limited

_MOST_PROCESSES = 16  # of a worker
# Frames as faulthandler and py-spy print them.
_FAULTHANDLER = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^:)]+):(?P<line>\d+)\)$")
# Frames of a worker that computes or waits for the others.
_COLLECTIVE = re.compile(r"/torch/|/torch_xla/|/neuronx_distributed/|slurmllm/train/backends/")


class StackLocation(NamedTuple):
    """Location of a worker's main thread."""

    text: str
    outside_step: bool  # whether it neither computed nor waited for the others


def read_locations(attempt: AttemptDir) -> dict[int, StackLocation]:
    return {rank: stack_location(dump) for rank, dump in read_stacks(attempt).items()}


def read_stacks(attempt: AttemptDir) -> dict[int, str]:
    """Return the dumps of the workers' stacks that can be read, by rank."""
    folder = attempt.stacks(0).parent

    def read(path: Path) -> tuple[int, str] | None:
        try:
            rank = int(path.stem.removeprefix("rank_"))
            return rank, read_limited(path).decode(errors="replace")
        except (OSError, ValueError):
            return None

    paths = sorted(folder.glob("rank_*.txt")) if folder.is_dir() else []
    return dict(dump for dump in read_all(read, paths) if dump is not None)


def stack_location(dump: str) -> StackLocation:
    """Return the location of a worker's main thread in a dump of its stacks."""
    if dump.startswith("no answer"):
        return StackLocation(dump.splitlines()[0], outside_step=True)
    # faulthandler prints the thread that took the signal, the main one, under "Current thread",
    # and the innermost frame first.
    main = dump.rpartition("Current thread")[2]
    frames = list(_FAULTHANDLER.finditer(main)) or list(_PY_SPY.finditer(main))
    if not frames:
        return StackLocation("no Python frames", outside_step=False)
    caller = next((frame for frame in frames if "slurmllm/" in frame["path"]), frames[0])
    description = " from ".join(
        f"{frame['name']} ({'/'.join(frame['path'].split('/')[-2:])}:{frame['line']})"
        for frame in dict.fromkeys((frames[0], caller))
    )
    # A frame of a library or a backend: it is in the step that all workers take together.
    return StackLocation(
        description, not any(_COLLECTIVE.search(frame["path"]) for frame in frames)
    )


def outliers(locations: Mapping[int, StackLocation]) -> tuple[int, ...]:
    """Return the ranks for which the others wait; empty if all or none are outside the step."""
    ranks = tuple(sorted(rank for rank, location in locations.items() if location.outside_step))
    return ranks if len(ranks) < len(locations) else ()


def stack_lines(locations: Mapping[int, StackLocation]) -> tuple[str, ...]:
    """Return a line for each outlier; without outliers, one with the most common location."""
    ranks = outliers(locations)
    lines = [f"rank {rank}: {locations[rank].text}" for rank in ranks[:4]]
    if not ranks and locations:
        texts = [location.text for location in locations.values()]
        location = max(set(texts), key=texts.count)
        lines = [f"{texts.count(location)} of {len(texts)} workers: {location}"]
    return tuple(lines)


def inspect_process(pid: int, by_spy: bool = True) -> str:
    """Return what /proc and py-spy show of a process: its state, where it waits, its stack."""
    state, channel = "?", "nothing"
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        state = status.partition("State:")[2].partition("\n")[0].strip() or state
        channel = Path(f"/proc/{pid}/wchan").read_text().strip() or channel
    head = f"state {state}, waits in {channel}\n"
    spy = shutil.which("py-spy") if by_spy else None
    if spy is None:
        return head
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=10.0, check=False)
        return head + (done.stdout or done.stderr).decode(errors="replace")
    return head


def stacks_of(pid: int, until: float) -> str:
    """Return what can be seen of a worker and the processes below it, a stopped one first.

    After `until`, by time.monotonic(), without py-spy: the supervisor waits for the node.
    """
    import psutil  # here: `status` reads stacks, and needs no processes

    stopped, running = list[str](), list[str]()
    with suppress(psutil.Error):
        worker = psutil.Process(pid)
        for process in [worker, *worker.children(recursive=True)][:_MOST_PROCESSES]:
            with suppress(psutil.Error):
                text = inspect_process(process.pid, time.monotonic() < until)
                text = f"process {process.pid}, {process.name()}: {text}"
                frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
                (stopped if frozen else running).append(text)
    # The others wait for what does not run.
    return ("no answer; " if stopped else "") + "\n".join(stopped + running)


def catches(pid: int, number: int) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
