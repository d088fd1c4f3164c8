"""Selects what to evaluate: checkpoints of a run, or a model folder; without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmllm.checkpoint.catalogue import (
    CheckpointEntry,
    invalidated_checkpoints,
    list_checkpoints,
    newest_verified,
    read_entry,
    require_step,
)
from slurmllm.checkpoint.folder import MANIFEST
from slurmllm.errors import CheckpointError, RunError
from slurmllm.evaluate.request import ModelRef, checkpoint_checksum, folder_checksum
from slurmllm.rundir import RunDir, find_run, is_run


@dataclass(frozen=True)
class EvaluationTarget:
    """The run or model that the command line names."""

    store: RunDir  # holds the scores: the run, or the model folder itself
    run: RunDir | None  # None for a model folder
    model: Path | None = None  # the model folder, or one checkpoint of the run; None: the run


@dataclass(frozen=True)
class Selection:
    """The models to evaluate."""

    models: tuple[ModelRef, ...]  # oldest first
    named_steps: frozenset[int] = frozenset()  # requested by number
    warnings: tuple[str, ...] = ()  # checkpoints that are skipped, with the reason


def find_target(target: str, root: Path) -> EvaluationTarget:
    """A run by name or directory, a checkpoint, or a Hugging Face folder; else a RunError."""
    path = Path(target).absolute()
    if path.is_dir() and not is_run(path) and not is_run(root / target):
        if (path / MANIFEST).is_file():
            above = path.parent.parent
            if path.parent.name == "checkpoints" and is_run(above):
                return EvaluationTarget(RunDir(above), RunDir(above), path)
            return EvaluationTarget(RunDir(path), None, path)
        if (path / "config.json").is_file():
            return EvaluationTarget(RunDir(path), None, path)
    run = find_run(target, root)
    return EvaluationTarget(run, run)


def select_models(
    target: EvaluationTarget, requested: Sequence[str], is_cached: Callable[[ModelRef], bool]
) -> Selection:
    """The models of --checkpoint: steps, `latest` or `all`; by default latest.

    A checkpoint that `is_cached` (all its scores are) is not verified.

    Raises:
        RunError: an unknown step, or --checkpoint without a run.
        CheckpointError: no checkpoint verifies.
    """
    if (folder := target.model) is not None:
        if requested:
            raise RunError(
                f"--checkpoint {requested[0]}: {folder} is one model; omit the option, or "
                "name the run"
            )
        if (folder / MANIFEST).is_file():
            return Selection((_model(read_entry(folder)),))
        return Selection((ModelRef(folder, 0, 0, folder_checksum(folder), huggingface=True),))
    # Reads only manifests; the job verifies the files, which takes minutes for a large model.
    run = target.run or target.store
    entries = list_checkpoints(run)
    invalidated = invalidated_checkpoints(run)
    complete = {
        _step(entry): entry
        for entry in entries
        if entry.manifest is not None and _step(entry) not in invalidated
    }
    selected: dict[int, ModelRef] = {}
    warnings: list[str] = []
    named: set[int] = set()
    for choice in requested or ("latest",):
        if choice == "all":
            selected = {step: _model(entry) for step, entry in complete.items()} | selected
            warnings += [
                f"skipping step {_step(entry)}: {'; '.join(entry.faults or ())}"
                for entry in entries
                if entry.manifest is None
            ]
            warnings += [f"skipping step {step}: {why}" for step, why in invalidated.items()]
            if not selected:
                newest_verified(run)  # raises the error that names the faults
        elif choice == "latest":
            newest = _model(complete[max(complete)]) if complete else None
            if newest is None or not is_cached(newest):
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
    models = tuple(selected[step] for step in sorted(selected))
    return Selection(models, frozenset(named), tuple(dict.fromkeys(warnings)))


def _step(entry: CheckpointEntry) -> int:
    # From the name: a damaged checkpoint may have no readable manifest.
    return int(entry.directory.name.rpartition("_")[2])


def _model(entry: CheckpointEntry) -> ModelRef:
    manifest = entry.manifest
    if manifest is None:
        raise CheckpointError(f"{entry.directory}: {'; '.join(entry.faults or ())}")
    checksum = checkpoint_checksum(manifest)
    return ModelRef(entry.directory, manifest.step, manifest.tokens, checksum)
