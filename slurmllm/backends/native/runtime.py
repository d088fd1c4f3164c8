"""How much memory a worker used at most, and how much it may use, of its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from slurmllm.backends.base import Backend, MicroBatch, ModelFactory, loss_weight
from slurmllm.backends.native import compiling, dcp_state, precision
from slurmllm.backends.native.compiling import alike_everywhere
from slurmllm.backends.native.dcp_save import DcpSaver
from slurmllm.backends.native.environment import unsupported
from slurmllm.backends.native.pipeline import Pipeline, as_one, chunks_of, make_chunk
from slurmllm.backends.native.sharded_tensors import copies_of, local_part, scale_, total_norm
from slurmllm.backends.native.tensor_parallel import share_out
from slurmllm.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.errors import ConfigError
from slurmllm.host_memory import Memory, host_memory
from slurmllm.model.decoder import Decoder
from slurmllm.model.init import fill, initialize
from slurmllm.plan.mesh import Mesh, pipelines


def device_memory(device: torch.device) -> Memory:
    """A GPU's, from the allocator's own count; counting starts anew."""
    peak = torch.cuda.max_memory_allocated(device)
    # What others hold (NCCL, the CUDA context) is in neither of the two.
    free, _ = torch.cuda.mem_get_info(device)
    limit = free + torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return Memory(peak, limit)


# A collective that waits longer than this has lost a peer. Long, because peers may compile or
# write a checkpoint meanwhile.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class NativeBackend(Backend):
    """Training on CPUs or CUDA devices.

    Attributes:
        chunks: The parts of the model that this worker holds: one, unless pipeline stages
            interleave. Names of parameters are those of the whole model.
        model: The chunks under one module.
    """

    device: torch.device
    device_mesh: DeviceMesh
    control: dist.ProcessGroup
    chunks: list[Decoder]
    model: nn.Module
    pipeline: Pipeline | None
    tied_group: dist.ProcessGroup | None = None
    optimizer: torch.optim.Optimizer
    shards: DcpSaver

    def start(self) -> None:
        """Open process groups and the device mesh (collective)."""
        faults = unsupported(self.config)
        worker, mesh, kind = self.worker, self.mesh, self.config.cluster.device
        if self.config.recipe.train.compile and kind == "cpu":
            faults += compiling.missing_compiler()
        if faults:
            raise ConfigError("the native backend cannot run this recipe", faults)
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device(kind, worker.local_rank)
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if kind == "cuda" else None,
        )
        self.device_mesh = init_device_mesh(
            kind,
            (mesh.pipeline, mesh.data, mesh.tensor),
            mesh_dim_names=("pipeline", "data", "tensor"),
        )
        # A group of its own over the host's network: its messages never queue behind the device's.
        self.control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        if self.config.recipe.model.tied_embeddings and mesh.pipeline > 1:
            pairs = [[ranks[0], ranks[-1]] for ranks in pipelines(mesh)]
            self.tied_group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
        torch.manual_seed(self.config.recipe.train.seed + worker.rank)

    def build(self, model_factory: ModelFactory) -> None:
        """Build this worker's shard of the model; weights depend on the seed alone (collective)."""
        recipe, mesh = self.config.recipe, self.mesh
        numbers = chunks_of(mesh.pipeline_rank(self.worker.rank), mesh)
        with torch.device("meta"):
            self.chunks = [make_chunk(model_factory, number, mesh) for number in numbers]
        tensor_mesh = self.device_mesh["tensor"]
        if mesh.tensor > 1:
            alike_everywhere(tensor_mesh, "tensor parallel")
        for chunk in self.chunks:
            precision.store_weights(chunk, recipe.train.precision)
            if mesh.tensor > 1:
                share_out(chunk, tensor_mesh, sequence=recipe.parallel.sequence)
        self._wrap()
        for chunk in self.chunks:
            self._shard(chunk)
            chunk.to_empty(device=self.device)
            initialize(chunk, recipe.model, recipe.train.seed)
        self.model = as_one(self.chunks)
        self.pipeline = self._pipeline() if mesh.pipeline > 1 else None

    def _wrap(self) -> None:
        train = self.config.recipe.train
        compiling.wrap_blocks(
            [block for chunk in self.chunks for block in chunk.blocks()],
            compiled=train.compile,
            recompute=train.activation_checkpointing,
        )
        if train.compile:
            compiling.wrap_output(self.chunks[-1].output)

    def _shard(self, chunk: Decoder) -> None:
        recipe = self.config.recipe
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data"],
            "mp_policy": precision.sharding_policy(recipe.train.precision),
            "reshard_after_forward": recipe.parallel.zero == 3,
        }
        for block in chunk.blocks():
            fully_shard(block, **options)
        fully_shard(chunk, **options)

    def _pipeline(self) -> Pipeline:
        recipe, mesh = self.config.recipe, self.mesh
        length = recipe.model.seq_len
        hidden = torch.empty(
            mesh.micro_batch,
            length // mesh.tensor if recipe.parallel.sequence else length,
            recipe.model.hidden_size,
            dtype=precision.compute_dtype(recipe.train.precision),
            device="meta",
            requires_grad=True,  # or no gradient is sent back
        )
        group = self.device_mesh["pipeline"]
        return Pipeline(self.chunks, mesh, group, self.device, hidden, length)

    def build_optimizer(self) -> None:
        """Build this worker's share of the optimizer from `config.recipe.optim`."""
        recipe = self.config.recipe
        self.optimizer = precision.make_optimizer(
            self.model.named_parameters(), recipe.optim, recipe.train
        )
        self.shards = DcpSaver(self.worker, self.control, self.device)

    def fill_weights(self, read: WeightReader) -> None:
        """Set the weights of this worker's shard, before the first step."""
        for chunk in self.chunks:
            fill(chunk, read)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int) -> float:
        """Accumulate the gradients of one step (collective).

        Returns:
            The mean loss over the labels of the global batch that count, in nats, equal on all
            workers.
        """
        weight = loss_weight(micro_batches, counted, self.mesh.data)
        if self.pipeline is not None:
            mean = self.pipeline.forward_backward(*self._to_device(micro_batches), weight)
        else:
            mean = self._accumulate(micro_batches, weight)
        self._add_tied_gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if mean is not None:
            total += mean
        dist.all_reduce(total)
        # The last stage's workers have added it, tensor-parallel ones each the same.
        return float(total.item()) / (self.mesh.data * self.mesh.tensor)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], weight: float) -> Tensor:
        (model,) = self.chunks
        assert isinstance(model, FSDPModule)
        zero = self.config.recipe.parallel.zero
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            model.set_requires_gradient_sync(last or zero >= 2)
            model.set_reshard_after_backward(last or zero == 3)
            # Equally many labels everywhere, counted or not: the mean over micro batches here, and
            # FSDP's mean over the data-parallel workers, make the mean over the global batch.
            loss = model(*self._to_device([micro_batch])) * weight / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def _to_device(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, labels and, where documents matter, positions."""

        def moved(arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(self.device, non_blocking=True)

        positions = [m.positions for m in batches if m.positions is not None]
        return (
            moved([m.tokens for m in batches]),
            moved([m.labels for m in batches]),
            moved(positions) if positions else None,
        )

    def _add_tied_gradients(self) -> None:
        """Add up the gradients of an embedding that first and last stage both hold."""
        tied = self._tied_embedding()
        if tied is not None:
            assert tied.grad is not None
            dist.all_reduce(local_part(tied.grad), group=self.tied_group)

    def _tied_embedding(self) -> nn.Parameter | None:
        """This worker's copy of an embedding that lies on two stages."""
        ends = self.chunks[0].first or self.chunks[-1].last
        if self.tied_group is None or not ends:
            return None
        return self.model.get_parameter("embed.weight")

    def optimizer_step(self, lr: float) -> float:
        """Clip, update, clear the gradients (collective).

        Returns:
            The 2-norm of the gradient over all parameters before clipping.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients, self._copies(parameters))
        limit = self.config.recipe.optim.grad_clip
        if limit > 0 and norm > limit:
            scale_(gradients, limit / (norm + 1e-6))
        precision.set_learning_rate(self.optimizer, lr)
        self.shards.settle()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def param_norm(self) -> float:
        """The 2-norm over all parameters (collective)."""
        parameters = list(self.model.parameters())
        return total_norm(parameters, self._copies(parameters))

    def _copies(self, parameters: Sequence[Tensor]) -> list[int]:
        """On how many workers each parameter's elements lie."""
        workers = self.mesh.data * self.mesh.tensor
        tied = self._tied_embedding()
        return [copies_of(p, workers) * (2 if p is tied else 1) for p in parameters]

    def save_shards(self, directory: Path) -> ShardWrite:
        """Write model, optimizer and random state into an existing folder (collective)."""
        return self.shards.begin(
            dcp_state.state_of(self.model, self.optimizer, self.worker),
            directory,
            asynchronous=self.config.recipe.checkpoint.asynchronous,
        )

    def load_shards(self, directory: Path) -> None:
        """Read back what `save_shards` wrote, on the same mesh or another one (collective)."""
        dcp_state.load(
            self.model,
            self.optimizer,
            directory,
            self.worker,
            self.control,
            config=self.config.recipe.model,
        )

    def gather(self, value: Any) -> list[Any]:
        """Every worker's small picklable value, by rank, on all workers (collective)."""
        values: list[Any] = [None] * self.worker.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def graph_cache_counts(self) -> tuple[int, int]:
        """Compiled graphs found in the cache and graphs that had to be compiled, so far."""
        return compiling.cache_counts()

    def change_batch(self, mesh: Mesh) -> None:
        """Go on with another micro batch or accumulation (collective)."""
        if mesh.micro_batch != self.mesh.micro_batch:
            torch.compiler.reset()  # shapes are fixed, and dynamo keeps no more than eight
        super().change_batch(mesh)
        if self.pipeline is not None:
            self.pipeline = self._pipeline()

    def memory(self) -> Memory:
        """What this worker used at most since the last call, and what it may use."""
        if self.device.type == "cuda":
            return device_memory(self.device)
        return host_memory(self.worker.sharing)

    def stop(self) -> None:
        """Close the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


BACKEND = NativeBackend
