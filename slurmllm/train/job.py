"""Everything that the training loop works with, put together in order."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmllm.backends.base import IGNORED, Backend, MicroBatch, Worker, load_backend
from slurmllm.backends.environment import load_environment
from slurmllm.checkpoint.catalogue import read_rollbacks
from slurmllm.checkpoint.resume import find_resumable, first_fault
from slurmllm.checkpoint.save import remove_leftovers
from slurmllm.checkpoint.state import TrainState, fingerprint
from slurmllm.config.load import load
from slurmllm.config.recipe import ModelConfig
from slurmllm.config.resolve import RunConfig
from slurmllm.data.spec import StreamSpec
from slurmllm.data.state import merge_states
from slurmllm.data.stream import PackedStream
from slurmllm.errors import ConfigError, StorageError
from slurmllm.plan.mesh import Mesh, assumed_micro_batch, make_mesh
from slurmllm.pulse import Pulse
from slurmllm.records import MicroBatchRecord, SkippedBatches
from slurmllm.rundir import RunDir, Stage
from slurmllm.train.guard import Guard
from slurmllm.train.run_records import EventLog, check_data
from slurmllm.train.schedules import SaveSchedule
from slurmllm.train.signals import StopRequest

if TYPE_CHECKING:
    from torch import nn

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
        skipped: Newer checkpoints that were passed over, with the reason.
        passed_over: Batches that no step is made with.
        first_step_s: Of the first step, where it was made before the loop began.
        read_at: time.perf_counter() when the figures of the last step were there.
        pulse: Says what this worker is doing.
        saves: Says after which steps a checkpoint is written.
        events: Keeps what happens beside the steps; rank 0's alone are written.
        guard: Ends training where it diverges.
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
    passed_over: tuple[SkippedBatches, ...] = ()
    first_step_s: float | None = None
    read_at: float = 0.0
    pulse: Pulse = field(init=False)
    saves: SaveSchedule = field(init=False)
    events: EventLog = field(init=False)
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.pulse = Pulse.from_environment()
        self.saves = SaveSchedule(self.config.recipe.checkpoint)
        written = self.worker.rank == 0 and self.stage == "train"
        self.events = EventLog(self.run.events(self.attempt) if written else None, self.attempt)
        self.guard = Guard(self)

    @property
    def first_step(self) -> int:
        """The step that this attempt began behind."""
        return self.resumed_from or 0

    def micro_batches(self) -> list[MicroBatch]:
        """This worker's sequences of the next global batch."""
        while any(w.first <= self.stream.batches + 1 <= w.last for w in self.passed_over):
            self.stream.skip_batch()
        batch, size = self.stream.next_batch(), self.mesh.micro_batch
        inputs, labels, positions = batch.inputs, batch.labels(IGNORED), batch.positions
        return [
            MicroBatch(
                inputs[i : i + size],
                labels[i : i + size],
                None if positions is None else positions[i : i + size],
            )
            for i in range(0, len(inputs), size)
        ]

    def train_state(self) -> TrainState:
        """What a checkpoint must remember besides the shards (collective)."""
        data = merge_states(self.backend.gather(self.stream.state()))
        return TrainState(
            step=self.step,
            tokens=self.tokens,
            data=data,
            fingerprint=self.fingerprint(),
            guard=self.guard.state(),
        )

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        position = self.stream.state()
        return fingerprint(self.config.recipe, position["corpus"], position["tokenizer"] or "")

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
    measured = measured_micro_batch(run, config, stage)
    if stage == "train":
        mesh, last_step = make_mesh(config, nodes, measured), config.recipe.train.steps
    else:
        mesh, last_step = precompile_mesh(config, nodes, measured), PRECOMPILE_STEPS
    return Job(run, stage, attempt, config, mesh, worker, stop, started, last_step)


def measured_micro_batch(run: RunDir, config: RunConfig, stage: Stage) -> int | None:
    """The micro batch that was measured for a recipe that says `auto`; None where there is none.

    Raises:
        StorageError: the train stage needs it and there is none.
    """
    if config.recipe.train.micro_batch != "auto":
        return None
    if assumed := assumed_micro_batch(config):
        return assumed
    if run.micro_batch.is_file():
        return MicroBatchRecord.load(run.micro_batch).micro_batch
    if stage == "precompile":
        return None
    raise StorageError(
        f"{run.micro_batch} is missing: train.micro_batch is auto, and the precompile stage "
        f"measures it; `slurmllm resume {run.name}` runs that stage again"
    )


