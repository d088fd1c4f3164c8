"""The child process that sends an attempt's metrics to trackers, with the lowest priority.

It reads the run directory (`track.sync`), so that neither training nor the supervisor waits for a
tracker, and nothing is lost with it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress

from slurmllm.config.resolve import RunConfig
from slurmllm.control.rendezvous import die_with_parent
from slurmllm.run.rundir import RunDir, Stage
from slurmllm.run.safe_files import open_append
from slurmllm.run.worker_files import diagnostic

LAST_STEPS_S = 15.0  # for the last steps of a run, when its nodes have no more work

log = logging.getLogger(__name__)


class Tracking:
    """The child process of one attempt; nothing without `trackers`, or without a network."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run, self._names = run, config.recipe.trackers
        self._enabled = bool(self._names) and config.cluster.trackers.network
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, stage: Stage) -> None:
        if not self._enabled or stage != "train":
            return
        if self._child is not None and self._child.poll() is None:
            return  # of an earlier attempt in this job; it sends those of this one too
        command = ["nice", "-n", "19", sys.executable, "-P", "-m", "slurmllm"]
        command += ["track", "sync", str(self._run.path), "--supervised"]
        with diagnostic("trackers"):
            output = open_append(self._run.track_log)
            with os.fdopen(output, "wb", buffering=0) as stream:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    preexec_fn=die_with_parent,
                )

    def stop(self, *, requeued: bool) -> None:
        """Have it send the last steps and wait for that; if requeued, the next attempt does."""
        if self._child is None:
            return
        if not requeued:
            with suppress(subprocess.TimeoutExpired):
                self._child.terminate()
                if self._child.wait(LAST_STEPS_S) == 0:
                    return
            log.warning(
                f"trackers: {' and '.join(self._names)} may lack the last steps; see "
                f"{self._run.track_log}, then `slurmllm track sync {self._run.name}`"
            )
        self._child.kill()
        self._child.wait()
