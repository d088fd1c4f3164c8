"""Everything that the training loop works with, put together in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slurmllm.backends.base import Backend, MicroBatch, Worker, load_backend
from slurmllm.checkpoint.resume import find_resumable
from slurmllm.checkpoint.save import remove_leftovers
from slurmllm.checkpoint.state import TrainState, fingerprint
from slurmllm.config.resolve import RunConfig, load
from slurmllm.data.stream import PackedStream, merge_states
from slurmllm.errors import ConfigError
from slurmllm.plan.mesh import Mesh, make_mesh
from slurmllm.rundir import RunDir, Stage
from slurmllm.train.stop import StopRequest

# What the precompile stage runs: enough for every graph of a steady step (AWS's NeoX run: 3).
PRECOMPILE_STEPS = 3


@dataclass
class Job:
    """One worker's part in one attempt of one stage.

    Attributes:
        last_step: The step after which the stage is complete.
        started: Unix time at which the worker began, s.
        step: Optimizer steps behind the weights.
        tokens: Trained on so far.
        resumed_from: The checkpoint's step, None at a start from nothing.
        skipped: Newer checkpoints that did not verify, with the reason.
    """

    run: RunDir
    stage: Stage
    attempt: int
    config: RunConfig
    mesh: Mesh
    worker: Worker
    stop: StopRequest
    started: float
    last_step: int
    backend: Backend = field(init=False)
    stream: PackedStream = field(init=False)
    step: int = 0
    tokens: int = 0
    resumed_from: int | None = None
    skipped: tuple[str, ...] = ()

    def micro_batches(self) -> list[MicroBatch]:
        """This worker's sequences of the next global batch."""
        batch, size = self.stream.next_batch(), self.mesh.micro_batch
        inputs = np.ascontiguousarray(batch[:, :-1])
        labels = np.ascontiguousarray(batch[:, 1:])
        return [
            MicroBatch(inputs[i : i + size], labels[i : i + size])
            for i in range(0, len(batch), size)
        ]

    def train_state(self) -> TrainState:
        """What a checkpoint must remember besides the shards (collective)."""
        data = merge_states(self.backend.gather(self.stream.state()))
        return TrainState(
            step=self.step, tokens=self.tokens, data=data, fingerprint=self.fingerprint()
        )

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        position = self.stream.state()
        return fingerprint(self.config.recipe, position["corpus"], position["tokenizer"])

    def say(self, message: str) -> None:
        """A line in the run's log, once."""
        if self.worker.rank == 0:
            print(message, flush=True)

    def close_stream(self) -> None:
        """End the processes that read the data, if they were started."""
        if hasattr(self, "stream"):
            self.stream.close()

    def close(self) -> None:
        """Close what `open_job` opened, after a stage that went well."""
        self.close_stream()
        self.backend.stop()


def make_job(
    run: RunDir, stage: Stage, attempt: int, worker: Worker, stop: StopRequest, started: float
) -> Job:
    """Read the configuration and settle mesh and number of steps; torch is not needed yet.

    Raises:
        ConfigError: the configuration does not fit the workers.
    """
    config = load(run.config)
    per_node = config.cluster.devices_per_node
    if worker.world_size % per_node:
        raise ConfigError(
            f"{worker.world_size} workers are no multiple of cluster.devices_per_node {per_node}; "
            "start as many workers on each node"
        )
    nodes = worker.world_size // per_node
    if stage == "train":
        mesh, last_step = make_mesh(config, nodes), config.recipe.train.steps
    else:
        mesh, last_step = precompile_mesh(config, nodes), PRECOMPILE_STEPS
    return Job(run, stage, attempt, config, mesh, worker, stop, started, last_step)


def precompile_mesh(config: RunConfig, nodes: int) -> Mesh:
    """A mesh whose graphs are the run's, on whatever nodes the precompile stage has.

    Graphs depend on the micro batch alone, so one of them a step and worker is enough.
    """
    recipe, per_node = config.recipe, config.cluster.devices_per_node
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    data, micro = nodes * per_node // (tensor * pipeline), recipe.train.micro_batch
    return Mesh(nodes, per_node, tensor, pipeline, data, data * micro, micro)


def open_job(job: Job) -> None:
    """Open the data, start the backend, build model and optimizer, resume (collective)."""
    recipe = job.config.recipe
    # Data first: its processes come up while torch is imported and the model is built.
    job.stream = _open_stream(job)
    job.backend = load_backend(job.config.backend)(job.config, job.mesh, job.worker)
    from slurmllm.model.decoder import build_model

    job.backend.start()
    job.backend.build(lambda: build_model(recipe.model))
    job.backend.build_optimizer()
    if job.stage == "train":
        _resume(job)


def _open_stream(job: Job) -> PackedStream:
    data, recipe = job.config.recipe.data, job.config.recipe
    if data.corpus is None or data.tokenizer is None:
        raise ConfigError(
            f"{recipe.name} has nothing to read",
            [
                f"data.{name}: not set; --set data.{name}=… when submitting"
                for name, value in (("corpus", data.corpus), ("tokenizer", data.tokenizer))
                if value is None
            ],
        )
    return PackedStream(
        Path(data.corpus),
        Path(data.tokenizer),
        recipe.model.seq_len,
        job.mesh.global_batch,
        recipe.train.seed,
        job.mesh.data_rank(job.worker.rank),
        job.mesh.data,
        data.num_workers,
    )


def _resume(job: Job) -> None:
    if job.worker.rank == 0:
        remove_leftovers(job.run)
    found = find_resumable(job.run, job.backend, job.fingerprint())
    job.skipped = found.skipped
    for line in found.skipped:
        job.say(f"skipped a checkpoint that does not verify: {line}")
    if found.state is None:
        job.say("starting from step 0")
        return
    job.step, job.tokens = found.state.step, found.state.tokens
    job.resumed_from = found.state.step
    if job.step >= job.last_step:
        return
    job.backend.load_shards(job.run.checkpoint(job.step))
    job.stream.load_state(found.state.data)
    job.say(f"resumed from step {job.step}")
