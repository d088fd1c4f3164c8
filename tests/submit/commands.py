"""Calls of the command line on the fake cluster."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result
from fake_slurm import FakeSlurm

from slurmllm.cli.main import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def fails(code: int, *arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") or "Usage:" in result.stderr
    return result.stderr


def submitted(fake: FakeSlurm, inputs: tuple[str, ...], *more: str) -> dict[str, object]:
    result = call("submit", "tiny_neox", "--nodes", "4", *inputs, "--json", *more)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))
