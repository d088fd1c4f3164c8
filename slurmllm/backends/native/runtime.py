"""The native backend's worker: PyTorch's FSDP2 on a data-parallel mesh, torch.compile per block.

FSDP2 shares out parameters, gradients and optimizer state alike between steps, which is at least
what any `parallel.zero` asks for. Within a step, zero 0 and 1 keep whole gradients until the last
micro batch and send them once; 2 and 3 send them after each. Zero 3 also drops whole parameters
between forward and backward; the others gather them once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from slurmllm.backends.base import Backend, MicroBatch, ModelFactory
from slurmllm.backends.native import compiling, sharded_state
from slurmllm.backends.native.limits import unsupported
from slurmllm.backends.native.norms import scale_, total_norm
from slurmllm.errors import ConfigError
from slurmllm.model.init import initialize

# A collective that waits longer than this has lost a peer. Long, because peers may compile or
# write a checkpoint meanwhile.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class NativeBackend(Backend):
    """Data-parallel training on CPUs or CUDA devices."""

    device: torch.device
    data_mesh: DeviceMesh
    control: dist.ProcessGroup
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def start(self) -> None:
        """Open process groups and the device mesh (collective)."""
        faults = unsupported(self.config)
        worker, kind = self.worker, self.config.cluster.device
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
        self.data_mesh = init_device_mesh(kind, (self.mesh.data,), mesh_dim_names=("data",))
        # A group of its own over the host's network: its messages never queue behind the device's.
        self.control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        torch.manual_seed(self.config.recipe.train.seed + worker.rank)

    def build(self, model_factory: ModelFactory) -> None:
        """Build this worker's shard of the model; weights depend on the seed alone (collective)."""
        recipe = self.config.recipe
        with torch.device("meta"):
            self.model = model_factory()
        blocks = list(self.model.get_submodule("layers").children())
        compiling.wrap_blocks(
            blocks,
            compiled=recipe.train.compile,
            recompute=recipe.train.activation_checkpointing == "full",
        )
        self._shard(blocks)
        self.model.to_empty(device=self.device)
        initialize(self.model, recipe.model, recipe.train.seed)

    def _shard(self, blocks: Sequence[nn.Module]) -> None:
        recipe = self.config.recipe
        policy = MixedPrecisionPolicy()
        if recipe.train.precision == "bf16_mixed":
            # The rotary table stays fp32 (cast_forward_inputs): in bf16, far positions blur.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        drop = recipe.parallel.zero == 3
        for block in blocks:
            fully_shard(block, mesh=self.data_mesh, mp_policy=policy, reshard_after_forward=drop)
        fully_shard(self.model, mesh=self.data_mesh, mp_policy=policy, reshard_after_forward=drop)

    def build_optimizer(self) -> None:
        """Build this worker's share of the optimizer from `config.recipe.optim`."""
        optim = self.config.recipe.optim
        parameters = list(self.model.parameters())
        # Matrices and embeddings have two dimensions; norms and biases have one.
        decayed = [p for p in parameters if p.ndim > 1 or optim.decay_norms_and_biases]
        others = [p for p in parameters if p.ndim <= 1 and not optim.decay_norms_and_biases]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Accumulate the gradients of one step (collective).

        Returns:
            The mean loss over the tokens of the global batch, in nats, equal on all workers.
        """
        assert isinstance(self.model, FSDPModule)
        zero = self.config.recipe.parallel.zero
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.model.set_requires_gradient_sync(last or zero >= 2)
            self.model.set_reshard_after_backward(last or zero == 3)
            # Equal token counts everywhere: the mean over micro batches here, and FSDP's mean
            # over the data-parallel workers, make the mean over the global batch.
            loss = self._loss(micro_batch) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        dist.all_reduce(total, group=self.data_mesh.get_group())
        return float(total.item()) / self.mesh.data

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        tokens = torch.from_numpy(micro_batch.tokens).to(self.device, non_blocking=True)
        labels = torch.from_numpy(micro_batch.labels).to(self.device, non_blocking=True)
        logits: Tensor = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def optimizer_step(self, lr: float) -> float:
        """Clip, update, clear the gradients (collective).

        Returns:
            The 2-norm of the gradient over all parameters before clipping.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(gradients, self.data_mesh)
        limit = self.config.recipe.optim.grad_clip
        if limit > 0 and norm > limit:
            scale_(gradients, limit / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def param_norm(self) -> float:
        """The 2-norm over all parameters (collective)."""
        return total_norm(list(self.model.parameters()), self.data_mesh)

    def save_shards(self, directory: Path) -> list[str]:
        """Write model, optimizer and random state into an existing folder (collective).

        Returns:
            Names of the files that this worker wrote.
        """
        return sharded_state.save(self.model, self.optimizer, directory, self.worker, self.control)

    def load_shards(self, directory: Path) -> None:
        """Read back what `save_shards` wrote, on the same mesh or another one (collective)."""
        sharded_state.load(self.model, self.optimizer, directory, self.worker, self.control)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's small picklable value, by rank, on all workers (collective)."""
        values: list[Any] = [None] * self.worker.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def graph_cache_counts(self) -> tuple[int, int]:
        """Compiled graphs found in the cache and graphs that had to be compiled, so far."""
        return compiling.cache_counts()

    def stop(self) -> None:
        """Close the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


BACKEND = NativeBackend
