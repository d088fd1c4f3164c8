"""Why a layout is the best, in words: what is said is what was predicted."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

import hypothesis
import pytest
from amounts import amount
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import resolve
from slurmllm.plan.explain import describe, explain, settings, traffic, why_too_large
from slurmllm.plan.search import SearchResult, search
from slurmllm.plan.step import rate, shard_group, tensor_group

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
    lines = explain(ranked, result.too_large)
    assert lines[0].startswith(f"best: {describe(best)}: {best.seq_per_s:.4g} seq/s")
    indented = [line for line in lines[1:] if line.startswith("  ")]
    tensor = next(line for line in indented if line.startswith("  tensor parallel"))
    assert ("inside the node" in tensor) == (
        best.mesh.tensor > 1 and tensor_group(best.mesh).nodes == 1
    )
    assert ("  bubble: " in "\n".join(indented[:4])) == (best.mesh.pipeline > 1)
    others = [item for item in ranked[1:] if describe(item) != describe(best)]
    assert sum(line.startswith("runner-up: ") for line in lines) == min(2, len(others))
    for line in lines:
        if "too much" in line:
            assert any(why_too_large(item.memory) in line for item in result.too_large)


@pytest.mark.parametrize("case", PLANS[1:3])
def test_a_runner_up_is_slower_by_the_parts_that_are_named(case: tuple[str, int, str]) -> None:
    result = plan(*case)
    by_name = {describe(item): item for item in result.fitting}
    lines = explain(result.fitting, result.too_large)
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


def test_bytes_are_those_of_the_step() -> None:
    """NeoX 20B at TP 8, PP 4, DP 4 on links without latency: seconds are bytes over the rate."""
    hardware = ("network_latency_us=0", "node_link_latency_us=0", "overlap=0")
    result = plan("neox_20b", 4, "trn1", *(f"cluster.hardware.{item}" for item in hardware))
    chosen = {"tensor": 8, "pipeline": 4, "data": 4, "micro_batch": 1}
    chosen |= {"sequence": True, "virtual_pipeline": 1}
    item = next(
        item
        for item in (*result.fitting, *result.too_large)
        if chosen.items() <= settings(item).items()
    )
    figures, moved = item.config.cluster.hardware, traffic(item)
    assert figures is not None
    for bytes_moved, seconds, members in (
        (moved.tensor, item.step.tensor, tensor_group(item.mesh)),
        (moved.data, item.step.data, shard_group(item.mesh)),
    ):
        assert bytes_moved / rate(members, figures) == pytest.approx(seconds)
    assert moved.data_s == pytest.approx(item.step.data)
    # 64 micro batches of 2,048 tokens, 6,144 wide, bf16, shared by 8, there and back.
    assert moved.stages == 2 * 64 * 2048 * 6144 * 2 / 8
    # A quarter of 20.6 billion parameters on 8 workers; gradients and weights in bf16, three
    # quarters of them to others.
    assert moved.data == pytest.approx(20.6e9 / 4 / 8 * 2 * 2 * 0.75, rel=0.05)


def test_what_computing_hides_is_told_apart() -> None:
    item = plan("gpt3_1.3b", 2, "p4d", "cluster.hardware.overlap=0.5").fitting[0]
    # Half of it, but none of the first layer's.
    layers = item.config.recipe.model.num_layers
    assert item.step.data == pytest.approx(
        traffic(item).data_s * (1 - 0.5 * (layers - 1) / layers), rel=0.01
    )
    assert "overlap with computation" in "\n".join(explain([item], []))
