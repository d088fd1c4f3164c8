"""`train.micro_batch: auto`: the precompile stage measures micro batches and chooses one.

1. Candidates divide the sequences that a data-parallel worker of the train stage has in a step;
   each is at least twice the one before.
2. Each candidate runs real steps: the first one compiles, later ones are timed. A timed step is as
   long as the run's own, or a few seconds. The result is seconds per sequence (forward, backward);
   the optimizer's time does not depend on the micro batch.
3. The search ends before a candidate whose predicted memory does not fit, or after two in a row
   that were not 3 % faster than the fastest before them.
4. The smallest within 3 % of the fastest is chosen: it uses less memory and fits more node counts.

All workers use the times of the slowest and the memory of the fullest worker, so that all choose
the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slurmllm.core.run.artifact_records import MicroBatchCandidate, MicroBatchRecord
from slurmllm.core.run.host_memory import Memory
from slurmllm.plan.mesh import Mesh, load_mesh, make_mesh, micro_batches, save_mesh
from slurmllm.train.backends.base import MicroBatch
from slurmllm.train.exits import classify_error
from slurmllm.train.job import Job, change_micro_batch
from slurmllm.train.schedules import learning_rate

log = logging.getLogger(__name__)

GAIN = 0.03  # timings of equal steps differ by a percent or two
PATIENCE = 2
MEMORY_SHARE = 0.9  # of what a worker may use; the rest is for fragmentation and saving
STEP_S = 2.0  # length of a timed step
REPEATS = (3, 10)  # timed steps: at least, and at most for steps under a second


def choose_micro_batch(job: Job) -> str | None:
    """Measure micro batches, write the record, continue with the chosen one (collective).

    Returns the signal that requested a stop, if any; then nothing is written.
    """
    planned = load_mesh(job.run.plan)
    share = planned.global_batch // planned.data
    names = job.control.gather(job.worker.node)
    nodes = job.control.broadcast(None if names is None else tuple(dict.fromkeys(names)))
    candidates: list[MicroBatchCandidate] = []

    def save_record() -> int:
        """Record the measurements; return the micro batch that is chosen from them."""
        chosen = choose(candidates)
        MicroBatchRecord(
            micro_batch=chosen,
            reason=reason,
            candidates=tuple(candidates),
            limit_bytes=limit,
            nodes=nodes,
            device=job.config.cluster.device,
            workers=job.worker.world_size,
        ).save(job.run.micro_batch)
        return chosen

    reason = f"none larger fits a worker's share of {share}"
    limit = 0
    resting = 0
    for size in to_try(micro_batches(share, planned.pipeline, planned.virtual_pipeline)):
        if stop := enough(candidates) or too_large(candidates, size, limit, resting):
            reason = stop
            break
        try:
            candidate, limit, resting = _measure(job, replace(planned, micro_batch=size))
        except Exception as error:
            if candidates and classify_error(error).error == "OutOfMemoryError":
                # Peers may wait in a collective for this worker, so this attempt cannot continue;
                # but the results that all workers share are enough to choose from.
                reason = f"{size} ran out of memory"
                log.error(
                    f"micro batch {reason}; micro batch {save_record()} is recorded; "
                    "`slurmllm resume` continues with it"
                )
            raise
        candidates.append(candidate)
        log.info(
            f"micro batch {size}: {candidate.seconds_per_sequence:.4g} s per sequence, "
            f"{candidate.peak_bytes / 1e9:.2f} of {limit / 1e9:.2f} GB per worker, "
            f"first step {candidate.first_step_s:.1f} s"
        )
        if signal_name := job.decide():
            return signal_name
    chosen = choose(candidates)
    if job.worker.rank == 0:
        save_record()
        save_mesh(make_mesh(job.config, planned.nodes, chosen), job.run.plan)
    log.info("micro batch %d chosen; %s", chosen, reason)
    job.start.first_step_s = next(c.first_step_s for c in candidates if c.micro_batch == chosen)
    change_micro_batch(job, chosen)
    return None


def to_try(fitting: Sequence[int]) -> list[int]:
    sizes = [fitting[0]]
    for size in fitting:
        if size >= 2 * sizes[-1]:
            sizes.append(size)
    return sizes


def choose(candidates: Sequence[MicroBatchCandidate]) -> int:
    fastest = min(candidate.seconds_per_sequence for candidate in candidates)
    return min(c.micro_batch for c in candidates if c.seconds_per_sequence <= fastest * (1 + GAIN))


def enough(candidates: Sequence[MicroBatchCandidate]) -> str | None:
    """Return why larger micro batches are not tried; None if they may be faster."""
    idle = 0
    fastest = math.inf
    for candidate in candidates:
        gained = candidate.seconds_per_sequence * (1 + GAIN) <= fastest
        idle = 0 if gained else idle + 1
        fastest = min(fastest, candidate.seconds_per_sequence)
    if idle < PATIENCE:
        return None
    tried = " and ".join(str(candidate.micro_batch) for candidate in candidates[-PATIENCE:])
    return f"{tried} are less than {GAIN:.0%} faster than a smaller one"


def too_large(
    candidates: Sequence[MicroBatchCandidate], size: int, limit: int, resting: int
) -> str | None:
    """Return why a micro batch does not fit into `limit` bytes; None if it is predicted to.

    A worker uses `resting` bytes between steps.
    """
    if not candidates:
        return None  # the first one is always measured
    last = candidates[-1]
    # A line through the last two, or from the memory between steps: memory grows no faster.
    below = 0
    base = resting
    if len(candidates) > 1:
        below = candidates[-2].micro_batch
        base = candidates[-2].peak_bytes
    slope = max(0.0, (last.peak_bytes - base) / (last.micro_batch - below))
    predicted = last.peak_bytes + slope * (size - last.micro_batch)
    if predicted <= MEMORY_SHARE * limit:
        return None
    return (
        f"{size} would need {predicted / 1e9:.2f} GB per worker, more than {MEMORY_SHARE:.0%} of "
        f"{limit / 1e9:.2f}"
    )


def _measure(job: Job, mesh: Mesh) -> tuple[MicroBatchCandidate, int, int]:
    """Measure the micro batch of a mesh of the train stage (collective).

    Returns the measurement, the bytes that a worker may use, and those used between steps.
    """
    # The shortest step with the memory of a whole one. Two micro batches: gradients exist from the
    # second one on. A pipeline holds as many as it has stages.
    shortest = min(mesh.accumulation, 2 * mesh.pipeline)
    first_step_s = _step(job, mesh, shortest)
    job.backend.memory()
    # Timed steps are as long as the run's own, or about STEP_S.
    timed_length = int(shortest * STEP_S / _step(job, mesh, shortest))
    length = min(mesh.accumulation, max(shortest, timed_length // mesh.pipeline * mesh.pipeline))
    times = [_step(job, mesh, length)]
    repeats = min(max(REPEATS[0], math.ceil(1 / times[0])), REPEATS[1])
    times += [_step(job, mesh, length) for _ in range(repeats - 1)]
    memory = _fullest(job)
    resting = _fullest(job)
    # The pipeline bubble in micro batches (Narayanan et al., arXiv 2104.04473, § 2.2).
    bubble = (mesh.pipeline - 1) / mesh.virtual_pipeline
    in_step = length + bubble
    of_run = mesh.accumulation + bubble
    candidate = MicroBatchCandidate(
        micro_batch=mesh.micro_batch,
        seconds_per_sequence=min(times) * of_run / in_step / (mesh.global_batch // mesh.data),
        peak_bytes=memory.peak_bytes,
        first_step_s=first_step_s,
    )
    return candidate, memory.limit_bytes, resting.peak_bytes


def _step(job: Job, planned: Mesh, length: int) -> float:
    """Run a step of `length` micro batches; return the slowest worker's seconds (collective)."""
    here = job.mesh
    mesh = replace(
        here,
        micro_batch=planned.micro_batch,
        global_batch=here.data * planned.micro_batch * length,
        unmeasured=False,
    )
    if mesh != job.backend.mesh:
        job.backend.change_batch(mesh)
    recipe = job.config.recipe
    model = recipe.model
    # Equal on all workers of a replica, as in training; the time does not depend on the tokens.
    tokens = np.random.default_rng(mesh.data_rank(job.worker.rank)).integers(
        model.vocab_size, size=(length, mesh.micro_batch, model.seq_len)
    )
    # The cost of the mask does not depend on the documents' boundaries.
    documents = recipe.data.mask == "document"
    positions = np.tile(np.arange(model.seq_len), (mesh.micro_batch, 1)) if documents else None
    batches = [MicroBatch(batch_tokens, batch_tokens, positions) for batch_tokens in tokens]
    job.control.barrier()  # all workers start together
    began = time.perf_counter()
    labels = mesh.global_batch * model.seq_len
    float(job.backend.forward_backward(batches, labels))  # waits for the device
    seconds = time.perf_counter() - began
    float(job.backend.optimizer_step(learning_rate(recipe.optim, recipe.train.steps, 1)))
    return float(job.control.all_reduce([seconds], "max")[0])


def _fullest(job: Job) -> Memory:
    """Return the largest peak and the smallest limit of all workers (collective)."""
    memory = job.backend.memory()
    peak_bytes, negated_limit = job.control.all_reduce(
        [memory.peak_bytes, -memory.limit_bytes], "max"
    )
    return Memory(peak_bytes, -negated_limit)
