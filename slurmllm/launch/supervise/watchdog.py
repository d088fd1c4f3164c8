"""Hang detection: launchers forward their workers' phases, the supervisor applies time limits.

All workers advance together: a run hangs if none of them has changed its phase or step for longer
than the phase of the slowest ones may take. The limit of a step is learned from the run.

Workers write into files on the node's own memory disk (`Heartbeats`), so that none of them ever
waits for the shared file system; the launcher forwards changes a few times a minute. The supervisor
(`Watchdog`) reads the heartbeats rarely as long as the metrics show steps.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from slurmllm.core.config.operation import WatchdogConfig
from slurmllm.core.config.yaml_source import LARGEST_YAML
from slurmllm.core.metrics.row_reader import Row, json_number, last_rows
from slurmllm.core.run.records import (
    AttemptRecord,
    ByRank,
    HangRecord,
    Heartbeat,
    NodeNames,
    NodeRecord,
    Phase,
    Ranks,
    WorkerPhase,
    WorkerPhases,
)
from slurmllm.core.run.rundir import AttemptDir, RunDir, read_all
from slurmllm.core.run.safe_files import (
    check_private_folder,
    open_update,
    os_error_text,
    read_limited,
    write_whole,
)
from slurmllm.core.run.worker_files import (
    PHASE_FILE,
    RUN_COPY,
    STACKS_FILE,
    STACKS_SIGNAL,
    read_phase,
)
from slurmllm.core.slurm.client import wait_for
from slurmllm.core.slurm.setup import Variables
from slurmllm.launch.supervise.classify import reported_all
from slurmllm.launch.supervise.rank_logs import take_lock
from slurmllm.launch.supervise.stacks import inspect_process

LOOK_S = 5.0  # interval between the supervisor's looks
HEARTBEAT_S = 15.0  # a launcher writes at least as often, whether or not anything changed
UNRESPONSIVE_S = 4 * HEARTBEAT_S  # without a heartbeat
STEPS_LEARNED = 200
_FOLDER = "slurmllm-phases-"
_LOCK = "lock"

log = logging.getLogger(__name__)


def limit_s(phase: Phase, config: WatchdogConfig, slow_step_s: float | None) -> float:
    """Return the time limit of a phase, s; `slow_step_s` is None before the run's second step."""
    if phase in ("starting", "resuming"):
        return config.start_up_s
    if phase in ("saving", "stopping"):
        return config.save_s
    # An evaluation may compile too. Its phase begins again with each pass, of a step's sequences.
    if phase in ("first_step", "evaluating") or slow_step_s is None:
        return config.first_step_s
    return max(config.min_step_s, config.step_factor * slow_step_s)


def behind(phases: WorkerPhases) -> Ranks:
    """Return the ranks furthest behind, which may be all of them."""
    positions = {rank: _position(phase) for rank, phase in phases.items()}
    last = min(positions.values(), default=None)
    return tuple(sorted(rank for rank, position in positions.items() if position == last))


def find_hang(
    phases: WorkerPhases,
    nodes: Mapping[int, str],
    unchanged_s: float,
    unresponsive: NodeNames,
    config: WatchdogConfig,
    slow_step_s: float | None,
) -> HangRecord | None:
    """Return the hang of an attempt, if any, with suspect nodes.

    `phases` and `nodes` are by rank; nothing has changed for `unchanged_s`; the launchers of
    `unresponsive` nodes stopped responding.
    """
    last = behind(phases)
    if not last:
        return None
    slowest = phases[last[0]]
    limit = limit_s(slowest.phase, config, slow_step_s)
    if unchanged_s <= limit:
        return None
    lagging = () if len(last) == len(phases) else last
    # A frozen launcher is stronger evidence than a late worker; if all launchers stopped
    # responding, the shared file system is at fault.
    suspects = unresponsive if len(unresponsive) < len(set(nodes.values())) else ()
    return HangRecord(
        found_at=time.time(),
        phase=slowest.phase,
        step=slowest.step,
        waited_s=unchanged_s,
        limit_s=limit,
        behind=lagging,
        unresponsive_nodes=unresponsive,
        suspects=suspects or tuple(dict.fromkeys(nodes[rank] for rank in lagging)),
    )


