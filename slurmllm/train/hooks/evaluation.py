"""Validation while training: the loss on the texts of `eval`, every `eval.every_steps`."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slurmllm.core.errors import DataError
from slurmllm.core.metrics.row_reader import perplexity, read_events
from slurmllm.data.spec import StreamSpec, evaluation_texts
from slurmllm.data.stream import single_sequences
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.base import IGNORED, MicroBatch
from slurmllm.train.hooks import Evaluation, Hook, StepEnd
from slurmllm.train.job import Job

log = logging.getLogger(__name__)


class EvaluationStep(NamedTuple):
    """One worker's part of the sequences of one call of `Backend.evaluate`."""

    micro_batches: list[MicroBatch]
    num_targets: int  # target tokens of all workers


@dataclass
class EvaluationHook(Hook):
    """Evaluation of the texts, on every worker; the hooks in `readers` get the losses.

    In the precompile stage only one pass of each, whose graphs are those of all.
    """

    job: Job
    readers: Sequence[Hook] = ()
    _texts: Mapping[str, Sequence[EvaluationStep]] | None = None

    def before_training(self) -> None:
        """Evaluate the step that training resumes from, if its attempt could not (collective)."""
        job = self.job
        if job.start.resumed_from is None or not job.evaluates(job.step) or job.stop.agreed:
            return
        absent = None
        if job.worker.rank == 0:
            absent = not any(
                event.kind == "evaluation" and event.step == job.step
                for attempt in range(job.attempt)
                for event in read_events(job.run, attempt)
            )
        if job.control.broadcast(absent):
            self._evaluate()

    def after_step(self, end: StepEnd) -> None:
        if end.evaluating and (end.last or self.job.stop.agreed is None):
            with self.job.backend.part("evaluation"):
                self._evaluate()

    def _evaluate(self) -> None:
        job = self.job
        began = time.monotonic()
        job.phases.begin("evaluating", job.step)
        if self._texts is None:
            self._texts = _read_texts(job)
        losses = self._losses(self._texts)
        if job.stage == "precompile":
            return
        if losses is None:
            level = logging.INFO
            then = "the next attempt evaluates it"
            if job.step == job.last_step:
                then = f"`slurmllm evaluate {job.run.name} --task validation` evaluates it"
                level = logging.WARNING
            log.log(
                level, "%s ended the evaluation of step %d; %s", job.stop.agreed, job.step, then
            )
            return
        seconds = time.monotonic() - began
        listing = "  ".join(
            f"{name} loss {loss:.4f}, perplexity {perplexity(loss):.2f}"
            for name, loss in losses.items()
        )
        log.info("evaluated step %d in %.2f s: %s", job.step, seconds, listing)
        finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
        job.events.add("evaluation", job.step, seconds=seconds, waited_s=seconds, values=finite)
        for reader in self.readers:
            reader.after_evaluation(Evaluation(job.step, time.time(), losses))

    def _losses(self, texts: Mapping[str, Sequence[EvaluationStep]]) -> dict[str, float] | None:
        """Return the mean loss over all targets of each text, equal on all workers (collective).

        None if a stop signal came: its flags are read one pass later, so that no pass waits.
        """
        job = self.job
        posted = None
        totals = dict.fromkeys(texts, 0.0)
        for name, passes in texts.items():
            for step in passes:
                if posted is not None and job.read_flags(posted):
                    return None
                posted = job.post_flags()
                job.phases.begin("evaluating", job.step)
                mean = job.backend.evaluate(step.micro_batches, step.num_targets)
                totals[name] += float(mean) * step.num_targets
            totals[name] /= sum(step.num_targets for step in passes)
        return totals


def _read_texts(job: Job) -> dict[str, list[EvaluationStep]]:
    recipe = job.config.recipe
    rank = job.mesh.data_rank(job.worker.rank)
    settings = recipe.eval
    texts = dict[str, list[EvaluationStep]]()
    for name, spec in evaluation_texts(StreamSpec.of(recipe), settings.corpora).items():
        passes = make_passes(spec, settings.sequences, job.mesh, rank)
        texts[name] = list(itertools.islice(passes, 1) if job.stage == "precompile" else passes)
        if not any(step.num_targets for step in texts[name]):
            raise DataError(
                f"eval: the first {settings.sequences} sequences of {name} have no target tokens; "
                "raise eval.sequences, or choose another corpus"
            )
    return texts


def make_passes(spec: StreamSpec, limit: int, mesh: Mesh, rank: int) -> Iterator[EvaluationStep]:
    """Yield the passes over a text for one data-parallel rank.

    A pass has at most the micro batches of a step; in a pipeline, whose schedule is fixed, exactly
    those. The last pass is filled up with sequences without targets.
    """
    sequences = single_sequences(spec, limit)
    size = mesh.data * mesh.micro_batch
    while group := list(itertools.islice(sequences, size * mesh.accumulation)):
        count = mesh.accumulation if mesh.pipeline > 1 else math.ceil(len(group) / size)
        labels = np.concatenate([batch.labels(IGNORED) for batch in group])
        targets = int((labels != IGNORED).sum())
        rows = np.arange(rank * count * mesh.micro_batch, (rank + 1) * count * mesh.micro_batch)
        inputs = np.concatenate([batch.inputs for batch in group])[rows % len(group)]
        labels = np.where((rows < len(group))[:, None], labels[rows % len(group)], IGNORED)
        positions = [batch.positions for batch in group if batch.positions is not None]
        whole = np.concatenate(positions)[rows % len(group)] if positions else None
        micro_batches = [
            MicroBatch(inputs[indices], labels[indices], None if whole is None else whole[indices])
            for indices in np.split(np.arange(len(rows)), count)
        ]
        yield EvaluationStep(micro_batches, targets)
