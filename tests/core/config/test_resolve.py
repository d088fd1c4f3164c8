"""Recipes, profiles and overrides: what they resolve to, and every fault at once."""

from pathlib import Path

import pytest
import yaml

from slurmllm.core.config.load import load
from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import clusters_dir, recipes_dir, resolve
from slurmllm.core.errors import ConfigError


def faults(*overrides: str, recipe: str = "tiny_neox") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, overrides=overrides)
    return list(caught.value.faults)


def test_every_shipped_recipe_and_profile_resolves() -> None:
    recipes, profiles = available(recipes_dir()), available(clusters_dir())
    assert {"tiny_neox", "neox_20b", "pythia_6.9b"} <= set(recipes)
    assert {"local", "trn1", "trn1n", "p4d"} <= set(profiles)
    for number, recipe in enumerate(recipes):
        for profile in profiles[number % 4 :: 4]:
            assert resolve(recipe, profile).recipe.name == recipe
    assert resolve("neox_20b", "p4d").backend == "native"
    assert resolve("neox_20b").backend == "nxd"
    assert resolve("neox_20b", overrides=["backend=native"]).backend == "native"


def test_a_removed_field_names_its_replacement_unless_an_old_run_has_its_default(
    tmp_path: Path,
) -> None:
    (fault,) = faults("cluster.stage_environment=true")
    assert fault.startswith("cluster.stage_environment was removed; set cluster.container, or ")
    run = yaml.safe_load(resolve("tiny_neox").to_yaml())
    run["cluster"]["stage_environment"] = False
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(run))
    assert load(path).values() == resolve("tiny_neox").values()
    run["origin"]["cluster.stage_environment"] = "mine.yaml:3"
    path.write_text(yaml.safe_dump(run))
    with pytest.raises(ConfigError, match=r"stage_environment was removed.*\(mine.yaml:3\)"):
        load(path)


@pytest.mark.parametrize("where", ["env", "cluster.env"])
def test_a_variables_value_is_a_text_whatever_it_looks_like(where: str, tmp_path: Path) -> None:
    request = {"A": "1", "B": "007", "C": "true", "D": "", "E": "a=b: [c", "F": "null", "G": "1e-4"}
    config = resolve("tiny_neox", overrides=[f"{where}.{name}={v}" for name, v in request.items()])
    holder = config.recipe if where == "env" else config.cluster
    assert holder.env == request
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    second = load(path)
    assert (second.recipe.env, second.cluster.env) == (config.recipe.env, config.cluster.env)
    assert second.origins[f"{where}.B"] == f"--set {where}.B=007"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.A-B=1", "env.A-B"),
        ("env.A.B=1", "env.A"),
        ("env=[1]", "must be a valid dictionary"),
        ("cluster.instance_type=trn1", "cluster.instance_type: 'trn1'"),
    ],
)
def test_bad_variables_and_instance_types(override: str, message: str) -> None:
    (fault,) = faults(override)
    assert message in fault