def slow_step_s(step_times: Sequence[float]) -> float | None:
    """Return the 95th percentile of the last steps, s; None without steps."""
    ordered = sorted(step_times[-STEPS_LEARNED:])
    return ordered[int(0.95 * len(ordered))] if ordered else None


def read_heartbeats(run: RunDir, record: AttemptRecord) -> list[Heartbeat]:
    """Return the heartbeats of an attempt's nodes that are written and not damaged."""
    paths = map(record.files(run).heartbeat, record.nodes)
    return [beat for beat in read_all(Heartbeat.find_readable, paths) if beat is not None]


def recent_step_times(run: RunDir) -> list[float]:
    """Return the last intervals between rows, s, oldest first: our trainer has a row per step."""
    durations: list[float] = []
    for path in reversed(run.metrics_files()):
        rows = list[Row]()
        with suppress(OSError):
            rows = last_rows(path, STEPS_LEARNED + 1)
        # The first row is the attempt's first step, or follows one that is not read.
        durations = [
            step_s * max(row["step"] - before["step"], 1)
            for before, row in pairwise(rows)
            if (step_s := json_number(row.get("step_time_s")) or 0.0) > 0
        ] + durations
        if len(durations) >= STEPS_LEARNED:
            break
    return durations[-STEPS_LEARNED:]


def _position(worker: WorkerPhase) -> tuple[int, int, int]:
    """Return the order of progress: start-up, steps; after one its evaluation, save, the next."""
    if worker.phase in ("starting", "resuming"):
        return ("starting", "resuming").index(worker.phase), 0, 0
    order = {"evaluating": 0, "saving": 1, "first_step": 2, "stepping": 2, "stopping": 3}
    return 2, worker.step, order[worker.phase]


