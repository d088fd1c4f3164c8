"""A checkpoint → the same one in another backend's format, on one machine and without the backend.

Weights, AdamW's state and `train_state.json`; of an imported checkpoint the weights. NxD's format
holds one worker's file in memory at a time, the native one a few pieces of `PIECE_BYTES`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from slurmllm.checkpoint.folder import atomic_folder
from slurmllm.checkpoint.formats import tokenizer_files
from slurmllm.checkpoint.formats.dcp_offline_write import write_dcp
from slurmllm.checkpoint.formats.dcp_writer import ChecksumFileSystem
from slurmllm.checkpoint.formats.nxd_files import MASTERS, NxdFiles
from slurmllm.checkpoint.formats.nxd_layout import (
    LAYOUT,
    TAG,
    NxdLayout,
    StoredPart,
    model_file,
    names_of_stages,
    optimizer_file,
    part_of_worker,
    read_layout,
    shard_of_replica,
)
from slurmllm.checkpoint.formats.safetensors_files import Region, TensorFiles, fsync_file
from slurmllm.checkpoint.formats.tokenizer_files import TOKENIZER_FOLDER
from slurmllm.checkpoint.formats.weights import (
    TrainingFiles,
    backend_files,
    is_backend_format,
    open_weights,
)
from slurmllm.checkpoint.manifest import MANIFEST, describe, read_manifest
from slurmllm.checkpoint.origin import MODEL, Origin, read_origin
from slurmllm.checkpoint.state import MOMENTS, TRAIN_STATE, TrainState, fingerprint_digest
from slurmllm.config.load import load
from slurmllm.config.recipe import OptimConfig, Recipe
from slurmllm.config.resolve import flatten
from slurmllm.config.rules import broken_rules
from slurmllm.errors import ConfigError, StorageError
from slurmllm.host_memory import free_memory
from slurmllm.plan.mesh import load_mesh
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.records import CheckpointManifest
from slurmllm.rundir import RunDir, is_run

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress

Precision = Literal["fp32", "bf16_mixed", "bf16_sr", "bf16"]

# A run sets the learning rate of each step itself.
_UNKNOWN_LR = 1e-4


@dataclass(frozen=True)
class NxdMesh:
    """Whose files NxD's format is to have.

    Attributes:
        data: Data-parallel workers, each with a file of its own under zero.
        zero: ZeRO-1.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual_pipeline: int = 1
    zero: bool = True


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that nothing stands against.

    Attributes:
        origin: The checkpoint.
        weights: Its weights.
        training: Its weights and optimizer state; None where it has no such state.
        precision: Of the run that is to read the result.
        layout: Of the files to write in NxD's format; None: the native one.
        optim: What the optimizer's parameter groups are to say.
        known_optim: Whether that is the run's, or of NxD's files; else the defaults.
    """

    origin: Origin
    weights: TensorFiles
    training: TrainingFiles | None
    precision: Precision
    layout: NxdLayout | None
    optim: OptimConfig
    known_optim: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's parameters."""
        return parameter_shapes(self.origin.model)

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of the weights that the optimizer updates, and of its state."""
        return torch.bfloat16 if self.precision in ("bf16", "bf16_sr") else torch.float32

    @property
    def num_bytes(self) -> int:
        """What is to be written."""
        layout = self.layout
        if layout is None:
            numbers = sum(math.prod(shape) for shape in self.shapes.values())
            moments = 0 if self.training is None else len(MOMENTS)
            return numbers * self.kept_dtype.itemsize * (1 + moments)
        replicas = layout.data if layout.zero else 1
        return sum(weights + state * replicas for weights, state in self._files(layout))

    @property
    def held_bytes(self) -> int:
        """The largest file of NxD's format, which is made in memory."""
        return max(max(files) for files in self._files(self.layout)) if self.layout else 0

    def _files(self, layout: NxdLayout) -> Iterator[tuple[int, int]]:
        """Bytes of each worker's weights, and of its optimizer's state in one replica."""
        written: torch.dtype = getattr(torch, layout.dtype)
        masters = layout.zero and written != self.kept_dtype
        each = self.kept_dtype.itemsize * (len(MOMENTS) + masters) if layout.trained else 0
        replicas, model = layout.data if layout.zero else 1, self.origin.model
        for names in layout.names:
            for rank in range(layout.tensor):
                parts = [
                    part_of_worker(name, self.shapes[name], model, layout.tensor, rank)
                    for name in names
                ]
                shards = (shard_of_replica(part, replicas, 0) for part in parts)
                yield (
                    sum(math.prod(part.shape) for part in parts) * written.itemsize,
                    sum(math.prod(shard.shape) for shard in shards) * each,
                )


