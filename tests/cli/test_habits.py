"""What people type by habit: sbatch's short options, verbs of other programs, a look at help."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from slurmllm.cli.main import cli

SHORT = {"nodes": "-N", "partition": "-p", "time": "-t", "account": "-A", "nodelist": "-w"}
SHORT |= {"constraint": "-C", "name": "-J"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, (*prefix, name))
        elif not command.hidden:
            found[" ".join((*prefix, name))] = command
    return found


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
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert len(re.findall(r"(?m)^  -", shown)) == len(options) + 1  # each once, and --help


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("statu", "status"), ("eval", "evaluate"), ("run", "submit"), ("train", "submit")),
        *(("rm", "delete"), ("log", "logs"), ("kill", "cancel"), ("stop", "cancel")),
        *(("ls", "status' or 'recipes"), ("list", "status' or 'recipes")),
        ("export", "checkpoint export"),
    ],
)
def test_verbs_of_other_programs(typed: str, meant: str) -> None:
    result = call(typed, "x")
    assert result.exit_code == 2
    assert f"No such command {typed!r}. Did you mean '{meant}'?" in result.stderr


def test_unknown_words_without_a_suggestion() -> None:
    assert "No such command 'qqq'.\n" in call("qqq").stderr
    assert "Did you mean" in call("submit", "tiny_neox", "--node", "2").stderr
    assert "'list'" in call("checkpoint", "lst").stderr
