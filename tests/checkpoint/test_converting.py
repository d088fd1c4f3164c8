"""From one backend's format to the other's, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import sample
from safetensors.torch import load_file, save_file
from torch import Tensor
from train.gang import make_data, make_run

from checkpoint.conftest import Run
from checkpoint.nxd_folders import (
    Layout,
    Whole,
    nxd_checkpoint,
    random_whole,
    stage_names,
    tensor_part,
    with_manifest,
    zero_shard,
)
from checkpoint.test_nxd_files import HALF, assert_holds
from slurmllm.checkpoint.folder import file_faults, read_manifest
from slurmllm.checkpoint.formats.converting import NxdMesh, plan_conversion, run_conversion
from slurmllm.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.checkpoint.formats.safetensors_files import write_index
from slurmllm.checkpoint.formats.tokenizer_files import TokenizerFiles
from slurmllm.checkpoint.formats.weights import open_training, open_weights, weight_reader
from slurmllm.checkpoint.state import INDEX, MODEL, TRAIN_STATE, TrainState, read_origin
from slurmllm.errors import StorageError
from slurmllm.plan.mesh import Mesh as PlanMesh
from slurmllm.plan.mesh import save_mesh
from slurmllm.run.artifact_records import ImportedModel

FP32 = "fp32"


def convert(source: Path, out: Path, mesh: NxdMesh | None, precision: Any = None) -> Path:
    run_conversion(plan_conversion(source, mesh, precision), out)
    assert file_faults(out, read_manifest(out).files) == []
    assert read_origin(out) == read_origin(source)._replace(directory=out)
    return out


def files_of(folder: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(folder)): torch.load(p, weights_only=True) for p in folder.rglob("*.pt")
    }


def without_groups(files: dict[str, Any]) -> dict[str, Any]:
    """Without what the native format does not keep."""
    return {
        name: {key: value for key, value in held.items() if key != "param_groups"}
        for name, held in files.items()
    }


def assert_equal(a: Any, b: Any, way: str = "") -> None:
    assert type(a) is type(b), way
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, way
        assert torch.equal(a, b), way
    elif isinstance(a, Mapping):
        assert set(a) == set(b), way
        for key in a:
            assert_equal(a[key], b[key], f"{way}/{key}")
    else:
        assert a == b, way


MESHES = {
    "neox": (Layout(2, 1, 3), NxdMesh(4, 2, 2)),
    "llama": (Layout(4, 2, 1, zero=False), NxdMesh(8, 1, 3)),
    "qwen3": (Layout(2, 2, 3), NxdMesh(4, 1, 2)),
    "gpt3": (Layout(1, 4, 2), NxdMesh(4, 2, 3, virtual_pipeline=2)),
}


@pytest.mark.parametrize("family", sample(2, ["gpt3", "llama", "neox", "qwen3"]))
def test_there_and_back(family: str, tmp_path: Path) -> None:
    whole = random_whole(family)
    before, after = MESHES[family]
    first = nxd_checkpoint(tmp_path / "first", whole, before)
    native = convert(first, tmp_path / "native", None)
    assert (native / ".metadata").is_file()
    assert_holds(open_training(native, whole.model), whole)
    other = convert(native, tmp_path / "other", after)
    assert_holds(open_training(other, whole.model), whole)
    assert_holds(open_training(convert(other, tmp_path / "again", None), whole.model), whole)
    moved = convert(first, tmp_path / "moved", after)
    assert_equal(without_groups(files_of(moved)), without_groups(files_of(other)))
    state = TrainState.load(first / TRAIN_STATE)
    for folder in (native, other, moved):
        assert TrainState.load(folder / TRAIN_STATE) == state
        manifest = read_manifest(folder)
        assert (manifest.step, manifest.tokens, manifest.attempt) == (7, 700, 2)


@pytest.mark.parametrize(
    ("family", "mesh", "precision"),
    sample(
        2,
        [
            ("llama", NxdMesh(4, 2, 1, zero=False), "bf16_sr"),
            ("gpt3", NxdMesh(1, 2, 2), "bf16_mixed"),
            ("llama", NxdMesh(8, 1, 5), FP32),
            ("neox", NxdMesh(2, 2, 3), "bf16_mixed"),
            ("gpt3", NxdMesh(4, 1, 3), "bf16"),
        ],
        arguments=3,
    ),
)
def test_nxd_s_files(family: str, mesh: NxdMesh, precision: str, tmp_path: Path) -> None:
    """Every file holds what the format's rules, written out in the tests, say."""
    whole = random_whole(family, seed=4)
    native = convert(nxd_checkpoint(tmp_path / "first", whole, Layout()), tmp_path / "native", None)
    out = convert(native, tmp_path / "out", mesh, precision)
    dtype = torch.float32 if precision == FP32 else torch.bfloat16
    weight_dtype = torch.bfloat16 if precision in ("bf16", "bf16_sr") else torch.float32
    layout = json.loads((out / "nxd_layout.json").read_text())
    files = files_of(out)
    assert sorted(sorted(names) for names in layout["names"]) == sorted(
        sorted(names) for names in stage_names(whole, mesh.pipeline)
    )
    expected: set[str] = set()
    for stage, names in enumerate(layout["names"]):
        for rank in range(mesh.tensor):
            place = f"tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            parts = [
                tensor_part(whole.model, n, whole.weights[n], mesh.tensor, rank) for n in names
            ]
            weights = dict(zip(names, (part.to(dtype) for part in parts), strict=True))
            if whole.model.tied_embeddings and stage == mesh.pipeline - 1:
                weights["head.weight"] = weights["embed.weight"]
                if mesh.pipeline > 1:
                    del weights["embed.weight"]
            expected.add(f"nxd/model/dp_rank_00_{place}")
            assert_equal(files[f"nxd/model/dp_rank_00_{place}"], weights)
            for replica in range(mesh.data if mesh.zero else 1):
                name = f"nxd/optim/dp_rank_{replica:02d}_{place}"
                expected.add(name)
                _check_optimizer(
                    files[name],
                    whole,
                    names,
                    mesh,
                    rank,
                    replica,
                    weight_dtype,
                    masters=weight_dtype != dtype,
                )
    assert set(files) == expected
    assert (out / "nxd/done").read_text() == (out / "nxd/checkpoint").read_text() == "1"


