"""The examples of docs/plan_your_hardware.md are run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmllm.cli.main import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan_your_hardware.md"
_BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _shape(line: str) -> str:
    """A line without its figures, which follow the planner's constants, and without alignment."""
    return " ".join(re.sub(r"\d[\d,.]*", "#", line).split())


def test_every_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = 0
    for language, text in _BLOCK.findall(PAGE.read_text("utf-8")):
        if language == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            # The comment is not a line of the file: messages name lines.
            Path(name).write_text(text.partition("\n")[2], encoding="utf-8")
            continue
        command, *shown = text.splitlines()
        program, *arguments = shlex.split(command.removeprefix("$ "))
        assert program == "slurmllm"
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == (2 if shown[0].startswith("error: ") else 0), done.output
        printed = {_shape(line) for line in done.output.splitlines()}
        for line in shown:
            assert line == "…" or _shape(line) in printed, (line, done.output)
        commands += 1
    assert commands == 7
