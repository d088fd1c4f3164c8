"""All layouts of a run, what is said of the others, and what fits near those that do not."""

import re
from collections.abc import Collection

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.config.resolve import RunConfig, change, resolve
from slurmllm.core.config.rules import broken_rules
from slurmllm.core.errors import ConfigError
from slurmllm.plan.choose_layout import mesh_fixes
from slurmllm.plan.explain import SettingSuggestion, explain, fitting_changes, memory_shortfall
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.search import CHECKPOINTING, VARIED, SearchResult, predict, search, some_fits
from slurmllm.train.backends.environment import load_environment


def plan(config: RunConfig, nodes: int, fixed: Collection[str] = ()) -> SearchResult:
    return search(config, nodes, load_environment(config.backend).unsupported, fixed)


def fits(config: RunConfig, nodes: int, fixed: Collection[str] = ()) -> bool:
    return some_fits(config, nodes, load_environment(config.backend).unsupported, fixed)


@pytest.mark.parametrize(
    ("recipe", "cluster", "nodes"), [("llama2_70b", "trn1", 32), ("gpt3_1.3b", "p4d", 2)]
)
def test_every_candidate_could_be_submitted(recipe: str, cluster: str, nodes: int) -> None:
    config = resolve(recipe, cluster)
    result = plan(config, nodes)
    assert len(result.fitting) > 3
    rates = [item.seq_per_s * (0.97 if item.memory.tight else 1) for item in result.fitting]
    assert rates == sorted(rates, reverse=True)
    unsupported = load_environment(config.backend).unsupported
    for item in result.fitting:
        assert make_mesh(item.config, nodes) == item.mesh
        values = {path: value for path, value, _ in item.config.rows()}
        assert not list(broken_rules(values))
        assert not unsupported(item.config)
        assert item.memory.peak <= item.memory.limit
    assert all(item.memory.peak > item.memory.limit for item in result.too_large)
    layouts = [
        (item.mesh, item.config.recipe.parallel, item.config.recipe.train)
        for item in (*result.fitting, *result.too_large)
    ]
    assert len(layouts) == len({str(layout) for layout in layouts}), "each once"


@pytest.mark.parametrize(
    ("recipe", "cluster", "nodes", "preferred"),
    [("llama3_8b", "p4de", 1, False), ("llama2_7b", "p5", 4, True)],
)
def test_a_tight_layout_is_the_best_only_if_the_next_is_3_percent_slower(
    recipe: str, cluster: str, nodes: int, preferred: bool
) -> None:
    result = plan(resolve(recipe, cluster), nodes)
    fastest = max(result.fitting, key=lambda item: item.seq_per_s)
    assert fastest.memory.tight
    assert fastest.memory.peak > 0.95 * fastest.memory.limit
    best, roomy = result.fitting[0], [item for item in result.fitting if not item.memory.tight]
    assert max(item.memory.peak for item in roomy) <= 0.95 * best.memory.limit
    assert (best is fastest) == best.memory.tight == preferred
    cost = 1 - max(item.seq_per_s for item in roomy) / fastest.seq_per_s
    assert (cost > 0.03) == preferred
    lines = "\n".join(explain(result, []))
    assert ("  memory: tight: " in lines, "ranked lower because tight: " in lines) == (
        preferred,
        not preferred,
    )


def test_what_is_fixed_stays() -> None:
    config = resolve("llama2_7b", overrides=["parallel.tensor=8", "train.micro_batch=2"])
    result = plan(config, 16, {"parallel.tensor", "train.micro_batch"})
    every = (*result.fitting, *result.too_large)
    assert {(item.mesh.tensor, item.mesh.micro_batch) for item in every} == {(8, 2)}
    assert len({item.mesh.pipeline for item in every}) > 3
    recipe = resolve("llama2_7b")
    assert plan(recipe, 16, VARIED).fitting == [predict(recipe, make_mesh(recipe, 16))]


