"""One worker's part of an attempt: configuration, mesh, data, backend and the resume."""

from __future__ import annotations

import gc
import logging
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.core.run.artifact_records import MicroBatchRecord
from slurmllm.core.run.records import SkippedBatches, SkipsRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.worker_files import EventLog, PhaseWriter, run_copy, wait_for_graphs
from slurmllm.data.spec import StreamSpec, merge_states
from slurmllm.data.stream import PackedStream, check_data
from slurmllm.plan.mesh import Mesh, assumed_micro_batch, make_mesh, one_pass_adamw
from slurmllm.train.backends.base import IGNORED, Backend, MicroBatch, Worker, load_backend
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.checkpoint.resume import Resumable, find_resumable, first_fault
from slurmllm.train.checkpoint.save import Save, remove_leftovers
from slurmllm.train.checkpoint.state import TrainState, fingerprint, training_settings
from slurmllm.train.control.plane import ControlPlane, Pending, open_control
from slurmllm.train.exits import StopRequest
from slurmllm.train.guard import Guard
from slurmllm.train.plugins import import_plugins
from slurmllm.train.schedules import SaveSchedule

log = logging.getLogger(__name__)

# Steps of the precompile stage: enough for all graphs of a later step (AWS's NeoX run: 3).
PRECOMPILE_STEPS = 3


class GlobalBatch(NamedTuple):
    """One worker's share of a global batch."""

    micro_batches: list[MicroBatch]
    number: int  # of the global batch in the stream, from 1
    num_targets: int  # target tokens of all workers
    wait_s: float  # until this worker had its sequences


@dataclass
class Start:
    """When and from what an attempt started."""

    started: float  # Unix time at which the worker started, s
    resumed_from: int | None = None  # step of the checkpoint; None if training started from step 0
    skipped: tuple[str, ...] = ()  # newer checkpoints that were skipped, with the reason
    skips: tuple[SkippedBatches, ...] = ()  # batches that are skipped after roll-backs
    first_step_s: float | None = None  # if it ran before the loop (measured micro batches)


@dataclass
class Job:
    """One worker's part of one attempt of one stage; `open_job` sets backend, stream and guard."""

    run: RunDir
    stage: Stage
    attempt: int
    config: RunConfig
    mesh: Mesh
    worker: Worker
    stop: StopRequest
    start: Start
    last_step: int  # the stage is complete after it
    control: ControlPlane = field(init=False)
    backend: Backend = field(init=False)
    stream: PackedStream = field(init=False)
    guard: Guard = field(init=False)
    save: Save | None = None  # the save in progress
    writing: bool = False  # whether a worker wrote files of it when the flags were read last
    step: int = 0  # optimizer steps that the weights have had
    tokens: int = 0  # trained on so far
    phases: PhaseWriter = field(default_factory=PhaseWriter.from_environment)
    saves: SaveSchedule = field(init=False)
    events: EventLog = field(init=False)  # written by rank 0 only

    def __post_init__(self) -> None:
        self.saves = SaveSchedule(self.config.recipe.checkpoint)
        written = self.worker.rank == 0 and self.stage == "train"
        self.events = EventLog(self.run.events(self.attempt) if written else None, self.attempt)

    @property
    def first_step(self) -> int:
        """The step that this attempt started from."""
        return self.start.resumed_from or 0

    def evaluates(self, step: int) -> bool:
        every = self.config.recipe.eval.every_steps
        return every is not None and (step % every == 0 or step == self.last_step)

    def post_flags(self) -> Pending:
        """Begin to exchange the flags of this step (collective); does not wait.

        The flags are the number of the signal to stop, 0 for none, whether this worker found a
        divergence, and whether it is writing files of the save in progress. The control plane forms
        their maximum while the next step runs. After that step all workers read it, and stop, fail
        or finish the save alike: a worker never acts on its own flags.
        """
        name = self.stop.signal_name
        number = int(signal.Signals[name]) if name else 0
        writing = self.save is not None and not self.save.written()
        flags = [number, int(self.guard.diverged), int(writing)]
        return self.control.reduce(flags, "max")

    def read_flags(self, pending: Pending) -> str | None:
        """Read the maximum of the flags posted, the same on all workers (collective).

        Returns the name of the signal to stop, if any. Raises a DivergenceError on all workers if
        one of them found a divergence.
        """
        stop_signal, diverged, writing = pending()
        self.writing = bool(writing)
        if diverged:
            self.guard.fail()
        if stop_signal:
            self.stop.agreed = signal.Signals(stop_signal).name
        return self.stop.agreed

    def decide(self) -> str | None:
        """Exchange the flags and wait for all workers' (collective), as `read_flags`."""
        return self.read_flags(self.post_flags())

    def next_batch(self) -> GlobalBatch:
        """Return this worker's sequences of the next global batch.

        If not every token is a target, all workers' targets are counted (collective).
        """
        asked_at = time.perf_counter()
        batches = self._micro_batches()
        wait_s = time.perf_counter() - asked_at
        if self.stream.trains_every_token:
            num_targets = self.mesh.global_batch * self.config.recipe.model.seq_len
        else:
            here = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
            # All workers of a replica read the same sequences.
            copies = self.mesh.tensor * self.mesh.pipeline
            num_targets = self.control.all_reduce([here], "sum")[0] // copies
        return GlobalBatch(batches, self.stream.batches, num_targets, wait_s)

    def _micro_batches(self) -> list[MicroBatch]:
        while any(skip.first <= self.stream.batches + 1 <= skip.last for skip in self.start.skips):
            self.stream.skip_batch()
        batch = self.stream.next_batch()
        size = self.mesh.micro_batch
        inputs = batch.inputs
        labels = batch.labels(IGNORED)
        positions = batch.positions
        parts = [slice(start, start + size) for start in range(0, len(inputs), size)]
        return [
            MicroBatch(inputs[p], labels[p], None if positions is None else positions[p])
            for p in parts
        ]

    def train_state(self) -> TrainState:
        """Return the part of a checkpoint that is not in the shards (collective).

        Complete on rank 0; the others have only their own position in the data.
        """
        position = self.stream.state()
        positions = self.control.gather(position)
        return TrainState(
            step=self.step,
            tokens=self.tokens,
            data=position if positions is None else merge_states(positions),
            fingerprint=self.fingerprint(),
            guard=self.guard.state(),
            settings=training_settings(self.config.recipe),
        )

    def fingerprint(self) -> dict[str, Any]:
        position = self.stream.state()
        return fingerprint(self.config.recipe, position["corpus"], position["tokenizer"] or "")

    def close(self) -> None:
        """Close what `open_job` opened, after a stage without failure."""
        self.stream.close()
        self.backend.stop()
        self.control.close()


