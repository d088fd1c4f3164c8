"""Options of sbatch and srun in recipes and after `--`: how they are read, and what is refused."""

import shlex
from pathlib import Path

import pytest
import yaml

from slurmllm.core.config.directives import as_arguments, parse_options, quoted
from slurmllm.core.config.load import load, save
from slurmllm.core.config.resolve import RunConfig, change, recipes_dir, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir


def test_a_command_line_is_read_as_sbatch_reads_it() -> None:
    arguments = shlex.split("--constraint='a100|h100' -C v100 -G2 --hold --comment 'a b' --nice -s")
    assert parse_options(arguments) == {
        "constraint": "v100",
        "gpus": "2",
        "hold": True,
        "comment": "a b",
        "nice": True,
        "oversubscribe": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-requeue", r"--no-requeue is not possible: slurm\.restart"),
        ("-N 3", "--nodes is not possible: --nodes of slurmllm sets"),
        ("-o x", "--output is not possible: the logs are files of the run's directory"),
        ("--outp=x", r"--outp \(short for --output\) is not possible"),
        ("-X", "-X: no option of sbatch"),
        ("a100", "unexpected argument 'a100': put options of sbatch, or a command, after `--`"),
    ],
)
def test_what_contradicts_generated_options_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(arguments.split())


def test_values_are_quoted_as_sbatch_unquotes_them() -> None:
    assert quoted("a100|h100") == "a100|h100"
    assert quoted("a b") == '"a b"'
    assert quoted('5" #1 \\ $HOME') == r'"5\" #1 \\ $HOME"'
    assert as_arguments({"hold": True, "comment": "a b"}) == ["--hold", "--comment=a b"]


def with_directives(tmp_path: Path, directives: object) -> RunConfig:
    recipe = yaml.safe_load((recipes_dir() / "tiny_neox.yaml").read_text())
    recipe.setdefault("slurm", {})["directives"] = directives
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    return resolve(str(tmp_path / "own.yaml"))


def test_a_recipe_has_options_for_each_stage(tmp_path: Path) -> None:
    train = {"constraint": "a100|h100", "nice": 5, "mail-type": ["END", "FAIL"], "hold": False}
    config = with_directives(tmp_path, {"train": train, "precompile": {"contiguous": True}})
    result = config.recipe.slurm.directives
    assert result.train == {"constraint": "a100|h100", "nice": "5", "mail-type": "END,FAIL"}
    assert result.precompile == {"contiguous": True}
    run = RunDir(tmp_path)
    save(config, run)
    assert load(run.config).recipe.slurm.directives == result
    changed = change(config, None, ["slurm.directives.train.nice=null"])
    assert "nice" not in changed.recipe.slurm.directives.train


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ({"train": {"nodes": 3}}, r"--nodes is not possible"),
        ({"train": {"--constraint": "a"}}, "no long option without its dashes"),
        ({"train": {"comment": "a\nb"}}, "has a line break"),
        ({"train": {"gres": {}}}, "gres: must be a text, a number, or true"),
        ({"train": "--gres=gpu:8"}, "must be options without their dashes"),
        ({"srun": {"label": True}}, "--label is not possible"),
        ({"srun": {"task-prolog": "/x/evil"}}, "options for resources only.*--set slurm.dir"),
        ({"train": {"bbf": "/x"}}, "options for resources only"),
    ],
)
def test_faults_of_a_recipe_s_options(tmp_path: Path, directives: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_directives(tmp_path, directives)


def test_a_profile_s_directives_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="--output is not possible"):
        resolve("tiny_neox", overrides=["cluster.directives=[--output=x]"])
    trusted = resolve("tiny_neox", overrides=["slurm.directives.srun.task-prolog=/my/prolog"])
    assert trusted.recipe.slurm.directives.srun == {"task-prolog": "/my/prolog"}


def test_dependencies() -> None:
    for text in ("afterok:12:13,afterany:4_2+30", "singleton", "after:1?afterok:2"):
        recipe = resolve("tiny_neox", overrides=[f"slurm.dependency={text}"]).recipe
        assert recipe.slurm.dependency == text
    with pytest.raises(ConfigError, match=r"slurm\.dependency: 'afterok'"):
        resolve("tiny_neox", overrides=["slurm.dependency=afterok"])