def _check_optimizer(
    held: dict[str, Any],
    whole: Whole,
    names: list[str],
    mesh: NxdMesh,
    rank: int,
    replica: int,
    dtype: torch.dtype,
    *,
    masters: bool,
) -> None:
    def shard(tensor: Tensor, name: str) -> Tensor:
        part = tensor_part(whole.model, name, tensor, mesh.tensor, rank)
        return (zero_shard(part, mesh.data, replica) if mesh.zero else part).to(dtype)

    state = {
        number: {
            "step": torch.tensor(7.0),
            **{kind: shard(tensors[name], name) for kind, tensors in whole.moments.items()},
        }
        for number, name in enumerate(names)
    }
    groups = held.pop("param_groups")
    matrices = [number for number, name in enumerate(names) if whole.weights[name].dim() > 1]
    assert [group["params"] for group in groups] == [
        matrices,
        list(range(len(matrices), len(names))),
    ]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    made = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    assert all(group.keys() == made.keys() for group in groups)
    if not mesh.zero:
        assert_equal(held, {"state": state})
        return
    expected: dict[str, Any] = {
        "state": {},
        "base_state": state,
        "shape_info": {
            number: tensor_part(whole.model, name, whole.weights[name], mesh.tensor, rank).shape
            for number, name in enumerate(names)
        },
    }
    if masters:
        expected["sharded_master_weights"] = {
            number: shard(whole.weights[name], name) for number, name in enumerate(names)
        }
    assert_equal(held, expected)


def test_hyperparameters_stay(tmp_path: Path) -> None:
    """Of a checkpoint that lies in no run, those in NxD's own files."""
    whole = random_whole("neox")
    first = nxd_checkpoint(tmp_path / "first", whole, Layout(2))
    names = stage_names(whole, 1)[0]
    hyper = {"lr": 0.5, "betas": [0.8, 0.7], "eps": 1e-4, "weight_decay": 0.3}
    for path in first.glob("nxd/optim/*"):
        held = torch.load(path)
        held["param_groups"] = [{**hyper, "params": list(range(len(names)))}]
        torch.save(held, path)
    with_manifest(first)
    for mesh in (NxdMesh(1, 2), NxdMesh(1, 2, zero=False)):
        plan = plan_conversion(first, mesh)
        assert plan.known_optim
        run_conversion(plan, tmp_path / str(mesh.zero))
        for path in (tmp_path / str(mesh.zero)).glob("nxd/optim/*"):
            for group in torch.load(path)["param_groups"]:  # norms and biases decay as well
                assert {key: group[key] for key in hyper} == {**hyper, "betas": (0.8, 0.7)}
    native = convert(first, tmp_path / "native", None)
    assert not plan_conversion(native, NxdMesh()).known_optim


