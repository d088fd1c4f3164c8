"""Requests that no layout fits: what would fit near them, at every node count."""

from __future__ import annotations

import re

import pytest

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.plan.fit_check import mesh_fixes
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.nearest import SettingSuggestion, fitting_changes, memory_shortfall
from slurmllm.plan.output import plan_json
from slurmllm.plan.recipe_plan import plan_recipe
from slurmllm.plan.search import search, some_fits

pytestmark = pytest.mark.usefixtures("layouts_searched_once")

RECIPES = ("neox_20b", "llama2_70b", "llama3_8b")


def near(config: RunConfig, nodes: int, *fixed: str) -> list[SettingSuggestion]:
    return fitting_changes(config, nodes, load_environment(config.backend).unsupported, fixed)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_node_count_has_a_plan_or_the_nearest_that_do(recipe: str, stride: int) -> None:
    config = resolve(recipe)
    unsupported = load_environment(config.backend).unsupported
    fits = {n: some_fits(config, n, unsupported, ()) for n in range(1, 129)}
    for nodes in [n for n, fit in fits.items() if not fit][::stride]:
        result = near(config, nodes)
        assert result, nodes
        counts = [item.nodes for item in result if item.options[0] == "--nodes"]
        # No count between the two, of which one may be above 128.
        low, high = min(counts) if min(counts) < nodes else 0, max(counts)
        assert not any(fits[n] for n in range(low + 1, min(high, 129)))
        for item in result[nodes % 8 :: 8]:  # one or none: all would take minutes
            mesh = item.best.mesh
            assert item.best.fits
            assert mesh.nodes * mesh.devices_per_node == mesh.tensor * mesh.pipeline * mesh.data
            assert mesh.global_batch == mesh.data * mesh.micro_batch * mesh.accumulation


@pytest.mark.parametrize("nodes", [12, 100])
def test_a_batch_on_either_side_of_what_the_nodes_cannot_share(nodes: int) -> None:
    config = resolve("neox_20b")
    unsupported = load_environment("nxd").unsupported
    batches = [item for item in near(config, nodes) if "global_batch" in item.options[1]]
    below, above = (item.best.mesh.global_batch for item in batches[:2])  # a third: farther, faster
    assert below < 256 < above
    for batch in range(below, above + 1):
        changed = resolve("neox_20b", overrides=[f"train.global_batch={batch}"])
        assert bool(search(changed, nodes, unsupported).fitting) == (batch in (below, above))
    for item, percent in zip(batches[:2], (256 - below, above - 256), strict=True):
        assert str(item).startswith(f"--set {item.options[1]}: {100 * percent / 256:.2g} % ")


def test_a_fixed_micro_batch_and_chunks_are_kept() -> None:
    settings = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.micro_batch=2"]
    config = resolve("tiny_neox", overrides=[*settings, "cluster.devices_per_node=4"])
    fixed = ["parallel.tensor", *(setting.partition("=")[0] for setting in settings)]
    changes = [item.options[1] for item in near(config, 3, *fixed)]
    assert changes == ["1", "train.global_batch=24"]


def test_a_recipe_s_own_mesh_gets_the_same_fixes() -> None:
    config = resolve("neox_20b")
    unsupported = load_environment("nxd").unsupported
    fixes = mesh_fixes(config, 12, unsupported)
    assert "`slurmllm plan`" in fixes.pop()
    options = [re.findall(r"--(?:nodes|set) (\S+):", fix)[0] for fix in fixes]
    assert options == ["8", "16", "train.global_batch=252", "train.global_batch=264"]
    make_mesh(resolve("neox_20b", overrides=[options[3]]), 12)
    # The batch of a run that has begun is not changed.
    of_a_resume = mesh_fixes(config, 12, unsupported, resumes=True)
    assert [fix.partition(":")[0] for fix in of_a_resume] == ["--nodes 8", "--nodes 16"]
    # Another mesh takes the batch as it is.
    assert mesh_fixes(resolve("neox_20b"), 22, unsupported)[0].startswith("this would fit: --set")


def test_sequences_too_long_for_a_core() -> None:
    longer = ["model.seq_len=32768"]
    config = resolve("llama2_7b", overrides=longer)
    assert not near(config, 4)
    least, scores, shorter = memory_shortfall(config, 4, load_environment("nxd").unsupported)
    assert re.search(r"TP 16 × PP 32 .*; a device with [\d.]+ GiB more would do$", least)
    assert scores.startswith("attention scores are 24.00 GiB of it: the nxd backend")
    options = re.findall(r"(?:--set|--nodes) (\S+)", shorter.removesuffix(":"))
    assert options[0] == "model.seq_len=16384"
    nodes = int(options.pop(1))
    changed = resolve("llama2_7b", overrides=[option.strip(":") for option in options])
    unsupported = load_environment("nxd").unsupported
    assert search(changed, nodes, unsupported, ["parallel.tensor"]).fitting
    wider = near(resolve("llama2_7b", overrides=["model.seq_len=16384"]), 4)[-1]
    assert wider.options == ("--set", "parallel.tensor=16")
    assert near(resolve("llama3_8b", overrides=longer), 4), "eight nodes do"


@pytest.mark.parametrize(
    ("recipe", "cluster", "nodes", "settings", "reason"),
    [
        ("llama2_70b", "trn1", 1, [], r"TP 8 × PP 4 × DP 1, .* least memory, [\d.]+ of 15\.75 GiB"),
        ("llama2_7b", "p5", 3, ["parallel.tensor=16"], "no product of .* divides the 24 workers"),
    ],
)
def test_why_no_batch_helps(
    recipe: str, cluster: str, nodes: int, settings: list[str], reason: str
) -> None:
    config = resolve(recipe, cluster, settings)
    unsupported = load_environment(config.backend).unsupported
    plan = plan_recipe(config, [nodes], unsupported, None, None)
    (result,) = plan.node_plans
    assert result.no_batch is not None
    assert re.search(f"^no other global batch fits on {nodes} nodes?: {reason}$", result.no_batch)
    assert result.no_batch in plan.no_fit_error().faults
    assert plan_json([plan], None, False)["nearest"][0]["no_batch"] == result.no_batch


def test_a_faster_batch_within_five_percent_is_added() -> None:
    config = resolve("llama2_7b", "p5")
    lines = near(config, 3)
    speeds = {item.options[1]: item.best.seq_per_s for item in lines}
    assert [*speeds][2:] == [f"train.global_batch={batch}" for batch in (1023, 1026, 1008)]
    closest = max(speeds["train.global_batch=1023"], speeds["train.global_batch=1026"])
    assert speeds["train.global_batch=1008"] > 1.03 * closest