def test_a_number_in_a_file_is_no_variable(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (recipes_dir() / "tiny_neox.yaml").read_text()
    path.write_text(f'{text}env:\n  NCCL_A: 1\n  FI_B: ""\n')
    (fault,) = faults(recipe=str(path))
    assert fault.startswith("env.NCCL_A: 1 (mine.yaml:")
    path.write_text(path.read_text().replace("A: 1", 'A: "1"'))
    assert resolve(str(path)).recipe.env == {"NCCL_A": "1", "FI_B": ""}


def test_each_value_knows_its_source() -> None:
    config = resolve(
        "tiny_neox",
        overrides=["optim.lr=1e-3", "cluster.node_local=/mnt/disk"],
        options={"slurm.partition": ("--partition", "main"), "slurm.qos": ("--qos", None)},
    )
    source = {path: origin for path, _, origin in config.rows()}
    lines = (recipes_dir() / "tiny_neox.yaml").read_text().splitlines()
    file, line = source["train.steps"].split(":")
    assert file == "tiny_neox.yaml"
    assert lines[int(line) - 1].strip().startswith("steps:")
    assert source["optim.lr"] == "--set optim.lr=1e-3"
    assert source["cluster.node_local"] == "--set cluster.node_local=/mnt/disk"
    assert source["slurm.partition"] == "--partition"
    assert source["slurm.qos"] == "default"
    assert source["optim.eps"] == "default"


def test_what_is_left_to_the_family_says_so(tmp_path: Path) -> None:
    config = resolve("tiny_llama", overrides=["model.attention_bias=true"])
    rows = {path: (value, source) for path, value, source in config.rows()}
    assert rows["model.rotary_pct"] == (1.0, "family llama")
    assert rows["model.parallel_residual"] == (False, "family llama")
    assert rows["model.attention_bias"] == (True, "--set model.attention_bias=true")
    assert rows["model.num_kv_heads"][1].startswith("tiny_llama.yaml:")
    assert rows["model.rotary_base"][1] == "default"
    other = {path: value for path, value, _ in resolve("tiny_gpt3").rows()}
    assert other["model.activation"] == "gelu_tanh"
    assert other["model.tied_embeddings"] is True
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load(path).rows() == config.rows()


def test_an_unknown_family_is_one_fault() -> None:
    result = faults("model.family=gpt5")
    assert result[0].startswith("model.family: 'gpt5' (--set model.family=gpt5): must be 'neox'")
    assert all(fault.endswith("so the recipe must set it") for fault in result[1:])


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    tree = yaml.safe_load((recipes_dir() / "tiny_neox.yaml").read_text())
    tree["model"]["num_heads"] = 7
    tree["model"]["colour"] = "blue"
    tree["train"]["steps"] = "many"
    tree["train"]["micro_batch"] = 3
    del tree["optim"]["lr"]
    tree["optim"]["betas"] = [0.9]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    result = faults(recipe=str(path))
    begins = (
        "model.num_heads: 7",
        "model.colour: unknown",
        "train.steps: 'many'",
        "train.micro_batch: 3 does not divide",
        "optim.lr: missing",
        "optim.betas",
    )
    for begin in begins:
        assert any(fault.startswith(begin) for fault in result), (begin, result)
    assert len(result) == len(begins)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "did you mean 'lr'"),
        ("optim.learning_rate=1", "did you mean 'lr'"),
        ("optim.lr=.nan", "finite"),
        ("optim.betas=[0.9,1.5]", "optim.betas: 1.5 (--set optim.betas=[0.9,1.5]): must be less"),
        ("optim.min_lr=1", "above optim.lr"),
        ("optim.warmup_steps=500", "not less than 120, the step at which the schedule ends"),
        ("optim.warmup_ratio=0.1", "exclude each other; set optim.warmup_steps=0"),
        ("optim.decay_start=2000", "would start after the last step (train.steps"),
        ("optim.decay_start=50 optim.decay=constant", "has no decay; set optim.decay=1-sqrt"),
        ("optim.decay_start=50 optim.decay_steps=50", "the decay ends at step 50"),
        (
            "optim.warmup_steps=0 optim.warmup_ratio=0.5 optim.decay_steps=40",
            "optim.warmup_ratio: 0.5 of train.steps",
        ),
        ("optim.decay_start=1", "the warm-up ends only at step"),
        ("parallel.tensor=5", "does not divide 6 attention heads; choose 1, 2, 3 or 6"),
        ("model.rotary_pct=0.1", "an odd number"),
        ("slurm.time=8:00", "eight minutes"),
        ("optim..lr=1", "expected path=value"),
        ("slurm.time=0", "allows no time"),
        ("slurm.signal_lead_s=7200", "is not less than the time limit"),
        ("slurm.partition=a b", "must not contain whitespace"),
        ("cluster.directives=['--gres=gpu:8 --uid=0']", "cluster.directives"),
        ("train.activation_checkpointing=most", "must be none, selective or full, or a list of"),
        ("train.activation_checkpointing=[]", "to recompute nothing, write none"),
        ("train.activation_checkpointing=[core, core]", "each part once"),
        ("train.activation_checkpointing=[attention]", "'attention' is not a part of a block"),
        ("train.steps.more=1", "is not a section"),
        ("layouts.cpu.parallel=auto", "--set parallel.tensor"),
    ],
)
def test_a_bad_value_is_named_with_its_rule(override: str, message: str) -> None:
    result = faults(*override.split(" ") if override.startswith("optim") else [override])
    assert any(message in fault for fault in result), result


def test_an_option_cannot_smuggle_in_a_directive() -> None:
    with pytest.raises(ConfigError, match="must not contain whitespace"):
        resolve("tiny_neox", options={"slurm.account": ("--account", "x\n")})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "holds no mapping"),
        ("name: a\nname: b\n", "written twice"),
        ("a: &a {b: *a}\n", "alias of itself"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(str(path))


def test_cluster_by_option_environment_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("neox_20b").cluster.name == "trn1"
    monkeypatch.setenv("SLURMLLM_CLUSTER", "p4d")
    assert resolve("neox_20b").cluster.name == "p4d"
    assert resolve("neox_20b", "local").cluster.name == "local"


def test_a_single_value_where_a_list_is_expected(tmp_path: Path) -> None:
    overrides = ["trackers=wandb", "profile.ranks=3", "profile.steps=[2, 3]", "slurm.notify.on=end"]
    overrides += ["slurm.notify.command=mail", "cluster.setup=module load cuda"]
    config = resolve("tiny_neox", overrides=overrides)
    recipe = config.recipe
    assert (recipe.trackers, recipe.profile.ranks) == (("wandb",), (3,))
    assert (recipe.slurm.notify.on, recipe.slurm.notify.command) == (("end",), ("mail",))
    assert config.cluster.setup == ("module load cuda",)
    assert config.origins["trackers"] == "--set trackers=wandb"
    (tmp_path / "mine.yaml").write_text(
        (recipes_dir() / "tiny_neox.yaml").read_text() + "trackers: mlflow\n"
    )
    assert resolve(str(tmp_path / "mine.yaml")).recipe.trackers == ("mlflow",)
    for override, rule in (
        ("trackers=wandbb", "trackers: 'wandbb' (--set trackers=wandbb): must be 'wandb' or"),
        ("optim.betas=0.9", "optim.betas: 0.9 (--set optim.betas=0.9): must be a list"),
        ("profile.ranks=-1", "profile.ranks: -1"),
        ("data.corpus=[]", "data.corpus: [] (--set data.corpus=[]): it should have at least 1"),
    ):
        assert rule in faults(override)[0]


@pytest.mark.parametrize(
    ("setting", "expected", "recomputed", "text"),
    [
        ("[core]", "selective", ("core",), "selective"),
        ("mlp", ("mlp",), ("mlp",), "mlp"),
        ("full", "full", ("block",), "full"),
        ("[norm, mlp]", ("mlp", "norm"), ("mlp", "norm"), "mlp+norm"),
    ],
)
def test_one_form_of_equal_lists_of_recomputed_parts(
    setting: str, expected: object, recomputed: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    config = resolve("neox_20b", overrides=[f"train.activation_checkpointing={setting}"])
    train = config.recipe.train
    assert train.activation_checkpointing == expected
    assert (train.recomputed, train.checkpointing_text) == (recomputed, text)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "config.yaml").recipe == config.recipe