def test_a_run_s_recipe(tmp_path: Path) -> None:
    """Around a checkpoint, it says what the optimizer's groups hold, and the precision."""
    whole = random_whole("neox")
    first = nxd_checkpoint(tmp_path / "first", whole, Layout(2))
    model = (f"model.{key}={value}" for key, value in whole.model.model_dump().items() if value)
    run = make_run(
        tmp_path / "run",
        make_data(tmp_path),
        *model,
        "optim.weight_decay=0.25",
        "optim.betas=[0.5, 0.25]",
        "train.precision=bf16_mixed",
    )
    native = convert(first, run.checkpoint(7), None)
    plan = plan_conversion(native, NxdMesh(2))
    assert plan.known_optim
    assert plan.precision == "bf16_mixed"
    run_conversion(plan, tmp_path / "out")
    for path in (tmp_path / "out").glob("nxd/optim/*"):
        groups = torch.load(path)["param_groups"]
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert all(group["betas"] == (0.5, 0.25) for group in groups)


@pytest.mark.parametrize(
    ("backend", "zero", "expected"),
    [("nxd", 0, False), ("nxd", 1, True), ("native", 0, True)],
)
def test_the_mesh_of_the_run_around(
    run: Run, tmp_path: Path, backend: str, zero: int, expected: bool
) -> None:
    """It is NxD's unless another is named, a part of it or all."""
    whole = random_whole("neox")
    model = (f"model.{key}={value}" for key, value in whole.model.model_dump().items() if value)
    around = make_run(
        tmp_path / "around",
        make_data(tmp_path),
        *model,
        f"backend={backend}",
        f"parallel.zero={zero}",
        "train.global_batch=12",
    )
    path = around.checkpoint(7)
    run_conversion(
        plan_conversion(nxd_checkpoint(tmp_path / "first", whole, Layout(2)), None), path
    )

    def layout(*options: object) -> dict[str, Any]:
        out = f"out{len(list(tmp_path.iterdir()))}"
        result = run(path, "--to", "nxd", "--out", out, "--json", *options)
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout)["layout"])

    around.plan.unlink(missing_ok=True)
    assert {key: layout()[key] for key in ("tensor", "pipeline", "data")} == {
        "tensor": 1,
        "pipeline": 1,
        "data": 1,
    }
    save_mesh(PlanMesh(2, 6, 2, 2, 3, 12, 1), around.plan)
    layout_of_run = layout()
    assert [layout_of_run[key] for key in ("tensor", "pipeline", "data")] == [2, 2, 3]
    assert layout_of_run["zero"] is expected
    layout_of_run = layout("--tensor", 4, "--no-zero")
    degrees = [layout_of_run[key] for key in ("tensor", "pipeline", "data", "zero")]
    assert degrees == [4, 2, 3, False]


