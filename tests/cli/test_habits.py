"""What people type by habit: short options, verbs of other programs, TAB, a look at help."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from command_line import call, refused

from slurmllm.cli.main import cli
from slurmllm.core.slurm.client import SlurmClient

SHORT = {"nodes": "-N", "partition": "-p", "time": "-t", "account": "-A", "nodelist": "-w"}
SHORT |= {"constraint": "-C", "name": "-J"}


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> dict[str, click.Command]:
    verbs: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            verbs |= commands(command, (*prefix, name))
        elif not command.hidden:
            verbs[" ".join((*prefix, name))] = command
    return verbs


def test_every_verb_has_sbatch_s_short_options() -> None:
    options = {
        f"{verb} --{name}": param.opts
        for verb, command in commands(cli).items()
        for param in command.params
        if isinstance(param, click.Option) and (name := max(param.opts, key=len)[2:]) in SHORT
    }
    lacking = [n for n, opts in options.items() if SHORT[n.rpartition("--")[2]] not in opts]
    assert lacking == []
    assert {"submit --name", "resume --constraint", "health --nodelist"} <= options.keys()


def test_short_options_are_the_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    how = ("submit", "tiny_neox", "--data", "builtin", "--dry-run")
    names = ("--nodes", "--partition", "--time", "--account", "--nodelist", "--constraint")
    values = ("2", "main", "10", "ml", "n[1-2]", "a|b")
    long = call(
        *how, *(f"{n}={v}" for n, v in zip((*names, "--name"), (*values, "r"), strict=True))
    )
    pairs = zip(("-N", "-p", "-t", "-A", "-w", "-C", "-J"), (*values, "r"), strict=True)
    short = call(*how, *(word for pair in pairs for word in pair))
    assert long.exit_code == short.exit_code == 0, short.output
    text = re.sub(r"(?m)^SLURMLLM_.*$", "", short.stdout)
    assert text == re.sub(r"(?m)^SLURMLLM_.*$", "", long.stdout)
    for line in ("--partition=main", "--account=ml", "--time=10", "--constraint=a|b"):
        assert f"#SBATCH {line}" in short.stdout


def test_help_begins_with_the_common_options() -> None:
    shown = call("submit", "--help").stdout
    sections = dict(re.findall(r"(?ms)^(\w+) options:\n(.*?)(?=^\w+ options:|\Z)", shown))
    assert list(sections) == ["Common", "Slurm", "Sweep", "Advanced"]
    for option, section in (
        *(("--dry-run", "Common"), ("--local", "Common"), ("-N, --nodes", "Common")),
        *(("-p, --partition", "Slurm"), ("--max-running", "Sweep"), ("--precompile", "Advanced")),
    ):
        assert [name for name, text in sections.items() if f"  {option} " in text] == [section]
    command = commands(cli)["submit"]
    options = [o for o in command.params if isinstance(o, click.Option) and not o.hidden]
    assert len(re.findall(r"(?m)^  -", shown)) == len(options) + 1  # each once, and --help


def test_verbs_of_other_programs() -> None:
    for typed, meant in (
        *(("statu", "status"), ("eval", "evaluate"), ("train", "submit"), ("rm", "delete")),
        *(("ls", "status' or 'recipes"), ("export", "checkpoint export")),
    ):
        assert f"No such command {typed!r}. Did you mean '{meant}'?" in refused(call(typed, "x"))
    assert "No such command 'qqq'.\n" in call("qqq").stderr
    assert "Did you mean" in call("submit", "tiny_neox", "--node", "2").stderr
    assert "'list'" in call("checkpoint", "lst").stderr


def complete(*words: str) -> list[str]:
    shell = BashComplete(cli, {}, "slurmllm", "_SLURMLLM_COMPLETE")
    return [f"{item.type},{item.value}" for item in shell.get_completions([*words[:-1]], words[-1])]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("neox-1", "neox-2", "other", "neox-$(touch harm)", "neox-\x1b[31m", "neox;x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("[" * 9)  # its content does not matter
    (tmp_path / "neox-none").mkdir()
    os.mkfifo(tmp_path / "neox-pipe")
    (tmp_path / "neox-loop").symlink_to("neox-loop")
    monkeypatch.setenv("SLURMLLM_RUNS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("verb", [("logs", "-f"), ("compare", "other"), ("checkpoint", "list")])
def test_names_of_runs(runs: Path, verb: tuple[str, ...]) -> None:
    assert complete(*verb, "ne") == ["plain,neox-1", "plain,neox-2"]
    assert complete(*verb, "./x") == ["file,./x"]


def test_names_under_another_root(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("SLURMLLM_RUNS", str(tmp_path_factory.mktemp("empty") / "absent"))
    assert complete("status", "--runs-dir", str(runs), "o") == ["plain,other"]
    assert complete("status", "o") == ["file,o"]


def test_names_of_recipes_and_profiles() -> None:
    assert "plain,tiny_neox" in complete("plan", "tiny_neox", "tiny_")
    adapters = complete("submit", "trainers/torcht")
    assert adapters == ["plain,trainers/torchtitan", "plain,trainers/torchtune"]
    assert "plain,trainers/nemo" in complete("recipes", "tr")
    profiles = complete("submit", "tiny_neox", "--cluster", "trn")
    assert profiles == ["plain,trn1", "plain,trn1n", "plain,trn2"]


def test_the_shell_gets_the_names() -> None:
    words = {"_SLURMLLM_COMPLETE": "bash_complete", "COMP_WORDS": "slurmllm sub", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "slurmllm"]
    done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["plain,submit"], "")


def test_the_list_of_verbs_cuts_no_sentence() -> None:
    assert "..." not in call("--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("submit torchrun train.py", "`slurmllm submit --nodes N -- torchrun train.py`"),
        ("submit my_recipe.yaml", "`init --recipe FILE` writes one"),
        ("submit tiny_neox optim.warmup_steps=500", "`submit --steps N` scales the schedule"),
    ],
)
def test_a_wrong_use_names_the_command_that_is_meant(command: str, remedy: str) -> None:
    done = call(*command.split(), "--dry-run")
    assert done.exit_code == 2
    assert remedy in done.stderr


def test_a_configuration_of_slurm_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """scontrol itself looks for it for a minute."""
    monkeypatch.setattr(SlurmClient, "missing_commands", lambda self: [])
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    for command in ("init --yes", "health --nodes 2 --cluster a100_ib"):
        assert "$SLURM_CONF names /nowhere/slurm.conf, which" in call(*command.split()).stderr
