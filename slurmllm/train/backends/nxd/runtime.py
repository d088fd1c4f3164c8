"""The NxD backend's worker: neuronx-distributed on Neuron devices, or on a CPU (NXD_CPU_MODE=1).

NxD's public functions do the work: `neuronx_distributed_config`, `initialize_parallel_model` (with
NxDPPModel for pipelines), `initialize_parallel_optimizer` (with ZeRO-1), `save_checkpoint`. Their
arguments are in `arguments.py`, the model in `model.py`.

On a Neuron device, operations are recorded and run when a step is marked. Nothing here waits for
them: losses and norms are tensors, which the training loop reads a step later.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import numpy as np
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.pipeline.scheduler import (
    BackwardStepTask,
    ForwardStepTask,
    TrainInterleavedSchedule,
)
from neuronx_distributed.utils import cpu_mode, mark_step
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slurmllm.core.errors import CodeError, ConfigError, StorageError
from slurmllm.core.run.host_memory import Memory, host_memory
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import kv_copies, sharding
from slurmllm.train.backends.base import Backend, MicroBatch, loss_weight
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.backends.nxd import model as parallel_model
from slurmllm.train.backends.nxd import saving
from slurmllm.train.backends.nxd.arguments import arguments, dtype, model_inputs, optimizer_dtype
from slurmllm.train.backends.nxd.environment import INSPECT, unsupported
from slurmllm.train.backends.nxd.saving import NxdSaving
from slurmllm.train.backends.nxd.shards import (
    NAME,
    Norm,
    Parameters,
    ParameterShards,
    clip_,
    sum_,
)
from slurmllm.train.backends.process_group import init_process_group
from slurmllm.train.checkpoint.formats.nxd_files import NxdLayout, read_layout
from slurmllm.train.checkpoint.formats.pickles import pickle_faults
from slurmllm.train.checkpoint.formats.weights import open_training
from slurmllm.train.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.train.checkpoint.state import MOMENTS
from slurmllm.train.model import decoder

# A collective of the host that waits longer than this has lost a peer. Long, because peers may
# compile meanwhile.
CONTROL_TIMEOUT = timedelta(hours=2)


class NxdBackend(Backend):
    """Training through neuronx-distributed."""

    deferred_metrics = True

    model: nn.Module  # from `initialize_parallel_model`
    optimizer: torch.optim.Optimizer  # from `initialize_parallel_optimizer`
    parameters: Parameters  # in the optimizer's order
    _hooked: torch.optim.Optimizer | None = None
    _stage_names: tuple[tuple[str, ...], ...] | None = None  # parameters of each stage

    def start(self) -> None:
        if faults := unsupported(self.config):
            raise ConfigError("the NxD backend cannot run this recipe", faults)
        if self.worker.rank not in self.config.recipe.profile.ranks:
            os.environ.pop(INSPECT, None)  # before the runtime starts, which reads it
        if not cpu_mode():
            import torch_xla.distributed.xla_backend  # noqa: F401  registers "xla"

        init_process_group(
            "gloo" if cpu_mode() else "xla",
            self.worker.rank,
            self.worker.world_size,
            CONTROL_TIMEOUT,
        )
        self.device = torch.device("cpu") if cpu_mode() else xm.xla_device()
        # Learning rate and step are tensors there: as Python numbers they would become constants of
        # the graph if they round to 1, as `1 - lr · decay` does in a warm-up: another graph than
        # the precompiled one.
        self._on_device = not cpu_mode()
        self.deferred_metrics = self._on_device  # a CPU computes at once
        self._sharded = self.config.recipe.parallel.zero > 0
        self._arguments = arguments(self.config, self.mesh)
        # After the process group: NxD makes its groups here.
        self._nxd_config = nxd.neuronx_distributed_config(**self._resolve_names())
        ranks = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        if ranks != self._ranks:  # NxD's order of the workers must be the mesh's
            raise CodeError(
                f"rank {self.worker.rank} is {ranks} (pipeline, data, tensor) to NxD, "
                f"not {self._ranks}"
            )
        copies = kv_copies(self.config.recipe.model, self.mesh.tensor)
        if copies > 1:
            parallel_state.initialize_kv_group(copies)
        self._graphs_at_start = self._count_graphs()

    def _resolve_names(self) -> dict[str, Any]:
        """Return NxD's configuration with classes and functions in place of their names."""
        options = dict(self._arguments["neuronx_distributed_config"])
        if recomputed := options["activation_checkpoint_config"]:
            options["activation_checkpoint_config"] = [
                next(vars(m)[name] for m in (parallel_model, decoder, nn) if name in vars(m))
                for name in recomputed
            ]
        if options["pipeline_config"]:
            layer = options["pipeline_config"]["transformer_layer_cls"]
            options["pipeline_config"] |= {"transformer_layer_cls": getattr(parallel_model, layer)}
        options["model_init_config"] = {
            "meta_device_init": True,
            # A late reference: NxD needs it before the ranks exist that weights depend on.
            "param_init_fn": lambda module, device: self._initialize(module, device),
        }
        return options

    def build(self) -> None:
        recipe = self.config.recipe
        mesh = self.mesh
        self._shards = ParameterShards(recipe.model, mesh.tensor)
        self._initialize = self._shards.initializer(recipe.train.seed)
        weight_dtype = getattr(torch, dtype(recipe.train.precision))
        layers = parallel_model.Layers(
            recipe.model, mesh.tensor, weight_dtype, sequence=recipe.parallel.sequence
        )

        def model_fn() -> nn.Module:
            with torch.device("meta"):
                whole = decoder.build_model(recipe.model)
            model = parallel_model.ParallelDecoder(whole, layers)
            for name, module in model.named_modules():
                setattr(module, NAME, name)
            return model

        self.model = nxd.initialize_parallel_model(self._nxd_config, model_fn)
        self._interleave_evaluation()
        if mesh.pipeline > 1:
            pipeline: Any = self.model.module
            functions = dict(pipeline._INSTRUCTION_MAP)  # a copy: it is the class's
            for task, name in ((ForwardStepTask, "forward"), (BackwardStepTask, "backward")):
                functions[task] = self.annotated(name, functions[task])
            pipeline._INSTRUCTION_MAP = functions
        else:
            # NxD loses ties when it materializes a model whose outermost module has no parameters
            # of its own (`analyze_shared_parameters`); between stages it keeps them.
            self.model.original_module().tie()  # type: ignore[operator]
        self.parameters = {}
        self._loss_functions: list[parallel_model.ParallelLoss] = []
        for module in self.model.local_modules():  # type: ignore[operator]
            losses = (m for m in module.modules() if isinstance(m, parallel_model.ParallelLoss))
            self._loss_functions += losses
            for name, parameter in self._shards.named_parameters(module).items():
                self.parameters.setdefault(name, parameter)
        for loss_function in self._loss_functions:
            loss_function.z_loss = recipe.train.z_loss
        sequence = recipe.parallel.sequence and mesh.tensor > 1
        self._shards.set_attributes(self.parameters, sequence=sequence)
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        optim = self.config.recipe.optim
        decayed = {n: p for n, p in self.parameters.items() if p.ndim > 1}
        vectors = {n: p for n, p in self.parameters.items() if p.ndim <= 1}
        self.parameters = {**decayed, **vectors}  # the optimizer's order
        # Two groups for every recipe, so that all checkpoints have the same layout.
        decay_others = optim.weight_decay if optim.decay_norms_and_biases else 0.0
        groups = [
            {"params": list(decayed.values()), "weight_decay": optim.weight_decay},
            {"params": list(vectors.values()), "weight_decay": decay_others},
        ]
        options = dict(self._arguments["initialize_parallel_optimizer"])
        del options["optimizer_class"], options["weight_decay"]
        options["betas"] = tuple(options["betas"])
        options["capturable"] = self._on_device
        if "optimizer_dtype" in options:
            options["optimizer_dtype"] = getattr(torch, options["optimizer_dtype"])
        self.optimizer = nxd.initialize_parallel_optimizer(
            self._nxd_config, torch.optim.AdamW, groups, **options
        )
        self._norm = Norm(
            [self._shards.copy_weights(name, self.mesh.pipeline) for name in self.parameters],
            self.mesh,
            self.device,
            sharded=self._sharded,
        )
        self._hook_clipping()

    @property
    def _inner_optimizer(self) -> Any:
        """The optimizer that updates the weights: inside NxD's, and inside ZeRO-1's."""
        inner = self.optimizer.optimizer  # type: ignore[attr-defined]
        return inner.base_optimizer if self._sharded else inner

    def _optimized_tensors(self) -> list[Tensor]:
        """Return the parameters, or with ZeRO-1 this worker's shards of them."""
        return [p for group in self._inner_optimizer.param_groups for p in group["params"]]

    def _hook_clipping(self) -> None:
        """Clip after the reduction; ZeRO-1 makes a new inner optimizer at every load."""

        def clip(*_: Any) -> None:
            gradients = [tensor.grad for tensor in self._optimized_tensors()]
            self._grad_norm = self._norm.compute(gradients)
            present = [gradient for gradient in gradients if gradient is not None]
            clip_(present, self._grad_norm, self.config.recipe.optim.grad_clip)

        if self._hooked is not self._inner_optimizer:
            self._hooked = self._inner_optimizer
            self._hooked.register_step_pre_hook(clip)

    def fill_weights(self, read: WeightReader) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._shards.read(name, read))
        if self._sharded:  # ZeRO-1 copies its shards from the weights again
            self.optimizer.optimizer.init_zero()  # type: ignore[attr-defined]
            self._hook_clipping()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> Tensor:
        self._set_loss_weight(loss_weight(micro_batches, num_targets, self.mesh.data))
        if self.mesh.pipeline > 1:
            loss = self.model.run_train(**self._inputs(micro_batches))  # type: ignore[operator]
        else:
            loss = self._accumulate(micro_batches)
        return self._global_mean(loss)

    def _set_loss_weight(self, weight: float) -> None:
        # Data, not a constant of the graph; [1], because torch-xla makes a scalar 1 a constant.
        on_device = torch.tensor([weight], dtype=torch.float32).to(self.device)
        for loss_function in self._loss_functions:
            loss_function.weight = on_device

    def evaluate(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> Tensor:
        weight = loss_weight(micro_batches, num_targets, self.mesh.data)
        if self.mesh.pipeline > 1:
            self._set_loss_weight(weight)
            return self._global_mean(self.model.run_eval(**self._inputs(micro_batches)))  # type: ignore[operator]
        # One graph for any number of micro batches: neither this number nor the 0 is a constant.
        self._set_loss_weight(weight / len(micro_batches))
        total = torch.zeros([1], dtype=torch.float32).to(self.device)
        with torch.no_grad():
            for micro_batch in micro_batches:
                total = total + self._loss(micro_batch)
                mark_step()
        return self._global_mean(total.squeeze())

    def _interleave_evaluation(self) -> None:
        """Replace NxD's schedule of an evaluation, which knows no virtual pipeline."""
        mesh = self.mesh
        if mesh.virtual_pipeline > 1:
            self.model.module.eval_scheduler = _InterleavedForward(  # type: ignore[union-attr]
                mesh.accumulation, mesh.virtual_pipeline, mesh.pipeline, self._ranks[0]
            )

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for micro_batch in micro_batches:
            with self.part("forward"):
                loss = self._loss(micro_batch) / len(micro_batches)
            with self.part("backward"):
                loss.backward()
            total += loss.detach()
            mark_step()
        return total

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        inputs = self._inputs([micro_batch]).values()
        loss: Tensor = self.model(*(values.to(self.device) for values in inputs))
        return loss

    def _inputs(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Return the model's inputs by name, [batch, seq], on the host as NxD's pipeline needs."""
        return {
            name: torch.from_numpy(np.concatenate([getattr(m, name) for m in micro_batches]))
            for name in model_inputs(self.config)
        }

    def _global_mean(self, loss: Tensor | None) -> Tensor:
        """Reduce the workers' mean losses, None except on the last stage, to the global batch's."""
        mean = torch.zeros((), dtype=torch.float32, device=self.device)
        if loss is not None:
            mean += loss.detach() / self.mesh.data
        if self.mesh.data > 1:
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        if self.mesh.pipeline > 1:
            dist.all_reduce(mean, group=parallel_state.get_pipeline_model_parallel_group())
        return mean

    def optimizer_step(self, lr: float) -> Tensor:
        rate = torch.tensor(lr, dtype=torch.float32).to(self.device) if self._on_device else lr
        self._set_learning_rate(rate)
        self._sum_over_heads()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._param_norm = self._norm.compute(self._optimized_tensors())
        mark_step()
        return self._grad_norm

    def _set_learning_rate(self, lr: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _sum_over_heads(self) -> None:
        """Sum gradients of which each tensor-parallel worker has those of its own heads only.

        They are those of replicated keys and values, and of the norms of queries and keys.
        """
        if self.mesh.tensor == 1:
            return
        replicated: list[Tensor] = []
        norms: list[Tensor] = []
        for name, parameter in self.parameters.items():
            row = self._shards.first_replicated_row(name)
            of_heads = sharding(name, self.config.recipe.model) == "head"
            if row is None and not of_heads:
                continue
            # With fp32 accumulation, NxD moves each gradient into `main_grad`.
            gradient = parameter.main_grad if parameter.grad is None else parameter.grad  # type: ignore[attr-defined]
            (norms if of_heads else replicated).append(gradient[row:])
        sum_(replicated, parallel_state.get_kv_shared_group)
        sum_(norms, parallel_state.get_tensor_model_parallel_group)

    def param_norm(self) -> Tensor:
        return self._param_norm  # computed by the last `optimizer_step`

    def save_shards(self, directory: Path) -> ShardWrite:
        self._set_learning_rate(self.config.recipe.optim.lr)  # a number, not a tensor, in the file
        return NxdSaving(directory, self._layout(), self._ranks, self.model, self.optimizer)

    def _layout(self) -> NxdLayout:
        """Return the layout of the checkpoints (collective when first called)."""
        mesh = self.mesh
        precision = self.config.recipe.train.precision
        if self._stage_names is None:
            first = self._ranks[1:] == (0, 0)  # one worker of a stage
            stages = self.control.gather(tuple(self.parameters) if first else None)
            names = None if stages is None else tuple(filter(None, stages))
            self._stage_names = self.control.broadcast(names)
        return NxdLayout(
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            data=mesh.data,
            virtual_pipeline=mesh.virtual_pipeline,
            zero=self._sharded,
            optimizer_dtype=optimizer_dtype(precision),
            dtype=dtype(precision),
            names=self._stage_names,
        )

    def load_shards(self, directory: Path) -> None:
        if read_layout(directory) == self._layout():
            hyperparameters = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ]
            # NxD unpickles what is in them.
            lines = pickle_faults(directory, saving.files_of(self._layout(), self._ranks))
            fault = StorageError(f"{directory}: {'; '.join(lines)}") if lines else None
            if first := self.control.first(fault):
                raise first
            saving.load(directory, self.model, self.optimizer)
            self._use_loaded_state()
            # NxD loads the hyperparameters too; the recipe's apply, which may have changed.
            for groups in (self.optimizer.param_groups, self._inner_optimizer.param_groups):
                for group, values in zip(groups, hyperparameters, strict=True):
                    group.update(values)
            return
        self._load_any_mesh(open_training(directory, self.config.recipe.model))

    def _load_any_mesh(self, files: Any) -> None:
        self.fill_weights(files.read)
        for name, updated in zip(self.parameters, self._optimized_tensors(), strict=True):
            if self._sharded:  # in the optimizer's format, which may be wider
                weight = self._shards.read(name, files.read)
                updated.data.copy_(self._shard(weight, updated))
            state = {"step": torch.tensor(float(files.step(name)), dtype=torch.float32)}
            for kind in MOMENTS:
                whole = self._shards.read(name, partial(files.read, kind=kind))
                shard = self._shard(whole, updated)
                state[kind] = shard.to(updated.device, updated.dtype, copy=True)
            self._inner_optimizer.state[updated] = state
        self._use_loaded_state()

    def _use_loaded_state(self) -> None:
        """Prepare a loaded optimizer state so that existing graphs can use it."""
        self._hook_clipping()
        if self._on_device:
            # torch-xla sends equal numbers to the device once: each parameter needs a step of its
            # own, or the next graph has fewer inputs than the precompiled ones.
            for state in self._inner_optimizer.state.values():
                zero = torch.zeros((), dtype=torch.float32, device=self.device)
                state["step"] = zero + state["step"].to(self.device)
            mark_step()

    def _shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return ZeRO-1's shard of this worker's part of a parameter; without ZeRO-1 the part."""
        if not self._sharded:
            return whole
        rows = len(like)
        shard = whole[self._ranks[1] * rows :][:rows]
        return torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])

    @property
    def _ranks(self) -> tuple[int, int, int]:
        """This worker's rank in its pipeline, among the replicas, in its tensor-parallel group."""
        rank = self.worker.rank
        mesh = self.mesh
        return mesh.pipeline_rank(rank), mesh.data_rank(rank), rank % mesh.tensor

    def precompile_resume(self) -> None:
        """Compile the graphs of a resume: ZeRO-1 gathers all weights from loaded master weights."""
        self._set_learning_rate(self.config.recipe.optim.lr)
        on_host = tree_map_only(torch.Tensor, Tensor.cpu, self.optimizer.state_dict())
        self.optimizer.load_state_dict(on_host)
        self._use_loaded_state()
        xm.rendezvous("rehearsal")  # its graph, too, is part of each save
        mark_step()

    def graph_cache_counts(self) -> tuple[int, int]:
        import torch_xla.debug.metrics as metrics

        compiled = self._count_graphs() - self._graphs_at_start
        (timed, *_) = metrics.metric_data("CompileTime") or (0,)
        return max(0, timed - compiled), compiled

    def _count_graphs(self) -> int:
        cache = os.environ.get("SLURMLLM_CACHE")
        graphs = load_environment("nxd").graphs(Path(cache)) if cache else []
        return sum(graph.state == "compiled" for graph in graphs)

    def change_batch(self, mesh: Mesh) -> None:
        super().change_batch(mesh)
        if mesh.pipeline > 1:
            pipeline: Any = self.model.module
            pipeline.num_microbatches = mesh.accumulation
            pipeline.shape_traced = False
            pipeline.clear_minibatch_state()
            pipeline.create_schedule()
            self._interleave_evaluation()

    def memory(self) -> Memory:
        if cpu_mode():
            return host_memory(self.worker.sharing)
        info = xm.get_memory_info(self.device)
        return Memory(info.get("peak_bytes_used", info["bytes_used"]), info["bytes_limit"])

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _InterleavedForward(TrainInterleavedSchedule):  # type: ignore[misc]
    """The forward passes of NxD's interleaved schedule, all of them before its backward passes."""

    def steps(self) -> Iterator[list[Any]]:
        self.num_warmup_steps = self.num_microbatches_steps
        self.num_steady_state_steps = 0
        for tasks in itertools.islice(super().steps(), self.num_microbatches_steps):
            yield [task for task in tasks if type(task).__name__.startswith("Forward")]


BACKEND = NxdBackend
