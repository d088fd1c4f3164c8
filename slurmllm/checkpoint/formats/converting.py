"""Conversion of a checkpoint to another backend's format on one machine, without the backend.

Converted are weights, AdamW's state and `train_state.json`; of an imported checkpoint the weights.
Memory: NxD's format takes one worker's file at a time, the native format a few `PIECE_BYTES`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from slurmllm.checkpoint.folder import atomic_folder, read_manifest, write_manifest
from slurmllm.checkpoint.formats.dcp_write import Keys, write_dcp
from slurmllm.checkpoint.formats.nxd_files import NxdFiles, NxdLayout, names_of_stages, read_layout
from slurmllm.checkpoint.formats.nxd_write import NxdWriter
from slurmllm.checkpoint.formats.safetensors_files import TensorFiles
from slurmllm.checkpoint.formats.tokenizer_files import (
    TOKENIZER_FOLDER,
    copy_tokenizer,
    tokenizer_in,
)
from slurmllm.checkpoint.formats.weights import (
    TrainingFiles,
    backend_files,
    is_backend_format,
    open_weights,
)
from slurmllm.checkpoint.shards import Region
from slurmllm.checkpoint.state import (
    MODEL,
    MOMENTS,
    TRAIN_STATE,
    Origin,
    TrainState,
    fingerprint_digest,
    optimizer_name,
    read_origin,
)
from slurmllm.config.load import load
from slurmllm.config.recipe import ADAMW, OptimConfig
from slurmllm.config.rules import broken_rules
from slurmllm.config.yaml_source import flatten
from slurmllm.errors import ConfigError, RunError, StorageError
from slurmllm.plan.mesh import load_mesh
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.run.artifact_records import CheckpointManifest
from slurmllm.run.host_memory import free_memory
from slurmllm.run.rundir import RunDir, is_run

if TYPE_CHECKING:
    from slurmllm.display.progress import OnProgress

Precision = Literal["fp32", "bf16_mixed", "bf16_sr", "bf16"]
_DEFAULT_LR = 1e-4  # written if it is unknown; a run sets the rate of each step itself


@dataclass(frozen=True)
class NxdMesh:
    """The workers to write NxD's files for."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1  # data-parallel workers; with `zero` each has an optimizer file of its own
    virtual_pipeline: int = 1
    zero: bool = True


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion whose inputs have been checked."""

    origin: Origin
    weights: TensorFiles
    training: TrainingFiles | None  # None if the checkpoint has only weights
    precision: Precision  # of the run that is to read the result
    layout: NxdLayout | None  # NxD's files to write; None writes the native format
    optim: OptimConfig  # hyperparameters for the optimizer's parameter groups in NxD's files
    known_optim: bool  # whether those are the run's or of NxD's files; else they are defaults

    @property
    def kept_dtype(self) -> torch.dtype:
        """Type of the weights that the optimizer updates, and of its state."""
        return torch.bfloat16 if self.precision in ("bf16", "bf16_sr") else torch.float32

    @property
    def nxd(self) -> NxdWriter | None:
        if self.layout is None:
            return None
        model, dtype = self.origin.model, self.kept_dtype
        return NxdWriter(self.layout, model, self.weights, self.training, self.optim, dtype)

    @property
    def num_bytes(self) -> int:
        if nxd := self.nxd:
            return sum(weights + state * nxd.replicas for weights, state in nxd.file_sizes())
        numbers = sum(math.prod(shape) for shape in parameter_shapes(self.origin.model).values())
        moments = 0 if self.training is None else len(MOMENTS)
        return numbers * self.kept_dtype.itemsize * (1 + moments)

    @property
    def held_bytes(self) -> int:
        """Size of the largest file of NxD's format, each of which is assembled in memory."""
        return max(max(sizes) for sizes in self.nxd.file_sizes()) if self.nxd else 0


def plan_conversion(
    directory: Path, mesh: NxdMesh | None = None, precision: Precision | None = None
) -> ConversionPlan:
    """Check a checkpoint that is to be converted: a run's of any backend, or an imported one.

    Without `mesh`, to the native format; without `precision`, that of the run that wrote it.
    """
    origin = read_origin(directory)
    weights = open_weights(origin)
    files = backend_files(origin) if is_backend_format(directory) else None
    training = files if files is not None and files.moments else None
    if training is not None and (name := optimizer_name(directory)) != ADAMW:
        raise RunError(
            f"{directory} has the state of optimizer {name}, and only AdamW's can be converted; "
            "`slurmllm checkpoint export` writes its weights, or resume the run itself, which "
            "reads the checkpoint on any mesh"
        )
    faults = _shape_faults(origin, weights, training)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise StorageError(f"{directory} is damaged; restore it:\n{lines}")
    run = _run_of(directory)
    recipe = load(run.config).recipe if run else None
    optim = recipe.optim if recipe else _stored_optim(weights)
    if precision is None and recipe is not None:
        precision = recipe.train.precision
    elif precision is None:  # of no run: concluded from the types of the tensors
        stored = read_layout(directory)
        fp32 = weights.tensors["embed.weight"].dtype != torch.bfloat16
        mixed = stored is not None and stored.dtype != stored.optimizer_dtype
        precision = "bf16_mixed" if mixed else "fp32" if fp32 else "bf16"
    is_known, optim = optim is not None, optim or OptimConfig(lr=_DEFAULT_LR)
    plan = ConversionPlan(origin, weights, training, precision, None, optim, is_known)
    if mesh is None:
        return plan
    plan = replace(plan, layout=_plan_layout(plan, mesh))
    needed, free = plan.held_bytes, free_memory()
    if needed > free:  # else hours of writing end in an out-of-memory kill
        fault = (
            f"the largest file takes {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are "
            "free; split it over more workers with --tensor, --pipeline or (under ZeRO-1, the "
            "optimizer's state) --data, or convert on a larger machine"
        )
        raise ConfigError(f"{directory} cannot be converted here", [fault])
    return plan


