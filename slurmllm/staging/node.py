"""A launcher's part of staging: prepare this node for its workers, or explain why not."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmllmError
from slurmllm.run.worker_files import STAGED_INPUTS
from slurmllm.staging.inputs import stage_inputs
from slurmllm.staging.install import Staged, install_environment

FOLDER = "environments"  # in the user's private folder on a node
# Set by the supervisor for its launchers: the manifest of the archive, the archive on the nodes'
# own disks, and why there is none.
MANIFEST = "SLURMLLM_ENVIRONMENT"
BROADCAST = "SLURMLLM_ENVIRONMENT_BROADCAST"
FAULT = "SLURMLLM_ENVIRONMENT_FAULT"

log = logging.getLogger(__name__)


class NodeStaging:
    """What is staged on this node; keeps it from being removed as long as this object exists."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.staged: Staged | None = None

    def prepare(self, private: Path) -> dict[str, object]:
        """Stage environment and inputs, and set the variables of the workers.

        Args:
            private: The user's private folder on this node's own disk.

        Returns:
            The fields of the node's record.
        """
        if not self.config.cluster.stage_environment:
            return {}
        started = time.monotonic()
        reason = self._stage_environment(private / FOLDER)
        if self.staged is not None:
            os.environ.update(self.staged.variables())
        else:
            log.warning(
                "environment: %s; the workers of this node run from the shared environment", reason
            )
        os.environ[STAGED_INPUTS] = str(stage_inputs(self.config, private))
        seconds = time.monotonic() - started
        if self.staged is not None:
            log.info("environment: staged (%s) in %.1f s", reason, seconds)
        return {
            "environment_source": "shared" if self.staged is None else "staged",
            "environment_reason": reason,
            "environment_s": round(seconds, 3),
        }

    def _stage_environment(self, folder: Path) -> str:
        """Stage the environment; returns its origin, or the reason of a failure."""
        manifest, broadcast = os.environ.get(MANIFEST), os.environ.get(BROADCAST)
        if manifest is None:
            return os.environ.get(FAULT, "the supervisor has packed no environment")
        try:
            path, group = Path(broadcast) if broadcast else None, self.config.cluster.trusted_group
            self.staged = install_environment(
                folder, Path(manifest), self.config.backend, path, group
            )
        except SlurmllmError as error:
            return str(error)
        return self.staged.origin
