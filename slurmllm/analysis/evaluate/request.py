"""What is evaluated: checkpoints of a run or a model folder, jobs and their cache keys; torch-free.

Requests and outcomes are pickled, so that they are plain data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from slurmllm.analysis.evaluate.suites import SuiteTask
from slurmllm.core.config.huggingface import ADAPTER
from slurmllm.core.errors import CheckpointError, RunError, UserError
from slurmllm.core.format import Texts, Values
from slurmllm.core.run.rundir import RunDir, is_run
from slurmllm.core.run.safe_files import open_regular
from slurmllm.train.checkpoint.catalogue import (
    CheckpointEntry,
    find_checkpoint,
    invalidated_checkpoints,
    list_checkpoints,
    newest_verified,
    read_entry,
    require_step,
)
from slurmllm.train.checkpoint.folder import MANIFEST, describe
from slurmllm.train.checkpoint.state import MODEL

HARNESS = "lm_eval"
# Prefix of the temporary folders of exported models, in the folder of the scores.
EXPORT_PREFIX = ".export-"
# Of a folder of tasks
_MOST_FILES = 10_000
_MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class ModelRef:
    """A model to evaluate."""

    directory: Path  # a checkpoint folder, or a Hugging Face model folder
    step: int  # 0 for a Hugging Face model
    tokens: int  # tokens trained on; 0 if unknown
    checksum: str  # of its contents
    huggingface: bool = False  # whether it is a Hugging Face folder, evaluated without an export
    verified: bool = False  # whether its files have been verified already


@dataclass(frozen=True)
class ValidationText:
    """The text of the task `validation`: held-out documents of a run, or a named corpus."""

    run: Path | None  # None for a named corpus of a model folder
    corpus: Path | None
    name: str  # of the task in the records


@dataclass(frozen=True)
class TaskRequest:
    """One task to evaluate."""

    task: SuiteTask
    folder: Path  # the task's own folder is relative to it
    key: str  # cache key of its scores
    allow_code: bool = False  # as in the settings


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of all tasks."""

    limit: int | None = None  # maximum questions or sequences; None: all, or the first 1,000
    batch_size: int | None = None  # None: one on a CPU, as many as fit on a CUDA device
    device: str = "auto"  # cpu, cuda, or auto: cuda if available
    allow_code: bool = False  # whether programs that the model writes may be executed
    tokenizer: Path | None = None  # a tokenizer.json to use instead of the run's
    call_id: str = ""  # in the names of this call's temporary folders


@dataclass(frozen=True)
class JobRequest:
    """One job: some tasks on one model."""

    store: Path  # directory that holds the scores: the run's, or the model folder
    model: ModelRef
    tasks: Sequence[TaskRequest]
    validation: ValidationText | None  # text of `validation`, if requested
    settings: EvaluationSettings

    def score_file(self, task: TaskRequest) -> Path:
        return RunDir(self.store).evaluation(self.model.checksum, task.key)

    def title(self, request: TaskRequest) -> str:
        """A task's name, with its shots if it is requested with several numbers of shots."""
        name = request.task.task
        shots = request.task.shots
        variants = sum(other.task.task == name for other in self.tasks)
        return name if variants == 1 or shots is None else f"{name} {shots}-shot"


class TaskScores(NamedTuple):
    """The scores of a task, as fields of `EvaluationRecord`."""

    scores: dict[str, float]
    errors: dict[str, float]
    num_samples: int
    version: str
    shots: int | None = None


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job."""

    failed: dict[str, str] = field(default_factory=dict)  # cache key of a task → reason
    damaged: Texts = ()  # faults of the checkpoint's files, which was therefore skipped


@cache
def harness_version() -> str | None:
    """Return such as `lm_eval 0.4.13`; None if the harness is not installed."""
    try:
        return f"{HARNESS} {metadata.version(HARNESS)}"
    except metadata.PackageNotFoundError:
        return None


def folder_checksum(folder: Path) -> str:
    """Return a digest of a Hugging Face model folder; raise UserError if it has no safetensors."""
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} has no weights in safetensors, and no others are read: pickles "
            "(pytorch_model.bin) can run code; load the model in transformers, if you trust its "
            "author, and save it again with save_pretrained, which writes safetensors"
        )
    # Without slurmllm's own file, which is written on import.
    names = (p.name for p in sorted(folder.iterdir()) if p.is_file() and p.name != MODEL)
    return _digest({name: describe(folder, name).sha256 for name in names})


def task_key(
    task: SuiteTask,
    folder: Path,
    limit: int | None,
    version: str,
    extra: Values | None = None,
) -> str:
    """Return a digest of all that a task's scores depend on, with the task's name in front.

    The task's own folder is relative to `folder`. The harness's `version` also identifies the tasks
    that the harness ships.
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
    """Return a digest of the files of a folder of tasks."""
    if not folder.is_dir():
        return ""  # the harness then reports the missing folder
    digests = dict[str, str]()
    total = 0
    for seen, path in enumerate(folder.rglob("*"), start=1):
        if path.is_file() and "__pycache__" not in path.parts:
            with open_regular(path) as stream:
                total += os.fstat(stream.fileno()).st_size
                if total <= _MOST_BYTES:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    digests[str(path.relative_to(folder))] = digest
        if seen > _MOST_FILES or total > _MOST_BYTES:
            raise UserError(
                f"folder {folder} of a suite has more than {_MOST_FILES:,} files or "
                f"{_MOST_BYTES >> 30} GiB: every file of it is part of the scores' key; name the "
                "folder that holds only the tasks"
            )
    return _digest(digests)