def mesh_of_run(directory: Path) -> NxdMesh:
    """Return the mesh of the run that a checkpoint is in; one worker if it is in none."""
    run = _run_of(directory)
    if run is None or not run.plan.is_file():
        return NxdMesh()
    config, mesh = load(run.config), load_mesh(run.plan)
    zero = config.backend != "nxd" or config.recipe.parallel.zero > 0
    return NxdMesh(mesh.tensor, mesh.pipeline, mesh.data, mesh.virtual_pipeline, zero)


def _run_of(directory: Path) -> RunDir | None:
    run = RunDir(directory.absolute().parent.parent)
    return run if is_run(run.path) else None


def _stored_optim(weights: TensorFiles) -> OptimConfig | None:
    """Return the hyperparameters in NxD's files; the native format stores none."""
    if not isinstance(weights, NxdFiles) or not (groups := weights.param_groups()):
        return None
    values = {key: groups[0][key] for key in ("betas", "eps", "weight_decay") if key in groups[0]}
    # The first group has the matrices, the last one norms and biases.
    all_decay = groups[-1].get("weight_decay") == groups[0].get("weight_decay")
    return OptimConfig(
        lr=groups[0].get("lr") or _DEFAULT_LR, decay_norms_and_biases=all_decay, **values
    )


def _shape_faults(
    origin: Origin, weights: TensorFiles, training: TrainingFiles | None
) -> list[str]:
    """Compare every parameter and moment with the model; return one line per fault."""
    faults = []
    for name, shape in parameter_shapes(origin.model).items():
        tensors = {name: weights.tensors.get(name)}
        if training is not None:
            tensors |= {f"{kind} of {name}": training.moments.get((kind, name)) for kind in MOMENTS}
        for title, stored in tensors.items():
            if stored is None or stored.shape != shape:
                state = "missing" if stored is None else list(stored.shape)
                faults.append(f"{title}: is {state}; {list(shape)} was expected")
    return faults


def _plan_layout(plan: ConversionPlan, mesh: NxdMesh) -> NxdLayout:
    model = plan.origin.model
    values = flatten(model.model_dump(), "model.")
    for field in ("tensor", "pipeline", "virtual_pipeline"):
        values[f"parallel.{field}"] = getattr(mesh, field)
    faults = list(broken_rules(values))
    if plan.precision == "bf16_mixed" and not mesh.zero:
        faults.append(
            "--precision: bf16_mixed: neuronx-distributed keeps fp32 master weights in its ZeRO-1 "
            "optimizer; leave out --no-zero, or choose another precision"
        )
    if faults:
        raise ConfigError(f"{plan.origin.directory} cannot be sharded for this mesh", faults)
    return NxdLayout(
        **vars(mesh),
        optimizer_dtype=str(plan.kept_dtype).removeprefix("torch."),
        dtype="float32" if plan.precision == "fp32" else "bfloat16",
        trained=plan.training is not None,
        names=names_of_stages(model, mesh.pipeline, mesh.virtual_pipeline),
    )


def run_conversion(
    plan: ConversionPlan, out: Path, on_progress: OnProgress = lambda _: None
) -> CheckpointManifest:
    """Write the checkpoint folder, complete or not at all; RunError if `out` exists."""
    started_at = time.time()
    # Step, tokens and attempt stay those of the source.
    source = read_manifest(plan.origin.directory)
    with atomic_folder(out) as folder:
        workers = 1
        if nxd := plan.nxd:
            replace(nxd, on_progress=on_progress).write(folder)
            workers = nxd.layout.tensor * nxd.layout.pipeline * nxd.layout.data
        else:
            _write_native(plan, folder, on_progress)
        origin = plan.origin
        if origin.imported is None:
            state = TrainState.load(origin.directory / TRAIN_STATE)
            state.save(folder / TRAIN_STATE)
            fingerprint = fingerprint_digest(state.fingerprint)
        else:
            origin.imported.save(folder / MODEL)
            copy_tokenizer(tokenizer_in(origin.directory / TOKENIZER_FOLDER), folder)
            fingerprint = fingerprint_digest(origin.imported.model)
        return write_manifest(
            folder,
            started_at,
            step=source.step,
            tokens=source.tokens,
            world_size=workers,
            attempt=source.attempt,
            recipe=source.recipe,
            fingerprint=fingerprint,
        )


def _write_native(plan: ConversionPlan, folder: Path, on_progress: OnProgress) -> None:
    dtype, training = plan.kept_dtype, plan.training
    shapes: dict[Keys, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(plan.origin.model).items():
        shapes["model", name] = shape
        if training is not None:
            shapes |= {("optimizer", name, kind): shape for kind in MOMENTS}
            shapes["optimizer", name, "step"] = ()

    def read(keys: Keys, region: Region) -> Tensor:
        if keys[0] == "model":
            return plan.weights.read(keys[1], region).to(dtype)
        assert training is not None
        _, name, kind = keys
        if kind == "step":  # fp32, also under pure bf16: bf16 counts exactly only up to 256
            return torch.tensor(training.step(name))
        return training.read_moment(kind, name, region).to(dtype)

    write_dcp(folder, shapes, dtype, read, on_progress)