def precompile_mesh(config: RunConfig, nodes: int, measured: int | None = None) -> Mesh:
    """A mesh whose graphs are the run's, on whatever nodes the precompile stage has.

    Where graphs depend on the micro batch alone, one of them a step and worker is enough, or one
    for each stage of a pipeline.

    Args:
        config: The run's.
        nodes: Of the precompile stage.
        measured: The micro batch, where the recipe says `auto` and it is known.
    """
    recipe, per_node = config.recipe, config.cluster.devices_per_node
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    data, micro = nodes * per_node // (tensor * pipeline), recipe.train.micro_batch
    unmeasured = micro == "auto" and measured is None
    if micro == "auto":
        micro = measured or 1
    virtual = recipe.parallel.virtual_pipeline
    batch = data * micro * pipeline
    if load_environment(config.backend).graphs_depend_on_accumulation(config):
        batch = recipe.train.global_batch
    return Mesh(nodes, per_node, tensor, pipeline, data, batch, micro, virtual, unmeasured)


def open_job(job: Job) -> None:
    """Open the data, start the backend, build model and optimizer, resume (collective)."""
    recipe = job.config.recipe
    # Data first: its processes come up while torch is imported and the model is built.
    job.stream = _open_stream(job)
    job.backend = _import_backend(job.config.backend)(job.config, job.mesh, job.worker)
    job.backend.start()
    job.backend.build(lambda: _model(recipe.model))
    job.backend.build_optimizer()
    if job.stage == "train":
        if job.worker.rank == 0:
            check_data(job.run, job.stream.identity)
        _resume(job)


def _import_backend(name: str) -> type[Backend]:
    """The backend's class. Torch's modules are a million objects that live on: looking for garbage
    among them takes a sixth of the time that a worker takes to import and to compile.
    """
    gc.disable()
    try:
        return load_backend(name)
    finally:
        gc.freeze()  # passed over from now on
        gc.enable()


def _model(config: ModelConfig) -> nn.Module:
    from slurmllm.model.decoder import build_model  # torch: not every backend builds one

    return build_model(config)


def reopen(job: Job, measured: int) -> None:
    """Go on with the precompile stage on the micro batch that was measured (collective)."""
    job.mesh = precompile_mesh(job.config, job.mesh.nodes, measured)
    job.backend.change_batch(job.mesh)
    job.close_stream()
    job.stream = _open_stream(job)


def _open_stream(job: Job) -> PackedStream:
    data, recipe = job.config.recipe.data, job.config.recipe
    if data.corpus is None:
        fault = "data.corpus: not set; --set data.corpus=… when submitting"
        raise ConfigError(f"{recipe.name} has nothing to read", [fault])
    spec = StreamSpec(
        corpora=[(Path(share.path), share.weight) for share in data.corpora],
        tokenizer=None if data.tokenizer is None else Path(data.tokenizer),
        seq_len=recipe.model.seq_len,
        global_batch=job.mesh.global_batch,
        seed=recipe.train.seed,
        vocab_size=recipe.model.vocab_size,
        mask=data.mask,
        validation=data.validation,
    )
    return PackedStream(spec, job.mesh.data_rank(job.worker.rank), job.mesh.data, data.num_workers)


def _start(job: Job) -> None:
    recipe = job.config.recipe
    if recipe.train.init_from is None:
        job.say("starting from step 0")
        return
    from slurmllm.checkpoint.formats.weights import weight_reader

    source = Path(recipe.train.init_from)
    fault = first_fault(source, job.backend)
    if fault is not None:
        raise StorageError(
            f"train.init_from: {source} does not verify: {fault}; restore it, or import it again"
        )
    job.backend.fill_weights(weight_reader(source, recipe.model))
    job.say(f"starting from step 0 with the weights of {source}")


def _resume(job: Job) -> None:
    job.pulse.beat("resuming", job.step)
    if job.worker.rank == 0:
        remove_leftovers(job.run, job.attempt)
    found = find_resumable(job.run, job.backend, job.fingerprint())
    job.skipped = found.skipped + found.invalidated
    for line in found.skipped:
        job.say(f"skipped a checkpoint that does not verify: {line}")
    for line in found.invalidated:
        job.say(f"passed over a checkpoint: {line}")
    first = job.worker.rank == 0
    job.passed_over = job.backend.gather(read_rollbacks(job.run) if first else None)[0]
    for window in job.passed_over:
        job.say(f"batches {window.first} to {window.last} are skipped: {window.reason}")
    if found.state is None:
        _start(job)
        return
    job.step, job.tokens = found.state.step, found.state.tokens
    job.resumed_from = found.state.step
    if job.step >= job.last_step:
        return
    job.backend.load_shards(job.run.checkpoint(job.step))
    job.guard.load_state(found.state.guard)
    # Data states of version 1 did not count; before them, no batch had been skipped.
    drawn = [job.step * job.mesh.global_batch]
    job.stream.load_state({"counts": drawn, **found.state.data})
    job.say(f"resumed from step {job.step}")
