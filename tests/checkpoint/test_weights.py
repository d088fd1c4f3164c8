"""Filling models, whole or shared out, from imported and from a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from train.gang import Gang, make_data, make_run

from slurmllm.checkpoint.folder import file_faults, read_manifest
from slurmllm.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.checkpoint.formats.importing import plan_import, run_import
from slurmllm.checkpoint.formats.safetensors_files import plan_shards, write_index
from slurmllm.checkpoint.formats.tokenizer_files import TokenizerFiles
from slurmllm.checkpoint.formats.weights import weight_reader
from slurmllm.checkpoint.state import INDEX, MODEL, TrainState, read_origin, require_model
from slurmllm.config.load import load
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import RunError, StorageError
from slurmllm.model.decoder import build_model
from slurmllm.model.init import fill, initialize
from slurmllm.run.artifact_records import ImportedModel


def config(family: str, **changes: object) -> ModelConfig:
    values = {
        "family": family,
        "num_layers": 3,
        "hidden_size": 24,
        "num_heads": 4,
        "ffn_hidden_size": 40,
        "vocab_size": 45,
        "seq_len": 10,
    }
    groups = {"num_kv_heads": 2} if family == "llama" else {}
    return ModelConfig.model_validate({**values, **groups, **changes})


def write(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """A checkpoint as `checkpoint import` leaves it, without its manifest; random values."""
    folder.mkdir()
    decoder = build_model(model)
    initialize(decoder, model, seed=2)
    held = {name: p.detach() + 0.1 for name, p in decoder.named_parameters()}
    weight_map = {}
    shards = plan_shards([t.nbytes for t in held.values()], 9000, "weights", "weights")
    for file, parts in shards.items():
        names = [list(held)[index] for index in parts]
        save_file({name: held[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    write_index(folder / INDEX, weight_map, 0)
    ImportedModel(
        source="", architecture="", model=model.model_dump(), parameters=0, dtypes=()
    ).save(folder / MODEL)
    return held


@pytest.mark.parametrize("family", ["neox", "llama", "gpt3"])
def test_padding_rows_are_0(family: str, tmp_path: Path) -> None:
    held = write(tmp_path / "c", config(family))
    padded = config(family, vocab_pad_multiple=16)
    model = build_model(padded)
    fill(model, weight_reader(tmp_path / "c", padded))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[: len(held[name])], held[name])
        assert not parameter[len(held[name]) :].any()


@pytest.mark.parametrize("family", ["neox", "gpt3"])
def test_a_pipeline_stage_takes_what_it_has(family: str, tmp_path: Path) -> None:
    stored = config(family)
    held = write(tmp_path / "c", stored)
    for layers, first, last in ((range(1), True, False), (range(1, 3), False, True)):
        stage = build_model(stored)
        stage.keep(layers, first=first, last=last)
        fill(stage, weight_reader(tmp_path / "c", stored))
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, held[name]), name


def test_buffers_are_computed_and_types_converted(tmp_path: Path) -> None:
    stored = config("llama")
    held = write(tmp_path / "c", stored)
    with torch.device("meta"):
        model = build_model(stored)
    model.to_empty(device="cpu").to(torch.bfloat16)
    fill(model, weight_reader(tmp_path / "c", stored))
    assert torch.equal(model.rotary, build_model(stored).rotary.to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, held[name].to(torch.bfloat16))


def test_shorter_sequences(tmp_path: Path) -> None:
    held = write(tmp_path / "c", config("gpt3"))
    short = config("gpt3", seq_len=4)
    model = build_model(short)
    fill(model, weight_reader(tmp_path / "c", short))
    assert torch.equal(model.get_parameter("positions.weight"), held["positions.weight"][:4])
    with pytest.raises(RunError, match=r"model.seq_len: the checkpoint has 10, the recipe 11"):
        require_model(tmp_path / "c", config("gpt3", seq_len=11))
    write(tmp_path / "turned", config("neox"))
    require_model(tmp_path / "turned", config("neox", seq_len=100))


def test_another_model(tmp_path: Path) -> None:
    write(tmp_path / "c", config("llama"))
    other = config("llama", vocab_size=50, num_kv_heads=4, norm_eps=1e-6, init_std=0.5)
    with pytest.raises(RunError) as caught:
        fill(build_model(other), weight_reader(tmp_path / "c", other))
    assert str(caught.value).splitlines()[1:-1] == [
        "  model.vocab_size: the checkpoint has 45, the recipe 50",
        "  model.norm_eps: the checkpoint has 1e-05, the recipe 1e-06",
        "  model.num_kv_heads: the checkpoint has 2, the recipe 4",
    ]
    assert "train.init_from" in str(caught.value)
    with pytest.raises(RunError, match=r"is not a checkpoint: it holds neither train_state.json"):
        require_model(tmp_path, other)
    with pytest.raises(RunError, match="is not a checkpoint"):
        require_model(tmp_path / "absent", other)


def test_a_checkpoint_of_the_first_version(tmp_path: Path) -> None:
    # Its model section had none of the fields that a family settles now.
    fields = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": None,
        "ffn_hidden_size": 40,
        "vocab_size": 45,
        "vocab_pad_multiple": 1,
        "seq_len": 10,
        "rotary_pct": 0.25,
        "rotary_base": 10000.0,
        "norm_eps": 1e-05,
        "init_std": 0.02,
        "family": "neox",
    }
    state = {"data.mask": "none", **{f"model.{name}": value for name, value in fields.items()}}
    TrainState(step=1, tokens=1, data={}, fingerprint=state).save(tmp_path / "train_state.json")
    assert read_origin(tmp_path).model == ModelConfig.model_validate(fields)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    stored = config("neox")
    write(tmp_path / "c", stored)
    model = build_model(stored)
    file = sorted((tmp_path / "c").glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[:-9])
    with pytest.raises(StorageError, match=f"{file.name} is cut short"):
        fill(model, weight_reader(tmp_path / "c", stored))
    file.unlink()
    with pytest.raises(StorageError, match=f"{file.name} cannot be read: No such file"):
        fill(model, weight_reader(tmp_path / "c", stored))
    file.write_bytes(content)
    (tmp_path / "c" / INDEX).write_text("{}")
    with pytest.raises(StorageError, match=r"cannot read .*index.json"):
        fill(model, weight_reader(tmp_path / "c", stored))
    ImportedModel.load(tmp_path / "c" / MODEL).model_copy(
        update={"model": {"family": "mamba"}}
    ).save(tmp_path / "c" / MODEL)
    with pytest.raises(RunError, match=r"a model that this version does not know: model.family"):
        read_origin(tmp_path / "c")


_WORKER = """
import os, sys
from functools import partial
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from slurmllm.backends.base import Worker, load_backend
from slurmllm.backends.native.parallel import apply_tensor_parallel
from slurmllm.checkpoint.state import read_origin
from checkpoint.pretend import save
from slurmllm.checkpoint.state import TrainState, fingerprint
from slurmllm.checkpoint.formats.weights import VOCABULARY
from slurmllm.checkpoint.formats.weights import weight_reader
from slurmllm.config.load import load
from slurmllm.control.plane import open_control
from slurmllm.control.plane import open_control
from slurmllm.model.decoder import build_model
from slurmllm.model.init import fill
from slurmllm.plan.mesh import make_mesh
from slurmllm.run.rundir import RunDir

