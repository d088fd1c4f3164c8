"""Parts of other packages at submit: checked in another process, because they may load torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

from slurmllm.config.resolve import RunConfig
from slurmllm.config.variables import is_secret
from slurmllm.errors import StorageError
from slurmllm.plugins import versions
from slurmllm.run.records import AttemptRecord
from slurmllm.run.rundir import RunDir
from slurmllm.supervise.attempts import node_records

log = logging.getLogger(__name__)

LIMIT_S = 180.0  # torch from a busy network file system takes a minute


def plugin_faults(config: RunConfig) -> list[str]:
    """Return what is wrong with the recipe's parts of other packages; torch is not loaded here.

    With `cluster.container` nothing is checked here; with `cluster.setup` faults are logged as
    warnings. The workers check in both cases.
    """
    recipe, cluster = config.recipe, config.cluster
    if not recipe.plugins and not recipe.plugin_refs:
        return []
    if cluster.container is not None:
        log.warning("hooks and optimizers are checked by the workers: the image has their packages")
        return []
    given = {**cluster.env, **recipe.env}
    own = {name: value for name, value in given.items() if not is_secret(name, value)}
    try:
        done = subprocess.run(
            # -P: a file in the current folder must not shadow a module.
            [cluster.python or sys.executable, "-P", "-m", "slurmllm.train.plugins"],
            input=json.dumps(config.values()), capture_output=True, text=True, timeout=LIMIT_S,
            env={**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""}, check=False,
        )  # fmt: skip
        found = json.loads(done.stdout) if done.returncode == 0 else [_last_line(done.stderr)]
    except subprocess.TimeoutExpired:
        found = [
            f"plugins: not imported within {LIMIT_S:.0f} s on this machine; import less at the top "
            "of their modules, or submit again if the file system was slow"
        ]
    except (OSError, ValueError) as error:
        found = [
            f"plugins: cannot run their check: {error}; set cluster.python to a Python that can "
            "import slurmllm"
        ]
    if cluster.setup:
        for fault in found:
            log.warning("%s (on this machine, without cluster.setup)", fault)
        return []
    return found


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines() or ["no output"]
    return f"plugins: the process that imports them failed: {lines[-1]}"


def warn_if_changed(config: RunConfig, run: RunDir) -> None:
    """Log a warning if other versions of the parts trained the run before."""
    attempts = run.attempts("train")
    if not attempts or not (now := versions(config.recipe.plugin_refs, config.recipe.plugins)):
        return
    try:
        nodes = node_records(run, AttemptRecord.load(attempts[-1].record)).values()
    except StorageError:  # resume reports damaged records itself
        return
    for name, version in now.items():
        before = sorted({known[name] for node in nodes if name in (known := node.versions)})
        if before and before != [version]:
            log.warning(
                "plugin %s: %s now, %s in attempt %d; results may differ from the earlier ones",
                name, version, " and ".join(before), attempts[-1].number,
            )  # fmt: skip
