"""Cancel a run or a sweep, or delete it: what goes, what stays, and why it may not go."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from slurmllm.core.config.load import load
from slurmllm.core.errors import ConfigError, RunError, StorageError, UserError
from slurmllm.core.format import Json
from slurmllm.core.run.artifact_records import CheckpointEvaluation
from slurmllm.core.run.records import JobsRecord, Submission, SweepRecord, last_submission, runs_of
from slurmllm.core.run.rundir import RunDir, SweepDir, find_run_or_sweep, is_sweep
from slurmllm.core.run.safe_files import os_error_text, untrusted_error, user_name
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.launch.submit.resume import require_ended
from slurmllm.launch.supervise.run_lock import locked
from slurmllm.launch.supervise.run_state import is_active, process_elsewhere
from slurmllm.train.checkpoint.foreign import command_of, list_trainer_checkpoints
from slurmllm.train.checkpoint.holds import read_evaluations, save_evaluation

log = logging.getLogger(__name__)


Target = RunDir | SweepDir


class CancelledJob(NamedTuple):
    """A job of a run, or the process of a run on this machine, and what was done to it."""

    run: str
    job: str | None  # of Slurm
    pid: int | None  # of a run on this machine
    action: str  # cancelled; `save and exit` or `exit`, as a process was asked; `asked before`


@dataclass(frozen=True)
class CancelledRun:
    """What was cancelled of a run or a sweep."""

    name: str
    jobs: tuple[CancelledJob, ...]

    def to_dict(self) -> Json:
        """Return it for JSON."""
        return {"run": self.name, "jobs": [job._asdict() for job in self.jobs]}


def cancel_jobs(
    target: Target,
    client: SlurmClient,
    on_process: Callable[[CancelledJob], object] = lambda _: None,
) -> CancelledRun:
    """Cancel all jobs of a run or a sweep, those that run last: no lane may start another one.

    `on_process` is called once a process was signalled: cancelling jobs may fail afterwards.

    Raises:
        RunError: it runs on another machine, or somebody else may have written its record.
        UserError: the process of a run on this machine belongs to another user.
    """
    with ExitStack() as locks:
        try:
            locks.enter_context(locked(RunDir(target.path), "cancel"))
        except StorageError as error:  # a full disk must not keep its jobs
            log.warning("%s; cancelling without the lock", error)
        return _cancel(target, client, on_process)


def _cancel(
    target: Target, client: SlurmClient, on_process: Callable[[CancelledJob], object]
) -> CancelledRun:
    runs = [target] if isinstance(target, RunDir) else [*target.graph_runs(), *_cases(target)]
    jobs, cancelled = dict[str, RunDir](), list[CancelledJob]()
    evaluations = dict[str, CheckpointEvaluation]()
    for run in runs:
        last = last_submission(run)
        if last is None:
            continue
        if process := process_elsewhere(run, client):
            raise RunError(f"{run.name}: {process} may run it; `slurmllm cancel {run.name}` there")
        for record in read_evaluations(run):
            # Another user may have written it, with the id of any job.
            if record.job and not untrusted_error(run.evaluating(record.step).stat()):
                jobs[record.job], evaluations[record.job] = run, record
        if not last.local or last.pid is None:
            jobs |= dict.fromkeys(last.own_jobs, run)
        elif is_active(run, client):
            _require_own_record(run)
            action = _cancel_process(run, last, last.pid)
            cancelled.append(CancelledJob(run.name, None, last.pid, action))
            on_process(cancelled[-1])
    queue = client.queue(list(jobs))
    active = [job for job in reversed(jobs) if job in queue and queue[job].active]
    active.sort(key=lambda job: queue[job].state != "PENDING")
    for job in active:
        _require_own_record(jobs[job])
    if active:
        client.cancel(active)
    for run in dict.fromkeys(jobs[job] for job in active):
        _record_cancellation(run)
    for job in evaluations.keys() & active:
        with suppress(StorageError):  # a resume submits it again
            save_evaluation(jobs[job], evaluations[job], state="due")
    cancelled += [CancelledJob(jobs[job].name, job, None, "cancelled") for job in active]
    return CancelledRun(target.name, tuple(cancelled))


def _cases(sweep: SweepDir) -> list[RunDir]:
    return [sweep.run(case.run) for case in SweepRecord.load(sweep.record).cases]


def _record_cancellation(run: RunDir) -> None:
    """Record the cancellation, if the directory takes it: without accounting only that tells."""
    try:
        JobsRecord.change_last(run, cancelled_at=time.time())
    except StorageError as error:
        log.warning("the cancellation is not recorded: %s", error)


def _require_own_record(run: RunDir) -> None:
    """Raise RunError if others may have written what is to be cancelled."""
    if why := untrusted_error(run.jobs.stat()):
        raise RunError(
            f"{run.jobs}: {why}; it may name any job or process of yours. Whose run it is can "
            "cancel it; an administrator uses `scancel`"
        )


def _cancel_process(run: RunDir, submission: Submission, pid: int) -> str:
    """Ask the process of a local run to save and exit, once: a second signal would end it."""
    _signal(pid, 0)
    if submission.cancelled_at is not None:
        return "asked before"
    _record_cancellation(run)  # before the signal: the process reads the reason when it ends
    _signal(pid, signal.SIGTERM)
    command = command_of(run)
    return "exit" if command and command.stop_signal is None else "save and exit"


def _signal(pid: int, number: int) -> None:
    """Send a signal to a local run's process; 0 only checks the permission."""
    try:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)
    except PermissionError as error:
        raise UserError(
            f"process {pid} belongs to another user; only who started a local run can cancel it"
        ) from error


