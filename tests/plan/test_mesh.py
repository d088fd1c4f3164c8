"""Mesh degrees and batch arithmetic."""

from __future__ import annotations

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.errors import ConfigError
from slurmllm.plan.mesh import make_mesh


def test_neox_20b_on_four_nodes_as_in_the_aws_run() -> None:
    mesh = make_mesh(resolve("neox_20b"), 4)
    assert (mesh.world_size, mesh.tensor, mesh.pipeline, mesh.data) == (128, 8, 4, 4)
    assert mesh.accumulation == 64


def test_data_ranks_share_out_evenly_and_tensor_groups_agree() -> None:
    mesh = make_mesh(resolve("neox_20b"), 4)
    shares = [mesh.data_rank(rank) for rank in range(mesh.world_size)]
    assert all(shares.count(share) == 32 for share in range(4))
    assert all(len(set(shares[first : first + 8])) == 1 for first in range(0, 128, 8))


@pytest.mark.parametrize(
    ("recipe", "nodes", "words"),
    [
        ("neox_20b", 6, "not a multiple of 6 data-parallel"),
        ("tiny_neox", 3, "choose 1, 2 or 4 nodes"),
        ("tiny_neox", 8, "choose 1, 2 or 4 nodes"),
        ("tiny_neox", 0, "less than 1"),
    ],
)
def test_a_mesh_that_does_not_fit_names_one_that_does(recipe: str, nodes: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_mesh(resolve(recipe), nodes)
    assert words in str(caught.value)


def test_degrees_that_do_not_divide_the_workers() -> None:
    config = resolve("tiny_neox", overrides=["parallel.tensor=2"])
    with pytest.raises(ConfigError, match="does not divide the 3 workers"):
        make_mesh(config, 3)
