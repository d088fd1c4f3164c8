"""The command line of `slurmllm plan`, in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from slurmllm.cli.main import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result
