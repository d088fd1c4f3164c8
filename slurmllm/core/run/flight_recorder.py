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
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slurmllm.core.run.records import Record
from slurmllm.core.run.safe_files import read_limited

# Names of one setting in several versions of torch: a user's value of any of them counts.
_PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE")
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_ENTRIES = "2000"  # torch's default since 2.7; before, nothing was recorded
_MAX_DUMP_BYTES = 64 << 20  # 2,000 entries with their stacks are about 2 MB
_PEERS = re.compile(r"(?:send|recv)\s+(\d+)(?:->|<-)(\d+)$")
_MAX_ENDED = 20  # operations of each group; one with its stack takes 3 kB
ProcessGroup = tuple[str, str]  # name and description of a process group


class StackFrame(BaseModel):
    """A line of Python code."""

    name: str
    filename: str
    line: int


class Operation(BaseModel, extra="allow"):  # torch's analyzer needs all fields
    """A collective, or a send or receive, as one rank recorded it."""

    process_group: ProcessGroup
    collective_seq_id: int
    p2p_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str  # `nccl:all_reduce`, `nccl:recv 0<-1`
    state: str
    retired: bool = False
    frames: list[StackFrame] = []

    @property
    def finished(self) -> bool:
        """Whether it has ended. gloo records no state; NCCL also retires what has timed out."""
        return self.state == "completed" or (
            self.profiling_name.startswith("gloo:") and self.retired
        )

    @property
    def peers(self) -> frozenset[int]:
        """The two ranks, within the group, of a send or receive; empty if not known."""
        match = _PEERS.search(self.profiling_name)
        return frozenset(map(int, match.groups())) if match else frozenset()

    @property
    def text(self) -> str:
        """`all_reduce 412 of group default_pg`."""
        name, description = self.process_group
        number = "" if self.is_p2p else f" {self.collective_seq_id}"
        group = name if description in ("", "undefined") else description
        return f"{self.profiling_name.rpartition(':')[2]}{number} of group {group}"

    @property
    def caller(self) -> str:
        """The first frame that is not torch's: ` (train.py:31)`; empty if unknown."""
        for frame in self.frames:
            if "/torch/" not in frame.filename:
                return f" ({Path(frame.filename).name}:{frame.line})"
        return ""


class Recording(Record):
    """One rank's operations, oldest first: all unfinished ones, the last others of each group."""

    version: str  # of the format
    entries: list[Operation]
    pg_config: dict[str, dict[str, str]]  # `ranks`: a list, as text
    from_start: bool = False  # whether no entry was overwritten

    @property
    def last_numbers(self) -> dict[ProcessGroup, int]:
        """Group → sequence number of its last collective."""
        return {e.process_group: e.collective_seq_id for e in self.entries}

    def ranks(self, group: ProcessGroup) -> str:
        """Return the ranks of a group as text; empty if unknown (gloo, of torch 2.13)."""
        return self.pg_config.get(group[0], {}).get("ranks", "")

    def is_before(self, operation: Operation) -> bool:
        """Whether this rank, which does not wait in an operation, has certainly not begun it."""
        number = operation.collective_seq_id
        last = self.last_numbers.get(operation.process_group, 0 if self.from_start else number)
        return operation.is_p2p or last < number


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump contains plain values only, not {module}.{name}")


def recorder_variables(
    folder: Path, environment: Mapping[str, str], nccl: bool = False
) -> dict[str, str]:
    """Return the variables that make torch record, and dump on request and after a time-out.

    Variables that the user has set are left out. Without DUMP_ON_TIMEOUT, torch looks at its pipe
    every ten minutes; with NCCL, some versions need the old name of the size, others warn of it.
    """
    values: dict[tuple[str, ...], str] = {_PIPES: f"{folder}/rank_", _DUMPS: f"{folder}/rank_"}
    if nccl:
        values |= {_SIZES: _ENTRIES, _ON_TIMEOUT: "1"}
    unset = [names for names in values if not environment.keys() & {*names}]
    return {name: values[names] for names in unset for name in names}


def dump_prefixes(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the paths of pipes and dumps without the rank at their end; empty if not set."""
    pipes, dumps = (
        next(filter(None, map(environment.get, names)), "") for names in (_PIPES, _DUMPS)
    )
    return pipes, dumps


def request_dump(pipe: Path) -> bool:
    """Request a process's dump; returns False if no process reads the pipe."""
    flags = os.O_WRONLY | os.O_NONBLOCK
    with suppress(OSError), os.fdopen(os.open(pipe, flags), "wb", 0) as stream:
        return bool(stream.write(b"1"))
    return False


def read_dump(path: Path) -> Recording:
    """Return the operations of a torch dump that matter; raises OSError or ValueError."""
    content = read_limited(path, _MAX_DUMP_BYTES)
    try:
        recording = Recording.model_validate(_PlainUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # damaged bytes may raise anything
        raise ValueError(f"{path} is not a dump: {error}") from error
    entries = recording.entries
    last = {e.process_group: e.collective_seq_id + e.p2p_seq_id for e in entries}
    entries = [
        e
        for e in entries
        if not e.finished or e.collective_seq_id + e.p2p_seq_id > last[e.process_group] - _MAX_ENDED
    ]
    from_start = getattr(next(iter(entries), None), "record_id", 0) == 0
    return recording.model_copy(update={"entries": entries, "from_start": from_start})
