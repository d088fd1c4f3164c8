"""A launcher's part of the watchdog: its workers' phases, and their stacks on request.

Workers write into files on the node's own memory disk, so that none of them ever waits for the
shared file system; the launcher forwards changes a few times a minute.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from slurmllm.config.recipe import WatchdogConfig
from slurmllm.records import Heartbeat, WorkerPhase
from slurmllm.rundir import AttemptDir
from slurmllm.supervise.watchdog import HEARTBEAT_S
from slurmllm.worker_phase import PHASE_FILE, STACKS_FILE, STACKS_SIGNAL, read_phase

READ_S = 1.0  # interval between reads of the workers' files
WRITE_S = 5.0  # minimum interval between writes to the shared file system
DUMP_S = 3.0  # for workers to dump their stacks
PY_SPY_S = 10.0
_FOLDER, _LOCK = "slurmllm-phases-", "lock"


class Heartbeats:
    """The phase files of one node's workers, and the node's heartbeat.

    Args:
        attempt: The attempt's folder, for heartbeats and stacks.
        node: Name of this node.
        config: The recipe's watchdog section.
    """

    def __init__(self, attempt: AttemptDir, node: str, config: WatchdogConfig) -> None:
        self._attempt, self._node = attempt, node
        # A heartbeat must be younger than a fraction of the limits, however short these are.
        self._write_s = min(WRITE_S, max(config.min_step_s / 8, 0.25))
        self._read_s = min(READ_S, self._write_s)
        self._written_at = self._read_at = -HEARTBEAT_S
        self._written: dict[int, WorkerPhase] = {}
        _remove_stale_folders()
        self._folder: Path | None = None
        with suppress(OSError):
            parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
            # Held as long as this process lives and by no other: workers do not inherit it.
            self._lock = (self._folder / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that name a worker's files."""
        if self._folder is None:
            return {}
        return {PHASE_FILE: str(self._phase(rank)), STACKS_FILE: str(self._stacks(rank))}

    def update(self, ranks: Mapping[int, int]) -> None:
        """Forward the workers' phases if it is time; `ranks` maps rank to process id."""
        now = time.monotonic()
        if self._folder is None or now - self._read_at < self._read_s:
            return
        self._read_at = now
        phases = {rank: read_phase(self._phase(rank)) for rank in ranks}
        # A worker that has not imported slurmllm yet has no phase.
        known = {rank: phase for rank, phase in phases.items() if phase is not None}
        waited_s = now - self._written_at
        changed = known != self._written and waited_s >= self._write_s
        if changed or waited_s >= HEARTBEAT_S:
            self._written, self._written_at = known, now
            self._write(Heartbeat(node=self._node, written_at=time.time(), ranks=known))

    def _write(self, heartbeat: Heartbeat) -> None:
        # Without fsync: a heartbeat that a crash removes has no reader any more.
        path = self._attempt.heartbeat(self._node)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(heartbeat.model_dump_json())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def dump_stacks(self, running: Mapping[int, int]) -> None:
        """Have all workers dump their stacks, and copy them into the run directory.

        Args:
            running: Rank → process id.
        """
        for pid in running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + DUMP_S
        waiting = dict(running)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {rank: pid for rank, pid in waiting.items() if not self._read_dump(rank)}
        if not waiting:
            time.sleep(0.2)  # for a dump that has begun to end
        for rank, pid in running.items():
            dump = self._read_dump(rank) or _inspect_process(pid)
            path = self._attempt.stacks(rank)
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                path.write_text(dump)  # the other nodes count these files

    def close(self) -> None:
        """Remove the workers' files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def _read_dump(self, rank: int) -> str:
        try:
            return self._stacks(rank).read_text(errors="replace")
        except OSError:
            return ""

    def _phase(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{rank}"

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{rank}.stacks"


def _inspect_process(pid: int) -> str:
    """What /proc and py-spy show of a process that dumps nothing: stopped, or in the kernel."""
    state = next(
        (line for line in _read_proc(pid, "status").splitlines() if "State" in line), "State: ?"
    )
    # "State:	T (stopped)" → "T (stopped)"
    state = state.partition(":")[2].strip()
    head = f"no answer; state {state}, waits in {_read_proc(pid, 'wchan')}\n"
    spy = shutil.which("py-spy")
    if spy is None:
        return head
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, errors="replace", timeout=PY_SPY_S, check=False,
        )  # fmt: skip
        return head + (done.stdout or done.stderr)
    return head


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip() or "nothing"
    except OSError as error:
        return str(error.strerror)


def _remove_stale_folders() -> None:
    """Remove the files of launchers that were killed: their locks are free."""
    # Not by process id: launchers in other containers may share this memory, with ids of their own.
    for parent in {"/dev/shm", tempfile.gettempdir()}:
        for lock in Path(parent).glob(f"{_FOLDER}*/{_LOCK}"):
            with suppress(OSError), lock.open("wb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