class Deletion(NamedTuple):
    """What is deleted of a run or a sweep."""

    target: Target
    paths: Sequence[Path]  # the directory; or all in it but the checkpoints, records first
    bytes: int  # that are freed
    checkpoints: int  # without those that are stored elsewhere, and linked
    checkpoint_bytes: int
    keeps_checkpoints: bool

    def to_json(self) -> Json:
        return {
            "run": self.target.name,
            "run_dir": str(self.target.path),
            "bytes": self.bytes,
            "checkpoints": self.checkpoints,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoints_deleted": not self.keeps_checkpoints,
        }


def find_deletable(name: str, root: Path) -> Target:
    """Find a run, a sweep, or the checkpoints that a deletion has left; RunError."""
    for path in (root / name, Path(name).absolute()):
        if path != root.absolute() and _left_runs(path):
            return RunDir(path)
    return find_run_or_sweep(name, root)


def _left_runs(path: Path) -> list[RunDir]:
    """Return the runs, of a sweep too, whose deletion has left nothing but checkpoints here."""
    if RunDir(path).only_checkpoints():
        return [RunDir(path)]
    with suppress(OSError):
        # Without the lock of this deletion.
        runs = [RunDir(entry) for entry in path.iterdir() if entry != RunDir(path).lock]
        if all(run.only_checkpoints() for run in runs):
            return runs
    return []


def plan_deletion(target: Target, with_checkpoints: bool, client: SlurmClient) -> Deletion:
    """Return what is deleted; RunError if it is in use, or not wholly this user's to delete."""
    path = target.path
    if path.is_symlink():
        raise RunError(f"{path} is a link to {path.resolve()}; name that folder instead")
    if (owner := path.stat().st_uid) != os.geteuid():
        raise RunError(f"{path} belongs to {user_name(owner)}, who can delete it")
    if path.parent.name == "graphs" and is_sweep(path.parents[1]):
        raise RunError(f"{path} compiles graphs for a sweep; delete {path.parents[1].name} instead")
    if mounts := _mounts_below(path):
        raise RunError(f"{mounts[0]} is mounted in {path}; unmount it first, nothing was deleted")
    if isinstance(target, RunDir):
        runs = _left_runs(path) or [target]
    else:
        left = (run for run in _cases(target) if run.only_checkpoints())
        runs = [*runs_of(target), *left, *target.graph_runs()]
    jobs: dict[str, RunDir] = {}  # those that Slurm is asked about, at once
    for run in runs:
        last = last_submission(run)
        if last is None or last.local:
            require_ended(run, client)
        else:
            jobs |= dict.fromkeys(last.own_jobs, run)
    queue = client.queue(list(jobs))
    for job, run in jobs.items():
        if job in queue and queue[job].active:
            require_ended(run, client)
    count = 0
    folders = list[Path]()
    for run in runs:
        checkpoints, outputs = _saved(run)
        count += checkpoints
        folders += outputs
    keeps = bool(folders) and not with_checkpoints
    paths = [*_all_but(folders, path)] if keeps else [path]
    return Deletion(target, paths, _freed_bytes(paths), count, _freed_bytes(folders), keeps)


