"""Recipes that extend another: what they inherit, and what is refused."""

import json
from pathlib import Path

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.core.config.yaml_source import write_yaml
from slurmllm.core.errors import ConfigError

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
FILES = {
    "mine": "extends: llama3_8b\noptim: {lr: 3.0e-4}\ndata: {corpus: /c, source: null}\n",
    "sub/theirs": "extends: ../mine.yaml\nname: theirs\ntrain: {steps: 500}\nslurm: null\n",
    "auto": "extends: llama3_8b\nparallel: auto\n",
    "fixed": "extends: auto.yaml\nparallel: {tensor: 8}\n",
    "published": "extends: auto.yaml\nmodel: config.json\n",
    "sub/longer": "extends: ../published.yaml\nmodel: {seq_len: 64}\n",
    "options": "extends: tiny_llama\nslurm: {directives: {train: {gres: gpu:8, mem: 1G}}}\n",
    "fewer": "extends: options.yaml\nslurm: {directives: {train: {mem: null}}}\n",
    "loop": "extends: back.yaml\n",
    "back": "extends: ./loop.yaml\n",
    "unknown": "# a comment\nextends: llama3\n",
    "list": "extends: [llama3_8b]\n",
    "lost": "extends: nowhere.yaml\n",
    "profile": "extends: p5\n",
    "wrong": "extends: mine.yaml\noptim: {lrr: 1}\n",
    "program": "extends: tiny_llama\nenv: {LD_PRELOAD: /x.so}\n",
    "victim": "extends: program.yaml\n",
    "empty": "[]\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_a_chain_replaces_single_values(folder: Path) -> None:
    base, config = resolve("llama3_8b"), resolve(str(folder / "sub" / "theirs.yaml"))
    recipe, origins = config.recipe, config.origins
    assert (recipe.name, recipe.train.steps, recipe.optim.lr) == ("theirs", 500, 3e-4)
    assert (recipe.data.corpus, recipe.data.source) == ("/c", None)
    assert recipe.model == base.recipe.model
    assert recipe.optim == base.recipe.optim.model_copy(update={"lr": 3e-4})
    assert (base.recipe.slurm.signal_lead_s, recipe.slurm.signal_lead_s) == (600, 300)
    assert origins["train.steps"] == "theirs.yaml:3"
    assert origins["optim.lr"] == "mine.yaml:2"
    assert origins["optim.warmup_steps"] == base.origins["optim.warmup_steps"]
    assert not any(path.startswith("slurm") for path in origins)
    assert resolve(str(folder / "mine.yaml")).recipe.name == "mine"
    assert config.cluster == base.cluster  # of the default_cluster that it inherits


def test_auto_and_a_published_model_replace_their_section(folder: Path) -> None:
    auto, fixed = (resolve(str(folder / f"{name}.yaml")) for name in ("auto", "fixed"))
    degrees = [path for path in auto.open_settings() if path.startswith("parallel.")]
    assert degrees[0] == "parallel.tensor"
    assert fixed.recipe.parallel.tensor == 8
    assert [p for p in fixed.open_settings() if p.startswith("parallel.")] == degrees[1:]
    published = resolve(str(folder / "published.yaml")).recipe.model
    assert (published.hidden_size, published.seq_len, published.num_kv_heads) == (64, 96, None)
    # The model's file is relative to the recipe that names it.
    longer = resolve(str(folder / "sub" / "longer.yaml"))
    assert longer.recipe.model == published.model_copy(update={"seq_len": 64})
    assert longer.origins["model.hidden_size"] == str(folder / "sub" / ".." / "config.json")


def test_null_takes_out_an_option_of_sbatch(folder: Path) -> None:
    directives = resolve(str(folder / "fewer.yaml")).recipe.slurm.directives
    assert directives.train == {"gres": "gpu:8"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "loop",
            r"^recipes extend each other: .*loop\.yaml extends .*back\.yaml extends .*name a ",
        ),
        ("unknown", r"^extends \(unknown\.yaml:2\): unknown recipe 'llama3'; did you mean 'llama3"),
        ("list", r"^extends \(list\.yaml:1\): \['llama3_8b'\]: must be a recipe's name, such as "),
        ("lost", "^extends .lost.yaml:1.: no recipe file '.*nowhere.yaml'; its path is relative"),
        ("profile", "unknown recipe 'p5'"),
        ("wrong", r"optim\.lrr: unknown field \(wrong\.yaml:2\); did you mean 'lr'"),
        ("victim", r"env\.LD_PRELOAD \(program\.yaml:2\): .*as it may be another user's file"),
        ("empty", "a recipe may be as short as `extends: RECIPE`"),
    ],
)
def test_what_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(str(folder / f"{name}.yaml"))


def test_a_chain_is_bounded(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (tmp_path / "60.yaml").write_text("extends: tiny_llama\n")
    with pytest.raises(ConfigError, match=r"0\.yaml extends more than 50 others"):
        resolve(str(tmp_path / "0.yaml"))
    assert resolve(str(tmp_path / "20.yaml")).recipe.name == "20"


def test_a_null_of_a_file_leaves_the_partition_to_the_users_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = resolve("tiny_llama").values()
    del values["cluster"]
    (tmp_path / "mine.yaml").write_text(write_yaml(values))
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    mine = str(tmp_path / "mine.yaml")
    assert resolve(mine).recipe.slurm.partition == "gpu"
    assert resolve(mine, overrides=["slurm.partition=null"]).recipe.slurm.partition is None