def test_a_micro_batch_that_needs_no_sum_of_gradients_is_not_missed() -> None:
    """In fp32 that sum takes more than what a micro batch of twice the size adds."""
    settings = ["cluster.hardware.memory_gib=34", "model.seq_len=512", "train.global_batch=16"]
    other_settings = ["train.precision=bf16_mixed", "parallel.tensor=1", "parallel.zero=1"]
    config = resolve("llama2_7b", "p5", [*settings, *other_settings, "parallel.sequence=false"])
    fixed = {"parallel.tensor", "parallel.pipeline", "parallel.zero"}
    result = plan(config, 1, fixed)
    modes = {item.config.recipe.train.activation_checkpointing for item in result.fitting}
    assert modes == {*CHECKPOINTING}
    assert {item.mesh.micro_batch for item in result.fitting} == {2}
    assert {item.mesh.micro_batch for item in result.too_large} == {1}
    assert fits(config, 1, fixed)
    auto = change(config, None, ["train.micro_batch=auto"])
    assert not plan(auto, 1, fixed).fitting, "a measurement begins with the smallest"
    assert not fits(auto, 1, fixed)


def test_what_is_refused_has_a_reason() -> None:
    twenty = plan(resolve("neox_20b"), 4).refused
    assert any("does not divide the 128 workers" in reason for reason in twenty)
    mixed = plan(resolve("llama2_70b"), 32).refused
    assert any("bf16_mixed" in reason for reason in mixed), "NxD needs ZeRO-1 for master weights"
    with pytest.raises(ConfigError, match="--nodes: 0 is less than 1"):
        plan(resolve("llama2_7b"), 0)
    bare = resolve("tiny_neox", overrides=["cluster.hardware=null"])
    with pytest.raises(ConfigError, match="slurmllm calibrate"):
        plan(bare, 1)


def test_the_minimum_is_the_fewest_nodes_that_fit() -> None:
    config = resolve("llama2_70b", overrides=["train.activation_checkpointing=selective"])
    fixed = {"train.activation_checkpointing"}
    assert not plan(config, 4, fixed).fitting
    (more, *_) = fitting_changes(config, 4, load_environment("nxd").unsupported, fixed)
    fewest = more.best.mesh.nodes
    assert fewest > 4
    assert plan(config, fewest, fixed).fitting
    assert not plan(config, fewest - 1, fixed).fitting
    never = resolve("llama2_70b", overrides=["cluster.hardware.memory_gib=0.5"])
    assert not fitting_changes(never, 4, load_environment("nxd").unsupported)


@settings(max_examples=amount(8, of=100))
@given(
    recipe=st.sampled_from(["neox_20b", "llama2_7b", "llama2_70b", "gpt3_6.7b", "tiny_neox"]),
    nodes=st.sampled_from([1, 2, 3, 5, 8, 12, 20]),
    gib=st.sampled_from([2, 6, 10, 16, 34, 80]),
    more=st.sets(
        st.sampled_from(["train.micro_batch=auto", "train.global_batch=240", "data.mask=document"])
    ),
    fixed=st.sampled_from([(), ("parallel.tensor",), ("train.activation_checkpointing",)]),
)
def test_the_fast_form_answers_as_the_search(
    recipe: str, nodes: int, gib: int, more: set[str], fixed: tuple[str, ...]
) -> None:
    if "train.global_batch=240" in more:
        more = {*more, "train.micro_batch=1"} - {"train.micro_batch=auto"}
    config = resolve(recipe, overrides=[*sorted(more), f"cluster.hardware.memory_gib={gib}"])
    assert fits(config, nodes, fixed) == bool(plan(config, nodes, fixed).fitting)


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
        counts = [item.best.mesh.nodes for item in result if item.options[0] == "--nodes"]
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


def test_fixes_keep_what_is_fixed_and_are_a_recipe_s_own_mesh_s_too() -> None:
    settings = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.micro_batch=2"]
    config = resolve("tiny_neox", overrides=[*settings, "cluster.devices_per_node=4"])
    fixed = ["parallel.tensor", *(setting.partition("=")[0] for setting in settings)]
    changes = [item.options[1] for item in near(config, 3, *fixed)]
    assert changes == ["1", "train.global_batch=24"]
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
    smallest, scores = memory_shortfall(config, 4, load_environment("nxd").unsupported)
    assert re.search(r"TP 8 × PP 32 .*; [\d.]+ GiB too much$", smallest)
    assert scores.startswith("attention scores are 48.00 GiB of it: the nxd backend")
    assert near(resolve("llama3_8b", overrides=longer), 4), "eight nodes do"