def plan_conversion(
    directory: Path, mesh: NxdMesh | None = None, precision: Precision | None = None
) -> ConversionPlan:
    """Look at a checkpoint that is to be converted.

    Args:
        directory: A run's checkpoint of any backend, or an imported one.
        mesh: For NxD's format; None: the native one.
        precision: Of the run that is to read it; None: of the one that wrote it.

    Raises:
        RunError: it is no checkpoint.
        ConfigError: the mesh does not fit the model, or a worker's file this machine's memory.
        StorageError: it is damaged.
    """
    origin = read_origin(directory)
    weights = open_weights(origin)
    training = _training(origin)
    faults = _unlike(origin, weights, training)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise StorageError(f"{directory} is damaged; restore it:\n{lines}")
    recipe = _recipe_around(directory)
    if precision is None:
        precision = (
            recipe.train.precision if recipe else _precision(read_layout(directory), weights)
        )
    optim = recipe.optim if recipe else _optim(weights)
    known = optim is not None
    optim = optim or OptimConfig(lr=_UNKNOWN_LR)
    plan = ConversionPlan(origin, weights, training, precision, None, optim, known)
    if mesh is None:
        return plan
    plan = replace(plan, layout=_layout(plan, mesh))
    _require_memory(plan)
    return plan


def mesh_of_run(directory: Path) -> NxdMesh:
    """The mesh of the run around a checkpoint; one worker where there is none."""
    run = RunDir(directory.absolute().parent.parent)
    if not is_run(run.path) or not run.plan.is_file():
        return NxdMesh()
    config, mesh = load(run.config), load_mesh(run.plan)
    zero = config.backend != "nxd" or config.recipe.parallel.zero > 0
    return NxdMesh(mesh.tensor, mesh.pipeline, mesh.data, mesh.virtual_pipeline, zero)


def _training(origin: Origin) -> TrainingFiles | None:
    files = backend_files(origin) if is_backend_format(origin.directory) else None
    return files if files is not None and files.moments else None


def _recipe_around(directory: Path) -> Recipe | None:
    around = directory.absolute().parent.parent
    return load(RunDir(around).config).recipe if is_run(around) else None


def _optim(weights: TensorFiles) -> OptimConfig | None:
    """What NxD's own files say; nothing in the native format does."""
    groups = weights.param_groups() if isinstance(weights, NxdFiles) else []
    if not groups:
        return None
    known = {key: groups[0][key] for key in ("betas", "eps", "weight_decay") if key in groups[0]}
    all_decay = groups[-1].get("weight_decay") == groups[0].get("weight_decay")
    return OptimConfig(
        lr=groups[0].get("lr") or _UNKNOWN_LR, decay_norms_and_biases=all_decay, **known
    )


def _precision(layout: NxdLayout | None, weights: TensorFiles) -> Precision:
    kept = weights.tensors["embed.weight"].dtype
    if layout is not None and layout.dtype != layout.optimizer_dtype:
        return "bf16_mixed"
    return "bf16" if kept == torch.bfloat16 else "fp32"


def _unlike(origin: Origin, weights: TensorFiles, training: TrainingFiles | None) -> list[str]:
    """Every parameter and moment that is not as the model says."""
    faults = []
    for name, shape in parameter_shapes(origin.model).items():
        held = {name: weights.tensors.get(name)}
        if training is not None:
            held |= {f"{kind} of {name}": training.moments.get((kind, name)) for kind in MOMENTS}
        for what, stored in held.items():
            if stored is None:
                faults.append(f"{what}: is missing; {list(shape)} was expected")
            elif stored.shape != shape:
                faults.append(f"{what}: is {list(stored.shape)}; {list(shape)} was expected")
    return faults


