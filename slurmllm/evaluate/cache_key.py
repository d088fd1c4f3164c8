"""Cache keys of scores: digests of a checkpoint's contents and of a task's definition."""

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
    """Such as `lm_eval 0.4.13`; None if the harness is not installed."""
    try:
        return f"{HARNESS} {metadata.version(HARNESS)}"
    except metadata.PackageNotFoundError:
        return None


def checkpoint_checksum(manifest: CheckpointManifest) -> str:
    """Digest of the names and checksums of a checkpoint's files.

    Without times and attempts: a checkpoint that is copied or saved again has the same digest.
    """
    return _digest({file.path: file.sha256 for file in manifest.files})


def folder_checksum(folder: Path) -> str:
    """Digest of the files of a Hugging Face model folder."""
    contents = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MODEL:  # which is slurmllm's own, written on import
            with path.open("rb") as stream:
                contents[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digest(contents)


def task_key(
    task: SuiteTask,
    folder: Path,
    limit: int | None,
    version: str,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Digest of a task's definition, with the task's name in front.

    Args:
        task: The task.
        folder: The task's own folder is relative to it.
        limit: Maximum questions.
        version: Of the harness, which also identifies the tasks that it ships.
        extra: Whatever else changes the scores.
    """
    parts = {
        "task": task.task,
        "shots": task.shots,
        "options": task.options,
        "limit": limit,
        "version": version,
        "files": None if task.folder is None else _files_digest(folder / task.folder),
        # A key of the digest: renaming it would invalidate all cached scores.
        "of": dict(extra or {}),
    }
    name = re.sub(r"[^A-Za-z0-9._-]", "_", task.task)[:80]
    return f"{name}-{_digest(parts)[:12]}"


@cache
def _files_digest(folder: Path) -> str:
    """Digest of the files of a folder of tasks."""
    if not folder.is_dir():
        return ""
    return _digest(
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
    )


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
