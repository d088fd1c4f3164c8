"""Watchdog, monitoring and recovery, each shown on a run of two workers of this machine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reproduce.runs import CommandError, slurmllm
from slurmllm.analysis.drill.injector import signal_worker
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.run.rundir import RunDir

Shown = list[tuple[str, str]]  # commands and what they printed

# Everything but the arithmetic, so that the demonstration is over soon.
_REHEARSAL = ("backend=rehearsal", "env.SLURMLLM_REHEARSAL_STEP_S=0.1", "optim.warmup_steps=10")
_STEP_LIMIT_S = 240  # for the step at which something is shown


def watchdog(runs_dir: Path) -> Shown:
    """Freeze a worker; the watchdog ends the attempt, keeps its stacks, and the run goes on."""
    settings = (*_REHEARSAL, "train.steps=60", "checkpoint.every_steps=10", "watchdog.min_step_s=3")
    with _training("watched", runs_dir, settings) as run:
        wait_for_step(run, 25)
        pid = signal_worker(run, 0, "local1", 1, signal.SIGSTOP)
    stacks = slurmllm("logs", "watched", "--stacks", "--runs-dir", str(runs_dir))
    return [
        (f"kill -STOP {pid}", "(rank 1, after step 25)"),
        ("slurmllm status watched", slurmllm("status", "watched", "--runs-dir", str(runs_dir))),
        ("slurmllm logs watched --stacks", "\n".join([*stacks.splitlines()[:6], "…"])),
    ]


def monitoring(runs_dir: Path) -> Shown:
    """Follow a run while it trains; check afterwards that TensorBoard has the same curves."""
    where = ("--runs-dir", str(runs_dir))
    with _training("followed", runs_dir, (*_REHEARSAL, "train.steps=100")) as run:
        wait_for_step(run, 40)
        shown = [
            ("slurmllm status followed", slurmllm("status", "followed", *where)),
            ("slurmllm logs followed -n 2", slurmllm("logs", "followed", "-n", "2", *where)),
        ]
    events = runs_dir / "followed" / "tensorboard"
    compared = slurmllm("compare", "followed", str(events), *where)
    return [
        *shown,
        (f"slurmllm compare followed {events}", compared),
        ("slurmllm health --local --nodes 2", slurmllm("health", "--local", "--nodes", "2")),
    ]


def drill(runs_dir: Path) -> Shown:
    """Train, then kill a worker of one copy and another while it saves; compare the losses."""
    settings = (*_REHEARSAL, "train.steps=30", "checkpoint.every_steps=10")
    with _training("drilled", runs_dir, settings):
        pass
    kinds = "worker,save"
    table = slurmllm("drill", "drilled", "--kinds", kinds, "--runs-dir", str(runs_dir))
    return [(f"slurmllm drill drilled --kinds {kinds}", table)]


@contextmanager
def _training(name: str, runs_dir: Path, settings: Sequence[str]) -> Iterator[RunDir]:
    """Train in the background inside the block, and wait for the end after it."""
    shutil.rmtree(runs_dir / name, ignore_errors=True)  # of an earlier demonstration
    runs_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "slurmllm", "submit", "tiny_neox", "--local", "--nodes", "2"]
    command += [part for setting in settings for part in ("--set", setting)]
    command += ["--name", name, "--runs-dir", str(runs_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            yield RunDir(runs_dir / name)
            output, _ = job.communicate()
        finally:
            job.terminate()
    if job.returncode:
        raise CommandError(output.decode()[-2000:])


def wait_for_step(run: RunDir, step: int) -> None:
    end = time.monotonic() + _STEP_LIMIT_S
    while time.monotonic() < end:
        row = last_row(run) if run.config.is_file() else None
        if row is not None and row["step"] >= step:
            return
        time.sleep(0.1)
    raise CommandError(f"{run.name} did not reach step {step} within {_STEP_LIMIT_S} s")
