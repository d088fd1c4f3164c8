"""What is to be judged: checkpoints of a run, or a model folder; torch-free."""

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
)
from slurmllm.checkpoint.manifest import MANIFEST
from slurmllm.errors import CheckpointError, RunError
from slurmllm.evaluate.cache_key import checkpoint_checksum, folder_checksum
from slurmllm.evaluate.request import Candidate
from slurmllm.rundir import RunDir, find_run, is_run

_HUGGINGFACE = "config.json"


@dataclass(frozen=True)
class Target:
    """What the command line names.

    Attributes:
        store: Keeps the scores: the run, or the model folder itself.
        run: The run; None for a model folder.
        model: The model folder, or the one checkpoint of the run that is named.
    """

    store: RunDir
    run: RunDir | None
    model: Path | None = None


@dataclass(frozen=True)
class Chosen:
    """The models to judge.

    Attributes:
        candidates: Oldest first.
        named: Steps that were asked for by number.
        warnings: Checkpoints that are passed over, with the reason.
    """

    candidates: tuple[Candidate, ...]
    named: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()


def find_target(target: str, root: Path) -> Target:
    """A run by name or directory, a checkpoint folder, or a Hugging Face folder.

    Raises:
        RunError: it is none of them.
    """
    path = Path(target).absolute()
    if path.is_dir() and not is_run(path) and not is_run(root / target):
        if (path / MANIFEST).is_file():
            around = path.parent.parent
            if path.parent.name == "checkpoints" and is_run(around):
                return Target(RunDir(around), RunDir(around), path)
            return Target(RunDir(path), None, path)
        if (path / _HUGGINGFACE).is_file():
            return Target(RunDir(path), None, path)
    run = find_run(target, root)
    return Target(run, run)


def choose(target: Target, asked: Sequence[str], known: Callable[[Candidate], bool]) -> Chosen:
    """The models that --checkpoint asks for.

    Args:
        target: What the command line names.
        asked: Steps, `latest` or `all`; none is latest.
        known: Whether everything is known of a checkpoint, so that it need not be verified.

    Raises:
        RunError: a step that is not there, or --checkpoint for something that is no run.
        CheckpointError: there is no checkpoint that verifies.
    """
    if target.model is not None or target.run is None:
        assert target.model is not None
        if asked:
            raise RunError(
                f"--checkpoint {asked[0]}: {target.model} is one model; leave the option out, or "
                "name the run"
            )
        return Chosen((_of_folder(target.model),))
    run, entries = target.run, list_checkpoints(target.run)
    aside = invalidated_checkpoints(run)
    whole = {step_of(e): e for e in entries if e.manifest is not None and step_of(e) not in aside}
    chosen: dict[int, Candidate] = {}
    warnings: list[str] = []
    named: set[int] = set()
    for word in asked or ("latest",):
        if word == "all":
            chosen = {step: _candidate(entry) for step, entry in whole.items()} | chosen
            warnings += [
                f"step {step_of(e)} is passed over: {'; '.join(e.faults or ())}"
                for e in entries
                if e.manifest is None
            ]
            warnings += [f"step {step} is passed over: {why}" for step, why in aside.items()]
            if not chosen:
                newest_verified(run)  # says what there is instead
        elif word == "latest":
            candidate, passed_over = _latest(run, whole, known)
            chosen[candidate.step] = candidate
            warnings += [f"{line}; passed over" for line in passed_over]
        else:
            if not entries:
                newest_verified(run)  # says that there is none yet
            step = _step(word, run, [step_of(entry) for entry in entries])
            entry = read_entry(run.checkpoint(step))
            if entry.manifest is None:
                raise CheckpointError(f"{entry.directory}: {'; '.join(entry.faults or ())}")
            chosen.setdefault(step, _candidate(entry))
            named.add(step)
    candidates = tuple(chosen[step] for step in sorted(chosen))
    return Chosen(candidates, frozenset(named), tuple(dict.fromkeys(warnings)))


def step_of(entry: CheckpointEntry) -> int:
    """The step that a checkpoint folder's name says."""
    return int(entry.directory.name.rpartition("_")[2])


def _latest(
    run: RunDir, whole: dict[int, CheckpointEntry], known: Callable[[Candidate], bool]
) -> tuple[Candidate, list[str]]:
    if whole:
        newest = _candidate(whole[max(whole)])
        if known(newest):
            return newest, []
    directory, passed_over = newest_verified(run)
    return replace(_candidate(read_entry(directory)), verified=True), passed_over


def _step(word: str, run: RunDir, steps: Sequence[int]) -> int:
    if not word.isdecimal() or int(word) not in steps:
        known = ", ".join(map(str, steps[-10:]))
        raise RunError(
            f"run {run.name} has no checkpoint of step {word or repr(word)}; it has: {known} (or "
            "say latest, or all)"
        )
    return int(word)


def _of_folder(folder: Path) -> Candidate:
    if (folder / MANIFEST).is_file():
        entry = read_entry(folder)
        if entry.manifest is None:
            raise CheckpointError(f"{folder}: {'; '.join(entry.faults or ())}")
        return _candidate(entry)
    return Candidate(folder, 0, 0, folder_checksum(folder), huggingface=True)


def _candidate(entry: CheckpointEntry) -> Candidate:
    manifest = entry.manifest
    assert manifest is not None
    checksum = checkpoint_checksum(manifest)
    return Candidate(entry.directory, manifest.step, manifest.tokens, checksum)
