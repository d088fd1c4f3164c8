"""What a job evaluates, its outcome, and the cache keys of its scores; pickled, so plain data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from slurmllm.checkpoint.state import MODEL
from slurmllm.evaluate.suites import SuiteTask
from slurmllm.records import CheckpointManifest
from slurmllm.rundir import RunDir

HARNESS = "lm_eval"
# Prefix of the temporary folders of exported models, in the folder of the scores.
EXPORT_PREFIX = ".export-"


@dataclass(frozen=True)
class ModelRef:
    """A model to evaluate.

    Attributes:
        directory: A checkpoint folder, or a Hugging Face model folder.
        step: Of the checkpoint; 0 for a Hugging Face model.
        tokens: Tokens trained on; 0 if unknown.
        checksum: Of its contents.
        huggingface: Whether it is a Hugging Face folder, which is evaluated without an export.
        verified: Whether its files have been verified already.
    """

    directory: Path
    step: int
    tokens: int
    checksum: str
    huggingface: bool = False
    verified: bool = False


@dataclass(frozen=True)
class ValidationText:
    """The text of the task `validation`.

    Attributes:
        run: The run whose held-out documents are read; None for a named corpus of a model folder.
        corpus: The named corpus.
        name: Of the task in the records.
    """

    run: Path | None
    corpus: Path | None
    name: str


@dataclass(frozen=True)
class TaskRequest:
    """One task to evaluate."""

    task: SuiteTask
    folder: Path  # the task's own folder is relative to it
    key: str  # cache key of its scores


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of all tasks.

    Attributes:
        limit: Maximum questions (`validation`: sequences); None: all (the first 1,000).
        batch_size: Sequences in a batch; None: one on a CPU, as many as fit on a CUDA device.
        device: cpu, cuda, or auto: cuda if available.
        allow_code: Whether programs that the model writes may be executed.
        export_dir: Where exported models are kept; None: they are removed.
        tokenizer: A tokenizer.json to use instead of the run's.
        call_id: In the names of this call's temporary folders.
    """

    limit: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    allow_code: bool = False
    export_dir: Path | None = None
    tokenizer: Path | None = None
    call_id: str = ""


@dataclass(frozen=True)
class JobRequest:
    """One job: some tasks on one model."""

    store: Path  # directory that holds the scores: the run's, or the model folder
    model: ModelRef
    tasks: tuple[TaskRequest, ...]
    validation: ValidationText | None  # text of `validation`, if requested
    settings: EvaluationSettings

    def score_file(self, task: TaskRequest) -> Path:
        return RunDir(self.store).evaluation(self.model.checksum, task.key)

    def title(self, request: TaskRequest) -> str:
        """A task's name, with its shots if it is requested with several numbers of shots."""
        name, shots = request.task.task, request.task.shots
        variants = sum(other.task.task == name for other in self.tasks)
        return name if variants == 1 or shots is None else f"{name} {shots}-shot"


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job."""

    failed: dict[str, str] = field(default_factory=dict)  # cache key of a task → reason
    damaged: tuple[str, ...] = ()  # faults of the checkpoint's files, which was therefore skipped
    error: str | None = None  # how the job ended, if it returned no outcome


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
        folder: The task's own folder is relative to it.
        limit: Maximum questions.
        version: Of the harness; it also identifies the tasks that the harness ships.
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
        return ""  # the harness then reports the missing folder
    return _digest(
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
    )


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
