"""The command line of `slurmllm plan`, in this process."""

from typing import Any

from click.testing import Result
from command_line import answer, call


def plan(*arguments: str) -> Result:
    return call("plan", *arguments)


def ranked(*arguments: str) -> dict[str, Any]:
    return dict(answer(plan(*arguments, "--json")))
