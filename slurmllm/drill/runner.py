"""Runs the copies of a drill: on Slurm, or on this machine.

They are started by the code of `slurmllm resume`, so that a drill tests what a user runs: checks,
graphs of earlier runs, job scripts. A local run needs a process of its own, since the drill signals
and kills it.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

from slurmllm.config.load import load
from slurmllm.control.rendezvous import die_with_parent
from slurmllm.errors import (
    CodeError,
    OutOfMemoryError,
    RunError,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.run.records import JobsRecord
from slurmllm.run.rundir import RunDir
from slurmllm.slurm.client import SlurmClient
from slurmllm.slurm.environment import slurm_environment
from slurmllm.status.runs import is_active
from slurmllm.submit.launch import submit_jobs
from slurmllm.submit.prepare import RunRequest, prepare
from slurmllm.supervise.allocation import SLURMLLM
from slurmllm.supervise.run_lock import locked

CANCEL_S = 60.0  # for a cancelled run to save and exit
REQUEUE_S = 120.0  # for Slurm to end a job whose batch script was killed
_NO_FILES: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
# By the exit code of `slurmllm resume`.
_ERRORS: dict[int, type[SlurmllmError]] = {
    kind.exit_code: kind for kind in (RunError, SlurmError, StorageError, OutOfMemoryError)
}


class Runner(Protocol):
    """Starts, monitors and cancels runs."""

    def start(self, run: RunDir, nodes: int) -> None:
        """Start a run whose directory has a configuration; raises as `slurmllm resume` does."""

    def start_on_nodes(
        self, run: RunDir, nodes: Sequence[str], command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on nodes of an active run."""

    def active(self, run: RunDir) -> bool:
        """Whether the run is pending or running."""

    def restart(self, run: RunDir, nodes: int) -> None:
        """Restart the run, as Slurm does when the first node of a job has died."""

    def cancel(self, run: RunDir) -> None:
        """End a run: its processes, or its Slurm jobs."""


class SlurmRunner:
    """Jobs of a Slurm cluster."""

    def __init__(self, client: SlurmClient) -> None:
        self.client = client

    def start(self, run: RunDir, nodes: int) -> None:
        config, root = load(run.config), run.path.parent
        request = RunRequest(config, nodes, root, run=run, check_weights=False)
        with locked(run, "drill"):
            submit_jobs(prepare(request), self.client)

    def start_on_nodes(
        self, run: RunDir, nodes: Sequence[str], command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        count = f"--nodes={len(nodes)}"
        srun = ["srun", f"--jobid={self._job(run)}", f"--nodelist={','.join(nodes)}", count]
        # --overlap, --mem=0: the step shares CPUs and memory of the run's steps.
        srun += [
            f"--ntasks={len(nodes)}",
            "--overlap",
            "--mem=0",
            "--cpu-bind=none",
            "--input=none",
            "--quiet",
        ]
        try:
            return subprocess.Popen([*srun, *command], env=slurm_environment(), **_NO_FILES)
        except OSError as error:
            raise SlurmError(f"srun cannot be started: {error}") from error

    def active(self, run: RunDir) -> bool:
        return is_active(run, self.client)

    def restart(self, run: RunDir, nodes: int) -> None:
        """Requeue the job, unless its successor follows; retries while Slurm still ends it."""
        last = JobsRecord.load(run.jobs).submissions[-1]
        if last.restart == "chain":
            return None
        deadline = time.monotonic() + REQUEUE_S
        while True:
            try:
                return self.client.requeue(self._job(run))
            except SlurmError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def cancel(self, run: RunDir) -> None:
        if (last := JobsRecord.of(run).last) is not None:
            self.client.cancel(last.own_jobs)

    def _job(self, run: RunDir) -> str:
        job = JobsRecord.load(run.jobs).submissions[-1].train_job
        assert job is not None
        return job


class LocalRunner:
    """Launchers on this machine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self, run: RunDir, nodes: int) -> None:
        # Returns at once: an error of `resume` is raised by `active`.
        self._stderr.seek(0)
        self._stderr.truncate()
        options = [f"--nodes={nodes}", f"--runs-dir={run.path.parent}", "--json", "--local"]
        self._process = subprocess.Popen(
            [*SLURMLLM, "resume", run.name, *options],
            **{**_NO_FILES, "stderr": self._stderr},
            start_new_session=True,  # Ctrl-C reaches only the drill, which then cancels the run
            preexec_fn=die_with_parent,
        )

    def start_on_nodes(
        self, run: RunDir, nodes: Sequence[str], command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **_NO_FILES, preexec_fn=die_with_parent)

    def active(self, run: RunDir) -> bool:
        """See Runner; raises a SlurmllmError if the run ended before its first attempt."""
        assert self._process is not None
        if self._process.poll() is None:
            return True
        if self._process.returncode != 0 and not (run.attempts("train") or run.graphs.is_dir()):
            code = self._process.returncode
            self._stderr.seek(0)
            text = self._stderr.read().decode(errors="replace").strip().removeprefix("error: ")
            text = text or f"slurmllm resume ended with exit code {code}"
            raise _ERRORS.get(code, CodeError)(text)
        return False

    def restart(self, run: RunDir, nodes: int) -> None:
        """Resume the run; its process has ended with its supervisor."""
        assert self._process is not None
        self._process.wait()
        self.start(run, nodes)

    def cancel(self, run: RunDir) -> None:
        """SIGTERM, which saves; a second one, which does not; then SIGKILL."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(CANCEL_S)