class Watchdog:
    """Watches one train attempt for the supervisor; `reporting`: the ranks that show phases."""

    def __init__(
        self,
        run: RunDir,
        record: AttemptRecord,
        config: WatchdogConfig,
        reporting: Iterable[int] | None = None,
    ) -> None:
        self.run = run
        self.record = record
        self.config = config
        self._heartbeats: dict[str, Heartbeat] = {}
        # Node → time after which it wrote its last heartbeat: that of the reading before.
        self._alive_at: dict[str, float] = {}
        self._metrics_bytes = -1
        per_node = record.world_size // len(record.nodes)
        self._nodes = {rank: record.nodes[rank // per_node] for rank in range(record.world_size)}
        self._all_report = reporting is None
        self._starting = WorkerPhase(phase="starting", step=0, since=record.started_at)
        self.phases = dict.fromkeys(self._nodes if reporting is None else reporting, self._starting)
        self._changed = self._looked = self._read_at = time.monotonic()
        # While rank 0 writes metrics, all workers advance: heartbeats then only show which nodes
        # respond. They are read at every look when nothing has changed for some time.
        self._next_read = 0.0
        limit_s = min(config.start_up_s, config.first_step_s, config.min_step_s, config.save_s)
        self._quiet_s = min(HEARTBEAT_S, limit_s / 4)

    def look(self) -> HangRecord | None:
        """Read new heartbeats; returns the hang if there is one."""
        now = time.monotonic()
        if now - self._looked > UNRESPONSIVE_S / 2:
            # This process itself was frozen: restart all clocks.
            self._changed = self._read_at = now
            self._alive_at = dict.fromkeys(self._alive_at, now)
        self._looked = now
        self._read(now)
        unchanged_s = now - self._changed
        slowest = self.phases[behind(self.phases)[0]]
        if unchanged_s <= limit_s(slowest.phase, self.config, 0.0):
            return None  # below the lowest limit: no need to read the step times
        # A node that has reported how its workers ended writes no more heartbeats: that is no hang.
        reported = read_all(self._has_reported, self.record.nodes)
        has_reported = dict(zip(self.record.nodes, reported, strict=True))
        nodes = {rank: name for rank, name in self._nodes.items() if not has_reported[name]}
        phases = {rank: phase for rank, phase in self.phases.items() if rank in nodes}
        # If all ranks that report phases have ended, give them the slowest phase: none lags.
        phases = phases or dict.fromkeys(self.phases, slowest)
        unresponsive = tuple(
            name
            for name in dict.fromkeys(nodes.values())
            if now - self._alive_at.get(name, self._changed) > UNRESPONSIVE_S
        )
        times = recent_step_times(self.run)
        slow_s = slow_step_s(times)
        if not self._all_report and slow_s is not None:
            # Its evaluations show no phase: twice the longest so far is no hang.
            slow_s = max(slow_s, 2 * max(times) / self.config.step_factor)
        return find_hang(phases, nodes, unchanged_s, unresponsive, self.config, slow_s)

    def _has_reported(self, name: str) -> bool:
        return reported_all(NodeRecord.find_readable(self.record.files(self.run).node(name)))

    def _read(self, now: float) -> None:
        with suppress(OSError):  # rank 0 appends a row per step
            size = self.run.metrics(self.record.attempt).stat().st_size
            if size != self._metrics_bytes:
                self._metrics_bytes = size
                self._changed = now
        if now - self._changed < self._quiet_s and now < self._next_read:
            return
        read_at = self._read_at
        self._read_at = now
        self._next_read = now + HEARTBEAT_S
        names = set(self.record.nodes)
        for heartbeat in read_heartbeats(self.run, self.record):
            name = heartbeat.node
            before = self._heartbeats.get(name)
            # Clocks of nodes may differ: a heartbeat is new if it differs from the last one.
            if name in names and heartbeat != before:
                self._heartbeats[name] = heartbeat
                self._alive_at[name] = read_at
                # A worker that has ended is in its node's heartbeat no more: the others have the
                # time of a start, as another project's trainer may have much to do at its end.
                ranks = {
                    **dict.fromkeys(before.ranks if before else (), self._starting),
                    **heartbeat.ranks,
                }
                self.phases |= {r: phase for r, phase in ranks.items() if r in self.phases}
                if before is None or before.ranks != heartbeat.ranks:
                    self._changed = now


class Heartbeats:
    """The phase files of one node's workers, and the node's heartbeat, for its launcher."""

    def __init__(self, attempt: AttemptDir, node: str, config: WatchdogConfig) -> None:
        self._attempt = attempt
        self._node = node
        # A heartbeat must be younger than a fraction of the limits, however short these are.
        # The least between two writes to the shared file system.
        self._write_s = min(5.0, max(config.min_step_s / 8, 0.25))
        self._read_s = min(1.0, self._write_s)
        self._written_at = self._read_at = -HEARTBEAT_S
        self._written: WorkerPhases = {}
        self.phases: WorkerPhases = {}  # rank → phase, as last read
        self._heartbeat: int | None = None  # descriptor of the heartbeat
        self._heartbeat_bytes = 0
        # Remove the files of launchers that were killed: their locks are free. Not by process id:
        # launchers in other containers may share this memory, with ids of their own.
        for folder in {"/dev/shm", tempfile.gettempdir()}:
            for lock in Path(folder).glob(f"{_FOLDER}*/{_LOCK}"):
                with suppress(OSError), take_lock(lock):
                    check_private_folder(lock.parent)
                    shutil.rmtree(lock.parent, ignore_errors=True)
        self._run_copy: RunDir | None = None
        self.folder: Path | None = None  # None if the node has no room for it
        with suppress(OSError):
            self.folder = Path(
                tempfile.mkdtemp(
                    prefix=_FOLDER, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                )
            )
            # Renamed once it is held: other launchers remove folders whose lock file is free.
            unlocked = self.folder / f"{_LOCK}.new"
            self._lock = take_lock(unlocked)
            unlocked.rename(self.folder / _LOCK)

    def environment(self, rank: int) -> Variables:
        if self.folder is None:
            return {}
        paths = {PHASE_FILE: self._file(rank), STACKS_FILE: self._file(f"{rank}.stacks")}
        if self._run_copy is not None:
            paths[RUN_COPY] = self._run_copy.path
        return {name: str(path) for name, path in paths.items()}

    def copy_run(self, run: RunDir) -> None:
        """Copy the files of the run that every worker reads; each reads the run if this fails."""
        if self.folder is None:
            return
        copy = RunDir(self._file("run"))
        try:
            # Without the secrets, which workers have in their environment.
            write_whole(
                copy.config,
                read_limited(run.config, LARGEST_YAML, trusted=True),
                0o600,
                durable=False,
            )
            with suppress(FileNotFoundError):  # not every run measures its micro batch
                write_whole(copy.micro_batch, read_limited(run.micro_batch), 0o600, durable=False)
        except OSError as error:
            log.warning("workers read %s themselves: %s", run.config, os_error_text(error))
        else:
            self._run_copy = copy

    def update(self, ranks: ByRank) -> None:
        """Forward the workers' phases if it is time; `ranks` maps rank to process id."""
        now = time.monotonic()
        if self.folder is None or now - self._read_at < self._read_s:
            return
        self._read_at = now
        # A worker that has not imported slurmllm yet has no phase.
        read = ((rank, read_phase(self._file(rank))) for rank in ranks)
        self.phases = {rank: phase for rank, phase in read if phase is not None}
        waited_s = now - self._written_at
        changed = self.phases != self._written and waited_s >= self._write_s
        if not changed and waited_s < HEARTBEAT_S:
            return
        self._written = self.phases
        self._written_at = now
        self._write(
            Heartbeat(node=self._node, written_at=time.time(), ranks=self.phases)
            .model_dump_json()
            .encode()
        )

    def _write(self, content: bytes) -> None:
        """Overwrite the heartbeat in place: two calls, where a new file with a rename is ten.

        A reader that sees half of it finds a damaged record and reads it again later.
        """
        try:
            if self._heartbeat is None:
                self._heartbeat = open_update(self._attempt.heartbeat(self._node))
            # Never shorter than before: JSON may end with spaces.
            self._heartbeat_bytes = max(self._heartbeat_bytes, len(content))
            os.pwrite(self._heartbeat, content.ljust(self._heartbeat_bytes), 0)
            os.fdatasync(self._heartbeat)  # NFS: other machines see it now, not half a minute later
        except OSError:  # full, or a stale handle of a server that was restarted
            self._close_heartbeat()

    def _close_heartbeat(self) -> None:
        if self._heartbeat is not None:
            with suppress(OSError):
                os.close(self._heartbeat)
            self._heartbeat = None

    def dump_stacks(self, running: ByRank) -> None:
        """Have the workers (rank → process id) dump their stacks into the run directory."""
        for pid in running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        if wait_for(lambda: all(map(self._read_dump, running)), 3.0, 0.05):
            time.sleep(0.2)  # for a dump that has begun to end
        for rank, pid in running.items():
            dump = self._read_dump(rank) or f"no answer; {inspect_process(pid)}"
            with suppress(OSError):
                # The other nodes count these files.
                write_whole(self._attempt.stacks(rank), dump.encode(), durable=False)

    def close(self) -> None:
        self._close_heartbeat()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    def _read_dump(self, rank: int) -> str:
        try:
            return read_limited(self._file(f"{rank}.stacks")).decode(errors="replace")
        except OSError:
            return ""

    def _file(self, name: int | str) -> Path:
        assert self.folder is not None
        return self.folder / str(name)
