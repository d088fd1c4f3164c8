"""Dumps of torch's Flight Recorder: what each rank's process groups did last.

Format, variables and pipes are torch's, 2.5 to 2.13 (FlightRecorderDetail.hpp, ProcessGroupNCCL.cpp
and its DumpPipe). A dump is a pickle of plain values, which is read without running any code.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slurmllm.core.run.safe_files import read_limited

# Names of one setting in several versions: the user's value of any of them counts.
_PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE")
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ENTRIES = "2000"  # torch's default since 2.7; before, nothing was recorded
_LARGEST = 64 << 20  # bytes of a dump; 2,000 entries with their stacks are about 2 MB
_PEERS = re.compile(r"(?:send|recv)\s+(\d+)(?:->|<-)(\d+)$")
_KEPT = 100  # finished operations of each group


class StackFrame(BaseModel):
    """A line of Python code."""

    name: str
    filename: str
    line: int


class Operation(BaseModel):
    """A collective, or a send or receive, as one rank recorded it."""

    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    is_p2p: bool = False
    profiling_name: str  # `nccl:all_reduce`, `nccl:recv 0<-1`
    state: str
    retired: bool = False
    input_sizes: list[list[int]] = []
    frames: list[StackFrame] = []

    @property
    def finished(self) -> bool:
        """Whether it is over; gloo has no states, and NCCL retires what has timed out."""
        by_gloo = self.profiling_name.startswith("gloo:")
        return self.state == "completed" or (by_gloo and self.retired)

    @property
    def name(self) -> str:
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @property
    def peers(self) -> frozenset[int]:
        """The two ranks, within the group, of a send or receive; empty if not known."""
        match = _PEERS.search(self.profiling_name)
        return frozenset(map(int, match.groups())) if match else frozenset()

    @property
    def group(self) -> str:
        name, description = self.process_group
        return name if description in ("", "undefined") else description

    @property
    def caller(self) -> str:
        """The first frame that is not torch's: ` (train.py:31)`; empty if unknown."""
        frames = (frame for frame in self.frames if "/torch/" not in frame.filename)
        frame = next(frames, None)
        return "" if frame is None else f" ({Path(frame.filename).name}:{frame.line})"


class GroupRanks(BaseModel):
    """The members of a process group."""

    ranks: str  # a list, as text


class Recording(BaseModel):
    """One rank's operations, oldest first."""

    entries: list[Operation]
    pg_config: dict[str, GroupRanks] = {}
    from_start: bool = False  # whether no entry was overwritten

    def members(self, group: str) -> frozenset[int]:
        """Return the ranks of a group by its name; empty if unknown (gloo, of torch 2.13)."""
        config = self.pg_config.get(group)
        ranks = [] if config is None else config.ranks.strip("[] ").split(",")
        return frozenset(int(rank) for rank in ranks if rank.strip().isdigit())

    def last_number(self, group: str) -> int:
        """Return the number of the last collective of a group; 0 if there is none."""
        entries = (e for e in self.entries if e.process_group[0] == group and not e.is_p2p)
        return max((entry.collective_seq_id for entry in entries), default=0)

    def is_before(self, group: str, number: int) -> bool:
        """Whether this rank surely has not begun a collective."""
        last = self.last_number(group)
        return last < number and (last > 0 or self.from_start)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has plain values only, not {module}.{name}")


def recorder_variables(
    folder: Path, environment: Mapping[str, str], nccl: bool = False
) -> dict[str, str]:
    """Return the variables by which torch records, and dumps on request and after a time-out.

    What the user has set stays. Without DUMP_ON_TIMEOUT, torch looks at its pipe every ten minutes;
    with NCCL, some versions need the old name of the size, of which others warn.
    """
    variables = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} if nccl else {}
    paths = str(folder / "rank_")
    for names, value in ((_PIPES, paths), (_DUMPS, paths), (_SIZES if nccl else (), _ENTRIES)):
        if not environment.keys() & {*names}:
            variables |= dict.fromkeys(names, value)
    return {name: value for name, value in variables.items() if name not in environment}


def dump_prefixes(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the paths of pipes and dumps, up to the rank; empty if not set."""
    pipes, dumps = (
        next((environment[name] for name in names if environment.get(name)), "")
        for names in (_PIPES, _DUMPS)
    )
    return pipes, dumps


def request_dump(pipe: Path) -> bool:
    """Ask a process for its dump; returns False if it does not listen."""
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        return bool(stream.write(b"1"))


def read_dump(path: Path) -> dict[str, Any]:
    """Return a dump as torch or `shortened` wrote it; OSError, ValueError if it can't be read."""
    try:
        dump = _PlainUnpickler(io.BytesIO(read_limited(path, _LARGEST))).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
    ) as error:
        raise ValueError(f"{path} is not a dump: {error}") from error
    if not isinstance(dump, dict):
        raise ValueError(f"{path} is not a dump")
    return dump


def read_recording(path: Path) -> Recording:
    """Return the operations of a dump; OSError, ValueError if it can't be read."""
    return Recording.model_validate(read_dump(path))


def shortened(dump: dict[str, Any]) -> bytes:
    """Return a dump with what is unfinished and the last operations of each group."""
    recording = Recording.model_validate(dump)
    counts: dict[object, int] = {}
    entries = []
    for entry, operation in zip(
        reversed(dump["entries"]), reversed(recording.entries), strict=True
    ):
        key = operation.process_group, operation.is_p2p
        counts[key] = counts.get(key, 0) + operation.finished
        if not operation.finished or counts[key] <= _KEPT:
            entries.append(entry)
    from_start = all(entry.get("record_id") == 0 for entry in dump["entries"][:1])
    return pickle.dumps({**dump, "entries": entries[::-1], "from_start": from_start})
