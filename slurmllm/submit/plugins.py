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
    values = {**cluster.env, **recipe.env}
    public = {name: value for name, value in values.items() if not is_secret(name, value)}
    faults = _import_faults(config, {**os.environ, **public, "CUDA_VISIBLE_DEVICES": ""})
    if cluster.setup:
        for fault in faults:
            log.warning("%s (on this machine, without cluster.setup)", fault)
        return []
    return faults


def _import_faults(config: RunConfig, environment: dict[str, str]) -> list[str]:
    # -P: a file in the current folder must not shadow a module.
    command = [config.cluster.python or sys.executable, "-P", "-m", "slurmllm.train.plugins"]
    values = json.dumps(config.values())
    try:
        done = subprocess.run(
            command, input=values, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode == 0:
            return list(json.loads(done.stdout))
        last = done.stderr.strip().rpartition("\n")[2] or "no output"
        return [f"plugins: the process that imports them failed: {last}"]
    except subprocess.TimeoutExpired:
        return [
            f"plugins: not imported within {LIMIT_S:.0f} s on this machine; import less at the top "
            "of their modules, or submit again if the file system was slow"
        ]
    except (OSError, ValueError) as error:
        fix = "set cluster.python to a Python that can import slurmllm"
        return [f"plugins: cannot run their check: {error}; {fix}"]


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
        before = sorted({node.versions[name] for node in nodes if name in node.versions})
        if before and before != [version]:
            earlier = f"{' and '.join(before)} in attempt {attempts[-1].number}"
            text = "results may differ from the earlier ones"
            log.warning("plugin %s: %s now, %s; %s", name, version, earlier, text)
