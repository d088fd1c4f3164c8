"""The native backend's worker: PyTorch on a mesh of pipeline × replicate × shard × tensor workers.

Tensor parallelism is DTensor's and pipelining torch.distributed.pipelining's (`parallel.py`), data
parallelism FSDP2's; torch.compile compiles a block (`compiling.py`).

FSDP2 shards parameters, gradients and optimizer state between steps, at least as much as every
ZeRO level requires. Within a step, zero 0 and 1 keep whole gradients until the last micro
batch and reduce them once; 2 and 3 reduce them after each. Zero 3 also frees whole parameters
between forward and backward; the others gather them once per step. With `parallel.shard_nodes`
gradients are summed over the copies of a shard (`replicate`) once, after the last micro batch.

On an accelerator the host enqueues a step and waits for none of it. Losses and norms are
`DeviceNumber`s, which the training loop reads when it has enqueued the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from slurmllm.core.config.recipe import ADAMW, MUON
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.host_memory import Memory
from slurmllm.plan.mesh import Mesh, fsdp_disabled, pipelines, suits_block_masks
from slurmllm.train.backends.base import Backend, MicroBatch, loss_weight
from slurmllm.train.backends.native import compiling, dcp, float8, precision
from slurmllm.train.backends.native.dcp import DcpSaver
from slurmllm.train.backends.native.device import KINDS, Device, DeviceNumber, send
from slurmllm.train.backends.native.environment import unsupported
from slurmllm.train.backends.native.muon import MuonAdamW
from slurmllm.train.backends.native.parallel import (
    Pipeline,
    apply_tensor_parallel,
    clip_factor,
    combine_chunks,
    make_chunk,
    num_copies,
    scale_,
    total_norm,
)
from slurmllm.train.backends.native.unsharded import MixedAdamW, UnshardedWeights
from slurmllm.train.backends.process_group import init_process_group
from slurmllm.train.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.train.model.attention import document_blocks
from slurmllm.train.model.decoder import Decoder
from slurmllm.train.model.init import fill, initialize, local_part

# A collective that waits longer than this has lost a peer. Long, because peers may compile or
# write a checkpoint meanwhile.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class NativeBackend(Backend):
    """Training on CPUs or accelerators, one a worker.

    Attributes:
        worker_device: What this worker computes on; `device` is the torch.device of it.
        chunks: This worker's parts of the model: one, or several with interleaved pipeline
            stages. Parameters have their names in the whole model.
    """

    worker_device: Device
    device: torch.device
    device_mesh: DeviceMesh
    chunks: list[Decoder]
    model: nn.Module  # all chunks as one module
    pipeline: Pipeline | None
    weights: UnshardedWeights | None = None  # None: FSDP's
    # Another one: torch's stages would be prepared anew at each change between training and this.
    evaluation_pipeline: Pipeline | None = None
    tied_group: dist.ProcessGroup | None = None
    optimizer: torch.optim.Optimizer
    parameters: dict[nn.Parameter, int]  # → how many workers have each of its elements
    shards: DcpSaver
    forward_marks: list[tuple[Any, Any]]  # of each block and micro batch

    def start(self) -> None:
        faults = unsupported(self.config)
        worker = self.worker
        mesh = self.mesh
        kind = KINDS[self.config.cluster.device]
        if self.config.recipe.train.compile and not kind.asynchronous:
            if fault := compiling.missing_compiler():
                faults.append(fault)
            compiling.tag_cache_keys()
        if faults:
            raise ConfigError("the native backend cannot run this recipe", faults)
        self.worker_device = kind(worker.local_rank)
        train = self.config.recipe.train
        if train.is_fp8 and (fault := float8.device_fault(train, self.worker_device)):
            raise ConfigError(fault)
        self.forward_marks = []
        self.device = self.worker_device.torch
        if kind.asynchronous:
            self.deferred_metrics = True
        bound_to = None if self.device.type == "cpu" else self.device
        init_process_group(
            kind.process_group, worker.rank, worker.world_size, COLLECTIVE_TIMEOUT, bound_to
        )
        degrees = {"pipeline": mesh.pipeline, **mesh.data_axes, "tensor": mesh.tensor}
        self.device_mesh = init_device_mesh(
            self.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
        )
        if self.config.recipe.model.tied_embeddings and mesh.pipeline > 1:
            pairs = [[ranks[0], ranks[-1]] for ranks in pipelines(mesh)]
            self.tied_group, _ = dist.new_subgroups_by_enumeration(pairs)
        torch.manual_seed(self.config.recipe.train.seed + worker.rank)

    def build(self) -> None:
        recipe = self.config.recipe
        mesh = self.mesh
        chunk_indices = range(mesh.pipeline_rank(self.worker.rank), mesh.chunks, mesh.pipeline)
        with torch.device("meta"):
            self.chunks = [make_chunk(recipe.model, index, mesh) for index in chunk_indices]
        unsharded = fsdp_disabled(self.config, mesh)
        shards = None if unsharded else mesh.shard * mesh.tensor
        tensor_mesh = self.device_mesh["tensor"]
        if mesh.tensor > 1:
            compiling.make_portable(tensor_mesh, "tensor parallel")
        for chunk in self.chunks:
            precision.store_weights(chunk, recipe.train.precision)
            for block in chunk.blocks() if recipe.train.is_fp8 else ():
                float8.convert_products(block, recipe.train, self.worker_device, shards)
            if mesh.tensor > 1:
                apply_tensor_parallel(chunk, tensor_mesh, sequence=recipe.parallel.sequence)
        # Before FSDP, whose hooks then run outside the compiled functions.
        blocks = [block for chunk in self.chunks for block in chunk.blocks()]
        compiling.wrap_blocks(
            blocks,
            self.worker_device,
            compiled=recipe.train.compile,
            recompute=recipe.train.recomputed,
        )
        for block in blocks:
            block.forward = self._marked(block.forward)  # type: ignore[method-assign]
        if self.worker_device.document_attention == "flex" and suits_block_masks(recipe):
            make_mask = self.worker_device.compile(document_blocks)
            for chunk in self.chunks:
                chunk.document_blocks = make_mask
        output = self.chunks[-1].output
        output.z_loss = recipe.train.z_loss
        output.row_multiple = self.worker_device.row_multiple
        output.logits_at_a_time = self.worker_device.logits_at_a_time
        if recipe.train.compile:
            compiling.wrap_output(output, self.worker_device, shared=mesh.tensor > 1)
        fsdp: dict[str, Any] = {
            "mesh": self.device_mesh[tuple(mesh.data_axes)],
            "mp_policy": precision.sharding_policy(recipe.train.precision),
            "reshard_after_forward": recipe.parallel.zero == 3,
        }
        for chunk in self.chunks:
            if not unsharded:
                for block in chunk.blocks():
                    fully_shard(block, **fsdp)
                fully_shard(chunk, **fsdp)
            chunk.to_empty(device=self.device)
        self.model = combine_chunks(self.chunks)
        if unsharded:
            self.weights = UnshardedWeights(
                self.model,
                precision.compute_dtype(recipe.train.precision),
                self.worker_device.waiting_gradients,
                lasting=self._has_mixed_adamw(),
            )
        for chunk in self.chunks:
            initialize(chunk, recipe.model, recipe.train.seed)
        self.pipeline = self._make_pipeline() if mesh.pipeline > 1 else None
        self._build_optimizer()

    def _marked(self, forward: compiling.Forward) -> compiling.Forward:
        # The hook of FSDP, which waits for other workers' weights, runs before this.
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = self.mark()
            output = forward(*args, **kwargs)
            self.forward_marks.append((begun, self.mark()))
            return output

        return call

    def _make_pipeline(self) -> Pipeline:
        recipe = self.config.recipe
        mesh = self.mesh
        length = recipe.model.seq_len
        share = length // mesh.tensor if recipe.parallel.sequence else length
        shape = (mesh.micro_batch, share, recipe.model.hidden_size)
        dtype = precision.compute_dtype(recipe.train.precision)
        # Without `requires_grad` no gradient is sent back.
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        return Pipeline(
            self.chunks,
            mesh,
            self.device_mesh["pipeline"],
            self.device,
            hidden,
            length,
            self.annotated,
        )

    def _has_mixed_adamw(self) -> bool:
        train = self.config.recipe.train
        return (
            fsdp_disabled(self.config, self.mesh)
            and self.config.recipe.optim.name == ADAMW
            and train.is_mixed
            and train.compile
            and self.worker_device.asynchronous
            # Gradients of another format than the weight's: torch 2.10.
            and hasattr(Tensor, "grad_dtype")
        )

    def _build_optimizer(self) -> None:
        recipe = self.config.recipe
        parameters = self.model.named_parameters()
        if self.weights is not None and self._has_mixed_adamw():
            self.optimizer = MixedAdamW(parameters, recipe.optim, self.weights, self.worker_device)
        elif recipe.optim.name == MUON:
            stages = [list(ranks) for ranks in zip(*pipelines(self.mesh), strict=True)]
            group, _ = dist.new_subgroups_by_enumeration(stages)
            self.optimizer = MuonAdamW(parameters, recipe, group, self.mesh.replicate)
        else:
            self.optimizer = precision.make_optimizer(parameters, recipe)
        workers = self.mesh.stage_workers
        shared = self._tied_embedding()
        self.parameters = {
            parameter: num_copies(parameter, workers) * (2 if parameter is shared else 1)
            for parameter in self.model.parameters()
        }
        self.shards = DcpSaver(
            self.control,
            self.worker_device,
            self.mesh,
            self.worker.rank,
            recipe.model.tied_embeddings,
        )

    def fill_weights(self, read: WeightReader) -> None:
        for chunk in self.chunks:
            fill(chunk, read)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], num_targets: int
    ) -> DeviceNumber:
        weight = loss_weight(micro_batches, num_targets, self.mesh.data)
        self.forward_marks = []
        with self.whole_weights(len(micro_batches)):
            if self.pipeline is not None:
                mean = self.pipeline.forward_backward(*self._to_device(micro_batches), weight)
            else:
                mean = self._accumulate(micro_batches, weight)
        tied = self._tied_embedding()
        if tied is not None:  # first and last stage each hold a partial gradient
            assert tied.grad is not None
            dist.all_reduce(local_part(tied.grad), group=self.tied_group)
        return self._global_mean(mean)

    def whole_weights(self, micro_batches: int = 1) -> AbstractContextManager[None]:
        """Return a context with whole weights, where FSDP does not gather them itself."""
        if self.weights is not None:
            return self.weights.whole(micro_batches)
        if self.config.recipe.train.is_fp8:
            float8.compute_scales(self.model)
        return nullcontext()

    def _global_mean(self, mean: Tensor | None) -> DeviceNumber:
        """Reduce the workers' mean losses, None except on the last stage, to the global batch's."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if mean is not None:
            total += mean
        dist.all_reduce(total)
        # Each last-stage worker contributes its mean; tensor-parallel workers contribute the same
        # value.
        return DeviceNumber(total / self.mesh.stage_workers)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], weight: float) -> Tensor:
        """Run the micro batches without a pipeline; return this worker's mean loss, fp64."""
        (model,) = self.chunks
        zero = self.config.recipe.parallel.zero
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last or zero >= 2)
                model.set_requires_all_reduce(last)
                model.set_reshard_after_backward(last or zero == 3)
            # All workers have the same number of labels, IGNORED ones included: the mean over micro
            # batches here and FSDP's mean over data-parallel workers give the global batch's mean.
            with self.part("forward"):
                loss = model(*self._to_device([micro_batch])) * weight / len(micro_batches)
            with self.part("backward"):
                loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> DeviceNumber:
        weight = loss_weight(micro_batches, num_targets, self.mesh.data)
        mean: Tensor | None = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self.whole_weights():
            if self.pipeline is not None:
                self.evaluation_pipeline = self.evaluation_pipeline or self._make_pipeline()
                inputs = self._to_device(micro_batches)
                mean = self.evaluation_pipeline.forward_backward(*inputs, weight, backward=False)
            else:
                for micro_batch in micro_batches:
                    loss = self.chunks[0](*self._to_device([micro_batch]))
                    mean += loss * weight / len(micro_batches)
        for chunk in self.chunks:  # a backward pass would have freed the whole weights
            for module in chunk.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return self._global_mean(mean)

    def _to_device(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor, Tensor | None]:

        def to_tensor(arrays: Sequence[np.ndarray[Any, Any]]) -> Tensor:
            return send(torch.from_numpy(np.concatenate(arrays)), self.device)

        positions = [m.positions for m in batches if m.positions is not None]
        return (
            to_tensor([m.tokens for m in batches]),
            to_tensor([m.labels for m in batches]),
            to_tensor(positions) if positions else None,
        )

    def _tied_embedding(self) -> nn.Parameter | None:
        """Return this worker's copy of an embedding that first and last stage share."""
        ends = self.chunks[0].first or self.chunks[-1].last
        if self.tied_group is None or not ends:
            return None
        return self.model.get_parameter("embed.weight")

    def optimizer_step(self, lr: float) -> DeviceNumber:
        copies = [count for p, count in self.parameters.items() if p.grad is not None]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients, copies, foreach=self.worker_device.asynchronous)
        factor = clip_factor(norm, self.config.recipe.optim.grad_clip)
        if isinstance(self.optimizer, MixedAdamW):
            self.optimizer.factor = factor
        elif self.config.recipe.optim.grad_clip > 0:
            scale_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        # A save in the background may still copy the weights that this step overwrites.
        self.shards.wait_for_copy()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return DeviceNumber(norm)  # here, so that who reads it waits for the whole step

    def param_norm(self) -> DeviceNumber:
        parameters = self.parameters
        foreach = self.worker_device.asynchronous
        return DeviceNumber(total_norm([*parameters], [*parameters.values()], foreach=foreach))

    def save_shards(self, directory: Path) -> ShardWrite:
        return self.shards.begin(
            dcp.state_of(self.model, self.optimizer, self.worker.rank),
            directory,
            asynchronous=self.config.recipe.checkpoint.asynchronous,
        )

    def load_shards(self, directory: Path) -> None:
        config = self.config.recipe.model
        dcp.load(self.model, self.optimizer, directory, self.control, config)

    def model_of_hooks(self) -> nn.Module:
        return self.model

    def graph_cache_counts(self) -> tuple[int, int]:
        return compiling.cache_counts()

    def change_batch(self, mesh: Mesh) -> None:
        if mesh.micro_batch != self.mesh.micro_batch:
            torch.compiler.reset()  # shapes are static, and dynamo keeps at most eight graphs
        super().change_batch(mesh)
        if self.pipeline is not None:
            self.pipeline = self._make_pipeline()
            self.evaluation_pipeline = None

    def mark(self) -> Any:
        return self.worker_device.mark() or super().mark()

    def memory(self) -> Memory:
        return self.worker_device.memory(self.worker.sharing)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


BACKEND = NativeBackend
