"""Processes that train one mesh after another, each of them from its first step.

Starting Python and torch takes seconds, a mesh of a tiny model much less; so torch is imported
once, and the processes of a case are forked from there. One machine's CPUs.

Each case has processes of its own: gloo's threads of groups that are destroyed live on and spin on
their closed sockets (torch 2.13).
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import Mesh, make_mesh
from slurmllm.train.backends.base import IGNORED, Backend, MicroBatch, Worker, load_backend
from slurmllm.train.control.plane import SOCKET, open_control
from slurmllm.train.control.relay import Position, Relay
from slurmllm.train.control.rendezvous import SECRET, free_port, new_secret

# (backend) → anything picklable; a function of a module, so that the processes find it by name.
Probe = Callable[[Any], Any]

# Four layers for four pipeline stages, eight heads and a padded vocabulary for four
# tensor-parallel workers: the last of them has real entries and padding. Adam's epsilon is above
# the rounding of gradients: far below it, those that are 0 but for rounding become whole updates,
# of another sign on another mesh or processor.
_SMALL = (
    "model.num_layers=4 model.hidden_size=64 model.num_heads=8 model.ffn_hidden_size=128 "
    "model.vocab_size=500 model.vocab_pad_multiple=128 model.seq_len=32 train.global_batch=8 "
    "train.micro_batch=2 train.compile=false optim.weight_decay=0.1 optim.eps=1e-5"
)
_LLAMA = ["model.family=llama", "model.rotary_pct=1.0", "model.num_kv_heads=4"]
_PATTERN = "model.attention_pattern="
FAMILIES: dict[str, list[str]] = {
    "neox": [],
    "llama": [*_LLAMA, "model.scaled_init=true"],
    # Llama 3.2: tied, with positions of which all three kinds of frequency occur.
    "llama3": [
        *(*_LLAMA, "model.tied_embeddings=true", "model.head_dim=16", "model.rotary_base=100.0"),
        "model.rope_scaling={kind: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
        "original_max_position_embeddings: 16}",
    ],
    "qwen3": [*_LLAMA, "model.family=qwen3", "model.head_dim=16"],
    "gpt3": ["model.family=gpt3", "model.rotary_pct=0.0"],
    "mistral": [*_LLAMA, "model.family=mistral", f"{_PATTERN}[{{window: 12}}]"],
    "smollm3": [
        *(*_LLAMA, "model.family=smollm3", "model.tied_embeddings=true"),
        f"{_PATTERN}[{{}}, {{rope: none}}]",
    ],
    "olmo3": [*_LLAMA, "model.family=olmo3", f"{_PATTERN}[{{window: 8}}, {{}}]"],
    "gemma3": [
        *(*_LLAMA, "model.family=gemma3", "model.head_dim=16", "model.query_pre_attn_scalar=20"),
        f"{_PATTERN}[{{window: 8, rope: 100.0}}, {{}}]",
    ],
    "nanochat": [*_LLAMA, "model.family=nanochat", "model.logits_softcap=2.0"],
}


def small_run(
    family: str, tensor: int = 1, pipeline: int = 1, data: int = 1, *overrides: str
) -> RunConfig:
    """A small model on one node with as many CPU devices as the mesh has workers."""
    degrees = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"]
    degrees.append(f"cluster.devices_per_node={tensor * pipeline * data}")
    settings = [*_SMALL.split(), *FAMILIES[family], *degrees, *overrides]
    return resolve("tiny_neox", "local", settings)


@dataclass(frozen=True)
class Case:
    """Some steps of a run, whose batches are random and depend on the step alone.

    `prepare`, `before`, `between` and `after` are called on each worker: before the backend is
    loaded, before the first step, after each step and after the last one. `Outcome` has their
    answers.
    """

    config: RunConfig
    nodes: int = 1  # all of them on this machine
    first: int = 0  # optimizer steps that are behind when it starts
    last: int = 20  # the last step it makes; `first` makes none
    lr: float = 1e-3
    load: Path | None = None  # folder of shards to start from
    save: Path | None = None  # folder that the shards go to after the last step, or `save_at`
    save_at: int | None = None
    prepare: Callable[[], None] | None = None
    before: Probe | None = None
    between: Probe | None = None
    after: Probe | None = None

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.config, self.nodes)


@dataclass(frozen=True)
class Outcome:
    """What one worker saw, and its answers to the functions of the case."""

    rows: list[tuple[float, float, float]]  # loss, gradient norm and parameter norm of each step
    before: Any = None
    between: Sequence[Any] = ()
    after: Any = None


class CaseFailed(Exception):
    """A worker raised; its traceback is the message."""


# What a worker imports, at whatever moment, and what one that compiles or has fp8 does, which takes
# a second of each process of each case. None of it starts a thread.
PRELOAD = """
torch torch._dynamo torch.distributed.pipelining torch.distributed.checkpoint
slurmllm.train.backends.native.runtime slurmllm.train.backends.native.dcp
slurmllm.train.model.decoder slurmllm.train.worker slurmllm.train.loop
slurmllm.train.hooks.checkpoint slurmllm.train.hooks.evaluation
slurmllm.train.hooks.monitoring slurmllm.train.hooks.tensorboard slurmllm.data.stream
slurmllm.train.checkpoint.save tokenizers pyarrow.ipc
"""
COMPILED = "torch._inductor.compile_fx torchao.float8"


class MeshPool:
    """Runs cases with up to `size` workers of `threads` threads each."""

    def __init__(self, size: int, threads: int = 1) -> None:
        self.size, self.threads = size, threads
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, case: Case, timeout_s: float = 600) -> list[Outcome]:
        """Train a case; return what each worker saw, by rank.

        Raises CaseFailed if a worker raised, died or did not answer.
        """
        world = case.mesh.world_size
        assert world <= self.size, f"{world} workers in a pool of {self.size}"
        secret = new_secret()
        with TemporaryDirectory(prefix="mesh-pool-") as folder:
            path, position = Path(folder) / "control", Position(0, ("node-0",), world)
            relay = Relay(position, path, ("127.0.0.1", 0), secret[SECRET].encode())
            try:
                self._open(world)
                relay.start()
                # Chosen last: the first processes start for seconds, and others take ports too.
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                return self._answers(case, {**address, **secret, SOCKET: str(path)}, timeout_s)
            finally:
                self._close()
                relay.close()

    def _answers(self, case: Case, variables: dict[str, str], timeout_s: float) -> list[Outcome]:
        world = case.mesh.world_size
        for pipe in self._pipes[:world]:
            pipe.send((case, variables))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world:
            waiting = {id(self._pipes[rank]): rank for rank in range(world) if rank not in outcomes}
            ready = wait([self._pipes[rank] for rank in waiting.values()], timeout_s)
            if not ready:
                late = sorted(waiting.values())
                raise CaseFailed(f"ranks {late} did not answer in {timeout_s:.0f} s")
            for rank in [waiting[id(pipe)] for pipe in ready]:
                try:
                    answer = self._pipes[rank].recv()
                except EOFError:
                    raise CaseFailed(f"rank {rank} died") from None
                if isinstance(answer, str):
                    raise CaseFailed(f"rank {rank}:\n{answer}")
                outcomes[rank] = answer
        return [outcomes[rank] for rank in range(world)]

    def _close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _open(self, count: int) -> None:
        context: Any = mp.get_context("forkserver")
        # NxD's CPU mode is set by whoever has NxD here (tests/nxd).
        has_nxd = os.environ.get("NXD_CPU_MODE") == "1"
        nxd = "slurmllm.train.backends.nxd.runtime" if has_nxd else ""
        context.set_forkserver_preload(f"{PRELOAD} {COMPILED} {nxd}".split())
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, self.threads, theirs)
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def global_batch(config: RunConfig, step: int) -> MicroBatch:
    """All sequences of a step, random.

    With `data.mask: document` each holds some documents, and each document begins with a prompt
    that is not learnt. Prompts are longer in some sequences, and the first has nothing else.
    """
    model, batch = config.recipe.model, config.recipe.train.global_batch
    random = np.random.default_rng(step)
    drawn = random.integers(0, model.vocab_size, (batch, model.seq_len + 1))
    tokens, labels = drawn[:, :-1].copy(), drawn[:, 1:].copy()
    if config.recipe.data.mask == "none":
        return MicroBatch(tokens, labels)
    places = np.arange(model.seq_len)
    begins = random.random(tokens.shape) < 0.08
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    labels[positions < np.arange(batch)[::-1, np.newaxis]] = IGNORED
    labels[0] = IGNORED
    return MicroBatch(tokens, labels, positions)


def counted(config: RunConfig, step: int) -> int:
    """Labels of the global batch of a step that are not IGNORED."""
    return int((global_batch(config, step).labels != IGNORED).sum())


def micro_batches(backend: Backend, step: int) -> list[MicroBatch]:
    return _share(backend, global_batch(backend.config, step))


def _share(backend: Backend, whole: MicroBatch) -> list[MicroBatch]:
    """A worker's share of a global batch."""
    mesh = backend.mesh
    share, micro = mesh.global_batch // mesh.data, mesh.micro_batch
    first = mesh.data_rank(backend.worker.rank) * share
    arrays = [a for a in (whole.tokens, whole.labels, whole.positions) if a is not None]
    parts = [slice(i, i + micro) for i in range(first, first + share, micro)]
    return [MicroBatch(*(array[part] for array in arrays)) for part in parts]


