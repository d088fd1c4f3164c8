"""Checkpoints that a roll-back has set aside: saved after training had begun to diverge.

They verify, so a resume must know them. They stay on disk for whoever wants to look, until training
reaches their step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from slurmllm.checkpoint.manifest import read_manifest
from slurmllm.errors import StorageError
from slurmllm.records import SkippedBatches, SkipsRecord
from slurmllm.rundir import RunDir


def read_skips(run: RunDir) -> tuple[SkippedBatches, ...]:
    """The roll-backs of a run, oldest first.

    Raises:
        StorageError: their file is damaged.
    """
    return SkipsRecord.load(run.skips).skips if run.skips.exists() else ()


def set_aside(step: int, attempt: int, skips: Sequence[SkippedBatches]) -> str | None:
    """Why a checkpoint counts no more; None where it does.

    Args:
        step: Its own.
        attempt: The one that saved it.
        skips: The run's roll-backs.
    """
    for skip in skips:
        if step >= skip.onset and attempt <= skip.attempt:
            return (
                f"attempt {attempt} saved it after the divergence from step {skip.onset} on, which "
                f"attempt {skip.attempt} rolled back"
            )
    return None


def all_set_aside(run: RunDir) -> dict[int, str]:
    """The checkpoints of a run that count no more: step → why.

    Raises:
        StorageError: the file of the run's roll-backs is damaged.
    """
    skips, found = read_skips(run), {}
    for step in run.checkpoint_steps() if skips else ():
        with suppress(StorageError):  # a damaged checkpoint is another matter
            attempt = read_manifest(run.checkpoint(step)).attempt
            if reason := set_aside(step, attempt, skips):
                found[step] = reason
    return found
