"""The commands of README.md and docs/: each can be typed as it stands, and prints the same."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import call

from slurmllm.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT_CODE = re.compile(r"# exit code (\d)")
# What stands for something else: an ellipsis, a name in capitals, a choice.
PLACEHOLDER = re.compile(r"[…\[]|\b[A-Z]+\b")
# Files, weights and packages that an example's page made; what a page shows to be refused.
THEIRS = re.compile(r"my_|mine|=weights|\.arrow|\.yaml|base/|=base@|trackers|notify|plugins|trn2")


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of slurmllm in the page's blocks, without comments, on one line each."""
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "bash" or line.startswith("$ "):
                command = re.sub(r"\s+# .*", "", line.removeprefix("$ ")).strip()
                if command.startswith("slurmllm "):
                    yield command


EXAMPLES = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@pytest.mark.parametrize("command", EXAMPLES)
def test_verb_and_options_exist(command: str) -> None:
    words = shlex.split(command.replace("…", ""))[1:]
    verb: click.Command | None = cli
    while isinstance(verb, click.Group):
        verb, words = verb.get_command(click.Context(verb), words[0]), words[1:]
    assert verb is not None, "no such verb"
    flags = {option for parameter in verb.params for option in (*parameter.opts, "--")}
    options = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in options if re.match(r"--?[a-z-]", word)}
    assert used <= flags | {"-h", "--help"}


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in EXAMPLES
        if " submit " in command
        and not PLACEHOLDER.search(command.replace("SLURMLLM", ""))
        and not THEIRS.search(command)
    ],
)
def test_submit_would_be_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    _, verb, *words = shlex.split(command)  # what follows `--` may be another program's
    result = call(verb, "--dry-run", *words)
    assert result.exit_code == 0, result.output
    assert "would refuse" not in result.stderr + caplog.text


@pytest.mark.timeout(3600)
@pytest.mark.long  # test_submit_would_be_accepted sees its options
def test_quick_start(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    page = (ROOT / "docs" / "university.md").read_text(encoding="utf-8")
    page = page.partition("\n## Tell it about your cluster\n")[0]  # the rest needs Slurm
    lines = [line for _, block in BLOCK.findall(page) for line in block.splitlines()]
    assert len(lines) > 13
    for line in lines:
        code = EXIT_CODE.search(line)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"$ {line}\n{done.stdout}{done.stderr}")
        allowed = {0, int(code[1])} if code else {0}
        assert done.returncode in allowed, f"{line}\n{done.stdout}{done.stderr}"


_BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _shape(line: str) -> str:
    """A line without its figures, which follow the planner's constants, and without alignment."""
    return " ".join(re.sub(r"\d[\d,.]*", "#", line).split())


def test_every_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = 0
    page = (ROOT / "docs" / "site.md").read_text("utf-8")
    for language, text in _BLOCK.findall(page.split("## Hardware")[1].split("## Measure")[0]):
        if language == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text.partition("\n")[2], encoding="utf-8")
            continue
        command, *shown = text.splitlines()
        done = call(*shlex.split(command.removeprefix("$ slurmllm ")))
        assert done.exit_code == (2 if shown[0].startswith("error: ") else 0), done.output
        printed = {_shape(line) for line in done.output.splitlines()}
        for line in shown:
            assert line == "…" or _shape(line) in printed, (line, done.output)
        commands += 1
    assert commands == 5
