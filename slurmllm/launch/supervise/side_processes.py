"""Child processes of the supervisor, at the lowest priority, whose failures do not affect training.

They send metrics to trackers, export them to Prometheus, and submit evaluations of checkpoints.
They read the run directory. The supervisor waits for them only when the run has no more work.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.core.slurm.client import wait_for
from slurmllm.core.slurm.error_texts import ChildProcess
from slurmllm.launch.supervise.allocation import SLURMLLM
from slurmllm.train.control.rendezvous import die_with_parent

# At the end of a run, for the last steps to be sent to trackers, the last checkpoint's evaluation
# to be submitted, and the file with metrics to be removed
_LAST_STEPS_S = 15.0
_SUBMISSION_S = 30.0
_REMOVAL_S = 2.0
_POLL_S = 0.05

log = logging.getLogger(__name__)


@dataclass
class SideProcesses:
    """The child processes of one job; they continue from one attempt in it to the next."""

    run: RunDir
    config: RunConfig
    children: dict[Path, ChildProcess] = field(default_factory=dict)  # by log

    def start(self, stage: Stage) -> None:
        recipe, cluster = self.config.recipe, self.config.cluster
        if stage != "train":
            return
        if recipe.trackers and cluster.trackers.network:
            self._start(self.run.track_log, "track", "sync", "--supervised")
        if cluster.metrics.port is not None or cluster.metrics.textfile is not None:
            self._start(self.run.exporter_log, "track", "prometheus", "--supervised")
        if recipe.evaluate is not None:
            self._start(self.run.evaluator_log, "evaluate-checkpoint")

    def _start(self, path: Path, *verb: str) -> None:
        if path in self.children and self.children[path].poll() is None:
            return
        command = ["nice", "-n", "19", *SLURMLLM, *verb]
        # The exporter removes its file when the supervisor ends.
        orphaned_by = signal.SIGTERM if path == self.run.exporter_log else signal.SIGKILL
        with diagnostic(path.stem), os.fdopen(open_append(path), "wb", buffering=0) as output:
            self.children[path] = subprocess.Popen(
                [*command, str(self.run.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=partial(die_with_parent, orphaned_by),
            )

    def stop(
        self,
        *,
        requeued: bool,
        local: bool = False,
        done: bool = False,
        cancelled: Callable[[], object] = lambda: False,
    ) -> None:
        """End the children, once the last steps are sent and the last evaluations submitted.

        If the run is requeued, the next attempt does that. A local run that is done waits for its
        evaluations; others leave them to the next attempt, or to Slurm.
        """
        self._stop(self.run.exporter_log, _REMOVAL_S)
        patience_s = math.inf if local and done else _SUBMISSION_S
        if requeued or (local and not done):
            patience_s = 0
        self._stop(self.run.evaluator_log, patience_s, cancelled)
        if not self._stop(self.run.track_log, 0 if requeued else _LAST_STEPS_S) and not requeued:
            log.warning(
                f"trackers: {' and '.join(self.config.recipe.trackers)} may lack the last steps; "
                f"see {self.run.track_log}, then `slurmllm track sync {self.run.name}`"
            )

    def _stop(
        self, path: Path, patience_s: float, cancelled: Callable[[], object] = lambda: False
    ) -> bool:
        """End a child, by force after `patience_s`; returns whether it has ended without error."""
        if (child := self.children.get(path)) is None:
            return True
        if patience_s:
            child.terminate()
            wait_for(lambda: child.poll() is not None or cancelled(), patience_s, _POLL_S)
        child.kill()
        return child.wait() == 0