def make_job(
    run: RunDir, stage: Stage, attempt: int, worker: Worker, stop: StopRequest, started: float
) -> Job:
    """Load the configuration, make the mesh and the number of steps; does not import torch."""
    config = load(run_copy(run).config, trusted=True)
    per_node = config.cluster.devices_per_node
    if worker.world_size % per_node:
        raise ConfigError(
            f"{worker.world_size} workers are no multiple of cluster.devices_per_node {per_node}; "
            "start as many workers on each node"
        )
    nodes = worker.world_size // per_node
    measured = measured_micro_batch(run, config, stage)
    if stage == "train":
        mesh = make_mesh(config, nodes, measured)
        last_step = config.recipe.train.steps
    else:
        mesh = precompile_mesh(config, nodes, measured)
        last_step = PRECOMPILE_STEPS
    return Job(run, stage, attempt, config, mesh, worker, stop, Start(started), last_step)


def measured_micro_batch(run: RunDir, config: RunConfig, stage: Stage) -> int | None:
    """Return the micro batch measured for `train.micro_batch: auto`; None if not measured yet."""
    if config.recipe.train.micro_batch != "auto":
        return None
    if assumed := assumed_micro_batch(config):
        return assumed
    for path in (run_copy(run).micro_batch, run.micro_batch):
        if path.is_file():
            return MicroBatchRecord.load(path).micro_batch
    if stage == "precompile":
        return None
    raise StorageError(
        f"{run.micro_batch} is missing: train.micro_batch is auto, and the precompile stage "
        f"measures it; `slurmllm resume {run.name}` runs that stage again"
    )


def precompile_mesh(config: RunConfig, nodes: int, measured: int | None = None) -> Mesh:
    """Make a mesh whose graphs are the run's, on the nodes of the precompile stage.

    Unless graphs depend on the accumulation, a step has one micro batch for each pipeline stage.
    """
    recipe = config.recipe
    per_node = config.cluster.devices_per_node
    tensor = recipe.parallel.tensor
    pipeline = recipe.parallel.pipeline
    data = nodes * per_node // (tensor * pipeline)
    micro = recipe.train.micro_batch
    unmeasured = micro == "auto" and measured is None
    if micro == "auto":
        micro = measured or 1
    virtual = recipe.parallel.virtual_pipeline
    batch = data * micro * pipeline
    if load_environment(config.backend).graphs_depend_on_accumulation:
        batch = recipe.train.global_batch
    mesh = Mesh(nodes, per_node, tensor, pipeline, data, batch, micro, virtual, unmeasured)
    # The optimizer's graph takes the sum of several gradients in another format than one.
    accumulates = recipe.train.global_batch > batch and one_pass_adamw(config, mesh)
    return replace(mesh, global_batch=2 * batch) if accumulates else mesh