def _saved(run: RunDir) -> tuple[int, Sequence[Path]]:
    """Return the number of a run's checkpoints, and what holds them in its directory.

    Of a trainer of another project that is all that it has written there.
    """
    folder = run.path.resolve()
    steps = run.checkpoint_steps()
    paths = []
    count = sum(folder in run.checkpoint(step).resolve().parents for step in steps)
    with suppress(ConfigError):  # then it is not known whose files these are
        if (command := load(run.config).recipe.command) is None:
            return count, [run.checkpoints] if steps else []
        paths = [entry.path for entry in list_trainer_checkpoints(run, command)]
    inside = [path.relative_to(run.path).parts[0] for path in paths if run.path in path.parents]
    count = sum(folder in path.resolve().parents for path in paths) or count
    return count, list(dict.fromkeys([*run.outputs(), *(run.path / name for name in inside)]))


def _all_but(folders: Sequence[Path], path: Path) -> Iterator[Path]:
    """Yield what is in a directory and not in `folders`, the records first."""
    for entry in sorted(path.iterdir(), key=lambda file: file.suffix not in (".yaml", ".json")):
        if any(entry in folder.parents for folder in folders):
            yield from _all_but(folders, entry)
        elif entry not in folders:
            yield entry


def _freed_bytes(paths: Iterable[Path]) -> int:
    """Return the size of files whose last link is in `paths`; RunError if one cannot be removed."""
    sizes = {}
    links = Counter[tuple[int, int]]()
    for path in paths:
        is_folder = path.is_dir() and not path.is_symlink()
        for folder, _, names in os.walk(path) if is_folder else [(path.parent, (), [path.name])]:
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise RunError(f"{folder} is not writable for you; nothing was deleted")
            for name in names:
                with suppress(FileNotFoundError):
                    info = Path(folder, name).lstat()
                    sizes[info.st_dev, info.st_ino] = (info.st_size, info.st_nlink)
                    links[info.st_dev, info.st_ino] += 1
    return sum(size for file, (size, count) in sizes.items() if links[file] >= count)


def delete_planned(deletion: Deletion) -> None:
    """Delete what was planned; the caller holds the lock. Raises StorageError.

    It is renamed first: whatever happens then, no other command takes a part of it for a run.
    """
    path = deletion.target.path
    hidden = path.with_name(f".{path.name}.removed")
    try:
        if os.path.lexists(hidden):  # of a deletion that was killed
            shutil.rmtree(hidden)  # refuses a link
        if not deletion.keeps_checkpoints:
            path.rename(hidden)
        else:
            hidden.mkdir()
            for number, output in enumerate(deletion.paths):
                output.rename(hidden / f"{number}-{output.name}")
        shutil.rmtree(hidden)
    except OSError as error:
        # Not `rm -r` of the run's directory, where the checkpoints stay.
        fix = f"`rm -r {hidden}`, then delete {path.name} again"
        if hidden.is_symlink() or not os.path.lexists(hidden):
            fix = f"nothing was deleted; check {path.parent} and {hidden.name} in it, and try again"
        raise StorageError(f"cannot delete all of {path}: {os_error_text(error)}; {fix}") from error


def _mounts_below(path: Path) -> list[str]:
    """Return the mount points in a directory, of any file system."""
    points = (mount.mountpoint for mount in psutil.disk_partitions(all=True))
    prefix = f"{path.resolve()}/"
    return [point for point in points if point.startswith(prefix)]