def _layout(plan: ConversionPlan, mesh: NxdMesh) -> NxdLayout:
    """NxD's files for a mesh.

    Raises:
        ConfigError: the mesh does not fit the model.
    """
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
        raise ConfigError(f"{plan.origin.directory} cannot be cut up for this mesh", faults)
    return NxdLayout(
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        data=mesh.data,
        virtual_pipeline=mesh.virtual_pipeline,
        zero=mesh.zero,
        optimizer_dtype=str(plan.kept_dtype).removeprefix("torch."),
        dtype="float32" if plan.precision == "fp32" else "bfloat16",
        trained=plan.training is not None,
        names=names_of_stages(model, mesh.pipeline, mesh.virtual_pipeline),
    )


def _require_memory(plan: ConversionPlan) -> None:
    """Each of NxD's files is made in memory."""
    held, free = plan.held_bytes, free_memory()
    if held > free:
        raise ConfigError(
            f"{plan.origin.directory} cannot be converted here",
            [
                f"the largest file takes {held / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB "
                "are free; cut it up for more workers with --tensor, --pipeline or (under ZeRO-1, "
                "the optimizer's state) --data, or convert on a larger machine"
            ],
        )


def run_conversion(
    plan: ConversionPlan, out: Path, on_progress: OnProgress = lambda _: None
) -> CheckpointManifest:
    """Write the checkpoint folder, whole or not at all.

    Args:
        plan: What to convert.
        out: The folder to make.
        on_progress: Told the bytes converted so far.

    Raises:
        RunError: there is something at `out` already.
        StorageError: a file cannot be read or written.
    """
    begun = time.time()
    before = read_manifest(plan.origin.directory)
    with atomic_folder(out) as folder:
        if plan.layout is None:
            _write_native(plan, folder, on_progress)
            workers = 1
        else:
            _NxdWriter(plan, plan.layout, folder, on_progress).write()
            workers = plan.layout.tensor * plan.layout.pipeline * plan.layout.data
        fingerprint = _copy_state(plan.origin, folder)
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        manifest = CheckpointManifest(
            step=before.step,
            tokens=before.tokens,
            world_size=workers,
            attempt=before.attempt,
            recipe=before.recipe,
            saved_at=time.time(),
            save_s=time.time() - begun,
            fingerprint=fingerprint,
            files=tuple(describe(folder, name) for name in names),
        )
        manifest.save(folder / MANIFEST)
    return manifest


def _copy_state(origin: Origin, folder: Path) -> str:
    """What says whose weights these are, and how far they are trained; returns its digest."""
    if origin.imported is None:
        state = TrainState.load(origin.directory / TRAIN_STATE)
        state.save(folder / TRAIN_STATE)
        return fingerprint_digest(state.fingerprint)
    origin.imported.save(folder / MODEL)
    tokenizer = tokenizer_files.tokenizer_in(origin.directory / TOKENIZER_FOLDER).files
    if tokenizer:
        (folder / TOKENIZER_FOLDER).mkdir()
        tokenizer_files.copy_files(tokenizer, folder / TOKENIZER_FOLDER)
    return fingerprint_digest(origin.imported.model)


def _write_native(plan: ConversionPlan, folder: Path, on_progress: OnProgress) -> None:
    dtype = plan.kept_dtype
    tensors: dict[str, dict[str, Any]] = {"model": dict(plan.shapes)}
    training = plan.training
    if training is not None:
        tensors["optimizer"] = {
            name: {**dict.fromkeys(MOMENTS, shape), "step": ()}
            for name, shape in plan.shapes.items()
        }

    def read(way: tuple[str, ...], region: Region) -> Tensor:
        if way[0] == "model":
            return plan.weights.read(way[1], region).to(dtype)
        assert training is not None
        _, name, kind = way
        if kind == "step":
            return torch.tensor(training.step(name))
        return training.read_moment(kind, name, region).to(dtype)

    write_dcp(folder, tensors, dtype, read, on_progress)


