"""`submit` and `resume` with the planner: what it chooses, warns of and refuses."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import Result
from command_line import call, call_json
from fake_slurm import FakeSlurm

from slurmllm.core.config.load import load
from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import TRIAL, recipes_dir, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.prepare import RunRequest, prepare
from slurmllm.plan.search import search
from slurmllm.train.backends.environment import load_environment

# A small cluster of CPUs, so that a tiny recipe has layouts to choose from.
PROFILE = """
name: shelf
device: cpu
devices_per_node: 2
node_local: /var/tmp
hardware: {source: this test, bf16_tflops: 1, fp32_tflops: 1, memory_gib: 1, memory_gb_s: 10,
  node_link_gb_s: 1, network_gb_s: 0.1, matrix_efficiency: 0.5, attention_efficiency: 0.5,
  memory_efficiency: 0.5, node_link_efficiency: 0.5, network_efficiency: 0.5}
"""
NOT_ENOUGH = "cluster.hardware.memory_gib=0.01"


@pytest.fixture
def fake(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("SLURMLLM_CLUSTER", "shelf.yaml")
    Path("shelf.yaml").write_text(PROFILE)
    np.save("tokens.npy", np.arange(5000, dtype=np.uint16) % 4096)
    return fake


def submit(*arguments: str) -> Result:
    data = ("--set=data.corpus=tokens.npy", "--set=data.tokenizer=null")
    return call("submit", "tiny_neox", "--nodes=2", "--name=r", *data, *arguments)


def degrees() -> dict[str, object]:
    return load(RunDir(Path("runs/r")).config).recipe.parallel.model_dump()


def test_auto_is_settled_before_anything_is_written(fake: FakeSlurm) -> None:
    sent = json.loads(submit("--set=parallel=auto", "--set=parallel.tensor=2", "--json").stdout)
    held = yaml.safe_load(Path("runs/r/config.yaml").read_text())
    planned = sent["planner"]
    assert planned["chosen"]
    assert held["parallel"]["auto"] is False
    assert held["parallel"]["tensor"] == planned["tensor"] == sent["mesh"]["tensor"] == 2
    for degree in ("pipeline", "virtual_pipeline", "sequence", "zero"):
        assert held["parallel"][degree] == planned[degree]
        assert held["origin"][f"parallel.{degree}"].startswith("planner: best of ")
    assert json.loads(Path("runs/r/plan.json").read_text())["pipeline"] == planned["pipeline"]
    assert len(fake.jobs) == 2
    call("cancel", "r")
    none = call("resume", "r", "--set=parallel=auto", "--set=cluster.hardware=null")
    assert (none.exit_code, "slurmllm calibrate" in none.stderr) == (2, True)
    line = r"tensor \d, pipeline \d, data \d, micro batch 2: [\d.]+ seq/s predicted, MFU \d+ %, "
    shown = call("resume", "r", "--set=parallel=auto").stdout
    assert re.search(f"^planner    {line}", shown, re.MULTILINE)


def test_a_written_mesh_that_cannot_fit_is_refused(fake: FakeSlurm) -> None:
    refused = submit("--set", NOT_ENOUGH)
    assert refused.exit_code == 2
    assert "does not fit into the memory of 2 node(s) of shelf" in refused.stderr
    assert re.search(r"optimizer [\d.]+[,;]", refused.stderr)
    assert "--force" in refused.stderr
    assert not fake.jobs
    assert not Path("runs").exists()
    dry = submit("--set", NOT_ENOUGH, "--dry-run", "--json")
    assert dry.exit_code == 0
    assert "submit would refuse this" in dry.stderr
    shown = json.loads(dry.stdout)
    assert shown["refusals"] == shown["planner"]["refusals"]
    assert not shown["planner"]["fits"]
    rough = submit("--set=cluster.hardware.rough=true", "--set", NOT_ENOUGH, "--dry-run")
    assert (rough.exit_code, "refuse" in rough.stderr) == (0, False)
    tight = submit("--set=parallel=auto", "--set", NOT_ENOUGH)
    assert tight.exit_code == 2
    assert re.search(r"closest to fitting: .*: [\d.]+ of [\d.]+ GiB", tight.stderr)
    forced = submit("--set", NOT_ENOUGH, "--force")
    assert forced.exit_code == 0
    assert "warning: " in forced.stderr
    assert len(fake.jobs) == 2
    call("cancel", "r")
    assert call("resume", "r", "--set=parallel=auto", "--set", NOT_ENOUGH, "--force").exit_code == 0
    config = load(RunDir(Path("runs/r")).config)
    assert config.origins["parallel.tensor"].startswith("planner: the smallest layout; none is")


def test_a_settled_run_keeps_its_degrees_until_auto_is_asked_for_again(fake: FakeSlurm) -> None:
    assert "# ── the planner's choice\n" in submit("--set=parallel=auto", "--dry-run").stdout
    submit("--set=parallel=auto")
    before = degrees()
    call("cancel", "r")
    more = call_json("resume", "r", "--nodes=4")
    assert degrees() == before
    assert (more["mesh"]["nodes"], more["planner"]["chosen"]) == (4, False)
    call("cancel", "r")
    assert call("resume", "r", "--set", NOT_ENOUGH).exit_code == 2
    assert degrees() == before
    assert call("resume", "r", "--set", NOT_ENOUGH, "--force").exit_code == 0
    call("cancel", "r")
    anew = ("cluster.hardware.memory_gib=1", "parallel=auto", "parallel.pipeline=2")
    assert call_json("resume", "r", *anew)["planner"]["chosen"]
    assert degrees()["pipeline"] == 2


def test_the_planner_s_micro_batch_follows_the_nodes(fake: FakeSlurm) -> None:
    first = json.loads(submit("--set=train.micro_batch=null", "--json").stdout)
    assert first["mesh"]["accumulation"] == 1
    config = load(RunDir(Path("runs/r")).config)
    assert config.recipe.train.micro_batch == first["mesh"]["micro_batch"]
    assert config.origins["train.micro_batch"].startswith("planner: best of ")
    call("cancel", "r")
    assert call_json("resume", "r", "--nodes=4")["mesh"]["micro_batch"] == 1
    call("cancel", "r")
    assert call_json("resume", "r", "--nodes=2")["mesh"]["accumulation"] > 1


def test_auto_without_hardware_figures(fake: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    Path("shelf.yaml").write_text(PROFILE.partition("hardware:")[0].replace("cpu", "cuda"))
    sent = json.loads(submit("--json").stdout)
    assert (sent["mesh"]["data"], sent["mesh"]["tensor"], sent["planner"]) == (4, 1, None)
    assert sent["mesh"]["micro_batch"] is None  # precompile measures it
    assert "no hardware figures to choose a layout by" in caplog.text


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