@pytest.mark.parametrize("zero", [True, False])
def test_a_file_larger_than_memory_is_refused(
    zero: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random_whole("neox")
    first = nxd_checkpoint(tmp_path / "first", whole, Layout(2))
    plan = plan_conversion(first, NxdMesh(2, 2, 3, zero=zero))
    run_conversion(plan, tmp_path / "out")
    largest = max(
        sum(tensor.nbytes for tensor in tensors_of(held))
        for held in files_of(tmp_path / "out").values()
    )
    assert 0.98 * largest <= plan.held_bytes <= largest  # but for counts of steps
    monkeypatch.setattr(
        "slurmllm.checkpoint.formats.converting.free_memory", lambda: plan.held_bytes
    )
    plan_conversion(first, NxdMesh(2, 2, 3, zero=zero))
    plan_conversion(first, None)  # a few pieces at a time
    monkeypatch.setattr(
        "slurmllm.checkpoint.formats.converting.free_memory", lambda: plan.held_bytes - 1
    )
    plan_conversion(first, None)
    result = run("first", "--to", "nxd", "--out", "refused", "--tensor", 2)
    assert result.exit_code == 2
    assert "GB are free; split it over more workers with --tensor, --pipeline" in result.output
    assert not (tmp_path / "refused").exists()


def tensors_of(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    inner = held.values() if isinstance(held, Mapping) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


def test_precisions(tmp_path: Path) -> None:
    whole = random_whole("neox")
    first = nxd_checkpoint(tmp_path / "first", whole, Layout(2, data=2, dtype="bfloat16"))
    plan = plan_conversion(first, NxdMesh(1, 2, 3))
    assert plan.precision == "bf16_mixed"
    assert plan.layout is not None
    assert (plan.layout.dtype, plan.layout.optimizer_dtype) == ("bfloat16", "float32")
    half = random_whole("neox", dtype=torch.bfloat16)
    pure = nxd_checkpoint(tmp_path / "pure", half, Layout(2, **HALF))
    native = convert(pure, tmp_path / "native", None)
    assert_holds(open_training(native, half.model), half)
    assert plan_conversion(native).precision == "bf16"
    rounded = convert(first, tmp_path / "rounded", None, "bf16_sr")
    assert_holds(open_training(rounded, half.model), half)


@pytest.mark.parametrize("family", sample(1, ["gpt3", "qwen3", "neox", "llama"]))
def test_exports_are_equal(family: str, tmp_path: Path) -> None:
    whole = random_whole(family)
    first = nxd_checkpoint(tmp_path / "first", whole, MESHES[family][0])
    native = convert(first, tmp_path / "native", None)
    hubs = []
    for source in (first, native):
        out = tmp_path / f"hub-{source.name}"
        run_export(plan_export(source, TokenizerFiles({})), out, 10**9)
        hubs.append(load_file(out / "model.safetensors"))
    assert_equal(*hubs)
    assert len(hubs[0]) >= len(whole.weights)


def imported(folder: Path, whole: Whole) -> Path:
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in whole.weights.items()}, folder / "weights")
    write_index(folder / INDEX, dict.fromkeys(whole.weights, "weights"), 0)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer_config.json").write_text("{}")
    ImportedModel(
        source="", architecture="", model=whole.model.model_dump(), parameters=0, dtypes=()
    ).save(folder / MODEL)
    return with_manifest(folder)


@pytest.mark.parametrize("backend", ["nxd", "native"])
def test_an_imported_model(backend: str, run: Run, tmp_path: Path) -> None:
    whole = random_whole("llama")
    imported(tmp_path / "c", whole)
    mesh = ("--tensor", 4, "--pipeline", 2) if backend == "nxd" else ()
    result = run("c", "--to", backend, "--out", "out", *mesh)
    assert result.exit_code == 0, result.output
    assert "no optimizer state" in result.stdout
    assert "train.init_from=out" in result.stdout
    weights = open_weights(read_origin(tmp_path / "out"))
    read = weight_reader(tmp_path / "out", whole.model)
    for name, expected in whole.weights.items():
        assert torch.equal(weights.read(name), expected)
        rows = (slice(0, whole.model.vocab_size if name in ("embed.weight", "head.weight") else 2),)
        rest = tuple(slice(0, size) for size in expected.shape[1:])
        assert torch.equal(read(name, (*rows, *rest)), expected[rows[0]])
    with pytest.raises(StorageError, match=r"no optimizer state; .* train.init_from"):
        open_training(tmp_path / "out", whole.model)
    assert (tmp_path / "out/tokenizer/tokenizer_config.json").read_text() == "{}"
    assert not (tmp_path / "out/nxd/optim").exists()


def test_the_command(run: Run, tmp_path: Path) -> None:
    whole = random_whole("llama")
    nxd_checkpoint(tmp_path / "c", whole, Layout(2))
    result = run(
        *("c", "--to", "nxd", "--out", "new/out", "--tensor", 8, "--pipeline", 2, "--data", 3),
        "--json",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["format"], document["step"], document["optimizer_state"]) == ("nxd", 7, True)
    assert document["layout"]["tensor"] == 8
    assert document["files"] == len([p for p in (tmp_path / "new/out").rglob("*") if p.is_file()])
    assert_holds(open_training(tmp_path / "new/out", whole.model), whole)
    assert read_manifest(tmp_path / "new/out").world_size == 48
    result = run("new/out", "--to", "native", "--out", "native")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("native: step 7, fp32, ")
    repeated = run("new/out", "--to", "native", "--out", "native")
    assert repeated.exit_code == 2
    assert "native is not empty" in repeated.output
