"""Shards over some nodes and copies on others, and why a layout is the best, in words."""

import itertools
import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import hypothesis
import pytest
from amounts import amount
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.core.config.resolve import resolve
from slurmllm.core.config.validate import PLANNER
from slurmllm.core.errors import ConfigError
from slurmllm.plan.choose_layout import choose_parallel, layout_text
from slurmllm.plan.explain import explain, settings, why_too_large
from slurmllm.plan.mesh import adapt_to_nodes, make_mesh
from slurmllm.plan.search import LayoutEstimate, SearchResult, predict, search
from slurmllm.train.backends.environment import load_environment

FULL = (
    *("parallel.tensor=1", "parallel.pipeline=1", "parallel.zero=3", "train.micro_batch=2"),
    *("train.global_batch=512", "train.precision=bf16_mixed"),
)


def layout(*overrides: str, nodes: int = 8, cluster: str = "p5") -> LayoutEstimate:
    config = resolve("gpt3_1.3b", cluster, [*FULL, *overrides])
    return predict(config, make_mesh(config, nodes))


@pytest.mark.parametrize(("nodes", "expected"), [(8, 4), (12, 4), (6, 6), (2, None)])
def test_what_the_planner_chose_follows_the_nodes(nodes: int, expected: int | None) -> None:
    config = resolve("gpt3_1.3b", "p5", [*FULL, "parallel.shard_nodes=4"])
    assert adapt_to_nodes(config, nodes) == config
    planned = config.with_settings("parallel", {"parallel.shard_nodes": f"{PLANNER}best"})
    assert adapt_to_nodes(planned, nodes).recipe.parallel.shard_nodes == expected