def evaluated(backend: Backend) -> float:
    """The loss of sequences that no step trains on, every third without labels."""
    whole = global_batch(backend.config, 1000)
    whole.labels[::3] = IGNORED
    num_targets = int((whole.labels != IGNORED).sum())
    return float(backend.evaluate(_share(backend, whole), num_targets))


def deviation(ours: Sequence[Outcome], reference: Sequence[Outcome]) -> tuple[float, float, float]:
    """Largest relative difference of loss, gradient norm and parameter norm over our steps.

    The reference may have more steps before ours.
    """
    mine = np.array(ours[0].rows)
    theirs = np.array(reference[0].rows[-len(mine) :])
    loss, gradient, parameter = np.abs(mine / theirs - 1).max(axis=0).tolist()
    return loss, gradient, parameter


def _serve(rank: int, threads: int, pipe: Connection) -> None:
    gc.freeze()  # a quarter of a case's CPU time: collections would visit and copy all of PRELOAD
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        case, variables = pipe.recv()
    except (EOFError, KeyboardInterrupt):
        return
    try:
        pipe.send(_train(case, rank, threads, variables))
    except Exception:
        pipe.send(traceback.format_exc())
    pipe.poll(None)  # the pool kills all processes once it has their answers


def _save(backend: Backend, folder: Path | None, rank: int) -> None:
    if folder is None:
        return
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    backend.control.barrier()
    saving = backend.save_shards(folder)
    saving.wait()
    backend.control.barrier()
    saving.finish()


