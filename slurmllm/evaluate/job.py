"""One job: a checkpoint, verified, exported and judged; each score is kept once it is known."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from time import time

from slurmllm.checkpoint.catalogue import read_entry, verify_entry
from slurmllm.errors import SlurmllmError
from slurmllm.evaluate.request import Asked, Outcome, Work
from slurmllm.records import EvaluationRecord
from slurmllm.rundir import RunDir


def evaluate(work: Work) -> Outcome:
    """Do what a job is to do; what fails is said and does not keep the rest from being done."""
    candidate = work.candidate
    if not candidate.verified and not candidate.huggingface:
        faults = verify_entry(read_entry(candidate.directory)).faults
        if faults:
            return Outcome(unsound=faults)
    failed: dict[str, str] = {}
    ours = [one for one in work.asked if _is_ours(work, one)]
    theirs = [one for one in work.asked if not _is_ours(work, one)]
    for one in ours:
        _attempt(work, one, failed, lambda _: validate(work))
    if theirs:
        try:
            _harness(work, theirs, failed)
        except Exception as error:
            reason = _said(error)
            failed |= {one.key: reason for one in theirs if not work.file(one).is_file()}
    return Outcome(failed=failed)


def validate(work: Work) -> EvaluationRecord:
    """The loss on held-out text."""
    from slurmllm.evaluate.harness import torch_device
    from slurmllm.evaluate.validation_loss import held_out_loss
    from slurmllm.evaluate.validation_text import LOOP, stream_spec

    candidate, settings = work.candidate, work.settings
    assert work.held_out is not None
    device = torch_device(settings.device)
    with stream_spec(work.held_out, candidate.directory, settings.tokenizer) as spec:
        found = held_out_loss(
            candidate.directory, spec, settings.limit, settings.batch_size, device
        )
    return EvaluationRecord(
        step=candidate.step,
        tokens=candidate.tokens,
        checkpoint=candidate.checksum,
        task=work.held_out.name,
        limit=settings.limit,
        scores=found.scores,
        errors=found.errors,
        num_samples=found.sequences,
        version=LOOP,
        seconds=found.seconds,
        evaluated_at=time(),
    )


def _harness(work: Work, theirs: list[Asked], failed: dict[str, str]) -> None:
    from slurmllm.evaluate.exported import exported
    from slurmllm.evaluate.harness import Harness

    with exported(work.candidate, RunDir(work.store).evaluations, work.settings) as folder:
        harness = Harness(folder, work.candidate, work.settings)
        for one in theirs:
            _attempt(work, one, failed, harness.judge)


def _is_ours(work: Work, asked: Asked) -> bool:
    return work.held_out is not None and asked.task.task == work.held_out.name


def _attempt(
    work: Work, asked: Asked, failed: dict[str, str], judge: Callable[[Asked], EvaluationRecord]
) -> None:
    """Do one task and keep what came of it."""
    try:
        judge(asked).save(work.file(asked))
    except Exception as error:
        failed[asked.key] = _said(error)


def _said(error: Exception) -> str:
    """An error in a line; where it is none of ours, the job's log has the rest."""
    if isinstance(error, SlurmllmError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