def open_job(job: Job) -> None:
    """Open the data, start the backend, build model and optimizer, resume (collective)."""
    # Data first: its processes start while torch is imported and the model is built.
    job.stream = open_stream(job)
    job.control = open_control(job.worker.rank, job.worker.world_size)
    # Checkpoints are read and verified while torch is imported and the model is built, which both
    # take as long. Until the resume, no operation of the control plane but this thread's is made.
    with ThreadPoolExecutor(1, thread_name_prefix="resume") as pool:
        resumable = pool.submit(_find_resumable, job) if job.stage == "train" else None
        _build(job)
    if resumable is not None:
        if job.worker.rank == 0:
            check_data(job.run, job.stream.identity)
        _resume(job, resumable)


def _build(job: Job) -> None:
    # Torch's modules are a million objects that stay: searching them for garbage takes a sixth of
    # the time that a worker takes to import and compile.
    gc.disable()
    try:
        backend_class = load_backend(job.config.backend)
        import_plugins(job.config)
    finally:
        gc.freeze()  # later collections ignore what exists now
        gc.enable()
    job.backend = backend_class(job.config, job.mesh, job.worker, job.control)
    job.guard = Guard(job.run, job.stage, job.attempt, job.config.recipe, job.backend, job.events)
    job.backend.start()
    job.guard.reused_graphs = wait_for_graphs()  # the backend compiles from here on
    job.backend.build()


def change_micro_batch(job: Job, measured: int) -> None:
    job.mesh = precompile_mesh(job.config, job.mesh.nodes, measured)
    job.backend.change_batch(job.mesh)
    job.stream.close()
    job.stream = open_stream(job)


def open_stream(job: Job) -> PackedStream:
    recipe = job.config.recipe
    if recipe.data.corpus is None:
        raise ConfigError(
            f"{recipe.name} has nothing to read",
            ["data.corpus: not set; --set data.corpus=… when submitting"],
        )
    spec = StreamSpec.of(recipe, job.mesh.global_batch)
    rank = job.mesh.data_rank(job.worker.rank)
    return PackedStream(spec, rank, job.mesh.data, recipe.data.num_workers)


def _find_resumable(job: Job) -> tuple[Resumable, tuple[SkippedBatches, ...]]:
    """Find the newest valid checkpoint and the batches that roll-backs skip (collective)."""
    first = job.worker.rank == 0
    if first:
        remove_leftovers(job.run, job.attempt)
    resumable = find_resumable(job.run, job.config, job.control, job.fingerprint())
    # Read by rank 0 alone: all workers must skip the same batches.
    return resumable, job.control.broadcast(SkipsRecord.of(job.run).skips if first else None)


def _resume(job: Job, future: Future[tuple[Resumable, tuple[SkippedBatches, ...]]]) -> None:
    """Resume from the newest valid checkpoint, or start from step 0 (collective)."""
    job.phases.begin("resuming", job.step)
    resumable, job.start.skips = future.result()
    job.start.skipped = resumable.skipped + resumable.invalidated
    for line in resumable.skipped:
        log.warning("skipped a checkpoint that does not verify: %s", line)
    for line in resumable.invalidated:
        log.info("skipped an invalidated checkpoint: %s", line)
    for skip in job.start.skips:
        log.info("batches %d to %d are skipped: %s", skip.first, skip.last, skip.reason)
    if resumable.state is None:
        _start(job)
        return
    job.step = resumable.state.step
    job.tokens = resumable.state.tokens
    job.start.resumed_from = resumable.state.step
    if job.step >= job.last_step:
        return
    job.backend.load_shards(job.run.checkpoint(job.step))
    job.guard.load_state(resumable.state.guard)
    job.stream.load_state(resumable.state.data)
    log.info("resumed from step %d", job.step)


def _start(job: Job) -> None:
    recipe = job.config.recipe
    if recipe.train.init_from is None:
        log.info("starting from step 0")
        return
    from slurmllm.train.checkpoint.formats.weights import weight_reader

    source = Path(recipe.train.init_from)
    if fault := first_fault(source, job.control):
        raise StorageError(
            f"train.init_from: {source} does not verify: {fault}; restore it, or import it again"
        )
    job.backend.fill_weights(weight_reader(source, recipe.model))
    log.info("starting from step 0 with the weights of %s", source)
