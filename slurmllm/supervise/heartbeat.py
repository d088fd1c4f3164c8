"""A launcher's part of the watchdog: what its workers are doing, and their stacks when asked.

Workers write into files on the node's own memory disk, so that none of them ever waits for the
shared file system; the launcher passes on what changed, a few times a minute.
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
from slurmllm.pulse import PULSE, STACKS, STACKS_SIGNAL, read_pulse
from slurmllm.records import Heartbeat, RankBeat
from slurmllm.rundir import AttemptDir
from slurmllm.supervise.watchdog import SIGN_OF_LIFE_S

READ_S = 1.0  # between two looks at the workers' files
WRITE_S = 5.0  # between two writes to the shared file system, at least
ANSWER_S = 3.0  # for workers to dump their stacks
PY_SPY_S = 10.0
_FOLDER, _LOCK = "slurmllm-pulse-", "lock"


class Heartbeats:
    """The files of one node's workers, and the node's heartbeat.

    Args:
        attempt: Where heartbeats and stacks go.
        node: This node's name.
        config: The recipe's.
    """

    def __init__(self, attempt: AttemptDir, node: str, config: WatchdogConfig) -> None:
        self._attempt, self._node = attempt, node
        # With short limits a heartbeat must not be older than a part of them.
        self._write_s = min(WRITE_S, max(config.min_step_s / 8, 0.25))
        self._read_s = min(READ_S, self._write_s)
        self._written_at = self._read_at = -SIGN_OF_LIFE_S
        self._written: dict[int, RankBeat] = {}
        _remove_old()
        self._folder: Path | None = None
        with suppress(OSError):
            place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=place))
            # Held as long as this process lives, and by nobody else: the workers do not inherit it.
            self._lock = (self._folder / _LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def environment(self, rank: int) -> dict[str, str]:
        """What a worker must be told."""
        if self._folder is None:
            return {}
        return {PULSE: str(self._pulse(rank)), STACKS: str(self._stacks(rank))}

    def update(self, ranks: Mapping[int, int]) -> None:
        """Pass on what the workers are doing, if it is time.

        Args:
            ranks: Rank → process id of this node's workers.
        """
        now = time.monotonic()
        if self._folder is None or now - self._read_at < self._read_s:
            return
        self._read_at = now
        beats = {rank: read_pulse(self._pulse(rank)) for rank in ranks}
        known = {rank: beat for rank, beat in beats.items() if beat is not None}
        waited_s = now - self._written_at
        changed = known != self._written and waited_s >= self._write_s
        if changed or waited_s >= SIGN_OF_LIFE_S:
            self._written, self._written_at = known, now
            self._write(Heartbeat(node=self._node, written_at=time.time(), ranks=known))

    def _write(self, beat: Heartbeat) -> None:
        """Without fsync: what a crash takes away, nobody needs any more."""
        path = self._attempt.heartbeat(self._node)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_text(beat.model_dump_json())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def dump_stacks(self, running: Mapping[int, int]) -> None:
        """Have all workers dump their stacks, and leave them in the run directory.

        Args:
            running: Rank → process id.
        """
        for pid in running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + ANSWER_S
        waiting = dict(running)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {rank: pid for rank, pid in waiting.items() if not self._answer(rank)}
        if not waiting:
            time.sleep(0.2)  # a dump that has begun comes to its end
        for rank, pid in running.items():
            words = self._answer(rank) or _from_outside(pid)
            path = self._attempt.stacks(rank)
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                path.write_text(words)  # counted by the other nodes

    def close(self) -> None:
        """Remove the workers' files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def _answer(self, rank: int) -> str:
        try:
            return self._stacks(rank).read_text(errors="replace")
        except OSError:
            return ""

    def _pulse(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{rank}"

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{rank}.stacks"


def _from_outside(pid: int) -> str:
    """What can be seen of a process that does not answer: it is stopped, or deep in the kernel."""
    state = next(
        (line for line in _read(pid, "status").splitlines() if "State" in line), "State: ?"
    )
    # "State:	T (stopped)" → "T (stopped)"
    head = f"no answer; state {state.partition(':')[2].strip()}, waits in {_read(pid, 'wchan')}\n"
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


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip() or "nothing"
    except OSError as error:
        return str(error.strerror)


def _remove_old() -> None:
    """Remove the files of launchers that were killed: nobody holds their lock.

    Not by process id: launchers of other containers may share this memory and count their own.
    """
    for place in {"/dev/shm", tempfile.gettempdir()}:
        for lock in Path(place).glob(f"{_FOLDER}*/{_LOCK}"):
            with suppress(OSError), lock.open("wb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