def _train(case: Case, rank: int, threads: int, variables: dict[str, str]) -> Outcome:
    import torch

    torch.set_num_threads(threads)
    config, mesh = case.config, case.mesh
    node, local = divmod(rank, mesh.devices_per_node)
    rank_variables = {"RANK": rank, "WORLD_SIZE": mesh.world_size}
    rank_variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": mesh.devices_per_node}
    os.environ.update({**variables, **{name: str(value) for name, value in rank_variables.items()}})
    worker = Worker(rank, mesh.world_size, local, f"node-{node}")
    if case.prepare is not None:
        case.prepare()
    control = open_control(rank, mesh.world_size)
    backend = load_backend(config.backend)(config, mesh, worker, control)
    backend.start()
    try:
        backend.build()
        if case.load is not None:
            backend.load_shards(case.load)
        before = case.before(backend) if case.before else None
        rows, between = [], []
        for step in range(case.first + 1, case.last + 1):
            batches = micro_batches(backend, step)
            loss = float(backend.forward_backward(batches, counted(config, step)))
            norms = float(backend.optimizer_step(case.lr)), float(backend.param_norm())
            rows.append((loss, *norms))
            if case.between is not None:
                between.append(case.between(backend))
            if step == case.save_at:
                _save(backend, case.save, rank)
        if case.save_at is None:
            _save(backend, case.save, rank)
        return Outcome(rows, before, between, case.after(backend) if case.after else None)
    finally:
        backend.stop()
        control.close()
