"""Where the runs of a drill run: on Slurm, or on this machine.

They are started by `slurmllm resume`, the way that a user has, so that a drill takes no path of
its own: checks, graphs of earlier runs, job scripts.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from slurmllm.errors import (
    CodeError,
    RunError,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.records import JobsRecord
from slurmllm.rundir import RunDir
from slurmllm.slurm.client import SlurmClient
from slurmllm.status.runs import is_active
from slurmllm.supervise.allocation import SLURMLLM, die_with_parent

LEAVE_S = 60.0  # for a cancelled run to save and go
REQUEUE_S = 120.0  # for Slurm to finish a job whose batch script was killed
_ERRORS: dict[int, type[SlurmllmError]] = {2: RunError, 3: SlurmError, 4: StorageError}


class Runner(ABC):
    """Starts runs, keeps an eye on them, and ends them."""

    @abstractmethod
    def start(self, run: RunDir, nodes: int) -> None:
        """Start a run whose directory holds a configuration.

        Raises:
            SlurmllmError: as `slurmllm resume` says it.
        """

    @abstractmethod
    def agent(self, run: RunDir, node: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on a node of a run that runs."""

    @abstractmethod
    def active(self, run: RunDir) -> bool:
        """Whether the run waits or runs."""

    @abstractmethod
    def start_again(self, run: RunDir, nodes: int) -> None:
        """What Slurm does when a job's first node has died: the job starts again."""

    @abstractmethod
    def cancel(self, run: RunDir) -> None:
        """End a run; its processes are gone, or Slurm is told to end them."""


class SlurmRunner(Runner):
    """Jobs of a Slurm cluster."""

    def __init__(self, client: SlurmClient) -> None:
        self.client = client

    def start(self, run: RunDir, nodes: int) -> None:
        """See Runner; returns once the jobs are submitted."""
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(
                _resume(run, nodes), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=words,
            )  # fmt: skip
            if process.wait() != 0:
                raise _error(process.returncode, words)

    def agent(self, run: RunDir, node: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A step beside the run's own, which takes nothing from them."""
        srun = [
            "srun", f"--jobid={self._job(run)}", f"--nodelist={node}", "--nodes=1", "--ntasks=1",
            "--overlap", "--cpu-bind=none", "--input=none", "--quiet", *command,
        ]  # fmt: skip
        try:
            return subprocess.Popen(
                srun, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise SlurmError(f"srun cannot be started: {error}") from error

    def active(self, run: RunDir) -> bool:
        """See Runner."""
        return is_active(run, self.client)

    def start_again(self, run: RunDir, nodes: int) -> None:
        """Requeue the job, as Slurm itself would have; it may still be about to end it."""
        deadline = time.monotonic() + REQUEUE_S
        while True:
            try:
                return self.client.requeue(self._job(run))
            except SlurmError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def cancel(self, run: RunDir) -> None:
        """See Runner."""
        sent = JobsRecord.load(run.jobs).submissions[-1:] if run.jobs.is_file() else ()
        for one in sent:
            jobs = [job for job in (one.train_job, one.precompile_job) if job is not None]
            self.client.cancel(jobs)

    def _job(self, run: RunDir) -> str:
        job = JobsRecord.load(run.jobs).submissions[-1].train_job
        assert job is not None
        return job


class LocalRunner(Runner):
    """Launchers on this machine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self, run: RunDir, nodes: int) -> None:
        """See Runner; returns at once, and a refusal comes with `active`."""
        self._words.seek(0)
        self._words.truncate()
        self._process = subprocess.Popen(
            [*_resume(run, nodes), "--local"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._words,
            start_new_session=True,  # Ctrl-C is for the drill, which ends the run itself
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def agent(self, run: RunDir, node: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """See Runner."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=die_with_parent,
        )  # fmt: skip

    def active(self, run: RunDir) -> bool:
        """See Runner.

        Raises:
            SlurmllmError: the run could not even begin an attempt.
        """
        assert self._process is not None
        if self._process.poll() is None:
            return True
        if self._process.returncode != 0 and not (run.attempts("train") or run.graphs.is_dir()):
            raise _error(self._process.returncode, self._words)
        return False

    def start_again(self, run: RunDir, nodes: int) -> None:
        """Resume the run, whose process ended with its supervisor."""
        assert self._process is not None
        self._process.wait()
        self.start(run, nodes)

    def cancel(self, run: RunDir) -> None:
        """Ask it to leave; kill it where it does not."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(LEAVE_S)


def _resume(run: RunDir, nodes: int) -> list[str]:
    return [
        *SLURMLLM, "resume", run.name, f"--nodes={nodes}", f"--runs-dir={run.path.parent}",
        "--json",
    ]  # fmt: skip


def _error(code: int, words: IO[bytes]) -> SlurmllmError:
    words.seek(0)
    text = words.read().decode(errors="replace").strip().removeprefix("error: ")
    kind = _ERRORS.get(code, CodeError)
    return kind(text or f"slurmllm resume ended with exit code {code}")
