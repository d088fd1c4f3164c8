"""From one backend's format to the other's, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import sample
from safetensors.torch import save_file
from torch import Tensor
from train.gang import make_data, make_run

from checkpoint.conftest import Run
from checkpoint.nxd_folders import (
    Layout,
    Whole,
    nxd_checkpoint,
    random_whole,
    stage_names,
    with_manifest,
    write_nxd,
)
from checkpoint.test_nxd_files import HALF, assert_holds
from slurmllm.checkpoint.folder import file_faults, read_manifest
from slurmllm.checkpoint.formats import converting
from slurmllm.checkpoint.formats.converting import (
    NxdMesh,
    mesh_of_run,
    plan_conversion,
    run_conversion,
)
from slurmllm.checkpoint.formats.safetensors_files import write_index
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
    "llama": (Layout(4, 2, 1, zero=False), NxdMesh(8, 1, 2)),
    "qwen3": (Layout(2, 2, 3), NxdMesh(4, 1, 2)),
    "gpt3": (Layout(1, 4, 2), NxdMesh(2, 2, 2, virtual_pipeline=2)),
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
    names = json.loads((out / "nxd_layout.json").read_text())["names"]
    assert [sorted(part) for part in names] == [sorted(p) for p in stage_names(whole, len(names))]
    saved_dtype = "bfloat16" if precision in ("bf16", "bf16_sr") else "float32"
    dtype = "float32" if precision == FP32 else "bfloat16"
    rounded = Whole(
        whole.model, *(_to(part, saved_dtype) for part in (whole.weights, whole.moments))
    )
    layout = Layout(mesh.tensor, mesh.pipeline, mesh.data, mesh.zero, dtype, saved_dtype)
    write_nxd(tmp_path / "expected", rounded, layout, names)
    files, expected = files_of(out), files_of(tmp_path / "expected")
    assert_equal(without_groups(files), without_groups(expected))
    made = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    for name, content in files.items():
        if "/optim/" in name:
            part = names[int(name[-5:-3])]
            matrices = [i for i, key in enumerate(part) if whole.weights[key].dim() > 1]
            groups = content["param_groups"]
            others = list(range(len(matrices), len(part)))
            assert [group["params"] for group in groups] == [matrices, others]
            assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
            assert all(group.keys() == made.keys() for group in groups)
    assert (out / "nxd/done").read_text() == (out / "nxd/checkpoint").read_text() == "1"


def _to(tensors: Any, dtype: str) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.to(getattr(torch, dtype))
    return {name: _to(value, dtype) for name, value in tensors.items()}


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


@pytest.mark.parametrize(
    ("backend", "zero", "expected", "precision"),
    [("nxd", 0, False, "fp32"), ("native", 0, True, "bf16_mixed")],
)
def test_the_mesh_of_the_run_around(
    run: Run, tmp_path: Path, backend: str, zero: int, expected: bool, precision: str
) -> None:
    """It is NxD's unless another is named, and so are precision and the optimizer's groups."""
    whole = random_whole("neox")
    model = (f"model.{key}={value}" for key, value in whole.model.model_dump().items() if value)
    around = make_run(
        tmp_path / "around",
        make_data(tmp_path),
        *model,
        *("optim.weight_decay=0.25", "optim.betas=[0.5, 0.25]", f"train.precision={precision}"),
        f"backend={backend}",
        f"parallel.zero={zero}",
        "train.global_batch=12",
    )
    path = around.checkpoint(7)
    run_conversion(
        plan_conversion(nxd_checkpoint(tmp_path / "first", whole, Layout(2)), None), path
    )

    def degrees() -> list[int]:
        layout = plan_conversion(path, mesh_of_run(path)).layout
        assert layout is not None
        return [layout.tensor, layout.pipeline, layout.data, layout.zero]

    around.plan.unlink(missing_ok=True)
    assert degrees() == [1, 1, 1, True]
    save_mesh(PlanMesh(2, 6, 2, 2, 3, 12, 1), around.plan)
    assert degrees() == [2, 2, 3, expected]
    result = run(path, "--to", "nxd", "--out", "o", "--json", "--tensor", 4, "--precision", "fp32")
    assert result.exit_code == 0, result.output
    layout = json.loads(result.stdout)["layout"]
    assert [layout[key] for key in ("tensor", "pipeline", "data")] == [4, 2, 3]
    plan = plan_conversion(path, NxdMesh(2))
    assert (plan.known_optim, plan.precision) == (True, precision)
    run_conversion(plan, tmp_path / "groups")
    for file in (tmp_path / "groups").glob("nxd/optim/*"):
        groups = torch.load(file)["param_groups"]
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert all(group["betas"] == (0.5, 0.25) for group in groups)


def test_a_file_larger_than_memory_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nxd_checkpoint(tmp_path / "first", random_whole("neox"), Layout(2))
    plan = plan_conversion(first, NxdMesh(2, 2, 3))
    run_conversion(plan, tmp_path / "out")
    largest = max(
        sum(tensor.nbytes for tensor in tensors_of(held))
        for held in files_of(tmp_path / "out").values()
    )
    assert 0.98 * largest <= plan.held_bytes <= largest  # but for counts of steps
    monkeypatch.setattr(converting, "free_memory", lambda: plan.held_bytes)
    plan_conversion(first, NxdMesh(2, 2, 3))
    monkeypatch.setattr(converting, "free_memory", lambda: plan.held_bytes - 1)
    plan_conversion(first, None)  # a few pieces at a time
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
        *("c", "--to", "nxd", "--out", "new/out", "--tensor", 8, "--pipeline", 1, "--data", 2),
        "--json",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["format"], document["step"], document["optimizer_state"]) == ("nxd", 7, True)
    assert document["layout"]["tensor"] == 8
    assert document["files"] == len([p for p in (tmp_path / "new/out").rglob("*") if p.is_file()])
    assert_holds(open_training(tmp_path / "new/out", whole.model), whole)
    assert read_manifest(tmp_path / "new/out").world_size == 16
    result = run("new/out", "--to", "native", "--out", "native")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("native: step 7, fp32, ")
    repeated = run("new/out", "--to", "native", "--out", "native")
    assert repeated.exit_code == 2
    assert "native is not empty" in repeated.output