class _NxdWriter:
    """Writes NxD's files, a worker's at a time."""

    def __init__(
        self, plan: ConversionPlan, layout: NxdLayout, folder: Path, on_progress: OnProgress
    ) -> None:
        self._plan, self._layout, self._folder = plan, layout, folder
        self._on_progress, self._done = on_progress, 0
        self._dtype: torch.dtype = getattr(torch, layout.dtype)

    def write(self) -> None:
        """Everything below the folder."""
        layout, folder = self._layout, self._folder
        for sub in ("model", "optim") if layout.trained else ("model",):
            (folder / TAG / sub).mkdir(parents=True)
        replicas = layout.data if layout.zero else 1
        for stage in range(layout.pipeline):
            for rank in range(layout.tensor):
                self._save(model_file(rank, stage), self._weights(stage, rank))
                for replica in range(replicas if layout.trained else 0):
                    name = optimizer_file(replica, rank, stage)
                    self._save(name, self._optimizer(stage, rank, replica))
        for mark in ("checkpoint", "done"):
            (folder / TAG / mark).write_text("1", encoding="utf-8")
            fsync_file(folder / TAG / mark)
        layout.save(folder / LAYOUT)

    def _save(self, name: str, held: dict[Any, Any]) -> None:
        files = ChecksumFileSystem()
        try:
            with files.create_stream(self._folder / name, "wb") as stream:
                torch.save(held, cast(IO[bytes], stream))
                stream.flush()
                os.fsync(stream.fileno())
        except Exception as error:
            if files.refusals:
                raise files.refusals[0] from error
            raise

    def _weights(self, stage: int, rank: int) -> dict[str, Tensor]:
        layout, model = self._layout, self._plan.origin.model
        mine = set(layout.names[stage])
        found = {
            name: self._fill(self._part(name, rank), self._dtype, self._reader(name))
            for name in self._plan.shapes
            if name in mine
        }
        if model.tied_embeddings and stage == layout.pipeline - 1:
            found["head.weight"] = found["embed.weight"]
            if layout.pipeline > 1:
                del found["embed.weight"]
        return found

    def _optimizer(self, stage: int, rank: int, replica: int) -> dict[str, Any]:
        training, layout, dtype = self._plan.training, self._layout, self._plan.kept_dtype
        assert training is not None
        names = layout.names[stage]
        parts = [self._part(name, rank) for name in names]
        held = parts
        if layout.zero:
            held = [shard_of_replica(part, layout.data, replica) for part in parts]
        state = {
            number: {
                "step": torch.tensor(training.step(name), dtype=torch.float32),
                **{
                    kind: self._fill(local, dtype, self._moment_reader(training, name, kind))
                    for kind in MOMENTS
                },
            }
            for number, (name, local) in enumerate(zip(names, held, strict=True))
        }
        groups = self._groups(names)
        if not layout.zero:
            return {"state": state, "param_groups": groups}
        found: dict[str, Any] = {
            "state": {},
            "param_groups": groups,
            "base_state": state,
            "shape_info": {i: torch.Size(part.shape) for i, part in enumerate(parts)},
        }
        if dtype != self._dtype:
            found[MASTERS] = {
                number: self._fill(local, dtype, self._reader(name))
                for number, (name, local) in enumerate(zip(names, held, strict=True))
            }
        return found

    def _groups(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """As torch's own optimizer writes them."""
        optim = self._plan.optim
        matrices = [len(self._plan.shapes[name]) > 1 for name in names]
        of_others = optim.weight_decay if optim.decay_norms_and_biases else 0.0
        groups = [
            {
                "params": [torch.nn.Parameter(torch.empty(0)) for m in matrices if m is which],
                "weight_decay": optim.weight_decay if which else of_others,
            }
            for which in (True, False)
        ]
        made = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        written: list[dict[str, Any]] = made.state_dict()["param_groups"]
        return written

    def _part(self, name: str, rank: int) -> StoredPart:
        shape, model = self._plan.shapes[name], self._plan.origin.model
        return part_of_worker(name, shape, model, self._layout.tensor, rank)

    def _reader(self, name: str) -> Callable[[Region], Tensor]:
        return lambda region: self._plan.weights.read(name, region)

    def _moment_reader(
        self, training: TrainingFiles, name: str, kind: str
    ) -> Callable[[Region], Tensor]:
        return lambda region: training.read_moment(kind, name, region)

    def _fill(
        self, local: StoredPart, dtype: torch.dtype, read: Callable[[Region], Tensor]
    ) -> Tensor:
        out = torch.zeros(local.shape, dtype=dtype)
        for part in local.parts:
            out[part.local] = read(part.whole)
        self._done += out.nbytes
        self._on_progress(self._done)
        return out
