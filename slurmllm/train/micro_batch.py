"""The micro batch of `train.micro_batch: auto`: measured once, by the precompile stage.

How it is found:

1. Candidates divide the sequences that a data-parallel worker of the train stage has in a step,
   each at least twice the one before.
2. Each of them makes real steps: the first one compiles, the next ones are timed. A timed step is
   as long as the run's own, or a few seconds. The figure is seconds a sequence, forward and
   backward; what comes once a step does not depend on the micro batch.
3. It ends before a candidate whose predicted memory does not suffice, or after two in a row that
   were not 3 % faster than the fastest before them.
4. The smallest within 3 % of the fastest is chosen: less memory, and it fits more node counts.

All workers take the slowest one's times and the fullest one's memory, so all choose alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slurmllm.backends.base import MicroBatch
from slurmllm.host_memory import Memory
from slurmllm.plan.mesh import Mesh, load_mesh, make_mesh, micro_batches, save_mesh
from slurmllm.records import MicroBatchCandidate, MicroBatchRecord
from slurmllm.train.failures import classify_error
from slurmllm.train.job import Job, reopen
from slurmllm.train.loop import stop_requested
from slurmllm.train.schedules import learning_rate

GAIN = 0.03  # timings of equal steps differ by a percent or two
PATIENCE = 2
MEMORY_SHARE = 0.9  # of what a worker may use; the rest is for fragments and for saving
STEP_S = 2.0  # a timed step is no longer than it needs to be
REPEATS = (3, 10)  # at least, and for steps under a second at most


def choose_micro_batch(job: Job) -> str | None:
    """Measure micro batches, write the record, go on with the chosen one (collective).

    Returns:
        The signal that asked to stop, where one did; then nothing is written.
    """
    planned = load_mesh(job.run.plan)
    share = planned.global_batch // planned.data
    nodes = tuple(dict.fromkeys(job.backend.gather(job.worker.node)))
    found: list[MicroBatchCandidate] = []
    reason, limit, resting = f"none larger fits a worker's share of {share}", 0, 0
    for size in to_try(micro_batches(share, planned.pipeline, planned.virtual_pipeline)):
        if stop := enough(found) or too_large(found, size, limit, resting):
            reason = stop
            break
        try:
            candidate, limit, resting = _measure(job, replace(planned, micro_batch=size))
        except Exception as error:
            if found and classify_error(error).error == "OutOfMemoryError":
                # Peers may wait in a collective for this worker, so there is no way on from here;
                # but what all of them know is enough to choose from.
                chosen = _save(job, found, limit, nodes, f"{size} ran out of memory").micro_batch
                words = f"micro batch {chosen} is recorded; `slurmllm resume` goes on with it"
                print(f"micro batch {size} ran out of memory; {words}", flush=True)
            raise
        found.append(candidate)
        job.say(
            f"micro batch {size}: {candidate.seconds_per_sequence:.4g} s a sequence, "
            f"{candidate.peak_bytes / 1e9:.2f} of {limit / 1e9:.2f} GB a worker, "
            f"first step {candidate.first_step_s:.1f} s"
        )
        if signal_name := stop_requested(job):
            return signal_name
    chosen = choose(found)
    if job.worker.rank == 0:
        _save(job, found, limit, nodes, reason)
        save_mesh(make_mesh(job.config, planned.nodes, chosen), job.run.plan)
    job.say(f"micro batch {chosen} chosen; {reason}")
    job.first_step_s = next(c.first_step_s for c in found if c.micro_batch == chosen)
    reopen(job, chosen)
    return None


def to_try(fitting: Sequence[int]) -> list[int]:
    """The micro batches that are measured, of those that fit, smallest first."""
    sizes = [fitting[0]]
    for size in fitting:
        if size >= 2 * sizes[-1]:
            sizes.append(size)
    return sizes


def choose(found: Sequence[MicroBatchCandidate]) -> int:
    """The smallest micro batch that is within a few percent of the fastest."""
    fastest = min(candidate.seconds_per_sequence for candidate in found)
    return min(c.micro_batch for c in found if c.seconds_per_sequence <= fastest * (1 + GAIN))


def enough(found: Sequence[MicroBatchCandidate]) -> str | None:
    """Why larger micro batches need not be tried; None where they may be faster."""
    idle, fastest = 0, math.inf
    for candidate in found:
        gained = candidate.seconds_per_sequence * (1 + GAIN) <= fastest
        idle = 0 if gained else idle + 1
        fastest = min(fastest, candidate.seconds_per_sequence)
    if idle < PATIENCE:
        return None
    tried = " and ".join(str(candidate.micro_batch) for candidate in found[-PATIENCE:])
    return f"{tried} are less than {GAIN:.0%} faster than a smaller one"


def too_large(
    found: Sequence[MicroBatchCandidate], size: int, limit: int, resting: int
) -> str | None:
    """Why a micro batch is not tried: its predicted memory; None where that suffices.

    Args:
        found: Measured so far, smallest first.
        size: The next one.
        limit: Bytes that a worker may use.
        resting: Bytes that a worker uses between steps.
    """
    if not found:
        return None  # somebody has to begin
    last = found[-1]
    # A line through the last two, or from what is used between steps: memory grows no faster.
    below, base = (found[-2].micro_batch, found[-2].peak_bytes) if found[1:] else (0, resting)
    slope = max(0.0, (last.peak_bytes - base) / (last.micro_batch - below))
    predicted = last.peak_bytes + slope * (size - last.micro_batch)
    if predicted <= MEMORY_SHARE * limit:
        return None
    return (
        f"{size} would need {predicted / 1e9:.2f} GB a worker, more than {MEMORY_SHARE:.0%} of "
        f"{limit / 1e9:.2f}"
    )


def _save(
    job: Job,
    found: Sequence[MicroBatchCandidate],
    limit: int,
    nodes: tuple[str, ...],
    reason: str,
) -> MicroBatchRecord:
    record = MicroBatchRecord(
        micro_batch=choose(found),
        reason=reason,
        candidates=tuple(found),
        limit_bytes=limit,
        nodes=nodes,
        device=job.config.cluster.device,
        workers=job.worker.world_size,
    )
    record.save(job.run.micro_batch)
    return record


def _measure(job: Job, mesh: Mesh) -> tuple[MicroBatchCandidate, int, int]:
    """Measure one micro batch (collective).

    Args:
        job: This worker's.
        mesh: The train stage's with this micro batch.

    Returns:
        What was measured; the bytes that a worker may use, and those that it uses between steps.
    """
    shortest = _shortest(mesh)
    first_step_s = _step(job, mesh, shortest)
    job.backend.memory()
    length = _timed_length(mesh, shortest, _step(job, mesh, shortest))
    times = [_step(job, mesh, length)]
    repeats = min(max(REPEATS[0], math.ceil(1 / times[0])), REPEATS[1])
    times += [_step(job, mesh, length) for _ in range(repeats - 1)]
    memory, resting = _fullest(job), _fullest(job)
    in_step, of_run = length + _idle(mesh), mesh.accumulation + _idle(mesh)
    candidate = MicroBatchCandidate(
        micro_batch=mesh.micro_batch,
        seconds_per_sequence=min(times) * of_run / in_step / (mesh.global_batch // mesh.data),
        peak_bytes=memory.peak_bytes,
        first_step_s=first_step_s,
    )
    return candidate, memory.limit_bytes, resting.peak_bytes


def _shortest(mesh: Mesh) -> int:
    """Micro batches of a step that needs as much memory as a whole one.

    Two, for gradients are there from the second one on; a pipeline holds as many as it has stages.
    """
    return min(mesh.accumulation, 2 * mesh.pipeline)


def _timed_length(mesh: Mesh, shortest: int, shortest_s: float) -> int:
    """Micro batches of a step that is as long as the run's own, or STEP_S long."""
    wanted = int(shortest * STEP_S / shortest_s)
    rounds = max(shortest, wanted // mesh.pipeline * mesh.pipeline)
    return min(mesh.accumulation, rounds)


def _idle(mesh: Mesh) -> float:
    """Micro batches' time that a worker idles in a step, while the pipeline fills and empties.

    Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    """
    return (mesh.pipeline - 1) / mesh.virtual_pipeline


def _step(job: Job, planned: Mesh, length: int) -> float:
    """One step of some micro batches; returns the slowest worker's seconds (collective)."""
    here = job.mesh
    mesh = replace(
        here,
        micro_batch=planned.micro_batch,
        global_batch=here.data * planned.micro_batch * length,
        unmeasured=False,
    )
    if mesh != job.backend.mesh:
        job.backend.change_batch(mesh)
    model = job.config.recipe.model
    # Of the same kind for all workers of a replica; which tokens they are makes no difference.
    tokens = np.random.default_rng(mesh.data_rank(job.worker.rank)).integers(
        model.vocab_size, size=(length, mesh.micro_batch, model.seq_len)
    )
    # The mask costs the same wherever documents begin.
    documents = job.config.recipe.data.mask == "document"
    positions = np.tile(np.arange(model.seq_len), (mesh.micro_batch, 1)) if documents else None
    batches = [MicroBatch(part, part, positions) for part in tokens]
    job.backend.gather(None)  # begin together
    began = time.perf_counter()
    labels = mesh.global_batch * model.seq_len
    float(job.backend.forward_backward(batches, labels))  # waits for the device
    seconds = time.perf_counter() - began
    recipe = job.config.recipe
    float(job.backend.optimizer_step(learning_rate(recipe.optim, recipe.train.steps, 1)))
    return float(max(job.backend.gather(seconds)))


def _fullest(job: Job) -> Memory:
    """The largest peak and the smallest limit of all workers (collective)."""
    every = job.backend.gather(job.backend.memory())
    return Memory(max(m.peak_bytes for m in every), min(m.limit_bytes for m in every))