def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

def check(model, config, folder):
    # Filled again, every share is what it was; padding rows may have been drawn at random.
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        local(parameter).fill_(7.0)
    fill(model, weight_reader(folder, config))
    for name, parameter in model.named_parameters():
        now = local(parameter)
        kept = now != 0 if name in VOCABULARY else torch.ones_like(now, dtype=torch.bool)
        assert torch.equal(now[kept], before[name][kept]), name

run, rank = RunDir(Path(sys.argv[1])), int(os.environ["RANK"])
config = load(run.config)
worker, control = Worker(rank, 4, rank, "node"), open_control(rank, 4)
backend = load_backend("native")(config, make_mesh(config, 1), worker, control)
backend.start()
backend.build(partial(build_model, config.recipe.model))
backend.build_optimizer()
state = TrainState(step=3, tokens=9, data={}, fingerprint=fingerprint(config.recipe, "c", "t"))
save(run, backend, state, attempt=0)
torch.set_grad_enabled(False)
for chunk in backend.chunks:
    check(chunk, config.recipe.model, run.checkpoint(3))

for shape in ((2, 2), (4, 1)):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    for family in ("neox", "llama", "gpt3"):
        folder = run.path / family
        config = read_origin(folder).model.model_copy(update={"vocab_pad_multiple": 16})
        model = build_model(config)
        fill(model, weight_reader(folder, config))
        if shape[1] > 1:
            apply_tensor_parallel(model, mesh["tensor"], sequence=False)
        for block in model.blocks():
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        check(model, config, folder)
control.barrier()  # rank 0 has the store that the others still connect by
backend.stop()
"""


def test_checkpoints_and_meshes(tmp_path: Path) -> None:
    overrides = (
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "model.vocab_size=401",
        "train.micro_batch=4",
        "model.vocab_pad_multiple=16",
        "cluster.devices_per_node=4",
        "model.family=gpt3",  # first and last stage both hold the embedding
    )
    run = make_run(tmp_path / "run", make_data(tmp_path), *overrides)
    for family in ("neox", "llama", "gpt3"):
        # Of 40, 44, 28, … rows in 3 layers the workers get unequal shares.
        write(run.path / family, config(family))
    gang = Gang(run, world=4, entry=_WORKER)
    assert gang.wait(280) == [0] * 4, gang.output()
    recipe = load(run.config).recipe
    whole = build_model(recipe.model)
    initialize(whole, recipe.model, recipe.train.seed)
    resumed = build_model(recipe.model)
    fill(resumed, weight_reader(run.checkpoint(3), recipe.model))
    rows = recipe.model.vocab_size
    for name, parameter in whole.named_parameters():
        loaded = resumed.get_parameter(name)
        if parameter.shape[0] == recipe.model.padded_vocab_size:
            assert not loaded[rows:].any()
            parameter, loaded = parameter[:rows], loaded[:rows]
        assert torch.equal(parameter, loaded), name
    run_export(plan_export(run.checkpoint(3), TokenizerFiles({})), tmp_path / "hub", 10**5)
    run_import(plan_import(tmp_path / "hub"), tmp_path / "ours", 10**5)
    assert read_origin(tmp_path / "ours").model.vocab_size == rows
    fill(whole, weight_reader(tmp_path / "ours", recipe.model))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name
    assert file_faults(tmp_path / "ours", read_manifest(tmp_path / "ours").files) == []
    shard = next(run.checkpoint(3).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(StorageError, match=r"cannot read .* from "):
        fill(resumed, weight_reader(run.checkpoint(3), recipe.model))
    (run.checkpoint(3) / ".metadata").write_bytes(b"\x80")
    with pytest.raises(StorageError, match=r"\.metadata is damaged"):
        fill(resumed, weight_reader(run.checkpoint(3), recipe.model))
