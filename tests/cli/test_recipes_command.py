"""`slurmllm recipes`: the list, and one recipe with its sources."""

import json
import re
from pathlib import Path

from click.testing import Result
from command_line import call, refused

from slurmllm.core.config.profiles import shipped_dir


def recipes(*arguments: str) -> Result:
    result = call("recipes", *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_list_has_parameters_and_goes_by_size() -> None:
    lines = recipes().stdout.splitlines()
    assert lines[0].split()[:2] == ["recipe", "parameters"]
    size = {line.split()[0]: line.split()[1] for line in lines[1:]}
    assert size["neox_20b"] == "20.6B"
    assert size["llama2_70b"] == "69B"
    assert size["pythia_160m"] == "162M"
    assert size["tiny_neox"] == "3.35M"
    rows = {row["name"]: row for row in json.loads(recipes("--json").stdout)["recipes"]}
    pythia = rows["pythia_70m"]
    assert (pythia["parameters"], pythia["default_cluster"]) == (70_426_624, "p4d")
    names = list(size)
    assert names.index("gpt3_760m") < names.index("gpt3_1.3b") < names.index("llama2_7b")


def test_explain_names_the_family() -> None:
    lines = recipes("llama2_70b", "--explain").stdout.splitlines()
    source = {line.split()[0]: line.split(maxsplit=2)[2].strip() for line in lines[1:]}
    assert source["model.activation"] == "family llama"
    assert source["model.num_kv_heads"].startswith("llama2_70b.yaml:")
    origin = json.loads(recipes("llama2_70b", "--explain", "--json").stdout)["origin"]
    assert origin["model.activation"] == "family llama"


def test_cluster_profiles(tmp_path: Path) -> None:
    this = tmp_path / "mine.yaml"
    this.write_text("extends: p5\nhardware: {network_gb_s: 100}\n")
    arguments = ("--clusters", "--cluster", str(this))
    rows = {
        row["name"]: row for row in json.loads(recipes(*arguments, "--json").stdout)["clusters"]
    }
    assert {"p4de", "p5e", "p5en", "p6-b200", "trn1n", "trn2", "a100_ib", "h100_ib"} < set(rows)
    assert rows["mine"]["network_gb_s"] == 100
    assert "network_efficiency" in rows["mine"]["assumed"]
    assert "for trn1 and trn1n" in rows["trn2"]["planning_only"]
    assert rows["p5en"]["memory_gib"] == rows["p5e"]["memory_gib"] == 139.8
    assert rows["trn2"]["devices_per_node"] * rows["trn2"]["memory_gib"] == 1536  # trn2-arch.rst
    lines = {line.split()[0]: line for line in recipes(*arguments).stdout.splitlines()}
    assert lines["trn2"].split()[1:5] == ["neuron", "64", "24", "166.75"]
    assert lines["trn2"].endswith("planning only, 5 assumed")
    assert lines["trn1"].split()[8] == "nxd"


def test_the_schemas_describe_every_field() -> None:
    for arguments, title, example in (
        (["--schema"], "Recipe", ("TrainConfig", "steps", "Optimizer steps to the run's end.")),
        (["--schema", "--clusters"], "Cluster", ("Price", "source", "Where they come from.")),
    ):
        schema = json.loads(recipes(*arguments).stdout)
        assert schema["title"] == title
        section, field, description = example
        assert schema["$defs"][section]["properties"][field]["description"] == description
        for part in (schema, *schema["$defs"].values()):
            for name, values in part["properties"].items():
                if "$ref" not in values and (part["title"] != "Recipe" or name == "name"):
                    assert values["description"].endswith("."), (part["title"], name)
    recipe = json.loads(recipes("--schema").stdout)
    required = recipe["then"]["properties"]["model"]["required"]
    assert "num_layers" in required
    assert "rotary_pct" not in required  # the family has it
    assert {"const": "auto"} in recipe["properties"]["parallel"]["anyOf"]
    slurm = recipe["$defs"]["SlurmConfig"]["properties"]
    assert "integer" in slurm["time"]["type"]  # a bare number counts minutes
    assert "integer" in slurm["partition"]["anyOf"][0]["type"]
    options = recipe["$defs"]["Directives"]["properties"]["train"]["additionalProperties"]
    assert {"number", "array", "null"} <= set(options["type"])
    for option in ("--schema", "--clusters", "--trainers"):
        assert "leave out NAME" in refused(call("recipes", "neox_20b", option))
    for options in ("--explain", "--set optim.lr=1", "--cluster p5", "--trainers --cluster p5"):
        message = "leave out --cluster" if "--trainers" in options else "need NAME"
        assert message in refused(call("recipes", *options.split()))


def test_adapters_of_trainers() -> None:
    shown = recipes("trainers/torchtitan").stdout
    assert shown == (shipped_dir() / "configs/trainers/torchtitan.yaml").read_text()
    listed = json.loads(recipes("--trainers", "--json").stdout)["trainers"]
    rows = {row["name"]: row for row in listed}
    assert len(rows) == len([*(shipped_dir() / "configs/trainers").iterdir()])
    titan = rows["trainers/torchtitan"]
    assert titan["description"].startswith("torchtitan, v0.2.2")
    assert (titan["progress"], titan["completion_file"]) == ("torchtitan", ".metadata")
    assert "trainers/nemo" in recipes("--trainers").stdout
    fields = recipes("trainers/torchtitan", "--explain").stdout
    assert re.search(r"command.completion_file +.metadata +torchtitan.yaml:\d", fields)
