"""Calls of the command line, and what they answer."""

import json
from typing import Any

from click.testing import CliRunner, Result

from slurmllm.cli.main import cli


def call(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], **options)


def printed(result: Result) -> str:
    """Return the standard output of a call that succeeds."""
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(result: Result) -> Any:
    """Return the JSON of a call that succeeds."""
    return json.loads(printed(result))


def refused(result: Result, code: int = 2) -> str:
    """Return the errors of a call that fails so."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stderr


def call_json(*arguments: object) -> Any:
    return answer(call(*arguments, "--json"))


def fails(code: int, *arguments: object) -> str:
    message = refused(call(*arguments), code)
    assert message.startswith("error: ") or "Usage:" in message
    return message
