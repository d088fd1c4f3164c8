"""Mesh degrees and batch arithmetic."""

import json
from pathlib import Path

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.plan.mesh import load_mesh, make_mesh, micro_batches, save_mesh
from slurmllm.train.backends.environment import load_environment


@pytest.mark.parametrize(
    ("recipe", "nodes", "message"),
    [
        ("neox_20b", 6, "not a multiple of 6 data-parallel"),
        ("tiny_neox", 3, "choose 2 or 4 nodes, or set train.global_batch to 6 (25 % fewer) or 12"),
        ("tiny_neox", 8, "choose 4 nodes, or set train.global_batch to 16 (2 times as many)"),
        ("tiny_neox", 0, "less than 1"),
        ("one", 2, "choose 1 node, or set train.global_batch to 2"),
        ("two", 3, "does not divide the 3 workers of 3 nodes × 1; choose 2 or 4 nodes, or"),
        ("two", 1, "the 1 workers of 1 node × 1; choose 2 nodes,"),
    ],
)
def test_meshes_that_do_not_fit_name_one_that_does(recipe: str, nodes: int, message: str) -> None:
    changes = {"one": ["train.global_batch=1", "train.micro_batch=1"], "two": ["parallel.tensor=2"]}
    name = "tiny_neox" if recipe in changes else recipe
    with pytest.raises(ConfigError) as caught:
        make_mesh(resolve(name, overrides=changes.get(recipe, [])), nodes)
    assert message in str(caught.value)


AUTO = "train.micro_batch=auto"


def test_a_plan_with_an_unmeasured_micro_batch_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    mesh = make_mesh(resolve("tiny_neox", overrides=[AUTO]), 2)
    assert mesh.unmeasured
    assert (mesh.to_json()["micro_batch"], mesh.to_json()["accumulation"]) == (None, None)
    save_mesh(mesh, tmp_path / "plan.json")
    assert load_mesh(tmp_path / "plan.json") == mesh
    older = {name: value for name, value in mesh.to_json().items() if name != "replicate"}
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert load_mesh(tmp_path / "plan.json") == mesh
    plan = tmp_path / "a_plan.json"
    with pytest.raises(StorageError, match=r"cannot read .*plan\.json"):
        load_mesh(plan)
    plan.write_text('{"nodes": 1}')
    with pytest.raises(StorageError, match="`slurmllm resume` writes it again"):
        load_mesh(plan)


@pytest.mark.parametrize(
    ("nodes", "micro_batch", "accumulation"), [(2, 6, 2), (3, 4, 2), (24, 1, 1)]
)
def test_a_measured_micro_batch_fits_every_node_count(
    tmp_path: Path, nodes: int, micro_batch: int, accumulation: int
) -> None:
    config = resolve("tiny_neox", overrides=[AUTO, "train.global_batch=24"])
    mesh = make_mesh(config, nodes, measured=7)
    assert (mesh.micro_batch, mesh.accumulation) == (micro_batch, accumulation)
    assert mesh.data * mesh.micro_batch * mesh.accumulation == 24
    assert not mesh.unmeasured
    save_mesh(mesh, tmp_path / "plan.json")
    assert load_mesh(tmp_path / "plan.json") == mesh


@pytest.mark.parametrize(
    ("pipeline", "virtual", "fitting"),
    [
        (1, 1, [1, 2, 3, 4, 6, 12]),
        (4, 1, [1, 2, 3]),  # as many micro batches as stages, or more
        (16, 1, [1, 2, 3, 4, 6, 12]),  # there is no such cut
        (2, 2, [1, 2, 3, 6]),
        (5, 2, []),
    ],
)
def test_micro_batches_that_fit_a_pipeline(pipeline: int, virtual: int, fitting: list[int]) -> None:
    assert micro_batches(12, pipeline, virtual) == fitting


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        ([AUTO], 3, "8 sequences are not a multiple of 3 data-parallel workers; choose 2 or 4"),
        (
            ["parallel.virtual_pipeline=2", "train.micro_batch=4"],
            4,
            "micro batches in rounds of 2 (parallel.pipeline), and train.micro_batch 4 makes 1 a "
            "step; choose 1 or 2",
        ),
        (
            [AUTO, "parallel.virtual_pipeline=2", "train.global_batch=6"],
            4,
            "gives each of 2 data-parallel workers 3 sequences; make it a multiple of 4",
        ),
    ],
)
def test_batches_that_do_not_fit(overrides: list[str], nodes: int, message: str) -> None:
    pipeline = ["parallel.pipeline=2"] if "virtual" in "".join(overrides) else []
    with pytest.raises(ConfigError) as caught:
        make_mesh(resolve("tiny_neox", overrides=[*pipeline, *overrides]), nodes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "per_node", "nodes", "expected"),
    [(8, 1, 8, 4, 1), (8, 4, 8, 8, 4), (2, 3, 4, 6, 3)],
)
def test_precompile_takes_whole_replicas(
    tensor: int, pipeline: int, per_node: int, nodes: int, expected: int
) -> None:
    overrides = [
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"cluster.devices_per_node={per_node}",
        "model.num_layers=12",
        "model.num_heads=8",
    ]
    config = resolve("tiny_neox", overrides=overrides)
    assert load_environment("native").precompile_nodes(config, nodes) == expected
    assert load_environment("nxd").precompile_nodes(config, nodes) == nodes


def test_nothing_measures_the_micro_batch_on_neuron_devices() -> None:
    config = resolve("gpt3_125m", "trn1")
    assert config.recipe.train.micro_batch == "auto"
    mesh = make_mesh(config, 1)
    assert (mesh.micro_batch, mesh.accumulation, mesh.unmeasured) == (1, 8, False)
