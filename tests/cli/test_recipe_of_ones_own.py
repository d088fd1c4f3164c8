"""A recipe of one's own: printed or written, completed by a schema, changed by PATH=VALUE."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from amounts import sample
from command_line import call, fails

from slurmllm.core.config.profiles import available, shipped_dir
from slurmllm.core.config.resolve import recipes_dir, resolve
from slurmllm.core.config.schema import schema_line, write_recipe
from slurmllm.core.config.yaml_source import parse_yaml

ANY = "command.run=COMMAND"
# One of each family first
RECIPES = dict.fromkeys(("tiny_neox", "qwen3_0.6b", "gpt3_125m", "llama2_70b"))
RECIPES |= dict.fromkeys(available(recipes_dir()))


def schema_faults(kind: str, text: str) -> list[str]:
    path = shipped_dir() / "configs" / "schemas" / f"{kind}.json"
    schema = jsonschema.Draft202012Validator(json.loads(path.read_text()))
    return [f"{e.json_path}: {e.message}" for e in schema.iter_errors(parse_yaml(text))]


@pytest.mark.parametrize("name", sample(4, RECIPES))
def test_what_recipes_prints_is_the_recipe(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(call("recipes", name).stdout)
    before, after = resolve(name), resolve(str(path))
    assert after.recipe == before.recipe
    assert after.open_settings() == before.open_settings()
    assert resolve(str(path), "p5").recipe == resolve(name, "p5").recipe
    assert schema_faults("recipe", path.read_text()) == []
    # With a profile too, and when the planner is to choose.
    path.write_text(call("recipes", name, "--cluster", "p5", "parallel=auto").stdout)
    assert "# cluster:\n#   name: p5\n" in path.read_text()
    before, after = resolve(name, "p5", ["parallel=auto"]), resolve(str(path), "p5")
    assert after.recipe == before.recipe
    assert after.open_settings() == before.open_settings() != []
    assert schema_faults("recipe", path.read_text()) == []


@pytest.mark.parametrize("name", sample(4, RECIPES))
def test_init_writes_a_recipe_that_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_recipe(path, name)
    text = path.read_text()
    base, mine = resolve(name).recipe, resolve(str(path)).recipe
    names = {"name": "mine", "description": f"From {name}"}
    assert mine == base.model_copy(update=names)
    assert text.startswith(schema_line("recipe"))
    assert max(map(len, text.splitlines()[1:])) <= 100
    # Every field of an example exists, and fits the schema.
    whole = re.sub(r"^( *)#(?! )", r"\1", text.partition("\n")[2], flags=re.MULTILINE)
    assert whole.count("\n") > 60
    path.write_text(whole)
    assert resolve(str(path)).recipe.trackers == ("wandb",)
    assert schema_faults("recipe", whole) == []


def test_init_extends_a_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team").mkdir()
    call("init", "--recipe", "team/base.yaml", "--from", "tiny_llama")
    shown = call("init", "--recipe", "my run.yaml", "--from", "team/base.yaml").stdout
    assert shown == (
        "recipe  my run.yaml: extends team/base.yaml\n"
        "next    slurmllm plan 'my run.yaml' --nodes N\n"
    )
    text = (tmp_path / "my run.yaml").read_text()
    assert "\nextends: team/base.yaml\nname: my-run\n" in text
    (tmp_path / "my run.yaml").write_text(text.replace("lr: 0.002", "lr: 0.003"))
    assert resolve("my run.yaml").recipe.optim.lr == 0.003
    assert "submit 'my run.yaml' --nodes 2" in call("plan", "my run.yaml", "--nodes=2").stdout


@pytest.mark.parametrize("name", sample(2, available(recipes_dir().parent / "trainers")))
def test_init_extends_an_adapter(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shown = call("init", "--recipe", str(path), "--from", f"trainers/{name}").stdout
    assert shown.endswith(f"next    slurmllm submit --dry-run {path} --nodes N\n")
    assert schema_faults("recipe", path.read_text()) == []
    assert f"extends: trainers/{name}\n" in path.read_text()
    mine, adapter = resolve(str(path)).recipe, resolve(f"trainers/{name}", None, [ANY]).recipe
    assert mine.command == adapter.command
    assert mine.slurm == adapter.slurm
    # What `recipes` prints of it is a recipe too.
    path.write_text(call("recipes", str(path)).stdout)
    assert resolve(str(path)).recipe == mine
    assert schema_faults("recipe", path.read_text()) == []


def test_what_init_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("extends: tiny_llama\n")
    for arguments, message in (
        ("--recipe mine.yaml", "--recipe FILE.yaml and --from RECIPE belong together"),
        ("--recipe mine --from tiny_llama", "write mine.yaml"),
        ("--recipe there.yaml --from tiny_llama", "exists; name another file, or"),
        ("--recipe there.yaml --from there.yaml --force", "is the recipe of --from"),
        ("--recipe a.yaml --from llama3", "unknown recipe 'llama3'; did you mean"),
        ("--recipe no/a.yaml --from tiny_llama", "the folder no does not exist"),
    ):
        assert message in fails(2, "init", *arguments.split())
        assert (tmp_path / "there.yaml").read_text() == "extends: tiny_llama\n"
        assert list(tmp_path.iterdir()) == [tmp_path / "there.yaml"]


@pytest.mark.parametrize(("kind", "option"), [("recipe", ()), ("cluster", ("--clusters",))])
def test_the_shipped_schemas_are_those_of_the_code(kind: str, option: tuple[str, ...]) -> None:
    folder = shipped_dir() / "configs"
    path = folder / "schemas" / f"{kind}.json"
    command = " ".join(("slurmllm recipes --schema", *option))
    text = call("recipes", "--schema", *option).stdout
    assert path.read_text() == text, f"{command} > configs/schemas/{kind}.json"
    for file in sorted((folder / f"{kind}s").glob("*.yaml")):
        assert schema_faults(kind, file.read_text()) == [], file.name


def test_only_a_file_that_extends_no_other_must_be_whole() -> None:
    text = "extends: tiny_llama\noptim: {min_lr: 0, decay: null}\nslurm: null\nparallel: null"
    assert schema_faults("recipe", text) == []
    whole = schema_faults("recipe", "name: mine\noptim: {min_lr: 0}\ntrain: {}\nmodel: a.json")
    assert sorted(whole) == [
        "$.optim: 'lr' is a required property",
        *(f"$.train: '{n}' is a required property" for n in ("global_batch", "steps")),
    ]
    assert schema_faults("recipe", "name: mine\ncommand: {run: python train.py}") == []
    (fault,) = schema_faults("recipe", "name: mine\ncommand: {steps: 3}")
    assert fault == "$.command: 'run' is a required property"
    (fault,) = schema_faults("recipe", "name: mine")
    assert "not valid under any of the given schemas" in fault
    assert schema_faults("cluster", "extends: p5\nhardware: {memory_gib: 141}") == []
    assert any("'device'" in fault for fault in schema_faults("cluster", "name: mine"))
    (fault,) = schema_faults("recipe", "extends: tiny_llama\noptim: {lrr: 0}")
    assert "'lrr' was unexpected" in fault


def test_a_setting_may_follow_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = call("recipes", "tiny_llama", "optim.lr=1e-3", "--explain", "--json").stdout
    assert json.loads(shown)["origin"]["optim.lr"] == "--set optim.lr=1e-3"
    # Later ones win, however they are written; the value of an option is none.
    order = ("optim.lr=1e-3", "--set", "optim.lr=2e-3", "--set=train.seed=1", "train.seed=2")
    values = json.loads(call("recipes", "tiny_llama", *order, "--json").stdout)
    assert (values["optim"]["lr"], values["train"]["seed"]) == (2e-3, 2)
    submit = ("submit", "tiny_llama", "--dry-run", "--json", "--cluster=local", "--data=builtin")
    sent = call(*submit, "train.seed=5", "--nodes", "2", "--", "--comment", "a=b").stdout
    config = json.loads(sent)["config"]
    assert config["train"]["seed"] == 5
    assert config["slurm"]["directives"]["train"]["comment"] == "a=b"
    planned = call("plan", "tiny_llama", "train.global_batch=16", "--nodes=2").stdout
    assert "--set train.global_batch=16" in planned
    swept = call(*submit, "--local", "--sweep", "optim.lr=1e-3,2e-3", "train.seed=5").stdout
    assert [run["values"] for run in json.loads(swept)["runs"]] == [
        {"optim.lr": "1e-3"},
        {"optim.lr": "2e-3"},
    ]


def test_settings_that_are_options_or_wrong() -> None:
    for arguments, message in (
        ("submit tiny_llama --optim.lr 1e-3", "No such option"),
        ("health --local cluster.nodes=1", "cluster.nodes: unknown field (--set"),
        ("data inspect a train.steps=3", "--set changes a recipe: add --recipe NAME"),
        ("submit tiny_llama ./optim.lr=1", "unexpected argument './optim.lr=1'"),
    ):
        assert message in fails(2, *arguments.split())