def _digest(parts: Values) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EvaluationTarget:
    """The run or model that the command line names."""

    store: RunDir  # holds the scores: the run, or the model folder itself
    run: RunDir | None  # None for a model folder
    model: Path | None = None  # the model folder, or one checkpoint of the run; None: the run


@dataclass(frozen=True)
class Selection:
    """The models to evaluate."""

    models: Sequence[ModelRef]  # oldest first
    named_steps: frozenset[int] = frozenset()  # requested by number
    warnings: Texts = ()  # checkpoints that are skipped, with the reason


def find_target(target: str, root: Path) -> EvaluationTarget:
    """Return the run, checkpoint or Hugging Face folder that `target` names; else a RunError."""
    checkpoint = find_checkpoint(target, root)
    if isinstance(checkpoint, RunDir):
        return EvaluationTarget(checkpoint, checkpoint)
    path = checkpoint.absolute()
    if path.parent.name == "checkpoints" and is_run(path.parent.parent):
        run = RunDir(path.parent.parent)
        return EvaluationTarget(run, run, path)
    if not (path / MANIFEST).is_file() and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise RunError(f"{path}: {ADAPTER}")
        raise RunError(f"{path} is no run, no checkpoint and no Hugging Face model; name one")
    return EvaluationTarget(RunDir(path), None, path)


def select_models(
    target: EvaluationTarget, requested: Sequence[str], is_cached: Callable[[ModelRef], bool]
) -> Selection:
    """Return the models of --checkpoint: steps, `latest` or `all`; by default latest.

    A checkpoint that `is_cached` (all its scores are) is not verified.
    """
    if (folder := target.model) is not None:
        if requested:
            raise RunError(
                f"--checkpoint {requested[0]}: {folder} is one model; omit the option, or "
                "name the run"
            )
        if target.run or (folder / MANIFEST).is_file():
            return Selection((_model(read_entry(folder)),))
        return Selection((ModelRef(folder, 0, 0, folder_checksum(folder), huggingface=True),))
    # Reads only manifests; the job verifies the files, which takes minutes for a large model.
    run = target.store
    entries = list_checkpoints(run)
    invalidated = invalidated_checkpoints(run)
    complete = {
        entry.step: entry for entry in entries if entry.manifest and entry.step not in invalidated
    }
    selected: dict[int, ModelRef] = {}
    warnings: list[str] = []
    named = set()
    for choice in requested or ("latest",):
        if choice == "all":
            selected = {step: _model(entry) for step, entry in complete.items()} | selected
            warnings += [
                f"skipping step {entry.step}: {'; '.join(entry.faults or ())}"
                for entry in entries
                if not entry.manifest
            ]
            warnings += [f"skipping step {step}: {why}" for step, why in invalidated.items()]
            if not selected:
                newest_verified(run)  # raises the error that names the faults
        elif choice == "latest":
            newest = _model(complete[max(complete)]) if complete else None
            if not newest or not is_cached(newest):
                directory, skipped = newest_verified(run)
                newest = replace(_model(read_entry(directory)), verified=True)
                warnings += [f"{fault}; skipped" for fault in skipped]
            selected[newest.step] = newest
        else:
            if not entries:
                newest_verified(run)  # raises the error that there is none yet
            entry = read_entry(require_step(run, choice, "latest, or all"))
            selected.setdefault(int(choice), _model(entry))
            named.add(int(choice))
    models = [selected[step] for step in sorted(selected)]
    return Selection(models, frozenset(named), tuple(dict.fromkeys(warnings)))


def _model(entry: CheckpointEntry) -> ModelRef:
    manifest = entry.manifest
    if manifest is None:
        raise CheckpointError(f"{entry.directory}: {'; '.join(entry.faults or ())}")
    # Without times and attempts: a checkpoint that is copied or saved again has the same digest.
    checksum = _digest({file.path: file.sha256 for file in manifest.files})
    return ModelRef(entry.directory, manifest.step, manifest.tokens, checksum)
