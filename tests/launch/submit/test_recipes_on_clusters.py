"""Every shipped recipe can be submitted wherever it fits, with the best layout's speed."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import TRIAL, recipes_dir, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.launch.submit.prepare import RunRequest, prepare
from slurmllm.plan.search import search
from slurmllm.train.backends.environment import load_environment

RECIPES = available(recipes_dir())
CLUSTERS, NODES = ("trn1", "p4d", "p5", "h100_ib", "p5en"), (1, 2, 4, 8, 16, 32, 64)
CELLS = [*product(CLUSTERS, NODES)]
DATA = {f"data.{name}": (TRIAL, "stdlib") for name in ("corpus", "tokenizer")}


def check(recipe: str, cluster: str, nodes: int) -> None:
    """Compare a dry run of `submit` with the best of all layouts."""
    config = resolve(recipe, cluster, options=DATA)
    fit = None
    try:
        run = prepare(RunRequest(config, nodes, Path("runs"), dry_run=True))
        refusals, fit = run.refusals, run.fit
    except ConfigError as error:
        refusals = error.faults
    best = search(config, nodes, load_environment(config.backend).unsupported).fitting
    if refusals or fit is None:
        # Every refusal has a way out; where the planner chooses, nothing fits these nodes.
        assert re.search(r"--nodes \d|--set |no number of nodes", " ".join(refusals))
        assert not best or not config.recipe.parallel.auto
    elif config.recipe.parallel.auto:
        assert fit.candidate.seq_per_s >= 0.95 * best[0].seq_per_s
        assert not fit.warnings


# All recipes on all clusters are in `make test-all`, by the test below.
@pytest.mark.parametrize(("place", "recipe"), [*enumerate(RECIPES)][::6])
def test_a_recipe_on_a_cluster(place: int, recipe: str) -> None:
    check(recipe, *CELLS[12 * place % len(CELLS)])


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_on_all_clusters(recipe: str) -> None:
    for cluster, nodes in CELLS:
        check(recipe, cluster, nodes)


def test_a_source_s_layout_is_for_its_hardware_alone() -> None:
    trn1, p5 = (resolve("llama3_8b", cluster) for cluster in ("trn1", "p5"))
    assert trn1.recipe.parallel.tensor == 32
    assert trn1.origins["parallel.tensor"].startswith("layout of neuron, llama3_8b.yaml:")
    assert trn1.recipe.train.activation_checkpointing == "selective"
    assert trn1.open_settings() == []
    assert "train.micro_batch" in p5.open_settings()
    assert p5.origins["parallel.auto"] == "no layout for p5"
    fixed = resolve("llama3_8b", "trn1", ["parallel.tensor=8"])
    assert (fixed.recipe.parallel.tensor, fixed.recipe.parallel.sequence) == (8, True)
