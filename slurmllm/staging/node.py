"""What an attempt stages: the supervisor's part, which sends the archive, and a launcher's part.

A launcher prepares its node for its workers, or explains why not. It also copies, once, the small
files that each worker reads: the tokenizer, small corpora and, of corpora in Megatron's format, the
index. Larger corpora are read from the shared file system, a document at a time. Workers find the
copies by `worker_files.local_copy`.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from slurmllm.backends.environment import broadcast_path, node_local_cache
from slurmllm.config.resolve import RunConfig
from slurmllm.diagnose.probe import Nodes, read_lines
from slurmllm.errors import SlurmllmError
from slurmllm.run.artifact_records import EnvironmentManifest
from slurmllm.run.rundir import RunDir
from slurmllm.run.safe_files import check_private_folder, open_regular, os_error_text
from slurmllm.run.worker_files import STAGED_INPUTS, copy_name
from slurmllm.slurm.error_texts import launch_failure
from slurmllm.staging.archive import ensure_archive, free_for
from slurmllm.staging.install import MARKER, Staged, install_environment

# In the user's private folder on a node.
ENVIRONMENTS, INPUTS = "environments", "inputs"
# Set by the supervisor for its launchers: the manifest of the archive, the archive on the nodes'
# own disks, and why there is none.
MANIFEST = "SLURMLLM_ENVIRONMENT"
BROADCAST = "SLURMLLM_ENVIRONMENT_BROADCAST"
FAULT = "SLURMLLM_ENVIRONMENT_FAULT"
ASK_S = 60.0  # for the nodes to answer; those that do not get the archive
# No Python: an interpreter on the shared file system would cost what this saves.
_ASK = 'if test -f "$1"; then echo slurmllm-staged; fi'
MAX_FILE_BYTES = 4_000_000_000  # a larger index is mapped from the shared file system
MAX_CORPUS_BYTES = 256_000_000  # read in a second by each of many nodes at a time
MAX_AGE_S = 14 * 86400.0  # of a copy of an input that no attempt has used

log = logging.getLogger(__name__)


def broadcast_environment(
    run: RunDir, config: RunConfig, nodes: Nodes, stop: Callable[[], bool]
) -> dict[str, str]:
    """Pack the environment if no attempt has, and send it to the nodes unless all have it.

    `stop` is polled; True ends the packing or the broadcast. Returns the variables for the
    launchers, which fall back to the shared environment after a failure.
    """
    if not config.cluster.stage_environment:
        return {}
    started = time.monotonic()
    try:
        path = ensure_archive(run.path.parent, config.cluster.trusted_group, stop)
        manifest = EnvironmentManifest.load_trusted(path, config.cluster.trusted_group)
        planned = Path(node_local_cache(config, run))
        # On a node where the private folder has another name, the environment is not found.
        marker = planned.parent / ENVIRONMENTS / manifest.fingerprint / MARKER
        asked = time.monotonic()
        processes = nodes.ask(["/bin/sh", "-c", _ASK, "sh", str(marker)])
        answers = [text.strip() for _, text in read_lines(processes, ASK_S, stop)]
        seconds = time.monotonic() - asked
        if not stop() and (failure := launch_failure(processes, seconds, answers, nodes.nodes)):
            log.warning("environment: the nodes were not asked: %s", failure.text)
    except SlurmllmError as error:
        if not stop():
            log.warning("environment: %s", error)
        return {FAULT: str(error)}
    variables = {MANIFEST: str(path)}
    if answers.count("slurmllm-staged") == len(nodes.nodes):
        log.info("environment: present on all %d nodes", len(nodes.nodes))
        return variables
    archive, target = path.with_name(manifest.archive), broadcast_path(planned)
    if (fault := nodes.broadcast(archive, target, stop)) is not None:
        if not stop():
            log.warning("sbcast: %s; the nodes read %s", fault, archive)
        return variables
    figures = manifest.archive_bytes / 1e6, time.monotonic() - started
    log.info("environment: %.0f MB to all nodes in %.1f s", *figures)
    return {**variables, BROADCAST: str(target)}


class NodeStaging:
    """What is staged on this node; keeps it from being removed as long as this object exists."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.staged: Staged | None = None

    def prepare(self, private: Path) -> dict[str, object]:
        """Stage environment and inputs, and set the variables of the workers.

        `private` is the user's private folder on this node's own disk. Returns the fields of the
        node's record.
        """
        if not self.config.cluster.stage_environment:
            return {}
        started = time.monotonic()
        reason = self._stage_environment(private / ENVIRONMENTS)
        if self.staged is None:
            log.warning(
                "environment: %s; the workers of this node run from the shared environment", reason
            )
        else:
            os.environ.update(self.staged.variables())
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
        path, group = Path(broadcast) if broadcast else None, self.config.cluster.trusted_group
        backend = self.config.backend
        try:
            self.staged = install_environment(folder, Path(manifest), backend, path, group)
        except SlurmllmError as error:
            return str(error)
        return self.staged.origin


def stage_inputs(config: RunConfig, private: Path) -> Path:
    """Copy a run's small inputs into the user's private folder; returns the folder of the copies.

    A file that cannot be copied is read from the shared file system.
    """
    folder = private / INPUTS
    for path, limit in _small_inputs(config):
        try:
            check_private_folder(private)
            folder.mkdir(mode=0o700, exist_ok=True)
            with open_regular(path) as source:
                copy = folder / copy_name(path)
                if copy.is_file():
                    os.utime(copy)
                    continue
                size = os.fstat(source.fileno()).st_size
                if size > limit:
                    continue
                free_for(folder, size)
                temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
                try:
                    with temporary.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
                    temporary.replace(copy)
                finally:
                    temporary.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # most tokenizers have no further files
        except OSError as error:
            reason = os_error_text(error)
            log.warning("cannot copy %s into %s, workers read it there: %s", path, folder, reason)
    with suppress(OSError):
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()
    return folder


def _small_inputs(config: RunConfig) -> Iterator[tuple[Path, int]]:
    """Yield the files, each with the largest size, in bytes, that is copied."""
    data = config.recipe.data
    if data.tokenizer is not None:
        tokenizer = Path(data.tokenizer)
        for name in (tokenizer.name, "tokenizer_config.json", "chat_template.jinja"):
            yield tokenizer.with_name(name), MAX_FILE_BYTES
    for text in (*(share.path for share in data.corpora), *config.recipe.eval.corpora.values()):
        path = Path(text)
        stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
        yield stem.with_name(f"{stem.name}.idx"), MAX_FILE_BYTES
        yield stem.with_name(f"{stem.name}.bin"), MAX_CORPUS_BYTES
        if stem == path and not path.is_dir():
            yield path, MAX_CORPUS_BYTES
