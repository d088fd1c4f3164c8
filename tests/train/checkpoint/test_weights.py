"""Filling models, whole or shared out, from imported and from a run's checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.run.artifact_records import ImportedModel
from slurmllm.train.checkpoint.formats.safetensors_files import plan_shards, write_index
from slurmllm.train.checkpoint.formats.weights import weight_reader
from slurmllm.train.checkpoint.state import INDEX, MODEL, read_origin, require_model
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import fill, initialize


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


@pytest.mark.parametrize("family", ["neox", "gpt3"])
def test_padding_rows_are_0(family: str, tmp_path: Path) -> None:
    held = write(tmp_path / "c", config(family))
    padded = config(family, vocab_pad_multiple=16)
    model = build_model(padded)
    fill(model, weight_reader(tmp_path / "c", padded))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter[: len(held[name])], held[name])
        assert not parameter[len(held[name]) :].any()


def test_buffers_are_computed_and_types_converted(tmp_path: Path) -> None:
    stored = config("llama")
    held = write(tmp_path / "c", stored)
    with torch.device("meta"):
        model = build_model(stored)
    model.to_empty(device="cpu").to(torch.bfloat16)
    fill(model, weight_reader(tmp_path / "c", stored))
    tables = [module.get_buffer("rotary_0") for module in (model, build_model(stored))]
    assert torch.equal(tables[0], tables[1].to(torch.bfloat16))
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
