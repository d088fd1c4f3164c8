"""Names under which scores are kept: what a checkpoint and a task's set-up come to."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from slurmllm.checkpoint.origin import MODEL
from slurmllm.evaluate.suites import SuiteTask
from slurmllm.records import CheckpointManifest

HARNESS = "lm_eval"


@cache
def harness_version() -> str | None:
    """What judges, such as `lm_eval 0.4.13`; None where it is not installed."""
    try:
        return f"{HARNESS} {metadata.version(HARNESS)}"
    except metadata.PackageNotFoundError:
        return None


def checkpoint_checksum(manifest: CheckpointManifest) -> str:
    """One word for a checkpoint's contents: names and checksums of its files.

    The bookkeeping beside them is left out: a checkpoint copied or saved again is the same.
    """
    return _digest({file.path: file.sha256 for file in manifest.files})


def folder_checksum(folder: Path) -> str:
    """One word for the contents of a model folder."""
    contents = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MODEL:
            with path.open("rb") as stream:
                contents[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digest(contents)


def task_key(
    task: SuiteTask,
    folder: Path,
    limit: int | None,
    version: str,
    of: Mapping[str, Any] | None = None,
) -> str:
    """One word for a task as it is set up.

    Args:
        task: What is asked.
        folder: From which the task's own folder is seen.
        limit: Questions at most.
        version: Of what judges; it settles what the tasks that it ships are.
        of: Whatever else settles the answer.
    """
    parts = {
        "task": task.task,
        "shots": task.shots,
        "options": task.options,
        "limit": limit,
        "version": version,
        "files": None if task.folder is None else _files_digest(folder / task.folder),
        "of": dict(of or {}),
    }
    name = re.sub(r"[^A-Za-z0-9._-]", "_", task.task)[:80]
    return f"{name}-{_digest(parts)[:12]}"


@cache
def _files_digest(folder: Path) -> str:
    """One word for the files of a folder of tasks."""
    if not folder.is_dir():
        return ""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return _digest(
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if "__pycache__" not in path.parts
        }
    )


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
