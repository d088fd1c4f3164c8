"""Hybrid shards: what a node has of the model, and what still crosses the network."""

from __future__ import annotations

import pytest

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import resolve
from slurmllm.plan.estimate import LayoutEstimate, hybrid, predict
from slurmllm.plan.explain import explain
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.search import search

FULL = ("parallel.tensor=1", "parallel.zero=3", "train.micro_batch=2")


def layout(recipe: str, nodes: int, *overrides: str) -> LayoutEstimate:
    config = resolve(recipe, overrides=overrides)
    return predict(config, make_mesh(config, nodes))


def test_a_node_holds_the_whole_state() -> None:
    own = layout("gpt3_1.3b", 8, *FULL)
    found = hybrid(own)
    assert found is not None
    assert found.mesh == own.mesh
    assert found.memory.parts["optimizer"] == pytest.approx(8 * own.memory.parts["optimizer"], 0.01)
    assert found.memory.parts["activations"] == own.memory.parts["activations"]
    before, after = own.step.parts(), found.step.parts()
    assert after["data"] < before["data"], "gathered inside the node"
    assert after["optimizer"] == pytest.approx(8 * before["optimizer"])
    for part in ("compute", "recompute", "tensor", "bubble", "transfer", "overhead"):
        assert after[part] == pytest.approx(before[part])


@pytest.mark.parametrize(
    ("recipe", "nodes", "overrides"),
    [
        ("gpt3_1.3b", 1, FULL),  # one node's workers are all
        ("gpt3_1.3b", 8, ("parallel.tensor=8", "parallel.zero=3", "train.micro_batch=2")),
        ("gpt3_1.3b", 8, ("parallel.pipeline=2", "train.micro_batch=2")),
        ("llama2_7b", 8, ()),  # neuronx-distributed shards no weights
    ],
)
def test_where_there_are_none(recipe: str, nodes: int, overrides: tuple[str, ...]) -> None:
    assert hybrid(layout(recipe, nodes, *overrides)) is None


def test_they_are_explained_as_planning_only() -> None:
    config = resolve("gpt3_1.3b")
    found = search(config, 4, load_environment(config.backend).unsupported)
    (line,) = [one for one in explain(found.fitting, found.too_large) if "hybrid" in one]
    assert "for planning only: no backend trains with them) would" in line