@pytest.mark.parametrize(("tensor", "pipeline", "shard_nodes"), [(4, 2, 2)])
def test_a_copy_is_on_as_many_nodes(tensor: int, pipeline: int, shard_nodes: int) -> None:
    degrees = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}")
    mesh = layout(*degrees, f"parallel.shard_nodes={shard_nodes}").mesh
    assert mesh.replicate * mesh.shard == mesh.data
    assert mesh.replicate == 8 // pipeline // shard_nodes
    copies: dict[tuple[int, int], set[tuple[int, int]]] = {}
    nodes: dict[tuple[int, int], set[int]] = {}
    for rank in range(mesh.world_size):
        copy = mesh.pipeline_rank(rank), mesh.data_rank(rank) // mesh.shard
        copies.setdefault(copy, set()).add((mesh.shard_rank(rank), rank % tensor))
        nodes.setdefault(copy, set()).add(rank // mesh.devices_per_node)
    whole = set(itertools.product(range(mesh.shard), range(tensor)))
    assert all(shards == whole for shards in copies.values())
    assert all(len(of_copy) == shard_nodes for of_copy in nodes.values())
    assert sum(map(len, nodes.values())) == 8, "no two copies share a node"


@pytest.mark.parametrize(
    ("overrides", "nodes", "fault"),
    [
        (
            ("parallel.shard_nodes=3",),
            8,
            "parallel.shard_nodes: 3 (24 workers) does not divide the 64 workers of a pipeline "
            "stage; choose 1, 2, 4 or 8 with --set parallel.shard_nodes, or --set "
            "parallel.shard_nodes=null",
        ),
        (
            ("parallel.shard_nodes=1", "parallel.tensor=8"),
            8,
            "1 (8 workers) is not two or more data-parallel workers of parallel.tensor 8; choose 2",
        ),
        (
            ("parallel.shard_nodes=1", "parallel.pipeline=2"),
            1,
            "the 4 workers of a pipeline stage; --set parallel.shard_nodes=null",
        ),
    ],
)
def test_groups_that_are_refused(overrides: tuple[str, ...], nodes: int, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(*overrides, nodes=nodes)
    assert fault in "\n".join(caught.value.faults)


def test_nxd_shards_over_all_workers() -> None:
    config = resolve("llama2_7b", "trn1", ["parallel.shard_nodes=1", "parallel.zero=1"])
    faults = load_environment("nxd").unsupported(config)
    assert any(fault.startswith("parallel.shard_nodes: 1: neuronx-") for fault in faults)


def test_the_search_ranks_them() -> None:
    """On a network so slow that parameters should not cross it in each micro batch."""
    config = resolve("gpt3_1.3b", "p5", [*FULL, "cluster.hardware.network_gb_s=20"])
    fixed = [f"parallel.{name}" for name in ("tensor", "pipeline", "zero")]
    result = search(config, 8, load_environment(config.backend).unsupported, fixed)
    best = result.fitting[0]
    tried = {estimate.config.recipe.parallel.shard_nodes for estimate in result.fitting}
    assert {None, 1} < tried <= {None, 1, 2, 4}
    nodes = best.config.recipe.parallel.shard_nodes
    assert nodes is not None
    assert settings(best)["shard_nodes"] == nodes
    assert f"over {nodes} node" in best.description
    copies = f"({best.mesh.replicate} copies of {best.mesh.shard} shards)"
    assert copies in layout_text(best)


def test_auto_may_choose_them() -> None:
    overrides = ["parallel=auto", *FULL[:3], FULL[-1], "cluster.hardware.network_gb_s=20"]
    config = resolve("gpt3_1.3b", "p5", overrides)
    unsupported = load_environment(config.backend).unsupported
    chosen = choose_parallel(config, 8, unsupported)
    assert chosen.recipe.parallel.shard_nodes is not None
    assert make_mesh(chosen, 8).replicate > 1
    assert "planner" in chosen.origins["parallel.shard_nodes"]
    # A number of nodes that varies would not be divisible.
    varying = config.with_settings("slurm", min_nodes=6)
    assert choose_parallel(varying, 8, unsupported).recipe.parallel.shard_nodes is None
    none = resolve("gpt3_1.3b", "p5", [*overrides, "parallel.shard_nodes=null"])
    assert choose_parallel(none, 8, unsupported).recipe.parallel.shard_nodes is None


PLANS = (
    ("neox_20b", 4, "trn1"),
    ("llama2_70b", 16, "trn1"),
    ("gpt3_1.3b", 2, "p4d"),
    ("pythia_160m", 1, "p4d"),
)
UNITS = {"s": 1.0, "ms": 1e-3}
DIFFERENCE = re.compile(r"(\w+) ([+-])(\S+) (m?s)\b")


@lru_cache
def plan(recipe: str, nodes: int, cluster: str, *overrides: str) -> SearchResult:
    config = resolve(recipe, cluster, overrides)
    return search(config, nodes, load_environment(config.backend).unsupported)


@hypothesis.settings(max_examples=amount(6, of=60), deadline=None, derandomize=True)
@given(st.data())
def test_any_order_is_explained_by_its_own_figures(data: st.DataObject) -> None:
    result = plan(*data.draw(st.sampled_from(PLANS)))
    first = data.draw(st.integers(0, len(result.fitting) - 1))
    ranked = result.fitting[first:]
    best = ranked[0]
    lines = list(explain(replace(result, fitting=ranked), ranked[1:3]))
    assert lines[0].startswith(f"best: {best.description}: {best.seq_per_s:.4g} seq/s")
    assert sum(line.startswith("runner-up: ") for line in lines) == len(ranked[1:3])
    for line in lines:
        if "too much" in line:
            assert any(why_too_large(item.memory) in line for item in result.too_large)


@pytest.mark.parametrize("case", PLANS[1:3])
def test_a_runner_up_is_slower_by_the_parts_that_are_named(case: tuple[str, int, str]) -> None:
    result = plan(*case)
    by_name = {item.description: item for item in result.fitting}
    lines = explain(result, result.fitting[1:3])
    best = result.fitting[0]
    for line, following in pairwise(lines):
        if not line.startswith("runner-up: "):
            continue
        other = next(
            item for name, item in by_name.items() if line.startswith(f"runner-up: {name}:")
        )
        named = DIFFERENCE.findall(following)
        apart = {name: float(f"{sign}{number}") * UNITS[unit] for name, sign, number, unit in named}
        for name, seconds in apart.items():
            theirs, mine = other.step.parts()[name], best.step.parts()[name]
            assert seconds == pytest.approx(theirs - mine, rel=0.01)
        sizes = [abs(seconds) for seconds in apart.values()]
        assert sizes == sorted(sizes, reverse=True)
        total = other.step.total - best.step.total
        assert sum(apart.values()) == pytest.approx(total, abs=0.01 * best.step.total)
