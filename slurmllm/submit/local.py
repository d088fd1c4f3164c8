"""Slurm's part for `submit --local`: run the two scripts on this machine, restarts included.

The scripts are the ones that sbatch would get, run by bash; what Slurm would write into the
stage's log also goes to the terminal. Ctrl-C asks the run to save and leave, as a time limit
would; a second Ctrl-C kills it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import IO

from slurmllm.backends.environment import load_environment
from slurmllm.backends.rendezvous import die_with_parent
from slurmllm.config.load import load
from slurmllm.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise.allocation import LOCAL_NODES, LOCAL_RESTARTS


class _LocalJob:
    """One batch script, run again as long as its supervisor asks for it."""

    def __init__(self, run: RunDir, stage: Stage, nodes: int, quiet: bool) -> None:
        self.run, self.stage, self.nodes, self.quiet = run, stage, nodes, quiet
        self.interrupts = self.restarts = 0
        self.process: subprocess.Popen[str] | None = None

    def run_to_end(self) -> int:
        while True:
            if self.interrupts:
                return EXIT_INTERRUPTED
            code = self._run_once()
            if code != EXIT_REQUEUE:
                return EXIT_INTERRUPTED if self.interrupts and code != EXIT_OK else code
            self.restarts += 1

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.process is not None and self.process.poll() is None:
            kill = self.interrupts > 1
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGUSR1)

    def _run_once(self) -> int:
        log = self.run.stage_log(self.stage)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            ["bash", str(self.run.script(self.stage))],
            env={
                **os.environ, LOCAL_NODES: str(self.nodes), LOCAL_RESTARTS: str(self.restarts)
            },
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
            start_new_session=True,  # Ctrl-C must reach this process alone
            preexec_fn=die_with_parent,
        )  # fmt: skip
        if self.interrupts:  # while it started
            self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None
        reader = threading.Thread(target=self._copy, args=(self.process.stdout,), daemon=True)
        reader.start()
        code = self.process.wait()
        reader.join(timeout=10)
        return code

    def _copy(self, stream: IO[str]) -> None:
        # Whatever happens to log or terminal, the pipe must be read on, or the run would stall.
        with stream, self.run.stage_log(self.stage).open("a", encoding="utf-8") as log:
            for line in stream:
                with contextlib.suppress(OSError):
                    log.write(line)
                    log.flush()
                if not self.quiet:
                    try:
                        sys.stdout.write(line)
                        sys.stdout.flush()
                    except OSError:  # nobody looks any more: `submit --local | head`
                        self.quiet = True


def run_locally(run: RunDir, stages: Sequence[Stage], nodes: int, quiet: bool = False) -> int:
    """Run stages one after the other, each only after the success of the one before.

    Returns:
        0, or the exit code of the stage that stopped; 130 after Ctrl-C.
    """
    config = load(run.config)
    before = load_environment(config.backend).precompile_nodes(config, nodes)
    for stage in stages:
        job = _LocalJob(run, stage, before if stage == "precompile" else nodes, quiet)
        previous = {n: signal.signal(n, job.on_interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = job.run_to_end()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if code != EXIT_OK:
            return code
        if job.interrupts and stage != stages[-1]:
            return EXIT_INTERRUPTED
    return EXIT_OK
