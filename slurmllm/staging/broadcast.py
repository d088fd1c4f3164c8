"""The supervisor's part of staging: the archive, packed once, on every node's own disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slurmllm.backends.environment import broadcast_path, node_local_cache
from slurmllm.config.resolve import RunConfig
from slurmllm.diagnose.probe import Nodes, read_lines
from slurmllm.errors import SlurmllmError
from slurmllm.run.artifact_records import EnvironmentManifest
from slurmllm.run.rundir import RunDir
from slurmllm.slurm.error_texts import launch_failure
from slurmllm.staging.archive import ensure_archive
from slurmllm.staging.install import MARKER
from slurmllm.staging.node import BROADCAST, FAULT, FOLDER, MANIFEST

ASK_S = 60.0  # for the nodes to answer; those that do not get the archive
_PRESENT = "slurmllm-staged"
# No Python: an interpreter on the shared file system would cost what this saves.
_ASK = f'if test -f "$1"; then echo {_PRESENT}; fi'

log = logging.getLogger(__name__)


class BroadcastNodes(Nodes, Protocol):
    """The nodes of an attempt, with a way to copy files to them."""

    def broadcast(self, source: Path, target: Path, stop: Callable[[], bool]) -> str | None:
        """Copy a file to the same path on every node; returns the reason of a failure."""


def broadcast_environment(
    run: RunDir, config: RunConfig, nodes: BroadcastNodes, stop: Callable[[], bool]
) -> dict[str, str]:
    """Pack the environment if no attempt has, and send it to the nodes unless all have it.

    Args:
        stop: Polled; True ends the packing or the broadcast.

    Returns:
        The variables for the launchers, which fall back to the shared environment after a failure.
    """
    if not config.cluster.stage_environment:
        return {}
    started = time.monotonic()
    try:
        path = ensure_archive(run.path.parent, config.cluster.trusted_group, stop)
        manifest = EnvironmentManifest.load_trusted(path, config.cluster.trusted_group)
        planned = Path(node_local_cache(config, run))
        marker = planned.parent / FOLDER / manifest.fingerprint / MARKER
        # On a node where the private folder has another name, the environment is not found.
        asked = time.monotonic()
        processes = nodes.ask(["/bin/sh", "-c", _ASK, "sh", str(marker)])
        answers = [text.strip() for _, text in read_lines(processes, ASK_S, stop)]
        present = answers.count(_PRESENT)
        seconds = time.monotonic() - asked
        if not stop() and (failure := launch_failure(processes, seconds, answers, nodes.nodes)):
            log.warning("environment: the nodes were not asked: %s", failure.text)
    except SlurmllmError as error:
        if not stop():
            log.warning("environment: %s", error)
        return {FAULT: str(error)}
    variables = {MANIFEST: str(path)}
    if present == len(nodes.nodes):
        log.info("environment: present on all %d nodes", present)
        return variables
    archive, target = path.with_name(manifest.archive), broadcast_path(planned)
    fault = nodes.broadcast(archive, target, stop)
    if fault is not None:
        if not stop():
            log.warning("sbcast: %s; the nodes read %s", fault, archive)
        return variables
    figures = manifest.archive_bytes / 1e6, time.monotonic() - started
    log.info("environment: %.0f MB to all nodes in %.1f s", *figures)
    return {**variables, BROADCAST: str(target)}
